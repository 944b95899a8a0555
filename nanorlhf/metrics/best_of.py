"""KL from best-of-n to the policy that it samples from, in nats, without best-of-n's probabilities."""

import math

import torch
from torch import Tensor


def best_of_n_bound(n: int) -> float:
    """Return log n - (n - 1) / n, an upper bound, tight if samples never repeat (Beirami et al. 2024, theorem 3.1)."""
    return math.log(n) - (n - 1) / n


def best_of_n_kl(logprobs: Tensor, n: int) -> Tensor:
    """Estimate KL(best of n || policy) from log policy (B,) of the chosen -> (B,) (Beirami et al. 2024, section 4).

    With p the policy's probability of the chosen response:
        (1 - p)^n (log n + (n - 1) log(1 - p) - (n - 1) / n) + (1 - (1 - p)^n) log((1 - (1 - p)^n) / p)
    It equals the bound as p -> 0, and 0 for a deterministic policy. The estimate is its mean over responses.
    """
    p = logprobs.double().exp().clamp(min=1e-300, max=1.0)
    miss = torch.exp(n * torch.log1p(-p))  # (B,) probability that all n samples miss it
    hit = -torch.expm1(n * torch.log1p(-p))
    rest = miss * best_of_n_bound(n) + torch.special.xlogy((n - 1) * miss, 1 - p)
    return (rest + hit * torch.log(hit / p)).float()
