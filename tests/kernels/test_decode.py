"""Attention of one new token per row; without a GPU, Triton runs in its interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels.decode
import nanorlhf.cache
from kernels.decode import Columns, decode_attention, decode_reference
from nanorlhf.cache import KVCache, can_decode
from nanorlhf.generate import generate
from tests.conftest import GPU
from tests.test_model import CONFIGS, make_model

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def row_by_row(q: Tensor, k: Tensor, v: Tensor, columns: Columns, scale: float) -> Tensor:
    """In float64, one head of one row at a time, from its columns only."""
    y = torch.empty(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        end = int(columns.last) + 1
        begin = max(int(columns.first[row]), end - columns.window if columns.window else 0)
        for head in range(q.size(1)):
            shared = head // (q.size(1) // k.size(1))
            keys, values = k[row, shared, begin:end].double(), v[row, shared, begin:end].double()
            y[row, head, 0] = (keys @ q[row, head, 0].double() * scale).softmax(0) @ values
    return y


def inputs(B: int, H: int, K: int, L: int, D: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (B, H, 1, D), (B, K, L, D), (B, K, L, D)
    return tuple(torch.randn(size, generator=generator).to(dtype) for size in sizes)


CASES = {
    "one row and head": (1, 1, 1, 40, 16, (0,), 39, None),
    "only the first column": (2, 2, 2, 9, 16, (0, 0), 0, None),
    "only the new token": (2, 2, 2, 9, 16, (5, 5), 5, None),
    "left padding, tokens to come": (3, 2, 2, 70, 8, (0, 13, 49), 50, None),
    "shared keys": (2, 8, 2, 33, 32, (3, 0), 20, None),
    "24 channels": (2, 3, 1, 33, 24, (3, 0), 32, None),
    "a window": (3, 4, 2, 50, 16, (0, 30, 41), 42, 5),
    "a window of one": (2, 2, 1, 50, 16, (0, 30), 42, 1),
    "more rows than one part needs": (70, 4, 2, 20, 8, tuple(i % 15 for i in range(70)), 17, None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_and_the_reference_equal_float64(case) -> None:
    B, H, K, L, D, first, last, window = CASES[case]
    q, k, v = inputs(B, H, K, L, D)
    columns = Columns(torch.tensor(first), torch.tensor([last]), window)
    expected = row_by_row(q, k, v, columns, 0.3)
    for row in range(B):  # what must not matter
        begin = max(first[row], last + 1 - window if window else 0)
        for x in (k, v):
            x[row, :, :begin] = x[row, :, last + 1 :] = float("nan")
    on_device = Columns(columns.first.to(DEVICE), columns.last.to(DEVICE), window)
    y = decode_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), on_device, 0.3)
    assert torch.allclose(y.cpu().double(), expected, atol=1e-5)
    reference = decode_reference(q.double(), k.nan_to_num().double(), v.double(), columns, 0.3)
    assert torch.allclose(reference, expected, atol=1e-6)


def test_strided_inputs_and_large_logits() -> None:
    """q as a slice of one matmul's output, the cache as one layer of a buffer; softmax of +-1e4."""
    B, H, K, L, D = 2, 4, 2, 21, 16
    generator = torch.Generator().manual_seed(1)
    q = (1e3 * torch.randn(B, 1, H + 2 * K, D, generator=generator)).transpose(1, 2)[:, :H]
    buffer = torch.randn(3, B, K, L, D, generator=generator)
    columns = Columns(torch.tensor([2, 0]), torch.tensor([19]), None)
    expected = row_by_row(q, buffer[1], buffer[2], columns, 1.0)
    on_device = Columns(columns.first.to(DEVICE), columns.last.to(DEVICE), None)
    y = decode_attention(q.to(DEVICE), buffer.to(DEVICE)[1], buffer.to(DEVICE)[2], on_device, 1.0)
    assert torch.allclose(y.cpu().double(), expected, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 16])
