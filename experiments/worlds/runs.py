"""Equally tuned algorithms: successive halving, then many worlds at three budgets.

The CSV records finished runs: a run with a row is not repeated, and its directory is deleted.
"""

import fcntl
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import numpy as np

from data.tiny import LOWEST
from experiments.compare.runs import ON_POLICY, algorithm, compared_world, judged, sampled_winners
from experiments.runs import START, Args, Run, Words, stage
from experiments.worlds import report as table
from experiments.worlds.report import Row
from nanorlhf.cli import MAY_BE_EMPTY, Count, Seed
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, write_text

# changes to an algorithm as tuned; a variant that changes nothing isn't run
VARIANTS: dict[str, dict[str, dict[str, str]]] = {
    "ppo": {
        "lambda 1": {"lam": "1"},
        "value model from the reward model": {"value_model": "reward model"},
        "value model from the policy": {"value_model": "policy"},
        "value model from scratch": {"value_model": "scratch"},
        "value model of a first run": {"value_model": "first run"},
        "values not clipped": {"value_clip": "None"},
        "rollouts of 256": {"batch_size": "256"},
    },
    "dpo": {  # twice and four times the tuned beta
        "beta 0.272": {"beta": "0.272"},
        "beta 0.544": {"beta": "0.544"},
        "half an epoch": {"epochs": "0.5"},
    },
}
VARIANT_NAMES = tuple(dict.fromkeys(name for variants in VARIANTS.values() for name in variants))


@dataclass(frozen=True, kw_only=True)
class Worlds(Args):
    """Compare tuned algorithms. Runs with a row in the CSV are not repeated, even if their directories are gone."""

    out: Path = Path("runs/worlds")
    csv: Path = table.Args.csv
    """table of all finished runs"""
    phase: Literal["all", "tune", "final"] = "all"
    """tune: only the tuning; final: only final runs, for algorithms that have been tuned"""
    share: str = "1/1"
    """K/N: the K-th of N shares: every N-th algorithm in tuning, every N-th world in final runs"""
    keep: bool = False
    """keep a run's directory after writing its row"""
    algorithms: Words = tuple(table.SPACE)
    tune_seeds: tuple[Seed, ...] = table.TUNING_WORLDS
    """worlds for tuning: all points run in the first, half in the next two, a quarter in the others"""
    num_points: Count = 12
    """points per algorithm"""
    draw_seed: Seed = 38
    """seed of the points"""
    seeds: tuple[Seed, ...] = table.WORLDS
    """worlds for the final runs"""
    budgets: tuple[Count, ...] = table.BUDGETS
    """responses sampled by a final run"""
    budget: Count = 1024
    """responses sampled by a tuning run and by a variant"""
    best_of: Annotated[tuple[Count, ...], MAY_BE_EMPTY] = (4, 16, 64)
    """n in best of n, evaluated with the initial policy; empty: evaluate neither"""
    variants: Annotated[Words, MAY_BE_EMPTY] = VARIANT_NAMES
    """changes to tuned algorithms, from VARIANTS"""
    num_demonstrations: Count = 8000
    num_comparisons: Count = 1600
    num_queries: Count = 256
    """queries of an evaluation"""


BATCH_SIZE = 64  # responses of a rollout
# core seconds on two cores of an AMD EPYC (Zen 4), used if the CSV has none: making a world; an evaluation plus the
# start-up of two programs; training on 1,024 responses, or the whole training for DPO and best of n
A_WORLD, AROUND_A_RUN = 70, 25
TRAINING = {"ppo": 24, "rloo": 14, "grpo": 14, "reinforce++": 14, "dpo": 32, "rejection": 12, table.START: 60}


@dataclass(frozen=True)
class Job:
    """A run of the study and its evaluation."""

    world: int
    keys: tuple[Row, ...]  # KEY of its rows in the CSV: one, or the initial policy's and one for each best of n
    runs: tuple[Run, ...]


def share_directory(args: Worlds) -> Path:
    """Return the directory of a share's worlds and runs, so that two shares can run at once on one disk."""
    return args.out if args.share == "1/1" else args.out / f"share_{args.share.replace('/', '_of_')}"


