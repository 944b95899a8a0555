"""TextRank over sentences (Mihalcea and Tarau 2004): the answer that is most like all others comes first.

A dimension of the similarity is an answer, the question's answers are the nodes of a complete weighted graph, and the
weights are those of PageRank on it, times the number of nodes.
"""

import numpy as np
from numpy.typing import ArrayLike

DECIMALS = 6  # of a weight that count: rounding errors must not decide between two answers that are alike


def text_rank(
    similarity: ArrayLike, damping: float = 0.85, max_iterations: int = 1000, tolerance: float = 1e-9
) -> np.ndarray:
    """[STR eq 4] How much each of m answers is voted for: similarity (m, m), such as cosines -> weights (m,), float64.

        W_i = (1 - d) + d * sum over j != i of S_ji / (sum over k != j of S_jk) * W_j        d = damping, W = 1 at first

    In the paper the outer sum runs over the neighbours of j; it must be those of i, who vote for it. Its algorithm
    shows one pass; here all weights are updated at once (Jacobi) until none changes by `tolerance`. A pass shrinks the
    error by the damping, so that far more than DECIMALS of a weight are right.

    The diagonal doesn't count and negative similarities are no votes. Weights sum to m, save that an answer without
    votes keeps 1 - d. Raises ValueError where the matrix is not square, is empty, or holds NaN or infinity.

    >>> text_rank([[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]).round(4)  # the middle one is like both others
    array([0.7703, 1.4595, 0.7703])
    """
    edges = np.asarray(similarity, dtype=np.float64)  # (m, m)
    if edges.ndim != 2 or edges.shape[0] != edges.shape[1] or edges.size == 0:
        raise ValueError(f"the similarity is {edges.shape}: it must be (m, m), m at least 1")
    if not np.isfinite(edges).all():
        raise ValueError("the similarity holds NaN or infinity: every pair of answers needs a number")
    edges = edges.clip(min=0)
    np.fill_diagonal(edges, 0)

    given = edges.sum(1)  # (m,) what answer j gives away in all
    shares = (edges / np.where(given > 0, given, 1)[:, None]).T  # (m, m) of i in what j gives
    weights = np.ones(len(edges))
    for _ in range(max_iterations):
        before, weights = weights, (1 - damping) + damping * shares @ weights
        if np.abs(weights - before).max() < tolerance:
            break
    return weights


def rank_order(weights: ArrayLike) -> np.ndarray:
    """(m,) -> (m,) indices, the highest weight first; of equal ones the earlier sample."""
    return np.argsort(-np.round(weights, DECIMALS), kind="stable")
