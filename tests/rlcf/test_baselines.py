"""RLCF's two baselines: their advantages in PPO's loss give the gradient of the losses in the paper."""

from itertools import product

import pytest
import torch

from nanorlhf.model import ScalarModel
from nanorlhf.ppo import policy_loss
from nanorlhf.rlcf.baselines import (
    bipolar_ramp_advantages,
    coderl_advantages,
    coderl_critic,
    coderl_critic_loss,
)
from tests.conftest import TINY

B, T, V = 4, 5, 7
RESPONSE = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 4, 0, 0], [2, 2, 2, 2, 2], [3, 0, 0, 0, 0]])
ACTIONS = torch.tensor([[t < n for t in range(T)] for n in (5, 3, 5, 1)])


def table(seed=0, dtype=torch.float64):
    """Logits of a policy that depend only on the position, (B, T, V)."""
    logits = 2 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return logits.requires_grad_()


def token_logprobs(logits):
    return logits.log_softmax(-1).gather(-1, RESPONSE[:, :, None]).squeeze(-1).masked_fill(~ACTIONS, 0.0)  # (B, T)


# ------------------------------------------------------------------------------------------------------------- 1. PPO
def test_the_gradient_of_one_ppo_step_is_that_of_minus_a_log_p():
    """On the rollout of the current policy the ratio is 1: nothing is clipped, whatever the advantages are."""
    logits = table()
    advantages = 5 * torch.randn(B, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses, is_clipped = policy_loss(token_logprobs(logits), token_logprobs(logits).detach(), advantages, ACTIONS, 0.2)
    (ours,) = torch.autograd.grad(losses.sum() / ACTIONS.sum(), logits)
    plain = -(advantages * token_logprobs(logits)).masked_fill(~ACTIONS, 0.0).sum() / ACTIONS.sum()
    (expected,) = torch.autograd.grad(plain, logits)
    assert torch.allclose(ours, expected, atol=1e-12) and ours.abs().max() > 0.1 and not is_clipped.any()


# ------------------------------------------------------------------------------------------------------ 2. BipolarRamp
def test_the_bipolar_gradient_is_that_of_its_loss_with_the_sign_fixed():
    """[RLCF eq 3] log p of the token at fault goes down, log p of the written program's tokens up."""
    error_index = torch.tensor([2, 0, T, 0])  # the third compiles
    logits, written_logits = table(), table(seed=5)
    advantages = bipolar_ramp_advantages(token_logprobs(logits).detach(), error_index)
    losses, _ = policy_loss(token_logprobs(logits), token_logprobs(logits).detach(), advantages, ACTIONS, 0.2)
    total = losses.sum() / B - token_logprobs(written_logits).sum() / B
    ours = torch.autograd.grad(total, (logits, written_logits))

    expected = 0.0
    for b in range(B):
        for t in range(T):
            if t == error_index[b]:
                expected = expected + logits[b, t].log_softmax(-1)[RESPONSE[b, t]]
            if ACTIONS[b, t]:
                expected = expected - written_logits[b, t].log_softmax(-1)[RESPONSE[b, t]]
    for one, other in zip(ours, torch.autograd.grad(expected / B, (logits, written_logits)), strict=True):
        assert torch.allclose(one, other, atol=1e-12) and one.abs().max() > 0.01
    (grad, _) = ours
    touched = {(b, t) for b in range(B) for t in range(T) if grad[b, t].any()}
    assert touched == {(0, 2), (1, 0), (3, 0)}
    assert all(grad[b, t, RESPONSE[b, t]] > 0 for b, t in touched)  # descent lowers this logit


def test_the_bipolar_advantages_of_a_worked_example():
    logprobs = torch.tensor([[-1.0, -9.9, -0.1], [-1.0, -10.1, -0.1], [-1.0, -10.0, 0.0], [-1.0, -50.0, -0.1]])
    result = bipolar_ramp_advantages(logprobs, torch.tensor([1, 1, 1, 3]))
    assert result.tolist() == [[0, -1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]  # from -10 nats on it is unlikely enough
    result = bipolar_ramp_advantages(logprobs, torch.tensor([1, 1, 2, 0]), floor=-20.0)
    assert result.tolist() == [[0, -1, 0], [0, -1, 0], [0, 0, -1], [-1, 0, 0]]


def test_the_floor_stops_the_fall_of_a_token():
    """Gradient descent on only this loss: without the floor, the log-probability would decrease forever."""
    logits = torch.zeros(1, 1, V, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    lowest = 0.0
    for _ in range(300):
        logprobs = logits.log_softmax(-1)[:, :, 3]
        lowest = min(lowest, logprobs.item())
        advantages = bipolar_ramp_advantages(logprobs.detach(), torch.tensor([0]))
        loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones(1, 1, dtype=torch.bool), 0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert -16 < lowest < -10  # one step may go beyond


# ----------------------------------------------------------------------------------------------------------- 3. CodeRL
def test_the_critic_is_a_max_pool_and_a_linear_layer_token_by_token():
    torch.manual_seed(0)
    model = ScalarModel(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.reward_bias.fill_(7.0)  # a reward's affair
    query = torch.tensor([[99, 5, 6], [7, 8, 9], [99, 99, 4], [1, 2, 3]])
    mask = torch.cat((query != 99, ACTIONS), dim=1)
    whole, tokens = coderl_critic(model, torch.cat((query, RESPONSE.masked_fill(~ACTIONS, 99)), dim=1), mask, ACTIONS)
    assert whole.shape == (B,) and tokens.shape == (B, T)
    weight, bias = model.score.weight[0], model.score.bias[0]
    for b in range(B):
        q, r = query[b][query[b] != 99].tolist(), RESPONSE[b][ACTIONS[b]].tolist()
        hidden = model.transformer(torch.tensor([q + r]))[0, len(q) :]  # (n, C) the state with each token in it
        pooled = [max(hidden[t, c].item() for t in range(len(r))) for c in range(TINY.d_model)]
        expected = sum(w.item() * x for w, x in zip(weight, pooled, strict=True)) + bias.item()
        assert whole[b].item() == pytest.approx(expected, abs=1e-4)
        assert torch.allclose(tokens[b, : len(r)], hidden @ weight + bias, atol=1e-4)


def test_tokens_after_the_end_do_not_reach_the_critic():
    torch.manual_seed(0)
    model = ScalarModel(TINY)
    query = torch.ones(B, 2, dtype=torch.long)
    mask = torch.cat((query > 0, ACTIONS), dim=1)
    plain = torch.cat((query, RESPONSE), dim=1)
    other = torch.cat((query, RESPONSE.masked_fill(~ACTIONS, 30)), dim=1)
    whole, tokens = coderl_critic(model, plain, mask, ACTIONS)
    its_whole, its_tokens = coderl_critic(model, other, mask, ACTIONS)
    assert torch.equal(whole, its_whole) and torch.equal(tokens[ACTIONS], its_tokens[ACTIONS])


def test_the_critic_learns_by_the_cross_entropy_of_whether_it_compiles():
    logits = torch.tensor([2.0, -1.0, 0.5, -3.0], requires_grad=True)
    passes = torch.tensor([True, True, False, False])
    loss = coderl_critic_loss(logits, passes)
    probabilities = 1 / (1 + (-logits.detach().double()).exp())
    expected = -sum((p if ok else 1 - p).log() for p, ok in zip(probabilities, passes, strict=True))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    assert torch.allclose(logits.grad.double(), probabilities - passes.double(), atol=1e-6)


def test_coderl_advantages_for_all_outcomes():
    """(r(y') - r(greedy)) times how sure the critic is, at each token, of how it turned out."""
    cases = list(product([True, False], repeat=2))  # y', the greedy response
    logits = torch.tensor([[0.0, 3.0, -3.0]]).repeat(4, 1).double()
    actions = torch.tensor([[True, True, True]] * 3 + [[True, True, False]])
    advantages = coderl_advantages(
        logits, torch.tensor([one for one, _ in cases]), torch.tensor([other for _, other in cases]), actions
    )
    s = (1 / (1 + torch.tensor(3.0).double().exp())).item()
    expected = [[0, 0, 0], [2 * 0.5, 2 * (1 - s), 2 * s], [-2 * 0.5, -2 * s, -2 * (1 - s)], [0, 0, 0]]
    assert torch.allclose(advantages, torch.tensor(expected).double(), atol=1e-9)
    worse = coderl_advantages(logits, torch.tensor([False] * 4), torch.tensor([True] * 4), actions)
    assert worse[3].tolist() == pytest.approx([-1.0, -2 * s, 0.0])  # nothing after the end


def test_an_extreme_critic_gives_finite_advantages():
    logits = torch.tensor([[1e4, -1e4]]).repeat(2, 1)
    advantages = coderl_advantages(
        logits, torch.tensor([True, False]), torch.tensor([False, True]), torch.ones(2, 2, dtype=torch.bool)
    )
    assert advantages.tolist() == [[2.0, 0.0], [0.0, -2.0]]
