"""Time implementations in alternation, measure their memory, and build the table's rows."""

import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bench import limit
from bench.settings import Args
from kernels import processor
from nanorlhf.launch import die_with_parent
from nanorlhf.progress import Progress
from nanorlhf.training.flops import published

BEFORE = "ours, padded and unfused"


def compare(ways: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, tuple[float, int]]:
    """Alternate between `ways` for `rounds` rounds after a warm-up; return each one's (median seconds, peak bytes)."""
    peaks = {name: peak_bytes(way, device) for name, way in ways.items()}  # also the warm-up
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            synchronise(device)
            start = time.perf_counter()
            way()
            synchronise(device)
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times[name]), peaks[name]) for name in ways}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_bytes(way: Callable[[], object], device: torch.device) -> int:
    """Return how far the peak of torch's allocator during the call exceeds the memory allocated before.

    On a CPU, this comes from the profiler's record of allocations, which doesn't include oneDNN's.
    """
    gc.collect()
    if device.type == "cuda":
        way()  # compiles and autotunes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way()
        return torch.cuda.max_memory_allocated() - before
    way()  # allocates what stays, such as gradients
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        way()
    events = record.profiler.kineto_results.events()
    held = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        peak = max(peak, held)
    return peak


def in_processes(
    ways: dict[str, Callable[[Args, Path], tuple[float, int]]], args: Args, directory: Path, what: str
) -> dict[str, tuple[float, int]]:
    """Alternate between `ways`, each call in a new process; return each one's (median seconds, peak bytes)."""
    times, peaks = {name: [] for name in ways}, {}
    for _ in Progress(range(args.rounds), desc=what):
        for name, way in ways.items():
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn, initializer=die_with_parent) as worker:
                seconds, peaks[name] = worker.submit(way, args, directory).result()
            times[name].append(seconds)
    return {name: (statistics.median(times[name]), peaks[name]) for name in ways}


def peak_of_process(device: str) -> int:
    """Return the peak bytes of this process and its forked child, if any; on CUDA, of PyTorch's allocator."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Use the matmuls of `torch.nn.functional.linear`; on a GPU, compute padding, without Triton."""
    before = processor.chosen
    processor.use(processor.PLAIN)
    try:
        with padded_and_unfused():
            yield
    finally:
        processor.use(before)


@contextmanager
def padded_and_unfused() -> Iterator[None]:
    """Run our code on a GPU without packing, kernels between the matmuls, the decode kernel and kept casts."""
    off = lambda *arguments: False  # noqa: E731
    with (
        mock.patch("nanorlhf.reading.can_pack", off), mock.patch("nanorlhf.cache.can_decode", off),
        mock.patch("nanorlhf.layers.fuses", off), mock.patch("kernels.attention.fuses", off),
        mock.patch("nanorlhf.batch.kept_casts", nullcontext), mock.patch("kernels.linear.casts", None),
    ):  # fmt: skip
        yield


def before_and_after(way: Callable[[], object], device: torch.device) -> dict[str, Callable[[], object]]:
    """Return our code as it is and, on a GPU, padded and unfused; on a CPU both are the same."""
    ways = {"ours": way}
    if device.type == "cuda":
        ways[BEFORE] = padded_and_unfused()(way)
    return ways


def rates(row: dict) -> str:
    """Return a row's rates in words: tokens or programs, model FLOPs and bytes per second."""
    words = [
        f"{rate:,.{0 if rate > 10 else 1}f} {unit}/s"
        for unit in ("tokens", "programs")
        if (rate := row.get(f"{unit}_per_second")) is not None
    ]
    if "mfu" in row:
        words.append(f"MFU {row['mfu']:.0%}")
    if "matmul_share" in row:
        words.append(f"{row['matmul_share']:.0%} of the matmul rate")
    if "bytes_per_second" in row:
        words.append(f"{row['bytes_per_second'] / 1e9:,.1f} GB/s of {row['read_rate'] / 1e9:,.1f}")
    if "packing_seconds" in row:
        words.append(f"including {1e3 * row['packing_seconds']:,.1f} ms to round and pack weights")
    return ", ".join(words)


def table_rows(what: str, size: str, result: dict[str, tuple[float, int]]) -> list[dict]:
    ours = result["ours"]
    return [
        {"what": what, "size": size, "way": name, "seconds": seconds, "ratio": seconds / ours[0], "peak_bytes": peak}
        for name, (seconds, peak) in result.items()
    ]


def with_limit(rows: list[dict], work: limit.Work, device: torch.device, args: Args) -> list[dict]:
    """Add the limit in seconds for args.dtype to the rows; lower precision may be faster than that.

    Also the algorithm's FLOPs per second as a share of the measured rate of a large matmul and, in bfloat16 on a known
    card, of its published rate: model FLOPs utilisation.
    """
    dtype = getattr(torch, args.dtype)
    added = {"limit_seconds": work.seconds(device, dtype)}
    rates = {"matmul_share": limit.matmul_rate(device, dtype)}
    if args.dtype == "bfloat16" and (card := published(device)):
        rates["mfu"] = card.rate
    flops = work.flops + sum(flops for flops, _ in work.steps)
    return [row | added | {name: flops / row["seconds"] / rate for name, rate in rates.items()} for row in rows]
