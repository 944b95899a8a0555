"""Find out what an error on one of two processes prints and exits with; each case runs in a fork."""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from nanorlhf import distributed, launch
from nanorlhf.cli import command_line
from nanorlhf.errors import InputError


@dataclass(frozen=True)
class Args:
    device: str = "cpu"
    processes: int = 2


def exchange() -> None:
    distributed.all_sum(torch.ones(1))


def fail(error: BaseException) -> None:
    raise error


def on_rank(rank: int, error: BaseException) -> None:
    if distributed.rank() == rank:
        raise error
    exchange()


def at_the_end(error: BaseException) -> None:
    """Raise on rank 1 when the first process has nothing left to do."""
    exchange()
    if distributed.rank() == 1:
        time.sleep(0.2)
        raise error


def killed() -> None:
    if distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange()


def dies_as_it_starts() -> None:
    launch.die_with_parent = lambda: os.kill(os.getpid(), signal.SIGKILL)  # a forked rank calls it first


def dies_as_it_joins() -> None:
    """Kill rank 1 as it joins; the others would wait for it for a minute."""
    launch.JOIN_TIMEOUT = timedelta(seconds=1)
    join = launch.dist.init_process_group

    def init_process_group(*names, rank: int, **settings) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        join(*names, rank=rank, **settings)

    launch.dist.init_process_group = init_process_group


def may_join_for_two_seconds() -> None:
    launch.JOIN_TIMEOUT = timedelta(seconds=2)


def later_than_the_time_to_join() -> None:
    time.sleep(3 * distributed.rank())
    ranks = distributed.all_gather_objects([distributed.rank()])
    if distributed.rank() == 0:
        print(ranks, file=sys.stderr)


def interrupted_as_it_forks() -> None:
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))


FIRST = {
    "a kill as it starts": dies_as_it_starts,
    "a kill as it joins": dies_as_it_joins,
    "later than the time to join": may_join_for_two_seconds,
    "ctrl-C within a fork": interrupted_as_it_forks,
}
"""called before the ranks are forked"""
CASES = {
    "bad input on rank 1": lambda: on_rank(1, InputError("rule.py:2 is bad.")),
    "bad input on rank 0": lambda: on_rank(0, InputError("rule.py:2 is bad.")),
    "bad input on both": lambda: fail(InputError("rule.py:2 is bad.")),
    "bad input at the end": lambda: at_the_end(InputError("rule.py:2 is bad.")),
    "another sentence on each": lambda: fail(InputError(f"rank {distributed.rank()} is bad.")),
    "bad input where rank 0 looks for all": lambda: distributed.from_first(lambda: fail(InputError("it is bad."))),
    "a full disk on rank 1": lambda: on_rank(1, OSError(28, "No space left on device", "out/file")),
    "a bug on rank 1": lambda: on_rank(1, ValueError("a bug")),
    "a bug on rank 0": lambda: on_rank(0, ValueError("a bug")),
    "a bug on both": lambda: fail(ValueError("a bug")),
    "a bug at the end": lambda: at_the_end(ValueError("a bug")),
    "a kill of rank 1": killed,
    "ctrl-C on rank 0": lambda: on_rank(0, KeyboardInterrupt()),
    "a kill as it starts": exchange,
    "a kill as it joins": exchange,
    "later than the time to join": later_than_the_time_to_join,
    "ctrl-C within a fork": exchange,
}


def outcome(case: str) -> tuple[int, str]:
    """Return the exit code and the stderr of all processes. Runs in a fork, since PyTorch has no threads here."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 2)
            code: object = 0
            try:
                FIRST.get(case, lambda: None)()
                command_line(lambda args: (launch.setup("cpu"), CASES[case]()), {"a": ("a test", Args())})
            except SystemExit as stop:
                code = stop.code
            except Exception:
                sys.excepthook(*sys.exc_info())
                code = 1
            os._exit(int(str(code)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        return code, file.read().decode()


def write_outcomes(path: Path) -> None:
    sys.argv = ["program"]
    path.write_text(json.dumps({case: outcome(case) for case in CASES}))
