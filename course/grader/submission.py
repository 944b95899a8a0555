"""Read a submission and put the graded part, the bodies of an exercise's functions, into the grader's tree.

The grader runs its own tree with its own tests. For each exercise, it inserts the student's bodies. The functions that
the exercise needs are the grader's, so a mistake costs points only once. The functions of all other exercises are
empty, so there is no solution to call. Everything else that a student changes or adds is ignored, except new top-level
functions and imports that the bodies use.
"""

import ast
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from course.copies import ROOT, path_and_name, read_untrusted, source_path
from course.edit import Function, find_function, parsed, rewritten
from course.exercises import EXERCISES, Exercise, closure
from nanorlhf.errors import InputError

DEEPEST = 100  # levels of a syntax tree, because we read it recursively


class Refused(Exception):
    """The reason why a submission's exercise isn't run."""


# ---------------------------------------------------------------------------------------------------- 1. the submission
def read_file(directory: Path, path: Path) -> str:
    """Read a Python file of a submission. Raises Refused unless it is a regular file that can be parsed."""
    try:
        text = read_untrusted(directory, path).decode("utf-8-sig")  # some editors begin a file with a byte order mark
        levels = depth(parsed(text))
    except InputError as error:
        raise Refused(str(error)) from None
    except SyntaxError as error:
        where = path if error.lineno is None else f"{path}, line {error.lineno}"
        raise Refused(f"{where}: SyntaxError: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # invalid UTF-8, a zero byte; too many nested brackets
        raise Refused(f"{path} can't be parsed: {type(error).__name__}") from None
    if levels > DEEPEST:
        raise Refused(f"{path} is nested {levels} levels deep; at most {DEEPEST} are allowed")
    return text


def depth(tree: ast.AST) -> int:
    """Count the levels of a syntax tree, without recursion."""
    levels, nodes = 0, [tree]
    while nodes:
        levels += 1
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
    return levels


def student_functions(directory: Path, exercise: Exercise) -> dict[Path, dict[str, Function]]:
    """Return the student's functions of an exercise, by file and name. Raises Refused if one can't be graded."""
    bodies: dict[Path, dict[str, Function]] = {}
    for where in exercise.functions:
        path, name = path_and_name(where)
        theirs = read_file(directory, path)
        try:
            function = find_function(theirs, name)
        except LookupError:
            raise Refused(f"{path} has no function {name}") from None
        ours = find_function(read_file(ROOT, path), name)
        if argument_names(function.args) != argument_names(ours.args):
            raise Refused(f"{path}, line {function.lineno}: {name} must keep its arguments, {ast.unparse(ours.args)}")
        bodies.setdefault(path, {})[name] = function
    return bodies


def argument_names(arguments: ast.arguments) -> list[list[str]]:
    extra = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    kinds = (arguments.posonlyargs, arguments.args, arguments.kwonlyargs, extra)
    return [[argument.arg for argument in kind] for kind in kinds]


def added(theirs: str, ours: str, functions: Mapping[str, Function]) -> list[ast.stmt]:
    """Return new top-level functions and imports in a student's file that the functions use, directly or indirectly."""
    known = top_level(ours)
    new = {name: node for name, node in top_level(theirs).items() if name not in known}
    used: dict[str, ast.stmt] = {}
    todo: list[ast.AST] = list(functions.values())
    while todo:
        for node in ast.walk(todo.pop()):
            name = node.id if isinstance(node, ast.Name) else ""
            if name in new and name not in used:
                used[name] = new[name]
                todo.append(new[name])
    return sorted(set(used.values()), key=lambda node: node.lineno)


def top_level(source: str) -> dict[str, ast.stmt]:
    """Return the top-level functions, classes and imports of a file, by each name that they define."""
    definitions: dict[str, ast.stmt] = {}
    for node in parsed(source).body:
        if isinstance(node, Function | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            definitions |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
    return definitions


# ------------------------------------------------------------------------------------------------- 2. the grader's tree
def arranged(directory: Path, exercise: Exercise) -> dict[Path, str]:
    """Return the files of all exercises with this one's functions from a submission. Raises Refused if it can't be."""
    kept = frozenset(closure(exercise) | {exercise.name})
    files = {path: emptied_except(path, kept) for path in exercise_files(EXERCISES)}
    for path, functions in student_functions(directory, exercise).items():
        extra = added(read_file(directory, path), files[path], functions)
        try:
            source = rewritten(files[path], {name: body_lines(function) for name, function in functions.items()})
            source = with_statements(source, [ast.unparse(node) for node in extra], next(iter(functions)))
            compile(source, str(path), "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Refused(f"{path} can't be compiled: {type(error).__name__}") from None
        files[path] = source
    return files


def judging(exercise: Exercise) -> dict[Path, str]:
    """Return the files of all exercises; this one's functions call the student's in the other process."""
    kept = frozenset(closure(exercise) | {exercise.name})
    files = {path: emptied_except(path, kept) for path in exercise_files(EXERCISES)}
    for where in exercise.functions:
        path, name = path_and_name(where)
        function = find_function(files[path], name)
        arguments = function.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        names += [f"*{argument.arg}" for argument in (arguments.vararg,) if argument is not None]
        lines = ["from course.grader.judge import call", f"return call({', '.join([repr(where), *names])})"]
        if name.endswith("__init__"):  # it needs the model that it gives the student's weights to
            lines = [*body_lines(function), *lines]
        files[path] = rewritten(files[path], {name: lines})
        if "triton.jit" in map(ast.unparse, function.decorator_list):  # a kernel's body isn't run as Python
            function = find_function(files[path], name)
            lines = ["from course.grader.judge import Kernel", f"{name} = Kernel({where!r})"]
            source = files[path].splitlines(keepends=True)
            source[function.end_lineno : function.end_lineno] = [
                f"{' ' * function.col_offset}{line}\n" for line in lines
            ]
            files[path] = "".join(source)
    return files


def body_lines(function: Function) -> list[str]:
    """Return the lines of a function's body, without docstring, comments and original layout."""
    body = function.body[ast.get_docstring(function) is not None :]
    return [line for statement in body for line in ast.unparse(statement).splitlines()] or ["pass"]


def with_statements(source: str, statements: list[str], before: str) -> str:
    """Insert statements before the top-level definition that contains the function `before`."""
    if not statements:
        return source
    name = before.partition(".")[0]
    [node] = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "".join([*lines[: first - 1], *(f"{statement}\n\n\n" for statement in statements), *lines[first - 1 :]])


def exercise_files(exercises: Iterable[Exercise]) -> list[Path]:
    """Return the files that contain the functions of these exercises."""
    return sorted({source_path(where) for exercise in exercises for where in exercise.functions})


@lru_cache(maxsize=4096)
def emptied_except(path: Path, kept: frozenset[str]) -> str:
    """Return the grader's file with the functions of all exercises except those in `kept` emptied."""
    bodies = {}
    for exercise in EXERCISES:
        if exercise.name not in kept:
            message = f"exercise {exercise.name}: not available here, as it isn't needed"
            for file, name in map(path_and_name, exercise.functions):
                if file == path:
                    bodies[name] = [f"raise NotImplementedError({message!r})"]
    try:
        return rewritten(read_file(ROOT, path), bodies)
    except LookupError as error:  # a student's copy that grades itself
        raise Refused(f"{path}: {error}") from None
