"""Read the JSON Lines files that the training scripts train on.

    sft.{train,validation}.jsonl           {"query": str, "response": str, "meta": {...}}
    comparisons.{train,validation}.jsonl   {"query": str, "chosen": str, "rejected": str, "meta": {...}}
    scored.{train,validation}.jsonl        {"query": str, "response": str, "score": float, "meta": {...}}
    code.{train,validation,test}.jsonl     {"query": str, "response": str, "language": "java" or "python",
                                            "prefix": str, "suffix": str, "tests": str, "meta": {...}}

All rows are read, checked and tokenised before training starts; a broken row stops the run with file, line and reason.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nanorlhf.errors import InputError
from nanorlhf.files import parse_json, read_lines
from nanorlhf.tokenizer import Tokenizer

T = TypeVar("T")
MAX_PROGRAM = 2**17  # bytes of a program: 128 KiB. CodeNet's have at most 64; parsers and compilers slow down beyond
MAX_TEXT = 2**20  # characters of a text: 1 million. Novels have half of that, posts and programs at most 64,000


@dataclass(frozen=True)
class Demonstration:
    query: list[int]
    response: list[int]  # ends in EOS
    record: dict  # the row as read


@dataclass(frozen=True)
class Scored(Demonstration):
    score: float


@dataclass(frozen=True)
class Comparison:
    query: list[int]
    chosen: list[int]  # both end in EOS
    rejected: list[int]
    record: dict


# ------------------------------------------------------------------------------------------------------ 1. rows as text
def iter_jsonl(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (`file:line`, object) per line of a JSON Lines file, also .gz; InputError for a blank or broken line."""
    number = 0
    for number, line in read_lines(path):
        yield f"{path}:{number}", parse_object(line, f"{path}:{number}")
    if number == 0:
        raise InputError(f"{path} is empty: it needs at least one row.")


def parse_object(line: bytes, where: str) -> dict:
    """Parse one line of JSON Lines into a dict; `where` (`file:line`) is for the error messages."""
    if not line.strip():
        raise InputError(f"{where}: the line is blank: delete it.")
    record = parse_json(line, where, is_line=True, encoding="utf-8-sig" if where.endswith(":1") else "utf-8")
    if not isinstance(record, dict):
        raise InputError(f"{where}: not a JSON object but {type(record).__name__}: every line must be one.")
    return record


def field(record: dict, name: str, kind: type[T], where: str) -> T:
    """`record[name]`, checked to be a `kind` (an int passes as float; floats must be finite, text valid Unicode)."""
    if name not in record:
        raise InputError(f"{where}: the field {name!r} is missing.")
    value: Any = record[name]
    is_number = kind is float and isinstance(value, int)
    if isinstance(value, bool) and kind is not bool or not (isinstance(value, kind) or is_number):
        raise InputError(f"{where}: the field {name!r} must be {kind.__name__}, not {type(value).__name__}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{where}: the field {name!r} is an integer of more than 64 bits: fix it.")
    if kind is float and not math.isfinite(value):
        raise InputError(f"{where}: the field {name!r} is {value}: it must be a finite number.")
    if kind is str:
        if len(value) > MAX_TEXT:
            raise InputError(f"{where}: the field {name!r} has more than {MAX_TEXT:,} characters: cut or delete it.")
        try:
            value.encode()  # JSON can escape half of a surrogate pair, such as \ud83d, which is not a character
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: the field {name!r} isn't Unicode (at {error.start}): fix it.") from error
    return value


def list_of(record: dict, name: str, kind: type[T], where: str) -> list[T]:
    """`record[name]`, checked to be a list, each item of which is a `kind` as in `field`."""
    values = field(record, name, list, where)
    return [field({f"{name}[{i}]": value}, f"{name}[{i}]", kind, where) for i, value in enumerate(values)]


def read_jsonl(path: str | Path, fields: dict[str, type]) -> list[dict]:
    """Read all rows of a file and check the types of `fields`; other fields pass through."""
    rows = []
    for where, record in iter_jsonl(path):
        for name, kind in fields.items():
            field(record, name, kind, where)
        rows.append(record)
    return rows


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    """Write one row per line, atomically. Escaped to ASCII, so that every reader agrees where a line ends."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="ascii") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- 2. rows as ids
def response_ids(query: str, response: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a response to `query`, with EOS.

    The query ends in `TL;DR:` without a space and the response begins with one, so no token spans the two: tokenising
    them separately gives the ids of the joined text.
    """
    # [N+ 3] unless there is whitespace already: the response's own, or the newline of CNN/DM's template
    if not (query[-1:].isspace() or response[:1].isspace()):
        response = " " + response
    return tokenizer.encode(response) + [tokenizer.eos_id]


