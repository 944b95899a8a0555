"""Compare several runs on one page: curves with bands over seeds, over-optimisation, model size, reward whitening.

    python -m nanorlhf.report.compare_runs --runs ppo runs/1b/ppo_1 ppo runs/1b/ppo_2 no_kl runs/1b/no_kl \\
        --out runs/compared
    python -m nanorlhf.report.compare_runs --runs ppo runs/1b/ppo ppo runs/6.9b/ppo rm runs/1b/rm rm runs/6.9b/rm \\
        --evals runs/1b/eval runs/6.9b/eval --out runs/compared

Runs with the same name and size are seeds. Win rates come from evaluations of the runs' checkpoints. For each figure
that can't be drawn, the page gives the reason.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open

from nanorlhf.cli import named_pairs, run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, open_regular, read_object
from nanorlhf.metrics import t_interval
from nanorlhf.report.page import LINES, Lines, Section, markup, number, panel, series, smooth, thinned, write_page
from nanorlhf.report.verdict import Gain, Outcome, change_of, verdict_section
from nanorlhf.training.resume import MAY_CHANGE
from nanorlhf.training.run_directory import Rows, read_metrics

CURVES = {  # metric of train_ppo: title, unit (N+ Figure 10)
    "objective/rlhf_reward": ("Score minus KL penalty", "score"),
    "objective/score": ("Rollout score", "score"),
    "gold_score": ("Rollout gold score", "score"),
    "objective/kl": ("KL to the reference", "nats per response"),
    "response_length": ("Response length", "tokens"),
    "eos_rate": ("Responses ending in EOS", "share"),
}
# settings that may differ between runs with and without whitened rewards
MAY_DIFFER = (
    MAY_CHANGE  # where and how often a run saves, on what hardware
    | {"trace", "gold", "reward_workers"}  # what it logs besides, and the processes that compute its rewards
    | {"seed", "data", "sft", "reward_model", "value_model", "tokenizer"}
    | {"whiten_rewards"}
)


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: tuple[str, ...]
    """pairs of a name and a run directory; runs with the same name are seeds, or sizes of one model"""
    out: Path
    """output directory for compare.html"""
    evals: tuple[Path, ...] = ()
    """output directories of eval.py with the runs' win rates"""


@dataclass(frozen=True)
class ComparedRun:
    name: str
    path: Path
    rows: Rows  # metrics.jsonl
    settings: dict  # args.json
    size: int | None  # parameters; None without a checkpoint
    win_rate: float | None  # against the references
    decided_by: str | None  # the judge or the gold score
    accuracy: float | None  # reward models: on validation pairs

    @property
    def is_ppo(self) -> bool:
        return any("objective/kl" in row for row in self.rows)


# ----------------------------------------------------------------------------------------------------- 1. reading
def num_parameters(directory: Path) -> int | None:
    """Return the number of parameters in a checkpoint directory; None without weights."""
    path = directory / "model.safetensors"
    if not path.exists():
        return None
    open_regular(path).close()
    try:
        with safe_open(path, "numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path}: damaged checkpoint ({error}).") from error


def win_rates(evals: tuple[Path, ...]) -> dict[Path, tuple[float, str]]:
    """Return checkpoint directory -> win rate against the references, and its source: the judge, else the gold score.

    Raises InputError for a malformed eval.json.
    """
    rates = {}
    for directory in evals:
        where = str(directory / "eval.json")
        result = read_object(directory / "eval.json")
        settings, policies = (field(result, name, dict, where) for name in ("args", "policies"))
        words = field(settings, "policies", list[str], f"{where}: args") if "policies" in settings else []
        deciders = {"gold_win_rate": "the gold score"}
        if result.get("judge") and field(result, "judge", dict, where).get("against") == "reference":
            deciders["judge_win_rate"] = "the judge"  # preferred if both are present
        for name, checkpoint in zip(words[::2], words[1::2], strict=False):
            row = field(policies, name, dict, f"{where}: policies") if name in policies else {}
            for key, by in deciders.items():
                if row.get(key) is not None:
                    rates[Path(checkpoint).resolve()] = field(row, key, float, f"{where}: {name}"), by
    return rates