def test_parts_without_columns_count_nothing(splits, monkeypatch) -> None:
    """Three columns in up to sixteen parts."""
    monkeypatch.setattr(kernels.decode, "MOST_SPLITS", splits)
    q, k, v = inputs(1, 2, 2, 12, 8)
    columns = Columns(torch.tensor([4]), torch.tensor([6]), None)
    expected = row_by_row(q, k, v, columns, 0.5)
    on_device = Columns(columns.first.to(DEVICE), columns.last.to(DEVICE), None)
    y = decode_attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), on_device, 0.5)
    assert torch.allclose(y.cpu().double(), expected, atol=1e-5)


def test_no_rows() -> None:
    q, k, v = inputs(0, 2, 2, 12, 8)
    assert decode_attention(q, k, v, Columns(torch.empty(0).long(), torch.tensor([1]), None), 1.0).shape == (0, 2, 1, 8)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("shape", [(64, 8, 8, 565, 256), (8, 12, 12, 565, 64), (64, 32, 8, 565, 128)])
def test_bfloat16_on_a_device(shape, device) -> None:
    """Within the rounding of the inputs and of the output, at the sizes of 1B, 124M and a model with shared keys."""
    B, H, K, L, D = shape
    q, k, v = inputs(B, H, K, L, D, torch.bfloat16)
    columns = Columns(torch.arange(B) % 200, torch.tensor([540]), None)
    expected = row_by_row(q, k, v, columns, D**-0.5)
    on_device = Columns(columns.first.to(device), columns.last.to(device), None)
    y = decode_attention(q.to(device), k.to(device), v.to(device), on_device, D**-0.5)
    assert torch.allclose(y.cpu().double(), expected, atol=1e-2)


# ------------------------------------------------------------------------------------------------------ in the sampler
PAD, EOS, Q, T = 40, 1, 7, 5


@pytest.mark.parametrize("name", ["gpt_neo", "llama", "gemma3"])
def test_sampling_with_the_kernel_equals_sampling_with_the_bias(name, monkeypatch) -> None:
    """Left-padded queries, one of them empty, windows, shared keys; rows that end are dropped from the cache."""
    model = make_model(CONFIGS[name])
    generator = torch.Generator().manual_seed(2)
    real = torch.arange(Q) >= Q - torch.tensor([7, 3, 1, 0])[:, None]
    query = torch.where(real, torch.randint(2, 37, (4, Q), generator=generator), PAD)
    uniforms = torch.rand((4, T), generator=generator, dtype=torch.float64)
    expected = generate(model, query, query != PAD, T, eos_id=EOS, pad_id=PAD, uniforms=uniforms, stop_ids=range(2, 9))
    assert (expected[0] == PAD).any()
    launched = []
    monkeypatch.setattr(kernels.decode, "MOST_SPLITS", 2)  # the interpreter takes milliseconds per program
    monkeypatch.setattr(nanorlhf.cache, "can_decode", lambda config, device: launched.append(config) or True)
    response, logprobs = generate(
        model.to(DEVICE), query.to(DEVICE), (query != PAD).to(DEVICE), T, eos_id=EOS, pad_id=PAD, uniforms=uniforms,
        stop_ids=range(2, 9),
    )  # fmt: skip
    assert launched and torch.equal(response.cpu(), expected[0])
    assert torch.allclose(logprobs.cpu(), expected[1], atol=1e-5)


def test_which_caches_use_the_kernel(monkeypatch) -> None:
    """Left-padded rows on a GPU, without capped logits; T5's decoder has a bias per distance."""
    cuda, config = torch.device("cuda"), CONFIGS["gpt_neox"]
    assert can_decode(config, cuda) and can_decode(CONFIGS["gemma3"], cuda)
    assert not can_decode(config, torch.device("cpu"))
    assert not can_decode(CONFIGS["capped"], cuda) and not can_decode(replace(config, d_head=264), cuda)
    assert not can_decode(replace(config, positions="relative"), cuda)
    monkeypatch.setattr(nanorlhf.cache, "can_decode", lambda config, device: True)
    for drawing, first in ((("..##", "####"), [2, 0]), (("##..", "####"), None), ((".#.#", "####"), None)):
        mask = torch.tensor([[sign == "#" for sign in row] for row in drawing])
        cache = KVCache(config, mask, 3, torch.float32)
        assert (None if cache.first is None else cache.first.tolist()) == first
