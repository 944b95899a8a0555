"""Shared by the modules of data/: reading sources, settings, splits, truncation, and writing and reporting rows."""

import fnmatch
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from nanorlhf.cli import Fraction, Seed
from nanorlhf.dataset import iter_jsonl, parse_object, response_ids
from nanorlhf.errors import InputError
from nanorlhf.files import atomic, check_out, hub_directory, open_regular, read_json, read_lines, to_json
from nanorlhf.progress import Progress
from nanorlhf.tokenizer import Tokenizer, train_tokenizer

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
MAX_VOCAB_SIZE = 2**20  # Gemma's tokenizer has 262,144


# ------------------------------------------------------------------------------------------------------------ 1. input
@dataclass(frozen=True, kw_only=True)
class SourceArgs:
    source: str
    """file, directory or Hub dataset id"""
    files: str = "*"
    """pattern for the relative paths of files in a directory or Hub dataset, such as 'data/*_prefs-*'"""
    revision: str | None = None
    """branch or commit of a Hub dataset"""


def source_files(args: SourceArgs) -> list[tuple[Path, str]]:
    """Return the data files of --source, each with its path relative to the source."""
    root = Path(args.source)
    if not root.exists():
        root = hub_directory(args.source, [args.files], "dataset", args.revision)
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise InputError(f"--source {args.source}: unsupported file type; expected {', '.join(SUFFIXES)}.")
        return [(root, root.name)]
    files = [
        (path, inside)
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.name.endswith(SUFFIXES)
        and fnmatch.fnmatch(inside := path.relative_to(root).as_posix(), args.files)
    ]
    if not files:
        raise InputError(
            f"--source {args.source}: no file matches --files {args.files!r} and ends in {', '.join(SUFFIXES)}."
        )
    return files


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield (location, record) for each record of a file. All formats except .json arrays are streamed."""
    if path.name.endswith(".parquet"):
        records = _parquet_records(path)
    elif path.suffix == ".json" and not _is_json_lines(path):
        records = _json_records(path)
    else:
        records = iter_jsonl(path)
    return iter(Progress(records, desc=path.name, unit=" rows", leave=False))


def _is_json_lines(path: Path) -> bool:
    """Return whether the first line is an object: some published .json files are JSON Lines."""
    try:
        for _, line in read_lines(path):
            return bool(parse_object(line, f"{path}:1"))
    except InputError:
        return False
    return True  # iter_jsonl reports empty files


def _json_records(path: Path) -> Iterator[tuple[str, dict]]:
    value = read_json(path)
    for number, record in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(record, dict):
            raise InputError(f"{path}: record {number}: expected a JSON object, got {type(record).__name__}.")
        yield f"{path}: record {number}", record


def _parquet_records(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:  # from the optional extra `hub`
        raise InputError(f"{path}: reading parquet needs pyarrow: install it with `pip install pyarrow`.") from error
    try:
        batches = ParquetFile(path, page_checksum_verification=True).iter_batches(batch_size=1024)
        for number, record in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
            yield f"{path}: row {number}", record
    except Exception as error:  # damaged bytes can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{path}: damaged, or not a parquet file ({reason:.200}).") from error


# --------------------------------------------------------------------------------------------------------- 2. settings
def check_vocab_size(vocab_size: int | None, tokenizer_flag: str | None = None) -> None:
    """Raise InputError if --vocab-size is out of range or combined with the flag that names a tokenizer."""
    if vocab_size is None:
        return
    if vocab_size < 300:
        raise InputError(f"--vocab-size {vocab_size}: must be at least 300 (256 entries are the bytes).")
    if vocab_size > MAX_VOCAB_SIZE:  # the library allocates memory for all of them
        raise InputError(f"--vocab-size {vocab_size}: must be at most {MAX_VOCAB_SIZE:,}.")
    if tokenizer_flag:
        raise InputError(f"--vocab-size trains a tokenizer and {tokenizer_flag} names one: pass only one of them.")


def has_rows(out: Path) -> bool:
    """Return whether --out has annotations to resume. Raises InputError if it can't be written as a file."""
    check_out(out.parent)
    if out.is_dir():
        raise InputError(f"--out must be a file; {out} is a directory.")
    if not out.exists():
        return False
    open_regular(out).close()  # it will be replaced
    return out.stat().st_size > 0  # empty if the only row was removed


