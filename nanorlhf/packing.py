"""A GPU computes no padding: the real tokens of a batch are one long row.

    ids    . q q a      packed  q q a p p p b      N tokens
           p p p b      bounds  0     3       7    where each row begins, and the end

Embedding, norms and linear layers work token by token. Attention gets the bounds instead of a bias:
a token attends to the tokens before it in its own row. Hidden states at padding are 0.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.cache import KVCache
from nanorlhf.config import GPTConfig
from nanorlhf.masks import position_ids

# PyTorch 2.11 has no such argument; later versions refuse fewer key than query heads without it
GQA: dict[str, Any] = {}


@cache
def varlen_arguments() -> list[str]:
    """Return the names of `varlen_attn`'s arguments. Imports PyTorch's compiler: a second."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch before 2.10
        return []
    arguments = [*inspect.signature(varlen_attn).parameters]
    if "enable_gqa" in arguments:
        GQA["enable_gqa"] = True
    return arguments


def can_pack(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether FlashAttention computes this model's attention; dtype of queries and keys."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and config.causal
        and config.attention_cap is None
        and config.head_width <= 256
        and config.head_width % 8 == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and "window_size" in varlen_arguments()
    )


class Bounds(NamedTuple):
    """Where each of B rows begins in packed queries and keys. Its queries are its last keys."""

    queries: Tensor  # (B + 1,) int32, from 0 to the number of queries
    keys: Tensor  # (B + 1,) int32
    longest_queries: int  # of a row, or more
    longest_keys: int
    window: int | None  # a token attends to itself and the window - 1 tokens before it


def attend_packed(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> Tensor:
    """Compute causal attention within each row: with FlashAttention, or row by row on a CPU.

    q (1, H, N, D), k and v (1, K, M, D) -> (1, H, N, D)
    """
    if not q.is_cuda:
        return attend_by_row(q, k, v, bounds, scale)
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if bounds.window is None else bounds.window - 1  # tokens before a token
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, D), (M, K, D) twice
    y = varlen_attn(q, k, v, *bounds[:4], scale=scale, window_size=(left, 0), **GQA)
    assert isinstance(y, Tensor)
    return y.transpose(0, 1)[None]


def attend_by_row(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> Tensor:
    """The specification of `attend_packed`, for tests: one call per row."""
    rows = []
    for (first, end), (first_key, end_key) in zip(
        pairwise(bounds.queries.tolist()), pairwise(bounds.keys.tolist()), strict=True
    ):
        key = torch.arange(end_key - first_key, device=q.device)
        query = key[len(key) - (end - first) :, None]
        visible = key <= query
        if bounds.window is not None:
            visible &= key > query - bounds.window
        q_row, k_row, v_row = (
            q[:, :, first:end],
            k[:, :, first_key:end_key],
            v[:, :, first_key:end_key],
        )
        rows.append(
            F.scaled_dot_product_attention(
                q_row, k_row, v_row, attn_mask=visible, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(rows, dim=2)


class Packing:
    """Moves the real tokens of B rows of S columns into one row, and their outputs back."""

    def __init__(self, real: Tensor, last: int):
        """real (B, S) bool; only the last `last` columns have outputs."""
        self.real, self.last = real, last
        self.row, self.column = real.nonzero(as_tuple=True)  # (N,) each; waits for a GPU
        skipped = real.size(1) - last
        self.wanted = (self.column >= skipped).nonzero().squeeze(1)  # (M,) in N
        self.target = (self.row * last + self.column - skipped)[self.wanted]  # (M,) in B * last

    def run(
        self,
        run_blocks: Callable[..., Tensor],  # Transformer's
        ids: Tensor,
        positions: Tensor,
        bounds: list[Bounds],
        cache: Any,
    ) -> Tensor:
        """ids, positions (B, S) -> hidden states (B, last, C), not normalised; 0 at padding"""
        ids, positions = (x[self.row, self.column][None] for x in (ids, positions))  # (1, N)
        x = run_blocks(ids, positions, bounds, cache, self.wanted)  # (1, M, C)
        B, C = len(self.real), x.size(2)
        return x.new_zeros(B * self.last, C).index_copy(0, self.target, x[0]).view(B, -1, C)

    def indices(self) -> Tensor:
        """Return the index of each token in the packed row, (B, S); meaningless at padding."""
        return self.real.flatten().cumsum(0).view_as(self.real) - 1

    def bounds(
        self, windows: Sequence[int | None], real_keys: Tensor | None = None
    ) -> list[Bounds]:
        """Return each layer's bounds; the last layer has queries only at the wanted tokens.

        real_keys (B, L) has more columns than `real` if keys of earlier tokens come first.
        """
        real_keys = self.real if real_keys is None else real_keys
        queries, keys = starts(self.real), starts(real_keys)
        longest, longest_keys = self.real.size(1), real_keys.size(1)
        layers = [Bounds(queries, keys, longest, longest_keys, window) for window in windows]
        queries = starts(self.real[:, -self.last :])
        layers[-1] = Bounds(queries, keys, self.last, longest_keys, windows[-1])
        return layers


def starts(real: Tensor) -> Tensor:
    """Return where each row's tokens begin, and the end: real (B, S) -> (B + 1,) int32"""
    return F.pad(real.sum(1).cumsum(0), (1, 0)).int()


class PackedPrefill:
    """Stores packed keys and values in the rows of a cache."""

    length = 0  # no decode steps

    def __init__(self, cache: KVCache, packing: Packing):
        self.cache, self.packing = cache, packing
        if not cache.fixed_shape:  # decode steps read padding too: it must not be NaN
            cache.keys.zero_()
            cache.values.zero_()

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value (1, K, N, D) and return them."""
        row, column = self.packing.row, self.packing.column
        self.cache.keys[layer][row, :, column] = key[0].transpose(0, 1)
        self.cache.values[layer][row, :, column] = value[0].transpose(0, 1)
        return key, value


def read_packed(
    run_blocks: Callable[..., Tensor],  # Transformer's
    windows: Sequence[int | None],  # of each layer
    ids: Tensor,
    real: Tensor,
    cache: KVCache | None,
    last: int,
) -> Tensor:
    """ids, real (B, L) -> hidden states (B, last, C), not normalised"""
    packing = Packing(real, last)
    store = None if cache is None else PackedPrefill(cache, packing)
    return packing.run(run_blocks, ids, position_ids(real), packing.bounds(windows), store)
