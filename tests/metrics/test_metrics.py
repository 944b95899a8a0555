"""Metrics of texts, several answers and policies against values computed by hand, brute force and libraries."""

import itertools
import math
import random
from statistics import fmean

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data import tiny
from nanorlhf.metrics import (
    bootstrap_interval,
    chance_mrr_at_k,
    compare,
    metric_at_k,
    mrr_at_k,
    pass_at_k,
    rouge,
    sentence_bleu,
    spearman_matrix,
    t_interval,
    wilson_interval,
    win_rate,
)


def test_rouge_of_texts_counted_by_hand() -> None:
    """Response `a b c d`, reference `a c b`: 3 words shared, no bigram, a longest common subsequence of 2."""
    scores = rouge(["a c b"], ["a b c d"])
    assert scores["rouge1"] == pytest.approx(2 * (3 / 4) * (3 / 3) / (3 / 4 + 3 / 3))
    assert scores["rouge2"] == 0
    assert scores["rougeL"] == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_rouge_is_the_mean_over_rows_and_does_not_stem() -> None:
    scores = rouge(["the cat", "dogs run"], ["the cat", "dog runs"])
    assert scores == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_an_empty_response_has_no_overlap() -> None:
    assert rouge(["the cat"], [""]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


def test_a_tie_is_half_a_win() -> None:
    assert win_rate([1.0, 2.0, 0.0], [0.0, 2.0, 5.0]) == 0.5
    assert win_rate([1.0, 1.0], [1.0, 1.0]) == 0.5


def test_lists_of_different_lengths_are_an_error_and_not_truncated() -> None:
    with pytest.raises(ValueError):
        win_rate([1.0], [1.0, 2.0])
    with pytest.raises(ValueError):
        rouge(["a"], ["a", "b"])


@given(st.integers(1, 5000), st.floats(0, 1))
def test_the_interval_solves_wilsons_equation(num_rows: int, share: float) -> None:
    """The ends are the two p at a distance of 1.96 standard errors of p from the share."""
    low, high = wilson_interval(share, num_rows)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for p in (low, high):
        assert (share - p) ** 2 == pytest.approx(1.96**2 * p * (1 - p) / num_rows, abs=1e-12)


def test_the_interval_covers_the_truth_in_95_of_100_experiments() -> None:
    """The coverage is exact, by summing the binomial distribution of 200 rows with a true win rate of 0.7."""
    n, p = 200, 0.7
    covered = sum(
        math.comb(n, k) * p**k * (1 - p) ** (n - k)
        for k in range(n + 1)
        if wilson_interval(k / n, n)[0] <= p <= wilson_interval(k / n, n)[1]
    )
    assert 0.94 < covered < 0.96


def test_the_interval_of_a_few_runs_is_students() -> None:
    """4 runs with mean 2.5 and variance 5/3; the 97.5% point of t with 3 degrees of freedom is 3.18245."""
    half = 3.18245 * math.sqrt(5 / 3 / 4)
    assert t_interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-4)
    assert t_interval([2.0, 2.0]) == (2.0, 2.0) and t_interval([1.0]) is None and t_interval([]) is None


# ------------------------------------------------------------------------------------ several answers to a question
def test_sentence_bleu_is_sacrebleus_and_lies_in_the_unit_interval() -> None:
    references = ["the cat sat on the mat.", "a b c", "one", "x y z w v"]
    responses = ["the cat sat on a mat.", "", "one", "x y q w v"]
    expected = [sacrebleu.sentence_bleu(b, [a]).score / 100 for a, b in zip(references, responses, strict=True)]
    assert sentence_bleu(references, responses) == pytest.approx([min(1.0, value) for value in expected])
    assert sentence_bleu(["a b c d"], ["a b c d"]) == [1.0] and sentence_bleu(["a"], [""]) == [0.0]


def test_sentence_bleu_by_hand() -> None:
    """5 tokens against 6: 4 of 5 unigrams, 2 of 4 bigrams, 1 of 3 trigrams, 0 of 2, which counts 1/2; brevity e^-.2."""
    score = math.exp(1 - 6 / 5) * (4 / 5 * 2 / 4 * 1 / 3 * (1 / 2) / 2) ** 0.25
    assert sentence_bleu(["a b c d e f"], ["a b c x f"]) == pytest.approx([score])


