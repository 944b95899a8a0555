"""The course: exercises that the project's own tests grade, and a bug hunt.

python -m course start DIR          a copy of the repository without the exercises' functions
python -m course next [DIR]         what to do now, and what to read
python -m course grade [DIR]        points; the first claim that fails, exercise by exercise
python -m course plant DIR --seed 7 a copy with a real bug in it
python -m course check DIR          is its behaviour right again?
python -m course reveal DIR         the page of the bug
python -m course verify             every exercise and every bug, in minutes: for those who change this course
python -m course mutants            how good the graders are: which wrong solutions they let pass
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tqdm import tqdm

from course import hunt, mutants, verify
from course.copies import ROOT, check_copy
from course.exercises import EXERCISES, Exercise, chosen
from course.grade import Outcome, Worker, first_open, given, grade
from course.start import start
from nanorlhf.cli import Count, Seconds, Seed, Workers, check_ranges, run_module
from nanorlhf.errors import InputError

Directory = tyro.conf.Positional[Path]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Write a copy of the repository in which the exercises' functions are empty."""

    directory: Directory
    """new directory"""
    exercises: tuple[str, ...] = ()
    """names; none: all"""

    def run(self) -> None:
        exercises = chosen(self.exercises) if self.exercises else list(EXERCISES)
        start(self.directory, exercises)
        print(f"{self.directory}: {len(exercises)} exercises, {points_of(exercises)} points.")
        print(f"What to do first: cd {self.directory} && python -m course next")


