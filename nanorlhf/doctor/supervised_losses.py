"""Reference losses of SFT, reward models, DPO and its variants, computed one text at a time.

They share only the model's forward pass with the scripts. Losses are means over the examples of a batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nanorlhf.model import GPT, ScalarModel


def token_logprobs(policy: GPT, query: list[int], response: list[int]) -> Tensor:
    """Return the log-probabilities (t,) of a response's tokens."""
    logprobs = policy.logits(policy(torch.tensor([query + response]))[0]).log_softmax(-1)
    position = torch.arange(len(response)) + len(query) - 1
    return logprobs[position, torch.tensor(response)]


def imitation_loss(model: GPT, rows: Sequence[Any], loss_on: str) -> Tensor:
    """Return the mean negative log-likelihood of a batch's labels, which include EOS but no text's first token."""
    logprobs = []
    for row in rows:
        ids, first = row.query + row.response, len(row.query) if loss_on == "response" else 1
        logprobs.append(token_logprobs(model, ids[:first], ids[first:]))
    return -torch.cat(logprobs).mean()


def score_loss(model: ScalarModel, rows: Sequence[Any], loss: str) -> Tensor:
    """Return -log sigmoid of the margin, or the squared error; a score is the output at the last token."""

    def score(row: Any, response: list[int]) -> Tensor:
        return model(torch.tensor([row.query + response]))[0, -1]

    if loss == "regression":
        return torch.stack([(score(row, row.response) - row.score) ** 2 for row in rows]).mean()
    return torch.stack([softplus(score(row, row.rejected) - score(row, row.chosen)) for row in rows]).mean()


def preference_loss(policy: GPT, reference: GPT, rows: Sequence[Any], settings: Any) -> Tensor:
    """Return --loss sigmoid, ipo, robust, hinge, kto, orpo or simpo. docs/algorithms.md lists the papers."""
    loss, beta, e = settings.loss, settings.beta, settings.labels.smoothing

    def log_ratio(row: Any, response: list[int]) -> Tensor:
        with torch.no_grad():
            ref = token_logprobs(reference, row.query, response).sum()
        return token_logprobs(policy, row.query, response).sum() - ref

    losses = []
    if loss == "kto":
        with torch.no_grad():  # pair each query with the responses to the next one
            pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
            unrelated = [log_ratio(row, y) for row, other in pairs for y in (other.chosen, other.rejected)]
        z0 = torch.stack(unrelated).mean().clamp(min=0)
        for row in rows:
            chosen, rejected = (beta * (log_ratio(row, y) - z0) for y in (row.chosen, row.rejected))
            desirable = settings.labels.desirable_weight * (1 - torch.sigmoid(chosen))
            losses.append((desirable + settings.labels.undesirable_weight * (1 - torch.sigmoid(-rejected))) / 2)
        return torch.stack(losses).mean()
    for row in rows:
        if loss in ("orpo", "simpo"):  # no reference; means over a response's tokens
            chosen, rejected = (token_logprobs(policy, row.query, y).mean() for y in (row.chosen, row.rejected))
        if loss == "orpo":
            odds = [y - torch.log(1 - y.exp()) for y in (chosen, rejected)]
            losses.append(-chosen + beta * softplus(odds[1] - odds[0]))
            continue
        if loss == "simpo":
            losses.append(softplus(settings.labels.target_margin - beta * (chosen - rejected)))
            continue
        margin = beta * (log_ratio(row, row.chosen) - log_ratio(row, row.rejected))
        right, flipped = softplus(-margin), softplus(margin)
        losses.append(
            {
                "sigmoid": (1 - e) * right + e * flipped,
                "robust": ((1 - e) * right - e * flipped) / (1 - 2 * e),
                "ipo": (margin / beta - 1 / (2 * beta)) ** 2,
                "hinge": torch.relu(1 - margin),
            }[loss]
        )
    return torch.stack(losses).mean()
