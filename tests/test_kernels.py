import math

import pytest
import torch

from kernels import gae, linear_logprobs, logprobs_from_logits


def test_logprobs_and_entropy_of_a_distribution_typed_by_hand():
    probabilities = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    logprobs, entropy = logprobs_from_logits(probabilities.log() + 7.0, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_linear_logprobs_equal_float64(temperature):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(11, 8), torch.randn(23, 8), torch.randn(23)
    labels = torch.randint(0, 23, (11,))
    logprobs, entropy = linear_logprobs(hidden, weight, labels, bias, temperature)
    table = ((hidden.double() @ weight.double().T + bias.double()) / temperature).log_softmax(-1)
    assert torch.allclose(logprobs.double(), table[range(11), labels], atol=1e-5)
    assert torch.allclose(entropy.double(), -(table.exp() * table).sum(-1), atol=1e-5)


def test_a_forbidden_id_has_no_gradient_and_leaves_no_nan():
    hidden = torch.randn(3, 4, requires_grad=True)
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    logprobs, entropy = linear_logprobs(hidden, torch.randn(3, 4), torch.tensor([0, 2, 0]), bias)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and entropy.isfinite().all()


def test_bf16_logits_are_reduced_in_float32():
    logits = torch.randn(4, 5000).bfloat16()
    logprobs, _ = logprobs_from_logits(logits, torch.zeros(4, dtype=torch.long))
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), logits.double().log_softmax(-1)[:, 0], atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_a_double_loop(gamma, lam):
    torch.manual_seed(0)
    B, T = 3, 7
    rewards, values = torch.randn(B, T, dtype=torch.double), torch.randn(B, T, dtype=torch.double)
    advantages, returns = gae(rewards, values, gamma, lam)
    for b in range(B):
        for t in range(T):
            expected = 0.0
            for s in range(t, T):  # sum over s of (gamma * lam)^(s - t) * delta_s
                bootstrap = values[b, s + 1] if s + 1 < T else 0.0
                expected += (gamma * lam) ** (s - t) * (rewards[b, s] + gamma * bootstrap - values[b, s])
            assert advantages[b, t].item() == pytest.approx(float(expected), abs=1e-12)
    assert torch.equal(returns, advantages + values)


def test_gae_with_lambda_one_returns_the_rewards_to_go():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    _, returns = gae(rewards, torch.tensor([[9.0, -4.0, 5.0]]), 1.0, 1.0)
    assert returns.tolist() == [[6.0, 5.0, 3.0]]
