"""Under autocast, weights are cast once per rollout and optimizer step, not once per micro-batch; no bit changes."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.linear import cast, kept_casts
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import scalar_from_gpt
from nanorlhf.dataset import Demonstration
from nanorlhf.logprobs import read_logprobs, read_values, response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import reference, tune
from nanorlhf.training.supervised import backward, evaluate
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


def linear_weights(model: GPT | ScalarModel) -> set[str]:
    """Names of the parameters that a matmul multiplies with: the blocks' and the LM head's. LoRA's `ups` are scaled."""
    weights = {name for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2}
    head = {"lm_head.weight"} if isinstance(model, GPT) else set()
    return head | {name for name in weights if ".ups." not in name}


def update(model: GPT, batch: Batch) -> None:
    """The update of train_ppo.py, with the log-probabilities as loss."""
    model.zero_grad()
    for mb in batch.micro_batches(2):
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = response_logprobs(model, mb.query_response, mb.real, mb.actions, 1.0)
        logprobs.sum().backward()


def rollout() -> Batch:
    query, response = torch.randint(2, 37, (6, 5)), torch.randint(2, 37, (6, T))
    return Batch.of([{}] * 6, query, response, torch.zeros(6, T), EOS, PAD, "last_token")


@pytest.mark.parametrize("how", ["full", "lora"])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_micro_batches_of_a_rollout_share_the_casts(model, checkpoint_activations, how) -> None:
    """Also of the weights that LoRA freezes."""
    tune(model, how, rank=2)
    model.transformer.checkpoint_activations = checkpoint_activations
    batch = rollout()
    with Casts(model) as casts:
        update(model, batch)
    assert {casts.counts[name] for name in linear_weights(model)} == {1}
    shared = gradient(model)
    model.zero_grad()
    with Casts(model) as casts:
        for index in batch.reading_order().split(2):  # without `kept_casts`
            mb = batch[index]
            with torch.autocast("cpu", torch.bfloat16):
                logprobs, _ = response_logprobs(model, mb.query_response, mb.real, mb.actions, 1.0)
            logprobs.sum().backward()
    blocks = linear_weights(model) - {"lm_head.weight"}
    assert {casts.counts[name] for name in blocks} in ({3}, {6}, {3, 6})
    assert torch.equal(shared, gradient(model))


@pytest.mark.parametrize("how", ["full", "lora"])
def test_reading_a_rollout_casts_each_weight_once(model, how) -> None:
    """Three micro-batches. LoRA's reference shares the weights of the policy."""
    tune(model, how, rank=2)
    ref_policy, value_model, batch = reference(model), scalar_from_gpt(GPT(TINY)), rollout()
    expected = read_logprobs(model, ref_policy, batch, 1.0, 2)
    models = (model, ref_policy, value_model)
    with (
        torch.autocast("cpu", torch.bfloat16),
        Casts(model) as one,
        Casts(ref_policy) as two,
        Casts(value_model) as three,
    ):
        read = read_logprobs(model, ref_policy, batch, 1.0, 2)
        read_values(value_model, batch, 2)
    for casts, read_model in zip((one, two, three), models, strict=True):
        assert {casts.counts[name] for name in linear_weights(read_model)} == {1}
    assert torch.allclose(read[0], expected[0], atol=0.05) and not torch.equal(read[0], expected[0])


def test_a_cast_is_kept_while_the_parameter_has_the_same_value() -> None:
    weight, wide = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4).double())
    with torch.autocast("cpu", torch.bfloat16), kept_casts():
        (first,), (again,), (computed,) = cast(weight), cast(weight), cast(weight * 1)
        assert first is again and first.requires_grad and first is not computed
        with torch.no_grad():
            (frozen,) = cast(weight)
            assert not frozen.requires_grad and torch.equal(frozen, first)
            weight.mul_(3)
        (changed,) = cast(weight)
        assert torch.equal(changed, weight.bfloat16()) and not torch.equal(changed, first)
        with torch.autocast("cpu", torch.float16):
            assert cast(weight)[0].dtype == torch.float16
        with torch.autocast("cpu", enabled=False):
            assert cast(weight)[0] is weight and cast(wide)[0] is wide
        with kept_casts():  # of a run that was started after an interrupted one
            assert cast(weight)[0] is not changed
    with torch.autocast("cpu", torch.bfloat16):
        assert cast(weight)[0] is not cast(weight)[0]


def test_the_next_update_casts_the_new_weights(model) -> None:
    batch = rollout()
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
    """In a notebook, the traceback of an interrupted cell keeps its generator, and with it the context."""
    batch = rollout()

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


def test_micro_batches_of_a_supervised_stage_share_the_casts(model) -> None:
    rows = [Demonstration([5, 6, 7], [], {}), Demonstration([10, 4, 8], [], {}), Demonstration([3, 9, 9], [], {})]

    def sums(model, rows):
        return (model(torch.tensor([row.query for row in rows])).float().square().sum(),)

    with Casts(model) as casts:
        backward(model, rows, sums, 7, 1, "bfloat16")
    blocks = linear_weights(model) - {"lm_head.weight"}
    assert {casts.counts[name] for name in blocks} == {1}
    shared = gradient(model)
    with mock.patch("nanorlhf.training.supervised.kept_casts", nullcontext), Casts(model) as casts:
        backward(model, rows, sums, 7, 1, "bfloat16")
    assert {casts.counts[name] for name in blocks} == {3}
    with Casts(model) as casts:
        evaluate(model, rows, sums, 1, 1, "bfloat16")
    assert {casts.counts[name] for name in blocks} == {1}
    assert torch.equal(shared, gradient(model))
