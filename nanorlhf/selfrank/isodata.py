"""ISODATA (Ball and Hall 1965) as the STR paper uses it: of many answers one of each kind.

Clusters that are too small are merged, those that are too large or too wide are split, until nothing new comes up.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

MIN_SIZE = 1  # a cluster of so many or fewer is merged
MAX_VARIANCE = 0.05  # mean squared distance to the centroid, of unit vectors; a cluster beyond it is split
MIN_SPLIT_SIZE = 3  # by variance: a cluster of two has no middle that is left when one goes
MAX_ROUNDS = 100
DECIMALS = 9  # of a squared distance that count: rounding errors must neither break ties nor part equal vectors


def isodata(vectors: ArrayLike, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """[STR isodata] Clusters of m vectors (m, d): labels (m,) from 0 on, and an index of a representative of each (n,).

    Vectors are taken to length 1. round(sqrt(m)) different ones, drawn by `seed`, are the first centroids. A round is:

        assign   every vector to its nearest centroid, then centroids anew
        merge    a cluster of at most 1 into the cluster with the nearest centroid; each takes part in one merge at most
        split    the farthest vector goes out of a cluster of at least ceil(m / 2), and out of one of at least 3 whose
                 mean squared distance to the centroid is above 0.05; out of each cluster once

    The rounds end when a partition comes up again, be it the last one or an earlier one (a round depends on nothing
    else, so what follows would be a cycle), or after 100. Splits come last: an outlier that every round merges and
    splits off again stays a cluster of its own. So a cluster may be left larger than the limit, or wider.

    The paper leaves open all but the three steps and the 0.05. Its representative is the centroid; ours is the member
    nearest to it, as a mean of embeddings is no answer. Equal vectors are one point, which is never parted. Clusters
    are numbered in the order of their first members. Raises ValueError for vectors that are not (m, d), infinite, or 0.
    """
    points = np.asarray(vectors, dtype=np.float64)  # (m, d)
    if points.ndim != 2 or points.size == 0:
        raise ValueError(f"the vectors are {points.shape}: they must be (m, d), at least one of each")
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        raise ValueError("a vector is 0 or holds NaN or infinity: it has no direction")
    points = points / lengths

    first_equal = (squared_distances(points, points) == 0).argmax(1)  # (m,) itself, or an earlier vector
    points, distinct = points[first_equal], np.unique(first_equal)  # equal to the last bit from here on
    num_centroids = min(round(math.sqrt(len(points))), len(distinct))
    centroids = points[np.random.default_rng(seed).choice(distinct, num_centroids, replace=False)]  # (K, d)
    seen: set[bytes] = set()
    for _ in range(MAX_ROUNDS):
        labels = squared_distances(points, centroids).argmin(1)  # (m,) the first of equally near ones
        labels = split(points, merge(points, in_order(labels)))
        centroids = means(points, labels)
        if labels.tobytes() in seen:
            break
        seen.add(labels.tobytes())

    from_own = squared_distances(points, centroids)  # (m, n)
    from_own[labels[:, None] != np.arange(len(centroids))] = np.inf
    return labels, from_own.argmin(0)


def merge(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One pass over the clusters in their order: the small ones go into their nearest."""
    centroids = means(points, labels)
    between = squared_distances(centroids, centroids)  # (n, n)
    np.fill_diagonal(between, np.inf)
    sizes, merged = np.bincount(labels), set()
    result = labels.copy()
    for cluster, nearest in enumerate(between.argmin(1)):
        if sizes[cluster] <= MIN_SIZE and len(sizes) > 1 and not merged & {cluster, nearest}:
            result[labels == cluster] = nearest
            merged |= {cluster, nearest}
    return in_order(result)


def split(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One pass over the clusters: the farthest vector of each that is too large or too wide becomes a cluster."""
    max_size = math.ceil(len(points) / 2)
    result = labels.copy()
    for cluster, centroid in enumerate(means(points, labels)):
        members = np.flatnonzero(labels == cluster)
        distances = squared_distances(points[members], centroid[None])[:, 0]
        too_wide = len(members) >= MIN_SPLIT_SIZE and distances.mean() > MAX_VARIANCE
        if (len(members) >= max_size or too_wide) and distances.max() > 0:  # 0: all are equal
            farthest = points[members[distances.argmax()]]
            equal = squared_distances(points[members], farthest[None])[:, 0] == 0
            result[members[equal]] = result.max() + 1
    return in_order(result)


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(m, d), (n, d) -> (m, n)"""
    return cdist(a, b, "sqeuclidean").round(DECIMALS)


def means(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(m, d), labels (m,) -> (n, d) the centroids."""
    members = labels == np.arange(labels.max() + 1)[:, None]  # (n, m)
    return members @ points / members.sum(1, keepdims=True)


def in_order(labels: np.ndarray) -> np.ndarray:
    """The same partition, its clusters numbered from 0 in the order of their first members."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]