def test_the_papers_sacrebleu_is_that_of_unrelated_texts() -> None:
    """[SO bleu] Strings instead of lists, with n_gram=1: the library zips characters and takes each as a text.

    The result is the share of positions at which two texts have the same letter, about .05 to .08 for any English.
    """

    def character_match(response: str, reference: str) -> float:
        """BLEU-1 of a corpus of one-character texts, in lower case."""
        pairs = list(zip(response.lower(), reference.lower(), strict=False))
        words = [(a, b) for a, b in pairs if not a.isspace()]  # a space is a text without words
        return sum(a == b for a, b in words) / max(1, len(words))

    rng = random.Random(0)
    unrelated = [tiny.write_post(rng).query for _ in range(300)]
    texts = [text.partition("POST: ")[2].removesuffix("TL;DR:") for text in unrelated]
    scores = [character_match(a, b) for a, b in itertools.pairwise(texts)]
    assert 0.03 < fmean(scores) < 0.08  # the paper reports .048 for SFT, .049 for its best model
    assert character_match("The same.", "the same.") == 1.0


SCORES = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(SCORES)
def test_metric_at_k_is_the_mean_over_all_choices_of_k(scores) -> None:
    for k in range(1, len(scores[0]) + 1):
        best = fmean(fmean(max(pick) for pick in itertools.combinations(row, k)) for row in scores)
        assert metric_at_k(scores, k) == pytest.approx(best)


def test_metric_at_1_is_the_mean_and_at_n_the_best() -> None:
    scores = np.random.default_rng(0).normal(size=(50, 10))
    assert metric_at_k(scores, 1) == pytest.approx(scores.mean())
    assert metric_at_k(scores, 10) == pytest.approx(scores.max(1).mean())


@given(SCORES, st.randoms())
def test_mrr_at_k_is_one_over_the_rank_of_the_first_useful_answer(scores, rng) -> None:
    useful = [[rng.random() < 0.4 for _ in row] for row in scores]
    for k in range(1, len(scores[0]) + 1):
        total = 0.0
        for row, labels in zip(scores, useful, strict=True):
            order = sorted(range(len(row)), key=lambda i: (-row[i], i))  # ties in the order of generation
            ranks = [rank for rank, i in enumerate(order, start=1) if labels[i]]
            total += 1 / ranks[0] if ranks and ranks[0] <= k else 0
        assert mrr_at_k(scores, useful, k) == pytest.approx(total / len(scores))


