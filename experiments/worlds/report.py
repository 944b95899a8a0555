"""Tables and pictures of `experiments worlds`, made from its CSV: algorithms, budgets, variants and reruns.

    python -m experiments.worlds.report

The CSV has a row per finished run. Writes the tables between the marks of --page; worlds_means.csv, every algorithm at
every budget; worlds_pairs.csv, every pair of algorithms with its statistics; worlds_variants.csv, the variants of PPO
and DPO; worlds_fresh.csv, the predictions for later worlds; and the plots worlds_spread.png and worlds_variance.png.
"""

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import scipy  # .stats loads with its first use
from matplotlib.figure import Figure

from experiments.compare.report import EVALUATED, cell, costs, mean_or_none, with_costs
from experiments.tables import csv_text, evaluated, float_at, markdown, mean_difference, read_csv, with_tables
from experiments.worlds.paired import Paired, detectable_effect, holm, paired, worlds_needed
from experiments.worlds.spread import components, quantile_interval
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_text, write_text
from nanorlhf.metrics import t_interval
from nanorlhf.report.compare_runs import read_run
from nanorlhf.report.page import BLUE, LINES, Lines, label_axes, number, write_pictures
from nanorlhf.training.trace import read_traces

TUNING_WORLDS = (101, 102, 103, 104, 105)
WORLDS = tuple(range(1, 41))
PREDICTING = WORLDS[:20]  # the worlds from whose results the later ones are predicted
BUDGETS = (256, 1024, 4096)
START = "sft"
ORDER = (START, "ppo", "rloo", "grpo", "reinforce++", "dpo", "rejection")  # then best-of-n
AGAINST = "ppo"
RELEVANT = 0.05  # a difference in gold win rate that would matter

# the search space: two numbers are the ends of a log-uniform range, words are choices
LR = (1e-4, 1e-2)
KL_COEF = (5e-3, 0.5)
BETA = (2e-2, 2.0)  # with an upper end of 0.5, the best, 0.329, was in the outer tenth
EPOCHS = ("1", "2", "4")
SPACE: dict[str, dict[str, tuple[float, float] | tuple[str, ...]]] = {
    "ppo": {
        "lr": LR,
        "kl_coef": KL_COEF,
        "epochs": EPOCHS,
        "lam": ("0.8", "0.9", "0.95", "1"),
        "value_model": ("reward model", "policy"),
    },
    "rloo": {"lr": LR, "kl_coef": KL_COEF, "epochs": EPOCHS},
    "grpo": {"lr": LR, "kl_coef": KL_COEF, "epochs": EPOCHS},
    "reinforce++": {"lr": LR, "kl_coef": KL_COEF, "epochs": EPOCHS},
    "dpo": {"lr": LR, "beta": BETA, "epochs": EPOCHS},
    "rejection": {"lr": LR, "epochs": ("2", "4", "8", "16")},
}
SETTINGS = ("lr", "kl_coef", "beta", "epochs", "lam", "value_model", "value_clip", "batch_size")
PHASES = ("tune", "final")
KEY = ("phase", "world", "algorithm", "variant", "budget", *SETTINGS)  # unique to each row
VARIANCE = ("explained_variance_end", "explained_variance_run")  # PPO's value model: last update, all updates
MEASURED = (*(key for key, *_ in EVALUATED), "tokens", "seconds", *VARIANCE)
COLUMNS = (*KEY, *MEASURED, "processor", "revision")
Row = dict[str, str]  # COLUMNS; "" for no value
SUMMARY = ("<!-- the table of python -m experiments.worlds.report -->", "<!-- the end of the table -->")
MARKS = ("<!-- the tables of python -m experiments.worlds.report -->", "<!-- the end of the tables -->")


@dataclass(frozen=True, kw_only=True)
class Args:
    csv: Path = Path("experiments/worlds/worlds.csv")
    """table of all finished runs"""
    reruns: Path = Path("experiments/worlds/worlds_reruns.csv")
    """table with rows of the same runs on another processor"""
    page: Path = Path("experiments/worlds/README.md")
    """page whose tables are replaced, between two marks each"""
    out: Path = Path("experiments/worlds")
    """directory of the other CSVs and the plots"""


