"""Figures for several answers per question: metric@k curves of all policies, and how much the metrics agree."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from nanorlhf.metrics import metric_at_k
from nanorlhf.report.page import LINES, panel


def metric_at_k_figures(scores: dict[str, dict[str, ArrayLike]]) -> list[Figure]:
    """SO Figure 3: one panel per metric, one curve per policy: the expected best of k answers, k from 1 to n.

    scores: policy -> metric -> (questions, n). The names become labels; a policy may lack a metric.
    """
    figures = []
    for metric in dict.fromkeys(metric for columns in scores.values() for metric in columns):
        figure, axes = panel(f"{metric} @ k", "k, number of answers", f"{metric}, best of k")
        for number, (policy, columns) in enumerate(scores.items()):
            if metric not in columns:
                continue
            color, marker = LINES[number % len(LINES)]
            ks = range(1, np.shape(columns[metric])[1] + 1)
            values = [metric_at_k(columns[metric], k) for k in ks]
            axes.plot(ks, values, color=color, marker=marker, markersize=4, linewidth=1.8, label=policy)
        axes.locator_params("x", integer=True)
        axes.legend(frameon=False)
        figures.append(figure)
    return figures


def spearman_figure(title: str, names: list[str], matrix: np.ndarray) -> Figure:
    """SO Figures A1 to A3: a matrix of rank correlations (m, m) as a heat map with numbers; NaN is a dash."""
    figure, axes = panel(title, "", "")
    figure.set_size_inches(5.2, 4.6)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.imshow(np.ma.masked_invalid(matrix), cmap="PuOr_r", vmin=-1, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    for (row, column), value in np.ndenumerate(matrix):
        text = "-" if np.isnan(value) else f"{value:.2f}"
        axes.text(column, row, text, ha="center", va="center", color="white" if abs(value) > 0.6 else "#1c2024")
    return figure
