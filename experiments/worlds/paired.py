"""Two algorithms in the same worlds: by how much they differ, how surely, and what so few worlds could have shown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # .stats loads with its first use
from numpy.typing import ArrayLike

from nanorlhf.metrics.intervals import t_interval


@dataclass(frozen=True)
class Paired:
    """Of differences d (n,), a world each."""

    num_worlds: int
    mean: float
    sd: float
    """with n - 1; 0 of a single world"""
    ci: tuple[float, float] | None
    """95% interval of the mean by Student's t; None of a single world"""
    effect: float | None
    """Cohen's d of paired differences, mean / sd; None where the sd is 0"""
    effect_ci: tuple[float, float] | None
    """its 95% interval by the noncentral t"""
    share: float
    """worlds in which d > 0; a tie counts half"""
    p: float
    """two-sided, Wilcoxon's signed-rank test"""


def paired(differences: ArrayLike) -> Paired:
    """What n paired differences say. Raises ValueError without any.

    >>> found = paired([1.0, 2.0, 3.0])
    >>> found.mean, found.sd, found.effect, found.share, found.p
    (2.0, 1.0, 2.0, 1.0, 0.25)
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n == 0:
        raise ValueError("no world has both")
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
    """The 95% interval of Cohen's d of n paired differences.

    sqrt(n) d has a noncentral t distribution with n - 1 degrees of freedom. The ends are the noncentralities, over
    sqrt(n), at which the measured value is its 97.5% and its 2.5% point (Steiger and Fouladi 1997).
    """
    root, dof = math.sqrt(num_worlds), num_worlds - 1
    t = abs(effect) * root
    reach = 10 + 4 * t  # there the probability is 0 or 1

    def end(probability: float) -> float:
        def excess(shift: float) -> float:
            share = scipy.stats.nct.cdf(t, dof, shift)
            return (share if math.isfinite(share) else float(shift < t)) - probability  # scipy underflows far out

        return float(scipy.optimize.brentq(excess, t - reach, t + reach)) / root

    low, high = end(0.975), end(0.025)
    return (low, high) if effect >= 0 else (-high, -low)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number (Holm 1979): below 0.05 all of them hold together, in 95 of 100 studies.

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
    """The probability that a two-sided paired t-test at 5% finds a true effect, Cohen's d, in n >= 2 worlds."""
    dof = num_worlds - 1
    critical = scipy.stats.t.ppf(0.975, dof)  # t^2 has a noncentral F distribution, which covers both sides
    return float(scipy.stats.ncf.sf(critical**2, 1, dof, num_worlds * effect**2))


def detectable_effect(num_worlds: int, wanted: float = 0.8) -> float:
    """The smallest effect, Cohen's d, that n >= 2 worlds show with this power. Times the sd it is a difference."""
    return float(scipy.optimize.brentq(lambda effect: power(effect, num_worlds) - wanted, 1e-6, 100.0))


def worlds_needed(effect: float, wanted: float = 0.8, most: int = 10_000) -> int | None:
    """The fewest worlds in which a true effect, Cohen's d above 0, is shown with this power; None: more than `most`."""
    low, high = 1, 2  # too few, perhaps enough
    while power(effect, high) < wanted:
        low, high = high, 2 * high
        if low > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle) >= wanted else (middle, high)
    return high if high <= most else None
