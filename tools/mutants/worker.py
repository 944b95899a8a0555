"""The grader's worker, which also judges mutants in forks of a process that has imported the project and the tests.

So one costs what its tests cost. A request of `course/grader/worker_main.py` with

    "mutants": [{"module": name, "function": name, "source": of the file}]
    -> an answer for the function as it is, then one for each mutant, of the same form, and one more, with "last", when
       there are no others; "limit": in processor seconds

The file is written, and a function that the process has imported gets its new code. What was made of the old code at
the import stays: of a mutant that survives, only a fresh process tells for certain.
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
from course.grader.forks import be_a_fork, outcome_of

LONGER = 5  # times the processor time of the function as it is: what a mutant may take, or `limit`, whichever is more
WAITING = 10  # times that: how long it may take on a busy machine, or waiting


class Nest:
    """A plugin that stands between collection and tests: it forks, and pytest goes on in the fork."""

    def __init__(self, root: str, mutants: list[dict], limit: float, answers: int, reporter: Any):
        self.root, self.mutants, self.limit, self.answers, self.reporter = root, mutants, limit, answers, reporter

    def pytest_runtestloop(self, session: Any) -> bool | None:
        """True: the tests have run; None: pytest runs them here."""
        if session.testsfailed:  # in collection
            return None
        gc.freeze()  # a collection in a fork would copy all pages
        seconds = None  # of processor time
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
            result = outcome_of(child, reader, None if seconds is None else WAITING * seconds)
            if path is not None:
                worker_main.write(path, source)
            os.write(self.answers, (json.dumps(result) + "\n").encode())
            if mutant is None:
                if result["failed"] or not result["ended"]:
                    break
                seconds = math.ceil(max(LONGER * result["processor_seconds"], self.limit))
        return True


def at_most(kind: int, limit: int) -> None:
    """The system stops a process that takes more."""
    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def path_in(root: str, module: str) -> Path:
    return Path(root, *module.split(".")).with_suffix(".py")


def put_in(root: str, module: str, function: str, source: str) -> None:
    """Write a mutant's file, and give the function its code, whoever has imported it.

    The file alone is written where the module is not imported yet, where the function is none (a kernel in Triton's
    interpreter, which reads the file), and where its code refers to other outer variables and can't be exchanged.
    """
    path = path_in(root, module)
    worker_main.write(path, source)
    part: Any = sys.modules.get(module)
    for name in function.split(".") if part is not None else []:
        part = inspect.unwrap(vars(part)[name])
        if isinstance(part, types.FunctionType):  # a function within it is made anew at each call
            code = code_named(compile(source, path, "exec"), part.__qualname__)
            if code is not None and code.co_freevars == part.__code__.co_freevars:
                part.__code__ = code
            break


def code_named(code: types.CodeType, name: str) -> types.CodeType | None:
    """The code of a function, `Class.method`, among all that a module's code holds."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found = inner if inner.co_qualname == name else code_named(inner, name)
            if found is not None:
                return found
    return None


def answer(root: str, tests: list[str], limit: float, mutants: list[dict] | None = None, **others: Any) -> dict:
    """As the worker of the grader does; with mutants, it takes as long as all of them take."""
    if mutants is None:
        return worker_main.answer(root, tests, limit, **others)
    answers = os.dup(1)

    def nest(reporter: worker_main.Reporter) -> Nest:
        os.environ["HYPOTHESIS_PROFILE"] = "unshrunk"
        return Nest(root, mutants, limit, answers, reporter)

    last = worker_main.answer(root, tests, None, plugin=nest)
    os.close(answers)
    return last | {"last": True}


if __name__ == "__main__":
    worker_main.main(answer)
