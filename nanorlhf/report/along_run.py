"""Win rate, scores and ROUGE-L against the KL along a run, from the checkpoints that --keep-every left."""

from itertools import cycle
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from nanorlhf.report.page import LINES, panel
from nanorlhf.training.run_directory import run_of


class Point(NamedTuple):
    value: float
    ends: tuple[float, float] | None  # of its interval


Points = dict[str, Point]  # by policy


def policies_along(checkpoints: dict[str, str]) -> dict[str, list[str]]:
    """Group the kept checkpoints, {"ppo@10": DIR, "ppo@20": DIR, ...} -> {"ppo": ["ppo@10", "ppo@20", ...]}."""
    runs: dict[str, list[str]] = {}
    for policy, checkpoint in checkpoints.items():
        if run_of(checkpoint) != checkpoint:
            runs.setdefault(policy.rpartition("@")[0] or run_of(checkpoint), []).append(policy)
    return runs


def earlier_checkpoints(checkpoints: dict[str, str]) -> set[str]:
    """Return the policies that are kept checkpoints of a run, but not its last one."""
    return {policy for policies in policies_along(checkpoints).values() for policy in policies[:-1]}


def along_figures(result: dict) -> list[Figure]:
    """Draw a line per run and measure, from the first policy to the run's last checkpoint; no figures without a run."""
    words, measured = result["args"]["policies"], result["policies"]
    first = next(iter(measured))
    runs = policies_along(dict(zip(words[::2], words[1::2], strict=True)))
    lines = {run: [first, *(policy for policy in policies if policy != first)] for run, policies in runs.items()}
    kls = {policy: max(row["kl"], 0.0) for policy, row in measured.items()}  # an estimate, may be negative

    def rates(key: str) -> Points:
        known = {policy: row for policy, row in measured.items() if row.get(key) is not None}
        return {policy: Point(row[key], row.get(f"{key}_ci")) for policy, row in known.items()}

    def gains(key: str) -> Points:
        known = {policy: row[key] for policy, row in result["differences"].items() if key in row}
        return {policy: Point(gain["mean"], gain["ci"]) for policy, gain in known.items()} | {first: Point(0.0, None)}

    drawn = (
        ("Win rate against KL", "share of queries", {"gold": rates("gold_win_rate"), "judge": rates("judge_win_rate")}),
        ("Scores against KL", f"change from {first}", {"gold": gains("gold_score"), "reward model": gains("rm_score")}),
        ("ROUGE-L against KL", "F1", {"ROUGE-L": rates("rougeL")}),
    )
    figures = (kl_figure(title, unit, first, lines, kls, measures) for title, unit, measures in drawn)
    return [figure for figure in figures if figure]


def kl_figure(
    title: str,
    unit: str,
    first: str,
    lines: dict[str, list[str]],
    kls: dict[str, float],
    measures: dict[str, Points],
) -> Figure | None:
    """Draw measures against the KL, on a square-root scale as in Gao et al. 2023; None if no line has two points."""
    figure, axes = panel(title, f"KL to {first}, nats (square-root scale)", unit)
    axes.set_xscale("function", functions=(lambda kl: np.sqrt(np.maximum(kl, 0)), np.square))
    for (run, policies), (color, marker) in zip(lines.items(), cycle(LINES), strict=False):
        for (measure, points), style in zip(measures.items(), ("-", "--"), strict=False):
            known = [policy for policy in policies if policy in points]
            if len(known) < 2:
                continue
            values = np.array([points[policy].value for policy in known])
            ends = np.array([points[policy].ends or (points[policy].value,) * 2 for policy in known])  # (points, 2)
            axes.errorbar(
                [kls[policy] for policy in known], values, np.abs(ends - values[:, None]).T, color=color,
                marker=marker, markersize=4, linestyle=style, linewidth=1.8, elinewidth=0.8, label=f"{run}, {measure}",
            )  # fmt: skip
    if not axes.lines:
        return None
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
