"""Three implementations of log-probabilities against float64: the reference, blocks on a CPU, the Triton kernels.

Without a GPU, the Triton kernels run in the interpreter, on small sizes.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.logprobs
from kernels import linear_logprobs, processor
from kernels.linear import wide_linear
from kernels.logprobs import stored_logprobs, vocabulary_blocks
from tests.conftest import GPU

CUDA = torch.cuda.is_available()
WAYS = ["cpu", "triton"]
# `way` sets the same constants for every example
# on a GPU a new shape is compiled and tuned, on a CPU Triton is interpreted
any_example = settings(
    deadline=None, max_examples=8 if CUDA else 12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip


@pytest.fixture
def way(request, monkeypatch) -> str:
    """Small blocks, so that small sizes have several; `triton` is the GPU path, interpreted without a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(kernels.logprobs, "runs_triton", lambda x: request.param == "triton")
    monkeypatch.setattr(processor, "chosen", replace(processor.DEFAULT, block=500))
    monkeypatch.setattr(kernels.logprobs, "GPU_BLOCK", 2000)
    monkeypatch.setattr(kernels.logprobs, "SPLIT", 48)
    monkeypatch.setattr(kernels.logprobs, "GROUP", 1200)
    return request.param


def to_device(way: str, *tensors: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.to("cuda" if way == "triton" and CUDA else "cpu") for t in tensors]


def stored_linear_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, bias=None, temperature: float = 1.0):
    """The reference implementation of `linear_logprobs`, from stored logits."""
    return stored_logprobs(wide_linear(hidden, weight, bias) / temperature, labels)


