"""Read the JSON Lines files that the training scripts train on.

    sft.{train,validation}.jsonl          {"query": str, "response": str}
    comparisons.{train,validation}.jsonl  {"query": str, "chosen": str, "rejected": str}
    scored.{train,validation}.jsonl       {"query": str, "response": str, "score": float}
    unpaired.{train,validation}.jsonl     {"query": str, "response": str, "label": bool}
    code.{train,validation,test}.jsonl    {"query": str, "response": str, "prefix": str,
                                           "suffix": str, "tests": str, "language": str}
    in all of them                        "meta": {...}, which training does not read

PPO and GRPO read only the queries, so their sft rows need no response.

"chat": true means that a chat template wrote the query: names of special tokens in it are parsed as
those tokens, and the responses get no leading space. In all other texts, and in every response,
such a name is ordinary text.

All rows are read, checked and tokenised before training starts; a broken row stops the run with
file, line and reason. The token ids are cached next to the file, in .tokens/, and later runs on the
same file memory-map the cache.
"""

import gzip
import hashlib
import io
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, get_origin, overload

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nanorlhf.errors import InputError
from nanorlhf.files import atomic, interrupts_wait, parse_json, read_lines, to_json
from nanorlhf.tokenizer import PAD, Tokenizer

T = TypeVar("T")
R = TypeVar("R")
# bytes: 128 KiB. CodeNet's programs have at most 64 KiB; larger ones slow down parsers and
# compilers
MAX_PROGRAM = 2**17
MAX_TEXT = 2**20  # characters: 1 million. A novel has about half of that, a post at most 64,000


@dataclass(frozen=True)
class Demonstration:
    query: list[int]
    response: list[int]  # ends in EOS
    record: dict  # the row of the file


class Scored(Demonstration):
    @property
    def score(self) -> float:
        return float(self.record["score"])


@dataclass(frozen=True)
class Comparison:
    query: list[int]
    chosen: list[int]  # both end in EOS; in an unpaired row, one is empty
    rejected: list[int]
    record: dict


