"""How the processes of a run start, join each other, and die together.

Under `torchrun`, or forked here by --processes N on a CPU. What they then send each other is in distributed.py.
"""

import ctypes
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from nanorlhf import distributed
from nanorlhf.errors import InputError, Interrupted

FAILURE = "nanorlhf/failure"  # key in the store of the process group
GRACE_PERIOD = 10.0  # seconds after a peer died, for `torchrun` to kill this process
TIMEOUT = timedelta(minutes=30)  # [N+ 8] for a peer that hangs, longer than a save; one that dies is noticed at once


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
            if distributed.world_size() == 1:
                raise
            # of a collective: gloo's errors have no class of their own
            if isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "gloo" in str(error):
                if processes > 1 and distributed.rank() == 0:  # which nobody kills
                    raise RuntimeError(f"in another process: {failure_elsewhere()}") from error
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(GRACE_PERIOD)
                raise RuntimeError(f"on another node {failure_elsewhere()}") from error
            with suppress(dist.DistError):  # the store's node may be gone
                dist.distributed_c10d._get_default_store().set(
                    FAILURE, f"rank {distributed.rank()} failed: {error!r:.500}"
                )
            raise

    if processes > 1:
        fork_ranks(guarded, processes)
    else:
        (record(guarded) if "TORCHELASTIC_ERROR_FILE" in os.environ else guarded)()


def fork_ranks(work: Callable[[], None], processes: int) -> None:
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
