"""Tables and pictures of `experiments tldr`.

    python -m experiments.tldr.report --runs runs/tldr_study   # the CSVs from finished runs, then the page and pictures
    python -m experiments.tldr.report                          # the page and pictures from the CSVs

The files are in --out: tldr.csv (a line per seed, size and quantity), curves.csv (PPO's updates), and README.md, whose
tables are replaced; a README.md is created if there is none.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import minimize

from experiments.tables import csv_text, evaluated, markdown, mean_difference, part, with_tables
from experiments.tldr.runs import EXPLANATIONS, WHITENED, run_directory
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_lines, read_object, read_text, write_text
from nanorlhf.metrics import t_interval
from nanorlhf.report.page import LINES, Lines, label_axes, number, write_pictures
from nanorlhf.training.run_directory import read_metrics

MARKS = ("<!-- the tables of python -m experiments.tldr.report -->", "<!-- the end of the tables -->")
COLUMNS, CURVES = ("seed", "size", "quantity", "value"), ("seed", "size", "update", "score", "gold", "kl")
Values = dict[str, dict[str, dict[int, float]]]  # size -> quantity -> seed -> value
Curves = dict[str, dict[int, np.ndarray]]  # size -> seed -> (updates, 3): score, gold score, KL


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path | None = None
    """directory of the runs of `experiments tldr`, which replace the CSVs; None: only read the CSVs"""
    out: Path = Path("experiments/tldr")
    """directory of the CSVs, README.md and the pictures"""
    sizes: tuple[str, ...] = ("32", "64", "128")
    """directories of the sizes, smallest first"""
    base: str = "128"
    """the size of the details"""


# ----------------------------------------------------------------------------------------------------------- 1. reading
def measured(directory: Path) -> Iterator[tuple[str, float]]:
    """Yield the quantities of a size at a seed and their values."""
    path = directory / "eval/eval.json"
    for policy, values in evaluated(path).items():
        for key in ("gold_win_rate", "gold_score", "rm_score", "rouge1", "rouge2", "rougeL", "response_length", "kl"):
            if values[key] is not None:
                yield f"{key}/{policy}", values[key]
    report = read_object(path)
    names = {"reward model": "rm", "dpo": "dpo"}
    by_distance: dict[int, list[dict]] = {}
    for row in part(report, str(path), "rewards", "sets", "validation", "accuracy"):
        if row["by"] == "confidence":  # from 1 and 9, sure, to 5, undecided
            by_distance.setdefault(abs(int(row["value"]) - 5), []).append(row)
        if row["by"] == "all":
            yield from ((f"accuracy/{name}", row["models"][model]["mean"]) for model, name in names.items())
    for distance, rows in sorted(by_distance.items()):
        total = sum(row["num_pairs"] for row in rows)
        for model, name in names.items():
            right = sum(row["num_pairs"] * row["models"][model]["mean"] for row in rows)
            yield f"accuracy_at_distance_{distance}/{name}", right / total
    agreement = part(report, str(path), "reward_model", "gold_agreement")
    if agreement is not None:
        yield "agreement/pairs", agreement
        samples = [json.loads(line) for _, line in read_lines(directory / "eval/samples.jsonl")]
        for policy in ("sft", "ppo"):
            if (share := agreement_with_gold(samples, policy)) is not None:
                yield f"agreement/{policy}", share
    path = directory / "dpo/summary.json"
    for side in ("chosen", "rejected"):
        yield f"implicit_reward/{side}", part(read_object(path), str(path), f"validation_{side}_reward")
    for name, (kind, _, _) in (WHITENED | EXPLANATIONS | {"ppo": ("ppo", "sft", ())}).items():
        path = directory / name / "summary.json"
        if not path.exists():
            continue
        if kind == "ppo":  # of the rollouts of the last five updates
            rows = read_metrics(path.parent)[-5:]
            yield f"late_length/{name}", fmean(row["response_length"] for row in rows)
            if "gold_score" in rows[-1]:
                yield f"late_gold_score/{name}", fmean(row["gold_score"] for row in rows)
        else:
            yield f"accuracy/{name}", part(read_object(path), str(path), "validation_accuracy")
    yield from probed(read_object(directory / "probe.json"))


def agreement_with_gold(samples: Iterable[dict[str, Any]], policy: str) -> float | None:
    """[N+ 17] Return how often reward model and gold score agree if a policy's summary or the reference is better.

    Pairs with equal gold scores are excluded; ties of the reward model are wrong.
    """
    agrees = []
    for sample in samples:
        ours = sample["policies"][policy]
        gold = ours["gold_score"] - sample["reference_gold_score"]
        if gold != 0:
            agrees.append((ours["rm_score"] - sample["reference_rm_score"]) * gold > 0)
    return fmean(agrees) if agrees else None


def probed(probe: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the quantities of a probe.json."""
    before = np.array(probe["before"])
    yield "negative/normalised", float(np.mean(before < 0))
    yield "negative/unnormalised", float(np.mean(before + probe["bias"] < 0))
    yield "negative/compared", float(np.mean(before < np.mean(probe["compared"])))
    yield "offset/unnormalised", probe["bias"]  # mean score of the references before normalisation
    yield "offset/compared", float(np.mean(probe["compared"]))
    yield "before/mean", float(before.mean())
    yield "before/std", float(before.std())
    for name, pairs in (("pairs", probe["pairs"]), ("false_facts", probe["false"])):
        if pairs is None:
            continue
        rm, policy, sft = (np.array(pairs[model]) for model in ("rm", "policy", "sft"))
        for model, margins in (("rm", rm), ("dpo", policy - sft), ("policy", policy), ("sft", sft)):
            yield f"{name}/{model}", float(np.mean(margins > 0))
        if name == "pairs":
            yield "pairs/rm_and_sft", combined_accuracy(np.stack([rm, sft], 1))
            if probe["invented"] is not None:
                invented = np.array(probe["invented"])
                for model, margins in (("rm", rm), ("dpo", policy - sft)):
                    yield f"invented/{model}", float(np.mean(margins[invented] > 0))
                    yield f"not_invented/{model}", float(np.mean(margins[~invented] > 0))


