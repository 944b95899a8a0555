"""What k answers to a question are worth: pass@k, metric@k and MRR@k.

`scores` is (questions, n), as in score_table.py; k from 1 to n. Anything else raises ValueError.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from nanorlhf.metrics.score_table import score_table


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n samples, c of which pass, include at least one that passes (Chen et al. 2021).

        1 - C(n-c, k) / C(n, k)

    Computed as a product, so that no factorial overflows. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    _check_k(k, n)
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples pass: it must be from 0 to {n}")
    if n - c < k:  # fewer failures than draws
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))


def metric_at_k(scores: ArrayLike, k: int) -> float:
    """[SO metric@k] Expected best score among k of the n answers, over all choices of k; mean over questions.

    In ascending order, x_(i) is the best of k in C(i-1, k-1) of the C(n, k) choices. k = 1 is the mean, k = n the best.
    Raises ValueError unless 1 <= k <= n.
    """
    ascending = np.sort(score_table(scores), axis=1)  # (questions, n)
    n = ascending.shape[1]
    _check_k(k, n)
    weights = [math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1)]  # (n,)
    return float((ascending @ np.array(weights)).mean())


def mrr_at_k(scores: ArrayLike, useful: ArrayLike, k: int) -> float:
    """[SO mrr@k] Mean reciprocal rank: mean over questions of 1/R, R the rank of the first useful answer.

    Answers are ranked by score, ties in the order of generation; 0 where R > k or no answer is useful. useful
    (questions, n) holds 1 or 0; NaN, an answer without a label, raises ValueError: choose questions that are fully
    labelled. So do scores and labels of different shapes, and k unless 1 <= k <= n.
    """
    values, labels = score_table(scores), score_table(useful)
    _check_k(k, values.shape[1])
    if values.shape != labels.shape:
        raise ValueError(f"scores are {values.shape}, labels {labels.shape}: they must be of the same answers")
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(labels, order, axis=1)[:, :k] > 0  # (questions, k) True = useful, best score first
    first = ranked.argmax(axis=1)  # (questions,) also 0 where none is useful
    return float(np.where(ranked.any(axis=1), 1 / (first + 1), 0.0).mean())


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: it must be from 1 to n = {n}")
