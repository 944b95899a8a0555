"""Data parallel in a handful of plain functions; one process is just the case of one rank.

A script works out the same global batch on every rank and takes its own slice of it; a loss is a sum divided by the
*global* count, so gradients add up: the result does not depend on how many processes share the work (to rounding).
The paper's stack is accelerate with ZeRO-2; this is plain PyTorch.
"""

import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from nanorlhf.errors import InputError
from nanorlhf.memory import keep_freed_memory


def setup(device: str) -> torch.device:
    """Join the other processes if `torchrun` started several; returns this rank's device ("auto": CUDA if there)."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InputError(f"--device {device}: write auto, cpu, cuda or cuda:N.")
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise InputError(f"--device {device}: this PyTorch sees {torch.cuda.device_count()} CUDA devices; use another.")
    if "RANK" in os.environ and int(os.environ["WORLD_SIZE"]) > 1 and not dist.is_initialized():
        die_with_parent()
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        # [N+ 8] a process that dies is noticed at once; half an hour is for one that hangs, and longer than a save
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    if device == "cpu":
        keep_freed_memory()
    return torch.device(device)


def run(main: Callable[[Any], object], args: Any) -> None:
    """main(args), so that `torchrun` ends the job with the reason of the process that died first.

    It writes a failure down where `torchrun` looks for it; one that is only the loss of another process waits to be
    ended, or the two might be taken for each other.
    """

    def guarded() -> None:
        try:
            main(args)
        except RuntimeError as error:  # the collectives': gloo's have no class of their own
            if world_size() > 1 and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(10)
            raise

    (record(guarded) if "TORCHELASTIC_ERROR_FILE" in os.environ else guarded)()


def die_with_parent() -> None:
    """Where `torchrun` is killed by force its processes go as well: nobody else would end them. On Linux."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_slice(num_rows: int) -> slice:
    """Which rows of a global batch are this rank's; `num_rows` must be a multiple of the world size."""
    share = num_rows // world_size()
    return slice(rank() * share, (rank() + 1) * share)


def all_sum(value: Tensor) -> Tensor:
    """The sum over all ranks, on every rank."""
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def all_gather_rows(rows: Tensor) -> Tensor:
    """(b, ...) on each rank -> (B, ...) the whole batch in rank order, on every rank."""
    if world_size() == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows.contiguous())
    return torch.cat(gathered)


def all_gather_objects(rows: list) -> list:
    """A list on each rank -> all of them in rank order, on every rank."""
    if world_size() == 1:
        return rows
    gathered: list[list] = [[] for _ in range(world_size())]
    dist.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


def from_first(function: Callable[[], Any]) -> Any:
    """What the function gives on rank 0, which alone calls it, on every rank."""
    box = [function() if rank() == 0 else None]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def largest(number: int) -> int:
    """Over all ranks, on every rank."""
    box = torch.tensor(number)
    if world_size() > 1:
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return int(box)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is cut up between the ranks as one, on every rank; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_gradients(*models: nn.Module) -> None:
    """Add up the gradients of all ranks: each holds its part of a loss that was divided by the global count."""
    if world_size() == 1:
        return
    gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
