"""Comparisons as rows with both responses, so that each query is read once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanorlhf.dataset import Comparison
from nanorlhf.padding import right_pad


class JoinedPairs(NamedTuple):
    """Rows of query + chosen + rejected, right-padded. The B chosen responses come first."""

    ids: Tensor
    """(B, L)"""
    branch: Tensor
    """(B, L): 0 in the query, 1 in the chosen response, 2 in the rejected one and after it"""
    row: Tensor
    """(2B,): the row of each response"""
    before: Tensor
    """(2B, T): the column whose hidden state predicts each response token"""
    end: Tensor
    """(2B,): the column of each response's last token, or of its query's if it is empty"""
    first: int
    """earlier columns are only needed as keys and values"""


def join_pairs(rows: Sequence[Comparison], pad_id: int, device: torch.device) -> JoinedPairs:
    """Put each of B comparisons into one row, and index the two responses.

    Both texts begin with the query. With a post of 300 tokens and two summaries of 40, a second
    copy of the query would be nearly half of the computation. Neither response attends to the
    other, and each has the positions it would have in a separate row
    (`nanorlhf.masks.branch_mask`), so results differ only by rounding.
    """
    ids = right_pad([row.query + row.chosen + row.rejected for row in rows], pad_id)  # (B, L)
    query = torch.tensor([len(row.query) for row in rows])  # (B,)
    chosen = torch.tensor([len(row.chosen) for row in rows])  # (B,)
    rejected = torch.tensor([len(row.rejected) for row in rows])  # (B,)
    column = torch.arange(ids.size(1))  # (L,)
    branch = (column >= query[:, None]).long() + (column >= (query + chosen)[:, None])  # (B, L)
    lengths = torch.cat((chosen, rejected))  # (2B,)
    start = torch.cat((query, query + chosen))  # (2B,) where each response begins
    last_of_query = query.repeat(2) - 1  # (2B,)
    t = torch.arange(max(1, int(lengths.max())))  # (T,)
    before = torch.where(t == 0, last_of_query[:, None], start[:, None] + t - 1)  # (2B, T)
    before = before.clamp(max=ids.size(1) - 1)  # at padding, any column will do
    end = torch.where(lengths > 0, start + lengths - 1, last_of_query)
    row = torch.arange(len(rows)).repeat(2)
    first = int(query.min()) - 1
    ids, branch, row, before, end = (
        tensor.to(device) for tensor in (ids, branch, row, before, end)
    )
    return JoinedPairs(ids, branch, row, before, end, first)
