"""Direct preference optimisation: the policy is its own reward model. [N+ 19]

The optimum of PPO with KL coefficient beta is policy = reference * exp(reward / beta) / Z(query) (Rafailov et al.
2023). Solved for the reward: a policy has the implicit reward beta * log(policy / reference), up to a constant per
query, which cancels in a comparison. So a reward model's loss trains the policy directly, without sampling.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear_logprobs
from nanorlhf import distributed
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.logprobs import response_logprobs, unpack
from nanorlhf.model import GPT
from nanorlhf.padding import join_pairs, left_pad, right_pad
from nanorlhf.t5 import T5Config

DPOLoss = Literal["sigmoid", "ipo", "robust", "hinge"]


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    beta: float,
    kind: DPOLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each pair by `margin_loss`, and the implicit rewards; the margin is their difference.

    margin = beta * (log policy(chosen) - log ref(chosen)) - beta * (log policy(rejected) - log ref(rejected))

    Inputs (B,): log-probabilities of the responses, summed over tokens, EOS included. Returns loss, chosen and rejected
    rewards, (B,) each; the reference gets no gradient.
    """
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs.detach())  # (B,)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs.detach())  # (B,)
    loss = margin_loss(chosen_rewards - rejected_rewards, beta, kind, label_smoothing)
    return loss, chosen_rewards, rejected_rewards


def margin_loss(margin: Tensor, beta: float, kind: DPOLoss, label_smoothing: float) -> Tensor:
    """The cost of a pair with this margin of implicit rewards, (B,) -> (B,). L(m) = -log sigmoid(m), e: label_smoothing

    sigmoid   (1 - e) L(m) + e L(-m)                  e = 0: Rafailov et al. 2023, in nats: its slope goes to 0 with a
                                                      large margin; else conservative DPO (Mitchell 2023), whose best
                                                      margin is log((1 - e) / e)
    robust    ((1 - e) L(m) - e L(-m)) / (1 - 2e)     Chowdhury et al. 2024: where a share e of the labels is flipped,
                                                      its mean is that of L on the labels without flips
    ipo       (m / beta - 1 / (2 beta))^2             Azar et al. 2023, equation 17: the log-ratios differ by 1/(2 beta)
                                                      and no more, however sure the label is
    hinge     max(0, 1 - m)                           SLiC (Zhao et al. 2023) on implicit rewards (Liu et al. 2023): no
                                                      slope beyond a margin of 1
    """
    if kind == "ipo":
        return (margin / beta - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return (1 - margin).clamp(min=0)
    if kind == "robust":
        unflipped = (1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
        return -unflipped / (1 - 2 * label_smoothing)
    if label_smoothing == 0:
        return -F.logsigmoid(margin)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def summed_logprobs(model: GPT, queries: list[list[int]], responses: list[list[int]], pad_id: int) -> Tensor:
    """log p(response | query) of each row, (B,), in nats: summed over the response's tokens, EOS included."""
    with distributed.on_device(model):
        query = left_pad(queries, pad_id).to(model.lm_head.weight.device)  # (B, Q)
        response = right_pad(responses, pad_id).to(query.device)  # (B, T)
        query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
        logprobs, _ = response_logprobs(model, query_response, query_response != pad_id, response == pad_id, 1.0)
        return logprobs.sum(1)


def pair_logprobs(model: GPT, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor]:
    """`summed_logprobs` of the chosen and the rejected responses, (B,) each, in one forward pass.

    A GPT reads their query once.
    """
    responses = [row.chosen for row in rows] + [row.rejected for row in rows]
    if isinstance(model.config, T5Config):
        sums = summed_logprobs(model, [row.query for row in rows] * 2, responses, pad_id)  # (2B,)
    else:
        with distributed.on_device(model):
            ids, branch, row, before, _, first = join_pairs(rows, pad_id, model.lm_head.weight.device)
            response = right_pad(responses, pad_id).to(ids.device)  # (2B, T)
            padding_mask = response == pad_id
            hidden = model(ids, ids != pad_id, last=ids.size(1) - first, branch=branch)  # (B, L - first, C)
            hidden = hidden[row[:, None], before - first][~padding_mask]  # (N, C)
            head = model.lm_head.weight, response[~padding_mask], model.head_bias
            sums = unpack(linear_logprobs(hidden, *head)[0], padding_mask).sum(1)  # (2B,)
    chosen, rejected = sums.chunk(2)
    return chosen, rejected


@torch.no_grad()
def implicit_pair_rewards(
    policy: GPT, ref_policy: GPT, rows: list[Comparison], pad_id: int, beta: float
) -> tuple[Tensor, Tensor]:
    """beta * (log policy - log reference) of the chosen and the rejected responses, (B,) each."""
    logprobs, ref_logprobs = (torch.stack(pair_logprobs(model, rows, pad_id)) for model in (policy, ref_policy))
    chosen, rejected = beta * (logprobs - ref_logprobs)  # (2, B)
    return chosen, rejected


@torch.no_grad()
def implicit_rewards(policy: GPT, ref_policy: GPT, rows: list[Demonstration], pad_id: int, beta: float) -> Tensor:
    """beta * (log policy - log reference) of single responses, (B,)."""
    texts = [row.query for row in rows], [row.response for row in rows], pad_id
    return beta * (summed_logprobs(policy, *texts) - summed_logprobs(ref_policy, *texts))
