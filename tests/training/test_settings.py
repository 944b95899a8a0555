"""Settings of every program: numbers have ranges, and every recipe is within them."""

import math
import re
from dataclasses import replace
from types import ModuleType
from typing import get_type_hints

import pytest

import train_dpo
import train_ppo
import train_rm
import train_sft
from nanorlhf.cli import check_ranges, ranges
from nanorlhf.errors import InputError
from nanorlhf.rlcf import train_baselines, train_discriminator

PROGRAMS = [train_sft, train_rm, train_dpo, train_ppo, train_discriminator, train_baselines]
by_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def numbers(program: ModuleType) -> list[str]:
    """Return the names of settings that are numbers, optional numbers or tuples of numbers."""
    hints = get_type_hints(program.Args)
    return [name for name, hint in hints.items() if re.search(r"\b(int|float)\b", str(hint))]


@by_program
def test_every_number_has_a_range(program):
    hints = get_type_hints(program.Args, include_extras=True)
    assert {"lr", "batch_size", "seed"} <= set(numbers(program))
    assert [name for name in numbers(program) if not ranges(hints[name])] == []


@by_program
def test_every_recipe_lies_within_the_ranges(program):
    assert program.RECIPES
    for _, args in program.RECIPES.values():
        assert type(args) is program.Args
        check_ranges(args)


@by_program
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_by_name(program, value):
    _, args = next(iter(program.RECIPES.values()))
    for name in numbers(program):
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} {value}: must be "):
            check_ranges(replace(args, **{name: value}))
