"""Learning curves of comparisons: the features against one text at a time, the folds, the line, the program."""

import math
import sys

import numpy as np
import pytest

from data import tiny
from experiments.learning_curve.report import (
    FOLDS,
    Args,
    length_difference,
    main,
    mean_cell,
    on_the_line,
    unseen,
)
from nanorlhf.dataset import Comparison
from nanorlhf.errors import InputError

PAIRS = [
    Comparison([5, 6, 7, 8], [11, 12, 1], [13, 14, 15, 16, 1], {"chosen": "four", "rejected": "a"}),
    Comparison([20], [21, 22, 23, 1], [1], {"chosen": "", "rejected": "four"}),
    Comparison([30, 31], [33, 1], [33, 1], {"chosen": "same", "rejected": "same"}),
]


def test_the_length_difference_counts_characters_and_changes_its_sign_with_the_responses():
    assert length_difference(PAIRS) == pytest.approx([math.log(5 / 2), -math.log(5), 0])


def test_a_separating_feature_ranks_all_pairs_right_and_noise_half():
    noise = np.random.default_rng(0).normal(size=(600, 20))
    queries = np.arange(600)
    right, num_pairs = unseen(noise, queries, 1.0, 2, seed=1)
    assert right.shape == (600, 2) and num_pairs == 540
    assert right.mean() == pytest.approx(0.5, abs=0.05)
    noise[:, 7] = 3 + np.abs(noise[:, 7])
    assert unseen(noise, queries, 1.0, 1, seed=1)[0].mean() > 0.99
    assert unseen(noise, queries, 0.25, 1, seed=1)[1] == 135
    assert unseen(np.zeros((600, 1)), queries, 1.0, 1, seed=1)[0].mean() == 0.5  # ties count half


def test_pairs_of_a_query_are_never_on_both_sides():
    """A query decides the order of its three pairs, so seeing one of them in training reveals the others."""
    queries = np.repeat(np.arange(200), 3)
    turned = np.random.default_rng(0).choice((-1.0, 1.0), size=200)
    inputs = np.eye(200)[queries] * turned[queries, None]
    assert unseen(inputs, queries, 1.0, 1, seed=1)[0].mean() == 0.5
    assert unseen(inputs, np.arange(600), 1.0, 1, seed=1)[0].mean() > 0.9


def test_the_line_goes_through_accuracies_that_grow_by_the_same_with_each_doubling():
    num_pairs = [800, 400, 200, 100]
    accuracy = np.array([0.69, 0.66, 0.63, 0.60])
    right = np.tile(accuracy, (2, 10, 1))  # two resamples of ten pairs
    assert on_the_line(right, num_pairs, 3200) == pytest.approx([0.75, 0.75])
    assert on_the_line(right, num_pairs, 2) - on_the_line(right, num_pairs, 1) == pytest.approx([0.03, 0.03])


def test_a_column_without_pairs_is_a_dash():
    assert mean_cell(np.array([1.0, 1.0]), 1) == "1.000 [1.000, 1.000]"
    assert mean_cell(np.zeros(0), 1) == "-"


def test_the_program_prints_the_curve_of_the_embedded_world_and_draws_it(miniature, tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "curve"
    tiny.main(tiny.Args(out=data, num_demonstrations=8, num_comparisons=160, num_validation=24, vocab_size=320))
    capsys.readouterr()
    main(Args(data=data, model=str(miniature.sft.out), out=out, num_sizes=2, num_repeats=1))
    printed = capsys.readouterr().out
    num_rows = sum(len((data / f"comparisons.{x}.jsonl").read_text().splitlines()) for x in ("train", "validation"))
    assert printed.startswith(f"{num_rows:,} pairs of ")
    assert "Doubling the pairs adds" in printed
    assert (out / "learning_curve.png").stat().st_size > 5_000


def test_a_curve_of_one_point_is_refused(miniature, tmp_path):
    with pytest.raises(InputError, match="--num-sizes must be at least 2, got 1"):
        main(Args(data=tmp_path, model=str(miniature.sft.out), num_sizes=1))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        unseen(np.zeros((FOLDS, 1)), np.arange(FOLDS), 1.0, 1, seed=1)
