"""What a language model thinks of a response that is already there."""

import torch
from torch import Tensor

from kernels import linear_logprobs
from nanorlhf.model import GPT


def response_logprobs(
    model: GPT, query_response: Tensor, mask: Tensor, padding_mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """logprobs (B, T) of the response tokens and entropies (B, T) of the distributions they come from; 0 at padding.

    query_response, mask (B, Q + T); padding_mask (B, T), True behind the end. Nats, of softmax(logits / temperature).
    The LM head runs only where a token counts.
    """
    T = padding_mask.size(1)
    hidden = model(query_response, mask, last=T + 1)[:, :-1]  # (B, T, C) position Q - 1 + t predicts response token t
    counts = ~padding_mask  # (B, T)
    labels = query_response[:, -T:][counts]  # (N,)
    flat = linear_logprobs(hidden[counts], model.lm_head.weight, labels, model.head_bias, temperature)
    return tuple(torch.zeros_like(counts, dtype=x.dtype).masked_scatter(counts, x) for x in flat)
