"""Command-line flags from `Args` dataclasses: each field has type, default, range and help text."""

import copy
import fractions
import inspect
import io
import itertools
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field, is_dataclass, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

import tyro

from nanorlhf.errors import InputError, Interrupted, PeerFailed, error_sentence

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FLAG = re.compile(r"--|-(?!\d|\.\d|inf|nan)[^-]")  # but not a negative number
# --help starts with the first and ends with the second; the program's own flags come in between
DATA_AND_MODELS = (
    "source data rows model tokenizer policies reward_models sft reward_model regression_model "
    "contrastive_model discriminator reward gold value_model ref_policy encoder out"
).split()
RUN = (
    "seed device processes dtype compile shard offload checkpoint_activations track trace "
    "eval_every save_every keep_every resume overwrite"
).split()
MAY_BE_EMPTY = "a list that may be empty"  # in a type: `Annotated[tuple[str, ...], MAY_BE_EMPTY]`
R = TypeVar("R")
S = TypeVar("S", bound="DataclassInstance")  # the settings of a script


@dataclass(frozen=True)
class Range:
    """The allowed values of a number, as part of its type: `lr: NonNegativeFloat = 3e-6`."""

    words: str
    allows: Callable[[float], bool]


_COUNTABLE = Range("at most 10^12", lambda x: x <= 10**12)
PositiveInt = Annotated[int, Range("at least 1", lambda x: x >= 1), _COUNTABLE]
NonNegativeInt = Annotated[int, Range("at least 0", lambda x: x >= 0), _COUNTABLE]
Count = Annotated[int, Range("from 1 to a million", lambda x: 1 <= x <= 10**6)]  # of rows in memory
CountOrNone = Annotated[int, Range("from 0 to a million", lambda x: 0 <= x <= 10**6)]
Epochs = Annotated[float, Range("above 0, a million at most", lambda x: 0 < x <= 10**6)]
PositiveFloat = Annotated[float, Range("above 0", lambda x: x > 0)]
ClipRange = PositiveFloat | tuple[PositiveFloat, PositiveFloat]  # one number, or (below, above)
NonNegativeFloat = Annotated[float, Range("at least 0", lambda x: x >= 0)]
Fraction = Annotated[float, Range("from 0 to 1", lambda x: 0 <= x <= 1)]
Beta = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
FiniteFloat = Annotated[float, Range("a finite number in float32", lambda x: abs(x) < 3.4e38)]
# a smaller one overflows float32; a larger one makes all tokens equally probable
Temperature = Annotated[float, Range("from 10^-6 to 10^6", lambda x: 1e-6 <= x <= 1e6)]
TemperatureOrGreedy = Annotated[
    float, Range("0 or from 10^-6 to 10^6", lambda x: x == 0 or 1e-6 <= x <= 1e6)
]
Seconds = Annotated[float, Range("above 0, an hour at most", lambda x: 0 < x <= 3600)]
Workers = Annotated[int, Range("from 1 to 500", lambda x: 1 <= x <= 500)]
NumWorkers = Annotated[int, Range("from 0 to 500", lambda x: 0 <= x <= 500)]  # 0: this process
Seed = Annotated[int, Range("from 0 to 2^63 - 1", lambda x: 0 <= x < 2**63)]


def ranges(hint: Any) -> list[Range]:
    """Return the ranges in a type hint, also in `PositiveFloat | None` or a tuple's items."""
    outer = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range)]
    return outer + [item for part in get_args(hint) for item in ranges(part)]


def check_ranges(args: "DataclassInstance", prefix: str = "--") -> None:
    """Raise InputError for a number outside its field's range, NaN and infinity included.

    The flags of a group begin with its name: `--sampler.top-p`. The script itself checks the
    combinations of settings.
    """
    if getattr(args, "dtype", None) == "auto":
        raise InputError("--dtype auto only works on the command line: pass float32 or bfloat16.")
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        setting = getattr(args, name)
        flag = f"{prefix}{name.replace('_', '-')}"
        if is_dataclass(setting) and not isinstance(setting, type):
            check_ranges(setting, f"{flag}.")
        for value in setting if isinstance(setting, tuple) else (setting,):
            if isinstance(value, int | float) and not isinstance(value, bool):
                is_finite = isinstance(value, int) or math.isfinite(value)
                for limits in ranges(hint):
                    if not (is_finite and limits.allows(value)):
                        raise InputError(f"{flag} {value}: must be {limits.words}.")


def exact(number: float) -> fractions.Fraction:
    """Return the exact decimal that a float is printed as, because 0.29 * 100 is less than 29.

    >>> int(0.29 * 100), int(exact(0.29) * 100)
    (28, 29)
    """
    return fractions.Fraction(str(number))


