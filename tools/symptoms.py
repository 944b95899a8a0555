"""Measure what each bug of the hunt changes in the metrics of the stages that it affects.

    python -m tools.symptoms --demo runs/tiny --out runs/symptoms

Each stage trains in the demo's world without a bug, at three seeds, and with each bug, at two; at one if the bug
changes no metric. Writes course/symptoms.csv, which the symptoms in course/bugs.py and tools/other_bugs.py quote. An
interrupted call continues from OUT. With --bugs, the table keeps its other rows. With --early, PPO stops after five
updates, and a later call without --early continues.
"""

import csv
import hashlib
import io
import math
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from course.bugs import BUGS, Bug
from nanorlhf.cli import Workers, check_ranges, run_module
from nanorlhf.errors import InputError
from nanorlhf.files import read_object, write_text
from nanorlhf.progress import Progress
from nanorlhf.training.resume import states
from nanorlhf.training.run import TIME_METRICS
from nanorlhf.training.run_directory import read_metrics
from tools.doctor import bug_stages, hash_code, planted, start
from tools.other_bugs import OTHER_BUGS

ALL_BUGS = (*BUGS, *OTHER_BUGS)
HEALTHY_SEEDS, SEEDS = (1, 2, 3), (1, 2)
IGNORED = {*TIME_METRICS, "step", "episode", "steps", "seconds", "peak_resident_bytes", "num_trained_parameters"}
OUTCOMES = ("objective/score", "gold_score", "validation_accuracy", "validation_loss")  # in the table, at the end
ROUNDING = 1e-4  # smaller differences may come from the order of float32 additions
FIRST = 5  # updates of PPO with --early
PER_WINDOW = 3  # rows per bug, stage and window, besides outcomes and the metrics that the symptom names

Means = dict[tuple[int, str, str], float]  # (window: 0, 1 or 2; metric; updates) -> mean


@dataclass(frozen=True, kw_only=True)
class Args:
    demo: Path = Path("runs/tiny")
    """output of `make demo`, with data, sft and rm"""
    out: Path = Path("runs/symptoms")
    table: Path = Path("course/symptoms.csv")
    bugs: tuple[str, ...] = ()
    """names of bugs; default: all"""
    num_seeds: Literal[1, 2] = 2
    """seeds to train each bug with"""
    early: bool = False
    """stop PPO after five updates"""
    jobs: Workers = 2
    """number of runs in parallel"""


class Case(NamedTuple):
    """Stages to train one after the other, with a bug or without."""

    bug: Bug | None
    stages: tuple[str, ...]
    seed: int

    @property
    def key(self) -> str:
        """A hash of the code and the edit, which determine the metrics."""
        edit = (self.bug.where, self.bug.old, self.bug.new, self.bug.number) if self.bug else ()
        return hashlib.sha256(hash_code() + repr((edit, self.stages, self.seed)).encode()).hexdigest()[:16]

    def directory(self, out: Path) -> Path:
        return out.absolute() / (self.bug.name if self.bug else f"healthy-{'-'.join(self.stages)}") / str(self.seed)

    def has_rows(self, out: Path, early: bool) -> bool:
        """Return whether all stages have finished, or with `early` at least trained for five updates."""
        file = self.directory(out) / "key"
        runs = [self.directory(out) / stage for stage in self.stages]
        return file.exists() and file.read_text() == self.key and all(is_done(run, early) for run in runs)


class Row(NamedTuple):
    """A metric with the bug and without, averaged over some updates."""

    bug: str
    stage: str
    metric: str
    updates: str
    """counted from 1; `read_means` chooses them"""
    healthy: float
    """at seed 1"""
    lowest: float
    highest: float
    """of three healthy seeds"""
    seed_1: float
    seed_2: float | None
    """with the bug"""
    ranges: float
    """distance to the healthy range, divided by the width of this range: of the seed that is nearer, 0 inside"""


