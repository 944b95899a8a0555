"""Table and picture of `experiments staleness`: what algorithms lose when their sampler is several updates old.

    python -m experiments.mismatch.staleness_report --runs runs/staleness --out runs/staleness/report

--runs has an evaluation SEED/eval/eval.json per seed, whose policies are named ALGORITHM,CORRECTION,SYNC_EVERY, and
their runs. Out: staleness.png, and staleness.html with the table.
"""

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.compare.report import Policies, Policy, cell, gaps, known, read_policies, seed_numbers
from experiments.tables import mean_difference
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.report.page import STYLES, Lines, label_axes, write_gallery

EVALUATED = (("gold_win_rate", "gold win rate", 3), ("gold_score", "gold score", 2), ("kl", "KL, nats", 2))


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/staleness")
    """directory with one directory per seed"""
    out: Path = Path("runs/staleness/report")
    """directory for the picture and staleness.html"""


Curves = dict[tuple[str, str], dict[int, list[Policy]]]  # (algorithm, correction) -> sync_every -> one per seed


def read_curves(policies: Policies) -> Curves:
    """Group the trained policies. A fresh sampler needs no correction, so each correction starts at the same point."""
    curves: Curves = {}
    for name, column in policies.items():
        if name.count(",") == 2:
            algorithm, correction, sync_every = name.split(",")
            curves.setdefault((algorithm, correction), {})[int(sync_every)] = column
    for (algorithm, correction), by_age in curves.items():
        if fresh := curves.get((algorithm, "none"), {}).get(1):
            curves[algorithm, correction] = {1: fresh} | by_age
    if not curves:
        raise InputError("no policy is named ALGORITHM,CORRECTION,SYNC_EVERY: run `python -m experiments staleness`.")
    return curves


def mean_gap(policy: Policy) -> float:
    """Average the gap between sampler and policy over the updates, in nats per token."""
    return fmean(row["policy/sampler_gap"] for row in policy.updates)


def make_table(curves: Curves) -> Lines:
    """Return a row per algorithm, correction and age: means over seeds, and the change from a fresh sampler."""
    headings = [heading for _, heading, _ in EVALUATED]
    lines = [["algorithm", "correction", "sync every", "seeds", "gap, nats", *headings, "gold win rate minus fresh"]]
    for (algorithm, correction), by_age in curves.items():
        fresh = {policy.seed: policy.numbers for policy in by_age.get(1, [])}
        for sync_every, column in by_age.items():
            if sync_every == 1 and correction != "none":
                continue
            cells = [cell([mean_gap(policy) for policy in column if policy.updates], 3)]
            cells += [cell(known(seed_numbers(column, key)), digits, True) for key, _, digits in EVALUATED]
            lost = known(gaps(column, fresh, "gold_win_rate")) if sync_every > 1 else []
            cells.append(mean_difference(lost))
            lines.append([algorithm, correction, str(sync_every), str(len(column)), *cells])
    return lines


def draw(curves: Curves) -> Figure:
    """Draw gold win rate and KL by age: a line per algorithm and correction, a band for the seeds' range."""
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    panels = (("gold_win_rate", "Gold win rate", "share"), ("kl", "KL to the initial policy", "nats per response"))
    for axes, (key, title, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        label_axes(axes, title, "updates between copies to the sampler", unit)
        axes.set_xscale("log", base=2)
        for ((algorithm, correction), by_age), (color, marker, style) in zip(curves.items(), cycle(STYLES)):
            values = {age: known(seed_numbers(column, key)) for age, column in by_age.items()}
            ages = [age for age in sorted(values) if values[age]]
            axes.fill_between(
                ages, [min(values[age]) for age in ages], [max(values[age]) for age in ages], color=color, alpha=0.1
            )
            label = algorithm if correction == "none" else f"{algorithm}, ratio to the sampler"
            means = [fmean(values[age]) for age in ages]
            axes.plot(ages, means, style, color=color, marker=marker, ms=4, linewidth=1.6, label=label)
        ages = sorted({age for by_age in curves.values() for age in by_age})
        axes.set_xticks(ages, [str(age) for age in ages])
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def main(args: Args) -> list[str]:
    """Write staleness.html and staleness.png; return the picture's name."""
    check_out(args.out)
    curves = read_curves(read_policies(args.runs))
    title, drawn = "Algorithms with stale samplers", {"staleness": draw(curves)}
    return write_gallery(args.out / "staleness.html", args.runs, title, [], make_table(curves), drawn)


if __name__ == "__main__":
    run_module(main, Args)
