"""Hit a small program with each fault in turn; `python -m tests.helpers.fault_effects` prints what happens."""

import errno
import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from tools.faults import FAULTS, World, is_alive, job_processes, small_disk, wrong_clock

PATIENCE = 30.0  # seconds to wait for a fault's effect, on a busy machine


def effects(mounted: bool) -> dict[str, str]:
    """Return fault -> its visible effect, with the `small_disk` mounted or not."""
    return {
        **dict.fromkeys(("SIGKILL", "SIGKILL in a save", "truncated state", "foreign file"), "exit -9"),
        "SIGINT": "exit 2",  # by KeyboardInterrupt
        "SIGTERM": "exit -15",
        "SIGHUP": "exit -1",
        "SIGSTOP, SIGCONT": "continued",
        "dead rank": "only the first is left",
        "full disk": f"OSError {errno.ENOSPC if mounted else errno.EFBIG}",
        **({"read-only disk": f"OSError {errno.EROFS}"} if mounted else {}),
        "jumping clock": "the clock jumped",
        "slow judge": "late headers",
        "dripping judge": "late body",
        "failing judge": "HTTP 500",
        "dead judge": f"ConnectionRefusedError {errno.ECONNREFUSED}",
    }


def write_and_ask(directory: Path, url: str, report: Path) -> None:
    """Append to a file, read the clock and query the judge in a loop; report anything unusual."""
    wrong_clock()
    right = time.time() - time.monotonic()
    with report.open("a") as log:
        while True:
            try:
                if abs(time.time() - time.monotonic() - right) > 1e6:
                    print("the clock jumped", file=log, flush=True)
                with (directory / "file").open("ab") as file:
                    file.write(bytes(5000))
                begin = time.monotonic()
                with urlopen(url, data=b"a prompt") as answer:
                    headers = time.monotonic()
                    text = answer.read()
                late = ("headers", headers - begin), ("body", time.monotonic() - headers)
                for part, seconds in late:
                    if seconds > 0.25:
                        print(f"late {part}", file=log, flush=True)
                assert b"Score: " in text
                print("well", file=log, flush=True)
            except HTTPError as error:
                print(f"HTTP {error.code}", file=log, flush=True)
            except (OSError, HTTPException) as error:  # urlopen wraps the cause
                cause = getattr(error, "reason", error)
                print(f"{type(cause).__name__} {getattr(cause, 'errno', '')}", file=log, flush=True)
            time.sleep(0.01)


def struck() -> dict[str, object]:
    """Return fault -> how the program ended or what it reported, and if its disk was mounted."""
    root = Path(tempfile.mkdtemp())
    (root / "disk").mkdir()
    (root / "view").mkdir()
    results: dict[str, object] = {}
    with small_disk(root / "disk") as mounted:
        world, expected = World(root, mounted), effects(mounted)
        world.run.mkdir()
        url = f"http://127.0.0.1:{world.reserved.getsockname()[1]}"
        for fault in FAULTS:
            if fault == "read-only disk" and not mounted:
                continue
            world.heal(judged=True)
            world.draw = random.Random(1)  # no judge recovers
            report = root / fault
            report.touch()
            job = os.fork()
            if job == 0:
                with suppress(BaseException):
                    os.setsid()
                    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
                    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
                    signal.alarm(300)
                    if fault == "dead rank":
                        os.fork()
                    write_and_ask(world.run, url, report)
                os._exit(2)
            while report.read_text().count("well") < 4:
                time.sleep(0.01)
            before = len(report.read_text())
            assert world.strike(fault, job, world.run)
            events = os.waitid(os.P_PID, job, os.WEXITED | os.WCONTINUED | os.WNOHANG | os.WNOWAIT)
            reported: set[str] = set()
            end = time.monotonic() + PATIENCE
            while expected[fault] not in reported and time.monotonic() < end:
                time.sleep(0.02)
                reported = set(report.read_text()[before:].splitlines())
                if events is not None and events.si_code == os.CLD_CONTINUED:
                    reported.add("continued")
                if not is_alive(job):
                    reported = {f"exit {os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])}"}
                    break
                if fault == "dead rank" and job_processes(job) == [job]:
                    reported.add("only the first is left")
            results[fault] = sorted(reported - {"well"})
            with suppress(ProcessLookupError):
                os.killpg(job, signal.SIGKILL)
        world.heal(judged=False)
    return results | {"mounted": mounted}


if __name__ == "__main__":
    print(json.dumps(struck()))
