"""GAE three ways against a double loop in float64; without a GPU the Triton source runs in its interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gae, penalised_gae
from kernels.gae import BLOCK, gae_doubling, gae_loop, penalised_gae_triton
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
def test_extreme_settings_are_monte_carlo_and_one_step(way, gamma_lam) -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    expected = {
        (1.0, 1.0): [[7.0 - 10, 6.0 - 20, 4.0 - 30]],  # all future rewards minus the value
        (1.0, 0.0): [[1.0 + 20 - 10, 2.0 + 30 - 20, 4.0 - 30]],  # one step and the next value
        (0.0, 1.0): [[1.0 - 10, 2.0 - 20, 4.0 - 30]],
    }[gamma_lam]
    assert WAYS[way](rewards, values, *gamma_lam)[0].tolist() == expected


def test_the_kernel_writes_its_rows_and_nothing_beyond() -> None:
    """Two rows of 5 in blocks of 8; 8 more floats stand after them."""
    pytest.importorskip("triton", reason="triton is not installed")
    from kernels.gae import gae_kernel

    inputs = torch.randn(2, 18, generator=torch.Generator().manual_seed(0))
    outputs = torch.full((2, 18), 7.0)
    rewards, values, advantages, returns = (x.to(DEVICE) for x in (*inputs, *outputs))
    gae_kernel[(2,)](rewards, values, advantages, returns, 5, 0.9, 0.9 * 0.8, BLOCK=8)
    expected = gae_loop(inputs[0, :10].view(2, 5), inputs[1, :10].view(2, 5), 0.9, 0.8)
    for got, want in zip((advantages, returns), expected, strict=True):
        assert torch.allclose(got[:10].cpu().view(2, 5), want, atol=1e-5) and (got[10:] == 7).all()


def test_masked_positions_do_not_change_advantages() -> None:
    rewards, values = torch.randn(3, 9), torch.randn(3, 9)
    mask = torch.arange(9) > torch.tensor([[8], [4], [-1]])  # none, some, all
    advantages, returns = gae(rewards, values, 1.0, 0.95, mask)
    for poison in (1e6, torch.nan):
        again = gae(rewards.masked_fill(mask, poison), values.masked_fill(mask, poison), 1.0, 0.95, mask)
        assert torch.equal(advantages, again[0]) and torch.equal(returns, again[1])
    assert (advantages[mask] == 0).all() and (returns[mask] == 0).all()
    alone, _ = gae(rewards[1:2, :5], values[1:2, :5], 1.0, 0.95)
    assert torch.allclose(advantages[1, :5], alone[0], atol=1e-6)


# ------------------------------------------------------------------------------------------------------- the fused form
@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["after_eos", "last_token"]),
    st.integers(0, 1000),
)
@pytest.mark.parametrize("way", ["cpu", "triton"])
def test_the_fused_form_equals_its_steps_in_float64_whatever_follows_the_end(
    way, B, T, gamma, lam, score_at, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs, values = torch.randn(3, B, T, generator=generator)
    scores, eos_index = torch.randn(B, generator=generator), torch.randint(T, (B,), generator=generator)
    index = torch.arange(T)
    no_action, no_state = index > eos_index[:, None], index > eos_index[:, None] + (score_at == "after_eos")
    poisoned = [logprobs.masked_fill(no_action, torch.nan), ref_logprobs.masked_fill(no_action, torch.inf)]
    inputs = [*poisoned, values.masked_fill(no_state, torch.nan), scores, eos_index]
    if way == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        inputs = [x.to(DEVICE) for x in inputs]
        result = penalised_gae_triton(*inputs, 0.1, gamma, lam, score_at == "after_eos")
    else:
        result = penalised_gae(*inputs, 0.1, gamma, lam, score_at)

    kl = torch.where(no_action, 0.0, (logprobs - ref_logprobs).double())
    rewards = -0.1 * kl
    for b in range(B):  # the score, once
        rewards[b, min(int(eos_index[b]) + (score_at == "after_eos"), T - 1)] += scores[b]
    values = torch.where(no_state, 0.0, values)
    advantages = torch.where(no_state, 0.0, double_loop(rewards, values, gamma, lam))
    expected = [rewards, kl, advantages, advantages + values]
    for got, want in zip(result[:4], expected, strict=True):
        assert torch.allclose(got.cpu().double(), want, atol=1e-4)
    mean, variance = result[4]
    actions = advantages[~no_action]
    assert mean.item() == pytest.approx(actions.mean().item(), abs=1e-4)
    assert variance.item() == pytest.approx(actions.var(correction=0).item(), abs=1e-3)


def test_the_fused_form_merges_blocks_and_keeps_a_small_variance_beside_a_large_mean() -> None:
    """Rows longer than a block; advantages of 1000 +- 1, where E[x^2] - E[x]^2 would lose the variance."""
    pytest.importorskip("triton", reason="triton is not installed")
    B, T = 2, 2 * BLOCK + 77
    generator = torch.Generator().manual_seed(0)
    zeros, eos_index = torch.zeros(B, T), torch.tensor([T - 1, BLOCK + 5])
    values = torch.randn(B, T, generator=generator) - 1000
    inputs = [x.to(DEVICE) for x in (zeros, zeros, values, torch.zeros(B), eos_index)]
    _, _, advantages, _, (mean, variance) = penalised_gae_triton(*inputs, 0.1, 0.0, 0.0, True)
    actions = -values[torch.arange(T) <= eos_index[:, None]].double()
    assert torch.equal(advantages.cpu()[0], -values[0])
    assert mean.item() == pytest.approx(actions.mean().item(), rel=1e-6)
    assert variance.item() == pytest.approx(actions.var(correction=0).item(), rel=1e-3)
    carried = penalised_gae_triton(*inputs, 0.1, 0.999, 0.98, True)[2].cpu()
    want = gae_loop(zeros.double(), values.double(), 0.999, 0.98)[0]
    assert torch.allclose(carried[0].double(), want[0], rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_equals_the_cpu() -> None:
    rewards, values = torch.randn(512, 1024), torch.randn(512, 1024)
    for got, want in zip(gae(rewards.cuda(), values.cuda(), 1.0, 0.95), gae(rewards, values, 1.0, 0.95), strict=True):
        assert torch.allclose(got.cpu(), want, atol=1e-3)
