"""PPO's formulas against brute force, float64 and worked examples; masked positions are NaN."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import k1, k3
from nanorlhf.ppo import (
    KLCoefficient,
    eos_masks,
    importance_weights,
    masked_mean,
    policy_loss,
    response_sum,
    value_loss,
    whiten,
)

E, PAD = 9, 0
NAN = float("nan")


def test_masks_of_the_example_in_the_docstring():
    response = torch.tensor([[1, 2, E, 4, 5, 6]])
    eos_index, actions, states = eos_masks(response, E, PAD)
    assert eos_index.tolist() == [2]
    assert actions.int().tolist() == [[1, 1, 1, 0, 0, 0]]
    assert states.int().tolist() == [[1, 1, 1, 1, 0, 0]]


def test_a_row_without_eos_ends_at_its_last_token_and_early_padding_is_masked():
    response = torch.tensor([[1, 2, 3, 4], [1, 2, PAD, PAD], [1, 2, 3, E], [E, PAD, PAD, PAD]])
    eos_index, actions, _ = eos_masks(response, E, PAD)
    assert eos_index.tolist() == [3, 1, 3, 0]
    assert actions.sum(1).tolist() == [4, 2, 4, 1]


def test_a_row_of_only_padding_ends_at_its_first_position():
    eos_index, actions, states = eos_masks(torch.tensor([[PAD, PAD, PAD]]), E, PAD)
    assert eos_index.tolist() == [0]
    assert actions.int().tolist() == [[1, 0, 0]] and states.int().tolist() == [[1, 1, 0]]


@given(st.lists(st.lists(st.sampled_from([1, 2, E]), min_size=5, max_size=5), min_size=1, max_size=5))
def test_masks_equal_a_loop_over_each_row(rows):
    eos_index, actions, states = eos_masks(torch.tensor(rows), E, PAD)
    for b, row in enumerate(rows):
        end = row.index(E) if E in row else 4
        assert eos_index[b] == end
        assert actions[b].tolist() == [t <= end for t in range(5)]
        assert states[b].tolist() == [t <= end + 1 for t in range(5)]


def test_whitening_equals_float64_statistics_of_counted_positions():
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6) * 3 + 2, torch.rand(4, 6) > 0.4
    kept = x.double()[mask]
    expected = (kept - kept.mean()) / (kept.var(unbiased=False) + 1e-8).sqrt()
    poisoned = torch.where(mask, x, NAN)
    assert torch.allclose(whiten(poisoned, mask)[mask].double(), expected, atol=1e-5)
    unshifted = whiten(poisoned, mask, shift_mean=False)
    assert torch.allclose(unshifted[mask].double(), expected + kept.mean(), atol=1e-5)
    assert (unshifted[~mask] == 0).all()


def test_equal_numbers_are_whitened_to_zero():
    x, mask = torch.full((2, 3), 7.0), torch.tensor([[True, True, False]] * 2)
    assert whiten(x, mask).tolist() == [[0.0, 0.0, 0.0]] * 2
    assert whiten(x, mask, shift_mean=False).tolist() == [[7.0, 7.0, 0.0]] * 2


def test_masked_mean_ignores_nan():
    assert masked_mean(torch.tensor([1.0, NAN, 5.0]), torch.tensor([True, False, True])).item() == 3.0


def test_policy_loss_of_three_tokens_by_hand():
    new, old = torch.tensor([[0.0, math.log(2), math.log(0.5)]]), torch.zeros(1, 3)
    advantages, actions = torch.tensor([[1.0, 1.0, -2.0]]), torch.ones(1, 3).bool()
    losses, is_clipped = policy_loss(new, old, advantages, actions, 0.2)
    # ratio 1: -1;  ratio 2, A > 0: clipped to -1.2;  ratio 0.5, A < 0: max(2 * 0.5, 2 * 0.8) = 1.6
    assert losses[0].tolist() == pytest.approx([-1, -1.2, 1.6])
    assert is_clipped.tolist() == [[False, True, True]]


def test_at_ratio_1_the_policy_gradient_is_reinforce_with_a_baseline():
    """Over every token of a vocabulary of five: -A * grad log pi each, and minus the gradient of E[r] on average."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    logprobs, rewards = logits.log_softmax(0)[None], torch.randn(1, 5, dtype=torch.float64)
    probabilities = logprobs.detach().exp()
    advantages = rewards - (probabilities * rewards).sum()
    losses, is_clipped = policy_loss(logprobs, logprobs.detach(), advantages, torch.ones(1, 5).bool(), 0.2)
    assert not is_clipped.any()
    each = torch.stack([torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses[0]])
    scores = torch.eye(5, dtype=torch.float64) - probabilities  # grad log pi of each token, (token, logit)
    torch.testing.assert_close(each, -advantages.T * scores)
    exact = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)[0]
    torch.testing.assert_close((probabilities @ each)[0], -exact)


