"""A job of two processes that imports little: `torchrun --nproc-per-node 2 -m tests.exchange FILE`.

They sum over the ranks again and again; rank 1 fails once FILE exists.
"""

import sys
from pathlib import Path

import torch

from nanorlhf import distributed


def exchange_until(file: Path) -> None:
    distributed.setup("cpu")
    while True:
        distributed.all_sum(torch.ones(1))
        file.with_name("started").touch()
        if distributed.rank() == 1 and file.exists():
            raise ValueError("the file is there")


if __name__ == "__main__":
    distributed.run(exchange_until, Path(sys.argv[1]))
