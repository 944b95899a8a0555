"""What all evaluations share: their settings, and a gold score that is a function or a larger reward model."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import eval as evaluation
from nanorlhf.cli import check_ranges, ranges
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import Comparison, Demonstration, response_ids
from nanorlhf.errors import InputError
from nanorlhf.evals import benchmarks, reward_models, summaries
from nanorlhf.evals.common import gold_margins
from nanorlhf.model import ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.recipes import recipes, tldr
from nanorlhf.reward import response_scores
from nanorlhf.rewards.gold import Gold
from nanorlhf.rlcf import evaluate_programs as programs
from nanorlhf.selfrank import evaluate_replies as replies
from nanorlhf.stackoverflow import evaluate_answers as answers
from nanorlhf.tokenizer import train_tokenizer

MODULES = (summaries, reward_models, benchmarks, answers, programs, replies)
CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------------------- 1. settings
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
        ("rlcf", {"ks": (0, 1)}, "--ks 0: it must be at least 1."),
        ("rlcf", {"temperatures": (-0.2, 0.6)}, "--temperatures -0.2: it must be 0 or from 10^-6 to 10^6."),
        ("rlcf", {"workers": 501}, "--workers 501: it must be from 1 to 500."),
        ("rlcf", {"timeout": 3601.0}, "--timeout 3601.0: it must be above 0, an hour at most."),
        ("tiny", {"judge_temperature": -1.0}, "--judge-temperature -1.0: it must be at least 0."),
        ("tiny", {"seed": -1}, "--seed -1: it must be from 0 to 2^63 - 1."),
        ("tldr-rm", {"max_cnndm_query_length": 0}, "--max-cnndm-query-length 0: it must be at least 1."),
        ("stackoverflow", {"top_p": 1.5}, "--top-p 1.5: it must be from 0 to 1."),
        ("stackoverflow", {"encoder_layer": 0}, "--encoder-layer 0: it must be at least 1."),
        ("str", {"num_resamples": 0}, "--num-resamples 0: it must be from 1 to a million."),
    ],
)
def test_a_number_outside_its_range_is_one_sentence(recipe, change, sentence) -> None:
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


# ------------------------------------------------------------------------------------------------------------- 2. gold
TEXTS = ["POST: a b\nTL;DR:", "POST: c\nTL;DR:", "POST: d e f\nTL;DR:"], [" b", " c c c", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(TEXTS[0] + TEXTS[1])] * 2, 280)


def rule_file(tmp_path: Path, body: str) -> str:
    (tmp_path / "truth.py").write_text(f"def score(query, response):\n    return {body}\n")
    return f"{tmp_path / 'truth.py'}:score"


def test_a_function_is_given_the_texts_of_samples_too(tmp_path, tokenizer) -> None:
    gold = Gold(rule_file(tmp_path, "len(query) + 100 * len(response)"), tokenizer, CPU)
    expected = [len(query) + 100 * len(text) for query, text in zip(*TEXTS, strict=True)]
    assert gold.of_texts(*TEXTS) == expected
    rows = [tokenizer.encode(text) + [tokenizer.eos_id] for text in TEXTS[1]]
    response = torch.tensor([row + [tokenizer.pad_id] * (16 - len(row)) for row in rows])
    assert gold.of_ids(TEXTS[0], torch.zeros(3, 0, dtype=torch.long), response) == expected


@pytest.mark.parametrize("body", ["None", "'high'", "[1, 2]", "float('nan')"])
def test_a_function_that_gives_no_number_is_one_sentence(body, tmp_path, tokenizer) -> None:
    gold = Gold(rule_file(tmp_path, body), tokenizer, CPU)
    with pytest.raises(InputError, match=r"^--gold .*truth.py:score .* number"):
        gold.of_texts(*TEXTS)


@pytest.mark.parametrize("where", ["no/such/file.py:score", "no/such/file.py"])
def test_a_function_that_is_not_there_is_one_sentence(where, tokenizer) -> None:
    with pytest.raises(InputError, match=f"^--gold {where}: write it as FILE.py:FUNCTION"):
        Gold(where, tokenizer, CPU)


def test_a_reward_model_scores_texts_and_samples_alike_whatever_the_batch_size(tokenizer, monkeypatch) -> None:
    torch.manual_seed(0)
    model = ScalarModel(
        GPTConfig(vocab_size=280, n_ctx=64, d_model=16, n_layer=1, n_head=2, d_mlp=32, rotary_dim=4,
                  positions="rotary_half")
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    monkeypatch.setattr("nanorlhf.rewards.gold.load_scalar", lambda where, device, dtype: model)
    rows = [
        Demonstration(tokenizer.encode(query), response_ids(query, text, tokenizer), {})
        for query, text in zip(*TEXTS, strict=True)
    ]
    scores = Gold("some/rm", tokenizer, CPU).of_rows(rows)
    assert len(set(scores)) == 3
    assert Gold("some/rm", tokenizer, CPU, batch_size=2).of_rows(rows) == pytest.approx(scores, abs=1e-5)
    pairs = [Comparison(row.query, rows[0].response, row.response, {}) for row in rows]
    assert Gold("some/rm", tokenizer, CPU).of_rows(pairs, "rejected") == pytest.approx(scores, abs=1e-5)
    assert response_scores(model, rows, tokenizer.pad_id, "right").tolist() == pytest.approx(scores, abs=1e-5)
    query = left_pad([row.query for row in rows], tokenizer.pad_id)
    response = right_pad([row.response for row in rows], tokenizer.pad_id)
    again = Gold("some/rm", tokenizer, CPU, batch_size=1).of_ids(TEXTS[0], query, response)
    assert again == pytest.approx(scores, abs=1e-5)
    with pytest.raises(InputError, match="more than the 64 positions of --gold some/rm"):
        Gold("some/rm", tokenizer, CPU).of_rows([Demonstration(rows[0].query * 30, rows[0].response, {})])


def test_gold_margins_are_chosen_minus_rejected(tmp_path, tokenizer) -> None:
    gold = Gold(rule_file(tmp_path, "len(response)"), tokenizer, CPU)
    rows = [Comparison([], [], [], {"query": "q", "chosen": "abc", "rejected": "a"})] * 2
    rows.append(Comparison([], [], [], {"query": "q", "chosen": "", "rejected": "a"}))
    assert gold_margins(gold, rows) == [2, 2, -1]
