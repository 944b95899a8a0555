"""Figures for several answers per question show the numbers passed to them."""

import numpy as np
import pytest

from nanorlhf.metrics import metric_at_k, spearman_matrix
from nanorlhf.stackoverflow.figures import metric_at_k_figures, spearman_figure

RNG = np.random.default_rng(0)
SCORES = {
    "sft": {"ROUGE-1": RNG.random((8, 5)), "gold": RNG.random((8, 5))},
    "ppo": {"ROUGE-1": RNG.random((8, 5))},
}


def test_one_panel_per_metric_and_one_curve_per_policy():
    at_k = {
        metric: {
            policy: [metric_at_k(columns[metric], k) for k in range(1, 6)]
            for policy, columns in SCORES.items()
            if metric in columns
        }
        for metric in SCORES["sft"]
    }
    figures = metric_at_k_figures(at_k)
    assert [len(figure.axes[0].lines) for figure in figures] == [2, 1]
    for policy, line in zip(("sft", "ppo"), figures[0].axes[0].lines, strict=True):
        assert line.get_label() == policy and list(line.get_xdata()) == [1, 2, 3, 4, 5]
        assert list(line.get_ydata()) == pytest.approx(at_k["ROUGE-1"][policy])


def test_the_heat_map_shows_each_number_in_its_cell():
    columns = SCORES["sft"] | {"constant": np.ones((8, 5))}
    names, matrix = spearman_matrix(columns)
    axes = spearman_figure("sft", names, matrix).axes[0]
    cells = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert len(cells) == 9
    for (row, column), value in np.ndenumerate(matrix):
        assert cells[column, row] == ("-" if np.isnan(value) else f"{value:.2f}")
    assert [label.get_text() for label in axes.get_yticklabels()] == names
