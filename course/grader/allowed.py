"""Static check of a solution's code, before anything runs.

A solution only computes. It needs no files, processes or interpreter attributes, so refusing these by name stops the
easy attacks. This isn't a security boundary; `worker_main.py` describes the next layer.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from course.edit import Function

IMPORTS = {"torch", "numpy", "math", "itertools", "functools", "collections", "heapq", "bisect", "random"}
DECORATORS = {"triton.jit", "torch.no_grad()"}  # allowed on functions that a student adds; decorators run on import
# names that give access to files, processes, other people's code or the interpreter
NAMES = {
    *("open", "exec", "eval", "compile", "globals", "locals", "vars", "getattr", "setattr", "delattr", "breakpoint"),
    *("exit", "quit", "memoryview", "os", "sys", "gc", "inspect", "importlib", "builtins", "subprocess", "ctypes"),
    *("pathlib", "Path", "shutil", "tempfile", "socket", "multiprocessing", "pickle", "atexit", "unittest", "pytest"),
}
ATTRIBUTES = NAMES | {
    *("io", "threading", "marshal", "linecache", "traceback", "operator", "types", "testing", "ctypeslib", "f2py"),
    *("load", "save", "savez", "savetxt", "loadtxt", "genfromtxt", "fromfile", "tofile", "from_file", "memmap", "dump"),
    *("dumps", "open_memmap", "DataSource", "load_library", "load_inline", "cpp_extension", "package", "hub"),
    *("library", "overrides", "jit", "fx", "spawn", "rpc", "data_ptr", "storage", "untyped_storage", "get_type_hints"),
    *("f_back", "f_globals", "f_locals", "f_builtins", "f_code", "gi_frame", "gi_code", "cr_frame", "ag_frame"),
    *("tb_frame", "tb_next", "with_traceback", "mro", "attrgetter", "methodcaller"),
}
LOADS = "tl.load"  # Triton's load is allowed
ASSIGNED = {"grad", "data", "requires_grad", "reward_bias"}  # attributes that may be assigned on objects besides `self`
FIXED = ("self", "tl")  # names that must not be reassigned


class Refused(Exception):
    """The reason why a submission's exercise isn't run."""


def objections(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, description) for everything that no exercise needs."""
    for part in ast.walk(node):
        if isinstance(part, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in part.names]
            if isinstance(part, ast.ImportFrom):
                modules = [f"{part.module}.{name}" for name in modules]
            for module in modules:
                first, *rest = module.split(".")
                wrong = first not in IMPORTS or (isinstance(part, ast.ImportFrom) and part.level > 0)
                if wrong or any(name in ATTRIBUTES or name.startswith("_") for name in rest):
                    yield part, f"import {module}"
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            if part.id in NAMES or (part.id.startswith("__") and part.id.endswith("__")):
                yield part, part.id
        elif isinstance(part, ast.Attribute):
            if ast.unparse(part) == LOADS:
                continue
            if part.attr in ATTRIBUTES or (part.attr.startswith("_") and part.attr != "__init__"):
                yield part, f".{part.attr}"
            elif not isinstance(part.ctx, ast.Load) and part.attr not in ASSIGNED:
                if not (isinstance(part.value, ast.Name) and part.value.id == "self"):
                    yield part, f"an assignment to {ast.unparse(part)}"
        elif isinstance(part, ast.Name) and part.id in FIXED:
            yield part, f"an assignment to {part.id}"
        elif isinstance(part, ast.MatchClass):  # reads attributes by name
            yield part, f"case {ast.unparse(part)}"
        elif isinstance(part, ast.ClassDef):
            yield part, f"class {part.name}"
        elif isinstance(part, ast.Global):
            yield part, f"global {', '.join(part.names)}"


def check(path: Path, nodes: list[ast.stmt]) -> None:
    """Raise Refused, with the line, if one of these functions or imports uses something that no solution needs."""
    for node in nodes:
        for part, what in objections(node):
            raise Refused(f"{path}, line {getattr(part, 'lineno', node.lineno)}: no exercise needs `{what}`")


def check_decorators(path: Path, nodes: list[ast.stmt]) -> None:
    """Raise Refused if a function that a student added has a decorator that no exercise needs."""
    for node in nodes:
        decorators = node.decorator_list if isinstance(node, Function) else []
        if any(ast.unparse(decorator) not in DECORATORS for decorator in decorators):
            raise Refused(f"{path}, line {node.lineno}: no exercise needs this decorator")
