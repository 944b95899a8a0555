"""Runs tests in forked processes: one request a line on stdin, one answer a line on stdout. `grade.py` starts it.

    {"root": directory, "tests": [pytest node ids], "limit": seconds}
    -> {"passed": [node ids], "failed": [[node id, why]], "skipped": [[node id, why]], "seconds": float, "late": bool,
        "ended": bool}

PyTorch and the rest of what tests import are imported once, here, and never a module of the project: each fork imports
those of its own `root`. `late`: it was stopped at the limit, within the test that `failed` names. `ended`: pytest came
to its end; without it, the code under test has ended the process.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

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


def run_tests(root: str, tests: list[str], pipe: int) -> None:
    """In a fork: pytest on the tests of `root`, which stops at the first that fails. Does not return."""
    os.setpgid(0, 0)
    if sys.platform == "linux":  # an endless loop must not outlive this worker
        PR_SET_PDEATHSIG = 1  # prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.chdir(root)
    sys.path[0] = root
    main: Any = sys.modules["__main__"]
    main.__spec__ = None  # so that processes which tests start don't look for this module in `root`
    reporter = Reporter(pipe)
    import pytest

    settings = ["-x", "-p", "no:cacheprovider", "--rootdir", root, "-c", f"{root}/pyproject.toml"]
    code = pytest.main([*settings, "--basetemp", f"{root}/.basetemp", *tests], plugins=[reporter])
    reporter.say("ended", str(int(code)))
    os._exit(0)


def answer(root: str, tests: list[str], limit: float) -> dict:
    """Fork, and wait for the fork for at most `limit` seconds."""
    began = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run_tests(root, tests, writer)
        finally:
            os._exit(1)
    os.close(writer)
    data, late = b"", False
    while True:
        left = began + limit - time.monotonic()
        late = not select.select([reader], [], [], max(left, 0.0))[0]
        chunk = b"" if late else os.read(reader, 65536)
        if not chunk:
            break
        data += chunk
        if data.endswith(b'"]\n') and data.splitlines()[-1].startswith(b'["ended"'):
            break  # not the pipe's end: a process that a test has left behind may hold it
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    said = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    started = [words[1] for words in said if words[0] == "started"]
    result: dict = {kind: [words[1:] for words in said if words[0] == kind] for kind in ("failed", "skipped")}
    result["passed"] = [words[1] for words in said if words[0] == "passed"]
    result["ended"] = any(words[0] == "ended" for words in said)
    if late:
        result["failed"].append([started[-1] if started else tests[0], f"no end after {limit:g} s"])
    return result | {"late": late, "seconds": round(time.monotonic() - began, 3)}


def main() -> None:
    for name in SLOW:
        with suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            print(json.dumps(answer(request["root"], request["tests"], request["limit"])), flush=True)
        except BrokenPipeError:  # who asked is gone
            os._exit(1)


if __name__ == "__main__":
    main()
