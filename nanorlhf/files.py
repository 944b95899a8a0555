"""Read untrusted files, local or from the Hub: only regular files of bounded size are accepted.

All modules read files with these functions, so each kind of bad file is rejected in one place. The
bounds are far above real data; the comments name the largest real example that we know.
`atomic`, `atomic_files` and `write_text` write our files atomically.
"""

import gzip
import json
import math
import os
import shutil
import signal
import stat
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
)

from nanorlhf.errors import InputError

MAX_LINE = 2**24  # bytes: 16 MiB. A row of 1,000 samples has 4 MiB, a post at most 64 KiB
MAX_FILE = 2**28  # bytes: 256 MiB. SQuAD 2.0 has 42 MB, Gemma's tokenizer.json 35 MB
WRITTEN = frozenset(  # suffixes of files that programs write into --out; .tmp while writing
    (".csv", ".html", ".jinja", ".json", ".jsonl", ".md", ".png", ".safetensors", ".svg")
    + (".tmp", ".txt", ".xml")
)


# -------------------------------------------------------------------------------------- 1. any file
def check_out(directory: Path, flag: str = "--out") -> None:
    """Reject a directory that can't be created or written to; run this before anything slow.

    Writes nothing. If an entry's name looks like a file we write, it must be a file, or a link,
    which writing would replace.
    """
    above = (directory, *directory.absolute().parents)
    parent = next(path for path in above if os.path.lexists(path))
    if not parent.exists():
        raise InputError(f"{flag} {directory}: {parent} is a broken symbolic link.")
    if parent == directory and not parent.is_dir():
        raise InputError(f"{flag} {directory} is a file, not a directory.")
    try:  # os.access isn't enough: root may write to /proc, but can't create a directory there
        TemporaryDirectory(dir=parent, prefix=".nanorlhf-").cleanup()
    except OSError as error:
        raise InputError(
            f"{flag} {directory}: {parent} is not a writable directory ({error.strerror})."
        ) from error
    for path in directory.iterdir() if parent == directory else ():
        if path.suffix in WRITTEN and not path.is_symlink() and not path.is_file():
            raise InputError(f"{flag} {directory}: {path} is not a regular file: move it away.")


def delete(path: Path) -> None:
    """Delete a file, directory or link, but not the link's target; the path may not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yield a temporary path next to `path`; the file written there then replaces `path`.

    After an error or an interruption, the old file is unchanged. A link, symbolic or hard, is
    replaced; its target is unchanged. Raises InputError for a device or a pipe, such as /dev/null,
    which a rename would turn into a file.

    suffix: of the temporary path; different for processes that may write the same file at once
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file.")
    temporary = path.with_name(path.name + suffix)
    temporary.unlink(missing_ok=True)  # left by a killed run; a link must not be followed
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(directory: Path, last: str) -> Iterator[Path]:
    """Yield a temporary directory; once its files are on disk, they replace those in `directory`.

    The file named `last` is replaced last. After an error, the old files are unchanged.
    """
    is_new = not directory.exists()
    partial = directory / ".partial"
    delete(partial)  # left by a killed run
    partial.mkdir(parents=True)
    try:
        yield partial
        files = sorted(partial.iterdir(), key=lambda file: file.name == last)
        for file in files:
            to_disk(file)
        for file in files:
            os.replace(file, directory / file.name)
        to_disk(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new and not any(directory.iterdir()):
            directory.rmdir()


def to_disk(path: Path) -> None:
    """Fsync a file or a directory, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: an interrupted write leaves the old file unchanged."""
    with atomic(path) as temporary:
        # half a surrogate pair, as in some paths, is written as an escape
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.

    Use it to read tensors: in PyTorch's compiled code, Ctrl-C raises an error that looks like a
    damaged file.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # only the main thread is interrupted
        return
    noted: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: noted.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[0])


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file as bytes. Raises InputError for others: a read of a pipe may not end."""
    shown = f"{path!s:.300}"
    try:
        if Path(path).is_dir():
            raise InputError(f"{shown} is a directory, not a file.")
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{shown} is not a regular file.")
        return Path(path).open("rb")
    except FileNotFoundError as error:
        raise InputError(f"{shown} does not exist.") from error
    except (OSError, ValueError) as error:  # no permission, a bad name, a loop of links
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(f"{shown} can't be opened ({reason}).") from error


def read_bytes(path: str | Path, most: int = MAX_FILE) -> bytes:
    """Return all bytes of a regular file. Raises InputError for more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(f"{path} has more than {most:,} bytes, too many to read at once.")
    return data


def decode(data: bytes, where: str | Path, encoding: str = "utf-8") -> str:
    """Decode bytes to text; `where` is for the error message."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start}).") from error


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Return all text of a file."""
    return decode(read_bytes(path), path, encoding)


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, which may be a .gz, with their numbers from 1.

    Lines are bytes: text mode would also split them at a lone carriage return. Raises InputError
    for a line with more than MAX_LINE bytes, and for a damaged .gz.
    """
    path = Path(path)
    number = 0
    with open_regular(path) as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise InputError(f"{path}:{number}: the line has more than {MAX_LINE:,} bytes.")
                yield number, line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(f"{path}:{number + 1}: the gzip file is damaged ({error}).") from error


# ------------------------------------------------------------------------------------------ 2. JSON
def parse_json(
    data: bytes, where: str | Path, is_line: bool = False, encoding: str = "utf-8-sig"
) -> Any:
    """Parse a JSON value; is_line: `where` already names its line. Raises InputError."""
    text = decode(data, where, encoding)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = "" if is_line else f":{error.lineno}"
        what = f"{error.msg}, column {error.colno}"
        raise InputError(f"{where}{line}: malformed JSON ({what}).") from error
    except (RecursionError, ValueError) as error:  # nested too deep; too many digits
        raise InputError(f"{where}: the JSON can't be parsed ({error}).") from error


def to_json(value: Any, **layout: Any) -> str:
    """Return JSON that every parser reads: NaN and infinity, which JSON lacks, become null.

    layout: settings of `json.dumps`.
    """

    def finite(part: Any) -> Any:
        if isinstance(part, float):
            return part if math.isfinite(part) else None
        if isinstance(part, dict):
            return {name: finite(inner) for name, inner in part.items()}
        return [finite(inner) for inner in part] if isinstance(part, list | tuple) else part

    return json.dumps(finite(value), allow_nan=False, **layout)


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_bytes(path), path)


def read_object(path: str | Path) -> dict:
    """Return the object in a JSON file. Raises InputError for any other value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}.")
    return value


# --------------------------------------------------------------------------------------- 3. the Hub
def hub_directory(
    hub_id: str, patterns: list[str], repo_type: str = "model", revision: str | None = None
) -> Path:
    """Download the files of `hub_id` that match `patterns`, or find them in the cache."""
    try:
        directory = snapshot_download(
            hub_id, repo_type=repo_type, revision=revision, allow_patterns=patterns
        )
        return Path(directory)
    except HFValidationError as error:
        raise InputError(
            f"{hub_id}: no such file or directory, and not a Hub id (owner/name)."
        ) from error
    except (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise InputError(
            f"{hub_id}: no such file or directory, and downloading it as a {repo_type} from the "
            f"Hub failed ({reason})."
        ) from error
