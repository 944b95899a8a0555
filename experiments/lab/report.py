"""Pictures of `experiments lab`: reward model and policy by setting of each labeller dial.

    python -m experiments.lab.report --runs runs/lab --out runs/lab/report

--runs has a directory per dial, which has one per setting, named by its value. Files may be missing:

    DIAL/VALUE/eval_rm/eval.json    eval.py tiny-rm: one reward model, the labels and gold
    DIAL/VALUE/ppo/metrics.jsonl    train_ppo.py against that reward model
    DIAL/VALUE/eval/eval.json       eval.py tiny: the policy comes last

A panel is drawn if at least two settings have data for it. Out: DIAL.png, lab.html with all pictures, and one table.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.tables import Numbers, float_at, part
from nanorlhf.cli import run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object
from nanorlhf.metrics.pair_accuracy import FEW
from nanorlhf.report.page import GREY, LINES, Lines, label_axes, number, series, smooth, write_gallery
from nanorlhf.training.run_directory import Rows, read_metrics

COLUMNS = (  # number, heading of the table, digits
    ("kappa", "kappa", 2),
    ("circular", "circular triads", 3),
    ("labels_truth", "labels right", 3),
    ("rm_truth", "RM right", 3),
    ("rm_labels", "RM as labelled", 3),
    ("ece", "calibration error", 3),
    ("labels_longer", "labels: longer", 3),
    ("rm_longer", "RM: longer", 3),
    ("rm_samples", "RM right on samples", 3),
    ("gold_win_rate", "gold win rate", 3),
    ("gold_score", "gold score", 2),
    ("response_length", "length", 1),
    ("kl", "KL", 2),
)
BY_VALUE = {  # title of a panel, unit: its numbers and their labels
    ("Accuracy of the reward model", "share of validation pairs"): {
        "rm_truth": "against the truth",
        "rm_labels": "against the labels",
        "labels_truth": "the labels against the truth",
    },
    ("Annotators", "Fleiss' kappa, share"): {"kappa": "kappa of their labels", "circular": "circular triads"},
    ("The longer response is preferred", "share of validation pairs"): {
        "rm_longer": "by the reward model",
        "labels_longer": "by the labels",
        "truth_longer": "by the gold score",
    },
    ("Calibration", "expected calibration error"): {"ece": "reward model"},
    ("After PPO", "share"): {
        "gold_win_rate": "gold win rate against the references",
        "rm_samples": "reward model right about the samples",
    },
}
BY_UPDATE = {  # metric of train_ppo.py: title, unit
    "gold_score": ("PPO: gold score", "score"),
    "objective/score": ("PPO: the reward model's score", "score"),
    "response_length": ("PPO: response length", "tokens"),
    "objective/kl": ("PPO: KL to the reference", "nats per response"),
}


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/lab")
    """directory with one directory per dial, which has one per setting"""
    out: Path = Path("runs/lab/report")
    """directory for the pictures and lab.html"""


@dataclass(frozen=True)
class Setting:
    dial: str
    value: str  # name of its directory
    numbers: Numbers  # those of COLUMNS and BY_VALUE that are known
    bins: list[dict]  # of `calibration`, empty without a reward model
    updates: Rows  # of metrics.jsonl


# ----------------------------------------------------------------------------------------------------------- 1. reading
def read_settings(runs: Path) -> dict[str, list[Setting]]:
    """Read the settings of each dial, smallest value first. Raises InputError if there are none or one is malformed."""
    dials: dict[str, list[Setting]] = {}
    for directory in sorted(runs.glob("*/*"), key=lambda path: (path.parent.name, in_order(path.name))):
        numbers, bins = reward_numbers(directory / "eval_rm" / "eval.json")
        if (directory / "eval" / "eval.json").exists():
            numbers |= policy_numbers(directory / "eval" / "eval.json")
        updates = read_metrics(directory / "ppo")
        if numbers or updates:
            dial = directory.parent.name
            dials.setdefault(dial, []).append(Setting(dial, directory.name, numbers, bins, updates))
    if not dials:
        raise InputError(
            f"--runs {runs}: no DIAL/VALUE there has an evaluation: run `python -m experiments lab` first."
        )
    return dials


def in_order(value: str) -> tuple[float, str]:
    """Sort key: numbers by size, then words.

    >>> sorted(["all", "16", "0.5", "4"], key=in_order)
    ['0.5', '4', '16', 'all']
    """
    try:
        return float(value), ""
    except ValueError:
        return np.inf, value


def reward_numbers(path: Path) -> tuple[Numbers, list[dict]]:
    """Read an evaluation of `eval.py tiny-rm`: numbers on the labels and the one reward model, and calibration bins."""
    if not path.exists():
        return {}, []
    result, where = read_object(path), str(path)
    measured = part(result, where, "sets", "validation")
    models = part(measured, where, "calibration")
    if len(models) != 1:
        raise InputError(f"{where}: expected one reward model, got {len(models)}: evaluate each setting separately.")
    [name] = models
    accuracy = field(measured, "accuracy", list[dict], where)[0]  # of all pairs
    labels, gold = (part(measured, where, "deciders", key) for key in ("labels", "truth"))
    model = part(measured, where, "deciders", "models", name)
    agreement = part(result, where, "agreement")
    numbers = {
        "kappa": float_at(agreement, where, "fleiss_kappa") if agreement else None,
        "circular": float_at(agreement, where, "circular_share") if agreement else None,
        "labels_truth": float_at(labels, where, "truth", "mean"),
        "labels_longer": float_at(labels, where, "longer", "mean"),
        "truth_longer": float_at(gold, where, "longer", "mean") if gold else None,
        "rm_truth": float_at(model, where, "truth", "mean"),
        "rm_longer": float_at(model, where, "longer", "mean"),
        "rm_labels": float_at(accuracy, where, "models", name, "mean"),
        "ece": float_at(models, where, name, "ece", "mean"),
    }
    bins = field(part(models, where, name), "bins", list[dict], where)
    return numbers, [{key: float_at(row, where, key) for key in ("middle", "mean", "num_pairs")} for row in bins]


def policy_numbers(path: Path) -> Numbers:
    """Read the last policy's numbers from an evaluation of `eval.py tiny`."""
    result, where = read_object(path), str(path)
    *_, last = part(result, where, "policies") or {"": {}}
    policy, reward_model = part(result, where, "policies", last), part(result, where, "reward_model")
    numbers = {key: float_at(policy, where, key) for key in ("gold_win_rate", "gold_score", "response_length", "kl")}
    if policy.get("gold_win_rate_ci") is not None:
        ends = field(policy, "gold_win_rate_ci", list[float], where)
        numbers |= dict(zip(("win_low", "win_high"), ends, strict=False))
    samples = float_at(reward_model, where, "samples_gold_agreement") if reward_model else None
    return numbers | {"rm_samples": samples}