def read_runs(args: Args) -> list[ComparedRun]:
    """Read all of --runs, in order. Raises InputError for a missing, repeated or unreadable directory."""
    pairs = named_pairs("--runs", args.runs)
    if len({Path(path).resolve() for _, path in pairs}) < len(pairs):
        raise InputError("--runs: a directory is repeated; pass each run once.")
    rates = win_rates(args.evals)
    return [read_run(name, Path(path), rates) for name, path in pairs]


def read_run(name: str, path: Path, rates: dict[Path, tuple[float, str]]) -> ComparedRun:
    """Read a run directory; rates: checkpoint directory -> win rate and its source."""
    if not (path / "metrics.jsonl").exists():
        raise InputError(f"--runs {name} {path} has no metrics.jsonl; expected a run directory of a training script.")
    rows = read_metrics(path)
    summary = read_object(path / "summary.json") if (path / "summary.json").exists() else {}
    accuracy = None
    if summary.get("validation_accuracy") is not None:
        accuracy = field(summary, "validation_accuracy", float, str(path / "summary.json"))
    settings = read_object(path / "args.json")
    if "whiten_rewards" in settings:
        field(settings, "whiten_rewards", bool, str(path / "args.json"))
    win_rate, decided_by = rates.get(path.resolve(), (None, None))
    return ComparedRun(name, path, rows, settings, num_parameters(path), win_rate, decided_by, accuracy)


def in_words(size: int | None) -> str:
    """Format a number of parameters with three digits and a unit.

    >>> in_words(6_900_000_000)
    '6.9B'
    """
    if size is None:
        return "size unknown"
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if size >= unit:
            return f"{size / unit:.3g}{letter}"
    return str(size)


