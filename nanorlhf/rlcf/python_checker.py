"""The process behind PythonCompiler: reads programs from stdin, writes diagnostics to stdout, and runs no program.

nanorlhf/rlcf/compilers.py starts it as a script, so it imports nothing from this package.
"""

import ast
import importlib
import json
import re
import struct
import sys
from typing import BinaryIO

from pyflakes import messages
from pyflakes.checker import Checker

UNDEFINED = messages.UndefinedName, messages.UndefinedLocal, messages.ImportStarUsage
UNUSED = messages.UnusedVariable, messages.UnusedAnnotation
NAME = re.compile(r"\w+")
DEEP = 100_000  # Python frames; pyflakes is pure Python, so the C stack doesn't overflow
# whose public names we look up, for `from math import *`; importing them has no side effects
MODULES = set(
    "abc array bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools heapq "
    "itertools json math operator os random re statistics string sys time typing".split()
)
FRESH = ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.List, ast.Dict  # values without another name


def check(program: str) -> list[list]:
    """Return [kind, code, start, end, message] for each diagnostic."""
    lines = [match.end() for match in re.finditer(r"\r\n|\r|\n", program)]
    line_starts = [0, *lines]
    line_ends = [*lines, len(program)]

    def offset(line: int, column: int) -> int:
        """Return the program offset of a line (from 1) and column (from 0). Python's columns may exceed the line."""
        line = min(max(line, 1), len(line_starts))
        return min(line_starts[line - 1] + max(column, 0), line_ends[line - 1])

    def offset_of_bytes(line: int, column: int) -> int:
        """Return the program offset of a line and a column in UTF-8 bytes, as in syntax trees."""
        text = program[offset(line, 0) : offset(line, len(program))]
        return offset(line, len(text.encode()[: max(column, 0)].decode(errors="ignore")))

    def syntax_error(error: SyntaxError, offset) -> list:
        """Return the error as a diagnostic. `offset` is one of the two functions above, to fit error.offset's unit."""
        code, message = type(error).__name__, str(error.msg)
        if error.lineno is None or error.offset is None:
            return ["error", code, len(program), len(program), message]
        start = offset(error.lineno, error.offset - 1)
        line = program[offset(error.lineno, 0) : offset(error.lineno, len(program))]
        if error.text is not None and error.text.strip() not in line:  # columns are relative to a part of an f-string
            return ["error", code, offset(error.lineno, 0), offset(error.lineno, len(line.rstrip())), message]
        if "was never closed" in message or "unterminated triple-quoted" in message:
            end = len(program)  # only visible at the end
        else:
            end = offset(error.end_lineno or error.lineno, (error.end_offset or 0) - 1)
            end = max(end, min(start + 1, len(program)))
        return ["error", code, start, end, message]

    if "\0" in program:
        position = program.index("\0")
        return [["error", "SyntaxError", position, position + 1, "source code cannot contain null bytes"]]
    unit = offset
    try:
        tree = ast.parse(program)
        unit = offset_of_bytes
        compile(tree, "<program>", "exec", dont_inherit=True)  # `return` outside a function, duplicate arguments
    except SyntaxError as error:
        return [syntax_error(error, unit)]
    except UnicodeEncodeError as error:  # a lone surrogate
        return [["error", "UnicodeEncodeError", error.start, error.end, error.reason]]
    except (RecursionError, MemoryError) as error:
        return [["error", type(error).__name__, len(program), len(program), "nested too deeply"]]

    # names that the syntax requires aren't unused: `with ... as` is exempt here, `except ... as` by its position below
    exempt = {
        (name.lineno, name.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
        for item in node.items
        if item.optional_vars is not None
        for name in ast.walk(item.optional_vars)
        if isinstance(name, ast.Name)
    }
    diagnostics = [
        ["unused", "UnusedVariable", start, start + len(name.id), f"local variable {name.id!r} is only read by itself"]
        for name in read_by_itself(tree)
        for start in (offset_of_bytes(name.lineno, name.col_offset),)
    ]
    starred = starred_names(tree)
    defined = guarded_names(tree)
    recursion_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(DEEP)
    checker_messages = Checker(tree).messages
    sys.setrecursionlimit(recursion_limit)
    for message in checker_messages:
        if not isinstance(message, UNDEFINED + UNUSED) or (message.lineno, message.col) in exempt:
            continue
        if isinstance(message, messages.ImportStarUsage):
            if starred is None or message.message_args[0] in starred:
                continue
        if (message.lineno, message.col) in defined:
            continue
        start = offset_of_bytes(message.lineno, message.col)
        name = NAME.match(program, start)
        if isinstance(message, UNUSED) and (name is None or name.group() != message.message_args[0]):
            continue
        kind = "unused" if isinstance(message, UNUSED) else "error"
        code, text = type(message).__name__, message.message % message.message_args
        if code == "ImportStarUsage":
            code, text = "UndefinedName", f"undefined name {message.message_args[0]!r}"
        diagnostics.append([kind, code, start, name.end() if name is not None else start + 1, text])
    return list({tuple(fields[:4]): fields for fields in diagnostics}.values())


# pyflakes trusts some statements to explain everything around them. As a reward, each would be a line that switches a
# check off, so these functions narrow them down.
def starred_names(tree: ast.Module) -> set[str] | None:
    """Return the names that `from ... import *` defines; None if a module isn't one of MODULES."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            if node.level or node.module not in MODULES:
                return None
            module = vars(importlib.import_module(node.module))
            names |= {*module.get("__all__", [name for name in module if not name.startswith("_")])}
    return names


def guarded_names(tree: ast.Module) -> set[tuple[int, int]]:
    """Make pyflakes ignore handlers of NameError and calls of locals(); return the positions of guarded names that the
    program defines elsewhere, as in `try: unicode`, `except NameError: unicode = str`.
    """
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    positions = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "locals":
            node.func.id = "vars"
        if isinstance(node, ast.ExceptHandler):
            caught = [node.type] if node.type is None or isinstance(node.type, ast.Name) else [*ast.walk(node.type)]
            for name in caught:
                if isinstance(name, ast.Name) and name.id == "NameError":
                    name.id = "Exception"
            if node.type is None:
                node.type = ast.copy_location(ast.Name("Exception", ast.Load()), node)
        if isinstance(node, (ast.Try, ast.TryStar)):
            names = [name for part in node.body for name in ast.walk(part) if isinstance(name, ast.Name)]
            positions |= {(name.lineno, name.col_offset) for name in names if name.id in bound}
    return positions


def read_by_itself(tree: ast.Module) -> list[ast.Name]:
    """Return the first assignment of each local variable that only its own updates read: `x += 1`, `x = x + 1`.

    `y += 1` also counts as a read if y may be another name of a list or the like.
    """
    unread: dict[tuple[int, int], ast.Name] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        # names that something else binds or reads
        skipped = {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Global) or (isinstance(node, ast.Nonlocal) and node in function.body):
                skipped.update(node.names)
            elif isinstance(node, ast.ClassDef):
                skipped |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        updates = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
        updated = {target.id for target in updates if isinstance(target, ast.Name)}
        updating = set()  # ids of the names in the variable's own assignments
        for node in nodes:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            is_assignment = isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr)
            if is_assignment and isinstance(target, ast.Name) and value is not None:
                parts = list(ast.walk(value))
                updating.add(id(target))
                if not any(isinstance(part, ast.Call | ast.Await | ast.Yield | ast.YieldFrom) for part in parts):
                    updating |= {id(part) for part in parts if isinstance(part, ast.Name) and part.id == target.id}
                if not isinstance(node, ast.AugAssign) and not isinstance(value, FRESH) and target.id in updated:
                    skipped.add(target.id)
        skipped |= {name.id for name in names if id(name) not in updating and not isinstance(name.ctx, ast.Del)}
        for name in sorted(names, key=lambda name: (name.lineno, name.col_offset)):
            if name.id not in skipped:
                skipped.add(name.id)
                unread[name.lineno, name.col_offset] = name
    return list(unread.values())


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer requests until stdin ends. Both ways: int id, int size, then `size` bytes. The first reply, id -1, means
    ready.
    """

    def reply(index: int, diagnostics: list[list]) -> None:
        content = json.dumps(diagnostics).encode()
        stdout.write(struct.pack(">ii", index, len(content)) + content)
        stdout.flush()

    reply(-1, check("ready = True\n"))
    while len(head := stdin.read(8)) == 8:
        index, size = struct.unpack(">ii", head)
        reply(index, check(stdin.read(size).decode("utf-8", "surrogatepass")))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
