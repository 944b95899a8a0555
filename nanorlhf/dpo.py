"""Implicit rewards of direct preference optimization: the policy is its own reward model.

The optimum of PPO with KL coefficient beta is policy = reference * exp(reward / beta) / Z(query)
(Rafailov et al. 2023). Solved for the reward: a policy has the implicit reward
beta * log(policy / reference), up to a constant per query, which cancels in a comparison.
`train_dpo.py` trains by them, the evaluations rank by them.
"""

import torch
from torch import Tensor

from kernels import linear_logprobs
from nanorlhf import distributed
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.logprobs import response_logprobs, unpack
from nanorlhf.model import GPT
from nanorlhf.padding import join_pairs, left_pad, right_pad
from nanorlhf.t5 import T5Config


def summed_logprobs(
    model: GPT, queries: list[list[int]], responses: list[list[int]], pad_id: int
) -> Tensor:
    """log p(response | query) of each row, (B,), in nats: summed over its tokens, EOS included."""
    with distributed.on_device(model):
        query = left_pad(queries, pad_id).to(model.lm_head.weight.device)  # (B, Q)
        response = right_pad(responses, pad_id).to(query.device)  # (B, T)
        ids = torch.cat((query, response), dim=1)  # (B, Q + T)
        logprobs, _ = response_logprobs(model, ids, ids != pad_id, response != pad_id, 1.0)
        return logprobs.sum(1)


def pair_logprobs(model: GPT, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor]:
    """`summed_logprobs` of the chosen and of the rejected responses, (B,) each.

    In one forward pass, in which a GPT reads their query once.
    """
    responses = [row.chosen for row in rows] + [row.rejected for row in rows]
    if isinstance(model.config, T5Config):
        sums = summed_logprobs(model, [row.query for row in rows] * 2, responses, pad_id)  # (2B,)
    else:
        with distributed.on_device(model):
            pairs = join_pairs(rows, pad_id, model.lm_head.weight.device)
            response = right_pad(responses, pad_id).to(pairs.ids.device)  # (2B, T)
            actions = response != pad_id
            last = pairs.ids.size(1) - pairs.first
            # (B, L - first, C)
            hidden = model(pairs.ids, pairs.ids != pad_id, last=last, branch=pairs.branch)
            # (N, C) of the tokens that count: column `before` predicts the token
            hidden = hidden[pairs.row[:, None], pairs.before - pairs.first][actions]
            head = model.lm_head.weight, response[actions], model.head_bias
            logprobs, _ = linear_logprobs(hidden, *head)  # (N,)
            sums = unpack(logprobs, actions).sum(1)  # (2B,)
    chosen, rejected = sums.chunk(2)
    return chosen, rejected


@torch.no_grad()
def implicit_pair_rewards(
    policy: GPT, ref_policy: GPT, rows: list[Comparison], pad_id: int, beta: float
) -> tuple[Tensor, Tensor]:
    """beta * log(policy / reference) of the chosen and of the rejected responses, (B,) each."""
    logprobs = torch.stack(pair_logprobs(policy, rows, pad_id))  # (2, B)
    ref_logprobs = torch.stack(pair_logprobs(ref_policy, rows, pad_id))  # (2, B)
    chosen, rejected = beta * (logprobs - ref_logprobs)
    return chosen, rejected


@torch.no_grad()
def implicit_rewards(
    policy: GPT, ref_policy: GPT, rows: list[Demonstration], pad_id: int, beta: float
) -> Tensor:
    """beta * log(policy / reference) of single responses, (B,)."""
    queries = [row.query for row in rows]
    responses = [row.response for row in rows]
    logprobs = summed_logprobs(policy, queries, responses, pad_id)  # (B,)
    ref_logprobs = summed_logprobs(ref_policy, queries, responses, pad_id)  # (B,)
    return beta * (logprobs - ref_logprobs)
