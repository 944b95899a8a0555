"""A job of two processes with few imports: `torchrun --nproc-per-node 2 -m tests.helpers.small_job FILE`.

Or with PROCESSES forked ones: `python -m tests.helpers.small_job FILE PROCESSES`. They sum over the ranks in a loop;
rank 1 fails once FILE exists. A third argument: the grace period.
"""

import sys
from functools import partial
from pathlib import Path

import torch

from nanorlhf import distributed, launch


def exchange_until(file: Path) -> None:
    launch.setup("cpu")
    while True:
        distributed.all_sum(torch.ones(1))
        file.with_name("started").touch()
        if distributed.rank() == 1 and file.exists():
            raise ValueError("the file is there")


def exchange(file: Path, processes: int) -> None:
    launch.run(partial(exchange_until, file), "cpu", processes)


if __name__ == "__main__":
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if len(sys.argv) > 3:
        launch.GRACE_PERIOD = float(sys.argv[3])
    exchange(Path(sys.argv[1]), processes)
