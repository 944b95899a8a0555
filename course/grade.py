"""Which exercises are solved: the project's own tests, run on the student's code."""

import compileall
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from course.copies import CODE, ROOT, check_copy, copy_files, read_mark, write_mark
from course.exercises import EXERCISES, Exercise, chosen
from course.submission import Refused, arranged
from course.worker import DECOY, write
from nanorlhf.errors import InputError

# what judges the code: the grader's, not the student's
JUDGES = ("tests", "Makefile", "pyproject.toml")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # tiny tensors lose by a second thread
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",  # a grade is the same with and without a GPU
    "TRITON_INTERPRET": "1",
    "NANORLHF_REAL_DATA": "none",  # nor with and without real data
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Outcome:
    """What the tests of one exercise, or of one bug, have shown."""

    passed: bool
    claim: str  # the first that failed, in words; empty where all hold
    reason: str  # its error in one line
    seconds: float


class Worker:
    """A process that runs tests in forks of its own; see `worker.py`, the module that it runs. Use it as a context.

    Raises InputError where the libraries of the tests are missing: every submission would fail.
    """

    def __init__(self, module: str = "course.worker") -> None:
        missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError(f"The tests need {' and '.join(missing)}: install them with `pip install -e '.[test]'`.")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT, env=environment | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the worker
        )  # fmt: skip

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, root: Path, tests: Sequence[str], limit: float, guarded: bool = False) -> Outcome:
        """Whether all these tests of the tree `root` pass within `limit` seconds.

        guarded: the code under test is a stranger's; see `worker.py`.
        """
        answer = next(self.answers(root=str(root), tests=list(tests), limit=limit, guarded=guarded))
        return guarded_outcome(answer, tests) if guarded else outcome(answer)

    def answers(self, **request: object) -> Iterator[dict]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return map(json.loads, self.process.stdout)


def outcome(answer: dict) -> Outcome:
    claim = reason = ""
    if answer["failed"]:
        test, reason = answer["failed"][0]
        claim = in_words(test)
    elif not answer["ended"]:
        claim, reason = "the tests come to their end", "the code under test has ended the process"
    elif not answer["passed"]:
        claim, reason = "the tests run", answer["skipped"][0][1] if answer["skipped"] else "they were not found"
    printable = "".join(letter if letter.isprintable() else " " for letter in reason)  # a stranger's: no control codes
    return Outcome(not claim, claim, printable, answer["seconds"])


def guarded_outcome(answer: dict, tests: Sequence[str]) -> Outcome:
    """Only what is said of every test counts: one that was left out, or skipped by the code under test, has failed."""
    result = outcome(answer)
    if answer["failed"] or not answer["ended"]:
        return result
    done = {*answer["passed"], *(test for test, _ in answer["skipped"])}  # skipped by a fixture: no data, no GPU
    said = done.union(answer["decoys"])
    silent = [test for test in answer["collected"] if test not in said]
    decoys = [test for test in silent if test.startswith(DECOY)]
    if decoys and silent == decoys:
        reason = "the code under test has changed the tools of the tests"
        return Outcome(False, "a test that must fail fails", reason, result.seconds)
    silent += [test for test in tests if not any(name == test or name.startswith(f"{test}[") for name in done)]
    if answer["collected"] and silent:
        return Outcome(False, in_words(silent[0]), "the code under test has kept it from running", result.seconds)
    return result


def in_words(test: str) -> str:
    """The claim of a test is its name.

    >>> in_words("tests/test_ppo.py::test_masked_mean_ignores_nan[3]")
    'masked mean ignores nan [3]'
    """
    file, _, name = test.partition("::")
    if not name:
        return f"{file} can be imported"
    name, bracket, values = name.partition("[")
    return name.removeprefix("test_").replace("_", " ") + f" {bracket}{values}".rstrip()