def check_url(flag: str, url: str, advice: str) -> None:
    """Reject anything but an http or https URL, and a URL that may contain a password or key.

    Settings, commands and the URLs in errors are logged, so they must not contain a secret.
    """
    if any(character in url for character in "@?#"):
        raise InputError(f"{flag}: the URL is logged, so it can't contain a password, ? or #.")
    try:
        parsed = urlsplit(url)
        valid = parsed.scheme in ("http", "https") and parsed.hostname and parsed.port != 0
    except ValueError:
        valid = False
    if not valid or not (url.isascii() and url.isprintable()) or " " in url:
        raise InputError(f"{flag} {url}: {advice}.")


def named_pairs(flag: str, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """("sft", DIR, "ppo", DIR) -> [("sft", DIR), ("ppo", DIR)].

    Raises InputError for half a pair, and for a name that reports can't print: a blank one, or one
    with half a surrogate pair.
    """
    if not words or len(words) % 2:
        command = " ".join((flag, *words))
        raise InputError(f"{command}: expected pairs of name and directory, such as sft runs/sft.")
    for name in words[::2]:
        if not name.strip() or not name.isprintable():
            raise InputError(f"{flag} {name!r:.80}: a name must be printable text.")
    return list(zip(words[::2], words[1::2], strict=True))


def command_line(main: Callable[[S], object], recipes: dict[str, tuple[str, S]]) -> None:
    """Run `script.py [recipe] [--flags]` or `python -m module [recipe] [--flags]`.

    recipes: name -> (help, settings); the first is the default. Exits with 2 on bad input.
    """
    from nanorlhf import launch  # imports PyTorch, which `python -m data.x --help` should not

    with one_sentence():
        args = read_settings(_program(main), sys.argv[1:], recipes)
        processes = getattr(args, "processes", 1)
        launch.run(partial(main, args), getattr(args, "device", "cpu"), processes)


def read_settings(program: str, words: list[str], recipes: dict[str, tuple[str, S]]) -> S:
    """Parse `[recipe] [--flags]` into settings, all within their ranges."""
    default = next(iter(recipes))
    recipe, arguments = (
        (words[0], words[1:]) if words and not words[0].startswith("-") else (default, words)
    )
    if words[:1] in (["-h"], ["--help"]):
        width = max(map(len, recipes))
        listed = (f"    {name:{width}}  {help_text}" for name, (help_text, _) in recipes.items())
        print("recipes:", *listed, sep="\n")
        print(f"\nflags of a recipe: {program} RECIPE --help; below: `{default}`\n", flush=True)
    if recipe not in recipes:
        known = ", ".join(recipes)
        raise InputError(f"{program}: unknown recipe {recipe!r}: choose one of {known}.")
    _, settings = recipes[recipe]
    args = with_dtype(parse_flags(type(settings), arguments, f"{program} {recipe}", settings))
    check_ranges(args)  # before --processes
    return args


def with_dtype(args: S) -> S:
    """Replace `--dtype auto` with the faster dtype on the device; rank 0 prints the choice."""
    if getattr(args, "dtype", None) != "auto":
        return args
    from kernels import processor
    from nanorlhf.launch import is_cpu

    device = getattr(args, "device", "auto")
    device = "cpu" if is_cpu(device) else device if device == "mps" else "cuda"
    dtype, reason = processor.faster_dtype(device)
    if os.environ.get("RANK", "0") == "0":
        print(f"--dtype auto: {dtype}, as {reason}")
    return replace(args, dtype=dtype)


def run_module(main: Callable[[S], R], args_class: type[S]) -> R:
    """Run a module without recipes, `python -m data.tldr --flags`; return the result of `main`."""
    with one_sentence():
        return main(parse_flags(args_class, sys.argv[1:], _program(main)))


def _program(main: Callable[..., object]) -> str:
    """Return how the program was started: `train_ppo.py`, or `python -m data.tldr`."""
    module = main.__module__ or ""  # None for a bound method of a builtin
    if module != "__main__":
        return f"python -m {module}" if "." in module else sys.argv[0]
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec is not None else sys.argv[0]


def parse_flags(
    args_class: type[S], arguments: list[str], program: str, default: S | None = None
) -> S:
    """Parse flags into settings; raises InputError for unknown flags and bad values."""
    options: dict[str, Any] = {} if default is None else {"default": default}
    _check_flags(_flags(args_class), arguments, program)
    shown: type = args_class
    inherits = any(is_dataclass(base) for base in args_class.__mro__[1:])
    if inherits and {"-h", "--help"} & {*arguments}:
        shown, options = _grouped(args_class, default, program), {}
    if 0 < shutil.get_terminal_size().columns < 40:  # tyro hangs in a column of a few characters
        os.environ["COLUMNS"] = "40"
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            parsed, unknown = tyro.cli(
                shown, args=arguments, prog=program, return_unknown_args=True, **options
            )
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        # tyro draws a box: a title, the reason, a rule, hints
        lines = [line.strip("│ ") for line in stderr.getvalue().splitlines()[1:]]
        reason = " ".join(itertools.takewhile(lambda line: line.strip("─╰╯"), lines)).rstrip(".")
        raise InputError(f"{program}: {reason}: see `{program} --help`.") from None
    if unknown:
        raise InputError(f"{program}: unexpected {unknown[0]!r}: see `{program} --help`.")
    return parsed


def _grouped(args_class: type[S], default: S | None, program: str) -> type:
    """Return the settings in groups, for `--help` only: tyro draws a box per nested dataclass.

    A group is a subclass with some of the fields, because tyro reads their help from the source.
    """
    items = args_class.__dataclass_fields__
    nested = [name for name, item in items.items() if is_dataclass(item.type)]
    listed = {*DATA_AND_MODELS, *RUN, *nested}
    declared = inspect.get_annotations(args_class)
    script = program.removeprefix("python -m ").split()[0].removesuffix(".py")
    groups = {
        "data and model": [name for name in DATA_AND_MODELS if name in items],
        script: [name for name in declared if name not in listed],
        "shared": [name for name in items if name not in listed and name not in declared],
        "run": [name for name in RUN if name in items],
    }
    boxes: list[Any] = []
    for label, names in groups.items():
        box: Any = type(label, (args_class,), {"__doc__": ""})
        box.__dataclass_fields__ = {name: items[name] for name in names}
        hint = Annotated[box, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=label)]
        if default is None:
            boxes.append((f"box_{len(boxes)}", hint))
        else:
            values = copy.copy(default)
            object.__setattr__(values, "__class__", box)  # the settings are frozen
            boxes.append((f"box_{len(boxes)}", hint, field(default=values)))
    for name in nested:
        value = items[name].default if default is None else getattr(default, name)
        boxes.append((name, items[name].type, field(default=value)))
    return make_dataclass("Groups", boxes, frozen=True, kw_only=True)


