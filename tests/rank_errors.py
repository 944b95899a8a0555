"""What each error of one of two processes prints and exits with: `python -m tests.rank_errors` prints them as JSON.

All in one program, which imports PyTorch once and forks for each case.
"""

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass

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
    """On rank 1, when the first process has nothing more to do."""
    exchange()
    if distributed.rank() == 1:
        time.sleep(0.2)
        raise error


def killed() -> None:
    if distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange()


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
}


def outcome(case: str) -> tuple[int, str]:
    """The exit code and what all processes write to stderr, in a fork: PyTorch has no threads here."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 2)
            code: object = 1
            try:
                command_line(lambda args: (launch.setup("cpu"), CASES[case]()), {"a": ("a test", Args())})
            except SystemExit as stop:
                code = stop.code
            except Exception:
                sys.excepthook(*sys.exc_info())
            os._exit(int(str(code)))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        return code, file.read().decode()


if __name__ == "__main__":
    print(json.dumps({case: outcome(case) for case in CASES}))