# ----------------------------------------------------------------------------------------------------------- 3. splits
@dataclass(frozen=True, kw_only=True)
class SplitArgs:
    validation_share: Fraction = 0.1
    """share of the data for validation, if the source has no splits"""
    resplit: bool = False
    """draw new splits by --validation-share even if the source has splits"""
    seed: Seed = 1
    """seed of the drawn splits"""


# published name -> name in the data contract
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("valid", "valid1", "valid2", "validation"), "validation")


def split_in_path(path: str) -> str | None:
    """Return the published split in a path: the last of its words that is train, valid, validation or test."""
    words = [word for word in re.split(r"[^a-z0-9]+", path.lower()) if word in SPLITS]
    return words[-1] if words else None


def in_validation(key: str, share: float, seed: int) -> bool:
    """Return whether a seeded hash of `key` puts a row into validation; equal keys get the same split."""
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def choose_split(published: str | None, key: str, args: SplitArgs) -> str:
    """Return the published split of a row, or a split drawn by a hash of `key` if it has none or with --resplit."""
    if published is not None and not args.resplit:
        return SPLITS[published]
    return "validation" if in_validation(key, args.validation_share, args.seed) else "train"


# ------------------------------------------------------------------------------------------------------- 4. truncation
SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*(?=\s)""")
LONGEST_TOKEN = 128  # characters, in the vocabularies of GPT-2 and GPT-NeoX


def longest_fit(ends: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the last of the ascending `ends` for which `fits` is true; None if there is none.

    After bisection, also check the ends up to LONGEST_TOKEN characters later: a longer prefix may have fewer tokens
    once a word is complete.
    """
    low, high = -1, len(ends)  # ends[low] fits, ends[high] doesn't
    while high - low > 1:
        middle = (low + high) // 2
        if fits(ends[middle]):
            low = middle
        else:
            high = middle
    if len(ends):
        beyond = bisect_right(ends, ends[max(low, 0)] + LONGEST_TOKEN)
        low = next((i for i in range(beyond - 1, low, -1) if fits(ends[i])), low)
    return ends[low] if low >= 0 else None


