"""Log-probabilities of existing responses, the KL between two policies, and values."""

import torch
from torch import Tensor

from kernels import linear_kl_divergence, linear_logprobs
from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.shared_queries import Groups


def response_hidden(
    model: GPT,
    query_response: Tensor,
    real: Tensor,
    actions: Tensor,
    groups: Groups | None = None,
) -> Tensor:
    """Return the hidden states (N, C) that predict the N response tokens that count.

    query_response, real (B, Q + T); actions (B, T), True up to the end of a response; groups: rows
    with the same query, None: find them.
    """
    T = actions.size(1)
    # (B, T, C) position Q - 1 + t predicts response token t
    hidden = model(query_response, real, last=T + 1, groups=groups)[:, :-1]
    return hidden[actions]


def response_logprobs(
    model: GPT,
    query_response: Tensor,
    real: Tensor,
    actions: Tensor,
    temperature: float,
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the response tokens, (B, T) each.

    In nats; 0 after the end of a response. Distributions are softmax(logits / temperature). The LM
    head runs only where a token counts. Arguments are as in `response_hidden`.
    """
    hidden = response_hidden(model, query_response, real, actions, groups)  # (N, C)
    labels = query_response[:, -actions.size(1) :][actions]  # (N,)
    logprobs, entropies = linear_logprobs(
        hidden, model.lm_head.weight, labels, model.head_bias, temperature, model.config.logit_cap
    )  # (N,) each
    return unpack(logprobs, actions), unpack(entropies, actions)


def compared_logprobs(
    policy: GPT,
    ref_policy: GPT,
    query_response: Tensor,
    real: Tensor,
    actions: Tensor,
    temperature: float,
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the response's log-probabilities under both policies, and KL(policy || reference).

    (B, T) each, in nats. The KL of each token's distribution is exact, a sum over the vocabulary;
    it has no gradient. Arguments and padding are as in `response_logprobs`.
    """
    labels = query_response[:, -actions.size(1) :][actions]  # (N,)
    hidden = response_hidden(policy, query_response, real, actions, groups)  # (N, C)
    ref_hidden = response_hidden(ref_policy, query_response, real, actions, groups)  # (N, C)
    head, ref_head = policy.lm_head.weight, ref_policy.lm_head.weight
    bias, ref_bias = policy.head_bias, ref_policy.head_bias
    cap, ref_cap = policy.config.logit_cap, ref_policy.config.logit_cap
    logprobs, _ = linear_logprobs(hidden, head, labels, bias, temperature, cap)  # (N,)
    ref_logprobs, _ = linear_logprobs(ref_hidden, ref_head, labels, ref_bias, temperature, ref_cap)
    with torch.no_grad():
        kl = linear_kl_divergence(
            hidden, head, ref_hidden, ref_head, bias, ref_bias, temperature, cap, ref_cap
        )  # (N,)
    return unpack(logprobs, actions), unpack(ref_logprobs, actions), unpack(kl, actions)


def response_values(
    model: ScalarModel, query_response: Tensor, real: Tensor, states: Tensor
) -> Tensor:
    """Return values (B, T): the expected return of the state before each token; 0 elsewhere.

    query_response, real (B, Q + T); states (B, T), True where there is a state.
    """
    T = states.size(1)
    Q = query_response.size(1) - T
    values = model(query_response, real, last=T + 1, query_length=Q)  # (B, T + 1)
    return torch.where(states, values[:, :-1], 0.0)


def unpack(values: Tensor, actions: Tensor) -> Tensor:
    """Scatter values (N,) of the tokens that count into (B, T), 0 elsewhere."""
    return torch.zeros_like(actions, dtype=values.dtype).masked_scatter(actions, values)


def read_logprobs(
    policy: GPT, ref_policy: GPT, batch: Batch, temperature: float, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `compared_logprobs` of a whole rollout, `size` responses at once: (B, T) each."""

    def read(mb: Batch) -> tuple[Tensor, Tensor, Tensor]:
        return compared_logprobs(
            policy, ref_policy, mb.query_response, mb.real, mb.actions, temperature, mb.groups
        )

    with distributed.on_device(ref_policy):
        return batch.read(read, size)


def read_values(model: ScalarModel, batch: Batch, size: int) -> Tensor:
    """Compute `response_values` of a whole rollout, `size` responses at once: (B, T)."""
    return batch.read(
        lambda mb: response_values(model, mb.query_response, mb.real, mb.states), size
    )
