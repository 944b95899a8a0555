"""The examples of the exercises, run against the solutions."""

import doctest
import importlib

import pytest

from course.examples import EXAMPLES, MODELS, SETTING
from course.exercises import EXERCISES
from course.handout import exercise_page


def test_each_exercise_has_one() -> None:
    assert list(EXAMPLES) == [exercise.name for exercise in EXERCISES]
    for exercise in EXERCISES:
        example, mistake = EXAMPLES[exercise.name]
        assert example.count(">>>") >= 1 and mistake.endswith(".")
        page = exercise_page(exercise)
        assert example in page and f"**A common mistake:** {mistake}" in page
        assert all((text in page) == (name in example) for name, text in MODELS.items())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_its_numbers_are_right(exercise) -> None:
    names: dict = {}
    exec(SETTING, names)
    for where in exercise.functions:
        module, _, name = where.partition(":")
        names[name.partition(".")[0]] = getattr(importlib.import_module(module), name.partition(".")[0])
    if exercise.name == "gae-kernel":  # a kernel needs a grid: the example shows a row that it writes
        names["gae_doubling"] = importlib.import_module("kernels.gae").gae_doubling
    test = doctest.DocTestParser().get_doctest(EXAMPLES[exercise.name][0], names, exercise.name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert not failures, "".join(failures)
