"""Linear layers and norms. Shapes as in model.py."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.activation import activated, gated
from kernels.linear import linear, matmul_dtype
from kernels.norm import WIDEST, fuses
from kernels.norm import add_norm as fused_add_norm
from nanorlhf.config import GPTConfig


class Linear(nn.Linear):
    """`nn.Linear` computed by `kernels.linear`, with an optional activation."""

    activation: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is not None and self.bias is not None and fuses(x):
            return activated(linear(x, self.weight), self.bias, self.activation)
        return self.project(x, self.activation)

    def project(self, x: Tensor, activation: str | None) -> Tensor:
        """Compute the layer with this activation, or none."""
        return linear(x, self.weight, self.bias, activation)


def gated_linear(gate: Linear, up: Linear, x: Tensor) -> Tensor:
    """Compute gate(x) * up(x), with one kernel after the matmuls on a GPU."""
    if gate.activation is None or not fuses(x):
        return gate(x) * up(x)
    return gated(gate.project(x, None), up(x), gate.activation)


def param_like(weight: Tensor, values: Tensor) -> nn.Parameter:
    """Make a parameter with the dtype of `weight` and, unless that is meta, its device."""
    return nn.Parameter(values.to(weight.dtype) if weight.is_meta else values.to(weight))


class AdaptedLinear(Linear):
    """A linear layer, then a residual bottleneck: y + up(gelu(down(y))). [STR adapter]

    Takes over the weights of the `layer` it replaces. `up` starts at 0, so the adapter starts as
    the identity.
    """

    def __init__(self, layer: Linear, size: int):
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        C = layer.out_features
        self.adapter_down = param_like(layer.weight, torch.randn(size, C) / math.sqrt(C))
        self.adapter_down_bias = param_like(layer.weight, torch.zeros(size))
        self.adapter_up = param_like(layer.weight, torch.zeros(C, size))
        self.adapter_up_bias = param_like(layer.weight, torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)  # (..., C)
        bottleneck = linear(y, self.adapter_down, self.adapter_down_bias, "gelu")  # (..., size)
        return y + linear(bottleneck, self.adapter_up, self.adapter_up_bias)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 even under autocast, then cast back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """An RMS norm with 1 + weight instead of weight: weight decay pulls the factor towards 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def norm(config: GPTConfig, width: int | None = None) -> nn.LayerNorm | RMSNorm:
    """Make a norm over `width` channels; None: over d_model, the residual stream."""
    kind = {"layer": nn.LayerNorm, "rms": RMSNorm, "rms_offset": OffsetRMSNorm}[config.norm]
    return kind(width or config.d_model, eps=config.norm_eps)


def add_norm(x: Tensor, residual: Tensor | None, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return s = x + residual and layer(s), with one kernel on a GPU if layer is a norm.

    layer(s) is the input of a matmul: under autocast, the kernel writes it in autocast's dtype.
    Without a residual, s is x.
    """
    can_fuse = fuses(x) and x.size(-1) <= WIDEST
    if not can_fuse or not isinstance(layer, nn.LayerNorm | RMSNorm):
        s = x if residual is None else x + residual
        return s, layer(s)
    assert layer.eps is not None
    kind = "rms_offset" if isinstance(layer, OffsetRMSNorm) else "rms"
    kind, bias = ("layer", layer.bias) if isinstance(layer, nn.LayerNorm) else (kind, None)
    dtype = matmul_dtype(x)
    return fused_add_norm(x, residual, layer.weight, bias, layer.eps, kind, dtype)