# ----------------------------------------------------------------------------------------------------------- 1. the CSV
def read_rows(path: Path) -> list[Row]:
    """Read the rows of the study's CSV; none if the file doesn't exist.

    Raises InputError for wrong columns, a wrong number of cells, or a cell that must be a number and isn't.
    """
    rows = []
    for where, row in read_csv(path, COLUMNS):
        if row["phase"] not in PHASES:
            raise InputError(f"{where}: phase must be one of {', '.join(PHASES)}, got {row['phase']!r:.80}.")
        for name in ("world", "budget"):
            if not row[name].isdecimal():
                raise InputError(f"{where}: {name} must be a whole number, got {row[name]!r:.80}.")
        for name in MEASURED:
            if row[name] and not is_number(row[name]):
                raise InputError(f"{where}: {name} must be a number or empty, got {row[name]!r:.80}.")
        if not row["gold_score"]:
            raise InputError(f"{where}: gold_score is empty.")
        rows.append(row)
    return rows


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def row_key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def joined(rows: Iterable[Row]) -> list[Row]:
    """Sort the rows and keep one per run. The result doesn't depend on the order of `rows`.

    Of two rows for a run, the one whose processor and revision sort first is kept, regardless of its measurements.
    """

    def sort_key(row: Row) -> tuple:
        words = (row[name] for name in (*KEY, "processor", "revision", *MEASURED))
        return PHASES.index(row["phase"]), int(row["world"]), row["algorithm"], int(row["budget"]), *words

    unique: dict[tuple[str, ...], Row] = {}
    for row in sorted(rows, key=sort_key):
        unique.setdefault(row_key(row), row)
    return list(unique.values())


def rows_text(rows: Iterable[Row]) -> str:
    return csv_text([COLUMNS, *([row[name] for name in COLUMNS] for row in rows)])


def measured(out: Path, policy: str) -> Row:
    """Read MEASURED of a policy from the evaluation in OUT/eval and, if there is one, its run in OUT."""
    path = out / "eval" / "eval.json"
    policies = evaluated(path)
    if policy not in policies:
        raise InputError(f"{path} lacks the policy {policy}: delete the file to evaluate again.")
    numbers = {key: float_at(policies[policy], str(path), key) for key, *_ in EVALUATED}
    if (out / "metrics.jsonl").exists():
        run = read_run(policy, out, {})
        numbers |= costs(replace(run, rows=with_costs(run.rows)))
        if (out / "trace").exists():
            numbers |= dict(zip(VARIANCE, explained_variance(out), strict=True))
    return {name: "" if (x := numbers.get(name)) is None else f"{x:.6g}" for name in MEASURED}


def explained_variance(run: Path) -> tuple[float | None, float | None]:
    """Return 1 - Var(returns - values) / Var(returns) over the states of the last traced update, and of all of them.

    1 is perfect; 0 is as good as predicting each update's mean. Both variances are summed over updates before
    dividing, so that an update with nearly constant returns doesn't dominate. None if all returns are equal.
    """
    errors, variances = [], []
    for tensors, _ in read_traces(run):
        returns, values = (tensors[name][tensors["states"]].double() for name in ("returns", "values"))
        errors.append((returns - values).var().item())
        variances.append(returns.var().item())
    ends = ((errors[-1], variances[-1]), (sum(errors), sum(variances)))
    at_end, over_run = (1 - error / variance if variance > 0 else None for error, variance in ends)
    return at_end, over_run


# ------------------------------------------------------------------------------------------------------- 2. the tuning
def row_settings(row: Row) -> Row:
    return {name: row[name] for name in SETTINGS}


def tuned(rows: Iterable[Row], algorithm: str) -> list[tuple[Row, list[float]]]:
    """Return the tried settings of an algorithm with their gold scores by world, best first.

    Sorted by number of worlds, then mean score. The first is the algorithm's choice.
    """
    scores: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["phase"] == "tune" and row["algorithm"] == algorithm:
            scores.setdefault(tuple(row_settings(row).values()), []).append(float(row["gold_score"]))
    ranked = sorted(scores.items(), key=lambda item: (-len(item[1]), -fmean(item[1]), item[0]))
    return [(dict(zip(SETTINGS, words, strict=True)), golds) for words, golds in ranked]


def at_edge(algorithm: str, settings: Row) -> list[str]:
    """Return the settings in the outer tenth of their range, on a log scale."""
    edge_settings = []
    for name, values in SPACE[algorithm].items():
        low, high = values[0], values[-1]
        if isinstance(low, float) and isinstance(high, float):
            share = math.log(float(settings[name]) / low) / math.log(high / low)
            if not 0.1 <= share <= 0.9:
                edge_settings.append(name)
    return edge_settings


