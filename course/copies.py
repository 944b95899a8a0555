"""Copies of the repository: a student works in one, the grader runs the tests in another."""

import base64
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

from course.edit import find_function, rewritten
from nanorlhf.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
# what students write and is graded
CODE = (
    *("data", "kernels", "nanorlhf", "eval.py", "nano.py"),
    *("train_dpo.py", "train_grpo.py", "train_ppo.py", "train_rlcf.py", "train_rm.py", "train_sft.py"),
)
OTHERS = (
    ".binder",
    ".ci",
    ".github",
    ".devcontainer",
    "bench",
    "course",
    "docs",
    "experiments",
    "pipelines",
    "tests",
    "tools",
    ".dockerignore",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "MANIFEST.in",
    "pyproject.toml",
    "setup.py",
)
# files that give solutions away
ANSWERS = ("course/exam-answers.md", "tools/mutants", "tests/tools/mutants")
MARK = ".course"  # file in a copy that records how it was made
LARGEST = 2**19  # bytes of a submission's file; our largest has a tenth of that


def list_files(root: Path, names: Iterable[str] = CODE + OTHERS) -> list[Path]:
    """List the repository's files under these names, relative to its root; in a git checkout only tracked files."""
    names = [name for name in names if (root / name).exists()]
    if (root / ".git").exists():
        listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--", *names], capture_output=True, text=True)
        if listed.returncode == 0:
            paths = (Path(name) for name in listed.stdout.split("\0") if name)
            return [path for path in paths if (root / path).is_file()]
    candidates = [
        path for name in names for path in ([root / name] if (root / name).is_file() else (root / name).rglob("*"))
    ]
    relative = (path.relative_to(root) for path in candidates if path.is_file())
    return [path for path in relative if "__pycache__" not in path.parts]


def copy_files(source: Path, target: Path, names: Iterable[str] = CODE + OTHERS, without: Iterable[str] = ()) -> None:
    for path in list_files(source, names):
        if any(path.is_relative_to(name) for name in without):
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)


def check_new(directory: Path, flag: str = "") -> None:
    """Raise InputError if the directory to write to exists and isn't empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{flag}{directory} is not empty: choose a new directory.")


def new_directory(directory: Path) -> None:
    """Make a directory for a copy. Raises InputError if it isn't empty, or if this repository is a student's copy."""
    check_new(directory)
    if (ROOT / MARK).exists():
        raise InputError(f"{ROOT} is a student's copy: run the course from the original repository.")
    directory.mkdir(parents=True, exist_ok=True)


def check_copy(directory: Path) -> None:
    """Raise InputError if the directory isn't a copy of the repository."""
    missing = [name for name in CODE if not (directory / name).exists()]
    if missing:
        raise InputError(f"{directory} has no {missing[0]}: expected a directory made by `python -m course start`.")


def write_mark(directory: Path, content: dict) -> None:
    """Write the mark in base64, so that a look at the directory doesn't give a planted bug away."""
    (directory / MARK).write_bytes(base64.b64encode(json.dumps(content).encode()) + b"\n")


def read_untrusted(directory: Path, path: Path | str) -> bytes:
    """Read a file of a submission. Raises InputError unless it is a regular file, without links on the way to it."""
    *parents, name = Path(path).parts
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for parent in parents:
            inside = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inside
        # opening a pipe without a writer would block
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(file, "rb") as stream:
            regular, data = stat.S_ISREG(os.fstat(file).st_mode), b""
            if regular:
                data = stream.read(LARGEST + 1)
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except OSError:
        regular = False
    finally:
        os.close(folder)
    if not regular:
        raise InputError(f"{path} must be a regular file, not a link or a device")
    if len(data) > LARGEST:
        raise InputError(f"{path} is larger than {LARGEST} bytes")
    return data


def read_mark(directory: Path) -> dict:
    """Return what `write_mark` wrote, or {} without a mark. Raises InputError if it can't be read."""
    if not os.path.lexists(directory / MARK):
        return {}
    try:
        content = json.loads(base64.b64decode(read_untrusted(directory, MARK).strip(), validate=True))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{directory / MARK} can't be read: make the copy again.") from error
    if not isinstance(content, dict):
        raise InputError(f"{directory / MARK} can't be read: make the copy again.")
    return content


def path_and_name(function: str) -> tuple[Path, str]:
    """`nanorlhf.ppo:whiten` -> (nanorlhf/ppo.py, "whiten")"""
    module, _, name = function.partition(":")
    return Path(*module.split(".")).with_suffix(".py"), name


def source_path(function: str) -> Path:
    """Return the file of `module:name`, or of a module."""
    return path_and_name(function)[0]


def take_out(directory: Path, function: str, body: list[str]) -> None:
    """Empty the function `module:name` in the copy. Raises InputError if it doesn't exist."""
    file, name = path_and_name(function)
    path = directory / file
    try:
        source = path.read_text(encoding="utf-8")
        find_function(source, name)
    except (OSError, LookupError, SyntaxError) as error:
        raise InputError(f"{path} has no function {name}: make the copy again.") from error
    path.write_text(rewritten(source, {name: body}), encoding="utf-8")
