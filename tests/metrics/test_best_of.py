"""The KL of best-of-n against the exact one over a few outcomes with a known order."""

import math

import pytest
import torch

from nanorlhf.metrics.best_of import best_of_n_bound, best_of_n_kl


def best_of_n(p: torch.Tensor, n: int) -> torch.Tensor:
    """Return the distribution of best-of-n over ascending outcomes: P(all n <= x) - P(all n < x)."""
    upto = p.cumsum(0)
    return upto**n - (upto - p) ** n


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_bound_holds_and_the_estimate_is_closer_to_the_exact_kl(n):
    generator, errors = torch.Generator().manual_seed(n), []
    for size in (2, 5, 30, 300):
        for _ in range(20):
            p = (2 * torch.randn(size, dtype=torch.float64, generator=generator)).softmax(0)
            q = best_of_n(p, n)
            exact = torch.special.xlogy(q, q / p).sum().item()
            estimate = (q * best_of_n_kl(p.log(), n)).sum().item()
            assert exact <= best_of_n_bound(n) + 1e-9 and estimate <= best_of_n_bound(n) + 1e-6
            errors.append((abs(estimate - exact), best_of_n_bound(n) - exact))
    ours, of_the_bound = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    assert ours < 0.5 * of_the_bound


def test_at_the_ends_the_estimate_is_the_bound_and_zero():
    rare, sure = best_of_n_kl(torch.tensor([-200.0, 0.0]), 16).tolist()
    assert rare == pytest.approx(math.log(16) - 15 / 16) and sure == 0
    assert best_of_n_bound(1) == 0 and best_of_n_kl(torch.tensor([-0.5, -9.0]), 1).abs().max() < 1e-6
