"""Metrics of k answers to a question: pass@k, metric@k and MRR@k.

`scores` is (questions, n), as in score_table.py, and 1 <= k <= n. Anything else raises ValueError.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from nanorlhf.metrics.score_table import score_table


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n samples include a pass if c of the n pass (Chen et al. 2021).

        1 - C(n-c, k) / C(n, k)

    Computed as a product, so that no factorial overflows. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    _check_k(k, n)
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples pass: c must be from 0 to {n}")
    if n - c < k:  # fewer failures than draws
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))


def metric_at_k(scores: ArrayLike, k: int) -> float:
    """[SO metric@k] Return the expected best score among k of the n answers; mean over questions.

    In ascending order, x_(i) is the best of k in C(i-1, k-1) of the C(n, k) choices. k = 1 is the mean, k = n the best.
    Raises ValueError unless 1 <= k <= n.
    """
    ascending = np.sort(score_table(scores), axis=1)  # (questions, n)
    n = ascending.shape[1]
    _check_k(k, n)
    weights = [math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1)]  # (n,)
    return float((ascending @ np.array(weights)).mean())


def mrr_at_k(scores: ArrayLike, useful: ArrayLike, k: int) -> float:
    """[SO mrr@k] Return the mean reciprocal rank: the mean of 1/R over questions, R the first useful answer's rank.

    Answers are ranked by score, ties in the order of generation; 0 if R > k or no answer is useful. useful
    (questions, n) is 1 or 0. Raises ValueError for NaN (an answer without a label: choose fully labelled questions),
    for scores and labels of different shapes, and unless 1 <= k <= n.
    """
    values, labels = score_table(scores), score_table(useful)
    _check_k(k, values.shape[1])
    if values.shape != labels.shape:
        raise ValueError(f"scores are {values.shape}, labels {labels.shape}: expected the same answers")
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(labels, order, axis=1)[:, :k] > 0  # (questions, k) True = useful, best score first
    first = ranked.argmax(axis=1)  # (questions,) also 0 if none is useful
    return float(np.where(ranked.any(axis=1), 1 / (first + 1), 0.0).mean())


def chance_mrr_at_k(useful: ArrayLike, k: int) -> float:
    """Return the expected `mrr_at_k` of a random order. useful (questions, n) is 1 or 0.

    With m of n answers useful, the first useful one has rank r in C(n-r, m-1) of C(n, m) orders.

    >>> chance_mrr_at_k([[1, 0]], 2)
    0.75
    """
    labels = score_table(useful)
    n = labels.shape[1]
    _check_k(k, n)
    counts = [int(count) for count in labels.sum(axis=1)]
    orders = [math.comb(n - r, m - 1) / math.comb(n, m) / r for m in counts if m for r in range(1, k + 1)]
    return sum(orders) / len(counts)


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} must be from 1 to n = {n}")