def float64_table(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Compute log-softmax (N, V) without the code under test."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    return (logits / temperature).log_softmax(-1)


def test_logprobs_and_entropy_of_a_distribution_typed_by_hand():
    probabilities = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    logprobs, entropy = stored_logprobs(probabilities.log() + 7.0, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)


def random_case(N: int, V: int, C: int, with_bias: bool, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(N + 10 * C + 100 * V)
    hidden, weight, bias = (torch.randn(*size, generator=generator) for size in ((N, C), (V, C), (V,)))
    # values that bfloat16 can represent, in any dtype: tensor cores multiply them exactly
    hidden, weight = (tensor.bfloat16().to(dtype) for tensor in (hidden, weight))
    labels = torch.randint(V, (N,), generator=generator)
    labels[1::4] = -100  # ignored
    return hidden, weight, labels, bias if with_bias else None, torch.randn(2, N, generator=generator)


def gradients(function, inputs: list[Tensor | None], labels: Tensor, temperature: float, coefficients: Tensor):
    """Return log-probabilities, entropies and the gradients of their weighted sum."""
    inputs = [t if t is None else t.clone().requires_grad_() for t in inputs]
    hidden, weight, bias = inputs
    logprobs, entropy = function(hidden, weight, labels, bias, temperature)
    (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
    return [x.cpu().double() for x in (logprobs.detach(), entropy.detach(), *(t.grad for t in inputs if t is not None))]


@any_example
@given(st.integers(0, 37), st.integers(1, 150), st.integers(1, 21), st.booleans(), st.sampled_from([0.7, 1.0, 2.5]))
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_linear_logprobs_of_any_shape_equal_float64_forward_and_backward(way, N, V, C, with_bias, temperature):
    hidden, weight, labels, bias, coefficients = random_case(N, V, C, with_bias)
    inputs = [t if t is None else t.double() for t in (hidden, weight, bias)]
    expected = gradients(stored_linear_logprobs, inputs, labels, temperature, coefficients.double())
    hidden, weight, labels, bias, coefficients = to_device(way, hidden, weight, labels, bias, coefficients)
    for kept in (0, N * V // 2, 2**24):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processor, "chosen", replace(processor.DEFAULT, block=100, kept=kept))
            got = gradients(linear_logprobs, [hidden, weight, bias], labels, temperature, coefficients)
        for one, other in zip(got, expected, strict=True):
            assert torch.allclose(one, other, atol=2e-4, rtol=1e-4)  # sums of up to 150 float32 products


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_linear_logprobs_equal_log_softmax_and_ignored_labels_give_zero(way, temperature):
    hidden, weight, labels, bias, _ = random_case(11, 61, 8, True)
    table = float64_table(hidden, weight, bias, temperature)
    logprobs, entropy = linear_logprobs(*to_device(way, hidden, weight, labels, bias), temperature)
    expected = torch.where(labels >= 0, table[range(11), labels.clamp(min=0)], 0.0)
    assert torch.allclose(logprobs.cpu().double(), expected, atol=1e-5)
    assert torch.allclose(entropy.cpu().double(), -(table.exp() * table).sum(-1), atol=1e-5)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_bf16_is_accumulated_in_float32(way):
    """bf16 inputs give the float64 result for the same numbers; gradients are rounded to bf16 at the end."""
    hidden, weight, labels, _, coefficients = random_case(20, 100, 64, False, torch.bfloat16)
    expected = gradients(
        stored_linear_logprobs, [hidden.double(), weight.double(), None], labels, 1.0, coefficients.double()
    )
    hidden, weight, labels, coefficients = to_device(way, hidden, weight, labels, coefficients)
    got = gradients(linear_logprobs, [hidden, weight, None], labels, 1.0, coefficients)
    assert (got[0] - expected[0]).abs().max() < 1e-4
    for one, other in zip(got[2:], expected[2:], strict=True):
        assert (one - other).abs().max() < 0.05 * other.abs().max()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_the_entropy_keeps_its_precision_with_large_logits(way):
    """Shifting all logits changes nothing. The logits are multiples of 1/16 below 512, exact in float32.

    Triton merges its splits by their normalisers, which are rounded to 3e-5 here.
    """
    hidden, weight = torch.randint(-4, 5, (20, 3)) / 4.0, torch.randint(-4, 5, (150, 3)) / 4.0
    bias = torch.full((150,), 500.0)
    table = float64_table(hidden, weight, bias, 1.0)
    inputs = to_device(way, hidden, weight, torch.zeros(20, dtype=torch.long), bias)
    entropy = linear_logprobs(*inputs)[1].cpu()
    torch.testing.assert_close(
        entropy.double(), -(table.exp() * table).sum(-1), rtol=0, atol={"cpu": 2e-6, "triton": 1e-4}[way]
    )


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_huge_logits_forbidden_ids_and_certainty_leave_no_nan(way):
    hidden = torch.tensor([[1e4, 0.0], [0.0, 1e4], [-1e4, 1.0]])
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]])
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0])
    hidden, weight, labels, bias = to_device(way, hidden, weight, torch.tensor([0, 0, 1]), bias)
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, labels, bias)
    (logprobs + 1e3 * entropy).sum().backward()
    assert logprobs.tolist() == [0.0, -1e4, 0.0] and entropy.tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_blocks_of_forbidden_ids_have_no_effect(way):
    """The first and last block contain only forbidden ids; a temperature below 1 must not make them NaN."""
    hidden, weight, _, _, _ = random_case(3, 200, 5, False)
    bias = torch.full((200,), -torch.inf)
    bias[90:110] = 0.0
    labels = torch.tensor([90, 100, 109])
    table = float64_table(hidden, weight[90:110], None, 0.5)
    hidden, weight, labels, bias = to_device(way, hidden, weight, labels, bias)
    hidden.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, labels, bias, 0.5)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.allclose(logprobs.cpu().double(), table[range(3), labels.cpu() - 90], atol=1e-5)
    assert torch.allclose(entropy.cpu().double(), -(table.exp() * table).sum(-1), atol=1e-5)
    assert hidden.grad.isfinite().all()


