"""Mutation testing of the course's graders: change each exercise's function in one place; do its tests fail?

    python -m tools.mutants whitening     # all mutants of one exercise
    python -m tools.mutants --sample 12   # twelve of each

An interrupted sweep continues from its file of verdicts.
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
    """Change the exercises' functions in one place at a time, and list the changes that no test catches."""

    exercises: tyro.conf.Positional[tuple[str, ...]] = ()
    """exercise names; default: all"""
    sample: Count | None = None
    """random mutants per exercise; None: all"""
    seed: Seed = 1
    jobs: Workers = 2
    """parallel processes"""
    limit: Seconds = 5.0
    """processor time for the tests of a mutant, seconds; or five times the time without a mutation, if that is more"""
    json: Path = Path("runs/mutants.jsonl")
    """file of verdicts, one per line; mutants that it has for the same source and tests are not run again"""
    publish: bool = False
    """write the counts to tools/mutants/mutants.csv; needs all mutants"""


def main(args: Args) -> None:
    if args.publish and (args.exercises or args.sample is not None):
        raise InputError("--publish needs all mutants: don't pass names or --sample.")
    exercises = chosen(args.exercises)
    tasks = sweep.make_tasks(exercises, args.sample, args.seed)
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
