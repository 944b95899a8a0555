"""Reward models trained by regression, selections of trained weights, and AdamW's parameter groups."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import train_rm
from nanorlhf.checkpoint import load_gpt, load_scalar, scalar_from_gpt
from nanorlhf.dataset import Scored, iter_jsonl, load_comparisons, load_scored, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.optimizer import parameter_groups, train_linear_layers
from tests.conftest import read_metrics
from tests.test_train_sft import gradients  # noqa: F401  a fixture

EOS, PAD = 1, 99
ROWS = [
    Scored([5, 6, 7], [8, 9, EOS], {"score": -0.5}),
    Scored([10], [11, EOS], {"score": 0.0}),
    Scored([4, 3], [EOS], {"score": 2.0}),
]


@pytest.fixture(scope="module")
def scored(miniature):
    """Score the miniature's demonstrations by their length in words."""
    for split in ("train", "validation"):
        rows = [row for _, row in iter_jsonl(miniature.root / "data" / f"sft.{split}.jsonl")]
        scores = [(len(row["response"].split()) - 7) / 4 for row in rows]
        write_jsonl(
            miniature.root / "data" / f"scored.{split}.jsonl",
            [row | {"score": score} for row, score in zip(rows, scores, strict=True)],
        )
    return replace(miniature.rm, loss="regression", num_normalisation=0, out=miniature.root / "rm_regression")


def test_the_loss_equals_the_squared_error_of_single_texts(miniature):
    model = load_scalar(miniature.root / "rm").requires_grad_(True)
    loss, num_right, absolute = train_rm.regression_loss(model, ROWS, PAD)
    alone = [model(torch.tensor([row.query + row.response]))[0, -1].item() for row in ROWS]
    errors = [score - row.score for score, row in zip(alone, ROWS, strict=True)]
    assert loss.item() == pytest.approx(sum(error**2 for error in errors), rel=1e-5)
    assert absolute.item() == pytest.approx(sum(map(abs, errors)), rel=1e-5)
    loss.backward()
    assert model.score.weight.grad.abs().max() > 0


def test_the_loss_of_three_scores_typed_by_hand(monkeypatch):
    scores = torch.tensor([-1.5, 0.0, -3.0], requires_grad=True)  # targets -0.5, 0 and 2
    scored = {("model", len(ROWS), PAD): scores}  # for either padding side
    monkeypatch.setattr(train_rm, "response_scores", lambda model, rows, pad_id, side: scored[model, len(rows), pad_id])
    loss, num_right, absolute = train_rm.regression_loss("model", ROWS, PAD)
    assert (loss.item(), num_right.item(), absolute.item()) == (26.0, 2, 6.0) and not absolute.requires_grad
    loss.backward()
    assert scores.grad.tolist() == [-2.0, 0.0, -10.0]
    for new_scores, num_right in (([-0.5, -0.5, 0.5], 2), ([0.5, 0.5, -0.5], 1)):  # correct signs: - + +
        monkeypatch.setattr(train_rm, "response_scores", lambda *_, new_scores=new_scores: torch.tensor(new_scores))
        assert train_rm.regression_loss(None, ROWS, PAD)[1].item() == num_right


def test_zero_counts_as_positive_on_both_sides(miniature, monkeypatch):
    """[SO eq 2]"""
    model = load_scalar(miniature.root / "rm")
    for scores, num_right in (((-1.0, 0.0, 0.0), 3), ((0.0, -1e-9, 3.0), 1), ((-0.1, 5.0, -5.0), 2)):
        monkeypatch.setattr(train_rm, "response_scores", lambda *_, scores=scores: torch.tensor(scores))
        assert train_rm.regression_loss(model, ROWS, PAD)[1] == num_right


@pytest.mark.slow
def test_a_regression_learns_the_scores_and_is_not_normalised(scored, miniature):
    summary = train_rm.main(replace(scored, num_epochs=20, lr=5e-3, overwrite=True))
    model, tokenizer = load_scalar(scored.out), load_tokenizer(scored.out)
    rows = load_scored(scored.data / "scored.validation.jsonl", tokenizer, None, None)
    outputs = [model(torch.tensor([row.query + row.response]))[0, -1].item() for row in rows]
    right = [(output >= 0) == (row.score >= 0) for output, row in zip(outputs, rows, strict=True)]
    squares = [(output - row.score) ** 2 for output, row in zip(outputs, rows, strict=True)]
    assert summary["validation_accuracy"] == pytest.approx(sum(right) / len(rows))
    assert summary["validation_loss"] == pytest.approx(sum(squares) / len(rows), rel=1e-4)
    positive = sum(row.score >= 0 for row in rows) / len(rows)
    assert summary["validation_majority_sign"] == max(positive, 1 - positive)
    assert model.reward_bias == 0
    losses = [row["loss"] for row in read_metrics(scored.out) if "loss" in row]
    assert sum(losses[-8:]) < 0.5 * sum(losses[:8])