def groups(runs: list[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Group runs into seeds: by name, and by size if a name has several sizes."""
    sizes: dict[str, set[int | None]] = defaultdict(set)
    for run in runs:
        sizes[run.name].add(run.size)
    by_name: dict[str, list[ComparedRun]] = defaultdict(list)
    for run in runs:
        by_name[run.name if len(sizes[run.name]) == 1 else f"{run.name}, {in_words(run.size)}"].append(run)
    return dict(by_name)


# ----------------------------------------------------------------------------------------------------- 2. the figures
def mean_and_sd(runs: list[ComparedRun], key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the episodes that all runs logged, and mean and standard deviation (n - 1; 0 for one run) over runs.

    All are (episodes,).
    """
    found = (series(run.rows, key, "episode") for run in runs)
    columns = [dict(zip(episodes.tolist(), values.tolist(), strict=True)) for episodes, values in found]
    episodes = sorted(set.intersection(*map(set, columns)))
    values = np.array([[column[x] for x in episodes] for column in columns]).reshape(len(runs), len(episodes))
    return np.array(episodes), values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(episodes))


def curve_figure(by_name: dict[str, list[ComparedRun]], key: str, title: str, unit: str) -> Figure | None:
    """Draw one line per name, with a band of one standard deviation over seeds; None if no run logged the metric."""
    figure, axes = panel(title, "episode", unit)
    for (name, runs), (color, _) in zip(by_name.items(), cycle(LINES), strict=False):
        have = [run for run in runs if any(key in row and "episode" in row for row in run.rows)]
        if not have:
            continue
        x, mean, sd = thinned(*mean_and_sd(have, key))
        seeds = f" ({len(have)} seeds)" if len(have) > 1 else ""
        axes.plot(x, mean, color=color, linewidth=1.8, label=name + seeds)
        axes.fill_between(x, mean - sd, mean + sd, color=color, alpha=0.18, linewidth=0)
    if not axes.lines:
        return None
    if key == "eos_rate":
        axes.set_ylim(0, 1.03)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def over_optimisation_figure(by_name: dict[str, list[ComparedRun]]) -> Figure | None:
    """Draw the change of proxy and gold score since the first update against sqrt(KL), as running means.

    One line per run, because runs differ in KL; None if no run logged a gold score.
    """
    figure, axes = panel("Proxy and gold score against KL", "sqrt(KL)", "score, change since the first update")
    for (name, runs), (color, _) in zip(by_name.items(), cycle(LINES), strict=False):
        for run in runs:
            rows = [row for row in run.rows if {"gold_score", "objective/score", "objective/kl"} <= row.keys()]
            if not rows:
                continue
            keys = ("objective/kl", "objective/score", "gold_score")
            kl, proxy, gold = thinned(*(np.array([row[key] for row in rows], dtype=float) for key in keys))
            width = max(3, len(kl) // 10)
            distance = np.sqrt(np.maximum(kl, 0))  # the estimate may be negative
            for scores, style, kind in ((proxy, "--", "proxy"), (gold, "-", "gold")):
                label = f"{name}, {kind}"
                known = {line.get_label() for line in axes.lines}
                with np.errstate(invalid="ignore"):  # diverged runs
                    change = smooth(scores - scores[0], width)
                axes.plot(
                    smooth(distance, width), change, style, linewidth=1.5, alpha=0.85,
                    color=color, label="_" if label in known else label,
                )  # fmt: skip
    if not axes.lines:
        return None
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def size_figure(runs: list[ComparedRun], field: str, title: str, unit: str) -> Figure | None:
    """Draw N+ Figure 1: `field` of the runs by number of parameters; None unless a name has values at two sizes.

    One dot per run; one line of means per name, with bars of one standard deviation over seeds.
    """
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))  # name -> size -> seeds' values
    for run in runs:
        if run.size and getattr(run, field) is not None:
            values[run.name][run.size].append(getattr(run, field))
    if all(len(sizes) < 2 for sizes in values.values()):
        return None
    figure, axes = panel(title, "parameters", unit)
    axes.set_xscale("log")
    for (name, of_size), (color, marker) in zip(values.items(), cycle(LINES), strict=False):
        sizes = sorted(of_size)
        for size in sizes:
            axes.scatter([size] * len(of_size[size]), of_size[size], s=12, color=color, alpha=0.5)
        means = [np.mean(of_size[size]) for size in sizes]
        sds = [float(np.std(of_size[size], ddof=1)) if len(of_size[size]) > 1 else 0.0 for size in sizes]
        axes.errorbar(sizes, means, sds, color=color, marker=marker, capsize=3, label=name)
    sizes = sorted({size for of_size in values.values() for size in of_size})
    axes.set_xticks(sizes, [in_words(size) for size in sizes])
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def whitening_figures(runs: list[ComparedRun]) -> list[Figure]:
    """Draw N+ Figure 11: runs with and without reward whitening, equal in all other settings except MAY_DIFFER.

    One pair of lines per such group of settings.
    """
    alike: dict[tuple, dict[bool, list[ComparedRun]]] = defaultdict(lambda: defaultdict(list))  # by settings, whitened
    for run in runs:
        if run.is_ppo and "whiten_rewards" in run.settings:
            rest = {name: value for name, value in run.settings.items() if name not in MAY_DIFFER}
            alike[run.size, json.dumps(rest, sort_keys=True)][run.settings["whiten_rewards"]].append(run)
    pairs = [found for found in alike.values() if len(found) == 2]
    by_name: dict[str, list[ComparedRun]] = {}
    for found in pairs:
        suffix = "" if len(pairs) == 1 else f", {found[True][0].name}"
        by_name |= {f"rewards not whitened{suffix}": found[False], f"rewards whitened{suffix}": found[True]}
    figures = [curve_figure(by_name, key, f"{title}, by whitening", unit)
               for key, (title, unit) in CURVES.items() if key != "eos_rate"]  # fmt: skip
    return [figure for figure in figures if figure]


# ----------------------------------------------------------------------------------------------------- 3. the page
CHANGED = {"gold_score": "the gold score", "objective/score": "the training score"}  # metric -> name within sentences


def changes(runs: list[ComparedRun], key: str) -> list[float]:
    """Return the change of a metric from the first update to the last, for each run that logged it."""
    columns = [[row[key] for row in run.rows if key in row] for run in runs]
    return [column[-1] - column[0] for column in columns if column]


def change_table(ppo: dict[str, list[ComparedRun]]) -> Lines:
    """Return one row per name: the mean of `changes` with its 95% interval over seeds."""
    lines = [["change from first to last update", "runs", "gold score", "score"]]
    for name, runs in ppo.items():
        lines.append([name, str(len(runs)), *(change_cell(changes(runs, key)) for key in CHANGED)])
    return lines


def change_cell(values: list[float]) -> str:
    return number(float(np.mean(values)), t_interval(values), 3, "+") if values else "-"


