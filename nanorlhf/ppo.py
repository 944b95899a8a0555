"""The arithmetic of PPO for language models: masks, KL penalty, whitening, the two losses.

Everything is a pure function of tensors; (B, T) tensors hold one number per response token. Masks are True where a
position does not count. Masked values are replaced by `torch.where`, never multiplied by 0: NaN * 0 is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gae import kl_penalised_rewards
from nanorlhf.padding import first_true_index

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "eos_masks",
    "kl_penalised_rewards",
    "masked_mean",
    "policy_loss",
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
