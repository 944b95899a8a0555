"""Tables and picture of `experiments programs`: what each reward teaches a policy that writes programs.

    python -m experiments.programs.report --runs runs/programs_study --out runs/programs_study/report

--runs has a directory per seed, named by its number:

    SEED/eval/eval.json        eval.py rlcf-tiny: first the initial policy, then the trained ones
    SEED/REWARD/               the run of a reward
    SEED/DISCRIMINATOR/        the run of nanorlhf.rlcf.train_discriminator

The seed of the search, whose policies are named REWARD-LR, only counts towards the learning rates. Out: programs.csv, a
line per seed and policy; programs.md, the tables in README.md; programs.html; programs.png.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from experiments.programs.runs import ARMS, DISCRIMINATORS
from experiments.tables import Line, by_policy_and_seed, csv_text, evaluated, markdown, paired_difference, part
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object, write_text
from nanorlhf.report.page import Lines, Section, label_axes, markup, number, write_study
from nanorlhf.training.run_directory import read_metrics, read_settings

START = "sft"
COLUMNS = ("lr", "pass@1", "pass@4", "ran@1", "kl")  # of programs.csv
COMPARED = (  # the control comes second
    ("compiler-pays-0", "compiler"),
    ("rlcf-untrained-frozen", "compiler-pays-0"),
    ("rlcf-brief", "compiler-pays-0"),
    ("rlcf-trained", "compiler-pays-0"),
    ("rlcf-trained-frozen", "compiler-pays-0"),
    ("tests", "imitation"),
    ("tests", "checks"),
    ("tests", "compiler-pays-0"),
    ("tests-and-checks", "tests"),
)


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/programs_study")
    """directory with one directory per seed"""
    out: Path = Path("runs/programs_study/report")
    """directory for the tables, programs.html and the picture"""


# ----------------------------------------------------------------------------------------------------------- 1. reading
def policy_lines(directories: Iterable[Path]) -> Iterator[list[str]]:
    """Yield a line per seed and policy; an empty cell has no value, such as the KL of imitation."""
    yield ["seed", "policy", *COLUMNS]
    for directory in directories:
        path = directory / "eval/eval.json"
        policies = evaluated(path)
        for name in (START, *ARMS):
            if name in policies:
                numbers = {"lr": None, "kl": None} | measured(policies, name, str(path))
                if name != START:
                    run = directory / name
                    numbers["lr"] = read_settings(run)["lr"]
                    numbers["kl"] = ([None] + [row.get("objective/kl") for row in read_metrics(run)])[-1]
                values = [numbers[column] for column in COLUMNS]
                yield [directory.name, name, *("" if value is None else f"{value:.6g}" for value in values)]


def measured(policies: dict[str, Any], name: str, where: str) -> dict[str, float]:
    """Return pass@1, pass@4 and ran@1, the share of programs that run to the end."""
    at_1, at_4 = part(policies, where, name, "at_k")
    return {"pass@1": at_1["pass"], "pass@4": at_4["pass"], "ran@1": at_1["exec"]}


def discriminator_table(directories: Sequence[Path]) -> Lines:
    """Return the steps of each discriminator and its accuracy on held-out pairs at each seed."""
    lines = [["discriminator", "steps", "held-out accuracy", "pairs"]]
    for name in DISCRIMINATORS:
        paths = [directory / name / "summary.json" for directory in directories]
        summaries = [read_object(path) for path in paths if path.exists()]
        if summaries:
            accuracies = [number(summary.get("validation_accuracy")) for summary in summaries]
            pairs = [f"{summary.get('num_validation_pairs', 0):.0f}" for summary in summaries]
            steps = [f"{summary['steps']:.0f}" for summary in summaries]
            lines.append([name, " ".join(steps), " ".join(accuracies), " ".join(pairs)])
    return lines if len(lines) > 1 else []


# ------------------------------------------------------------------------------------------------------------ 2. tables
ByPolicy = dict[str, dict[str, Line]]  # policy -> seed -> line of programs.csv


def policy_table(by_policy: ByPolicy) -> Lines:
    """Return pass@1 and pass@4 at each seed, and the means of the others."""
    lines = [["policy", "pass@1", "mean", "pass@4", "mean", "ran@1", "KL, nats", "learning rate"]]
    for name, by_seed in by_policy.items():
        cells = [name]
        for column in ("pass@1", "pass@4"):
            values = [float(row[column]) for row in by_seed.values()]
            cells += [" ".join(f"{value:.2f}" for value in values), f"{fmean(values):.3f}"]
        cells.append(f"{fmean(float(row['ran@1']) for row in by_seed.values()):.3f}")
        kls = [float(row["kl"]) for row in by_seed.values() if row["kl"]]
        rates = dict.fromkeys(row["lr"] for row in by_seed.values() if row["lr"])
        lines.append([*cells, f"{fmean(kls):.1f}" if kls else "-", " ".join(rates) or "-"])
    return lines


def differences(by_policy: ByPolicy) -> Lines:
    """Return the differences of COMPARED, paired by seed: the mean with its 95% interval by Student's t."""
    lines = [["policy", "minus", "pass@1", "pass@4"]]
    for ours, theirs in COMPARED:
        ours_by_seed, theirs_by_seed = by_policy.get(ours, {}), by_policy.get(theirs, {})
        if ours_by_seed.keys() & theirs_by_seed.keys():
            cells = (paired_difference(ours_by_seed, theirs_by_seed, column) for column in ("pass@1", "pass@4"))
            lines.append([ours, theirs, *cells])
    return lines if len(lines) > 1 else []


def figure_of(by_policy: ByPolicy) -> Figure:
    """Draw pass@1 of each policy: a dot per seed, and a line at the mean."""
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    label_axes(axes, "Programs that pass their tests", "pass@1", "")
    names = list(by_policy)[::-1]
    for height, name in enumerate(names):
        values = [float(row["pass@1"]) for row in by_policy[name].values()]
        axes.plot(values, [height] * len(values), "o", color="tab:blue", ms=5, alpha=0.7)
        axes.plot([fmean(values)] * 2, [height - 0.3, height + 0.3], color="black")
    axes.set_yticks(range(len(names)), names)
    return figure


# -------------------------------------------------------------------------------------------------------------- 3. page
def main(args: Args) -> list[str]:
    """Write the tables, programs.html and the picture; return the picture's name."""
    check_out(args.out)
    paths = sorted(args.runs.glob("*/eval/eval.json"), key=lambda path: path.parts[-3].zfill(20))
    directories = [path.parent.parent for path in paths if not evaluated(path).keys().isdisjoint(ARMS)]
    if not directories:
        raise InputError(f"--runs {args.runs}: no SEED there has an evaluation: run `python -m experiments programs`.")
    text = csv_text(policy_lines(directories))
    by_policy = by_policy_and_seed(csv.DictReader(io.StringIO(text)))
    tables = {
        "Policies": policy_table(by_policy),
        "Differences": differences(by_policy),
        "Discriminators": discriminator_table(directories),
    }
    tables = {title: table for title, table in tables.items() if table}
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "programs.csv", text)
    parts = [f"### {title}\n\n{markdown(table)}\n" for title, table in tables.items()]
    write_text(args.out / "programs.md", "\n".join(parts))
    picture = figure_of(by_policy)
    sections = [Section(title, tables=[table]) for title, table in tables.items()]
    page = [markup.title("Programs: checks, tests, discriminators"), *sections, Section("Picture", figures=[picture])]
    return write_study(args.out / "programs.html", args.runs, page, {"programs.png": picture})


if __name__ == "__main__":
    run_module(main, Args)
