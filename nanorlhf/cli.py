"""Flags of the scripts, out of their `Args` dataclasses: help text, defaults and types stand there once."""

import errno
import io
import itertools
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import fields
from typing import Any

import tyro

from nanorlhf.errors import InputError, Interrupted

AT_LEAST_1 = ("at least 1", lambda x: x >= 1)
AT_LEAST_0 = ("at least 0", lambda x: x >= 0)
ABOVE_0 = ("above 0", lambda x: x > 0)
UP_TO_1 = ("from 0 to 1", lambda x: 0 <= x <= 1)
# every number among the settings of the four scripts; NaN and infinity are in no range
RANGES = {
    **dict.fromkeys(("n_layer", "n_head", "d_model", "encoder_layer"), AT_LEAST_1),
    **dict.fromkeys(("batch_size", "micro_batch_size", "rollout_batch_size", "num_minibatches"), AT_LEAST_1),
    **dict.fromkeys(("triplet_batch_size", "num_rows"), AT_LEAST_1),
    **dict.fromkeys(("num_ppo_epochs", "total_episodes", "num_samples", "num_queries", "num_resamples"), AT_LEAST_1),
    **dict.fromkeys(("max_query_length", "max_response_length", "response_length"), AT_LEAST_1),
    **dict.fromkeys(("max_cnndm_query_length", "eval_every", "save_every", "keep_last", "sample_every"), AT_LEAST_1),
    "max_skipped_steps": AT_LEAST_0,
    **dict.fromkeys(("warmup_steps", "lr", "temperature", "kl_coef", "value_coef", "num_report_samples"), AT_LEAST_0),
    "discriminator_lr": AT_LEAST_0,
    **dict.fromkeys(("num_triplet_epochs", "num_pair_epochs", "triplet_margin", "triplet_lr"), AT_LEAST_0),
    **dict.fromkeys(("weight_decay", "num_normalisation", "top_k", "no_repeat_ngram_size"), AT_LEAST_0),
    **dict.fromkeys(("num_epochs", "kl_target", "clip_range", "value_clip_range", "kl_temperature"), ABOVE_0),
    **dict.fromkeys(("adam_eps", "max_grad_norm", "dpo_beta"), ABOVE_0),
    "adam_betas": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    **dict.fromkeys(("gamma", "lam", "top_p"), UP_TO_1),
    "seed": ("from 0 to 2^63 - 1", lambda x: 0 <= x < 2**63),
    "ks": AT_LEAST_1,
    "temperatures": AT_LEAST_0,
    "timeout": ("above 0, an hour at most", lambda x: 0 < x <= 3600),
    "workers": ("from 1 to 500", lambda x: 1 <= x <= 500),
    **dict.fromkeys(("judge_max_calls", "judge_temperature"), AT_LEAST_0),
    "judge_max_tokens": AT_LEAST_1,
    "judge_timeout": ("above 0, an hour at most", lambda x: 0 < x <= 3600),
    "judge_workers": ("from 1 to 500", lambda x: 1 <= x <= 500),
    "missing_eos_score": ("a finite number", math.isfinite),
}


def check_ranges(args: Any) -> None:
    """Refuse a number that makes no sense; whether two of them fit together is for the script to say."""
    for field in fields(args):
        setting = getattr(args, field.name)
        for value in setting if isinstance(setting, tuple) else (setting,):
            if isinstance(value, int | float) and not isinstance(value, bool):
                words, allowed = RANGES[field.name]
                if not (math.isfinite(value) and allowed(value)):
                    raise InputError(f"--{field.name.replace('_', '-')} {value}: it must be {words}.")


def command_line(main: Callable[[Any], object], recipes: dict[str, tuple[str, Any]]) -> None:
    """Run `script.py [recipe] [--flags]`: the first recipe where none is named. Exits 2 on bad input."""
    from nanorlhf import distributed  # with it comes PyTorch, which --flags of a data module don't wait for

    arguments = sys.argv[1:]
    default = next(iter(recipes))
    if arguments[:1] in (["-h"], ["--help"]):
        print("recipes: " + "; ".join(f"{name} ({help_text})" for name, (help_text, _) in recipes.items()))
        print(f"the flags of a recipe: {sys.argv[0]} RECIPE --help; below, those of `{default}`\n")
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else default
    with _one_sentence():
        if recipe not in recipes:
            raise InputError(f"{sys.argv[0]}: unknown recipe {recipe!r}: choose one of {', '.join(recipes)}.")
        distributed.run(main, _parse(recipes[recipe][1], arguments, f"{sys.argv[0]} {recipe}"))


def run_module(main: Callable[[Any], object], args_class: type) -> None:
    """The same for a module without recipes: `python -m data.tldr --flags`."""
    with _one_sentence():
        main(_parse(args_class, sys.argv[1:], f"python -m {main.__module__}"))


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


class _one_sentence:
    """Turns the errors that are the user's to mend into one line on stderr and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, InputError):
            sys.exit(_fail(str(error)))
        if isinstance(error, OSError):
            where = error.filename or "the output directory"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                sys.exit(_fail(f"the disk is full ({error.strerror}) at {where}: free some space and start again."))
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR):
                sys.exit(_fail(f"{where}: {error.strerror}: name another path or change its permissions."))
        if isinstance(error, Interrupted):
            if str(error):  # of several processes one speaks
                print(error, file=sys.stderr)
            sys.exit(error.code)
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            sys.exit(130)


def _fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2
