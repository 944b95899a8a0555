"""Rotation of q and k by a Triton kernel against pairwise rotations in float64; without a GPU, in its interpreter."""

import pytest
import torch
from torch import Tensor

import kernels.attention
import kernels.rotary
from kernels.attention import apply_rotary_, rotated_heads, store_rotated
from kernels.rotary import rotary_store_triton, rotary_triton_
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


# ----------------------------------------------------------------------------------------- k and v into a static cache
COLUMN, LENGTH = 3, 5
STORED = {  # B, H, K, D, r
    "no rows": (0, 2, 1, 8, 8),
    "one pair of one head": (1, 1, 1, 2, 2),
    "all channels": (2, 2, 2, 8, 8),
    "six of ten channels": (3, 3, 3, 10, 6),
    "shared keys, q, k and v in one program": (2, 5, 2, 6, 2),
    "more heads than a program has": (2, 9, 3, 12, 4),
}


def empty_cache(B: int, K: int, D: int, order: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three layers full of NaN, as `KVCache` allocates them on a GPU or on a CPU."""
    layout = {"GPU": (0, 1, 2, 3, 4), "CPU": (0, 1, 2, 4, 3)}[order]
    keys = torch.empty_permuted((3, B, K, LENGTH, D), layout, device=DEVICE, dtype=dtype)
    values = torch.empty((3, B, K, LENGTH, D), device=DEVICE, dtype=dtype)
    return keys.fill_(torch.nan), values.fill_(torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["GPU", "CPU"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", STORED)
def test_q_k_and_v_equal_a_rotation_and_two_copies(case, interleaved, order, dtype, monkeypatch) -> None:
    """All other columns, and the layers before and after, stay NaN."""
    monkeypatch.setattr(kernels.rotary, "CHANNELS", 64)
    B, H, K, D, r = STORED[case]
    qkv, angles = (x.to(DEVICE) for x in inputs(B, 1, H, K, D, r))
    qkv, tables, at = qkv.to(dtype), (angles.cos(), angles.sin()), torch.tensor([COLUMN], device=DEVICE)
    results = []
    for on in (False, True):
        monkeypatch.setattr(kernels.attention, "fuses", lambda x, on=on: on)
        keys, values = empty_cache(B, K, D, order, dtype)
        q, k, v = store_rotated(qkv.clone(), *tables, H, interleaved, keys[1], values[1], at)
        assert q.shape == (B, H, 1, D) and q.dtype == dtype
        assert k.data_ptr() == keys[1].data_ptr() and v.data_ptr() == values[1].data_ptr()
        results.append((q, keys, values))
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(fused.double(), plain.double(), atol=4 * TOLERANCE[dtype], equal_nan=True)
    (_, _, expected_values), (q, keys, values) = results
    assert torch.equal(values[1, :, :, COLUMN], expected_values[1, :, :, COLUMN])
    expected = pair_by_pair(qkv.cpu(), angles.cpu(), H, interleaved)
    got = torch.cat((q[:, :, 0], keys[1, :, :, COLUMN], values[1, :, :, COLUMN]), dim=1)
    assert torch.allclose(got.cpu().double(), expected[:, 0], atol=4 * TOLERANCE[dtype])
    assert keys.isfinite().sum() == values.isfinite().sum() == B * K * D


def test_a_cache_of_another_dtype_and_strided_inputs() -> None:
    """bfloat16 qkv as a slice of a buffer, tables that all rows share, a float32 cache; k in qkv is not rotated."""
    B, H, K, D, r = 2, 3, 2, 10, 6
    qkv, angles = inputs(B, 1, H, K, D, r)
    buffer = torch.full((B, 1, H + 2 * K, 2 * D), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    view = buffer[..., ::2]
    view.copy_(qkv)
    expected = pair_by_pair(view.cpu(), angles[:1], H, True)[:, 0]
    before = view[:, 0, H:].clone()
    keys, values = empty_cache(B, K, D, "CPU", torch.float32)
    cos, sin = (x[:1].to(DEVICE).expand(B, -1, -1, -1) for x in (angles.cos(), angles.sin()))
    at = torch.tensor([COLUMN], device=DEVICE, dtype=torch.int32)
    assert rotary_store_triton(view, cos, sin, H, True, keys[0], values[0], at) is view
    assert torch.allclose(view[:, 0, :H].cpu().double(), expected[:, :H], atol=4e-2)
    assert torch.allclose(keys[0, :, :, COLUMN].cpu().double(), expected[:, H : H + K], atol=1e-6)
    assert torch.equal(values[0, :, :, COLUMN].cpu().double(), expected[:, H + K :])
    assert torch.equal(view[:, 0, H:], before) and buffer[..., 1::2].isnan().all()
    assert keys.isfinite().sum() == values.isfinite().sum() == B * K * D


def test_q_and_k_with_a_gradient_keep_it(monkeypatch) -> None:
    monkeypatch.setattr(kernels.attention, "fuses", lambda x: True)
    qkv, angles = inputs(2, 1, 3, 2, 8, 4)
    leaf, at = qkv.to(DEVICE).requires_grad_(), torch.tensor([1], device=DEVICE)
    keys, values = (torch.zeros(2, 2, 3, 8, device=DEVICE) for _ in range(2))
    tables = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    heads = store_rotated(leaf.clone(), *tables, 3, False, keys, values, at)
    grad = torch.ones(qkv.shape, dtype=torch.float64)
    (got,) = torch.autograd.grad(sum(x.sum() for x in heads), leaf)
    assert torch.allclose(got.cpu().double(), pair_by_pair(grad, -angles, 3, False), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- on a device
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", [(64, 8, 8, 256, 64), (8, 32, 8, 128, 128)])
def test_a_decode_step_of_real_models_on_a_device(case, interleaved, device) -> None:
    B, H, K, D, r = case
    qkv, angles = inputs(B, 1, H, K, D, r)
    qkv = qkv.bfloat16()
    expected = pair_by_pair(qkv, angles, H, interleaved)[:, 0]
    keys, values = empty_cache(B, K, D, "GPU", torch.bfloat16)
    at, qkv = torch.tensor([COLUMN], device=device), qkv.to(device)
    rotary_store_triton(qkv, angles.cos().to(device), angles.sin().to(device), H, interleaved, keys[0], values[0], at)
    got = torch.cat((qkv[:, 0, :H], keys[0, :, :, COLUMN], values[0, :, :, COLUMN]), dim=1)
    assert torch.allclose(got.cpu().double(), expected, atol=4e-2)
    assert keys.isfinite().sum() == values.isfinite().sum() == B * K * D


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
