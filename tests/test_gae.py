"""GAE three ways against a double loop in float64; the Triton source runs in its interpreter where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gae
from kernels.gae import BLOCK, gae_doubling, gae_loop
from kernels.gae import gae_triton as gae_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gae_triton(rewards, values, gamma, lam):
    pytest.importorskip("triton", reason="triton is not installed")
    advantages, returns = gae_launch(rewards.to(DEVICE), values.to(DEVICE), gamma, lam)
    return advantages.cpu(), returns.cpu()


WAYS = {"loop": gae_loop, "doubling": gae_doubling, "triton": gae_triton}


def double_loop(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, written out."""
    B, T = rewards.shape
    values = torch.cat((values.double(), torch.zeros(B, 1)), dim=1)
    advantages = torch.zeros(B, T, dtype=torch.float64)
    for t in range(T):
        for k in range(T - t):
            delta = rewards[:, t + k].double() + gamma * values[:, t + k + 1] - values[:, t + k]
            advantages[:, t] += (gamma * lam) ** k * delta
    return advantages


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 4), st.integers(0, 40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_a_double_loop_in_float64(way, B, T, gamma, lam, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(B, T, generator=generator), torch.randn(B, T, generator=generator)
    advantages, returns = WAYS[way](rewards, values, gamma, lam)
    expected = double_loop(rewards, values, gamma, lam)
    assert torch.allclose(advantages.double(), expected, atol=1e-4)
    assert torch.allclose(returns.double(), expected + values, atol=1e-4)


@pytest.mark.parametrize("T", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
@pytest.mark.parametrize("way", ["doubling", "triton"])
def test_rows_around_and_beyond_a_block_equal_the_loop(way, T) -> None:
    generator = torch.Generator().manual_seed(T)
    rewards, values = torch.randn(2, T, generator=generator), torch.randn(2, T, generator=generator)
    expected = gae_loop(rewards.double(), values.double(), 0.999, 0.98)
    for got, want in zip(WAYS[way](rewards, values, 0.999, 0.98), expected, strict=True):
        assert torch.allclose(got.double(), want, atol=1e-3)


@pytest.mark.parametrize("gamma_lam", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("way", WAYS)
def test_the_extremes_are_monte_carlo_and_one_step(way, gamma_lam) -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    expected = {
        (1.0, 1.0): [[7.0 - 10, 6.0 - 20, 4.0 - 30]],  # all rewards to come, less the value
        (1.0, 0.0): [[1.0 + 20 - 10, 2.0 + 30 - 20, 4.0 - 30]],  # one step and the next value
        (0.0, 1.0): [[1.0 - 10, 2.0 - 20, 4.0 - 30]],
    }[gamma_lam]
    assert WAYS[way](rewards, values, *gamma_lam)[0].tolist() == expected


def test_nothing_behind_the_mask_moves_an_advantage() -> None:
    rewards, values = torch.randn(3, 9), torch.randn(3, 9)
    mask = torch.arange(9) > torch.tensor([[8], [4], [-1]])  # none, some, all
    advantages, returns = gae(rewards, values, 1.0, 0.95, mask)
    for poison in (1e6, torch.nan):
        again = gae(rewards.masked_fill(mask, poison), values.masked_fill(mask, poison), 1.0, 0.95, mask)
        assert torch.equal(advantages, again[0]) and torch.equal(returns, again[1])
    assert (advantages[mask] == 0).all() and (returns[mask] == 0).all()
    alone, _ = gae(rewards[1:2, :5], values[1:2, :5], 1.0, 0.95)
    assert torch.allclose(advantages[1, :5], alone[0], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    rewards, values = torch.randn(512, 1024), torch.randn(512, 1024)
    for got, want in zip(gae(rewards.cuda(), values.cuda(), 1.0, 0.95), gae(rewards, values, 1.0, 0.95), strict=True):
        assert torch.allclose(got.cpu(), want, atol=1e-3)
