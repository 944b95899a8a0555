"""Conversations in the formats of Hub datasets -> sft.jsonl and comparisons.jsonl, by a model's chat template.

    python -m data.chat --source mine.jsonl --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct --out runs/chat/data
    python -m data.chat --source HuggingFaceH4/ultrafeedback_binarized --files 'data/*_prefs-*' --out runs/chat/data

A record is a demonstration or a pair; a message is {"role": "system", "user", "assistant" or "tool", "content": text}:

    {"messages": [...]}                                         -> sft.{train,validation}.jsonl
    {"conversations": [{"from", "value"}, ...]}                 ShareGPT's, also with `chosen` and `rejected`
    {"prompt": [...], "completion": [...]}                      the same, split in two
    {"prompt": [...], "chosen": [...], "rejected": [...]}       -> comparisons.{train,validation}.jsonl
    {"chosen": [...], "rejected": [...]}                        full conversations; their shared prefix is the prompt

A message's other fields (tool_calls, reasoning_content, name) and the columns `tools` or `functions`, `documents` and
`chat_template_kwargs` are passed to the template, as in transformers; a column `system` is the first message. A
conversation is skipped if the template drops its tools, calls, tool results or the reasoning of the reply, or if the
reply has "weight": 0 or "train": false.

A string instead of a list is one message: from the user in a prompt, otherwise from the assistant. The chosen reply of
a pair is also a demonstration, because people preferred it.

The query is the conversation before the last reply (--turns all: before each reply), with the template's generation
prompt. The response is the reply as the template writes it, up to its end-of-turn token: the special token that
follows, such as <|im_end|>. That token is the EOS of the data: the tokenizer in --out has it as EOS, and
`train_sft.py --tokenizer DIR` passes it on to the policy and all later stages.

A query that is too long loses its oldest turns (a user message and the replies to it), but keeps the system message and
the last turn. Unusable conversations are skipped, and the reasons printed. Examples are a message that contains the
name of a special token, which would become that token in a query, and a reply that the template changes.

meta has the messages of the query and the record's other fields that are a text, a number or a boolean, such as
`answer`, for reward functions to use (docs/rewards.md). Other columns are dropped and counted.

The split is read from the path of a file; test becomes validation, and meta keeps the name. Without such a name, or
with --resplit, the split is drawn by a seeded hash of the first user message, so equal first messages share a split.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data import prepare
from data.prepare import Skipped
from nanorlhf.cli import PositiveInt, check_ranges, run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import parse_json, read_text
from nanorlhf.tokenizer import PAD, Tokenizer, load_tokenizer

LAYOUT = ("messages", "prompt", "completion", "chosen", "rejected", "conversations")
FOR_TEMPLATE = ("tools", "functions", "documents", "chat_template_kwargs")
COLUMNS = {1: ("response",), 2: ("chosen", "rejected")}  # by number of replies
ROLES = ("system", "user", "assistant")  # supported by every template
SHAREGPT = {  # from: role
    **dict.fromkeys(("human", "user"), "user"), **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"), "system": "system",
    "function_call": "function_call",
}  # fmt: skip
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
THINK = re.compile(r"</?think(?:ing)?>")
T = TypeVar("T")
Render = Callable[..., str]  # a `Template` with the settings of a record bound
PROBE = "\ue000\ue001"  # placeholder for a reply, to find the text that the template writes around it


@dataclass(frozen=True, kw_only=True)
class Args(prepare.SourceArgs, prepare.SplitArgs):
    out: Path = Path("runs/chat/data")
    """directory for the JSON Lines and the tokenizer; existing files are replaced"""
    tokenizer: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """directory or Hub id, with a chat template; the limits below count its tokens"""
    template: Path | None = None
    """file with a chat template in Jinja that replaces the tokenizer's own"""
    turns: Literal["last", "all"] = "last"
    """replies of a demonstration that become rows"""
    sft_from_pairs: bool = True
    """write the chosen replies of pairs to sft.jsonl too"""
    max_query_length: PositiveInt = 512
    """tokens; longer conversations lose their oldest turns"""
    max_response_length: PositiveInt = 256
    """tokens including EOS; longer replies, and pairs with one, are skipped"""