def tuning_table(rows: list[Row]) -> Lines:
    lines = [["algorithm", "chosen settings", "gold score"]]
    for algorithm in SPACE:
        if tried := tuned(rows, algorithm):
            settings, golds = tried[0]
            chosen = ", ".join(f"{name} {value}" for name, value in settings.items() if value)
            lines.append([f"`{algorithm}`", chosen, f"{fmean(golds):.2f}"])
    return lines


def tuning_section(rows: list[Row]) -> list[str]:
    """Return a heading, the chosen settings, and a sentence on choices at the edge of their range."""
    table = tuning_table(rows)
    if len(table) == 1:
        return []
    chosen = {algorithm: tried[0][0] for algorithm in SPACE if (tried := tuned(rows, algorithm))}
    edges = {algorithm: at_edge(algorithm, settings) for algorithm, settings in chosen.items()}
    named = "; ".join(f"`{algorithm}`: {', '.join(names)}" for algorithm, names in edges.items() if names)
    text = f"Choices in the outer tenth of their range: {named or 'none'}."
    return ["### Chosen settings", markdown(table), text]


# -------------------------------------------------------------------------------------------------------- 3. the tables
ByWorld = dict[str, dict[str, Row]]  # name -> world -> row
QUANTILES = (10, 25, 50, 75)  # percent, of gold win rates over worlds
SPREAD = tuple(f"quantile_{percent}{end}" for percent in QUANTILES for end in ("", "_low", "_high"))
TUNED = "as tuned"


def finals(
    rows: Iterable[Row], budget: int, variants_of: str | None = None, worlds: Container[int] | None = None
) -> ByWorld:
    """Return the final runs at a budget, including algorithms that don't sample, which are the same at every budget.

    variants_of: return an algorithm's variants by name instead, with the algorithm as tuned in their worlds. worlds:
    only these. Raises InputError if an algorithm has two runs in a world with different settings.
    """
    by_name: ByWorld = {}
    for row in rows:
        if row["phase"] != "final":
            continue
        if int(row["budget"]) not in ((budget,) if variants_of else (0, budget)):
            continue
        if worlds is not None and int(row["world"]) not in worlds:
            continue
        if row["algorithm"] != variants_of if variants_of else row["variant"]:
            continue
        name = (row["variant"] or TUNED) if variants_of else row["algorithm"]
        by_world = by_name.setdefault(name, {})
        if row["world"] in by_world:
            raise InputError(
                f"world {row['world']} has two final rows for {name} at {budget} responses, with different settings: "
                "delete the one that wasn't chosen from the CSV."
            )
        by_world[row["world"]] = row
    if variants_of and TUNED in by_name:
        varied = {world for name, by_world in by_name.items() if name != TUNED for world in by_world}
        by_name[TUNED] = {world: row for world, row in by_name[TUNED].items() if world in varied}
    order = (TUNED,) if variants_of else ORDER
    rank = {name: i for i, name in enumerate(order)}
    names = sorted(by_name, key=lambda name: (rank.get(name, len(rank)), len(name), name))  # best-of-4 before -16
    return {name: by_name[name] for name in names if by_name[name]}


def numbers(by_world: dict[str, Row], key: str) -> dict[str, float]:
    """Return the known numbers by world, in the order of the worlds."""
    return {world: float(by_world[world][key]) for world in sorted(by_world, key=int) if by_world[world][key]}


def column(by_world: dict[str, Row], key: str) -> list[float]:
    return [*numbers(by_world, key).values()]


def differences(ours: dict[str, Row], theirs: dict[str, Row], key: str) -> dict[str, float]:
    """Return ours minus theirs in the worlds that have both."""
    their_numbers = numbers(theirs, key)
    return {
        world: value - their_numbers[world] for world, value in numbers(ours, key).items() if world in their_numbers
    }


def spread(rates: list[float]) -> list[float]:
    """Return SPREAD."""
    return [
        end
        for percent in QUANTILES
        for end in (float(np.quantile(rates, percent / 100)), *quantile_interval(rates, percent / 100))
    ]


def half_width(values: list[float]) -> float | None:
    """Return half of the mean's 95% interval."""
    interval = t_interval(values)
    return (interval[1] - interval[0]) / 2 if interval else None


