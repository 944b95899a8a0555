"""What a person runs after each edit: style, types, and the tests nearest to what was changed, within a minute.

    make check
    python -m tools.check --since main --seconds 300

Its own tests come first: those of train_ppo.py are tests/test_train_ppo.py, those of kernels/gae.py
tests/kernels/test_gae.py. Where they take longer than there is time, the quickest of them run, and the others are
listed. After them a changed file concerns the tests that import it, and less those that import what imports it; a file
that is not Python concerns the tests whose text names it. The nearest come first, as many as the time is enough for, by
the seconds that each took in the last run here. Tests marked slow are left to `make test-all`.
"""

import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nanorlhf.cli import PositiveInt, run_module
from nanorlhf.errors import InputError
from tools.house import narrow_files

ROOT = Path(__file__).resolve().parent.parent
SECONDS = ROOT / ".pytest_cache/v/seconds"
"""seconds per test file, which tests/conftest.py keeps; beside it those per test function"""
START = 12.0
"""seconds of types, and of workers that import PyTorch"""
UNKNOWN = 0.6
"""seconds of a test, with all its parameters, that has not been run here"""


@dataclass(frozen=True, kw_only=True)
class Args:
    since: str = "HEAD"
    """commit or branch that the working tree is compared with"""
    seconds: PositiveInt = 60
    """how long it may take, about"""
    workers: PositiveInt = 2
    """processes that run tests"""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"git {' '.join(arguments)}: {done.stderr.strip()}: name a commit with --since.")
    return done.stdout.splitlines()


def changed_files(since: str) -> set[Path]:
    """Changed, new and deleted files, relative to the tree."""
    # a renamed file is one that was deleted and a new one
    names = git("diff", "--name-only", "--no-renames", since, "--") + git("ls-files", "--others", "--exclude-standard")
    return {Path(name) for name in names}


@cache
def python_files() -> frozenset[Path]:
    return frozenset(Path(name) for name in git("ls-files", "--cached", "--others", "--exclude-standard", "*.py"))


def files_of(module: str) -> set[Path]:
    path = Path(*module.split("."))
    return {path.with_suffix(".py"), path / "__init__.py"}


