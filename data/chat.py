"""Conversations, as most datasets of the Hub hold them -> sft.jsonl and comparisons.jsonl, by a model's chat template.

    python -m data.chat --source mine.jsonl --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct --out runs/chat/data
    python -m data.chat --source HuggingFaceH4/ultrafeedback_binarized --files 'data/*_prefs-*' --out runs/chat/data

A record is a demonstration or a pair; a message is {"role": "system", "user" or "assistant", "content": text}:

    {"messages": [...]}                                         -> sft.{train,validation}.jsonl
    {"prompt": [...], "completion": [...]}                      the same in two parts
    {"prompt": [...], "chosen": [...], "rejected": [...]}       -> comparisons.{train,validation}.jsonl
    {"chosen": [...], "rejected": [...]}                        whole conversations; the prompt is what they share

A text in place of a list stands for one message: a prompt for the user's, anything else for the assistant's. The chosen
reply of a pair is a demonstration too: people preferred it.

The query is the conversation before the last reply (--turns all: before each), as the template writes it when it asks
for a reply. The response is what the template writes of the reply, up to its end-of-turn token: the special token that
follows, such as <|im_end|>. That is the EOS of the data: the tokenizer is written to --out with it, and
`train_sft.py --tokenizer DIR` passes it on to the policy and all later stages.

A long query loses its oldest turns, each a user's message and the replies to it, but keeps the system message and the
last turn. Conversations that can't be used are left out and counted:
    - the name of a special token in a message: it would be text to the model that wrote it, and a mark in a query
    - a message that is no text (tool calls, images), is empty, or has another role
    - no user's message before the reply; a demonstration that doesn't end in a reply, or is labelled as a bad one
    - pairs that differ before the last turn, and pairs of identical replies
    - a conversation that the template refuses, or a reply that it changes or doesn't end with the end-of-turn token
    - a reply longer than --max-response-length, a last turn that alone is longer than --max-query-length

The splits are those that a file's path names; test is validation too, and meta tells them apart. Where it names none,
and everywhere with --resplit, a seeded coin draws them by the first user's message: the same one is in the same split.
"""

import json
import re
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.dialogue import MAX_TURNS
from data.prepare import (
    LengthTable,
    first_fit,
    jsonl_files,
    list_reasons,
    print_left_out,
    read_records,
    source_files,
    split_in_path,
    split_of,
)
from nanorlhf.cli import Fraction, PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import field, response_ids
from nanorlhf.errors import InputError
from nanorlhf.files import MAX_LINE, read_text
from nanorlhf.tokenizer import PAD, Tokenizer, load_tokenizer

KINDS = {1: ("sft", ("response",)), 2: ("comparisons", ("chosen", "rejected"))}  # of rows, by their replies
ROLES = ("system", "user", "assistant")
PROBE = "\ue000\ue001"  # stands for a reply, to see what the template writes around one
# a template is a program of strangers: what one conversation may take; published ones need a millisecond and a megabyte
RENDER_SECONDS = 10  # of processor time
RENDER_BYTES = 2**30  # of memory
MAX_RENDERED = 4 * MAX_LINE  # characters


@dataclass(frozen=True, kw_only=True)
class Args:
    source: str
    """file, directory or Hub dataset id"""
    out: Path = Path("runs/chat/data")
    """directory for the JSON Lines and the tokenizer; existing files are replaced"""
    tokenizer: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """directory, GGUF file or Hub id, with a chat template; the limits below count its tokens"""
    template: Path | None = None
    """file of a chat template in Jinja, for a tokenizer without one, or instead of its own"""
    files: str = "*"
    """which files of a directory or Hub dataset: a pattern for their relative path, such as 'data/*_prefs-*'"""
    revision: str | None = None
    """branch or commit of a Hub dataset"""
    turns: Literal["last", "all"] = "last"
    """which replies of a demonstration become rows"""
    sft_from_pairs: bool = True
    """the chosen replies of pairs are demonstrations too; without it, sft.jsonl may come from another source"""
    max_query_length: PositiveInt = 512
    """tokens; longer conversations lose their oldest turns"""
    max_response_length: PositiveInt = 256
    """tokens including EOS; longer replies, and pairs with one, are left out"""
    validation_share: Fraction = 0.1
    """share of first user's messages in validation, where the source has no splits"""
    resplit: bool = False
    """draw the splits by --validation-share even where the source has splits"""
    seed: Seed = 1
    """seed of those splits"""


