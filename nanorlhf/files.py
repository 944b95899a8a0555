"""Read files that others made, local or from the Hub: regular, of bounded size, or refused.

All modules read through these functions, so each kind of bad file is refused in one place. The
bounds are far above real data; the comments name the largest real example that we know.
`atomic`, `atomic_files` and `write_text` write files of ours in one step.
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
WRITTEN = frozenset(  # suffixes of what programs write into --out; .tmp while they do
    (".csv", ".html", ".jinja", ".json", ".jsonl", ".md", ".png", ".safetensors", ".svg")
    + (".tmp", ".txt", ".xml")
)


# -------------------------------------------------------------------------------------- 1. any file
def check_out(directory: Path, flag: str = "--out") -> None:
    """Refuse a directory that can't be made or written in, before anything slow; leaves nothing.

    An entry in it that has the name of a file must be one, or a link, which writing replaces.
    """
    above = (directory, *directory.absolute().parents)
    parent = next(path for path in above if os.path.lexists(path))
    if not parent.exists():
        raise InputError(f"{flag} {directory}: {parent} is a symbolic link that leads nowhere.")
    if parent == directory and not parent.is_dir():
        raise InputError(f"{flag} {directory} is a file, not a directory.")
    try:  # os.access can't tell: root may write in /proc, which takes no directory
        TemporaryDirectory(dir=parent, prefix=".nanorlhf-").cleanup()
    except OSError as error:
        raise InputError(
            f"{flag} {directory}: {parent} is not a writable directory ({error.strerror})."
        ) from error
    for path in directory.iterdir() if parent == directory else ():
        if path.suffix in WRITTEN and not path.is_symlink() and not path.is_file():
            raise InputError(f"{flag} {directory}: {path} is not a regular file: move it away.")


def delete(path: Path) -> None:
    """Delete a file, a directory or a link, but not what a link leads to; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """Yield a new path beside `path`; the file that the block writes there then replaces `path`.

    After an error, or an interruption, the old file is as it was. A link, or a second name of the
    same file, is replaced too: what it leads to stays. Raises InputError for a device or a pipe,
    such as /dev/null, which a rename would turn into a file.

    suffix: of the new path; one of their own for processes that may write the same file at once
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file.")
    temporary = path.with_name(path.name + suffix)
    temporary.unlink(missing_ok=True)  # left by a kill; if it is a link, it must not be followed
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_files(directory: Path, last: str) -> Iterator[Path]:
    """Yield a new directory; its files then replace those of `directory`, once all are on disk.

    The file named `last` comes last. After an error the old files are as they were.
    """
    is_new = not directory.exists()
    partial = directory / ".partial"
    delete(partial)  # left by a kill
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
    """fsync a file or a directory, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write in one step: an interrupted write leaves no half of it, and the old file as it was."""
    with atomic(path) as temporary:
        # half a surrogate pair, in a path, is written as its number
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.

    For reads of tensors: where PyTorch's compiled code meets it, it becomes an error that looks
    like a damaged file's.
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
    """Open a regular file as bytes. Raises InputError for others: reading a pipe may never end."""
    shown = f"{path!s:.300}"
    try:
        if Path(path).is_dir():
            raise InputError(f"{shown} is a directory, not a file.")
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{shown} is not a regular file.")
        return Path(path).open("rb")
    except FileNotFoundError as error:
        raise InputError(f"{shown} does not exist.") from error
    except (OSError, ValueError) as error:  # no permission, a bad name, a circle of links
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InputError(f"{shown} can't be opened ({reason}).") from error


def read_bytes(path: str | Path, most: int = MAX_FILE) -> bytes:
    """All bytes of a regular file. Raises InputError for more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(f"{path} has more than {most:,} bytes, too many to read at once.")
    return data


def decode(data: bytes, where: str | Path, encoding: str = "utf-8") -> str:
    """Bytes as text; `where` is for the error message."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start}).") from error


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """All text of a file."""
    return decode(read_bytes(path), path, encoding)


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, which may be a .gz, with their numbers from 1.

    As bytes: text mode would also split lines at a lone carriage return. Raises InputError for a
    line of more than MAX_LINE bytes, and for a damaged .gz.
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
        raise InputError(f"{where}: JSON that can't be read ({error}).") from error


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
    """The value in a JSON file."""
    return parse_json(read_bytes(path), path)


def read_object(path: str | Path) -> dict:
    """The object in a JSON file. Raises InputError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object but {type(value).__name__}.")
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
            f"{hub_id}: no such file or directory, and not a Hub id (owner/name) either."
        ) from error
    except (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise InputError(
            f"{hub_id}: no such file or directory, and downloading it as a {repo_type} from the "
            f"Hub failed ({reason})."
        ) from error