def combined_accuracy(margins: np.ndarray) -> float:
    """Return the accuracy of the best weighted sum of rankers; margins (pairs, rankers), chosen minus rejected.

    A logistic regression on one half of the pairs gives the weights for the other half.
    """
    margins = margins / margins.std(0)
    halves = margins[0::2], margins[1::2]

    def weights(half: np.ndarray) -> np.ndarray:
        return minimize(lambda w: np.logaddexp(0, -half @ w).mean(), np.zeros(half.shape[1])).x

    right = [test @ weights(train) > 0 for train, test in (halves, halves[::-1])]
    return float(np.concatenate(right).mean())


def finished(args: Args) -> tuple[Lines, Lines]:
    """Return the lines of both CSVs. Raises InputError if no run has finished."""
    assert args.runs is not None
    lines, curves = [[*COLUMNS]], [[*CURVES]]
    seeds = sorted(int(directory.name) for directory in args.runs.glob("*") if directory.name.isdigit())
    for size in args.sizes:
        for seed in seeds:
            directory = run_directory(args.runs, seed, size)
            for path in sorted(directory.glob("probe-lr-*.json")):
                values = dict(probed(read_object(path)))
                for name in AT_LR:
                    lines.append([str(seed), size, f"{name}-{path.stem.removeprefix('probe-')}", f"{values[name]:.5g}"])
            if not (directory / "probe.json").exists():
                continue
            lines += [[str(seed), size, name, f"{value:.5g}"] for name, value in measured(directory)]
            for row in read_metrics(directory / "ppo"):
                numbers = (row.get(key, math.nan) for key in ("objective/score", "gold_score", "objective/kl"))
                curves.append([str(seed), size, str(row["step"]), *(f"{x:.5g}" for x in numbers)])
    if len(lines) == 1:
        raise InputError(f"--runs {args.runs} has no finished run of `python -m experiments tldr`.")
    return lines, curves


def read_values(path: Path) -> Values:
    values: Values = {}
    for line in csv.DictReader(read_text(path).splitlines()):
        by_seed = values.setdefault(line["size"], {}).setdefault(line["quantity"], {})
        by_seed[int(line["seed"])] = float(line["value"])
    return values


