"""Edits by position: what is not edited stays byte for byte."""

import ast

import pytest

from course.edit import emptied, find_function, replaced

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


def test_a_function_keeps_signature_decorators_and_docstring() -> None:
    result = emptied(SOURCE, "loss", ["# read this", 'raise NotImplementedError("loss")'])
    start, end = SOURCE.index("    def inner"), SOURCE.index("\n\nLAST")
    assert result == SOURCE[:start] + '    # read this\n    raise NotImplementedError("loss")\n' + SOURCE[end:]
    result = emptied(SOURCE, "Cache.end", ["raise KeyError"])
    assert "    def end(self) -> int:\n        raise KeyError\n\n\ndef loss" in result and "@property" in result


def test_a_function_within_another_is_found_and_what_is_none_is_not() -> None:
    assert find_function(SOURCE, "loss.inner").lineno == 16
    for name in ("inner.loss", "Cache", "Cache.loss", "nothing"):
        with pytest.raises(LookupError):
            find_function(SOURCE, name)


def test_a_node_is_replaced_and_the_rest_stays() -> None:
    result = replaced(SOURCE, "loss", "(x - y).sum()", "(y - x).mean()")
    assert result == SOURCE.replace("(x\n             - y).sum()", "(y - x).mean()")
    assert replaced(SOURCE, "loss.inner", '"é" + z', '"à" + z') == SOURCE.replace('"é" + z', '"à" + z')


def test_one_of_several_nodes_is_replaced() -> None:
    assert "total / len(x) if n else" in replaced(SOURCE, "loss", "len(x)", "n", number=1)
    assert "total / n if len(x) else" in replaced(SOURCE, "loss", "len(x)", "n", number=0)
    with pytest.raises(LookupError, match="2 times"):
        replaced(SOURCE, "loss", "len(x)", "n", number=2)


def test_a_statement_can_be_taken_out_or_become_two() -> None:
    assert replaced(SOURCE, "loss", "warn(total)", "") == SOURCE.replace("    warn(total)\n", "")
    result = replaced(SOURCE, "loss", "warn(total)", "warn(total)\nstop(total)")
    assert "    warn(total)\n    stop(total)\n    return" in result
    ast.parse(result)
