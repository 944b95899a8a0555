"""Tables and pictures of `experiments compare`: every algorithm in the same worlds, at the same cost.

    python -m experiments.compare.report --runs runs/compare --out runs/compare/report

--runs has a directory per seed, named by its number. Files may be missing:

    SEED/eval/eval.json            eval.py tiny: first the initial policy, then the algorithms and best-of-n
    SEED/ALGORITHM/                the run of an algorithm, if it has one
    grid/ALGORITHM/eval/eval.json  eval.py tiny at another seed: initial policy, then points FLAG/VALUE/FLAG/VALUE

Out: compare.html with the tables and pictures, over_optimisation.png, sampled_tokens.png, and seeds.csv, a line per
policy and seed.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.tables import (
    Line,
    Numbers,
    by_policy_and_seed,
    csv_text,
    evaluated,
    float_at,
    mean_difference,
    paired_difference,
)
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object, write_text
from nanorlhf.metrics import t_interval
from nanorlhf.report.compare_runs import ComparedRun, mean_and_sd, read_run
from nanorlhf.report.page import (
    BLUE,
    GREY,
    ORANGE,
    STYLES,
    Lines,
    Section,
    label_axes,
    markup,
    number,
    panel,
    plus_minus,
    smooth,
    write_study,
)
from nanorlhf.report.verdict import Gain, comparison
from nanorlhf.training.run_directory import Rows

EVALUATED = (  # number in eval.json, heading of the table, digits, with an interval?
    ("gold_win_rate", "gold win rate", 3, True),
    ("gold_score", "gold score", 2, True),
    ("rm_score", "proxy score", 2, True),
    ("kl", "KL, nats", 2, True),
    ("entropy", "entropy, nats", 2, False),
    ("distinct", "distinct responses", 2, False),
    ("eos_rate", "EOS rate", 3, False),
    ("response_length", "length, tokens", 1, False),
)
COSTS = (
    ("tokens", "tokens sampled", 0, False),
    ("seconds", "seconds", 0, False),
    ("megabytes", "peak memory, MB", 0, False),
    ("models", "models held", 0, False),
)
LAST = 3  # updates averaged at the point where a run is cut off


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/compare")
    """directory with one directory per seed, and the grid"""
    out: Path = Path("runs/compare/report")
    """directory for compare.html, the pictures and seeds.csv"""
    against: str = "ppo"
    """algorithm that the others are compared with, paired by seed"""


@dataclass(frozen=True)
class Policy:
    """The result of one algorithm at one seed."""

    seed: str
    numbers: Numbers  # those of EVALUATED and COSTS that are known
    is_best_of: bool  # True if several responses are sampled for each answer
    run: ComparedRun | None  # None for the initial policy and best-of-n, which aren't trained

    @property
    def updates(self) -> Rows:
        """Rows of train_ppo.py or train_grpo.py, with the cost up to each; empty for other runs."""
        return self.run.rows if self.run is not None and self.run.is_ppo else []


Policies = dict[str, list[Policy]]  # name -> one per seed


# ----------------------------------------------------------------------------------------------------------- 1. reading
def read_policies(runs: Path) -> Policies:
    """Read all seeds' policies in evaluation order. Raises InputError if there are none or one is malformed."""
    policies: Policies = {}
    for path in sorted(runs.glob("*/eval/eval.json"), key=lambda path: path.parts[-3].zfill(20)):
        if not path.parts[-3].isdigit():
            continue
        where, directory = str(path), path.parent.parent
        for position, (name, row) in enumerate(evaluated(path).items()):
            run = None
            if position > 0 and (directory / name / "metrics.jsonl").exists():  # position 0 is the initial policy
                run = read_run(name, directory / name, {})
                run = replace(run, rows=with_costs(run.rows))
            is_best_of = float_at(row, where, "kl_estimate") is not None
            numbers = {key: float_at(row, where, key) for key, *_ in EVALUATED}
            numbers |= costs(run) if run else {"models": 2.0 if is_best_of else None}
            policies.setdefault(name, []).append(Policy(directory.name, numbers, is_best_of, run))
    if not policies:
        raise InputError(f"--runs {runs}: no SEED there has an evaluation: run `python -m experiments compare` first.")
    return policies


