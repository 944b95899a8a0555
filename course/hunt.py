"""The bug hunt: plant a bug in a copy, check whether it is fixed, show its description."""

import random
import textwrap
from pathlib import Path

from course.bugs import BUGS, Bug, bug_named
from course.copies import ANSWERS, ROOT, copy_files, new_directory, path_and_name, read_mark, write_mark
from course.edit import replaced
from course.grader.grade import temporary_tree
from course.grader.worker import Worker
from nanorlhf.errors import InputError

# the guarding tests, the table of bugs, and the doctor, which would name the line
GIVEAWAYS = ("tests", "course", "nanorlhf/doctor", "tools/doctor.py", *ANSWERS)


def plant(directory: Path, seed: int, level: int | None) -> int:
    """Copy the repository to a new directory, plant one bug, selected by the seed, and return its level."""
    bug = random.Random(seed).choice([bug for bug in BUGS if level in (None, bug.level)])
    new_directory(directory)
    copy_files(ROOT, directory, without=GIVEAWAYS)
    put_in(directory, bug)
    write_mark(directory, {"bug": bug.name, "seed": seed})
    return bug.level


def put_in(directory: Path, bug: Bug) -> None:
    file, function = path_and_name(bug.where)
    path = directory / file
    source = replaced(path.read_text(encoding="utf-8"), function, bug.old, bug.new, bug.number)
    path.write_text(source, encoding="utf-8")


def planted_in(directory: Path) -> Bug:
    """Return the bug in a copy. Raises InputError if none was planted."""
    name = read_mark(directory).get("bug")
    if not isinstance(name, str):
        raise InputError(f"{directory} has no planted bug: expected a directory made by `python -m course plant`.")
    return bug_named(name)


def check(directory: Path, limit: float, worker: Worker) -> str:
    """Report whether the tests that guard against the bug pass again; the bug is named only if they do."""
    bug = planted_in(directory)
    with temporary_tree(directory) as tree:
        result = worker.run(tree, bug.guard, limit)
    if not result.passed:
        return f"{directory}: not fixed yet."
    return f"{directory}: fixed. The bug was {bug.name}: python -m course reveal {directory}"


def page(bug: Bug) -> str:
    """Return the description of a bug: symptom, cause, who had it, the change, and the tests that catch it."""
    sections = {
        "where": bug.where.replace(":", ", "),
        "symptom": bug.symptom,
        "cause": bug.cause,
        "who had it": bug.who,
    }
    lines = [f"{bug.name} (level {bug.level})", ""]
    for title, text in sections.items():
        lines += textwrap.wrap(
            text, 110, break_on_hyphens=False, initial_indent=f"{title:12}", subsequent_indent=" " * 12
        )
    lines += ["", f"{'right':12}{bug.old}", f"{'planted':12}{bug.new or '(deleted)'}", ""]
    return "\n".join([*lines, *(f"{'guard':12}{test}" for test in bug.guard)])
