"""Under autocast, the weights are cast once per optimizer step, not once per micro-batch, and no bit changes."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanorlhf.batch import Batch
from nanorlhf.dataset import Demonstration
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT
from nanorlhf.training.supervised import backward
from tests.conftest import TINY

EOS, PAD, T = 1, 40, 4


class Casts(TorchDispatchMode):
    """Counts the casts of each parameter to bfloat16."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        if function is torch.ops.aten._to_copy.default and id(arguments[0]) in self.names:
            name = self.names[id(arguments[0])]
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*arguments, **settings or {})


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY)


def gradient(model: GPT) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def linear_weights(model: GPT) -> set[str]:
    return {name for name, p in model.transformer.blocks.named_parameters(prefix="transformer.blocks") if p.ndim == 2}


def update(model: GPT, batch: Batch) -> None:
    """The update of train_ppo.py, with the log-probabilities as loss."""
    model.zero_grad()
    for mb in batch.micro_batches(2):
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = response_logprobs(model, mb.query_response, mb.real, mb.actions, 1.0)
        logprobs.sum().backward()


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_micro_batches_of_a_rollout_share_the_casts(model, checkpoint_activations) -> None:
    model.transformer.checkpoint_activations = checkpoint_activations
    query, response = torch.randint(2, 37, (6, 5)), torch.randint(2, 37, (6, T))
    batch = Batch.of([{}] * 6, query, response, torch.zeros(6, T), EOS, PAD, "last_token")
    with Casts(model) as casts:
        update(model, batch)
    assert {casts.counts[name] for name in linear_weights(model)} == {1}
    shared = gradient(model)
    model.zero_grad()
    with Casts(model) as casts:
        for index in batch.reading_order().split(2):  # without the outer context
            mb = batch[index]
            with torch.autocast("cpu", torch.bfloat16):
                logprobs, _ = response_logprobs(model, mb.query_response, mb.real, mb.actions, 1.0)
            logprobs.sum().backward()
    assert {casts.counts[name] for name in linear_weights(model)} == {6 if checkpoint_activations else 3}
    assert torch.equal(shared, gradient(model))


def test_the_next_update_casts_the_new_weights(model) -> None:
    query, response = torch.randint(2, 37, (6, 5)), torch.randint(2, 37, (6, T))
    batch = Batch.of([{}] * 6, query, response, torch.zeros(6, T), EOS, PAD, "last_token")
    update(model, batch)
    before = gradient(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    update(model, batch)
    changed = gradient(model)
    torch.clear_autocast_cache()
    update(model, batch)
    assert torch.equal(changed, gradient(model)) and not torch.allclose(changed, before)


def test_an_interrupted_loop_leaves_no_old_casts(model) -> None:
    """In a notebook, the traceback of an interrupted cell keeps its generator, and with it the outer context."""
    query, response = torch.randint(2, 37, (6, 5)), torch.randint(2, 37, (6, T))
    batch = Batch.of([{}] * 6, query, response, torch.zeros(6, T), EOS, PAD, "last_token")

    def read() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return response_logprobs(model, batch.query_response, batch.real, batch.actions, 1.0)[0]

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)

    interrupted = batch.micro_batches(2)
    next(interrupted)
    read()  # its casts have no gradient
    update(model, batch)
    assert gradient(model).abs().sum() > 0
    step()
    after = read()
    step()
    update(model, batch)
    last = gradient(model)
    interrupted.close()
    update(model, batch)
    assert torch.equal(last, gradient(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(1.1)
    assert torch.allclose(after, read(), atol=1e-2)


def test_autocast_stays_on_or_off_in_the_loop(model) -> None:
    query, response = torch.randint(2, 37, (2, 5)), torch.randint(2, 37, (2, T))
    batch = Batch.of([{}] * 2, query, response, torch.zeros(2, T), EOS, PAD, "last_token")
    for enabled in (False, True):
        with torch.autocast("cpu", torch.float16, enabled):
            for _ in batch.micro_batches(1):
                assert torch.is_autocast_enabled("cpu") == enabled
                assert not enabled or torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_enabled("cpu")


def test_micro_batches_of_a_supervised_stage_share_the_casts(model) -> None:
    rows = [Demonstration([5, 6, 7], [], {}), Demonstration([10, 4, 8], [], {}), Demonstration([3, 9, 9], [], {})]

    def sums(model, rows):
        return (model(torch.tensor([row.query for row in rows])).float().square().sum(),)

    with Casts(model) as casts:
        backward(model, rows, sums, 7, 1, "bfloat16")
    assert {casts.counts[name] for name in linear_weights(model)} == {1}
    shared = gradient(model)
    with mock.patch("nanorlhf.training.supervised.kept_casts", nullcontext), Casts(model) as casts:
        backward(model, rows, sums, 7, 1, "bfloat16")
    assert {casts.counts[name] for name in linear_weights(model)} == {3}
    assert torch.equal(shared, gradient(model))
