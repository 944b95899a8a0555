"""Comparisons that read each query once give the same results as separate texts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanorlhf.dataset import Comparison
from nanorlhf.dpo import pair_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import pair_scores
from tests.test_model import CONFIGS, make_model

PAD = 40
PAIRS = [
    Comparison([5, 6, 7, 8, 9, 10], [11, 12, 1], [13, 14, 15, 16, 1], {}),
    Comparison([20], [21, 22, 23, 1], [1], {}),
    Comparison([30, 31, 32], [33, 1], [33, 1], {}),
]


def texts(pair: Comparison) -> list[list[int]]:
    return [pair.query + pair.chosen, pair.query + pair.rejected]


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_logprobs_equals_that_of_single_texts_in_float64(name) -> None:
    model = make_model(CONFIGS[name]).double()
    chosen, rejected = pair_logprobs(model, PAIRS, PAD)
    total = 0.0
    for pair in PAIRS:
        for text, response, sign in zip(texts(pair), (pair.chosen, pair.rejected), (1, -2), strict=True):
            logits = model.logits(model(torch.tensor([text])))[0, len(pair.query) - 1 : -1]  # (T, V)
            total = total + sign * -F.cross_entropy(logits, torch.tensor(response), reduction="sum")
    loss = (chosen - 2 * rejected).sum()
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    atol = 1e-4 if CONFIGS[name].norm != "layer" else 1e-9  # an RMS norm computes in float32
    assert torch.allclose(gradient(model, loss), gradient(model, total), atol=atol)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_scores_equals_that_of_single_texts(name) -> None:
    model = make_model(CONFIGS[name], ScalarModel)
    chosen, rejected = pair_scores(model, PAIRS, PAD)
    alone = torch.stack([torch.stack([model(torch.tensor([text]))[0, -1] for text in texts(pair)]) for pair in PAIRS])
    assert torch.allclose(torch.stack((chosen, rejected), 1), alone, atol=1e-5)
    loss, expected = F.softplus(rejected - chosen).sum(), F.softplus(alone[:, 1] - alone[:, 0]).sum()
    assert torch.allclose(gradient(model, loss), gradient(model, expected), atol=1e-4)


@torch.no_grad()
def test_neither_response_changes_the_other() -> None:
    model = make_model(CONFIGS["gpt_neox"], ScalarModel)
    changed = [replace(pair, rejected=[17, 18, 19, 2, 3, 1]) for pair in PAIRS]
    assert torch.allclose(pair_scores(model, PAIRS, PAD)[0], pair_scores(model, changed, PAD)[0], atol=1e-5)
    changed = [replace(pair, chosen=[17, 18, 19, 2, 3, 1]) for pair in PAIRS]
    assert torch.allclose(pair_scores(model, PAIRS, PAD)[1], pair_scores(model, changed, PAD)[1], atol=1e-5)


@torch.no_grad()
def test_an_empty_response_ends_where_its_query_does() -> None:
    model = make_model(CONFIGS["gpt2"], ScalarModel)
    for chosen, rejected in (([], [3, 1]), ([3, 1], []), ([], [])):
        scores = torch.cat(pair_scores(model, [Comparison([5, 6], chosen, rejected, {})], PAD))
        alone = [model(torch.tensor([[5, 6, *response]]))[0, -1].item() for response in (chosen, rejected)]
        assert scores.tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("kind", [GPT, ScalarModel])
@torch.no_grad()
def test_the_query_is_read_once(kind, monkeypatch) -> None:
    model, seen = make_model(CONFIGS["gpt_neox"], kind), []
    embed = model.transformer.embedding.forward

    def spy(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return embed(ids)

    monkeypatch.setattr(model.transformer.embedding, "forward", spy)
    (pair_logprobs if kind is GPT else pair_scores)(model, PAIRS[:1], PAD)
    (query, responses), pair = seen, PAIRS[0]
    assert query.tolist() == [pair.query]
    padding = [0] * (len(pair.rejected) - len(pair.chosen))  # [PAD] is embedded as 0
    assert responses.tolist() == [pair.chosen + padding, pair.rejected]
