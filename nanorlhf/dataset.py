"""Read the JSON Lines files that the training scripts train on.

    sft.{train,validation}.jsonl           {"query": str, "response": str, "meta": {...}}
    comparisons.{train,validation}.jsonl   {"query": str, "chosen": str, "rejected": str, "meta": {...}}
    scored.{train,validation}.jsonl        {"query": str, "response": str, "score": float, "meta": {...}}
    code.{train,validation,test}.jsonl     {"query": str, "response": str, "language": "java" or "python",
                                            "prefix": str, "suffix": str, "tests": str, "meta": {...}}

A row with "chat": true has a query that a chat template has written: the names of special tokens in it are those
tokens, and no blank is put before its responses. Everywhere else, and in every response, such a name is plain text.

All rows are read, checked and tokenised before training starts; a broken row stops the run with file, line and reason.
Their ids are cached beside the file, in .tokens/: a later start on the same file maps them.
"""

import gzip
import hashlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nanorlhf.errors import InputError
from nanorlhf.files import parse_json, read_lines
from nanorlhf.tokenizer import PAD, Tokenizer

T = TypeVar("T")
R = TypeVar("R")
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


def sampled_rows(path: Path, settings: dict[str, str]) -> list[tuple[str, dict]]:
    """The rows of a sampling that was interrupted, each with its `file:line`; what was not written whole is left out.

    settings: those that the samples depend on, as the first line of the file has them. Raises InputError where they
    differ.
    """
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    rows = [(f"{path}:{number}", parse_object(line, f"{path}:{number}")) for number, line in enumerate(whole, start=1)]
    before = rows[0][1] if rows else settings
    for name, value in settings.items():
        if before.get(name) != value:
            raise InputError(
                f"--resume: the sampling in {path} was started with --{name.replace('_', '-')} {before.get(name)}, not "
                f"{value}: pass the same, or start anew with --overwrite."
            )
    return rows[1:]


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
# per row: `file:line`, the texts of its fields, its score or 0, whether a chat template has written its query
Texts = Iterator[tuple[str, list[str], float, bool]]


def is_chat(record: dict, where: str) -> bool:
    """Whether a chat template has written the query of a row."""
    return "chat" in record and field(record, "chat", bool, where)


def with_blank(query: str, response: str, chat: bool = False) -> str:
    """The response with a leading space, unless there is whitespace already or the row is a chat's. [N+ 3]

    That may be the response's own, or the newline of CNN/DM's template. So no token spans query and response:
    tokenising them separately gives the ids of the joined text. A chat's responses are as its template writes them.
    """
    return response if chat or query[-1:].isspace() or response[:1].isspace() else " " + response


def response_ids(query: str, response: str, tokenizer: Tokenizer, chat: bool = False) -> list[int]:
    """Token ids of a response to `query`, with EOS."""
    [ids] = tokenizer.encode_responses([with_blank(query, response, chat)])
    return ids + [tokenizer.eos_id]


def load_demonstrations(
    path: str | Path, tokenizer: Tokenizer, max_query_length: int | None, max_response_length: int | None
) -> "Rows[Demonstration]":
    """Read an sft file. Limits in tokens, None: no limit; a longer row is an InputError."""

    def texts(records: Iterable[tuple[str, dict]]) -> Texts:
        for where, record in records:
            query, response = _texts(record, ("query", "response"), where)
            chat = is_chat(record, where)
            yield where, [query, with_blank(query, response, chat)], 0.0, chat

    tokens = load_tokens(path, tokenizer, "demonstrations", texts)
    tokens.check_lengths(("query", "response"), max_query_length, max_response_length)
    return Rows(tokens, lambda ids, record, _: Demonstration(ids[0], ids[1], record))


def load_scored(
    path: str | Path, tokenizer: Tokenizer, max_query_length: int | None, max_response_length: int | None
) -> "Rows[Scored]":
    """Read a scored file. Limits as in `load_demonstrations`."""

    def texts(records: Iterable[tuple[str, dict]]) -> Texts:
        for where, record in records:
            query, response = _texts(record, ("query", "response"), where)
            chat, score = is_chat(record, where), float(field(record, "score", float, where))
            yield where, [query, with_blank(query, response, chat)], score, chat

    tokens = load_tokens(path, tokenizer, "scored", texts)
    tokens.check_lengths(("query", "response"), max_query_length, max_response_length)
    return Rows(tokens, lambda ids, record, score: Scored(ids[0], ids[1], record, score))


