"""Micro-batches of the supervised stages."""

from pathlib import Path

import pytest
import torch

from nanorlhf import distributed
from nanorlhf.dataset import Demonstration
from nanorlhf.training.supervised import backward, number_of_steps
from tests.conftest import weights
from train_sft import demonstration_loss

EOS, PAD = 1, 99
ROWS = [Demonstration([5, 6, 7], [8, 9, 4, EOS], {}), Demonstration([10], [EOS], {}), Demonstration([3], [4, EOS], {})]


def test_a_share_of_an_epoch_is_counted_exactly() -> None:
    """Checked against integer arithmetic: 0.29 epochs of 100 rows are 29 rows, not 28.999."""
    for hundredths in range(1, 301):
        for num_rows in (100, 999, 1000):
            steps = number_of_steps(hundredths / 100, num_rows, 1, Path("sft.train.jsonl"))
            assert steps == hundredths * num_rows // 100
    assert number_of_steps(0.29, 100, 29, Path("sft.train.jsonl")) == 1


def test_micro_batches_change_neither_the_gradient_nor_the_means(tiny_gpt) -> None:
    """The rows have 4, 1 and 2 labels, so a mean of the micro-batches' means would weight them differently."""
    model, results = tiny_gpt.double(), []

    def sums(model, rows):
        return demonstration_loss(model, rows, PAD, "response"), torch.tensor(len(rows), dtype=torch.double)

    for size in (1, 2, 3):
        means = backward(model, ROWS, sums, 7, size, "float32")
        results.append((means, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))
    model.zero_grad()
    (demonstration_loss(model, ROWS, PAD, "response") / 7).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert expected.abs().max() > 1e-2 and len(expected) == len(weights(model))
    for means, gradient in results:
        assert torch.allclose(gradient, expected, atol=1e-12)
        assert means[1].item() == pytest.approx(3 / 7) and means[0].item() == pytest.approx(results[0][0][0].item())


def test_ranks_add_up_to_the_gradient_and_the_means_of_the_whole_batch(tiny_gpt, monkeypatch) -> None:
    """Two ranks, run one after the other with two rows each, send sums that add up to a single process's result."""
    model, rows = tiny_gpt.double(), [*ROWS, Demonstration([7, 8], [9, EOS], {})]
    sent = []

    def sums(model, rows):
        return demonstration_loss(model, rows, PAD, "response"), torch.tensor(len(rows), dtype=torch.double)

    def gradient() -> torch.Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    means = backward(model, rows, sums, 9, 1, "float32")
    whole = gradient()
    assert not means.requires_grad and means[1].item() == pytest.approx(4 / 9)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "sum_gradients", lambda model: sent.append(gradient()))
    monkeypatch.setattr(distributed, "all_sum", lambda x: sent.append(x) or "of all ranks")
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        assert backward(model, rows, sums, 9, 1, "float32") == "of all ranks"
    assert torch.allclose(sent[0] + sent[2], whole, atol=1e-12) and not torch.allclose(sent[0], whole, atol=1e-3)
    assert torch.allclose(sent[1] + sent[3], means, atol=1e-12)
