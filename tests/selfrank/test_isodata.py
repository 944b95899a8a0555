"""ISODATA against a version with plain loops, examples by hand, and properties of any vectors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorlhf.selfrank.isodata import isodata, merge, split


def plain_isodata(vectors, seed):
    """The docstring of `isodata`, written with sets and double loops: clusters and their representatives."""
    points = [np.array(v, dtype=float) / math.sqrt(sum(x * x for x in v)) for v in vectors]
    everyone = range(len(points))

    def squared(a, b):
        return float(np.round(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)), 9))

    def centre(cluster):
        return sum(points[i] for i in sorted(cluster)) / len(cluster)

    def spread(cluster):
        return {i: squared(points[i], centre(cluster)) for i in sorted(cluster)}

    def ordered(clusters):
        return sorted((c for c in clusters if c), key=min)

    distinct = [i for i in everyone if all(squared(points[i], points[j]) > 0 for j in range(i))]
    num = min(round(math.sqrt(len(points))), len(distinct))
    centres = [points[i] for i in np.random.default_rng(seed).choice(distinct, num, replace=False)]
    history = []
    while len(history) < 100:
        clusters = [set() for _ in centres]
        for i in everyone:
            distances = [squared(points[i], c) for c in centres]
            clusters[distances.index(min(distances))].add(i)
        # merge
        before, merged, clusters = ordered(clusters), set(), ordered(clusters)
        middles = [centre(c) for c in before]
        for a in range(len(before)):
            if len(before[a]) == 1 and len(before) > 1:
                b = min((b for b in range(len(before)) if b != a), key=lambda b: (squared(middles[a], middles[b]), b))
                if not {a, b} & merged:
                    clusters[b], clusters[a] = before[a] | before[b], set()
                    merged |= {a, b}
        # split
        after = []
        for cluster in ordered(clusters):
            distances = spread(cluster)
            wide = len(cluster) >= 3 and sum(distances.values()) / len(cluster) > 0.05
            out = set()
            if (2 * len(cluster) >= len(points) or wide) and max(distances.values()) > 0:
                far = max(distances, key=distances.get)
                out = {i for i in cluster if squared(points[i], points[far]) == 0}
            after += [cluster - out, out]
        clusters = ordered(after)
        centres = [centre(c) for c in clusters]
        if clusters in history:
            break
        history.append(clusters)
    return clusters, [min(c, key=lambda i: (spread(c)[i], i)) for c in clusters]


def as_sets(labels):
    return [set(np.flatnonzero(labels == label).tolist()) for label in range(labels.max() + 1)]


@st.composite
def some_vectors(draw):
    """Small integer vectors, with many ties and equal vectors; or normal ones."""
    m, d = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        rows = draw(st.lists(st.lists(st.integers(-2, 2), min_size=d, max_size=d), min_size=m, max_size=m))
        return np.array([row if any(row) else [1] * d for row in rows], dtype=float)
    return np.random.default_rng(draw(st.integers(0, 10**6))).normal(size=(m, d)) + draw(st.integers(0, 3))


@given(some_vectors(), st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_the_partition_is_that_of_plain_loops(vectors, seed):
    labels, representatives = isodata(vectors, seed)
    clusters, nearest = plain_isodata(vectors, seed)
    assert as_sets(labels) == clusters
    assert representatives.tolist() == nearest


@given(some_vectors(), st.integers(0, 5))
@settings(deadline=None)
def test_every_answer_is_in_one_cluster_whose_representative_is_nearest_to_the_centroid(vectors, seed):
    labels, representatives = isodata(vectors, seed)
    assert labels.shape == (len(vectors),) and set(labels) == set(range(len(representatives)))
    assert list(dict.fromkeys(labels)) == list(range(len(representatives)))  # in the order of the first members
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for label, representative in enumerate(representatives):
        members = units[labels == label]
        distances = np.linalg.norm(members - members.mean(0), axis=1)
        assert labels[representative] == label
        assert np.linalg.norm(units[representative] - members.mean(0)) <= distances.min() + 1e-4


@given(some_vectors(), st.integers(0, 5), st.sampled_from([0.125, 3.7, 1000.0]))
@settings(deadline=None)
def test_the_seed_fixes_the_result_and_lengths_do_not_matter(vectors, seed, scale):
    labels, representatives = isodata(vectors, seed)
    scales = scale ** np.arange(len(vectors))[:, None].clip(max=3)
    for again in (vectors, torch.tensor(vectors), vectors * scale, vectors * scales):
        assert isodata(again, seed)[0].tolist() == labels.tolist()
        assert isodata(again, seed)[1].tolist() == representatives.tolist()


@given(some_vectors(), st.integers(0, 5))
@settings(deadline=None)
def test_equal_answers_share_a_cluster(vectors, seed):
    labels, representatives = isodata(vectors, seed)
    units = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).round(6)
    for i in range(len(vectors)):
        assert (labels[(units == units[i]).all(1)] == labels[i]).all()
    different = {tuple(units[i]) for i in representatives}
    assert len(different) == len(representatives)  # so no pair holds two equal answers


@given(some_vectors(), st.integers(0, 5))
@settings(deadline=None)
def test_a_cluster_beyond_the_limits_has_just_been_split(vectors, seed):
    # a round splits each cluster at most once, so a cluster may stay beyond the limits; for each of these there is
    # another one, of equal vectors, that was split off it
    labels, _ = isodata(vectors, seed)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    num_beyond = num_equal = 0
    for label in set(labels):
        members = units[labels == label]
        variance = ((members - members.mean(0)) ** 2).sum(1).mean()
        if variance < 1e-9:
            num_equal += 1
        elif 2 * len(members) >= len(vectors) or (len(members) >= 3 and variance > 0.05 + 1e-9):
            num_beyond += 1
    assert num_beyond <= num_equal


# ------------------------------------------------------------------------------------------------------------ by hand
def at(*degrees):
    return np.array([[math.cos(math.radians(angle)), math.sin(math.radians(angle))] for angle in degrees])


@pytest.mark.parametrize("seed", range(4))
def test_few_or_equal_answers_by_hand(seed):
    def result(vectors):
        return [array.tolist() for array in isodata(vectors, seed)]

    assert result([[3.0, 4.0]]) == [[0], [0]]
    assert result([[1.0, 2.0]] * 16) == [[0] * 16, [0]]
    assert result(at(0, 90)) == [[0, 1], [0, 1]]
    assert result(at(0, 1)) == [[0, 1], [0, 1]]  # half of two is one: a cluster of both is too large
    assert result(at(0, 180, 0, 180, 0)) == [[0, 1, 0, 1, 0], [0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_an_outlier_ends_as_its_own_cluster_although_every_round_merges_it(seed):
    # whatever the first centroids, 180 is farther from the centroid than all others
    labels, representatives = isodata(at(0, 1, 2, 3, 4, 5, 6, 180), seed)
    assert (labels == labels[7]).sum() == 1
    assert 7 in representatives


def test_a_cluster_is_split_above_the_size_and_above_the_variance():
    # the centroid of -a, 0 and a has length c = (1 + 2 cos a) / 3, so the mean squared distance to it is 1 - c^2
    limit = math.degrees(math.acos((3 * math.sqrt(0.95) - 1) / 2))
    far = [100, 101, 102, 200, 200.5, 201]  # ceil(9 / 2) = 5: none is too large
    labels = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    assert split(at(0, -limit + 0.1, limit - 0.1, *far), labels).tolist() == labels.tolist()
    assert split(at(0, -limit - 0.1, limit + 0.1, *far), labels).tolist() == [0, 1, 0, 2, 2, 2, 3, 3, 3]
    # a pair is never too wide, but may be too large
    assert split(at(0, 90, 180, 270, 271), np.array([0, 0, 1, 2, 2])).tolist() == [0, 0, 1, 2, 2]
    assert split(at(0, 90, 180), np.array([0, 0, 1])).tolist() == [0, 1, 2]
    # three of six is too large, two of five is not; of three equal vectors and another, the other is split off
    assert split(at(0, 1, 3, 90, 91, 92), np.array([0, 0, 0, 1, 1, 2])).tolist() == [0, 0, 1, 2, 2, 3]
    assert split(at(0, 0, 0, 1, 90), np.array([0, 0, 0, 0, 1])).tolist() == [0, 0, 0, 1, 2]
    # vectors equal to the farthest go with it
    assert split(at(0, 9, 9, 9, 180, 180), np.array([0, 0, 0, 0, 0, 0])).tolist() == [0, 0, 0, 0, 1, 1]


def test_a_cluster_of_one_joins_its_nearest_which_takes_one_per_pass():
    assert merge(at(0, 10, 11, 90, 91), np.array([0, 1, 1, 2, 2])).tolist() == [0, 0, 0, 1, 1]
    assert merge(at(0, 10, 11, 15), np.array([0, 1, 1, 2])).tolist() == [0, 0, 0, 1]
    assert merge(at(0, 1, 90, 92), np.array([0, 1, 2, 3])).tolist() == [0, 0, 1, 1]
    assert merge(at(0, 1, 90), np.array([0, 0, 0])).tolist() == [0, 0, 0]
    assert merge(at(0), np.array([0])).tolist() == [0]


@pytest.mark.parametrize("vectors", [np.zeros((2, 3)), [[1, np.nan]], [[np.inf, 1]], [1.0, 2], np.ones((0, 3))])
def test_vectors_without_a_direction_are_rejected(vectors):
    with pytest.raises(ValueError, match="vector"):
        isodata(vectors, 0)
