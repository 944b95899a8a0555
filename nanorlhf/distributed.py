"""Data parallelism in a few plain functions; a single process is one rank.

Every rank computes the same global batch and takes its own slice. A loss is a sum divided by the *global* count, so
gradients are summed across ranks and the result does not depend on the number of processes (to rounding).
The paper uses accelerate with ZeRO-2; this is plain PyTorch.

With `shard`, each rank holds only its shard of a model's weights, gradients and optimizer state; FSDP2 gathers a block
when it runs. Code that runs a different number of times on each rank, or once per token, uses `plain(model)` instead.
"""

import copy
import ctypes
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._pytree import tree_map

from nanorlhf.errors import InputError, Interrupted
from nanorlhf.model import GPT, ScalarModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FAILURE = "nanorlhf/failure"  # key in the store of the process group
WAIT_TO_BE_KILLED = 10.0  # seconds that a process whose neighbour died waits for `torchrun`
TIMEOUT = timedelta(minutes=30)  # [N+ 8] of one that hangs, and longer than a save; one that dies is noticed at once
M = TypeVar("M", bound=nn.Module)
N = TypeVar("N", int, float)


def setup(device: str) -> torch.device:
    """Join the process group if `torchrun` started several processes; returns this rank's device.

    device: auto (CUDA if available), cpu, cuda (one GPU per local rank) or, for a single process, cuda:N; InputError
    otherwise.
    """
    if device == "auto":
        device = "cpu" if is_cpu(device) else "cuda"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise InputError(f"--device {device}: write auto, cpu, cuda or cuda:N.")
    num_processes = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    if num_processes > 1 and ":" in device:
        raise InputError(f"--device {device} would put all {num_processes} processes on one GPU: write cuda.")
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        raise InputError(f"--device {device}: this PyTorch sees {torch.cuda.device_count()} CUDA devices; use another.")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # kernels, streams and graphs are made on the current device
    if num_processes > 1 and not dist.is_initialized():
        die_with_parent()
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    if device == "cpu":
        keep_freed_memory()
    return torch.device(device)


def is_cpu(device: str) -> bool:
    """Whether --device means this machine's CPU."""
    return device == "cpu" or device == "auto" and not torch.cuda.is_available()


def run(main: Callable[[Any], object], args: Any) -> None:
    """Call main(args), on a CPU in --processes processes, and report the error of the one that failed first.

    Under `torchrun` the error goes to the file that it reads. A process that fails only because another one died waits
    to be killed, so that its error is not reported as the cause. Where that one was on another node, whose `torchrun`
    can't kill it, or was forked here, it repeats the other's error. Raises InputError for processes that can't be.
    """
    computes_on_cpu = is_cpu(args.device) and not getattr(args, "plan", False)
    processes = getattr(args, "processes", 1) if computes_on_cpu else 1
    if processes > 1 and "RANK" in os.environ:
        raise InputError(f"--processes {processes}: `torchrun` has started the processes already: omit the flag.")
    if processes > 1 and sys.platform != "linux":
        raise InputError(f"--processes {processes} needs Linux: put `torchrun --nproc-per-node {processes}` in front.")

    def guarded() -> None:
        try:
            main(args)
        except Exception as error:
            if world_size() == 1:
                raise
            # of a collective: gloo's errors have no class of their own
            if isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo" in str(error):
                if processes > 1 and rank() == 0:  # which nobody kills
                    raise RuntimeError(f"in another process: {failure_elsewhere()}") from error
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(WAIT_TO_BE_KILLED)
                raise RuntimeError(f"on another node {failure_elsewhere()}") from error
            with suppress(dist.DistError):  # the store's node may be gone
                dist.distributed_c10d._get_default_store().set(FAILURE, f"rank {rank()} failed: {error!r:.500}")
            raise

    if processes > 1:
        share(guarded, processes)
    else:
        (record(guarded) if "TORCHELASTIC_ERROR_FILE" in os.environ else guarded)()


def share(work: Callable[[], None], processes: int) -> None:
    """Do the work as rank 0 of so many processes of one thread each; the others are forked from this one.

    For small models: two threads wait for each other at each product, two processes once per optimizer step. A fork
    imports nothing twice; it has to come before PyTorch has threads, which it would lose. Rank 0 speaks for all.
    """
    threads, listener = torch.get_num_threads(), socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()

    def join(number: int) -> None:
        handle = listener.detach() if number == 0 else None
        store = dist.TCPStore(address, port, is_master=number == 0, wait_for_workers=False, master_listen_fd=handle)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=store, rank=number, world_size=processes, timeout=TIMEOUT)
        work()

    def follow(number: int) -> None:
        die_with_parent()
        listener.close()
        with suppress(InputError, Interrupted, KeyboardInterrupt):  # rank 0 has the same, and says so
            join(number)

    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=follow, args=(number,)) for number in range(1, processes)]
    for other in others:
        other.start()
    try:
        join(0)
    except BaseException:
        for other in others:
            other.kill()
        raise
    finally:
        for other in others:
            other.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)