def read_curves(path: Path) -> Curves:
    points: dict[str, dict[int, list[list[float]]]] = {}
    for line in csv.DictReader(read_text(path).splitlines()):
        by_seed = points.setdefault(line["size"], {}).setdefault(int(line["seed"]), [])
        by_seed.append([float(line[key]) for key in ("score", "gold", "kl")])
    return {size: {seed: np.array(rows) for seed, rows in by_seed.items()} for size, by_seed in points.items()}


# ------------------------------------------------------------------------------------------------------------ 2. tables
def over_seeds(by_seed: dict[int, float], digits: int = 3) -> str:
    """Format the mean over seeds and its 95% interval by Student's t."""
    values = list(by_seed.values())
    return number(fmean(values), t_interval(values), digits) if values else "-"


def paired(ours: dict[int, float], theirs: dict[int, float], digits: int = 3) -> str:
    """Format the mean difference over common seeds and its 95% interval by Student's t."""
    values = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return mean_difference(values, digits)


BY_SIZE = {
    "accuracy/rm": "reward model: accuracy",
    "accuracy/dpo": "DPO: accuracy",
    "agreement/pairs": "reward model agrees with the gold score: validation pairs",
    "agreement/sft": "the same: SFT's summary and the reference",
    "agreement/ppo": "the same: PPO's summary and the reference",
    "gold_win_rate/sft": "SFT: gold win rate",
    "gold_win_rate/ppo": "PPO: gold win rate",
    "gold_win_rate/dpo": "DPO: gold win rate",
    "gold_score/sft": "SFT: gold score",
    "gold_score/ppo": "PPO: gold score",
    "rougeL/sft": "SFT: ROUGE-L",
    "rougeL/ppo": "PPO: ROUGE-L",
    "kl/ppo": "PPO: KL, nats",
}


def size_table(values: Values, sizes: Sequence[str]) -> Lines:
    """Return the quantities of BY_SIZE at the seeds that all sizes have, and the differences between neighbours."""
    steps = list(zip(sizes[1:], sizes, strict=False))
    lines = [["", *sizes, *(f"{larger} - {smaller}" for larger, smaller in steps)]]
    for quantity, title in BY_SIZE.items():
        columns = {size: values[size].get(quantity, {}) for size in sizes}
        common = set.intersection(*(set(column) for column in columns.values()))
        columns = {size: {seed: column[seed] for seed in sorted(common)} for size, column in columns.items()}
        cells = [over_seeds(columns[size]) for size in sizes]
        lines.append([title, *cells, *(paired(columns[larger], columns[smaller]) for larger, smaller in steps)])
    return lines


def confidence_table(at_base: dict[str, dict[int, float]]) -> Lines:
    """Return the accuracies at each distance of the labeller's confidence from 5, undecided."""
    distances = [name for name in at_base if name.startswith("accuracy_at_distance_") and name.endswith("/rm")]
    distances = [name.removesuffix("/rm") for name in distances]
    lines = [["", *(name.removeprefix("accuracy_at_distance_") for name in distances)]]
    for model, title in (("rm", "reward model"), ("dpo", "DPO")):
        lines.append([title, *(over_seeds(at_base[f"{name}/{model}"]) for name in distances)])
    return lines


RANKERS = {
    "accuracy/rm": "reward model",
    "accuracy/dpo": "DPO",
    "pairs/policy": "DPO's log-probability, without the reference's",
    "pairs/sft": "SFT's log-probability",
    "pairs/rm_and_sft": "reward model and SFT's log-probability",
    "accuracy/rm-pooled": "reward model, mean over the response's tokens",
    "accuracy/rm-untaught": "reward model from a policy that knows no language",
    "accuracy/dpo-untaught": "DPO from a policy that knows no language",
}


def ranker_table(at_base: dict[str, dict[int, float]]) -> Lines:
    """Return the accuracy of each ranker, and the difference from the reward model's."""
    lines = [["pairs ranked by", "seeds", "accuracy", "minus reward model"]]
    for quantity, title in RANKERS.items():
        by_seed = at_base.get(quantity, {})
        if by_seed:
            difference = "-" if quantity == "accuracy/rm" else paired(by_seed, at_base["accuracy/rm"])
            lines.append([title, str(len(by_seed)), over_seeds(by_seed), difference])
    return lines


