"""Accuracy (N+ Table 5) and calibration of reward models, by hand on six pairs and by a double loop."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nanorlhf.dataset import Comparison
from nanorlhf.errors import InputError
from nanorlhf.metrics.pair_accuracy import (
    accuracy_table,
    calibration,
    deciders,
    first_shown_share,
    pair_groups,
    score_statistics,
)
from nanorlhf.report.calibration_figures import calibration_figure


def pair(batch=None, confidence=None, split=None, policies=None) -> Comparison:
    meta = {"batch": batch, "confidence": confidence, "split": split, "policies": policies}
    return Comparison([], [], [], {"meta": {name: value for name, value in meta.items() if value is not None}})


ROWS = [
    pair("batch7", 1, "valid1", ["ppo", "ref"]),
    pair("batch22", 9, "valid2", ["ref", "ppo"]),
    pair("batch7", 9, "valid1", ["sup", "ref"]),
    pair("batch11", 6, "valid2", ["ppo", "ref"]),
    pair("batch11", None, "valid2", ["sup", "ppo"]),
    Comparison([], [], [], {}),  # without meta: counts in the overall accuracy only
]
# two seeds of one model, one of another
MARGINS = {
    "rm": np.array([[1.0, -1.0, 0.5, 2.0, 0.0, 3.0], [1.0, 1.0, -0.5, 2.0, 1.0, 3.0]]),
    "dpo": np.array([[-1.0, -1.0, 1.0, 1.0, 1.0, -1.0]]),
}


def test_table_5_by_hand():
    """A tie (the fifth pair of the first seed) is wrong; std over the two seeds is abs(a - b) / sqrt(2)."""
    table = accuracy_table(pair_groups(ROWS, "pairs.jsonl"), MARGINS)
    cells = {
        (row["by"], row["value"]): (row["num_pairs"], row["models"]["rm"], row["models"]["dpo"]["mean"])
        for row in table
    }
    root = math.sqrt(2)
    expected = {
        ("all", ""): (6, 4 / 6, 5 / 6, 3 / 6),
        ("batch", "batch7"): (2, 2 / 2, 1 / 2, 1 / 2),
        ("batch", "batch11"): (2, 1 / 2, 2 / 2, 2 / 2),
        ("batch", "batch22"): (1, 0, 1, 0),
        ("confidence", "1"): (1, 1, 1, 0),
        ("confidence", "6"): (1, 1, 1, 1),
        ("confidence", "9"): (2, 1 / 2, 1 / 2, 1 / 2),
        ("split", "valid1"): (2, 2 / 2, 1 / 2, 1 / 2),
        ("split", "valid2"): (3, 1 / 3, 3 / 3, 2 / 3),
        ("policies", "ppo / ref"): (3, 2 / 3, 3 / 3, 1 / 3),  # unordered; most pairs first
        ("policies", "ppo / sup"): (1, 0, 1, 1),
        ("policies", "ref / sup"): (1, 1, 0, 1),
    }
    assert list(cells) == list(expected)  # batches sorted by number, not as text
    for group, (num_pairs, first, second, dpo) in expected.items():
        count, rm, of_dpo = cells[group]
        assert count == num_pairs and of_dpo == pytest.approx(dpo)
        assert rm["mean"] == pytest.approx((first + second) / 2)
        assert rm["std"] == pytest.approx(abs(first - second) / root)
    assert all(row["models"]["dpo"]["std"] is None for row in table)  # None for a single seed


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ({"batch": 7}, "pairs.jsonl:2: the field 'batch' must be str"),
        ({"confidence": "9"}, "pairs.jsonl:2: the field 'confidence' must be int"),
        ({"policies": ["ref"]}, "pairs.jsonl:2: 'policies'.*two names"),
        ({"policies": ["ref", 3]}, r"pairs.jsonl:2: the field 'policies\[1\]' must be str, not int"),
    ],
)
def test_a_field_of_another_type_is_reported_with_its_line(meta, sentence):
    with pytest.raises(InputError, match=sentence):
        pair_groups([ROWS[0], Comparison([], [], [], {"meta": meta})], "pairs.jsonl")


def test_calibration_by_hand():
    """Two seeds of five pairs; the 99.5% quantile of all margins is below 1.2: bins are 0 to 0.5 and 0.5 to 1."""
    margins = np.array([[0.1, -0.2, 0.4, 0.9, -2.0], [0.3, 0.3, -0.3, 1.2, 0.6]])
    result = calibration(margins)
    first, second = result["bins"]
    assert (first["middle"], second["middle"]) == (0.25, 0.75)
    assert first["num_pairs"] == 3 and second["num_pairs"] == 1 and result["num_beyond"] == 1
    assert first["mean"] == pytest.approx(2 / 3) and first["std"] == pytest.approx(0)
    assert second["mean"] == 1 and second["std"] == 0

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    ece = [
        3 / 5 * abs(2 / 3 - (sigmoid(0.1) + sigmoid(0.2) + sigmoid(0.4)) / 3)
        + 1 / 5 * abs(1 - sigmoid(0.9))
        + 1 / 5 * abs(0 - sigmoid(2.0)),  # not in the figure, but in the error
        3 / 5 * abs(2 / 3 - sigmoid(0.3)) + 1 / 5 * abs(1 - sigmoid(0.6)) + 1 / 5 * abs(1 - sigmoid(1.2)),
    ]
    assert result["ece"]["mean"] == pytest.approx(sum(ece) / 2)
    assert result["ece"]["std"] == pytest.approx(abs(ece[0] - ece[1]) / math.sqrt(2))


@given(arrays(float, st.tuples(st.integers(1, 3), st.integers(1, 30)), elements=st.floats(-6, 6)))
def test_every_pair_is_in_one_bin_and_the_accuracy_is_a_count(margins):
    result = calibration(margins)
    assert sum(row["num_pairs"] for row in result["bins"]) + result["num_beyond"] == pytest.approx(margins.shape[1])
    for number, row in enumerate(result["bins"]):
        shares = []
        for seed in margins.tolist():
            inside = [m for m in seed if 0.5 * number <= abs(m) < 0.5 * (number + 1)]
            shares += [sum(m > 0 for m in inside) / len(inside)] if inside else []
        assert row["mean"] == (pytest.approx(sum(shares) / len(shares)) if shares else None)
    assert 0 <= result["ece"]["mean"] <= 1


def test_a_calibrated_model_has_no_calibration_error():
    generator = np.random.default_rng(0)
    size = generator.exponential(1.5, (1, 200_000))
    right = generator.random(size.shape) < 1 / (1 + np.exp(-size))
    margins = np.where(right, size, -size)
    assert calibration(margins)["ece"]["mean"] < 0.01
    assert calibration(3 * margins)["ece"]["mean"] > 0.1  # overconfident


def test_the_statistics_of_scores_are_over_responses_then_over_seeds():
    result = score_statistics(np.array([[1.0, 3.0], [0.0, 0.0]]))
    assert {name: column["mean"] for name, column in result.items()} == {"max": 1.5, "mean": 1, "min": 0.5, "std": 0.5}
    assert result["max"]["std"] == pytest.approx(3 / math.sqrt(2))


def test_the_figure_has_the_logistic_curve_and_hollow_points_where_pairs_are_few():
    margins = np.concatenate((np.full(20, 0.3), np.full(9, 0.7), np.full(12, 1.2)))[None] * np.array([[1.0], [1.0]])
    figure = calibration_figure("rm", calibration(margins))
    curve, _, *points = figure.axes[0].lines
    x, y = curve.get_data()
    assert y == pytest.approx(1 / (1 + np.exp(-x)))
    by_face = {line.get_markerfacecolor(): line.get_xdata().tolist() for line in points}
    assert by_face["white"] == [0.75] and 0.25 in next(v for k, v in by_face.items() if k != "white")


def test_who_agrees_with_the_truth_and_who_prefers_the_longer_by_hand():
    """Six pairs; the third has equal gold scores, the fourth equal lengths. A margin of 0 counts as wrong."""
    golds = np.array([1.0, -1.0, 0.0, 2.0, 1.0, -2.0])
    lengths = np.array([[5, 3], [5, 3], [2, 4], [4, 4], [3, 6], [7, 1]])
    table = deciders(MARGINS, lengths, golds)
    assert table["labels"]["truth"] == {"mean": pytest.approx(3 / 5), "std": None}
    assert table["labels"]["longer"]["mean"] == pytest.approx(3 / 5)
    assert table["truth"]["truth"]["mean"] == 1
    assert table["truth"]["longer"]["mean"] == pytest.approx(1 / 5)  # no preference on the third
    rm = table["models"]["rm"]  # signs + - + + 0 + and + + - + + +
    assert rm["truth"]["mean"] == pytest.approx((3 / 5 + 3 / 5) / 2) and rm["truth"]["std"] == 0
    assert rm["longer"]["mean"] == pytest.approx((2 / 5 + 4 / 5) / 2)
    assert rm["longer"]["std"] == pytest.approx(2 / 5 / math.sqrt(2))


def test_without_a_truth_or_without_two_lengths_there_is_no_share():
    table = deciders(MARGINS, np.full((6, 2), 4), None)
    assert table["truth"] is None and table["labels"] == {name: {"mean": None, "std": None} for name in table["labels"]}
    assert table["models"]["dpo"]["truth"]["mean"] is None


def test_the_share_of_the_response_shown_first_is_of_the_pairs_that_say_so():
    def chosen(*choices) -> list[Comparison]:
        return [Comparison([], [], [], {"meta": {"choice": choice}}) for choice in choices]

    assert first_shown_share([*chosen(0, 0, 1, None), Comparison([], [], [], {})], "pairs") == pytest.approx(2 / 3)
    assert first_shown_share(ROWS, "pairs") is None
    with pytest.raises(InputError, match="pairs:2: the field 'choice' must be int"):
        first_shown_share(chosen(0, "first"), "pairs")
