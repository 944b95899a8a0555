"""x @ weight.T + bias with both factors rounded to 8 bits: sampling up to 2x faster with VNNI.

    weight[n, k] ~ scale[n] * q[n, k]     q from -127 to 127, scale[n] = max_k |weight[n, k]| / 127
    x[b, k]      ~ s[b] * p[b, k]         the same, computed in each matmul
    y[b, n]      = s[b] * scale[n] * sum_k p[b, k] q[n, k] + bias[n]

The sum is over integers, so it is exact. Each row of x has its own scale, so its result, and a
sampled response, doesn't depend on the other rows, not even in the last bit. PyTorch's
`linear_dynamic` has one scale per tensor. oneDNN multiplies the integers through `torch._int_mm`,
without reordering the weight.
"""

import torch
from torch import Tensor

from kernels.linear import ACTIVATIONS

LARGEST = 127
TINY = torch.finfo(torch.float32).tiny  # scale of an all-zero row
ROWS_AT_ONCE = 256  # weight rows that stay in the cache between division and rounding


class Int8Weight:
    """Weight (N, K) rounded to int8 from float32 or a narrower dtype."""

    def __init__(self, weight: Tensor):
        assert weight.size(1) > 1, "torch._int_mm reads out of bounds for a weight with one column"
        self.q, scale = rounded_rows(weight)
        self.scale = scale.flatten()  # (N,)

    def matmul(
        self, x: Tensor, bias: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        """Multiply x (..., K) and add bias (N,): (..., N) in float32, without a gradient."""
        rows = x.detach().flatten(0, -2).float()  # (M, K)
        scale = row_scale(rows)  # (M, 1)
        p = (rows / scale).round_().to(torch.int8)  # (M, K)
        y = torch._int_mm(p, self.q.T).float().mul_(self.scale)  # (M, N)
        y = y.mul_(scale) if bias is None else torch.addcmul(bias.float(), y, scale, out=y)
        return ACTIVATIONS[activation][0](y.unflatten(0, x.shape[:-1]))


def row_scale(rows: Tensor) -> Tensor:
    """Return scales (M, 1) that map each row of (M, K) to the range -127 to 127."""
    # not rows.abs(), which would copy the rows
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
    return largest.clamp_(min=TINY * LARGEST).div_(LARGEST)


def rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight (N, K) to q (N, K) int8 and scale (N, 1)."""
    weight = weight.detach().float()
    scale = row_scale(weight)
    q = torch.empty(weight.shape, dtype=torch.int8)
    chunks = (tensor.split(ROWS_AT_ONCE) for tensor in (weight, scale, q))
    for rows, row_scales, out in zip(*chunks, strict=True):
        out.copy_((rows / row_scales).round_())
    return q, scale


def reference_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference in float64: x (..., K), weight (N, K), bias (N,) or None -> (..., N)."""
    rows = x.flatten(0, -2).float()
    s = row_scale(rows)
    q, scale = rounded_rows(weight)
    sums = (rows / s).round().double() @ q.double().T  # (M, N) integers
    y = s.double() * scale.flatten().double() * sums + (0 if bias is None else bias.double())
    return y.unflatten(0, x.shape[:-1])
