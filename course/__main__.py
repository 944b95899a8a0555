"""The course: exercises graded by the project's own tests, and a bug hunt.

python -m course start DIR          a copy of the repository without the exercises' functions
python -m course start DIR --scratch    only nano.py, without its functions, to write from scratch
python -m course next [DIR]         the next exercise, and what to read for it
python -m course grade [DIR]        points and the first failing test of each exercise; --format csv: a whole class
python -m course similar DIR        pairs of suspiciously similar submissions
python -m course handout --out DIR  a page per exercise and per week, without answers; --key: the answers
python -m course nbgrader --out DIR a notebook per exercise, for nbgrader to release and grade
python -m course slides --out DIR   the slide decks of the eight sessions as HTML pages
python -m course plant DIR --seed 7 a copy with a real bug in it
python -m course check DIR          is the bug fixed?
python -m course reveal DIR         the description of the bug
python -m course verify             check every exercise and every bug after changing the course; takes minutes
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from course import assignment, handout, hunt, questions, scratch, slides, verify
from course.copies import check_copy
from course.examples import EXAMPLES
from course.exercises import chosen
from course.grader import similar, whole_class
from course.grader.formats import FORMATS, max_points, table
from course.grader.grade import assigned_exercises, check_gradable, first_open, grade, graders
from course.grader.worker import Worker
from course.questions import right_answers
from course.start import start
from nanorlhf.cli import Fraction, Seconds, Seed, Workers, check_ranges, run_module
from nanorlhf.errors import InputError
from nanorlhf.progress import Progress

Directory = tyro.conf.Positional[Path]


@dataclass(frozen=True, kw_only=True)
class Start:
    """Write a copy of the repository with the exercises' functions emptied."""

    directory: Directory
    """new directory"""
    exercises: tuple[str, ...] = ()
    """exercise names; default: all"""
    student: str | None = None
    """the student's name: adds QUESTIONS.md, with numbers drawn for this student"""
    scratch: bool = False
    """write only nano.py, with all functions empty, to write it section by section"""

    def run(self) -> None:
        if self.scratch:
            if self.exercises or self.student is not None:
                raise InputError("--scratch: takes no --exercises and no --student.")
            scratch.start(self.directory)
            print(f"{self.directory / 'nano.py'}: write section 1, then run: python -m course next {self.directory}")
            return
        exercises = chosen(self.exercises)
        start(self.directory, exercises, self.student)
        print(f"{self.directory}: {len(exercises)} exercises, {max_points(exercises)} points.")
        print(f"Start with: cd {self.directory} && python -m course next")


