"""Start the processes of a run, join them in a process group, and end all of them if one fails.

`torchrun` starts them, or on a CPU --processes N forks them here. Communication is in
distributed.py.
"""

import ctypes
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.context import ForkProcess

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from nanorlhf import distributed
from nanorlhf.errors import InputError, Interrupted, PeerFailed, error_sentence
from nanorlhf.files import interrupts_wait

FAILURE = "nanorlhf/failure"  # key in the store of the process group
JOINING = "nanorlhf/joining"  # and one per rank
LONGEST_TRACE = 20_000  # characters
GRACE_PERIOD = 10.0  # seconds after a peer's death in which `torchrun` kills this process
# [N+ 8] for a peer that hangs: longer than a save. A peer that dies is noticed at once.
TIMEOUT = timedelta(minutes=30)
# for a forked peer to join: one that dies while joining is not noticed at once
JOIN_TIMEOUT = timedelta(seconds=60)


def setup(device: str, dtype: str = "float32") -> torch.device:
    """Join the process group if `torchrun` started several processes; return this rank's device.

    device: auto (CUDA if available), cpu, cuda (one GPU per local rank) or, for a single process,
    cuda:N or mps, which computes in float32 only. Raises InputError for anything else.
    """
    if device == "auto":
        device = "cpu" if is_cpu(device) else "cuda"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise InputError(f"--device {device}: must be auto, cpu, cuda, cuda:N or mps.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise InputError("--device mps: PyTorch found no GPU of Apple's.")
    if device == "mps" and dtype != "float32":
        raise InputError(f"--dtype {dtype}: on mps only float32 works.")
    num_processes = 1
    if "RANK" in os.environ:
        num_processes = distributed.launched("WORLD_SIZE", 1, 10**6)
        distributed.launched("RANK", 0, num_processes - 1)
    if num_processes > 1 and device == "mps":
        raise InputError(f"--device mps: {num_processes} processes can't share it: start one.")
    if num_processes > 1 and ":" in device:
        raise InputError(f"--device {device} puts {num_processes} processes on one GPU: pass cuda.")
    if device == "cuda":
        device = f"cuda:{distributed.launched('LOCAL_RANK', 0, 10**6, default=0)}"
    num_gpus = torch.cuda.device_count()
    if device.startswith("cuda:") and int(device[5:]) >= num_gpus:
        raise InputError(f"--device {device}: PyTorch found {num_gpus} CUDA devices.")
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # kernels, streams and graphs use the current device
    if num_processes > 1 and not dist.is_initialized():
        distributed.launched("MASTER_PORT", 0, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise InputError("MASTER_ADDR is not set, but RANK is: start the run with `torchrun`.")
        die_with_parent()
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    if device == "cpu":
        keep_freed_memory()
    return torch.device(device)


def is_cpu(device: str) -> bool:
    """Return True if --device means the CPU on this machine."""
    return device == "cpu" or device == "auto" and not torch.cuda.is_available()


def run(main: Callable[[], object], device: str, processes: int) -> None:
    """Call `main`, on a CPU in several processes; report the error of the one that failed first.

    The process that fails first puts its error into the shared store. If the processes were forked
    here, rank 0 reports it. Under `torchrun`, the process that failed reports it, and a bug also
    goes to the file that `torchrun` reads; the other processes wait to be killed, and report the
    error too if they aren't, because the failed process is on another node.
    """
    if not is_cpu(device):
        processes = 1
    if processes > 1 and "RANK" in os.environ:
        raise InputError(f"--processes {processes}: `torchrun` has already started the processes.")
    if processes > 1 and sys.platform != "linux":
        raise InputError(
            f"--processes {processes} needs Linux: use `torchrun --nproc-per-node {processes}`."
        )

    def guarded() -> Exception | None:
        """Return an error that needs no traceback: `record` would write one if it were raised."""
        try:
            main()
        except Interrupted as error:
            return error
        except Exception as error:
            is_first = distributed.world_size() == 1 or fails_first(error)
            if processes > 1 and distributed.rank() > 0:
                sys.exit(1)  # which rank 0 notices
            if not is_first:
                return failure_elsewhere(forked=processes > 1)
            if error_sentence(error) is None:
                raise
            return error
        return None

    def work() -> None:
        is_recorded = "TORCHELASTIC_ERROR_FILE" in os.environ
        failure = record(guarded)() if is_recorded else guarded()
        if failure is not None:
            raise failure

    if processes > 1:
        fork_ranks(work, processes)
    else:
        work()


def fails_first(error: Exception) -> bool:
    """Return True if no peer has failed before, and put the error into the shared store."""
    # a collective failed because a peer did: gloo's errors have no specific class
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    if is_gloo or isinstance(error, dist.DistError):
        return False
    trace = "".join(traceback.format_exception(error))
    failure = json.dumps([distributed.rank(), error_sentence(error), trace[-LONGEST_TRACE:]])
    with suppress(dist.DistError):  # the store's node may be gone
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set(FAILURE, "", failure).decode() == failure
    return True


def failure_elsewhere(forked: bool) -> Exception:
    """Return the error that the first failed process put into the shared store, if it could."""
    if not forked:  # `torchrun` kills this process if the other one was on the same node
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(GRACE_PERIOD)
    where = "in another process" if forked else "on another node"
    with suppress(dist.DistError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([FAILURE]):
            rank, sentence, trace = json.loads(store.get(FAILURE))
            if sentence is not None:
                return InputError(sentence)
            return PeerFailed(f"{where}: rank {rank} failed:\n{trace.strip()}")
    return PeerFailed(f"{where}: a process died, or the node itself: its output may show why")


def fork_ranks(work: Callable[[], None], processes: int) -> None:
    """Do the work in several processes with one thread each: this one, rank 0, forks the others.

    Useful for small models: two threads synchronise at each matmul, two processes once per
    optimizer step. A fork repeats no imports. It must come before PyTorch starts threads, because a
    fork loses them.
    """
    num_threads = torch.get_num_threads()
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    interrupted = signal.getsignal(signal.SIGINT)
    peers: list[ForkProcess] = []

    def join(rank: int) -> None:
        handle = listener.detach() if rank == 0 else None
        store = dist.TCPStore(
            address, port, is_master=rank == 0, wait_for_workers=False, master_listen_fd=handle
        )
        torch.set_num_threads(1)
        store.set(f"{JOINING}/{rank}", "")
        for number, peer in enumerate(peers if rank == 0 else [], start=1):
            while not store.check([f"{JOINING}/{number}"]):
                if not peer.is_alive():  # the process group would wait for it
                    raise PeerFailed(f"in another process: rank {number} died at startup")
                time.sleep(0.01)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=processes, timeout=JOIN_TIMEOUT
            )
        except (RuntimeError, dist.DistError) as error:
            seconds = JOIN_TIMEOUT.total_seconds()
            raise PeerFailed(
                f"in another process: it died at startup, or did not join within {seconds:.0f} s"
            ) from error
        dist.distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)
        work()

    def follow(rank: int) -> None:
        signal.signal(signal.SIGINT, interrupted)
        die_with_parent()
        listener.close()
        try:
            with suppress(Interrupted):  # rank 0 prints the same
                join(rank)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)

    try:
        with interrupts_wait():  # within a fork, Python swallows Ctrl-C and keeps logging's lock
            for rank in range(1, processes):
                process = ForkProcess(target=follow, args=(rank,))
                process.start()
                peers.append(process)
        join(0)
        for peer in peers:
            peer.join()
            if peer.exitcode:  # it failed after its last exchange with this process
                raise failure_elsewhere(forked=True)
    except BaseException as error:
        codes = []
        for peer in peers:
            peer.join(1.0 if isinstance(error, PeerFailed) else 0)  # for its exit code, if it ends
            codes.append(peer.exitcode)
            peer.kill()
        if not isinstance(error, PeerFailed):
            raise
        # a signal to all processes, received by one before or after it handles signals
        for number in (signal.SIGTERM, signal.SIGINT):
            if {-number, 128 + number} & {*codes}:
                raise Interrupted(
                    f"stopped by {number.name} before or after its steps: --resume continues from "
                    "the last state, if there is one.",
                    128 + number,
                ) from error
        for rank, code in enumerate(codes, start=1):
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                hint = ", maybe out of memory" if -code == signal.SIGKILL else ""
                raise PeerFailed(f"in another process: rank {rank} died of {name}{hint}") from error
        raise
    finally:
        for peer in peers:
            peer.join()
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(num_threads)


def die_with_parent() -> None:
    """Kill this process when its parent is killed, even with SIGKILL. Linux only."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1  # from prctl.h
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next tensor instead of returning it to the kernel.

    Otherwise the kernel zeroes and maps the pages of each large tensor again, and a PPO step on a
    CPU takes 10 to 20% longer. Does nothing with another C library.
    """
    if sys.platform != "linux":
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_MAX, 0)  # allocate large tensors on the heap too
        library.mallopt(M_TRIM_THRESHOLD, -1)  # and never shrink the heap
