"""Attention that PyTorch lacks or runs slowly: rotary positions, one new token, capped logits.

Shapes: B batch, S tokens of this call, L tokens so far, H query heads, K key and value heads (each
shared by H / K query heads), D head width, r rotated channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import soft_cap
from kernels.norm import fuses
from kernels.rotary import rotary_store_triton, rotary_triton_


# -------------------------------------------------------------------------------- rotary positions
@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Settings to extend rotary positions beyond pre-training by rotating channel pairs slower."""

    kind: str
    """which pairs rotate slower. linear: all; llama3 and yarn: those with few turns within
    original_n_ctx, and partly those with more"""
    factor: float
    """divides the rotation speed"""
    original_n_ctx: int = 0
    """longest sequence in pre-training"""
    few_turns: float = 1.0
    """pairs with fewer turns are slowed down by the full factor (low_freq_factor, beta_slow)"""
    many_turns: float = 32.0
    """pairs with more turns are not slowed down (high_freq_factor, beta_fast)"""
    attention_factor: float = 1.0
    """multiplies q and k (yarn)"""
    whole_pairs: bool = True
    """yarn: round the boundaries outwards to whole pairs"""


def rotary_frequencies(
    rotary_dim: int, base: float, scaling: RotaryScaling | None, device: torch.device
) -> Tensor:
    """Return each channel pair's radians per position, (r / 2,) float32: base^(-2i / r), scaled."""
    r = rotary_dim
    # 1 / base^x rounds like transformers; with base^-x, angles at position 2,000 differ by 1e-4
    frequencies = 1 / base ** (torch.arange(0, r, 2, device=device).float() / r)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    few, many, length = scaling.few_turns, scaling.many_turns, scaling.original_n_ctx
    if scaling.kind == "llama3":  # interpolate linearly in the number of turns
        kept = ((length / (2 * math.pi / frequencies) - few) / (many - few)).clamp(0, 1)
    else:  # yarn: interpolate linearly in the pair's index

        def pair(turns: float) -> float:
            return r * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair(many), pair(few)
        if scaling.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, r - 1)
        steps = torch.arange(r // 2, device=device).float() - first
        kept = 1 - (steps / (last - first if last > first else 1e-3)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(
    positions: Tensor, rotary_dim: int, base: float, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Map positions (B, S) to cos and sin of position * frequency, (B, S, 1, r / 2) float32."""
    frequencies = rotary_frequencies(rotary_dim, base, scaling, positions.device)
    angles = positions[:, :, None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    factor = scaling.attention_factor if scaling else 1.0
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotated_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool
) -> tuple[Tensor, ...]:
    """Rotate q and k by their positions' angles, in place: nothing else may read qkv.

    qkv (B, S, H + 2K, D), cos and sin (B, S, 1, r / 2) -> q (B, H, S, D), k and v (B, K, S, D).
    Channels from r on are not rotated.
    """
    if torch.compiler.is_compiling():
        return split_heads(rotated(qkv, cos, sin, n_head, interleaved), n_head)
    if qkv.requires_grad:
        return RotatedHeads.apply(qkv, cos, sin, n_head, interleaved)
    return split_heads(rotate_(qkv, cos, sin, n_head, interleaved), n_head)


def store_rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool, keys: Tensor,
    values: Tensor, at: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`rotated_heads` of one token per row, k and v stored in column `at` (1,) of a static cache.

    qkv (B, 1, H + 2K, D), keys and values (B, K, L, D) -> q (B, H, 1, D), keys and values.
    """
    if fuses(qkv) and not qkv.requires_grad:
        qkv = rotary_store_triton(qkv, cos, sin, n_head, interleaved, keys, values, at)
        return split_heads(qkv, n_head)[0], keys, values
    q, k, v = rotated_heads(qkv, cos, sin, n_head, interleaved)
    return q, keys.index_copy_(2, at, k), values.index_copy_(2, at, v)


class RotatedHeads(torch.autograd.Function):
    """Rotation that saves only the tables: the backward pass rotates the gradient back."""

    @staticmethod
    def forward(
        ctx, qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return split_heads(rotate_(qkv.detach(), cos, sin, n_head, interleaved), n_head)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = torch.cat([g.transpose(1, 2) for g in grads], dim=2)  # (B, S, H + 2K, D)
        grad = rotate_(grad, cos, -sin, grads[0].size(1), ctx.interleaved)
        return grad, None, None, None, None


def split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, ...]:
    """Split (B, S, H + 2K, D) into q (B, H, S, D), k and v (B, K, S, D)."""
    kv_heads = (qkv.size(2) - n_head) // 2
    return qkv.transpose(1, 2).split([n_head, kv_heads, kv_heads], dim=1)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool) -> Tensor:
    rotate = rotary_triton_ if fuses(qkv) else apply_rotary_
    return rotate(qkv, cos, sin, n_head, interleaved)


def apply_rotary_(qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool) -> Tensor:
    """Rotate q and k of (B, S, H + 2K, D) in place, in pairs (0, 1), (2, 3) or (0, r/2), ...

    A pair (a, b) is the complex number a + ib, and rotating it multiplies it by cos + i sin, in
    float32 or wider. cos and sin have one column per pair of the first r channels. The other
    channels and the K value heads, which come last, don't change.
    """
    qk = qkv[:, :, : (n_head + qkv.size(2)) // 2, : 2 * cos.size(-1)]  # (B, S, H + K, r)
    a, b = (qk[..., 0::2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)
    wide = torch.promote_types(qk.dtype, torch.float32)
    rotated = torch.complex(a.to(wide), b.to(wide)).mul_(torch.complex(cos, sin))
    a.copy_(rotated.real)
    b.copy_(rotated.imag)
    return qkv


def rotated(qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool) -> Tensor:
    """`apply_rotary_` in real numbers and out of place, which a compiler can fuse."""
    kv_heads, r = (qkv.size(2) - n_head) // 2, 2 * cos.size(-1)
    qk, v = qkv.split([n_head + kv_heads, kv_heads], dim=2)
    turned, kept = qk[..., :r], qk[..., r:]
    wide = torch.promote_types(qk.dtype, torch.float32)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    a, b = a.to(wide), b.to(wide)
    a, b = a * cos - b * sin, a * sin + b * cos
    pairs = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((torch.cat((pairs.to(qk.dtype), kept), dim=-1), v), dim=2)


# ----------------------------------------------------------------------------------- one new token
def attend_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Compute attention for one new token on a CPU, in two batched matmuls.

    q (B, H, 1, D), k and v (B, K, L, D), bias (B, H, 1, L) -> (B, H, 1, D). PyTorch's fused kernel
    is built for many tokens and takes 1.5 times as long for one. The queries that share keys and
    values are the rows of one matmul.
    """
    B, K = k.shape[:2]
    rows = q.reshape(B * K, -1, q.size(-1))  # (B * K, H / K, D)
    bias = bias.reshape(B * K, -1, bias.size(-1))  # (B * K, H / K, L)
    logits = torch.baddbmm(bias, rows, k.flatten(0, 1).mT, alpha=scale)
    return torch.bmm(logits.softmax(-1), v.flatten(0, 1)).view_as(q)


# ----------------------------------------------------------------------------------- capped logits
def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, cap: float
) -> Tensor:
    """Compute softmax(cap * tanh(scale * q k^T / cap) + bias) v in float32 or wider. (Gemma 2)

    q (B, H, S, D), k and v (B, K, L, D), bias (B, 1 or H, S, L) -> (B, H, S, D). Fused kernels
    don't cap logits, so they are stored, (B, H, S, L).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.size(1) // k.size(1)
    with torch.autocast(q.device.type, enabled=False):
        keys = k.to(wide).repeat_interleave(group, dim=1)  # (B, H, L, D)
        values = v.to(wide).repeat_interleave(group, dim=1)
        logits = soft_cap(q.to(wide) @ keys.mT * scale, cap) + bias
        return (logits.softmax(-1) @ values).to(q.dtype)
