"""The process behind PythonCompiler: reads programs from stdin, writes diagnostics to stdout, and runs no program.

nanorlhf/rlcf/compilers.py starts it as a script, so it imports nothing from this package.
"""

import ast
import json
import re
import struct
import sys
from typing import BinaryIO

from pyflakes import messages
from pyflakes.checker import Checker

UNDEFINED = messages.UndefinedName, messages.UndefinedLocal
UNUSED = messages.UnusedVariable, messages.UnusedAnnotation
NAME = re.compile(r"\w+")
DEEP = 100_000  # Python frames; pyflakes is pure Python, so the C stack doesn't overflow


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
    diagnostics = []
    recursion_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(DEEP)
    checker_messages = Checker(tree).messages
    sys.setrecursionlimit(recursion_limit)
    for message in checker_messages:
        if not isinstance(message, UNDEFINED + UNUSED) or (message.lineno, message.col) in exempt:
            continue
        start = offset_of_bytes(message.lineno, message.col)
        name = NAME.match(program, start)
        if isinstance(message, UNUSED) and (name is None or name.group() != message.message_args[0]):
            continue
        kind = "unused" if isinstance(message, UNUSED) else "error"
        end = name.end() if name is not None else start + 1
        diagnostics.append([kind, type(message).__name__, start, end, message.message % message.message_args])
    return diagnostics


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