def num_updates(run: Path) -> int:
    """Return the number of rows of a run's metrics.jsonl, which may not exist yet."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_done(run: Path, early: bool) -> bool:
    return (run / "summary.json").exists() or (early and run.name == "ppo" and num_updates(run) >= FIRST)


def run_case(case: Case, args: Args) -> None:
    """Train the stages of a case, from where an earlier call stopped. Raises InputError if one of them fails."""
    directory = case.directory(args.out)
    key = directory / "key"
    if not key.exists() or key.read_text() != case.key:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        key.write_text(case.key)
    with planted((case.bug,) if case.bug else ()) as tree:
        for stage in case.stages:
            out = directory / stage
            if not is_done(out, args.early):
                again = "--resume" if states(out) else "--overwrite"
                log = directory / f"{stage}.log"
                process = start(tree, stage, args.demo.absolute(), out, (again,), case.seed, log)
                while process.poll() is None:
                    time.sleep(0.5)
                    if args.early and stage == "ppo" and num_updates(out) >= FIRST:
                        process.terminate()  # takes effect at the end of an update: the next one, at the latest
                        process.wait()
            if not is_done(out, args.early):
                raise InputError(f"train_{stage}.py failed: see {directory / stage}.log.")


def healthy_case(stages: tuple[str, ...], seed: int) -> Case:
    """Return the longest run without a bug that begins with these stages, because it serves several bugs."""
    known = {bug_stages(bug) for bug in ALL_BUGS}
    return Case(None, max((other for other in known if other[: len(stages)] == stages), key=len), seed)


def read_means(run: Path) -> Means:
    """Average each metric at the beginning, over four more updates, and over five at the end of the run.

    If a metric was logged less than five times, as a validation loss, its first and its last value count; if only in
    summary.json, this value.
    """
    rows, means = read_metrics(run), {}
    if not (run / "summary.json").exists():
        rows = rows[:FIRST]
    for metric in {name: None for row in rows for name in row if name not in IGNORED}:
        points = [(int(row["step"]) + 1, row[metric]) for row in rows if metric in row]
        middle, end = (points[1:5], points[5:][-5:]) if len(points) >= 5 else ([], points[1:][-1:])
        for window, part in enumerate((points[:1], middle, end)):
            if part:
                (first, _), (last, _) = part[0], part[-1]
                updates = str(first) if first == last else f"{first}-{last}"
                means[window, metric, updates] = fmean(value for _, value in part)
    if (run / "summary.json").exists():
        known = {name for row in rows for name in row} | IGNORED
        summary = read_object(run / "summary.json")
        means |= {(2, name, "end"): float(summary[name]) for name in summary if name not in known}
    return means


def distance(values: Sequence[float], lowest: float, highest: float) -> float:
    """Return how far the nearest of the values is outside the range, in widths of the range.

    0 if one is inside or they are on both sides; NaN is infinitely far. No range is narrower than rounding errors.
    """
    values = [math.inf if math.isnan(value) else value for value in values]
    width = max(highest - lowest, ROUNDING * max(1.0, abs(lowest), abs(highest)))
    return max(lowest - max(values), min(values) - highest, 0.0) / width


def changes_nothing(case: Case, out: Path) -> bool:
    """Return whether a bug leaves every metric of the same seed as it is."""
    directories = case.directory(out), healthy_case(case.stages, case.seed).directory(out)
    pairs = [[read_means(directory / stage) for directory in directories] for stage in case.stages]
    return all(
        sick.keys() <= healthy.keys() and all(distance([sick[key]], healthy[key], healthy[key]) <= 1 for key in sick)
        for sick, healthy in pairs
    )


def measure(bug: Bug, out: Path) -> Iterator[Row]:
    """Yield a bug's rows: in each stage and window the largest differences, outcomes, and what the symptom names."""
    stages = bug_stages(bug)
    with_bug = [case.directory(out) for seed in SEEDS if (case := Case(bug, stages, seed)).has_rows(out, True)]
    for stage in stages if with_bug else ():
        healthy = [read_means(healthy_case(stages, seed).directory(out) / stage) for seed in HEALTHY_SEEDS]
        sick = [read_means(directory / stage) for directory in with_bug]
        windows: dict[int, list[tuple[float, Row]]] = {}
        for key in [key for key in healthy[0] if all(key in means for means in (*healthy, *sick[:1]))]:
            usual, values = [means[key] for means in healthy], [means[key] for means in sick if key in means]
            lowest, highest = min(usual), max(usual)
            ranges = distance(values, lowest, highest)
            window, metric, updates = key
            second = values[1] if len(values) > 1 else None
            row = Row(bug.name, stage, metric, updates, usual[0], lowest, highest, values[0], second, ranges)
            shift = abs(values[0] - usual[0]) / max(highest - lowest, ROUNDING)  # of seed 1, also within the range
            windows.setdefault(window, []).append((shift, row))
        for window, rows in sorted(windows.items()):
            ordered = sorted(rows, key=lambda pair: (pair[1].ranges, pair[0]), reverse=True)
            for rank, (_, row) in enumerate(ordered):
                outcome = row.metric in OUTCOMES and window == 2
                named = re.search(rf"(?<![\w/]){row.metric}(?![\w/])", bug.symptom)
                if rank < PER_WINDOW or outcome or named:
                    yield row


def read_table(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def write_table(path: Path, bugs: Sequence[Bug], out: Path) -> None:
    """Replace the rows of these bugs and keep the table's other rows; sort them like the lists of bugs."""
    names = {bug.name for bug in bugs}
    rows = [[row[name] for name in Row._fields] for row in read_table(path) if row["bug"] not in names]
    for bug in bugs:
        rows += [[f"{x:.4g}" if isinstance(x, float) else x or "" for x in row] for row in measure(bug, out)]
    order = [bug.name for bug in ALL_BUGS]
    rows.sort(key=lambda row: order.index(row[0]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Row._fields, *rows])
    write_text(path, text.getvalue())  # a call that is interrupted leaves the old table


def main(args: Args) -> None:
    check_ranges(args)
    for name in ("data", "sft", "rm"):
        if not (args.demo / name).is_dir():
            raise InputError(f"--demo {args.demo} has no {name}: run `make demo` first.")
    for name in args.bugs:
        if all(bug.name != name for bug in ALL_BUGS):
            raise InputError(f"--bugs {name}: unknown bug.")
    bugs = [bug for bug in ALL_BUGS if bug_stages(bug) and (not args.bugs or bug.name in args.bugs)]
    first, second = ([Case(bug, bug_stages(bug), seed) for bug in bugs] for seed in SEEDS)
    healthy = dict.fromkeys(healthy_case(bug_stages(bug), seed) for bug in bugs for seed in HEALTHY_SEEDS)
    rounds = ((list(healthy), "without a bug"), (first, "seed 1"), (second, "seed 2"))
    for cases, title in rounds[: 1 + args.num_seeds]:
        if cases is second:
            cases = [case for case, before in zip(second, first, strict=True) if not changes_nothing(before, args.out)]
        pending = [case for case in cases if not case.has_rows(args.out, args.early)]
        with ThreadPoolExecutor(args.jobs) as pool, Progress(total=len(pending), desc=title) as bar:
            for case, _ in zip(pending, pool.map(lambda case: run_case(case, args), pending), strict=True):
                bar.update()
                bar.write(str(case.directory(args.out)))
                if case.bug:
                    write_table(args.table, bugs, args.out)
    write_table(args.table, bugs, args.out)


if __name__ == "__main__":
    run_module(main, Args)
