"""--compile: compiled blocks have the hidden states and gradients of eager blocks, without a graph break."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor

import train_sft
from kernels.attention import apply_rotary_, rotated
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT
from nanorlhf.training.loading import prepare_models
from tests.conftest import TINY
from tests.test_model import CONFIGS, make_model

PAD = 40


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotation_in_real_numbers_equals_complex_multiplication(interleaved, dtype) -> None:
    """Two query heads, two key heads, two value heads; 6 of 10 channels rotate."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 5, 6, 10, generator=generator).to(dtype)
    angles = torch.randn(3, 5, 1, 3, generator=generator).to(torch.promote_types(dtype, torch.float32))
    before = qkv.clone()
    y = rotated(qkv, angles.cos(), angles.sin(), 2, interleaved)
    assert torch.equal(qkv, before) and y.dtype == dtype
    expected = apply_rotary_(qkv, angles.cos(), angles.sin(), 2, interleaved)
    assert torch.allclose(y, expected, atol=torch.finfo(dtype).eps * 4)


def hidden_and_gradient(model: GPT, length: int, last: int | None) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 37, (3, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3] = False
    hidden = model(ids, mask, last=last)
    gradient = torch.autograd.grad(hidden.square().sum(), list(model.transformer.parameters()))
    return hidden.detach(), torch.cat([g.flatten() for g in gradient])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++ on a CPU")
@pytest.mark.parametrize("name", ["gpt_neox", "qwen3"])
def test_compiled_blocks_equal_eager_ones_at_every_length(name) -> None:
    """Two graphs for all lengths and blocks: all tokens, and the last block's last tokens. qwen3 has windows."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model(CONFIGS[name])
    for length, last in ((9, 4), (14, 4), (20, 7)):
        model.transformer.compile_blocks = False
        hidden, gradient = hidden_and_gradient(model, length, last)
        model.transformer.compile_blocks = True
        compiled_hidden, compiled_gradient = hidden_and_gradient(model, length, last)
        assert torch.allclose(compiled_hidden, hidden, atol=1e-5)
        assert torch.allclose(compiled_gradient, gradient, atol=1e-6 * gradient.abs().max().item())
    counters = torch._dynamo.utils.counters
    assert counters["graph_break"] == Counter()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++ on a CPU")
@torch.no_grad()
def test_compiled_blocks_read_without_a_gradient() -> None:
    """The compiler used to guard that 3 times the width isn't divisible by the number of last tokens, and to fail."""
    torch._dynamo.reset()
    model, ids = make_model(TINY), torch.randint(0, 37, (2, 8))
    for last in (8, 4):
        model.transformer.compile_blocks = False
        hidden = model(ids, last=last)
        model.transformer.compile_blocks = True
        assert torch.allclose(model(ids, last=last), hidden, atol=1e-5)


def test_a_sampler_is_not_compiled(monkeypatch) -> None:
    """The cache changes in Python; so do the keys of shared queries."""
    model = make_model(CONFIGS["gpt_neox"])
    model.transformer.compile_blocks = True
    monkeypatch.setattr("nanorlhf.model.compiled_block", lambda block: 1 / 0)
    ids = torch.randint(2, 37, (2, 6))
    generate(model, ids, ids != PAD, 3, pad_id=PAD)
    model(ids.repeat_interleave(2, 0), torch.ones(4, 6, dtype=torch.bool), last=3)
    with pytest.raises(ZeroDivisionError):
        model(ids, torch.ones(2, 6, dtype=torch.bool), last=3)


def test_the_flag_compiles_trained_and_frozen_models_but_no_sharded_ones() -> None:
    args = train_sft.Args(data=Path("data"), out=Path("out"), batch_size=2, max_response_length=8, compile=True)
    trained, frozen = make_model(CONFIGS["gpt2"]), make_model(CONFIGS["gpt2"])
    prepare_models(args, torch.device("cpu"), [trained], [frozen])
    assert trained.transformer.compile_blocks and frozen.transformer.compile_blocks
    with pytest.raises(InputError, match="--compile can't be combined with --shard fsdp"):
        prepare_models(replace(args, shard="fsdp"), torch.device("cpu"), [trained])
