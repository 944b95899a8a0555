import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import gae, linear_logprobs, logprobs_from_logits
from kernels.logprobs import ChunkedLogprobs, stored_logprobs


def test_logprobs_and_entropy_of_a_distribution_typed_by_hand():
    probabilities = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    logprobs, entropy = logprobs_from_logits(probabilities.log() + 7.0, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.25), abs=1e-6)
    assert entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_linear_logprobs_equal_float64(temperature):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(11, 8), torch.randn(23, 8), torch.randn(23)
    labels = torch.randint(0, 23, (11,))
    logprobs, entropy = linear_logprobs(hidden, weight, labels, bias, temperature)
    table = ((hidden.double() @ weight.double().T + bias.double()) / temperature).log_softmax(-1)
    assert torch.allclose(logprobs.double(), table[range(11), labels], atol=1e-5)
    assert torch.allclose(entropy.double(), -(table.exp() * table).sum(-1), atol=1e-5)


def test_a_forbidden_id_has_no_gradient_and_leaves_no_nan():
    hidden = torch.randn(3, 4, requires_grad=True)
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    logprobs, entropy = linear_logprobs(hidden, torch.randn(3, 4), torch.tensor([0, 2, 0]), bias)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and entropy.isfinite().all()


def test_bf16_logits_are_reduced_in_float32():
    logits = torch.randn(4, 5000).bfloat16()
    logprobs, _ = logprobs_from_logits(logits, torch.zeros(4, dtype=torch.long))
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), logits.double().log_softmax(-1)[:, 0], atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_a_double_loop(gamma, lam):
    torch.manual_seed(0)
    B, T = 3, 7
    rewards, values = torch.randn(B, T, dtype=torch.double), torch.randn(B, T, dtype=torch.double)
    advantages, returns = gae(rewards, values, gamma, lam)
    for b in range(B):
        for t in range(T):
            expected = 0.0
            for s in range(t, T):  # sum over s of (gamma * lam)^(s - t) * delta_s
                bootstrap = values[b, s + 1] if s + 1 < T else 0.0
                expected += (gamma * lam) ** (s - t) * (rewards[b, s] + gamma * bootstrap - values[b, s])
            assert advantages[b, t].item() == pytest.approx(float(expected), abs=1e-12)
    assert torch.equal(returns, advantages + values)


def test_gae_with_lambda_one_returns_the_rewards_to_go():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    _, returns = gae(rewards, torch.tensor([[9.0, -4.0, 5.0]]), 1.0, 1.0)
    assert returns.tolist() == [[6.0, 5.0, 3.0]]


# ---------------------------------------------------------------------------------------- chunks, recomputed backwards
def chunked(hidden, weight, labels, bias=None, temperature=1.0, num_rows=3):
    return ChunkedLogprobs.apply(hidden, weight, labels, bias, temperature, num_rows)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 9),
    st.integers(1, 6),
    st.integers(1, 11),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([0.7, 2]),
)
def test_chunks_equal_stored_logits_forward_and_backward(N, C, V, num_rows, with_bias, temperature):
    generator = torch.Generator().manual_seed(N + 10 * C + 100 * V)
    hidden, weight, bias = (torch.randn(*size, generator=generator) for size in ((N, C), (V, C), (V,)))
    labels = torch.randint(V, (N,), generator=generator)
    coefficients = torch.randn(2, N, generator=generator)
    results = []
    for way in (stored_logprobs, lambda *arguments: chunked(*arguments, num_rows)):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        logprobs, entropy = way(inputs[0], inputs[1], labels, inputs[2] if with_bias else None, temperature)
        (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
        results.append((logprobs, entropy, *(inputs[i].grad for i in range(2 + with_bias))))
    for stored, chunk in zip(*results, strict=True):
        assert torch.allclose(stored, chunk, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_the_chunks_is_that_of_finite_differences():
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 3), (7, 3), (7,))
    )
    labels = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda h, w, b: chunked(h, w, labels, b, 0.7, 2), (hidden, weight, bias))


def test_only_the_gradients_that_are_asked_for_are_made():
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    logprobs, entropy = chunked(hidden, weight, torch.tensor([0, 1, 2, 4]))
    entropy.sum().backward(retain_graph=True)  # the logprobs have no gradient here
    alone = hidden.grad.clone()
    hidden.grad = None
    logprobs.sum().backward()
    assert weight.grad is None and alone.isfinite().all() and not torch.equal(alone, hidden.grad)


def test_forbidden_ids_and_huge_logits_leave_no_nan_in_the_chunks():
    hidden = torch.tensor([[1e4, 0.0], [0.0, 1e4], [-1e4, 1.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.5]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf, 0.0])
    logprobs, entropy = chunked(hidden, weight, torch.tensor([0, 0, 1]), bias, num_rows=2)
    (logprobs + entropy).sum().backward()
    assert logprobs.tolist() == [0.0, -1e4, 0.0] and entropy.tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_chunks_follow_autocast_forward_and_backward():
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(6, 16), torch.randn(9, 16), torch.randint(9, (6,))
    results = []
    for way in (stored_logprobs, chunked):
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, _ = way(*inputs, labels, None, 1.0)
        logprobs.sum().backward()
        results.append((logprobs, inputs[0].grad, inputs[1].grad))
    assert torch.equal(results[0][0], results[1][0]) and results[1][0].dtype == torch.float32
    for stored, chunk in zip(*results, strict=True):
        assert (stored - chunk).abs().max() < 0.05  # bf16 has 8 bits


def test_large_logits_are_never_stored(monkeypatch):
    """No tensor of the pass has more numbers than a chunk of logits or a gradient."""
    monkeypatch.setattr("kernels.logprobs.STORED", 1000)
    monkeypatch.setattr("kernels.logprobs.CHUNK", 2000)
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