def csv_cells(numbers: Iterable[float | None]) -> list[str]:
    return ["" if x is None else f"{x:.6g}" for x in numbers]


def mean_lines(rows: list[Row]) -> Lines:
    """Return the lines of worlds_means.csv: the spread of gold win rates, and means with half their 95% intervals."""
    keys = (*(key for key, *_ in EVALUATED), "tokens", "seconds")
    lines = [["budget", "algorithm", "worlds", *SPREAD, *(name for key in keys for name in (key, f"{key}_half"))]]
    for budget in final_budgets(rows):
        for name, by_world in finals(rows, budget).items():
            numbers: list[float | None] = [*spread(column(by_world, "gold_win_rate"))]
            for key in keys:
                values = column(by_world, key)
                numbers += [mean_or_none(values), half_width(values)]
            lines.append([str(budget), name, str(len(by_world)), *csv_cells(numbers)])
    return lines


def summary_table(rows: list[Row]) -> Lines:
    """Return each algorithm's mean gold win rate at every budget, and its difference to PPO, paired by world.

    A difference is bold if Holm's p < 0.05 over all pairs at the budget.
    """
    by_budget = {budget: finals(rows, budget) for budget in final_budgets(rows)}
    cells: dict[tuple[int, str], str] = {}  # budget, algorithm -> difference to PPO
    for budget, by_name in by_budget.items():
        for pair in pairs(by_name, "gold_win_rate"):
            if AGAINST in (pair.a, pair.b):
                name, sign = (pair.a, 1) if pair.b == AGAINST else (pair.b, -1)
                mark = "**" * (pair.corrected < 0.05)
                difference = number(sign * pair.result.mean, flipped(pair.result.ci, sign), 3, "+")
                cells[budget, name] = f"{mark}{difference}{mark}"
    heads = ((f"after {budget:,}", "worlds", f"minus `{AGAINST}`") for budget in by_budget)
    lines = [["gold win rate", *(text for head in heads for text in head)]]
    for name in dict.fromkeys(name for by_name in by_budget.values() for name in by_name):
        line = [f"`{name}`"]
        for budget, by_name in by_budget.items():
            rates = column(by_name.get(name, {}), "gold_win_rate")
            line += [cell(rates, 3), str(len(rates)), cells.get((budget, name), "-")]
        lines.append(line)
    return lines


def quantile_table(rows: list[Row]) -> Lines:
    """Return quantiles of the gold win rate over worlds; an algorithm that doesn't sample has one line."""
    percents = QUANTILES[:3]
    lines = [["algorithm", "responses", "worlds", *(f"{percent}% quantile" for percent in percents)]]
    budgets_by_name: dict[str, list[int]] = {}
    for budget in final_budgets(rows):
        for name in finals(rows, budget):
            budgets_by_name.setdefault(name, []).append(budget)
    for name, budgets in budgets_by_name.items():
        for budget in budgets:
            by_world = finals(rows, budget)[name]
            samples = next(iter(by_world.values()))["budget"] != "0"
            rates = column(by_world, "gold_win_rate")
            cells = (
                number(float(np.quantile(rates, percent / 100)), quantile_interval(rates, percent / 100), 3)
                for percent in percents
            )
            lines.append([f"`{name}`", f"{budget:,}" if samples else "-", str(len(rates)), *cells])
            if not samples:
                break
    return lines