@contextmanager
def tree_of(directory: Path) -> Iterator[Path]:
    """A temporary tree with the code of `directory` and the tests of this repository."""
    check_copy(directory)
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as name:
        tree = Path(name).resolve()
        copy_files(directory, tree, CODE)
        copy_files(ROOT, tree, JUDGES)
        yield tree


class Desk:
    """A worker and its tree: this repository's code and tests, in which an exercise's functions are a student's."""

    def __init__(self, worker: Worker, tree: Path):
        self.worker, self.tree = worker, tree
        self.written: dict[Path, str] = {}

    def judge(self, directory: Path, exercise: Exercise, limit: float) -> Outcome:
        try:
            files = arranged(directory, exercise)
        except Refused as refused:
            return Outcome(False, "the function can be graded", str(refused), 0.0)
        for path, source in files.items():
            if self.written.get(path) != source:
                write(self.tree / path, source)
                self.written[path] = source
        return self.worker.run(self.tree, exercise.tests, limit, guarded=True)


@contextmanager
def desks(number: int) -> Iterator[list[Desk]]:
    """Workers, each with a tree of its own, in which the code is compiled already: what they run can't write to it."""
    with tree_of(ROOT) as tree, ExitStack() as stack:
        workers = [stack.enter_context(Worker()) for _ in range(number)]  # they import while this compiles
        for name in CODE:
            is_script = name.endswith(".py")
            (compileall.compile_file if is_script else compileall.compile_dir)(tree / name, quiet=2)
        trees = [tree]
        for _ in workers[1:]:
            other = stack.enter_context(tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True))
            trees.append(Path(shutil.copytree(tree, Path(other).resolve() / "tree")))
        yield [Desk(worker, tree) for worker, tree in zip(workers, trees, strict=True)]


def grade(
    directory: Path,
    exercises: Sequence[Exercise],
    limit: float,
    desks: Sequence[Desk],
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """The outcome of each exercise, by name; each runs in a process of its own, one per desk at once.

    A process that takes longer than `limit` seconds costs its exercise and no other. tell is called after each.
    """
    check_copy(directory)
    idle: SimpleQueue[Desk] = SimpleQueue()
    for desk in desks:
        idle.put(desk)

    def judge(exercise: Exercise) -> Outcome:
        desk = idle.get()
        try:
            return desk.judge(directory, exercise, limit)
        finally:
            idle.put(desk)
            tell()

    with ThreadPoolExecutor(len(desks)) as pool:
        outcomes = list(pool.map(judge, exercises))
    return {exercise.name: result for exercise, result in zip(exercises, outcomes, strict=True)}


def given(directory: Path) -> list[Exercise]:
    """The exercises of a student's copy: those that `start` has emptied; all, where it was made otherwise."""
    names = read_mark(directory).get("exercises")
    return chosen(names) if names else list(EXERCISES)


def first_open(directory: Path, limit: float, desk: Desk) -> tuple[Exercise, Outcome] | None:
    """The first exercise that is not solved and whose needs are, and why it is not; None where all are solved.

    The mark of a copy remembers what has passed, so that only what has changed since is judged again.
    """
    solved: set[str] = set()
    mark = read_mark(directory)
    passed = mark.setdefault("passed", {})  # exercise -> digest of its files
    exercises = given(directory)
    names = {exercise.name for exercise in exercises}
    for exercise in exercises:
        if set(exercise.needs) & names <= solved:
            digest = digest_of(directory, exercise)
            if digest is None or passed.get(exercise.name) != digest:
                result = desk.judge(directory, exercise, limit)
                if not result.passed:
                    return exercise, result
                passed[exercise.name] = digest
                if "exercises" in mark:
                    write_mark(directory, mark)
            solved.add(exercise.name)
    return None


def digest_of(directory: Path, exercise: Exercise) -> str | None:
    """Of what is judged of an exercise; None where it can't be judged."""
    with suppress(Refused):
        return hashlib.sha256(repr(sorted(arranged(directory, exercise).items())).encode()).hexdigest()
    return None