# ---------------------------------------------------------------------------------- 1. rows as text
def iter_jsonl(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (`file:line`, object) for each line of a JSON Lines file, which may be a .gz.

    Raises InputError for a blank or broken line, and for an empty file.
    """
    number = 0
    for number, line in read_lines(path):
        yield f"{path}:{number}", parse_object(line, f"{path}:{number}")
    if number == 0:
        raise InputError(f"{path} is empty.")


def parse_object(line: bytes, where: str) -> dict:
    """Parse one line of JSON Lines into a dict; `where` (`file:line`) is for the error messages."""
    if not line.strip():
        raise InputError(f"{where}: the line is blank.")
    encoding = "utf-8-sig" if where.endswith(":1") else "utf-8"
    record = parse_json(line, where, is_line=True, encoding=encoding)
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, got {type(record).__name__}.")
    return record


def field(record: dict, name: str, kind: type[T], where: str) -> T:
    """Return `record[name]`; raises InputError unless it is a `kind`, such as list[str].

    An int passes as float. Floats must be finite, strings valid Unicode and not too long.
    """
    value: Any = record.get(name)
    plain: Any = get_origin(kind) or kind  # list, of list[str]
    fits = isinstance(value, plain) or (plain is float and isinstance(value, int))
    problem = None
    if name not in record:
        problem = "is missing"
    elif not fits or (isinstance(value, bool) and plain is not bool):
        problem = f"must be {plain.__name__}, not {type(value).__name__}"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        problem = "is an integer with more than 64 bits"
    elif plain is float and not math.isfinite(value):
        problem = f"is {value}, not a finite number"
    elif plain is str and len(value) > MAX_TEXT:
        problem = f"has more than {MAX_TEXT:,} characters"
    elif plain is str and value.encode(errors="ignore").decode() != value:
        problem = "isn't valid Unicode"  # JSON can contain half a surrogate pair, such as \ud83d
    if problem:
        raise InputError(f"{where}: the field {name!r} {problem}.")
    for item_kind in get_args(kind)[-1:]:
        entries = value.items() if plain is dict else enumerate(value)
        items = {f"{name}[{key}]": item for key, item in entries}
        for item in items:
            field(items, item, item_kind, where)
    return value


def filled(record: dict, name: str, where: str) -> str:
    """Return `record[name]`, a string; raises InputError if it is blank."""
    text = field(record, name, str, where)
    if not text.strip():
        raise InputError(f"{where}: the field {name!r} is empty.")
    return text


def sampled_rows(path: Path, settings: dict[str, str]) -> list[tuple[str, dict]]:
    """Read the complete rows of an interrupted sampling, each with its `file:line`.

    settings: everything that the samples depend on, stored in the first line of the file. Raises
    InputError if they differ.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            rows.append((f"{path}:{number}", parse_object(line, f"{path}:{number}")))
    before = rows[0][1] if rows else settings
    for name, value in settings.items():
        if before.get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(
                f"--resume: the sampling in {path} was started with {flag} {before.get(name)}, not "
                f"{value}: pass the same value, or start again with --overwrite."
            )
    return rows[1:]


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    """Write one row per line, atomically; as ASCII, so that all readers agree where a line ends.

    Creates the directory if it is missing.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic(Path(path)) as temporary, temporary.open("w", encoding="ascii") as file:
        for row in rows:
            file.write(to_json(row) + "\n")


# ----------------------------------------------------------------------------------- 2. rows as ids
# per row: `file:line`, the texts of its fields, whether it is a chat
Texts = Iterator[tuple[str, list[str], bool]]


def is_chat(record: dict, where: str) -> bool:
    """Return True if a chat template wrote the query of the row."""
    return "chat" in record and field(record, "chat", bool, where)


def with_leading_space(query: str, response: str, chat: bool = False) -> str:
    """Put a space before a response, unless whitespace is there or the row is a chat. [N+ 3]

    The whitespace may begin the response or end the query, like the newline in CNN/DM's template.
    No token then spans query and response: tokenising them separately gives the ids of the joined
    text. An empty text has no whitespace. A chat's responses stay as its template writes them.
    """
    if chat or query[-1:].isspace() or response[:1].isspace():
        return response
    return " " + response


def response_ids(query: str, response: str, tokenizer: Tokenizer, chat: bool = False) -> list[int]:
    """Return the token ids of a response to `query`, with EOS."""
    text = with_leading_space(query, response, chat)
    [ids] = tokenizer.encode_responses([text], [query] if chat else None)
    return ids + [tokenizer.eos_id]


def load_demonstrations(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None = None,
    needs_response: bool = True,
) -> "Rows[Demonstration]":
    """Read an sft file. Limits are in tokens (None: no limit); a longer row raises InputError.

    Unless `needs_response`, a row may have no response; its response ids are then [EOS].
    """
    names, limits = ("query", "response"), (max_query_length, max_response_length)
    kind = "demonstrations" if needs_response else "queries"
    texts = partial(text_rows, names=names) if needs_response else query_rows
    return load_rows(path, tokenizer, kind, Demonstration, texts, names, limits)


def load_scored(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None,
) -> "Rows[Scored]":
    """Read a scored file. Limits as in `load_demonstrations`."""
    names, limits = ("query", "response"), (max_query_length, max_response_length)
    texts = partial(text_rows, names=names, has_score=True)
    return load_rows(path, tokenizer, "scored", Scored, texts, names, limits)


def load_programs(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None = None,
    needs_response: bool = True,
) -> "Rows[Demonstration]":
    """Read a code file, all rows in one language. Limits as in `load_demonstrations`.

    The response is tokenised unchanged, without the space that `response_ids` may add: prefix +
    response + suffix is a program, a prefix may end mid-line, and a compiler's offsets count every
    character. It may be empty unless `needs_response`.
    """

    def texts(records: Iterable[tuple[str, dict]]) -> Texts:
        file_language = None
        for where, record in records:
            query = filled(record, "query", where)
            if needs_response:
                filled(record, "response", where)
            names = ("response", "language", "prefix", "suffix", "tests")
            response, language, *context = (field(record, n, str, where) for n in names)
            if len(response) + sum(map(len, context)) > MAX_PROGRAM:
                raise InputError(f"{where}: the program has more than {MAX_PROGRAM:,} characters.")
            if language not in ("java", "python"):
                raise InputError(
                    f"{where}: the field 'language' is {language!r}, must be java or python."
                )
            if language != (file_language or language):
                raise InputError(
                    f"{where}: the field 'language' is {language!r}, unlike line 1: "
                    "use one file per language."
                )
            file_language = language
            yield where, [query, response], is_chat(record, where)

    kind = "programs" if needs_response else "prompts"
    names, limits = ("query", "response"), (max_query_length, max_response_length)
    return load_rows(path, tokenizer, kind, Demonstration, texts, names, limits)


def load_comparisons(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None,
) -> "Rows[Comparison]":
    """Read a comparisons file. Limits as in `load_demonstrations`."""
    names = ("query", "chosen", "rejected")
    limits = (max_query_length, max_response_length, max_response_length)
    texts = partial(text_rows, names=names)
    return load_rows(path, tokenizer, "comparisons", Comparison, texts, names, limits)


def load_unpaired(
    path: str | Path,
    tokenizer: Tokenizer,
    max_query_length: int | None,
    max_response_length: int | None,
) -> "Rows[Comparison]":
    """Read an unpaired file: a row has a chosen response if its label is true, else a rejected one.

    Limits as in `load_demonstrations`. Raises InputError if all rows have the same label.
    """

    def one_sided(query: list[int], response: list[int], record: dict) -> Comparison:
        chosen, rejected = (response, []) if record["label"] else ([], response)
        return Comparison(query, chosen, rejected, record)

    def texts(records: Iterable[tuple[str, dict]]) -> Texts:
        labels = set()
        for where, record in records:
            labels.add(field(record, "label", bool, where))
            yield from text_rows([(where, record)], names)
        if len(labels) == 1:
            [label] = labels
            raise InputError(
                f"{path}: every row has the label {json.dumps(label)}: KTO needs both labels."
            )

    names, limits = ("query", "response"), (max_query_length, max_response_length)
    return load_rows(path, tokenizer, "unpaired", one_sided, texts, names, limits)


def text_rows(
    records: Iterable[tuple[str, dict]], names: tuple[str, ...], has_score: bool = False
) -> Texts:
    """Yield the texts of each row: its query, and its responses with a leading space."""
    for where, record in records:
        query, *responses = (filled(record, name, where) for name in names)
        chat = is_chat(record, where)
        if has_score:
            field(record, "score", float, where)
        yield where, [query, *(with_leading_space(query, text, chat) for text in responses)], chat


def query_rows(records: Iterable[tuple[str, dict]]) -> Texts:
    """Yield the texts of each row; only the query is required."""
    for where, record in records:
        if record.get("response") is None or record["response"] == "":
            yield where, [filled(record, "query", where), ""], is_chat(record, where)
        else:
            yield from text_rows([(where, record)], ("query", "response"))


# --------------------------------------------------------------------------- 3. ids in a few arrays
CACHE = ".tokens"  # directory next to the data
CACHE_FORMAT = "4"  # a cache in another format is replaced
CHUNK = 1024  # rows tokenised at once, on all cores


@dataclass(frozen=True, eq=False)
class Rows(Sequence[R]):
    """The rows of a tokenised file, F fields each; a slice is another view of the same arrays.

    The arrays, for all N rows of the file, are mapped from the cache: ranks share its memory. A
    row's text is read from the file on demand.
    """

    make: Callable[..., R]  # the ids of each field, and the record -> the row
    path: Path
    file: BinaryIO
    numbers: range  # rows of the file in this view, from 0
    ids: np.ndarray  # int32, all fields of all rows, concatenated
    ends: np.ndarray  # (N, F) int64, where each field ends in `ids`
    lines: np.ndarray  # (N + 1,) int64, where each row's line begins in the file

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows[R]": ...
    def __getitem__(self, index: int | slice) -> "R | Rows[R]":
        if isinstance(index, slice):
            return replace(self, numbers=self.numbers[index])
        i = self.numbers[index]
        ends = self.ends[i].tolist()
        starts = [int(self.ends[i - 1, -1]) if i else 0, *ends[:-1]]
        ids = [self.ids[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        first, last = self.lines[i : i + 2].tolist()
        self.file.seek(first)
        record = parse_object(self.file.read(last - first), f"{self.path}:{i + 1}")
        return self.make(*ids, record)

    @property
    def lengths(self) -> np.ndarray:
        """Lengths (rows, F) in tokens: query and response, or query, chosen and rejected."""
        lengths = np.diff(self.ends.reshape(-1), prepend=0).reshape(self.ends.shape)
        return lengths[np.asarray(self.numbers, dtype=np.int64)]


def load_rows(
    path: str | Path,
    tokenizer: Tokenizer,
    kind: str,
    make: Callable[..., R],
    texts: Callable[[Iterable[tuple[str, dict]]], Texts],
    names: tuple[str, ...],
    limits: tuple[int | None, ...],
) -> Rows[R]:
    """Tokenise a file, or map the cache that an earlier run wrote; every rank calls it.

    Rank 0 does the work. The cache is named after kind and tokenizer; it is replaced if the SHA-256
    of the file or of its arrays differs, and written atomically. If the cache can't be written, or
    another node doesn't see it, rank 0 sends the arrays to the other ranks. Raises InputError for
    the first field with more tokens than its limit.
    """
    from nanorlhf import distributed  # imports PyTorch, which converters don't need

    path = Path(path)
    cached = distributed.from_first(lambda: cached_tokens(path, tokenizer, kind, texts))
    arrays = cached if isinstance(cached, dict) else map_cache(cached)
    file: BinaryIO = path.open("rb")
    if path.suffix == ".gz":
        file = io.BytesIO(gzip.decompress(file.read()))
    rows = Rows(make, path, file, range(len(arrays["ends"])), **arrays)
    lengths = rows.lengths
    too_long = np.argwhere(lengths > [math.inf if limit is None else limit for limit in limits])
    for i, f in too_long[:1].tolist():
        flag = "--max-query-length" if f == 0 else "--max-response-length"
        raise InputError(
            f"{path}:{i + 1}: the field {names[f]!r} has {lengths[i, f]} tokens (including a "
            f"response's EOS), but {flag} is {limits[f]}."
        )
    return rows


def map_cache(path: Path) -> dict[str, np.ndarray]:
    """Map the arrays of rank 0's cache; rank 0 sends them if a node doesn't see that file."""
    from nanorlhf import distributed

    try:
        key, arrays = read_cache(path)
    except (OSError, SafetensorError):
        key, arrays = "", {}
    if distributed.largest(int(key != distributed.from_first(lambda: key))):
        arrays = distributed.from_first(lambda: arrays)
    return arrays


def cached_tokens(
    path: Path,
    tokenizer: Tokenizer,
    kind: str,
    texts: Callable[[Iterable[tuple[str, dict]]], Texts],
) -> Path | dict[str, np.ndarray]:
    """Return the file that caches the arrays of `Rows`, or the arrays if it can't be written."""
    for _ in iter_jsonl(path):  # raises InputError unless it is a regular file
        break
    with path.open("rb") as file:
        source = f"{CACHE_FORMAT} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    cache = path.parent / CACHE / f"{path.name}.{kind}.{tokenizer.fingerprint[:16]}.safetensors"
    try:
        key, arrays = read_cache(cache)
        if key == f"{source} {digest(arrays)}":
            return cache
    except (OSError, SafetensorError, TypeError):  # TypeError: a dtype that NumPy doesn't have
        pass  # missing or damaged: written below
    arrays = tokenise(path, tokenizer, texts)
    key = f"{source} {digest(arrays)}"
    try:
        cache.parent.mkdir(exist_ok=True)
        for stale in cache.parent.glob("*.tmp"):
            if time.time() - stale.stat().st_mtime > 3600:  # left by a killed run
                stale.unlink(missing_ok=True)
        # two runs may write at once, on nodes that share the directory
        with atomic(cache, f".{platform.node()}.{os.getpid()}.tmp") as temporary:
            temporary.write_bytes(save(arrays, {"key": key}))
    except OSError as error:
        print(
            f"note: can't cache token ids, so every run tokenises {path} again: "
            f"{cache.parent}: {error.strerror}.",
            file=sys.stderr,
        )
        return arrays
    return cache


def read_cache(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Return a cache's key and its mapped arrays."""
    with interrupts_wait(), safe_open(path, "pt") as file:
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}
        return (file.metadata() or {}).get("key", ""), arrays


def digest(arrays: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of the arrays' names, dtypes, shapes and bytes."""
    sha256 = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha256.update(f"{name} {array.dtype} {array.shape} ".encode())
        sha256.update(array.data)
    return sha256.hexdigest()


def tokenise(
    path: Path, tokenizer: Tokenizer, texts: Callable[[Iterable[tuple[str, dict]]], Texts]
) -> dict[str, np.ndarray]:
    """Tokenise into the arrays of `Rows`; InputError for a broken row or two equal responses."""
    ids = [np.zeros(0, dtype=np.int32)]
    lengths: list[list[int]] = []
    rows = texts(iter_jsonl(path))
    while chunk := list(islice(rows, CHUNK)):
        encoded: dict[bool, tuple[Iterator[list[int]], Iterator[list[int]]]] = {}
        for chat in (False, True):
            selected = [fields for _, fields, kind in chunk if kind == chat]
            queries = tokenizer.encode_batch([query for query, *_ in selected], chat)
            response_texts = [text for _, *texts in selected for text in texts]
            chats = [query for query, *texts in selected for _ in texts] if chat else None
            encoded[chat] = iter(queries), iter(tokenizer.encode_responses(response_texts, chats))
        for where, fields, chat in chunk:
            query = next(encoded[chat][0])
            responses = [next(encoded[chat][1]) for _ in fields[1:]]
            if tokenizer.pad_id in query:
                raise InputError(f"{where}: the chat's query has {PAD}, which masks would hide.")
            # compared as ids, because a leading space makes no difference
            if len(responses) == 2 and responses[0] == responses[1]:
                raise InputError(f"{where}: 'chosen' and 'rejected' are the same.")
            row = [query, *(response + [tokenizer.eos_id] for response in responses)]
            ids.append(np.fromiter(chain.from_iterable(row), dtype=np.int32))
            lengths.append([len(field_ids) for field_ids in row])
    ends = np.array(lengths, dtype=np.int64).cumsum().reshape(len(lengths), -1)
    lines = np.array([0, *accumulate(len(line) for _, line in read_lines(path))], dtype=np.int64)
    return {"ids": np.concatenate(ids), "ends": ends, "lines": lines}


# ------------------------------------------------------------------------------- 4. rows in batches
def batch_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Return the row indices of batch `step` in an endless stream of reshuffled epochs. [N+ 21]

    Every row comes once per epoch; a batch may span two epochs and is never short. A pure function
    of its arguments: a resumed run continues the same stream, and ranks that take slices of a batch
    never overlap. Raises an InputError that names --seed if the seed is negative.
    """
    if seed < 0:
        raise InputError(f"--seed {seed}: it must not be negative.")
    indices: list[int] = []
    position = step * batch_size
    while len(indices) < batch_size:
        epoch, start = divmod(position + len(indices), num_rows)
        order = np.random.default_rng((seed, epoch)).permutation(num_rows)
        indices += order[start : start + batch_size - len(indices)].tolist()
    return indices