class LeftOut(Exception):
    """A conversation that can't be used, and why."""


# --------------------------------------------------------------------------------------------------------- 1. records
def messages_of(record: dict, name: str, role: str, where: str) -> list[dict]:
    """The messages in a field of a record, or the one of this role that its text stands for.

    Raises InputError for what is no message, LeftOut for one that holds no text or can't be a turn.
    """
    if isinstance(record[name], str):
        return checked([{"role": role, "content": field(record, name, str, where)}])
    found = field(record, name, list, where)
    if len(found) > MAX_TURNS:
        raise InputError(f"{where}: {name!r} has more than {MAX_TURNS} messages: split the conversation.")
    messages = []
    for number, message in enumerate(found):
        place = f"{where}: {name}[{number}]"
        if not isinstance(message, dict):
            raise InputError(f"{place} must be a message with role and content, not {type(message).__name__}.")
        content = message.get("content", "")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(field(part, "text", str, place) for part in content)
        elif content is None or isinstance(content, list):
            raise LeftOut("a message that is no text, such as a tool call or an image")
        else:
            content = field(message, "content", str, place)
        messages.append({"role": field(message, "role", str, place), "content": content})
    return checked(messages)


def checked(messages: list[dict]) -> list[dict]:
    for message in messages:
        if message["role"] not in ROLES:
            raise LeftOut("a message of another role than system, user and assistant")
        if message["role"] != "system" and not message["content"].strip():
            raise LeftOut("an empty message")
    return messages


def conversations(record: dict, where: str) -> tuple[list[dict], list[list[dict]]]:
    """A record's messages, and the replies to them, a list of messages each: two of a pair, none of a demonstration."""
    given = {name for name, value in record.items() if value is not None}  # parquet fills in null
    if {"chosen", "rejected"} <= given:
        return split_pair(record, where)
    if "messages" in given:
        return messages_of(record, "messages", "user", where), []
    if {"prompt", "completion"} <= given:
        if record.get("label") is False:
            raise LeftOut("a completion that is labelled as bad")
        prompt, completion = (
            messages_of(record, *of, where) for of in (("prompt", "user"), ("completion", "assistant"))
        )
        return prompt + completion, []
    raise InputError(
        f"{where}: no conversation: it needs messages, prompt and completion, or chosen and rejected, and has "
        f"{', '.join(map(str, record)) or 'no fields':.200}."
    )


def split_pair(record: dict, where: str) -> tuple[list[dict], list[list[dict]]]:
    """A pair's prompt, which may stand in a field, in both conversations or in both places; and the two replies."""
    replies = [messages_of(record, name, "assistant", where) for name in ("chosen", "rejected")]
    prompt = record.get("prompt")
    before = [] if prompt is None else messages_of(record, "prompt", "user", where)
    if prompt is None or all(reply[: len(before)] == before for reply in replies) or isinstance(prompt, str):
        num_shared = 0
        for one, other in zip(replies[0][:-1], replies[1][:-1], strict=False):
            if one != other:
                break
            num_shared += 1
        if num_shared:  # a prompt that is a text is its last message, without the system's
            before, replies = replies[0][:num_shared], [reply[num_shared:] for reply in replies]
    if not all([message["role"] for message in reply] == ["assistant"] for reply in replies):
        raise LeftOut("pairs that differ before the last turn, or don't end in a reply")
    return before, replies


# -------------------------------------------------------------------------------------------------------- 2. templates
class Refusal(Exception):
    """What a template says by raise_exception."""


class Generation(Extension):
    """{% generation %}: where some templates mark what the model is trained on; to the text it does nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def refuse(message: object) -> None:
    raise Refusal(str(message))


def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    """JSON without the escapes for HTML that Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