# --------------------------------------------------------------------------------------------------------- 1. records
def read_messages(record: dict, name: str, role: str, where: str) -> list[dict]:
    """Return the messages in a field of a record; a string is one message with this role.

    Raises InputError for malformed messages, Skipped for messages that are not text or are empty.
    """
    if isinstance(record[name], str):
        raw_messages = [{"role": role, "content": record[name]}]
    else:
        raw_messages = field(record, name, list[dict], where)
    messages = []
    for number, message in enumerate(raw_messages):
        location = f"{where}: {name}[{number}]"
        message = {key: value for key, value in message.items() if value is not None}  # parquet fills gaps with null
        if function_call := message.pop("function_call", None):  # OpenAI's first format for tool calls
            message.setdefault("tool_calls", [{"type": "function", "function": function_call}])
        if "tool_calls" in message:
            message["tool_calls"] = json_field(message, "tool_calls", list, location)
        has_more = any(message.get(name) for name in ("tool_calls", *THOUGHTS))
        if has_more:
            message.setdefault("content", "")
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(field(part, "text", str, location) for part in content)
        elif isinstance(content, list) or (content is None and "content" in raw_messages[number]):
            raise Skipped("a message that is not text, such as an image")
        else:
            content = field(message, "content", str, location)
        speaker = field(message, "role", str, location)
        speaker = "tool" if speaker == "function" else speaker  # also OpenAI's first format
        if speaker not in ("system", "tool") and not content.strip() and not has_more:
            raise Skipped("an empty message")
        messages.append(message | {"role": speaker, "content": content})
    return messages


def json_field(record: dict, name: str, kind: type[T], where: str) -> T:
    """Return `record[name]`, parsed if it is a JSON string, and check that it is a `kind`."""
    value = record[name]
    if isinstance(value, str):
        value = parse_json(value.encode(), f"{where}: the field {name!r}", is_line=True)
    return field({name: value}, name, kind, where)


def from_sharegpt(message: Any, where: str) -> Any:
    """Convert ShareGPT's {"from", "value"} to a message; return others unchanged. A function_call's value is JSON."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    speaker, value = (field(message, name, str, where) for name in ("from", "value"))
    rest = {name: other for name, other in message.items() if name not in ("from", "value")}
    role = SHAREGPT.get(speaker, speaker)
    if role != "function_call":
        return {"role": role, "content": value} | rest
    calls = parse_json(value.encode(), f"{where}: the field 'value'", is_line=True)
    calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    return {"role": "assistant", "content": "", "tool_calls": calls} | rest


def plain_record(record: dict, where: str) -> dict:
    """Return a copy of a record with ShareGPT's columns converted to messages."""
    record = dict(record)
    turns = record.pop("conversations", None)
    if turns is not None and record.get("messages") is None:
        field({"conversations": turns}, "conversations", list, where)
        messages = [from_sharegpt(turn, f"{where}: conversations[{i}]") for i, turn in enumerate(turns)]
        is_pair = record.get("chosen") is not None and record.get("rejected") is not None
        record["prompt" if is_pair else "messages"] = messages
    for name in ("chosen", "rejected"):
        if isinstance(record.get(name), dict):
            record[name] = [from_sharegpt(record[name], f"{where}: {name}")]
    return record


def template_settings(record: dict, where: str) -> dict[str, Any]:
    """Return a record's inputs for the chat template other than messages."""
    inputs: dict[str, Any] = {}
    for name in FOR_TEMPLATE:
        if record.get(name) not in (None, ""):
            inputs[name] = json_field(record, name, dict if name == "chat_template_kwargs" else list, where)
    if "functions" in inputs:
        functions = [{"type": "function", "function": function} for function in inputs.pop("functions")]
        inputs.setdefault("tools", functions)
    settings = inputs.pop("chat_template_kwargs", {})
    if reserved := {"messages", "tools", "documents", "add_generation_prompt"} & settings.keys():
        raise InputError(f"{where}: chat_template_kwargs must not set {min(reserved)}.")
    return settings | {name: value for name, value in inputs.items() if value}


def conversations(record: dict, where: str) -> tuple[list[dict], list[list[dict]]]:
    """Return a record's messages and the two replies of a pair, each a list of messages; no replies otherwise."""
    record = plain_record(record, where)
    messages, replies = messages_and_replies(record, where)
    if record.get("system"):
        system = {"role": "system", "content": field(record, "system", str, where)}
        if messages[:1] != [system]:
            if messages[:1] and messages[0]["role"] == "system":
                raise Skipped("a system message and another one in the column system")
            messages = [system, *messages]
    return messages, replies


