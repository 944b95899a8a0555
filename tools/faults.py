"""Faults that hit a run in tools/soak.py: signals, and failures of its disk, judge, clock and saved states.

The disk is a tmpfs that really fills up and really becomes read-only. If the kernel doesn't permit mounts, the size of
files is limited instead (RLIMIT_FSIZE), and there is no read-only fault. The clock that jumps is Python's time.time.
"""

import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from nanorlhf import launch

# fault -> exit codes of a run that it ends; none: the run must continue undisturbed. Exit code 0 is always allowed
FAULTS: dict[str, tuple[int, ...]] = {
    "SIGKILL": (-signal.SIGKILL,),
    "SIGKILL in a save": (-signal.SIGKILL,),
    "SIGINT": (128 + signal.SIGINT,),
    "SIGTERM": (128 + signal.SIGTERM, -signal.SIGTERM),  # the second code: before the first step
    "SIGHUP": (-signal.SIGHUP,),
    "SIGSTOP, SIGCONT": (),
    "dead rank": (1,),
    "full disk": (2,),
    "read-only disk": (2,),
    "jumping clock": (),
    "slow judge": (),
    "dripping judge": (),
    "failing judge": (2,),
    "dead judge": (2,),
    "truncated state": (-signal.SIGKILL,),
    "foreign file": (-signal.SIGKILL,),
}
DISK = 2**26  # bytes; a round of the soak leaves a few million
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # from sched.h
# error of a run's clock in seconds, in memory shared by all forks: we can't set it by a signal, because a signal
# between fork and handler would kill the process
CLOCK = ctypes.c_double.from_buffer(mmap.mmap(-1, ctypes.sizeof(ctypes.c_double)))
YEAR = 365 * 86400.0  # seconds


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """Mount a tmpfs of DISK bytes and an empty /dev/shm that only this process and its children see.

    Yields False if the kernel doesn't permit mounts.
    """
    user = os.getuid()
    unshared = ctypes.CDLL(None).unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)) == 0
    if unshared and user:
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    tmpfs = ("mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak")
    commands = (("mount", "--make-rprivate", "/"), (*tmpfs, directory), (*tmpfs, "/dev/shm"))
    mounted = unshared and all(
        subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0 for command in commands
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(("umount", "--lazy", directory), check=True)


class Judge(BaseHTTPRequestHandler):
    """A fake judge whose score depends only on the prompt."""

    mood = ""

    def do_POST(self) -> None:
        prompt = self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": f"Score: {sha256(prompt).digest()[0] % 10 + 1}"}
        answer = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        time.sleep(0.3 if self.mood == "slow judge" else 0)
        self.send_response(500 if self.mood == "failing judge" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        size = 1 if self.mood == "dripping judge" else len(answer)
        for start in range(0, len(answer), size):
            self.wfile.write(answer[start : start + size])
            time.sleep(0.01 if size == 1 else 0)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def wrong_clock() -> None:
    """Shift time.time by CLOCK; called in a run before it starts."""
    right = time.time
    time.time = lambda: right() + CLOCK.value


def saves(out: Path) -> set[tuple[Path, int]]:
    """Return the directories of unfinished saves, with the time of their last change."""
    result = set()
    for directory in (out, out / "state", out / "value_model", out / "best"):
        for path in (directory / ".partial", directory / ".doomed"):
            with contextlib.suppress(FileNotFoundError):
                result.add((path, path.stat().st_ctime_ns))
    return result


def is_alive(job: int) -> bool:
    """Return whether a child is still running, without reaping it."""
    return os.waitid(os.P_PID, job, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def job_processes(job: int) -> list[int]:
    """Return the running processes of a job's process group."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = file.read_text().rpartition(") ")[2].split()[:3]
            if int(group) == job and state != "Z":
                processes.append(int(file.parent.name))
    return processes


class World:
    """The environment of a run: root/disk, with the run in root/disk/run, and the judge's port.

    mounted: whether root/disk is a `small_disk`.
    """

    def __init__(self, root: Path, mounted: bool):
        self.disk, self.run, self.view, self.mounted = root / "disk", root / "disk" / "run", root / "view", mounted
        self.draw = random.Random()
        self.judge = 0  # process id; 0: none
        self.read_only = False
        self.reserved = socket.socket()  # keeps the port while the judge is dead
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))

    def serve(self, mood: str = "") -> None:
        """Replace the judge by one with this mood."""
        if self.judge:
            os.kill(self.judge, signal.SIGKILL)
            os.waitpid(self.judge, 0)
        self.judge = 0 if mood == "dead judge" else os.fork()
        if self.judge or mood == "dead judge":
            return
        try:
            os.setsid()
            launch.die_with_parent()
            Judge.mood = mood
            os.close(2)  # the server logs errors about dead runs there
            ThreadingHTTPServer(self.reserved.getsockname(), Judge).serve_forever()
        finally:
            os._exit(1)

    def moment(self, fault: str, job: int, out: Path, seconds: float) -> bool:
        """Wait for a random moment, or for the first save after it; return whether the run is still alive."""
        end, before = time.monotonic() + self.draw.uniform(0, seconds), saves(out)
        while is_alive(job):
            if time.monotonic() >= end and (fault != "SIGKILL in a save" or saves(out) - before):
                break
            time.sleep(0.0005)
        return is_alive(job)

    def strike(self, fault: str, job: int, out: Path) -> bool:
        """Apply the fault to a run, the leader of a process group; return whether it was possible.

        Raises ProcessLookupError if the run ends meanwhile.
        """
        send = self.draw.choice((os.kill, os.killpg))  # to the main process, or to the whole group
        processes = job_processes(job)
        if not processes:  # the process group doesn't exist yet
            return False
        match fault:
            case "SIGKILL" | "SIGKILL in a save" | "truncated state" | "foreign file":
                send(job, signal.SIGKILL)
            case "SIGINT" | "SIGTERM" | "SIGHUP":
                send(job, signal.Signals[fault])
            case "SIGSTOP, SIGCONT":
                chosen = self.draw.choice(processes)
                os.kill(chosen, signal.SIGSTOP)
                time.sleep(self.draw.uniform(0, 1))
                os.kill(chosen, signal.SIGCONT)
            case "dead rank":
                if processes == [job]:  # the second rank hasn't started yet, or has ended
                    return False
                os.kill(next(process for process in processes if process != job), signal.SIGKILL)
            case "full disk" if self.mounted:
                with (self.disk / "ballast").open("wb") as file:
                    while free := os.statvfs(self.disk).f_bavail * os.statvfs(self.disk).f_frsize:
                        with contextlib.suppress(OSError):  # the run has written meanwhile
                            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            case "full disk":
                for process in processes:
                    most = self.draw.randrange(20_000)
                    resource.prlimit(process, resource.RLIMIT_FSIZE, (most, most))
            case "read-only disk":
                subprocess.run(("mount", "-o", "bind,ro", self.run, self.view), check=True)
                subprocess.run(("mount", "--move", self.view, self.run), check=True)
                self.read_only = True
            case "jumping clock":
                CLOCK.value = -CLOCK.value or YEAR  # alternate between a year ahead and a year behind
                for directory, directories, files in os.walk(out):  # the run may delete states meanwhile
                    for name in (*directories, *files):
                        with contextlib.suppress(FileNotFoundError):
                            os.utime(Path(directory, name), (0, 4e9))
            case _:
                self.serve(fault)
                if self.draw.random() < 0.5:  # recover before the run gives up
                    time.sleep(self.draw.uniform(0, 3))
                    self.serve()
        return True

    def heal(self, judged: bool) -> None:
        """Undo all faults: correct clock, free and writable disk, and a healthy judge if the run uses one."""
        CLOCK.value = 0.0
        (self.disk / "ballast").unlink(missing_ok=True)
        if self.read_only:
            subprocess.run(("umount", "--lazy", self.run), check=True)
            self.read_only = False
        self.serve("" if judged else "dead judge")
