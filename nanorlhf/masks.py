"""Positions of left-padded rows, and attention masks.

Letters in shapes as in model.py.
"""

import torch
from torch import Tensor

from nanorlhf.config import GPTConfig

ALL = slice(None)  # all tokens of a pass, where a block may be asked for some


# --------------------------------------------------------------------------------------- positions
def position_ids(mask: Tensor) -> Tensor:
    """Count the real tokens before each token: mask (B, L), True = real -> (B, L), 0 at padding.

    A left-padded row gets the positions it would have without padding. Learned positions need this;
    rotary ones are invariant to a shift.

        mask      . . # # # .      (# = real)
        position  0 0 0 1 2 0
    """
    return (mask.long().cumsum(1) - 1).masked_fill(~mask, 0)


# ------------------------------------------------------------------------------------------- masks
def attention_mask(mask: Tensor, window: int | None, causal: bool = True) -> Tensor:
    """Mask of the keys that each token attends to: real, in the window, if causal not after it.

    mask (B, L) -> (B, 1, L, L) bool. Every token attends to itself: otherwise a padding token would
    attend to nothing, and a softmax over nothing is NaN. No real token attends to padding. The
    window is the token itself and the window - 1 tokens before it; it doesn't limit later tokens.
    """
    key = torch.arange(mask.size(1), device=mask.device)  # (L,)
    query = key[:, None]  # (L, 1)
    visible = key <= query if causal else torch.ones_like(key == query)  # (L, L)
    if window is not None:
        visible &= key > query - window
    return (visible & mask[:, None, None, :]) | (key == query)


def attention_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask into a bias of 0 or -inf on the attention logits, once for all layers."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, -torch.inf)


def causal_suffices(mask: Tensor) -> bool:
    """Return True if the device has a causal kernel and no real token follows padding, mask (B, L).

    Causal attention then never reaches padding. The check waits for the GPU.
    """
    return has_causal_kernel(mask.device) and not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def has_causal_kernel(device: torch.device) -> bool:
    """Return True on a GPU, where flash attention takes no bias. A CPU's kernel takes one, so that
    a row's sums don't depend on the other rows' padding.
    """
    return device.type == "cuda"


def positions_and_biases(
    config: GPTConfig,
    ids: Tensor,
    mask: Tensor | None,
    last: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return positions (B, L), and each layer's bias on the attention logits, (B, 1, L, L).

    The last layer's has only the last `last` tokens as queries, (B, 1, last, L).

    A bias of None selects PyTorch's causal kernel.

        case                               bias            why
        no mask                            None            all tokens are real
        padding only after the text, GPU   None            causal attention never reaches it
          its last layer, if last < L      attention_mask  the causal kernel takes L queries
        padding before the text, windows,
          capped logits, a CPU,
          both directions                  attention_mask  the mask must be explicit

    Decode steps use `KVCache.next_token` instead.
    """
    L = ids.size(1)
    is_plain = not any(config.windows) and config.attention_cap is None
    only_causal = config.causal and is_plain
    if mask is None and only_causal and last == L:
        return torch.arange(L, device=ids.device).expand_as(ids), [None] * config.n_layer
    if mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    positions = position_ids(mask)
    if only_causal and causal_suffices(mask):
        biases: list[Tensor | None] = [None] * config.n_layer
        if last < L:
            biases[-1] = attention_bias(attention_mask(mask, None)[:, :, -last:], dtype)
        return positions, biases

    by_window = {
        window: attention_bias(attention_mask(mask, window, config.causal), dtype)
        for window in set(config.windows)
    }
    layers = [by_window[window] for window in config.windows]
    layers[-1:] = [bias[:, :, -last:] for bias in layers[-1:]]
    return positions, [*layers]
