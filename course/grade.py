"""Which exercises are solved: the project's own tests, run on the student's code."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from course.copies import CODE, ROOT, check_copy, copy_files, read_mark
from course.exercises import EXERCISES, Exercise, chosen

# what judges the code: the grader's, not the student's
JUDGES = ("tests", "Makefile", "pyproject.toml")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # tiny tensors lose by a second thread
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",  # a grade is the same with and without a GPU
    "TRITON_INTERPRET": "1",
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
    """A process that runs tests in forks of its own; see `worker.py`. Use it as a context."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "course.worker"],
            cwd=ROOT, env=environment | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the worker
        )  # fmt: skip

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, root: Path, tests: Sequence[str], limit: float) -> Outcome:
        """Whether all these tests of the tree `root` pass within `limit` seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"root": str(root), "tests": list(tests), "limit": limit}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return outcome(json.loads(self.process.stdout.readline()))

    def judge(self, root: Path, tests: Sequence[str], mutants: Sequence[dict], limit: float) -> Iterator[Outcome]:
        """What these tests say of the tree as it is, then of it with each of the mutants; see `nest.py`.

        Ends after the first outcome if the tests don't pass; has nothing but that if they can't be imported.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"root": str(root), "tests": list(tests), "limit": limit, "mutants": list(mutants)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        judged = False
        for line in self.process.stdout:
            answer = json.loads(line)
            last = answer.pop("last", False)
            if not (last and judged):
                yield outcome(answer)
            if last:
                return
            judged = True


def outcome(answer: dict) -> Outcome:
    claim = reason = ""
    if answer["failed"]:
        test, reason = answer["failed"][0]
        claim = in_words(test)
    elif not answer["ended"]:
        claim, reason = "the tests come to their end", "the code under test has ended the process"
    elif not answer["passed"]:
        claim, reason = "the tests run", answer["skipped"][0][1] if answer["skipped"] else "they were not found"
    return Outcome(not claim, claim, reason, answer["seconds"])


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
def tree_of(directory: Path, own_tests: bool = False) -> Iterator[Path]:
    """A temporary tree with the code of `directory` and the tests of this repository; own_tests: with its own."""
    check_copy(directory)
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as name:
        tree = Path(name).resolve()
        copy_files(directory, tree, CODE)
        copy_files(directory if own_tests else ROOT, tree, JUDGES)
        yield tree


def grade(
    directory: Path,
    exercises: Sequence[Exercise],
    limit: float,
    workers: Sequence[Worker],
    own_tests: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """The outcome of each exercise, by name; each runs in a process of its own, one per worker at once.

    A process that takes longer than `limit` seconds costs its exercise and no other. tell is called after each.
    """
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    with tree_of(directory, own_tests) as tree:

        def judge(exercise: Exercise) -> Outcome:
            worker = idle.get()
            try:
                return worker.run(tree, exercise.tests, limit)
            finally:
                idle.put(worker)
                tell()

        with ThreadPoolExecutor(len(workers)) as pool:
            outcomes = list(pool.map(judge, exercises))
    return {exercise.name: result for exercise, result in zip(exercises, outcomes, strict=True)}


def given(directory: Path) -> list[Exercise]:
    """The exercises of a student's copy: those that `start` has emptied; all, where it was made otherwise."""
    names = read_mark(directory).get("exercises")
    return chosen(names) if names else list(EXERCISES)


def first_open(directory: Path, limit: float, worker: Worker) -> tuple[Exercise, Outcome] | None:
    """The first exercise that is not solved and whose needs are, and why it is not; None where all are solved."""
    solved: set[str] = set()
    exercises = given(directory)
    names = {exercise.name for exercise in exercises}
    with tree_of(directory) as tree:
        for exercise in exercises:
            if set(exercise.needs) & names <= solved:
                result = worker.run(tree, exercise.tests, limit)
                if not result.passed:
                    return exercise, result
                solved.add(exercise.name)
    return None