def failure_elsewhere() -> str:
    """What the process that failed first has left in the store that all share, if it could."""
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([FAILURE]):
            return store.get(FAILURE).decode(errors="replace")
    return "a process died, or the node itself: its output may say why"


def die_with_parent() -> None:
    """Kill this process when `torchrun` is killed with SIGKILL, which ends no children. Linux only."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next tensor instead of returning it to the kernel.

    Otherwise the kernel zeroes and maps the pages of a large tensor anew each time: a PPO step on a CPU takes 10 to 20%
    longer. Does nothing with another C library.
    """
    if sys.platform != "linux":
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_MAX, 0)  # allocate large tensors on the heap too
        library.mallopt(M_TRIM_THRESHOLD, -1)  # and never shrink the heap


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def node_size() -> int:
    """Number of this node's processes. Raises InputError where another node has another number."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    sizes = set(all_gather_objects([here]))
    if len(sizes) > 1:
        raise InputError(f"--shard hsdp: nodes run {sorted(sizes)} processes: pass all the same --nproc-per-node.")
    return here


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rank_slice(num_rows: int) -> slice:
    """This rank's rows of a global batch; `num_rows` must be a multiple of the world size."""
    share = num_rows // world_size()
    return slice(rank() * share, (rank() + 1) * share)


def all_sum(value: Tensor) -> Tensor:
    """Sum `value` over all ranks in place and return it."""
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def all_gather_rows(rows: Tensor) -> Tensor:
    """(b, ...) on each rank -> (B, ...) in rank order, on every rank."""
    if world_size() == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows.contiguous())
    return torch.cat(gathered)


def all_gather_objects(rows: list) -> list:
    """A list on each rank -> their concatenation in rank order, on every rank."""
    if world_size() == 1:
        return rows
    gathered: list[list] = [[] for _ in range(world_size())]
    dist.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


def from_first(function: Callable[[], Any]) -> Any:
    """Call the function on rank 0 only; return its result on every rank."""
    box = [function() if rank() == 0 else None]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def largest(number: N) -> N:
    """The maximum of `number` over all ranks."""
    box = torch.tensor(number)
    if world_size() > 1:
        dist.all_reduce(box, dist.ReduceOp.MAX)
    return type(number)(box.item())