def load_programs(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None,
    needs_response: bool = True,
) -> "Rows[Demonstration]":
    """Read a code file, all rows in one language. Limits as in `load_demonstrations`.

    The response is tokenised unchanged, without the space that `response_ids` may add: prefix + response + suffix is
    a program, a prefix may end mid-line, and a compiler's offsets count every character. It may be empty unless
    `needs_response`.
    """

    def texts(records: Iterable[tuple[str, dict]]) -> Texts:
        language_of_file = None
        for where, record in records:
            _texts(record, ("query", "response") if needs_response else ("query",), where)
            query, response, language, *_ = (
                field(record, name, str, where)
                for name in ("query", "response", "language", "prefix", "suffix", "tests")
            )
            if sum(len(record[name]) for name in ("prefix", "response", "suffix", "tests")) > MAX_PROGRAM:
                raise InputError(f"{where}: the program has more than {MAX_PROGRAM:,} characters: cut or delete it.")
            if language not in ("java", "python"):
                raise InputError(f"{where}: the field 'language' is {language!r}: write java or python.")
            if language != (language_of_file or language):
                raise InputError(
                    f"{where}: the field 'language' is {language!r}, unlike line 1: use a file per language."
                )
            language_of_file = language
            yield where, [query, response], 0.0, is_chat(record, where)

    tokens = load_tokens(path, tokenizer, "programs" if needs_response else "prompts", texts)
    tokens.check_lengths(("query", "response"), max_query_length, max_response_length)
    return Rows(tokens, lambda ids, record, _: Demonstration(ids[0], ids[1], record))


def load_comparisons(
    path: str | Path, tokenizer: Tokenizer, max_query_length: int | None, max_response_length: int | None
) -> "Rows[Comparison]":
    """Read a comparisons file. Limits as in `load_demonstrations`."""

    def texts(records: Iterable[tuple[str, dict]]) -> Texts:
        for where, record in records:
            query, *responses = _texts(record, ("query", "chosen", "rejected"), where)
            chat = is_chat(record, where)
            yield where, [query, *(with_blank(query, response, chat) for response in responses)], 0.0, chat

    tokens = load_tokens(path, tokenizer, "comparisons", texts)
    tokens.check_lengths(("query", "chosen", "rejected"), max_query_length, max_response_length)
    return Rows(tokens, lambda ids, record, _: Comparison(ids[0], ids[1], ids[2], record))


