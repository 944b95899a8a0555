"""Run tests in forked processes: one request per line on stdin, one answer per line on stdout. `worker.py` starts it.

    {"root": directory, "tests": [pytest node ids], "limit": seconds, "guarded": bool}
    -> {"passed": [node ids], "failed": [[node id, why]], "skipped": [[node id, why]], "seconds": float, "late": bool,
        "ended": bool, "collected": [node ids], "decoys": [node ids]}

PyTorch and the tests' other third-party packages are imported once, here. Modules of the project are not: each fork
imports them from its `root`. `late`: killed at the time limit, in the test that `failed` names. `ended`: pytest
finished; if false, the code under test has ended the process.

guarded: the code under test is untrusted. The operating system restricts the fork to what a computation needs
(`confine`). The tests share a process with that code, so it could fake their report. Therefore each line of the report
starts with a random word drawn for this fork; every test that was collected before any of that code ran must have
finished; and a decoy test that must fail must have failed after them. Code that can reach into the interpreter can get
around each of these: `allowed.py` refuses what it would need for that.
"""

import gc
import importlib.util
import json
import os
import resource
import secrets
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from course.grader.forks import be_a_fork, collect_outcome

ROOT = Path(__file__).resolve().parents[2]

# slow third-party imports; if one is missing, the tests that need it skip or fail
SLOW = (
    *("torch", "torch.utils.checkpoint", "torch.utils.tensorboard", "triton", "numpy", "pytest", "hypothesis", "tyro"),
    *("scipy.stats", "scipy.spatial.distance", "tokenizers", "safetensors.torch", "matplotlib.figure", "jinja2", "bs4"),
    *("huggingface_hub._snapshot_download", "networkx", "rouge_score.rouge_scorer", "sacrebleu.metrics", "tqdm"),
    "yaml",
)
WHY = 300  # maximum length of a reason, characters
DECOY = "tests/decoy.py"  # a test that must fail
MEMORY = 4 * 2**30  # bytes of data, against a list that grows without end
DISK = 2**26  # bytes per file; tests write tiny checkpoints
SCRATCH = ".scratch"  # the directory in a tree that tests may write to
supervisor: Any = None  # nanorlhf/sandbox/supervisor.py, loaded by path: the package `nanorlhf` is the student's


class Reporter:
    """A pytest plugin that writes results to a pipe, line by line, so a killed process has reported its progress."""

    def __init__(self, pipe: int, prefix: str, guarded: bool):
        self.pipe, self.prefix, self.guarded = pipe, prefix, guarded

    def say(self, *words: str) -> None:
        os.write(self.pipe, (self.prefix + json.dumps(words) + "\n").encode())

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self.say("collected", item.nodeid)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.say("started", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid.startswith(DECOY):
            if report.when == "call" and report.failed:
                self.say("decoys", report.nodeid)
        elif report.failed:
            self.say("failed", report.nodeid, first_line(report))
        elif report.skipped and report.when == "call" and self.guarded:
            self.say("failed", report.nodeid, "the code under test has skipped it")
        elif report.skipped:
            self.say("skipped", report.nodeid, str(report.longrepr[2])[:WHY])
        elif report.when == "call":
            self.say("passed", report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.say("failed", report.nodeid, first_line(report))


Plugin = Callable[[Reporter], object]


def first_line(report: Any) -> str:
    """Return the error in one line; for a failed import, the last line that pytest prints."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).splitlines()[0][:WHY] if str(crash.message) else ""
    lines = [line.removeprefix("E   ").strip() for line in str(report.longrepr).splitlines() if line.strip()]
    return lines[-1][:WHY] if lines else ""


def confine(root: Path, pipe: int) -> None:
    """Restrict this process to what a computation needs, as far as the operating system can.

    It may read Python, its packages and the tree, write below the tree's SCRATCH, and start threads but no processes.
    It has no network, no signals and bounded memory. Systems without Landlock and system call filters (all but Linux)
    apply only the resource limits.
    """
    os.closerange(3, pipe)
    os.closerange(pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    scratch = root / SCRATCH
    os.environ |= {"HOME": str(scratch), "TMPDIR": str(scratch), "TRITON_CACHE_DIR": str(scratch)}
    tempfile.tempdir = None  # let tempfile read TMPDIR again
    sys.dont_write_bytecode = True
    for kind, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_FSIZE, DISK), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    if sys.platform == "linux":
        supervisor.call("prctl", supervisor.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        packages = {path for path in sys.path if os.path.isdir(path) and Path(path).resolve() != ROOT}
        readonly = [sys.prefix, sys.base_prefix, *sorted(packages), str(root)]
        supervisor.restrict_files({"readonly": readonly, "writable": [], "home": str(scratch)})
        supervisor.filter_system_calls(deny_signals=True, deny_processes=True)


def run_tests(root: str, tests: list[str], reporter: Reporter, plugin: Plugin | None) -> None:
    """Run pytest on the tests of `root` in a fork and stop at the first failure. Does not return."""
    be_a_fork()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.chdir(root)
    os.makedirs(SCRATCH, exist_ok=True)
    sys.path[0] = root
    main: Any = sys.modules["__main__"]
    main.__spec__ = None  # otherwise processes that tests start look for this module in `root`
    plugins = [reporter] if plugin is None else [reporter, plugin(reporter)]
    import pytest

    if reporter.guarded:
        confine(Path(root), reporter.pipe)
        tests = [*tests, DECOY]
    settings = ["-x", "-p", "no:cacheprovider", "--rootdir", root, "-c", f"{root}/pyproject.toml"]
    code = pytest.main([*settings, "--basetemp", f"{root}/{SCRATCH}/tests", *tests], plugins=plugins)
    reporter.say("ended", str(int(code)))
    os._exit(0)


def answer(
    root: str, tests: list[str], limit: float | None, guarded: bool = False, plugin: Plugin | None = None
) -> dict:
    """Run tests in a fork and wait at most `limit` seconds. plugin: makes another pytest plugin, in the fork."""
    prefix = secrets.token_hex(16) if guarded else ""
    if guarded:  # files that another submission left behind
        shutil.rmtree(Path(root, SCRATCH), ignore_errors=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run_tests(root, tests, Reporter(writer, prefix, guarded), plugin)
        finally:
            os._exit(1)
    os.close(writer)
    return collect_outcome(child, reader, limit, prefix)


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
