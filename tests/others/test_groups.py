"""GRPO and its variants, compared with TRL, verl and OpenRLHF. Table: docs/how-we-compare.md."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import k3
from nanorlhf import grpo
from nanorlhf.grpo import mean_of_means, mean_of_sums, mean_over_tokens
from nanorlhf.ppo import ClipRange, cispo_loss, gspo_loss, importance_weights, policy_loss
from tests.others.common import (
    ACTIONS,
    ADVANTAGES,
    OLD,
    REF,
    SCORES,
    K,
    alone,
    difference,
    load,
    loss_difference,
    need,
    random,
)

B, T = ACTIONS.shape
NONE = torch.zeros_like(OLD)
QUERIES = np.array([0, 0, 0, 1, 1, 1])
PER_TOKEN = ADVANTAGES[:, None].expand(B, T)
BATCH = {  # with TRL's names
    "prompt_ids": torch.zeros(B, 1),
    "prompt_mask": torch.ones(B, 1),
    "completion_ids": torch.zeros(B, T),
    "completion_mask": ACTIONS.long(),
    "advantages": ADVANTAGES,
}


def ours(mean_loss, loss_function=policy_loss, clip_range: ClipRange = 0.2, beta: float = 0.0):
    """Return the loss of `train_grpo.py`, a function of the new log-probabilities (B, T)."""

    def loss(new: Tensor) -> Tensor:
        losses, _ = loss_function(new, OLD, PER_TOKEN, ACTIONS, clip_range)
        losses = losses + beta * torch.where(ACTIONS, k3(new, REF), 0.0)
        return mean_loss(losses, ACTIONS, torch.tensor(B), ACTIONS.sum())

    return loss


# ---------------------------------------------------------------------------------------------------------- 1. TRL
def loss_of_trl(kind: str, level: str = "token", clip_range: tuple[float, float] = (0.2, 0.2), beta: float = 0.0):
    need("trl")
    from trl import GRPOTrainer

    def loss(new: Tensor) -> Tensor:
        trainer = alone(
            loss_type=kind,
            importance_sampling_level=level,
            beta=beta,
            epsilon_low=clip_range[0],
            epsilon_high=clip_range[1],
            max_completion_length=T,
            current_gradient_accumulation_steps=1,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            _entropy_bonus_enabled=False,
            args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
            _get_per_token_logps_and_entropies=lambda *_, **__: (new, NONE, None),
        )
        inputs = {
            **BATCH,
            "old_per_token_logps": OLD,
            "ref_per_token_logps": REF,
            "num_items_in_batch": ACTIONS.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

    return loss


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip_range", [(0.2, 0.2), (0.1, 0.28)])
def test_the_loss_of_grpo_is_trls(clip_range, beta):
    expected = loss_of_trl("grpo", clip_range=clip_range, beta=beta)
    assert loss_difference(ours(mean_of_means, clip_range=clip_range, beta=beta), expected) < 1e-12


@pytest.mark.parametrize("kind", ["dapo", "bnpo"])
def test_the_mean_over_tokens_is_trls(kind):
    """bnpo takes the mean over the tokens of a micro-batch, dapo over the whole batch: here they are the same."""
    expected = loss_of_trl(kind, clip_range=(0.2, 0.28))
    assert loss_difference(ours(mean_over_tokens, clip_range=(0.2, 0.28)), expected) < 1e-12


def test_the_loss_of_dr_grpo_is_trls_times_the_longest_length():
    """TRL divides by a constant, like the paper's listing; equation and gradient are the same up to that factor."""
    expected = loss_of_trl("dr_grpo", beta=0.3)
    assert loss_difference(ours(mean_of_sums, beta=0.3), lambda new: T * expected(new)) < 1e-12


@pytest.mark.parametrize("clip_range", [(3e-4, 4e-4), (0.1, 0.2)])
def test_the_loss_of_gspo_is_trls(clip_range):
    expected = loss_of_trl("grpo", "sequence", clip_range)
    assert loss_difference(ours(mean_of_means, gspo_loss, clip_range), expected) < 1e-12


@pytest.mark.parametrize("bound", [1.2, 5.0])
def test_the_loss_of_cispo_is_trls_whose_setting_is_the_bound_itself(bound):
    expected = loss_of_trl("cispo", clip_range=(0.2, bound))
    assert loss_difference(ours(mean_over_tokens, cispo_loss, (1.0, bound - 1)), expected) < 1e-12


