"""A quick check to run after each edit: style, types, and the tests closest to the change, within a minute.

    make check
    python -m tools.check --since main --seconds 300

A changed file's own tests run first: tests/test_train_ppo.py for train_ppo.py, tests/kernels/test_gae.py for
kernels/gae.py. If they don't fit in the time, the quickest run and the others are listed. Then come other tests,
closest first: those that import a changed file, then those that import its importers; for a file that isn't Python,
the tests that mention its name. As many run as fit in the time, judging by their durations in the last run on this
machine. Tests marked slow run only in `make test-all`.
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
"""seconds per test file, written by tests/conftest.py; next to it the seconds per test function"""
START = 12.0
"""seconds for the type check and for workers to import PyTorch"""
UNKNOWN = 0.6
"""assumed seconds of a test function, with all parameters, that has not run on this machine"""


@dataclass(frozen=True, kw_only=True)
class Args:
    since: str = "HEAD"
    """commit or branch to compare the working tree with"""
    seconds: PositiveInt = 60
    """approximate time limit, seconds"""
    workers: PositiveInt = 2
    """number of test processes"""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"git {' '.join(arguments)}: {done.stderr.strip()}: --since must be a commit or branch.")
    return done.stdout.splitlines()


def changed_files(since: str) -> set[Path]:
    """Return changed, new and deleted files, relative to the root."""
    # a rename counts as a deletion and a new file
    names = git("diff", "--name-only", "--no-renames", since, "--") + git("ls-files", "--others", "--exclude-standard")
    return {Path(name) for name in names}


@cache
def python_files() -> frozenset[Path]:
    return frozenset(Path(name) for name in git("ls-files", "--cached", "--others", "--exclude-standard", "*.py"))


def module_files(module: str) -> set[Path]:
    path = Path(*module.split("."))
    return {path.with_suffix(".py"), path / "__init__.py"}


def imported(file: Path) -> set[Path]:
    """Return the files that a file's import statements may refer to, including imports inside functions."""
    files: set[Path] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            files = files.union(*(module_files(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module:
            files |= module_files(node.module)
            files = files.union(*(module_files(f"{node.module}.{alias.name}") for alias in node.names))
    return files


def distances(changed: Iterable[Path]) -> dict[Path, int]:
    """Map each affected test file to its number of imports away from a changed file; 0: changed itself."""
    importers: dict[Path, set[Path]] = {}
    for file in python_files():
        if (ROOT / file).exists():  # not deleted
            for target in imported(file):
                importers.setdefault(target, set()).add(file)
    reached = {file: 0 for file in changed}
    for file in [file for file in reached if file.suffix != ".py"]:
        reached |= {test: 1 for test in test_files() if file.name in (ROOT / test).read_text()}
    for file in [file for file in reached if file.name == "conftest.py"]:  # no test imports it
        reached |= {test: 1 for test in test_files() if test.is_relative_to(file.parent) and test not in reached}
    queue = list(reached)
    for file in queue:
        for importer in importers.get(file, ()):
            if importer not in reached:
                reached[importer] = reached[file] + 1
                queue.append(importer)
    return {file: distance for file, distance in reached.items() if file in test_files()}


def matching_tests(changed: Iterable[Path]) -> set[Path]:
    """Return the test files named after the changed files or their folders, such as tests/tools/test_docs.py for docs/.

    tests/x/test_y.py belongs to x/y.py and nanorlhf/x/y.py, tests/test_y.py to y.py and nanorlhf/y.py. Files outside
    the library, such as the Makefile, may have their tests in tests/tools.
    """
    tests = set()
    for file in changed:
        folders = [part for part in file.parts[:-1] if part != "nanorlhf"]
        for name in (file.stem.lower(), *folders):
            tests |= {Path("tests/tools", f"test_{name}.py"), Path("tests", f"test_{name}.py")}
        tests.add(Path("tests", *folders, f"test_{file.stem.lower()}.py"))
        if file.suffix == ".md":
            tests.add(Path("tests/tools/test_docs.py"))
    return tests & test_files()


@cache
def test_files() -> frozenset[Path]:
    tests = (file for file in python_files() if file.parts[0] == "tests" and file.name.startswith("test_"))
    return frozenset(file for file in tests if (ROOT / file).exists())


@cache
def known_seconds() -> dict[str, float]:
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def file_seconds(file: Path) -> float:
    return known_seconds().get(str(file), UNKNOWN * (ROOT / file).read_text().count("\ndef test_"))


def seconds_by_test(file: Path) -> dict[str, float]:
    """Return the node ids of a file's test functions and their seconds; unknown ones get a share of the file's time."""
    kept = SECONDS.with_name("seconds_of_tests")
    known = json.loads(kept.read_text()) if kept.exists() else {}
    tree = ast.parse((ROOT / file).read_text())
    names = [
        f"{file}::{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not any("slow" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return {name: known.get(name, file_seconds(file) / len(names)) for name in names}


def quickest(seconds_by_name: dict[str, float], seconds: float) -> list[str]:
    """Return the quickest tests that fit in the time together, at least one."""
    selected: list[str] = []
    for name in sorted(seconds_by_name, key=lambda name: seconds_by_name[name]):
        seconds -= seconds_by_name[name]
        if selected and seconds < 0:
            break
        selected.append(name)
    return selected


def select_required(files: Iterable[Path], seconds: float, workers: int) -> tuple[list[str], list[str], float]:
    """Divide the time between the files that must run: return what to run, what to skip, and the remaining seconds.

    A worker runs a whole file, so no file may take longer than one worker's share of the time.
    """
    selected: list[str] = []
    skipped: list[str] = []
    waiting = sorted(files, key=file_seconds)
    limit = seconds / workers
    while waiting:
        file, share = waiting.pop(0), min(limit, seconds / (1 + len(waiting)))
        if file_seconds(file) <= share:
            selected.append(str(file))
            seconds -= file_seconds(file)
            continue
        each = seconds_by_test(file)
        picked = quickest(each, share)
        selected += picked
        skipped += [name for name in each if name not in picked]
        seconds -= sum(each[name] for name in picked)
    return selected, skipped, seconds


def chosen(file_distances: dict[Path, int], seconds: float) -> list[Path]:
    """Return the closest files that fit, quicker ones first; a file that doesn't fit is skipped, later ones may fit."""
    selected = []
    for file in sorted(file_distances, key=lambda file: (file_distances[file], file_seconds(file))):
        if file_seconds(file) <= seconds:
            selected.append(file)
            seconds -= file_seconds(file)
    return selected


def main(args: Args) -> None:
    start = time.perf_counter()
    changed = changed_files(args.since)
    if not changed:
        print(f"no changes since {args.since}")
        return
    python = [file for file in changed if file.suffix == ".py" and (ROOT / file).exists()]
    narrow = [file.relative_to(ROOT) for file in narrow_files(ROOT) if file.relative_to(ROOT) in changed]
    near = distances(changed)
    required = matching_tests(changed) | {file for file, distance in near.items() if distance == 0}
    near |= dict.fromkeys(required, 0)
    tests, skipped, seconds = select_required(required, args.workers * max(0.0, args.seconds - START), args.workers)
    other_tests = chosen({file: distance for file, distance in near.items() if file not in required}, seconds)
    files = {name.split("::")[0] for name in tests} | {str(file) for file in other_tests}
    ruff = [sys.executable, "-m", "ruff"]
    hundred = ["--config", "line-length = 100", "--config", "format.exclude = []"]
    commands = {
        "ruff check": [*ruff, "check", "--quiet", *python] if python else [],
        # skip the files that pyproject.toml excludes; the next command formats them
        "ruff format": [*ruff, "format", "--check", "--quiet", "--force-exclude", *python] if python else [],
        "ruff format, 100 columns": [*ruff, "format", "--check", "--quiet", *hundred, *narrow] if narrow else [],
        "mypy": [sys.executable, "-m", "mypy"] if python else [],
    }
    running = {name: subprocess.Popen(command, cwd=ROOT) for name, command in commands.items() if command}
    failed = []
    if files:
        # -r: list failures; the last line counts the skipped tests
        pytest = [sys.executable, "-m", "pytest", "-rfE", "-m", "not slow and not gpu", *tests, *map(str, other_tests)]
        pytest += ["--numprocesses", str(args.workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        if subprocess.run(pytest, cwd=ROOT).returncode not in (0, 5):  # 5: all tests are marked slow
            failed.append("the tests")
    failed += [name for name, process in running.items() if process.wait()]
    print(
        f"{len(changed)} changed files affect {len(near)} test files; ran {len(files)} of them "
        f"in {time.perf_counter() - start:.0f} s. `make test-all` runs everything."
    )
    for file in sorted({name.split("::")[0] for name in skipped}):
        names = [name.split("::")[1] for name in skipped if name.startswith(f"{file}::")]
        print(f"not run, out of time: {len(names)} tests in {file}: {', '.join(names)}")
    if failed:  # last, because the tools' own messages may be far above
        print(f"failed: {'; '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    run_module(main, Args)
