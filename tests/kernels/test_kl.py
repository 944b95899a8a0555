"""The exact KL against a float64 sum, its gradient against finite differences, estimators against expectations."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels.kl
from kernels import k1, k2, k3, kl_divergence, linear_kl_divergence

WAYS = ["cpu", "triton"]
# on a GPU a new shape is compiled and tuned
any_example = settings(
    deadline=None, max_examples=8 if torch.cuda.is_available() else 25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@pytest.fixture
def way(request, monkeypatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(kernels.kl, "runs_triton", lambda x: request.param == "triton")
    return "cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu"


def by_hand(logits: torch.Tensor, ref_logits: torch.Tensor) -> float:
    """Sum p log(p / q) over one row in Python floats."""
    p, q = (row.double().softmax(-1).tolist() for row in (logits, ref_logits))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@any_example
@given(st.integers(0, 4), st.integers(1, 150), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_the_kl_of_any_shape_equals_a_sum_in_float64(way, N, V, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = (3 * torch.randn(2, N, V, generator=generator)).to(dtype)
    got = kl_divergence(logits.to(way), ref_logits.to(way))
    assert got.shape == (N,) and got.dtype == torch.float32
    expected = [by_hand(*rows) for rows in zip(logits, ref_logits, strict=True)]
    assert got.tolist() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_the_gradient_of_the_kl_equals_float64(way):
    torch.manual_seed(0)
    logits, ref_logits, coefficients = torch.randn(3, 2, 100), torch.randn(3, 2, 100), torch.randn(3, 2)
    reference = logits.double().requires_grad_()
    log_p, log_q = reference.log_softmax(-1), ref_logits.double().log_softmax(-1)
    ((log_p.exp() * (log_p - log_q)).sum(-1) * coefficients).sum().backward()
    logits, ref_logits = logits.to(way).requires_grad_(), ref_logits.to(way).requires_grad_()
    (kl_divergence(logits, ref_logits) * coefficients.to(way)).sum().backward()
    assert torch.allclose(logits.grad.cpu().double(), reference.grad, atol=1e-5)
    assert ref_logits.grad is None  # the reference is a constant


def test_the_gradient_of_the_kl_equals_finite_differences():
    torch.manual_seed(0)
    ref_logits = torch.randn(4, 6, dtype=torch.float64)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl_divergence(x, ref_logits), logits)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_impossible_ids_count_as_zero_and_ids_impossible_only_for_the_reference_as_infinite(way):
    no = -torch.inf
    logits = torch.tensor([[0.0, 0.0, no], [0.0, no, no], [0.0, 0.0, 0.0], [1e4, 0.0, -1e4]], device=way)
    ref_logits = torch.tensor([[0.0, 0.0, no], [0.0, 0.0, no], [0.0, 0.0, no], [1e4, 0.0, -1e4]], device=way)
    expected = pytest.approx([0.0, math.log(2), math.inf, 0.0])
    assert kl_divergence(logits, ref_logits).tolist() == expected
    kl = kl_divergence(logits.requires_grad_(), ref_logits)
    assert kl.tolist() == expected
    kl[[0, 1, 3]].sum().backward()
    assert logits.grad[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_a_probability_too_small_for_the_type_is_not_one_of_zero(way):
    """Ids 0 and 69 have p = exp(-200), which is 0 in float32; the kernel's blocks of 64 are before and after id 64."""
    logits, ref_logits = torch.zeros(3, 70, device=way), torch.zeros(3, 70, device=way)
    logits[:, 64] = ref_logits[:, 64] = 200.0
    ref_logits[0, 0] = ref_logits[1, 69] = -torch.inf
    assert kl_divergence(logits, ref_logits).tolist() == [torch.inf, torch.inf, 0.0]
    kl = kl_divergence(logits.requires_grad_(), ref_logits)
    assert kl.tolist() == [torch.inf, torch.inf, 0.0]
    kl[2].backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_linear_form_equals_the_logits_form_in_value_and_gradient(temperature, monkeypatch):
    """Chunks of two rows; the reference has another width."""
    monkeypatch.setattr(kernels.kl, "CHUNK", 26)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(5, 4), torch.randn(13, 4), torch.randn(13)
    ref_hidden, ref_weight = torch.randn(5, 6, requires_grad=True), torch.randn(13, 6)
    results = []
    for linear_form in (True, False):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        h, w, b = inputs
        if linear_form:
            kl = linear_kl_divergence(h, w, ref_hidden, ref_weight, b, None, temperature)
        else:
            kl = kl_divergence((h @ w.T + b) / temperature, (ref_hidden @ ref_weight.T) / temperature)
        (kl * torch.arange(5)).sum().backward()
        results.append((kl, *(tensor.grad for tensor in inputs)))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert ref_hidden.grad is None
    assert linear_kl_divergence(hidden[:0], weight, ref_hidden[:0], ref_weight).shape == (0,)


