"""Length control: the regression against brute force, and judges with a known length bias."""

import math
from functools import partial

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from nanorlhf.metrics import length_control
from nanorlhf.metrics.length_control import (
    label_weights,
    length_controlled_win_rate,
    logistic_regression,
    near_length_accuracy,
)


def penalised(coefficients: np.ndarray, features: np.ndarray, wins: np.ndarray) -> float:
    """Return minus Firth's penalised log-likelihood, term by term."""
    total, information = 0.0, np.zeros((len(coefficients), len(coefficients)))
    for x, y in zip(features, wins, strict=True):
        p = 1 / (1 + math.exp(-float(x @ coefficients)))
        total += y * math.log(p) + (1 - y) * math.log(1 - p)
        information += p * (1 - p) * np.outer(x, x)
    return -total - 0.5 * math.log(np.linalg.det(information))


SEPARATED = np.array([[1.0, -1.5], [1.0, -0.2], [1.0, 0.3], [1.0, 0.9], [1.0, 1.4]])
GENERATOR = np.random.default_rng(3)
CASES = {
    "mixed": (GENERATOR.normal(size=(30, 2)), (GENERATOR.random(30) < 0.6).astype(float)),
    "ties": (GENERATOR.normal(size=(20, 2)), GENERATOR.choice((0, 0.5, 1), 20)),
    "three terms": (GENERATOR.normal(size=(40, 3)), (GENERATOR.random(40) < 0.4).astype(float)),
    "separated": (SEPARATED, np.array([0.0, 0, 1, 1, 1])),
    "wins alone": (SEPARATED, np.ones(5)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_regression_maximises_the_penalised_likelihood(case) -> None:
    features, wins = CASES[case]
    coefficients = logistic_regression(features, wins)
    options = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 20_000, "maxfev": 20_000}
    searched = minimize(
        partial(penalised, features=features, wins=wins),
        np.zeros(features.shape[1]),
        method="Nelder-Mead",
        options=options,
    )
    assert coefficients == pytest.approx(searched.x, abs=1e-5)


def test_a_constant_alone_gives_the_share_with_half_a_win_and_half_a_loss_more() -> None:
    [constant] = logistic_regression(np.ones((10, 1)), np.array([1.0] * 8 + [0.0] * 2))
    assert expit(constant) == pytest.approx(8.5 / 11)


def test_the_regression_finds_the_curve_that_the_wins_were_drawn_from() -> None:
    generator = np.random.default_rng(0)
    features = np.column_stack((np.ones(200_000), generator.normal(0, 1, 200_000)))
    wins = (generator.random(200_000) < expit(features @ [0.4, -1.3])).astype(float)
    assert logistic_regression(features, wins) == pytest.approx([0.4, -1.3], abs=0.03)


def test_features_that_depend_on_each_other_share_the_weight() -> None:
    x, wins = CASES["mixed"][0][:, :1], CASES["mixed"][1]
    [alone] = logistic_regression(x, wins)
    assert logistic_regression(np.column_stack((x, x)), wins) == pytest.approx([alone / 2] * 2, abs=1e-6)
    assert logistic_regression(np.column_stack((x, 0 * x)), wins) == pytest.approx([alone, 0], abs=1e-6)


# ------------------------------------------------------------------------------------------------------ 2. win rates
def differences(num_rows: int, mean: float) -> np.ndarray:
    """Return random differences of lengths in characters, (rows, 1)."""
    return np.random.default_rng(1).normal(mean, 100, (num_rows, 1)).round()


@pytest.fixture
def few_resamples(monkeypatch) -> None:
    """Resample less, since each resample fits a regression; not for tests of the interval's coverage."""
    monkeypatch.setattr(length_control, "NUM_RESAMPLES", 10)


def draw_wins(probabilities: np.ndarray) -> np.ndarray:
    """(rows, pairs) -> drawn wins (rows, pairs, 1)"""
    return (np.random.default_rng(2).random(probabilities.shape) < probabilities).astype(float)[..., None]


@pytest.mark.slow
def test_a_judge_by_length_has_no_preference_at_equal_length() -> None:
    """Our texts are longer in 84 of 100 pairs; the judge prefers the longer one mostly or always."""
    d = differences(300, 100)
    always = (np.sign(d) + 1)[..., None] / 2  # equally long texts are a tie
    for wins in (draw_wins(expit(2 * np.tanh(d / d.std()))), always):
        rate, (low, high) = length_controlled_win_rate(wins, d, seed=1)
        assert wins.mean() > 0.7
        assert rate == pytest.approx(0.5, abs=0.1) and low < 0.5 < high < wins.mean()


def test_a_judge_that_does_not_look_at_length_has_the_same_rate_at_equal_length() -> None:
    d = differences(800, 100)
    wins = draw_wins(np.full(d.shape, 0.7))
    rate, (low, high) = length_controlled_win_rate(wins, d, seed=1)
    assert rate == pytest.approx(wins.mean(), abs=0.05) and low < wins.mean() < high


def test_quality_is_found_despite_a_length_bias() -> None:
    """Our texts are better but shorter: only the controlled rate shows it."""
    d = differences(800, -100)
    wins = draw_wins(expit(0.8 + 2 * np.tanh(d / d.std(ddof=1))))
    rate, (low, high) = length_controlled_win_rate(wins, d, seed=1)
    assert wins.mean() < 0.5 < low < expit(0.8) < high and rate == pytest.approx(expit(0.8), abs=0.06)


@pytest.mark.usefixtures("few_resamples")
def test_the_rates_of_two_sides_add_up_to_1_and_a_policy_ties_with_itself() -> None:
    d = differences(200, 30)
    wins = draw_wins(expit(0.5 + d / 100))
    rate, (low, high) = length_controlled_win_rate(wins, d, seed=1)
    swapped, ends = length_controlled_win_rate(1 - wins, -d, seed=1)
    assert swapped == pytest.approx(1 - rate) and ends == pytest.approx((1 - high, 1 - low))
    assert length_controlled_win_rate(np.full((200, 1, 1), 0.5), d, seed=1)[0] == pytest.approx(0.5)


def test_where_all_differences_are_the_same_length_and_quality_can_not_be_told_apart() -> None:
    assert length_controlled_win_rate(np.ones((5, 1, 1)), np.full((5, 1), 7), seed=1) is None
    assert length_controlled_win_rate(np.ones((1, 1, 1)), np.array([[7]]), seed=1) is None


@pytest.mark.slow
def test_pairs_of_one_row_are_resampled_together() -> None:
    """A row of nine equal pairs has no more information than one pair."""
    d = differences(150, 50)
    wins = draw_wins(expit(0.4 + d / 100))
    one, (low, high) = length_controlled_win_rate(wins, d, seed=1)
    nine, (low_of_nine, high_of_nine) = length_controlled_win_rate(np.repeat(wins, 9, 1), np.repeat(d, 9, 1), seed=1)
    assert nine == pytest.approx(one, abs=0.01)
    assert high_of_nine - low_of_nine == pytest.approx(high - low, rel=0.1)


@pytest.mark.usefixtures("few_resamples")
def test_of_several_seeds_the_mean_of_their_rates() -> None:
    d = differences(100, 10)
    one, two = draw_wins(expit(d / 100)), 1 - draw_wins(np.full(d.shape, 0.2))
    rates = [length_controlled_win_rate(wins, d, seed=1)[0] for wins in (one, two)]
    both, _ = length_controlled_win_rate(np.concatenate((one, two), axis=2), d, seed=1)
    assert both == pytest.approx(np.mean(rates))


# ---------------------------------------------------------------------------------------------------- 3. reward models
@pytest.mark.parametrize(("knows", "clear", "unclear"), [(True, "margin", "length"), (False, "length", "margin")])
def test_the_weights_tell_a_model_that_knows_quality_from_one_that_knows_length(knows, clear, unclear) -> None:
    """Labels depend on quality or only on length; margins on quality or length, plus noise."""
    generator = np.random.default_rng(5)
    quality, length, noise = generator.normal(size=(3, 600, 1))
    labelled = np.sign((quality if knows else length) + 0.5 * generator.normal(size=(600, 1)))  # chosen first or second
    margins = labelled * ((quality if knows else length) + noise)
    weights = label_weights(margins[..., None], labelled * (length * 50).round(), seed=1)
    low, high = weights[clear]["interval"]
    assert 0 < low < weights[clear]["mean"] < high
    low, high = weights[unclear]["interval"]
    assert low < 0 < high


@pytest.mark.usefixtures("few_resamples")
def test_a_term_that_is_zero_gets_no_weight() -> None:
    d = differences(40, 60)
    without_margin = label_weights(np.zeros((40, 1, 1)), d, seed=1)
    assert without_margin["margin"] == {"mean": 0, "interval": (0, 0)} and without_margin["length"]["mean"] > 0
    without_length = label_weights(d[..., None], np.zeros((40, 1)), seed=1)
    assert without_length["length"]["mean"] == 0 and without_length["margin"]["mean"] > 0


def test_pairs_of_about_equal_length_by_hand() -> None:
    lengths = np.array([[[10, 9], [10, 8]], [[90, 100], [100, 89]], [[5, 10], [1, 9]]])  # within a tenth: 1 of each
    right = np.array([[[1], [0]], [[0], [1]], [[1], [1]]])
    accuracy = near_length_accuracy(right, lengths, seed=1)
    assert accuracy["mean"] == 0.5 and accuracy["num_pairs"] == 2  # of rows 0 and 1; the third row has none
    low, high = accuracy["interval"]
    assert 0 < low < 0.5 < high < 1
    assert near_length_accuracy(right[2:], lengths[2:], seed=1) is None