@dataclass(frozen=True, kw_only=True)
class Next:
    """Print the next exercise, what to read, and the first failing test."""

    directory: Directory = Path(".")
    limit: Seconds = 60.0
    """time limit for the tests of an exercise, seconds; of a section from scratch: ten times as much"""

    def run(self) -> None:
        if scratch.is_scratch(self.directory):
            with Worker() as worker:
                for line in scratch.progress(self.directory, 10 * self.limit, worker):
                    print(line, flush=True)
            return
        check_copy(self.directory)
        with graders(1) as [grader]:
            open_exercise = first_open(self.directory, self.limit, grader)
        if open_exercise is None:
            print("All exercises are solved.")
            return
        exercise, result = open_exercise
        print(f"{exercise.name}: {exercise.points} point(s), level {exercise.level}")
        for function in exercise.functions:
            print(f"  write  {function.replace(':', ': ')}")
        print(f"  read   {exercise.read}\n  hint   {exercise.hint}")
        print("\n".join(f"         {line}" for line in EXAMPLES[exercise.name][0].splitlines()))
        for test in exercise.tests:
            print(f"  test   {test}")
        print(f"  now    {result.claim}: {result.reason}")


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Run the tests of each exercise and add up the points."""

    directory: Directory = Path(".")
    """a student's copy; with --format csv, a directory of such copies"""
    exercises: tuple[str, ...] = ()
    """exercise names; default: the list that `start` stored in the copy"""
    format: Literal["table", "json", "gradescope", "github-classroom", "csv"] = "table"
    """gradescope: results.json; github-classroom: a line for $GITHUB_OUTPUT; csv: a row per submission"""
    out: Path | None = None
    """output file; an existing csv is continued; default: print"""
    limit: Seconds = 60.0
    """time limit for the tests of an exercise, seconds; beyond it the exercise fails"""
    workers: Workers = 2
    """parallel processes"""

    def run(self) -> None:
        if self.format not in ("table", "json") and not self.exercises:
            raise InputError(f"--format {self.format} needs --exercises: the student could edit the list in the copy.")
        if self.format == "csv" and self.out is None:
            raise InputError("--format csv needs --out: an interrupted run continues from that file.")
        exercises = chosen(self.exercises) if self.exercises else assigned_exercises(self.directory)
        num = min(self.workers, len(exercises))
        if self.format == "csv":
            assert self.out is not None
            submissions = whole_class.submissions_in(self.directory)
            whole_class.read_class(self.out, exercises)  # raises before anything runs
            with Progress(total=len(submissions), unit="submission", leave=False) as bar, graders(num) as started:
                rows = whole_class.grade_class(self.directory, exercises, self.limit, started, self.out, bar.update)
            print(f"{self.out}: {len(rows)} submissions, at most {max_points(exercises)} points each.")
            return
        check_copy(self.directory)
        with Progress(total=len(exercises), unit="exercise", leave=False) as bar, graders(num) as started:
            outcomes = grade(self.directory, exercises, self.limit, started, bar.update)
        if self.format not in ("table", "json"):
            check_gradable(outcomes)
        if self.format == "table" or self.out is not None:
            print(table(exercises, outcomes))
            if (answers := right_answers(self.directory)) is not None:
                print(f"{answers[0]}'s questions: {answers[1]} of {len(questions.MAKERS)} right")
        if self.format != "table":
            text = FORMATS[self.format](exercises, outcomes)
            if self.out is None:
                print(text, end="")
            else:
                with self.out.open("a" if self.format == "github-classroom" else "w") as file:  # other steps write too
                    file.write(text)


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Write a copy of the repository with one bug in it."""

    directory: Directory
    """new directory"""
    seed: Seed = 1
    """selects the bug"""
    student: str | None = None
    """student's name: selects the bug instead of the seed"""
    level: Literal[1, 2, 3] | None = None
    """1: obvious in a metric; 2: visible in a metric if you know what to expect; 3: visible only in a test, or with
    other settings; default: any level"""

    def run(self) -> None:
        seed = self.seed if self.student is None else questions.student_seed(self.student)
        level = hunt.plant(self.directory, seed, self.level)
        print(f"{self.directory}: one bug of level {level}. After fixing it, run: {CHECK} {self.directory}")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check whether the bug in a copy is fixed."""

    directory: Directory
    limit: Seconds = 120.0
    """time limit for the tests, seconds"""

    def run(self) -> None:
        hunt.planted_in(self.directory)
        with Worker() as worker:
            print(hunt.check(self.directory, self.limit, worker))


@dataclass(frozen=True, kw_only=True)
class Reveal:
    """Print the description of the planted bug."""

    directory: Directory

    def run(self) -> None:
        print(hunt.page(hunt.planted_in(self.directory)))


@dataclass(frozen=True, kw_only=True)
class Similar:
    """List pairs of similar submissions for each exercise, ignoring code that many students share."""

    directory: Directory
    """directory with one student's copy per subdirectory"""
    exercises: tuple[str, ...] = ()
    """exercise names; default: all"""
    threshold: Fraction = 0.8
    """minimum number of shared shingles, as a fraction of the shorter submission's shingles"""

    def run(self) -> None:
        submissions = whole_class.submissions_in(self.directory)
        pairs = [
            pair
            for exercise in chosen(self.exercises)
            for pair in similar.similar_pairs(submissions, exercise, self.threshold)
        ]
        print(similar.table(pairs))


@dataclass(frozen=True, kw_only=True)
class Handout:
    """Write a page for each exercise and each week: handouts without answers, or the key."""

    out: Path
    """new directory"""
    exercises: tuple[str, ...] = ()
    """exercise names; default: all"""
    key: bool = False
    """write solutions and marking guide instead of handouts"""
    pdf: bool = False
    """also write each page as a PDF, with Chromium"""

    def run(self) -> None:
        exercises = chosen(self.exercises)
        with Progress(unit="page", leave=False) as bar:
            written = handout.write_handouts(self.out, exercises, self.key, self.pdf, bar.update)
        print(f"{self.out}: {len(written)} files.")


@dataclass(frozen=True, kw_only=True)
class Nbgrader:
    """Write an nbgrader course directory: a source notebook per exercise, with solution and hidden test."""

    out: Path
    """new directory"""
    exercises: tuple[str, ...] = ()
    """exercise names; default: all"""

    def run(self) -> None:
        exercises = chosen(self.exercises)
        written = assignment.write_assignments(self.out, exercises)
        print(f"{self.out}: {len(written)} notebooks, {max_points(exercises)} points.")


@dataclass(frozen=True, kw_only=True)
class Slides:
    """Write the decks in docs/slides as HTML pages. Keys: right arrow: next step; n: speaker's notes."""

    out: Path
    """output directory"""
    pdf: bool = False
    """also write each deck as a PDF, with Chromium"""

    def run(self) -> None:
        with Progress(unit="deck", leave=False) as bar:
            written = slides.write_slides(self.out, self.pdf, bar.update)
        print("\n".join(map(str, written)))


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check the course itself: each exercise fails when empty and passes when solved, and each bug is caught."""

    parts: tuple[Literal["exercises", "bugs", "runs"], ...] = ("exercises", "bugs", "runs")
    """runs: all stages in miniature with each bug, to see which metrics change"""
    names: tuple[str, ...] = ()
    """names of exercises and bugs; default: all"""
    limit: Seconds = 300.0
    """time limit for the tests of an exercise or a bug, seconds"""
    json: Path | None = None
    """output file for the results"""

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