# ----------------------------------------------------------------------------------------------------------- 2. figures
def dial_figure(settings: list[Setting]) -> Figure | None:
    """Draw all panels of one dial, two side by side. Returns None if no panel has two settings."""
    by_value = {
        title: lines
        for title, keys in BY_VALUE.items()
        if (lines := {label: known for key, label in keys.items() if len(known := known_values(settings, key)) > 1})
    }
    calibrated = [setting for setting in settings if setting.bins]
    trained = {key: [s for s in settings if any(key in row for row in s.updates)] for key in BY_UPDATE}
    metrics = [key for key, group in trained.items() if len(group) > 1]
    num_panels = len(by_value) + (len(calibrated) > 1) + len(metrics)
    if not num_panels:
        return None

    num_rows = -(-num_panels // 2)
    figure = Figure(figsize=(10.4, 3.2 * num_rows), layout="constrained")
    panels: list[Axes] = figure.subplots(num_rows, 2, squeeze=False).ravel().tolist()
    dial = settings[0].dial
    style = "-" if all(in_order(setting.value)[0] < np.inf for setting in settings) else ""  # words aren't ordered
    for (title, unit), lines in by_value.items():
        axes = panels.pop(0)
        label_axes(axes, title, dial, unit)
        for (label, known), (color, marker) in zip(lines.items(), LINES, strict=False):
            axes.plot(list(known), list(known.values()), style, color=color, marker=marker, linewidth=1.8, label=label)
        axes.update_datalim([(0, 0)])  # shares from 0, so that small differences look small
        axes.autoscale_view()
        axes.set_xticks(range(len(settings)), [setting.value.replace(",", "\n") for setting in settings])
        axes.legend(frameon=False, fontsize=8)
    if len(calibrated) > 1:
        draw_calibration(panels.pop(0), calibrated)
    for key in metrics:
        axes = panels.pop(0)
        label_axes(axes, BY_UPDATE[key][0], "update", BY_UPDATE[key][1])
        for setting, (color, _) in zip(trained[key], cycle(LINES), strict=False):
            steps, values = series(setting.updates, key)
            axes.plot(steps, smooth(values, 3), color=color, linewidth=1.8, label=f"{dial} {setting.value}")
        axes.legend(frameon=False, fontsize=8)
    for axes in panels:  # one is left over if the number is odd
        axes.remove()
    return figure


def known_values(settings: list[Setting], key: str) -> dict[int, float]:
    """Return position on the axis -> number, for the settings that have it."""
    values = {position: setting.numbers.get(key) for position, setting in enumerate(settings)}
    return {position: value for position, value in values.items() if value is not None}


def draw_calibration(axes: Axes, settings: Iterable[Setting]) -> None:
    """Draw how often labels agree with margins of each size: one line per setting, bins with at least FEW pairs."""
    label_axes(axes, "Calibration of margins", "|margin|", "share ranked as labelled")
    longest = 1.0
    for setting, (color, marker) in zip(settings, cycle(LINES), strict=False):
        bins = [row for row in setting.bins if row["mean"] is not None and row["num_pairs"] >= FEW]
        middles = [row["middle"] for row in bins]
        longest = max(longest, *middles) if middles else longest
        label = f"{setting.dial} {setting.value}"
        axes.plot(middles, [row["mean"] for row in bins], color=color, marker=marker, ms=4, linewidth=1.4, label=label)
    line = np.linspace(0, longest, 100)
    axes.plot(line, 1 / (1 + np.exp(-line)), color=GREY, linestyle="--", linewidth=1.4, label="sigmoid(|margin|)")
    axes.legend(frameon=False, fontsize=8)


# -------------------------------------------------------------------------------------------------------------- 3. page
def make_table(dials: dict[str, list[Setting]]) -> Lines:
    """Return one row per setting, without columns that no setting has."""
    settings = [setting for column in dials.values() for setting in column]
    columns = [column for column in COLUMNS if any(s.numbers.get(column[0]) is not None for s in settings)]
    lines = [["dial", "value", *(heading for _, heading, _ in columns)]]
    for setting in settings:
        cells = [
            win_cell(setting.numbers) if key == "gold_win_rate" else number(setting.numbers.get(key), digits=digits)
            for key, _, digits in columns
        ]
        lines.append([setting.dial, setting.value, *cells])
    return lines


def win_cell(numbers: Numbers) -> str:
    """Format the gold win rate, with its interval if the evaluation has one."""
    low, high = numbers.get("win_low"), numbers.get("win_high")
    return number(numbers.get("gold_win_rate"), None if low is None or high is None else (low, high), 3)


def happened(settings: list[Setting]) -> tuple[str, str] | None:
    """Report where on a dial the policy wins most and least; None without two policies that have an interval."""
    scored = [setting for setting in settings if {"gold_win_rate", "win_low", "win_high"} <= setting.numbers.keys()]
    if len(scored) < 2:
        return None
    ranked = sorted(scored, key=lambda setting: setting.numbers["gold_win_rate"] or 0.0)
    worst, best = ranked[0], ranked[-1]
    text = f"{best.dial}: the policy wins most at {best.value}, {win_cell(best.numbers)}"
    text += f", and least at {worst.value}, {win_cell(worst.numbers)}"
    if (worst.numbers["win_high"] or 0.0) < (best.numbers["win_low"] or 0.0):
        return "good", f"{text}."
    return "warn", f"{text}; the intervals overlap, so no difference is significant."


def main(args: Args) -> list[str]:
    """Write DIAL.png for each dial, and lab.html; return the names of the pictures."""
    check_out(args.out)
    dials = read_settings(args.runs)
    drawn = {dial: figure for dial, settings in dials.items() if (figure := dial_figure(settings))}
    paragraphs = [paragraph for settings in dials.values() if (paragraph := happened(settings))]
    return write_gallery(
        args.out / "lab.html", args.runs, "The preference laboratory", paragraphs, make_table(dials), drawn
    )


if __name__ == "__main__":
    run_module(main, Args)
