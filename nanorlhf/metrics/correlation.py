"""Rank correlation of metrics: how much they agree on which answers are better."""

import numpy as np
import scipy  # .stats is loaded on first use, which most runs don't reach
from numpy.typing import ArrayLike

from nanorlhf.metrics.score_table import score_table


def spearman_matrix(columns: dict[str, ArrayLike], within_questions: bool = True) -> tuple[list[str], np.ndarray]:
    """[SO spearman] Return Spearman's rank correlation of each pair of metrics: their names, and the matrix (m, m).

    columns: name -> (questions, n). Ranks are taken within each question and pooled over questions; otherwise an easy
    question, on which all metrics are high, would look like agreement. within_questions=False ranks all answers
    together. Ties share their mean rank. A constant metric (or n = 1 within questions) has NaN in its row and column.
    Raises ValueError if the columns differ in shape.
    """
    shapes = {np.shape(column) for column in columns.values()}
    if len(shapes) != 1:
        raise ValueError(f"the columns are {sorted(shapes)}: expected the same answers")
    tables = [score_table(column) for column in columns.values()]  # (questions, n) each
    if not within_questions:
        tables = [table.reshape(1, -1) for table in tables]
    ranks = np.stack([scipy.stats.rankdata(table, axis=1).ravel() for table in tables])  # (m, answers)
    deviations = ranks - (tables[0].shape[1] + 1) / 2  # from the mean rank, which ties don't change
    dot_products = deviations @ deviations.T  # (m, m)
    squares = np.diag(dot_products)
    with np.errstate(invalid="ignore"):  # 0 / 0 is the NaN we want
        return list(columns), np.clip(dot_products / np.sqrt(np.outer(squares, squares)), -1, 1)
