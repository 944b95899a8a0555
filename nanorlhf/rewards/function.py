"""Load a user's reward function, `FILE.py:FUNCTION`, call it with the arguments that it names, and check its values.

    def score(queries, responses): ...                         two lists of texts
    def score(queries, responses, answer, records): ...        and, by name, fields of the rows, the rows, response_ids
    def score(prompts, completions, answer, **columns): ...    TRL's: by keyword; messages if a row is a chat

A field is looked up in a row's `meta`, then in the row; the function gets a list, with None for rows without the field.
For each response the function returns a number, a list with a number per token (including EOS), or None if it doesn't
apply.

This module doesn't import PyTorch, because it also runs in worker processes.
"""

import asyncio
import importlib.util
import inspect
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from nanorlhf.errors import InputError

Value = float | list[float] | None  # of one response
FIXED_FIELDS = ("query", "response", "chat", "meta")  # fields of a row that aren't columns
TRL_INPUTS = ("prompts", "completions", "completion_ids")
BY_NAME = ("records", "response_ids")
OURS = Path(__file__).resolve().parents[1:3]  # data/ is in the first if installed, in the second in the repository
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGKILL, signal.SIGTERM)
MAX_ROWS = 1000  # searched for the columns of a function with **columns


@dataclass(frozen=True)
class Responses:
    """The inputs of a reward function for n responses."""

    queries: list[str]
    responses: list[str]
    response_ids: list[list[int]]  # without [PAD], with EOS
    records: list[dict]  # rows of the data file

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rows: slice) -> "Responses":
        return Responses(self.queries[rows], self.responses[rows], self.response_ids[rows], self.records[rows])


