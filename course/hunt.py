"""The bug hunt: plant a bug in a copy, say whether it is gone, show its page."""

import random
import textwrap
from pathlib import Path

from course.bugs import BUGS, Bug, bug_named
from course.copies import ANSWERS, ROOT, copy_files, new_directory, place_of, read_mark, write_mark
from course.edit import replaced
from course.grader.grade import tree_of
from course.grader.worker import Worker
from nanorlhf.errors import InputError

GIVEAWAYS = ("tests", "course", *ANSWERS)  # the tests and the table of bugs among them


def plant(directory: Path, seed: int, level: int | None) -> int:
    """Copy the repository into a new directory, plant one bug, drawn by the seed, and return its level."""
    bug = random.Random(seed).choice([bug for bug in BUGS if level in (None, bug.level)])
    new_directory(directory)
    copy_files(ROOT, directory, without=GIVEAWAYS)
    put_in(directory, bug)
    write_mark(directory, {"bug": bug.name, "seed": seed})
    return bug.level


def put_in(directory: Path, bug: Bug) -> None:
    file, function = place_of(bug.where)
    path = directory / file
    source = replaced(path.read_text(encoding="utf-8"), function, bug.old, bug.new, bug.number)
    path.write_text(source, encoding="utf-8")


def planted_in(directory: Path) -> Bug:
    """The bug of a copy; InputError where none was planted."""
    name = read_mark(directory).get("bug")
    if not isinstance(name, str):
        raise InputError(f"{directory}: no bug was planted there: name a directory of `python -m course plant`.")
    return bug_named(name)


def check(directory: Path, limit: float, worker: Worker) -> str:
    """Whether the tests that guard against the bug pass again, in a sentence that names the bug only if they do."""
    bug = planted_in(directory)
    with tree_of(directory) as tree:
        result = worker.run(tree, bug.guard, limit)
    if not result.passed:
        return f"{directory}: not right yet."
    return f"{directory}: right again. It was {bug.name}: python -m course reveal {directory}"


def page(bug: Bug) -> str:
    """All there is to say about a bug."""
    parts = {"where": bug.where.replace(":", ", "), "symptom": bug.symptom, "cause": bug.cause, "who had it": bug.who}
    lines = [f"{bug.name} (level {bug.level})", ""]
    for title, text in parts.items():
        lines += textwrap.wrap(
            text, 110, break_on_hyphens=False, initial_indent=f"{title:12}", subsequent_indent=" " * 12
        )
    lines += ["", f"{'right':12}{bug.old}", f"{'planted':12}{bug.new or '(taken out)'}", ""]
    return "\n".join([*lines, *(f"{'guard':12}{test}" for test in bug.guard)])
