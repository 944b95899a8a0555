"""The arithmetic of PPO for language models: masks, KL penalty, whitening, the two losses.

Everything is a pure function of tensors; (B, T) tensors hold one number a response token. Masks are True where a
position does not count. What they hide is chosen away by `torch.where`, never multiplied by 0: NaN * 0 is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanorlhf.padding import first_true_index


def eos_masks(response: Tensor, eos_id: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each response ends, and the two masks that follow from it (True = masked).

        response          a  b  E  x  y  z      E = EOS, eos_index e = 2; whatever follows does not count
        padding_mask      .  .  .  #  #  #      t > e      no action here: KL, policy loss, whitening of advantages
        padding_mask_p1   .  .  .  .  #  #      t > e + 1  no state here:  value loss, whitening of rewards

    The values at e + 1 are read at the EOS token itself: the state in which the response is complete.
    A response without EOS ends with its last token that is not [PAD] (T - 1 where it is full).

    response (B, T) -> eos_index (B,), padding_mask (B, T), padding_mask_p1 (B, T)
    """
    T = response.size(1)
    ends = torch.minimum(first_true_index(response == eos_id), first_true_index(response == pad_id) - 1)
    eos_index = ends.clamp(min=0, max=T - 1)  # (B,)
    index = torch.arange(T, device=response.device)  # (T,)
    return eos_index, index > eos_index[:, None], index > eos_index[:, None] + 1


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over what is not masked."""
    return torch.where(mask, 0.0, x).sum() / (~mask).sum()


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over what is not masked, population variance; masked positions become 0.

    shift_mean False adds the mean back: rewards keep their level, advantages do not. [N+ 24, 25]
    x (B, T) is the whole rollout batch, gathered from all ranks, so the statistics are global.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return torch.where(mask, 0.0, whitened)


def kl_penalised_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    eos_index: Tensor,
    kl_coef: float,
    score_at: str = "after_eos",
) -> tuple[Tensor, Tensor]:
    """The reward of each token: -kl_coef * (logprob - ref_logprob) up to the end, and the score once.

    logprobs, ref_logprobs (B, T), scores (B,), eos_index (B,) -> rewards (B, T), kl (B, T), both 0 behind the end.

    score_at says who earns the score (kl_t = logprob - ref_logprob, the estimator k1):
        after_eos    a  b  E  x     rewards -kl -kl -kl score    the state that contains EOS: slot e + 1 (N+)
        last_token   a  b  E  x     rewards -kl -kl -kl+score 0  the token that ends the response: slot e
    Where e + 1 = T there is no such slot and the score falls on e. A row's rewards sum to score - kl_coef * sum(kl).
    """
    T = logprobs.size(1)
    index = torch.arange(T, device=logprobs.device)  # (T,)
    kl = torch.where(index > eos_index[:, None], 0.0, logprobs - ref_logprobs)  # (B, T)
    score_index = eos_index if score_at == "last_token" else (eos_index + 1).clamp(max=T - 1)  # (B,)
    rewards = -kl_coef * kl + torch.where(index == score_index[:, None], scores[:, None], 0.0)
    return rewards, kl


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    padding_mask: Tensor,
    clip_range: float,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate: mean of max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps)), ratio = exp(new - old).

    All (B, T). num_tokens is the count to divide by: that of the whole minibatch over all ranks and micro-batches, so
    that how it is cut up doesn't change the gradient; None is this tensor's own. Returns loss, share of clipped tokens.
    """
    num_tokens = (~padding_mask).sum() if num_tokens is None else num_tokens
    ratio = torch.where(padding_mask, 0.0, new_logprobs - logprobs).exp()
    advantages = torch.where(padding_mask, 0.0, advantages)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(unclipped, clipped).sum() / num_tokens, (clipped > unclipped).sum() / num_tokens


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """0.5 * mean of max((V - R)^2, (clip(V, Vold - eps, Vold + eps) - R)^2); clip_range None does not clip.

    All (B, T); num_tokens as in `policy_loss`. Returns loss, share of clipped values.
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


@dataclass
class FixedKL:
    """A KL coefficient that stays. [N+ 20]"""

    coefficient: float

    def update(self, kl: float, num_episodes: int) -> None:
        pass


@dataclass
class AdaptiveKL:
    """A KL coefficient that is steered towards a target: Ziegler et al. 2019, section 2.2.

    After an update over num_episodes (of all ranks) with kl nats a response:
    coefficient *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon.
    """

    coefficient: float
    target: float
    horizon: int = 10_000

    def update(self, kl: float, num_episodes: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * num_episodes / self.horizon
