"""How good are the course's graders? Each exercise's function is changed in one place at a time: do its tests notice?

    python -m tools.mutants whitening     # all mutants of one exercise
    python -m tools.mutants --sample 12   # twelve of each

The file of verdicts lets an interrupted sweep go on.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from course.exercises import chosen
from nanorlhf.cli import Count, Seconds, Seed, Workers, run_module
from nanorlhf.errors import InputError
from nanorlhf.progress import Progress
from tools.mutants import sweep

COUNTS = Path(__file__).with_name("mutants.csv")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Change the exercises' functions in one place at a time, and list the changes that no test notices."""

    exercises: tyro.conf.Positional[tuple[str, ...]] = ()
    """names; none: all"""
    sample: Count | None = None
    """mutants per exercise, drawn by the seed; None: all"""
    seed: Seed = 1
    jobs: Workers = 2
    """processes at once"""
    limit: Seconds = 5.0
    """seconds of processor time for the tests of a mutant; five times as many as without it, if that is more"""
    json: Path = Path("runs/mutants.jsonl")
    """file for the verdicts, a line each; those that it holds, on the same source and tests, are not asked for again"""
    publish: bool = False
    """write the numbers into tools/mutants/mutants.csv; they must be of all mutants"""


def main(args: Args) -> None:
    if args.publish and (args.exercises or args.sample is not None):
        raise InputError("--publish needs all mutants: leave out the names and --sample.")
    exercises = chosen(args.exercises)
    tasks = sweep.tasks_of(exercises, args.sample, args.seed)
    known = sweep.read_verdicts(args.json)
    with Progress(total=len(tasks), unit="mutant", leave=False) as bar:

        def tell(verdict: sweep.Verdict) -> None:
            known[verdict.key] = verdict
            sweep.append(args.json, verdict)
            bar.update()

        todo = [task for task in tasks if task.key not in known]
        bar.update(len(tasks) - len(todo))
        sweep.sweep(todo, args.jobs, args.limit, tell)
    verdicts = [known[task.key] for task in tasks]
    print(sweep.table(verdicts), sweep.listed(verdicts), sep="\n")
    if args.publish:
        sweep.write_counts(COUNTS, verdicts)


if __name__ == "__main__":
    run_module(main, Args)
