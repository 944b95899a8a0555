"""Implicit rewards of direct preference optimization: the policy is its own reward model.

The optimum of PPO with KL coefficient beta is policy = reference * exp(reward / beta) / Z(query)
(Rafailov et al. 2023). Solved for the reward: a policy has the implicit reward
beta * log(policy / reference), up to a constant per query, which cancels in a comparison.
`train_dpo.py` trains on them; the evaluations rank by them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.cli import NonNegativeFloat, Range
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.errors import InputError
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.shared_queries import Groups, pairs


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Settings for labels; a loss rejects the settings that it doesn't use."""

    smoothing: Annotated[float, Range("at least 0, below 0.5", lambda x: 0 <= x < 0.5)] = 0.0
    """fraction of labels assumed flipped; makes sigmoid conservative DPO, required by robust"""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: lambda_D, weight of the chosen or desirable responses"""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: lambda_U, weight of the rejected or undesirable responses"""
    target_margin: NonNegativeFloat = 0.0
    """simpo: gamma, the margin at which the loss is log 2, in units of the rewards"""

    def check(self, loss: str) -> None:
        """Raise InputError for a setting that the loss doesn't use, and for a missing one."""
        users = {
            "smoothing": ("sigmoid", "robust"),
            "desirable_weight": ("kto", "kto_unpaired"),
            "undesirable_weight": ("kto", "kto_unpaired"),
            "target_margin": ("simpo",),
        }
        for name, losses in users.items():
            if loss not in losses and getattr(self, name) != getattr(Labels(), name):
                flag = f"--labels.{name.replace('_', '-')}"
                raise InputError(f"{flag} is for --loss {' and '.join(losses)}, not {loss}.")
        if loss == "robust" and self.smoothing == 0:
            raise InputError(
                "--loss robust needs --labels.smoothing, the fraction of flipped labels."
            )


def summed_logprobs(
    model: GPT,
    queries: list[list[int]],
    responses: list[list[int]],
    pad_id: int,
    groups: Groups | None = None,
) -> Tensor:
    """Return log p(response | query) of each row, (B,), in nats: the sum over tokens with EOS.

    groups: adjacent rows with the same query; None: find them.
    """
    with distributed.on_device(model):
        query = left_pad(queries, pad_id).to(model.lm_head.weight.device)  # (B, Q)
        response = right_pad(responses, pad_id).to(query.device)  # (B, T)
        ids = torch.cat((query, response), dim=1)  # (B, Q + T)
        logprobs, _ = response_logprobs(model, ids, ids != pad_id, response != pad_id, 1.0, groups)
        return logprobs.sum(1)


def pair_logprobs(model: GPT, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return `summed_logprobs` of the chosen and the rejected responses, (B,) each.

    The two responses to a query are adjacent rows, so it is read once (shared_queries.py).
    """
    queries = [row.query for row in rows for _ in range(2)]
    responses = [response for row in rows for response in (row.chosen, row.rejected)]
    groups = pairs(len(rows), model.lm_head.weight.device)
    sums = summed_logprobs(model, queries, responses, pad_id, groups)  # (2B,)
    return sums[0::2], sums[1::2]


def kto_loss(
    rewards: Tensor, present: Tensor, reference_point: Tensor, labels: Labels
) -> tuple[Tensor, Tensor]:
    """Compute the loss of KTO (Ethayarajh et al. 2024, equation 8) and the margins, (B,) each.

    A row has a desirable response, an undesirable one or both: implicit rewards (2, B), desirable
    first; present (2, B), True = the row has one. reference_point: z0 in units of rewards.

    The loss is the mean over a row's responses of

        lambda_D - lambda_D * sigmoid(reward - reference_point)     desirable
        lambda_U - lambda_U * sigmoid(reference_point - reward)     undesirable

    A margin is the difference of the two rewards; the reference point replaces a missing one.
    """
    desirable, undesirable = torch.where(present, rewards, reference_point)  # (B,) each
    losses = torch.stack(
        (
            labels.desirable_weight * torch.sigmoid(reference_point - desirable),  # 1 - sigmoid(x)
            labels.undesirable_weight * torch.sigmoid(undesirable - reference_point),
        )
    )
    loss = torch.where(present, losses, 0).sum(0) / present.sum(0)
    return loss, desirable - undesirable


def pair_means(sums: Tensor) -> dict[str, float]:
    """Return loss, accuracy, mean chosen and rejected reward, and their difference, the margin.

    sums (6,), divided by the number of rows: losses, rows ranked as labelled, chosen rewards,
    rejected rewards, chosen responses, rejected responses. If there are no responses of one kind,
    its reward and the margin are left out.
    """
    loss, accuracy, chosen, rejected, num_chosen, num_rejected = sums.tolist()
    means = {"loss": loss, "accuracy": accuracy}
    if num_chosen > 0:
        means["chosen_reward"] = chosen / num_chosen
    if num_rejected > 0:
        means["rejected_reward"] = rejected / num_rejected
    if num_chosen > 0 and num_rejected > 0:
        means["margin"] = means["chosen_reward"] - means["rejected_reward"]
    return means


def mismatched(rows: Sequence[Comparison]) -> list[Comparison]:
    """Pair each query with the responses of the next row; the last query with the first row's.

    KTO estimates its reference point on responses that have nothing to do with the query.
    """
    following = [*rows[1:], rows[0]]
    return [
        Comparison(row.query, other.chosen, other.rejected, {})
        for row, other in zip(rows, following, strict=True)
    ]


def log_odds(logprobs: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p (Hong et al. 2024, equation 4), elementwise.

    A p that float32 can't tell from 1 counts as exp(-1e-6), so that the result is finite.
    """
    logprobs = logprobs.clamp(max=-1e-6)
    return logprobs - torch.log(-torch.expm1(logprobs))


@torch.no_grad()
def implicit_pair_rewards(
    policy: GPT, ref_policy: GPT, rows: list[Comparison], pad_id: int, beta: float
) -> tuple[Tensor, Tensor]:
    """Compute beta * log(policy / reference) of chosen and rejected responses, (B,) each."""
    logprobs = torch.stack(pair_logprobs(policy, rows, pad_id))  # (2, B)
    ref_logprobs = torch.stack(pair_logprobs(ref_policy, rows, pad_id))  # (2, B)
    chosen, rejected = beta * (logprobs - ref_logprobs)
    return chosen, rejected


@torch.no_grad()
def implicit_rewards(
    policy: GPT, ref_policy: GPT, rows: list[Demonstration], pad_id: int, beta: float
) -> Tensor:
    """Compute beta * log(policy / reference) of single responses, (B,)."""
    queries = [row.query for row in rows]
    responses = [row.response for row in rows]
    logprobs = summed_logprobs(policy, queries, responses, pad_id)  # (B,)
    ref_logprobs = summed_logprobs(ref_policy, queries, responses, pad_id)  # (B,)
    return beta * (logprobs - ref_logprobs)


def log_ratio_sum(
    policy: GPT, rows: list[Comparison], ref_policy: GPT, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Sum log(policy / reference), in nats, over all responses; return the sum and their number."""
    log_ratios = torch.stack(implicit_pair_rewards(policy, ref_policy, rows, pad_id, beta=1.0))
    present = [bool(response) for row in rows for response in (row.chosen, row.rejected)]
    return log_ratios.sum(), log_ratios.new_tensor(sum(present))
