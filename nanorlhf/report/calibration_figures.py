"""Calibration figures of reward models: accuracy against the size of the margin."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorlhf.metrics.pair_accuracy import FEW
from nanorlhf.report.page import BLUE, GREY, label_axes, panel


def calibration_figure(name: str, calibration: dict) -> Figure:
    """[N+ 18] Draw Figure 7, right: accuracy by the size of the margin, with the logistic curve."""
    figure, axes = panel("", "", "")
    draw_calibration(axes, name, calibration)
    return figure


def draw_calibration(axes: Axes, name: str, calibration: dict) -> None:
    """Draw accuracy by margin; hollow points have few pairs, and the band is one standard deviation over seeds.

    The title has the expected calibration error.
    """
    bins = [row for row in calibration["bins"] if row["mean"] is not None]
    x, y = (np.array([row[key] for row in bins]) for key in ("middle", "mean"))
    std = np.array([row["std"] or 0.0 for row in bins])
    is_few = np.array([row["num_pairs"] < FEW for row in bins], dtype=bool)
    title = f"{name}: calibration error {calibration['ece']['mean']:.3f}"
    label_axes(axes, title, "|margin|", "share ranked correctly")
    line = np.linspace(0, calibration["bins"][-1]["middle"] + 0.25, 100)
    axes.plot(line, 1 / (1 + np.exp(-line)), color=GREY, linestyle="--", linewidth=1.4, label="sigmoid(|margin|)")
    axes.fill_between(x, y - std, y + std, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(x, y, color=BLUE, linewidth=1.4)
    for hollow, label in ((False, "accuracy"), (True, f"fewer than {FEW} pairs")):
        points = is_few == hollow
        face = "white" if hollow else BLUE
        if points.any():
            axes.plot(x[points], y[points], "o", color=BLUE, markerfacecolor=face, markersize=6, zorder=3, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right")
