"""Pad rows to one length: queries on the left, complete texts on the right. [N+ 5]"""

from collections.abc import Sequence

import torch
from torch import Tensor


def left_pad(rows: list[list[int]], pad_id: int) -> Tensor:
    """Pad rows of ids on the left -> (B, length of the longest).

    >>> left_pad([[5, 6], [7]], pad_id=0)
    tensor([[5, 6],
            [0, 7]])
    """
    length = max(map(len, rows))
    return torch.tensor([[pad_id] * (length - len(row)) + row for row in rows], dtype=torch.long)


def right_pad(rows: list[list[int]], pad_id: int) -> Tensor:
    """Pad rows of ids on the right -> (B, length of the longest)."""
    length = max(map(len, rows))
    return torch.tensor([row + [pad_id] * (length - len(row)) for row in rows], dtype=torch.long)


def first_true_index(mask: Tensor) -> Tensor:
    """Return the index of the first True in each row, T if none: (B, T) -> (B,). T may be 0."""
    T = mask.size(1)
    index = torch.arange(T, device=mask.device).expand_as(mask)
    return (
        torch.where(mask, index, T).amin(1) if T else mask.new_zeros(mask.size(0), dtype=torch.long)
    )


def micro_batches(rows: Sequence | Tensor, size: int) -> list:
    """Split rows into consecutive micro-batches of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]
