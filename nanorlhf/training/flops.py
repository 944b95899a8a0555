"""FLOPs of the matmuls that models need, bytes that decode steps read, and the rates of cards.

Only necessary work counts: no padding, only the visible keys in causal attention, the last block and the LM head only
where their output is used, the query of several responses once, and no recomputation to save memory.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import fits_onednn, matmul_by_onednn
from nanorlhf.config import GPTConfig


class Card(NamedTuple):
    """Published rates of a card."""

    rate: float  # FLOP/s of dense bfloat16 matmuls
    bandwidth: float  # bytes per second of its memory


# from NVIDIA's data sheets, by the device's name; the first that matches
CARDS = {
    "A100-SXM4-40GB": Card(312e12, 1.555e12),
    "A100-PCIE-40GB": Card(312e12, 1.555e12),
    "A100 80GB PCIe": Card(312e12, 1.935e12),
    "A100": Card(312e12, 2.039e12),
    "H100 PCIe": Card(756e12, 2.0e12),
    "H100": Card(989e12, 3.35e12),
    "H200": Card(989e12, 4.8e12),
    "B200": Card(2250e12, 8.0e12),
}
MULTIPLIED = {"cpu": 2048, "cuda": 8192}  # rows of the square matrix that measures the rate
REPEATS = 10


# ------------------------------------------------------------------------------------------------------------- 1. rates
def published(device: torch.device) -> Card | None:
    """Return the card's published rates; None for a CPU or an unknown card."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((card for pattern, card in CARDS.items() if pattern in name), None)


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
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a large matmul with the fastest library in PyTorch: a GPU takes about 20 ms."""
    n = MULTIPLIED[device.type]
    a = torch.randn(n, n, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    ways: list[Callable[[], Tensor]] = [lambda: F.linear(a, a)]
    if fits_onednn(a, a):
        ways.append(lambda: matmul_by_onednn(a, a))
    with torch.no_grad():
        return 2 * n**3 / min(median_seconds(way, device) for way in ways)


# ------------------------------------------------------------------------------------------------------------- 2. FLOPs


class Read(NamedTuple):
    """Input of a causal pass: tokens, and pairs of a token with itself or an earlier token."""

    tokens: int
    pairs: int


def text(length: int, last: int | None = None) -> Read:
    """Return the work for the last tokens of a text; None: for all tokens."""
    last = length if last is None else last
    return Read(last, sum(range(length - last + 1, length + 1)))


def total(reads: Sequence[Read]) -> Read:
    return Read(sum(read.tokens for read in reads), sum(read.pairs for read in reads))


def block_weights(config: GPTConfig) -> tuple[int, int]:
    """Return a block's weights, which equal its multiplications per token: key and value projections, and the rest."""
    C, width = config.d_model, config.head_width
    return 2 * C * config.kv_heads * width, (
        2 * C * config.n_head * width + (3 if config.gated_mlp else 2) * C * config.d_mlp  # query, output, MLP
    )


def forward_flops(config: GPTConfig, read: Read, used: Read, num_logits: int = 0) -> int:
    """Count the FLOPs of the matmuls in one pass; a multiplication and an addition are two.

    `used` are the positions whose output is needed; for other positions, the last block only computes keys and values.
    `num_logits` positions go through the LM head.
    """
    key_weights, other_weights = block_weights(config)
    pair = 2 * config.n_head * config.head_width  # query times key, and weight times value
    first = (config.n_layer - 1) * (read.tokens * (key_weights + other_weights) + read.pairs * pair)
    last = read.tokens * key_weights + used.tokens * other_weights + used.pairs * pair
    return 2 * (first + last + num_logits * config.d_model * config.vocab_size)


def iteration_flops(
    policy: GPTConfig,
    value_model: GPTConfig | None,
    reward_models: Sequence[GPTConfig],
    queries: Sequence[int],
    responses: Sequence[int],
    k: int,
    num_epochs: int,
    num_readings: int = 3,
) -> int:
    """Count the FLOPs of an iteration of PPO, or without a value model of GRPO.

    queries, responses: B lengths; k adjacent responses share a query. num_readings: passes of policy and reference
    without a gradient, including sampling, which computes each token once as a reading does.
    """
    lengths, shared = list(zip(queries, responses, strict=True)), queries[::k]
    # the last token predicts nothing
    answers = total([text(query + response - 1, response - 1) for query, response in lengths])
    ends = total([text(query + response, 1) for query, response in lengths])
    read, used = total([answers, *map(text, shared)]), total([answers, *(text(query, 1) for query in shared)])
    flops = (num_readings + 3 * num_epochs) * forward_flops(policy, read, used, sum(responses))  # backward: two more
    if value_model is not None:
        flops += (1 + 3 * num_epochs) * forward_flops(value_model, read, used)
    return flops + sum(forward_flops(config, total([read, ends]), ends) for config in reward_models)


# ------------------------------------------------------------------------------------------------------------- 3. bytes
def num_parameters(config: GPTConfig, with_head: bool = True) -> int:
    """Count the parameters in matrices; vectors and learned positions are small."""
    heads = 1 if config.tied_head or not with_head else 2
    return config.n_layer * sum(block_weights(config)) + heads * config.vocab_size * config.d_model


def decoded_numbers(config: GPTConfig) -> tuple[int, int]:
    """Return the numbers that a decode step reads: weights without the embedding, and the cache of one token."""
    embedding = 0 if config.tied_head else config.vocab_size * config.d_model
    return num_parameters(config) - embedding, 2 * config.n_layer * config.kv_heads * config.head_width


def decode_bytes(config: GPTConfig, rows: Sequence[tuple[int, int]], size: int, itemsize: int) -> int:
    """Count the bytes that sampling must read in decode steps of `size` rows at once, queries of similar length.

    rows: lengths of queries and responses; a response needs one step less than it has tokens, and all steps of a batch
    read the weights. itemsize: bytes of a weight, and of a number in the cache
    """
    weights, per_token = decoded_numbers(config)
    rows, numbers = sorted(rows), 0
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        numbers += weights * (max(response for _, response in batch) - 1)
        numbers += per_token * sum(query + t for query, response in batch for t in range(1, response))
    return itemsize * numbers