def test_policy_loss_is_0_where_there_is_no_action():
    """Ratios 2, 0.5 and 1 count; the fourth would be clipped, but isn't an action and is NaN."""
    old = torch.tensor([[-3.0, -1.0], [-2.0, NAN]])
    new = (old + torch.tensor([[math.log(2), math.log(0.5)], [0.0, NAN]])).requires_grad_()
    advantages, actions = torch.tensor([[1.0, 2.0], [-3.0, NAN]]), torch.tensor([[True, True], [True, False]])
    losses, is_clipped = policy_loss(new, old, advantages, actions, 0.2)
    # A > 0: min(2, 1.2) and 2 * min(0.5, 0.8); A < 0, ratio 1: 3
    assert losses.flatten().tolist() == pytest.approx([-1.2, -1.0, 3.0, 0.0])
    assert is_clipped.int().tolist() == [[1, 0], [0, 0]]
    (losses.sum() / 8).backward()
    assert new.grad.flatten().tolist() == pytest.approx([0.0, -0.125, 0.375, 0.0])


def test_a_ratio_far_from_one_is_clipped_and_never_dropped():
    """Some trainers zero a whole batch whose mean ratio is above 10. Here it counts as in the formula."""
    new = torch.tensor([[5.0, 5.0]], requires_grad=True)
    losses, is_clipped = policy_loss(new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.ones(1, 2).bool(), 0.2)
    losses.sum().backward()
    assert losses[0].tolist() == pytest.approx([-1.2, math.exp(5)]) and is_clipped.tolist() == [[True, False]]
    assert new.grad[0].tolist() == [0.0, pytest.approx(math.exp(5))]


@pytest.mark.parametrize(
    ("advantage", "loss", "slope"), [(0.0, 0.0, 0.0), (2.0, -2.4, 0.0), (-0.5, math.inf, math.inf)]
)
def test_an_overflowing_ratio_is_clipped_like_any_large_one(advantage, loss, slope):
    new = torch.tensor([[90.0]], requires_grad=True)
    losses, is_clipped = policy_loss(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool), 0.2
    )
    losses.sum().backward()
    assert (losses.item(), new.grad.item()) == (pytest.approx(loss), slope)
    assert is_clipped.item() == (advantage > 0)


def test_value_loss_by_hand_with_and_without_clipping():
    new, old, returns = torch.tensor([[1.0, 0.1]]), torch.zeros(1, 2), torch.tensor([[1.0, 1.0]])
    states = torch.ones(1, 2).bool()
    losses, is_clipped = value_loss(new, old, returns, states, 0.2)
    assert losses[0].tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 0.9**2])  # the first is clipped to 0.2
    assert is_clipped.tolist() == [[True, False]]
    losses, is_clipped = value_loss(new, old, returns, states, None)
    assert losses[0].tolist() == pytest.approx([0.0, 0.5 * 0.9**2]) and not is_clipped.any()


def test_values_are_clipped_on_both_sides_of_the_old_ones():
    """Old values 3 and 3 clip to 2.8 and 3.2; the third is in range, with equal errors; the last isn't a state."""
    new, old = torch.tensor([[1.0, 5.0, 2.1, NAN]]), torch.tensor([[3.0, 3.0, 2.0, NAN]])
    returns, states = torch.tensor([[1.5, 4.0, 1.0, NAN]]), torch.tensor([[True, True, True, False]])
    losses, is_clipped = value_loss(new, old, returns, states, 0.2)
    assert losses[0].tolist() == pytest.approx([0.5 * 1.3**2, 0.5 * 1.0**2, 0.5 * 1.1**2, 0.0])
    assert is_clipped.tolist() == [[True, False, False, False]]


