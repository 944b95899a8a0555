"""TextRank against an example by hand, a linear system, and PageRank of networkx."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorlhf.selfrank.text_rank import rank_order, text_rank


def positive_graph(m: int, seed: int) -> np.ndarray:
    """Symmetric, with an edge between any two nodes and a diagonal of 1, like cosines."""
    upper = np.triu(np.random.default_rng(seed).uniform(0.01, 1, (m, m)), 1)
    return upper + upper.T + np.eye(m)


def test_weights_of_a_path_of_three_nodes():
    # the ends vote for the middle only, the middle half for each end: e = .15 + .85 m / 2, m = .15 + .85 * 2e
    middle = 0.405 / 0.2775
    end = 0.15 + 0.425 * middle
    similarity = [[1, 0.2, 0], [0.2, 1, 0.2], [0, 0.2, 1]]
    assert text_rank(similarity) == pytest.approx([end, middle, end], abs=1e-8)
    # with a damping of .5: e = .5 + m / 4, m = .5 + e
    assert text_rank(similarity, damping=0.5) == pytest.approx([5 / 6, 4 / 3, 5 / 6], abs=1e-8)


@pytest.mark.parametrize(("m", "seed"), [(2, 0), (3, 1), (16, 2), (50, 3)])
def test_weights_are_pagerank_times_the_number_of_nodes(m, seed):
    networkx = pytest.importorskip("networkx", reason="networkx is the reference")
    similarity = positive_graph(m, seed)
    graph = networkx.from_numpy_array(similarity - np.eye(m))
    pagerank = networkx.pagerank(graph, alpha=0.85, tol=1e-14, max_iter=1000)
    assert text_rank(similarity) == pytest.approx([m * pagerank[node] for node in range(m)], abs=1e-6)


@given(st.integers(1, 12), st.integers(0, 10**6), st.floats(0, 0.95))
@settings(deadline=None)
def test_weights_solve_the_equation_and_sum_to_m(m, seed, damping):
    similarity = positive_graph(m, seed)
    votes = [
        [0 if i == j else similarity[i, j] / sum(similarity[k, j] for k in range(m) if k != j) for j in range(m)]
        for i in range(m)
    ]
    expected = np.linalg.solve(np.eye(m) - damping * np.array(votes), np.full(m, 1 - damping))
    weights = text_rank(similarity, damping)
    assert weights.shape == (m,) and weights.dtype == np.float64
    assert weights == pytest.approx(expected, abs=1e-6)
    if m > 1:
        assert weights.sum() == pytest.approx(m)


@given(st.integers(2, 10), st.integers(0, 10**6))
@settings(deadline=None)
def test_the_order_of_the_answers_and_the_scale_of_the_similarity_change_nothing(m, seed):
    similarity, order = positive_graph(m, seed), np.random.default_rng(seed).permutation(m)
    weights = text_rank(similarity)
    assert text_rank(similarity[np.ix_(order, order)]) == pytest.approx(weights[order])
    assert text_rank(3.7 * similarity) == pytest.approx(weights)


def test_an_oscillating_graph_converges():
    star = np.zeros((9, 9))  # votes oscillate between the hub and the others, so convergence is slow
    star[0, 1:] = star[1:, 0] = 1
    hub = (0.15 + 0.85 * 8 * 0.15) / (1 - 0.85**2)
    assert text_rank(star)[0] == pytest.approx(hub, abs=1e-7)
    assert text_rank(star, max_iterations=1)[0] == pytest.approx(0.15 + 0.85 * 8)  # one pass, as the paper prints it


def test_neither_the_diagonal_nor_negative_similarities_count():
    similarity = positive_graph(5, 0)
    similarity[0, 1] = similarity[1, 0] = 0
    weights = text_rank(similarity)
    np.fill_diagonal(similarity, 1e6)
    similarity[0, 1] = similarity[1, 0] = -0.9
    original = similarity.copy()
    assert text_rank(similarity) == pytest.approx(weights)
    assert (similarity == original).all()


def test_an_answer_without_edges_keeps_one_minus_the_damping():
    similarity = [[1, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, -0.3], [0, 0, -0.3, 1]]
    assert text_rank(similarity) == pytest.approx([1, 1, 0.15, 0.15])
    assert text_rank([[1.0]]) == pytest.approx([0.15])
    path = np.zeros((4, 4))  # of three, which settle later than the fourth
    path[0, 1] = path[1, 0] = path[1, 2] = path[2, 1] = 0.2
    middle = 0.405 / 0.2775
    assert text_rank(path) == pytest.approx([0.15 + 0.425 * middle, middle, 0.15 + 0.425 * middle, 0.15], abs=1e-8)


def test_an_answer_distributes_its_vote_by_its_row():
    """Not its column: 0 votes only for 1; 1 for both others equally; 2 for 0 and 1 at three to one."""
    weights = text_rank([[9, 2, 0], [1, 9, 1], [3, 1, 9]])
    votes = np.array([[0, 0.5, 0.75], [1, 0, 0.25], [0, 0.5, 0]])  # [i, j]: share of j's vote that goes to i
    assert weights == pytest.approx(np.linalg.solve(np.eye(3) - 0.85 * votes, np.full(3, 0.15)), abs=1e-8)


def test_torch_tensors_are_accepted():
    vectors = torch.nn.functional.normalize(torch.rand(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    similarity = vectors @ vectors.T
    assert text_rank(similarity) == pytest.approx(text_rank(similarity.double().numpy()), rel=1e-12)


def test_the_highest_weight_is_first_and_ties_keep_the_order_of_the_samples():
    assert rank_order([0.5, 2.0, 1.0, 2.0]).tolist() == [1, 3, 2, 0]
    assert rank_order([1.0, 1.0 + 1e-12, 1.0]).tolist() == [0, 1, 2]  # rounding errors don't break ties
    vectors = np.random.default_rng(0).normal(size=(4, 8))
    vectors = np.abs(vectors[[0, 1, 2, 1, 3, 1]])  # three equal answers
    order = rank_order(text_rank(vectors @ vectors.T)).tolist()
    assert [index for index in order if index in (1, 3, 5)] == [1, 3, 5]


@pytest.mark.parametrize(
    "similarity",
    [[[1, np.nan], [np.nan, 1]], [[1, np.inf], [np.inf, 1]], np.ones((2, 3)), np.ones(4), np.ones((0, 0))],
)
def test_matrices_that_are_not_similarities_are_rejected(similarity):
    with pytest.raises(ValueError):
        text_rank(similarity, max_iterations=0)  # otherwise NumPy would fail in the first pass