@contextmanager
def bounded() -> Iterator[None]:
    """A limit on the processor time and memory of a block: TimeoutError, MemoryError."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {RENDER_SECONDS} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    usage = Path("/proc/self/statm")
    before = signal.signal(signal.SIGVTALRM, stop)
    if usage.exists():  # Linux only; elsewhere the time alone is limited
        limit = int(usage.read_text().split()[0]) * resource.getpagesize() + RENDER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(soft, limit), hard))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Template:
    """A tokenizer's chat template, compiled in Jinja's sandbox with what transformers offers to templates.

    Raises InputError, which names the tokenizer, for one that is missing or broken, or takes too long.
    """

    def __init__(self, tokenizer: Tokenizer, where: str):
        if tokenizer.chat_template is None:
            raise InputError(
                f"--tokenizer {where} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json): name a model that was trained to chat, or a --template."
            )
        self.where = where
        eos = tokenizer.backend.id_to_token(tokenizer.eos_id)
        self.tokens = {"bos_token": tokenizer.bos or "", "eos_token": eos, "pad_token": PAD}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda layout: datetime.now().strftime(str(layout)),
        }
        try:
            with bounded():
                self.template = environment.from_string(tokenizer.chat_template)
        except Exception as error:  # a program of strangers: whatever it leads to
            raise self.broken(error) from error

    def __call__(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """The text of a conversation. LeftOut for one that the template refuses."""
        pieces, size = [], 0
        try:
            with bounded():
                for piece in self.template.generate(
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.tokens,
                ):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RENDERED:
                        raise MemoryError(f"it writes more than {MAX_RENDERED:,} characters")
        except Refusal as error:
            raise LeftOut(f"the chat template refuses it: {error!s:.80}") from error
        except Exception as error:  # as above
            raise self.broken(error) from error
        return "".join(pieces)

    def broken(self, error: Exception) -> InputError:
        reason = " ".join(str(error).split()) or "it takes too much memory"
        return InputError(
            f"--tokenizer {self.where}: its chat template fails ({reason:.200}): fix it, or name another."
        )


# ---------------------------------------------------------------------------------------------- 3. query and response
@dataclass(frozen=True)
class Frame:
    """What a template writes around a reply."""

    messages: list[dict]  # that are answered
    before: str  # all that it writes before the reply
    query: str  # of that, what a policy is given; a response begins with the rest
    blank: str  # whitespace after the reply, the end of a response
    end: str  # the end-of-turn token
    after: str  # all that it writes after the reply


def frame_of(messages: list[dict], template: Template, special: re.Pattern) -> Frame:
    """The frame of a reply to messages. LeftOut if no end-of-turn token follows it."""
    before, _, after = template([*messages, {"role": "assistant", "content": PROBE}]).rpartition(PROBE)
    end = re.match(rf"(\s*)({special.pattern})", after)
    if end is None:
        raise LeftOut("no end-of-turn token after the reply")
    plain, query = template(messages), template(messages, add_generation_prompt=True)
    if not before.startswith(query):  # it asks for more than a reply, such as thoughts
        query = plain
    if not before.startswith(query):
        raise LeftOut("a chat template that writes messages differently once there is a reply")
    rest = before[len(query) :]
    if special.search(rest) or (query == plain and rest.strip()):  # the header of a reply is none of its text
        query = before
    return Frame(messages, before, query, end[1], end[2], after)


def fitting_frame(
    messages: list[dict], template: Template, special: re.Pattern, tokenizer: Tokenizer, limit: int
) -> tuple[Frame, int]:
    """The frame without the oldest turns, as few as it takes to fit, and the tokens of its query."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise LeftOut("no user's message before the reply")
    found: dict[int, tuple[Frame, int]] = {}

    def fits(start: int) -> bool:
        frame = frame_of(system + messages[start:], template, special)
        found[start] = frame, len(tokenizer.encode(frame.query, marks=True))
        return found[start][1] <= limit

    start = first_fit([len(system), *(i for i in users if i > len(system))], fits)
    if start is None:
        raise LeftOut(f"a last turn longer than --max-query-length {limit}")
    return found[start]


def response_in(frame: Frame, reply: dict, template: Template) -> str:
    """A reply as the template writes it, without the end-of-turn token."""
    text = template([*frame.messages, reply])
    given = text[len(frame.before) : len(text) - len(frame.after)]
    if text != frame.before + given + frame.after or given.strip() != reply["content"].strip():
        raise LeftOut("a reply that the chat template changes")
    return frame.before[len(frame.query) :] + given + frame.blank


def with_end(tokenizer: Tokenizer, frame: Frame, template: Template) -> Tokenizer:
    """The tokenizer with the end-of-turn token as its EOS. InputError if the template then writes something else."""
    eos_id = tokenizer.backend.token_to_id(frame.end)
    assert eos_id is not None  # it is one of its special tokens
    if eos_id == tokenizer.eos_id:
        return tokenizer
    changed = replace(tokenizer, eos_id=eos_id)
    if Template(changed, template.where)(frame.messages) != template(frame.messages):
        raise InputError(
            f"--tokenizer {template.where}: its chat template ends a reply with {frame.end} and writes another "
            "eos_token elsewhere: name one with a single end, or change it with --template."
        )
    return changed


