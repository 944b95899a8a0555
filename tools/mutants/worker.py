"""A version of the grader's worker that tests mutants in forks of a process that has already imported everything.

So a mutant costs only the time of its tests. A request of `course/grader/worker_main.py` with

    "mutants": [{"module": name, "function": name, "source": of the file}]
    -> an answer for the unchanged function, then one for each mutant, in the same format, and a final one with "last";
       "limit": in processor seconds

For each mutant, the file is written, and the imported function gets the new code. Objects that were made from the old
code at import stay, so a mutant that survives must be tested again in a fresh process.
"""

import gc
import inspect
import json
import math
import os
import resource
import sys
import types
from pathlib import Path
from typing import Any

from course.grader import worker_main
from course.grader.forks import be_a_fork, collect_outcome

LONGER = 5  # a mutant's limit of processor time, as a multiple of the unchanged function's time; at least `limit`
WAITING = 10  # a mutant's limit of wall-clock time, as a multiple of that limit


class Nest:
    """A pytest plugin that forks between collection and tests; pytest continues in the fork."""

    def __init__(self, root: str, mutants: list[dict], limit: float, answers: int, reporter: Any):
        self.root, self.mutants, self.limit, self.answers, self.reporter = root, mutants, limit, answers, reporter

    def pytest_runtestloop(self, session: Any) -> bool | None:
        """Fork once per mutant. Returns True if the tests have run in forks, None to let pytest run them here."""
        if session.testsfailed:  # in collection
            return None
        gc.freeze()  # otherwise garbage collection in a fork would copy all memory pages
        seconds = None  # limit of processor time
        for mutant in [None, *self.mutants]:
            path = path_in(self.root, mutant["module"]) if mutant is not None else None
            source = path.read_text(encoding="utf-8") if path is not None else ""
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                be_a_fork()
                self.reporter.pipe = writer
                at_most(resource.RLIMIT_DATA, worker_main.MEMORY)
                if seconds is not None:
                    at_most(resource.RLIMIT_CPU, seconds)
                if mutant is not None:
                    put_in(self.root, **mutant)
                return None
            os.close(writer)
            result = collect_outcome(child, reader, None if seconds is None else WAITING * seconds)
            if path is not None:
                worker_main.write(path, source)
            os.write(self.answers, (json.dumps(result) + "\n").encode())
            if mutant is None:
                if result["failed"] or not result["ended"]:
                    break
                seconds = math.ceil(max(LONGER * result["processor_seconds"], self.limit))
        return True


def at_most(kind: int, limit: int) -> None:
    """Set a resource limit for this process."""
    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def path_in(root: str, module: str) -> Path:
    return Path(root, *module.split(".")).with_suffix(".py")


def put_in(root: str, module: str, function: str, source: str) -> None:
    """Write a mutant's file, and replace the code of the function object, so that every importer sees it.

    Only the file is written if the module isn't imported yet, if the function isn't a Python function (a kernel in
    Triton's interpreter, which reads the file), or if its code can't be replaced because its free variables differ.
    """
    path = path_in(root, module)
    worker_main.write(path, source)
    part: Any = sys.modules.get(module)
    for name in function.split(".") if part is not None else []:
        part = inspect.unwrap(vars(part)[name])
        if isinstance(part, types.FunctionType):  # nested functions are created at each call
            code = code_named(compile(source, path, "exec"), part.__qualname__)
            if code is not None and code.co_freevars == part.__code__.co_freevars:
                part.__code__ = code
            break


def code_named(code: types.CodeType, name: str) -> types.CodeType | None:
    """Find the code object of a function, `Class.method`, inside a module's code."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            match = inner if inner.co_qualname == name else code_named(inner, name)
            if match is not None:
                return match
    return None


def answer(root: str, tests: list[str], limit: float, mutants: list[dict] | None = None, **options: Any) -> dict:
    """Answer a request like the grader's worker; with mutants, test all of them before returning."""
    if mutants is None:
        return worker_main.answer(root, tests, limit, **options)
    answers = os.dup(1)

    def nest(reporter: worker_main.Reporter) -> Nest:
        os.environ["HYPOTHESIS_PROFILE"] = "unshrunk"
        return Nest(root, mutants, limit, answers, reporter)

    last = worker_main.answer(root, tests, None, plugin=nest)
    os.close(answers)
    return last | {"last": True}


if __name__ == "__main__":
    worker_main.main(answer)
