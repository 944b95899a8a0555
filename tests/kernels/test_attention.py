"""Rotary positions against pairwise rotations, and capped attention against its formula."""

import pytest
import torch

from kernels.attention import apply_rotary_, attend_capped


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_a_product_of_complex_numbers(interleaved) -> None:
    """Three query heads and one key head rotate six of ten channels; the value head and other channels don't change."""
    qkv = torch.randn(2, 4, 5, 10, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    angles = torch.randn(2, 4, 1, 3, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    expected = qkv.clone()
    for i in range(3):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, 3 + i)
        a, b = qkv[:, :, :4, first], qkv[:, :, :4, second]
        cos, sin = angles.cos()[..., i], angles.sin()[..., i]
        expected[:, :, :4, first], expected[:, :, :4, second] = a * cos - b * sin, b * cos + a * sin
    rounded = qkv.bfloat16()
    assert apply_rotary_(qkv, angles.cos(), angles.sin(), 3, interleaved) is qkv
    assert torch.allclose(qkv, expected, atol=1e-12)
    apply_rotary_(rounded, angles.float().cos(), angles.float().sin(), 3, interleaved)
    assert torch.allclose(rounded.double(), expected, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_capped_attention_equals_its_formula_query_by_query(dtype) -> None:
    """Four query heads share two key heads; scaled logits reach ten times the cap; one query sees a single token."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 6).to(dtype), torch.randn(2, 2, 5, 6).to(dtype), torch.randn(2, 2, 5, 6).to(dtype)
    visible = torch.rand(2, 1, 3, 5) > 0.4
    visible[:, :, 0] = torch.arange(5) == 2
    visible[:, :, 1:, 1] = True
    bias = torch.zeros(2, 1, 3, 5).masked_fill(~visible, -torch.inf).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):  # it must not round the logits
        got = attend_capped(q, k, v, bias, scale=2.0, cap=1.5)
    assert got.dtype == dtype
    for b in range(2):
        for h in range(4):
            for i in range(3):
                seen = [j for j in range(5) if visible[b, 0, i, j]]
                logits = torch.stack([q[b, h, i].double() @ k[b, h // 2, j].double() for j in seen])
                weights = (1.5 * (2.0 * logits / 1.5).tanh()).softmax(0)
                expected = sum(w * v[b, h // 2, j].double() for w, j in zip(weights, seen, strict=True))
                tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.01}[dtype]
                assert (got[b, h, i].double() - expected).abs().max() < tolerance
