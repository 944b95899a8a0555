"""Runs tests in forked processes: one request a line on stdin, one answer a line on stdout. `grade.py` starts it.

    {"root": directory, "tests": [pytest node ids], "limit": seconds}
    -> {"passed": [node ids], "failed": [[node id, why]], "skipped": [[node id, why]], "seconds": float, "late": bool,
        "ended": bool}

PyTorch and the rest of what tests import are imported once, here, and never a module of the project: each fork imports
those of its own `root`. `late`: it was stopped at the limit, within the test that `failed` names. `ended`: pytest came
to its end; without it, the code under test has ended the process.

A request with "mutants" gets several answers, as `nest.py` says, and one more, with "last", when there are no others.
"""

import gc
import importlib
import json
import os
import sys
from contextlib import suppress
from typing import Any

from course.forks import be_a_fork, outcome_of
from course.nest import Nest

# third-party imports that take time; one that is missing is the tests' business
SLOW = (
    *("torch", "torch.utils.checkpoint", "torch.utils.tensorboard", "triton", "numpy", "pytest", "hypothesis", "tyro"),
    *("scipy.stats", "scipy.spatial.distance", "tokenizers", "safetensors.torch", "matplotlib.figure", "jinja2", "bs4"),
    *(
        "huggingface_hub._snapshot_download",
        "networkx",
        "rouge_score.rouge_scorer",
        "sacrebleu.metrics",
        "tqdm",
        "yaml",
    ),
)
WHY = 300  # characters


class Reporter:
    """A plugin that writes what pytest finds to a pipe, line by line: a process that is stopped has said so far."""

    def __init__(self, pipe: int):
        self.pipe = pipe

    def say(self, *words: str) -> None:
        os.write(self.pipe, (json.dumps(words) + "\n").encode())

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.say("started", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.say("failed", report.nodeid, first_line(report))
        elif report.skipped:
            self.say("skipped", report.nodeid, str(report.longrepr[2])[:WHY])
        elif report.when == "call":
            self.say("passed", report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say("failed", report.nodeid, first_line(report))


def first_line(report: Any) -> str:
    """The error in one line; of an import that failed, the last line of what pytest prints."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).splitlines()[0][:WHY] if str(crash.message) else ""
    lines = [line.removeprefix("E   ").strip() for line in str(report.longrepr).splitlines() if line.strip()]
    return lines[-1][:WHY] if lines else ""


def run_tests(root: str, tests: list[str], pipe: int, mutants: list[dict] | None, limit: float) -> None:
    """In a fork: pytest on the tests of `root`, which stops at the first that fails. Does not return."""
    be_a_fork()
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.chdir(root)
    sys.path[0] = root
    main: Any = sys.modules["__main__"]
    main.__spec__ = None  # so that processes which tests start don't look for this module in `root`
    reporter = Reporter(pipe)
    plugins: list[Any] = [reporter]
    if mutants is not None:
        os.environ["HYPOTHESIS_PROFILE"] = "unshrunk"
        plugins.append(Nest(root, mutants, limit, answers, reporter))
    import pytest

    settings = ["-x", "-p", "no:cacheprovider", "--rootdir", root, "-c", f"{root}/pyproject.toml"]
    code = pytest.main([*settings, "--basetemp", f"{root}/.basetemp", *tests], plugins=plugins)
    reporter.say("ended", str(int(code)))
    os._exit(0)


def answer(root: str, tests: list[str], limit: float, mutants: list[dict] | None = None) -> dict:
    """Fork, and wait for the fork: for at most `limit` seconds, or for as long as all mutants take."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run_tests(root, tests, writer, mutants, limit)
        finally:
            os._exit(1)
    os.close(writer)
    if mutants is None:
        return outcome_of(child, reader, limit)
    return outcome_of(child, reader, None) | {"last": True}


def main() -> None:
    for name in SLOW:
        with suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # a collection in a fork would copy all pages
    for line in sys.stdin:
        request = json.loads(line)
        try:
            print(json.dumps(answer(**request)), flush=True)
        except BrokenPipeError:  # who asked is gone
            os._exit(1)


if __name__ == "__main__":
    main()
