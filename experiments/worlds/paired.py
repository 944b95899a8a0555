"""Paired comparison of two algorithms in the same worlds: difference, significance and power."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # .stats loads with its first use
from numpy.typing import ArrayLike

from nanorlhf.metrics.intervals import t_interval


@dataclass(frozen=True)
class Paired:
    """Statistics of differences d (n,), one per world."""

    num_worlds: int
    mean: float
    sd: float
    """with n - 1; 0 for a single world"""
    ci: tuple[float, float] | None
    """95% interval of the mean by Student's t; None for a single world"""
    effect: float | None
    """Cohen's d of paired differences, mean / sd; None if the sd is 0"""
    effect_ci: tuple[float, float] | None
    """95% interval of the effect by the noncentral t"""
    share: float
    """share of worlds with d > 0; a tie counts half"""
    p: float
    """two-sided p-value of Wilcoxon's signed-rank test"""


def paired(differences: ArrayLike) -> Paired:
    """Compute the statistics of n paired differences. Raises ValueError if there are none.

    >>> found = paired([1.0, 2.0, 3.0])
    >>> found.mean, found.sd, found.effect, found.share, found.p
    (2.0, 1.0, 2.0, 1.0, 0.25)
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n == 0:
        raise ValueError("no differences: no world has both algorithms")
    mean = float(values.mean())
    sd = float(values.std(ddof=1)) if n > 1 else 0.0
    effect = mean / sd if sd > 0 else None
    return Paired(
        num_worlds=n,
        mean=mean,
        sd=sd,
        ci=t_interval(values),
        effect=effect,
        effect_ci=None if effect is None else effect_interval(effect, n),
        share=float(np.mean((values > 0) + 0.5 * (values == 0))),
        p=float(scipy.stats.wilcoxon(values).pvalue) if values.any() else 1.0,
    )


def effect_interval(effect: float, num_worlds: int) -> tuple[float, float]:
    """Return the 95% interval of Cohen's d for n paired differences.

    sqrt(n) d has a noncentral t distribution with n - 1 degrees of freedom. The ends are the noncentralities, divided
    by sqrt(n), for which the measured value is the 97.5% and the 2.5% quantile (Steiger and Fouladi 1997).
    """
    root, dof = math.sqrt(num_worlds), num_worlds - 1
    t = abs(effect) * root
    reach = 10 + 4 * t  # the probability is 0 or 1 at this distance

    def end(probability: float) -> float:
        def excess(shift: float) -> float:
            share = scipy.stats.nct.cdf(t, dof, shift)
            return (share if math.isfinite(share) else float(shift < t)) - probability  # scipy underflows in the tails

        return float(scipy.optimize.brentq(excess, t - reach, t + reach)) / root

    low, high = end(0.975), end(0.025)
    return (low, high) if effect >= 0 else (-high, -low)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons (Holm 1979), at a family-wise error rate of 5% for p < 0.05.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def power(effect: float, num_worlds: int) -> float:
    """Return the probability that a two-sided paired t-test at 5% detects an effect (Cohen's d) in n >= 2 worlds."""
    dof = num_worlds - 1
    critical = scipy.stats.t.ppf(0.975, dof)  # t^2 has a noncentral F distribution, which covers both sides
    return float(scipy.stats.ncf.sf(critical**2, 1, dof, num_worlds * effect**2))


def detectable_effect(num_worlds: int, target_power: float = 0.8) -> float:
    """Return the smallest effect (Cohen's d) that n >= 2 worlds detect with this power; times the sd, a difference."""
    return float(scipy.optimize.brentq(lambda effect: power(effect, num_worlds) - target_power, 1e-6, 100.0))


def worlds_needed(effect: float, target_power: float = 0.8, most: int = 10_000) -> int | None:
    """Return the fewest worlds that detect a true effect (Cohen's d > 0) with this power; None if more than `most`."""
    low, high = 1, 2  # too few, perhaps enough
    while power(effect, high) < target_power:
        low, high = high, 2 * high
        if low > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle) >= target_power else (middle, high)
    return high if high <= most else None
