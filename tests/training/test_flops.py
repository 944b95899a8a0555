"""Model FLOPs utilisation: an iteration's FLOPs token by token, and their share of a card's rate."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_ppo
from nanorlhf.batch import Batch
from nanorlhf.config import GPTConfig
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import QUERY_AND_VALUE, tune
from nanorlhf.training import update_metrics
from nanorlhf.training.flops import Card, decode_bytes, iteration_flops, published
from nanorlhf.training.settings import SamplerSettings

SMALL = GPTConfig(vocab_size=40, n_ctx=16, d_model=16, n_layer=2, n_head=4, n_kv_head=2, d_mlp=24, rotary_dim=4)
WIDE = replace(SMALL, d_model=32)
EOS, PAD = 0, 39
QUERIES, RESPONSES = [3, 3, 5, 5], [4, 1, 2, 4]  # two responses to each of two queries


def pass_by_token(config: GPTConfig, lengths: list[tuple[int, list[int]]], used_from: str, last: int) -> int:
    """Add up 2 FLOPs per multiplication over each layer and token; `last` tokens of each response are not read."""
    C, D, H, K = config.d_model, config.head_width, config.n_head, config.kv_heads
    keys, rest = C * 2 * K * D, C * H * D + H * D * C + 2 * C * config.d_mlp
    multiplications = 0
    for query, responses in lengths:
        tokens = [(i + 1, used_from == "query's end" and i == query - 1) for i in range(query)]  # (visible, used)
        for response in responses:
            read = response - last
            tokens += [(query + i + 1, used_from == "query's end" or i == read - 1) for i in range(read)]
        for layer in range(config.n_layer):
            for visible, is_used in tokens:
                multiplications += keys
                if layer < config.n_layer - 1 or is_used:
                    multiplications += rest + visible * H * D * 2
    return 2 * multiplications


@pytest.mark.parametrize(
    ("k", "groups"), [(1, [(3, [4]), (3, [1]), (5, [2]), (5, [4])]), (2, [(3, [4, 1]), (5, [2, 4])])]
)
def test_an_iteration_samples_reads_and_trains_each_token(k, groups):
    logits = 2 * sum(RESPONSES) * 16 * 40
    policy = pass_by_token(SMALL, groups, "query's end", last=1) + logits  # the last token predicts nothing
    value, reward = pass_by_token(WIDE, groups, "query's end", last=1), pass_by_token(WIDE, groups, "end", last=0)
    for num_epochs in (1, 4):
        trained = 3 * num_epochs
        ppo = iteration_flops(SMALL, WIDE, [WIDE, WIDE], QUERIES, RESPONSES, k, num_epochs)
        assert ppo == (3 + trained) * policy + (1 + trained) * value + 2 * reward
        assert iteration_flops(SMALL, None, [], QUERIES, RESPONSES, k, num_epochs) == (3 + trained) * policy


def test_the_published_rates_are_looked_up_by_the_name_of_the_card(monkeypatch):
    for name, rates in (
        ("NVIDIA H100 80GB HBM3", (989e12, 3.35e12)), ("NVIDIA H100 PCIe", (756e12, 2e12)),
        ("NVIDIA A100-SXM4-80GB", (312e12, 2.039e12)), ("NVIDIA A100-SXM4-40GB", (312e12, 1.555e12)),
        ("NVIDIA GeForce RTX 4090", None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert published(torch.device("cuda")) == rates
    assert published(torch.device("cpu")) is None


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, tied_head=True)], ids=["untied", "tied"])
def test_decode_steps_read_all_weights_per_step_and_the_cache_of_rows_that_have_not_ended(config):
    """Added up step by step: the batches are the rows with queries of 3 and of 5 tokens, and all rows."""
    model = GPT(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2)
    weights = matrices - (0 if config.tied_head else 40 * 16)
    lengths = list(zip(QUERIES, RESPONSES, strict=True))
    for size, batches in ((2, (lengths[:2], lengths[2:])), (4, (lengths,))):
        numbers = 0
        for batch in batches:
            for t in range(1, 4):  # the first token comes from the query
                live = [query + t for query, response in batch if t < response]
                numbers += (
                    (weights + sum(live) * 2 * 2 * 2 * 4) if live else 0
                )  # 2 layers, keys and values, 2 heads of 4
        shuffled = [lengths[i] for i in (2, 0, 3, 1)]
        assert decode_bytes(config, shuffled, size, 2) == 2 * numbers


def test_utilisation_is_relative_to_the_rates_of_all_cards(monkeypatch):
    query = torch.tensor([[PAD] * (5 - q) + [7] * q for q in QUERIES])
    response = torch.tensor([[7] * (t - 1) + [EOS] + [PAD] * (4 - t) for t in RESPONSES])
    batch = Batch.of([{}] * 4, query, response, torch.zeros(4, 4), EOS, PAD, "last_token")
    args = SimpleNamespace(dtype="bfloat16", read_size=8)
    run = SimpleNamespace(args=args, step_start=10.0, generating_seconds=0.5)
    policy, value_model, reward_model = GPT(SMALL), ScalarModel(WIDE), ScalarModel(SMALL)
    monkeypatch.setattr(time, "perf_counter", lambda: 14.0)
    arguments = run, batch, 3, policy, value_model, [reward_model], 2
    assert update_metrics.utilisation(*arguments) == {}  # a CPU
    monkeypatch.setattr(update_metrics, "published", lambda device: Card(1e9, 1e6))
    monkeypatch.setattr(update_metrics, "matmul_rate", lambda device, dtype: 5e8)
    monkeypatch.setattr(update_metrics.distributed, "world_size", lambda: 2)
    flops = iteration_flops(SMALL, WIDE, [SMALL], QUERIES, RESPONSES, 2, 3)
    share = flops / 4.0 / 2e9
    bandwidth = decode_bytes(SMALL, [(3, 4), (3, 1)], 8, 2) / 0.5 / 1e6  # of this rank's half
    expected = {"time/mfu": share, "time/matmul_share": 2 * share, "time/decode_bandwidth": bandwidth}
    assert update_metrics.utilisation(*arguments) == pytest.approx(expected)
    sampler = SamplerSettings(url="http://localhost:8000")
    run.args = replace(train_ppo.RECIPES["tiny"][1], dtype="bfloat16", sampler=sampler)
    assert "time/decode_bandwidth" not in update_metrics.utilisation(*arguments)
    run.args = args
    run.args.dtype = "float32"
    assert update_metrics.utilisation(*arguments) == {}
    run.args.dtype = "bfloat16"
    tune(policy, "lora", 2, QUERY_AND_VALUE)
    assert update_metrics.utilisation(*arguments) == {}
