"""The time that each kind of kernel takes: a profile in one screen."""

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from bench.stopwatch import synchronise

# a kernel has the first kind whose pattern is in its name; on a CPU, operators
KINDS = {
    "log-probabilities": r"linear_(forward|backward)_kernel|kl_kernel",
    "attention": r"flash|fmha|sdpa|decode_kernel|combine_kernel|attention",
    "matmuls": r"gemm|gemv|nvjet|cutlass|splitk|cublas|aten::(addmm|mm|bmm|baddbmm|linear)\b|mkldnn",
    "norms": r"norm|gammabeta",
    "activations and rotations": r"gelu|silu|activated|gated|rotary|triton_",
    "casts and copies": r"copy|Memcpy|CatArray|aten::cat",
    "optimizer": r"multi_tensor|adam",
    "sampling": r"scan|cumsum|searchsorted|sort|topk|reduce.*ArgMax",
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def kernel_times(way: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the seconds of each kind of kernel in a call, the longest first; on a CPU, of operators themselves."""
    way()
    synchronise(device)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as record:
        way()
        synchronise(device)
    times: dict[str, float] = {}
    for event in record.key_averages():
        microseconds = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if microseconds and not event.key.startswith(("cuda", "ProfilerStep", "Activity Buffer")):  # calls, not kernels
            kind = kind_of(event.key)
            times[kind] = times.get(kind, 0.0) + microseconds / 1e6
    return dict(sorted(times.items(), key=lambda item: -item[1]))
