"""Entries in the worlds of the public set, or of a set drawn from a secret.

The CSV records finished runs: a run with a row is not repeated unless its entry's file changes.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from experiments.compare.runs import compared_world
from experiments.leaderboard import report as table
from experiments.leaderboard.labeller import read_secret, secret_number
from experiments.leaderboard.report import Row
from experiments.runs import Args, Run, Words
from experiments.worlds.report import BUDGETS, TUNING_WORLDS, read_rows
from experiments.worlds.runs import processor, revision
from nanorlhf.cli import Count, PositiveFloat
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_object, write_text

ENTRIES = tuple(
    f"experiments/leaderboard/entries/{path.name}"
    for path in sorted((Path(__file__).parent / "entries").glob("[!_]*.py"))
)
BASELINES = ("sft", "best-of-16", "best-of-64")  # the initial policy, and its best answer by the reward model


@dataclass(frozen=True, kw_only=True)
class Leaderboard(Args):
    """Run entries. Without --secret-file in the public set, where the worlds study has rows for its algorithms."""

    out: Path = Path("runs/leaderboard")
    jobs: Count = 1
    """entries in parallel; the limits assume two cores for each"""
    csv: Path = table.Args.csv
    """table of all finished runs"""
    worlds: Path = table.Args.worlds
    """the worlds study's table, which has rows of the public set"""
    entries: Words = (*BASELINES, *ENTRIES)
    """files with a function train(world); sft and best-of-N are evaluated without one"""
    secret_file: Path | None = None
    """file with a secret: use the set drawn from it"""
    numbers: tuple[Count, ...] = table.WORLDS
    """worlds; in the public set their seeds"""
    budgets: tuple[Count, ...] = BUDGETS
    """responses that the reward model scores for an entry; an entry that needs none runs once"""
    reproduce: bool = False
    """run entries again that have rows in the worlds study"""
    minutes: PositiveFloat = 20
    """time limit of an entry on two cores"""
    num_demonstrations: Count = 8000
    num_comparisons: Count = 1600
    num_queries: Count = 256
    """queries of an evaluation"""


def set_name(args: Leaderboard) -> str:
    """Return `public`, or a name that differs between secrets and doesn't show them."""
    secret = read_secret(args.secret_file)
    return table.PUBLIC if secret is None else f"secret-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"


def world_runs(args: Leaderboard, number: int) -> list[Run]:
    """Return the runs that make a world: as in the worlds study, or with a secret labeller, texts and seeds."""
    directory = args.out / set_name(args) / str(number)
    sizes = args.num_demonstrations, args.num_comparisons
    secret = read_secret(args.secret_file)
    if secret is None:
        return compared_world(directory, number, *sizes)
    words = (
        "-m", "experiments.leaderboard.labeller", "--secret-file", args.secret_file, "--number", number,
        "--out", directory / "data", "--num-demonstrations", sizes[0], "--num-comparisons", sizes[1],
    )  # fmt: skip
    data = Run(tuple(map(str, words)), directory / "data/tokenizer.json")
    return [data, *compared_world(directory, secret_number("training", secret, number), *sizes)[1:]]


def digest(entry: str) -> str:
    """Return the beginning of the SHA-256 of an entry's file, "" for a baseline."""
    if not entry.endswith(".py"):
        return ""
    if not Path(entry).is_file():
        raise InputError(f"--entries {entry}: no such file.")
    return hashlib.sha256(Path(entry).read_bytes()).hexdigest()[:8]


def known_rows(args: Leaderboard) -> list[Row]:
    """Return the rows of the CSV and, unless they are to be reproduced, the worlds study's."""
    rows = table.read_results(args.csv)
    return rows if args.reproduce else [*table.study_rows(read_rows(args.worlds)), *rows]


def run_key(args: Leaderboard, number: int, entry: str) -> Row:
    return {"set": set_name(args), "number": str(number), "entry": Path(entry).stem, "digest": digest(entry)}


def entry_run(args: Leaderboard, number: int, entry: str, budget: int) -> Run:
    key = run_key(args, number, entry)
    directory = args.out / key["set"] / str(number)
    out = args.out / "rows" / f"{'_'.join(key.values())}_{budget}.json"
    words = (
        "-m", "experiments.leaderboard.referee", "--world", directory, "--number", number, "--entry", entry,
        "--budget", budget, "--minutes", args.minutes, "--num-queries", args.num_queries, "--out", out,
        *(("--secret-file", args.secret_file) if args.secret_file else ()),
    )  # fmt: skip
    run = Run(tuple(map(str, words)), out, (directory / "rm/summary.json",))
    return replace(run, then=partial(record, args, key, budget, out))


def record(args: Leaderboard, key: Row, budget: int, out: Path) -> None:
    """Add the row of a finished run to the CSV, in place of one for another version of the entry.

    An entry that scored no response gets a budget of 0, which counts at every budget.
    """
    result = read_object(out)
    numbers = {name: "" if result.get(name) is None else f"{result[name]:.6g}" for name in table.MEASURED}
    used = str(budget if result["num_scored"] else 0)
    row = key | {"budget": used, "refused": result["refused"]} | numbers
    row |= {"processor": processor(), "revision": revision()}
    with (args.out / "rows" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_text(args.csv, table.results_text([*table.read_results(args.csv), row]))


def has_row(rows: list[Row], key: Row, budget: int) -> bool:
    """Return True if a run has a row. The worlds study's have no digest: it has no entries."""
    names = ("set", "number", "entry")
    return any(
        all(row[name] == key[name] for name in names)
        and row["digest"] in ("", key["digest"])
        and row["budget"] in ("0", str(budget))
        for row in rows
    )


def leaderboard(args: Leaderboard) -> Iterator[list[Run]]:
    """Yield the runs without rows, a list per budget: the smallest shows which entries need no responses."""
    check_leaderboard(args)
    if not args.dry_run:
        (args.out / "rows").mkdir(parents=True, exist_ok=True)
    for budget in sorted(args.budgets):
        rows, runs = known_rows(args), []
        for number in args.numbers:
            jobs = [
                entry_run(args, number, entry, budget)
                for entry in args.entries
                if args.dry_run or not has_row(rows, run_key(args, number, entry), budget)
            ]
            runs += [*world_runs(args, number), *jobs] if jobs else []
        for run in [] if args.dry_run else runs:
            if run.then is not None and run.done is not None and run.done.exists():
                run.then()  # it ended after the study was interrupted
        yield runs


def check_leaderboard(args: Leaderboard) -> None:
    for entry in args.entries:
        if not entry.endswith(".py") and entry != "sft" and not entry.removeprefix("best-of-").isdecimal():
            raise InputError(f"--entries {entry}: expected the file of an entry, sft or best-of-N.")
        digest(entry)
    if args.secret_file is None and (outside := {*args.numbers} - {*table.WORLDS, *TUNING_WORLDS}):
        raise InputError(f"--numbers {min(outside)}: the public set has worlds 1 to 20; 101 to 105 are for tuning.")
    for budget in args.budgets:
        if budget % 64:
            raise InputError(f"--budgets {budget}: must be a multiple of 64, a rollout of the first entries.")
    check_out(args.out)
    check_out(args.csv.parent, "--csv")
