"""How good a set of responses is: overlap with references, how often they win, and what several answers are worth.

`scores` below is (questions, n): n answers to each question, in the order in which they were generated. An array of
another shape, an empty one, NaN and infinity raise ValueError.
"""

import math
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU
from scipy import stats

ROUGE = ("rouge1", "rouge2", "rougeL")


# ----------------------------------------------------------------------------------------- 1. overlap with a reference
def rouge_scores(references: list[str], responses: list[str]) -> dict[str, list[float]]:
    """F1 of ROUGE-1, ROUGE-2 and ROUGE-L of each row, from 0 to 1, without stemming as N+ computes it."""
    scorer = RougeScorer(ROUGE, use_stemmer=False)
    scores = [scorer.score(*pair) for pair in zip(references, responses, strict=True)]
    return {name: [score[name].fmeasure for score in scores] for name in ROUGE}


def rouge(references: list[str], responses: list[str]) -> dict[str, float]:
    """The means of `rouge_scores`."""
    return {name: fmean(column) for name, column in rouge_scores(references, responses).items()}


def sentence_bleu(references: list[str], responses: list[str]) -> list[float]:
    """SacreBLEU of each row, from 0 to 1, with that library's defaults for a sentence.

    1- to 4-grams of the 13a tokenizer, case counts; an order without a match is smoothed (exp), an order for which the
    response is too short is left out (effective order). An empty response has 0.
    [SO bleu] prints .048, but not of this: see test_the_papers_sacrebleu_is_that_of_unrelated_texts.
    """
    bleu = BLEU(tokenize="13a", smooth_method="exp", effective_order=True)
    pairs = zip(references, responses, strict=True)
    return [min(1.0, bleu.sentence_score(response, [reference]).score / 100) for reference, response in pairs]


# ------------------------------------------------------------------------------------------------------------- 2. wins


def win_rate(ours: list[float], theirs: list[float]) -> float:
    """The share of rows in which our score is the higher one; a tie counts half.

    >>> win_rate([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 5.0, -1.0])
    0.625
    """
    return fmean((a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True))


