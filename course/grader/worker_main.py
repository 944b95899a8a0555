"""Run tests in forked processes: one request per line on stdin, one answer per line on stdout. `worker.py` starts it.

    {"root": directory, "tests": [pytest node ids], "limit": seconds, "student": directory or null}
    -> {"passed": [node ids], "failed": [[node id, why]], "skipped": [[node id, why]], "seconds": float, "late": bool,
        "ended": bool}

PyTorch and the tests' other third-party packages are imported once, here. Modules of the project are not: each fork
imports them from its `root`. `late`: killed at the time limit, in the test that `failed` names. `ended`: pytest
finished.

student: a tree with a student's code. A second fork runs it, which the operating system restricts to what a computation
needs (`confine`). The tests of `root` call it through two pipes (`judge.py`), so it can report nothing but the results
of its functions.
"""

import gc
import importlib.util
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from course.grader import judge, student
from course.grader.forks import be_a_fork, collect_outcome, die_with_parent

ROOT = Path(__file__).resolve().parents[2]

# slow third-party imports; if one is missing, the tests that need it skip or fail
SLOW = (
    *("torch", "torch._dynamo", "torch.utils.checkpoint", "torch.utils.tensorboard", "triton", "numpy", "pytest"),
    *("hypothesis", "tyro", "scipy.stats", "scipy.spatial.distance", "tokenizers", "safetensors.torch", "yaml"),
    *("matplotlib.figure", "jinja2", "bs4", "huggingface_hub._snapshot_download", "networkx", "tqdm"),
    *("rouge_score.rouge_scorer", "sacrebleu.metrics"),
)
WHY = 300  # maximum length of a reason, characters
MEMORY = 4 * 2**30  # bytes of data, against a list that grows without end
DISK = 2**26  # bytes per file; tests write tiny checkpoints
SCRATCH = ".scratch"  # the directory in a tree that tests may write to
Pipes = tuple[int, int]  # to read from, to write to
supervisor: Any = None  # nanorlhf/sandbox/supervisor.py, loaded by path: the package `nanorlhf` is the student's


class Reporter:
    """A pytest plugin that writes results to a pipe, line by line, so a killed process has reported its progress."""

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
        elif report.skipped:  # the whole file, by pytest.importorskip
            self.say("skipped", report.nodeid, str(report.longrepr[2])[:WHY])


Plugin = Callable[[Reporter], object]


def first_line(report: Any) -> str:
    """Return the error in one line; for a failed import, the last line that pytest prints."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        line = str(crash.message).partition("\n")[0]
        return line.removeprefix("AssertionError: ").removeprefix("Failed: ")[:WHY]  # the tests' own sentences
    lines = [line.removeprefix("E   ").strip() for line in str(report.longrepr).splitlines() if line.strip()]
    return lines[-1][:WHY] if lines else ""


def confine(tree: Path, pipes: Pipes, scratch: Path) -> None:
    """Restrict this process to what a computation needs, as far as the operating system can.

    It may read Python, its packages and the tree, write to `scratch`, and start threads but no processes. It has no
    network, no signals and bounded memory. Systems without Landlock and system call filters (all but Linux) apply only
    the resource limits.
    """
    low, high = sorted(pipes)
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.environ |= dict.fromkeys(("HOME", "TMPDIR", "TRITON_CACHE_DIR"), str(scratch))
    tempfile.tempdir = None  # let tempfile read TMPDIR again
    sys.dont_write_bytecode = True
    for kind, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_FSIZE, DISK), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    if sys.platform == "linux":
        supervisor.call("prctl", supervisor.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        packages = {path for path in sys.path if os.path.isdir(path) and Path(path).resolve() != ROOT}
        readonly = [sys.prefix, sys.base_prefix, *sorted(packages), str(tree)]
        supervisor.restrict_files({"readonly": readonly, "writable": [], "home": str(scratch)})
        supervisor.filter_system_calls(deny_signals=True, deny_processes=True)


def enter(root: str) -> None:
    """Let a fork work in a tree, with its code and without input and output."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.chdir(root)
    sys.path[0] = root


def run_student(root: str, pipes: Pipes, limit: float) -> None:
    """Run a student's code in a fork, for the tests in another. Does not return."""
    die_with_parent()
    seconds = 2 * math.ceil(limit) + 10  # if the code has seen to it that it doesn't die with its parent
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    enter(root)
    confine(Path(root), pipes, Path(os.devnull))  # it may write nowhere
    student.Process(*pipes).serve()


def run_tests(root: str, tests: list[str], reporter: Reporter, pipes: Pipes | None, plugin: Plugin | None) -> None:
    """Run pytest on the tests of `root` in a fork and stop at the first failure. Does not return."""
    be_a_fork()
    enter(root)
    os.makedirs(SCRATCH, exist_ok=True)
    main: Any = sys.modules["__main__"]
    main.__spec__ = None  # otherwise processes that tests start look for this module in `root`
    plugins = [reporter] if plugin is None else [reporter, plugin(reporter)]
    import pytest

    if pipes is not None:
        judge.student = judge.Student(*pipes)
        judge.note_replacements(pytest.MonkeyPatch)
    settings = ["-x", "-p", "no:cacheprovider", "--rootdir", root, "-c", f"{root}/pyproject.toml"]
    code = pytest.main([*settings, "--basetemp", f"{root}/{SCRATCH}/tests", *tests], plugins=plugins)
    reporter.say("ended", str(int(code)))
    os._exit(0)


def fork(run: Callable[..., None], *arguments: Any) -> int:
    """Fork a process that runs a function and ends; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            run(*arguments)
        finally:
            os._exit(1)
    return child


def answer(
    root: str, tests: list[str], limit: float | None, student: str | None = None, plugin: Plugin | None = None
) -> dict:
    """Run tests in a fork, with a student's code in another, and wait at most `limit` seconds.

    plugin: makes another pytest plugin, in the fork.
    """
    if student is None:
        return answer_alone(root, tests, limit, None, plugin)
    shutil.rmtree(Path(root, SCRATCH), ignore_errors=True)  # files of the last submission's tests
    (questions, asks), (answers, replies) = os.pipe(), os.pipe()
    child = fork(run_student, student, (questions, replies), limit)
    os.close(questions)
    os.close(replies)
    try:
        return answer_alone(root, tests, limit, (answers, asks), plugin)
    finally:
        os.close(asks)
        os.close(answers)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def answer_alone(root: str, tests: list[str], limit: float | None, pipes: Pipes | None, plugin: Plugin | None) -> dict:
    reader, writer = os.pipe()
    child = fork(run_tests, root, tests, Reporter(writer), pipes, plugin)
    os.close(writer)
    return collect_outcome(child, reader, limit)


def write(path: Path, source: str) -> None:
    """Write a source file and set its modification time to a hash of the source.

    Python considers a .pyc file current if it has the source's size and time, and two versions of the same size may be
    written within one second.
    """
    path.write_text(source, encoding="utf-8")
    stamp = zlib.crc32(source.encode())
    os.utime(path, (stamp, stamp))


def main(answer: Callable[..., dict] = answer) -> None:
    global supervisor
    spec = importlib.util.spec_from_file_location("supervisor", ROOT / "nanorlhf" / "sandbox" / "supervisor.py")
    assert spec is not None and spec.loader is not None
    supervisor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(supervisor)
    for name in SLOW:
        with suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # otherwise garbage collection in a fork would copy all memory pages
    for line in sys.stdin:
        request = json.loads(line)
        try:
            print(json.dumps(answer(**request)), flush=True)
        except BrokenPipeError:  # the parent is gone
            os._exit(1)


if __name__ == "__main__":
    main()
