"""nbgrader notebooks contain the whole exercise; nbgrader's rules empty and grade them; only right solutions pass."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from course import assignment
from course.assignment import check, hand_in, write_assignments
from course.copies import ROOT
from course.exercises import EXERCISES, chosen
from course.grader.submission import arranged
from nanorlhf.errors import InputError
from tests.course.test_handout import lines_of_bodies

STUB = "# YOUR CODE HERE\nraise NotImplementedError()"  # nbgrader's
HIDDEN = re.compile(r"^### BEGIN HIDDEN TESTS$.*?^### END HIDDEN TESTS$", re.M | re.S)
SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION$.*?^ *### END SOLUTION$", re.M | re.S)


def get_cells(exercise, kind: str) -> list[str]:
    """Return the sources of the cells that are graded, written by students, or given, by nbgrader's metadata."""
    code = [cell for cell in assignment.assignment(exercise)["cells"] if cell["cell_type"] == "code"]
    kinds = {"grade": [], "solution": [], "given": []}
    for cell in code:
        about = cell["metadata"]["nbgrader"]
        kinds["grade" if about["grade"] else "solution" if about["solution"] else "given"].append(cell["source"])
    return kinds[kind]


def emptied(source: str) -> str:
    """Empty a cell like nbgrader does for students."""
    return SOLUTION.sub(lambda mark: "\n".join(mark[1] + line for line in STUB.splitlines()), source)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_notebook_follows_nbgraders_schema_3(exercise) -> None:
    notebook = assignment.assignment(exercise)
    abouts = [cell["metadata"]["nbgrader"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    needed = {"schema_version", "grade_id", "grade", "solution", "locked", "task"}
    for about in abouts:
        assert set(about) == needed | ({"points"} if about["grade"] else set())
        assert about["schema_version"] == 3 and re.fullmatch(r"[\w-]+", about["grade_id"])
        assert about["locked"] != about["solution"] and not (about["grade"] and about["solution"]) and not about["task"]
    assert len({about["grade_id"] for about in abouts}) == len(abouts)
    assert [about["points"] for about in abouts if about["grade"]] == [exercise.points]
    assert sum(about["solution"] for about in abouts) == len(exercise.functions)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.from_dict(notebook))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_released_notebooks_compile_and_contain_no_solution(exercise) -> None:
    released = [cell["source"] for cell in assignment.assignment(exercise)["cells"] if cell["cell_type"] == "markdown"]
    for source in (*get_cells(exercise, "given"), *get_cells(exercise, "solution"), *get_cells(exercise, "grade")):
        compile(source, exercise.name, "exec")
        assert source.count("### BEGIN SOLUTION") == source.count("### END SOLUTION") == ("def " in source)
        released.append(HIDDEN.sub("", emptied(source)))
        compile(released[-1], exercise.name, "exec")
    page = "\n".join(released)
    assert not [line for line in lines_of_bodies(exercise) if line in page]
    assert "course.assignment" not in page and page.count("YOUR CODE HERE") == len(exercise.functions)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_solutions_reach_the_grader_unchanged(exercise, tmp_path) -> None:
    hand_in(get_cells(exercise, "solution"), exercise, tmp_path)
    assert arranged(tmp_path, exercise) == arranged(ROOT, exercise)


@pytest.fixture
def graded(grader, monkeypatch):
    """Return a function from whitening's cells to the error that nbgrader would show, run in an existing worker."""
    monkeypatch.setattr(assignment, "graders", lambda number: nullcontext([grader]))

    def said(cells: list[str]) -> str:
        try:
            check("whitening", ["", *cells, "check('whitening', In)"])
        except AssertionError as error:
            return str(error)
        return ""

    return said


def test_only_correct_cells_get_points(graded) -> None:
    [exercise] = chosen(["whitening"])
    mean, whiten = get_cells(exercise, "solution")
    assert graded([mean, whiten]) == ""
    assert graded([mean, whiten.replace("correction=0", "correction=1")]).startswith("whitening equals float64")
    assert "NotImplementedError" in graded([emptied(mean), emptied(whiten)])
    assert "no cell defines whiten" in graded([mean])
    assert "no cell defines whiten" in graded([mean, whiten.replace("### BEGIN", "return (((")])
    renamed = whiten.replace("mask: Tensor, shift_mean", "mask: Tensor, keep")
    assert graded([mean, renamed]).startswith("whiten must keep its arguments, x: Tensor, mask: Tensor, shift_mean")


def test_the_last_definition_counts_and_its_helpers_are_included(graded) -> None:
    [exercise] = chosen(["whitening"])
    mean, whiten = get_cells(exercise, "solution")
    helper = "def spread(values):\n    return values.var(correction=0)\n\n\nunused = 3"
    better = whiten.replace("counted.var(correction=0)", "spread(counted)")
    assert graded([mean, emptied(whiten), helper, better]) == ""
    assert graded([mean, whiten, emptied(whiten)]) != ""
    spy = helper.replace("return", "open('/etc/passwd')\n    return")
    assert "PermissionError" in graded([mean, spy, better])


def test_the_command_writes_a_course_directory(tmp_path) -> None:
    paths = write_assignments(tmp_path / "out", chosen(["padding", "whitening"]))
    assert [path.relative_to(tmp_path / "out").as_posix() for path in paths] == [
        "source/week-1/padding.ipynb", "source/week-3/whitening.ipynb",
    ]  # fmt: skip
    compile((tmp_path / "out" / "nbgrader_config.py").read_text(), "nbgrader_config.py", "exec")
    with pytest.raises(InputError, match="is not empty: choose a new directory"):
        write_assignments(tmp_path / "out", EXERCISES)


@pytest.mark.slow
def test_nbgrader_releases_and_grades(tmp_path) -> None:
    pytest.importorskip("nbgrader", reason="pip install nbgrader")
    pytest.importorskip("ipykernel", reason="pip install -e '.[notebook]'")
    [exercise] = chosen(["whitening"])
    course = tmp_path / "course"
    write_assignments(course, [exercise])
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    words = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "3", "language": "python"}))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "JUPYTER_PATH": str(tmp_path / "jupyter"), "HOME": str(tmp_path)}

    def nbgrader(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *command], cwd=course, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]

    nbgrader("generate_assignment", "week-3")
    released = json.loads((course / "release/week-3/whitening.ipynb").read_text())
    text = "".join("".join(cell["source"]) for cell in released["cells"])
    assert text.count("YOUR CODE HERE") == 2 and "HIDDEN" not in text and "torch.where(mask, x" not in text
    right = get_cells(exercise, "solution")
    wrong = [source.replace("correction=0", "correction=1") for source in right]
    for student, sources in {"right": right, "wrong": wrong, "empty": None}.items():
        submission = Path(shutil.copytree(course / "release", course / "submitted" / student))
        notebook = json.loads(json.dumps(released))
        written = [c for c in notebook["cells"] if c["metadata"].get("nbgrader", {}).get("solution")]
        for cell, source in zip(written, sources or [cell["source"] for cell in written], strict=True):
            cell["source"] = source
        notebook["cells"][-1]["source"] = "pass"  # nbgrader restores the test
        (submission / "week-3/whitening.ipynb").write_text(json.dumps(notebook))
    nbgrader("autograde", "week-3")
    nbgrader("export")
    head, *rows = ((course / "grades.csv").read_text()).splitlines()
    students = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
    assert {row["student_id"]: float(row["score"]) for row in students} == {"right": 2, "wrong": 0, "empty": 0}