def first_fit(starts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the first of the ascending `starts` for which `fits` is true, as for all later ones; None if none is."""
    index = 0 if starts and fits(starts[0]) else bisect_left(starts, True, key=fits)
    return starts[index] if index < len(starts) else None


# ----------------------------------------------------------------------------------------------------------- 5. output
class Skipped(Exception):
    """Raised to skip a record or row; the message is the reason."""


@contextmanager
def jsonl_files(directory: Path, may_lack: Mapping[str, str] = {}) -> Iterator[Callable[[str, dict], None]]:
    """Yield `write(name, row)`, which appends to name.jsonl.

    The files appear together at the end of the block; after an error, no file or new directory remains. may_lack: names
    that may get no rows -> why; their files from an earlier run are removed, because they wouldn't match the others.
    """
    check_out(directory)
    new_directories = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            files = {}

            def write(name: str, row: dict) -> None:
                if name not in files:
                    new = stack.enter_context(atomic(directory / f"{name}.jsonl"))
                    files[name] = stack.enter_context(new.open("w", encoding="ascii"))
                files[name].write(to_json(row) + "\n")

            yield write
            for file in files.values():
                file.close()
        new_directories = []
        for name, reason in may_lack.items():
            if name not in files:
                (directory / f"{name}.jsonl").unlink(missing_ok=True)
                print(f"note: no {name}.jsonl: {reason}.")
    finally:
        for parent in new_directories:
            parent.rmdir()


class LengthTable:
    """Table of query and response lengths in tokens, by file. Response lengths include EOS. [N+ 4]"""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # (file, column) -> length -> rows

    def add(self, file: str, query: int, **responses: int) -> None:
        """Add a row: the lengths of its query and, by column, of its responses."""
        self.counts[file, "query"][query] += 1
        for column, length in responses.items():
            self.counts[file, column][length] += 1
            self.counts[file, f"query+{column}"][query + length] += 1

    def __str__(self) -> str:
        lines = [f"{'tokens':<26} {'':<17} {'rows':>7} {'min':>5} {'median':>6} {'mean':>7} {'95%':>5} {'max':>5}"]
        for (name, column), counter in sorted(self.counts.items(), key=lambda item: item[0][0]):
            values = np.array(list(counter.elements()))
            middle, high = np.quantile(values, (0.5, 0.95), method="inverted_cdf")  # lengths that occur
            lines.append(
                f"{name:<26} {column:<17} {len(values):7} {values.min():5} {middle:6} {values.mean():7.1f} {high:5} "
                f"{values.max():5}"
            )
        return "\n".join(lines)


def program_lengths(row: dict, tokenizer: Tokenizer, limits: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """Return the lengths of a row's query and its response, if any, and a message for each one above its limit."""
    lengths = {"query": len(tokenizer.encode(row["query"]))}
    if row["response"]:
        lengths["response"] = len(tokenizer.encode(row["response"])) + 1  # with EOS, as in dataset.load_programs
    too_long = (column for column, length in lengths.items() if length > limits[column])
    return lengths, [f"{column} longer than --max-{column}-length {limits[column]}" for column in too_long]


def list_reasons(skipped: Mapping[str, int]) -> str:
    """Return the reasons why rows were skipped, in one line."""
    return "; ".join(f"{count} x {reason}" for reason, count in skipped.items())


def print_skipped(skipped: Mapping[str, int], firsts: Mapping[str, str] = {}) -> None:
    """Print how often each reason occurred and, if known, where it first occurred."""
    print("\nskipped")
    for reason, count in sorted(skipped.items()) or [("nothing", 0)]:
        print(f"{count:10,}  {reason}" + (f"; first: {firsts[reason]}" if reason in firsts else ""))


def train_bpe(texts: Sequence[str], vocab_size: int, source: str | Path) -> Tokenizer:
    """Train a tokenizer with --vocab-size entries. Raises InputError without any texts."""
    if not texts:
        raise InputError(f"--vocab-size: {source} has no train split to train a tokenizer on: pass --resplit.")
    return train_tokenizer(texts, vocab_size)


KINDS = {"chosen": "comparisons", "score": "scored", "label": "unpaired"}  # field of a row -> its file


@contextmanager
def converted_files(
    out: Path,
    source: str | Path,
    tokenizer: Tokenizer,
    skipped: Counter[str],
    firsts: Mapping[str, str] = {},
    missing: str = "the source has no such split; --resplit draws one",
    may_lack: Mapping[str, str] = {},
    lengths: LengthTable | None = None,
) -> Iterator[Callable[..., bool]]:
    """Yield `write(split, row, flag, limit)`, which appends to {sft,scored,unpaired,comparisons}.{split}.jsonl.

    It skips a row if a response has more than `limit` tokens or if both responses are equal, and returns whether it
    wrote the row. With `sft_too=True`, the chosen response also becomes a demonstration. After the block, tables about
    the files are printed; `missing` is the reason printed if only one of two splits has a file. Raises InputError if
    there are no rows. lengths: an empty table to fill, for callers that also draw it.
    """
    lengths = LengthTable() if lengths is None else lengths
    written: Counter[str] = Counter()
    with jsonl_files(out, may_lack) as append:

        def write(split: str, row: dict, flag: str, limit: float, sft_too: bool = False) -> bool:
            columns = ("chosen", "rejected") if "chosen" in row else ("response",)
            responses = [response_ids(row["query"], row[column], tokenizer, "chat" in row) for column in columns]
            if len(responses) == 2 and responses[0] == responses[1]:
                skipped["two identical responses"] += 1
                return False
            if max(map(len, responses)) > limit:
                skipped[f"a response longer than {flag} {limit}"] += 1
                return False
            kind = next((kind for name, kind in KINDS.items() if name in row), "sft")
            append(f"{kind}.{split}", row)
            written[f"{kind}.{split}"] += 1
            query_length = len(tokenizer.encode(row["query"], "chat" in row))
            lengths.add(f"{kind}.{split}", query_length, **dict(zip(columns, map(len, responses), strict=True)))
            if sft_too:
                demonstration = {"response" if name == "chosen" else name: value for name, value in row.items()}
                del demonstration["rejected"]
                append(f"sft.{split}", demonstration)
                written[f"sft.{split}"] += 1
            return True

        yield write
        if not written:
            reasons = list_reasons(skipped) or "the source is empty"
            raise InputError(f"--source {source}: no usable rows ({reasons}); nothing was written.")
    print(lengths)
    print_skipped(skipped, firsts)
    print(f"\nwritten: {out}: " + ", ".join(f"{name}.jsonl ({count})" for name, count in sorted(written.items())))
    for kind in ("sft", "comparisons"):
        missing_splits = [split for split in ("train", "validation") if f"{kind}.{split}" not in written]
        if len(missing_splits) == 1 and f"{kind}.{missing_splits[0]}" not in may_lack:
            print(f"note: no {kind}.{missing_splits[0]}.jsonl: {missing}.")
