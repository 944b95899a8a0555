"""Model FLOPs utilisation: an iteration's FLOPs token by token, and their share of a card's rate."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanorlhf.batch import Batch
from nanorlhf.config import GPTConfig
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import QUERY_AND_VALUE, tune
from nanorlhf.training import update_metrics
from nanorlhf.training.flops import iteration_flops

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


def test_utilisation_is_flops_per_second_over_the_published_rate_of_all_cards(monkeypatch):
    query = torch.tensor([[PAD] * (5 - q) + [7] * q for q in QUERIES])
    response = torch.tensor([[7] * (t - 1) + [EOS] + [PAD] * (4 - t) for t in RESPONSES])
    batch = Batch.of([{}] * 4, query, response, torch.zeros(4, 4), EOS, PAD, "last_token")
    run = SimpleNamespace(args=SimpleNamespace(dtype="bfloat16"), step_start=10.0)
    policy, value_model, reward_model = GPT(SMALL), ScalarModel(WIDE), ScalarModel(SMALL)
    monkeypatch.setattr(time, "perf_counter", lambda: 14.0)
    arguments = run, batch, 3, policy, value_model, [reward_model], 2
    assert update_metrics.mfu(*arguments) == {}  # a CPU
    monkeypatch.setattr(update_metrics, "published_rate", lambda device: 1e9)
    monkeypatch.setattr(update_metrics.distributed, "world_size", lambda: 8)
    flops = iteration_flops(SMALL, WIDE, [SMALL], QUERIES, RESPONSES, 2, 3)
    assert update_metrics.mfu(*arguments) == {"time/mfu": pytest.approx(flops / 4.0 / 8e9)}
    run.args.dtype = "float32"
    assert update_metrics.mfu(*arguments) == {}
    run.args.dtype = "bfloat16"
    tune(policy, "lora", 2, QUERY_AND_VALUE)
    assert update_metrics.mfu(*arguments) == {}