def _texts(record: dict, names: tuple[str, ...], where: str) -> list[str]:
    texts = [field(record, name, str, where) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise InputError(f"{where}: the field {name!r} is empty: delete the line or fill it.")
    return texts


# ----------------------------------------------------------------------------------------------- 3. ids in a few arrays
CACHE = ".tokens"  # directory beside the data
CACHE_FORMAT = "2"  # a cache that another format wrote is made anew
CHUNK = 1024  # rows tokenised at a time, on all cores


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenised file of N rows with F fields each, mapped from the cache: ranks and later runs share its memory.

    A row's text is read from the file when it is asked for.
    """

    path: Path
    file: BinaryIO
    ids: np.ndarray  # int32, of all fields of all rows, one after the other
    ends: np.ndarray  # (N, F) int64, where in `ids` a field ends
    lines: np.ndarray  # (N + 1,) int64, where in the file a row's line begins
    scores: np.ndarray  # (N,) float64, 0 where rows have none

    @property
    def lengths(self) -> np.ndarray:
        """(N, F) tokens of each field."""
        return np.diff(self.ends.reshape(-1), prepend=0).reshape(self.ends.shape)

    def row(self, i: int) -> tuple[list[list[int]], dict, float]:
        """The ids of each field of row i, the row as it was read, and its score."""
        ends = self.ends[i].tolist()
        starts = [int(self.ends[i - 1, -1]) if i else 0, *ends[:-1]]
        ids = [self.ids[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        first, last = self.lines[i : i + 2].tolist()
        self.file.seek(first)
        return ids, parse_object(self.file.read(last - first), f"{self.path}:{i + 1}"), float(self.scores[i])

    def check_lengths(
        self, names: tuple[str, ...], max_query_length: int | None, max_response_length: int | None
    ) -> None:
        """Raise InputError for the first field that is longer than its limit."""
        flags = ["--max-query-length"] + ["--max-response-length"] * (len(names) - 1)
        limits = [max_query_length] + [max_response_length] * (len(names) - 1)
        lengths = self.lengths
        too_long = np.argwhere(lengths > [math.inf if limit is None else limit for limit in limits])
        for i, f in too_long[:1].tolist():
            raise InputError(
                f"{self.path}:{i + 1}: the field {names[f]!r} has {lengths[i, f]} tokens (including a response's EOS), "
                f"{flags[f]} is {limits[f]}: raise the flag, or shorten or delete the row."
            )


class Rows(Sequence[R]):
    """Rows of a tokenised file. One that is indexed is made of lists; a slice is another view of the same arrays."""

    def __init__(self, tokens: Tokens, make: Callable[[list[list[int]], dict, float], R], numbers: range | None = None):
        self.tokens, self.make = tokens, make
        self.numbers = range(len(tokens.ends)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows[R]": ...
    def __getitem__(self, index: int | slice) -> "R | Rows[R]":
        if isinstance(index, slice):
            return Rows(self.tokens, self.make, self.numbers[index])
        return self.make(*self.tokens.row(self.numbers[index]))

    @property
    def lengths(self) -> np.ndarray:
        """(rows, fields) tokens: query and response, or query, chosen and rejected."""
        return self.tokens.lengths[np.asarray(self.numbers, dtype=np.int64)]


def load_tokens(
    path: str | Path, tokenizer: Tokenizer, kind: str, texts: Callable[[Iterable[tuple[str, dict]]], Texts]
) -> Tokens:
    """Tokenise a file, or map what an earlier start has made of the same file and tokenizer; every rank calls it.

    Rank 0 does the work. The cache is named by kind and tokenizer, and made anew where the file's SHA-256 differs. It
    is written whole or not at all; where its directory can't be written, rank 0 sends the arrays to the others.
    """
    from nanorlhf import distributed  # here, as it imports torch, which converters do without

    path = Path(path)
    found = distributed.from_first(lambda: cached_tokens(path, tokenizer, kind, texts))
    arrays = found if isinstance(found, dict) else read_cache(found)[1]
    file = io.BytesIO(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path.open("rb")
    return Tokens(path, file, **arrays)


def cached_tokens(
    path: Path, tokenizer: Tokenizer, kind: str, texts: Callable[[Iterable[tuple[str, dict]]], Texts]
) -> Path | dict[str, np.ndarray]:
    """The file that caches the arrays of `Tokens`; the arrays themselves where it can't be written."""
    for _ in iter_jsonl(path):  # refuses what is no file
        break
    with path.open("rb") as file:
        key = f"{CACHE_FORMAT} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    cache = path.parent / CACHE / f"{path.name}.{kind}.{tokenizer.fingerprint[:16]}.safetensors"
    try:
        if read_cache(cache)[0] == key:
            return cache
    except (OSError, SafetensorError):
        pass  # there is none, or it is damaged: it is made below
    arrays = tokenise(path, tokenizer, texts)
    temporary = cache.with_name(f".{cache.name}.{os.getpid()}.tmp")
    try:
        cache.parent.mkdir(exist_ok=True)
        temporary.write_bytes(save(arrays, {"key": key}))
        os.replace(temporary, cache)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        print(f"note: {path} is tokenised at every start: {cache.parent}: {error.strerror}.", file=sys.stderr)
        return arrays
    return cache


def read_cache(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The key of a cache, and its arrays, mapped."""
    with safe_open(path, "pt") as file:
        return file.metadata().get("key", ""), {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118


def tokenise(
    path: Path, tokenizer: Tokenizer, texts: Callable[[Iterable[tuple[str, dict]]], Texts]
) -> dict[str, np.ndarray]:
    """The arrays of `Tokens`. Raises InputError for a row that is broken, or whose two responses are the same."""
    ids, lengths, scores = [np.zeros(0, dtype=np.int32)], [], []
    rows = texts(iter_jsonl(path))
    while chunk := list(islice(rows, CHUNK)):
        queries = {
            chat: iter(tokenizer.encode_batch([fields[0] for _, fields, _, its in chunk if its == chat], marks=chat))
            for chat in {chat for *_, chat in chunk}
        }
        encoded = iter(tokenizer.encode_responses([text for _, fields, _, _ in chunk for text in fields[1:]]))
        for where, fields, score, chat in chunk:
            query, responses = next(queries[chat]), [next(encoded) for _ in fields[1:]]
            if tokenizer.pad_id in query:
                raise InputError(f"{where}: the query of a chat holds {PAD}, which masks would hide: take it out.")
            if len(responses) == 2 and responses[0] == responses[1]:  # as ids, where a leading space is no difference
                raise InputError(f"{where}: 'chosen' and 'rejected' are the same: delete the line.")
            row = [query, *(response + [tokenizer.eos_id] for response in responses)]
            ids.append(np.fromiter(chain.from_iterable(row), dtype=np.int32))
            lengths.append([len(field_ids) for field_ids in row])
            scores.append(score)
    ends = np.array(lengths, dtype=np.int64).cumsum().reshape(len(lengths), -1)
    lines = np.array([0, *accumulate(len(line) for _, line in read_lines(path))], dtype=np.int64)
    return {"ids": np.concatenate(ids), "ends": ends, "lines": lines, "scores": np.array(scores, dtype=np.float64)}


# --------------------------------------------------------------------------------------------------- 4. rows in batches
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
