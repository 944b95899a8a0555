"""Figures for several answers per question: metric@k curves of all policies, and rank correlations of metrics."""

import numpy as np
from matplotlib.figure import Figure

from nanorlhf.report.page import draw_lines, panel


def metric_at_k_figures(metrics: dict[str, dict[str, list[float]]]) -> list[Figure]:
    """Draw SO Figure 3: the expected best of k answers, one panel per metric and one curve per policy.

    metrics: name -> policy -> the best of k for k from 1 to n.
    """
    figures = []
    for metric, at_k in metrics.items():
        figure, axes = panel(f"{metric} @ k", "k, number of answers", f"{metric}, best of k")
        draw_lines(axes, {policy: (range(1, len(values) + 1), values) for policy, values in at_k.items()})
        axes.locator_params("x", integer=True)
        figures.append(figure)
    return figures


def spearman_figure(title: str, names: list[str], matrix: np.ndarray) -> Figure:
    """Draw SO Figures A1 to A3: a matrix of rank correlations (m, m) as a heat map with numbers; NaN is a dash."""
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
