"""The least time in which this machine could do what an algorithm asks for, whoever writes the program.

Products are counted at the rate of a large product here, decode steps and the optimizer by the bytes that they must
read and write, at the rate of reading here. Only what the algorithm needs is counted: no padding, a key for each query
of causal attention, the last block and the LM head where their output is used, a comparison's query once, and nothing
twice to save memory. Elementwise work, sampling and everything in Python count nothing, so 100% can't be reached.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import fits_onednn, matmul_by_onednn
from nanorlhf.config import GPTConfig

# what the rates are measured on: rows of a square matrix, and the most bytes that are read
MULTIPLIED = {"cpu": 2048, "cuda": 8192}
MOST_READ = {"cpu": 2**29, "cuda": 2**31}
REPEATS = 10
ADAMW_WORDS = 7  # per parameter and step: weight, gradient and both moments are read, all but the gradient written


# ------------------------------------------------------------------------------------------------------------- 1. rates
def median_seconds(way: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@cache
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product, by the faster of the libraries in PyTorch."""
    n = MULTIPLIED[device.type]
    a = torch.randn(n, n, device=device, dtype=dtype)
    ways: list[Callable[[], Tensor]] = [lambda: F.linear(a, a)]
    if fits_onednn(a, a):
        ways.append(lambda: matmul_by_onednn(a, a))
    return 2 * n**3 / min(median_seconds(way, device) for way in ways)