# ------------------------------------------------------------------------------------------------------ sharded weights
def shard(
    model: GPT | ScalarModel, device: torch.device, bfloat16: bool, offload: bool = False, within: int | None = None
) -> None:
    """Shard the model's weights across the ranks' devices, block by block (FSDP2); a single process keeps it whole.

    within: so many consecutive ranks, those of a node, share one copy of the weights, and the nodes' copies are kept
    equal by summing their gradients (HSDP); None: all ranks share one.

    bfloat16: on CUDA, gather the blocks in bfloat16 and sum their gradients in float32; embedding, final norm and heads
    stay float32, as under autocast. offload: keep this rank's shard in CPU memory. Of a model that was loaded on the
    meta device, each rank reads only its own rows from the files.
    """
    home = torch.device("cpu") if offload else device
    if not dist.is_initialized():
        if "stored" in model.__dict__:
            read_weights(model, home)
        model.to(home)
        return
    # here, as FSDP2 takes more than a second to import, which only a sharded run needs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    stored = model.__dict__.pop("stored", None)
    tensors = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    model.__dict__["skeleton"] = copy.deepcopy(model, tensors)  # for `plain`; not registered as a submodule
    if within is None:
        mesh = init_device_mesh(device.type, (world_size(),))
    else:
        mesh = init_device_mesh(device.type, (world_size() // within, within), mesh_dim_names=("copies", "shards"))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    mixed = MixedPrecisionPolicy()
    if bfloat16 and device.type == "cuda":
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    parts = [
        fully_shard(block, mesh=mesh, mp_policy=mixed, offload_policy=policy) for block in model.transformer.blocks
    ]
    parts.append(fully_shard(model, mesh=mesh, offload_policy=policy))
    for part in parts:  # sum, not mean, over ranks: losses are divided by the global count
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    if stored is not None:
        model.__dict__["stored"] = stored
        read_weights(model, home)


def read_weights(model: nn.Module, device: str | torch.device) -> None:
    """Read the weights of a model that was loaded on the meta device; of a sharded one only this rank's rows."""
    stored = model.__dict__.pop("stored")
    read: dict[nn.Parameter, nn.Parameter] = {}  # a tied head is the embedding, read once
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in read and mine(parameter).is_meta:
                here = stored.rows(f"{path}.{name}".lstrip("."), my_rows(parameter))
                value = torch.empty(here.shape, dtype=parameter.dtype, device=device).copy_(here)
                read[parameter] = nn.Parameter(like_shard(value, parameter), parameter.requires_grad)
            if parameter in read:
                setattr(module, name, read[parameter])


def my_rows(tensor: Tensor) -> slice:
    """This rank's rows of a tensor as FSDP2 shards it: like `torch.chunk`, so the last ranks may have fewer or none."""
    if not is_distributed(tensor):
        return slice(None)
    mesh = tensor.device_mesh  # the last dimension shards, one before it copies
    share, place = -(-len(tensor) // mesh.size(mesh.ndim - 1)), mesh.get_local_rank(mesh.ndim - 1)
    return slice(place * share, (place + 1) * share)


def like_shard(rows: Tensor, like: Tensor) -> Tensor:
    """This rank's rows as the sharded tensor that `like` is; unchanged if it is not sharded."""
    if not is_distributed(like):
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def is_sharded(model: nn.Module) -> bool:
    return "skeleton" in model.__dict__


def plain(model: M) -> M:
    """The model itself; of a sharded model, a copy with the full weights gathered now, for inference only."""
    if not is_sharded(model):
        return model
    copied: M = copy.deepcopy(model.__dict__["skeleton"])
    gathered: dict[int, Tensor] = {}  # by id: a tied head is the embedding, gathered once
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            value = whole(tensor.detach())
            gathered[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
        state[name] = gathered[id(tensor)]
    copied.load_state_dict(state, assign=True)
    for theirs, ours in zip(copied.buffers(), model.buffers(), strict=True):  # the state dict omits some buffers
        theirs.data = ours.data
    return copied


def is_distributed(leaf: Any) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor, one shard of which is here; asked by attribute, as the class is slow to import."""
    return hasattr(leaf, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, on every rank; other tensors unchanged."""
    return tensor.full_tensor() if is_distributed(tensor) else tensor


def mine(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; other tensors unchanged."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def on_first(state: Any) -> Any:
    """A nested state with its sharded tensors gathered on rank 0's CPU; on other ranks they become None."""

    def gather(leaf: Any) -> Any:
        if not is_distributed(leaf):
            return leaf
        tensor = leaf.full_tensor()
        return tensor.cpu() if rank() == 0 else None

    return tree_map(gather, state)


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a full tensor, the same on every rank, as `like` is sharded."""
    if not is_distributed(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """`load_state_dict` with full tensors, into a model that may be sharded."""
    now = model.state_dict()
    model.load_state_dict({name: cut_like(tensor, now.get(name, tensor)) for name, tensor in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict` with full tensors, into an optimizer of models that may be sharded."""
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
    """Sum the gradients over all ranks: each rank's loss was divided by the global count."""
    if world_size() == 1:
        return
    gradients = [
        p.grad for model in models if not is_sharded(model) for p in model.parameters() if p.grad is not None
    ]  # FSDP has already summed those of a sharded model
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def offload(model: nn.Module, device: torch.device) -> None:
    """Keep a frozen model in CPU memory; `visiting` brings it to the device. FSDP offloads its own by itself."""
    model.to("cpu")
    if device.type == "cuda":
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.pin_memory()  # from where a copy to the GPU takes half the time
    model.__dict__["visits"] = device


@contextmanager
def visiting(model: nn.Module | None) -> Iterator[None]:
    """A model that waits in CPU memory is on its device within, as a copy that is then dropped."""
    device = None if model is None else model.__dict__.pop("visits", None)  # within, it does not visit again
    if model is None or device is None:
        yield
        return
    tensors = [*model.parameters(), *model.buffers()]
    at_home = [tensor.data for tensor in tensors]
    try:
        for tensor, values in zip(tensors, at_home, strict=True):
            tensor.data = values.to(device, copy=True, non_blocking=True)
        yield
    finally:
        for tensor, values in zip(tensors, at_home, strict=True):
            tensor.data = values
        model.__dict__["visits"] = device


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
