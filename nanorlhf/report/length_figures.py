"""Length bias, N+ Figures 12 and 13: wins by length ratio, and win rate by mean length."""

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy.special import expit

from nanorlhf.metrics import wilson_interval
from nanorlhf.metrics.length_control import logistic_regression
from nanorlhf.report.page import GREY, LINES, panel

NUM_EDGES = 10  # edges of nine equally spaced bins
FEW = 10  # bins with fewer pairs are drawn hollow


def log_length_ratio(ours: ArrayLike, theirs: ArrayLike) -> np.ndarray:
    """Return log(our length / their length), in tokens without EOS; an empty response counts as one token."""
    return np.log(np.maximum(ours, 1) / np.maximum(theirs, 1))


def binned(x: np.ndarray, wins: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return middle, share of wins and number of pairs per non-empty bin, (bins,); the last bin is closed."""
    edges = np.linspace(x.min(), x.max(), NUM_EDGES)
    index = np.clip(np.digitize(x, edges) - 1, 0, NUM_EDGES - 2)  # (pairs,)
    counts = np.bincount(index, minlength=NUM_EDGES - 1)
    sums = np.bincount(index, weights=wins, minlength=NUM_EDGES - 1)
    some = counts > 0
    return ((edges[1:] + edges[:-1]) / 2)[some], sums[some] / counts[some], counts[some]


def length_figures(
    lengths: dict[str, list[int]], wins: dict[str, list[float | None]], against: str, decided_by: str
) -> list[Figure]:
    """Draw a panel of wins by length ratio and one of win rate by mean length; one colour and marker per policy.

    lengths: policy -> tokens of each response without EOS; also for `against`. wins: policy -> 1, 0 or 0.5 per pair,
    None without a verdict, as decided by the judge or the gold score. Policies without verdicts are skipped; without
    any verdict, the list is empty.
    """
    wins = {name: column for name, column in wins.items() if any(win is not None for win in column)}
    if not wins:
        return []
    of_ratio, axes = panel("Wins by length", f"log(length / length of {against})", f"share preferred by {decided_by}")
    of_mean, mean_axes = panel("Win rate and length", "mean length, tokens without EOS", f"win rate by {decided_by}")
    for number, (name, column) in enumerate(wins.items()):
        color, marker = LINES[number % len(LINES)]
        known = [i for i, win in enumerate(column) if win is not None]
        won = np.array([column[i] for i in known], dtype=float)  # (pairs,)
        ours = np.array([lengths[name][i] for i in known])
        x = log_length_ratio(ours, [lengths[against][i] for i in known])
        middles, shares, counts = binned(x, won)
        for enough in (True, False):
            chosen = (counts >= FEW) == enough
            axes.scatter(
                middles[chosen], shares[chosen], s=26, marker=marker, color=color,
                facecolors=color if enough else "white", zorder=3,
            )  # fmt: skip
        a, b = logistic_regression(np.column_stack((np.ones(len(x)), x)), won)
        line = np.linspace(x.min(), x.max(), 100)
        axes.plot(line, expit(a + b * line), color=color, marker=marker, ms=5, markevery=[], linewidth=1.8, label=name)
        rate = won.mean()
        ends = np.array(wilson_interval(rate, len(won)))
        mean_axes.errorbar(
            ours.mean(), rate, np.abs(ends - rate)[:, None], color=color, marker=marker, ms=7, capsize=3, label=name
        )
    compared = [length for i, length in enumerate(lengths[against]) if any(c[i] is not None for c in wins.values())]
    mean_axes.axvline(float(np.mean(compared)), color=GREY, linewidth=1, linestyle=":", label=against)
    axes.axvline(0, color=GREY, linewidth=1, linestyle=":")
    for each in (axes, mean_axes):
        each.axhline(0.5, color=GREY, linewidth=1, linestyle=":")
        each.set_ylim(-0.04, 1.04)
        each.figure.legend(loc="outside lower center", ncols=3, frameon=False)  # inside the axes it would hide points
    return [of_ratio, of_mean]