def loss_of_trls_rloo(new: Tensor) -> Tensor:
    from trl import RLOOTrainer

    trainer = alone(
        epsilon_low=0.2,
        epsilon_high=0.2,
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, NONE, None),
    )
    inputs = {
        **BATCH,
        "old_logps": OLD.sum(1),
    }
    return RLOOTrainer._compute_loss(trainer, trainer.model, inputs)


def test_the_first_step_of_rloo_is_trls_and_later_ones_clip_the_ratio_of_a_response():
    """At a ratio of 1 the gradients agree. In later steps TRL clips the product of a response's ratios; we clip each
    token's ratio."""
    need("trl")
    gradients = []
    for loss_function in (ours(mean_of_sums), loss_of_trls_rloo):
        new = OLD.clone().requires_grad_(True)
        gradients += torch.autograd.grad(loss_function(new), new)
    assert difference(*gradients) < 1e-12
    assert loss_difference(ours(mean_of_sums), loss_of_trls_rloo) > 0.1


# --------------------------------------------------------------------------------------------------------- 2. verl
@pytest.fixture(scope="module")
def verl():
    need("verl")
    from verl.trainer.ppo import core_algos

    return core_algos


VERL_MEANS = {
    "seq-mean-token-mean": mean_of_means,
    "seq-mean-token-sum": mean_of_sums,
    "token-mean": mean_over_tokens,
}


def settings_of_verl(clip_range: tuple[float, float], **more: object):
    from verl.workers.config import ActorConfig

    low, high = clip_range
    clip = {"clip_ratio": low, "clip_ratio_low": low, "clip_ratio_high": high}
    return ActorConfig(strategy="fsdp", rollout_n=K, use_dynamic_bsz=True, **clip, **more)


def loss_of_verl(name: str, mean: str, clip_range: tuple[float, float], **more: object):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = settings_of_verl(clip_range, **more)

    def loss(new: Tensor) -> Tensor:
        losses, _ = get_policy_loss_fn(name)(OLD, new, PER_TOKEN, ACTIONS.double(), mean, config)
        return losses

    return loss


@pytest.mark.parametrize("mean", VERL_MEANS)
def test_the_clipped_loss_is_verls_with_each_mean(verl, mean):
    """verl also bounds the loss of ratios above 3 with a negative advantage (dual clip); there are none here.

    It divides by the length + 1e-8.
    """
    expected = loss_of_verl("vanilla", mean, (0.2, 0.28))
    assert loss_difference(ours(VERL_MEANS[mean], clip_range=(0.2, 0.28)), expected) < 1e-7


def test_verls_default_bounds_the_loss_of_a_large_ratio_with_a_negative_advantage(verl):
    """At a ratio of 10 and an advantage of -1, PPO's loss is 10; verl's is 3, without a gradient, unless turned off."""
    new = torch.tensor([[10.0]], dtype=torch.float64).log().requires_grad_(True)
    old, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    losses, _ = policy_loss(new, old, -one, one.bool(), 0.2)
    theirs, _ = verl.compute_policy_loss_vanilla(old, new, -one, one, "token-mean", settings_of_verl((0.2, 0.2)))
    off = settings_of_verl((0.2, 0.2), clip_ratio_c=1e9)
    without, _ = verl.compute_policy_loss_vanilla(old, new, -one, one, "token-mean", off)
    assert losses.item() == pytest.approx(10) == without.item() and theirs.item() == 3
    assert torch.autograd.grad(theirs, new)[0].item() == 0


def test_the_loss_of_gspo_is_verls(verl):
    expected = loss_of_verl("gspo", "seq-mean-token-mean", (0.1, 0.2))
    assert loss_difference(ours(mean_of_means, gspo_loss, (0.1, 0.2)), expected) < 1e-7


def test_the_loss_of_cispo_is_verls(verl):
    expected = loss_of_verl("cispo", "token-mean", (1.0, 0.2))
    assert loss_difference(ours(mean_over_tokens, cispo_loss, (1.0, 0.2)), expected) < 1e-12


def at_the_end(scores: Tensor) -> Tensor:
    """Put scores (B,) at the last tokens, (B, T)."""
    rewards = torch.zeros_like(OLD, dtype=scores.dtype)
    rewards[torch.arange(B), ACTIONS.sum(1) - 1] = scores
    return rewards


