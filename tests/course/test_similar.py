"""Copied submissions are found even if names change; code that the class has in common doesn't count."""

from pathlib import Path

import pytest

from course.copies import ROOT
from course.edit import rewritten
from course.exercises import chosen
from course.grader.similar import similar_pairs, table
from course.start import stub_lines

AT_K = "nanorlhf/metrics/at_k.py"
[EXERCISE] = chosen(["pass-at-k"])
OWN = """
_check_k(k, n)
if c < 0 or c > n:
    raise ValueError("the number must be from 0 to n")
miss = 1.0
left = n - c
for draw in range(k):
    miss *= max(left - draw, 0) / (n - draw)
return 1.0 - miss
"""
RENAMED = """
_check_k(k, n)
# written by me
if c < 0 or c > n:
    raise ValueError("the number must be from 0 to n")
fails = 1.0

remaining = n - c
for step in range(k):
    fails *= max(remaining - step, 0) / (n - step)
return 1.0 - fails
"""
OTHER = """
_check_k(k, n)
if not 0 <= c <= n:
    raise ValueError(f"{c} must be from 0 to {n}")
return 1.0 if n - c < k else 1 - math.comb(n - c, k) / math.comb(n, k)
"""


def hand_in(directory: Path, body: str) -> Path:
    (directory / AT_K).parent.mkdir(parents=True)
    source = (ROOT / AT_K).read_text()
    (directory / AT_K).write_text(rewritten(source, {"pass_at_k": body.strip("\n").splitlines()}) if body else source)
    return directory


def test_a_renamed_copy_is_found_and_an_independent_solution_is_not(tmp_path) -> None:
    bodies = {"ada": OWN, "bob": RENAMED, "cyd": OTHER, "dan": "", "eve": "\n".join(stub_lines(EXERCISE))}
    inbox = [hand_in(tmp_path / name, body) for name, body in bodies.items()]
    (tmp_path / "fay").mkdir()
    [pair] = similar_pairs([*inbox, tmp_path / "fay"], EXERCISE, 0.8)
    assert (pair.one, pair.other, pair.similarity) == ("ada", "bob", 1.0) and pair.names == 0
    assert "pass-at-k" in table([pair]) and "ada, bob" in table([pair])
    assert table([]) == "No similar submissions found."


def test_code_that_a_third_of_the_class_writes_does_not_count(tmp_path) -> None:
    inbox = [hand_in(tmp_path / f"student {number}", OWN) for number in range(9)]
    assert similar_pairs(inbox, EXERCISE, 0.8) == []


def test_copies_of_our_own_solution_are_not_reported_as_a_pair(tmp_path) -> None:
    assert similar_pairs([hand_in(tmp_path / name, "") for name in ("ada", "bob")], EXERCISE, 0.0) == []


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_threshold_selects_pairs(tmp_path, threshold) -> None:
    half = OWN.replace(
        "return 1.0 - miss", "answer = float(1.0)\nfor _ in [None, None]:\n    answer -= miss / 2.0\nreturn answer"
    )
    inbox = [hand_in(tmp_path / name, body) for name, body in (("ada", OWN), ("bob", half), ("cyd", OTHER))]
    names = {(pair.one, pair.other) for pair in similar_pairs(inbox, EXERCISE, threshold)}
    assert ("ada", "bob") in names and ((("ada", "cyd") in names) == (threshold == 0.0))