class RewardFunction:
    """Call a function with the columns that it names. Raises InputError if a column is missing or a value is invalid.

    columns: fields of rows to pass; None: find them in `records`, an iterable of rows
    """

    def __init__(self, where: str, records: Iterable[dict] = (), columns: tuple[str, ...] | None = None):
        self.where = where
        module, name = load_module("--reward", where), where.rpartition(":")[2]
        self.function: Callable = getattr(module, name)
        self.name = f"--reward {where}"
        self.path = where.rpartition(":")[0]
        self.file = str(module.__file__)  # absolute, as in a traceback
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        self.line: int | None = None
        if code is not None and code.co_filename == self.file:  # not imported from another file
            self.line = code.co_firstlineno
        try:
            parameters = dict(inspect.signature(self.function).parameters)
        except ValueError:  # some builtins have none
            parameters = {}
        self.is_trl = any(name in parameters for name in TRL_INPUTS)
        self.time_limit: float | None = getattr(module, "TIME_LIMIT", None)
        self.timeout_score: float | None = getattr(module, "TIMEOUT_SCORE", 0.0)
        for setting, value in (("TIME_LIMIT", self.time_limit), ("TIMEOUT_SCORE", self.timeout_score)):
            is_number = isinstance(value, Real) and math.isfinite(value)
            if value is not None and not (is_number and (setting != "TIME_LIMIT" or value > 0)):
                expected = "a number above 0" if setting == "TIME_LIMIT" else "a finite number"
                raise InputError(f"{self.name}: {self.path} sets {setting} = {value!r:.80}, expected {expected}.")
        asked = self.asked_for(parameters)
        self.passed_names = [name for name in asked if name in (TRL_INPUTS if self.is_trl else BY_NAME)]
        has_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if self.is_trl and has_all:
            self.passed_names = list(TRL_INPUTS)
        if columns is None:
            wanted = {name: parameter for name, parameter in asked.items() if name not in self.passed_names}
            columns = self.find_columns(wanted, records, has_all)
        self.columns = columns

    @property
    def source(self) -> str:
        """File and line of the function, for messages."""
        return self.path if self.line is None else f"{self.path}:{self.line}"

    def asked_for(self, parameters: dict[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
        """Return the parameters that are passed by name."""
        by_name = {p.name: p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if self.is_trl or not parameters:
            return by_name
        positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            raise InputError(
                f"{self.name}: {self.source} must take two lists of texts, queries and responses, followed by the "
                "names of the fields that it needs."
            )
        return {name: p for name, p in by_name.items() if name not in positional[:2]}

    def find_columns(
        self, wanted: dict[str, inspect.Parameter], records: Iterable[dict], has_all: bool
    ) -> tuple[str, ...]:
        """Return the fields of rows to pass. Raises InputError for a name without default that no row has."""
        names: dict[str, None] = {}
        for number, record in enumerate(records):
            if not wanted.keys() - names.keys() and not (has_all and number < MAX_ROWS):
                break
            names |= dict.fromkeys(row_fields(record))
        for name, parameter in wanted.items():
            if name not in names and parameter.default is parameter.empty:
                known = ", ".join(islice(names, 20)) or "none"
                raise InputError(
                    f"{self.name}: {self.source} has the parameter {name!r}, but no row of the data has this field in "
                    f"its meta (fields: {known})."
                )
        return tuple(name for name in names if has_all or name in wanted)

    def __call__(self, batch: Responses) -> list[Value]:
        try:
            values = self.function(*self.positional(batch), **self.by_name(batch))
            if inspect.iscoroutine(values):
                values = asyncio.run(values)
            values = plain(values)
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise InputError(f"{self.name}: {raised(error, self.path, self.file)}.") from error
        return self.checked(values, batch)

    def positional(self, batch: Responses) -> tuple[list[str], ...]:
        return () if self.is_trl else ([*batch.queries], [*batch.responses])  # copies: a function may change them

    def by_name(self, batch: Responses) -> dict[str, list]:
        fields = [row_fields(record) for record in batch.records]
        columns = {name: [row.get(name) for row in fields] for name in self.columns}
        response_ids = [[*ids] for ids in batch.response_ids]
        offered: dict[str, list] = {"records": [*batch.records], "response_ids": response_ids}
        if self.is_trl:
            turns = list(zip(batch.queries, batch.responses, batch.records, strict=True))
            offered = {
                "prompts": [trl_prompt(query, record) for query, _, record in turns],
                "completions": [trl_completion(response, record) for _, response, record in turns],
                "completion_ids": response_ids,
            }
        return columns | {name: offered[name] for name in self.passed_names}

    def checked(self, values: Any, batch: Responses) -> list[Value]:
        """Return the values as floats. Raises InputError for anything but one value per response."""
        if not isinstance(values, list):
            raise InputError(
                f"{self.name}: {self.source} must return a list, one value per response, not {shown(values)}."
            )
        if len(values) != len(batch):
            raise InputError(f"{self.name}: {self.source} returned {len(values)} values for {len(batch)} responses.")
        return [self.checked_value(value, i, batch) for i, value in enumerate(values)]

    def checked_value(self, value: Any, i: int, batch: Responses) -> Value:
        if value is None:
            return None
        which = f"for the response {batch.responses[i]!r:.60}"
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if not is_finite(number):
                raise InputError(
                    f"{self.name}: {self.source} returned {shown(number)} {which}: it must return a finite "
                    "number, a list with one per token, or None."
                )
        if not isinstance(value, list):
            return float(value)
        if len(numbers) != len(batch.response_ids[i]):
            raise InputError(
                f"{self.name}: {self.source} returned {len(numbers)} rewards {which}, which has "
                f"{len(batch.response_ids[i])} tokens with its EOS."
            )
        return [float(number) for number in numbers]


def plain(value: Any) -> Any:
    """Convert tensors, arrays and tuples to numbers or lists of numbers."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def is_finite(number: Any) -> bool:
    """Return True for a number that is finite as a float."""
    try:
        return isinstance(number, Real) and math.isfinite(float(number))
    except (OverflowError, ValueError):  # an integer of 400 digits
        return False


def shown(value: Any) -> str:
    """Format the beginning of a value for a message; only the type's name if its repr fails."""
    try:
        return f"{value!r:.80}"
    except Exception:  # the user's class, or an integer with too many digits
        return f"a value of type {type(value).__name__}"


def row_fields(record: dict) -> dict[str, Any]:
    """Return the fields of a row that a function can take by name."""
    meta = record.get("meta")
    fields = {name: value for name, value in record.items() if name not in FIXED_FIELDS}
    return fields | meta if isinstance(meta, dict) else fields


def trl_prompt(query: str, record: dict) -> str | list[dict]:
    """Return TRL's prompt: a text, or the messages of a chat."""
    if not record.get("chat"):
        return query
    return row_fields(record).get("messages") or [{"role": "user", "content": query}]


def trl_completion(response: str, record: dict) -> str | list[dict]:
    return [{"role": "assistant", "content": response}] if record.get("chat") else response


# ----------------------------------------------------------------------------------------------------- FILE.py:FUNCTION
@contextmanager
def kept_alive() -> Iterator[None]:
    """Make calls that would end this process raise SystemExit, so that they are reported as errors of the user's code.

    Otherwise `os._exit(0)` in a reward would end a run silently with status 0. Processes forked by the user's code may
    exit normally. C code can still end the process, but a worker's exit is always noticed.
    """
    pid, leave, abort, kill = os.getpid(), os._exit, os.abort, os.kill

    def no_exit(status: int) -> None:
        if os.getpid() != pid:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    def no_abort() -> None:
        if os.getpid() != pid:
            abort()
        raise SystemExit("os.abort()")

    def no_kill(whom: int, number: int) -> None:
        if os.getpid() == pid and whom in (0, pid) and number in ENDING:
            raise SystemExit(f"os.kill({whom}, {number:d})")
        kill(whom, number)

    with mock.patch.multiple(os, _exit=no_exit, abort=no_abort, kill=no_kill):
        yield


def load_function(flag: str, where: str) -> Callable:
    """Return the function `FILE.py:FUNCTION`; raises InputError with the flag's name."""
    return getattr(load_module(flag, where), where.rpartition(":")[2])


def score_response(flag: str, where: str, function: Callable, query: str, response: str) -> float:
    """Return a function's score of one response. Raises InputError if it raises or returns no finite number."""
    path = where.rpartition(":")[0]
    try:
        with kept_alive():
            value = plain(function(query, response))
    except (Exception, SystemExit) as error:  # it is the user's code: whatever it raises
        raise InputError(f"{flag} {where}: {raised(error, path, str(find_file(path)))}.") from error
    if not is_finite(value):
        raise InputError(f"{flag} {where} must return a finite number, not {shown(value)}.")
    return float(value)


def load_module(flag: str, where: str) -> ModuleType:
    """Load the module of `FILE.py:FUNCTION`. Raises InputError, with the flag's name, also if it lacks the function."""
    path, _, name = where.rpartition(":")
    file = find_file(path)
    if not name or file.suffix != ".py" or not file.is_file():
        raise InputError(f"{flag} {where}: expected FILE.py:FUNCTION, with a file that exists.")
    spec = importlib.util.spec_from_file_location("user_function", file)
    assert spec is not None and spec.loader is not None  # the file exists and ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        with kept_alive():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it is the user's code: whatever it raises
        raise InputError(f"{flag} {where}: {raised(error, path, str(file))}.") from error
    if not callable(getattr(module, name, None)):
        raise InputError(f"{flag} {where}: {path} doesn't define a function {name}.")
    return module


def find_file(path: str) -> Path:
    """Return the absolute path of a file in a setting; data/NAME.py is found in any working directory."""
    folders = [Path(), *OURS] if path.startswith("data/") else [Path()]
    files = [(folder / path).absolute() for folder in folders]
    return next((file for file in files if file.is_file()), files[0])


def raised(error: BaseException, path: str, file: str) -> str:
    """Format an error raised by the user's file at `path`, with the file's last line in the traceback.

    `file` is its full path.
    """
    steps = [(step.filename, step.lineno) for step in traceback.extract_tb(error.__traceback__)]
    steps = [step for step in steps if step[0] != __file__ and not step[0].startswith("<frozen ")]
    if isinstance(error, SyntaxError) and error.filename == file:  # a file that doesn't compile isn't in the traceback
        steps.append((file, error.lineno))
    if steps and file not in dict(steps):  # the function is imported from another file
        path = file = steps[0][0]
    line = f":{dict(steps)[file]}" if file in dict(steps) else ""
    try:
        text = f"{error!s:.200}"
    except Exception:  # the user's class
        text = "(no message)"
    return f"{path}{line} raises {type(error).__name__}: {text}"