def test_rloos_advantages_are_verls_with_the_kl_in_the_reward(verl):
    kl = OLD - REF
    advantages = grpo.rloo(grpo.Inputs(SCORES, kl, NONE, ACTIONS, K, 0.3, 1.0))
    for estimate in (verl.compute_rloo_outcome_advantage, verl.compute_rloo_vectorized_outcome_advantage):
        expected, _ = estimate(at_the_end(SCORES) - 0.3 * kl, ACTIONS.double(), QUERIES)
        assert difference(torch.where(ACTIONS, advantages, 0.0), expected) < 1e-12


def test_dr_grpos_advantages_are_verls(verl):
    expected, _ = verl.compute_grpo_outcome_advantage(at_the_end(SCORES), ACTIONS.double(), QUERIES, 1e-6, False)
    advantages = torch.where(ACTIONS, grpo.dr_grpo(grpo.Inputs(SCORES, NONE, NONE, ACTIONS, K, 0.0, 1.0)), 0.0)
    assert difference(advantages, expected) < 1e-12


UNBIASED = ((K - 1) / K) ** 0.5  # population divided by sample standard deviation, for K scores


def test_grpos_advantages_are_verls_but_for_the_standard_deviation(verl):
    """The paper doesn't define std. We use the population's, so advantages are sqrt(k / (k - 1)) times as large."""
    expected, _ = verl.compute_grpo_outcome_advantage(at_the_end(SCORES), ACTIONS.double(), QUERIES)
    advantages = torch.where(ACTIONS, grpo.grpo(grpo.Inputs(SCORES, NONE, NONE, ACTIONS, K, 0.0, 1.0)), 0.0)
    assert difference(UNBIASED * advantages, expected) < 1e-5 and difference(advantages, expected) > 0.2


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_verls_but_for_the_variance(verl, gamma):
    kl, process = OLD - REF, random(0.5, 9)
    config = SimpleNamespace(gamma=gamma)
    rewards = at_the_end(SCORES) + process - 0.3 * kl
    expected, _ = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, ACTIONS.double(), config=config)
    advantages = grpo.reinforce_plus_plus(grpo.Inputs(SCORES, kl, process, ACTIONS, K, 0.3, gamma))
    n = ACTIONS.sum().item()
    assert difference(advantages * ((n - 1) / n) ** 0.5, expected) < 1e-8


# ----------------------------------------------------------------------------------------------------- 3. OpenRLHF
@pytest.fixture(scope="module")
def openrlhf_losses():
    return load("openrlhf.models.loss", "deepspeed")


@pytest.fixture(scope="module")
def openrlhf_advantages():
    """OpenRLHF's `compute_advantages_and_returns`: estimator, scores (B,), kl (B, T), beta -> (B, T)."""
    unused = "deepspeed", "ray", "openrlhf.trainer.ray.launcher"
    module = load("openrlhf.trainer.ppo_utils.experience_maker", *unused)

    def advantages(estimator: str, scores: Tensor, kl: Tensor, beta: float, gamma: float = 1.0) -> Tensor:
        experience = SimpleNamespace(
            rewards=scores.clone(), index=list(range(B)), action_mask=ACTIONS.double(), kl=kl, info={}
        )
        advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=1.0, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=K),
            reward=SimpleNamespace(clip_range=None),
            algo=SimpleNamespace(advantage=advantage),
        )
        maker = object.__new__(module.RemoteExperienceMaker)
        maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), estimator
        maker.kl_ctl = SimpleNamespace(value=beta)
        [result] = maker.compute_advantages_and_returns([experience])
        return torch.where(ACTIONS, result.advantages, 0.0)

    return advantages


def masked(advantages: Tensor) -> Tensor:
    return torch.where(ACTIONS, advantages, 0.0)


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("over_tokens", [True, False])
def test_the_clipped_losses_are_openrlhfs(openrlhf_losses, kind, over_tokens):
    theirs = openrlhf_losses.PolicyLoss(0.2, 0.28, token_level_loss=over_tokens, policy_loss_type=kind)
    mean_loss = mean_over_tokens if over_tokens and kind == "ppo" else mean_of_means
    loss_function = gspo_loss if kind == "gspo" else policy_loss

    def expected(new: Tensor) -> Tensor:
        return theirs(new, OLD, PER_TOKEN, ACTIONS.double())[0]

    assert loss_difference(ours(mean_loss, loss_function, (0.2, 0.28)), expected) < 1e-7