PARTS = {
    "invented": "pairs whose rejected summary invents more",
    "not_invented": "other pairs",
    "false_facts": "a true summary and one with a false fact",
}


def parts_table(at_base: dict[str, dict[int, float]]) -> Lines:
    lines = [["share ranked correctly", "reward model", "DPO", "difference"]]
    for name, title in PARTS.items():
        rm, dpo = (at_base.get(f"{name}/{model}", {}) for model in ("rm", "dpo"))
        if rm:
            lines.append([title, over_seeds(rm), over_seeds(dpo), paired(dpo, rm)])
    return lines


NEGATIVE = {
    "normalised": "the references' mean score, as in the paper",
    "unnormalised": "what training leaves it at",
    "compared": "the mean score of the compared responses",
}


def negative_table(at_base: dict[str, dict[int, float]]) -> Lines:
    """Return the share of negative logits before EOS by where 0 is, over seeds.

    The last column is its correlation over seeds with the references' mean score before normalisation.
    """
    offsets = list(at_base["offset/unnormalised"].values())
    lines = [["0 is", "negative before EOS", "lowest seed", "highest seed", "correlation"]]
    for name, title in NEGATIVE.items():
        shares = list(at_base[f"negative/{name}"].values())
        cells = (f"{min(shares):.3f}", f"{max(shares):.3f}")
        varies = len(shares) > 2 and np.ptp(shares) > 0 and np.ptp(offsets) > 0
        correlation = f"{np.corrcoef(shares, offsets)[0, 1]:+.2f}" if varies else "-"
        lines.append([title, over_seeds(at_base[f"negative/{name}"]), *cells, correlation])
    return lines


WHITENING = {
    "gold_win_rate": "gold win rate",
    "gold_score": "gold score",
    "rm_score": "reward model's score",
    "response_length": "length, tokens",
    "kl": "KL, nats",
}


def whitening_table(at_base: dict[str, dict[int, float]]) -> Lines:
    lines = [["", "without", "with whitening", "difference"]]
    for name, title in WHITENING.items():
        off, on = (at_base.get(f"{name}/{run}", {}) for run in ("ppo", "whitened"))
        if on and off:
            lines.append([title, over_seeds(off), over_seeds(on), paired(on, off)])
    return lines


OFFSETS = {
    "late_length": "length, tokens",
    "late_gold_score": "gold score",
}


def offset_table(at_base: dict[str, dict[int, float]]) -> Lines:
    """Return the effect of whitening with and without a constant in the score, in the last five updates."""
    lines = [["in the last five updates", "reward", "without", "with whitening", "difference"]]
    for name, title in OFFSETS.items():
        for reward, runs in (("score", ("ppo", "whitened")), ("score / 10 + 1", ("offset", "offset-whitened"))):
            off, on = (at_base.get(f"{name}/{run}", {}) for run in runs)
            if on and off:
                lines.append([title, reward, over_seeds(off, 2), over_seeds(on, 2), paired(on, off, 2)])
    return lines


def implicit_table(at_base: dict[str, dict[int, float]]) -> Lines:
    lines = [["DPO's mean reward at the end", "", "seeds below 0"]]
    for side in ("chosen", "rejected"):
        by_seed = at_base[f"implicit_reward/{side}"]
        below = sum(value < 0 for value in by_seed.values())
        lines.append([side, over_seeds(by_seed), f"{below} of {len(by_seed)}"])
    return lines


AT_LR = {
    "pairs/rm": "reward model: accuracy",
    "pairs/dpo": "DPO: accuracy",
    "offset/unnormalised": "references' mean score before normalisation",
    "negative/normalised": "negative logits before EOS",
    "negative/unnormalised": "the same before normalisation",
}


