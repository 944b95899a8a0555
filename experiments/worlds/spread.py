"""Spread of a number over worlds: quantiles with intervals, and the part of the variance within a world."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # .stats loads with its first use


def quantile_interval(rates: Sequence[float], share: float) -> tuple[float, float]:
    """Return the 95% interval of a quantile of a rate from 0 to 1, whatever its distribution.

    The number of n values below the quantile is binomial (n, share), so both ends are order statistics. An end is 0 or
    1 if n values are too few to bound it: the lower end of the 10% quantile takes 36.

    >>> quantile_interval([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0.5), quantile_interval([0.7, 0.8], 0.1)
    ((0.1, 0.6), (0.0, 0.8))
    """
    ordered = [0.0, *sorted(rates), 1.0]
    low, high = scipy.stats.binom.ppf((0.025, 0.975), len(rates), share)
    return float(ordered[int(low)]), float(ordered[int(high) + 1])


@dataclass(frozen=True)
class Components:
    """Standard deviations of a run's result: between worlds, and between repeated runs in a world."""

    num_worlds: int
    num_runs: int
    worlds: float
    within: float
    within_ci: tuple[float, float]
    """95% interval, for normal errors"""


def components(runs: Sequence[Sequence[float]]) -> Components | None:
    """Estimate both from the runs of each world, by a one-way analysis of variance.

    A negative estimate of the variance between worlds counts as 0. None unless two worlds have runs and one has two.
    """
    sizes = np.array([len(values) for values in runs])
    n, k = int(sizes.sum()), len(runs)
    if k < 2 or n == k:
        return None
    means = np.array([np.mean(values) for values in runs])
    squares = sum(float(np.square(np.array(values) - mean).sum()) for values, mean in zip(runs, means, strict=True))
    between = float((sizes * np.square(means - (sizes * means).sum() / n)).sum())
    variance = squares / (n - k)
    runs_per_world = (n - np.square(sizes).sum() / n) / (k - 1)  # the number of runs of each world, if it is the same
    worlds = max(0.0, (between / (k - 1) - variance) / runs_per_world)
    low, high = (math.sqrt(squares / scipy.stats.chi2.ppf(share, n - k)) for share in (0.975, 0.025))
    return Components(k, n, math.sqrt(worlds), math.sqrt(variance), (low, high))