def test_nan_after_the_end_reaches_neither_loss_nor_gradient():
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False]])
    clean = [torch.randn(1, 3) for _ in range(3)]
    poisoned = [torch.where(mask, x, NAN) for x in clean]
    for loss_function, clip in ((policy_loss, 0.2), (value_loss, 0.2), (value_loss, None)):
        outcomes = []
        for new, a, b in (clean, poisoned):
            new = new.clone().requires_grad_(True)
            losses, is_clipped = loss_function(new, a, b, mask, clip)
            losses.sum().backward()
            outcomes.append((losses.tolist(), is_clipped.tolist(), new.grad.tolist()))
        assert outcomes[0] == outcomes[1]


def test_splitting_a_batch_into_micro_batches_does_not_change_the_gradient():
    torch.manual_seed(0)
    B, T = 4, 5
    mask = torch.arange(T) <= torch.tensor([0, 4, 2, 3])[:, None]
    new, old, advantages = torch.randn(B, T, dtype=torch.double), torch.randn(B, T), torch.randn(B, T)
    num_tokens = mask.sum()
    gradients = []
    for size in (1, 2, 3, B):
        leaf = new.clone().requires_grad_(True)
        for start in range(0, B, size):
            rows = slice(start, start + size)
            losses, _ = policy_loss(leaf[rows], old[rows], advantages[rows], mask[rows], 0.2)
            values, _ = value_loss(leaf[rows], old[rows], advantages[rows], mask[rows], 0.2)
            ((losses + values).sum() / num_tokens).backward()
        gradients.append(leaf.grad)
    for gradient in gradients[:-1]:
        assert torch.allclose(gradient, gradients[-1], atol=1e-14)


def test_adaptive_kl_follows_the_formula_and_clips_the_error():
    control = KLCoefficient(0.2, target=6.0)
    control.update(6.6, 256)
    assert control.value == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))
    control.update(600.0, 256)
    assert control.value == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000) * (1 + 0.2 * 256 / 10_000))
    control = KLCoefficient(0.2, target=6.0, horizon=1000)
    control.update(0.0, 100)
    assert control.value == pytest.approx(0.2 * (1 - 0.2 * 100 / 1000))
    control.update(5.4, 100)
    assert control.value == pytest.approx(0.2 * (1 - 0.2 * 100 / 1000) * (1 - 0.1 * 100 / 1000))
    fixed = KLCoefficient(0.05)
    fixed.update(100.0, 512)
    assert fixed.value == 0.05


def test_kl_estimators_have_the_right_expectation_over_a_vocabulary_of_five():
    """The exact averages of k1 and k3 over samples from p are KL(p, q), not KL(q, p)."""
    torch.manual_seed(0)
    p, q = torch.randn(5).double().log_softmax(0), torch.randn(5).double().log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    assert (p.exp() * k1(p, q)).sum().item() == pytest.approx(exact.item())
    assert (p.exp() * k3(p, q)).sum().item() == pytest.approx(exact.item())


# --------------------------------------------------------------------------------------------------- importance weights
COUNTS = torch.ones(1, 1, dtype=torch.bool)


def test_importance_weights_equal_float64_and_ignore_padding():
    generator = torch.Generator().manual_seed(0)
    logprobs, sampled = (-3 * torch.rand(4, 6, generator=generator) for _ in range(2))
    mask = torch.arange(6) <= torch.tensor([5, 0, 2, 3])[:, None]
    weights, clipped = importance_weights(logprobs.where(mask, NAN), sampled.where(mask, 1e6), mask, 1.5)
    ratio = (logprobs.double() - sampled.double()).exp()
    assert torch.allclose(weights.double(), ratio.clamp(max=1.5).where(mask, 0.0), rtol=1e-6)
    assert clipped.item() == pytest.approx(((ratio > 1.5) & mask).sum().item() / mask.sum().item())
    assert 0 < clipped < 1
    equal, none = importance_weights(logprobs, logprobs, mask, 1.5)
    assert torch.equal(equal, mask.float()) and none == 0