def rate_table(at_base: dict[str, dict[int, float]]) -> Lines:
    """Return the quantities of AT_LR at each learning rate, at one seed."""
    names = [name.removeprefix("pairs/rm-lr-") for name in at_base if name.startswith("pairs/rm-lr-")]
    rates = sorted(names, key=float)
    lines = [["learning rate", *rates]]
    for name, title in AT_LR.items():
        lines.append([title, *(over_seeds(at_base[f"{name}-lr-{rate}"]) for rate in rates)])
    return lines if rates else lines[:1]


def page_text(values: Values, sizes: Sequence[str], base: str) -> str:
    """Return the text between the page's marks."""
    sizes = [size for size in sizes if size in values]
    at_base = values[base]
    tables = {
        "Model sizes": size_table(values, sizes),
        "Accuracy by confidence": confidence_table(at_base),
        "DPO and the reward model": ranker_table(at_base),
        "Learning rates": rate_table(at_base),
        "What they rank correctly": parts_table(at_base),
        "DPO's rewards": implicit_table(at_base),
        "Logits before EOS": negative_table(at_base),
        "Reward whitening": whitening_table(at_base),
        "Reward whitening and a constant": offset_table(at_base),
    }
    return "\n\n".join(f"### {title}\n\n{markdown(table)}" for title, table in tables.items() if len(table) > 1)


# ---------------------------------------------------------------------------------------------------------- 3. pictures
def draw_band(axes: Axes, x: Sequence[float], values: np.ndarray, label: str, color: str, marker: str = "") -> None:
    """Draw the mean of values (seeds, points) and its 95% interval by Student's t."""
    axes.plot(x, values.mean(0), color=color, marker=marker, markersize=4, label=label)
    if len(values) > 1:
        low, high = np.transpose([t_interval(column) for column in values.T])
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def size_figure(values: Values, sizes: Sequence[str]) -> Figure:
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = {
        "Gold win rate": {"gold_win_rate/sft": "SFT", "gold_win_rate/ppo": "PPO", "gold_win_rate/dpo": "DPO"},
        "Accuracy and agreement": {
            "accuracy/rm": "reward model", "accuracy/dpo": "DPO", "agreement/ppo": "reward model and gold, on PPO's",
        },
    }  # fmt: skip
    for axes, (title, quantities) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        label_axes(axes, title, "model size", "share")
        for (quantity, label), (color, marker) in zip(quantities.items(), LINES, strict=False):
            columns = [values[size].get(quantity, {}) for size in sizes]
            seeds = sorted(set.intersection(*map(set, columns)))
            if seeds:
                rows = np.array([[column[seed] for column in columns] for seed in seeds])  # (seeds, sizes)
                draw_band(axes, range(len(sizes)), rows, label, color, marker)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.legend(frameon=False, fontsize=8)
    return figure


def curve_figure(curves: Curves, sizes: Sequence[str]) -> Figure:
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    titles = ("Reward model's score", "Gold score", "KL, nats")
    for i, (axes, title) in enumerate(zip(figure.subplots(1, 3), titles, strict=True)):
        label_axes(axes, title, "update", "")
        for size, (color, _) in zip(sizes, LINES, strict=False):
            rows = np.stack(list(curves[size].values()))[:, :, i]  # (seeds, updates)
            draw_band(axes, range(rows.shape[1]), rows, size, color)
        axes.legend(frameon=False, fontsize=8)
    return figure


def main(args: Args) -> None:
    """Write the CSVs if --runs is given, then the page's tables and the pictures."""
    check_out(args.out)
    page = args.out / "README.md"
    if args.runs is not None:
        for name, lines in zip(("tldr.csv", "curves.csv"), finished(args), strict=True):
            args.out.mkdir(parents=True, exist_ok=True)
            write_text(args.out / name, csv_text(lines))
    values, curves = read_values(args.out / "tldr.csv"), read_curves(args.out / "curves.csv")
    sizes = [size for size in args.sizes if size in values]
    text = read_text(page) if page.exists() else "\n".join(MARKS)
    write_text(page, with_tables(text, page, page_text(values, sizes, args.base), MARKS))
    write_pictures(args.out, {"sizes.png": size_figure(values, sizes), "curves.png": curve_figure(curves, sizes)})
    print(f"written: {page}, sizes.png and curves.png")


if __name__ == "__main__":
    run_module(main, Args)
