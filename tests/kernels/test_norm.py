"""Residual addition and norm against float64, and in whole models; without a GPU, Triton runs in its interpreter."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import kernels.norm
import nanorlhf.layers
from kernels.norm import add_norm, add_norm_reference
from nanorlhf.layers import OffsetRMSNorm, RMSNorm
from tests.conftest import GPU

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {"layer": nn.LayerNorm, "rms": RMSNorm, "rms_offset": OffsetRMSNorm}
HALF, SINGLE = torch.bfloat16, torch.float32


def by_hand(inputs: list[Tensor], kind: str, eps: float) -> tuple[Tensor, Tensor]:
    """Row by row from the definition, in float64: x, residual (N, C), weight and bias (C,)."""
    x, residual, weight, bias = inputs
    s = x if residual is None else x + residual
    rows = []
    for row in s:
        centred = row - row.sum() / len(row) if kind == "layer" else row
        scale = ((centred * centred).sum() / len(row) + eps) ** -0.5
        factor = 1 + weight if kind == "rms_offset" else weight
        rows.append(centred * scale * factor + (bias if kind == "layer" else 0))
    return s, torch.stack(rows) if rows else s


def random(*sizes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def leaves(inputs: list[Tensor], kind: str, dtypes: tuple, device: str, adds: bool = True) -> list[Tensor | None]:
    typed = [x.to(device, dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    return [typed[0], typed[1] if adds else None, typed[2], typed[3] if kind == "layer" else None]


def values_and_gradients(outputs: tuple[Tensor, Tensor], leaves: list, grads: list[Tensor]) -> Iterator[Tensor]:
    s, y = outputs
    loss = (s * grads[0].to(s)).sum() + (y * grads[1].to(y)).sum()
    wanted = [leaf for leaf in leaves if leaf is not None]
    yield from (s, y, *torch.autograd.grad(loss, wanted, materialize_grads=True))


# rows and channels: none, one, few; widths around powers of two; more rows than programs
SIZES = [(0, 5), (1, 1), (1, 24), (5, 31), (5, 32), (3, 33), (11, 7)]
DTYPES = {  # of x, the residual, weight and bias; of y; tolerance
    "float32": ((SINGLE,) * 4, SINGLE, 2e-5),
    "autocast": ((SINGLE, HALF, SINGLE, SINGLE), HALF, 2e-2),
    "bfloat16": ((HALF,) * 4, HALF, 6e-2),
    "bfloat16 stream, autocast": ((HALF, HALF, SINGLE, SINGLE), SINGLE, 6e-2),
    "float16": ((torch.float16,) * 4, torch.float16, 6e-3),
}


@pytest.mark.parametrize("adds", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_all_gradients_equal_float64(kind, dtypes, adds, monkeypatch) -> None:
    monkeypatch.setattr(kernels.norm, "PROGRAMS", 4)
    types, out, tolerance = DTYPES[dtypes]
    for N, C in SIZES:
        inputs, grads = random((N, C), (N, C), (C,), (C,)), random((N, C), (N, C), seed=1)
        inputs = [x.to(dtype).double() for x, dtype in zip(inputs, types, strict=True)]
        exact = leaves(inputs, kind, (torch.float64,) * 4, "cpu", adds)
        expected = [*values_and_gradients(by_hand(exact, kind, 1e-3), exact, grads)]
        reference = add_norm_reference(*exact, 1e-3, kind)
        for ours, theirs in zip(values_and_gradients(reference, exact, grads), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-12)
        typed = leaves(inputs, kind, types, DEVICE, adds)
        got = [*values_and_gradients(add_norm(*typed, 1e-3, kind, out), typed, grads)]
        wanted = [leaf.dtype for leaf in typed if leaf is not None]
        assert [x.dtype for x in got] == [torch.promote_types(*types[:2]) if adds else types[0], out, *wanted]
        for ours, theirs in zip(got, expected, strict=True):
            scale = 1 + (theirs.abs().max().item() if theirs.numel() else 0)
            assert torch.allclose(ours.cpu().double(), theirs, atol=tolerance * scale, rtol=0), (N, C)


@pytest.mark.parametrize("adds", [True, False], ids=["residual", "no residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_values_equal_the_module_s(kind, adds, monkeypatch) -> None:
    """Check each dtype of the residual stream; under autocast the output is cast as a matmul's input."""
    torch.manual_seed(0)
    layer = KINDS[kind](24, eps=1e-3).to(DEVICE)
    nn.init.normal_(layer.weight)
    for stream, dtype, autocast in (
        (SINGLE, SINGLE, False), (SINGLE, HALF, False), (SINGLE, HALF, True), (HALF, HALF, kind != "layer"),
    ):  # fmt: skip
        x, residual = torch.randn(3, 4, 24, device=DEVICE).to(stream), torch.randn(3, 4, 24, device=DEVICE).to(dtype)
        module = layer.to(HALF if stream == HALF and not autocast else SINGLE)
        with torch.autocast(DEVICE, HALF, enabled=autocast):
            monkeypatch.setattr(nanorlhf.layers, "fuses", lambda x: False)
            s, y = nanorlhf.layers.add_norm(x, residual if adds else None, module)
            monkeypatch.setattr(nanorlhf.layers, "fuses", lambda x: True)
            got = nanorlhf.layers.add_norm(x, residual if adds else None, module)
        expected = s, y.to(HALF) if autocast else y
        assert [x.dtype for x in got] == [x.dtype for x in expected] and (adds or got[0] is x)
        for ours, theirs in zip(got, expected, strict=True):  # the interpreter rounds to bfloat16 towards 0
            assert torch.allclose(ours, theirs, rtol=2**-7, atol=2e-2 if HALF in (stream, ours.dtype) else 1e-5)