def messages_and_replies(record: dict, where: str) -> tuple[list[dict], list[list[dict]]]:
    """Do the same for a record without ShareGPT's columns, ignoring the column `system`."""
    present = {name for name, value in record.items() if value is not None}  # parquet fills gaps with null
    if {"chosen", "rejected"} <= present:
        return split_pair(record, where)
    if "messages" in present:
        return read_messages(record, "messages", "user", where), []
    if {"prompt", "completion"} <= present:
        if record.get("label") is False:
            raise Skipped("a completion that is labelled as bad")
        prompt = read_messages(record, "prompt", "user", where)
        return prompt + read_messages(record, "completion", "assistant", where), []
    raise InputError(
        f"{where}: not a conversation: expected messages, prompt and completion, or chosen and rejected; got "
        f"{', '.join(map(str, record)) or 'no fields':.200}."
    )


def split_pair(record: dict, where: str) -> tuple[list[dict], list[list[dict]]]:
    """Return a pair's prompt and two replies; the prompt can be a field, the start of both conversations, or both."""
    replies = [read_messages(record, name, "assistant", where) for name in ("chosen", "rejected")]
    prompt = record.get("prompt")
    before = [] if prompt is None else read_messages(record, "prompt", "user", where)
    if prompt is None or all(reply[: len(before)] == before for reply in replies) or isinstance(prompt, str):
        num_shared = 0
        for first, second in zip(replies[0][:-1], replies[1][:-1], strict=False):
            if first != second:
                break
            num_shared += 1
        if num_shared:  # preferred to a prompt string, which lacks the system message
            before, replies = replies[0][:num_shared], [reply[num_shared:] for reply in replies]
    if not all([message["role"] for message in reply] == ["assistant"] for reply in replies):
        raise Skipped("pairs that differ before the last turn, or don't end in a reply")
    return before, replies


# -------------------------------------------------------------------------------------------------------- 2. templates
class Generation(Extension):
    """{% generation %}, a tag around the trained text in some templates; rendered as its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def refuse(message: object) -> None:
    raise Skipped(f"rejected by the chat template: {message!s:.80}")


def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


class Template:
    """A tokenizer's chat template, compiled in Jinja's sandbox with the functions that transformers provides.

    Raises InputError if the template is missing or broken.
    """

    def __init__(self, tokenizer: Tokenizer, where: str):
        if tokenizer.chat_template is None:
            raise InputError(
                f"--tokenizer {where} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); pass one with --template."
            )
        self.where = where
        self.tokens = {"bos_token": tokenizer.bos or "", "eos_token": tokenizer.eos, "pad_token": PAD}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda layout: datetime.now().strftime(str(layout)),
        }
        try:
            self.template = environment.from_string(tokenizer.chat_template)
        except Exception as error:  # third-party code can raise anything
            raise self.broken(error) from error

    def __call__(self, messages: list[dict], add_generation_prompt: bool = False, **settings: Any) -> str:
        """Return the text of a conversation. Raises Skipped if the template rejects it.

        settings: tools, documents, and any other variables that the template reads
        """
        variables = {"tools": None, "documents": None} | self.tokens | settings
        try:
            return self.template.render(**variables, messages=messages, add_generation_prompt=add_generation_prompt)
        except Skipped:
            raise
        except Exception as error:  # as above
            raise self.broken(error) from error

    def broken(self, error: Exception) -> InputError:
        reason = " ".join(str(error).split())
        return InputError(f"--tokenizer {self.where}: the chat template fails ({reason:.200}).")


# ---------------------------------------------------------------------------------------------- 3. query and response
@dataclass(frozen=True)
class Frame:
    """The text that a template writes around a reply."""

    messages: list[dict]  # before the reply
    before: str  # text before the reply
    query: str  # the start of `before`, given to the policy; the response starts with the rest
    space: str  # whitespace after the reply, at the end of the response
    end: str  # the end-of-turn token
    after: str  # text after the reply


def find_frame(messages: list[dict], template: Render, special: re.Pattern) -> Frame:
    """Return the frame of a reply to messages. Raises Skipped if no end-of-turn token follows it."""
    before, _, after = template([*messages, {"role": "assistant", "content": PROBE}]).rpartition(PROBE)
    end = re.match(rf"(\s*)({special.pattern})", after)
    if end is None:
        raise Skipped("no end-of-turn token after the reply")
    without_prompt = template(messages)
    query = template(messages, add_generation_prompt=True)
    if not before.startswith(query):  # the generation prompt has more than the reply's header, such as <think>
        query = without_prompt
    if not before.startswith(query):
        raise Skipped("a chat template that formats messages differently if a reply follows")
    rest = before[len(query) :]
    if special.search(rest) or (query == without_prompt and rest.strip()):  # a reply's header is not part of it
        query = before
    return Frame(messages, before, query, end[1], end[2], after)


def fitting_frame(
    messages: list[dict], template: Render, special: re.Pattern, tokenizer: Tokenizer, limit: int
) -> Frame:
    """Return the frame of the longest history with a query of at most `limit` tokens."""
    system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise Skipped("no user message before the reply")
    frames: dict[int, Frame] = {}

    def fits(start: int) -> bool:
        frames[start] = find_frame(system + messages[start:], template, special)
        return len(tokenizer.encode(frames[start].query, parse_special=True)) <= limit

    start = prepare.first_fit([len(system), *(i for i in users if i > len(system))], fits)
    if start is None:
        raise Skipped(f"a last turn longer than --max-query-length {limit}")
    return frames[start]


def format_response(frame: Frame, reply: dict, template: Render, special: re.Pattern) -> str:
    """Return a reply as the template writes it, without the end-of-turn token. Raises Skipped if any of it is lost."""
    text = template([*frame.messages, reply])
    written = text[len(frame.query) : len(text) - len(frame.after)]
    if text != frame.query + written + frame.after:
        raise Skipped("a reply that the chat template changes")
    thoughts = [reply[name] for name in THOUGHTS if reply.get(name)]
    calls = reply.get("tool_calls") or []
    if thoughts or calls or THINK.search(reply["content"]):
        if not all(map(partial(contains, written), THINK.split(reply["content"]))):
            raise Skipped("a reply that the chat template changes")
        if not all(map(partial(contains, written), leaves(thoughts))):
            raise Skipped("reasoning that the chat template drops")
        if not all(map(partial(contains, written), called(calls))):
            raise Skipped("a tool call that the chat template drops")
        if special.search(written):  # in a response, the name of a special token would be plain text
            raise Skipped("a reply in which the chat template writes special tokens")
    elif written[len(frame.before) - len(frame.query) :].strip() != reply["content"].strip():
        raise Skipped("a reply that the chat template changes")
    return written + frame.space


def check_written(frame: Frame, settings: dict, template: Template) -> None:
    """Raise Skipped if the template drops tools, documents, calls or results before a reply.

    It may drop earlier reasoning, as the templates of reasoning models do.
    """
    for name in ("tools", "documents"):
        remaining = {key: value for key, value in settings.items() if key != name}
        if name in settings and template(frame.messages, **remaining) == template(frame.messages, **settings):
            raise Skipped(f"{name} that the chat template drops")
    for message in frame.messages:
        if not all(map(partial(contains, frame.query), called(message.get("tool_calls") or []))):
            raise Skipped("a tool call that the chat template drops")
        if message["role"] not in ROLES and not contains(frame.query, message["content"]):
            raise Skipped(f"a message with the role {message['role']:.40} that the chat template drops")


def leaves(value: Any) -> Iterator[Any]:
    """Yield the keys, strings and numbers in a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


