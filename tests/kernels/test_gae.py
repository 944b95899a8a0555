"""Three implementations of GAE against a double loop in float64; without a GPU, Triton runs in its interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gae
from kernels.gae import BLOCK, gae_doubling, gae_loop
from kernels.gae import gae_triton as gae_launch
from tests.conftest import GPU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gae_triton(rewards, values, gamma, lam):
    pytest.importorskip("triton", reason="triton is not installed")
    advantages, returns = gae_launch(rewards.to(DEVICE), values.to(DEVICE), gamma, lam)
    return advantages.cpu(), returns.cpu()


WAYS = {"loop": gae_loop, "doubling": gae_doubling, "triton": gae_triton}


def double_loop(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Compute A_t = sum over k of (gamma lam)^k delta_{t+k} with two loops."""
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
def test_extreme_settings_are_monte_carlo_and_one_step(way, gamma_lam) -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    expected = {
        (1.0, 1.0): [[7.0 - 10, 6.0 - 20, 4.0 - 30]],  # all future rewards minus the value
        (1.0, 0.0): [[1.0 + 20 - 10, 2.0 + 30 - 20, 4.0 - 30]],  # one step and the next value
        (0.0, 1.0): [[1.0 - 10, 2.0 - 20, 4.0 - 30]],
    }[gamma_lam]
    assert WAYS[way](rewards, values, *gamma_lam)[0].tolist() == expected


def test_the_kernel_writes_its_rows_and_nothing_beyond() -> None:
    """Two rows of 5 in blocks of 8, followed by 8 more floats."""
    pytest.importorskip("triton", reason="triton is not installed")
    from kernels.gae import gae_kernel

    inputs = torch.randn(2, 18, generator=torch.Generator().manual_seed(0))
    outputs = torch.full((2, 18), 7.0)
    rewards, values, advantages, returns = (x.to(DEVICE) for x in (*inputs, *outputs))
    gae_kernel[(2,)](rewards, values, advantages, returns, 5, 0.9, 0.9 * 0.8, BLOCK=8)
    expected = gae_loop(inputs[0, :10].view(2, 5), inputs[1, :10].view(2, 5), 0.9, 0.8)
    for got, want in zip((advantages, returns), expected, strict=True):
        assert torch.allclose(got[:10].cpu().view(2, 5), want, atol=1e-5) and (got[10:] == 7).all()


def test_positions_without_a_state_do_not_change_advantages() -> None:
    rewards, values = torch.randn(3, 9), torch.randn(3, 9)
    states = torch.arange(9) <= torch.tensor([[8], [4], [-1]])  # all, some, none
    advantages, returns = gae(rewards, values, 1.0, 0.95, states)
    for poison in (1e6, torch.nan):
        again = gae(rewards.where(states, poison), values.where(states, poison), 1.0, 0.95, states)
        assert torch.equal(advantages, again[0]) and torch.equal(returns, again[1])
    assert (advantages[~states] == 0).all() and (returns[~states] == 0).all()
    alone, _ = gae(rewards[1:2, :5], values[1:2, :5], 1.0, 0.95)
    assert torch.allclose(advantages[1, :5], alone[0], atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_device_equals_the_loop_at_real_sizes(device) -> None:
    rewards, values = torch.randn(512, 1024), torch.randn(512, 1024)
    expected = gae_loop(rewards.double(), values.double(), 1.0, 0.95)
    for got, want in zip(gae(rewards.to(device), values.to(device), 1.0, 0.95), expected, strict=True):
        assert torch.allclose(got.cpu().double(), want, atol=1e-3)
