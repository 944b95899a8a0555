"""The arithmetic of PPO against brute force, float64 and examples by hand; masked positions hold NaN."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import gae
from nanorlhf.ppo import (
    AdaptiveKL,
    FixedKL,
    eos_masks,
    importance_weights,
    kl_penalised_rewards,
    masked_mean,
    policy_loss,
    value_loss,
    whiten,
)

E, PAD = 9, 0
NAN = float("nan")


def test_masks_of_the_example_in_the_docstring():
    response = torch.tensor([[1, 2, E, 4, 5, 6]])
    eos_index, padding_mask, padding_mask_p1 = eos_masks(response, E, PAD)
    assert eos_index.tolist() == [2]
    assert padding_mask.int().tolist() == [[0, 0, 0, 1, 1, 1]]
    assert padding_mask_p1.int().tolist() == [[0, 0, 0, 0, 1, 1]]


def test_a_row_without_eos_ends_at_its_last_token_and_early_padding_is_masked():
    response = torch.tensor([[1, 2, 3, 4], [1, 2, PAD, PAD], [1, 2, 3, E], [E, PAD, PAD, PAD]])
    eos_index, padding_mask, _ = eos_masks(response, E, PAD)
    assert eos_index.tolist() == [3, 1, 3, 0]
    assert padding_mask.sum(1).tolist() == [0, 2, 0, 3]


def test_a_row_of_padding_alone_ends_at_its_first_slot():
    eos_index, padding_mask, padding_mask_p1 = eos_masks(torch.tensor([[PAD, PAD, PAD]]), E, PAD)
    assert eos_index.tolist() == [0]
    assert padding_mask.int().tolist() == [[0, 1, 1]] and padding_mask_p1.int().tolist() == [[0, 0, 1]]


@given(st.lists(st.lists(st.sampled_from([1, 2, E]), min_size=5, max_size=5), min_size=1, max_size=5))
def test_masks_equal_a_loop_over_each_row(rows):
    eos_index, padding_mask, padding_mask_p1 = eos_masks(torch.tensor(rows), E, PAD)
    for b, row in enumerate(rows):
        end = row.index(E) if E in row else 4
        assert eos_index[b] == end
        assert padding_mask[b].tolist() == [t > end for t in range(5)]
        assert padding_mask_p1[b].tolist() == [t > end + 1 for t in range(5)]


def test_rewards_of_a_rollout_typed_by_hand():
    response = torch.tensor([[1, E, PAD, PAD], [1, 2, 3, E]])
    eos_index, _, _ = eos_masks(response, E, PAD)
    logprobs = torch.tensor([[-1.0, -2.0, NAN, NAN], [-1.0, -1.0, -1.0, -1.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, NAN, NAN], [-2.0, -2.0, -2.0, -2.0]])
    scores = torch.tensor([3.0, 5.0])
    rewards, kl = kl_penalised_rewards(logprobs, ref_logprobs, scores, eos_index, 0.1, "after_eos")
    assert torch.allclose(kl, torch.tensor([[0.5, -1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert torch.allclose(rewards, torch.tensor([[-0.05, 0.1, 3.0, 0.0], [-0.1, -0.1, -0.1, 4.9]]))
    rewards, _ = kl_penalised_rewards(logprobs, ref_logprobs, scores, eos_index, 0.1, "last_token")
    assert torch.allclose(rewards, torch.tensor([[-0.05, 3.1, 0.0, 0.0], [-0.1, -0.1, -0.1, 4.9]]))


@pytest.mark.parametrize("score_at", ["after_eos", "last_token"])
def test_rewards_sum_to_the_score_less_the_penalty(score_at):
    torch.manual_seed(0)
    response = torch.tensor([[1, E, PAD, PAD], [1, 2, 3, E], [1, 2, 3, 4], [E, PAD, PAD, PAD]])
    eos_index, padding_mask, _ = eos_masks(response, E, PAD)
    logprobs, ref_logprobs, scores = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    rewards, _ = kl_penalised_rewards(logprobs, ref_logprobs, scores, eos_index, 0.3, score_at)
    kl_by_hand = [(logprobs[b] - ref_logprobs[b])[: eos_index[b] + 1].sum() for b in range(4)]
    assert torch.allclose(rewards.sum(1), scores - 0.3 * torch.stack(kl_by_hand), atol=1e-6)


def test_both_score_placements_give_the_same_advantages_if_the_last_value_is_the_score():
    torch.manual_seed(0)
    response = torch.tensor([[1, 2, E, PAD, PAD]])
    eos_index, padding_mask, padding_mask_p1 = eos_masks(response, E, PAD)
    logprobs, ref_logprobs, scores, values = (
        torch.randn(1, 5),
        torch.randn(1, 5),
        torch.tensor([2.0]),
        torch.randn(1, 5),
    )
    values[0, 3] = 2.0  # V(the state that contains EOS) = score
    results = {}
    for score_at, state_mask in (("after_eos", padding_mask_p1), ("last_token", padding_mask)):
        rewards, _ = kl_penalised_rewards(logprobs, ref_logprobs, scores, eos_index, 0.1, score_at)
        advantages, _ = gae(rewards, torch.where(state_mask, 0.0, values), 1.0, 0.95)
        results[score_at] = advantages[:, :3]
    assert torch.allclose(results["after_eos"], results["last_token"], atol=1e-6)


def test_whitening_with_given_statistics_is_the_same() -> None:
    x, mask = torch.randn(3, 5), torch.arange(5) > torch.tensor([[4], [2], [0]])
    statistics = x[~mask].mean(), x[~mask].var(correction=0)
    assert torch.allclose(whiten(x, mask, statistics=statistics), whiten(x, mask), atol=1e-6)
    zeros, ones = torch.zeros(()), torch.ones(())
    assert torch.allclose(whiten(x, mask, statistics=(zeros, 3 * ones)), torch.where(mask, 0.0, x / 3**0.5))


def test_whitening_equals_float64_statistics_of_what_is_not_masked():
    torch.manual_seed(0)
    x, mask = torch.randn(4, 6) * 3 + 2, torch.rand(4, 6) < 0.4
    kept = x.double()[~mask]
    expected = (kept - kept.mean()) / (kept.var(unbiased=False) + 1e-8).sqrt()
    poisoned = torch.where(mask, NAN, x)
    assert torch.allclose(whiten(poisoned, mask)[~mask].double(), expected, atol=1e-5)
    unshifted = whiten(poisoned, mask, shift_mean=False)
    assert torch.allclose(unshifted[~mask].double(), expected + kept.mean(), atol=1e-5)
    assert (unshifted[mask] == 0).all()


def test_equal_numbers_are_whitened_to_zero():
    x, mask = torch.full((2, 3), 7.0), torch.tensor([[False, False, True]] * 2)
    assert whiten(x, mask).tolist() == [[0.0, 0.0, 0.0]] * 2
    assert whiten(x, mask, shift_mean=False).tolist() == [[7.0, 7.0, 0.0]] * 2


def test_masked_mean_ignores_nan():
    assert masked_mean(torch.tensor([1.0, NAN, 3.0]), torch.tensor([False, True, False])).item() == 2.0


def test_policy_loss_of_three_tokens_by_hand():
    new, old = torch.tensor([[0.0, math.log(2), math.log(0.5)]]), torch.zeros(1, 3)
    advantages, mask = torch.tensor([[1.0, 1.0, -2.0]]), torch.zeros(1, 3).bool()
    loss, clip_fraction = policy_loss(new, old, advantages, mask, 0.2)
    # ratio 1: -1;  ratio 2, A > 0: clipped to -1.2;  ratio 0.5, A < 0: max(2 * 0.5, 2 * 0.8) = 1.6
    assert loss.item() == pytest.approx((-1 - 1.2 + 1.6) / 3)
    assert clip_fraction.item() == pytest.approx(2 / 3)


def test_policy_loss_counts_unmasked_tokens_alone_and_divides_by_the_given_number():
    """Ratios 2, 0.5 and 1 count; the fourth would be clipped, but is masked and holds NaN."""
    old = torch.tensor([[-3.0, -1.0], [-2.0, NAN]])
    new = (old + torch.tensor([[math.log(2), math.log(0.5)], [0.0, NAN]])).requires_grad_()
    advantages, mask = torch.tensor([[1.0, 2.0], [-3.0, NAN]]), torch.tensor([[False, False], [False, True]])
    for num_tokens, divisor in ((None, 3), (torch.tensor(8), 8)):
        loss, clip_fraction = policy_loss(new, old, advantages, mask, 0.2, num_tokens)
        # A > 0: min(2, 1.2) and 2 * min(0.5, 0.8); A < 0, ratio 1: 3
        assert loss.item() == pytest.approx((-1.2 - 1.0 + 3.0) / divisor)
        assert clip_fraction.item() == pytest.approx(1 / divisor)
    loss.backward()
    assert new.grad.flatten().tolist() == pytest.approx([0.0, -0.125, 0.375, 0.0])


def test_a_ratio_far_from_one_is_clipped_and_never_dropped():
    """Some trainers zero a whole batch whose mean ratio is above 10. Here it counts as the formula says."""
    new = torch.tensor([[5.0, 5.0]], requires_grad=True)
    loss, clip_fraction = policy_loss(
        new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2).bool(), 0.2
    )
    loss.backward()
    assert loss.item() == pytest.approx((-1.2 + math.exp(5)) / 2) and clip_fraction.item() == 0.5
    assert new.grad[0].tolist() == [0.0, pytest.approx(math.exp(5) / 2)]


def test_value_loss_by_hand_with_and_without_clipping():
    new, old, returns = torch.tensor([[1.0, 0.1]]), torch.zeros(1, 2), torch.tensor([[1.0, 1.0]])
    mask = torch.zeros(1, 2).bool()
    loss, clip_fraction = value_loss(new, old, returns, mask, 0.2)
    assert loss.item() == pytest.approx(0.5 * (0.8**2 + 0.9**2) / 2)  # the first is clipped to 0.2
    assert clip_fraction.item() == 0.5
    loss, clip_fraction = value_loss(new, old, returns, mask, None)
    assert loss.item() == pytest.approx(0.5 * (0.0 + 0.9**2) / 2) and clip_fraction.item() == 0


def test_values_are_clipped_to_both_sides_of_the_old_ones():
    """Old 3 and 3, clipped to 2.8 and 3.2; the third is in its range, so its errors are equal; padding."""
    new, old = torch.tensor([[1.0, 5.0, 2.1, NAN]]), torch.tensor([[3.0, 3.0, 2.0, NAN]])
    returns, mask = torch.tensor([[1.5, 4.0, 1.0, NAN]]), torch.tensor([[False, False, False, True]])
    for num_tokens, divisor in ((None, 3), (torch.tensor(5), 5)):
        loss, clip_fraction = value_loss(new, old, returns, mask, 0.2, num_tokens)
        assert loss.item() == pytest.approx(0.5 * (1.3**2 + 1.0**2 + 1.1**2) / divisor)
        assert clip_fraction.item() == pytest.approx(1 / divisor)


def test_nan_after_the_end_reaches_neither_loss_nor_gradient():
    torch.manual_seed(0)
    mask = torch.tensor([[False, False, True]])
    clean = [torch.randn(1, 3) for _ in range(3)]
    poisoned = [torch.where(mask, NAN, x) for x in clean]
    for loss_of, clip in ((policy_loss, 0.2), (value_loss, 0.2), (value_loss, None)):
        outcomes = []
        for new, a, b in (clean, poisoned):
            new = new.clone().requires_grad_(True)
            loss, clip_fraction = loss_of(new, a, b, mask, clip)
            loss.backward()
            outcomes.append((loss.item(), clip_fraction.item(), new.grad.tolist()))
        assert outcomes[0] == outcomes[1]


def test_splitting_a_batch_into_micro_batches_does_not_change_the_gradient():
    torch.manual_seed(0)
    B, T = 4, 5
    mask = torch.arange(T) > torch.tensor([0, 4, 2, 3])[:, None]
    new, old, advantages = torch.randn(B, T, dtype=torch.double), torch.randn(B, T), torch.randn(B, T)
    num_tokens = (~mask).sum()
    gradients = []
    for size in (1, 2, 3, B):
        leaf = new.clone().requires_grad_(True)
        for start in range(0, B, size):
            rows = slice(start, start + size)
            loss, _ = policy_loss(leaf[rows], old[rows], advantages[rows], mask[rows], 0.2, num_tokens)
            value, _ = value_loss(leaf[rows], old[rows], advantages[rows], mask[rows], 0.2, num_tokens)
            (loss + value).backward()
        gradients.append(leaf.grad)
    for gradient in gradients[:-1]:
        assert torch.allclose(gradient, gradients[-1], atol=1e-14)


def test_adaptive_kl_follows_the_formula_and_clips_the_error():
    control = AdaptiveKL(0.2, target=6.0)
    control.update(6.6, 256)
    assert control.coefficient == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))
    control.update(600.0, 256)
    assert control.coefficient == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000) * (1 + 0.2 * 256 / 10_000))
    control = AdaptiveKL(0.2, target=6.0, horizon=1000)
    control.update(0.0, 100)
    assert control.coefficient == pytest.approx(0.2 * (1 - 0.2 * 100 / 1000))
    control.update(5.4, 100)
    assert control.coefficient == pytest.approx(0.2 * (1 - 0.2 * 100 / 1000) * (1 - 0.1 * 100 / 1000))
    fixed = FixedKL(0.05)
    fixed.update(100.0, 512)
    assert fixed.coefficient == 0.05


def test_kl_estimators_have_the_right_expectation_over_a_vocabulary_of_five():
    """k1 and k3 of samples from p, averaged exactly, are KL(p, q) and not KL(q, p)."""
    torch.manual_seed(0)
    p, q = torch.randn(5).double().log_softmax(0), torch.randn(5).double().log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    _, k1 = kl_penalised_rewards(p[:, None], q[:, None], torch.zeros(5), torch.zeros(5).long(), 1.0)
    assert (p.exp() * k1[:, 0]).sum().item() == pytest.approx(exact.item())
    assert (p.exp() * ((-k1[:, 0]).exp() - 1 + k1[:, 0])).sum().item() == pytest.approx(exact.item())


# --------------------------------------------------------------------------------------------------- importance weights
def test_importance_weights_equal_float64_and_padding_counts_nowhere():
    generator = torch.Generator().manual_seed(0)
    logprobs, sampled = (-3 * torch.rand(4, 6, generator=generator) for _ in range(2))
    mask = torch.arange(6) > torch.tensor([5, 0, 2, 3])[:, None]
    weights, clipped = importance_weights(logprobs.where(~mask, NAN), sampled.where(~mask, 1e6), mask, 1.5)
    ratio = (logprobs.double() - sampled.double()).exp()
    assert torch.allclose(weights.double(), ratio.clamp(max=1.5).where(~mask, 0.0), rtol=1e-6)
    assert clipped.item() == pytest.approx(((ratio > 1.5) & ~mask).sum().item() / (~mask).sum().item())
    assert 0 < clipped < 1
    equal, none = importance_weights(logprobs, logprobs, mask, 1.5)
    assert torch.equal(equal, (~mask).float()) and none == 0


def loss_of_samples(theta, logits, sampler, rewards, clip):
    """The clipped loss of one token that the sampler drew, in expectation over its draws; clip None: uncorrected.

    theta (V,) are added to the policy's logits; at 0 the ratio is 1.
    """
    old, new = logits.log_softmax(0), (logits + theta).log_softmax(0)
    weights = torch.ones(len(old), 1)
    if clip is not None:
        weights, _ = importance_weights(old[:, None], sampler.log()[:, None], NOT_MASKED.expand(len(old), 1), clip)
    losses = [
        policy_loss(new[a].view(1, 1), old[a].view(1, 1), weights[a] * rewards[a].view(1, 1), NOT_MASKED, 0.2)[0]
        for a in sampler.nonzero().flatten()
    ]
    return (sampler[sampler > 0] * torch.stack(losses)).sum()


NOT_MASKED = torch.zeros(1, 1, dtype=torch.bool)


@pytest.mark.parametrize("sampler_is", ["another", "cut"])
def test_untruncated_weights_make_the_gradient_unbiased_unless_the_sampler_lacks_a_token(sampler_is):
    """Over a vocabulary of five, in float64: minus the gradient of the expected reward under the policy itself."""
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
    else:  # what remains is the term of the token that is missing
        missing = int(logits.argmin())
        term = gradient(lambda theta: -(logits + theta).softmax(0)[missing] * rewards[missing])
        assert torch.allclose(unbounded + term, wanted, atol=1e-12) and term.abs().max() > 1e-3