def wilson_interval(share: float, num_rows: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927), which stays within 0 and 1 and has a width at 0 and at 1 too.

    With ties counted half the variance is below share * (1 - share), so it is wider than it need be, never narrower.
    """
    middle = (share + z**2 / (2 * num_rows)) / (1 + z**2 / num_rows)
    half = z / (1 + z**2 / num_rows) * math.sqrt(share * (1 - share) / num_rows + z**2 / (4 * num_rows**2))
    return max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share))  # rounding at 0 and 1


# ------------------------------------------------------------------------------------- 3. several answers to a question
def metric_at_k(scores: ArrayLike, k: int) -> float:
    """[SO metric@k] The best score among k of the n answers, expected over the choice of k, mean over questions.

    With x ascending, x_(i) is the best of k in C(i-1, k-1) of the C(n, k) choices. k from 1 (the mean) to n (the best).
    """
    ascending = np.sort(_scores(scores), axis=1)  # (questions, n)
    n = ascending.shape[1]
    _check_k(k, n)
    weights = [math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1)]  # (n,)
    return float((ascending @ np.array(weights)).mean())


def mrr_at_k(scores: ArrayLike, useful: ArrayLike, k: int) -> float:
    """[SO mrr@k] Answers are ranked by score, equal ones in the order of generation; R is the rank of the first useful.

    The mean over questions of 1/R, 0 where R > k or no answer is useful. useful (questions, n) holds True and False, or
    1 and 0; NaN, an answer without a label, raises ValueError: choose the questions that are labelled throughout.
    """
    values, labels = _scores(scores), _scores(useful)
    _check_k(k, values.shape[1])
    if values.shape != labels.shape:
        raise ValueError(f"scores are {values.shape}, labels {labels.shape}: they must be of the same answers")
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(labels, order, axis=1)[:, :k] > 0  # (questions, k) True = useful, best score first
    first = ranked.argmax(axis=1)  # (questions,) 0 too where none is useful
    return float(np.where(ranked.any(axis=1), 1 / (first + 1), 0.0).mean())


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n samples, c of which pass, hold at least one that passes: 1 - C(n-c, k) / C(n, k).

    As a product, so that no factorial overflows. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    _check_k(k, n)
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples pass: it must be from 0 to {n}")
    if n - c < k:  # fewer failures than draws
        return 1.0
    return 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))


# -------------------------------------------------------------------------------------------------- 4. rank statistics
def spearman_matrix(columns: dict[str, ArrayLike], within_questions: bool = True) -> tuple[list[str], np.ndarray]:
    """[SO spearman] Rank correlation of every pair of metrics over all answers: their names and the matrix (m, m).

    columns: name -> (questions, n). Ranks are taken within each question and pooled, so that an easy question, good by
    every metric, is no agreement of the metrics; within_questions=False ranks all answers together. Equal scores share
    their mean rank. A metric that ranks nothing (constant, or n = 1 within questions) has NaN in its row and column.
    """
    shapes = {np.shape(column) for column in columns.values()}
    if len(shapes) != 1:
        raise ValueError(f"the columns are {sorted(shapes)}: they must be of the same answers")
    tables = [_scores(column) if within_questions else _scores(column).reshape(1, -1) for column in columns.values()]
    ranks = np.stack([stats.rankdata(table, axis=1).ravel() for table in tables])  # (m, answers)
    deviations = ranks - (tables[0].shape[1] + 1) / 2  # from the mean rank, which ties don't move
    products = deviations @ deviations.T  # (m, m)
    squares = np.diag(products)
    with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN we want
        return list(columns), np.clip(products / np.sqrt(np.outer(squares, squares)), -1, 1)


def bootstrap_interval(values: ArrayLike, seed: int, num_resamples: int = 2000) -> tuple[float, float]:
    """The 95% interval of the mean of values (questions, n): percentiles of the means of resamples.

    A resample draws whole questions. Answers to one question are alike, so they are no n independent observations, and
    drawing answers singly would give an interval that is too narrow, up to sqrt(n) times.
    """
    means = _scores(values).mean(axis=1)  # (questions,)
    generator = np.random.default_rng(seed)
    resampled = [means[generator.integers(len(means), size=len(means))].mean() for _ in range(num_resamples)]
    low, high = np.quantile(resampled, (0.025, 0.975))
    return float(low), float(high)


def compare(ours: ArrayLike, theirs: ArrayLike, seed: int, num_resamples: int = 2000) -> dict:
    """[SO significance] Do two policies differ? ours and theirs (questions, n), row by row answers to one question.

    mean_difference     ours - theirs, and in mean_difference_ci its 95% interval, by `bootstrap_interval` over the
                        questions' differences: how hard a question is drops out
    ks, ks_p            Kolmogorov-Smirnov: the largest gap of the two distribution functions of single answers
    mann_whitney_u, _p  pairs of answers in which ours is higher, ties counted half; two-sided

    Both p take all answers for independent, as the paper's do, and are too small where those of a question are alike.
    """
    ours, theirs = _scores(ours), _scores(theirs)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} questions against {len(theirs)}: they must be the same")
    differences = ours.mean(axis=1) - theirs.mean(axis=1)  # (questions,)
    ks = stats.ks_2samp(ours.ravel(), theirs.ravel())
    mann_whitney = stats.mannwhitneyu(ours.ravel(), theirs.ravel())
    return {
        "mean_difference": float(differences.mean()),
        "mean_difference_ci": bootstrap_interval(differences[:, None], seed, num_resamples),
        "ks": float(ks.statistic),
        "ks_p": float(ks.pvalue),
        "mann_whitney_u": float(mann_whitney.statistic),
        "mann_whitney_p": float(mann_whitney.pvalue),
    }


def _scores(values: ArrayLike) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"scores are {array.shape}: they must be (questions, n), at least one of each")
    if not np.isfinite(array).all():
        raise ValueError("scores hold NaN or infinity: every answer needs a number")
    return array


def _check_k(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}: it must be from 1 to n = {n}")
