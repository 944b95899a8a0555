"""Pad rows to one length: queries on the left, complete texts on the right, both texts of a pair in one row. [N+ 5]"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanorlhf.dataset import Comparison
from nanorlhf.model import position_ids

__all__ = [
    "JoinedPairs",
    "first_true_index",
    "join_pairs",
    "left_pad",
    "micro_batches",
    "position_ids",
    "right_pad",
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
    return (
        torch.where(mask, index, T).amin(1) if T else mask.new_zeros(mask.size(0), dtype=torch.long)
    )


def micro_batches(rows: Sequence | Tensor, size: int) -> list:
    """Split rows into consecutive micro-batches of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class JoinedPairs(NamedTuple):
    """Columns of query + chosen + rejected, right-padded; the chosen responses first, then the rejected ones."""

    ids: Tensor
    """(B, L)"""
    branch: Tensor
    """(B, L): 0 in the query, 1 in the chosen response, 2 in the rejected one and after it"""
    row: Tensor
    """(2B,): the row of each response"""
    before: Tensor
    """(2B, T): the column whose hidden state predicts each response token"""
    end: Tensor
    """(2B,): the column of each response's last token; of its query's where it is empty"""
    first: int
    """what stands before this column is needed as keys and values alone"""


def join_pairs(rows: Sequence[Comparison], pad_id: int, device: torch.device) -> JoinedPairs:
    """B comparisons -> their rows, which read the query once, and where the responses are in them, on the device.

    The two texts of a comparison begin alike: of a post of 300 tokens with two summaries of 40 each, the second copy is
    nearly half of what two rows would compute. Neither response sees the other and both have the positions that they
    would have alone (`nanorlhf.model.branch_mask`), so results differ by rounding only.
    """
    ids = right_pad([row.query + row.chosen + row.rejected for row in rows], pad_id)  # (B, L)
    query, chosen, rejected = (
        torch.tensor([len(getattr(row, name)) for row in rows])
        for name in ("query", "chosen", "rejected")
    )  # (B,) each
    column = torch.arange(ids.size(1))  # (L,)
    branch = (column >= query[:, None]).long() + (column >= (query + chosen)[:, None])  # (B, L)
    lengths = torch.cat((chosen, rejected))  # (2B,)
    start = torch.cat((query, query + chosen))  # (2B,) where each response begins
    last_of_query = query.repeat(2) - 1  # (2B,)
    t = torch.arange(max(1, int(lengths.max())))  # (T,)
    before = torch.where(t == 0, last_of_query[:, None], start[:, None] + t - 1)  # (2B, T)
    before = before.clamp(max=ids.size(1) - 1)  # at padding any column will do
    end = torch.where(lengths > 0, start + lengths - 1, last_of_query)
    row = torch.arange(len(rows)).repeat(2)
    first = int(query.min()) - 1
    ids, branch, row, before, end = (
        tensor.to(device) for tensor in (ids, branch, row, before, end)
    )
    return JoinedPairs(ids, branch, row, before, end, first)
