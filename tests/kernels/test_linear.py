"""Matmuls with oneDNN against PyTorch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

import kernels.linear
from kernels import processor
from kernels.linear import (
    ACTIVATIONS,
    OneDNNLinear,
    PackedWeight,
    is_worth_packing,
    linear,
    matmul_into,
)

has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not has_onednn, reason="this build of PyTorch has no oneDNN linear")


@pytest.fixture
def onednn(monkeypatch):
    """Choose oneDNN for every shape."""
    monkeypatch.setattr(kernels.linear, "onednn_matmul", lambda: torch.ops.mkldnn._linear_pointwise.default)
    monkeypatch.setattr(kernels.linear, "is_for_onednn", kernels.linear.fits_onednn)


@needs_onednn
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (0, 5), (1, 1, 64), (4, 1)])
@pytest.mark.parametrize("num_out", [1, 3, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_onednn_equals_float64_forward_and_backward(onednn, shape, num_out, with_bias):
    torch.manual_seed(0)
    tensors = [torch.randn(*shape), torch.randn(num_out, shape[-1]), torch.randn(num_out)][: 2 + with_bias]
    results = []
    for function, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        inputs = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in tensors]
        y = function(*inputs)
        if dtype == torch.float32:
            assert "OneDNN" in str(y.grad_fn) or "OneDNN" in str(y.grad_fn.next_functions)
        (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
        results.append([y, *(tensor.grad for tensor in inputs)])
    for one, other in zip(*results, strict=True):
        assert one.shape == other.shape and torch.allclose(one.double(), other, atol=1e-4)


@needs_onednn
def test_only_the_required_gradients_are_computed(onednn):
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5, requires_grad=True), torch.randn(3)
    linear(x, weight, bias).sum().backward()
    assert x.grad is None and bias.grad is None and weight.grad.shape == (3, 5)


@needs_onednn
def test_a_bias_gets_a_gradient_even_if_weight_and_input_need_none(onednn):
    """The first layer with BitFit: neither its inputs nor its weight need a gradient."""
    x, weight, bias = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3, requires_grad=True)
    for activation, slope in ((None, torch.full((4, 3), 1.0)), ("relu", (x @ weight.T + bias > 0).float())):
        bias.grad = None
        linear(x, weight, bias, activation).sum().backward()
        assert x.grad is None and weight.grad is None and torch.equal(bias.grad, slope.sum(0))


@needs_onednn
def test_transposed_operands_are_multiplied_correctly(onednn):
    a, b = torch.randn(6, 4).T, torch.randn(6, 9).T
    assert torch.allclose(linear(a, b), a @ b.T, atol=1e-5)


@needs_onednn
def test_other_dtypes_and_autocast_use_pytorch(onednn, monkeypatch):
    monkeypatch.setattr(OneDNNLinear, "apply", lambda *_: pytest.fail("went through oneDNN"))
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(torch.randn(2, 0), torch.randn(4, 0)).tolist() == [[0.0] * 4] * 2


def test_without_the_operator_pytorch_is_used(monkeypatch):
    monkeypatch.setattr(kernels.linear, "onednn_matmul", lambda: None)
    x, weight, bias = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3), torch.randn(4)
    y = linear(x, weight, bias)
    assert torch.equal(y, F.linear(x, weight, bias)) and "OneDNN" not in str(y.grad_fn)


@needs_onednn
@pytest.mark.parametrize(("rows", "is_fast"), [(1, False), (7, False), (8, True), (511, True), (512, False)])
def test_only_forward_matmuls_of_some_rows_and_large_weights_use_onednn(monkeypatch, rows, is_fast):
    operator, seen = torch.ops.mkldnn._linear_pointwise.default, []
    monkeypatch.setattr(kernels.linear, "onednn_matmul", lambda: lambda *all: seen.append(1) or operator(*all))
    x, large, smaller = torch.randn(rows, 1024), torch.randn(1024, 1024), torch.randn(1023, 1024)
    linear(x[:, None], large)
    assert len(seen) == is_fast
    linear(x, large.requires_grad_()).sum().backward()
    assert len(seen) == 2 * is_fast  # not for gradients
    linear(x, smaller)
    monkeypatch.setattr(processor, "chosen", processor.PLAIN)
    linear(x, large)
    assert len(seen) == 2 * is_fast


def test_the_plain_choice_equals_pytorchs_linear_to_the_last_bit(monkeypatch):
    torch.manual_seed(0)
    tensors = torch.randn(16, 1024), torch.randn(1024, 1024), torch.randn(1024)
    monkeypatch.setattr(processor, "chosen", processor.PLAIN)
    results = []
    for function in (linear, F.linear):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        y = function(*inputs)
        y.square().sum().backward()
        results.append([y, *(tensor.grad for tensor in inputs)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(linear(*tensors, "gelu"), F.gelu(F.linear(*tensors)))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_is_written_into_rows_of_a_larger_tensor(add, dtype):
    a, b, total = torch.randn(5, 3).T.to(dtype), torch.randn(4, 5).to(dtype), torch.ones(9, 4)  # (3, 5), (4, 5)
    matmul_into(total[2:5], a, b, add)
    expected = torch.ones(9, 4, dtype=torch.float64)
    expected[2:5] = a.double() @ b.double().T + add
    assert torch.allclose(total.double(), expected, atol=1e-5 if dtype == torch.float32 else 0.05)


@needs_onednn
@pytest.mark.parametrize("activation", [name for name in kernels.linear.ACTIVATIONS if name])
@pytest.mark.parametrize("with_grad", [False, True])
def test_fused_activations_equal_separate_ones(onednn, activation, with_grad):
    torch.manual_seed(0)
    x, weight, bias = 3 * torch.randn(9, 5), torch.randn(7, 5, requires_grad=with_grad), torch.randn(7)
    plain = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = {
        "gelu": 0.5 * plain * (1 + torch.erf(plain / 2**0.5)),
        "gelu_new": 0.5 * plain * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (plain + 0.044715 * plain**3))),
        "relu": plain.clamp(min=0),
        "silu": plain / (1 + (-plain).exp()),
    }[activation]
    assert torch.allclose(linear(x, weight, bias, activation).double(), expected, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_a_packed_weight_equals_the_plain_weight_up_to_rounding(onednn, rows):
    """Two packed copies agree bit for bit. With few rows, some processors sum a plain weight in another order."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, rows, 96), torch.randn(200, 96), torch.randn(200)
    packed, again = PackedWeight(weight), PackedWeight(weight)
    for maybe_bias in (bias, None):
        plain = F.linear(x.double(), weight.double(), None if maybe_bias is None else maybe_bias.double())
        for activation, (function, _) in ACTIVATIONS.items():
            y = linear(x, packed, maybe_bias, activation)
            assert y.shape == plain.shape and torch.allclose(y.double(), function(plain), atol=1e-5)
            assert torch.equal(y, linear(x, again, maybe_bias, activation))


@needs_onednn
def test_only_large_float32_weights_are_packed(onednn, monkeypatch):
    large, small = torch.empty(2**10, 2**10), torch.empty(2**10, 2**9)
    assert is_worth_packing(large) and not is_worth_packing(small) and not is_worth_packing(large.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_worth_packing(large)
    monkeypatch.setattr(processor, "chosen", processor.PLAIN)
    assert not is_worth_packing(large)
