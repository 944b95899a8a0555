"""Rotation of q and k by a Triton kernel against pairwise rotations in float64; without a GPU, in its interpreter."""

import pytest
import torch
from torch import Tensor

import kernels.attention
import kernels.rotary
from kernels.attention import apply_rotary_, rotated_heads
from kernels.rotary import rotary_triton_
from tests.conftest import GPU

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def pair_by_pair(qkv: Tensor, angles: Tensor, n_head: int, interleaved: bool) -> Tensor:
    """In float64: qkv (B, S, H + 2K, D), angles (B or 1, S, 1, r / 2)."""
    y, r = qkv.double().clone(), angles.size(-1)
    heads = (n_head + qkv.size(2)) // 2
    for i in range(r):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, r + i)
        a, b = qkv[:, :, :heads, first].double(), qkv[:, :, :heads, second].double()
        cos, sin = angles.double().cos()[..., i], angles.double().sin()[..., i]
        y[:, :, :heads, first], y[:, :, :heads, second] = a * cos - b * sin, a * sin + b * cos
    return y


def inputs(B: int, S: int, H: int, K: int, D: int, r: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, S, H + 2 * K, D, generator=generator), 3 * torch.randn(B, S, 1, r // 2, generator=generator)


CASES = {  # B, S, H, K, D, r
    "no rows": (0, 3, 2, 1, 8, 8),
    "one pair of one head": (1, 1, 1, 1, 2, 2),
    "all channels": (2, 3, 2, 2, 8, 8),
    "six of ten channels": (2, 4, 3, 1, 10, 6),
    "more heads than a program has": (2, 2, 9, 3, 6, 6),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_pairwise_rotations(case, interleaved, dtype, monkeypatch) -> None:
    """The channels from r on and the value heads are NaN and don't move."""
    monkeypatch.setattr(kernels.rotary, "PAIRS", 16)
    monkeypatch.setattr(kernels.attention, "fuses", lambda x: True)
    B, S, H, K, D, r = CASES[case]
    qkv, angles = inputs(B, S, H, K, D, r)
    qkv = qkv.to(dtype)
    qkv[..., r:] = qkv[:, :, H + K :] = torch.nan
    expected = pair_by_pair(qkv, angles, H, interleaved)
    leaf = qkv.to(DEVICE).requires_grad_()
    tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    heads = rotated_heads(leaf.clone(), *tables, H, interleaved)
    assert [x.shape for x in heads] == [(B, H, S, D), (B, K, S, D), (B, K, S, D)]
    got = torch.cat([x.transpose(1, 2) for x in heads], dim=2)
    assert got.dtype == dtype
    assert torch.allclose(got.cpu().double(), expected, atol=4 * TOLERANCE[dtype], equal_nan=True)
    grad = torch.randn(qkv.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (turned_back,) = torch.autograd.grad(got, leaf, grad.to(DEVICE))
    expected = pair_by_pair(grad, -angles, H, interleaved)
    assert torch.allclose(turned_back.cpu().double(), expected, atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_tensors_are_changed_in_place_and_nothing_else(interleaved) -> None:
    """qkv as a slice of a buffer with another order of dimensions; tables that all rows share, as a slice."""
    B, S, H, K, D, r = 2, 3, 2, 1, 10, 6
    qkv, angles = inputs(B, S, H, K, D, r)
    angles = angles[:1]
    buffer = torch.full((S, B, H + 2 * K, D + 3), torch.nan, device=DEVICE)
    view = buffer.transpose(0, 1)[..., 1 : D + 1]
    view.copy_(qkv)
    cos, sin = (torch.stack((table, table), -1).to(DEVICE)[..., 0] for table in (angles.cos(), angles.sin()))
    assert rotary_triton_(view, cos.expand(B, -1, -1, -1), sin.expand(B, -1, -1, -1), H, interleaved) is view
    assert torch.allclose(view.cpu().double(), pair_by_pair(qkv, angles, H, interleaved), atol=1e-5)
    assert buffer[..., 0].isnan().all() and buffer[..., D + 1 :].isnan().all()


def test_the_kernel_equals_the_reference() -> None:
    """At the positions of a long text, where angles are large."""
    qkv, _ = inputs(1, 3, 2, 2, 16, 16)
    cos, sin = kernels.attention.rotary_tables(torch.tensor([[0, 1, 3071]]), 16, 1e4)
    expected = apply_rotary_(qkv.clone(), cos, sin, 2, False)
    got = rotary_triton_(qkv.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), 2, False)
    assert torch.allclose(got.cpu(), expected, atol=1e-6)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", [(4, 129, 8, 8, 256, 64), (4, 129, 32, 8, 128, 128)])
def test_the_sizes_of_real_models_on_a_device(case, interleaved, device) -> None:
    B, S, H, K, D, r = case
    qkv, angles = inputs(B, S, H, K, D, r)
    qkv = qkv.bfloat16()
    expected = pair_by_pair(qkv, angles, H, interleaved)
    got = rotary_triton_(qkv.to(device), angles.cos().to(device), angles.sin().to(device), H, interleaved)
    assert torch.allclose(got.cpu().double(), expected, atol=4e-2)
