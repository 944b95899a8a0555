"""FLOPs of the matmuls that models need, and the rates of cards, for model FLOPs utilisation (MFU).

Only necessary work counts: no padding, only the visible keys in causal attention, the last block and the LM head only
where their output is used, the query of several responses once, and no recomputation to save memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanorlhf.config import GPTConfig

# FLOP/s of dense bfloat16 matmuls, from NVIDIA's data sheets, by the device's name; the first that matches
PUBLISHED = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def published_rate(device: torch.device) -> float | None:
    """Return the card's published bfloat16 FLOP/s; None for a CPU or an unknown card."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for card, rate in PUBLISHED.items() if card in name), None)


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