def test_each_models_cap_applies_to_its_own_logits():
    torch.manual_seed(0)
    hidden, weight, ref_hidden, ref_weight = (3 * torch.randn(*size) for size in ((5, 4), (13, 4), (5, 6), (13, 6)))
    bias = torch.zeros(13).index_fill(0, torch.tensor([4]), -torch.inf)
    got = linear_kl_divergence(hidden, weight, ref_hidden, ref_weight, bias, bias, 0.7, cap=2.0, ref_cap=5.0)
    logits, ref_logits = hidden.double() @ weight.double().T, ref_hidden.double() @ ref_weight.double().T
    logits, ref_logits = 2 * (logits / 2).tanh() + bias, 5 * (ref_logits / 5).tanh() + bias
    assert torch.allclose(got.double(), kl_divergence(logits / 0.7, ref_logits / 0.7), atol=1e-5)


def test_autocast_rounds_the_inputs_but_not_the_logits():
    torch.manual_seed(0)
    tensors = [8 * torch.randn(6, 16), torch.randn(90, 16), 8 * torch.randn(6, 16), torch.randn(90, 16)]
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_kl_divergence(*tensors)
    hidden, weight, ref_hidden, ref_weight = (tensor.bfloat16().double() for tensor in tensors)
    assert torch.allclose(got.double(), kl_divergence(hidden @ weight.T, ref_hidden @ ref_weight.T), atol=1e-3)


def test_estimators_have_the_stated_expectation():
    """Exact expectations over a vocabulary of five, where KL(p, q) and KL(q, p) differ by a factor of two."""
    p, q = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).double(), torch.tensor([0.05, 0.05, 0.1, 0.4, 0.4]).double()
    kl = (p * (p / q).log()).sum()
    assert (p * k1(p.log(), q.log())).sum() == pytest.approx(kl)
    assert (p * k3(p.log(), q.log())).sum() == pytest.approx(kl)
    assert (p * k2(p.log(), q.log())).sum() == pytest.approx((p * 0.5 * (p / q).log() ** 2).sum())
    assert (k3(p.log(), q.log()) >= 0).all() and (k2(p.log(), q.log()) >= 0).all() and k1(p.log(), q.log()).min() < 0
    assert k3(torch.zeros(1), torch.full((1,), 1e-4)).item() == pytest.approx(5e-9, rel=1e-2)  # no cancellation


def test_estimators_have_the_slopes_of_their_formulas():
    """The slopes in log p are 1, x and 1 - exp(-x) with x = log p - log q, and minus these in log q."""
    logprobs, ref_logprobs = torch.tensor([-1.0, -2.0, -0.5]).double(), torch.tensor([-2.0, -2.0, -0.1]).double()
    x = logprobs - ref_logprobs
    for estimator, slope in ((k1, torch.ones(3)), (k2, x), (k3, 1 - (-x).exp())):
        leaves = logprobs.clone().requires_grad_(), ref_logprobs.clone().requires_grad_()
        estimator(*leaves).sum().backward()
        for leaf, expected in zip(leaves, (slope, -slope), strict=True):
            assert leaf.grad.tolist() == pytest.approx(expected.tolist(), abs=1e-12)
