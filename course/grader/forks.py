"""Forked processes that report through a pipe, line by line, and are killed when they take too long."""

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

MOST = 4 * 2**20  # bytes that a fork may report; a test's name and error take a few hundred


def be_a_fork() -> None:
    """Give a fork a separate process group, and let it die with its parent."""
    os.setpgid(0, 0)
    die_with_parent()


def die_with_parent() -> None:
    if sys.platform == "linux":  # an endless loop would outlive the parent
        PR_SET_PDEATHSIG = 1  # prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def collect_outcome(child: int, reader: int, limit: float | None) -> dict:
    """Collect a fork's reports until its end, its first failure or the time limit; then kill it."""
    began = time.monotonic()
    data, late = b"", False
    ends = tuple(f'["{kind}"'.encode() for kind in ("ended", "failed"))
    while len(data) < MOST:
        left = None if limit is None else max(began + limit - time.monotonic(), 0.0)
        late = not select.select([reader], [], [], left)[0]
        chunk = b"" if late else os.read(reader, 65536)
        if not chunk:
            break
        data += chunk
        if data.endswith(b"\n") and data.splitlines()[-1].startswith(ends):
            break  # don't wait for the pipe to close: a process that a test left behind may keep it open
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    os.close(reader)
    reports = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    result: dict = {kind: [words[1:] for words in reports if words[0] == kind] for kind in ("failed", "skipped")}
    result["passed"] = [words[1] for words in reports if words[0] == "passed"]
    result["ended"] = any(words[0] == "ended" for words in reports)
    hit_limit = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if late or hit_limit:
        started = [words[1] for words in reports if words[0] == "started"]
        why = "exceeded its processor time" if hit_limit else f"not finished after {limit:g} s"
        result["failed"].append([started[-1] if started else "the tests", why])
    seconds = {"seconds": time.monotonic() - began, "processor_seconds": usage.ru_utime + usage.ru_stime}
    return result | {"late": late or hit_limit} | {name: round(number, 3) for name, number in seconds.items()}
