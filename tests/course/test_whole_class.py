"""Grading a class writes one row per submission, whatever is in it, and continues after an interruption."""

import csv
from pathlib import Path

import pytest

from course.copies import ROOT
from course.edit import rewritten
from course.exercises import chosen
from course.grader.whole_class import cell, grade_class, read_class, submissions_in
from course.start import start
from nanorlhf.errors import InputError

EXERCISES = chosen(["learning-rate", "pass-at-k"])
LIMIT = 300.0  # seconds, on a busy machine


def hand_in(directory: Path, solved: int, body: str = "") -> Path:
    """Make a copy with the first exercises solved; body: replaces pass_at_k's."""
    start(directory, EXERCISES)
    for exercise in EXERCISES[:solved]:
        path = exercise.functions[0].partition(":")[0].replace(".", "/") + ".py"
        (directory / path).write_text((ROOT / path).read_text())
    if body:
        path = directory / "nanorlhf/metrics/at_k.py"
        path.write_text(rewritten(path.read_text(), {"pass_at_k": [body]}))
    return directory


def read_rows(file: Path) -> dict[str, dict[str, str]]:
    with file.open(newline="") as lines:
        return {row["submission"]: row for row in csv.DictReader(lines)}


@pytest.mark.slow
def test_each_submission_gets_a_row_and_an_interrupted_run_continues(tmp_path, grader) -> None:
    inbox, file = tmp_path / "handed-in", tmp_path / "grades.csv"
    inbox.mkdir()
    hand_in(inbox / "ada", 2)
    hand_in(inbox / "bob", 1, "return 0.5")
    hand_in(inbox / "=cmd", 1, "raise ValueError('=1+1')")
    hand_in(inbox / "eve", 2, "return open('/etc/passwd')")
    (inbox / "empty").mkdir()
    (inbox / "link").symlink_to(ROOT)
    (inbox / "notes.txt").touch()
    told: list[int] = []
    rows = grade_class(inbox, EXERCISES, LIMIT, [grader], file, lambda: told.append(1))
    written = read_rows(file)
    assert list(written.values()) == rows and len(told) == 6
    points = {name: (row["learning-rate"], row["pass-at-k"], row["points"]) for name, row in written.items()}
    assert points == {
        "ada": ("1", "1", "2"), "bob": ("1", "0", "1"), "'=cmd": ("1", "0", "1"), "eve": ("1", "0", "1"),
        "empty": ("0", "0", "0"), "link": ("0", "0", "0"),
    }  # fmt: skip
    assert {row["of"] for row in rows} == {"2"} and written["ada"]["note"] == ""
    assert written["bob"]["note"].startswith("pass-at-k: pass at k is the share")
    assert "PermissionError" in written["eve"]["note"] and "has no data" in written["empty"]["note"]
    assert "is a link" in written["link"]["note"]

    # a second run grades only changed submissions
    marked = file.read_text().replace("ada,1,1,2", "ada,1,1,9")
    file.write_text(marked)
    path = inbox / "bob/nanorlhf/metrics/at_k.py"
    path.write_text((ROOT / "nanorlhf/metrics/at_k.py").read_text())
    grade_class(inbox, EXERCISES, LIMIT, [grader], file, lambda: None)
    written = read_rows(file)
    assert written["ada"]["points"] == "9" and written["bob"]["points"] == "2" and len(written) == 6


def test_a_file_that_cannot_be_continued_is_refused(tmp_path) -> None:
    assert read_class(tmp_path / "none.csv", EXERCISES) == {}
    (tmp_path / "grades.csv").write_text("submission,whitening,points,of,student,questions,note,digest\n")
    with pytest.raises(InputError, match="has grades for other exercises: choose another --out"):
        read_class(tmp_path / "grades.csv", EXERCISES)
    with pytest.raises(InputError, match="has no submissions"):
        submissions_in(tmp_path)


def test_untrusted_text_is_never_a_spreadsheet_formula() -> None:
    assert [cell(text) for text in ("=1", "+1", "-1", "@a", "a=1")] == ["'=1", "'+1", "'-1", "'@a", "a=1"]
    assert [cell(text) for text in (" =1", "\uff1d1", "\t=1", "\r\n=1")] == ["' =1", "'\uff1d1", "\\t=1", "\\r\\n=1"]
    assert cell("a\x1b\0\ud800") == "a\\x1b\\x00\\ud800" and len(cell("=" * 10**6)) < 3000
