"""Mutation testing: a mutant survives a grader that is too loose, and the table shows it."""

import csv
import json
import os
import sys
from collections.abc import Iterator

import pytest

from course.copies import ROOT, path_and_name
from course.edit import fixed_names
from course.exercises import EXERCISES, Exercise, chosen
from course.grader.forks import be_a_fork, collect_outcome
from course.grader.worker import Worker
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from tests.course.test_edit import local_variables, with_renamed
from tools.mutants import sweep as mutants
from tools.mutants.__main__ import COUNTS, Args, main
from tools.mutants.equivalent import EQUIVALENT
from tools.mutants.operators import make_mutants
from tools.mutants.sweep import (
    Task,
    Verdict,
    batches,
    equivalent_changes,
    judge,
    make_tasks,
    read_verdicts,
    reads_like,
    sweep,
    table,
)

SHAPES = """\
class Shape:
    def __init__(self):
        self.sides = 4


class Box(Shape):
    def __init__(self, width, height):
        super().__init__()
        self.area = area(width, height)


def area(width, height):
    return width * height


def total(numbers):
    left, result = list(numbers), 0
    while left:
        result += left.pop()
    return result


HALL = area(2, 3)
"""
TESTS = """\
from shapes import HALL, Box, area, total

def test_loose():
    assert area(1, 1) == 1

def test_strict():
    assert area(2, 3) == 6

def test_imported():
    assert HALL == 6

def test_box():
    assert Box(2, 3).sides == 4

def test_total():
    assert total([1, 2]) == 3

def test_wrong():
    assert area(1, 1) == 2
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("tools.mutants.worker") as started:
        yield started


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / "shapes.py").write_text(SHAPES)
    (tmp_path / "tests" / "test_shapes.py").write_text(TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def exercise(function: str, *tests: str) -> Exercise:
    names = tuple(f"tests/test_shapes.py::test_{test}" for test in tests)
    return Exercise(name="box", functions=(f"shapes:{function}",), read="", hint="", tests=names, points=1, level=1)


def verdicts(tree, worker, function: str, *tests: str, limit: float = 60.0) -> dict[str, Verdict]:
    tasks = make_tasks([exercise(function, *tests)], sample=None, seed=1)
    by_change = {verdict.change: verdict for verdict in judge(tasks, tree, worker, limit)}
    assert len(by_change) == len(tasks) and (tree / "shapes.py").read_text() == SHAPES
    return by_change


@pytest.mark.slow
def test_a_grader_that_is_too_loose_lets_mutants_survive(tree, worker) -> None:
    loose = verdicts(tree, worker, "area", "loose")
    assert set(loose) == {f"return {text}" for text in ("width / height", "width", "height")}
    assert not any(verdict.killed for verdict in loose.values())
    strict = verdicts(tree, worker, "area", "loose", "strict")
    assert all(verdict.killed and verdict.claim == "strict" for verdict in strict.values())


@pytest.mark.slow
def test_a_mutant_that_matters_only_at_import_is_killed_in_a_fresh_process(tree, worker) -> None:
    assert all(verdict.killed for verdict in verdicts(tree, worker, "area", "imported").values())
    by_change = verdicts(tree, worker, "Box.__init__", "box")  # without super(), the code has other free variables
    assert by_change["pass  # super().__init__()"].killed and not by_change["self.area = area(height, width)"].killed


@pytest.mark.slow
def test_an_endless_loop_counts_as_killed(tree, worker) -> None:
    by_change = verdicts(tree, worker, "total", "total", limit=1.0)
    endless = by_change["pass  # result += left.pop()"]
    assert endless.killed and endless.claim == "total" and endless.reason == "exceeded its processor time"


@pytest.mark.slow
def test_a_grader_that_the_solution_does_not_pass_is_an_error(tree, worker) -> None:
    with pytest.raises(InputError, match="box fails without a mutation, fix it first: wrong: "):
        verdicts(tree, worker, "area", "wrong")
    (tree / "tests" / "test_shapes.py").write_text("import nothing\n")
    with pytest.raises(InputError, match="No module named 'nothing'"):
        verdicts(tree, worker, "area", "strict")


def test_a_fork_is_stopped_at_the_limit_or_at_the_first_failure() -> None:
    for words, limit, failed in (
        ([["started", "test_a"]], 0.1, [["test_a", "not finished after 0.1 s"]]),
        ([], 0.1, [["the tests", "not finished after 0.1 s"]]),
        ([["passed", "test_a"], ["failed", "test_b", "why"]], None, [["test_b", "why"]]),
    ):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            be_a_fork()
            os.write(writer, "".join(json.dumps(word) + "\n" for word in words).encode())
            while True:
                pass
        os.close(writer)
        result = collect_outcome(child, reader, limit)
        assert result["failed"] == failed and not result["ended"]


# --------------------------------------------------------------------------------------------------- 2. without running
def verdict(task: Task, killed: bool) -> Verdict:
    mutant = task.mutant
    return Verdict(
        task.key, task.exercise.name, task.function, mutant.operator, mutant.line, mutant.change, killed, "a claim",
        "why", 0.1,
    )  # fmt: skip


def test_a_sample_depends_only_on_the_seed_and_covers_each_exercise() -> None:
    exercises = chosen(["whitening", "pass-at-k"])
    everything, one, again, other = (
        [(task.function, task.mutant.change) for task in make_tasks(exercises, sample, seed)]
        for sample, seed in ((None, 1), (5, 1), (5, 1), (5, 2))
    )
    assert one == again != other and len(one) == 10 and set(one) <= set(everything)
    assert one == sorted(one, key=everything.index)
    parts = batches(make_tasks(exercises, None, 1))
    assert sum(parts, []) == make_tasks(exercises, None, 1) and len(parts) == 3
    assert all(len(part) <= mutants.BATCH and len({task.exercise.name for task in part}) == 1 for part in parts)


def test_a_verdict_depends_on_its_source_and_tests(tree) -> None:
    def keys(*tests: str) -> list[str]:
        return [task.key for task in make_tasks([exercise("area", *tests)], None, 1)]

    before = keys("loose")
    assert before == keys("loose") and len(set(before + keys("strict"))) == 6
    (tree / "tests" / "test_shapes.py").write_text(TESTS + "\n")
    assert not set(before) & set(keys("loose"))


class NoWorker:
    def __init__(self, module: str) -> None:
        pass

    def __enter__(self) -> "NoWorker":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_sweep_reports_every_verdict_and_raises_a_jobs_error(monkeypatch) -> None:
    monkeypatch.setattr(mutants, "Worker", NoWorker)
    monkeypatch.setattr(mutants, "judge", lambda batch, *_: (verdict(task, True) for task in batch))
    tasks, reported = make_tasks(chosen(["whitening", "padding"]), None, 1), []
    sweep(tasks, 2, 5.0, reported.append)
    assert sorted(verdict.key for verdict in reported) == sorted(task.key for task in tasks)

    def broken(batch, *_):
        raise InputError("no")

    monkeypatch.setattr(mutants, "judge", broken)
    with pytest.raises(InputError, match="no"):
        sweep(tasks, 2, 5.0, reported.append)


def run(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m tools.mutants", *map(str, words)])
    run_module(main, Args)


def test_an_interrupted_sweep_continues_and_a_second_one_runs_nothing(monkeypatch, capsys, tmp_path) -> None:
    judged = []

    def interrupted(tasks, jobs, limit, tell):
        for task in tasks:
            if len(judged) == 7:
                judged.append(None)
                raise KeyboardInterrupt
            judged.append(task.key)
            tell(verdict(task, killed="constant" in task.mutant.operator))

    monkeypatch.setattr(mutants, "sweep", interrupted)
    words = ["pass-at-k", "--json", tmp_path / "found.jsonl"]
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *words)
    assert stop.value.code == 130 and len(read_verdicts(tmp_path / "found.jsonl")) == 7
    run(monkeypatch, *words)
    tasks = make_tasks(chosen(["pass-at-k"]), None, 1)
    assert len(judged) == 1 + len(tasks) and len(set(judged)) == len(judged)
    said = capsys.readouterr().out
    assert "survived  pass-at-k, nanorlhf/metrics/at_k.py:" in said and f"| pass-at-k | {len(tasks):7} |" in said
    run(monkeypatch, *words)
    assert len(judged) == 1 + len(tasks) and capsys.readouterr().out == said


def test_a_broken_file_and_a_partial_table_are_refused(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "found.jsonl").write_text('{"key": "1"}\n')
    for words, sentence in (
        (["pass-at-k", "--json", tmp_path / "found.jsonl"], "found.jsonl:1: not a verdict"),
        (["pass-at-k", "--publish"], "--publish needs all mutants"),
        (["--sample", "3", "--publish"], "--publish needs all mutants"),
        (["pass-at-kk"], "unknown exercise 'pass-at-kk'"),
    ):
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, *words)
        assert stop.value.code == 2 and sentence in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- 3. what the course claims
def test_every_equivalent_mutant_is_still_there() -> None:
    functions = {function for exercise in EXERCISES for function in exercise.functions}
    named = [(known.function, change) for known in EQUIVALENT for change in known.changes]
    assert len(set(named)) == len(named)
    for known in EQUIVALENT:
        assert known.function in functions and known.why.endswith(".")
        assert len(equivalent_changes(known.function)) >= len(known.changes)


@pytest.mark.parametrize("function", sorted({known.function for known in EQUIVALENT}))
def test_renaming_all_local_variables_moves_no_equivalent_mutant(function) -> None:
    path, name = path_and_name(function)
    source = (ROOT / path).read_text()
    source = with_renamed(source, name, local_variables(source, name))
    changes, fixed = {mutant.change for mutant in make_mutants(source, name)}, fixed_names(source)
    for known in EQUIVALENT:
        for change in known.changes if known.function == function else ():
            assert any(reads_like(change, other, fixed) for other in changes), change


def test_the_share_excludes_equivalent_mutants_and_wrong_explanations_are_listed(monkeypatch) -> None:
    known = EQUIVALENT[0]
    [known_exercise] = [exercise for exercise in EXERCISES if known.function in exercise.functions]
    tasks = [task for task in make_tasks([known_exercise], None, 1)]
    judged = [verdict(task, killed=task.mutant.change not in known.changes) for task in tasks]
    equivalent = sum(verdict.explained for verdict in judged)
    assert f"| {len(tasks):7} | {equivalent:10} | " in table(judged) and table(judged).endswith("|  100% |")
    assert mutants.listed(judged) == ""
    judged = [verdict(task, killed=True) for task in tasks]
    assert mutants.listed(judged).count("not equivalent") == equivalent


def test_the_published_numbers_cover_every_exercise_and_each_reaches_95_percent() -> None:
    with COUNTS.open(newline="") as stream:
        _, *rows = csv.reader(stream)
    assert [name for name, *_ in rows] == [*(exercise.name for exercise in EXERCISES), "all"]
    numbers = [tuple(map(int, row[1:])) for row in rows]
    assert [sum(column) for column in zip(*numbers[:-1], strict=True)] == list(numbers[-1])
    assert all(killed >= 0.95 * (number - equivalent) for number, equivalent, killed in numbers)
    number, equivalent, killed = numbers[-1]
    assert f"kill {killed:,} of {number - equivalent:,} wrong" in (ROOT / "course" / "README.md").read_text()


def test_counts_are_written_in_a_row_per_exercise_and_a_total(tmp_path) -> None:
    exercises = chosen(["whitening", "pass-at-k"])
    tasks = make_tasks(exercises, 5, 1)
    file = tmp_path / "mutants.csv"
    mutants.write_counts(file, [verdict(task, killed=task.exercise.name == "whitening") for task in tasks])
    with file.open(newline="") as stream:
        heading, *rows = csv.reader(stream)
    assert heading == ["exercise", "mutants", "equivalent", "killed"]
    assert [(name, number, killed) for name, number, _, killed in rows] == [
        ("whitening", "5", "5"), ("pass-at-k", "5", "0"), ("all", "10", "5")
    ]  # fmt: skip