def take_share(args: Worlds, values: tuple) -> tuple:
    """Return the K-th of every N values."""
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", args.share)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(f"--share {args.share}: expected K/N with K from 1 to N, such as 3/8.")
    return values[int(match[1]) - 1 :: int(match[2])]


# the CSV
def known_rows(args: Worlds) -> list[Row]:
    """Return the rows of the CSV and of all files in OUT/rows, written here or copied from another machine."""
    return table.joined(row for path in (args.csv, *args.out.glob("rows/*.csv")) for row in table.read_rows(path))


def join(args: Worlds) -> None:
    """Write all known rows to the CSV, under a lock so that no job overwrites another's rows."""
    with (args.out / "rows" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_text(args.csv, table.rows_text(known_rows(args)))


def record(args: Worlds, keys: tuple[Row, ...], out: Path, has_diverged: bool = False) -> None:
    """Write the rows of the run in `out`, named by algorithm in its evaluation, and delete the run.

    A diverged run has no evaluation and counts as if all its responses were empty.
    """
    made = {"processor": processor(), "revision": revision()}
    rows = []
    for key in keys:
        lost = dict.fromkeys(table.MEASURED, "") | {"gold_score": str(LOWEST), "gold_win_rate": "0"}
        rows.append(key | (lost if has_diverged else table.measured(out, key["algorithm"])) | made)
    write_text(rows_file(args, out), table.rows_text(rows))
    join(args)
    if not args.keep:
        shutil.rmtree(out)


def rows_file(args: Worlds, out: Path) -> Path:
    return args.out / "rows" / f"{out.name}.csv"


@cache
def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor()


@cache
def revision() -> str:
    """Return this checkout's revision, with + if its code was changed; empty if it isn't a git checkout."""
    root = Path(__file__).parents[2]
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    results = ("docs", "*.csv", "*.md", "*.png")  # files of this study and others that no run reads
    status = ("status", "--short", "-uno", "--", ".", *(f":!{name}" for name in results))
    head, changes = (
        subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), status)
    )
    return head + "+" * bool(changes)


# the tuning
def drawn(args: Worlds, name: str) -> list[Row]:
    """Draw the N points of an algorithm. Settings are stratified: each 1/N of a range contains one point."""
    generator = np.random.default_rng([args.draw_seed, *name.encode()])
    n = args.num_points
    columns = {}
    for setting, values in table.SPACE[name].items():
        shares = (generator.permutation(n) + generator.random(n)) / n  # (n,) from 0 to 1
        low, high = values[0], values[-1]
        if isinstance(low, float) and isinstance(high, float):
            columns[setting] = [f"{low * (high / low) ** share:.3g}" for share in shares]
        else:
            columns[setting] = [str(values[int(share * len(values))]) for share in shares]
    return [{name: columns[name][i] if name in columns else "" for name in table.SETTINGS} for i in range(n)]


