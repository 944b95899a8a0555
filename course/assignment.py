"""nbgrader assignments: one notebook per exercise, with the solution between nbgrader's markers and a hidden test.

nbgrader removes the solutions and the tests from the students' version, and restores the tests before it grades. The
test runs the course's grader (`grader/`) in a separate process on the functions in the cells. As with every nbgrader
test, the cell that calls it shares its kernel with the student's code, which could fake the result of the call. Grade
in a container, and use `python -m course grade` if cheating matters.
"""

import ast
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from course.copies import ROOT, check_new, path_and_name
from course.edit import Function, find_function, rewritten
from course.exercises import Exercise, chosen
from course.grader.grade import graders
from course.grader.submission import argument_names, body_lines, top_level, with_statements
from course.handout import exercise_functions, exercise_page
from course.sessions import SESSIONS

LIMIT = 60.0  # seconds, for the tests of one exercise
CONFIG = """c = get_config()
c.CourseDirectory.course_id = "rlhf"
c.ExecutePreprocessor.timeout = 300  # seconds per cell: the graders import PyTorch
"""


# ---------------------------------------------------------------------------------------------------- 1. the notebooks
def assignment(exercise: Exercise) -> dict:
    """Return the source notebook: the task, a cell per function with its solution, and a cell with the hidden test."""
    modules = dict.fromkeys(where.partition(":")[0] for where in exercise.functions)
    names = [
        "import importlib",
        "",
        "# the names that the functions may use: those of their modules",
        *(f"given = vars(importlib.import_module({module!r}))" + f"\n{UPDATE}" for module in modules),
    ]
    test = [
        f"# {exercise.points} point(s), all or nothing: graded by the tests of the course",
        "### BEGIN HIDDEN TESTS",
        "from course.assignment import check",
        "",
        f"check({exercise.name!r}, In)",
        "### END HIDDEN TESTS",
    ]
    task = {"cell_type": "markdown", "id": "task", "metadata": {}, "source": exercise_page(exercise)}
    cells = [task, code_cell("names", "\n".join(names), locked=True)]
    for where, function in exercise_functions(exercise):
        cells.append(code_cell(f"write-{len(cells) - 1}", solution(where, function), solution=True))
    cells.append(code_cell("test", "\n".join(test), locked=True, points=exercise.points))
    return {
        "cells": cells,
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


UPDATE = 'globals().update({name: value for name, value in given.items() if not name.startswith("__")})'


def code_cell(name: str, text: str, locked: bool = False, solution: bool = False, points: int | None = None) -> dict:
    """Return a code cell with nbgrader's metadata; a cell with points is graded."""
    about = {"schema_version": 3, "grade_id": name, "grade": points is not None, "solution": solution}
    about |= {"locked": locked, "task": False} | ({} if points is None else {"points": points})
    return {
        "cell_type": "code", "execution_count": None, "id": name, "metadata": {"nbgrader": about}, "outputs": [],
        "source": text,
    }  # fmt: skip


def solution(where: str, function: Function) -> str:
    """Return a function's source with its body between nbgrader's solution markers."""
    path, name = path_and_name(where)
    source = (ROOT / path).read_text(encoding="utf-8").splitlines()
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    has_docstring = ast.get_docstring(function) is not None
    statement = function.body[0]
    body_start = statement.end_lineno if has_docstring else statement.lineno - 1
    assert body_start is not None
    head, body = source[first - 1 : body_start], source[body_start : function.end_lineno]
    margin = " " * (function.col_offset + 4)
    lines = [*head, f"{margin}### BEGIN SOLUTION", *body, f"{margin}### END SOLUTION"]
    return "\n".join([f"# {name}, in {path}", *(line[function.col_offset :] for line in lines)])


def write_assignments(out: Path, exercises: Sequence[Exercise]) -> list[Path]:
    """Write an nbgrader course directory: source/week-N/EXERCISE.ipynb and nbgrader_config.py."""
    check_new(out, "--out ")
    weeks = {name: i // 2 + 1 for i, session in enumerate(SESSIONS) for name in session.exercises}
    written = []
    for exercise in exercises:
        written.append(out / "source" / f"week-{weeks[exercise.name]}" / f"{exercise.name}.ipynb")
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        written[-1].write_text(json.dumps(assignment(exercise), indent=1) + "\n", encoding="utf-8")
    (out / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")
    return written


# ----------------------------------------------------------------------------------------------------- 2. the grading
def check(name: str, cells: Iterable[str]) -> None:
    """Grade the functions in a notebook's cells. Raises AssertionError with the first failing test.

    cells: the cells' sources in the order in which they ran (IPython's `In`).
    """
    [exercise] = chosen([name])
    with tempfile.TemporaryDirectory(prefix="course-") as directory:
        hand_in(cells, exercise, Path(directory))
        with graders(1) as [grader]:
            outcome = grader.judge(Path(directory), exercise, LIMIT)
    if not outcome.passed:
        raise AssertionError(f"{outcome.claim}: {outcome.reason}")


def hand_in(cells: Iterable[str], exercise: Exercise, directory: Path) -> None:
    """Write the exercise's files as in a student's copy: the functions in the cells, and other definitions there.

    A function that no cell defines is empty. Raises AssertionError if a function's arguments were changed.
    """
    defined: dict[str, ast.stmt] = {}  # the last definition of each name
    for cell in cells:
        try:
            defined |= top_level(cell)
        except SyntaxError:  # the cell raised an error when it ran
            continue
    bodies: dict[Path, dict[str, list[str]]] = {}
    for where in exercise.functions:
        path, name = path_and_name(where)
        student_function = defined.get(name.rpartition(".")[2])
        lines = [f"raise NotImplementedError({f'no cell defines {name}'!r})"]
        if isinstance(student_function, Function):
            our_function = find_function((ROOT / path).read_text(encoding="utf-8"), name)
            if argument_names(student_function.args) != argument_names(our_function.args):
                raise AssertionError(f"{name} must keep its arguments, {ast.unparse(our_function.args)}")
            lines = body_lines(student_function)
        bodies.setdefault(path, {})[name] = lines
    written = {name.rpartition(".")[2] for by_name in bodies.values() for name in by_name}
    for path, by_name in bodies.items():
        source = (ROOT / path).read_text(encoding="utf-8")
        known = written | set(top_level(source))
        new = dict.fromkeys(node for name, node in defined.items() if name not in known)
        source = with_statements(rewritten(source, by_name), [ast.unparse(node) for node in new], next(iter(by_name)))
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(source, encoding="utf-8")
