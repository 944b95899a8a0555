"""Table and pictures of `experiments mismatch`: the effect on PPO of a sampler that differs from the policy.

    python -m experiments.mismatch.report --runs runs/mismatch --out runs/mismatch/report

--runs has a directory SAMPLER/CORRECTION/SEED per PPO run; `exact/none` is the baseline. eval/eval.json, if present,
has the trained policies as SAMPLER-CORRECTION-SEED, all sampled the same way. Numbers are means over seeds with their
standard deviation. Out: SAMPLER.png, mismatch.html with all pictures, and a table.
"""

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from experiments.tables import float_at, part
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object
from nanorlhf.metrics import t_interval
from nanorlhf.metrics.pair_accuracy import mean_and_std
from nanorlhf.report.page import GREY, LINES, Lines, label_axes, number, plus_minus, series, smooth, write_gallery
from nanorlhf.report.verdict import Gain, comparison
from nanorlhf.training.run_directory import Rows, read_metrics

EXACT = ("exact", "none")
UPDATE_COLUMNS = (  # metric of train_ppo.py, mean over the updates of a run: heading, digits
    ("policy/sampler_gap", "gap, nats", 4),
    ("policy/first_ratio_error", "first ratio off by", 3),
    ("policy/ratio", "ratio", 3),
    ("policy/clip_fraction", "clipped", 3),
    ("policy/tis_weight", "weight", 3),
    ("policy/tis_clipped", "truncated", 3),
)
POLICY_COLUMNS = (("kl", "KL, nats", 2), ("gold_score", "gold score", 2), ("gold_win_rate", "gold win rate", 3))
BY_UPDATE = {  # metric of train_ppo.py: title, unit
    "policy/sampler_gap": ("Sampler against policy", "nats per token"),
    "policy/clip_fraction": ("Clipped ratios", "share of tokens"),
    "objective/kl_exact": ("KL to the reference", "nats per response"),
    "gold_score": ("Gold score of the rollouts", "score"),
}


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/mismatch")
    """directory with SAMPLER/CORRECTION/SEED"""
    out: Path = Path("runs/mismatch/report")
    """directory for the pictures and mismatch.html"""


@dataclass(frozen=True)
class Setting:
    sampler: str
    correction: str
    updates: list[Rows]  # metrics.jsonl, one per seed
    policies: dict[str, dict[str, float | None]]  # seed -> POLICY_COLUMNS, for evaluated seeds


# ----------------------------------------------------------------------------------------------------------- 1. reading
def read_runs(runs: Path) -> list[Setting]:
    """Read the settings, exact first, then by name. Raises InputError if there are none or one is malformed."""
    evaluation = runs / "eval" / "eval.json"
    policies = part(read_object(evaluation), str(evaluation), "policies") if evaluation.exists() else {}
    directories = {metrics.parent.parent for metrics in runs.glob("*/*/*/metrics.jsonl")}
    settings = []
    for directory in sorted(directories, key=lambda directory: (directory.parts[-2:] != EXACT, directory.parts)):
        sampler, correction = directory.parts[-2:]
        seeds = sorted(metrics.parent for metrics in directory.glob("*/metrics.jsonl"))
        updates = [rows for seed in seeds if (rows := whole_metrics(seed))]
        judged = {
            seed.name: {key: float_at(policies, str(evaluation), name, key) for key, _, _ in POLICY_COLUMNS}
            for seed in seeds
            if (name := f"{sampler}-{correction}-{seed.name}") in policies
        }
        if updates:
            settings.append(Setting(sampler, correction, updates, judged))
    if not settings:
        raise InputError(
            f"--runs {runs}: no SAMPLER/CORRECTION/SEED there has a PPO run: "
            "run `python -m experiments mismatch` first."
        )
    return settings


def whole_metrics(run: Path) -> Rows:
    """Read the rows of a PPO run. Raises InputError if one lacks a metric of UPDATE_COLUMNS."""
    rows = read_metrics(run)
    for key, _, _ in UPDATE_COLUMNS:
        if any(key not in row for row in rows):
            raise InputError(f"{run / 'metrics.jsonl'}: {key} is missing: expected a run of train_ppo.py; rerun it.")
    return rows


