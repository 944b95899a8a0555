"""Padding by hand. That it changes no output of the model: test_model.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.masks import position_ids
from nanorlhf.padding import (
    first_true_index,
    left_pad,
    micro_batches,
    right_pad,
)

PAD = 99
rows = st.lists(st.lists(st.integers(4, 9), min_size=1, max_size=6), min_size=1, max_size=5)


def test_left_and_right_padding_by_hand():
    assert left_pad([[5, 6], [7]], PAD).tolist() == [[5, 6], [PAD, 7]]
    assert right_pad([[5, 6], [7]], PAD).tolist() == [[5, 6], [7, PAD]]


@given(rows)
def test_padding_loses_nothing(rows):
    for pad in (left_pad, right_pad):
        padded = pad(rows, PAD)
        assert padded.shape == (len(rows), max(map(len, rows)))
        assert [row[row != PAD].tolist() for row in padded] == rows


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6))
def test_first_true_index_equals_list_index(mask):
    expected = [row.index(True) if True in row else 4 for row in mask]
    assert first_true_index(torch.tensor(mask)).tolist() == expected


def test_a_row_without_columns_has_its_first_true_at_0():
    index = first_true_index(torch.zeros(2, 0, dtype=torch.bool))
    assert index.tolist() == [0, 0] and index.dtype == torch.long


def test_positions_count_the_real_tokens_before():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


def test_micro_batches_are_consecutive_and_complete():
    assert micro_batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
