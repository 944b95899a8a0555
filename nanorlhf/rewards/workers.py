"""Worker processes for slow reward functions: --reward-workers, and a file's TIME_LIMIT.

Each worker is a new interpreter that imports the function's file but not PyTorch. It runs in a separate session, so it
doesn't receive Ctrl-C and is killed together with its child processes. It ends with the training process, even if that
is killed.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from nanorlhf.errors import InputError
from nanorlhf.progress import Progress
from nanorlhf.rewards.function import Responses, RewardFunction, Value

CHUNKS = 4  # per worker and call, so that a slow chunk leaves few workers idle
SLOW = 2.0  # seconds before a call shows its progress


class Worker:
    """One worker process, seen from the parent."""

    def __init__(self, function: RewardFunction):
        ours, theirs = socket.socketpair()
        fd = theirs.fileno()
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanorlhf.rewards.workers", str(fd)],
            pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | variables,
        )  # fmt: skip
        theirs.close()
        self.connection = Connection(ours.detach())
        self.connection.send((function.where, function.columns))
        self.is_ready = False  # it has imported the function's file
        self.start = 0  # index of the first response that it is scoring
        self.deadline = float("inf")

    def kill(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def kill_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().kill()


class Workers:
    """Call a reward function in several processes.

    num_timeouts: number of responses in the last call that took longer than the file's TIME_LIMIT (seconds per
    response); they get its TIMEOUT_SCORE. With a TIME_LIMIT the function gets one response per call.
    """

    def __init__(self, function: RewardFunction, num: int, show: bool = True):
        self.function, self.num, self.show = function, num, show
        self.num_timeouts = 0
        self.workers: list[Worker] = []
        weakref.finalize(self, kill_all, self.workers)  # at the latest at interpreter exit

    def __call__(self, batch: Responses) -> list[Value]:
        try:
            return self.call(batch)
        except BaseException:  # interrupts too: late answers would be taken for the next call's
            kill_all(self.workers)
            raise

    def call(self, batch: Responses) -> list[Value]:
        limit = self.function.time_limit
        size = 1 if limit is not None else -(-len(batch) // (CHUNKS * self.num))
        waiting = deque(range(0, len(batch), size))
        values: list[Value] = [None] * len(batch)
        self.num_timeouts = 0
        while len(self.workers) < min(self.num, len(waiting)):
            self.workers.append(Worker(self.function))
        idle, busy = [*self.workers], dict[Any, Worker]()
        settings: dict[str, Any] = {"unit": " responses", "delay": SLOW, "leave": False, "disable": not self.show}
        with Progress(total=len(batch), desc=self.function.name, **settings) as progress:
            while waiting or busy:
                while waiting and idle:
                    worker = idle.pop()
                    worker.start = waiting.popleft()
                    worker.deadline = time.monotonic() + limit if limit and worker.is_ready else float("inf")
                    busy[worker.connection] = worker
                    self.exchange(worker, batch[worker.start : worker.start + size])
                remaining = min(worker.deadline for worker in busy.values()) - time.monotonic()
                timeout = None if remaining == float("inf") else max(0.0, remaining)
                for connection in wait([*busy], timeout):
                    worker = busy[connection]
                    answer = self.exchange(worker)
                    if isinstance(answer, str):
                        raise InputError(answer)
                    if answer is None:  # ready: startup doesn't count towards the response's time
                        worker.is_ready = True
                        worker.deadline = time.monotonic() + limit if limit else float("inf")
                        continue
                    values[worker.start : worker.start + size] = answer
                    progress.update(len(answer))
                    idle.append(busy.pop(connection))
                for connection, worker in [*busy.items()]:
                    if worker.deadline <= time.monotonic():
                        values[worker.start] = self.function.timeout_score
                        self.num_timeouts += 1
                        progress.update()
                        worker.kill()
                        self.workers.remove(busy.pop(connection))
                        if waiting:
                            self.workers.append(Worker(self.function))
                            idle.append(self.workers[-1])
        return values

    def exchange(self, worker: Worker, batch: Responses | None = None) -> Any:
        """Send responses to a worker, or receive its answer. Raises InputError if the process has ended."""
        try:
            return worker.connection.recv() if batch is None else worker.connection.send(batch)
        except (EOFError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(1)  # get its own exit code before we kill it
            worker.kill()
            code = worker.process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise InputError(
                f"{self.function.name}: a worker process ended ({how}) while scoring responses."
            ) from error


# --------------------------------------------------------------------------------------------------------- in a worker
def end_with(parent: int) -> None:
    """Kill this session when the parent process has ended, even if it was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main(fd: int) -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    connection = Connection(fd)
    try:
        where, columns = connection.recv()
        function = RewardFunction(where, columns=columns)
        connection.send(None)
        while True:
            connection.send(function(connection.recv()))
    except InputError as error:
        connection.send(str(error))
    except (EOFError, ConnectionError):  # the parent is done, or was killed
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
