"""Norm, with or without a residual addition before it, in one pass over the rows, on a GPU.

    s = x + residual, or x                                            mean: over the C channels
    layer       h = (s - mean(s)) t   t = 1 / sqrt(mean((s - mean(s))^2) + eps)   y = h w + b
    rms         h = s t               t = 1 / sqrt(mean(s^2) + eps)               y = h w
    rms_offset  the same, with 1 + w instead of w

With u = dy w, or dy (1 + w), and ds from the other uses of s:

    d loss / dx = d loss / d residual = ds + t (u - mean(u) - h mean(u h))    mean(u): layer only
    d loss / dw = sum over the rows of dy h        d loss / db = sum over the rows of dy

The forward pass reads x and the residual once and writes s and y once, y in the dtype of the matmul
that reads it. The backward pass saves only s and recomputes h and t from it. Each of its programs
sums dw and db over its own rows; a second pass adds these sums in a fixed order, so results are
reproducible.

Not measured on a card yet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

PROGRAMS = 264  # of the backward pass: two per multiprocessor of an H100
WIDEST = 4096  # channels; a wider row would spill registers


def fuses(x: Tensor) -> bool:
    """Return whether Triton kernels replace elementwise operations on x: on a GPU, in eager code.

    A compiler fuses them itself.
    """
    can_run = x.is_cuda and triton is not None and x.dtype != torch.float64
    return can_run and not torch.compiler.is_compiling()


def add_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Reference: x, residual (..., C), weight, bias (C,) -> s, y (..., C)"""
    s = x if residual is None else x + residual
    if kind == "layer":
        return s, F.layer_norm(s, weight.shape, weight, bias, eps)
    return s, F.rms_norm(s, weight.shape, 1 + weight if kind == "rms_offset" else weight, eps)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + residual and its norm in `dtype`, differentiable; C is at most WIDEST.

    x, residual (..., C), weight, bias (C,) -> (..., C) twice. The sum has the wider dtype of the
    two, and the norm of the rounded sum is computed in float32. Without a residual, the sum is x.
    kind: layer, rms or rms_offset
    """
    if residual is None:
        return x, Norm.apply(x, weight, bias, eps, kind, dtype)
    return AddNorm.apply(x, residual, weight, bias, eps, kind, dtype)


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, kind, dtype):
        s, y = add_norm_triton(x, residual, weight, bias, eps, kind, dtype)
        ctx.save_for_backward(s, weight)
        ctx.eps, ctx.kind, ctx.dtypes = eps, kind, (x.dtype, residual.dtype)
        return s, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_s, grad_y):
        s, weight = ctx.saved_tensors
        grad_x, grad_residual, grad_weight, grad_bias = add_norm_backward_triton(
            s, weight, grad_s, grad_y, ctx.eps, ctx.kind, ctx.dtypes, ctx.needs_input_grad[2:4]
        )
        return grad_x, grad_residual, grad_weight, grad_bias, None, None, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, kind, dtype):
        x, y = add_norm_triton(x, None, weight, bias, eps, kind, dtype)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kind = eps, kind
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x, _, grad_weight, grad_bias = add_norm_backward_triton(
            x, weight, None, grad, ctx.eps, ctx.kind, (x.dtype, x.dtype), ctx.needs_input_grad[1:3]
        )
        return grad_x, grad_weight, grad_bias, None, None, None


# ------------------------------------------------------------------------------------------- Triton
def add_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, kind: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`add_norm` without a gradient: one program per row. Without a residual, s is x."""
    C = x.size(-1)
    s = x = x.contiguous()
    if residual is not None:
        residual = residual.contiguous()
        s = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    y = torch.empty_like(x, dtype=dtype)
    if N := x.numel() // C:
        add_norm_kernel[(N,)](
            x, x if residual is None else residual, weight, weight if bias is None else bias, s, y,
            C, eps, ADDS=residual is not None, LAYER=kind == "layer", OFFSET=kind == "rms_offset",
            HAS_BIAS=bias is not None, WIDTH=triton.next_power_of_2(C), num_warps=num_warps(C),
        )  # fmt: skip
    return s, y


