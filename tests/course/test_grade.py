"""Grading gives points for passing the repository's own tests, whatever else the student's code does."""

import importlib.util
import site

import pytest

from course.copies import ROOT, read_mark, source_path
from course.edit import replaced, rewritten
from course.exercises import EXERCISES, chosen
from course.grader.grade import Grader, assigned_exercises, first_open, grade, temporary_tree
from course.grader.worker import Outcome, Worker, in_words
from course.start import start
from nanorlhf.errors import InputError

pytestmark = pytest.mark.slow
CHEAP = ["learning-rate", "pass-at-k"]
LIMIT = 300.0  # seconds, on a busy machine


def restore(copy, function: str) -> None:
    path = source_path(function)
    (copy / path).write_text((ROOT / path).read_text())


def points(copy, grader: Grader, names: list[str]) -> int:
    exercises = chosen(names)
    outcomes = grade(copy, exercises, LIMIT, [grader])
    return sum(exercise.points for exercise in exercises if outcomes[exercise.name].passed)


def test_an_empty_exercise_fails_by_name_and_a_solved_one_adds_its_points(tmp_path, grader) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    outcomes = grade(copy, chosen(CHEAP), LIMIT, [grader])
    for name, outcome in outcomes.items():
        assert not outcome.passed and f"exercise {name}:" in outcome.reason
    assert outcomes["learning-rate"].claim == "linear is the papers fraction"
    reached = 0
    for exercise in chosen(CHEAP):
        restore(copy, exercise.functions[0])
        now = points(copy, grader, CHEAP)
        assert now == reached + exercise.points
        reached = now


def test_next_is_the_first_unsolved_exercise(tmp_path, grader) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    assert [exercise.name for exercise in assigned_exercises(copy)] == CHEAP
    restore(copy, chosen(CHEAP)[0].functions[0])
    exercise, outcome = first_open(copy, LIMIT, grader)
    assert exercise.name == "pass-at-k" and outcome.claim.startswith("pass at k is the share of draws")
    restore(copy, exercise.functions[0])
    assert first_open(copy, LIMIT, grader) is None


def test_next_tests_only_changed_exercises_again(tmp_path, grader, monkeypatch) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    for exercise in chosen(CHEAP):
        restore(copy, exercise.functions[0])
    judged = []
    judge = Grader.judge
    monkeypatch.setattr(Grader, "judge", lambda self, *given: judged.append(given[1].name) or judge(self, *given))
    assert first_open(copy, LIMIT, grader) is None and first_open(copy, LIMIT, grader) is None
    assert judged == CHEAP
    path = copy / "nanorlhf/metrics/at_k.py"
    path.write_text(replaced(path.read_text(), "pass_at_k", "_check_k(k, n)", "pass"))
    exercise, _ = first_open(copy, LIMIT, grader)
    assert exercise.name == "pass-at-k" and judged == [*CHEAP, "pass-at-k"]


@pytest.mark.parametrize("line", ["np = pytest.importorskip('no_such_package')", ""])
def test_a_test_that_is_skipped_makes_an_exercise_not_gradable(worker, line) -> None:
    """In the first case the whole file is skipped, in the second one of its two tests."""
    with temporary_tree(ROOT) as tree:
        (tree / "tests/test_x.py").write_text(f"""import pytest
{line}
def test_one(): pass
def test_two(): pytest.importorskip("no_such_package")
""")
        outcome = worker.run(tree, ["tests/test_x.py::test_one", "tests/test_x.py::test_two"], LIMIT)
        assert (outcome.passed, outcome.gradable, outcome.claim) == (False, False, "not gradable here")
        assert "no_such_package" in outcome.reason
        if not line:
            assert worker.run(tree, ["tests/test_x.py::test_one"], LIMIT).passed


def test_next_skips_an_exercise_that_is_not_gradable(tmp_path, grader, monkeypatch) -> None:
    copy = tmp_path / "copy"
    start(copy, chosen(CHEAP))
    first, second = chosen(CHEAP)
    judge = Grader.judge
    skipped = Outcome(False, "not gradable here", "no package", 0.1, gradable=False)
    monkeypatch.setattr(Grader, "judge", lambda *args: skipped if args[2] == first else judge(*args))
    open_exercise = first_open(copy, LIMIT, grader)
    assert open_exercise is not None and open_exercise[0] == second
    restore(copy, second.functions[0])
    assert first_open(copy, LIMIT, grader) is None
    assert read_mark(copy)["passed"].keys() == {second.name}


