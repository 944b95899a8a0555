"""Rotary positions by complex numbers, as pairs of channels are rotated."""

import pytest
import torch

from kernels.attention import apply_rotary_


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_a_product_of_complex_numbers(interleaved) -> None:
    """Six of ten channels of three query heads and one key head; the value head and the other channels stay."""
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