def imported(file: Path) -> set[Path]:
    """The files that a file's import statements may name, within functions too."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            found = found.union(*(files_of(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= files_of(node.module)
            found = found.union(*(files_of(f"{node.module}.{alias.name}") for alias in node.names))
    return found


def distances(changed: Iterable[Path]) -> dict[Path, int]:
    """Test file -> how many imports lie between it and what was changed; 0: it was changed itself."""
    importers: dict[Path, set[Path]] = {}
    for file in python_files():
        if (ROOT / file).exists():  # not deleted
            for found in imported(file):
                importers.setdefault(found, set()).add(file)
    reached = {file: 0 for file in changed}
    for file in [file for file in reached if file.suffix != ".py"]:
        reached |= {test: 1 for test in test_files() if file.name in (ROOT / test).read_text()}
    for file in [file for file in reached if file.name == "conftest.py"]:  # which no test imports
        reached |= {test: 1 for test in test_files() if test.is_relative_to(file.parent) and test not in reached}
    queue = list(reached)
    for file in queue:
        for importer in importers.get(file, ()):
            if importer not in reached:
                reached[importer] = reached[file] + 1
                queue.append(importer)
    return {file: distance for file, distance in reached.items() if file in test_files()}


def own_tests(changed: Iterable[Path]) -> set[Path]:
    """The test files named like the changed files, or like the folder that they are in: tests/tools/test_docs.py.

    tests/x/test_y.py for x/y.py and nanorlhf/x/y.py, and tests/test_y.py for y.py and nanorlhf/y.py; what is no part of
    the library, such as the Makefile, may have its tests in tests/tools.
    """
    found = set()
    for file in changed:
        folders = [part for part in file.parts[:-1] if part != "nanorlhf"]
        for name in (file.stem.lower(), *folders):
            found |= {Path("tests/tools", f"test_{name}.py"), Path("tests", f"test_{name}.py")}
        found.add(Path("tests", *folders, f"test_{file.stem.lower()}.py"))
        if file.suffix == ".md":
            found.add(Path("tests/tools/test_docs.py"))
    return found & test_files()


@cache
def test_files() -> frozenset[Path]:
    tests = (file for file in python_files() if file.parts[0] == "tests" and file.name.startswith("test_"))
    return frozenset(file for file in tests if (ROOT / file).exists())


@cache
def known_seconds() -> dict[str, float]:
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def seconds_of(file: Path) -> float:
    return known_seconds().get(str(file), UNKNOWN * (ROOT / file).read_text().count("\ndef test_"))


def functions_of(file: Path) -> dict[str, float]:
    """The test functions of a file, as pytest names them, and the seconds of each; of one that has not run, a share."""
    kept = SECONDS.with_name("seconds_of_tests")
    known = json.loads(kept.read_text()) if kept.exists() else {}
    tree = ast.parse((ROOT / file).read_text())
    names = [
        f"{file}::{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not any("slow" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return {name: known.get(name, seconds_of(file) / len(names)) for name in names}


def quickest(seconds_of_each: dict[str, float], seconds: float) -> list[str]:
    """The quickest tests that fit in the time together, at least one."""
    found: list[str] = []
    for name in sorted(seconds_of_each, key=lambda name: seconds_of_each[name]):
        seconds -= seconds_of_each[name]
        if found and seconds < 0:
            break
        found.append(name)
    return found


def own_first(files: Iterable[Path], seconds: float, workers: int) -> tuple[list[str], list[str], float]:
    """What to run of the files that must run, what of them is left out, and the seconds that remain.

    A worker runs the whole of a file, so none may take longer than one of them has. They share the time.
    """
    found: list[str] = []
    left: list[str] = []
    waiting = sorted(files, key=seconds_of)
    limit = seconds / workers
    while waiting:
        file, share = waiting.pop(0), min(limit, seconds / (1 + len(waiting)))
        if seconds_of(file) <= share:
            found.append(str(file))
            seconds -= seconds_of(file)
            continue
        each = functions_of(file)
        picked = quickest(each, share)
        found += picked
        left += [name for name in each if name not in picked]
        seconds -= sum(each[name] for name in picked)
    return found, left, seconds


def chosen(distance_of: dict[Path, int], seconds: float) -> list[Path]:
    """The nearest files that fit, the quicker of two first; what does not fit is left out, not what follows it."""
    found = []
    for file in sorted(distance_of, key=lambda file: (distance_of[file], seconds_of(file))):
        if seconds_of(file) <= seconds:
            found.append(file)
            seconds -= seconds_of(file)
    return found


def main(args: Args) -> None:
    start = time.perf_counter()
    changed = changed_files(args.since)
    if not changed:
        print(f"nothing has changed since {args.since}")
        return
    python = [file for file in changed if file.suffix == ".py" and (ROOT / file).exists()]
    narrow = [file.relative_to(ROOT) for file in narrow_files(ROOT) if file.relative_to(ROOT) in changed]
    near = distances(changed)
    own = own_tests(changed) | {file for file, distance in near.items() if distance == 0}
    near |= dict.fromkeys(own, 0)
    tests, left, seconds = own_first(own, args.workers * max(0.0, args.seconds - START), args.workers)
    others = chosen({file: distance for file, distance in near.items() if file not in own}, seconds)
    files = {name.split("::")[0] for name in tests} | {str(file) for file in others}
    ruff = [sys.executable, "-m", "ruff"]
    hundred = ["--config", "line-length = 100", "--config", "format.exclude = []"]
    commands = {
        "ruff check": [*ruff, "check", "--quiet", *python] if python else [],
        # those that pyproject.toml leaves to the next command are left to it here too
        "ruff format": [*ruff, "format", "--check", "--quiet", "--force-exclude", *python] if python else [],
        "ruff format, 100 columns": [*ruff, "format", "--check", "--quiet", *hundred, *narrow] if narrow else [],
        "mypy": [sys.executable, "-m", "mypy"] if python else [],
    }
    running = {name: subprocess.Popen(command, cwd=ROOT) for name, command in commands.items() if command}
    failed = []
    if files:
        # -r: what failed; how many were skipped says the last line
        pytest = [sys.executable, "-m", "pytest", "-rfE", "-m", "not slow and not gpu", *tests, *map(str, others)]
        pytest += ["--numprocesses", str(args.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        if subprocess.run(pytest, cwd=ROOT).returncode not in (0, 5):  # 5: all of them are slow
            failed.append("the tests")
    failed += [name for name, process in running.items() if process.wait()]
    print(
        f"{len(changed)} changed files, {len(near)} test files that they concern, {len(files)} of them run, "
        f"in {time.perf_counter() - start:.0f} s. `make test-all` runs everything."
    )
    for file in sorted({name.split("::")[0] for name in left}):
        names = [name.split("::")[1] for name in left if name.startswith(f"{file}::")]
        print(f"for want of time {len(names)} tests of {file} did not run: {', '.join(names)}")
    if failed:  # said last: the tools' own words may stand far above
        print(f"failed: {'; '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    run_module(main, Args)
