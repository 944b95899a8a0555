"""The arithmetic of PPO for language models: masks, KL penalty, whitening, losses, advantages without a value model.

Everything is a pure function of tensors; (B, T) tensors hold one number per response token. Masks are True where a
position does not count. Masked values are replaced by `torch.where`, never multiplied by 0: NaN * 0 is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gae import gae, kl_penalised_rewards
from kernels.kl import k3
from nanorlhf.padding import first_true_index

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "eos_masks",
    "grpo",
    "importance_weights",
    "kl_loss",
    "kl_penalised_rewards",
    "masked_mean",
    "policy_loss",
    "reinforce_plus_plus",
    "rloo",
    "value_loss",
    "whiten",
]


def eos_masks(response: Tensor, eos_id: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each response ends, and the two masks that follow from it (True = masked).

        response          a  b  E  x  y  z      E = EOS, eos_index e = 2; tokens after it do not count
        padding_mask      .  .  .  #  #  #      t > e      no action here: KL, policy loss, whitening of advantages
        padding_mask_p1   .  .  .  .  #  #      t > e + 1  no state here:  value loss, whitening of rewards

    The value at e + 1 is read at the EOS token itself: the state in which the response is complete.
    A response without EOS ends at its last token that is not [PAD] (T - 1 if it is full).

    response (B, T) -> eos_index (B,), padding_mask (B, T), padding_mask_p1 (B, T)
    """
    T = response.size(1)
    ends = torch.minimum(first_true_index(response == eos_id), first_true_index(response == pad_id) - 1)
    eos_index = ends.clamp(min=0, max=T - 1)  # (B,)
    index = torch.arange(T, device=response.device)  # (T,)
    return eos_index, index > eos_index[:, None], index > eos_index[:, None] + 1


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over unmasked positions."""
    return torch.where(mask, 0.0, x).sum() / (~mask).sum()


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True, statistics: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over unmasked positions, population variance; masked positions become 0.

    shift_mean False adds the mean back: rewards keep their level, advantages do not. [N+ 24, 25]
    x (B, T) is the whole rollout batch, gathered from all ranks, so the statistics are global; `statistics` is (mean,
    variance) if they are already known.
    """
    if statistics is None:
        mean = masked_mean(x, mask)
        variance = masked_mean((x - mean) ** 2, mask)
    else:
        mean, variance = statistics
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return torch.where(mask, 0.0, whitened)


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    clip_range: float,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate: mean of max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps)), ratio = exp(new - old).

    All (B, T). num_tokens is the divisor: the count of the whole minibatch over all ranks and micro-batches, so that
    splitting it doesn't change the gradient; None: this tensor's own count. Returns loss, fraction of clipped tokens.
    """
    num_tokens = (~padding_mask).sum() if num_tokens is None else num_tokens
    ratio = torch.where(padding_mask, 0.0, new_logprobs - logprobs).exp()
    advantages = torch.where(padding_mask, 0.0, advantages)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(unclipped, clipped).sum() / num_tokens, (clipped > unclipped).sum() / num_tokens


def importance_weights(
    logprobs: Tensor, sampled_logprobs: Tensor, padding_mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (TIS): Yao et al. 2025, Your efficient RL framework secretly brings you off-policy.

        w = min(old probability / sampler's probability, clip)      per token, without a gradient

    Multiplied into the advantages it multiplies the clipped loss, which is homogeneous in them. Without truncation the
    expectation over the sampler's tokens is that over the policy's, provided that the sampler can emit each of them.
    (B, T) each; `logprobs` of the training forward pass. Returns w, 0 at padding, and the share that was truncated.
    """
    weights = torch.where(padding_mask, -torch.inf, logprobs - sampled_logprobs).exp()
    return weights.clamp(max=clip), masked_mean((weights > clip).float(), padding_mask)


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """0.5 * mean of max((V - R)^2, (clip(V, Vold - eps, Vold + eps) - R)^2); clip_range None does not clip.

    All (B, T); num_tokens as in `policy_loss`. Returns loss, fraction of clipped values.
    """
    num_tokens = (~mask).sum() if num_tokens is None else num_tokens
    new_values = torch.where(mask, 0.0, new_values)
    values = torch.where(mask, 0.0, values)
    returns = torch.where(mask, 0.0, returns)
    error = (new_values - returns) ** 2
    if clip_range is None:
        return 0.5 * error.sum() / num_tokens, torch.zeros_like(error.sum())
    clipped_error = (new_values.clamp(values - clip_range, values + clip_range) - returns) ** 2
    return 0.5 * torch.maximum(error, clipped_error).sum() / num_tokens, (clipped_error > error).sum() / num_tokens


