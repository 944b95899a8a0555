"""The bug hunt: planting a bug, and what `check` reports before and after the fix."""

import os
import subprocess
import sys

import pytest

from course.bugs import BUGS, bug_named
from course.copies import ROOT, read_mark, source_path, write_mark
from course.hunt import check, page, plant, planted_in, put_in
from nanorlhf.errors import InputError


def test_the_seed_selects_a_bug_of_the_given_level(tmp_path) -> None:
    for name, seed in (("one", 7), ("again", 7), ("other", 8)):
        assert plant(tmp_path / name, seed, 2) == 2
    bugs = {name: planted_in(tmp_path / name) for name in ("one", "again", "other")}
    assert bugs["one"] == bugs["again"] != bugs["other"] and bugs["one"].level == 2
    path = source_path(bugs["one"].where)
    assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "again" / path).read_bytes()
    assert (tmp_path / "one" / path).read_bytes() != (ROOT / path).read_bytes()


def test_a_copy_does_not_reveal_the_bug(tmp_path) -> None:
    plant(tmp_path / "hunt", 7, None)
    bug = planted_in(tmp_path / "hunt")
    assert not any((tmp_path / "hunt" / name).exists() for name in ("tests", "course", "nanorlhf/doctor"))
    assert bug.name.encode() not in (tmp_path / "hunt/.course").read_bytes()
    assert read_mark(tmp_path / "hunt") == {"bug": bug.name, "seed": 7}


@pytest.mark.slow
def test_a_copy_trains_without_the_doctor(tmp_path) -> None:
    plant(tmp_path / "hunt", 7, None)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for program in ("train_sft.py", "train_rm.py", "train_ppo.py", "eval.py"):
        words = [sys.executable, program, "--help"]
        done = subprocess.run(words, cwd=tmp_path / "hunt", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eos-is-masked", "adaptive-kl-runs-away"])
def test_a_bug_is_named_only_after_it_is_fixed(copy, worker, name) -> None:
    bug = bug_named(name)
    write_mark(copy, {"bug": name})
    put_in(copy, bug)
    said = check(copy, 300.0, worker)
    assert said == f"{copy}: not fixed yet." and name not in said.removeprefix(str(copy))
    path = source_path(bug.where)
    (copy / path).write_bytes((ROOT / path).read_bytes())
    assert check(copy, 300.0, worker).startswith(f"{copy}: fixed. The bug was {name}:")


def test_the_description_of_a_bug_has_symptom_cause_source_and_guard() -> None:
    for bug in BUGS:
        words = " ".join(page(bug).split())
        for text in (bug.symptom, bug.cause, bug.who, *bug.guard):
            assert " ".join(text.split()) in words


def test_a_directory_without_a_bug_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="has no planted bug"):
        planted_in(tmp_path)
    write_mark(tmp_path, {"bug": "gone"})
    with pytest.raises(InputError, match="unknown bug 'gone'"):
        planted_in(tmp_path)
