"""Learning curve of RLCF's discriminator: accuracy on held-out pairs while it trains.

    python -m experiments.programs.learning_curve --runs runs/discriminators --out runs/discriminators/report

--runs has a directory SEED/DISCRIMINATOR per run of nanorlhf.rlcf.train_discriminator. A pair is a written program and
one of the policy's for the same prompt. Out: discriminator.csv, a line per validation; discriminator.png; and a table.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from experiments.programs.runs import CURVES
from experiments.tables import Line, csv_text, markdown, part
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object, write_text
from nanorlhf.metrics import wilson_interval
from nanorlhf.report.page import LINES, Lines, number, panel, write_pictures
from nanorlhf.training.run_directory import read_metrics


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/discriminators")
    """directory with SEED/DISCRIMINATOR"""
    out: Path = Path("runs/discriminators/report")
    """directory for the CSV, the picture and the table"""


def curve_lines(runs: Path) -> Iterator[list[object]]:
    """Yield a line per validation. `stage` is what the steps before it trained on."""
    yield ["seed", "discriminator", "step", "stage", "accuracy", "pairs"]
    for directory in sorted(runs.glob("[0-9]*"), key=lambda path: path.name.zfill(20)):
        for name in CURVES:
            path = directory / name / "summary.json"
            if path.exists():
                summary = read_object(path)
                num_pairs = round(part(summary, str(path), "num_validation_pairs"))
                validated = {
                    row["step"] + ("lr" in row): row  # the summary, which has no "lr", follows the last step
                    for row in read_metrics(path.parent)
                    if "validation_accuracy" in row
                }
                for step, row in validated.items():
                    stage = "triplets" if "triplet/loss" in row else "pairs"
                    yield [directory.name, name, step, stage, f"{row['validation_accuracy']:.4f}", num_pairs]


def curves_of(lines: Iterable[Line]) -> dict[str, dict[str, list[Line]]]:
    """Group the lines of discriminator.csv, discriminator -> seed -> lines."""
    curves: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        curves.setdefault(line["discriminator"], {}).setdefault(line["seed"], []).append(line)
    return curves


def table(curves: dict[str, dict[str, list[Line]]]) -> Lines:
    """Return the last accuracy of each discriminator at each seed, and the step that first comes within 2 points."""
    lines = [["discriminator", "seed", "pairs", "steps", "accuracy", "within 2 points after"]]
    for name, by_seed in curves.items():
        for seed, rows in by_seed.items():
            last, num_pairs = float(rows[-1]["accuracy"]), int(rows[-1]["pairs"])
            reached = next(row["step"] for row in rows if float(row["accuracy"]) > last - 0.02)
            accuracy = number(last, wilson_interval(last, num_pairs))
            lines.append([name, seed, rows[-1]["pairs"], rows[-1]["step"], accuracy, reached])
    return lines


def figure_of(curves: dict[str, dict[str, list[Line]]]) -> Figure:
    """Draw a line per seed and discriminator, faint while it trains on triplets."""
    figure, axes = panel("Held-out pairs", "steps", "accuracy")
    for (name, by_seed), (color, _) in zip(curves.items(), cycle(LINES), strict=False):
        for label, rows in zip([name, *[None] * len(by_seed)], by_seed.values(), strict=False):
            steps, accuracies = ([float(row[column]) for row in rows] for column in ("step", "accuracy"))
            num_triplets = sum(row["stage"] == "triplets" for row in rows)
            axes.plot(steps[:num_triplets], accuracies[:num_triplets], color=color, alpha=0.3)
            axes.plot(steps[num_triplets:], accuracies[num_triplets:], color=color, alpha=0.8, label=label)
    axes.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    axes.legend(frameon=False)
    return figure


def main(args: Args) -> list[str]:
    """Print the table; write the CSV and the picture, and return the picture's name."""
    check_out(args.out)
    text = csv_text(curve_lines(args.runs))
    curves = curves_of(csv.DictReader(io.StringIO(text)))
    if not curves:
        raise InputError(f"--runs {args.runs}: no run has finished: run `python -m experiments discriminators`.")
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "discriminator.csv", text)
    print(markdown(table(curves)))
    write_pictures(args.out, {"discriminator.png": figure_of(curves)})
    return ["discriminator.png"]


if __name__ == "__main__":
    run_module(main, Args)
