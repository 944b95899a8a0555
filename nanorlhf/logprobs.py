"""Log-probabilities of given responses, and how far two policies differ on them."""

import torch
from torch import Tensor

from kernels import linear_kl_divergence, linear_logprobs
from nanorlhf.model import GPT


def response_hidden(model: GPT, query_response: Tensor, mask: Tensor, padding_mask: Tensor) -> Tensor:
    """The hidden states (N, C) that predict the N response tokens that count.

    query_response, mask (B, Q + T); padding_mask (B, T), True after the end.
    """
    T = padding_mask.size(1)
    hidden = model(query_response, mask, last=T + 1)[:, :-1]  # (B, T, C) position Q - 1 + t predicts response token t
    return hidden[~padding_mask]


def response_logprobs(
    model: GPT, query_response: Tensor, mask: Tensor, padding_mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """logprobs (B, T) of the response tokens and entropies (B, T) of their distributions, in nats; 0 at padding.

    query_response, mask (B, Q + T); padding_mask (B, T), True after the end. Distributions are softmax(logits /
    temperature). The LM head runs only on unmasked positions.
    """
    hidden = response_hidden(model, query_response, mask, padding_mask)  # (N, C)
    labels = query_response[:, -padding_mask.size(1) :][~padding_mask]  # (N,)
    logprobs, entropies = linear_logprobs(hidden, model.lm_head.weight, labels, model.head_bias, temperature)
    return unpack(logprobs, padding_mask), unpack(entropies, padding_mask)


def compared_logprobs(
    policy: GPT, ref_policy: GPT, query_response: Tensor, mask: Tensor, padding_mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs (B, T) of the response tokens by both policies, and the exact KL(policy || reference) at each of them.

    The KL is the sum over the vocabulary, in nats, without a gradient; arguments and padding as in `response_logprobs`.
    """
    labels = query_response[:, -padding_mask.size(1) :][~padding_mask]  # (N,)
    models = policy, ref_policy
    hidden = [response_hidden(model, query_response, mask, padding_mask) for model in models]  # (N, C) each
    logprobs, ref_logprobs = (
        linear_logprobs(h, model.lm_head.weight, labels, model.head_bias, temperature)[0]
        for model, h in zip(models, hidden, strict=True)
    )
    heads = policy.lm_head.weight, hidden[1], ref_policy.lm_head.weight, policy.head_bias, ref_policy.head_bias
    with torch.no_grad():
        kl = linear_kl_divergence(hidden[0], *heads, temperature)  # (N,)
    return unpack(logprobs, padding_mask), unpack(ref_logprobs, padding_mask), unpack(kl, padding_mask)


def unpack(values: Tensor, padding_mask: Tensor) -> Tensor:
    """values (N,) of the tokens that count -> (B, T), 0 at padding."""
    return torch.zeros_like(padding_mask, dtype=values.dtype).masked_scatter(~padding_mask, values)