@dataclass(frozen=True)
class Pair:
    """Comparison of algorithm a minus algorithm b."""

    a: str
    b: str
    result: Paired
    corrected: float
    """Wilcoxon's p with Holm's correction over all pairs at the budget"""

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that these worlds detect with 80% power."""
        n = self.result.num_worlds
        return detectable_effect(n) * self.result.sd if n > 1 and self.result.sd > 0 else None

    @property
    def needed(self) -> int | None:
        """Worlds needed to detect a difference of RELEVANT with 80% power at this spread; None if over 10,000."""
        return worlds_needed(RELEVANT / self.result.sd) if self.result.sd > 0 else None


def pairs(by_name: ByWorld, key: str) -> list[Pair]:
    """Compare all pairs of algorithms with a common world, except the initial policy."""
    compared = {
        (a, b): paired([*gaps.values()])
        for a, b in combinations([name for name in by_name if name != START], 2)
        if (gaps := differences(by_name[a], by_name[b], key))
    }
    corrected = holm([result.p for result in compared.values()])
    return [Pair(a, b, result, p) for ((a, b), result), p in zip(compared.items(), corrected, strict=True)]


def flipped(ends: tuple[float, float] | None, sign: int) -> tuple[float, float] | None:
    """Return the interval of a number times `sign`."""
    return ends if ends is None or sign > 0 else (-ends[1], -ends[0])


def gaps_to_tuned(by_name: ByWorld, name: str) -> list[float]:
    """Return a variant minus its algorithm as tuned in gold win rate, in the worlds that both have."""
    return [*differences(by_name[name], by_name.get(TUNED, {}), "gold_win_rate").values()] * (name != TUNED)


def varied(rows: list[Row]) -> Iterator[tuple[int, str, ByWorld]]:
    """Yield the algorithms with variants: budget (0 if it doesn't sample), algorithm, variants by name."""
    for budget in (*final_budgets(rows), 0):
        for algorithm in SPACE:
            by_name = finals(rows, budget, variants_of=algorithm)
            if len(by_name) > 1:
                yield budget, algorithm, by_name


def variant_table(by_name: ByWorld) -> Lines:
    """Return an algorithm and its variants: gold win rate, KL, and the variance that a value model explains."""
    lines = [["", "worlds", "gold win rate", "minus as tuned", "25% quantile", "KL, nats", "variance explained"]]
    for name, by_world in by_name.items():
        gaps, rates = gaps_to_tuned(by_name, name), column(by_world, "gold_win_rate")
        gap = mean_difference(gaps)
        quartile = number(float(np.quantile(rates, 0.25)), None, 3)
        kl, explained = cell(column(by_world, "kl"), 2), cell(column(by_world, VARIANCE[1]), 2)
        lines.append([name, str(len(rates)), cell(rates, 3), gap, quartile, kl, explained])
    if not any(column(by_world, VARIANCE[1]) for by_world in by_name.values()):
        lines = [line[:-1] for line in lines]
    return lines


def variant_lines(rows: list[Row]) -> Lines:
    """Return the lines of worlds_variants.csv: spread, differences, and explained variance of variants."""
    lines = [
        [
            *("budget", "algorithm", "variant", "worlds", *SPREAD, "gold_win_rate", "gold_win_rate_half", "sd"),
            *("minus_as_tuned", "low", "high", "kl", *VARIANCE, "rank_correlation", "rank_correlation_p"),
        ]
    ]
    for budget, algorithm, by_name in varied(rows):
        for name, by_world in by_name.items():
            rates, gaps = column(by_world, "gold_win_rate"), gaps_to_tuned(by_name, name)
            numbers = [
                *(*spread(rates), mean_or_none(rates), half_width(rates)),
                float(np.std(rates, ddof=1)) if len(rates) > 1 else None,
                *(mean_or_none(gaps), *(t_interval(gaps) or (None, None))),
                *(mean_or_none(column(by_world, key)) for key in ("kl", *VARIANCE)),
                *correlation(by_world),
            ]
            lines.append([str(budget), algorithm, name, str(len(by_world)), *csv_cells(numbers)])
    return lines


def correlation(by_world: dict[str, Row]) -> tuple[float | None, float | None]:
    """Return Spearman's correlation over worlds between explained variance and gold score, and its p-value."""
    known = [row for row in by_world.values() if row[VARIANCE[1]]]
    explained, golds = ([float(row[key]) for row in known] for key in (VARIANCE[1], "gold_score"))
    if len(known) < 3 or len(set(explained)) == 1 or len(set(golds)) == 1:
        return None, None
    result = scipy.stats.spearmanr(explained, golds)
    return float(result.statistic), float(result.pvalue)


def final_budgets(rows: Iterable[Row]) -> list[int]:
    """Return the budgets of final runs, without 0."""
    return sorted({int(row["budget"]) for row in rows if row["phase"] == "final"} - {0})


# ------------------------------------------------------------------------------------------------------------ 4. reruns
def repeated(rows: list[Row], reruns: list[Row]) -> dict[tuple[str, int], list[list[float]]]:
    """Return algorithm, budget -> the gold win rates of each run that was repeated, the first run's first."""
    first = {row_key(row): float(row["gold_win_rate"]) for row in rows if row["phase"] == "final"}
    by_run: dict[tuple[str, int], dict[tuple[str, ...], list[float]]] = {}
    for row in reruns:
        key = row_key(row)
        if key in first:
            runs = by_run.setdefault((row["algorithm"], int(row["budget"])), {})
            runs.setdefault(key, [first[key]]).append(float(row["gold_win_rate"]))
    return {name: [*runs.values()] for name, runs in sorted(by_run.items())}


def reruns_section(rows: list[Row], reruns: list[Row]) -> list[str]:
    """Return a heading and a table: standard deviations between worlds, and between processors in the same world."""
    head = ["algorithm", "responses", "worlds", "runs", "rerun minus first run"]
    lines = [[*head, "sd between worlds", "sd between processors"]]
    for (algorithm, budget), runs in repeated(rows, reruns).items():
        if result := components(runs):
            gaps = mean_difference([fmean(again) - first for first, *again in runs])
            sds = (number(result.worlds, None, 3), number(result.within, result.within_ci, 3))
            counts = (f"{budget:,}" if budget else "-", str(result.num_worlds), str(result.num_runs))
            lines.append([f"`{algorithm}`", *counts, gaps, *sds])
    return ["### Reruns on another processor", markdown(lines)] if len(lines) > 1 else []


# ------------------------------------------------------------------------------------------------------ 5. later worlds
def fresh_lines(rows: list[Row]) -> Lines:
    """Return the lines of worlds_fresh.csv: the range over PREDICTING, and how many later numbers are in it.

    The first 20 worlds predict each number of a later world: its gold win rate, and its difference to PPO's.
    """
    later = {int(row["world"]) for row in rows if row["phase"] == "final"} - {*PREDICTING}
    lines = [["responses", "algorithm", "minus", "worlds", "low", "high", "later_worlds", "inside"]]
    for budget in final_budgets(rows):
        by_group = [finals(rows, budget, worlds=worlds) for worlds in (PREDICTING, later)]
        for name in by_group[0]:
            for base in ("", AGAINST):
                if name in (START, base):
                    continue
                predicting, measured = (
                    differences(by_name.get(name, {}), by_name.get(base, {}), "gold_win_rate")
                    if base
                    else numbers(by_name.get(name, {}), "gold_win_rate")
                    for by_name in by_group
                )
                if len(predicting) < 2:
                    continue
                low, high = min(predicting.values()), max(predicting.values())
                inside = sum(low <= value <= high for value in measured.values())
                counts = (str(len(measured)), str(inside))
                lines.append([str(budget), name, base, str(len(predicting)), f"{low:.3f}", f"{high:.3f}", *counts])
    return lines


def fresh_section(rows: list[Row]) -> list[str]:
    """Return a heading and a paragraph on how many numbers of later worlds were inside their predicted range.

    The next of n + 1 exchangeable worlds is equally likely to have any rank, so it is between the lowest and the
    highest of the n with probability (n - 1) / (n + 1), whatever the distribution of gold win rates.
    """
    _, *lines = fresh_lines(rows)
    if not lines:
        return []
    fewest = min(int(line[3]) for line in lines)
    text = (
        f"With {fewest} worlds, each number of a new world is between the lowest and the highest so far with "
        f"probability {(fewest - 1) / (fewest + 1):.2f}, whatever the distribution."
    )
    if count := sum(int(line[-2]) for line in lines):
        text += f" Of later worlds, {sum(int(line[-1]) for line in lines)} of {count:,} numbers were inside."
    return ["### Predictions for a new world", f"{text} All ranges: [worlds_fresh.csv](worlds_fresh.csv)."]


# --------------------------------------------------------------------------------------------------------- 6. the files
def page_text(rows: list[Row], reruns: list[Row]) -> str:
    """Return the text between the page's marks."""
    if not final_budgets(rows):
        sections = ["No worlds yet."]
    else:
        sections = ["### Quantiles over worlds", markdown(quantile_table(rows))]
    sections += reruns_section(rows, reruns)
    sections += tuning_section(rows)
    for budget, algorithm, by_name in varied(rows):
        after = f" after {budget:,} responses" if budget else ""
        sections += [f"### `{algorithm}` and its variants{after}", markdown(variant_table(by_name))]
    sections += fresh_section(rows)
    captions = {
        "worlds_spread.png": "Gold win rate by algorithm and budget, a dot per world",
        "worlds_variance.png": "Gold score of PPO over the variance explained by its value model",
    }
    sections += [f"![{captions[name]}]({name})" for name in pictures(rows)]
    return "\n\n".join(sections)


def pair_lines(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the lines of worlds_pairs.csv: all pairs at all budgets, by gold win rate and gold score."""
    yield [
        *("budget", "metric", "a", "b", "worlds", "difference", "low", "high", "sd", "cohens_d", "d_low", "d_high"),
        *("share_a_better", "wilcoxon_p", "holm_p", "detectable", "worlds_needed"),
    ]
    for budget in final_budgets(rows):
        by_name = finals(rows, budget)
        for metric in ("gold_win_rate", "gold_score"):
            for pair in pairs(by_name, metric):
                result = pair.result
                numbers = [
                    result.mean, *(result.ci or (None, None)), result.sd, result.effect,
                    *(result.effect_ci or (None, None)), result.share, result.p, pair.corrected, pair.detectable,
                    pair.needed if metric == "gold_win_rate" else None,
                ]  # fmt: skip
                yield [str(budget), metric, pair.a, pair.b, str(result.num_worlds), *csv_cells(numbers)]


def spread_figure(rows: list[Row]) -> Figure | None:
    """Draw a panel per budget: quartiles and median of the gold win rate, and a dot per world. None without worlds."""
    budgets = final_budgets(rows)
    if not budgets:
        return None
    figure = Figure(figsize=(4.6 * len(budgets), 4.4), layout="constrained")
    for axes, budget in zip(figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0], budgets, strict=True):
        label_axes(axes, f"{budget:,} responses", "", "gold win rate")
        by_name = finals(rows, budget)
        columns = [column(by_world, "gold_win_rate") for by_world in by_name.values()]
        axes.boxplot(columns, showfliers=False, widths=0.6, medianprops={"color": "black"})
        for i, values in enumerate(columns, start=1):
            offsets = np.linspace(-0.18, 0.18, len(values))
            axes.plot(i + offsets, values, ".", color=BLUE, alpha=0.6, markersize=4)
        axes.set_xticks(range(1, len(by_name) + 1), list(by_name), rotation=60, ha="right", fontsize=8)
    return figure


def variance_figure(rows: list[Row]) -> Figure | None:
    """Draw PPO at each budget, and its variants, a dot per world. None if no value model was measured."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    budgets = final_budgets(rows)
    tuned_ones = {f"{budget:,} responses": finals(rows, budget).get(AGAINST, {}) for budget in budgets}
    variants = {
        name: by_world
        for _, algorithm, by_name in varied(rows)
        if algorithm == AGAINST
        for name, by_world in by_name.items()
    }
    for axes, title, groups in zip(
        figure.subplots(1, 2, sharey=True), ("PPO as tuned", "its variants"), (tuned_ones, variants), strict=True
    ):
        label_axes(axes, title, "variance explained over the run", "gold score")
        for (name, by_world), (color, marker) in zip(groups.items(), LINES, strict=False):
            known = [row for row in by_world.values() if row[VARIANCE[1]]]
            if known:
                explained, golds = ([float(row[key]) for row in known] for key in (VARIANCE[1], "gold_score"))
                axes.plot(explained, golds, marker, color=color, alpha=0.7, markersize=4, label=name)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    return figure if any(axes.lines for axes in figure.axes) else None


def pictures(rows: list[Row]) -> dict[str, Figure]:
    drawn = {"worlds_spread.png": spread_figure(rows), "worlds_variance.png": variance_figure(rows)}
    return {name: figure for name, figure in drawn.items() if figure}


def csv_lines(rows: list[Row]) -> dict[str, Iterable[list[str]]]:
    """Return the lines of worlds_NAME.csv by NAME."""
    return {
        "means": mean_lines(rows), "pairs": pair_lines(rows), "variants": variant_lines(rows),
        "fresh": fresh_lines(rows),
    }  # fmt: skip


def main(args: Args) -> None:
    """Write the page's tables, the other CSVs and the pictures."""
    check_out(args.out)
    rows = joined(read_rows(args.csv))
    page = with_tables(read_text(args.page), args.page, markdown(summary_table(rows)), SUMMARY)
    page = with_tables(page, args.page, page_text(rows, read_rows(args.reruns)), MARKS)
    write_pictures(args.out, pictures(rows))
    for name, lines in csv_lines(rows).items():
        write_text(args.out / f"worlds_{name}.csv", csv_text(lines))
    write_text(args.page, page)
    print(f"written: {args.page} and the tables in {args.out}, from {len(rows)} rows of {args.csv}")


if __name__ == "__main__":
    run_module(main, Args)
