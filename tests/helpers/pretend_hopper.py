"""Simulate a Hopper GPU for whole scripts, with bfloat16, packed rows and Triton kernels.

FlashAttention is computed row by row, after the checks that it makes on a GPU. Triton kernels run in the interpreter
on the data of the simulated GPU's tensors, and reject host tensors. Autocast casts as on a CPU.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import kernels.activation  # noqa: F401  in KERNELS
import kernels.attention
import kernels.norm
import nanorlhf.distributed
import nanorlhf.layers
import nanorlhf.training.update_metrics
from nanorlhf.packing import Bounds, attend_by_row
from tests.helpers.pretend_gpu import OnGPU, PretendGPU, changed, tensors

DEVICE = {  # of torch.cuda
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    "is_bf16_supported": lambda including_emulation=True: True,
}
KERNELS = (
    "logprobs.linear_forward_triton",
    "logprobs.linear_backward_triton",
    "gae.gae_triton",
    "kl.kl_triton",
    # between matmuls
    "norm.add_norm_triton",
    "norm.add_norm_backward_triton",
    "attention.rotary_triton_",
    "attention.rotary_store_triton",
    "activation.activated_triton",
    "activation.activated_backward_triton",
    "activation.gated_triton",
    "activation.gated_backward_triton",
)


def as_launch(function: Callable) -> Callable:
    """Wrap a function that launches a Triton kernel: it gets the data of its arguments."""

    def launch(*arguments: Any, **settings: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            return function(*arguments, **settings)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **settings: Any) -> Any:
        gpu, inputs = PretendGPU.current, tensors((arguments, settings))
        gpu.launches.append(function.__name__)
        assert all(isinstance(tensor, OnGPU) for tensor in inputs), f"{function.__name__} got a host tensor"
        on_gpu = {id(tensor.held): tensor for tensor in inputs if isinstance(tensor, OnGPU)}
        arguments, settings = changed((arguments, settings), lambda tensor: tensor.held)  # type: ignore[attr-defined]
        if gpu.graph is not None:
            gpu.memory.used(tensors((arguments, settings)))
        result = launch(*arguments, **settings)
        if gpu.graph is not None:
            gpu.memory.made(tensors(result))
            gpu.graph.calls.append((launch, arguments, settings, result))
        return changed(result, lambda tensor: on_gpu[id(tensor)] if id(tensor) in on_gpu else OnGPU(tensor))

    return wrapped


@functools.wraps(torch.nn.attention.varlen.varlen_attn)
def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """PyTorch's function, row by row; q (N, H, D), k and v (M, K, D) -> (N, H, D)"""
    PretendGPU.current.launches.append("varlen_attn")
    assert all(isinstance(x, OnGPU) for x in (q, k, v, cu_seq_q, cu_seq_k))
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.size(-1) % 8 == 0 and q.size(-1) <= 256
    assert q.size(1) == k.size(1) or enable_gqa and q.size(1) % k.size(1) == 0
    for bounds, x, longest in ((cu_seq_q, q, max_q), (cu_seq_k, k, max_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous()
        lengths = bounds.cpu().diff()
        assert bounds.tolist()[0] == 0 and bounds.tolist()[-1] == len(x)
        assert 0 <= lengths.min() and lengths.max() <= longest
    left, right = window_size
    assert right == 0
    rows = Bounds(cu_seq_q, cu_seq_k, max_q, max_k, None if left < 0 else left + 1)
    return attend_by_row(*(x.transpose(0, 1)[None] for x in (q, k, v)), rows, scale)[0].transpose(0, 1)


class PretendHopper(PretendGPU):
    """fuses: run the kernels between matmuls too, at about 10 times the time."""

    def __init__(self, fuses: bool = False) -> None:
        super().__init__()
        self.fuses = fuses
        self.launches: list[str] = []  # of kernels

    def patch(self, target: Any, name: str, value: Any) -> None:
        self.patches.enter_context(mock.patch.object(target, name, value))

    def __enter__(self):
        is_first = self.depth == 0
        super().__enter__()
        if is_first:
            for name, value in DEVICE.items():
                self.patch(torch.cuda, name, value)
            self.patch(nanorlhf.training.update_metrics, "matmul_rate", lambda device, dtype: 8e14)
            self.patch(Tensor, "pin_memory", lambda tensor: tensor)
            self.patch(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
            self.patch(nn.Module, "to", module_to)
            # a simulated tensor can't be assigned to the data of a host tensor
            self.patch(nanorlhf.distributed, "offload", module_to)
            for path in KERNELS:
                module, name = path.split(".")
                where = sys.modules[f"kernels.{module}"]
                self.patch(where, name, as_launch(getattr(where, name)))
            if self.fuses:
                self.patch(nanorlhf.layers, "fuses", kernels.norm.fuses)
                self.patch(kernels.attention, "fuses", kernels.norm.fuses)
        return self


TO = nn.Module.to


def module_to(model: nn.Module, *arguments: Any, **settings: Any) -> nn.Module:
    """`Module.to`; C++ treats a simulated tensor as a host tensor and would replace shared ones twice."""
    device, dtype, *_ = torch._C._nn._parse_to(*arguments, **settings)
    if device is None or device.type == "cpu":
        return TO(model, *arguments, **settings)
    return PretendGPU.current.move(model if dtype is None else TO(model, dtype))