def called(calls: list) -> Iterator[Any]:
    """Yield the names and arguments in tool calls."""
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(function, dict):
            function = [function.get("name"), function.get("arguments")]
        yield from leaves(function)


def contains(text: str, value: Any) -> bool:
    """Return whether a text contains a value, literally or JSON-escaped."""
    bare = str(value).strip()
    return any(form in text for form in (bare, json.dumps(bare)[1:-1], json.dumps(bare, ensure_ascii=False)[1:-1]))


def with_end(tokenizer: Tokenizer, end: str) -> Tokenizer:
    """Return the tokenizer with the end-of-turn token as EOS, without changing what its template writes."""
    eos_id = tokenizer.backend.token_to_id(end)
    assert eos_id is not None  # a special token
    template = tokenizer.chat_template or ""
    if eos_id != tokenizer.eos_id and "eos_token" in template:
        # for example, Phi-3's template writes the model's eos_token after a conversation; Jinja drops the newline
        template = f"{{% set eos_token = {to_json(tokenizer.eos)} %}}\n{template}"
    return replace(tokenizer, eos_id=eos_id, chat_template=template)


class Writer:
    """Formats conversations with a chat template; the first one determines the end-of-turn token, the EOS."""

    def __init__(self, where: str, template: Path | None, max_query_length: int):
        """where: --tokenizer; template: a file that replaces the tokenizer's template."""
        self.where, self.max_query_length = where, max_query_length
        self.tokenizer = load_tokenizer(where)
        if template is not None:
            self.tokenizer = replace(self.tokenizer, chat_template=read_text(template))
        self.template = Template(self.tokenizer, where)
        marks = sorted(map(re.escape, self.tokenizer.special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(marks))
        self.end: str | None = None  # the end-of-turn token

    def write(self, messages: list[dict], replies: list[dict], **settings: Any) -> tuple[Frame, list[str]]:
        """Return the frame of replies to messages, and the text of each reply. settings: see `Template`.

        Raises Skipped if the conversation can't be used.
        """
        texts = (text for text in leaves([messages, replies, settings]) if isinstance(text, str))
        if any(map(self.special.search, texts)):
            raise Skipped("a message that contains the name of a special token")
        render = partial(self.template, **settings)
        frame = fitting_frame(messages, render, self.special, self.tokenizer, self.max_query_length)
        check_written(frame, settings, self.template)
        responses = [format_response(frame, reply, render, self.special) for reply in replies]
        if self.end is None:
            self.end, self.tokenizer = frame.end, with_end(self.tokenizer, frame.end)
            self.template = Template(self.tokenizer, self.where)
        if frame.end != self.end:
            raise Skipped(f"an end-of-turn token other than {self.end}")
        return frame, responses


# ------------------------------------------------------------------------------------------------------------ 4. files
def examples(record: dict, where: str, turns: str) -> list[tuple[list[dict], list[dict]]]:
    """Return, for each row, the messages and the one reply of a demonstration or the two of a pair."""
    messages, replies = conversations(record, where)
    if replies:
        return [(messages, [message for [message] in replies])]
    if turns == "last" and messages[-1:] and messages[-1]["role"] != "assistant":
        raise Skipped("a demonstration that doesn't end in a reply")
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        raise Skipped("a demonstration without a reply")
    return [(messages[:i], [messages[i]]) for i in (ends if turns == "all" else ends[-1:])]


def check_trained(reply: dict) -> None:
    """Raise Skipped if a reply is marked as not to be trained on, or has a fractional weight."""
    if any(reply.get(name, 1) == 0 for name in ("weight", "train", "loss")):  # names that differ by program
        raise Skipped("a reply with weight 0 or train false")
    if reply.get("weight", 1) != 1:
        raise Skipped("a reply with a weight other than 0 and 1")


def other_fields(record: dict) -> dict[str, str | int | float | bool]:
    """Return a record's fields outside the conversation that are a text, a number or a boolean."""
    extra = {name: value for name, value in record.items() if name not in LAYOUT + FOR_TEMPLATE}
    return {
        name: value
        for name, value in extra.items()
        if isinstance(value, str) or (isinstance(value, int | float) and -math.inf < value < math.inf)
    }


def main(args: Args) -> None:
    check_ranges(args)
    writer = Writer(args.tokenizer, args.template, args.max_query_length)
    skipped: Counter[str] = Counter()
    num_cut = 0
    not_kept: Counter[str] = Counter()  # columns

    with prepare.converted_files(args.out, args.source, writer.tokenizer, skipped) as write:
        for path, relative_path in prepare.source_files(args):
            published = prepare.split_in_path(relative_path)
            for where, record in prepare.read_records(path):
                try:
                    rows_to_write, settings = examples(record, where, args.turns), template_settings(record, where)
                except Skipped as reason:
                    skipped[str(reason)] += 1
                    continue
                for messages, replies in rows_to_write:
                    try:
                        for reply in replies:
                            check_trained(reply)
                        frame, responses = writer.write(messages, replies, **settings)
                        if len(responses) == 2 and responses[0].strip() == responses[1].strip():
                            raise Skipped("two identical responses")
                    except Skipped as reason:
                        skipped[str(reason)] += 1
                        continue

                    opening = next(message["content"] for message in messages if message["role"] == "user")
                    split = "train" if prepare.choose_split(published, opening, args) == "train" else "validation"
                    texts = dict(zip(COLUMNS[len(replies)], responses, strict=True))
                    facts = {"batch": path.name.split(".")[0], "split": published, "num_messages": len(frame.messages)}
                    kept = other_fields(record)
                    meta = kept | facts | {"messages": frame.messages}
                    known = {*LAYOUT, *FOR_TEMPLATE, *kept}
                    row = {"query": frame.query, "chat": True} | texts | {"meta": meta}
                    sft_too = len(replies) == 2 and args.sft_from_pairs
                    if write(split, row, "--max-response-length", args.max_response_length, sft_too):
                        num_cut += frame.messages != messages
                        not_kept.update(
                            name for name, value in record.items() if value is not None and name not in known
                        )
    writer.tokenizer.save(args.out)  # with the new EOS, for train_sft.py --tokenizer
    for name, count in not_kept.items():
        print(f"column {name} is not in meta ({count} rows): not a text, a number or a boolean")
    print(f"{num_cut} queries lost their oldest turns; replies end with {writer.end}")


if __name__ == "__main__":
    run_module(main, Args)