def test_the_chance_level_of_mrr_is_its_mean_over_all_orders() -> None:
    useful = np.array([[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    orders = [np.array([order] * len(useful)) for order in itertools.permutations(range(4))]
    for k in range(1, 5):
        assert chance_mrr_at_k(useful, k) == pytest.approx(fmean(mrr_at_k(order, useful, k) for order in orders))


def test_pass_at_k_is_the_share_of_draws_that_include_a_pass() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at_k(100_000, 1, 100) == pytest.approx(0.001)


@pytest.mark.parametrize("arguments", [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_rejects_impossible_counts(arguments) -> None:
    with pytest.raises(ValueError):
        pass_at_k(*arguments)


@pytest.mark.parametrize("function", [metric_at_k, lambda scores, k: mrr_at_k(scores, np.zeros_like(scores), k)])
def test_scores_that_are_not_a_table_of_finite_numbers_are_rejected(function) -> None:
    for scores, k in (([[1.0, 2.0]], 3), ([[1.0, 2.0]], 0), ([1.0, 2.0], 1), ([[math.nan, 1.0]], 1), ([[]], 1)):
        with pytest.raises(ValueError):
            function(np.array(scores), k)


def test_mrr_at_k_keeps_the_order_of_many_ties_and_needs_a_label_for_each_score() -> None:
    scores, useful = np.zeros((1, 100)), np.zeros((1, 100))
    scores[0, ::2], useful[0, 60] = 1.0, 1.0
    assert mrr_at_k(scores, useful, 100) == pytest.approx(1 / 31)
    with pytest.raises(ValueError):
        mrr_at_k([[1.0, 2.0]], [[0, 1, 1]], 1)


def test_spearman_pooled_is_scipys_and_within_questions_removes_difficulty() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(size=(40, 1)) * 5  # the level of each question, in both metrics
    a, b = hard + rng.normal(size=(40, 10)), hard + rng.normal(size=(40, 10))
    names, pooled = spearman_matrix({"a": a, "b": b}, within_questions=False)
    assert names == ["a", "b"]
    assert pooled[0, 1] == pytest.approx(stats.spearmanr(a.ravel(), b.ravel()).statistic) and pooled[0, 1] > 0.8
    _, within = spearman_matrix({"a": a, "b": b})
    ranks = [np.concatenate([stats.rankdata(row) for row in table]) for table in (a, b)]
    assert within[0, 1] == pytest.approx(np.corrcoef(*ranks)[0, 1]) and abs(within[0, 1]) < 0.2
    assert np.allclose(np.diag(within), 1) and np.allclose(within, within.T)


def test_ties_share_their_rank_and_a_metric_that_ranks_nothing_has_nan() -> None:
    a = [[1.0, 1.0, 2.0, 3.0], [0.0, 5.0, 5.0, 1.0]]
    b = [[4.0, 3.0, 3.0, 9.0], [1.0, 1.0, 2.0, 2.0]]
    _, matrix = spearman_matrix({"a": a, "b": b, "constant": [[7.0] * 4] * 2})
    ranks = [np.concatenate([stats.rankdata(row) for row in table]) for table in (a, b)]
    assert matrix[0, 1] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert np.isnan(matrix[2]).all() and not np.isnan(matrix[:2, :2]).any()
    _, single = spearman_matrix({"a": [[1.0], [2.0]], "b": [[3.0], [1.0]]})
    assert np.isnan(single).all()


def test_the_bootstrap_resamples_questions_and_covers_the_truth() -> None:
    """Answers to a question are equal, so the interval must be as wide as with one answer per question."""
    rng = np.random.default_rng(0)
    covered, widths = 0, []
    for seed in range(100):
        questions = rng.normal(size=(60, 1))
        low, high = bootstrap_interval(np.repeat(questions, 10, axis=1), seed, num_resamples=300)
        covered += low <= 0 <= high
        widths.append(high - low)
    assert 86 <= covered <= 100
    assert fmean(widths) == pytest.approx(2 * 1.96 / math.sqrt(60), rel=0.1)


@pytest.mark.parametrize("num_questions", [1, 7, 70_001])
def test_many_resamples_at_a_time_are_those_drawn_one_by_one(num_questions: int) -> None:
    values = np.random.default_rng(num_questions).normal(size=(num_questions, 2))
    means, generator = values.mean(axis=1), np.random.default_rng(3)
    drawn = [means[generator.integers(num_questions, size=num_questions)].mean() for _ in range(40)]
    assert bootstrap_interval(values, 3, num_resamples=40) == tuple(np.quantile(drawn, (0.025, 0.975)))


def test_two_policies_are_compared_as_scipy_does_and_a_question_is_its_own_control() -> None:
    rng = np.random.default_rng(1)
    level = rng.normal(size=(50, 1)) * 10
    ours, theirs = level + 0.5 + rng.normal(size=(50, 4)), level + rng.normal(size=(50, 4))
    result = compare(ours, theirs, seed=0, num_resamples=500)
    assert result["mean_difference"] == pytest.approx((ours - theirs).mean())
    low, high = result["mean_difference_ci"]
    assert 0 < low < result["mean_difference"] < high < 1.2  # the level, with its spread of 10, cancels out
    assert result["ks"] == stats.ks_2samp(ours.ravel(), theirs.ravel()).statistic
    assert result["mann_whitney_p"] == stats.mannwhitneyu(ours.ravel(), theirs.ravel()).pvalue
    wins = sum((a > b) + 0.5 * (a == b) for a in ours.ravel() for b in theirs.ravel())
    assert result["mann_whitney_u"] == wins
    assert compare(ours, theirs, seed=0, num_resamples=500) == result
    with pytest.raises(ValueError, match="50 and 3 questions"):
        compare(ours, theirs[:3], seed=0)
