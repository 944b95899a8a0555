"""Grading a class writes one row per submission, whatever is in it, and continues after an interruption."""

import base64
import csv
import os
import shutil
import sys
from pathlib import Path

import pytest

from course.copies import CODE, MARK, ROOT, copy_files
from course.edit import rewritten
from course.exercises import chosen
from course.grader.whole_class import cell, grade_class, read_class, submissions_in
from course.start import start
from nanorlhf.errors import InputError

EXERCISES = chosen(["learning-rate", "pass-at-k"])
AT_K = "nanorlhf/metrics/at_k.py"
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


def marked(content: bytes):
    return lambda copy: (copy / MARK).write_bytes(base64.b64encode(content))


def changed_file(change):
    return lambda copy: (copy / AT_K).write_bytes(change((copy / AT_K).read_bytes()))


def replaced_file(make):
    return lambda copy: ((copy / AT_K).unlink(), make(copy / AT_K))


def with_body(body: str):
    return lambda copy: (copy / AT_K).write_text(rewritten((copy / AT_K).read_text(), {"pass_at_k": body.splitlines()}))


SOLVED = {  # changes to a solved copy, which still gets its point
    "right": lambda copy: None,
    "a mark that is a link to a device": lambda copy: (copy / MARK).symlink_to("/dev/zero"),
    "a mark that is a link to itself": lambda copy: (copy / MARK).symlink_to(copy / MARK),
    "a mark of a terabyte": lambda copy: ((copy / MARK).touch(), os.truncate(copy / MARK, 2**40)),
    "a mark nested 100,000 deep": marked(b"[" * 100_000 + b"]" * 100_000),
    "a mark of 5,000 digits": marked(b'{"student": ' + b"1" * 5000 + b"}"),
    "a mark in UTF-16": marked(b"\xff\xfe"),
    "=1+1": marked(b'{"student": "=1+1"}'),
    "\t=1+1": marked(b'{"student": "\\t=1+1"}'),
    "\r\n\x1b[2J": marked(b'{"student": "\\r=1+1\\u0000"}'),
    os.fsdecode(b"\xff\xfe"): marked(b'{"student": "\\ud800"}'),
    "questions that are a pipe": lambda copy: (marked(b'{"student": "a"}')(copy), os.mkfifo(copy / "QUESTIONS.md")),
    "a byte order mark": changed_file(lambda data: b"\xef\xbb\xbf" + data),
    "line ends of Windows": changed_file(lambda data: data.replace(b"\n", b"\r\n")),
    "planted files": lambda copy: [
        (copy / name).write_text("raise SystemExit") for name in ("conftest.py", "torch.py")
    ],
    "many files": lambda copy: [(copy / "nanorlhf" / f"{i}").touch() for i in range(5000)],
    "a deep directory": lambda copy: (copy / "/".join("d" * 900)).mkdir(parents=True),
}
UNSOLVED = {
    "a pipe": replaced_file(os.mkfifo),
    "a device": replaced_file(lambda path: path.symlink_to("/dev/zero")),
    "a directory": replaced_file(os.mkdir),
    "a terabyte": lambda copy: os.truncate(copy / AT_K, 2**40),
    "a zero byte": changed_file(lambda data: data + b"\0"),
    "UTF-16": changed_file(lambda data: data.decode().encode("utf-16")),
    "1 + 1 + 1": changed_file(lambda data: data + b"x = 1" + b" + 1" * 60_000),
    "a directory that is a file": lambda copy: (shutil.rmtree(copy / "nanorlhf"), (copy / "nanorlhf").touch()),
    "a link for a directory": lambda copy: (
        shutil.rmtree(copy / "nanorlhf"), (copy / "nanorlhf").symlink_to(ROOT / "nanorlhf"),
    ),
    "no directory": lambda copy: shutil.rmtree(copy / "nanorlhf"),
    "equals everything": with_body("return type('E', (), {'__eq__': lambda a, b: True})()"),
    "ends its process": with_body("import os\nos._exit(0)"),
    "never answers": with_body("import time\nwhile True:\n    time.sleep(1)"),
    "an error that is a formula": with_body("raise ValueError('=1+1\\r\\n\\t@')"),
    "a huge answer": with_body("return 'a' * 10**8"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pipes, devices and names that aren't UTF-8")
def test_no_submission_ends_the_grading_of_a_class(tmp_path, grader) -> None:
    inbox, file, exercises = tmp_path / "handed-in", tmp_path / "grades.csv", chosen(["pass-at-k"])
    for name, change in (SOLVED | UNSOLVED).items():
        copy_files(ROOT, inbox / name, CODE)
        change(inbox / name)
    grade_class(inbox, exercises, 20.0, [grader], file, lambda: None)
    text = file.read_text()
    rows = read_rows(file)
    assert len(rows) == len(SOLVED | UNSOLVED) == len(text.splitlines()) - 1
    points = {name: int(rows[cell(name)]["points"]) for name in SOLVED | UNSOLVED}
    assert points == dict.fromkeys(SOLVED, 1) | dict.fromkeys(UNSOLVED, 0)
    cells = [text for row in rows.values() for text in row.values()]
    assert all(text.isprintable() and not text.startswith(("=", "+", "-", "@")) for text in cells)
    assert all(row["note"] for name, row in rows.items() if row["points"] == "0")


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