def _flags(args_class: type, prefix: str = "--") -> dict[str, Any]:
    """Return the flags of a dataclass, its groups and its subcommands, with their type hints."""
    flags: dict[str, Any] = {}
    for name, hint in get_type_hints(args_class, include_extras=True).items():
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            continue
        name = name.replace("_", "-")
        flags[f"{prefix}{name}"] = hint
        if bool in (hint, *get_args(hint)):
            flags[f"{prefix}no-{name}"] = hint
        inner = prefix if name == "command" else f"{prefix}{name}."
        for part in (
            hint,
            *(part for outer in get_args(hint) for part in (outer, *get_args(outer))),
        ):
            if isinstance(part, type) and is_dataclass(part):
                flags |= _flags(part, inner)
    return flags


def _check_flags(flags: dict[str, Any], arguments: list[str], program: str) -> None:
    """Raise InputError for a flag that is unknown or has no value.

    tyro would blame another argument, or accept an empty list for a flag with a list of values.
    """
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    for argument, following in itertools.pairwise([*arguments, "--"]):
        flag, equals, value = argument.partition("=")
        if not FLAG.match(flag) or flag in ("-h", "--help"):
            continue
        flag = flag.replace("_", "-")
        if flag == "--plan" and flag not in flags:
            script = program.split()[0].removesuffix(".py")
            raise InputError(f"{program}: --plan is a command now: `nanorlhf plan {script} ...`.")
        if flag not in flags:
            raise InputError(f"{program}: unknown flag {flag!r}: see `{program} --help`.")
        if following == "" or equals and value == "":  # as a path: the working directory
            raise InputError(f"{program}: {flag} is empty: pass a value or omit the flag.")
        hint = flags[flag]
        may_lack = bool in (hint, *get_args(hint)) or MAY_BE_EMPTY in get_args(hint)
        if not may_lack and not equals and following.startswith("--"):
            raise InputError(f"{program}: {flag} needs a value: see `{program} --help`.")


class one_sentence:
    """Turn the errors that the user can fix into one line on stderr and exit code 2."""

    def __enter__(self) -> None:
        if sys.stdout is None:  # closed by `>&-`: discard the output
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if isinstance(sys.stdout, io.TextIOWrapper):  # a path may contain bytes that aren't text
            sys.stdout.reconfigure(errors="backslashreplace")

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, BrokenPipeError):  # `--help | head -1`: the pipe is closed
            sys.exit(_silent())
        sentence = error_sentence(error)
        if sentence is not None:
            sentence = " ".join(sentence.splitlines())  # a path may contain a newline
            print(f"error: {sentence}", file=sys.stderr)
            sys.exit(2)
        if isinstance(error, PeerFailed):
            print(error, file=sys.stderr)
            sys.exit(1)
        if isinstance(error, Interrupted):
            if str(error):  # empty on all ranks but one
                print(error, file=sys.stderr)
            sys.exit(error.code)
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            sys.exit(130)


def _silent() -> int:
    """End as if killed by SIGPIPE, without a second error when Python flushes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def printable(text: str) -> str:
    """Strip a text and replace its control characters, which could move the terminal's cursor."""
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(shown).strip()