@any_example
@given(st.integers(0, 37), st.integers(1, 150), st.integers(1, 21), st.booleans(), st.sampled_from([0.7, 1.0]))
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_capped_logits_equal_float64_forward_and_backward(way, N, V, C, with_bias, temperature):
    """The cap changes most logits; the bias is added after it, forbids ids and has no gradient."""
    hidden, weight, labels, _, coefficients = random_case(N, V, C, False)
    bias = torch.where(torch.arange(V) % 7 == 3, -torch.inf, 0.1 * torch.arange(V)) if with_bias else None
    labels[labels % 7 == 3] = 0
    results = []
    for dtype in (torch.float64, torch.float32):
        h, w = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
        b = None if bias is None else bias.to(dtype)
        if dtype == torch.float64:
            logits = 2.0 * torch.tanh(h @ w.T / 2.0)
            logprobs, entropy = stored_logprobs((logits if b is None else logits + b) / temperature, labels)
        else:
            on_device = to_device(way, h, w, labels, b)
            logprobs, entropy = (x.cpu() for x in linear_logprobs(*on_device, temperature, cap=2.0))
        (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
        results.append([logprobs.detach().double(), entropy.detach().double(), h.grad.double(), w.grad.double()])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy_coef", [None, 0.3])
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_label_whose_probability_underflows_keeps_the_slope_of_its_cap(way, entropy_coef, with_bias, temperature):
    """With Gemma 2's cap of 30 and T < 0.58, p can be 0 in float32. Each id is the label of one row."""
    hidden, weight = torch.ones(4, 1), torch.tensor([[60.0], [-60.0], [0.1], [-20.0]])
    bias = torch.tensor([0.0, 7.0, -1.0, 2.0]) if with_bias else None
    results = []
    for dtype in (torch.float64, torch.float32):
        labels = torch.arange(4)
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)]
        if dtype == torch.float64:
            logits = 30 * torch.tanh(inputs[0] @ inputs[1].T / 30) + (0 if bias is None else bias)
            table = (logits / temperature).log_softmax(-1)  # (4, 4)
            logprobs, entropy = table.diagonal(), -(table.exp() * table).sum(-1)
        else:
            logprobs, entropy = linear_logprobs(*to_device(way, *inputs, labels, bias), temperature, cap=30.0)
        loss = logprobs.sum() if entropy_coef is None else logprobs.sum() + entropy_coef * entropy.sum()
        loss.backward()
        results.append([x.detach().cpu().double() for x in (logprobs, entropy, *(tensor.grad for tensor in inputs))])
    for expected, got in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_the_cap_applies_before_the_bias_is_added():
    x, weight, bias = torch.tensor([[3.0]]), torch.tensor([[1.0], [-2.0], [0.1]]), torch.tensor([1.0, -torch.inf, 0.0])
    expected = [2 * math.tanh(1.5) + 1, -math.inf, 2 * math.tanh(0.15)]
    assert wide_linear(x, weight, bias, cap=2.0)[0].tolist() == pytest.approx(expected)


def test_the_blocked_gradient_equals_finite_differences(monkeypatch):
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 3), (7, 3), (7,))
    )
    labels = torch.tensor([0, 6, 3, -100, 1])
    twice = 1e-12  # a graph's second backward pass has nothing kept, so it rounds differently
    for kept in (0, 20, 2**24):  # none, the first of three blocks, all
        monkeypatch.setattr(processor, "chosen", replace(processor.DEFAULT, block=15, kept=kept))
        for way in (linear_logprobs, stored_linear_logprobs):
            run = lambda h, w, b, way=way: way(h, w, labels, b, 0.7)  # noqa: E731
            assert torch.autograd.gradcheck(run, (hidden, weight, bias), nondet_tol=twice)
        capped = lambda h, w: linear_logprobs(h, w, labels, bias.detach(), 0.7, cap=1.3)  # noqa: E731
        assert torch.autograd.gradcheck(capped, (hidden, weight), nondet_tol=twice)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_only_the_required_gradients_are_computed(way):
    hidden, weight, labels = to_device(way, torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 1, 2, 4]))
    hidden.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, labels)
    entropy.sum().backward(retain_graph=True)  # no gradient through the log-probabilities
    alone = hidden.grad.clone()
    hidden.grad = None
    logprobs.sum().backward()
    assert weight.grad is None and alone.isfinite().all() and not torch.equal(alone, hidden.grad)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_autocast_multiplies_in_its_dtype_and_sums_in_float32(device):
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(6, 16), torch.randn(9, 16), torch.randint(9, (6,))
    hidden, weight, labels = hidden.to(device), weight.to(device), labels.to(device)
    results = []
    for way in ("stored", "blocked"):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        if way == "stored":
            logprobs, _ = stored_linear_logprobs(*(tensor.bfloat16() for tensor in inputs), labels)
        else:
            with torch.autocast(device, torch.bfloat16):
                logprobs, _ = linear_logprobs(*inputs, labels)
        logprobs.sum().backward()
        assert inputs[1].grad.dtype == torch.float32
        results.append((logprobs, inputs[0].grad, inputs[1].grad))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6) and results[1][0].dtype == torch.float32
    for stored, blocked in zip(*results, strict=True):
        assert (stored - blocked).abs().max() < 0.05  # bf16 has 8 bits


