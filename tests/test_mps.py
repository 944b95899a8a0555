"""Training on a simulated GPU of Apple's, which rejects float64; untested on a Mac."""

import copy
from pathlib import Path

import pytest
import torch

from kernels import gae
from kernels.processor import faster_dtype
from nanorlhf.cli import with_dtype
from nanorlhf.generate import draw, for_sampling, generate
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad
from nanorlhf.ppo import policy_loss, value_loss, whiten
from nanorlhf.training.settings import RunArgs
from tests.conftest import TINY
from tests.helpers.pretend_gpu import PretendMPS
from tests.test_generate import EOS, PAD, QUERIES

T = 12


def models() -> tuple[GPT, ScalarModel]:
    torch.manual_seed(0)
    return GPT(TINY), ScalarModel(TINY)


def test_the_simulated_gpu_rejects_float64() -> None:
    with PretendMPS() as gpu:
        x = torch.ones(2, device=gpu.device)
        assert x.device.type == "mps" and not x.is_cuda and not x.is_cpu
        for refused in (lambda: x.double(), lambda: x.cumsum(0, dtype=torch.float64), lambda: x.to(torch.float64)):
            with pytest.raises(TypeError, match="no float64"):
                refused()


def sampled(policy: GPT, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    uniforms = torch.rand((len(QUERIES), T), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler = for_sampling(policy, "same")
    return generate(sampler, query, query != PAD, T, eos_id=EOS, pad_id=PAD, uniforms=uniforms, temperature=0.7)


def test_responses_are_the_same_as_on_a_cpu() -> None:
    policy, _ = models()
    query = left_pad(QUERIES, PAD)
    response, logprobs = sampled(copy.deepcopy(policy), query)
    with PretendMPS() as gpu:
        on_gpu = sampled(gpu.move(policy), query.to(gpu.device))
        assert torch.equal(on_gpu[0].cpu(), response)
        torch.testing.assert_close(on_gpu[1].cpu(), logprobs)


def test_float32_draws_the_tokens_of_float64() -> None:
    """Over a vocabulary of 50,304 the sum in float32 chooses another token only near a boundary."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn((64, 50304), generator=generator).mul(3).softmax(-1)
    uniforms = torch.rand((64, 1), generator=generator, dtype=torch.float64)
    expected = draw(probabilities, uniforms)
    with PretendMPS() as gpu:
        ids = draw(probabilities.to(gpu.device), uniforms.float().to(gpu.device)).cpu()
    cumulative = probabilities.double().cumsum(-1)
    bounds = cumulative.gather(1, torch.minimum(ids, expected))  # the boundary between two neighbours
    assert ((ids == expected) | ((bounds - uniforms * cumulative[:, -1:]).abs() < 1e-5)).all()
    assert (ids == expected).float().mean() > 0.9


def update(policy: GPT, value_model: ScalarModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Take a PPO step with AdamW; return the loss, the advantages and the new weights of the LM head."""
    parameters = [weight.requires_grad_() for weight in (*policy.parameters(), *value_model.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)
    mask = torch.ones(ids[:, 1:].shape, dtype=torch.bool, device=ids.device)
    logprobs = policy.lm_head(policy(ids))[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    values = value_model(ids)[:, 1:]
    rewards = (ids[:, 1:] % 5).float() / 5
    advantages, returns = gae(rewards, values.detach(), 0.99, 0.95, mask)
    advantages = whiten(advantages, mask)
    loss = policy_loss(logprobs, logprobs.detach() - 0.1, advantages, mask, 0.2)[0].mean()
    loss = loss + 0.1 * value_loss(values, values.detach() + 0.1, returns, mask, 0.2)[0].mean()
    loss.backward()
    optimizer.step()
    return [loss.detach(), advantages, policy.lm_head.weight.detach()]


def test_a_ppo_step_is_the_same_as_on_a_cpu() -> None:
    policy, value_model = models()
    ids = torch.randint(3, TINY.vocab_size, (4, 10), generator=torch.Generator().manual_seed(2))
    expected = update(copy.deepcopy(policy), copy.deepcopy(value_model), ids)
    with PretendMPS() as gpu:
        results = [x.cpu() for x in update(gpu.move(policy), gpu.move(value_model), ids.to(gpu.device))]
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference)


def test_auto_chooses_float32(capsys) -> None:
    assert faster_dtype("mps")[0] == "float32"
    settings = {"data": Path("data"), "out": Path("out"), "batch_size": 1, "micro_batch_size": 1}
    assert with_dtype(RunArgs(**settings, device="mps", dtype="auto")).dtype == "float32"
    assert "--dtype auto: float32, as only float32 works on mps" in capsys.readouterr().out