def test_masked_weights_are_zero_out_of_bounds_and_equal_float64_within():
    generator = torch.Generator().manual_seed(0)
    logprobs, sampled = (-3 * torch.rand(4, 6, generator=generator) for _ in range(2))
    mask = torch.arange(6) <= torch.tensor([5, 0, 2, 3])[:, None]
    weights, outside = importance_weights(logprobs.where(mask, NAN), sampled.where(mask, 1e6), mask, 3.0, 0.5, True)
    expected, num_outside = torch.zeros(4, 6, dtype=torch.float64), 0
    for i, t in mask.nonzero().tolist():
        ratio = math.exp(logprobs[i, t].item() - sampled[i, t].item())
        expected[i, t] = ratio if 0.5 <= ratio <= 3 else 0.0
        num_outside += not 0.5 <= ratio <= 3
    assert torch.allclose(weights.double(), expected, rtol=1e-6)
    assert outside.item() == pytest.approx(num_outside / mask.sum().item()) and 0 < num_outside < mask.sum()
    infinite, outside = importance_weights(torch.zeros(1, 1), torch.full((1, 1), -200.0), COUNTS, 5.0, 0.5, True)
    assert infinite.tolist() == [[0.0]] and outside == 1


def test_a_weight_per_response_is_unbiased_where_weights_per_token_are_not():
    """Responses of two tokens: the second's distribution, and reward, depend on the first. All nine, in float64."""
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(4, 3, dtype=torch.float64, generator=generator).log_softmax(1) for _ in range(2)]
    rewards = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    policy, sampler = (
        torch.stack([torch.stack((table[3, a], table[a, b])) for a in range(3) for b in range(3)]) for table in tables
    )  # (9, 2) log-probabilities
    mask = torch.ones(9, 2, dtype=torch.bool)
    expected = (policy.sum(1).exp() * rewards.flatten()).sum()
    per_response, _ = importance_weights(response_sum(policy, mask), response_sum(sampler, mask), mask, torch.inf)
    per_token, _ = importance_weights(policy, sampler, mask, torch.inf)
    drawn = sampler.sum(1).exp() * rewards.flatten()
    assert torch.allclose((drawn[:, None] * per_response).sum(0), expected.expand(2), atol=1e-12)
    assert ((drawn[:, None] * per_token).sum(0) - expected).abs().min() > 0.01
    padded = torch.tensor([[True, False]] * 9)
    assert torch.equal(response_sum(policy.where(padded, NAN), padded)[:, 1], torch.zeros(9, dtype=torch.float64))


def loss_of_samples(theta, logits, sampler, rewards, clip):
    """Compute the expected clipped loss of one token drawn by the sampler; clip None: uncorrected.

    theta (V,) are added to the policy's logits; at 0 the ratio is 1.
    """
    old, new = logits.log_softmax(0), (logits + theta).log_softmax(0)
    weights = torch.ones(len(old), 1)
    if clip is not None:
        weights, _ = importance_weights(old[:, None], sampler.log()[:, None], COUNTS.expand(len(old), 1), clip)
    losses = [
        policy_loss(new[a].view(1, 1), old[a].view(1, 1), weights[a] * rewards[a].view(1, 1), COUNTS, 0.2)[0]
        for a in sampler.nonzero().flatten()
    ]
    return (sampler[sampler > 0] * torch.stack(losses).flatten()).sum()


@pytest.mark.parametrize("sampler_is", ["another", "cut"])
def test_untruncated_weights_make_the_gradient_unbiased_unless_the_sampler_lacks_a_token(sampler_is):
    """Over a vocabulary of five, in float64, it is minus the gradient of the policy's expected reward."""
    torch.manual_seed(0)
    logits, rewards = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    sampler = (logits + torch.randn(5, dtype=torch.float64)).softmax(0)
    if sampler_is == "cut":  # top-p: the last is never drawn
        sampler = logits.softmax(0) * (logits > logits.min())
        sampler = sampler / sampler.sum()

    def gradient(loss):
        theta = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(loss(theta), theta)[0]

    wanted = gradient(lambda theta: -((logits + theta).softmax(0) * rewards).sum())
    unbounded, truncated, uncorrected = (
        gradient(lambda theta, c=clip: loss_of_samples(theta, logits, sampler, rewards, c)) for clip in (1e9, 1.0, None)
    )
    if sampler_is == "another":
        assert torch.allclose(unbounded, wanted, atol=1e-12)
        assert not torch.allclose(truncated, wanted, atol=1e-3) and not torch.allclose(uncorrected, wanted, atol=1e-3)
    else:  # the difference is the missing token's term
        missing = int(logits.argmin())
        term = gradient(lambda theta: -(logits + theta).softmax(0)[missing] * rewards[missing])
        assert torch.allclose(unbounded + term, wanted, atol=1e-12) and term.abs().max() > 1e-3
