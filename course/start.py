"""A student's copy: the repository without the bodies of the exercises' functions."""

import textwrap
from collections.abc import Iterable
from pathlib import Path

from course import nano_page
from course.copies import ANSWERS, ROOT, copy_files, new_directory, take_out, write_mark
from course.exercises import Exercise
from course.questions import FILE, sheet


def start(directory: Path, exercises: Iterable[Exercise], student: str | None = None) -> None:
    """Write the copy to a new directory; with a student's name, also the questions with that student's numbers."""
    exercises = list(exercises)
    new_directory(directory)
    copy_files(ROOT, directory, without=ANSWERS)
    for exercise in exercises:
        empty(directory, exercise)
    page, source = (directory / path.relative_to(ROOT) for path in (nano_page.PAGE, nano_page.SOURCE))
    page.write_text(nano_page.page(source.read_text(encoding="utf-8")), encoding="utf-8")  # it quotes all of nano.py
    mark: dict = {"exercises": [exercise.name for exercise in exercises]}
    if student is not None:
        mark["student"] = student
        (directory / FILE).write_text(sheet(student), encoding="utf-8")
    write_mark(directory, mark)


def empty(directory: Path, exercise: Exercise) -> None:
    """Empty an exercise's functions in a copy: each raises an error that names the exercise."""
    for function in exercise.functions:
        take_out(directory, function, stub_lines(exercise))


def stub_lines(exercise: Exercise) -> list[str]:
    text = f"Exercise {exercise.name}, {exercise.points} point(s). Read {exercise.read}. {exercise.hint}"
    return [f"# {line}" for line in textwrap.wrap(text, 100)] + [
        f'raise NotImplementedError("exercise {exercise.name}: write this function")'
    ]