def with_costs(rows: Rows) -> Rows:
    """Add the tokens sampled and seconds taken up to each update to a rollout script's rows; leave others unchanged.

    The tokens include those that DAPO resampled.
    """
    tokens = seconds = episodes = 0.0
    done = []
    for row in rows:
        if {"episode", "response_length", "episodes_per_second"} <= row.keys():
            batch_size, episodes = row["episode"] - episodes, row["episode"]
            tokens += batch_size * row["response_length"] + row.get("groups/refilled_tokens", 0)
            seconds += batch_size / row["episodes_per_second"]
            row = row | {"tokens": tokens, "seconds": seconds}
        done.append(row)
    return done


def costs(run: ComparedRun) -> Numbers:
    """Return the costs of a run, including sampling by `data.best_of` if it was trained on those winners."""
    summary = {} if not (run.path / "summary.json").exists() else read_object(run.path / "summary.json")
    stages = [(summary, str(run.path / "summary.json"))]
    sampling = Path(str(run.settings.get("data"))) / "best_of.json"
    if sampling.exists():
        stages.append((read_object(sampling), str(sampling)))
    seconds, peaks = (
        [value for stage, where in stages if key in stage and (value := float_at(stage, where, key)) is not None]
        for key in ("seconds", "peak_resident_bytes")
    )
    if run.is_ppo:
        tokens: float | None = run.rows[-1].get("tokens")
    else:
        tokens = float_at(*stages[1], "num_tokens") if len(stages) == 2 else 0.0
    return {
        "tokens": tokens,
        "seconds": sum(seconds) if len(seconds) == len(stages) else None,
        "megabytes": max(peaks) / 1e6 if len(peaks) == len(stages) else None,
        "models": models_held(run.settings),
    }


def models_held(settings: dict) -> float:
    """Return how many models a run keeps in memory.

    On-policy algorithms need the policy, the reference, reward models and perhaps a value model; DPO the policy and the
    reference; ORPO and SimPO only the policy; sampling the best of n the policy and the reward model.
    """
    if settings.get("loss") in ("orpo", "simpo"):
        return 1.0
    if "total_episodes" not in settings:
        return 2.0
    reward_models = settings.get("reward_model")
    num_reward_models = len(reward_models) if isinstance(reward_models, list) else int(reward_models is not None)
    return 2.0 + num_reward_models + ("value_coef" in settings)


def best_point(path: Path) -> str:
    """Return the name of the grid point with the highest gold score."""
    _, *points = evaluated(path).items()
    scores = {name: float_at(row, str(path), "gold_score") for name, row in points}
    known = {name: score for name, score in scores.items() if score is not None}
    if not known:
        raise InputError(f"{path}: no point of the grid has a gold score: pass --gold to eval.py.")
    return max(known, key=lambda name: known[name])


def to_flags(point: str) -> str:
    """Turn a grid point into flags of a script.

    >>> to_flags("lr/3e-4/kl-coef/0.02")
    '--lr 3e-4 --kl-coef 0.02'
    """
    words = point.split("/")
    return " ".join(f"--{flag} {value}" for flag, value in zip(words[::2], words[1::2], strict=False))


# ------------------------------------------------------------------------------------------------------------ 2. tables
def seed_numbers(column: Iterable[Policy], key: str) -> np.ndarray:
    """Return a number at each seed (seeds,), NaN if unknown."""
    return np.array([policy.numbers.get(key) for policy in column], dtype=float)


def gaps(column: list[Policy], theirs: dict[str, Numbers], key: str) -> np.ndarray:
    """Return our number minus theirs at each seed (seeds,), NaN if one is unknown."""
    their_numbers = [theirs.get(policy.seed, {}).get(key) for policy in column]
    return seed_numbers(column, key) - np.array(their_numbers, dtype=float)


def known(values: np.ndarray) -> list[float]:
    return values[~np.isnan(values)].tolist()