def kl_loss(
    new_logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor, padding_mask: Tensor, num_tokens: Tensor | None = None
) -> Tensor:
    """The KL to the reference as a term of the loss: sum over tokens of weight * k3, divided by num_tokens.

    k3 = ref / new - 1 - log(ref / new), never negative. (B, T) but for the weights (B, 1): coefficient * what the
    response's advantages are scaled by, 0 for none. num_tokens as in `policy_loss`.
    """
    num_tokens = (~padding_mask).sum() if num_tokens is None else num_tokens
    ignored = padding_mask | (weights == 0)
    new_logprobs, ref_logprobs = (torch.where(ignored, 0.0, x) for x in (new_logprobs, ref_logprobs))
    return (weights * k3(new_logprobs, ref_logprobs)).sum() / num_tokens


# -------------------------------------------------------------------------------- advantages without a value model
# Other responses say what was to be expected: those to the same query, which are k rows in a row, or all of the batch.
# `policy_loss` divides a sum over tokens by their number, rows * mean length. Where a paper takes another mean, its
# factor is folded into the advantages, in which the clipped loss is homogeneous: the mean over responses of a sum over
# tokens has the factor mean length; that of a mean over tokens has mean length / own length. The mean length is the
# rollout's: exact for one minibatch; of several, each is scaled by the rollout's over its own mean length.
def rloo(scores: Tensor, kl: Tensor, padding_mask: Tensor, kl_coef: float, k: int) -> Tensor:
    """REINFORCE leave-one-out: Ahmadian et al. 2024. A whole response is one action.

        R_i = score_i - kl_coef * sum_t kl_it        A_i = R_i - mean of the R_j of the query's k - 1 other responses
        loss = mean over i of -A_i * sum_t ratio_it  at ratio 1 its gradient is that of E[-R], without bias

    scores (B,); kl (B, T), the estimator k1; k at least 2 -> advantages (B, T).
    """
    rewards = (scores - kl_coef * torch.where(padding_mask, 0.0, kl).sum(1)).view(-1, k)  # (B / k, k)
    others = (rewards.sum(1, keepdim=True) - rewards) / (k - 1)
    mean_length = (~padding_mask).sum() / len(scores)
    return torch.where(padding_mask, 0.0, mean_length * (rewards - others).view(-1, 1))


def grpo(scores: Tensor, padding_mask: Tensor, kl_coef: float, k: int, scale: str) -> tuple[Tensor, Tensor]:
    """Group relative policy optimisation: Shao et al. 2024, equations 3 and 4. The KL is a term of the loss.

        A_i = (score_i - mean) / std          mean and population standard deviation of the query's k scores
        loss = mean over i of (mean over t of -A_i * ratio_it + kl_coef * k3_it)

    scale "none" is Dr. GRPO (Liu et al. 2025): A_i = score_i - mean, and sums over t. Dividing by std favours queries
    whose scores hardly differ, dividing by length favours short good and long bad responses; the gradient is biased.

    scores (B,); k at least 2 -> advantages (B, T), and weights (B, 1) for `kl_loss`.
    """
    groups, lengths = scores.view(-1, k), (~padding_mask).sum(1, keepdim=True)  # (B / k, k), (B, 1)
    advantages = groups - groups.mean(1, keepdim=True)
    weights = lengths.sum() / len(scores) * torch.ones_like(scores)[:, None]  # (B, 1) mean length
    if scale == "std":
        advantages = advantages * torch.rsqrt(groups.var(1, correction=0, keepdim=True) + 1e-8)
        weights = weights / lengths
    return torch.where(padding_mask, 0.0, weights * advantages.view(-1, 1)), kl_coef * weights


def reinforce_plus_plus(scores: Tensor, kl: Tensor, padding_mask: Tensor, kl_coef: float, gamma: float) -> Tensor:
    """REINFORCE++: Hu et al. 2025. The KL is penalised at each token, and the whole batch is the baseline.

        A_it = score_i - kl_coef * sum of kl_is over s >= t, then to mean 0 and standard deviation 1 over all tokens

    It is PPO with V = 0 and lambda = 1. scores (B,); kl (B, T), the estimator k1; gamma discounts per token, 1 in the
    paper -> advantages (B, T).
    """
    end = (~padding_mask).sum(1, keepdim=True) - 1  # (B, 1) the last token, which gets the score
    rewards = (-kl_coef * torch.where(padding_mask, 0.0, kl)).scatter_add(1, end, scores[:, None])  # (B, T)
    returns, _ = gae(rewards, torch.zeros_like(rewards), gamma, 1.0)
    return whiten(returns, padding_mask)


# -------------------------------------------------------------------------------------------- the coefficient of the KL
@dataclass
class FixedKL:
    """A constant KL coefficient. [N+ 20]"""

    coefficient: float

    def update(self, kl: float, num_episodes: int) -> None:
        pass


@dataclass
class AdaptiveKL:
    """A KL coefficient that tracks a target KL: Ziegler et al. 2019, section 2.2.

    After an update over num_episodes (of all ranks) with kl nats per response:
    coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon.
    """

    coefficient: float
    target: float
    horizon: int = 10_000

    def update(self, kl: float, num_episodes: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_episodes / self.horizon
