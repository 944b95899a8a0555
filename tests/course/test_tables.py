"""The tables of exercises and bugs refer only to things that exist."""

import ast
import re

import pytest

from course.bugs import BUGS, Bug
from course.copies import ROOT, path_and_name
from course.edit import find_function, replaced
from course.exercises import EXERCISES, chosen
from nanorlhf.errors import InputError


def read_source(function: str) -> tuple[str, str]:
    path, name = path_and_name(function)
    return (ROOT / path).read_text(), name


def is_a_test(node: str) -> bool:
    """Return whether a pytest node id names a test, without checking the values in its brackets."""
    file, _, name = node.partition("::")
    return f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_every_exercise_names_existing_functions_and_tests() -> None:
    for exercise in EXERCISES:
        for function in exercise.functions:
            node = find_function(*read_source(function))
            assert node.body[0].lineno > node.lineno, f"{function}: a body on the line of its signature"
        assert exercise.tests and all(map(is_a_test, exercise.tests)), exercise.name
        for page in re.findall(r"docs/\w+\.md|nanorlhf/[\w/]+\.py|kernels/\w+\.py", exercise.read):
            assert (ROOT / page).is_file(), page


def test_names_are_unique_points_positive_and_needs_come_before() -> None:
    before: set[str] = set()
    for exercise in EXERCISES:
        assert re.fullmatch(r"[a-z0-9-]+", exercise.name) and exercise.name not in before
        assert set(exercise.needs) <= before, exercise.name
        assert 1 <= exercise.points <= 4 and exercise.level in (1, 2, 3) and exercise.hint
        before.add(exercise.name)
    functions = [function for exercise in EXERCISES for function in exercise.functions]
    assert len(functions) == len(set(functions)) and len(EXERCISES) >= 30


def test_exercises_are_chosen_by_name_in_the_order_of_the_course() -> None:
    assert [exercise.name for exercise in chosen(["whitening", "padding"])] == ["padding", "whitening"]
    with pytest.raises(InputError, match="unknown exercise 'witening': choose from padding, "):
        chosen(["witening"])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_planted_in_a_file_that_still_compiles(bug: Bug) -> None:
    source, function = read_source(bug.where)
    result = replaced(source, function, bug.old, bug.new, bug.number)
    compile(result, bug.where, "exec")
    assert ast.dump(ast.parse(result)) != ast.dump(ast.parse(source))
    assert all(map(is_a_test, bug.guard)) and bug.level in (1, 2, 3)
    before, after = find_function(source, function), find_function(result, function)
    first, last = before.lineno - 1, before.end_lineno
    assert result.splitlines()[:first] == source.splitlines()[:first]
    assert result.splitlines()[after.end_lineno :] == source.splitlines()[last:]


def test_there_are_forty_bugs_of_all_levels_each_with_a_page() -> None:
    assert len(BUGS) >= 40 and len({bug.name for bug in BUGS}) == len(BUGS)
    assert all(sum(bug.level == level for bug in BUGS) >= 10 for level in (1, 2, 3))
    for bug in BUGS:
        for text in (bug.symptom, bug.cause):
            assert len(text) > 20 and text.endswith("."), bug.name
        assert bug.who
