"""Attention of one new token per row to a static cache, on a GPU.

    y = softmax(scale * q K^T) V    over a row's columns from its first real token to the new one

PyTorch's attention gets a mask for this and reads the whole buffer: left padding and the columns of
tokens still to come. Here each program reads only the columns that count. If there are fewer heads
than the GPU can run at a time, a head's columns are split among programs (split-K, Flash-Decoding,
Dao et al. 2023), and a second kernel combines their parts:

    part s   m_s = max l, t_s = sum exp(l - m_s), y_s = sum exp(l - m_s) v
    total    y = sum_s exp(m_s - m) y_s / sum_s exp(m_s - m) t_s,  m = max m_s

The first and the last column are tensors, so that a CUDA graph of one step serves all steps.

Shapes: B rows, H query heads, K key and value heads (each shared by H / K query heads), L columns,
D head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None

PROGRAMS = 264  # two per multiprocessor of an H100
MOST_SPLITS = 16


class Columns(NamedTuple):
    """The columns that each row's new token attends to."""

    first: Tensor  # (B,) of the row's first real token
    last: Tensor  # (1,) of the new token
    window: int | None  # maximum number of columns, ending at `last`; None: no limit


def decode_reference(q: Tensor, k: Tensor, v: Tensor, columns: Columns, scale: float) -> Tensor:
    """The same in plain PyTorch: q (B, H, 1, D), k and v (B, K, L, D) -> (B, H, 1, D)"""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    column = torch.arange(k.size(2), device=q.device)
    visible = (column >= columns.first[:, None]) & (column <= columns.last)  # (B, L)
    if columns.window is not None:
        visible &= column > columns.last - columns.window
    logits = (q @ k.mT * scale).masked_fill(~visible[:, None, None], -torch.inf)
    v = torch.where(visible[:, None, :, None], v, 0.0)
    return logits.softmax(-1) @ v


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and triton is not None


# ------------------------------------------------------------------------------------------- Triton
def decode_attention(q: Tensor, k: Tensor, v: Tensor, columns: Columns, scale: float) -> Tensor:
    """Attend to a cache: q (B, H, 1, D) with contiguous D, k and v (B, K, L, D) -> (B, H, 1, D)"""
    B, H, _, D = q.shape
    K = k.size(1)
    y = torch.empty(B, H, 1, D, device=q.device, dtype=q.dtype)
    splits = 1
    while splits < MOST_SPLITS and B * H * splits < PROGRAMS:
        splits *= 2
    # (m, t, y) of each part; one part writes y itself
    parts = torch.empty(B * H, splits, D if splits > 1 else 1, device=q.device)
    tops, totals = (torch.empty(B * H, splits, device=q.device) for _ in range(2))
    if B == 0:
        return y
    width = triton.next_power_of_2(D)
    decode_kernel[(B * H, splits)](
        q, k, v, y, parts, tops, totals, columns.first, columns.last, scale, columns.window or 0,
        H, H // K, D, q.stride(0), q.stride(1), *k.stride(), *v.stride(),
        SPLITS=splits, WIDTH=width,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(B * H,)](parts, tops, totals, y, D, SPLITS=splits, WIDTH=width)
    return y


if triton is not None:
    if triton.knobs.runtime.interpret:  # the interpreter can't time settings
        BLOCKS = [triton.Config({"BLOCK_L": 16})]
    else:
        BLOCKS = [
            triton.Config({"BLOCK_L": block}, num_warps=warps)
            for block, warps in ((16, 4), (32, 4), (64, 4))
        ]

    @triton.autotune(BLOCKS, key=["D", "group"])
    @triton.jit
    def decode_kernel(
        q,  # (B, H, 1, D)
        k,  # (B, K, L, D)
        v,  # (B, K, L, D)
        y,  # (B, H, 1, D) out, if SPLITS is 1
        parts,  # (B * H, SPLITS, D) out, else
        tops,  # (B * H, SPLITS) out
        totals,  # (B * H, SPLITS) out
        first,  # (B,)
        last,  # (1,)
        scale,
        window,  # 0: none
        H,
        group,  # H / K
        D,
        q_row, q_head, k_row, k_head, k_column, k_channel,  # strides
        v_row, v_head, v_column, v_channel,
        SPLITS: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK_L: tl.constexpr,
    ):  # fmt: skip
        row_head, split = tl.program_id(0), tl.program_id(1)
        row, head = (row_head // H).to(tl.int64), row_head % H
        channel = tl.arange(0, WIDTH)
        inside = channel < D
        # 1. this part's columns: all of them, divided evenly
        end = tl.load(last) + 1
        begin = tl.load(first + row)
        if window > 0:
            begin = tl.maximum(begin, end - window)
        share = tl.cdiv(end - begin, SPLITS)
        begin = begin + split * share
        end = tl.minimum(end, begin + share)
        # 2. an online softmax over blocks of columns
        query = tl.load(q + row * q_row + head * q_head + channel, mask=inside, other=0.0)
        query = query.to(tl.float32) * scale
        keys = k + row * k_row + (head // group) * k_head
        values = v + row * v_row + (head // group) * v_head
        top = -float("inf")
        total = 0.0
        out = tl.zeros((WIDTH,), tl.float32)
        for start in range(begin, end, BLOCK_L):
            column = (start + tl.arange(0, BLOCK_L)).to(tl.int64)
            real = column < end
            mask = real[:, None] & inside[None, :]
            key = tl.load(
                keys + column[:, None] * k_column + channel * k_channel, mask=mask, other=0.0
            )
            logit = tl.sum(key.to(tl.float32) * query[None, :], 1)  # (BLOCK_L,)
            logit = tl.where(real, logit, -float("inf"))
            new_top = tl.maximum(top, tl.max(logit, 0))
            p = tl.exp(logit - new_top)
            value = tl.load(
                values + column[:, None] * v_column + channel * v_channel, mask=mask, other=0.0
            )
            shrink = tl.exp(top - new_top)
            out = out * shrink + tl.sum(p[:, None] * value.to(tl.float32), 0)
            total = total * shrink + tl.sum(p, 0)
            top = new_top
        # 3. the result, or this part of it
        if SPLITS == 1:
            result = (out / total).to(y.dtype.element_ty)
            tl.store(y + row_head.to(tl.int64) * D + channel, result, mask=inside)
        else:
            part = row_head.to(tl.int64) * SPLITS + split
            tl.store(parts + part * D + channel, out, mask=inside)
            tl.store(tops + part, top)
            tl.store(totals + part, total)

    @triton.jit
    def combine_kernel(
        parts,  # (N, SPLITS, D)
        tops,  # (N, SPLITS)
        totals,  # (N, SPLITS)
        y,  # (N, D) out
        D,
        SPLITS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        split, channel = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
        inside = channel < D
        top = tl.load(tops + row * SPLITS + split)
        weight = tl.exp(top - tl.max(top, 0))  # 0 for a part without columns, whose maximum is -inf
        total = tl.sum(weight * tl.load(totals + row * SPLITS + split), 0)
        at = (row * SPLITS + split[:, None]) * D + channel[None, :]
        part = tl.load(parts + at, mask=inside[None, :], other=0.0)
        out = tl.sum(weight[:, None] * part, 0) / total
        tl.store(y + row * D + channel, out.to(y.dtype.element_ty), mask=inside)
