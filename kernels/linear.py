"""x @ weight.T + bias in float32 on a CPU, with one of the two BLAS libraries in PyTorch.

PyTorch's CPU builds multiply float32 with MKL. They also include oneDNN, which is used here for 8
to 511 rows and large weights (`is_for_onednn`), but not for gradients. Its float32 matmul is only
available through a private operator. Without it, and for other shapes, `F.linear` is used.

oneDNN repacks a weight before each multiplication. A sampler multiplies a few rows by the same
weights for every token, so it packs them once: `PackedWeight`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import processor

MANY_WEIGHTS = 2**20  # smaller weights stay in the cache: not worth oneDNN, nor packing
# name -> function, and oneDNN's arguments to fuse it into the matmul
ACTIVATIONS: dict[str | None, tuple[Callable[[Tensor], Tensor], tuple[str, list, str]]] = {
    None: (lambda x: x, ("none", [], "")),
    "gelu": (F.gelu, ("gelu", [], "none")),
    "gelu_new": (lambda x: F.gelu(x, approximate="tanh"), ("gelu", [], "tanh")),
    "relu": (F.relu, ("relu", [], "")),
    "silu": (F.silu, ("swish", [], "")),
}


@cache
def onednn_matmul() -> Callable | None:
    """Return oneDNN's linear operator if this build has both oneDNN and MKL, else None."""
    if (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return torch.ops.mkldnn._linear_pointwise.default
    return None


class Packed(Protocol):
    """Weight (N, K) prepared for sampling: a `PackedWeight`, or an `Int8Weight` (int8.py)."""

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """Multiply x (..., K) and add bias (N,): (..., N), without a gradient."""


class PackedWeight:
    """Float32 weight (N, K) in oneDNN's packed layout; results are equal up to rounding."""

    def __init__(self, weight: Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """Multiply x (..., K) and add bias (N,): (..., N), without a gradient."""
        _, fused = ACTIVATIONS[activation]
        return torch.ops.mkldnn._linear_pointwise(x.detach(), self.packed, bias, *fused)


def is_worth_packing(weight: Tensor) -> bool:
    """Return whether a sampler should pack this weight: it is large and oneDNN can multiply it."""
    is_large = weight.numel() >= MANY_WEIGHTS
    return is_large and processor.chosen.pack and fits_onednn(weight, weight)


def linear(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Compute activation(x weight^T + bias), differentiable.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N)
    """
    if not isinstance(weight, Tensor):
        return weight.matmul(x, bias, activation)
    function, _ = ACTIVATIONS[activation]
    compiling = torch.compiler.is_compiling()
    if compiling or not is_for_onednn(x, weight):
        if not compiling and casts is not None and weight.dtype == torch.float32:
            (weight,), bias = cast(weight), None if bias is None else cast(bias)[0]
        return function(F.linear(x, weight, bias))
    is_trained = any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if not (is_trained and torch.is_grad_enabled()):
        return matmul_by_onednn(x, weight, bias, activation)
    # flatten outside the Function, so that its output isn't a view
    y = OneDNNLinear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    return function(y)


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """Return autocast's dtype if it is on, else the weight's dtype."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


# (tensor, its version, its cast) by id and by whether a cast has a gradient; None: keep none
casts: dict[tuple[int, bool], tuple[Tensor, int, Tensor]] | None = None


@contextmanager
def kept_casts() -> Iterator[None]:
    """Cast each parameter to autocast's dtype once in this context, and again if it changes.

    autocast itself keeps casts only until its outermost context ends, which would be one
    micro-batch, and keeps none of frozen parameters, such as the weights below LoRA's updates.
    """
    global casts
    outer, casts = casts, {}
    try:
        yield
    finally:
        casts = outer


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the inputs of a matmul to autocast's dtype if it is on."""
    return tuple(cast_one(tensor) for tensor in tensors)


def cast_one(tensor: Tensor) -> Tensor:
    dtype = matmul_dtype(tensor)
    if casts is None or dtype == tensor.dtype or not isinstance(tensor, nn.Parameter):
        return tensor.to(dtype)
    key = id(tensor), torch.is_grad_enabled()
    _, version, kept = casts.get(key, (tensor, -1, tensor))
    if version != tensor._version or kept.dtype != dtype:
        kept = tensor.to(dtype)
        casts[key] = tensor, tensor._version, kept
    return kept


def cast_head(weight: Tensor | Packed) -> Tensor | Packed:
    """Cast an LM head's weight (V, C) for `wide_linear`, once for many calls."""
    if not isinstance(weight, Tensor):
        return weight
    (head,) = cast(weight)
    return head if head.is_cuda else head.to(weight.dtype)  # no CPU matmul widens its inputs


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(x / cap): close to x where x is small, always within +-cap. (Gemma 2)"""
    return (x / cap).tanh() * cap


def wide_linear(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """Compute logits x weight^T + bias, differentiable, in float32 even from bfloat16 inputs.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N); float64 from float64. `cap` bounds the
    matmul before the bias is added; the bias is -inf for forbidden ids. Logits rounded to bfloat16
    are off by up to 0.4%, and at a low temperature that gives a different distribution. Autocast
    must be off, because it would round them.
    """
    if cap is not None:
        y = soft_cap(wide_linear(x, weight), cap)
        return y if bias is None else y + bias
    if not isinstance(weight, Tensor):
        return linear(x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=wide)  # the tensor cores' accumulator
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias
    return linear(x.to(wide), weight.to(wide), bias)


def matmul_by_onednn(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Compute activation(a b^T + bias) without a gradient. `onednn_matmul` must not be None.

    a (..., K), b (N, K), bias (N,) or None -> (..., N)
    """
    operator = onednn_matmul()
    assert operator is not None
    _, fused = ACTIVATIONS[activation]
    return operator(a, b, bias, *fused)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """Write a b^T to out, or add it; PyTorch's own matmul does this without a copy.

    a (M, K), b (N, K), out (M, N), which may have a wider dtype.
    """
    if out.dtype != a.dtype:
        # a bfloat16 matmul is faster in the second order if a and b are both transposed
        y = F.linear(a, b) if add else F.linear(b, a).T
        out.add_(y) if add else out.copy_(y)
    elif add:
        out.addmm_(a, b.T)
    else:
        torch.mm(a, b.T, out=out)


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes x weight^T: it can, it is faster at this shape, and is chosen.

    Nothing is timed during a run, so that results are reproducible.
    """
    return (
        processor.chosen.onednn
        and fits_onednn(x, weight)
        and 8 <= x.numel() // x.size(-1) < 512
        and weight.numel() >= MANY_WEIGHTS
    )


def fits_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether a b^T is float32 on a CPU with K > 0; PyTorch itself uses oneDNN for bf16."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.is_cpu
        and a.size(-1) > 0
        and not torch.is_autocast_enabled("cpu")
        and onednn_matmul() is not None
    )


class OneDNNLinear(torch.autograd.Function):
    """y = x W^T + b;   dL/dx = g W,   dL/dW = g^T x,   dL/db = sum of g over the rows.

    oneDNN computes y, MKL the gradients.
    x (rows, K), y (rows, N)
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return matmul_by_onednn(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = grad.T @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None
