"""Direct preference optimisation: the policy is its own reward model. [N+ 19]

Where PPO with a KL penalty beta would end, policy = reference * exp(reward / beta) / Z(query) (Rafailov et al. 2023).
Read backwards, a policy has an implicit reward beta * log(policy / reference), up to a number a query that drops out of
a comparison. So the loss of a reward model trains it, and nothing is sampled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, right_pad


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each pair -log sigmoid(margin) in nats, and the implicit rewards whose difference the margin is.

    margin = beta * (log policy(chosen) - log ref(chosen)) - beta * (log policy(rejected) - log ref(rejected))

    Each (B,): a response's logprobs summed over its tokens, EOS included. Returns loss, chosen and rejected rewards,
    (B,) each. The gradient by chosen_logprobs is -beta * sigmoid(-margin): a pair that is ranked rightly by far has
    none, and the reference has none ever.
    """
    chosen_rewards = beta * (chosen_logprobs - ref_chosen_logprobs.detach())  # (B,)
    rejected_rewards = beta * (rejected_logprobs - ref_rejected_logprobs.detach())  # (B,)
    return -F.logsigmoid(chosen_rewards - rejected_rewards), chosen_rewards, rejected_rewards


def summed_logprobs(model: GPT, queries: list[list[int]], responses: list[list[int]], pad_id: int) -> Tensor:
    """log p(response | query) of each row, (B,), in nats: the sum over its tokens, EOS included; the query has none."""
    query = left_pad(queries, pad_id).to(model.lm_head.weight.device)  # (B, Q)
    response = right_pad(responses, pad_id).to(query.device)  # (B, T)
    query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
    logprobs, _ = response_logprobs(model, query_response, query_response != pad_id, response == pad_id, 1.0)
    return logprobs.sum(1)


def pair_logprobs(model: GPT, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor]:
    """The same of chosen and rejected, (B,) each, in one forward pass."""
    responses = [row.chosen for row in rows] + [row.rejected for row in rows]
    return summed_logprobs(model, [row.query for row in rows] * 2, responses, pad_id).chunk(2)


@torch.no_grad()
def implicit_pair_rewards(
    policy: GPT, ref_policy: GPT, rows: list[Comparison], pad_id: int, beta: float
) -> tuple[Tensor, Tensor]:
    """beta * (log policy - log reference) of chosen and rejected, (B,) each."""
    logprobs, ref_logprobs = (torch.stack(pair_logprobs(model, rows, pad_id)) for model in (policy, ref_policy))
    return tuple(beta * (logprobs - ref_logprobs))


@torch.no_grad()
def implicit_rewards(policy: GPT, ref_policy: GPT, rows: list[Demonstration], pad_id: int, beta: float) -> Tensor:
    """The same of single responses, (B,)."""
    texts = [row.query for row in rows], [row.response for row in rows], pad_id
    return beta * (summed_logprobs(policy, *texts) - summed_logprobs(ref_policy, *texts))
