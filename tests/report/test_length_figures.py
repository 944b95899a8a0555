"""Wins by length: ratio and bins against double loops and closed forms, and the figures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.report.length_figures import binned, length_figures, log_length_ratio


def test_the_ratio_is_a_logarithm_and_an_empty_response_counts_as_one_token() -> None:
    ratios = log_length_ratio([10, 5, 0, 7, 0], [5, 10, 4, 0, 0])
    assert ratios.tolist() == pytest.approx([math.log(2), -math.log(2), -math.log(4), math.log(7), 0])


@given(st.lists(st.tuples(st.integers(-40, 40), st.sampled_from((0.0, 0.5, 1.0))), min_size=1, max_size=50))
def test_bins_are_those_of_a_double_loop(pairs) -> None:
    x, wins = np.array([pair[0] / 8 for pair in pairs]), np.array([pair[1] for pair in pairs])
    middles, shares, counts = binned(x, wins)
    edges = [x.min() + i * (x.max() - x.min()) / 9 for i in range(10)]
    if x.min() == x.max():
        assert middles.tolist() == [x[0]] and shares.tolist() == [wins.mean()] and counts.tolist() == [len(x)]
        return
    assert counts.sum() == len(x) and len(middles) <= 9
    assert (shares * counts).sum() == pytest.approx(wins.sum())
    for middle, share, count in zip(middles, shares, counts, strict=True):
        i = min(range(9), key=lambda i: abs((edges[i] + edges[i + 1]) / 2 - middle))
        slack = 1e-9  # rounding may put a point on an edge into either bin
        surely = [w for v, w in zip(x, wins, strict=True) if edges[i] + slack < v < edges[i + 1] - slack]
        perhaps = [w for v, w in zip(x, wins, strict=True) if edges[i] - slack <= v <= edges[i + 1] + slack]
        assert len(surely) <= count <= len(perhaps)
        if len(surely) == len(perhaps):
            assert share == pytest.approx(np.mean(surely))


def test_the_last_bin_includes_both_edges() -> None:
    middles, shares, counts = binned(np.arange(10.0), np.array([0.0] * 9 + [1.0]))
    assert counts.tolist() == [1] * 8 + [2] and shares.tolist() == [0] * 8 + [0.5]
    assert middles.tolist() == pytest.approx([i + 0.5 for i in range(9)])


LENGTHS = {"reference": [4, 4, 4, 4, 4], "sft": [2, 4, 8, 3, 0], "ppo": [8, 16, 8, 9, 9], "none": [1, 1, 1, 1, 1]}
WINS = {"sft": [0.0, 1.0, 0.0, None, 1.0], "ppo": [1.0, 0.5, 1.0, 1.0, None], "none": [None] * 5}


def test_the_figures_show_policies_with_verdicts_and_their_means() -> None:
    of_ratio, of_mean = length_figures(LENGTHS, WINS, "reference", "the judge")
    assert of_ratio.axes[0].get_ylabel() == "share preferred by the judge"
    points = {}
    for container in of_mean.axes[0].containers:
        points[container.get_label()] = [float(line.get_data()[k][0]) for line in container[:1] for k in (0, 1)]
    assert points == {"sft": pytest.approx([3.5, 0.5]), "ppo": pytest.approx([10.25, 0.875])}
    (legend,) = of_mean.legends
    assert [text.get_text() for text in legend.get_texts()] == ["reference", "sft", "ppo"]


def test_the_curve_rises_where_the_longer_response_always_wins() -> None:
    """Length separates wins from losses, so the unpenalised likelihood has no maximum."""
    lengths = {"reference": [4] * 20, "sft": [2] * 10 + [8] * 10}
    of_ratio, _ = length_figures(lengths, {"sft": [0.0] * 10 + [1.0] * 10}, "reference", "the judge")
    [curve] = [line for line in of_ratio.axes[0].lines if line.get_label() == "sft"]
    shares = curve.get_ydata()
    assert shares[0] == pytest.approx(0.5 / 11, abs=1e-6) and shares[-1] == pytest.approx(10.5 / 11, abs=1e-6)


def test_without_verdicts_there_are_no_figures() -> None:
    assert length_figures(LENGTHS, {"none": [None] * 5}, "reference", "the judge") == []