@cache
def read_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of reading a tensor of that size over and over; one that fits a cache is read from there."""
    x = torch.ones(max(1, min(num_bytes, MOST_READ[device.type]) // 4), device=device)
    return 4 * x.numel() / min(median_seconds(way, device) for way in (x.sum, lambda: torch.dot(x, x)))


# ------------------------------------------------------------------------------------------------- 2. what is asked for
class Read(NamedTuple):
    """What causal attention goes through: tokens, and pairs of a token with itself or an earlier one."""

    tokens: int
    pairs: int


def text(length: int, last: int | None = None) -> Read:
    """The last tokens of a text; None: all of it."""
    last = length if last is None else last
    return Read(last, sum(range(length - last + 1, length + 1)))


def total(parts: Sequence[Read]) -> Read:
    return Read(sum(part.tokens for part in parts), sum(part.pairs for part in parts))


def block_weights(config: GPTConfig) -> tuple[int, int]:
    """Of the projections to keys and values, and of the others: as many as multiplications per token."""
    C, width = config.d_model, config.head_width
    return 2 * C * config.kv_heads * width, (
        2 * C * config.n_head * width + (3 if config.gated_mlp else 2) * C * config.d_mlp  # query, output, MLP
    )


def forward_flops(config: GPTConfig, read: Read, used: Read, num_logits: int = 0) -> int:
    """Operations of the products of one pass; a multiplication and an addition are two.

    `used` are the positions whose output counts: of the others the last block needs keys and values alone. `num_logits`
    of them go through the LM head.
    """
    keys, others = block_weights(config)
    pair = 2 * config.n_head * config.head_width  # of a query with a key, and of its weight with a value
    first = (config.n_layer - 1) * (read.tokens * (keys + others) + read.pairs * pair)
    last = read.tokens * keys + used.tokens * others + used.pairs * pair
    return 2 * (first + last + num_logits * config.d_model * config.vocab_size)


@dataclass(frozen=True)
class Work:
    """What an algorithm asks for: operations of products, bytes of the optimizer, and steps of decoding."""

    flops: int = 0
    moved: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """(operations, bytes) of each decode step, which takes the longer of the two"""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.moved + other.moved, self.steps + other.steps)

    def seconds(self, device: torch.device, dtype: torch.dtype) -> float:
        rate = product_rate(device, dtype)
        # bytes to the next power of two, so that few sizes are measured
        decoding = (max(flops / rate, size / read_rate(device, 1 << size.bit_length())) for flops, size in self.steps)
        return self.flops / rate + self.moved / read_rate(device, MOST_READ[device.type]) + sum(decoding)


def training(config: GPTConfig, read: Read, used: Read, num_logits: int = 0) -> Work:
    """One optimizer step: a forward pass, twice its products for the gradient, and AdamW in float32."""
    flops = 3 * forward_flops(config, read, used, num_logits)
    return Work(flops, moved=4 * ADAMW_WORDS * num_parameters(config, with_head=num_logits > 0))


def num_parameters(config: GPTConfig, with_head: bool = True) -> int:
    """Of the matrices: vectors and learned positions are small."""
    heads = 1 if config.tied_head or not with_head else 2
    return config.n_layer * sum(block_weights(config)) + heads * config.vocab_size * config.d_model


# ------------------------------------------------------------------------------------------------------- 3. algorithms
def generation(config: GPTConfig, queries: Sequence[int], num_tokens: int, itemsize: int) -> Work:
    """Sample `num_tokens` after queries of these lengths: a step reads all weights but the embedding, and the cache.

    itemsize: bytes of a weight, and of a number in the cache
    """
    prefill = total([text(length) for length in queries])
    work = Work(forward_flops(config, prefill, total([text(length, 1) for length in queries]), len(queries)))
    embedding = 0 if config.tied_head else config.vocab_size * config.d_model
    weights = num_parameters(config) - embedding
    per_token = 2 * config.n_layer * config.kv_heads * config.head_width  # numbers in the cache
    steps = []
    for t in range(1, num_tokens):  # the first token comes from the queries
        read = total([text(length + t, 1) for length in queries])
        steps.append((forward_flops(config, read, read, len(queries)), itemsize * (weights + per_token * read.pairs)))
    return work + Work(steps=tuple(steps))


def ppo_iteration(config: GPTConfig, queries: Sequence[int], num_tokens: int, num_epochs: int, itemsize: int) -> Work:
    """One update with one minibatch: sample, four models read the rollout, epochs of policy and value model.

    itemsize: as of `generation`
    """
    read = total([text(length + num_tokens - 1) for length in queries])  # nothing follows from the last token
    used = total([text(length + num_tokens - 1, num_tokens) for length in queries])
    whole = total([text(length + num_tokens) for length in queries])
    ends = total([text(length + num_tokens, 1) for length in queries])
    num_logits = len(queries) * num_tokens
    work = generation(config, queries, num_tokens, itemsize)
    work += Work(2 * forward_flops(config, read, used, num_logits))  # policy and reference
    work += Work(forward_flops(config, read, used) + forward_flops(config, whole, ends))  # values, scores
    for _ in range(num_epochs):
        work += training(config, read, used, num_logits) + training(config, read, used)
    return work


def sft_step(config: GPTConfig, rows: Sequence[tuple[int, int]]) -> Work:
    """One step on (query, response) of these lengths, with the loss on all tokens but the first."""
    read = total([text(query + response - 1) for query, response in rows])
    return training(config, read, read, read.tokens)


def comparison(query: int, response: int, last: int) -> tuple[Read, Read]:
    """A query and two responses of one length: what is read, and the last positions of each response."""
    alone = text(query)
    both = text(query + response, response)
    end = text(query + response, last)
    return Read(query + 2 * both.tokens, alone.pairs + 2 * both.pairs), Read(2 * end.tokens, 2 * end.pairs)


def rm_step(config: GPTConfig, rows: Sequence[tuple[int, int]]) -> Work:
    """One step on comparisons with (query, response) of these lengths; each response's score is at its end."""
    parts = [comparison(query, response, last=1) for query, response in rows]
    return training(config, total([read for read, _ in parts]), total([used for _, used in parts]))


def dpo_step(config: GPTConfig, rows: Sequence[tuple[int, int]]) -> Work:
    """The same of policy and reference: the query's last token predicts the first of both responses."""
    parts = [comparison(query, response - 1, last=response - 1) for query, response in rows]
    read = total([read for read, _ in parts])
    used = total([used for _, used in parts] + [text(query, 1) for query, _ in rows])
    return training(config, read, used, used.tokens) + Work(forward_flops(config, read, used, used.tokens))
