"""Win rates, 95% intervals, and tests for a difference between two policies."""

import math
from collections.abc import Callable
from statistics import fmean

import numpy as np
import scipy  # .stats is loaded on first use, which most runs don't reach
from numpy.typing import ArrayLike

from nanorlhf.metrics.score_table import score_table


def win_rate(ours: list[float], theirs: list[float]) -> float:
    """Return the share of rows with a higher score of ours; a tie counts half.

    >>> win_rate([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 5.0, -1.0])
    0.625
    """
    return fmean((a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True))


def wilson_interval(share: float, num_rows: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95% interval of a share (Wilson 1927), which stays within 0 and 1 and has a width even at 0 and 1.

    If ties count half, the variance is below share * (1 - share), so the interval is conservative.
    """
    middle = (share + z**2 / (2 * num_rows)) / (1 + z**2 / num_rows)
    half = z / (1 + z**2 / num_rows) * math.sqrt(share * (1 - share) / num_rows + z**2 / (4 * num_rows**2))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))  # rounding at 0 and 1


def bootstrap_interval(values: ArrayLike, seed: int, num_resamples: int = 2000) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the mean of values (questions, n), by percentiles.

    Whole questions are resampled: answers to one question are correlated, so resampling single answers would give an
    interval up to sqrt(n) times too narrow.
    """
    means = score_table(values).mean(axis=1)  # (questions,)
    return percentile_interval(means, lambda resamples: resamples.mean(axis=1), seed, num_resamples)


def percentile_interval(
    rows: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int, num_resamples: int
) -> tuple[float, float]:
    """Return the 95% bootstrap interval of a statistic of rows (questions, ...), by percentiles.

    statistic: (resamples, questions, ...) -> (resamples,), called for as many resamples at a time as fit 2^20 rows.
    """
    generator = np.random.default_rng(seed)
    at_once = max(1, 2**20 // len(rows))
    values = []
    for done in range(0, num_resamples, at_once):
        drawn = generator.integers(len(rows), size=(min(at_once, num_resamples - done), len(rows)))
        values.append(statistic(rows[drawn]))
    low, high = np.quantile(np.concatenate(values), (0.025, 0.975))
    return float(low), float(high)


def t_interval(values: ArrayLike) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of independent values (n,), by Student's t; None for fewer than two."""
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return None
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def compare(ours: ArrayLike, theirs: ArrayLike, seed: int, num_resamples: int = 2000) -> dict:
    """[SO significance] Test if two policies differ; ours and theirs (questions, n), a row for answers to one question.

    mean_difference     ours - theirs; mean_difference_ci is its 95% interval, `bootstrap_interval` over the questions'
                        differences, which cancels how hard each question is
    ks, ks_p            Kolmogorov-Smirnov: the largest gap between the distribution functions of single answers
    mann_whitney_u, _p  number of pairs of answers with ours higher, ties counted half; two-sided

    Both p-values treat all answers as independent, as in the paper, so they are too small if answers to a question are
    correlated. Raises ValueError if the numbers of questions differ.
    """
    ours, theirs = score_table(ours), score_table(theirs)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} questions: expected the same questions")
    differences = ours.mean(axis=1) - theirs.mean(axis=1)  # (questions,)
    ks = scipy.stats.ks_2samp(ours.ravel(), theirs.ravel())
    mann_whitney = scipy.stats.mannwhitneyu(ours.ravel(), theirs.ravel())
    return {
        "mean_difference": float(differences.mean()),
        "mean_difference_ci": bootstrap_interval(differences[:, None], seed, num_resamples),
        "ks": float(ks.statistic),
        "ks_p": float(ks.pvalue),
        "mann_whitney_u": float(mann_whitney.statistic),
        "mann_whitney_p": float(mann_whitney.pvalue),
    }
