"""Forks that say what they find through a pipe, line by line, and that are stopped when they take too long."""

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress


def be_a_fork() -> None:
    """In a fork: a process group of its own, which does not outlive its parent."""
    os.setpgid(0, 0)
    if sys.platform == "linux":  # an endless loop, say
        PR_SET_PDEATHSIG = 1  # prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outcome_of(child: int, reader: int, limit: float | None) -> dict:
    """What a fork says until its end, the first failure or the limit; then it is stopped."""
    began = time.monotonic()
    data, late = b"", False
    while True:
        left = None if limit is None else max(began + limit - time.monotonic(), 0.0)
        late = not select.select([reader], [], [], left)[0]
        chunk = b"" if late else os.read(reader, 65536)
        if not chunk:
            break
        data += chunk
        if data.endswith(b"\n") and data.splitlines()[-1].startswith((b'["ended"', b'["failed"')):
            break  # not the pipe's end: a process that a test has left behind may hold it
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    os.close(reader)
    said = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    result: dict = {kind: [words[1:] for words in said if words[0] == kind] for kind in ("failed", "skipped")}
    result["passed"] = [words[1] for words in said if words[0] == "passed"]
    result["ended"] = any(words[0] == "ended" for words in said)
    of_processor = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if late or of_processor:
        started = [words[1] for words in said if words[0] == "started"]
        why = "no end within its processor time" if of_processor else f"no end after {limit:g} s"
        result["failed"].append([started[-1] if started else "the tests", why])
    seconds = {"seconds": time.monotonic() - began, "processor_seconds": usage.ru_utime + usage.ru_stime}
    return result | {"late": late or of_processor} | {name: round(number, 3) for name, number in seconds.items()}
