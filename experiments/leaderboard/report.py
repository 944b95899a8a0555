"""The leaderboard: ranks, tables and picture from its CSV and the worlds study's.

    python -m experiments.leaderboard.report

Rank 1 + the number of entries that are better. Better on average: the 95% interval of the mean difference over common
worlds is above 0 (Student's t, paired). Better in the worst world: the 95% intervals of the two lowest win rates don't
overlap (Wilson, over the queries of a world). Writes the tables between the marks of --page and leaderboard.png.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import scipy  # .stats loads with its first use
from matplotlib.figure import Figure

from experiments.tables import csv_text, markdown, mean_difference, read_csv, with_tables
from experiments.worlds import report as study
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_text, write_text
from nanorlhf.metrics import t_interval, wilson_interval
from nanorlhf.report.page import BLUE, ORANGE, Lines, label_axes, number, write_pictures

PUBLIC = "public"
KEY = ("set", "number", "entry", "budget")  # unique to each row
MEASURED = ("gold_win_rate", "gold_score", "rm_score", "kl", "entropy", "distinct", "num_scored", "seconds")
COLUMNS = (*KEY, "digest", "refused", *MEASURED, "processor", "revision")
NAMES = {"reinforce++": "reinforce_plus_plus"}  # algorithms of the worlds study whose entry has another name
FIRST = {"sft", *(NAMES.get(name, name) for name in study.SPACE)}  # entries of the first rows, besides best-of-n
BASES = ("dpo", "rloo")  # that later entries are compared with: the best with few and with more responses
WORLDS = tuple(range(1, 21))  # of the public set
NUM_QUERIES = 256  # of an evaluation, for the interval of the worst world
MAIN_BUDGET = 1024
VALUE_MODEL_BASES = ("ppo", "reinforce_plus_plus", "best-of-16")  # PPO, and entries that it is below in the secret set
MARKS = ("<!-- the tables of python -m experiments.leaderboard.report -->", "<!-- the end of the tables -->")
Row = dict[str, str]  # COLUMNS; "" for no value
Rates = dict[str, dict[str, float]]  # entry -> world -> gold win rate


@dataclass(frozen=True, kw_only=True)
class Args:
    csv: Path = Path("experiments/leaderboard/leaderboard.csv")
    """table of all finished runs"""
    worlds: Path = study.Args.csv
    """the worlds study's table, for the first rows of the public set"""
    value_model: Path = Path("experiments/leaderboard/ppo_value_model.csv")
    """table of PPO's runs with another value model, which aren't ranked"""
    page: Path = Path("experiments/leaderboard/README.md")
    """page whose tables are replaced, between its marks"""
    out: Path = Path("experiments/leaderboard")
    """directory of the picture"""


# ----------------------------------------------------------------------------------------------------------- 1. the CSV
def read_results(path: Path) -> list[Row]:
    """Read the rows of the leaderboard's CSV; none if the file doesn't exist.

    Raises InputError for wrong columns, a wrong number of cells, or a cell that must be a number and isn't.
    """
    rows = []
    for where, row in read_csv(path, COLUMNS):
        for name in ("number", "budget", *MEASURED):
            if row[name] and not study.is_number(row[name]) or name in KEY and not row[name].isdecimal():
                raise InputError(f"{where}: {name} must be a number, got {row[name]!r:.80}.")
        if not row["refused"] and not row["gold_win_rate"]:
            raise InputError(f"{where}: gold_win_rate is empty, but the entry was not refused.")
        rows.append(row)
    return rows


def row_key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def results_text(rows: Iterable[Row]) -> str:
    """Format rows as CSV, sorted; of two rows for a run, the later one is kept."""
    unique = {row_key(row): row for row in rows}

    def order(row: Row) -> tuple:
        return row["set"] != PUBLIC, row["set"], int(row["number"]), row["entry"], int(row["budget"])

    return csv_text([COLUMNS, *([row[name] for name in COLUMNS] for row in sorted(unique.values(), key=order))])