def test_no_tensor_stores_all_logits(monkeypatch):
    """No tensor is larger than a block of logits or a gradient."""
    monkeypatch.setattr(processor, "chosen", replace(processor.DEFAULT, block=2000, kept=1000))
    N, V, C = 100, 200, 4
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **keywords or {})
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return result

    hidden, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    with Watch():
        logprobs, entropy = linear_logprobs(hidden, weight, torch.zeros(N, dtype=torch.long))
        (logprobs + entropy).sum().backward()
    assert largest[0] == 2000


# --------------------------------------------------------------------------------------------------- the specification
@any_example
@given(st.integers(0, 5), st.integers(1, 150), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_the_specification_of_any_shape_equals_float64_forward_and_backward(N, V, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(N, 2, V, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(V, (N, 2), generator=generator)
    labels[::2, 0], labels[1::2, 0], labels[1::2, 1] = -100, -1, V  # ignored
    coefficients = torch.randn(2, N, 2, generator=generator)
    reference = logits.detach().double().requires_grad_()
    table = torch.cat((reference.log_softmax(-1), torch.zeros(N, 2, 1)), dim=-1)  # a column for ignored labels
    counts = (labels >= 0) & (labels < V)
    chosen = table.gather(-1, labels.where(counts, V)[..., None]).squeeze(-1)
    expected = torch.stack((chosen, -(table.exp() * table).sum(-1)))
    (expected * coefficients).sum().backward()

    logprobs, entropy = stored_logprobs(logits, labels)
    (torch.stack((logprobs, entropy)) * coefficients).sum().backward()
    assert logprobs.dtype == torch.float32 and logits.grad.dtype == dtype
    assert torch.allclose(torch.stack((logprobs, entropy)).double(), expected, atol=2e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02 * reference.grad.abs().amax().item() if N else 0
    assert torch.allclose(logits.grad.double(), reference.grad, atol=tolerance)
    assert stored_logprobs(reference, labels)[0].dtype == torch.float64


def test_extreme_logits_leave_no_nan():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, -torch.inf, 0.0], [-torch.inf, 3.0, -torch.inf], [-1e4, -1e4, -1e4]])
    labels = torch.tensor([1, 0, 1, 2])
    logits.requires_grad_()
    logprobs, entropy = stored_logprobs(logits, labels)
    (logprobs + entropy).sum().backward()
    # float32 has steps of 1e-3 at 1e4
    assert logprobs.tolist() == pytest.approx([-2e4, -math.log(2), 0.0, -math.log(3)], abs=1e-3)
    assert entropy.tolist() == pytest.approx([0.0, math.log(2), 0.0, math.log(3)], abs=1e-3)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize(
    ("N", "sizes"), [(0, (500, 2000)), (7, (71, 272)), (60, (8, 32)), (150, (3, 13)), (5000, (1, 1))]
)
def test_gpu_blocks_above_sixteen_ids_are_multiples_of_sixteen(way, N, sizes):
    size = sizes[WAYS.index(way)]
    expected = [slice(start, min(start + size, 1000)) for start in range(0, 1000, size)]
    assert vocabulary_blocks(torch.empty(N, 3), 1000) == expected


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_equals_float64_at_real_sizes(dtype, device):
    hidden, weight, labels, _, coefficients = random_case(1000, 50257, 768, False, dtype)
    weight = weight * 0.02
    expected = gradients(
        stored_linear_logprobs, [hidden.double().cuda(), weight.double().cuda(), None], labels.cuda(), 0.7,
        coefficients.double().cuda(),
    )  # fmt: skip
    inputs = [hidden.cuda(), weight.cuda(), None]
    got = gradients(linear_logprobs, inputs, labels.cuda(), 0.7, coefficients.cuda())
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() < (1e-4 if dtype == torch.float32 else 0.02) * other.abs().max().clamp(min=1)
