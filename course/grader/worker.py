"""Run tests in another process and summarize the result."""

import importlib.util
import json
import os
import site
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from course.copies import ROOT
from nanorlhf.errors import InputError

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # with tiny tensors, a second thread is slower
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",  # the same grade with and without a GPU
    "TRITON_INTERPRET": "1",
    "NANORLHF_REAL_DATA": "none",  # and with and without real data
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Outcome:
    """The result of the tests of one exercise or one bug."""

    passed: bool
    claim: str  # name of the first failing test, in words; empty if all pass
    reason: str  # its error in one line
    seconds: float
    gradable: bool = True  # False: a test was skipped, for example because a package is missing


class Worker:
    """A process that forks to run tests; see `worker_main.py`. Use it as a context manager.

    Raises InputError if the libraries that the tests need are missing, because every submission would fail, or if the
    repository is installed among Python's packages.
    """

    def __init__(self, module: str = "course.grader.worker_main") -> None:
        missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError(f"The tests need {' and '.join(missing)}: run `pip install -e '.[course]'`.")
        for packages in site.getsitepackages():  # a student's process reads them
            if (Path(packages) / "nanorlhf").is_dir():
                raise InputError(f"{packages} contains the solutions: install the repository with `pip install -e .`.")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT, env=environment | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C reaches only this process, which then kills the worker
        )  # fmt: skip

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, root: Path, tests: Sequence[str], limit: float, student: Path | None = None) -> Outcome:
        """Run these tests of the tree `root`; they must pass within `limit` seconds.

        student: a tree with untrusted code that the tests call; see `worker_main.py`.
        """
        code = None if student is None else str(student)
        return outcome(next(self.answers(root=str(root), tests=list(tests), limit=limit, student=code)))

    def answers(self, **request: object) -> Iterator[dict]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return map(json.loads, self.process.stdout)


def outcome(answer: dict) -> Outcome:
    claim = reason = ""
    gradable = True
    if answer["failed"]:
        test, reason = answer["failed"][0]
        claim = in_words(test)
    elif not answer["ended"]:
        claim, reason = "the tests finish", "the code under test has ended the process"
    elif answer["skipped"]:
        claim, reason, gradable = "not gradable here", answer["skipped"][0][1], False
    elif not answer["passed"]:
        claim, reason = "the tests run", "they were not found"
    printable = "".join(letter if letter.isprintable() else " " for letter in reason)  # untrusted: no control codes
    return Outcome(not claim, claim, printable, answer["seconds"], gradable)


def in_words(test: str) -> str:
    """Turn the name of a test into words.

    >>> in_words("tests/test_ppo.py::test_masked_mean_ignores_nan[3]")
    'masked mean ignores nan [3]'
    """
    file, _, name = test.partition("::")
    if not name:
        return f"{file} can be imported"
    name, bracket, values = name.partition("[")
    return name.removeprefix("test_").replace("_", " ") + f" {bracket}{values}".rstrip()
