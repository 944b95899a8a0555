"""Forks that say what they find through a pipe, line by line, and that are stopped when they take too long."""

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

MOST = 4 * 2**20  # bytes that a fork may say: a test's claim and error are a few hundred


def be_a_fork() -> None:
    """In a fork: a process group of its own, which does not outlive its parent."""
    os.setpgid(0, 0)
    if sys.platform == "linux":  # an endless loop, say
        PR_SET_PDEATHSIG = 1  # prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def outcome_of(child: int, reader: int, limit: float | None, word: str = "") -> dict:
    """What a fork says until its end, the first failure or the limit; then it is stopped.

    word: lines that don't begin with it are not the reporter's.
    """
    began = time.monotonic()
    data, late = b"", False
    ends = tuple(f'{word}["{kind}"'.encode() for kind in ("ended", "failed"))
    while len(data) < MOST:
        left = None if limit is None else max(began + limit - time.monotonic(), 0.0)
        late = not select.select([reader], [], [], left)[0]
        chunk = b"" if late else os.read(reader, 65536)
        if not chunk:
            break
        data += chunk
        if data.endswith(b"\n") and data.splitlines()[-1].startswith(ends):
            break  # not the pipe's end: a process that a test has left behind may hold it
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    os.close(reader)
    lines = [line for line in data.splitlines(keepends=True) if line.startswith(word.encode()) and line.endswith(b"\n")]
    said = [json.loads(line[len(word) :]) for line in lines]
    result: dict = {kind: [words[1:] for words in said if words[0] == kind] for kind in ("failed", "skipped")}
    result |= {kind: [words[1] for words in said if words[0] == kind] for kind in ("passed", "collected", "decoys")}
    result["ended"] = any(words[0] == "ended" for words in said)
    of_processor = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    if late or of_processor:
        started = [words[1] for words in said if words[0] == "started"]
        why = "no end within its processor time" if of_processor else f"no end after {limit:g} s"
        result["failed"].append([started[-1] if started else "the tests", why])
    seconds = {"seconds": time.monotonic() - began, "processor_seconds": usage.ru_utime + usage.ru_stime}
    return result | {"late": late or of_processor} | {name: round(number, 3) for name, number in seconds.items()}
