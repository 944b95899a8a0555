"""Tests that the pages on the doctor agree with its findings and results."""

import csv
import re
from pathlib import Path

import pytest

from course.bugs import BUGS
from course.copies import source_path
from course.edit import replaced
from tools.changes import CHANGES
from tools.doctor import Verdict, all_cases, bug_stages, summary
from tools.other_bugs import OTHER_BUGS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for package in ("doctor", "rules") for path in (ROOT / "nanorlhf" / package).glob("*.py")]


def test_the_rows_of_the_troubleshooting_page_are_the_findings():
    named = {name for path in SOURCES for name in re.findall(r'\bname="([a-z0-9-]+)"', path.read_text())}
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)]
    assert named == set(listed)


@pytest.mark.parametrize(
    "bug",
    [
        *OTHER_BUGS,
        *(change.wrong for change in CHANGES),
        *(change.right for change in CHANGES if change.right is not None),
    ],
    ids=lambda bug: bug.name,
)
def test_a_new_bug_and_a_change_can_be_planted(bug):
    module, _, name = bug.where.partition(":")
    source = (ROOT / source_path(module)).read_text(encoding="utf-8")
    assert replaced(source, name, bug.old, bug.new, bug.number) != source
    assert bug.name not in {other.name for other in BUGS}


def test_the_summary_counts_both_commands_and_names_missed_bugs():
    verdicts = [
        Verdict("1", "seen", "course", 1, ["masks"], ["eos-rate"], [], 1.0),
        Verdict("2", "unseen", "course", 3, [], [], [], 1.0),
        Verdict("3", "fresh", "new", 2, [], ["gae"], [], 1.0),
        Verdict("4", "gspo", "right", 2, [], [], [], 1.0),
        Verdict("5", "gspo", "wrong", 2, ["statistics"], [], [], 1.0),
    ]
    assert summary(verdicts).splitlines() == [
        "bugs of the course: 2, found by code 1, by run 1, by neither: ['unseen']",
        "bugs of the course, level 1: 1, found by code 1, by run 1, by neither: none",
        "new bugs: 1, found by code 0, by run 1, by neither: none",
        "right changes: 1, found by code 0, by run 0, by neither: ['gspo']",
        "wrong changes: 1, found by code 1, by run 0, by neither: none",
    ]


def test_the_table_has_a_row_per_bug_and_the_page_counts_it():
    with (ROOT / "docs/doctor.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    cases = [(case.name, case.kind, str(case.level)) for case in all_cases()]
    assert [(row["bug"], row["from"], row["level"]) for row in rows] == cases
    course = [row for row in rows if row["from"] == "course"]
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    easy = [row for row in course if row["level"] == "1"]
    kinds = ([row for row in rows if row["from"] == kind] for kind in ("course", "new", "right", "wrong"))
    for group in (easy, *kinds):
        by_code, by_run = sum(bool(row["code"]) for row in group), sum(bool(row["run"]) for row in group)
        neither = sum(not row["code"] and not row["run"] for row in group)
        assert f"| {len(group)} | {by_code} | {by_run} | {neither} |" in page
    assert not any(row["code"] or row["run"] for row in rows if row["from"] == "right")
    assert sum(bool(row["code"]) for row in course) >= 50
    assert sum(bool(row["run"]) for row in easy) >= 14


def test_a_reward_model_bug_is_also_searched_in_the_reward_models_run():
    stages = {bug.name: bug_stages(bug) for bug in BUGS}
    assert stages["reward-of-all-tokens"] == ("rm", "ppo") and stages["eos-has-no-loss"] == ("sft",)
    assert stages["kl-of-the-wrong-sign"] == ("ppo",) and stages["judge-is-always-answered"] == ()
