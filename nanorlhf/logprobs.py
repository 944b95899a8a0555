"""Log-probabilities of given responses."""

import torch
from torch import Tensor

from kernels import linear_logprobs
from nanorlhf.model import GPT


def response_logprobs(
    model: GPT, query_response: Tensor, mask: Tensor, padding_mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """logprobs (B, T) of the response tokens and entropies (B, T) of their distributions, in nats; 0 at padding.

    query_response, mask (B, Q + T); padding_mask (B, T), True after the end. Distributions are softmax(logits /
    temperature). The LM head runs only on unmasked positions.
    """
    T = padding_mask.size(1)
    hidden = model(query_response, mask, last=T + 1)[:, :-1]  # (B, T, C) position Q - 1 + t predicts response token t
    counts = ~padding_mask  # (B, T)
    labels = query_response[:, -T:][counts]  # (N,)
    logprobs, entropies = linear_logprobs(hidden[counts], model.lm_head.weight, labels, model.head_bias, temperature)
    zeros = torch.zeros_like(counts, dtype=logprobs.dtype)  # (B, T)
    return zeros.masked_scatter(counts, logprobs), zeros.masked_scatter(counts, entropies)