def test_truncated_importance_weights_are_openrlhfs_and_verls_token_weights(openrlhf_losses, verl):
    """We multiply the advantages, they the losses: the same, because the weights are positive."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    sampled = OLD + random(0.7, 8)
    weights, share = importance_weights(OLD, sampled, ACTIONS, 1.5)
    assert 0.1 < share < 0.6
    correction = {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": (0.0, 1.5)}
    theirs = openrlhf_losses.PolicyLoss(**correction)

    def ours(new: Tensor) -> Tensor:
        losses, _ = policy_loss(new, OLD, PER_TOKEN * weights, ACTIONS, 0.2)
        return losses.sum() / ACTIONS.sum()

    def expected(new: Tensor) -> Tensor:
        return theirs(new, OLD, PER_TOKEN, ACTIONS.double(), sampled)[0]

    assert loss_difference(ours, expected) < 1e-12
    their_weights, _ = compute_rollout_correction_weights(OLD - sampled, ACTIONS.double(), "token", 1.5)
    assert difference(weights, masked(their_weights)) < 1e-12


def test_the_overlong_penalty_is_openrlhfs():
    penalise = load("openrlhf.trainer.ppo_utils.length_penalty").apply_overlong_penalty
    experience = SimpleNamespace(response_length=ACTIONS.sum(1), rewards=torch.zeros(B, dtype=torch.float64))
    assert penalise([experience], T, T / 5) == 2
    assert difference(grpo.overlong_penalty(ACTIONS), experience.rewards) < 1e-6


def test_dr_grpos_advantages_are_openrlhfs(openrlhf_advantages):
    advantages = masked(grpo.dr_grpo(grpo.Inputs(SCORES, NONE, NONE, ACTIONS, K, 0.0, 1.0)))
    assert difference(advantages, openrlhf_advantages("dr_grpo", SCORES, NONE, 0.0)) < 1e-12


def test_grpos_advantages_are_openrlhfs_but_for_the_standard_deviation(openrlhf_advantages):
    advantages = masked(grpo.grpo(grpo.Inputs(SCORES, NONE, NONE, ACTIONS, K, 0.0, 1.0)))
    expected = openrlhf_advantages("group_norm", SCORES, NONE, 0.0)
    assert difference(UNBIASED * advantages, expected) < 1e-7 and difference(advantages, expected) > 0.2


def test_others_make_advantages_of_the_rounding_of_equal_scores(openrlhf_advantages, verl):
    """The mean of three scores of 0.9 is 0.90000004 in float32, their deviation 0; divided by 1e-9 that gives 60."""
    scores = torch.full((B,), 0.9)
    assert masked(grpo.grpo(grpo.Inputs(scores, NONE, NONE, ACTIONS, K, 0.0, 1.0))).abs().max() == 0
    assert openrlhf_advantages("group_norm", scores, NONE, 0.0).abs().max() > 50
    theirs, _ = verl.compute_grpo_outcome_advantage(at_the_end(scores).float(), ACTIONS.float(), QUERIES)
    assert 0.01 < theirs.abs().max() < 0.1  # verl divides by 1e-6


def test_rloos_advantages_are_openrlhfs_without_a_kl_and_have_a_baseline_for_the_kl_too(openrlhf_advantages):
    """The paper's R is the score minus beta times the response's KL. OpenRLHF's baseline uses only the scores, and a
    token is charged the KL from itself on: also unbiased, but with another variance."""
    kl = OLD - REF
    without = openrlhf_advantages("rloo", SCORES, NONE, 0.3)
    assert difference(masked(grpo.rloo(grpo.Inputs(SCORES, NONE, NONE, ACTIONS, K, 0.3, 1.0))), without) < 1e-12
    to_go = kl.flip(1).cumsum(1).flip(1)
    with_kl = openrlhf_advantages("rloo", SCORES, kl, 0.3)
    assert difference(masked(without - 0.3 * to_go), with_kl) < 1e-12
    assert difference(masked(grpo.rloo(grpo.Inputs(SCORES, kl, NONE, ACTIONS, K, 0.3, 1.0))), with_kl) > 0.1


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_openrlhfs(openrlhf_advantages, gamma):
    """This is the authors' implementation. It normalises in float32."""
    kl = OLD - REF
    expected = openrlhf_advantages("reinforce", SCORES, kl, 0.3, gamma)
    advantages = grpo.reinforce_plus_plus(grpo.Inputs(SCORES, kl, NONE, ACTIONS, K, 0.3, gamma))
    assert difference(advantages, expected) < 1e-6
