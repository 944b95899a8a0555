"""nano.py from scratch: each section's tests need only the sections up to it."""

import ast

import pytest

from course import scratch
from course.__main__ import Start
from course.copies import ROOT
from course.edit import find_function, rewritten
from course.grader.grade import temporary_tree
from course.grader.worker import Outcome
from nanorlhf.errors import InputError

SOURCE = (ROOT / "nano.py").read_text()


def solved_until(number: int) -> str:
    """Return nano.py with the functions of later sections emptied."""
    later = {name: scratch.stub(name, part) for part in scratch.SECTIONS[number:] for name in part.functions}
    return rewritten(SOURCE, later)


def test_every_function_but_the_evaluation_is_empty(tmp_path):
    scratch.start(tmp_path / "hw")
    empty = (tmp_path / "hw/nano.py").read_text()
    names = {name for section in scratch.SECTIONS for name in section.functions}
    top = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in top} - names == {"evaluate", "take_apart", "main"}
    for name in names:
        ours, theirs = find_function(SOURCE, name), find_function(empty, name)
        assert ast.dump(ours.args) == ast.dump(theirs.args) and ast.get_docstring(ours) == ast.get_docstring(theirs)
        assert isinstance(theirs.body[-1], ast.Raise) and f"write {name}" in ast.unparse(theirs.body[-1])
    assert [section.title for section in scratch.SECTIONS] == [
        line.rpartition("- ")[2] for line in SOURCE.splitlines() if line.startswith("# ------")
    ]
    assert scratch.HINTS.keys() <= names
    assert [path.name for path in sorted((tmp_path / "hw").iterdir())] == [".course", "nano.py"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(scratch.SECTIONS)))
def test_a_section_needs_no_later_one_and_fails_without_its_own_functions(worker, number):
    section = scratch.SECTIONS[number]
    tests = [f"tests/test_nano.py::{test}" for test in section.tests if "raises_the_gold_score" not in test]
    with temporary_tree(ROOT) as tree:
        (tree / "nano.py").write_text(solved_until(number + 1))
        solved = worker.run(tree, tests, 300)
        assert solved.passed, solved
        for name in section.functions:
            (tree / "nano.py").write_text(rewritten(solved_until(number + 1), {name: scratch.stub(name, section)}))
            emptied = worker.run(tree, tests, 300)
            assert not emptied.passed and f"write {name}" in emptied.reason, (name, emptied)


class Answers:
    """A worker that passes some sections."""

    def __init__(self, num_solved: int):
        self.num_solved, self.runs = num_solved, []

    def run(self, tree, tests, limit):
        self.runs.append(((tree / "nano.py").read_text(), tests, limit))
        return Outcome(len(self.runs) <= self.num_solved, "the first ratio is 1", "it is 2", 3.2)


def test_the_first_open_section_is_reported_with_its_first_failure(tmp_path):
    scratch.start(tmp_path / "hw")
    (tmp_path / "hw/nano.py").write_text("mine = 1\n")
    worker = Answers(4)
    lines = [*scratch.progress(tmp_path / "hw", 600, worker)]
    assert lines[0] == "1. The world: solved in 3 s" and lines[4] == "5. PPO: do more of what is good: open"
    assert "  write  ppo_loss" in lines and lines[-1] == "  now    the first ratio is 1: it is 2"
    assert len(worker.runs) == 5 and {run[0] for run in worker.runs} == {"mine = 1\n"}
    *_, training, last, done = scratch.progress(tmp_path / "hw", 600, Answers(6))
    assert training == "The last section trains your file, in minutes."  # before it does
    assert last == "6. Evaluation with gold scores: solved in 3 s" and done.startswith("All of nano.py is yours: ")


def test_exercises_and_students_are_refused_with_scratch(tmp_path):
    for settings in ({"exercises": ("whitening",)}, {"student": "Ada"}):
        with pytest.raises(InputError, match="--scratch: takes no --exercises and no --student"):
            Start(directory=tmp_path / "hw", scratch=True, **settings).run()
    assert not (tmp_path / "hw").exists()
