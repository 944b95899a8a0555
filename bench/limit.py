"""Lower bound on the time that an algorithm needs on this machine, independent of the implementation.

Matmuls are counted at the measured rate of a large matmul; decode steps and the optimizer by the bytes that they must
read and write, at the measured read rate. Only necessary work is counted: no padding, only the visible keys in causal
attention, the last block and the LM head only where their output is used, a comparison's query once, and no
recomputation to save memory. Elementwise work, sampling and Python count as 0, so 100% can't be reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from nanorlhf.config import GPTConfig
from nanorlhf.training.flops import (
    Read,
    decoded_numbers,
    forward_flops,
    iteration_flops,
    matmul_rate,
    median_seconds,
    num_parameters,
    text,
    total,
)

MOST_READ = {"cpu": 2**29, "cuda": 2**31}  # bytes to read to measure the rate
ADAMW_WORDS = 7  # per parameter and step: reads weight, gradient and both moments, writes all but the gradient


# ------------------------------------------------------------------------------------------------------------- 1. rates
@cache
def read_rate(device: torch.device, num_bytes: int) -> float:
    """Measure the bytes per second when reading a tensor of that size repeatedly, from the cache if it fits."""
    x = torch.ones(max(1, min(num_bytes, MOST_READ[device.type]) // 4), device=device)
    return 4 * x.numel() / min(median_seconds(way, device) for way in (x.sum, lambda: torch.dot(x, x)))


# ------------------------------------------------------------------------------------------------------------- 2. work
@dataclass(frozen=True)
class Work:
    """Work of an algorithm: FLOPs of matmuls, bytes moved by the optimizer, and decode steps."""

    flops: int = 0
    moved: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """(FLOPs, bytes) of each decode step, which takes the longer of the two times"""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.moved + other.moved, self.steps + other.steps)

    def seconds(self, device: torch.device, dtype: torch.dtype) -> float:
        rate = matmul_rate(device, dtype)
        # round bytes up to a power of two, so that few sizes are measured
        decoding = (max(flops / rate, size / read_rate(device, 1 << size.bit_length())) for flops, size in self.steps)
        return self.flops / rate + self.moved / read_rate(device, MOST_READ[device.type]) + sum(decoding)


def training(config: GPTConfig, read: Read, used: Read, num_logits: int = 0) -> Work:
    """One optimizer step: a forward pass, twice its matmuls for the gradient, and AdamW in float32."""
    return Work(3 * forward_flops(config, read, used, num_logits), moved_by_adamw(config, with_head=num_logits > 0))


def moved_by_adamw(config: GPTConfig, with_head: bool = True) -> int:
    return 4 * ADAMW_WORDS * num_parameters(config, with_head)


# ------------------------------------------------------------------------------------------------------- 3. algorithms
def generation(config: GPTConfig, queries: Sequence[int], num_tokens: int, itemsize: int, k: int = 1) -> Work:
    """Sample `num_tokens` k times after each query: a step reads the cache and all weights but the embedding.

    queries: their lengths; itemsize: bytes of a weight, and of a number in the cache
    """
    prefill = total([text(length) for length in queries])
    work = Work(forward_flops(config, prefill, total([text(length, 1) for length in queries]), len(queries)))
    queries = [length for length in queries for _ in range(k)]
    weights, per_token = decoded_numbers(config)
    steps = []
    for t in range(1, num_tokens):  # the first token comes from the queries
        read = total([text(length + t, 1) for length in queries])
        steps.append((forward_flops(config, read, read, len(queries)), itemsize * (weights + per_token * read.pairs)))
    return work + Work(steps=tuple(steps))


def ppo_iteration(config: GPTConfig, queries: Sequence[int], num_tokens: int, num_epochs: int, itemsize: int) -> Work:
    """One update with one minibatch: sample, four models read the rollout, train policy and value model for epochs.

    itemsize: see `generation`
    """
    responses = [num_tokens] * len(queries)
    flops = iteration_flops(config, config, [config], queries, responses, 1, num_epochs, num_readings=2)
    moved = num_epochs * (moved_by_adamw(config) + moved_by_adamw(config, with_head=False))
    return generation(config, queries, num_tokens, itemsize) + Work(flops, moved)


def grpo_iteration(
    config: GPTConfig, queries: Sequence[int], k: int, num_tokens: int, num_epochs: int, itemsize: int
) -> Work:
    """One update with one minibatch: k samples per query, three models read them, and training for epochs.

    queries: lengths of the distinct queries; itemsize: see `generation`
    """
    each = [length for length in queries for _ in range(k)]
    flops = iteration_flops(config, None, [config], each, [num_tokens] * len(each), k, num_epochs, num_readings=2)
    return generation(config, queries, num_tokens, itemsize, k) + Work(flops, num_epochs * moved_by_adamw(config))


def sft_step(config: GPTConfig, rows: Sequence[tuple[int, int]]) -> Work:
    """One step on (query, response) pairs of these lengths, with a loss on all tokens but the first."""
    read = total([text(query + response - 1) for query, response in rows])
    return training(config, read, read, read.tokens)


def group(query: int, response: int, last: int, k: int) -> tuple[Read, Read]:
    """Work for a query with k responses of equal length: all tokens, and the last positions of each response."""
    query_read = text(query)
    each = text(query + response, response)
    end = text(query + response, last)
    return Read(query + k * each.tokens, query_read.pairs + k * each.pairs), Read(k * end.tokens, k * end.pairs)


def rm_step(config: GPTConfig, rows: Sequence[tuple[int, int]]) -> Work:
    """One step on comparisons with (query, response) of these lengths; each response's score is at its end."""
    comparisons = [group(query, response, last=1, k=2) for query, response in rows]
    return training(config, total([read for read, _ in comparisons]), total([used for _, used in comparisons]))


def dpo_step(config: GPTConfig, rows: Sequence[tuple[int, int]]) -> Work:
    """The same for policy and reference; the query's last token predicts the first token of both responses."""
    comparisons = [group(query, response - 1, last=response - 1, k=2) for query, response in rows]
    read = total([read for read, _ in comparisons])
    used = total([used for _, used in comparisons] + [text(query, 1) for query, _ in rows])
    return training(config, read, used, used.tokens) + Work(forward_flops(config, read, used, used.tokens))
