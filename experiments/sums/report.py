"""Tables and pictures of `experiments sums`: training on addition with a verifiable reward.

    python -m experiments.sums.report --runs runs/sums_study --out runs/sums_study/report

--runs has a directory per seed, named by its number. Files may be missing:

    SEED/eval/eval.json            eval.py sums: first the initial policy, then the trained ones
    SEED/ALGORITHM[-VARIANT]/      the run of train_ppo.py or train_grpo.py

Out: sums.csv, a line per seed and policy; sums.md, the tables in README.md and those of differences; sums.html;
pass_at_k.png, training.png, leak.png.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from experiments.tables import by_policy_and_seed, csv_text, float_at, markdown, paired_difference, part
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object, write_text
from nanorlhf.metrics import t_interval
from nanorlhf.report.page import (
    STYLES,
    Lines,
    Section,
    label_axes,
    markup,
    number,
    panel,
    plus_minus,
    series,
    smooth,
    write_study,
)
from nanorlhf.report.verdict import Gain, comparison
from nanorlhf.training.run_directory import Rows, read_metrics

START = "sft"
SAMPLES_PER_QUERY = 16  # in the recipe
LEAK, LEAK_SCORE = "reward/layout", 1.5  # correct work gets 1; skipping lines raises it
COLUMNS = (  # of sums.csv: heading of the table, digits
    ("pass@1", "solved", 3),
    ("pass@8", "pass@8", 3),
    ("pass@64", "pass@64", 3),
    ("outcome", "right answer", 3),
    ("steps", "right steps", 3),
    ("eos_rate", "EOS rate", 3),
    ("length", "length", 1),
    ("tokens", "tokens sampled", 0),
    ("seconds", "seconds", 0),
)
BY_SEED, MEANS = ("pass@1", "pass@64", "outcome"), ("length", "seconds")  # in the tables; the others are in sums.csv
COMPARED = ("pass@1", "pass@64", "steps")  # in the tables of differences
TABLES = (  # title, what is in it
    ("The outcome as reward", lambda name: "-" not in name or name in ("dr-grpo", "online-dpo")),
    ("Other rewards", lambda name: name.endswith(("-process", "-learned", "-leak"))),
    ("Other samplers", lambda name: "-bfloat16" in name or "-top-p" in name),
)


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/sums_study")
    """directory with one directory per seed"""
    out: Path = Path("runs/sums_study/report")
    """directory for the tables, sums.html and the pictures"""


@dataclass(frozen=True)
class Policy:
    """The result of one algorithm at one seed."""

    seed: str
    name: str
    numbers: dict[str, float | None]  # COLUMNS
    curve: dict[int, float]  # k -> pass@k
    updates: Rows  # of its run; empty for the initial policy


# ----------------------------------------------------------------------------------------------------------- 1. reading
def read_policies(runs: Path) -> list[Policy]:
    """Read all seeds' policies in evaluation order. Raises InputError if there are none or one is malformed."""
    policies = []
    for path in sorted(runs.glob("*/eval/eval.json"), key=lambda path: path.parts[-3].zfill(20)):
        directory = path.parent.parent
        for name, row in part(read_object(path), str(path), "policies").items():
            policies.append(read_policy(directory, name, row, str(path)))
    if not policies:
        raise InputError(f"--runs {runs}: no SEED there has an evaluation: run `python -m experiments sums` first.")
    return policies


def read_policy(directory: Path, name: str, row: dict, where: str) -> Policy:
    at_k, rewards = (part(row, where, key) for key in ("pass_at_k", "rewards"))
    curve = {int(k): measured["mean"] for k, measured in at_k.items()}
    updates = [] if name == START else list(read_metrics(directory / name))
    summary = directory / name / "summary.json"
    numbers = {f"pass@{k}": solved for k, solved in curve.items()}
    numbers |= {
        "outcome": part(rewards, where, "outcome")["mean"],
        "steps": part(rewards, where, "process")["mean"],
        "eos_rate": float_at(row, where, "eos_rate"),
        "length": float_at(row, where, "response_length"),
        "tokens": sampled_tokens(updates) if updates else None,
        "seconds": float_at(read_object(summary), str(summary), "seconds") if updates and summary.exists() else None,
    }
    return Policy(directory.name, name, {key: numbers.get(key) for key, *_ in COLUMNS}, curve, updates)