def test_an_endless_loop_fails_only_its_exercise_and_reports_the_limit(copy, grader) -> None:
    loop = "while True:\n    step += 1"
    path = copy / "nanorlhf/training/optimizer.py"
    source = path.read_text()
    path.write_text(
        replaced(source, "lr_factor", "progress = (step - warmup_steps) / (num_steps - warmup_steps)", loop)
    )
    outcome = grade(copy, chosen(["learning-rate"]), 3.0, [grader])["learning-rate"]
    assert not outcome.passed and outcome.reason == "not finished after 3 s" and outcome.seconds < 60
    assert points(copy, grader, ["pass-at-k"]) == 1


def test_a_function_that_ends_the_tests_has_not_passed(copy, grader) -> None:
    path = copy / "nanorlhf/metrics/at_k.py"
    path.write_text(replaced(path.read_text(), "pass_at_k", "_check_k(k, n)", "raise KeyboardInterrupt"))
    outcome = grade(copy, chosen(["pass-at-k"]), LIMIT, [grader])["pass-at-k"]
    assert not outcome.passed and outcome.reason.endswith("StudentError: KeyboardInterrupt:")


def test_a_mistake_does_not_fail_exercises_that_need_the_function(copy, grader) -> None:
    path = copy / "nanorlhf/padding.py"
    path.write_text(rewritten(path.read_text(), {"first_true_index": ["raise KeyError"]}))
    assert points(copy, grader, ["padding", "eos-masks"]) == 2


def test_code_that_cannot_be_imported_is_reported(copy, grader) -> None:
    (copy / "nanorlhf/metrics/at_k.py").write_text("def pass_at_k(:\n")
    outcome = grade(copy, chosen(["pass-at-k"]), LIMIT, [grader])["pass-at-k"]
    assert not outcome.passed and "SyntaxError" in outcome.reason + outcome.claim


def test_a_directory_that_is_not_a_copy_is_refused(tmp_path, grader) -> None:
    with pytest.raises(InputError, match="has no data: expected a directory made"):
        grade(tmp_path, list(EXERCISES), LIMIT, [grader])
    assert read_mark(tmp_path) == {}
    (tmp_path / ".course").write_text("not base64")
    with pytest.raises(InputError, match="can't be read: make the copy again"):
        assigned_exercises(tmp_path)


def test_nothing_is_graded_without_the_tests_libraries(monkeypatch) -> None:
    """Otherwise every right answer would fail, as if its code had ended the process."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hypothesis" else find(name))
    with pytest.raises(InputError, match="The tests need hypothesis: run `pip install"):
        Worker()


def test_nothing_is_graded_where_the_solutions_are_among_the_packages(monkeypatch, tmp_path) -> None:
    (tmp_path / "nanorlhf").mkdir()
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    with pytest.raises(InputError, match="contains the solutions"):
        Worker()


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_repositorys_own_code_gets_all_points(exercise, grader) -> None:
    outcome = grade(ROOT, [exercise], LIMIT, [grader])[exercise.name]
    assert outcome.passed, outcome


def test_an_argument_is_changed_only_where_the_docstring_allows_it(copy, grader) -> None:
    """Otherwise a function could set both its result and what a test compares it with."""
    path = copy / "kernels/gae.py"
    zeros = "rewards.zero_()\nvalues.zero_()\nreturn torch.zeros_like(rewards), torch.zeros_like(rewards)"
    path.write_text(rewritten(path.read_text(), {"gae_loop": zeros.splitlines()}))
    outcome = grade(copy, chosen(["gae-loop"]), LIMIT, [grader])["gae-loop"]
    assert not outcome.passed and outcome.reason.endswith("the function changes an argument in place")


def test_a_detached_result_fails(copy, grader) -> None:
    path = copy / "nanorlhf/ppo.py"
    source = replaced(path.read_text(), "policy_loss", "torch.maximum(unclipped, clipped)", "unclipped.detach()")
    path.write_text(source)
    outcome = grade(copy, chosen(["policy-loss"]), LIMIT, [grader])["policy-loss"]
    assert not outcome.passed


def test_a_test_name_is_turned_into_words() -> None:
    assert in_words("tests/test_ppo.py::test_masked_mean_ignores_nan") == "masked mean ignores nan"
    assert in_words("tests/a.py::test_a_b[3-gpt2]") == "a b [3-gpt2]"
    assert in_words("tests/a.py") == "tests/a.py can be imported"
