"""The arithmetic of PPO for language models: masks, whitening, the two clipped losses, the KL
coefficient.

Everything is a pure function of tensors; (B, T) tensors hold one number per response token. Masks
are True where a position counts. Elsewhere values are replaced by `torch.where`, never multiplied
by 0: NaN * 0 is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanorlhf.padding import first_true_index


def eos_masks(response: Tensor, eos_id: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each response ends, and the two masks that follow from it (True = counts).

        response   a  b  E  x  y  z      E = EOS, eos_index e = 2; tokens after it do not count
        actions    #  #  #  .  .  .      t <= e      a token was chosen here: KL, policy loss
        states     #  #  #  #  .  .      t <= e + 1  the finished response is a state: value loss

    The value at e + 1 is read at the EOS token itself: the state in which the response is complete.
    A response without EOS ends at its last token that is not [PAD] (T - 1 if it is full).

    response (B, T) -> eos_index (B,), actions (B, T), states (B, T)
    """
    T = response.size(1)
    first_eos = first_true_index(response == eos_id)  # (B,)
    first_pad = first_true_index(response == pad_id)  # (B,)
    eos_index = torch.minimum(first_eos, first_pad - 1).clamp(min=0, max=T - 1)
    index = torch.arange(T, device=response.device)  # (T,)
    return eos_index, index <= eos_index[:, None], index <= eos_index[:, None] + 1


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over positions that count (mask True)."""
    return torch.where(mask, x, 0.0).sum() / mask.sum()


def whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over positions that count; the others become 0. [N+ 24, 25]

    shift_mean False adds the mean back: rewards keep their level, advantages do not. The variance
    is the population's. x (B, T) is the whole rollout, gathered from all ranks, so the statistics
    are global.
    """
    counted = x[mask]  # (N,)
    mean = counted.mean()
    variance = counted.var(correction=0)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return torch.where(mask, whitened, 0.0)


def policy_loss(
    new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, actions: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of each token: max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps)).

    ratio = exp(new_logprobs - logprobs), eps = clip_range; all (B, T). Returns the losses, and
    which tokens are clipped; 0 and False where there is no action. What they are divided by is the
    algorithm's choice, and a count over all ranks and micro-batches.
    """
    ratio = torch.where(actions, new_logprobs - logprobs, 0.0).exp()
    advantages = torch.where(actions, advantages, 0.0)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def value_loss(
    new_values: Tensor, values: Tensor, returns: Tensor, states: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """0.5 * max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) of each token.

    eps = clip_range; None does not clip. All (B, T). Returns the losses, and which values are
    clipped; 0 and False where there is no state.
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
    logprobs: Tensor, sampled_logprobs: Tensor, actions: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling (TIS): Yao et al. 2025, Your efficient RL framework secretly
    brings you off-policy.

        w = min(old probability / sampler's probability, clip)      per token, without a gradient

    Multiplied into the advantages it multiplies the clipped loss, which is homogeneous in them.
    Without truncation the expectation over the sampler's tokens equals the one over the policy's,
    if the sampler can emit every token that the policy can. (B, T) each. Returns w, 0 where there
    is no action, and the share of truncated tokens.
    """
    weights = torch.where(actions, logprobs - sampled_logprobs, -torch.inf).exp()
    return weights.clamp(max=clip), masked_mean((weights > clip).float(), actions)


@dataclass
class KLCoefficient:
    """beta, which tracks a target KL where there is one: Ziegler et al. 2019, section 2.2.

    After an update over num_episodes (of all ranks) with kl nats per response:
    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon.
    """

    value: float
    target: float | None = None  # None: the coefficient is constant [N+ 20]
    horizon: int = 10_000

    def update(self, kl: float, num_episodes: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * num_episodes / self.horizon