def sampled_tokens(updates: Rows) -> float:
    """Return the tokens sampled in a run. DAPO's resampled responses are assumed to be as long as the kept ones."""
    total = episodes = 0.0
    for row in updates:
        if "response_length" in row and "episode" in row:
            num_again = SAMPLES_PER_QUERY * row.get("groups/refilled", 0.0)
            total += (row["episode"] - episodes + num_again) * row["response_length"]
            episodes = row["episode"]
    return total


# ------------------------------------------------------------------------------------------------------------ 2. tables
def policy_lines(policies: Iterable[Policy]) -> Iterator[list[str]]:
    """Yield a line per seed and policy; an empty cell is unknown."""
    yield ["seed", "policy", *(key for key, *_ in COLUMNS)]
    for policy in policies:
        cells = (policy.numbers[key] for key, *_ in COLUMNS)
        yield [policy.seed, policy.name, *("" if x is None else f"{x:.6g}" for x in cells)]


def make_tables(rows: Iterable[dict[str, str]]) -> dict[str, Lines]:
    """Return title -> table from the lines of sums.csv: BY_SEED, and the means of MEANS over seeds.

    The initial policy is in each table. Tables with no other policy are omitted.
    """
    by_name: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_name.setdefault(row["policy"], []).append(row)
    headings = {key: heading for key, heading, _ in COLUMNS}
    tables = {}
    for title, belongs in TABLES:
        names = [name for name in by_name if name == START or belongs(name)]
        if len(names) > 1:
            tables[title] = [["policy", *(headings[key] for key in (*BY_SEED, *MEANS))]]
            tables[title] += [[name, *row_cells(by_name[name])] for name in names]
    return tables


def row_cells(rows: list[dict[str, str]]) -> list[str]:
    digits = {key: number_of_digits for key, _, number_of_digits in COLUMNS}
    cells = []
    for key in BY_SEED:
        cells.append(" ".join(f"{float(row[key]):.2f}" if row[key] else "-" for row in rows))
    for key in MEANS:
        values = [float(row[key]) for row in rows if row[key]]
        cells.append(plus_minus(fmean(values) if values else None, None, digits[key]))
    return cells


def differences(rows: Iterable[dict[str, str]], base: str) -> Lines:
    """Return each policy minus `base`, paired by seed: the mean with its 95% interval by Student's t."""
    headings = {key: heading for key, heading, _ in COLUMNS}
    lines = [["policy", *(headings[key] for key in COMPARED)]]
    by_name = by_policy_and_seed(rows)
    theirs = by_name.get(base, {})
    for name, ours in by_name.items():
        if name not in (START, base) and ours.keys() & theirs.keys():
            lines.append([name, *(paired_difference(ours, theirs, key) for key in COMPARED)])
    return lines


def happened(rows: Sequence[dict[str, str]], leaks: Lines) -> Section:
    """Report which policies solve more or less than the initial one, and how many runs found the leak.

    Empty without a trained policy.
    """
    solved: dict[str, dict[str, float]] = {}
    for row in rows:
        solved.setdefault(row["policy"], {})[row["seed"]] = float(row["pass@1"])
    initial = solved.pop(START, {})
    gains: dict[str, Gain | None] = {}
    for name, by_seed in solved.items():
        if seeds := [seed for seed in by_seed if seed in initial]:
            values = [by_seed[seed] - initial[seed] for seed in seeds]
            interval = t_interval(values)
            gains[name] = interval and Gain("pass@1", interval, number(fmean(values), interval, 3, "+"))
    if not gains:
        return Section()
    kind, text = comparison("pass@1", START, gains)
    paid = [line[2] for line in leaks if line[0].endswith("-leak")]
    if paid:
        text += f" {len(paid) - paid.count('never')} of {len(paid)} runs with a reward for layout found the leak."
    return Section(about=markup.verdict([(kind, text)]))


