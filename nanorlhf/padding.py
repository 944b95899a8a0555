"""Pad rows to one length: queries on the left, complete texts on the right. [N+ 5]"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanorlhf.model import position_ids

__all__ = [
    "first_true_index",
    "left_pad",
    "micro_batches",
    "needed_columns",
    "position_ids",
    "right_pad",
    "truncate_at_eos",
]


def left_pad(rows: list[list[int]], pad_id: int, length: int | None = None) -> Tensor:
    """Rows of ids -> (B, length), padded on the left; length None: that of the longest row.

    >>> left_pad([[5, 6], [7]], pad_id=0)
    tensor([[5, 6],
            [0, 7]])
    """
    length = max(map(len, rows)) if length is None else length
    return torch.tensor([[pad_id] * (length - len(row)) + row for row in rows], dtype=torch.long)


def right_pad(rows: list[list[int]], pad_id: int, length: int | None = None) -> Tensor:
    """Rows of ids -> (B, length), padded on the right; length None: that of the longest row."""
    length = max(map(len, rows)) if length is None else length
    return torch.tensor([row + [pad_id] * (length - len(row)) for row in rows], dtype=torch.long)


def first_true_index(mask: Tensor) -> Tensor:
    """(B, T) bool -> (B,): the index of the first True in each row; T if there is none (`argmax` would give 0)."""
    T = mask.size(1)
    index = torch.arange(T, device=mask.device).expand_as(mask)
    return torch.where(mask, index, T).amin(1) if T else mask.new_zeros(mask.size(0), dtype=torch.long)


def truncate_at_eos(response: Tensor, eos_id: int, pad_id: int) -> Tensor:
    """(B, T) -> (B, T): everything after the first EOS becomes [PAD]; the EOS stays. [N+ 23]"""
    index = torch.arange(response.size(1), device=response.device)  # (T,)
    return response.masked_fill(index > first_true_index(response == eos_id)[:, None], pad_id)


def micro_batches(rows: Sequence | Tensor, size: int) -> list:
    """Split rows into consecutive micro-batches of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def needed_columns(query_mask: Tensor, state_mask: Tensor) -> tuple[int, int]:
    """The columns that some row needs: the first with a real query token, and the number of response columns.

    query_mask (b, Q) True = real, state_mask (b, T) True = no state. All other columns are padding in every row.

        query  # # q q | response  a E s #      first 2, count 3: keeps E and the state s after it
               # # # q |           E s # #
    """
    return int(query_mask.any(0).long().argmax()), int((~state_mask).any(0).sum())
