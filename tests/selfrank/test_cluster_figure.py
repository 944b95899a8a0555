"""Principal components against an eigendecomposition, and the figure against the given numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from nanorlhf.report.page import image
from nanorlhf.selfrank.cluster_figure import INK, cluster_figure, pca

RNG = np.random.default_rng(0)


@given(st.integers(0, 99), st.integers(3, 12), st.integers(2, 12))
def test_components_are_the_leading_eigenvectors_of_the_covariance(seed, m, d) -> None:
    vectors = np.random.default_rng(seed).normal(size=(m, d)) * np.arange(1, d + 1) + 7
    points, explained = pca(vectors)
    variances, directions = np.linalg.eigh(np.cov(vectors, rowvar=False))  # ascending
    projected = (vectors - vectors.mean(0)) @ directions[:, [-1, -2]]
    assert np.abs(points.numpy()) == pytest.approx(np.abs(projected), abs=1e-7)
    assert explained.numpy() == pytest.approx(variances[[-1, -2]] / variances.sum())


def test_the_sign_does_not_depend_on_the_order_of_the_answers() -> None:
    vectors = RNG.normal(size=(8, 5))
    order = RNG.permutation(8)
    assert pca(vectors[order])[0].numpy() == pytest.approx(pca(vectors)[0].numpy()[order])
    points, _ = pca([[0.0, 0.0], [1.0, -3.0]])  # direction (-1, 3) / sqrt(10): its largest entry is positive
    assert points[:, 0].tolist() == pytest.approx([np.sqrt(10) / 2, -np.sqrt(10) / 2])
    points, _ = pca([[0.0, 0.0], [1.0, -1.0]])  # in a tie, the first entry
    assert points[:, 0].tolist() == pytest.approx([-np.sqrt(2) / 2, np.sqrt(2) / 2])


@pytest.mark.parametrize(
    "vectors", [[[3.0, 4.0]], [[3.0, 4.0]] * 5, RNG.normal(size=(1, 384)).repeat(16, 0), [[1.0]] * 3]
)
def test_single_or_equal_answers_are_at_0_and_explain_nothing(vectors) -> None:
    points, explained = pca(vectors)
    assert points.shape == (len(vectors), 2) and points.abs().max() < 1e-12 and explained.tolist() == [0, 0]


def test_two_answers_lie_on_a_line_that_explains_all() -> None:
    points, explained = pca(RNG.normal(size=(2, 384)))
    assert explained.tolist() == [1, 0] and points[:, 1].tolist() == [0, 0] and points[0, 0] == -points[1, 0] != 0
    points, explained = pca([[1.0], [2.0], [6.0]])  # one dimension
    assert points.tolist() == [[-2, 0], [-1, 0], [3, 0]] and explained.tolist() == [1, 0]


@pytest.mark.parametrize("vectors", [[], [1.0, 2.0], [[1.0, float("nan")]], np.zeros((0, 3))])
def test_vectors_that_are_not_a_table_of_finite_numbers_are_rejected(vectors) -> None:
    with pytest.raises(ValueError, match="must be"):
        pca(vectors)


VECTORS = RNG.normal(size=(5, 6))
INPUTS = {
    "vectors": VECTORS,
    "weights": [0.9, 1.3, 1.1, 0.8, 0.9],
    "clusters": [0, 1, 1, 0, 2],
    "representatives": [1, 0, 4],
}
RANKS = [3, 1, 2, 5, 4]  # in a tie, the earlier sample first


def test_the_colour_of_an_answer_is_its_rank_and_the_best_is_on_top() -> None:
    axes = cluster_figure("question", **INPUTS).axes[0]
    [dots] = axes.collections
    points, explained = pca(VECTORS)
    worst_first = sorted(range(5), key=lambda index: -RANKS[index])
    assert np.asarray(dots.get_offsets()) == pytest.approx(points.numpy()[worst_first])
    assert dots.get_array().tolist() == [5, 4, 3, 2, 1]
    assert f"{explained[0]:.0%}" in axes.get_xlabel() and f"{explained[1]:.0%}" in axes.get_ylabel()


def test_representatives_are_ringed_and_ranked_and_joined_to_their_cluster() -> None:
    axes = cluster_figure("question", **INPUTS).axes[0]
    points = pca(VECTORS)[0].numpy()
    [dots] = axes.collections
    ringed = [tuple(point) for point, edge in zip(dots.get_offsets(), dots.get_edgecolors(), strict=True)
              if tuple(edge[:3]) == to_rgb(INK)]  # fmt: skip
    assert sorted(ringed) == sorted(map(tuple, points[[1, 0, 4]]))
    labels = {text.get_text(): text.get_position() for text in axes.texts}
    assert labels == {"1": tuple(points[1]), "3": tuple(points[0]), "4": tuple(points[4])}
    ties = [line.get_xydata() for line in axes.lines]
    for tie, index, middle in zip(ties, range(5), (0, 1, 1, 0, 4), strict=True):
        assert tie == pytest.approx(points[[middle, index]])


@pytest.mark.parametrize("m", [1, 3])
def test_one_answer_and_equal_answers_can_be_drawn(m) -> None:
    figure = cluster_figure("equal", np.ones((m, 4)), [1.0] * m, [0] * m, [0])
    assert "0% of the variance" in figure.axes[0].get_xlabel()
    assert [text.get_text() for text in figure.axes[0].texts] == (["1"] if m == 1 else ["1", "×3"])
    assert image(figure).startswith('<img alt="equal" src="data:image/svg+xml;base64,')


def test_the_same_answers_give_the_same_bytes_and_distances_are_to_scale() -> None:
    figures = [cluster_figure("question", **INPUTS) for _ in range(2)]
    assert image(figures[0]) == image(figures[1])
    axes, points = figures[0].axes[0], pca(VECTORS)[0].numpy()
    pixels = axes.transData.transform(points)  # image() has drawn it
    assert pixels - pixels[0] == pytest.approx((points - points[0]) * (pixels[1, 0] - pixels[0, 0]) /
                                               (points[1, 0] - points[0, 0]))  # fmt: skip
    assert axes.bbox.containsx(pixels[:, 0].min()) and axes.bbox.containsx(pixels[:, 0].max())


def test_dollars_in_a_title_are_not_a_formula() -> None:
    figure = cluster_figure("from $5 to \\nothing or $6", **INPUTS)
    assert "$5 to" in image(figure)  # as a formula, matplotlib would reject it
