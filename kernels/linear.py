"""x @ weight.T + bias on a CPU in float32, through the faster of the two BLAS libraries in PyTorch.

PyTorch's CPU builds multiply float32 with MKL. On AMD processors MKL takes its AVX2 path, while
oneDNN, in the same build, uses all that the processor has. On Intel's the two are equal for many
rows, and oneDNN is up to twice as fast for the few rows of a decode step: kernels/README.md has the
measurements. Its float32 matmul is only reachable through a private operator, which is used here
and nowhere else. Where the operator is absent or not known to be faster,
`torch.nn.functional.linear` does the work.

oneDNN rearranges a weight before it multiplies. A sampler, which multiplies a few rows by the same
weights at each token, has that done once: `PackedWeight`.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.int8 import Int8Weight
from kernels.processor import maker

# on Intel's processors oneDNN multiplies at most this many rows by at least this many weights
FEW_ROWS = range(8, 512)
MANY_WEIGHTS = 2**20
# name: the function, and oneDNN's arguments to fuse it into the matmul
ACTIVATIONS: dict[str | None, tuple[Callable[[Tensor], Tensor], tuple[str, list, str]]] = {
    None: (lambda x: x, ("none", [], "")),
    "gelu": (F.gelu, ("gelu", [], "none")),
    "gelu_new": (lambda x: F.gelu(x, approximate="tanh"), ("gelu", [], "tanh")),
    "relu": (F.relu, ("relu", [], "")),
    "silu": (F.silu, ("swish", [], "")),
}


@cache
def onednn_matmul() -> Callable | None:
    """oneDNN's linear operator if this build has both it and MKL."""
    if (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return torch.ops.mkldnn._linear_pointwise.default
    return None


class PackedWeight:
    """A float32 weight (N, K) in the order in which oneDNN reads it; it changes no bit."""

    def __init__(self, weight: Tensor):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """x (..., K), bias (N,) or None -> (..., N), without a gradient."""
        _, fused = ACTIVATIONS[activation]
        return torch.ops.mkldnn._linear_pointwise(x.detach(), self.packed, bias, *fused)


def is_worth_packing(weight: Tensor) -> bool:
    """Whether oneDNN multiplies few rows by it: float32 on a CPU; small ones stay in the cache."""
    return weight.numel() >= MANY_WEIGHTS and is_for_onednn(weight[: FEW_ROWS.start], weight)


Packed = Int8Weight | PackedWeight  # what a sampler has instead of a weight


def linear(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """activation(x weight^T + bias), differentiable.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N)
    """
    if isinstance(weight, PackedWeight):
        return weight.matmul(x, bias, activation)
    if isinstance(weight, Int8Weight):
        return ACTIVATIONS[activation][0](weight.matmul(x, bias))
    is_trained = any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if not (is_trained and torch.is_grad_enabled()):
        return matmul(x, weight, bias, activation)
    if is_for_onednn(x, weight):
        # flattened outside the Function, so that its output is not a view
        y = OneDNNLinear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    else:
        y = F.linear(x, weight, bias)
    return ACTIVATIONS[activation][0](y)


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else the weight's own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The factors of a product, in autocast's dtype where it is on."""
    return tuple(tensor.to(matmul_dtype(tensor)) for tensor in tensors)


def cast_head(weight: Tensor | Packed) -> Tensor | Packed:
    """An LM head's weight (V, C) as `wide_linear` takes it, cast once for many calls."""
    if isinstance(weight, Packed):
        return weight
    (head,) = cast(weight)
    return head if head.is_cuda else head.to(weight.dtype)  # no CPU product widens its factors


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): x where it is small, and never beyond -cap or cap. (Gemma 2)"""
    return (x / cap).tanh() * cap


def wide_linear(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """x weight^T + bias, differentiable, summed and returned in float32, also from bfloat16.

    x (..., K), weight (N, K), bias (N,) or None -> (..., N); float64 from float64. `cap` bounds the
    product, before the bias is added, which is -inf where an id is forbidden. For logits:
    rounded to bfloat16 they are off by up to 0.4%, and divided by a low temperature that is another
    distribution. Autocast must be off: it would round them.
    """
    if cap is not None:
        y = soft_cap(wide_linear(x, weight), cap)
        return y if bias is None else y + bias
    if isinstance(weight, Packed):
        return linear(x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=wide)  # as tensor cores sum it
        y = y.unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias
    return linear(x.to(wide), weight.to(wide), bias)


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """activation(a b^T + bias) without a gradient.

    a (..., K), b (N, K), bias (N,) or None -> (..., N)
    """
    function, fused = ACTIVATIONS[activation]
    operator = onednn_matmul() if is_for_onednn(a, b) else None
    if operator is not None:
        return operator(a, b, bias, *fused)
    return function(F.linear(a, b, bias))


def matmul_into(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> None:
    """out = a b^T, or out += a b^T: without a copy where PyTorch's own matmul is taken.

    a (M, K), b (N, K), out (M, N), which may be of a wider dtype.
    """
    if out.dtype != a.dtype or is_for_onednn(a, b):
        # oneDNN is faster in this order where a and b are both transposed
        y = matmul(a, b) if add else matmul(b, a).T
        out.add_(y) if add else out.copy_(y)
    elif add:
        out.addmm_(a, b.T)
    else:
        torch.mm(a, b.T, out=out)


def is_for_onednn(a: Tensor, b: Tensor) -> bool:
    """True for float32 on a CPU with K > 0, which oneDNN requires; bf16 has it from PyTorch.

    Chosen by the processor's maker and the shape, not by timing: a choice that may vary between
    runs would change their digits.
    """
    if (
        not a.dtype == b.dtype == torch.float32
        or not a.is_cpu
        or a.size(-1) == 0
        or torch.is_autocast_enabled("cpu")
        or onednn_matmul() is None
    ):
        return False
    if maker() == "GenuineIntel":
        num_rows = a.numel() // a.size(-1)
        return b.is_contiguous() and b.numel() >= MANY_WEIGHTS and num_rows in FEW_ROWS
    return maker() == "AuthenticAMD"


class OneDNNLinear(torch.autograd.Function):
    """y = x W^T + b;   dL/dx = g W,   dL/dW = g^T x,   dL/db = sum of g over the rows.

    x (rows, K), y (rows, N)
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return matmul(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = matmul(grad, weight.T) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # if N > K, x^T g is up to 1.5 times as fast but has to be transposed: for many rows
            swap = weight.size(0) > weight.size(1) and len(x) > 8 * weight.size(1)
            grad_weight = matmul(x.T, grad.T).T.contiguous() if swap else matmul(grad.T, x.T)
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None
