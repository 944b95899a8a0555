"""Data parallel in a handful of plain functions; one process is just the case of one rank.

A script works out the same global batch on every rank and takes its own slice of it; a loss is a sum divided by the
*global* count, so gradients add up: the result does not depend on how many processes share the work (to rounding).
The paper's stack is accelerate with ZeRO-2; this is plain PyTorch.

With `shard` a rank keeps only its part of a model's weights, gradients and optimizer state: FSDP2 gathers a block when
it runs. What runs a different number of times on each rank, or once a token, runs on `plain(model)` instead.
"""

import copy
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

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


# ------------------------------------------------------------------------------------------- weights that are cut up
def shard(model: nn.Module, device: torch.device, bfloat16: bool, offload: bool = False) -> None:
    """Cut the model's weights up between the ranks' devices (FSDP2), block by block; with one process it stays whole.

    bfloat16: on CUDA the blocks are gathered in bfloat16, and their gradients added up in float32; embedding, final
    norm and heads stay float32, as under autocast. offload: this rank's part waits in the CPU's memory.
    """
    if world_size() == 1:
        model.to("cpu" if offload else device)
        return
    tensors = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    model.skeleton = [copy.deepcopy(model, tensors)]  # in a list, so that it is no part of the model
    mesh = init_device_mesh(device.type, (world_size(),))
    settings = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")} if offload else {}
    mixed = MixedPrecisionPolicy()
    if bfloat16 and device.type == "cuda":
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.transformer.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed, **settings)
    fully_shard(model, mesh=mesh, **settings)
    for part in (model, *model.transformer.blocks):  # the sum over ranks: losses are divided by the global count
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def plain(model: nn.Module) -> nn.Module:
    """The model itself, or of a sharded one a copy with whole weights, gathered now: for reading, not for training."""
    if not is_sharded(model):
        return model
    copied = copy.deepcopy(model.skeleton[0])
    gathered: dict[int, Tensor] = {}  # a tied head is the embedding, gathered once
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            value = whole(tensor.detach())
            gathered[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
        state[name] = gathered[id(tensor)]
    copied.load_state_dict(state, assign=True)
    for theirs, ours in zip(copied.buffers(), model.buffers(), strict=True):  # a state dict has not all of them
        theirs.data = ours.data
    return copied


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is cut up as one, on every rank; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mine(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut up; others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_first(state: Any) -> Any:
    """The same nest of dictionaries and lists with whole tensors, on the CPU of rank 0; elsewhere None for them."""

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        tensor = leaf.full_tensor()
        return tensor.cpu() if rank() == 0 else None

    return tree_map(gather, state)


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, cut up as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """`load_state_dict` with whole tensors, of a model that may be sharded."""
    now = model.state_dict()
    model.load_state_dict({name: cut_like(tensor, now.get(name, tensor)) for name, tensor in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict` with whole tensors, of an optimizer of sharded models."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_parameters = {
        number: {
            name: cut_like(value, parameters[number]) if value.shape == parameters[number].shape else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": of_parameters})


def sum_gradients(*models: nn.Module) -> None:
    """Add up the gradients of all ranks: each holds its part of a loss that was divided by the global count."""
    if world_size() == 1:
        return
    gradients = [
        p.grad for model in models if not is_sharded(model) for p in model.parameters() if p.grad is not None
    ]  # those of a sharded one are summed already
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@contextmanager
def visiting(models: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Models that wait in CPU memory are on the device within; FSDP moves its own by itself."""
    visitors = [model for model in models if not is_sharded(model)]
    for model in visitors:
        model.to(device)
    yield
    for model in visitors:
        model.to("cpu")


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
