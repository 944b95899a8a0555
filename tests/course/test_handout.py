"""Handouts contain the task and none of the solution; the key contains the rest."""

import ast
import shutil

import pytest

from course.copies import ROOT
from course.exercises import EXERCISES, chosen
from course.handout import exercise_functions, exercise_page, key_page, measured, write_handouts
from course.sessions import SESSIONS
from nanorlhf.errors import InputError


def lines_of_bodies(exercise) -> list[str]:
    """Return the solution's lines of code that are long enough to be distinctive."""
    lines = []
    for _, function in exercise_functions(exercise):
        for statement in function.body[ast.get_docstring(function) is not None :]:
            lines += [line.strip() for line in ast.unparse(statement).splitlines()]
    return [line for line in lines if len(line) >= 20]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_a_handout_has_everything_except_the_solution(exercise) -> None:
    page, key = exercise_page(exercise), key_page(exercise)
    for where, function in exercise_functions(exercise):
        assert f"## `{where.partition(':')[2]}`" in page  # as code, or Markdown would read underscores as emphasis
        assert f"def {function.name}(" in page and f"def {function.name}(" in key
        assert not (text := ast.get_docstring(function)) or text in page
    assert exercise.read in page and exercise.hint in page and f"\n{exercise.points} point" in page
    assert all(name in page for name in exercise.needs)
    code = lines_of_bodies(exercise)
    assert not [line for line in code if line in page]
    # the key quotes the file, where a statement may take several lines
    words = "".join(key.split())
    assert sum("".join(line.split()).replace('"', "'") in words.replace('"', "'") for line in code) >= len(code) / 2
    assert all(f"`{test}`" in key for test in exercise.tests)


def test_the_page_states_the_measured_times() -> None:
    times = measured()
    assert [*times] == [exercise.name for exercise in EXERCISES]
    seconds, attempts = zip(*times.values(), strict=True)
    page = (ROOT / "course/README.md").read_text()
    assert (
        f"solved all {len(times)} in {sum(seconds) / 60:.0f} minutes, {min(seconds)} to {max(seconds)} seconds" in page
    )
    assert f"{attempts.count(1)} of them on the first attempt" in page


def test_pages_are_written_for_exercises_and_weeks(tmp_path) -> None:
    told: list[int] = []
    names = ["padding", "learning-rate", "whitening"]
    write_handouts(tmp_path / "out", chosen(names), False, False, lambda: told.append(1))
    files = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert set(files) == {*(f"{name}.md" for name in names), "week-1.md", "week-3.md"} and len(told) == 5
    week = files["week-1.md"]
    assert week.startswith("# Week 1\n\n**The whole pipeline.** Read README.md;")
    assert week.index("## padding") < week.index("## learning-rate") and "whitening" not in week
    assert "### `first_true_index`, in nanorlhf/padding.py" in week
    with pytest.raises(InputError, match="is not empty: choose a new directory"):
        write_handouts(tmp_path / "out", chosen(names), False, False, lambda: None)


def test_every_exercise_is_in_one_session() -> None:
    names = [name for session in SESSIONS for name in session.exercises]
    assert len(names) == len(set(names)) and set(names) == {exercise.name for exercise in EXERCISES}
    for session in SESSIONS:
        for page in (word.strip(";,.") for word in session.read.split()):
            assert not page.endswith((".md", ".py")) or (ROOT / page).is_file(), page


def test_a_pdf_needs_a_browser(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="--pdf needs Chromium on the PATH"):
        write_handouts(tmp_path / "out", chosen(["padding"]), False, True, lambda: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium here")
def test_a_page_is_printed(tmp_path) -> None:
    pytest.importorskip("markdown")
    write_handouts(tmp_path / "out", chosen(["padding"]), False, True, lambda: None)
    assert (tmp_path / "out" / "padding.pdf").read_bytes().startswith(b"%PDF")