# ------------------------------------------------------------------------------------------------------------- 2. table
def make_table(settings: list[Setting]) -> Lines:
    """Return one row per setting, means over seeds, without columns on policies if none was evaluated."""
    policy_columns = POLICY_COLUMNS if any(setting.policies for setting in settings) else ()
    gains = compute_gains(settings)
    lines = [["sampler", "correction", "seeds", *(heading for _, heading, _ in (*UPDATE_COLUMNS, *policy_columns))]]
    lines[0] += ["gold score minus exact"] if gains else []
    for setting in settings:
        columns: list[tuple[list, int]] = []  # a number or None per seed, and digits
        for key, _, digits in UPDATE_COLUMNS:
            columns.append(([fmean(row[key] for row in rows) for rows in setting.updates], digits))
        for key, _, digits in policy_columns:
            columns.append(([policy[key] for policy in setting.policies.values()], digits))
        cells = [plus_minus(**mean_and_std(np.array(seeds, dtype=float)), digits=digits) for seeds, digits in columns]
        gain = gains.get(f"{setting.sampler}/{setting.correction}")
        cells += [gain.text if gain else "-"] if gains else []
        lines.append([setting.sampler, setting.correction, str(len(setting.updates)), *cells])
    return lines


def compute_gains(settings: list[Setting]) -> dict[str, Gain | None]:
    """Return sampler/correction -> gain in gold score over the exact sampler, over seeds; None for a single seed.

    Empty if the exact sampler wasn't evaluated.
    """
    golds = {
        f"{setting.sampler}/{setting.correction}": {
            seed: gold for seed, policy in setting.policies.items() if (gold := policy["gold_score"]) is not None
        }
        for setting in settings
    }
    exact = golds.pop("/".join(EXACT), {})
    gains: dict[str, Gain | None] = {}
    for name, by_seed in golds.items():
        if values := [gold - exact[seed] for seed, gold in by_seed.items() if seed in exact]:
            interval = t_interval(values)
            gains[name] = interval and Gain("the gold score", interval, number(fmean(values), interval, 2, "+"))
    return gains


# ----------------------------------------------------------------------------------------------------------- 3. figures
def sampler_figure(settings: list[Setting], exact: Setting | None) -> Figure:
    """Draw one sampler: a panel per metric, a line per correction (mean over seeds), a band for the seeds' range."""
    figure = Figure(figsize=(10.4, 6.4), layout="constrained")
    for axes, (key, (title, unit)) in zip(figure.subplots(2, 2).ravel(), BY_UPDATE.items(), strict=True):
        label_axes(axes, title, "update", unit)
        axes.locator_params(axis="x", integer=True)
        styles = [(s, s.correction, style) for s, style in zip(settings, cycle(LINES), strict=False)]
        styles += [(exact, "exact sampler", (GREY, "v"))] if exact is not None else []
        for setting, label, (color, marker) in styles:
            curves = [series(rows, key) for rows in setting.updates if any(key in row for row in rows)]
            if not curves:
                continue
            length = min(len(steps) for steps, _ in curves)  # a seed may still be training
            values = np.stack([smooth(values[:length], 3) for _, values in curves])  # (seeds, updates)
            steps = curves[0][0][:length]
            axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)
            axes.plot(steps, values.mean(0), color=color, marker=marker, ms=3, linewidth=1.6, label=label)
        axes.legend(frameon=False, fontsize=8)
    return figure


def main(args: Args) -> list[str]:
    """Write SAMPLER.png for each sampler but the exact one, and mismatch.html; return the names of the pictures."""
    check_out(args.out)
    settings = read_runs(args.runs)
    exact = next((setting for setting in settings if (setting.sampler, setting.correction) == EXACT), None)
    samplers = dict.fromkeys(setting.sampler for setting in settings if setting is not exact)
    drawn = {
        sampler: sampler_figure([setting for setting in settings if setting.sampler == sampler], exact)
        for sampler in samplers
    }
    title, gains = "The sampler is not the policy", compute_gains(settings)
    happened = [comparison("the gold score", "the exact sampler", gains)] if gains else []
    return write_gallery(args.out / "mismatch.html", args.runs, title, happened, make_table(settings), drawn)


if __name__ == "__main__":
    run_module(main, Args)
