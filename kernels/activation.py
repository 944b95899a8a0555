"""Activations with the bias or the gate, and their gradients, in one pass on a GPU.

    activated   y = f(x + bias)       dx = dy f'(x + bias)    d bias = sum over the rows of dx
    gated       y = f(gate) * up      d gate = dy up f'(gate)              d up = dy f(gate)

    gelu       f = x P(x)             f' = P(x) + x exp(-x^2 / 2) / sqrt(2 pi)    P: normal CDF
    gelu_new   f = x S(2 u(x))        f' = S + 2 x u'(x) S (1 - S)    S: sigmoid, u: cubic
    silu       f = x S(x)             f' = S + x S (1 - S)
    relu       f = max(x, 0)          f' = 1 where x > 0

gelu_new's u(x) = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh u) / 2 = S(2u).

Only the inputs are saved: plain PyTorch also stores f(gate) for the backward pass. The gradient of
the bias is summed in the pass that computes dx: each program sums ROWS rows, and a second pass adds
these sums in a fixed order, so results are reproducible.

Not measured on a card yet.
"""

import torch
from torch import Tensor

from kernels.linear import ACTIVATIONS

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

BLOCK = 1024  # numbers per program of `gated`
BLOCK_M = 256  # columns per program of `activated`
STEP = 8  # rows that it processes at once
ROWS = 64  # rows per program of its backward pass


