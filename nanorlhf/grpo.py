"""The algorithms of `train_grpo.py`, as in their papers; docs/algorithms.md compares them.

An algorithm defines what a response is compared with (its advantages), which ratio is clipped (its
policy loss), and how the loss is averaged. The k responses to a query are consecutive rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import gae
from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.ppo import ClipRange, cispo_loss, gspo_loss, policy_loss, whiten

PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, ClipRange], tuple[Tensor, Tensor]]


# ----------------------------------------------------------------------------------- 1. advantages
@dataclass(frozen=True)
class Inputs:
    """The inputs for computing advantages (B, T): scores, KL and rewards of B responses."""

    scores: Tensor  # (B,)
    kl: Tensor  # (B, T) log policy - log reference; 0 after the end of a response
    token_rewards: Tensor  # (B, T) 0 after the end
    actions: Tensor  # (B, T) bool
    k: int  # responses per query
    kl_coef: float
    gamma: float


def centred(values: Tensor, k: int) -> Tensor:
    """Subtract the mean of each query's k values, (B,) -> (B / k, k); exactly 0 if all equal."""
    groups = values.view(-1, k)
    differences = groups - groups[:, :1]
    return differences - differences.mean(1, keepdim=True)


def grpo(x: Inputs) -> Tensor:
    """Compute A_i = (score_i - mean) / std over the query's k scores. [GRPO section 4.1.2]

    The standard deviation is the population's (divided by k), with 1e-8 under the root: equal
    scores have advantages of 0. Dividing by it favours queries whose scores hardly differ.
    """
    groups = centred(x.scores, x.k)  # (B / k, k)
    variance = groups.square().mean(1, keepdim=True)
    return (groups * torch.rsqrt(variance + 1e-8)).view(-1, 1).expand_as(x.kl)


def dr_grpo(x: Inputs) -> Tensor:
    """Compute A_i = score_i - mean of the query's k scores. [Dr. GRPO section 3.2]"""
    return centred(x.scores, x.k).view(-1, 1).expand_as(x.kl)


def maxrl(x: Inputs) -> Tensor:
    """Compute A_i = (score_i - mean) / mean over the query's k scores; 0 if all are 0. [MaxRL]

    If scores are 1 (right) or 0 and p is the probability of a right response, the loss has the
    expected gradient of - sum over j < k of (1 - p)^j / j, which approaches log p. Rare right
    responses have large weights. Raises InputError for scores below 0.
    """
    if (x.scores < 0).any():
        least = x.scores.min().item()
        raise InputError(f"--algorithm maxrl needs scores of at least 0; got {least:.4g}.")
    means = x.scores.view(-1, x.k).mean(1, keepdim=True)  # (B / k, 1)
    return (centred(x.scores, x.k) / (means + 1e-8)).view(-1, 1).expand_as(x.kl)


def dapo(x: Inputs) -> Tensor:
    """Compute GRPO's advantages with a penalty on long responses. [DAPO equations 9 and 13]"""
    return grpo(replace(x, scores=x.scores + overlong_penalty(x.actions)))


def overlong_penalty(actions: Tensor) -> Tensor:
    """Return the length penalty (B,), 0 to -1 over the last fifth of T tokens. [DAPO equation 13]

    The paper's L_max is 20,480 tokens and its L_cache 4,096 of them (section 4.1).
    """
    T = actions.size(1)
    soft = T / 5
    return ((T - soft - actions.sum(1)) / soft).clamp(-1, 0)


def rloo(x: Inputs) -> Tensor:
    """Compute A_i = R_i - mean of the other R_j, R_i = score_i - beta * sum_t kl_it. [RLOO 3]

    A response is one action. The baseline excludes R_i, so the gradient is unbiased.
    """
    response_rewards = x.scores - x.kl_coef * x.kl.sum(1)  # (B,)
    return (centred(response_rewards, x.k) * (x.k / (x.k - 1))).view(-1, 1).expand_as(x.kl)


def reinforce_plus_plus(x: Inputs) -> Tensor:
    """Compute A_it = score_i + sum over s >= t of (r_is - beta * kl_is), whitened. [REINFORCE++]

    r is a process reward, or 0. The batch is the baseline. This is PPO with V = 0 and lambda = 1.
    """
    rewards = x.token_rewards - x.kl_coef * x.kl
    rewards[torch.arange(len(x.scores)), x.actions.sum(1) - 1] += x.scores  # at the last token
    returns, _ = gae(rewards, torch.zeros_like(rewards), x.gamma, 1.0)
    return whiten(returns, x.actions)


def online_dpo(x: Inputs) -> Tensor:
    """Compute the gradient of DPO's loss on the best (w) and worst (l) of k. [Online DPO, eq. 1]

        loss = -log sigmoid(m), m = beta * (sum_t kl_wt - sum_t kl_lt)
        A_w = beta * sigmoid(-m) = -A_l, and 0 for the others

    d loss = -A_w d log p(w) - A_l d log p(l). This is exact only for the policy that sampled, so
    take one step per rollout. The factor k is there because our loss is a mean over all responses
    and the paper's is a mean over queries. A query whose responses all score the same has no pair:
    its advantages are 0.
    """
    groups = x.scores.view(-1, x.k)
    best, worst = groups.argmax(1, keepdim=True), groups.argmin(1, keepdim=True)  # (B / k, 1)
    log_ratios = x.kl.sum(1).view(-1, x.k)
    margins = x.kl_coef * (log_ratios.gather(1, best) - log_ratios.gather(1, worst))
    weights = x.k * x.kl_coef * torch.sigmoid(-margins)  # (B / k, 1)
    advantages = torch.zeros_like(groups).scatter_add(1, best, weights)
    advantages = advantages.scatter_add(1, worst, -weights)
    return advantages.view(-1, 1).expand_as(x.kl)


