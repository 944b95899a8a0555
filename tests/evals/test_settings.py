"""Settings of evaluations: ranges, recipes and misspelt names."""

import re
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

import eval as evaluation
from nanorlhf.cli import check_ranges, ranges
from nanorlhf.errors import InputError
from nanorlhf.evals import benchmarks, reward_models, summaries
from nanorlhf.recipes import recipes, tldr
from nanorlhf.rlcf import evaluate_programs as programs
from nanorlhf.selfrank import evaluate_replies as replies
from nanorlhf.stackoverflow import evaluate_answers as answers

MODULES = (summaries, reward_models, benchmarks, answers, programs, replies)


def is_number(hint) -> bool:
    parts = get_args(hint)
    return hint in (int, float) or any(is_number(part) for part in parts)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_number_among_the_settings_has_a_range(module) -> None:
    hints = get_type_hints(module.Args, include_extras=True)
    numbers = {name: hint for name, hint in hints.items() if is_number(hint)}
    assert len(numbers) >= 4
    assert [name for name, hint in numbers.items() if not ranges(hint)] == []


@pytest.mark.parametrize("name", evaluation.RECIPES)
def test_the_settings_of_every_recipe_are_within_their_ranges(name) -> None:
    check_ranges(evaluation.RECIPES[name][1])


@pytest.mark.parametrize(
    ("recipe", "change", "sentence"),
    [
        ("rlcf", {"ks": (0, 1)}, "--ks 0: must be at least 1."),
        ("rlcf", {"temperatures": (-0.2, 0.6)}, "--temperatures -0.2: must be 0 or from 10^-6 to 10^6."),
        ("rlcf", {"workers": 501}, "--workers 501: must be from 1 to 500."),
        ("rlcf", {"timeout": 3601.0}, "--timeout 3601.0: must be above 0, an hour at most."),
        ("tiny", {"judge_temperature": -1.0}, "--judge-temperature -1.0: must be at least 0."),
        ("tiny", {"seed": -1}, "--seed -1: must be from 0 to 2^63 - 1."),
        ("tldr-rm", {"max_cnndm_query_length": 0}, "--max-cnndm-query-length 0: must be at least 1."),
        ("stackoverflow", {"top_p": 1.5}, "--top-p 1.5: must be from 0 to 1."),
        ("stackoverflow", {"encoder_layer": 0}, "--encoder-layer 0: must be at least 1."),
        ("str", {"num_resamples": 0}, "--num-resamples 0: must be from 1 to a million."),
    ],
)
def test_a_number_outside_its_range_raises_input_error(recipe, change, sentence) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        evaluation.main(replace(evaluation.RECIPES[recipe][1], **change))


def test_a_misspelt_setting_in_a_recipe_is_a_type_error(monkeypatch) -> None:
    monkeypatch.setitem(tldr.RECIPES["tldr"]["summaries"], "temprature", 0.5)
    with pytest.raises(TypeError, match="temprature"):
        recipes("summaries", summaries.Args)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_settings_choose_their_evaluation(module, monkeypatch) -> None:
    monkeypatch.setattr(module, "main", lambda args: {"ran": type(args)})
    recipe = next(args for _, args in evaluation.RECIPES.values() if type(args) is module.Args)
    assert evaluation.main(recipe) == {"ran": module.Args}