def add_norm_backward_triton(
    s: Tensor, weight: Tensor, grad_s: Tensor | None, grad_y: Tensor, eps: float, kind: str,
    dtypes: tuple[torch.dtype, torch.dtype], trained: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x and residual in their dtypes, and of weight and bias if trained.

    x and residual share a tensor if their dtypes are equal. grad_s None: s has no other use
    """
    C = s.size(-1)
    N = s.numel() // C
    programs = min(N, PROGRAMS)
    grad_x = torch.empty_like(s, dtype=dtypes[0])
    same = dtypes[0] == dtypes[1]
    grad_residual = grad_x if same else torch.empty_like(s, dtype=dtypes[1])
    # each program's sums for weight and bias
    weight_sums, bias_sums = (torch.empty(programs * on, C, device=s.device) for on in trained)
    if N:
        add_norm_backward_kernel[(programs,)](
            s, weight, s if grad_s is None else grad_s.contiguous(), grad_y.contiguous(), grad_x,
            grad_residual, weight_sums, bias_sums, N, C, eps, ADDS=grad_s is not None,
            LAYER=kind == "layer", OFFSET=kind == "rms_offset", SAME=same, SUMS_WEIGHT=trained[0],
            SUMS_BIAS=trained[1], WIDTH=triton.next_power_of_2(C), num_warps=num_warps(C),
        )  # fmt: skip
    grad_weight, grad_bias = (
        sums.sum(0).to(weight.dtype) if on else None
        for sums, on in zip((weight_sums, bias_sums), trained, strict=True)
    )
    return grad_x, grad_residual, grad_weight, grad_bias


def num_warps(C: int) -> int:
    """Return warps per row: eight channels per thread, up to 16 warps."""
    return min(16, max(1, triton.next_power_of_2(C) // 256))


if triton is not None:

    @triton.jit
    def normalised(s, inside, C, eps, LAYER: tl.constexpr):
        """Return h (WIDTH,) and t of a row s (WIDTH,), both float32; s is 0 outside."""
        if LAYER:
            # rounded to nearest: with a large mean, an error of one bit would be added to each s
            s = tl.where(inside, s - tl.div_rn(tl.sum(s, 0), tl.cast(C, tl.float32)), 0.0)
        t = 1 / tl.sqrt(tl.sum(s * s, 0) / C + eps)
        return s * t, t

    @triton.jit
    def add_norm_kernel(
        x,  # (N, C)
        residual,  # (N, C), if ADDS
        weight,  # (C,)
        bias,  # (C,)
        s,  # (N, C) out, if ADDS
        y,  # (N, C) out
        C,
        eps,
        ADDS: tl.constexpr,
        LAYER: tl.constexpr,
        OFFSET: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        channel = tl.arange(0, WIDTH)
        inside = channel < C
        at = tl.program_id(0).to(tl.int64) * C + channel
        # 1. the sum, rounded to its dtype
        total = tl.load(x + at, mask=inside, other=0.0)
        if ADDS:
            total = total.to(tl.float32)
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
            total = total.to(s.dtype.element_ty)
            tl.store(s + at, total, mask=inside)
        # 2. its norm
        h, _ = normalised(total.to(tl.float32), inside, C, eps, LAYER)
        w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            w += 1
        out = h * w
        if HAS_BIAS:
            out += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def add_norm_backward_kernel(
        s,  # (N, C)
        weight,  # (C,)
        grad_s,  # (N, C), if ADDS
        grad_y,  # (N, C)
        grad_x,  # (N, C) out
        grad_residual,  # (N, C) out, unless SAME
        weight_sums,  # (programs, C) out, if SUMS_WEIGHT
        bias_sums,  # (programs, C) out, if SUMS_BIAS
        N,
        C,
        eps,
        ADDS: tl.constexpr,
        LAYER: tl.constexpr,
        OFFSET: tl.constexpr,
        SAME: tl.constexpr,  # grad_residual is grad_x
        SUMS_WEIGHT: tl.constexpr,
        SUMS_BIAS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        channel = tl.arange(0, WIDTH)
        inside = channel < C
        w = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            w += 1
        weight_sum = tl.zeros((WIDTH,), tl.float32)
        bias_sum = tl.zeros((WIDTH,), tl.float32)
        at = tl.program_id(0).to(tl.int64) * C + channel
        for _ in range(tl.program_id(0), N, tl.num_programs(0)):
            total = tl.load(s + at, mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
            h, t = normalised(total, inside, C, eps, LAYER)
            u = dy * w
            slope = u - h * (tl.sum(u * h, 0) / C)
            if LAYER:
                slope -= tl.sum(u, 0) / C
            grad = t * slope
            if ADDS:
                grad += tl.load(grad_s + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=inside)
            if not SAME:
                out = grad.to(grad_residual.dtype.element_ty)
                tl.store(grad_residual + at, out, mask=inside)
            weight_sum += dy * h
            bias_sum += dy
            at += tl.num_programs(0).to(tl.int64) * C
        out = tl.program_id(0) * C + channel
        if SUMS_WEIGHT:
            tl.store(weight_sums + out, weight_sum, mask=inside)
        if SUMS_BIAS:
            tl.store(bias_sums + out, bias_sum, mask=inside)