def leak_table(policies: Iterable[Policy]) -> Lines:
    """Return when each run found the leak: the update from which the mean reward for layout stayed above LEAK_SCORE."""
    lines = [["policy", "seed", "found at update", "layout at the end", "right answers at the end"]]
    for policy in policies:
        steps, layout = series(policy.updates, LEAK)
        if len(steps):
            before = [step for step, value in zip(steps, layout, strict=True) if value <= LEAK_SCORE]
            after = [step for step in steps if not before or step > before[-1]]
            outcome = policy.updates[-1].get("reward/outcome")
            update = f"{after[0]:.0f}" if after else "never"
            lines.append([policy.name, policy.seed, update, f"{layout[-1]:.2f}", plus_minus(outcome, None)])
    return lines if len(lines) > 1 else []


# ----------------------------------------------------------------------------------------------------------- 3. figures
def group_by_name(policies: Iterable[Policy]) -> dict[str, list[Policy]]:
    """Group the policies by name, one per seed."""
    by_name: dict[str, list[Policy]] = {}
    for policy in policies:
        by_name.setdefault(policy.name, []).append(policy)
    return by_name


def pass_figure(by_name: dict[str, list[Policy]]) -> Figure:
    """Draw pass@k over k, mean over seeds, with a panel for each table."""
    figure = Figure(figsize=(12.6, 5.2), layout="constrained")
    for axes, (title, belongs) in zip(figure.subplots(1, len(TABLES), sharey=True), TABLES, strict=True):
        label_axes(axes, title, "k", "solved by one of k samples")
        axes.set_xscale("log", base=2)
        shown = [name for name in by_name if name == START or belongs(name)]
        for i, name in enumerate(shown):
            color, marker, line = STYLES[i % len(STYLES)]
            ks = list(by_name[name][0].curve)
            solved = [fmean(policy.curve[k] for policy in by_name[name] if k in policy.curve) for k in ks]
            axes.plot(ks, solved, line, color=color, marker=marker, ms=3, label=name)
            axes.set_xticks(ks, list(map(str, ks)))
        axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return figure


def training_figure(by_name: dict[str, list[Policy]], key: str, title: str, unit: str) -> Figure | None:
    """Draw a metric over responses sampled so far, mean over seeds. Returns None if no run logs it."""
    figure, axes = panel(title, "responses", unit)
    figure.set_size_inches(8.4, 4.8)
    for i, (name, column) in enumerate(by_name.items()):
        curves = [curve for policy in column if len((curve := series(policy.updates, key, "episode"))[0])]
        if curves:
            length = min(len(episodes) for episodes, _ in curves)  # a seed may still be training
            values = sum(smooth(values[:length], 5) for _, values in curves) / len(curves)
            color, marker, line = STYLES[i % len(STYLES)]
            axes.plot(curves[0][0][:length], values, line, color=color, marker=marker, ms=3, markevery=10, label=name)
    if not axes.lines:
        return None
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


# -------------------------------------------------------------------------------------------------------------- 4. page
def main(args: Args) -> list[str]:
    """Write the tables, sums.html and the pictures; return the pictures' names."""
    check_out(args.out)
    policies = read_policies(args.runs)
    by_name = group_by_name(policies)
    text = csv_text(policy_lines(policies))
    rows = list(csv.DictReader(io.StringIO(text)))
    tables = make_tables(rows)
    for base in (START, "ppo"):
        if len(table := differences(rows, base)) > 1:
            tables[f"Minus {base}, seed by seed"] = table
    leaks = leak_table(policies)
    if leaks:
        tables["When the leak was found"] = leaks
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "sums.csv", text)
    sections = [f"### {title}\n\n{markdown(table)}\n" for title, table in tables.items()]
    write_text(args.out / "sums.md", "\n".join(sections))
    checked = {name: column for name, column in by_name.items() if TABLES[0][1](name)}
    pictures = {
        "pass_at_k.png": pass_figure(by_name),
        "training.png": training_figure(checked, "reward/outcome", "The outcome as reward", "right answers"),
        "leak.png": training_figure(by_name, LEAK, "The leak", "reward for layout"),
    }
    drawn = {name: figure for name, figure in pictures.items() if figure}
    return write_study(
        args.out / "sums.html",
        args.runs,
        [
            markup.title("Sums: a verifiable reward"),
            happened(rows, leaks),
            *(Section(title, tables=[table]) for title, table in tables.items()),
            Section("Pictures", figures=list(drawn.values())),
        ],
        drawn,
    )


if __name__ == "__main__":
    run_module(main, Args)
