"""Edits by position keep the rest of the file byte for byte."""

import ast

import pytest

from course.bugs import BUGS, Bug
from course.copies import ROOT, path_and_name
from course.edit import find_function, fixed_names, replaced, rewritten, spliced

SOURCE = '''\
"""Docstring; déjà vu."""


class Cache:  # a comment
    @property
    def end(self) -> int:
        # a comment of the body
        return self.length + 1  # columns


def loss(x, y):
    """The mean of x - y.

    x, y (B,) -> a number
    """
    def inner(z):
        return "é" + z  # (B,)

    total = (x
             - y).sum()  # a comment that stays
    warn(total)
    return total / len(x) if len(x) else total / len(y)


LAST = 1
'''


def test_rewriting_keeps_signature_decorators_and_docstring() -> None:
    body = ["# read this", 'raise NotImplementedError("loss")']
    result = rewritten(SOURCE, {"loss": body})
    start, end = SOURCE.index("    def inner"), SOURCE.index("\n\nLAST")
    assert result == SOURCE[:start] + '    # read this\n    raise NotImplementedError("loss")\n' + SOURCE[end:]
    assert rewritten(SOURCE, {"loss": body, "Cache.end": []}).endswith(result[result.index("def loss") :])
    result = rewritten(SOURCE, {"Cache.end": ["raise KeyError"]})
    assert "    def end(self) -> int:\n        raise KeyError\n\n\ndef loss" in result and "@property" in result


def test_nested_functions_are_found_and_other_names_raise() -> None:
    assert find_function(SOURCE, "loss.inner").lineno == 16
    for name in ("inner.loss", "Cache", "Cache.loss", "nothing"):
        with pytest.raises(LookupError):
            find_function(SOURCE, name)


def test_replacing_a_node_keeps_the_rest() -> None:
    result = replaced(SOURCE, "loss", "(x - y).sum()", "(y - x).mean()")
    assert result == SOURCE.replace("(x\n             - y).sum()", "(y - x).mean()")
    assert replaced(SOURCE, "loss.inner", '"é" + z', '"à" + z') == SOURCE.replace('"é" + z', '"à" + z')


def test_one_of_several_nodes_is_replaced() -> None:
    assert "total / len(x) if n else" in replaced(SOURCE, "loss", "len(x)", "n", number=1)
    assert "total / n if len(x) else" in replaced(SOURCE, "loss", "len(x)", "n", number=0)
    with pytest.raises(LookupError, match="2 matches"):
        replaced(SOURCE, "loss", "len(x)", "n", number=2)


def test_a_statement_can_be_deleted_or_become_two() -> None:
    assert replaced(SOURCE, "loss", "warn(total)", "") == SOURCE.replace("    warn(total)\n", "")
    result = replaced(SOURCE, "loss", "warn(total)", "warn(total)\nstop(total)")
    assert "    warn(total)\n    stop(total)\n    return" in result
    ast.parse(result)


def test_a_node_is_found_under_other_local_names_and_the_edit_uses_them() -> None:
    other = SOURCE.replace("total", "sum_of_all")
    assert replaced(other, "loss", "warn(total)", "stop(total)") == other.replace("warn(sum", "stop(sum")
    with pytest.raises(LookupError, match="2 matches of .* with 2 other local names"):
        replaced(SOURCE, "loss", "a / len(b)", "a")
    with pytest.raises(LookupError, match="0 matches"):
        replaced(SOURCE, "loss", "min(total)", "stop(total)")  # a function isn't a local variable
    with pytest.raises(LookupError, match="0 matches"):
        replaced(SOURCE, "loss", "(x - x).sum()", "0")  # x and y differ


def local_variables(source: str, name: str) -> set[str]:
    function = find_function(source, name)
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored - fixed_names(source)


def with_renamed(source: str, name: str, variables: set[str]) -> str:
    """Rename these local variables of a function."""
    function = find_function(source, name)
    nodes = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in variables]
    for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        source = spliced(source, node, f"{node.id}_of_another_name")
    return source


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_renaming_a_local_variable_does_not_move_a_bug(bug: Bug) -> None:
    """Rename each local variable in turn: the same bug is planted in the same place."""
    path, name = path_and_name(bug.where)
    source = (ROOT / path).read_text()
    planted = replaced(source, name, bug.old, bug.new, bug.number)
    for variable in local_variables(source, name):
        expected = with_renamed(planted, name, {variable})
        result = replaced(with_renamed(source, name, {variable}), name, bug.old, bug.new, bug.number)
        assert ast.dump(ast.parse(result)) == ast.dump(ast.parse(expected)), variable
