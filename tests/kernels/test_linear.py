"""The product through oneDNN against PyTorch's own, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

import kernels.linear
from kernels.linear import OneDNNLinear, linear, product

has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not has_onednn, reason="this build of PyTorch has no oneDNN linear")


@pytest.fixture
def onednn(monkeypatch):
    """As on a processor where oneDNN is faster."""
    monkeypatch.setattr(kernels.linear, "onednn_product", lambda: torch.ops.mkldnn._linear_pointwise.default)


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
def test_transposed_operands_are_multiplied_correctly(onednn):
    a, b = torch.randn(6, 4).T, torch.randn(6, 9).T
    assert torch.allclose(product(a, b), a @ b.T, atol=1e-5)


@needs_onednn
def test_other_dtypes_and_autocast_use_pytorch(onednn, monkeypatch):
    monkeypatch.setattr(OneDNNLinear, "apply", lambda *_: pytest.fail("went through oneDNN"))
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(torch.randn(2, 0), torch.randn(4, 0)).tolist() == [[0.0] * 4] * 2


def test_without_the_operator_pytorch_is_used(monkeypatch):
    monkeypatch.setattr(kernels.linear, "onednn_product", lambda: None)
    x, weight, bias = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3), torch.randn(4)
    y = linear(x, weight, bias)
    assert torch.equal(y, F.linear(x, weight, bias)) and "OneDNN" not in str(y.grad_fn)


def test_onednn_is_chosen_by_cpu_vendor(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(kernels.linear, "CPUINFO", cpuinfo)
    for text, faster in (("vendor_id : AuthenticAMD", has_onednn), ("vendor_id : GenuineIntel", False), (None, False)):
        cpuinfo.unlink(missing_ok=True)
        if text:
            cpuinfo.write_text(text)
        kernels.linear.onednn_product.cache_clear()
        assert (kernels.linear.onednn_product() is not None) == faster
    kernels.linear.onednn_product.cache_clear()


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