# ------------------------------------------------------------------------- 2. averages of the loss
# losses and actions (b, T) of a micro-batch; the numbers of responses and tokens in its minibatch
def mean_of_means(losses: Tensor, actions: Tensor, responses: Tensor, tokens: Tensor) -> Tensor:
    """Average over each response's tokens, then over responses: tokens of short ones weigh more."""
    lengths = actions.sum(1).clamp(min=1)  # (b,) a dropped response has no action left
    return (losses.sum(1) / lengths).sum() / responses


def mean_of_sums(losses: Tensor, actions: Tensor, responses: Tensor, tokens: Tensor) -> Tensor:
    """Sum over each response's tokens, then average over responses."""
    return losses.sum() / responses


def mean_over_tokens(losses: Tensor, actions: Tensor, responses: Tensor, tokens: Tensor) -> Tensor:
    """Average over all tokens."""
    return losses.sum() / tokens


# ------------------------------------------------------------------------------- 3. the algorithms
@dataclass(frozen=True)
class Algorithm:
    advantages: Callable[[Inputs], Tensor]
    mean_loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    policy_loss: PolicyLoss = policy_loss
    clip_range: tuple[float, float] = (0.2, 0.2)
    """the paper's clip range, below and above 1"""
    has_response_ratio: bool = False
    """one ratio per response instead of one per token; the metrics report it"""
    has_kl_loss: bool = False
    """the KL is a term of the loss, k3 at each token"""
    is_without_kl: bool = False
    """the KL is neither in the loss nor in the reward"""
    num_refills: int = 0
    """how often groups whose responses all score the same are resampled before they are dropped"""


ALGORITHMS = {
    "grpo": Algorithm(grpo, mean_of_means, has_kl_loss=True),
    "dr_grpo": Algorithm(dr_grpo, mean_of_sums, has_kl_loss=True),
    "maxrl": Algorithm(maxrl, mean_of_sums, is_without_kl=True),
    "rloo": Algorithm(rloo, mean_of_sums),
    "reinforce++": Algorithm(reinforce_plus_plus, mean_over_tokens),
    "gspo": Algorithm(  # [GSPO equation 5; clip range of section 5.1]
        grpo,
        mean_of_means,
        gspo_loss,
        clip_range=(3e-4, 4e-4),
        has_response_ratio=True,
        has_kl_loss=True,
    ),
    "dapo": Algorithm(  # [DAPO equation 8; clip range of section 4.1]
        dapo, mean_over_tokens, clip_range=(0.2, 0.28), is_without_kl=True, num_refills=3
    ),
    "cispo": Algorithm(  # [CISPO equation 4] no lower bound; the paper doesn't give the upper one
        grpo, mean_over_tokens, cispo_loss, clip_range=(1.0, 4.0), is_without_kl=True
    ),
    "online_dpo": Algorithm(online_dpo, mean_of_sums),
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of an algorithm, or of `ppo`."""
    return ALGORITHMS[name].policy_loss if name in ALGORITHMS else policy_loss


# ----------------------------------------------------------------------- 4. groups of equal scores
def all_alike(scores: Tensor, k: int) -> Tensor:
    """Mask (B,) of responses to queries whose k scores are equal: none has an advantage."""
    groups = scores.view(-1, k)
    return (groups == groups[:, :1]).all(1).repeat_interleave(k)


def refill(
    batch: Batch,
    scores: Tensor,
    rows: Sequence[Demonstration],
    k: int,
    num_refills: int,
    rollout: Callable[[list[Demonstration], Tensor, int], tuple[Batch, Tensor, Tensor]],
    update: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """Replace groups whose responses all score the same, in `batch` and `scores` (B,). [DAPO 3.2]

    They are resampled at most `num_refills` times; groups that are still alike are dropped from the
    loss. With 0, nothing is resampled or dropped.

    rollout    rows, random numbers (n, T) and the update -> a batch, scores (n,), a third result
    generator  for the random numbers; the same on every rank, like the scores
    """
    if num_refills == 0:
        return {}
    T, num_refilled, num_tokens = batch.response.size(1), 0, 0
    for _ in range(num_refills):
        indices = all_alike(scores, k).nonzero().flatten().cpu()  # (n,)
        n = len(indices)
        if n == 0:
            break
        uniforms = torch.rand((n, T), generator=generator, dtype=torch.float64)
        shared = torch.arange(n + -n % distributed.world_size()) % n  # ranks have equal shares
        examples = [rows[i] for i in indices[shared].tolist()]
        new_batch, new_scores, _ = rollout(examples, uniforms[shared], update)
        batch.replace(indices, new_batch)
        scores[indices] = new_scores[:n]
        num_refilled += n
        num_tokens += int(batch.actions[indices].sum())
    alike = all_alike(scores, k)  # (B,)
    batch.in_loss &= ~alike[:, None]
    return {
        "groups/refilled": num_refilled / k,
        "groups/refilled_tokens": num_tokens,
        "groups/dropped": alike.float().mean().item(),
    }
