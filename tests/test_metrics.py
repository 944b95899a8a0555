import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.metrics import rouge, wilson_interval, win_rate


def test_rouge_of_texts_counted_by_hand() -> None:
    """Response `a b c d`, reference `a c b`: 3 words shared, no bigram, a longest common subsequence of 2."""
    scores = rouge(["a c b"], ["a b c d"])
    assert scores["rouge1"] == pytest.approx(2 * (3 / 4) * (3 / 3) / (3 / 4 + 3 / 3))
    assert scores["rouge2"] == 0
    assert scores["rougeL"] == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_rouge_is_the_mean_over_rows_and_does_not_stem() -> None:
    scores = rouge(["the cat", "dogs run"], ["the cat", "dog runs"])
    assert scores == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_an_empty_response_overlaps_with_nothing() -> None:
    assert rouge(["the cat"], [""]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


def test_a_tie_is_half_a_win() -> None:
    assert win_rate([1.0, 2.0, 0.0], [0.0, 2.0, 5.0]) == 0.5
    assert win_rate([1.0, 1.0], [1.0, 1.0]) == 0.5


def test_rows_that_do_not_match_are_an_error_and_not_cut_off() -> None:
    with pytest.raises(ValueError):
        win_rate([1.0], [1.0, 2.0])
    with pytest.raises(ValueError):
        rouge(["a"], ["a", "b"])


@given(st.integers(1, 5000), st.floats(0, 1))
def test_the_interval_solves_wilsons_equation(num_rows: int, share: float) -> None:
    """Its ends are the p at which the share lies 1.96 standard errors, those of p, away."""
    low, high = wilson_interval(share, num_rows)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for p in (low, high):
        assert (share - p) ** 2 == pytest.approx(1.96**2 * p * (1 - p) / num_rows, abs=1e-12)


def test_the_interval_holds_the_truth_in_95_of_100_experiments() -> None:
    """Exactly, by summing the binomial distribution: 200 rows, won at a true rate of 0.7."""
    n, p = 200, 0.7
    covered = sum(
        math.comb(n, k) * p**k * (1 - p) ** (n - k)
        for k in range(n + 1)
        if wilson_interval(k / n, n)[0] <= p <= wilson_interval(k / n, n)[1]
    )
    assert 0.94 < covered < 0.96