def rungs(args: Worlds) -> list[tuple[tuple[int, ...], int]]:
    """Return the rungs of successive halving: worlds, and the number of points that run in them."""
    seeds, n = args.tune_seeds, args.num_points
    groups = ((seeds[:1], n), (seeds[1:3], max(1, n // 2)), (seeds[3:], max(1, n // 4)))
    return [group for group in groups if group[0]]


def standing(args: Worlds, rows: list[Row], name: str, rung: int) -> list[Row] | None:
    """Return the points of an algorithm that run in a rung or, after the last rung, the chosen one.

    They have the highest mean gold score over the worlds so far. None if a run of an earlier rung has no row; a dry
    run then returns the first points.
    """
    golds = {table.row_key(row): float(row["gold_score"]) for row in rows}
    points = drawn(args, name)
    worlds: tuple[int, ...] = ()
    for seeds, num_points in rungs(args)[:rung]:
        points, worlds = points[:num_points], worlds + seeds
        scores = []
        for point in points:
            keys = (table.row_key(run_key(args, "tune", seed, name, args.budget, point)) for seed in worlds)
            scores.append([golds.get(key) for key in keys])
        if any(score is None for point_scores in scores for score in point_scores):
            if not args.dry_run:
                return None
            break
        means = [fmean(score for score in point_scores if score is not None) for point_scores in scores]
        points = [points[i] for i in sorted(range(len(points)), key=lambda i: -means[i])]
    return points[: rungs(args)[rung][1] if rung < len(rungs(args)) else 1]


# the runs
def run_key(args: Worlds, phase: str, seed: int, name: str, budget: int, settings: Row, variant: str = "") -> Row:
    """Return the KEY of a run's row. Algorithms that don't sample in training have the budget 0."""
    samples = name in ON_POLICY or name == "rejection"
    key = {"phase": phase, "world": str(seed), "algorithm": name, "variant": variant}
    return key | {"budget": str(budget if samples else 0)} | settings


def setting_flags(key: Row, directory: Path) -> Iterator[object]:
    """Yield the flags for the settings of a row."""
    flags = {"lr": "--lr", "kl_coef": "--kl-coef", "beta": "--beta", "lam": "--lam", "value_clip": "--value-clip-range"}
    flags["epochs"] = "--num-ppo-epochs" if key["algorithm"] == "ppo" else "--num-epochs"
    for setting, flag in flags.items():
        if key[setting]:
            yield from (flag, key[setting])
    value_models = {"policy": "sft", "scratch": "scratch", "first run": "first_run/value_model"}
    if key["value_model"] in value_models:
        yield from ("--value-model", directory / value_models[key["value_model"]])
    if key["batch_size"]:  # with the same number of optimizer steps
        yield from ("--batch-size", key["batch_size"], "--num-minibatches", int(key["batch_size"]) // BATCH_SIZE)


def training_job(args: Worlds, key: Row) -> Job:
    """Return the job of a training run and its evaluation, including what it needs besides the world."""
    name, seed, budget = key["algorithm"], int(key["world"]), int(key["budget"])
    directory = share_directory(args) / str(seed)
    out = share_directory(args) / "runs" / "_".join(word.replace(" ", "-") for word in key.values() if word)
    runs = []
    if name == "rejection":
        runs.append(sampled_winners(directory, seed, f"winners_{budget}", budget))
    if key["value_model"] == "scratch":  # a model of the policy's shape with random weights
        runs.append(stage(
            directory / "scratch", seed, *START, "--data", directory / "data",
            "--num-epochs", 20 / args.num_demonstrations, "--lr", 0, "--warmup-steps", 0,
            needs=(directory / "data/tokenizer.json",),
        ))  # fmt: skip
    if key["value_model"] == "first run":  # uses a quarter of the responses; its policy is discarded
        first, budget = budget // 4, budget - budget // 4
        flags = setting_flags(key | {"value_model": ""}, directory)
        done = directory / "rm/summary.json"
        runs.append(stage(directory / "first_run", seed, *algorithm(name, directory, first), *flags, needs=(done,)))
    needs = (directory / "rm/summary.json", *(run.done for run in runs if run.done is not None))
    words = algorithm(name, directory, budget, f"winners_{budget}")
    traced = ("--trace", BATCH_SIZE) if name == "ppo" else ()  # the report computes explained variance from traces
    training = stage(out, seed, *words, *setting_flags(key, directory), *traced, needs=needs)
    runs.append(replace(training, diverged=partial(record, args, (key,), out, has_diverged=True)))
    return Job(seed, (key,), (*runs, rated(args, (key,), out, [name, out], out / "summary.json")))


def initial_policy_job(args: Worlds, seed: int) -> Job:
    """Return the job that evaluates the initial policy and its best of n."""
    directory = share_directory(args) / str(seed)
    names = (table.START, *(f"best-of-{n}" for n in args.best_of))
    keys = tuple(run_key(args, "final", seed, name, 0, dict.fromkeys(table.SETTINGS, "")) for name in names)
    policies: list[object] = [word for name in names[1:] for word in (name, f"{name}:{directory / 'sft'}")]
    out = share_directory(args) / "runs" / f"final_{seed}_best-of-{'-'.join(map(str, args.best_of))}"
    return Job(seed, keys, (rated(args, keys, out, policies, directory / "rm/summary.json"),))


def rated(args: Worlds, keys: tuple[Row, ...], out: Path, policies: list[object], needed: Path) -> Run:
    """Return the evaluation of a job, which then writes the job's rows."""
    seed = int(keys[0]["world"])
    run = judged(out, share_directory(args) / str(seed), seed, policies, args.num_queries)
    return replace(run, done=rows_file(args, out), needs=(needed,), then=partial(record, args, keys, out))


def final_jobs(args: Worlds, seed: int, choices: dict[str, Row]) -> Iterator[Job]:
    """Yield the jobs of all final runs in a world."""
    if args.best_of:
        yield initial_policy_job(args, seed)
    for name, settings in choices.items():
        keys = [run_key(args, "final", seed, name, budget, settings) for budget in args.budgets]
        for variant, changes in VARIANTS.get(name, {}).items():
            if variant in args.variants and settings | changes != settings:
                keys.append(run_key(args, "final", seed, name, args.budget, settings | changes, variant))
        yield from (training_job(args, key) for key in {table.row_key(key): key for key in keys}.values())


def job_lists(args: Worlds) -> Iterator[list[Job]]:
    """Yield all jobs of a share, including finished ones: a list per rung of the tuning, then the final runs."""
    names = take_share(args, args.algorithms)
    for rung, (seeds, _) in enumerate(rungs(args)) if args.phase != "final" else ():
        rows = known_rows(args)
        yield [
            training_job(args, run_key(args, "tune", seed, name, args.budget, point))
            for seed in seeds
            for name in names
            for point in standing(args, rows, name, rung) or ()
        ]
    if args.phase != "tune":
        rows, choices = known_rows(args), {}
        for name in args.algorithms:
            if chosen := standing(args, rows, name, len(rungs(args))):
                choices[name] = chosen[0]
                for setting in [] if args.dry_run else table.at_edge(name, chosen[0]):
                    print(f"{name}: the best {setting}, {chosen[0][setting]}, is in the outer tenth of its range.")
            else:
                print(f"{name}: tuning isn't finished in {args.csv}; skipping the final runs.")
        yield [job for seed in take_share(args, args.seeds) for job in final_jobs(args, seed, choices)]


def without_row(args: Worlds, jobs: Iterable[Job]) -> list[Job]:
    known = {table.row_key(row) for row in known_rows(args)}
    return [job for job in jobs if not all(table.row_key(key) in known for key in job.keys)]


def worlds(args: Worlds) -> Iterator[list[Run]]:
    """Yield the runs of jobs without rows, each after the runs that make its world."""
    check_worlds(args)
    if not args.dry_run:
        (args.out / "rows").mkdir(parents=True, exist_ok=True)
        join(args)
    for jobs in job_lists(args):
        runs: list[Run] = []
        for job in jobs if args.dry_run else without_row(args, jobs):
            directory = share_directory(args) / str(job.world)
            runs += compared_world(directory, job.world, args.num_demonstrations, args.num_comparisons)
            runs += job.runs
        yield runs


def check_worlds(args: Worlds) -> None:
    for name in args.algorithms:
        if name not in table.SPACE:
            raise InputError(f"--algorithms {name}: choose from {', '.join(table.SPACE)}.")
    for name in args.variants:
        if name not in VARIANT_NAMES:
            raise InputError(f"--variants {name!r}: choose from {', '.join(VARIANT_NAMES)}.")
    if overlap := {*args.seeds} & {*args.tune_seeds}:
        raise InputError(f"--seeds {min(overlap)} is also in --tune-seeds: final worlds must not be used for tuning.")
    for flag, budget in (("--budget", args.budget), *(("--budgets", budget) for budget in args.budgets)):
        if budget % 256:
            raise InputError(f"{flag} {budget}: must be a multiple of 256, the largest rollout.")
    check_out(args.out)
    check_out(args.csv.parent, "--csv")


def hours_left(args: Worlds) -> float:
    """Estimate the core hours of jobs without rows, from the CSV's seconds or else from our measurements."""
    measured: dict[tuple[str, str], list[float]] = {}
    for row in known_rows(args):
        if row["seconds"]:
            measured.setdefault((row["algorithm"], row["budget"]), []).append(float(row["seconds"]))
    jobs = without_row(args, (job for jobs in job_lists(args) for job in jobs))
    seconds = float(A_WORLD * len({job.world for job in jobs}))
    for job in jobs:
        name, budget = job.keys[0]["algorithm"], job.keys[0]["budget"]
        known_seconds = measured.get((name, budget))
        guess = TRAINING[name] * (int(budget) / 1024 if budget != "0" else 1)
        seconds += AROUND_A_RUN + (fmean(known_seconds) if known_seconds else guess)
    return seconds / 3600
