"""How far the best of n samples is from the policy that gave them, in nats: its KL, without its probabilities."""

import math

import torch
from torch import Tensor


def best_of_n_bound(n: int) -> float:
    """log n - (n - 1) / n, reached where no sample comes twice; never too low (Beirami et al. 2024, theorem 3.1)."""
    return math.log(n) - (n - 1) / n


def best_of_n_kl(logprobs: Tensor, n: int) -> Tensor:
    """Beirami et al.'s estimate (section 4) of KL(best of n || policy), from log policy (B,) of the chosen -> (B,).

    With p the probability of the chosen response, which is among the n samples by chance as well:
        (1 - p)^n (log n + (n - 1) log(1 - p) - (n - 1) / n) + (1 - (1 - p)^n) log((1 - (1 - p)^n) / p)
    The bound where p is near 0, and 0 where the policy always says the same. Its mean over responses is the estimate.
    """
    p = logprobs.double().exp().clamp(min=1e-300, max=1.0)
    none = torch.exp(n * torch.log1p(-p))  # (B,) that n samples all miss it
    some = -torch.expm1(n * torch.log1p(-p))
    rest = none * best_of_n_bound(n) + torch.special.xlogy((n - 1) * none, 1 - p)
    return (rest + some * torch.log(some / p)).float()