def outcome(name: str, runs: list[ComparedRun]) -> Outcome:
    """Return the outcome of the runs of a name; a single run has no interval."""
    changed = {key: found for key in CHANGED if (found := changes(runs, key))}
    eos_rates = [run.rows[-1]["eos_rate"] for run in runs if "eos_rate" in run.rows[-1]]
    eos_rate = float(np.mean(eos_rates)) if eos_rates else 1.0
    if len(runs) == 1:
        changes_text = " and ".join(f"{CHANGED[key]} by {change_cell(found)}" for key, found in changed.items())
        return Outcome(
            f"{name} is a single run, without intervals.",
            "warn",
            changes_text and f"Training changed {changes_text}.",
            eos_rate,
        )
    gains = {}
    for key, found in changed.items():
        if (interval := t_interval(found)) is not None:
            gains[key] = Gain(CHANGED[key], interval, change_cell(found))
    change = change_of(gains.get("gold_score"), gains.get("objective/score"))
    return Outcome(f"{name} has {len(runs)} runs.", *change, eos_rate)


def table_of(by_name: dict[str, list[ComparedRun]]) -> Lines:
    """Return one row per run: its name, seed, size and final metrics."""
    lines = [["run", "directory", "seed", "parameters", "score", "gold score", "KL, nats", "win rate", "RM accuracy"]]
    for name, runs in by_name.items():
        for run in runs:
            last = run.rows[-1] if run.rows else {}
            numbers = [last.get("objective/score"), last.get("gold_score"), last.get("objective/kl"), run.win_rate]
            seed, size = str(run.settings.get("seed", "-")), "-" if run.size is None else in_words(run.size)
            cells = [number(value, digits=3) for value in (*numbers, run.accuracy)]
            lines.append([name, str(run.path), seed, size, *cells])
    return lines


def main(args: Args) -> list[str]:
    """Write compare.html and return the figures that couldn't be drawn, each with the reason."""
    check_out(args.out)
    runs = read_runs(args)
    by_name = groups(runs)
    ppo = {name: [run for run in group if run.is_ppo] for name, group in by_name.items()}
    ppo = {name: group for name, group in ppo.items() if group}
    deciders = sorted({run.decided_by for run in runs if run.decided_by})
    sections: dict[str, tuple[Sequence[Figure | None], str]] = {  # heading -> figures, reason if there are none
        "Training (Figure 10)": (
            [curve_figure(ppo, key, title, unit) for key, (title, unit) in CURVES.items()],
            "no run is from a rollout script such as train_ppo.py",
        ),
        "Over-optimisation": (
            [over_optimisation_figure(ppo)],
            "no run logged a gold score; pass --gold to train_ppo.py",
        ),
        "Size: win rate (Figure 1)": (
            [
                size_figure([run for run in runs if run.decided_by == by], "win_rate", f"Win rate by {by}", "share")
                for by in deciders
            ],
            "no name has win rates in --evals for two sizes",
        ),
        "Size: reward model (Figure 1)": (
            [size_figure(runs, "accuracy", "Reward model accuracy", "share of validation pairs")],
            "no name has finished reward models of two sizes",
        ),
        "Reward whitening (Figure 11)": (
            whitening_figures(runs),
            "no two runs differ only in --whiten-rewards, seed and paths",
        ),
    }
    bands = "Lines are means over seeds; bands and bars are one standard deviation (n - 1)."
    bands += " Changes have the mean's 95% interval over runs (Student's t)."
    outcomes = ((outcome(name, group), [str(run.path) for run in group]) for name, group in ppo.items())
    happened = verdict_section(outcomes, {str(run.path): run.rows for run in runs})
    parts = [markup.title("Comparison of runs"), happened]
    parts.append(Section(about=bands, tables=[table_of(by_name), change_table(ppo)]))
    missing = []
    for heading, (drawn, reason) in sections.items():
        if any(drawn):
            parts.append(Section(heading, figures=list(filter(None, drawn))))
        else:
            missing.append(f"{heading}: not drawn because {reason}.")
    if missing:
        parts.append(Section("Not drawn", about=markup.bullets(missing)))
    args.out.mkdir(parents=True, exist_ok=True)
    write_page(args.out / "compare.html", str(args.out), parts)
    print("\n".join([*missing, f"written: {args.out / 'compare.html'}"]))
    return missing


if __name__ == "__main__":
    run_module(main, Args)
