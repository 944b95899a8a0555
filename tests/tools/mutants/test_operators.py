"""Each mutation operator gives the expected mutants of a small function."""

import ast

import pytest

from course.copies import ROOT, path_and_name
from course.edit import find_function
from course.exercises import EXERCISES
from tools.mutants.operators import make_mutants

HEAD = "import torch\n\n\ndef f(a, b, x):\n"


def test_only_results_that_are_differentiated_are_detached() -> None:
    source = HEAD.replace("f(", "policy_loss(") + "    return a, b\n"
    assert [mutant.change for mutant in make_mutants(source, "policy_loss") if mutant.operator == "detached"] == [
        "return (a.detach(), b)"
    ]
    assert changes("return a, b", "detached") == []


def changes(body: str, operator: str) -> list[str]:
    source = HEAD + "".join(f"    {line}\n" for line in body.splitlines())
    mutants = [mutant for mutant in make_mutants(source, "f") if mutant.operator == operator]
    for mutant in mutants:
        compile(mutant.source, "f", "exec")
        assert mutant.source.startswith(HEAD)
    return [mutant.change for mutant in mutants]


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("comparison", "return a < b", ["return a <= b", "return a >= b"]),
        ("comparison", "return a is not None", ["return a is None"]),
        (
            "comparison",
            "return 0 <= a < b",
            ["return 0 < a < b", "return 0 > a < b", "return 0 <= a <= b", "return 0 <= a >= b"],
        ),
        ("arithmetic", "return a ** b", ["return a * b"]),
        ("arithmetic", "x += a\nreturn x", ["x -= a", "x = a"]),
        ("swapped operands", "return a - b + x", ["return b - a + x"]),
        ("swapped operands", "return (a - b) ** 2", ["return 2 ** (a - b)"]),
        ("dropped operand", "return a * (b + 1)", ["return a", "return b + 1", "return a * b", "return a * 1"]),
        ("dropped operand", "return -a", ["return a"]),
        ("dropped operand", "return a and b and x", ["return b and x", "return a and x", "return a and b"]),
        ("boolean", "return a or b", ["return a and b"]),
        ("negated condition", "if a:\n    return b\nreturn x", ["if not a:"]),
        ("negated condition", "return [i for i in x if i.real]", ["return [i for i in x if not i.real]"]),
        ("negated condition", "return a if a < b else b", []),  # `comparison` has a >= b
        ("constant", "return a, 2, 0.5, True, 'b'", [
            "return (a, 3, 0.5, True, 'b')", "return (a, 1, 0.5, True, 'b')", "return (a, 2, 1.5, True, 'b')",
            "return (a, 2, 0.0, True, 'b')", "return (a, 2, 0.5, False, 'b')", "return (a, 2, 0.5, True, 'b!')",
        ]),
        ("index", "return x[a, :b]", [
            "return x[a + 1, :b]", "return x[a - 1, :b]", "return x[a, 1:b]", "return x[a, :b + 1]",
            "return x[a, :b - 1]", "return x[a, :]",
        ]),
        ("index", "return list(range(a))", ["return list(range(a + 1))", "return list(range(a - 1))"]),
        ("index", "return x[-1]", []),  # `constant` and `dropped operand` shift it
        ("swapped arguments", "return g(a, b, x)", ["return g(b, a, x)", "return g(a, x, b)"]),
        ("swapped arguments", "return max(a, b)", []),
        ("swapped arguments", "return a, b", ["return (b, a)"]),
        ("dropped argument", "return x.sum(dim=1, out=a)", ["return x.sum(out=a)", "return x.sum(dim=1)"]),
        ("dropped argument", "return torch.zeros(a, device=b)", []),
        ("another function", "return x.amin(1)", ["return x.amax(1)"]),
        ("another function", "return sum(x)", []),  # there is no function `mean`
        ("dropped call", "return torch.exp(x).clamp(max=1)", ["return torch.exp(x)", "return x.clamp(max=1)"]),
        ("dropped call", "return x.to(a.device)", []),
        ("removed statement", "y = a\ny = b\ng(y)\nx[0] = y\nreturn y", [
            "pass  # y = b", "pass  # g(y)", "pass  # x[0] = y",
        ]),
        ("removed statement", "for i in x:\n    if a:\n        continue\n    return i\nreturn b", [
            "pass  # continue", "pass  # return i",
        ]),
    ],
)  # fmt: skip
def test_an_operator_makes_these_changes(operator, body, expected) -> None:
    assert changes(body, operator) == expected


def test_code_that_tests_cannot_judge_is_not_mutated() -> None:
    body = '"""-1"""\ny: tuple[1, 2] = x\nassert a < b\nif a:\n    raise ValueError(f"{a + 1}", "no")\nreturn y'
    source = HEAD + "".join(f"    {line}\n" for line in body.splitlines())
    mutations = {mutant.change for mutant in make_mutants(source, "f")}
    assert mutations == {"if not a:", "pass  # raise ValueError(f'{a + 1}', 'no')"}


def test_a_mutant_keeps_the_rest_of_the_file_and_its_comments() -> None:
    source = "A = 1 < 2\n\n\ndef f(x):\n    é = 'é'; return (x  # (B,)\n            < 1)  # a comment\n\n\nB = 1 < 2\n"
    mutated = [mutant.source for mutant in make_mutants(source, "f") if mutant.operator == "comparison"]
    assert mutated[0] == source.replace("x  # (B,)\n            < 1)", "(x <= 1))")


def test_equal_changes_are_numbered_in_file_order() -> None:
    source = HEAD + "    x.append(a)\n    x.append(a)\n    return x\n"
    mutants = [mutant for mutant in make_mutants(source, "f") if mutant.operator == "removed statement"]
    assert [(mutant.line, mutant.number) for mutant in mutants] == [(5, 0), (6, 1)]
    assert {mutant.change for mutant in mutants} == {"pass  # x.append(a)"}


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_mutants_of_an_exercise_are_distinct_and_change_only_its_function(exercise) -> None:
    for function in exercise.functions:
        path, name = path_and_name(function)
        source = (ROOT / path).read_text()
        lines = source.splitlines()
        node = find_function(source, name)
        before, after = lines[: node.lineno - 1], lines[node.end_lineno :]
        mutants = make_mutants(source, name)
        programs = set()
        for text in [lines, *(mutant.source.splitlines() for mutant in mutants)]:
            assert text[: len(before)] == before and text[len(text) - len(after) :] == after
            function_source = "\n".join(text[len(before) : len(text) - len(after)])
            programs.add(ast.dump(ast.parse("if 1:\n" * function_source.startswith(" ") + function_source)))
        assert len(mutants) >= 4 and len(programs) == 1 + len(mutants)
