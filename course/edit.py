"""Edits of a source file by the positions of its syntax-tree nodes: whatever they don't touch stays as it is."""

import ast
from collections.abc import Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_function(source: str, name: str) -> Function:
    """The function `name` of a file: `gae_loop`, `KVCache.append`, or `main.normalise` for one within another.

    Raises LookupError if there is none.
    """
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [
            child
            for child in ast.walk(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == part
        ]
        if not found:
            raise LookupError(f"no function {name}")
        node = found[0]
    if isinstance(node, ast.ClassDef):
        raise LookupError(f"{name} is a class")
    assert isinstance(node, Function)
    return node


def emptied(source: str, name: str, body: Sequence[str]) -> str:
    """`source` with the lines `body` in place of the function's own; signature, decorators and docstring stay."""
    function = find_function(source, name)
    lines = source.splitlines(keepends=True)
    first, end = function.body[0], function.end_lineno
    assert end is not None and first.end_lineno is not None
    if ast.get_docstring(function) is not None:
        start = first.end_lineno + 1
    else:
        start = first.lineno
        while lines[start - 2].strip().startswith("#"):  # comments above the first statement go with it
            start -= 1
    indent = " " * first.col_offset
    return "".join([*lines[: start - 1], *(f"{indent}{line}".rstrip() + "\n" for line in body), *lines[end:]])


def replaced(source: str, name: str, old: str, new: str, number: int = 0) -> str:
    """`source` with one node of the function replaced: the expression or statement that reads as `old` does.

    Layout and comments don't matter for whether two nodes are the same. number: which of several that match, in the
    order of the file. `new` is put in as it is, further lines indented as the node; an empty one deletes a statement
    with its lines. Raises LookupError if nothing matches.
    """
    function = find_function(source, name)
    (pattern,) = ast.parse(old).body
    wanted = ast.dump(pattern.value) if isinstance(pattern, ast.Expr) else ast.dump(pattern)
    found = [
        node
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Expr) and ast.dump(node) == wanted
    ]
    if isinstance(pattern, ast.Expr) and not new:  # a call that stands alone: the statement goes
        found = [
            n for s in function.body for n in ast.walk(s) if isinstance(n, ast.Expr) and ast.dump(n.value) == wanted
        ]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    if number >= len(found):
        raise LookupError(f"{name} holds {old!r} {len(found)} times")
    return spliced(source, found[number], new)


def spliced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """`source` with `text` in place of the node; an empty text deletes a statement with its lines."""
    data = source.encode()
    starts = [0]  # of the lines, in bytes, as columns are
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    if not text:
        start, end = starts[node.lineno - 1], starts[node.end_lineno]
    text = text.replace("\n", "\n" + " " * node.col_offset)
    return (data[:start] + text.encode() + data[end:]).decode()
