"""Log-probabilities of given tokens, and the entropy of the distribution they come from.

For a row of logits l with normaliser Z = logsumexp(l) and p = exp(l - Z):

    logprob = l[label] - Z                 d logprob / d l = onehot(label) - p
    entropy = Z - sum_v p_v l_v            d entropy / d l = -p * (log p + entropy)

`linear_logprobs` starts from hidden states. Stored logits, (N, V) and their gradient, are the largest tensors of a
whole training step; where they would be large it takes a few tokens at a time and makes their logits once more in the
backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

STORED = 2**24  # logits that are stored and not recomputed: up to 64 MB in float32
CHUNK = 2**23  # logits held at a time where they are recomputed


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits (..., V), labels (...) -> logprobs (...), entropy (...), both float32 (float64 from float64), in nats.

    Accumulates in float32 whatever the logits' type; a logit of -inf (an id that can't be emitted) counts as p = 0.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - normaliser
    finite = logits.masked_fill(logits == -torch.inf, 0.0)  # 0 * -inf would be NaN
    entropy = normaliser - (logits.softmax(-1) * finite).sum(-1)
    return logprobs, entropy


def linear_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same straight from hidden states: logits = (hidden @ weight.T + bias) / temperature.

    hidden (N, C), weight (V, C), labels (N,), bias (V,) or None -> logprobs (N,), entropy (N,), as above. Under
    autocast the product is in its type.
    """
    if len(hidden) * len(weight) <= STORED:
        return stored_logprobs(hidden, weight, labels, bias, temperature)
    return ChunkedLogprobs.apply(hidden, weight, labels, bias, temperature, max(1, CHUNK // len(weight)))


def stored_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """The specification, and the fastest way while the logits are small."""
    return logprobs_from_logits(scaled_logits(hidden, weight, bias, temperature), labels)


def scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(N, C), (V, C), (V,) -> (N, V), in float32 from the product on."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits if bias is None else logits + bias) / temperature


class ChunkedLogprobs(torch.autograd.Function):
    """`stored_logprobs` for `num_rows` tokens at a time: at most num_rows * V logits exist at once."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, bias, temperature, num_rows):
        device = hidden.device.type
        ctx.autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(device)
        ctx.temperature, ctx.num_rows = temperature, num_rows
        ctx.set_materialize_grads(False)  # entropy is mostly for the log: then its gradient is None
        parts = [
            stored_logprobs(hidden[rows], weight, labels[rows], bias, temperature)
            for rows in slices(len(hidden), num_rows)
        ]
        logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, labels, bias, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, labels, bias, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for rows in slices(len(hidden), ctx.num_rows):
            with torch.autocast(**ctx.autocast):
                log_p = scaled_logits(hidden[rows], weight, bias, ctx.temperature)  # (n, V)
            log_p -= log_p.logsumexp(-1, keepdim=True)
            p = log_p.exp()  # (n, V)
            # d loss / d logits, written over p: g_l * (onehot - p) - g_e * p * (log p + entropy)
            factor = torch.zeros_like(entropy[rows])[:, None] if grad_logprobs is None else -grad_logprobs[rows, None]
            if grad_entropy is not None:
                log_p.masked_fill_(log_p == -torch.inf, 0.0)  # p is 0 there, and 0 * -inf would be NaN
                factor = factor - grad_entropy[rows, None] * (log_p + entropy[rows, None])
            p *= factor
            if grad_logprobs is not None:
                p.scatter_add_(1, labels[rows, None], grad_logprobs[rows, None])
            p /= ctx.temperature
            if grad_bias is not None:
                grad_bias += p.sum(0)
            p = p.to(ctx.autocast["dtype"]) if ctx.autocast["enabled"] else p
            if grad_hidden is not None:
                grad_hidden[rows] = p @ weight.to(p.dtype)
            if grad_weight is not None:
                grad_weight += p.T @ hidden[rows].to(p.dtype)
        return grad_hidden, grad_weight, None, grad_bias, None, None


def slices(length: int, size: int) -> list[slice]:
    """Consecutive pieces of at most `size`; one empty piece of nothing."""
    return [slice(start, start + size) for start in range(0, max(length, 1), size)]
