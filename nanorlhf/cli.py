"""Flags of the scripts, out of their `Args` dataclasses: help text, defaults and types stand there once."""

import errno
import sys
from collections.abc import Callable
from typing import Any

import tyro

from nanorlhf.errors import InputError


def command_line(main: Callable[[Any], object], recipes: dict[str, tuple[str, Any]]) -> None:
    """Run `script.py [recipe] [--flags]`: the first recipe where none is named. Exits 2 on bad input."""
    arguments = sys.argv[1:]
    default = next(iter(recipes))
    if arguments[:1] in (["-h"], ["--help"]):
        print("recipes: " + "; ".join(f"{name} ({help_text})" for name, (help_text, _) in recipes.items()))
        print(f"the flags of a recipe: {sys.argv[0]} RECIPE --help; below, those of `{default}`\n")
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default
    with _one_sentence():
        if recipe not in recipes:
            raise InputError(f"{sys.argv[0]}: unknown recipe {recipe!r}: choose one of {', '.join(recipes)}.")
        main(_parse(recipes[recipe][1], arguments, f"{sys.argv[0]} {recipe}"))


def run_module(main: Callable[[Any], object], args_class: type) -> None:
    """The same for a module without recipes: `python -m data.tldr --flags`."""
    with _one_sentence():
        main(_parse(args_class, sys.argv[1:], f"python -m {main.__module__}"))


def _parse(args: Any, arguments: list[str], program: str) -> Any:
    cls, default = (args, {}) if isinstance(args, type) else (type(args), {"default": args})
    parsed, unknown = tyro.cli(cls, args=arguments, prog=program, return_unknown_args=True, **default)
    if unknown:
        raise InputError(f"{program}: unknown flag {unknown[0]!r}: `{program} --help` lists those there are.")
    return parsed


class _one_sentence:
    """Turns the errors that are the user's to mend into one line on stderr and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, InputError):
            sys.exit(_fail(str(error)))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "the output directory"
            sys.exit(_fail(f"the disk is full while writing {where}: free some space and start again."))
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            sys.exit(130)


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2