def test_a_regression_also_reports_its_ranking_accuracy(scored):
    summary = train_rm.main(replace(scored, overwrite=True))
    model, tokenizer = load_scalar(scored.out), load_tokenizer(scored.out)
    pairs = load_comparisons(scored.data / "comparisons.validation.jsonl", tokenizer, None, None)
    margins = [torch.sub(*train_rm.pair_scores(model, [pair], tokenizer.pad_id)).item() for pair in pairs]
    assert summary["validation_pair_accuracy"] == sum(margin > 0 for margin in margins) / len(pairs)


def test_a_regression_runs_without_pairs(scored, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("scored.train", "scored.validation", "sft.train"):
        (tmp_path / "data" / f"{name}.jsonl").symlink_to(scored.data / f"{name}.jsonl")
    summary = train_rm.main(replace(scored, data=tmp_path / "data", out=tmp_path / "rm"))
    assert "validation_pair_accuracy" not in summary and math.isfinite(summary["validation_loss"])


def test_a_score_that_is_not_a_number_names_its_line(scored, tmp_path):
    rows = [{"query": "a", "response": "b", "score": 1}, {"query": "a", "response": "b", "score": "2"}]
    write_jsonl(tmp_path / "scored.jsonl", rows)
    with pytest.raises(InputError, match=r"scored.jsonl:2: the field 'score' must be float, not str"):
        load_scored(tmp_path / "scored.jsonl", load_tokenizer(scored.sft), None, None)
    write_jsonl(tmp_path / "scored.jsonl", rows[:1])
    [row] = load_scored(tmp_path / "scored.jsonl", load_tokenizer(scored.sft), None, None)
    assert row.score == 1.0 and row.response[-1] == load_tokenizer(scored.sft).eos_id


# ------------------------------------------------------------------------------------------------ which weights move
def test_linear_trains_the_outer_blocks_the_linear_layers_and_the_head_only(tiny_gpt):
    config = replace(tiny_gpt.config, n_layer=4)
    model = scalar_from_gpt(type(tiny_gpt)(config))
    train_linear_layers(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    inner_norms = {
        f"transformer.blocks.{i}.norm{j}.{kind}" for i in (1, 2) for j in (1, 2) for kind in ("weight", "bias")
    }
    assert frozen == {"transformer.embedding.weight", "transformer.norm.weight", "transformer.norm.bias"} | inner_norms
    assert {"score.weight", "transformer.blocks.0.norm1.weight", "transformer.blocks.2.mlp.up.bias"} <= trained


def test_training_changes_trained_weights_and_no_frozen_weight(miniature, tmp_path):
    train_rm.main(replace(miniature.rm, trainable="linear", out=tmp_path / "rm", lr=1e-2))
    model, policy = load_scalar(tmp_path / "rm"), load_gpt(miniature.root / "sft")
    assert torch.equal(model.transformer.embedding.weight, policy.transformer.embedding.weight)
    assert torch.equal(model.transformer.norm.weight, policy.transformer.norm.weight)
    assert not torch.equal(model.transformer.blocks[0].mlp.up.weight, policy.transformer.blocks[0].mlp.up.weight)


def test_without_vector_decay_only_matrices_decay():
    layer = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    with torch.no_grad():
        layer[0].bias += 1
    before = [parameter.clone() for parameter in layer.parameters()]
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)  # so that only decay moves them
    torch.optim.AdamW(parameter_groups(layer.parameters(), 0.5, decay_vectors=False), lr=0.1).step()
    matrix, *vectors = layer.parameters()
    assert torch.allclose(matrix, before[0] * (1 - 0.1 * 0.5))
    assert all(torch.equal(*pair) for pair in zip(vectors, before[1:], strict=True))
    torch.optim.AdamW(parameter_groups(layer.parameters(), 0.5, decay_vectors=True), lr=0.1).step()
    assert torch.allclose(vectors[0], before[1] * 0.95)


def test_the_gradient_norm_is_clipped(miniature, tmp_path, monkeypatch):
    plain, norms = torch.optim.AdamW.step, []

    def step(self, *arguments):
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        norms.append(torch.cat([parameter.grad.flatten() for parameter in trained]).norm().item())
        return plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train_rm.main(replace(miniature.rm, out=tmp_path / "free", num_epochs=0.125))
    limit = norms[0] / 10
    train_rm.main(replace(miniature.rm, out=tmp_path / "short", num_epochs=0.125, max_grad_norm=limit))
    assert norms[1] == pytest.approx(limit, rel=1e-3)


def test_the_summary_is_written_to_disk(scored):
    train_rm.main(replace(scored, overwrite=True))
    assert json.loads((scored.out / "summary.json").read_text())["num_validation_rows"] == 16