def test_the_rounded_sum_is_normalised() -> None:
    """In bfloat16, 256 + 1 is 256: both channels are equal, and their layer norm is 0."""
    x, residual = torch.tensor([[256.0, 256.0]]).to(DEVICE, HALF), torch.tensor([[1.0, 0.0]]).to(DEVICE, HALF)
    one, zero = torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE)
    s, y = add_norm(x, residual, one, zero, 1e-5, "layer", SINGLE)
    assert s.tolist() == [[256.0, 256.0]] and y.tolist() == [[0.0, 0.0]]


def test_a_large_mean_leaves_the_variance_exact() -> None:
    """mean(s^2) - mean(s)^2 would be 0 or negative in float32."""
    x = 1e4 + torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]], device=DEVICE)
    one, zero = torch.ones(5, device=DEVICE), torch.zeros(5, device=DEVICE)
    _, y = add_norm(x, torch.zeros_like(x), one, zero, 0.0, "layer", SINGLE)
    assert torch.allclose(y.cpu(), torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]]) / 2**0.5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_nan_stays_in_its_row_and_nothing_is_read_beyond_the_rows(kind) -> None:
    """Rows are slices of a wider buffer, and between rows of NaN."""
    buffers = torch.randn(2, 5, 40, device=DEVICE)
    buffers[:, 0] = buffers[:, 4] = buffers[:, 2] = buffers[:, :, 24:] = torch.nan
    x, residual = buffers[:, 1:4, :24]  # (3, 24), not contiguous
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    weight = torch.ones(24, device=DEVICE)
    s, y = add_norm(x, residual, weight, None, 1e-5, kind, SINGLE)
    grads = torch.autograd.grad((s + y).sum(), (x, residual))
    for tensor in (s, y, *grads):
        assert tensor[[0, 2]].isfinite().all() and tensor[1].isnan().all()
    expected = add_norm_reference(x[[0, 2]], residual[[0, 2]], weight, None, 1e-5, kind)
    assert torch.allclose(y[[0, 2]], expected[1], atol=1e-5)


