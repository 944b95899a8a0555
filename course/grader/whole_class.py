"""Grade a whole class into a CSV file with a row per submission; an interrupted run continues from it."""

import csv
import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from course.copies import MARK, read_untrusted
from course.exercises import Exercise
from course.grader.formats import max_points, reached, summary, total
from course.grader.grade import Grader, check_gradable, grade
from course.grader.submission import exercise_files
from course.questions import FILE, right_answers
from nanorlhf.errors import InputError
from nanorlhf.files import atomic

LONGEST = 2000  # characters of a cell
QUESTION_COLUMNS = ("student", "questions")  # the student's name stored in the copy, and the number of right answers


def submissions_in(directory: Path) -> list[Path]:
    """Return the subdirectories of `directory`, sorted by name. Raises InputError if there are none."""
    submissions = sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    if not submissions:
        raise InputError(f"{directory} has no submissions: expected one subdirectory per student.")
    return submissions


def column_names(exercises: Sequence[Exercise]) -> list[str]:
    return [
        "submission",
        *(exercise.name for exercise in exercises),
        "points",
        "of",
        *QUESTION_COLUMNS,
        "note",
        "digest",
    ]


def read_class(file: Path, exercises: Sequence[Exercise]) -> dict[str, dict[str, str]]:
    """Read the rows that an earlier run has written, by submission, and skip a truncated last line.

    Raises InputError if the columns don't match these exercises.
    """
    if not file.exists():
        return {}
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        columns = column_names(exercises)
        if reader.fieldnames is not None and list(reader.fieldnames) != columns:
            raise InputError(f"{file} has grades for other exercises: choose another --out.")
        return {row["submission"]: row for row in reader if row["digest"]}


def grade_class(
    directory: Path,
    exercises: Sequence[Exercise],
    limit: float,
    graders: Sequence[Grader],
    file: Path,
    on_done: Callable,
) -> list[dict[str, str]]:
    """Write one row per submission as soon as it is graded, and keep the rows of unchanged submissions.

    An error in a submission becomes the note in its row and doesn't stop the others. `on_done` is called after each.
    Raises InputError if an exercise's tests can't run here.
    """
    known = read_class(file, exercises)
    rows: list[dict[str, str]] = []
    for submission in submissions_in(directory):
        digest = hash_submission(submission, exercises)
        row = known.get(cell(submission.name))
        if row is None or row["digest"] != digest:
            row = get_row(submission, exercises, limit, graders) | {"digest": digest}
        rows.append(row)
        remaining = [known[name] for name in known if name not in {row["submission"] for row in rows}]
        write_class(file, exercises, [*rows, *remaining])
        on_done()
    write_class(file, exercises, rows)
    return rows


def get_row(submission: Path, exercises: Sequence[Exercise], limit: float, graders: Sequence[Grader]) -> dict[str, str]:
    row = {"submission": cell(submission.name), "of": str(max_points(exercises)), **dict.fromkeys(QUESTION_COLUMNS, "")}
    try:
        if submission.is_symlink():
            raise InputError(f"{submission} is a link: submit the directory itself.")
        outcomes = grade(submission, exercises, limit, graders)
    except (InputError, OSError, ValueError) as error:  # such as a directory that can't be read
        return row | {exercise.name: "0" for exercise in exercises} | {"points": "0", "note": cell(str(error))}
    check_gradable(outcomes)
    row |= {exercise.name: str(reached(exercise, outcomes)) for exercise in exercises}
    notes = [f"{name}: {summary(result):.160}" for name, result in outcomes.items() if not result.passed]
    try:
        if (answers := right_answers(submission)) is not None:
            row |= {"student": cell(answers[0]), "questions": str(answers[1])}
    except InputError as error:
        notes.append(str(error))
    return row | {"points": str(total(exercises, outcomes)), "note": cell("; ".join(notes))}


def write_class(file: Path, exercises: Sequence[Exercise], rows: Sequence[dict[str, str]]) -> None:
    """Write all rows atomically: an interrupted run leaves the previous version of the file."""
    with atomic(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, column_names(exercises))
        writer.writeheader()
        writer.writerows(rows)


def cell(text: str) -> str:
    """Return untrusted text in one line, and quoted so that a spreadsheet doesn't read it as a formula."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:LONGEST])
    first = unicodedata.normalize("NFKC", text.strip())[:1]  # the wide = and - are formulas too
    return f"'{text}" if first in ("=", "+", "-", "@", "\u2212") else text


def hash_submission(submission: Path, exercises: Sequence[Exercise]) -> str:
    """Return a hash of the files that are graded or read; it changes when the student submits again."""
    digest = hashlib.sha256()
    for path in (*exercise_files(exercises), FILE, MARK):
        try:
            digest.update(read_untrusted(submission, path))
        except (InputError, OSError) as error:
            digest.update(str(error).encode(errors="replace"))
    return digest.hexdigest()[:16]
