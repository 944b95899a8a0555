"""The policy gradient in a world of seven responses: by enumeration, by autograd and from samples."""

import math

import pytest
import torch

from nanorlhf.doctor.seven import RESPONSES, SCORES, TEXTS, probabilities, reinforce
from nanorlhf.ppo import policy_loss

LOGITS = torch.tensor([0.4, -0.3, 1.1], dtype=torch.float64)


def test_the_seven_probabilities_by_hand():
    """EOS has probability 1/2, x and y have 1/4 each."""
    logits = torch.tensor([math.log(2.0), 0.0, 0.0], dtype=torch.float64)
    expected = [1 / 2, 1 / 8, 1 / 8, 1 / 16, 1 / 16, 1 / 16, 1 / 16]
    assert probabilities(logits).tolist() == pytest.approx(expected)
    assert [len(tokens) for tokens in RESPONSES] == [1] + [2] * 6
    assert [text for text in TEXTS] == ["".join(" xy"[i] for i in tokens if i) for tokens in RESPONSES]


def test_the_probabilities_sum_to_1_and_have_gradients():
    logits = LOGITS.clone().requires_grad_()
    total = probabilities(logits).sum()
    assert total.item() == pytest.approx(1)
    assert torch.autograd.grad(probabilities(logits)[0], logits)[0].abs().min() > 0.01
    assert torch.autograd.grad(total, logits)[0].abs().max() < 1e-12


@pytest.mark.parametrize("baseline", [0.0, 0.4, -3.0])
def test_reinforce_is_unbiased_with_any_baseline(baseline):
    """The mean over the policy's samples is the gradient of the expected score, which autograd computes."""
    logits = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(probabilities(logits) @ SCORES, logits)
    torch.testing.assert_close(probabilities(LOGITS) @ reinforce(LOGITS, baseline), exact)


def test_an_estimate_is_score_minus_baseline_times_the_gradient_of_the_log_probability():
    logits = LOGITS.clone().requires_grad_()
    for i in range(7):
        (slope,) = torch.autograd.grad(probabilities(logits)[i].log(), logits)
        torch.testing.assert_close(reinforce(LOGITS, 0.25)[i], (SCORES[i] - 0.25) * slope)


def test_the_first_step_of_ppo_on_a_sample_has_minus_this_gradient():
    """Its loss is a sum over the tokens of a response, all with the advantage score - baseline."""
    for i, tokens in enumerate(RESPONSES):
        logits = LOGITS.clone().requires_grad_()
        logprobs = logits.log_softmax(0)[tokens][None]  # (1, T)
        advantages = (SCORES[i] - 0.25).expand(1, len(tokens))
        actions = torch.ones(1, len(tokens), dtype=torch.bool)
        losses, _ = policy_loss(logprobs, logprobs.detach(), advantages, actions, 0.2)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        torch.testing.assert_close(-gradient, reinforce(LOGITS, 0.25)[i])


def test_the_mean_of_ten_thousand_estimates_is_close_and_a_baseline_brings_it_closer():
    generator = torch.Generator().manual_seed(0)
    samples = torch.multinomial(probabilities(LOGITS), 10_000, replacement=True, generator=generator)
    exact = probabilities(LOGITS) @ reinforce(LOGITS)
    spreads = []
    for baseline in (0.0, (probabilities(LOGITS) @ SCORES).item()):
        estimates = reinforce(LOGITS, baseline)[samples]  # (10000, 3)
        errors = estimates.std(0) / 100
        assert ((estimates.mean(0) - exact).abs() < 4 * errors).all()
        spreads.append(errors.norm().item())
    assert spreads[1] < spreads[0]
