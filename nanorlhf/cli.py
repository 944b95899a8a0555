"""Command-line flags from `Args` dataclasses: type, default, range and help text stand with the field, once."""

import errno
import io
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from nanorlhf.errors import InputError, Interrupted


@dataclass(frozen=True)
class Range:
    """Which numbers a setting may have; it stands with the field: `lr: NonNegativeFloat = 3e-6`."""

    words: str
    allows: Callable[[float], bool]


_COUNTABLE = Range("at most 10^12", lambda x: x <= 10**12)
PositiveInt = Annotated[int, Range("at least 1", lambda x: x >= 1), _COUNTABLE]
NonNegativeInt = Annotated[int, Range("at least 0", lambda x: x >= 0), _COUNTABLE]
Count = Annotated[int, Range("from 1 to a million", lambda x: 1 <= x <= 10**6)]  # of rows that are held at once
Epochs = Annotated[float, Range("above 0, a million at most", lambda x: 0 < x <= 10**6)]
PositiveFloat = Annotated[float, Range("above 0", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, Range("at least 0", lambda x: x >= 0)]
Fraction = Annotated[float, Range("from 0 to 1", lambda x: 0 <= x <= 1)]
Beta = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
FiniteFloat = Annotated[float, Range("a finite number", math.isfinite)]
Seconds = Annotated[float, Range("above 0, an hour at most", lambda x: 0 < x <= 3600)]
Workers = Annotated[int, Range("from 1 to 500", lambda x: 1 <= x <= 500)]
Seed = Annotated[int, Range("from 0 to 2^63 - 1", lambda x: 0 <= x < 2**63)]


def ranges(hint: Any) -> list[Range]:
    """The ranges in a type hint: `PositiveFloat | None` and `tuple[PositiveInt, ...]` have one."""
    found = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range)]
    return found + [item for part in get_args(hint) for item in ranges(part)]


def check_ranges(args: Any) -> None:
    """Raise InputError for a number outside its field's range, NaN and infinity included.

    Whether two settings fit together is for the script to say.
    """
    if getattr(args, "dtype", None) == "auto":
        raise InputError("--dtype auto is resolved on the command line: pass float32 or bfloat16.")
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        setting = getattr(args, name)
        for value in setting if isinstance(setting, tuple) else (setting,):
            if isinstance(value, int | float) and not isinstance(value, bool):
                for limits in ranges(hint):
                    if not ((isinstance(value, int) or math.isfinite(value)) and limits.allows(value)):
                        raise InputError(f"--{name.replace('_', '-')} {value}: it must be {limits.words}.")


def check_names(flag: str, names: Iterable[str]) -> None:
    """InputError for a name that reports can't print: one that is blank, or with half a surrogate pair."""
    for name in names:
        if not name.strip() or not name.isprintable():
            raise InputError(f"{flag} {name!r:.80}: a name must be printable text: choose another.")


def command_line(main: Callable[[Any], object], recipes: dict[str, tuple[str, Any]]) -> None:
    """Run `script.py [recipe] [--flags]`, or `python -m module [recipe] [--flags]`; exits with 2 on bad input.

    The default is the first recipe.
    """
    from nanorlhf import launch  # imports PyTorch, which `python -m data.x --help` shouldn't wait for

    arguments, program = sys.argv[1:], _program(main)
    default = next(iter(recipes))
    if arguments[:1] in (["-h"], ["--help"]):
        print("recipes: " + "; ".join(f"{name} ({help_text})" for name, (help_text, _) in recipes.items()))
        print(f"the flags of a recipe: {program} RECIPE --help; below, those of `{default}`\n")
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default
    with _one_sentence():
        if recipe not in recipes:
            raise InputError(f"{program}: unknown recipe {recipe!r}: choose one of {', '.join(recipes)}.")
        args = with_dtype(_parse(recipes[recipe][1], arguments, f"{program} {recipe}"))
        check_ranges(args)  # before --processes
        launch.run(main, args)


def with_dtype(args: Any) -> Any:
    """The settings with `--dtype auto` replaced by what is faster on the device; the first process says what it is."""
    if getattr(args, "dtype", None) != "auto":
        return args
    from kernels.processor import faster_dtype  # as above, not for --help
    from nanorlhf.launch import is_cpu

    dtype, reason = faster_dtype("cpu" if is_cpu(args.device) else "cuda")
    if os.environ.get("RANK", "0") == "0":
        print(f"--dtype auto: {dtype}, as {reason}")
    return replace(args, dtype=dtype)


def run_module(main: Callable[[Any], object], args_class: type) -> None:
    """Run a module without recipes: `python -m data.tldr --flags`."""
    with _one_sentence():
        main(_parse(args_class, sys.argv[1:], _program(main)))


def _program(main: Callable[[Any], object]) -> str:
    """How the program was started: `train_ppo.py`, or `python -m data.tldr`."""
    module = main.__module__ or ""  # a bound method of a builtin has None
    if module != "__main__":
        return f"python -m {module}" if "." in module else sys.argv[0]
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else sys.argv[0]


def _parse(args: Any, arguments: list[str], program: str) -> Any:
    cls, default = (args, {}) if isinstance(args, type) else (type(args), {"default": args})
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            parsed, unknown = tyro.cli(cls, args=arguments, prog=program, return_unknown_args=True, **default)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        # tyro draws a box: a title, the reason, a rule, hints
        lines = [line.strip("│ ") for line in box.getvalue().splitlines()[1:]]
        reason = " ".join(itertools.takewhile(lambda line: line.strip("─╰╯"), lines)).rstrip(".")
        raise InputError(f"{program}: {reason}: `{program} --help` lists the flags and their values.") from None
    if unknown:
        raise InputError(f"{program}: unknown flag {unknown[0]!r}: `{program} --help` lists those there are.")
    return parsed


BAD_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.EILSEQ, errno.EIO),
)  # fmt: skip


class _one_sentence:
    """Turns the errors that the user can fix into one line on stderr and exit code 2."""

    def __enter__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are no text
            sys.stdout.reconfigure(errors="backslashreplace")

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, InputError):
            sys.exit(_fail(str(error)))
        if isinstance(error, OSError):
            where = error.filename or "the output directory"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                sys.exit(_fail(f"the disk is full ({error.strerror}) at {where}: free some space and start again."))
            if error.errno in BAD_PATH:
                sys.exit(_fail(f"{where!s:.300}: {error.strerror}: name another path or change its permissions."))
        if isinstance(error, Interrupted):
            if str(error):  # only one of several processes prints
                print(error, file=sys.stderr)
            sys.exit(error.code)
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            sys.exit(130)


def _fail(sentence: str) -> int:
    print(f"error: {' '.join(sentence.splitlines())}", file=sys.stderr)  # a path may hold a newline
    return 2


def printable(text: str) -> str:
    """`text` stripped, its control characters replaced: sampled ones could move the cursor or change colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text).strip()
