"""Paired statistics against formulas typed by hand, enumeration and numerical integration."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from experiments.worlds.paired import detectable_effect, effect_interval, holm, paired, power, worlds_needed

DIFFERENCES = [0.31, -0.12, 0.55, 0.07, 0.42, -0.03, 0.26, 0.18]


def noncentral_t(t: float, dof: int, shift: float) -> float:
    """P(T <= t) of (Z + shift) / sqrt(V / dof), integrated over V, chi-squared."""
    density = stats.chi2(dof).pdf
    return integrate.quad(lambda v: stats.norm.cdf(t * math.sqrt(v / dof) - shift) * density(v), 0, np.inf)[0]


def test_the_interval_is_students_and_the_effect_is_the_mean_over_the_sd() -> None:
    result = paired(DIFFERENCES)
    mean = sum(DIFFERENCES) / 8
    sd = math.sqrt(sum((x - mean) ** 2 for x in DIFFERENCES) / 7)
    half = 2.364624 * sd / math.sqrt(8)  # t of 7 degrees of freedom, from a table
    assert (result.num_worlds, result.mean, result.sd) == (8, pytest.approx(mean), pytest.approx(sd))
    assert result.ci == pytest.approx((mean - half, mean + half), rel=1e-5)
    assert result.effect == pytest.approx(mean / sd) and result.share == 6 / 8


def test_wilcoxon_is_the_enumeration_of_all_signs() -> None:
    """With n differences there are 2^n equally likely assignments of signs to the ranks of |d|."""
    sizes = sorted(map(abs, DIFFERENCES))
    ranks = [sizes.index(abs(x)) + 1 for x in DIFFERENCES]
    measured = sum(rank for rank, x in zip(ranks, DIFFERENCES, strict=True) if x > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=8)]
    middle = sum(ranks) / 2
    as_far = sum(abs(s - middle) >= abs(measured - middle) for s in sums)
    assert paired(DIFFERENCES).p == pytest.approx(as_far / 2**8)


def test_a_permutation_of_signs_agrees_with_the_t_test_to_chance() -> None:
    """The mean's exact permutation p-value is near that of the interval's t: both are below 5% or neither is."""
    means = [
        abs(np.mean([s * x for s, x in zip(signs, DIFFERENCES, strict=True)]))
        for signs in itertools.product((1, -1), repeat=8)
    ]
    permuted = np.mean([m >= abs(np.mean(DIFFERENCES)) - 1e-12 for m in means])
    result = paired(DIFFERENCES)
    assert result.ci is not None and (result.ci[0] > 0) == (permuted < 0.05)


def test_no_difference_and_a_single_world() -> None:
    same = paired([0.0, 0.0, 0.0])
    assert (same.mean, same.share, same.p, same.effect, same.ci) == (0.0, 0.5, 1.0, None, (0.0, 0.0))
    one = paired([0.2])
    assert (one.sd, one.ci, one.effect_ci, one.share) == (0.0, None, None, 1.0)
    with pytest.raises(ValueError, match="no world"):
        paired([])


@pytest.mark.parametrize(("effect", "n"), [(0.5, 20), (-1.2, 8), (4.0, 20), (0.0, 5), (0.3, 2), (20.0, 20)])
def test_the_effects_interval_solves_the_noncentral_t(effect, n) -> None:
    low, high = effect_interval(effect, n)
    root = math.sqrt(n)
    assert low < effect < high
    assert noncentral_t(effect * root, n - 1, low * root) == pytest.approx(0.975, abs=1e-5)
    assert noncentral_t(effect * root, n - 1, high * root) == pytest.approx(0.025, abs=1e-5)


def test_holm_on_a_worked_example() -> None:
    # sorted: 0.005 * 4, then 0.01 * 3 = 0.03, then max(0.03, 0.03 * 2) = 0.06, then max(0.06, 0.04) = 0.06
    assert holm([0.04, 0.005, 0.03, 0.01]) == pytest.approx([0.06, 0.02, 0.06, 0.03])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_holm_is_the_step_down_test() -> None:
    """p < 0.05 exactly if Holm's procedure rejects: the smallest p at 0.05 / m, the next at 0.05 / (m - 1)..."""
    for p_values in np.random.default_rng(0).random((200, 6)) ** 4:
        rejected = set()
        for rank, index in enumerate(np.argsort(p_values)):
            if p_values[index] > 0.05 / (6 - rank):
                break
            rejected.add(int(index))
        assert {i for i, p in enumerate(holm(p_values.tolist())) if p <= 0.05} == rejected


@pytest.mark.parametrize(("effect", "worlds"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_worlds_needed_are_those_of_cohens_tables(effect, worlds) -> None:
    assert worlds_needed(effect) == worlds
    assert power(effect, worlds) >= 0.8 > power(effect, worlds - 1)


def test_power_is_the_share_of_simulated_studies_that_find_the_effect() -> None:
    draws = np.random.default_rng(1).normal(0.6, 1.0, (20_000, 20))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(20))
    assert power(0.6, 20) == pytest.approx(np.mean(abs(t) > 2.093024), abs=0.01)


def test_the_detectable_effect_is_detected_with_that_power() -> None:
    effect = detectable_effect(20)
    assert effect == pytest.approx(0.66, abs=0.01) and power(effect, 20) == pytest.approx(0.8, abs=1e-6)
    assert worlds_needed(effect) in (20, 21) and worlds_needed(1e-3) is None
