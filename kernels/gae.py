"""Generalised advantage estimation."""

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """rewards, values (B, T) -> advantages, returns (B, T).

    delta_t = r_t + gamma * V_{t+1} - V_t with V_T = 0;  A_t = delta_t + gamma * lam * A_{t+1};  returns = A + V.
    Rewards and values behind a response's end must be 0 already, or V there would leak into its last tokens.
    """
    next_values = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)  # V_{t+1}
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    running = deltas.new_zeros(deltas.size(0))
    for t in reversed(range(deltas.size(1))):
        running = deltas[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages, advantages + values
