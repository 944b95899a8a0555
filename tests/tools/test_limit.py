"""The benchmark's limits, compared with PyTorch's FLOP counter."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench import limit, settings, stopwatch, updates
from bench.limit import Work
from nanorlhf.model import GPT
from nanorlhf.training import flops
from nanorlhf.training.flops import Read, forward_flops, text, total

SHAPE = settings.Shape(2, 16, 2, 40, 8, 5, 4)
GATED = dict(n_kv_head=1, gated_mlp=True, d_mlp=24, architecture="llama", rotary_dim=8, norm="rms", mlp_bias=False)


def matmul_flops(way) -> int:
    """Count the FLOPs of the matmuls in a call with PyTorch, which includes attention to later tokens."""
    # PyTorch doesn't count FLOPs inside the CPU's fused attention
    with stopwatch.plain_pytorch(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        way()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [SHAPE.config, replace(SHAPE.config, **GATED)], ids=["neox", "grouped heads"])
@pytest.mark.parametrize("last", [1, 3, 9])
def test_forward_flops_equal_the_models_matmuls(config, last):
    model, ids = GPT(config).eval(), torch.randint(40, (1, 9))
    real = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        counted = matmul_flops(lambda: model.logits(model(ids, real, last=last)))
    unused = 2 * (9 - last) * 16 * 16  # queries of the last block, which the model's joint projection computes too
    assert counted == forward_flops(config, Read(9, 9 * 9), Read(last, last * 9), last) + unused


def test_the_backward_pass_takes_twice_the_forward_flops():
    model, ids = GPT(SHAPE.config), torch.randint(40, (1, 9))
    real = torch.ones_like(ids, dtype=torch.bool)
    counted = matmul_flops(lambda: model.logits(model(ids, real)).sum().backward())
    assert counted == 3 * forward_flops(SHAPE.config, Read(9, 81), Read(9, 81), 9)


def test_pairs_are_those_of_causal_attention():
    def pairs(first: int, length: int) -> int:
        return sum(key <= query for query, key in itertools.product(range(first, length), range(length)))

    assert text(7) == Read(7, pairs(0, 7)) and text(7, 2) == Read(2, pairs(5, 7))
    assert total([Read(1, 2), Read(30, 40)]) == Read(31, 42)
    # a query of 4 tokens, then two responses of 3, each attending to the query and itself
    sees = [[key <= query and not (query >= 7 and 4 <= key < 7) for key in range(10)] for query in range(10)]
    read, used = limit.group(4, 3, last=1, k=2)
    assert read == Read(10, sum(map(sum, sees))) and used == Read(2, sum(sees[6]) + sum(sees[9]))


def test_parameters_and_decode_steps_are_the_models():
    for name in ("tiny", "124m"):
        config = replace(settings.SHAPES[name].config, n_layer=2, vocab_size=300)
        model = GPT(config)
        matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "position" not in n)
        assert limit.num_parameters(config) == matrices
    (flops, _), *_ = limit.generation(SHAPE.config, [3, 5], 2, 4).steps
    read = Read(2, 4 + 6)
    assert flops == forward_flops(SHAPE.config, read, read, 2)


@pytest.mark.parametrize(
    ("changes", "weights", "cached"),
    [
        # 2 layers with four 16 x 16 projections and two 16 x 64 matrices, and a 40 x 16 head; per layer and token, 16
        # keys and 16 values
        ({}, 2 * (4 * 256 + 2 * 1024) + 640, 64),
        ({"tied_head": True, "architecture": "gpt2", "positions": "learned", "rotary_dim": 0}, 2 * 3072 + 640, 64),
        (GATED, 2 * (2 * 256 + 2 * 128 + 3 * 384) + 640, 32),  # one of two heads has keys: 8 wide
    ],
    ids=["neox", "tied", "grouped heads"],
)
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_decode_step_reads_weights_and_cache_in_the_dtype_of_the_run(changes, weights, cached, dtype, itemsize):
    """Also in a PPO iteration, but AdamW stays in float32: two models, three epochs, seven numbers per weight."""
    config = replace(SHAPE.config, **changes)
    expected = [itemsize * (weights + cached * tokens) for tokens in (4 + 6, 5 + 7)]  # queries of 3 and 5, then 1, 2
    assert [size for _, size in limit.generation(config, [3, 5], 3, dtype.itemsize).steps] == expected
    work = limit.ppo_iteration(config, [3, 5], 3, 3, dtype.itemsize)
    assert [size for _, size in work.steps] == expected
    policy, value_model = weights + (0 if config.tied_head else 640), weights
    assert work.moved == 3 * 7 * 4 * (policy + value_model)


@pytest.mark.parametrize(
    ("way", "work"),
    [
        (partial(updates.plain_pytorch_stage, stage="sft"), limit.sft_step),
        (partial(updates.plain_pytorch_stage, stage="rm"), limit.rm_step),
        (partial(updates.plain_pytorch_stage, stage="dpo"), limit.dpo_step),
        (updates.plain_pytorch_ppo, lambda config, rows: limit.ppo_iteration(config, [q for q, _ in rows], 5, 4, 4)),
        (updates.our_grpo, lambda config, rows: limit.grpo_iteration(config, [rows[0][0]], len(rows), 5, 4, 4)),
    ],
    ids=["sft", "rm", "dpo", "ppo", "grpo"],
)
def test_a_straightforward_program_multiplies_more_than_the_limit(way, work, tmp_path, monkeypatch):
    monkeypatch.setitem(settings.SHAPES, "tiny", SHAPE)
    settings.make_run(SHAPE, tmp_path, torch.device("cpu"))
    needed = work(SHAPE.config, [(length, SHAPE.response_length) for length in SHAPE.query_lengths])
    flops = needed.flops + sum(flops for flops, _ in needed.steps)
    counted = matmul_flops(lambda: way(settings.Args(device="cpu"), tmp_path)) / 2  # per step
    assert flops < counted < 3 * flops


def test_seconds_are_work_over_rates(monkeypatch):
    monkeypatch.setattr(limit, "matmul_rate", lambda device, dtype: 100.0)
    monkeypatch.setattr(limit, "read_rate", lambda device, size: 10.0)
    work = Work(200, 30, ((50, 20), (300, 1))) + Work(100)
    assert work.seconds(torch.device("cpu"), torch.float32) == pytest.approx(3 + 3 + 2 + 3)


def test_rates_are_measured(monkeypatch):
    monkeypatch.setitem(flops.MULTIPLIED, "cpu", 16)
    monkeypatch.setattr(flops, "REPEATS", 1)
    limit.matmul_rate.cache_clear()
    limit.read_rate.cache_clear()
    for dtype in (torch.float32, torch.bfloat16):
        assert limit.matmul_rate(torch.device("cpu"), dtype) > 0
    assert limit.read_rate(torch.device("cpu"), 4096) > 0
    limit.matmul_rate.cache_clear()
    limit.read_rate.cache_clear()