def study_rows(rows: Iterable[study.Row]) -> list[Row]:
    """Return the worlds study's final runs in worlds 1 to 20 as rows of the public set, without digests."""
    return [
        dict.fromkeys(COLUMNS, "")
        | {name: row[name] for name in (*MEASURED, "processor", "revision") if name in row}
        | {"set": PUBLIC, "number": row["world"], "entry": NAMES.get(row["algorithm"], row["algorithm"])}
        | {"budget": row["budget"], "num_scored": row["budget"]}
        for row in rows
        if row["phase"] == "final" and not row["variant"] and int(row["world"]) in WORLDS
    ]


def set_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of the sets, the public one first."""
    return sorted({row["set"] for row in rows}, key=lambda name: (name != PUBLIC, name))


def budgets(rows: Iterable[Row], name: str) -> list[int]:
    """Return the budgets of a set's entries that score responses."""
    return sorted({int(row["budget"]) for row in rows if row["set"] == name} - {0})


# --------------------------------------------------------------------------------------------------------- 2. the ranks
def rates(rows: Iterable[Row], name: str, budget: int) -> Rates:
    """Return the gold win rates of a set at a budget. An entry that was refused in any of its worlds is left out."""
    chosen = [row for row in rows if row["set"] == name and row["budget"] in ("0", str(budget))]
    refused = {row["entry"] for row in chosen if row["refused"]}
    by_entry: Rates = {}
    for row in chosen:
        if row["entry"] not in refused and (name != PUBLIC or int(row["number"]) in WORLDS):
            by_entry.setdefault(row["entry"], {})[row["number"]] = float(row["gold_win_rate"])
    return by_entry


def gaps(ours: dict[str, float], theirs: dict[str, float]) -> list[float]:
    """Return ours minus theirs in the worlds that both have."""
    return [rate - theirs[world] for world, rate in ours.items() if world in theirs]


