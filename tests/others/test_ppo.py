"""Whitening, GAE, KL and PPO's losses, compared with TRL, verl, OpenRLHF and torchtune.

Table: docs/how-we-compare.md.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import gae, k1, k2, k3
from nanorlhf.ppo import KLCoefficient, policy_loss, value_loss, whiten
from tests.others.common import (
    ACTIONS,
    ADVANTAGES,
    LENGTHS,
    OLD,
    REF,
    SCORES,
    STATES,
    difference,
    load,
    loss_difference,
    need,
    random,
)

B, T = ACTIONS.shape
REWARDS, VALUES = random(1.0, 4), random(1.0, 5)
N = ACTIONS.sum().item()
BESSEL = ((N - 1) / N) ** 0.5  # population divided by sample standard deviation


@pytest.fixture(scope="module")
def trl():
    need("trl")
    from trl.experimental.ppo import ppo_trainer

    return ppo_trainer


@pytest.fixture(scope="module")
def verl():
    need("verl")
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture(scope="module")
def openrlhf_utils():
    return load("openrlhf.models.utils", "deepspeed")


@pytest.fixture(scope="module")
def torchtune():
    return load("torchtune.rlhf.rewards")


# ------------------------------------------------------------------------------------------------------- 1. whitening
@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("whose", ["trl", "verl"])
def test_whitening_is_trls_and_verls_but_for_the_variance(whose, shift_mean, request):
    """They use the sample variance, with N - 1. [N+ 24, 25] follow OpenAI's code, which uses the population's."""
    module = request.getfixturevalue(whose)
    masked_whiten = module.masked_whiten if whose == "trl" else module.verl_F.masked_whiten
    mean = REWARDS[ACTIONS].mean()
    expected = masked_whiten(REWARDS, ACTIONS.double(), shift_mean)
    back = 0.0 if shift_mean else mean
    whitened = (whiten(REWARDS, ACTIONS, shift_mean) - back) * BESSEL + back
    assert difference(whitened[ACTIONS], expected[ACTIONS]) < 1e-8
    assert difference(whiten(REWARDS, ACTIONS, shift_mean)[ACTIONS], expected[ACTIONS]) > 1e-3


def test_torchtunes_whitening_adds_the_mean_back_where_it_says_that_it_shifts_it(torchtune):
    """Therefore its advantages keep their mean: three equal advantages of 5 stay 5, but [N+ 25] requires 0."""
    for shift_mean in (True, False):
        whitened = whiten(REWARDS, ACTIONS, shift_mean)
        mean = REWARDS[ACTIONS].mean()
        back = 0.0 if shift_mean else mean
        expected = torchtune.whiten(REWARDS, ACTIONS, not shift_mean)
        assert difference(((whitened - back) * BESSEL + back)[ACTIONS], expected[ACTIONS]) < 1e-7
    advantages, _ = torchtune.estimate_advantages(torch.zeros(3, 1), torch.full((3, 1), 5.0), 1.0, 1.0)
    assert advantages.flatten().tolist() == [5, 5, 5]
    assert whiten(torch.full((3, 1), 5.0), torch.ones(3, 1).bool()).flatten().tolist() == [0, 0, 0]


# -------------------------------------------------------------------------------------------------------------- 2. GAE
every_discount = pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])


@every_discount
def test_gae_is_verls(verl, gamma, lam):
    """The value after the last token is 0. verl returns whitened advantages, but plain returns."""
    advantages, returns = gae(REWARDS, VALUES, gamma, lam, ACTIONS)
    whitened, theirs = verl.compute_gae_advantage_return(REWARDS, VALUES, ACTIONS.double(), gamma, lam)
    assert difference(returns[ACTIONS], theirs[ACTIONS]) < 1e-12
    assert difference(whiten(advantages, ACTIONS)[ACTIONS] * BESSEL, whitened[ACTIONS]) < 1e-8


@every_discount
def test_gae_is_openrlhfs(gamma, lam):
    unused = "deepspeed", "ray", "openrlhf.trainer.ray.launcher"
    maker = load("openrlhf.trainer.ppo_utils.experience_maker", *unused).RemoteExperienceMaker
    theirs = maker.get_advantages_and_returns(None, VALUES, REWARDS, ACTIONS.double(), gamma, lam)
    ours = gae(REWARDS, VALUES, gamma, lam, ACTIONS)
    assert max(difference(*pair) for pair in zip(ours, theirs, strict=True)) < 1e-12


@every_discount
def test_the_returns_of_gae_are_torchtunes(torchtune, gamma, lam):
    """We compare only the returns: torchtune whitens the advantages differently."""
    _, returns = gae(REWARDS, VALUES, gamma, lam, ACTIONS)
    _, theirs = torchtune.estimate_advantages(VALUES, REWARDS, gamma, lam, ACTIONS)
    assert difference(returns[ACTIONS], theirs[ACTIONS]) < 1e-12


# --------------------------------------------------------------------------------------------------- 3. KL and rewards
every_estimator = pytest.mark.parametrize(("ours", "name"), [(k1, "k1"), (k2, "k2"), (k3, "k3")])


@every_estimator
def test_the_estimators_of_the_kl_are_verls(verl, ours, name):
    assert loss_difference(lambda new: ours(new, REF).sum(), lambda new: verl.kl_penalty(new, REF, name).sum()) < 1e-12


@every_estimator
def test_the_estimators_of_the_kl_are_openrlhfs(openrlhf_utils, ours, name):
    """OpenRLHF computes in float32."""
    theirs = openrlhf_utils.compute_approx_kl
    assert loss_difference(lambda new: ours(new, REF).sum(), lambda new: theirs(new, REF, None, name).sum()) < 1e-5


def test_others_cut_k3_off_at_10_where_its_gradient_is_lost(verl, openrlhf_utils):
    """If the reference gives a token e^5 times the probability, k3 is 142.4, with a gradient to match."""
    new, ref = torch.tensor([-6.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    estimates = []
    for estimate in (
        k3,
        lambda new, ref: verl.kl_penalty(new, ref, "k3"),
        lambda new, ref: openrlhf_utils.compute_approx_kl(new, ref, None, "k3"),
    ):
        leaf = new.clone().requires_grad_(True)
        kl = estimate(leaf, ref)
        estimates.append((kl.item(), torch.autograd.grad(kl.sum(), leaf)[0].item()))
    e5 = torch.tensor(5.0, dtype=torch.float64).exp().item()
    assert estimates[0] == (pytest.approx(e5 - 6), pytest.approx(1 - e5)) and estimates[1:] == [(10, 0), (10, 0)]


def rewards_at_the_last_token() -> Tensor:
    """Return the KL penalty of each token, plus the score at EOS (score_at last_token)."""
    rewards = -0.3 * (OLD - REF)
    rewards[torch.arange(B), LENGTHS - 1] += SCORES
    return rewards


def test_the_rewards_of_ppo_are_openrlhfs(openrlhf_utils):
    expected = openrlhf_utils.compute_reward(SCORES, 0.3, OLD - REF, ACTIONS.double())
    assert difference(rewards_at_the_last_token(), expected) < 1e-12


def test_the_rewards_of_ppo_are_torchtunes(torchtune):
    expected, _, _ = torchtune.get_rewards_ppo(SCORES, OLD, REF, 0.3, LENGTHS - 1)
    assert difference(rewards_at_the_last_token(), expected) < 1e-12


@pytest.mark.parametrize("whose", ["verl", "openrlhf"])
def test_the_adaptive_coefficient_is_verls_and_openrlhfs(whose, request):
    if whose == "verl":
        module = request.getfixturevalue("verl")
    else:
        module = load("openrlhf.trainer.ppo_utils.kl_controller")
    beta, theirs = KLCoefficient(0.1, 6.0, 10_000), module.AdaptiveKLController(0.1, 6.0, 10_000)
    for kl in (1.0, 6.5, 7.0, 40.0, 0.0, 6.0):
        beta.update(kl, 512)
        theirs.update(kl, 512)
        assert theirs.value == pytest.approx(beta.value, rel=1e-12)


# ----------------------------------------------------------------------------------------------------------- 4. losses
VALUES_OF_STATES, RETURNS = random(1.0, 6, STATES), random(1.0, 7, STATES)


def our_value_loss(clip_range: float | None):
    """Return the mean value loss over the states that count."""

    def loss(new: Tensor) -> Tensor:
        losses, _ = value_loss(new, VALUES_OF_STATES, RETURNS, STATES, clip_range)
        return losses.sum() / STATES.sum()

    return loss


@pytest.mark.parametrize("clip_range", [0.2, None])
def test_the_value_loss_is_openrlhfs(clip_range):
    theirs = load("openrlhf.models.loss", "deepspeed").ValueLoss(clip_range)
    expected = partial(theirs, old_values=VALUES_OF_STATES, returns=RETURNS, action_mask=STATES.double())
    assert loss_difference(our_value_loss(clip_range), expected) < 1e-12


def test_the_value_loss_is_verls(verl):
    def expected(new: Tensor) -> Tensor:
        return verl.compute_value_loss(new, RETURNS, VALUES_OF_STATES, STATES.double(), 0.2)[0]

    assert loss_difference(our_value_loss(0.2), expected) < 1e-12


def test_the_clipped_tokens_are_those_that_verl_counts(verl):
    advantages = ADVANTAGES[:, None].expand(B, T)
    new = OLD + random(0.3, 3)
    _, is_clipped = policy_loss(new, OLD, advantages, ACTIONS, 0.2)
    _, share, _, _ = verl.compute_policy_loss(OLD, new, advantages, ACTIONS.double(), 0.2)
    assert 0.1 < share.item() == pytest.approx(is_clipped.sum().item() / N)
