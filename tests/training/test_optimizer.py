"""Steps with a non-finite gradient are skipped and counted; too many in a row end the run."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from nanorlhf.errors import InputError
from nanorlhf.training import optimizer
from nanorlhf.training.optimizer import FiniteSteps

BAD = (float("nan"), float("inf"), -float("inf"), 1e30)  # 1e30 is finite, but the gradient norm isn't


def make():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, FiniteSteps(torch.optim.AdamW(model.parameters(), lr=0.1), Path("run"), "lower --lr")


def set_gradients(model, seed, bad=None):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    if bad is not None:
        model.weight.grad[1, 2] = bad


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_gradient_moves_neither_weights_nor_the_optimizers_state(bad):
    model, steps = make()
    for seed in range(3):
        set_gradients(model, seed)
        assert steps.step(model.parameters(), 1.0)
    before = copy.deepcopy((model.state_dict(), steps.optimizer.state_dict()))
    set_gradients(model, 3, bad)
    assert not steps.step(model.parameters(), 1.0, max_norm=1.0)
    after = model.state_dict(), steps.optimizer.state_dict()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    for number, state in before[1]["state"].items():
        assert all(torch.equal(state[name], after[1]["state"][number][name]) for name in state)
    assert (steps.skipped, steps.in_a_row) == (1, 1)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_finite_steps_are_those_of_adamw(max_norm):
    """Bit for bit the steps of PyTorch on the finite gradients only."""
    model, steps = make()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for seed in range(6):
        set_gradients(model, seed, float("nan") if seed in (2, 3) else None)
        steps.step(model.parameters(), 1.0, max_norm)
        if seed not in (2, 3):
            set_gradients(twin, seed)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
            optimizer.step()
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias) and steps.skipped == 2


def test_more_than_the_limit_in_a_row_end_the_run_and_a_finite_step_resets_the_count(monkeypatch):
    monkeypatch.setattr(optimizer, "MAX_SKIPPED_STEPS", 2)
    model, steps = make()
    for bad in (True, True, False, True, True):
        set_gradients(model, 0, float("inf") if bad else None)
        assert steps.step(model.parameters(), 1.0) != bad
    set_gradients(model, 0)
    with pytest.raises(InputError, match=r"not finite for 3 step\(s\) in a row \(the loss is nan\): lower --lr; run"):
        steps.step(model.parameters(), float("nan"))  # a non-finite loss is enough
    assert steps.skipped == 5


def test_its_state_is_restored():
    model, steps = make()
    set_gradients(model, 0)
    steps.step(model.parameters(), 1.0)
    steps.step(model.parameters(), float("nan"))
    _, other = make()
    other.load_state_dict(steps.state_dict())
    assert (other.skipped, other.in_a_row) == (1, 1)
    assert torch.equal(
        other.optimizer.state_dict()["state"][0]["exp_avg"], steps.optimizer.state_dict()["state"][0]["exp_avg"]
    )