@pytest.mark.parametrize("used", ["s", "y"])
def test_an_output_without_a_use_contributes_no_gradient(used) -> None:
    inputs = [x.to(DEVICE, SINGLE).requires_grad_() for x in random((3, 8), (3, 8), (8,), (8,))]
    chosen = {"s": 0, "y": 1}[used]
    expected = add_norm_reference(*inputs, 1e-5, "layer")[chosen].square().sum()
    got = add_norm(*inputs, 1e-5, "layer", SINGLE)[chosen].square().sum()
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, allow_unused=True), torch.autograd.grad(expected, inputs, allow_unused=True),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(ours, torch.zeros_like(ours) if theirs is None else theirs, atol=1e-4)


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
def test_only_trained_weights_and_biases_get_a_gradient(trained) -> None:
    x, residual, *vectors = (x.to(DEVICE, SINGLE) for x in random((3, 8), (3, 8), (8,), (8,)))
    for vector, on in zip(vectors, trained, strict=True):
        vector.requires_grad_(on)
    s, y = add_norm(x.requires_grad_(), residual, *vectors, 1e-5, "layer", SINGLE)
    (s + y).square().sum().backward()
    assert [vector.grad is not None for vector in vectors] == [*trained] and x.grad.abs().sum() > 0


def test_sums_over_rows_are_the_same_in_every_run_and_for_any_number_of_programs(monkeypatch) -> None:
    """Bit by bit for one number; up to rounding for others."""
    inputs = [x.to(DEVICE, SINGLE).requires_grad_() for x in random((13, 8), (13, 8), (8,), (8,))]
    results = []
    for programs in (1, 5, 5, 64):
        monkeypatch.setattr(kernels.norm, "PROGRAMS", programs)
        s, y = add_norm(*inputs, 1e-5, "layer", SINGLE)
        results.append(torch.autograd.grad((s.square() + y.exp()).sum(), inputs[2:]))
    for once, again in zip(results[1], results[2], strict=True):
        assert torch.equal(once, again)
    for result in results:
        for one, other in zip(result, results[0], strict=True):
            assert torch.allclose(one, other, rtol=1e-5)


def test_the_forward_pass_saves_only_the_sum_and_the_weight() -> None:
    """Without a residual, that is the input itself."""
    inputs = [x.to(DEVICE, SINGLE).requires_grad_() for x in random((3, 8), (3, 8), (8,), (8,))]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        s, _ = add_norm(*inputs, 1e-5, "layer", SINGLE)
        x, _ = add_norm(inputs[0], None, *inputs[2:], 1e-5, "layer", SINGLE)
    assert [x.data_ptr() for x in saved] == [y.data_ptr() for y in (s, inputs[2], inputs[0], inputs[2])]
    assert x is inputs[0]


def test_wide_rows_float64_and_other_layers_use_plain_pytorch(monkeypatch) -> None:
    monkeypatch.setattr(nanorlhf.layers, "fuses", lambda x: True)
    monkeypatch.setattr(nanorlhf.layers, "fused_add_norm", lambda *arguments: 1 / 0)
    x = torch.randn(2, 4097)
    for layer in (nn.LayerNorm(4097), nn.Identity()):
        s, y = nanorlhf.layers.add_norm(x, x, layer)
        assert torch.equal(s, x + x) and torch.equal(y, layer(x + x))
        s, y = nanorlhf.layers.add_norm(x, None, layer)
        assert s is x and torch.equal(y, layer(x))
    with pytest.raises(ZeroDivisionError):
        nanorlhf.layers.add_norm(x[:, :4096], x[:, :4096], nn.LayerNorm(4096))
    assert not kernels.norm.fuses(x)  # on a CPU


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize(("kind", "C"), [("layer", 768), ("rms", 4096), ("rms_offset", 2304)])
def test_the_sizes_of_real_models_on_a_device(kind, C, device) -> None:
    """Under autocast: a float32 residual stream and bfloat16 outputs of matmuls."""
    inputs, grads = random((1030, C), (1030, C), (C,), (C,)), random((1030, C), (1030, C), seed=1)
    types = DTYPES["autocast"][0]
    inputs = [x.to(dtype).double() for x, dtype in zip(inputs, types, strict=True)]
    exact = leaves(inputs, kind, (torch.float64,) * 4, device)
    expected = values_and_gradients(add_norm_reference(*exact, 1e-5, kind), exact, [x.to(device) for x in grads])
    typed = leaves(inputs, kind, types, device)
    got = values_and_gradients(add_norm(*typed, 1e-5, kind, SINGLE), typed, [x.to(device) for x in grads])
    for ours, theirs in zip(got, expected, strict=True):
        tolerance = 1e-2 if ours.dtype == HALF else 1e-4
        assert torch.allclose(ours.double(), theirs, atol=tolerance * (1 + theirs.abs().max().item()))
