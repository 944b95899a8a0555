"""The KV cache: earlier tokens' keys and values for a decode step. Shapes as in model.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda_graph import replays
from kernels.decode import Columns, has_kernel
from nanorlhf.config import GPTConfig, RotaryTables
from nanorlhf.masks import position_ids


def can_decode(config: GPTConfig, device: torch.device) -> bool:
    """Return whether `kernels.decode` computes a decode step's attention."""
    plain = config.attention_cap is None and config.positions != "relative"
    return has_kernel(device) and plain and config.head_width <= 256


def is_left_padded(mask: Tensor) -> bool:
    """Return whether no padding follows a real token, mask (B, Q). Waits for a GPU."""
    return not bool((mask[:, :-1] & ~mask[:, 1:]).any())


class KVCache:
    """Keys, values and position tables in buffers that are allocated once and updated in place.

    Prefill takes the query in one call; each later call takes one token per row. query_mask (B, Q)
    True = real; the num_new tokens after the query are all real. `at` is a tensor, not a number, so
    that a CUDA graph of one step can be replayed for all of them. For the same reason, a GPU
    returns the whole buffer, which gives all steps the same shape; a CPU returns the part written
    so far.
    """

    def __init__(
        self,
        config: GPTConfig,
        query_mask: Tensor,
        num_new: int,
        dtype: torch.dtype,
    ):
        B, Q = query_mask.shape
        device = query_mask.device
        self.config = config
        self.fixed_shape = replays(device)
        self.length = 0  # tokens in the cache; the model advances it after each call
        self.prefill = Q  # tokens of the first call
        shape = (config.n_layer, B, config.kv_heads, Q + num_new, config.head_width)
        # a CPU multiplies one query by all keys up to three times as fast if each channel is
        # contiguous
        layout = (0, 1, 2, 3, 4) if query_mask.is_cuda else (0, 1, 2, 4, 3)
        self.keys = torch.empty_permuted(shape, layout, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        if self.fixed_shape:  # columns not yet written are read too: they must not be NaN
            self.keys.zero_()
            self.values.zero_()
        mask = F.pad(query_mask, (0, num_new), value=True)  # (B, L)
        self.positions = position_ids(mask)  # (B, L)
        self.rotary = config.rotary_tables(self.positions)
        self.at = torch.full((1,), Q, device=device)  # column of the next token
        self.index = torch.arange(Q + num_new, device=device)  # (L,)
        # the first real column of left-padded rows (B,), for kernels.decode; None: use the bias
        self.first: Tensor | None = None
        if can_decode(config, device) and is_left_padded(query_mask):
            self.first = (~query_mask).sum(1)
        # 0 or -inf: at first the query's real tokens are visible, then one more in each step
        self.bias = torch.zeros((B, config.n_head, 1, Q + num_new), device=device, dtype=dtype)
        self.bias.masked_fill_(~mask[:, None, None, :] | (self.index >= Q), -torch.inf)

    def next_token(self) -> tuple[Tensor, RotaryTables, list[Any]]:
        """Return the next token's positions (B, 1) and rotary tables, and what each layer attends
        to: a bias (B, H, 1, L), or the columns.
        """
        rotary = {}
        for settings, (cos, sin) in self.rotary.items():
            rotary[settings] = cos.index_select(1, self.at), sin.index_select(1, self.at)
        positions, windows = self.positions.index_select(1, self.at), self.config.windows
        if self.first is not None:
            return positions, rotary, [Columns(self.first, self.at, window) for window in windows]
        return positions, rotary, self.next_biases()

    def next_biases(self) -> list[Tensor]:
        """Return each layer's bias on the next token's logits, (B, H, 1, L)."""
        self.bias.index_fill_(3, self.at, 0.0)
        bias = self.bias[..., : self.end]
        biases: dict[int | None, Tensor] = {None: bias}
        for window in self.config.windows:
            if window is not None and window not in biases:
                too_far = self.index[: self.end] <= self.at - window
                biases[window] = bias.masked_fill(too_far, -torch.inf)
        return [biases[window] for window in self.config.windows]

    @property
    def end(self) -> int:
        """Number of columns that a decode step attends to."""
        return self.bias.size(3) if self.fixed_shape else self.length + 1

    @property
    def is_static(self) -> bool:
        """Return whether the next call is a decode step with the same shapes as all others."""
        return self.fixed_shape and self.length > 0

    def slot(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's keys and values (B, K, L, D) and the next token's column (1,)."""
        return self.keys[layer], self.values[layer], self.at

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key, value (B, K, S, D) of new tokens -> the keys and values they may attend to.

        The query is stored from column 0, a later token in column `length`. `at` is the same
        column as a tensor, for a CUDA graph.
        """
        keys, values = self.keys[layer], self.values[layer]  # (B, K, Q + num_new, D)
        if self.is_static:
            keys.index_copy_(2, self.at, key)
            values.index_copy_(2, self.at, value)
        else:  # writing a slice takes half the time of index_copy_
            end = self.length + key.size(2)
            keys[:, :, self.length : end], values[:, :, self.length : end] = key, value
        return (keys[:, :, : self.end], values[:, :, : self.end]) if self.length else (key, value)

    def advance(self, num_tokens: int) -> None:
        if self.length:
            self.at += 1
        self.length += num_tokens

    def keep(self, rows: Tensor) -> None:
        """Keep the rows with these indices (n,); an index may come twice."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.positions, self.bias = self.positions[rows], self.bias[rows]
        self.first = None if self.first is None else self.first[rows]
        for settings, (cos, sin) in self.rotary.items():
            self.rotary[settings] = cos[rows], sin[rows]
