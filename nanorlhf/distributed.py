"""Data parallelism: collectives, and models sharded by FSDP2. A single process is one rank.

Every rank computes the same global batch and takes its own slice. A loss is a sum divided by the
*global* count, so gradients are summed across ranks and the result does not depend on the number of
processes (up to rounding). The paper uses accelerate with ZeRO-2; we use plain PyTorch.

With `shard`, each rank keeps only its shard of a model's weights, gradients and optimizer state;
FSDP2 gathers a block when it runs. Code that runs a different number of times on each rank, or once
per token, uses the full copy that `unshard` makes.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", int, float)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def launched(name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a number that `torchrun` set in the environment; InputError if missing or invalid."""
    text = os.environ.get(name, default)
    if text is None:
        raise InputError(
            f"{name} is not set, but RANK is: start the processes with `torchrun`, or unset RANK."
        )
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", str(text)) else -1
    if not least <= number <= most:
        raise InputError(
            f"{name}={text}: must be a number from {least} to {most}, as `torchrun` sets it."
        )
    return number


def node_size() -> int:
    """Return the number of processes on this node; InputError unless all nodes have the same."""
    size = launched("LOCAL_WORLD_SIZE", 1, 10**6, default=world_size())
    sizes = set(all_gather_objects([size]))
    if len(sizes) > 1:
        raise InputError(
            f"--shard hsdp: nodes run {sorted(sizes)} processes: pass the same "
            "--nproc-per-node on each."
        )
    return size


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_slice(num_rows: int) -> slice:
    """Return the slice of this rank's rows; `num_rows` must be a multiple of the world size."""
    share = num_rows // world_size()
    return slice(rank() * share, (rank() + 1) * share)


def all_sum(value: Tensor) -> Tensor:
    """Sum `value` over all ranks in place and return it."""
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def all_gather_rows(rows: Tensor) -> Tensor:
    """Concatenate (b, ...) of each rank to (B, ...) in rank order, on every rank."""
    if world_size() == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows.contiguous())
    return torch.cat(gathered)


def all_gather_objects(rows: list) -> list:
    """Concatenate the lists of all ranks in rank order, on every rank."""
    if world_size() == 1:
        return rows
    gathered: list[list] = [[] for _ in range(world_size())]
    dist.all_gather_object(gathered, rows)
    return [row for rows_of_rank in gathered for row in rows_of_rank]


def from_first(function: Callable[[], Any]) -> Any:
    """Call the function only on rank 0; return its result on every rank."""
    results = [function() if rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(results)
    return results[0]


def largest(number: N) -> N:
    """Return the maximum of `number` over all ranks."""
    value = torch.tensor(number)
    if world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return type(number)(value.item())


# ---------------------------------------------------- weights that are elsewhere: `model.elsewhere`
@dataclass(frozen=True)
class OnDisk:
    """Weights in mapped files. A model on the meta device, and its copies, are read from them."""

    read: Callable[[str, slice], Tensor]  # rows of a tensor, by name
    check: Callable[[Any, torch.device, torch.dtype], None]  # for the model after reading

    def load(self, model: nn.Module, device: str | torch.device) -> None:
        """Read all weights; for a sharded model, only this rank's rows."""
        read: dict[nn.Parameter, nn.Parameter] = {}  # a tied head is the embedding, read once
        for path, module in model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in read and local_tensor(parameter).is_meta:
                    rows = self.read(f"{path}.{name}".lstrip("."), local_rows(parameter))
                    value = torch.empty(rows.shape, dtype=parameter.dtype, device=device)
                    value = as_shard(value.copy_(rows), parameter)
                    read[parameter] = nn.Parameter(value, parameter.requires_grad)
                if parameter in read:
                    setattr(module, name, read[parameter])


@dataclass(frozen=True)
class Sharded:
    """Weights on all ranks, sharded by FSDP2."""

    skeleton: Any  # the same modules without weights, for `unshard`


@dataclass(frozen=True)
class Offloaded:
    """Weights in CPU memory; `on_device` copies them to the device."""

    device: torch.device


# ---------------------------------------------------------------------------------- sharded weights
def shard(
    model: GPT | ScalarModel,
    device: torch.device,
    bfloat16: bool,
    offload: bool = False,
    ranks_per_copy: int | None = None,
) -> None:
    """Shard the model's weights across the ranks' devices, block by block (FSDP2).

    A single process keeps the full model. A model that was loaded on the meta device is read here:
    each rank reads only its own rows of the files.

    ranks_per_copy: number of consecutive ranks, such as a node's, that share one copy of the
    weights; summed gradients keep the copies equal (HSDP). None: all ranks share one copy.

    bfloat16: on CUDA, gather the blocks in bfloat16 and sum their gradients in float32; embedding,
    final norm and heads stay float32, as under autocast. offload: keep this rank's shard in CPU
    memory.
    """
    shard_device = torch.device("cpu") if offload else device
    stored: OnDisk | None = model.elsewhere
    model.elsewhere = None
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    if not dist.is_initialized():
        if stored is not None:
            stored.load(model, shard_device)
        model.to(shard_device)
        if stored is not None:
            stored.check(model, shard_device, dtype)
        return
    # imported here: FSDP2 takes more than a second, and only sharded runs need it
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in model.parameters()
    }
    model.elsewhere = Sharded(copy.deepcopy(model, empty))
    model.transformer.share_queries = False  # ranks would gather a block unequally often
    if ranks_per_copy is None:
        mesh = init_device_mesh(device.type, (world_size(),))
    else:
        sizes = world_size() // ranks_per_copy, ranks_per_copy
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards"))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy()
    if bfloat16 and device.type == "cuda":
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    units = [
        fully_shard(block, mesh=mesh, mp_policy=mixed, offload_policy=policy)
        for block in model.transformer.blocks
    ]
    units.append(fully_shard(model, mesh=mesh, offload_policy=policy))
    for unit in units:  # sum, not mean, over ranks: losses are divided by the global count
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if stored is not None:
        problems = []
        try:
            stored.load(model, shard_device)
        except InputError as error:  # in this rank's rows
            problems = [str(error)]
        for problem in all_gather_objects(problems):
            raise InputError(problem)
        stored.check(model, device, dtype)
        units[-1].reshard()  # the root keeps its weights after a pass


