"""Grading: points for what the repository's own tests let pass, whatever else the student's code does."""

import pytest

from course.copies import ROOT, path_of, read_mark
from course.edit import replaced
from course.exercises import EXERCISES, chosen
from course.grade import Worker, first_open, given, grade, in_words
from course.start import start
from nanorlhf.errors import InputError

pytestmark = pytest.mark.slow
CHEAP = ["learning-rate", "pass-at-k"]
LIMIT = 300.0  # of a busy machine


def restore(copy, function: str) -> None:
    path = path_of(function.partition(":")[0])
    (copy / path).write_text((ROOT / path).read_text())


def points(copy, worker: Worker, names: list[str], **settings) -> int:
    exercises = chosen(names)
    outcomes = grade(copy, exercises, LIMIT, [worker], **settings)
    return sum(exercise.points for exercise in exercises if outcomes[exercise.name].passed)


def test_an_empty_exercise_fails_by_its_name_and_a_restored_one_raises_the_grade_by_its_points(
    tmp_path, worker
) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    outcomes = grade(copy, chosen(CHEAP), LIMIT, [worker])
    for name, outcome in outcomes.items():
        assert not outcome.passed and f"exercise {name}:" in outcome.reason
    assert outcomes["learning-rate"].claim == "linear is the papers fraction"
    reached = 0
    for exercise in chosen(CHEAP):
        restore(copy, exercise.functions[0])
        now = points(copy, worker, CHEAP)
        assert now == reached + exercise.points
        reached = now


def test_next_is_the_first_exercise_that_is_open(tmp_path, worker) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    assert [exercise.name for exercise in given(copy)] == CHEAP
    restore(copy, chosen(CHEAP)[0].functions[0])
    exercise, outcome = first_open(copy, LIMIT, worker)
    assert exercise.name == "pass-at-k" and outcome.claim.startswith("pass at k is the share of draws")
    restore(copy, exercise.functions[0])
    assert first_open(copy, LIMIT, worker) is None


def test_an_endless_loop_costs_its_exercise_and_names_the_limit(copy, worker) -> None:
    loop = "while True:\n    step += 1"
    path = copy / "nanorlhf/training/optimizer.py"
    source = path.read_text()
    path.write_text(
        replaced(source, "lr_factor", "progress = (step - warmup_steps) / (num_steps - warmup_steps)", loop)
    )
    outcome = grade(copy, chosen(["learning-rate"]), 8.0, [worker])["learning-rate"]
    assert not outcome.passed and outcome.reason == "no end after 8 s" and outcome.seconds < 60
    assert points(copy, worker, ["pass-at-k"]) == 1


def test_a_function_that_ends_the_process_has_not_passed(copy, worker) -> None:
    path = copy / "nanorlhf/metrics/at_k.py"
    path.write_text(replaced(path.read_text(), "pass_at_k", "_check_k(k, n)", "__import__('os')._exit(0)"))
    outcome = grade(copy, chosen(["pass-at-k"]), LIMIT, [worker])["pass-at-k"]
    assert not outcome.passed and outcome.reason == "the code under test has ended the process"


def test_an_edited_test_does_not_count_unless_the_teacher_says_so(tmp_path, worker) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(["pass-at-k"]))
    names = [test.partition("::")[2] for test in chosen(["pass-at-k"])[0].tests]
    (copy / "tests/metrics/test_metrics.py").write_text("".join(f"def {name}(): pass\n" for name in names))
    assert points(copy, worker, ["pass-at-k"]) == 0
    assert points(copy, worker, ["pass-at-k"], own_tests=True) == 1


def test_code_that_cannot_be_imported_says_so(copy, worker) -> None:
    (copy / "nanorlhf/metrics/at_k.py").write_text("def pass_at_k(:\n")
    outcome = grade(copy, chosen(["pass-at-k"]), LIMIT, [worker])["pass-at-k"]
    assert not outcome.passed and "SyntaxError" in outcome.reason + outcome.claim


def test_a_directory_that_is_no_copy_is_refused(tmp_path, worker) -> None:
    with pytest.raises(InputError, match="has no data: name a directory that"):
        grade(tmp_path, list(EXERCISES), LIMIT, [worker])
    assert read_mark(tmp_path) == {}
    (tmp_path / ".course").write_text("not base64")
    with pytest.raises(InputError, match="can't be read: make the copy again"):
        given(tmp_path)


def test_the_name_of_a_test_is_its_claim() -> None:
    assert in_words("tests/test_ppo.py::test_masked_mean_ignores_nan") == "masked mean ignores nan"
    assert in_words("tests/a.py::test_a_b[3-gpt2]") == "a b [3-gpt2]"
    assert in_words("tests/a.py") == "tests/a.py can be imported"
