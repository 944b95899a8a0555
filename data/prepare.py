"""What the modules of data/ share: raw records in, the files of the data contract out, and a table of lengths."""

import fnmatch
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from nanorlhf.dataset import iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.hub import hub_directory

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


def source_files(source: str, files: str, revision: str | None) -> list[tuple[Path, str]]:
    """The data files of --source: the file itself, or those of a directory or Hub dataset that match --files.

    Each with its path inside the source.
    """
    root = Path(source)
    if not root.exists():
        root = hub_directory(source, [files], "dataset", revision)
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise InputError(f"--source {source}: can't read this kind of file: it must end in {', '.join(SUFFIXES)}.")
        return [(root, root.name)]
    found = [
        (path, inside)
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.name.endswith(SUFFIXES)
        and fnmatch.fnmatch(inside := path.relative_to(root).as_posix(), files)
    ]
    if not found:
        raise InputError(f"--source {source}: no file matches --files {files!r} and ends in {', '.join(SUFFIXES)}.")
    return found


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """The records of one file, each with its place for error messages; all but .json arrays are read as a stream."""
    if path.name.endswith(".parquet"):
        records = _parquet_records(path)
    elif path.suffix == ".json" and not _is_json_lines(path):
        records = _json_records(path)
    else:
        records = iter_jsonl(path)
    return iter(tqdm(records, desc=path.name, unit=" rows", disable=None, leave=False))


def _is_json_lines(path: Path) -> bool:
    """Published comparisons are JSON Lines in files named .json: then the first line is an object of its own."""
    with path.open("rb") as file:
        try:
            return isinstance(json.loads(file.readline()), dict)
        except ValueError:
            return path.stat().st_size == 0  # an empty file is an error there


def _json_records(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        value = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: malformed JSON ({error.msg}): mend it.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start}): convert the file to UTF-8.") from error
    for number, record in enumerate(value if isinstance(value, list) else [value], start=1):
        if not isinstance(record, dict):
            raise InputError(f"{path}: record {number} is no JSON object but {type(record).__name__}: it must be one.")
        yield f"{path}: record {number}", record


def _parquet_records(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow.parquet
    except ImportError as error:  # the optional extra `hub`
        raise InputError(f"{path}: reading parquet needs pyarrow: install it with `pip install pyarrow`.") from error
    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", record
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: damaged, or not a parquet file: download it again.") from error


def in_validation(key: str, share: float, seed: int) -> bool:
    """A seeded coin for a row of validation, a function of `key` alone: equal keys are never on both sides."""
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@contextmanager
def jsonl_files(directory: Path) -> Iterator[Callable[[str, dict], None]]:
    """Gives `write(name, row)`. The files name.jsonl appear together at the end of the block, or none of them does."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out {directory} is a file: name a directory.")
    made = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(TemporaryDirectory(dir=directory, prefix=".incomplete-")))
            files = {}

            def write(name: str, row: dict) -> None:
                if name not in files:
                    files[name] = stack.enter_context((scratch / f"{name}.jsonl").open("w", encoding="ascii"))
                files[name].write(json.dumps(row) + "\n")

            yield write
            for file in files.values():
                file.close()
            for name in files:
                os.replace(scratch / f"{name}.jsonl", directory / f"{name}.jsonl")
            made = []
    finally:
        for parent in made:
            parent.rmdir()


def length_table(lengths: dict[tuple[str, str], Counter[int]]) -> str:
    """Tokens by file and column; a response counts with its EOS. [N+ 4]"""
    lines = [f"{'tokens':<26} {'':<17} {'rows':>7} {'min':>5} {'median':>6} {'mean':>7} {'95%':>5} {'max':>5}"]
    for (name, column), counter in sorted(lengths.items(), key=lambda item: item[0][0]):
        values = np.array(list(counter.elements()))
        middle, high = np.quantile(values, (0.5, 0.95), method="inverted_cdf")  # lengths that occur
        lines.append(
            f"{name:<26} {column:<17} {len(values):7} {values.min():5} {middle:6} {values.mean():7.1f} {high:5} "
            f"{values.max():5}"
        )
    return "\n".join(lines)