def local_rows(tensor: Tensor) -> slice:
    """Return the slice of a tensor's rows on this rank, split like `torch.chunk`; may be empty."""
    if not is_distributed(tensor):
        return slice(None)
    mesh = tensor.device_mesh  # the last dimension shards, the one before it replicates
    shards = mesh.ndim - 1
    size = -(-len(tensor) // mesh.size(shards))  # rounded up
    index = mesh.get_local_rank(shards)
    return slice(index * size, (index + 1) * size)


def as_shard(rows: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's rows as a shard like `like`; unchanged if `like` is not sharded."""
    if not is_distributed(like):
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def is_sharded(model: nn.Module) -> bool:
    return isinstance(getattr(model, "elsewhere", None), Sharded)


def unshard(model: M) -> M:
    """Gather a sharded model into a full copy for inference; return other models unchanged."""
    sharded = getattr(model, "elsewhere", None)
    if not isinstance(sharded, Sharded):
        return model
    full: M = copy.deepcopy(sharded.skeleton)
    gathered: dict[int, Tensor] = {}  # by id: a tied head is the embedding, gathered once
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            value = full_tensor(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            gathered[id(tensor)] = nn.Parameter(value) if is_parameter else value
        state[name] = gathered[id(tensor)]
    full.load_state_dict(state, assign=True)
    # the state dict omits some buffers
    for buffer, value in zip(full.buffers(), model.buffers(), strict=True):
        buffer.data = value.data
    return full


def is_distributed(leaf: Any) -> "TypeGuard[DTensor]":
    """Return True for a DTensor, a tensor sharded over ranks; the class is slow to import."""
    return hasattr(leaf, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; return other tensors unchanged."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, and other tensors unchanged."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def gather_on_first(state: Any) -> Any:
    """Gather the sharded tensors of a nested state on rank 0's CPU; other ranks get None."""

    def gather(leaf: Any) -> Any:
        if not is_distributed(leaf):
            return leaf
        tensor = leaf.full_tensor()
        return tensor.cpu() if rank() == 0 else None

    return tree_map(gather, state)


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor, which is the same on every rank, like `like`."""
    if not is_distributed(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Call `load_state_dict` with full tensors on a model that may be sharded."""
    now = model.state_dict()
    sharded = {name: shard_like(tensor, now.get(name, tensor)) for name, tensor in state.items()}
    model.load_state_dict(sharded)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Call `load_state_dict` with full tensors on an optimizer of models that may be sharded."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def sharded(value: Tensor, parameter: Tensor) -> Tensor:
        return shard_like(value, parameter) if value.shape == parameter.shape else value

    states = {
        index: {name: sharded(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict(state | {"state": states})


def sum_gradients(*models: nn.Module) -> None:
    """Sum the gradients over all ranks: each rank's loss was divided by the global count. [N+ 8]

    If a model `is_sharded`, FSDP has already summed its gradients.
    """
    if world_size() == 1:
        return
    parameters = [p for model in models if not is_sharded(model) for p in model.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, summed in zip(gradients, sums, strict=True):
        gradient.copy_(summed.view_as(gradient))


def offload(model: GPT | ScalarModel, device: torch.device) -> None:
    """Keep a frozen model in CPU memory; `on_device` copies it to the device. Not for FSDP."""
    model.to("cpu")
    if device.type == "cuda":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.pin_memory()  # halves the time of a copy to the GPU
    model.elsewhere = Offloaded(device)


@contextmanager
def on_device(model: GPT | ScalarModel | None) -> Iterator[None]:
    """Copy an offloaded model to its device for the block, then drop the copy.

    Does nothing with other models.
    """
    offloaded = None if model is None else model.elsewhere
    if model is None or not isinstance(offloaded, Offloaded):
        yield
        return
    model.elsewhere = None  # a nested call does nothing
    tensors = [*model.parameters(), *model.buffers()]
    in_cpu_memory = [tensor.data for tensor in tensors]
    try:
        for tensor, values in zip(tensors, in_cpu_memory, strict=True):
            tensor.data = values.to(offloaded.device, copy=True, non_blocking=True)
        yield
    finally:
        for tensor, values in zip(tensors, in_cpu_memory, strict=True):
            tensor.data = values
        model.elsewhere = offloaded


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
