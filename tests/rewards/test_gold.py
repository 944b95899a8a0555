"""Gold scores from a function or a larger reward model."""

from pathlib import Path

import pytest
import torch

from nanorlhf.config import GPTConfig
from nanorlhf.dataset import Comparison, Demonstration, response_ids
from nanorlhf.errors import InputError
from nanorlhf.evals.scores import gold_margins
from nanorlhf.model import ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.reward_model import response_scores
from nanorlhf.rewards.gold import Gold
from nanorlhf.tokenizer import train_tokenizer

CPU = torch.device("cpu")
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
    assert gold.score_texts(*TEXTS) == expected
    rows = [tokenizer.encode(text) + [tokenizer.eos_id] for text in TEXTS[1]]
    response = torch.tensor([row + [tokenizer.pad_id] * (16 - len(row)) for row in rows])
    assert gold.score_ids(TEXTS[0], torch.zeros(3, 0, dtype=torch.long), response) == expected


@pytest.mark.parametrize("body", ["None", "'high'", "[1, 2]", "float('nan')"])
def test_a_function_that_returns_no_number_raises_input_error(body, tmp_path, tokenizer) -> None:
    gold = Gold(rule_file(tmp_path, body), tokenizer, CPU)
    with pytest.raises(InputError, match=r"^--gold .*truth.py:score .* number"):
        gold.score_texts(*TEXTS)


@pytest.mark.parametrize("where", ["no/such/file.py:score", "no/such/file.py"])
def test_a_missing_function_raises_input_error(where, tokenizer) -> None:
    with pytest.raises(InputError, match=f"^--gold {where}: expected FILE.py:FUNCTION"):
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
    scores = Gold("some/rm", tokenizer, CPU).score_rows(rows)
    assert len(set(scores)) == 3
    assert Gold("some/rm", tokenizer, CPU, batch_size=2).score_rows(rows) == pytest.approx(scores, abs=1e-5)
    pairs = [Comparison(row.query, rows[0].response, row.response, {}) for row in rows]
    assert Gold("some/rm", tokenizer, CPU).score_rows(pairs, "rejected") == pytest.approx(scores, abs=1e-5)
    assert response_scores(model, rows, tokenizer.pad_id, "right").tolist() == pytest.approx(scores, abs=1e-5)
    query = left_pad([row.query for row in rows], tokenizer.pad_id)
    response = right_pad([row.response for row in rows], tokenizer.pad_id)
    again = Gold("some/rm", tokenizer, CPU, batch_size=1).score_ids(TEXTS[0], query, response)
    assert again == pytest.approx(scores, abs=1e-5)
    with pytest.raises(InputError, match="more than the 64 positions of --gold some/rm"):
        Gold("some/rm", tokenizer, CPU).score_rows([Demonstration(rows[0].query * 30, rows[0].response, {})])


def test_gold_margins_are_chosen_minus_rejected(tmp_path, tokenizer) -> None:
    gold = Gold(rule_file(tmp_path, "len(response)"), tokenizer, CPU)
    rows = [Comparison([], [], [], {"query": "q", "chosen": "abc", "rejected": "a"})] * 2
    rows.append(Comparison([], [], [], {"query": "q", "chosen": "", "rejected": "a"}))
    assert gold_margins(gold, rows) == [2, 2, -1]
