"""Grading gives points for passing the repository's own tests, whatever else the student's code does."""

import importlib.util

import pytest

from course.copies import ROOT, path_of, read_mark
from course.edit import replaced, rewritten
from course.exercises import EXERCISES, chosen
from course.grader.grade import Desk, first_open, given, grade
from course.grader.worker import Worker, in_words
from course.start import start
from nanorlhf.errors import InputError

pytestmark = pytest.mark.slow
CHEAP = ["learning-rate", "pass-at-k"]
LIMIT = 300.0  # seconds, on a busy machine


def restore(copy, function: str) -> None:
    path = path_of(function)
    (copy / path).write_text((ROOT / path).read_text())


def points(copy, desk: Desk, names: list[str]) -> int:
    exercises = chosen(names)
    outcomes = grade(copy, exercises, LIMIT, [desk])
    return sum(exercise.points for exercise in exercises if outcomes[exercise.name].passed)


def test_an_empty_exercise_fails_by_its_name_and_a_restored_one_raises_the_grade_by_its_points(tmp_path, desk) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    outcomes = grade(copy, chosen(CHEAP), LIMIT, [desk])
    for name, outcome in outcomes.items():
        assert not outcome.passed and f"exercise {name}:" in outcome.reason
    assert outcomes["learning-rate"].claim == "linear is the papers fraction"
    reached = 0
    for exercise in chosen(CHEAP):
        restore(copy, exercise.functions[0])
        now = points(copy, desk, CHEAP)
        assert now == reached + exercise.points
        reached = now


def test_next_is_the_first_exercise_that_is_open(tmp_path, desk) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    assert [exercise.name for exercise in given(copy)] == CHEAP
    restore(copy, chosen(CHEAP)[0].functions[0])
    exercise, outcome = first_open(copy, LIMIT, desk)
    assert exercise.name == "pass-at-k" and outcome.claim.startswith("pass at k is the share of draws")
    restore(copy, exercise.functions[0])
    assert first_open(copy, LIMIT, desk) is None


def test_next_judges_again_only_what_has_changed(tmp_path, desk, monkeypatch) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    for exercise in chosen(CHEAP):
        restore(copy, exercise.functions[0])
    judged = []
    judge = Desk.judge
    monkeypatch.setattr(Desk, "judge", lambda self, *given: judged.append(given[1].name) or judge(self, *given))
    assert first_open(copy, LIMIT, desk) is None and first_open(copy, LIMIT, desk) is None
    assert judged == CHEAP
    path = copy / "nanorlhf/metrics/at_k.py"
    path.write_text(replaced(path.read_text(), "pass_at_k", "_check_k(k, n)", "pass"))
    exercise, _ = first_open(copy, LIMIT, desk)
    assert exercise.name == "pass-at-k" and judged == [*CHEAP, "pass-at-k"]


def test_an_endless_loop_costs_its_exercise_and_names_the_limit(copy, desk) -> None:
    loop = "while True:\n    step += 1"
    path = copy / "nanorlhf/training/optimizer.py"
    source = path.read_text()
    path.write_text(
        replaced(source, "lr_factor", "progress = (step - warmup_steps) / (num_steps - warmup_steps)", loop)
    )
    outcome = grade(copy, chosen(["learning-rate"]), 3.0, [desk])["learning-rate"]
    assert not outcome.passed and outcome.reason == "not finished after 3 s" and outcome.seconds < 60
    assert points(copy, desk, ["pass-at-k"]) == 1


def test_a_function_that_ends_the_tests_has_not_passed(copy, desk) -> None:
    path = copy / "nanorlhf/metrics/at_k.py"
    path.write_text(replaced(path.read_text(), "pass_at_k", "_check_k(k, n)", "raise KeyboardInterrupt"))
    outcome = grade(copy, chosen(["pass-at-k"]), LIMIT, [desk])["pass-at-k"]
    assert not outcome.passed and outcome.reason == "the code under test has kept it from running"


def test_a_mistake_in_one_exercise_costs_no_other_that_needs_it(copy, desk) -> None:
    path = copy / "nanorlhf/padding.py"
    path.write_text(rewritten(path.read_text(), {"first_true_index": ["raise KeyError"]}))
    assert points(copy, desk, ["padding", "eos-masks"]) == 2


def test_code_that_cannot_be_imported_says_so(copy, desk) -> None:
    (copy / "nanorlhf/metrics/at_k.py").write_text("def pass_at_k(:\n")
    outcome = grade(copy, chosen(["pass-at-k"]), LIMIT, [desk])["pass-at-k"]
    assert not outcome.passed and "SyntaxError" in outcome.reason + outcome.claim


def test_a_directory_that_is_no_copy_is_refused(tmp_path, desk) -> None:
    with pytest.raises(InputError, match="has no data: expected a directory made"):
        grade(tmp_path, list(EXERCISES), LIMIT, [desk])
    assert read_mark(tmp_path) == {}
    (tmp_path / ".course").write_text("not base64")
    with pytest.raises(InputError, match="can't be read: make the copy again"):
        given(tmp_path)


def test_without_the_libraries_of_the_tests_nothing_is_judged(monkeypatch) -> None:
    """Otherwise every right answer would fail, as if its code had ended the process."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hypothesis" else find(name))
    with pytest.raises(InputError, match="The tests need hypothesis: run `pip install"):
        Worker()


def test_the_name_of_a_test_is_its_claim() -> None:
    assert in_words("tests/test_ppo.py::test_masked_mean_ignores_nan") == "masked mean ignores nan"
    assert in_words("tests/a.py::test_a_b[3-gpt2]") == "a b [3-gpt2]"
    assert in_words("tests/a.py") == "tests/a.py can be imported"