def cell(values: Sequence[float], digits: int, with_interval: bool = False) -> str:
    """Format the mean and, for two or more seeds, half of its 95% interval.

    >>> cell([1.0, 2.0], 1), cell([], 1)
    ('1.5', '-')
    """
    interval = t_interval(values) if with_interval else None
    return plus_minus(mean_or_none(values), interval and (interval[1] - interval[0]) / 2, digits)


def mean_or_none(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def policy_table(policies: Policies) -> Lines:
    """Return one row per algorithm, means over seeds, without columns that no algorithm has."""
    everyone = [policy for column in policies.values() for policy in column]
    columns = [column for column in EVALUATED + COSTS if len(known(seed_numbers(everyone, column[0])))]
    lines = [["policy", "seeds", *(heading for _, heading, _, _ in columns)]]
    for name, column in policies.items():
        cells = [cell(known(seed_numbers(column, key)), digits, paired) for key, _, digits, paired in columns]
        lines.append([name, str(len(column)), *cells])
    return lines


def difference_table(policies: Policies, against: str) -> Lines:
    """Return each algorithm minus `against`, paired by seed, with the mean's 95% interval.

    Only the headings if `against` is missing.
    """
    columns = [(key, heading, digits) for key, heading, digits, paired in EVALUATED if paired]
    lines = [[f"minus {against}", "seeds", *(heading for _, heading, _ in columns)]]
    theirs = {policy.seed: policy.numbers for policy in policies.get(against, [])}
    for name, column in policies.items():
        compared = [policy for policy in column if policy.seed in theirs]
        if name == against or not compared:
            continue
        differences = [(known(gaps(compared, theirs, key)), digits) for key, _, digits in columns]
        cells = [mean_difference(values, digits) for values, digits in differences]
        lines.append([name, str(len(compared)), *cells])
    return lines


def seed_lines(policies: Policies) -> Lines:
    """Return the lines of seeds.csv, one per policy and seed, without seconds, which depend on what else runs."""
    columns = [key for key, *_ in EVALUATED + COSTS if key != "seconds"]
    lines = [["policy", "seed", *columns]]
    for name, column in policies.items():
        for policy in column:
            values = [policy.numbers.get(key) for key in columns]
            lines.append([name, policy.seed, *("" if value is None else f"{value:.6g}" for value in values)])
    return lines


def variant_table(by_policy: dict[str, dict[str, Line]]) -> Lines:
    """Compare each variant of an algorithm with it, such as ppo-soft with ppo, paired by seed, from lines of seeds.csv.

    Only the headings without variants.
    """
    bases = {name: base for name in by_policy if (base := name.partition("-")[0]) in by_policy and base != name}
    lines = [["policy", "gold win rate", "difference", "gold score", "KL, nats"]]
    for name, by_seed in by_policy.items():
        if name in {*bases, *bases.values()}:
            rate, score, kl = (
                cell([float(line[key]) for line in by_seed.values() if line[key]], digits, True)
                for key, digits in (("gold_win_rate", 3), ("gold_score", 2), ("kl", 1))
            )
            theirs = by_policy[bases[name]] if name in bases else {}
            lines.append([name, rate, paired_difference(by_seed, theirs, "gold_win_rate"), score, kl])
    return lines


def happened(policies: Policies, against: str) -> Section:
    """Report which algorithms are better and worse than `against` by gold score; empty without two to compare."""
    theirs = {policy.seed: policy.numbers for policy in policies.get(against, [])}
    gains: dict[str, Gain | None] = {}
    for name, column in policies.items():
        values = known(gaps(column, theirs, "gold_score"))
        if name != against and values:
            interval = t_interval(values)
            text = number(mean_or_none(values), interval, 2, "+")
            gains[name] = interval and Gain("the gold score", interval, text)
    return Section(about=markup.verdict([comparison("the gold score", against, gains)]) if gains else "")


def equal_cost_table(policies: Policies) -> Lines:
    """Return gold scores of the rollouts at equal cost: each seed's runs cut off at the total cost of its cheapest.

    The score is the mean of the LAST updates that fit, so nothing is retrained. Only scripts that sample log both
    costs.
    """
    trained = {name: [p for p in column if p.updates] for name, column in policies.items()}
    trained = {name: column for name, column in trained.items() if column}
    limits: dict[str, dict[str, float]] = {"tokens": {}, "seconds": {}}  # -> seed -> total cost of its cheapest run
    for policy in (policy for column in trained.values() for policy in column):
        for key, by_seed in limits.items():
            by_seed[policy.seed] = min(by_seed.get(policy.seed, np.inf), policy.updates[-1].get(key, np.inf))
    lines = [["policy"]]
    for key, by_seed in limits.items():
        lines[0] += [f"gold after {fmean(by_seed.values()) if by_seed else np.nan:,.0f} {key}", "updates"]
    for name, column in trained.items():
        line = [name]
        for key, by_seed in limits.items():
            fit = [[row for row in p.updates if row.get(key, np.inf) <= by_seed[p.seed]] for p in column]
            golds = [[row["gold_score"] for row in rows[-LAST:] if "gold_score" in row] for rows in fit]
            line += [cell([fmean(scores) for scores in golds if scores], 2, True), cell(list(map(len, fit)), 1)]
        lines.append(line)
    return lines


def grid_table(runs: Path) -> Lines:
    """Return all grid points; only the headings without a grid."""
    lines = [["algorithm", "point", "gold score", "gold win rate", "KL, nats", "chosen"]]
    digits = {"gold_score": 2, "gold_win_rate": 3, "kl": 2}
    for path in sorted(runs.glob("grid/*/eval/eval.json")):
        best = best_point(path)
        for name, row in list(evaluated(path).items())[1:]:
            cells = [number(float_at(row, str(path), key), digits=digits[key]) for key in digits]
            lines.append([path.parts[-3], to_flags(name), *cells, "yes" if name == best else ""])
    return lines


# ----------------------------------------------------------------------------------------------------------- 3. figures
def runs_with_gold(column: list[Policy]) -> list[ComparedRun]:
    """Return the runs that logged a gold score."""
    needed = {"gold_score", "objective/score", "objective/kl_exact", "tokens"}
    return [p.run for p in column if p.run is not None and any(needed <= row.keys() for row in p.updates)]


def over_optimisation_figure(policies: Policies) -> Figure | None:
    """Draw the gains in gold and proxy score over sqrt(KL): a panel per algorithm, with best-of-n in each.

    Curves are means over seeds at each update; algorithms that log no updates get a dot per seed. Returns None if
    there is nothing to draw.
    """
    initial_policies, *_ = policies.values()
    initial = {policy.seed: policy.numbers for policy in initial_policies}
    curves = {name: runs for name, column in policies.items() if (runs := runs_with_gold(column))}
    undrawn = {
        name: column for name, column in list(policies.items())[1:]
        if name not in curves and not any(p.is_best_of for p in column)
    }  # fmt: skip
    best_of = [gains(column, initial) for column in policies.values() if any(p.is_best_of for p in column)]
    # best-of-n at its analytic KL, starting at best of one, the initial policy: means over seeds
    best_points = np.array([(0.0, 0.0, 0.0), *(group.mean(0) for group in best_of if len(group))])  # (n, 3) as `gains`
    panels = [*curves, *(["end of training"] if any(len(gains(group, initial)) for group in undrawn.values()) else [])]
    if not panels:
        return None

    num_rows = -(-len(panels) // 3)
    figure = Figure(figsize=(12.6, 3.6 * num_rows), layout="constrained")
    all_axes: list[Axes] = figure.subplots(num_rows, 3, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    for name, axes in zip(panels, all_axes, strict=False):
        label_axes(axes, name, "sqrt(KL)", "score, change since the start")
        for i, style, label in ((1, "-", "gold"), (2, "--", "proxy")):
            best_label = f"best of n, {label}"
            axes.plot(best_points[:, 0], best_points[:, i], style, marker=".", color=GREY, label=best_label)
        if name in curves:
            distance = np.sqrt(mean_and_sd(curves[name], "objective/kl_exact")[1].clip(min=0))
            for key, style, label, color in (
                ("gold_score", "-", "gold", ORANGE), ("objective/score", "--", "proxy", BLUE)
            ):  # fmt: skip
                scores = mean_and_sd(curves[name], key)[1]
                axes.plot(smooth(distance, LAST), smooth(scores - scores[0], LAST), style, color=color, label=label)
        else:
            for (other, column), (_, marker, _) in zip(undrawn.items(), cycle(STYLES), strict=False):
                points = gains(column, initial)
                axes.plot(points[:, 0], points[:, 1], marker, color=ORANGE, label=f"{other}, gold")
                axes.plot(points[:, 0], points[:, 2], marker, color=BLUE, mfc="none", label=f"{other}, proxy")
        axes.legend(frameon=False, fontsize=8)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    return figure


def gains(column: list[Policy], initial: dict[str, Numbers]) -> np.ndarray:
    """Return sqrt(KL) and the gains in gold and proxy score, (seeds, 3), for seeds where all three are known."""
    distance = np.sqrt(seed_numbers(column, "kl").clip(min=0))
    points = np.stack([distance, gaps(column, initial, "gold_score"), gaps(column, initial, "rm_score")], axis=1)
    return points[~np.isnan(points).any(1)]


def token_figure(policies: Policies) -> Figure | None:
    """Draw gold score over tokens sampled so far: means over seeds with a band of one standard deviation.

    Algorithms that log no updates get a dot for their final policy. Returns None if there is nothing to draw.
    """
    figure, axes = panel("What a sampled token buys", "tokens sampled", "gold score")
    figure.set_size_inches(7.2, 4.4)
    for (name, column), (color, marker, style) in zip(list(policies.items())[1:], cycle(STYLES), strict=False):
        if runs := runs_with_gold(column):
            sampled, (_, mean, sd) = mean_and_sd(runs, "tokens")[1], mean_and_sd(runs, "gold_score")
            mean = smooth(mean, LAST)
            axes.plot(sampled, mean, style, color=color, linewidth=1.8, label=name)
            axes.fill_between(sampled, mean - sd, mean + sd, color=color, alpha=0.12, linewidth=0)
            continue
        tokens, golds = (known(seed_numbers(column, key)) for key in ("tokens", "gold_score"))
        if tokens and golds:
            axes.plot(fmean(tokens), fmean(golds), marker, color=color, label=f"{name}, at its end")
    if not axes.lines:
        return None
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


# -------------------------------------------------------------------------------------------------------------- 4. page
def main(args: Args) -> list[str]:
    """Write compare.html, seeds.csv and the pictures; return the pictures' names."""
    check_out(args.out)
    policies = read_policies(args.runs)
    text = csv_text(seed_lines(policies))
    pictures = {
        "over_optimisation.png": over_optimisation_figure(policies),
        "sampled_tokens.png": token_figure(policies),
    }
    drawn = {name: figure for name, figure in pictures.items() if figure}
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(args.out / "seeds.csv", text)
    return write_study(
        args.out / "compare.html",
        args.runs,
        [
            markup.title("Algorithms compared"),
            happened(policies, args.against),
            Section(
                "After the same number of responses",
                tables=[policy_table(policies)],
                notes="Means over seeds, ± half of their 95% interval (Student's t). Best of n samples n responses for "
                "each answer, without training; its KL is log n - (n - 1) / n.",
            ),
            Section(
                f"Minus {args.against}, seed by seed",
                tables=[difference_table(policies, args.against)],
                notes="Mean difference and its 95% interval over seeds. Algorithms at a seed share posts, initial "
                "policy and reward model, so their effects cancel.",
            ),
            Section(
                "Variants",
                tables=[variant_table(by_policy_and_seed(csv.DictReader(io.StringIO(text))))],
                notes="The difference is to the algorithm of that name without a suffix, paired by seed.",
            ),
            Section(
                "At the same cost",
                tables=[equal_cost_table(policies)],
                notes=f"Gold score of the rollouts, mean of the last {LAST} updates within the total cost of the "
                "cheapest algorithm. Runs that are cut off here were planned to be longer: their learning rate had "
                "not decayed yet.",
            ),
            Section(
                "The grid",
                tables=[grid_table(args.runs)],
                notes="At a separate seed. The point with the highest gold score is chosen.",
            ),
            Section("Pictures", figures=list(drawn.values())),
        ],
        drawn,
    )


if __name__ == "__main__":
    run_module(main, Args)
