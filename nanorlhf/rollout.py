"""A rollout: the policy answers a batch of queries, and the other models read what it wrote."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.dataset import Demonstration
from nanorlhf.generate import generate
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches
from nanorlhf.ppo import eos_masks
from nanorlhf.reward import Gold

# score(rows, query (b, Q), response (b, T)) -> response (b, T), which a compiler may have cut, and scores (b,)
ScoreRows = Callable[[list[Demonstration], Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rollout:
    """The whole batch, the same on every rank. B responses, Q query tokens, T response tokens."""

    query: Tensor  # (B, Q) ids, left-padded
    response: Tensor  # (B, T) ids, [PAD] after the first EOS
    query_response: Tensor  # (B, Q + T)
    query_mask: Tensor  # (B, Q) True = real token
    mask: Tensor  # (B, Q + T) True = real token
    eos_index: Tensor  # (B,) T - 1 where there is no EOS
    padding_mask: Tensor  # (B, T) True = no action here: after EOS
    state_mask: Tensor  # (B, T) True = no state here: after EOS, or one later where the score falls due after EOS
    sampled_logprobs: Tensor  # (B, T) of the sampling pass
    logprobs: Tensor  # (B, T) of the policy's forward pass, as the update computes them
    ref_logprobs: Tensor  # (B, T) of the reference policy
    values: Tensor  # (B, T) of the value model; 0 where there is no state
    scores: Tensor  # (B,) of the reward scheme
    gold_scores: list[float]  # B true scores, of the responses as sampled; empty without a gold score


@torch.no_grad()
def rollout(
    policy: GPT,
    ref_policy: GPT,
    value_model: ScalarModel | None,
    score: ScoreRows,
    rows: list[Demonstration],
    uniforms: Tensor,
    eos_id: int,
    pad_id: int,
    temperature: float,
    score_at: str,
    rollout_batch_size: int,
    gold: Gold | None = None,
) -> Rollout:
    """Sample a response to each row's query, by temperature only: any other filter would change the distribution that
    the ratio is taken against. [N+ 21, 22]

    rows      the global batch; each rank samples and reads its share, rollout_batch_size at once
    uniforms  (B, T) a random number per token: a row's own, whichever rank samples it
    """
    B, T = uniforms.shape
    query = left_pad([row.query for row in rows], pad_id).to(policy.lm_head.weight.device)  # (B, Q) [N+ 5]
    mine = distributed.rank_slice(B)
    sampler = distributed.plain(policy)  # gathered once per rollout, not once per token
    parts: list[tuple[Tensor, ...]] = []
    golds: list[float] = []
    batches = (micro_batches(all_rows[mine], rollout_batch_size) for all_rows in (rows, query, uniforms))
    for some_rows, q, u in zip(*batches, strict=True):
        # (b, T) each; [N+ 23] [PAD] after the first EOS
        response, sampled = generate(sampler, q, q != pad_id, T, temperature, eos_id=eos_id, pad_id=pad_id, uniforms=u)
        assert response.shape == (len(q), T)  # the response alone: no query ids in it
        if gold is not None:  # one frozen model after the other is on the device
            golds += gold.of_ids([row.record["query"] for row in some_rows], q, response)
        response, scores = score(some_rows, q, response)
        _, padding_mask, padding_mask_p1 = eos_masks(response, eos_id, pad_id)
        state_mask = padding_mask_p1 if score_at == "after_eos" else padding_mask
        ids, mask = torch.cat((q, response), dim=1), torch.cat((q != pad_id, ~padding_mask), dim=1)  # (b, Q + T)
        # recomputed as the update will: the sampler's cache and its rounding would move the ratio off 1
        logprobs, _ = response_logprobs(policy, ids, mask, padding_mask, temperature)
        with distributed.visiting(ref_policy):
            ref_logprobs, _ = response_logprobs(ref_policy, ids, mask, padding_mask, temperature)
        values = torch.zeros_like(logprobs)
        if value_model is not None:
            values = response_values(value_model, ids, mask, state_mask)
        parts.append((response, sampled, logprobs, ref_logprobs, values, scores))
    response, sampled, logprobs, ref_logprobs, values, scores = (
        distributed.all_gather_rows(torch.cat(part)) for part in zip(*parts, strict=True)
    )
    query_mask = query != pad_id
    eos_index, padding_mask, padding_mask_p1 = eos_masks(response, eos_id, pad_id)
    return Rollout(
        query=query,
        response=response,
        query_response=torch.cat((query, response), dim=1),
        query_mask=query_mask,
        mask=torch.cat((query_mask, ~padding_mask), dim=1),
        eos_index=eos_index,
        padding_mask=padding_mask,
        state_mask=padding_mask_p1 if score_at == "after_eos" else padding_mask,
        sampled_logprobs=sampled,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
        scores=scores,
        gold_scores=distributed.all_gather_objects(golds),
    )


def response_values(model: ScalarModel, query_response: Tensor, mask: Tensor, state_mask: Tensor) -> Tensor:
    """Values (B, T): the expected return of the state before each response token; 0 where there is no state."""
    T = state_mask.size(1)
    return torch.where(state_mask, 0.0, model(query_response, mask, last=T + 1)[:, :-1])
