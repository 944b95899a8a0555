"""Log-probabilities of given tokens, and the entropy of the distribution they come from."""

import torch
import torch.nn.functional as F
from torch import Tensor


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits (..., V), labels (...) -> logprobs (...), entropy (...), both float32, in nats.

    logprob = logits[label] - logsumexp(logits);  entropy = logsumexp(logits) - sum_v p_v logits_v.
    Accumulates in float32 whatever the logits' type; a logit of -inf (an id that can't be emitted) counts as p = 0.
    """
    logits = logits.float()
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normaliser
    finite = logits.masked_fill(logits == -torch.inf, 0.0)  # 0 * -inf would be NaN
    entropy = normaliser - (logits.softmax(-1) * finite).sum(-1)
    return logprobs, entropy


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same straight from hidden states: logits = (hidden @ weight.T + bias) / temperature.

    hidden (N, C), weight (V, C), labels (N,), bias (V,) or None -> logprobs (N,), entropy (N,) in float32.
    """
    return logprobs_from_logits(F.linear(hidden, weight, bias).float() / temperature, labels)
