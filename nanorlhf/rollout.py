"""A rollout: the policy answers a batch of queries, and the other models read what it wrote."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanorlhf import distributed
from nanorlhf.dataset import Demonstration
from nanorlhf.generate import for_sampling, generate
from nanorlhf.logprobs import compared_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches, needed_columns
from nanorlhf.ppo import eos_masks, importance_weights, masked_mean
from nanorlhf.reward import Gold

# score(rows, query (b, Q), response (b, T)) -> response (b, T), which a compiler may have cut, and scores (b,)
ScoreRows = Callable[[list[Demonstration], Tensor, Tensor], tuple[Tensor, Tensor]]


class Sampler:
    """The model that writes the responses: the policy, exactly, unless a setting says otherwise (docs/mismatch.md).

    dtype       of its weights: same, bfloat16 or int8, rounded once per rollout (`for_sampling`)
    top_p       it samples from the most probable tokens whose total probability reaches this
    sync_every  the policy's weights are copied to it at every so many updates: above 1 it is stale in between
    correction  tis: the update weighs a token by how much less probable it was to the sampler; none
    tis_clip    largest such weight
    """

    def __init__(
        self,
        policy: GPT,
        dtype: str = "same",
        top_p: float = 1.0,
        sync_every: int = 1,
        correction: str = "none",
        tis_clip: float = 2.0,
    ):
        self.policy, self.dtype, self.top_p, self.sync_every = policy, dtype, top_p, sync_every
        self.correction, self.tis_clip = correction, tis_clip
        self.source = policy if sync_every == 1 else copy.deepcopy(policy).requires_grad_(False)
        self.parts: dict[str, nn.Module] = {} if sync_every == 1 else {"sampler": self.source}  # of the run's state

    def sync(self, update: int) -> None:
        if self.source is not self.policy and update % self.sync_every == 0:
            self.source.load_state_dict(self.policy.state_dict())

    def precision(self, device: torch.device) -> AbstractContextManager[None]:
        """Autocast as the weights need it; for `same`, as it is."""
        if self.dtype == "same":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def writer(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """`generate` with the weights of now: a sharded policy is gathered once per rollout, not per token."""
        model = for_sampling(distributed.unshard(self.source), self.dtype)

        def write(query: Tensor, mask: Tensor, T: int, temperature: float, **rest: Any) -> tuple[Tensor, Tensor]:
            with self.precision(query.device):
                return generate(model, query, mask, T, temperature, top_p=self.top_p, filtered_logprobs=True, **rest)

        return write

    def weights(self, batch: "Rollout") -> tuple[Tensor | float, dict[str, float]]:
        """What the update multiplies advantages by, (B, T), 1 without a correction; and how far off the sampler is."""
        gap = masked_mean((batch.sampled_logprobs - batch.logprobs).abs(), batch.padding_mask)
        weights, truncated = importance_weights(
            batch.logprobs, batch.sampled_logprobs, batch.padding_mask, self.tis_clip
        )
        metrics = {
            "policy/sampler_gap": gap.item(),
            "policy/tis_weight": masked_mean(weights, batch.padding_mask).item(),
            "policy/tis_clipped": truncated.item(),
        }
        return weights if self.correction == "tis" else 1.0, metrics


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
    sampled_logprobs: Tensor  # (B, T) of the sampler, after its filter: the distribution that was sampled from
    logprobs: Tensor  # (B, T) of the policy's forward pass, as the update computes them
    ref_logprobs: Tensor  # (B, T) of the reference policy
    exact_kl: Tensor  # (B, T) KL(policy || reference) over the vocabulary, in nats
    values: Tensor  # (B, T) of the value model; 0 where there is no state, or no value model
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
    sampler: Sampler | None = None,
) -> Rollout:
    """Sample a response to each row's query, by temperature only: any other filter would change the distribution that
    the ratio is taken against, as a `sampler` other than the policy does. [N+ 21, 22]

    rows      the global batch; each rank samples and reads its share, rollout_batch_size at once
    uniforms  (B, T) a random number per token: a row's own, whichever rank samples it and beside whichever other rows
    """
    B, T = uniforms.shape
    device = policy.lm_head.weight.device
    order, place = sampling_order(rows)
    write = (sampler or Sampler(policy)).writer()
    parts: list[tuple[Tensor, ...]] = []
    golds: list[float] = []
    for index in micro_batches(order, rollout_batch_size):
        some_rows, u = [rows[i] for i in index], uniforms[index]  # (b, T)
        q = left_pad([row.query for row in some_rows], pad_id).to(device)  # (b, q) as long as these need [N+ 5]
        # (b, T) each; [N+ 23] [PAD] after the first EOS
        response, sampled = write(q, q != pad_id, T, temperature, eos_id=eos_id, pad_id=pad_id, uniforms=u)
        assert response.shape == (len(q), T)  # the response alone: no query ids in it
        if gold is not None:  # one frozen model after the other is on the device
            golds += gold.of_ids([row.record["query"] for row in some_rows], q, response)
        response, scores = score(some_rows, q, response)
        _, padding_mask, padding_mask_p1 = eos_masks(response, eos_id, pad_id)
        state_mask = padding_mask_p1 if score_at == "after_eos" else padding_mask
        t = needed_columns(q != pad_id, state_mask)[1]  # of the longest response, and the state after its EOS
        padding_mask, state_mask = padding_mask[:, :t], state_mask[:, :t]  # (b, t)
        ids, mask = torch.cat((q, response[:, :t]), dim=1), torch.cat((q != pad_id, ~padding_mask), dim=1)  # (b, q + t)
        # recomputed as the update will: the sampler's cache and its rounding would move the ratio off 1
        with distributed.on_device(ref_policy):
            compared = compared_logprobs(policy, ref_policy, ids, mask, padding_mask, temperature)
        values = response_values(value_model, ids, mask, state_mask)
        whole = (F.pad(part, (0, T - t)) for part in (*compared, values))  # (b, T) each
        parts.append((response, sampled, *whole, scores))
    response, sampled, logprobs, ref_logprobs, exact_kl, values, scores = (
        distributed.all_gather_rows(torch.cat(part)[place]) for part in zip(*parts, strict=True)
    )
    query = left_pad([row.query for row in rows], pad_id).to(device)  # (B, Q)
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
        exact_kl=exact_kl,
        values=values,
        scores=scores,
        gold_scores=distributed.all_gather_objects([golds[i] for i in place] if golds else []),
    )


def sampling_order(rows: list[Demonstration]) -> tuple[list[int], list[int]]:
    """This rank's rows of the global batch, shortest query first, and the place of each of its rows in that order.

    Rows of like length share a micro-batch, which is then only as wide as they need.
    """
    mine = range(len(rows))[distributed.rank_slice(len(rows))]
    order = sorted(mine, key=lambda i: len(rows[i].query))
    return order, sorted(range(len(order)), key=order.__getitem__)


def response_values(model: ScalarModel | None, query_response: Tensor, mask: Tensor, state_mask: Tensor) -> Tensor:
    """Values (B, T): the expected return of the state before each response token; 0 without a state or a model."""
    if model is None:
        return torch.zeros(state_mask.shape, device=state_mask.device)
    T = state_mask.size(1)
    return torch.where(state_mask, 0.0, model(query_response, mask, last=T + 1)[:, :-1])