# ------------------------------------------------------------------------------------------------------------ 4. files
def examples(record: dict, where: str, turns: str) -> list[tuple[list[dict], list[dict]]]:
    """What rows are made of: messages, and the reply of a demonstration or the two of a pair."""
    messages, replies = conversations(record, where)
    if replies:
        return [(messages, [message for [message] in replies])]
    if turns == "last" and messages[-1:] and messages[-1]["role"] != "assistant":
        raise LeftOut("a demonstration that doesn't end in a reply")
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        raise LeftOut("a demonstration without a reply")
    return [(messages[:i], [messages[i]]) for i in (ends if turns == "all" else ends[-1:])]


def token_counts(responses: list[str], tokenizer: Tokenizer, limit: int) -> list[int]:
    """The tokens of each response, with EOS. LeftOut for two that are the same, and for one that is too long."""
    ids = [response_ids("", response, tokenizer, chat=True) for response in responses]
    if len(ids) == 2 and (ids[0] == ids[1] or responses[0].strip() == responses[1].strip()):
        raise LeftOut("two identical replies")
    if max(map(len, ids)) > limit:
        raise LeftOut(f"a reply longer than --max-response-length {limit}")
    return [len(row) for row in ids]


def main(args: Args) -> None:
    check_ranges(args)
    tokenizer = load_tokenizer(args.tokenizer)
    if args.template is not None:
        tokenizer = replace(tokenizer, chat_template=read_text(args.template))
    template = Template(tokenizer, args.tokenizer)
    special = re.compile("|".join(sorted(map(re.escape, tokenizer.special_tokens), key=len, reverse=True)))
    end = None  # the end-of-turn token
    lengths = LengthTable()
    written: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    num_cut = 0

    with jsonl_files(args.out) as write:
        for path, relative_path in source_files(args.source, args.files, args.revision):
            published = split_in_path(relative_path)
            for where, record in read_records(path):
                try:
                    found = examples(record, where, args.turns)
                except LeftOut as reason:
                    left_out[str(reason)] += 1
                    continue
                for messages, replies in found:
                    try:
                        if any(special.search(message["content"]) for message in messages + replies):
                            raise LeftOut("a message with the name of a special token")
                        limits = tokenizer, args.max_query_length
                        frame, query_length = fitting_frame(messages, template, special, *limits)
                        responses = [response_in(frame, reply, template) for reply in replies]
                        if end is None:
                            end, tokenizer = frame.end, with_end(tokenizer, frame, template)
                            template = Template(tokenizer, args.tokenizer)
                        if frame.end != end:
                            raise LeftOut(f"another end-of-turn token than {end}")
                        response_lengths = token_counts(responses, tokenizer, args.max_response_length)
                    except LeftOut as reason:
                        left_out[str(reason)] += 1
                        continue

                    num_cut += frame.messages != messages
                    opening = next(message["content"] for message in messages if message["role"] == "user")
                    split = "train" if split_of(published, opening, args) == "train" else "validation"
                    row = {"query": frame.query, "chat": True}
                    meta = {"batch": path.name.split(".")[0], "split": published, "num_messages": len(frame.messages)}
                    kind, columns = KINDS[len(replies)]
                    texts = {kind: dict(zip(columns, responses, strict=True))}
                    if kind == "comparisons" and args.sft_from_pairs:
                        texts["sft"] = {"response": responses[0]}
                    for name, its_texts in texts.items():
                        write(f"{name}.{split}", row | its_texts | {"meta": meta})
                        written[f"{name}.{split}"] += 1
                    lengths.add(f"{kind}.{split}", query_length, **dict(zip(columns, response_lengths, strict=True)))
        if not written:
            reasons = list_reasons(left_out) or "it holds none"
            raise InputError(f"--source {args.source}: no conversation could be used ({reasons}): nothing was written.")
    tokenizer.save(args.out)  # with its EOS: train_sft.py --tokenizer

    print(lengths)
    print(f"\n{num_cut} queries lost old turns; a reply ends in {end}")
    print_left_out(left_out)
    print(f"\nwritten: {args.out}: " + ", ".join(f"{name}.jsonl ({written[name]})" for name in sorted(written)))
    for kind in ("sft", "comparisons"):
        missing = [split for split in ("train", "validation") if f"{kind}.{split}" not in written]
        if len(missing) == 1:
            print(f"note: no {kind}.{missing[0]}.jsonl: the source has no such split; --resplit draws one.")


if __name__ == "__main__":
    run_module(main, Args)
