"""The course: exercises that the project's own tests grade, and a bug hunt.

python -m course start DIR          a copy of the repository without the exercises' functions
python -m course next [DIR]         what to do now, and what to read
python -m course grade [DIR]        points; the first claim that fails, exercise by exercise; --format csv: of a class
python -m course similar DIR        pairs of submissions that are alike in what few have written
python -m course handout --out DIR  a page per exercise and per week, without the answers; --key: the answers
python -m course nbgrader --out DIR a notebook per exercise, which nbgrader releases and grades
python -m course slides --out DIR   the four decks of the lecture as pages for a browser
python -m course plant DIR --seed 7 a copy with a real bug in it
python -m course check DIR          is its behaviour right again?
python -m course reveal DIR         the page of the bug
python -m course verify             every exercise and every bug, in minutes: for those who change this course
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from course import assignment, handout, hunt, questions, slides, verify
from course.copies import check_copy
from course.exercises import chosen
from course.grader import similar, whole_class
from course.grader.formats import FORMATS, points_of, table
from course.grader.grade import desks, first_open, given, grade
from course.grader.worker import Worker
from course.questions import right_answers
from course.start import start
from nanorlhf.cli import Fraction, Seconds, Seed, Workers, check_ranges, run_module
from nanorlhf.errors import InputError
from nanorlhf.progress import Progress

Directory = tyro.conf.Positional[Path]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Write a copy of the repository in which the exercises' functions are empty."""

    directory: Directory
    """new directory"""
    exercises: tuple[str, ...] = ()
    """names; none: all"""
    student: str | None = None
    """name of whom it is for: adds QUESTIONS.md, with numbers of the student's own"""

    def run(self) -> None:
        exercises = chosen(self.exercises)
        start(self.directory, exercises, self.student)
        print(f"{self.directory}: {len(exercises)} exercises, {points_of(exercises)} points.")
        print(f"What to do first: cd {self.directory} && python -m course next")


@dataclass(frozen=True, kw_only=True)
class Next:
    """Say which exercise comes now, what to read, and which claim does not hold yet."""

    directory: Directory = Path(".")
    limit: Seconds = 60.0
    """seconds for the tests of an exercise"""

    def run(self) -> None:
        check_copy(self.directory)
        with desks(1) as [desk]:
            found = first_open(self.directory, self.limit, desk)
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
    """a student's copy; for csv a directory of such copies"""
    exercises: tuple[str, ...] = ()
    """names; none: those that `start` has emptied, as the copy itself says"""
    format: Literal["table", "json", "gradescope", "github-classroom", "csv"] = "table"
    """gradescope: results.json; github-classroom: a line for $GITHUB_OUTPUT; csv: a row for each of many submissions"""
    out: Path | None = None
    """file for the result; a csv that is there already is gone on with; none: print it"""
    limit: Seconds = 60.0
    """seconds for the tests of an exercise: more, and it has not passed"""
    workers: Workers = 2
    """processes at once"""

    def run(self) -> None:
        if self.format not in ("table", "json") and not self.exercises:
            raise InputError(f"--format {self.format} needs --exercises: a copy's own list is the student's.")
        if self.format == "csv" and self.out is None:
            raise InputError("--format csv needs --out: the file is what an interrupted run goes on from.")
        exercises = chosen(self.exercises) if self.exercises else given(self.directory)
        num = min(self.workers, len(exercises))
        if self.format == "csv":
            assert self.out is not None
            submissions = whole_class.submissions_in(self.directory)
            whole_class.read_class(self.out, exercises)  # refused before anything runs
            with Progress(total=len(submissions), unit="submission", leave=False) as bar, desks(num) as found:
                rows = whole_class.grade_class(self.directory, exercises, self.limit, found, self.out, bar.update)
            print(f"{self.out}: {len(rows)} submissions, {points_of(exercises)} points each at most.")
            return
        check_copy(self.directory)
        with Progress(total=len(exercises), unit="exercise", leave=False) as bar, desks(num) as found:
            outcomes = grade(self.directory, exercises, self.limit, found, bar.update)
        if self.format == "table" or self.out is not None:
            print(table(exercises, outcomes))
            if (asked := right_answers(self.directory)) is not None:
                print(f"questions of {asked[0]}: {asked[1]} of {len(questions.MAKERS)}")
        if self.format != "table":
            text = FORMATS[self.format](exercises, outcomes)
            if self.out is None:
                print(text, end="")
            else:
                with self.out.open("a" if self.format == "github-classroom" else "w") as file:  # others' lines stay
                    file.write(text)


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Write a copy of the repository with one bug in it."""

    directory: Directory
    """new directory"""
    seed: Seed = 1
    """which bug"""
    student: str | None = None
    """draw the bug by this name, not by the seed"""
    level: Literal[1, 2, 3] | None = None
    """1: it shows in a metric at once; 2: in a metric, to those who know what to expect; 3: in a test alone, or with
    other settings; none given: any"""

    def run(self) -> None:
        seed = self.seed if self.student is None else questions.seed_of(self.student)
        level = hunt.plant(self.directory, seed, self.level)
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
class Similar:
    """List the pairs of submissions that are alike in what few have written, exercise by exercise."""

    directory: Directory
    """holds a student's copy in each of its directories"""
    exercises: tuple[str, ...] = ()
    """names; none: all"""
    threshold: Fraction = 0.8
    """shared shingles per shingle of the shorter one"""

    def run(self) -> None:
        submissions = whole_class.submissions_in(self.directory)
        pairs = [
            pair
            for exercise in chosen(self.exercises)
            for pair in similar.pairs_of(submissions, exercise, self.threshold)
        ]
        print(similar.table(pairs))


@dataclass(frozen=True, kw_only=True)
class Handout:
    """Write a page for each exercise and each week, without the answers, or the key to them."""

    out: Path
    """new directory"""
    exercises: tuple[str, ...] = ()
    """names; none: all"""
    key: bool = False
    """the solutions and how to mark them, instead of the hand-outs"""
    pdf: bool = False
    """print each page into a PDF too, by Chromium"""

    def run(self) -> None:
        exercises = chosen(self.exercises)
        with Progress(unit="page", leave=False) as bar:
            written = handout.write_handouts(self.out, exercises, self.key, self.pdf, bar.update)
        print(f"{self.out}: {len(written)} files.")


@dataclass(frozen=True, kw_only=True)
class Nbgrader:
    """Write a course directory of nbgrader: a source notebook per exercise, with the solution and the hidden test."""

    out: Path
    """new directory"""
    exercises: tuple[str, ...] = ()
    """names; none: all"""

    def run(self) -> None:
        exercises = chosen(self.exercises)
        written = assignment.write_assignments(self.out, exercises)
        print(f"{self.out}: {len(written)} notebooks, {points_of(exercises)} points.")


@dataclass(frozen=True, kw_only=True)
class Slides:
    """Write the four decks of docs/slides as pages for a browser: right arrow: next step, n: the speaker's notes."""

    out: Path
    """directory"""
    pdf: bool = False
    """print each deck into a PDF too, by Chromium"""

    def run(self) -> None:
        with Progress(unit="deck", leave=False) as bar:
            written = slides.write_slides(self.out, self.pdf, bar.update)
        print("\n".join(map(str, written)))


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
class Args:
    command: Annotated[
        Start | Next | Grade | Similar | Handout | Nbgrader | Slides | Plant | Check | Reveal | Verify,
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.arg(name=""),
    ]


CHECK = "python -m course check"


def main(args: Args) -> None:
    check_ranges(args.command)
    run: Callable[[], None] = args.command.run
    run()


if __name__ == "__main__":
    run_module(main, Args)
