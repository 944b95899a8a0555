"""Activations with a bias or a gate against float64; without a GPU, Triton runs in its interpreter."""

import math

import pytest
import torch
from torch import Tensor

import kernels.activation
import nanorlhf.layers
from kernels.activation import activated, activated_reference, gated, gated_reference
from kernels.linear import ACTIVATIONS
from nanorlhf.layers import Linear, gated_linear
from tests.conftest import GPU

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [kind for kind in ACTIVATIONS if kind is not None]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NUMBERS = (-1e4, -30.0, -5.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 1.0, 5.0, 30.0, 1e4)


def value(x: float, kind: str) -> float:
    """One number, from the definition."""
    if kind == "relu":
        return max(x, 0.0)
    if kind == "silu":
        return x / (1 + math.exp(-x)) if x > -700 else 0.0
    if kind == "gelu":
        return x * math.erfc(-x / math.sqrt(2)) / 2
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_has_the_value_of_the_definition(kind) -> None:
    x = torch.tensor([NUMBERS], device=DEVICE)
    expected = torch.tensor([value(number, kind) for number in NUMBERS], dtype=torch.float64)
    for y in (
        activated(x, torch.zeros(len(NUMBERS), device=DEVICE), kind), gated(x, torch.ones_like(x), kind),
    ):  # fmt: skip
        assert torch.allclose(y[0].cpu().double(), expected, rtol=1e-5, atol=1e-6)


def compare(way, reference, inputs: list[Tensor], dtype: torch.dtype, kind: str, other: torch.dtype) -> None:
    """Compare values and gradients with float64 from the same rounded inputs; `other` is the second input's dtype."""
    generator = torch.Generator().manual_seed(1)
    typed = [x.to(DEVICE, t).requires_grad_() for x, t in zip(inputs, (dtype, other), strict=True)]
    # the kernel rounds the bias to x's dtype, towards 0 in the interpreter
    exact = [x.detach().cpu().double().requires_grad_() for x in typed]
    y, expected = way(*typed, kind), reference(*exact, kind)
    assert y.dtype == dtype and y.shape == expected.shape
    grad = torch.randn(y.shape, generator=generator)
    grad = grad.to(dtype).double()
    results = y, *torch.autograd.grad(y, typed, grad.to(y))
    expected = expected, *torch.autograd.grad(expected, exact, grad)
    for ours, theirs in zip(results, expected, strict=True):
        scale = 1 + (theirs.abs().max().item() if theirs.numel() else 0)
        assert torch.allclose(ours.detach().cpu().double(), theirs.detach(), atol=TOLERANCE[dtype] * scale, rtol=0)
    assert [x.dtype for x in results[1:]] == [dtype, other]


SIZES = [(0, 5), (1, 1), (3, 1), (1, 33), (17, 32), (5, 70)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_activation_and_bias_equal_float64(kind, dtype, monkeypatch) -> None:
    """Rows and columns of several blocks, whole and partly filled."""
    for name, size in (("BLOCK_M", 32), ("STEP", 2), ("ROWS", 8)):
        monkeypatch.setattr(kernels.activation, name, size)
    generator = torch.Generator().manual_seed(0)
    for N, M in SIZES:
        x, bias = torch.randn(N, M, generator=generator), torch.randn(M, generator=generator)
        compare(activated, activated_reference, [x, bias], dtype, kind, other=torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation_equals_float64(kind, dtype, monkeypatch) -> None:
    monkeypatch.setattr(kernels.activation, "BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    for N, M in SIZES:
        gate, up = torch.randn(2, N, M, generator=generator)
        compare(gated, gated_reference, [gate, up], dtype, kind, other=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_does_not_spread_and_nothing_is_read_beyond_the_rows(kind) -> None:
    """Inputs are slices of buffers of NaN; a NaN reaches its own outputs and the sum over its column."""
    buffers = torch.full((3, 5, 12), torch.nan, device=DEVICE)
    buffers[:, 1:4, :7] = torch.randn(3, 3, 7, device=DEVICE)
    buffers[0, 2, 4] = torch.nan
    x, up, grad = buffers[:, 1:4, :7].unbind()
    bias = torch.randn(7, device=DEVICE).requires_grad_()
    x, up = x.requires_grad_(), up.requires_grad_()
    is_nan = torch.zeros(3, 7, dtype=torch.bool, device=DEVICE)
    is_nan[1, 4] = True
    y = activated(x, bias, kind)
    grad_x, grad_bias = torch.autograd.grad(y, (x, bias), grad)
    gated_y = gated(x, up, kind)
    grad_gate, grad_up = torch.autograd.grad(gated_y, (x, up), grad)
    tensors = [y, gated_y, grad_up] if kind == "relu" else [y, gated_y, grad_up, grad_x, grad_gate]
    for tensor in tensors:
        assert torch.equal(tensor.isnan(), is_nan)
    assert kind == "relu" or grad_bias.isnan().tolist() == [i == 4 for i in range(7)]


def test_the_bias_is_rounded_like_the_weight() -> None:
    """Under autocast a matmul rounds the bias to bfloat16; a bias that is stored so gives the same bits."""
    x, bias = torch.randn(4, 9).to(DEVICE, torch.bfloat16), torch.randn(9, device=DEVICE).bfloat16()
    assert torch.equal(activated(x, bias.float(), "gelu"), activated(x, bias, "gelu"))
    between = bias.float() * (1 + 2**-10)  # rounds to the same bfloat16
    assert torch.equal(activated(x, between, "gelu"), activated(x, bias, "gelu"))


def test_the_bias_s_gradient_is_summed_in_float32_and_the_same_in_every_run() -> None:
    """In bfloat16, 300 ones add up to 256."""
    x = torch.ones(300, 3, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(3, device=DEVICE, requires_grad=True)
    results = [torch.autograd.grad(activated(x, bias, "relu").sum(), bias)[0] for _ in range(2)]
    assert results[0].tolist() == [300.0] * 3 and torch.equal(*results)


def test_only_the_inputs_are_saved() -> None:
    gate, up = torch.randn(2, 3, 8, device=DEVICE).unbind()
    bias = torch.zeros(8, device=DEVICE, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gated(gate.requires_grad_(), up.requires_grad_(), "silu")
        activated(gate, bias, "gelu")
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (gate, up, gate, bias)]


def test_a_frozen_bias_gets_no_gradient() -> None:
    x, bias = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.randn(8, device=DEVICE)
    activated(x, bias, "gelu").sum().backward()
    assert bias.grad is None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [None, "gelu", "silu"])
def test_layers_with_the_kernels_equal_plain_layers(kind, bias, monkeypatch) -> None:
    """Also a layer without an activation or a bias."""
    torch.manual_seed(0)
    gate, up = Linear(5, 7, bias=bias).to(DEVICE), Linear(5, 7, bias=bias).to(DEVICE)
    gate.activation = kind
    x = torch.randn(2, 3, 5, device=DEVICE)
    results = []
    for on in (False, True):
        monkeypatch.setattr(nanorlhf.layers, "fuses", lambda x, on=on: on)
        outputs = gate(x), gated_linear(gate, up, x)
        loss = sum(y.square().sum() for y in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, [*gate.parameters(), *up.parameters()])])
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, atol=1e-5)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_of_real_models_on_a_device(kind, device) -> None:
    x, up = torch.randn(2, 300, 14336, generator=torch.Generator().manual_seed(0))
    compare(activated, activated_reference, [x, up[0]], torch.bfloat16, kind, other=torch.float32)
    compare(gated, gated_reference, [x, up], torch.bfloat16, kind, other=torch.bfloat16)
