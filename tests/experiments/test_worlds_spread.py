"""Quantile intervals and variance components of the study over worlds, against enumeration and simulation."""

from itertools import product
from math import prod

import numpy as np
import pytest
from scipy import stats

from experiments.worlds.spread import components, quantile_interval


def missed(num_values: int, share: float, position: int) -> tuple[float, float]:
    """Return the probabilities that fewer than `position` values are below the quantile, and the opposite."""
    fewer = 0.0
    for below in product((True, False), repeat=num_values):
        if sum(below) < position:
            fewer += prod(share if x else 1 - share for x in below)
    return fewer, 1 - fewer


@pytest.mark.parametrize("num_values", [1, 6, 10])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_a_quantile_interval_misses_at_most_one_in_forty_on_each_side_and_is_the_narrowest(num_values, share) -> None:
    """Value k of the sorted ones is above the quantile if fewer than k are below it."""
    rates = [k / 100 for k in range(1, num_values + 1)]
    low, high = (round(100 * end) for end in quantile_interval(rates[::-1], share))
    high = min(high, num_values + 1)  # 1 for no bound
    assert missed(num_values, share, low)[0] <= 0.025 < missed(num_values, share, low + 1)[0]
    assert missed(num_values, share, high)[1] <= 0.025 < missed(num_values, share, high - 1)[1]


def test_quantile_intervals_agree_with_published_tables() -> None:
    """The median of 20: values 6 and 15 (Conover 1999). 36 is the first n with 0.9^n < 0.025."""
    rates = [k / 100 for k in range(1, 41)]
    assert quantile_interval(rates[:20], 0.5) == (0.06, 0.15)
    assert quantile_interval(rates[:35], 0.1)[0] == 0 and quantile_interval(rates[:36], 0.1)[0] == 0.01


def test_components_are_the_mean_squares_of_an_analysis_of_variance() -> None:
    runs = [[0.90, 0.92, 0.88], [0.70, 0.76, 0.73], [0.95, 0.94, 0.96], [0.85, 0.80, 0.84]]
    result = components(runs)
    f = stats.f_oneway(*runs).statistic
    within = np.mean([np.var(values, ddof=1) for values in runs])
    assert result is not None and (result.num_worlds, result.num_runs) == (4, 12)
    assert result.within == pytest.approx(np.sqrt(within))
    assert result.worlds == pytest.approx(np.sqrt(within * (f - 1) / 3))
    low, high = result.within_ci
    assert stats.chi2.cdf(8 * within / low**2, 8) == pytest.approx(0.975)
    assert stats.chi2.cdf(8 * within / high**2, 8) == pytest.approx(0.025)


def test_components_recover_both_standard_deviations_from_unequal_numbers_of_runs() -> None:
    generator = np.random.default_rng(0)
    runs = [
        list(0.8 + 0.05 * generator.standard_normal() + 0.02 * generator.standard_normal(size))
        for size in generator.integers(1, 5, 4000)
    ]
    result = components(runs)
    assert result is not None
    assert (result.worlds, result.within) == pytest.approx((0.05, 0.02), rel=0.05)
    assert result.within_ci[0] < 0.02 < result.within_ci[1]


def test_components_take_a_rerun() -> None:
    assert components([[0.9], [0.8]]) is components([[0.9, 0.8]]) is components([]) is None
    equal = components([[0.9, 0.7], [0.9, 0.7]])
    assert equal is not None and equal.worlds == 0 and equal.within == pytest.approx(np.sqrt(0.02))
