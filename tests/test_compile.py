"""--compile: compiled blocks have the hidden states and gradients of eager blocks, without a graph break."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

import train_sft
from kernels.attention import apply_rotary_, rotated
from kernels.compiled_blocks import compiled_call, linear_casts
from kernels.linear import kept_casts
from nanorlhf.checkpoint import cast_linear_weights
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.logprobs import read_logprobs, read_values
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import reference, tune
from nanorlhf.training.loading import prepare_models
from nanorlhf.training.supervised import autocast
from tests.conftest import TINY
from tests.test_model import CONFIGS, make_model
from tests.test_weight_casts import rollout

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


def hidden_and_gradient(model: GPT, length: int, last: int | None, dtype: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, 37, (3, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3] = False
    with autocast(dtype, ids.device), kept_casts():
        hidden = model(ids, mask, last=last).float()
    gradient = torch.autograd.grad(hidden.square().sum(), list(model.transformer.parameters()))
    return hidden.detach(), torch.cat([g.flatten() for g in gradient])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++ on a CPU")
@pytest.mark.parametrize(("name", "dtype"), [("gpt_neox", "float32"), ("qwen3", "float32"), ("gpt_neox", "bfloat16")])
def test_compiled_blocks_equal_eager_ones_at_every_length(name, dtype) -> None:
    """Two graphs for all lengths and blocks: all tokens, and the last block's last tokens. qwen3 has windows."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model(CONFIGS[name])
    for length, last in ((9, 4), (14, 4), (20, 7)):
        model.transformer.compile_blocks = False
        hidden, gradient = hidden_and_gradient(model, length, last, dtype)
        model.transformer.compile_blocks = True
        compiled_hidden, compiled_gradient = hidden_and_gradient(model, length, last, dtype)
        tolerance = 1e-6 if dtype == "float32" else 1e-3
        assert torch.allclose(compiled_hidden, hidden, atol=10 * tolerance)
        assert torch.allclose(compiled_gradient, gradient, atol=tolerance * gradient.abs().max().item())
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


@pytest.fixture
def graphs(monkeypatch) -> Iterator[list[GraphModule]]:
    """The forward graphs of compiled blocks, which run without a C++ compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recorded = []

    def record(graph, inputs):
        recorded.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled_call.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield recorded
    compiled_call.cache_clear()
    torch._dynamo.reset()


def cast_weights(graph: GraphModule) -> int:
    """The number of weights that a graph casts to bfloat16."""
    casts = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    return sum(node.args[0].op == "placeholder" and node.args[0].meta["val"].ndim == 2 for node in casts)


def bfloat16_weights(graph: GraphModule) -> list[Tensor]:
    inputs = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return [x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.bfloat16 and x.ndim == 2]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "num_graphs"), [("full", 2), ("lora", 3), ("adapter", 3)])
def test_compiled_blocks_cast_no_weights_that_are_kept(how, num_graphs, graphs) -> None:
    """Weights are inputs in bfloat16; their gradients reach the float32 parameters, bit by bit as in eager blocks.

    With a frozen embedding, the first block has a separate graph: its input has no gradient.
    """
    model = make_model(replace(CONFIGS["gpt_neox"], mlp_bias=False))  # a bias would fix the weight's size
    tune(model, how, rank=3)
    for parameter in model.transformer.parameters():  # LoRA and adapters start as the identity
        torch.nn.init.normal_(parameter, std=0.3)
    block = model.transformer.blocks[0]

    def gradients(is_compiled: bool, context) -> Tensor:
        """Accumulate the gradients of two micro-batches."""
        model.transformer.compile_blocks = is_compiled
        model.zero_grad()
        with context():
            for length in (9, 14):
                ids = torch.randint(2, 37, (3, length), generator=torch.Generator().manual_seed(length))
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = model(ids, last=4)
                hidden.float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.transformer.parameters() if p.requires_grad])

    expected = gradients(False, kept_casts)
    assert expected.isfinite().all() and expected.count_nonzero() > 0.9 * len(expected)
    assert torch.equal(gradients(True, kept_casts), expected)
    assert len(graphs) == num_graphs and not any(map(cast_weights, graphs))
    weights = [weight for graph in graphs for weight in bfloat16_weights(graph)]
    assert all(type(size) is int for weight in weights for size in weight.shape)  # not dynamic, as lengths are
    model.transformer.checkpoint_activations = True
    assert torch.equal(gradients(True, kept_casts), expected)
    model.transformer.checkpoint_activations = False
    assert torch.equal(gradients(True, nullcontext), expected)
    assert torch._dynamo.utils.counters["graph_break"] == Counter()
    names = [name for name, _ in block.named_parameters() if not name.endswith("bias") and "norm" not in name]
    assert len(weights) == num_graphs * len(names)
    num_casts = sum(".ups." not in name for name in names)  # the graph scales LoRA's `ups` before it casts them
    assert [cast_weights(graph) for graph in graphs] == [0] * num_graphs + [num_casts] * num_graphs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_only_float32_weights_under_autocast_have_casts(dtype) -> None:
    block = make_model(TINY).transformer.blocks[0]
    with kept_casts():
        assert linear_casts(block) == {}
        with torch.autocast("cpu", torch.bfloat16):
            assert {cast.dtype for cast in linear_casts(block).values()} == {torch.bfloat16}
            cast_linear_weights(block, dtype)
            assert linear_casts(block) == {}
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_casts(make_model(TINY).transformer.blocks[0]) == {}


@pytest.mark.slow
def test_every_graph_of_ppo_is_compiled(graphs) -> None:
    """Reading and training have a graph for all tokens and one for the last tokens each; so has a frozen reference.

    Models of one shape share graphs. By default, the compiler would run the ninth graph eagerly.
    """
    policy, value_model = make_model(TINY), make_model(TINY, ScalarModel)
    wide_value_model = make_model(replace(TINY, d_model=48), ScalarModel)
    ref_policy, batch = reference(policy), rollout()
    cast_linear_weights(ref_policy, torch.bfloat16)
    for model in (policy, value_model, wide_value_model, ref_policy):
        model.transformer.compile_blocks = True
    numbers = []
    with torch.autocast("cpu", torch.bfloat16):
        read_logprobs(policy, ref_policy, batch, 1.0, 2)
        numbers.append(len(graphs))
        for model in (value_model, wide_value_model):
            read_values(model, batch, 2)
            numbers.append(len(graphs))
    for model in (policy, value_model, wide_value_model):
        for mb in batch.micro_batches(2):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.transformer(mb.query_response, mb.real, last=4)
            hidden.float().sum().backward()
        numbers.append(len(graphs))
    assert numbers == [4, 4, 6, 8, 8, 10]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10
    assert torch._dynamo.utils.counters["graph_break"] == Counter()


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
