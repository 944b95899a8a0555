"""TextRank (Mihalcea and Tarau 2004), which ranks the answers to a question by their similarity to all others.

The answers are the nodes of a complete graph, and their similarities are its edge weights. TextRank's weights are
PageRank on this graph times the number of nodes.
"""

import numpy as np
from numpy.typing import ArrayLike

DECIMALS = 6  # of weights in `rank_order`: rounding errors must not decide between equal answers


def text_rank(
    similarity: ArrayLike, damping: float = 0.85, max_iterations: int = 1000, tolerance: float = 1e-9
) -> np.ndarray:
    """[STR eq 4] Compute how strongly the others vote for each answer. Similarity (m, m), e.g. cosines -> weights (m,).

        W_i = (1 - d) + d * sum over j != i of S_ji / (sum over k != j of S_jk) * W_j        d = damping, W = 1 at first

    The paper's outer sum runs over the neighbours of j, but it must run over i's, which vote for i. The paper's
    algorithm shows one pass. Here all weights are updated at once (Jacobi) until none changes by `tolerance`. Each pass
    shrinks the error by the damping factor, so far more digits than DECIMALS are right.

    The diagonal is ignored; negative similarities count as 0. Weights sum to m, except that an answer without votes
    keeps 1 - d. Raises ValueError if the matrix isn't square, is empty, or contains NaN or infinity.

    >>> text_rank([[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]).round(4)  # the middle one is similar to both others
    array([0.7703, 1.4595, 0.7703])
    """
    edges = np.asarray(similarity, dtype=np.float64)  # (m, m)
    if edges.ndim != 2 or edges.shape[0] != edges.shape[1] or edges.size == 0:
        raise ValueError(f"similarity must be (m, m) with m >= 1, got shape {edges.shape}")
    if not np.isfinite(edges).all():
        raise ValueError("similarity contains NaN or infinity")
    edges = edges.clip(min=0)
    np.fill_diagonal(edges, 0)

    totals = edges.sum(1)  # (m,) the sum of j's edges
    shares = (edges / np.where(totals > 0, totals, 1)[:, None]).T  # (m, m) [i, j]: share of j's vote that goes to i
    weights = np.ones(len(edges))
    for _ in range(max_iterations):
        before, weights = weights, (1 - damping) + damping * shares @ weights
        if np.abs(weights - before).max() < tolerance:
            break
    return weights


def rank_order(weights: ArrayLike) -> np.ndarray:
    """Return the indices sorted by weight, highest first; ties in sampling order. (m,) -> (m,)"""
    return np.argsort(-np.round(np.asarray(weights), DECIMALS), kind="stable")