@dataclass(frozen=True, kw_only=True)
class Next:
    """Say which exercise comes now, what to read, and which claim does not hold yet."""

    directory: Directory = Path(".")
    limit: Seconds = 60.0
    """seconds for the tests of an exercise"""

    def run(self) -> None:
        with Worker() as worker:
            found = first_open(self.directory, self.limit, worker)
        if found is None:
            print("All exercises are solved.")
            return
        exercise, result = found
        print(f"{exercise.name}: {exercise.points} point(s), level {exercise.level}")
        for function in exercise.functions:
            print(f"  write  {function.replace(':', ': ')}")
        print(f"  read   {exercise.read}\n  hint   {exercise.hint}")
        for test in exercise.tests:
            print(f"  test   {test}")
        print(f"  now    {result.claim}: {result.reason}")


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Run the tests of each exercise and add up the points."""

    directory: Directory = Path(".")
    exercises: tuple[str, ...] = ()
    """names; none: those that `start` has emptied"""
    json: Path | None = None
    """file for the result"""
    limit: Seconds = 60.0
    """seconds for the tests of an exercise: more, and it has not passed"""
    workers: Workers = 2
    """processes at once"""
    own_tests: bool = False
    """take the tests of the copy, which a student may have edited"""

    def run(self) -> None:
        exercises = chosen(self.exercises) if self.exercises else given(self.directory)
        check_copy(self.directory)
        with ExitStack() as stack, tqdm(total=len(exercises), unit="exercise", leave=False) as bar:
            workers = [stack.enter_context(Worker()) for _ in range(min(self.workers, len(exercises)))]
            outcomes = grade(self.directory, exercises, self.limit, workers, self.own_tests, bar.update)
        print(table(exercises, outcomes))
        if self.json is not None:
            self.json.write_text(json.dumps(as_dict(exercises, outcomes), indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Write a copy of the repository with one bug in it."""

    directory: Directory
    """new directory"""
    seed: Seed = 1
    """which bug"""
    level: Literal[1, 2, 3] | None = None
    """1: it shows in a metric at once; 2: in a metric, to those who know what to expect; 3: in a test alone, or with
    other settings; none given: any"""

    def run(self) -> None:
        level = hunt.plant(self.directory, self.seed, self.level)
        print(f"{self.directory}: one bug of level {level}. When you have fixed it: {CHECK} {self.directory}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Say whether the behaviour of a copy is right again."""

    directory: Directory
    limit: Seconds = 120.0
    """seconds for the tests"""

    def run(self) -> None:
        hunt.planted_in(self.directory)
        with Worker() as worker:
            print(hunt.check(self.directory, self.limit, worker))


@dataclass(frozen=True, kw_only=True)
class Reveal:
    """Print the page of the bug that was planted."""

    directory: Directory

    def run(self) -> None:
        print(hunt.page(hunt.planted_in(self.directory)))


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check the course itself: each exercise fails when empty and passes when restored, each bug is caught."""

    parts: tuple[Literal["exercises", "bugs", "runs"], ...] = ("exercises", "bugs", "runs")
    """runs: all stages in miniature with each bug, and the metrics that change"""
    names: tuple[str, ...] = ()
    """of exercises and bugs; none: all"""
    limit: Seconds = 300.0
    """seconds for the tests of an exercise or a bug"""
    json: Path | None = None
    """file for the result"""

    def run(self) -> None:
        verify.verify(self.parts, self.names, self.limit, self.json)


@dataclass(frozen=True, kw_only=True)
class Mutants:
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
    """write the numbers into course/mutants.csv; they must be of all mutants"""

    def run(self) -> None:
        if self.publish and (self.exercises or self.sample is not None):
            raise InputError("--publish needs all mutants: leave out the names and --sample.")
        exercises = chosen(self.exercises) if self.exercises else list(EXERCISES)
        tasks = mutants.tasks_of(exercises, self.sample, self.seed)
        known = mutants.read_verdicts(self.json)
        with tqdm(total=len(tasks), unit="mutant", leave=False) as bar:

            def tell(verdict: mutants.Verdict) -> None:
                known[verdict.key] = verdict
                mutants.append(self.json, verdict)
                bar.update()

            todo = [task for task in tasks if task.key not in known]
            bar.update(len(tasks) - len(todo))
            mutants.sweep(todo, self.jobs, self.limit, tell)
        verdicts = [known[task.key] for task in tasks]
        print(mutants.table(verdicts), mutants.listed(verdicts), sep="\n")
        if self.publish:
            mutants.write_counts(ROOT / "course" / "mutants.csv", verdicts)


@dataclass(frozen=True, kw_only=True)
class Args:
    command: Annotated[
        Start | Next | Grade | Plant | Check | Reveal | Verify | Mutants,
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.arg(name=""),
    ]


CHECK = "python -m course check"


def points_of(exercises: list[Exercise]) -> int:
    return sum(exercise.points for exercise in exercises)


def table(exercises: list[Exercise], outcomes: dict[str, Outcome]) -> str:
    """One line per exercise, and the sum."""
    width = max(len(exercise.name) for exercise in exercises)
    lines = []
    for exercise in exercises:
        result = outcomes[exercise.name]
        points = exercise.points if result.passed else 0
        said = "passed" if result.passed else f"{result.claim}: {result.reason}"
        lines.append(f"{exercise.name:{width}}  {points:2} of {exercise.points}  {said:.160}")
    reached = points_of([exercise for exercise in exercises if outcomes[exercise.name].passed])
    return "\n".join([*lines, f"{'points':{width}}  {reached:2} of {points_of(exercises)}"])


def as_dict(exercises: list[Exercise], outcomes: dict[str, Outcome]) -> dict:
    rows = [
        {
            "name": exercise.name,
            "points": exercise.points if (result := outcomes[exercise.name]).passed else 0,
            "of": exercise.points,
            "passed": result.passed,
            "claim": result.claim,
            "reason": result.reason,
            "seconds": result.seconds,
        }
        for exercise in exercises
    ]
    return {"points": sum(row["points"] for row in rows), "of": points_of(exercises), "exercises": rows}


def main(args: Args) -> None:
    check_ranges(args.command)
    run: Callable[[], None] = args.command.run
    run()


if __name__ == "__main__":
    run_module(main, Args)
