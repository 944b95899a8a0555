"""PPO's formulas for language models: masks, whitening, the clipped losses, the KL coefficient.

Everything is a pure function of tensors. A (B, T) tensor has one number per response token. Masks
are True where a position counts. Other positions are replaced with `torch.where`, never multiplied
by 0: NaN * 0 is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanorlhf.padding import first_true_index

LARGEST_LOG_RATIO = 80.0  # exp(88.8) is infinite in float32
ClipRange = float | tuple[float, float]
"""PPO's clip range eps: one number, or a pair for below and above 1"""


def eos_masks(response: Tensor, eos_id: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the end of each response and return it with the two masks (True = counts).

        response   a  b  E  x  y  z      E = EOS, eos_index e = 2; tokens after it do not count
        actions    #  #  #  .  .  .      t <= e      a token was chosen here: KL, policy loss
        states     #  #  #  #  .  .      t <= e + 1  the finished response is a state: value loss

    The value at e + 1 is computed at the EOS token: it is the value of the finished response. A
    response without EOS ends at its last token that is not [PAD] (T - 1 if it is full).

    response (B, T) -> eos_index (B,), actions (B, T), states (B, T)
    """
    T = response.size(1)
    first_eos = first_true_index(response == eos_id)  # (B,)
    first_pad = first_true_index(response == pad_id)  # (B,)
    eos_index = torch.minimum(first_eos, first_pad - 1).clamp(min=0, max=T - 1)
    index = torch.arange(T, device=response.device)  # (T,)
    return eos_index, index <= eos_index[:, None], index <= eos_index[:, None] + 1


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x over the positions that count (mask True)."""
    return torch.where(mask, x, 0.0).sum() / mask.sum()


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return (x - mean) / sqrt(var + 1e-8) where mask is True, 0 elsewhere. [N+ 24, 25]

    shift_mean=False adds the mean back: rewards keep their mean, advantages do not. The variance is
    the population variance. x (B, T) is the whole rollout, gathered from all ranks, so the
    statistics are global.
    """
    counted = x[mask]  # (N,)
    mean = counted.mean()
    variance = counted.var(correction=0)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return torch.where(mask, whitened, 0.0)


def ratio_bounds(clip_range: ClipRange) -> tuple[float, float]:
    """Return the bounds that the ratio is clipped to, 1 - eps and 1 + eps; eps may be a pair."""
    lower, upper = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    return 1 - lower, 1 + upper


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    actions: Tensor,
    clip_range: ClipRange,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped loss of each token.

        max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps)), ratio = exp(new_logprobs - logprobs)

    All tensors are (B, T); the bounds are `ratio_bounds(clip_range)`. Returns the losses, and which
    tokens are clipped (their clipped loss is larger); 0 and False outside `actions`. The caller
    averages the losses, because the denominator counts all ranks and micro-batches.
    """
    least, most = ratio_bounds(clip_range)
    advantages = torch.where(actions, advantages, 0.0)
    log_ratio = torch.where(actions, new_logprobs - logprobs, 0.0)
    # an overflowing ratio is clipped to `most` unless A < 0, but its gradient would be 0 * inf
    ratio = torch.where(advantages < 0, log_ratio, log_ratio.clamp(max=LARGEST_LOG_RATIO)).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(least, most)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def response_sum(x: Tensor, actions: Tensor) -> Tensor:
    """Sum x (B, T) over each response's actions; all of its tokens get the sum, (B, T)."""
    sums = torch.where(actions, x, 0.0).sum(1, keepdim=True)
    return torch.where(actions, sums, 0.0)


def response_mean(x: Tensor, actions: Tensor) -> Tensor:
    """Average x (..., T) over each response's actions; all of its tokens get the mean, (..., T)."""
    lengths = actions.sum(-1, keepdim=True).clamp(min=1)
    means = torch.where(actions, x, 0.0).sum(-1, keepdim=True) / lengths
    return torch.where(actions, means, 0.0)


def gspo_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    actions: Tensor,
    clip_range: ClipRange,
) -> tuple[Tensor, Tensor]:
    """Compute `policy_loss` with one ratio per response, exp(mean over its tokens of new - old).

    All tokens of a response get the same loss, so their mean is the response's loss. Zheng et al.
    2025, Group Sequence Policy Optimization, equations 5 and 7.
    """
    new, old = response_mean(new_logprobs, actions), response_mean(logprobs, actions)
    return policy_loss(new, old, advantages, actions, clip_range)


def cispo_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    actions: Tensor,
    clip_range: ClipRange,
) -> tuple[Tensor, Tensor]:
    """Compute -A * w * new_logprobs of each token, w = clip(ratio, 1 - eps, 1 + eps) detached.

    Clipping reduces a token's gradient but never removes it. Arguments and results are as in
    `policy_loss`. MiniMax 2025, MiniMax-M1, equations 4 and 5.
    """
    least, most = ratio_bounds(clip_range)
    new_logprobs = torch.where(actions, new_logprobs, 0.0)
    ratio = (new_logprobs.detach() - torch.where(actions, logprobs, 0.0)).exp()
    weights = ratio.clamp(least, most)
    losses = -torch.where(actions, advantages, 0.0) * weights * new_logprobs
    return losses, weights != ratio


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, states: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """Compute 0.5 * max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) of each token.

    eps = clip_range; None turns clipping off. All tensors are (B, T). Returns the losses, and which
    values are clipped (their clipped error is larger); 0 and False outside `states`.
    """
    new_values = torch.where(states, new_values, 0.0)
    values = torch.where(states, values, 0.0)
    returns = torch.where(states, returns, 0.0)
    error = (new_values - returns) ** 2
    if clip_range is None:
        return 0.5 * error, torch.zeros_like(states)
    clipped_values = new_values.clamp(values - clip_range, values + clip_range)
    clipped_error = (clipped_values - returns) ** 2
    return 0.5 * torch.maximum(error, clipped_error), clipped_error > error


def importance_weights(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    actions: Tensor,
    most: float,
    least: float = 0.0,
    is_masked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute importance weights from the sampler to the old policy, without a gradient.

        w = old probability / sampler's probability                 per token
        truncated: min(w, most)                                     TIS, Yao et al. 2025
        masked: w if it is from `least` to `most`, else 0           IcePop, Ling Team 2025

    To weight the clipped loss, multiply the advantages by w: the loss is homogeneous in them.
    Unbounded, the weighted expectation over the sampler's tokens equals the expectation over the
    policy's, provided that the sampler can emit every token that the policy can. All tensors are
    (B, T). Returns w, 0 outside `actions`, and the fraction of tokens with w out of bounds.
    """
    weights = torch.where(actions, logprobs - sampled_logprobs, -torch.inf).exp()
    outside = (weights > most) | (weights < least)
    bounded = torch.where(outside, 0.0, weights) if is_masked else weights.clamp(max=most)
    return bounded, masked_mean(outside.float(), actions)


@dataclass
class KLCoefficient:
    """The KL coefficient beta, adapted to a target KL if one is set: Ziegler et al. 2019, 2.2.

    After an update on num_episodes (summed over ranks) with a KL of kl nats per response:
    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon.
    """

    value: float
    target: float | None = None  # None: the coefficient is constant [N+ 20]
    horizon: int = 10_000

    def update(self, kl: float, num_episodes: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * num_episodes / self.horizon
