"""How good a set of responses is: overlap with references, and how often they win."""

import math
from statistics import fmean

from rouge_score.rouge_scorer import RougeScorer

ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge(references: list[str], responses: list[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, from 0 to 1, without stemming as N+ computes it."""
    scorer = RougeScorer(ROUGE, use_stemmer=False)
    scores = [scorer.score(*pair) for pair in zip(references, responses, strict=True)]
    return {name: fmean(score[name].fmeasure for score in scores) for name in ROUGE}


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