def load_demonstrations(
    path: str | Path, tokenizer: Tokenizer, max_query_length: int | None, max_response_length: int | None
) -> list[Demonstration]:
    """Read an sft file. Limits in tokens, None: no limit; a longer row is an InputError."""
    rows = []
    for where, record in iter_jsonl(path):
        query, response = _texts(record, ("query", "response"), where)
        row = Demonstration(tokenizer.encode(query), response_ids(query, response, tokenizer), record)
        _check_length(row.query, "query", max_query_length, where)
        _check_length(row.response, "response", max_response_length, where)
        rows.append(row)
    return rows


def load_scored(
    path: str | Path, tokenizer: Tokenizer, max_query_length: int | None, max_response_length: int | None
) -> list[Scored]:
    """Read a scored file. Limits as in `load_demonstrations`."""
    demonstrations = load_demonstrations(path, tokenizer, max_query_length, max_response_length)
    return [
        Scored(row.query, row.response, row.record, float(field(row.record, "score", float, f"{path}:{number}")))
        for number, row in enumerate(demonstrations, start=1)
    ]


def load_programs(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None,
    needs_response: bool = True,
) -> list[Demonstration]:
    """Read a code file, all rows in one language. Limits as in `load_demonstrations`.

    The response is tokenised unchanged, without the space that `response_ids` may add: prefix + response + suffix is
    a program, a prefix may end mid-line, and a compiler's offsets count every character. It may be empty unless
    `needs_response`.
    """
    rows: list[Demonstration] = []
    for where, record in iter_jsonl(path):
        _texts(record, ("query", "response") if needs_response else ("query",), where)
        query, response, language, *_ = (
            field(record, name, str, where) for name in ("query", "response", "language", "prefix", "suffix", "tests")
        )
        if sum(len(record[name]) for name in ("prefix", "response", "suffix", "tests")) > MAX_PROGRAM:
            raise InputError(f"{where}: the program has more than {MAX_PROGRAM:,} characters: cut or delete it.")
        if language not in ("java", "python"):
            raise InputError(f"{where}: the field 'language' is {language!r}: write java or python.")
        if rows and language != rows[0].record["language"]:
            raise InputError(f"{where}: the field 'language' is {language!r}, unlike line 1: use a file per language.")
        row = Demonstration(tokenizer.encode(query), tokenizer.encode(response) + [tokenizer.eos_id], record)
        _check_length(row.query, "query", max_query_length, where)
        _check_length(row.response, "response", max_response_length, where)
        rows.append(row)
    return rows


def load_comparisons(
    path: str | Path, tokenizer: Tokenizer, max_query_length: int | None, max_response_length: int | None
) -> list[Comparison]:
    """Read a comparisons file. Limits as in `load_demonstrations`."""
    rows = []
    for where, record in iter_jsonl(path):
        query, chosen, rejected = _texts(record, ("query", "chosen", "rejected"), where)
        row = Comparison(
            tokenizer.encode(query),
            response_ids(query, chosen, tokenizer),
            response_ids(query, rejected, tokenizer),
            record,
        )
        if row.chosen == row.rejected:  # as ids, where a leading space makes no difference
            raise InputError(f"{where}: 'chosen' and 'rejected' are the same: delete the line.")
        _check_length(row.query, "query", max_query_length, where)
        _check_length(row.chosen, "chosen", max_response_length, where)
        _check_length(row.rejected, "rejected", max_response_length, where)
        rows.append(row)
    return rows


def _texts(record: dict, names: tuple[str, ...], where: str) -> list[str]:
    texts = [field(record, name, str, where) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise InputError(f"{where}: the field {name!r} is empty: delete the line or fill it.")
    return texts


def _check_length(ids: list[int], name: str, limit: int | None, where: str) -> None:
    if limit is not None and len(ids) > limit:
        flag = "--max-query-length" if name == "query" else "--max-response-length"
        raise InputError(
            f"{where}: the field {name!r} has {len(ids)} tokens (including a response's EOS), {flag} is {limit}: "
            "raise the flag, or shorten or delete the row."
        )


# --------------------------------------------------------------------------------------------------- 3. rows in batches
def batch_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Row indices of batch `step` in an endless stream of reshuffled epochs. [N+ 21]

    Every row comes once per epoch; a batch may span two epochs and is never short. A pure function of its arguments:
    a resumed run continues the same stream, and ranks that take slices of a batch never overlap.
    """
    if seed < 0:
        raise InputError(f"--seed {seed}: must not be negative.")
    indices: list[int] = []
    position = step * batch_size
    while len(indices) < batch_size:
        epoch, start = divmod(position + len(indices), num_rows)
        order = np.random.default_rng((seed, epoch)).permutation(num_rows)
        indices += order[start : start + batch_size - len(indices)].tolist()
    return indices
