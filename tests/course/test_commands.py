"""The commands of `python -m course`, as course/README.md prints them."""

import base64
import json
import sys
from contextlib import nullcontext

import pytest

from course import __main__ as course
from course.__main__ import Args, main
from course.bugs import BUGS
from course.exercises import EXERCISES, chosen
from course.grader import whole_class
from course.grader.worker import Outcome
from nanorlhf.cli import run_module
from tests.helpers.page_commands import ROOT, parse_settings, read_page

PAGE = read_page("course/README.md", (ROOT / "course" / "README.md").read_text())


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m course", *map(str, words)])
    run_module(main, Args)


def test_the_page_names_only_existing_exercises_and_bugs() -> None:
    names = {part.name for table in (EXERCISES, BUGS) for part in table}
    for command in (command for command in PAGE.commands if command.program == "course"):
        settings = parse_settings(command)
        assert set(getattr(settings, "exercises", ())) | set(getattr(settings, "names", ())) <= names, command
    assert f"The {len(EXERCISES)} exercises" in (ROOT / "course" / "README.md").read_text()


def test_start_makes_a_copy_and_plant_adds_a_bug(monkeypatch, capsys, tmp_path) -> None:
    run(monkeypatch, "start", tmp_path / "hw", "--exercises", "whitening", "padding")
    assert f"{tmp_path / 'hw'}: 2 exercises, 3 points." in capsys.readouterr().out
    run(monkeypatch, "plant", tmp_path / "hunt", "--seed", "7", "--level", "1")
    assert "one bug of level 1" in capsys.readouterr().out
    run(monkeypatch, "reveal", tmp_path / "hunt")
    page = capsys.readouterr().out
    assert all(word in page for word in ("symptom", "cause", "who had it", "guard"))


def test_a_grade_is_printed_as_a_table_and_written_to_a_file(monkeypatch, capsys, tmp_path) -> None:
    outcomes = {
        "padding": Outcome(True, "", "", 1.0),
        "whitening": Outcome(False, "masked mean ignores nan", "NotImplementedError: exercise whitening: ...", 2.0),
    }
    monkeypatch.setattr(course, "graders", lambda number: nullcontext([None] * number))
    monkeypatch.setattr(course, "grade", lambda *_: outcomes)
    flags = ["grade", ROOT, "--exercises", *outcomes, "--workers", "1", "--format"]
    run(monkeypatch, *flags, "json", "--out", tmp_path / "grade.json")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["padding", "1", "of", "1", "passed"]
    assert "0 of 2  masked mean ignores nan: NotImplementedError: exercise whitening" in lines[1]
    assert lines[2].split() == ["points", "1", "of", "3"]
    written = json.loads((tmp_path / "grade.json").read_text())
    assert (written["points"], written["of"]) == (1, 3)
    assert [row["name"] for row in written["exercises"]] == ["padding", "whitening"]
    assert written["exercises"][1]["claim"] == "masked mean ignores nan"

    run(monkeypatch, *flags, "gradescope")
    tests = json.loads(capsys.readouterr().out)["tests"]
    assert [(test["name"], test["score"], test["max_score"], test["status"]) for test in tests] == [
        ("padding", 1, 1, "passed"), ("whitening", 0, 2, "failed"),
    ]  # fmt: skip
    assert tests[1]["output"].startswith("masked mean ignores nan: NotImplementedError")

    file = tmp_path / "output"
    file.write_text("before=1\n")
    run(monkeypatch, *flags, "github-classroom", "--out", file)
    before, result = file.read_text().splitlines()
    assert before == "before=1" and result.startswith("result=")
    decoded = json.loads(base64.b64decode(result.removeprefix("result=")))
    assert (decoded["version"], decoded["status"], decoded["max_score"]) == (1, "fail", 3)
    assert [(test["status"], test["score"]) for test in decoded["tests"]] == [("pass", 1), ("fail", 0)]


def test_an_exercise_that_is_not_gradable_here_has_no_points_to_lose(monkeypatch, capsys, tmp_path) -> None:
    """A table leaves it out of the sum; the formats that count as grades are refused."""
    outcomes = {
        "padding": Outcome(True, "", "", 1.0),
        "whitening": Outcome(False, "not gradable here", "no transformers", 2.0, gradable=False),
    }
    monkeypatch.setattr(course, "graders", lambda number: nullcontext([None] * number))
    monkeypatch.setattr(course, "grade", lambda *_: outcomes)
    monkeypatch.setattr(whole_class, "grade", lambda *_: outcomes)
    flags = ["--exercises", *outcomes, "--format"]
    run(monkeypatch, "grade", ROOT, *flags, "table")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == "whitening - of 2 not gradable here: no transformers".split()
    assert lines[2].split() == ["points", "1", "of", "1"]
    (tmp_path / "class/ada").mkdir(parents=True)
    for words in ([ROOT, *flags, "gradescope"], [tmp_path / "class", *flags, "csv", "--out", tmp_path / "grades.csv"]):
        with pytest.raises(SystemExit):
            run(monkeypatch, "grade", *words)
        assert "whitening is not gradable here: no transformers: run `pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["grade", "/nowhere"], "/nowhere has no data"),
        (["grade", "--exercises", "witening"], "unknown exercise 'witening'"),
        (["start", "."], "is not empty"),
        (["check", "."], ". has no planted bug"),
        (["plant"], "PATH"),
        (["plant", "x", "--level", "4"], "level"),
        (["grade", "--format", "gradescope"], "--format gradescope needs --exercises"),
        (["grade", "--format", "csv", "--exercises", "padding"], "--format csv needs --out"),
        (["grade", "/nowhere", "--format", "csv", "--exercises", "padding", "--out", "x"], "has no submissions"),
        (["grade", "--limit", "0"], "--limit 0.0: must be above 0"),
        (["verify", "--names", "witening"], "unknown exercise or bug: 'witening'"),
        (["grad"], "grad"),
    ],
)
def test_bad_input_is_one_sentence(monkeypatch, capsys, words, sentence) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: ") and sentence in said and said.count("\n") == 1


def test_next_prints_what_to_read(monkeypatch, capsys) -> None:
    [exercise] = chosen(["whitening"])
    outcome = Outcome(False, "masked mean ignores nan", "NotImplementedError", 1.0)
    monkeypatch.setattr(course, "graders", lambda number: nullcontext([None] * number))
    monkeypatch.setattr(course, "first_open", lambda *_: (exercise, outcome))
    run(monkeypatch, "next", ROOT)
    said = capsys.readouterr().out
    assert "write  nanorlhf.ppo: whiten" in said and f"read   {exercise.read}" in said
    assert "now    masked mean ignores nan: NotImplementedError" in said
    monkeypatch.setattr(course, "first_open", lambda *_: None)
    run(monkeypatch, "next", ROOT)
    assert capsys.readouterr().out == "All exercises are solved.\n"
