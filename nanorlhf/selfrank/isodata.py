"""ISODATA clustering (Ball and Hall 1965) as the STR paper uses it, to get one representative for each kind of answer.

Small clusters are merged and large or wide ones are split until a partition repeats. Then clusters with nearby
representatives are joined.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.distance import cdist

from nanorlhf.cli import exact

MIN_SPLIT_SIZE = 3  # smallest cluster that is split by variance: of two members, neither is the outlier
MAX_ROUNDS = 100
DECIMALS = 9  # of squared distances: rounding errors must neither break ties nor separate equal vectors


@dataclass(frozen=True)
class Limits:
    """Limits on clusters of unit vectors. The paper gives the steps, and a variance of 0.05 without a unit.

    Two texts with cosine c have the squared distance 2 - 2c and, as a cluster, the variance (1 - c) / 2. Under
    all-MiniLM-L6-v2, short paraphrases have cosines of about 0.8 and up: a variance of 0.1, a distance of 0.4.
    """

    min_size: int = 1  # clusters with at most this many members are merged
    max_share: float = 0.5  # clusters with at least this share of the m vectors are split
    max_variance: float = 0.1  # mean squared distance to the centroid; clusters above it are split
    join_distance: float = 0.4  # squared; clusters with nearer representatives are joined; 0: only the paper's steps


def isodata(vectors: ArrayLike, seed: int, limits: Limits = Limits()) -> tuple[np.ndarray, np.ndarray]:
    """[STR isodata] Cluster m vectors (m, d). Returns labels (m,) from 0 and the index of each representative (n,).

    Vectors are normalised to length 1. The first centroids are round(sqrt(m)) distinct vectors, drawn by `seed`. Each
    round then does:

        assign   every vector to its nearest centroid, then recompute the centroids
        merge    each cluster of 1 into the one with the nearest centroid; a cluster takes part in at most one merge
        split    move the farthest vector out of a cluster of at least ceil(m / 2), or out of one of at least 3 whose
                 mean squared distance to the centroid is above 0.1; once per cluster

    Rounds end when any earlier partition repeats (a round depends on nothing else, so a cycle would follow), or after
    100. Because the split comes last, an outlier that is merged and split off in every round ends as its own cluster,
    and a final cluster may exceed the size or variance limit. Two paraphrases may therefore end up apart, and so may
    two that were both among the first centroids. Hence the last step:

        join     the two clusters with the nearest representatives, until none are nearer than 0.4

    `Limits` has the numbers. The paper specifies assign, merge, split and 0.05. Ball and Hall also join nearby
    clusters, but by their centroids, which in a wide cluster are far from every answer. The paper's representative is
    the centroid; ours is the member nearest to it, because a mean of embeddings isn't an answer. Equal vectors count
    as one point and always share a cluster. Clusters are numbered by their first members. Raises ValueError for
    vectors that are not (m, d), not finite, or 0.
    """
    points = np.asarray(vectors, dtype=np.float64)  # (m, d)
    if points.ndim != 2 or points.size == 0:
        raise ValueError(f"vectors must be (m, d) with m, d >= 1, got shape {points.shape}")
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        raise ValueError("a vector is 0 or contains NaN or infinity, so it has no direction")
    points = points / lengths

    first_equal = (squared_distances(points, points) == 0).argmax(1)  # (m,) index of the first equal vector
    points, distinct = points[first_equal], np.unique(first_equal)  # from here on, equal vectors are bitwise equal
    num_centroids = min(round(math.sqrt(len(points))), len(distinct))
    centroids = points[np.random.default_rng(seed).choice(distinct, num_centroids, replace=False)]  # (K, d)
    seen: set[bytes] = set()
    for _ in range(MAX_ROUNDS):
        labels = squared_distances(points, centroids).argmin(1)  # (m,) the first in a tie
        labels = split(points, merge(points, in_order(labels), limits), limits)
        centroids = means(points, labels)
        if labels.tobytes() in seen:
            break
        seen.add(labels.tobytes())

    labels = join(points, labels, limits)
    return labels, nearest_members(points, labels)


def merge(points: np.ndarray, labels: np.ndarray, limits: Limits = Limits()) -> np.ndarray:
    """Merge each small cluster into its nearest, in one pass over the clusters in order. (m, d), (m,) -> (m,)

    A cluster takes part in at most one merge per pass: if its nearest was just merged, a small cluster waits.
    """
    centroids = means(points, labels)
    between = squared_distances(centroids, centroids)  # (n, n)
    np.fill_diagonal(between, np.inf)
    sizes, result = np.bincount(labels), labels.copy()
    merged: set[int] = set()
    for cluster, nearest in enumerate(between.argmin(1)):
        if sizes[cluster] <= limits.min_size and len(sizes) > 1 and not merged & {cluster, nearest}:
            result[labels == cluster] = nearest
            merged |= {cluster, nearest}
    return in_order(result)


def split(points: np.ndarray, labels: np.ndarray, limits: Limits = Limits()) -> np.ndarray:
    """Split the farthest vector off each cluster that is too large or too wide, in one pass. (m, d), (m,) -> (m,)

    Equal vectors move together; a cluster of equal vectors isn't split.
    """
    max_size = len(points) * exact(limits.max_share)
    result = labels.copy()
    for cluster, centroid in enumerate(means(points, labels)):
        members = np.flatnonzero(labels == cluster)
        distances = squared_distances(points[members], centroid[None])[:, 0]
        too_wide = len(members) >= MIN_SPLIT_SIZE and distances.mean() > limits.max_variance
        if (len(members) >= max_size or too_wide) and distances.max() > 0:  # 0: all members are equal
            farthest = points[members[distances.argmax()]]
            equal = squared_distances(points[members], farthest[None])[:, 0] == 0
            result[members[equal]] = result.max() + 1
    return in_order(result)


def join(points: np.ndarray, labels: np.ndarray, limits: Limits = Limits()) -> np.ndarray:
    """Join the two nearest clusters until no representatives are nearer than the limit. (m, d), (m,) -> (m,)"""
    while True:
        representatives = points[nearest_members(points, labels)]  # (n, d)
        between = squared_distances(representatives, representatives)  # (n, n)
        np.fill_diagonal(between, np.inf)
        first, second = divmod(int(between.argmin()), len(between))
        if not between[first, second] < limits.join_distance:
            return labels
        labels = in_order(np.where(labels == second, first, labels))


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return squared distances, (m, d), (n, d) -> (m, n), rounded to DECIMALS."""
    return cdist(a, b, "sqeuclidean").round(DECIMALS)


def means(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the centroids (n, d) of points (m, d) with labels (m,)."""
    members = labels == np.arange(labels.max() + 1)[:, None]  # (n, m)
    return members @ points / members.sum(1, keepdims=True)


def nearest_members(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the index of the member nearest to each cluster's centroid. (m, d), labels (m,) -> (n,)"""
    centroids = means(points, labels)
    distances = squared_distances(points, centroids)  # (m, n)
    distances[labels[:, None] != np.arange(len(centroids))] = np.inf
    return distances.argmin(0)


def in_order(labels: np.ndarray) -> np.ndarray:
    """Renumber the clusters of a partition from 0 by their first members."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[inverse]
