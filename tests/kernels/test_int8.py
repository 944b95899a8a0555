"""The 8-bit matmul against hand-computed integers, its reference implementation and float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.int8 import Int8Weight, reference_matmul
from kernels.linear import linear, wide_linear
from kernels.processor import has_int8_matmul

pytestmark = pytest.mark.skipif(not has_int8_matmul(), reason="this processor has no VNNI")


def test_a_hand_computed_matmul():
    """The weight's scales are 1 and 2, those for x 1 and 0.5: all numbers are multiples, so nothing is rounded."""
    weight = torch.tensor([[127.0, -3.0, 0.0], [254.0, 2.0, -4.0]])
    x = torch.tensor([[127.0, 1.0, -127.0], [63.5, -0.5, 10.0]])
    expected = [[127 * 127 - 3.0, 254 * 127 + 2 + 4 * 127.0], [127 * 63.5 + 1.5, 254 * 63.5 - 1 - 40.0]]
    assert Int8Weight(weight).matmul(x).tolist() == expected
    assert Int8Weight(weight).matmul(x, torch.tensor([0.5, -torch.inf])).tolist() == [
        [expected[0][0] + 0.5, -torch.inf],
        [expected[1][0] + 0.5, -torch.inf],
    ]


def test_half_a_step_is_rounded_to_even():
    """The scale depends only on the largest number in the row."""
    weight = Int8Weight(torch.eye(4) * 127)
    rows = [[127.0, 0.5, 0.51, 1.5], [127.0, -0.51, -0.5, -1.5], [1270.0, 5.0, 5.1, 15.0]]
    y = weight.matmul(torch.tensor(rows)) / 127
    assert y.tolist() == [[127.0, 0.0, 1.0, 2.0], [127.0, -1.0, 0.0, -2.0], [1270.0, 0.0, 10.0, 20.0]]


@pytest.mark.parametrize("shape", [(1, 2), (7, 5), (2, 3, 130), (0, 16), (65, 768)])
@pytest.mark.parametrize("num_out", [1, 3, 50, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_matmul_equals_the_reference(shape, num_out, dtype):
    torch.manual_seed(0)
    x, weight, bias = 3 * torch.randn(*shape).to(dtype), torch.randn(num_out, shape[-1]), torch.randn(num_out)
    for maybe_bias in (None, bias):
        y, exact = Int8Weight(weight).matmul(x, maybe_bias), reference_matmul(x, weight, maybe_bias)
        assert y.dtype == torch.float32 and y.shape == exact.shape == (*shape[:-1], num_out)
        assert torch.allclose(y.double(), exact, atol=1e-5, rtol=1e-6)


def test_the_error_matches_two_roundings_to_8_bits():
    """Rounding errors are uniform within half a step, so their std is step / sqrt(12); step = row maximum / 127."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 768), torch.randn(500, 768)
    exact = x.double() @ weight.double().T
    error = (Int8Weight(weight).matmul(x).double() - exact).square().mean().sqrt()
    steps = [(rows.abs().amax(1) / 127).square().mean() / 12 for rows in (x, weight)]
    expected = (768 * (steps[0] + steps[1])).sqrt()  # each is multiplied by numbers with variance 1
    assert error == pytest.approx(expected.item(), rel=0.03) and expected < 0.012 * exact.std()


def test_rows_are_independent_to_the_last_bit():
    torch.manual_seed(0)
    x, weight = torch.randn(33, 96), Int8Weight(torch.randn(200, 96))
    together = weight.matmul(x)
    assert all(torch.equal(together[i : i + 1], weight.matmul(x[i : i + 1])) for i in range(33))
    x[5] *= 1e4  # with one scale for all rows, the others would become 0
    assert torch.equal(weight.matmul(x)[:5], together[:5])


def test_zeros_stay_zero_and_nonfinite_inputs_show():
    x, rows = torch.randn(3, 8), torch.randn(4, 8)
    x[1], rows[2] = 0.0, 0.0
    y = Int8Weight(rows).matmul(x)
    assert (y[1] == 0).all() and (y[:, 2] == 0).all() and y.isfinite().all() and (y != 0).any()
    x[0, 3], rows[1, 5], rows[3, 2] = torch.nan, torch.nan, torch.inf
    assert (~Int8Weight(rows).matmul(x).isfinite()).tolist() == [[True] * 4, *[[False, True, False, True]] * 2]


def test_linear_accepts_an_int8_weight_like_a_tensor():
    torch.manual_seed(0)
    x, rows, bias = torch.randn(2, 5, 16), torch.randn(7, 16), torch.randn(7)
    weight = Int8Weight(rows)
    assert torch.equal(wide_linear(x, weight, bias), weight.matmul(x, bias))
    assert torch.equal(linear(x, weight, bias, "gelu_new"), F.gelu(weight.matmul(x, bias), approximate="tanh"))
    assert not linear(x.requires_grad_(), weight).requires_grad