def is_better(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    """Return True if the interval of the mean difference is above 0; False with fewer than two common worlds."""
    interval = t_interval(gaps(ours, theirs))
    return interval is not None and interval[0] > 0


def worst(by_world: dict[str, float]) -> tuple[float, tuple[float, float]]:
    """Return the lowest win rate and its interval over the queries of that world.

    The interval doesn't cover the choice of the world: the lowest of many rates is low partly by chance.
    """
    lowest = min(by_world.values())
    return lowest, wilson_interval(lowest, NUM_QUERIES)


def mean_interval(by_world: dict[str, float]) -> tuple[float, float] | None:
    """Return Student's t interval of the mean win rate, cut off at 0 and 1; None for a single world."""
    interval = t_interval([*by_world.values()])
    return interval and (max(0.0, interval[0]), min(1.0, interval[1]))


def complete(by_entry: Rates) -> Rates:
    """Return the entries that ran in every world of the set. Only these are ranked: worlds differ in difficulty."""
    worlds = {world for by_world in by_entry.values() for world in by_world}
    return {name: by_world for name, by_world in by_entry.items() if by_world.keys() == worlds}


def ranks(by_entry: Rates) -> dict[str, tuple[int, int]]:
    """Return each entry's rank by mean and by worst world; entries whose intervals overlap share one."""
    return {
        name: (
            1 + sum(is_better(other, ours) for other in by_entry.values()),
            1 + sum(worst(other)[1][0] > worst(ours)[1][1] for other in by_entry.values()),
        )
        for name, ours in by_entry.items()
    }


# -------------------------------------------------------------------------------------------------------- 3. the tables
def by_rank(by_entry: Rates) -> list[str]:
    """Sort entries by rank, then by mean; the ones without a rank come last."""
    ranked = ranks(complete(by_entry))
    last = len(by_entry) + 1, 0
    return sorted(by_entry, key=lambda name: (ranked.get(name, last)[0], -fmean(by_entry[name].values())))


def leaderboard_table(by_entry: Rates) -> Lines:
    ranked = ranks(complete(by_entry))
    lines = [["rank", "entry", "mean gold win rate", "worlds", "rank by worst world", "worst world"]]
    for name in by_rank(by_entry):
        by_world = by_entry[name]
        by_mean, by_worst = ranked.get(name, ("-", "-"))
        cells = (number(fmean(by_world.values()), mean_interval(by_world), 3), str(len(by_world)))
        lines.append([str(by_mean), f"`{name}`", *cells, str(by_worst), number(*worst(by_world), 3)])
    return lines


def set_sections(rows: list[Row]) -> list[str]:
    """Return a heading and a table for each set and budget with at least two worlds of two entries."""
    sections = []
    for name in set_names(rows):
        for budget in budgets(rows, name):
            by_entry = rates(rows, name, budget)
            used = {world for by_world in by_entry.values() for world in by_world}
            if len(by_entry) > 1 and len(used) > 1:
                title = "Public set" if name == PUBLIC else f"Secret set `{name.removeprefix('secret-')}`"
                sections += [f"### {title}, {budget:,} responses", markdown(leaderboard_table(by_entry))]
    return sections


@dataclass(frozen=True)
class Agreement:
    """The order of the same entries in two sets."""

    entries: int
    tau: float
    """Kendall's rank correlation of the means"""
    p: float
    pairs: int
    """pairs of entries with a better one in the first set"""
    same: int
    """of these, pairs with the same better entry in the second set"""
    reversed: int
    """of these, pairs with the other entry better in the second set"""


def agreement(first: Rates, second: Rates) -> Agreement | None:
    """Compare the order of two sets' common entries; None for fewer than three."""
    names = [name for name in first if name in second]
    if len(names) < 3:
        return None
    means = [[fmean(by_entry[name].values()) for name in names] for by_entry in (first, second)]
    result = scipy.stats.kendalltau(*means)
    ordered = [
        (a, b) if is_better(first[a], first[b]) else (b, a)
        for a, b in combinations(names, 2)
        if is_better(first[a], first[b]) or is_better(first[b], first[a])
    ]
    same = sum(is_better(second[a], second[b]) for a, b in ordered)
    swapped = sum(is_better(second[b], second[a]) for a, b in ordered)
    return Agreement(len(names), float(result.statistic), float(result.pvalue), len(ordered), same, swapped)


def agreement_section(rows: list[Row]) -> list[str]:
    """Return a heading, and a table that compares the ranked entries of the public set with each secret set's."""
    lines = [
        [
            "secret set",
            "responses",
            "entries",
            "worlds",
            "Kendall's tau",
            "p",
            "pairs that differ in public",
            "same order",
            "reversed",
        ]
    ]
    for name in sorted({row["set"] for row in rows} - {PUBLIC}):
        for budget in budgets(rows, name):
            public, secret = (complete(rates(rows, which, budget)) for which in (PUBLIC, name))
            if result := agreement(public, secret):
                worlds = max(map(len, secret.values()))
                numbers = (f"{result.tau:.2f}", f"{result.p:.3f}", result.pairs, result.same, result.reversed)
                cells = map(str, (f"{budget:,}", result.entries, worlds, *numbers))
                lines.append([f"`{name.removeprefix('secret-')}`", *cells])
    return ["### Public and secret set", markdown(lines)] if len(lines) > 1 else []


def later_section(rows: list[Row]) -> list[str]:
    """Return a heading, and a table of the entries after the first rows, minus BASES in their common worlds."""
    lines = [["entry", "set", "responses", "worlds", *(f"minus `{base}`" for base in BASES)]]
    for name in set_names(rows):
        for budget in study.BUDGETS:
            by_entry = rates(rows, name, budget)
            for entry in sorted(by_entry.keys() - FIRST):
                if entry.startswith("best-of-"):
                    continue
                differences = (gaps(by_entry[entry], by_entry.get(base, {})) for base in BASES)
                cells = (name.removeprefix("secret-"), f"{budget:,}", ", ".join(sorted(by_entry[entry], key=int)))
                lines.append([f"`{entry}`", *cells, *map(mean_difference, differences)])
    return ["### Later entries against the first", markdown(lines)] if len(lines) > 1 else []


def value_model_section(rows: list[Row], varied: list[Row]) -> list[str]:
    """Return a heading, and a table of PPO with its own and another value model, minus VALUE_MODEL_BASES.

    Differences are over common worlds.
    """
    lines = [["entry", "set", "mean gold win rate", "worlds", *(f"minus `{base}`" for base in VALUE_MODEL_BASES)]]
    for name in set_names(varied):
        by_entry = rates([*rows, *varied], name, MAIN_BUDGET)
        for entry in ("ppo", *sorted({row["entry"] for row in varied} & by_entry.keys())):
            ours = by_entry.get(entry, {})
            mean = number(fmean(ours.values()) if ours else None, mean_interval(ours), 3)
            differences = (gaps(ours, by_entry.get(base, {})) if base != entry else [] for base in VALUE_MODEL_BASES)
            cells = (name.removeprefix("secret-"), mean, str(len(ours)))
            lines.append([f"`{entry}`", *cells, *map(mean_difference, differences)])
    return [f"### PPO's value model, {MAIN_BUDGET:,} responses", markdown(lines)] if len(lines) > 1 else []


def reproduction_section(rows: list[Row], studied: list[Row]) -> list[str]:
    """Return a heading, and a table of entries minus the worlds study's rows of the same algorithm and world."""
    known = {row_key(row): float(row["gold_win_rate"]) for row in studied}
    differences: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in rows:
        key = row_key(row)
        if key in known and not row["refused"]:
            difference = float(row["gold_win_rate"]) - known[key]
            differences.setdefault((row["entry"], row["budget"]), []).append((row["number"], difference))
    lines = [["entry", "responses", "worlds", "entry minus study"]]
    for (entry, budget), values in sorted(differences.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        numbers = ", ".join(world for world, _ in values)
        lines.append([f"`{entry}`", budget if budget != "0" else "-", numbers, mean_difference([x for _, x in values])])
    return ["### Entries against the study's own runs", markdown(lines)] if len(lines) > 1 else []


def refused_section(rows: list[Row]) -> list[str]:
    lines = [["entry", "set", "world", "responses", "reason"]]
    lines += [
        [f"`{row['entry']}`", row["set"], row["number"], row["budget"], row["refused"].replace("|", "\\|")]
        for row in rows
        if row["refused"]
    ]
    return ["### Refused", markdown(lines)] if len(lines) > 1 else []


def joined(studied: list[Row], rows: list[Row]) -> list[Row]:
    """Return all rows; the worlds study's rows replace the leaderboard's for the same run."""
    known = set(map(row_key, studied))
    return [*studied, *(row for row in rows if row_key(row) not in known)]


def picture(rows: list[Row], budget: int = MAIN_BUDGET) -> Figure | None:
    """Draw a panel per set: a dot per world, and the mean with its interval. None without rows."""
    by_set = {name: by_entry for name in set_names(rows) if (by_entry := rates(rows, name, budget))}
    if not by_set:
        return None
    first = next(iter(by_set.values()))
    everyone = {name: by_world for by_entry in reversed(by_set.values()) for name, by_world in by_entry.items()}
    names = [*by_rank(first), *(name for name in everyone if name not in first)][::-1]
    figure = Figure(figsize=(4.8 * len(by_set), 0.9 + 0.36 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(by_set), sharey=True, squeeze=False)[0]
    for axes, (name, by_entry) in zip(panels, by_set.items(), strict=True):
        most = max(map(len, by_entry.values()))
        title = "public" if name == PUBLIC else "secret"
        label_axes(axes, f"{title} set, {most} worlds, {budget:,} responses", "gold win rate", "")
        for y, entry in enumerate(names):
            by_world = by_entry.get(entry, {})
            offsets = np.linspace(-0.2, 0.2, len(by_world))
            axes.plot([*by_world.values()], y + offsets, ".", color=BLUE, alpha=0.45, markersize=4)
            if interval := mean_interval(by_world):
                axes.plot(interval, (y, y), "-", color=ORANGE, linewidth=2)
                axes.plot(fmean(by_world.values()), y, "o", color=ORANGE, markersize=5)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0, 1)
    return figure


def main(args: Args) -> None:
    """Write the page's tables and the picture."""
    check_out(args.out)
    results = read_results(args.csv)
    studied = study_rows(study.read_rows(args.worlds))
    rows = joined(studied, results)
    sections = set_sections(rows) + agreement_section(rows) + later_section(rows)
    sections += value_model_section(rows, read_results(args.value_model))
    sections += reproduction_section(results, studied) + refused_section(results)
    if figure := picture(rows):
        write_pictures(args.out, {"leaderboard.png": figure})
        sections.append("![Gold win rate of each entry, a dot per world, the mean and its interval](leaderboard.png)")
    text = "\n\n".join(sections) or "No rows yet."
    write_text(args.page, with_tables(read_text(args.page), args.page, text, MARKS))
    print(f"written: {args.page} and the picture in {args.out}, from {len(rows)} rows")


if __name__ == "__main__":
    run_module(main, Args)