def activated_reference(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Reference: x (..., M), bias (M,) -> (..., M)"""
    function, _ = ACTIVATIONS[kind]
    return function(x + bias)


def gated_reference(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Reference: gate, up (..., M) -> (..., M)"""
    function, _ = ACTIVATIONS[kind]
    return function(gate) * up


def activated(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return f(x + bias), differentiable; x (..., M), bias (M,) -> (..., M) in x's dtype.

    The bias is first rounded to x's dtype, as autocast does before a matmul. kind: a name in
    `ACTIVATIONS`
    """
    return Activated.apply(x, bias, kind)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return f(gate) * up, differentiable; gate, up (..., M) of one dtype -> (..., M)"""
    return Gated.apply(gate, up, kind)


class Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, kind):
        x = x.contiguous()
        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return activated_triton(x, bias, kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, bias = ctx.saved_tensors
        sums_rows = ctx.needs_input_grad[1]
        return *activated_backward_triton(x, bias, grad, ctx.kind, sums_rows), None


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, kind):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return gated_triton(gate, up, kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return *gated_backward_triton(gate, up, grad, ctx.kind), None


# ------------------------------------------------------------------------------------------- Triton
def activated_triton(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """`activated` without a gradient, x contiguous."""
    y, M = torch.empty_like(x), x.size(-1)
    if N := x.numel() // M:
        grid = triton.cdiv(N, STEP), triton.cdiv(M, BLOCK_M)
        activated_kernel[grid](x, bias, y, N, M, KIND=kind, STEP=STEP, BLOCK_M=BLOCK_M)
    return y


def activated_backward_triton(
    x: Tensor, bias: Tensor, grad: Tensor, kind: str, sums_rows: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and, if sums_rows, bias."""
    grad_x, M = torch.empty_like(x), x.size(-1)
    N = x.numel() // M
    grid = triton.cdiv(N, ROWS), triton.cdiv(M, BLOCK_M)
    sums = torch.empty(grid[0] if sums_rows else 0, M, device=x.device)
    if N:
        activated_backward_kernel[grid](
            x, bias, grad.contiguous(), grad_x, sums, N, M,
            KIND=kind, SUMS_ROWS=sums_rows, ROWS=ROWS, STEP=STEP, BLOCK_M=BLOCK_M,
        )  # fmt: skip
    return grad_x, sums.sum(0).to(bias.dtype) if sums_rows else None


def gated_triton(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`gated` without a gradient, of contiguous tensors."""
    y = torch.empty_like(gate)
    if size := y.numel():
        gated_kernel[(triton.cdiv(size, BLOCK),)](gate, up, y, size, KIND=kind, BLOCK=BLOCK)
    return y


def gated_backward_triton(
    gate: Tensor, up: Tensor, grad: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if size := gate.numel():
        gated_backward_kernel[(triton.cdiv(size, BLOCK),)](
            gate, up, grad.contiguous(), grad_gate, grad_up, size, KIND=kind, BLOCK=BLOCK
        )
    return grad_gate, grad_up


if triton is not None:

    @triton.jit
    def function_and_slope(x, KIND: tl.constexpr):
        """Return f(x) and f'(x) in float32; the compiler drops the one that isn't used."""
        if KIND == "gelu":
            cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
            y = x * cdf
            slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        elif KIND == "gelu_new":
            gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
            y = x * gate
            inner = 1.5957691216057308 * (1 + 0.134145 * x * x)  # 2 u'
            slope = gate + x * inner * gate * (1 - gate)
        elif KIND == "silu":
            gate = tl.sigmoid(x)
            y = x * gate
            slope = gate + x * gate * (1 - gate)
        else:
            tl.static_assert(KIND == "relu")
            y = tl.where(x <= 0, 0.0, x)  # NaN stays NaN
            slope = tl.where(x <= 0, 0.0, 1.0)
        return y, slope

    @triton.jit
    def activated_kernel(
        x,  # (N, M)
        bias,  # (M,)
        y,  # (N, M) out
        N,
        M,
        KIND: tl.constexpr,
        STEP: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        row = tl.program_id(0) * STEP + tl.arange(0, STEP)
        column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = column < M
        at = row.to(tl.int64)[:, None] * M + column[None, :]
        mask = (row < N)[:, None] & inside[None, :]
        b = tl.load(bias + column, mask=inside, other=0.0).to(x.dtype.element_ty).to(tl.float32)
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + b[None, :]
        out, _ = function_and_slope(z, KIND)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def activated_backward_kernel(
        x,  # (N, M)
        bias,  # (M,)
        grad_y,  # (N, M)
        grad_x,  # (N, M) out
        sums,  # (cdiv(N, ROWS), M) out, if SUMS_ROWS
        N,
        M,
        KIND: tl.constexpr,
        SUMS_ROWS: tl.constexpr,
        ROWS: tl.constexpr,
        STEP: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        column = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = column < M
        b = tl.load(bias + column, mask=inside, other=0.0).to(x.dtype.element_ty).to(tl.float32)
        total = tl.zeros((STEP, BLOCK_M), tl.float32)
        first = tl.program_id(0) * ROWS
        for start in range(first, tl.minimum(first + ROWS, N), STEP):
            row = start + tl.arange(0, STEP)
            at = row.to(tl.int64)[:, None] * M + column[None, :]
            mask = (row < N)[:, None] & inside[None, :]
            z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + b[None, :]
            _, slope = function_and_slope(z, KIND)
            grad = tl.load(grad_y + at, mask=mask, other=0.0).to(tl.float32) * slope
            tl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=mask)
            total += grad
        if SUMS_ROWS:
            tl.store(sums + tl.program_id(0) * M + column, tl.sum(total, 0), mask=inside)

    @triton.jit
    def gated_kernel(
        gate,  # (size,)
        up,  # (size,)
        y,  # (size,) out
        size,
        KIND: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        out, _ = function_and_slope(tl.load(gate + at, mask=inside).to(tl.float32), KIND)
        out *= tl.load(up + at, mask=inside).to(tl.float32)
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def gated_backward_kernel(
        gate,  # (size,)
        up,  # (size,)
        grad_y,  # (size,)
        grad_gate,  # (size,) out
        grad_up,  # (size,) out
        size,
        KIND: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        value, slope = function_and_slope(tl.load(gate + at, mask=inside).to(tl.float32), KIND)
        grad = tl.load(grad_y + at, mask=inside).to(tl.float32)
        factor = tl.load(up + at, mask=inside).to(tl.float32)
        tl.store(
            grad_gate + at, (grad * factor * slope).to(grad_gate.dtype.element_ty), mask=inside
        )
        tl.store(grad_up + at, (grad * value).to(grad_up.dtype.element_ty), mask=inside)
