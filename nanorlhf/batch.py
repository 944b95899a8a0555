"""A rollout: the queries, the policy's responses, and each model's outputs per token."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import kept_casts
from nanorlhf import distributed
from nanorlhf.dataset import Demonstration
from nanorlhf.padding import left_pad, micro_batches
from nanorlhf.ppo import eos_masks
from nanorlhf.shared_queries import Groups, find_groups

ScoreAt = Literal["after_eos", "last_token"]


@dataclass(kw_only=True)
class Batch:
    """B queries of Q tokens and their responses of T tokens. In all masks True = counts.

        query    #  #  q  q | response   a  b  E  #  #      # = [PAD], E = EOS, eos_index 2
        real     .  .  x  x |            x  x  x  .  .
                              actions    x  x  x  .  .      a token was chosen here
                              states     x  x  x  x  .      with the finished response: after_eos

    The script sets the fields after `token_rewards`, in the order of the algorithm.
    """

    index: Tensor  # (B,) row number in the rollout
    records: list[dict]  # B rows of the data file
    query: Tensor  # (B, Q) ids, left-padded
    response: Tensor  # (B, T) ids, [PAD] after the end
    real: Tensor  # (B, Q + T) True at tokens of query and response, False at padding
    actions: Tensor  # (B, T)
    states: Tensor  # (B, T) the actions, and with score_at after_eos one more position
    in_loss: Tensor  # (B, T) True; a script drops a token or a response by setting it to False
    eos_index: Tensor  # (B,) position of the last token
    score_index: Tensor  # (B,) position of the reward that the score is added to
    has_eos: Tensor  # (B,) bool
    sampled_logprobs: Tensor  # (B, T) under the distribution sampled from, after its filters
    token_rewards: Tensor  # (B, T) rewards of single tokens, without the score; 0 until computed
    logprobs: Tensor = field(init=False)  # (B, T) of the policy, as the update computes them
    ref_logprobs: Tensor = field(init=False)  # (B, T) of the reference policy
    values: Tensor = field(init=False)  # (B, T) of the value model
    advantages: Tensor = field(init=False)  # (B, T), or (B,) if there is one per response
    returns: Tensor = field(init=False)  # (B, T)
    # whether a query has several responses, so that every rank reads it first, then its responses
    shares_queries: bool = field(init=False, default=False)
    # whether the ratio divides by the sampler's probabilities, not by the policy's
    ratio_to_sampler: bool = field(init=False, default=False)
    # per epoch and micro-batch: index (b,), new_logprobs and new_values (b, t); None: no trace
    trace: list[list[tuple[Tensor, Tensor, Tensor | None]]] | None = field(init=False, default=None)

    @classmethod
    def of(
        cls,
        records: list[dict],
        query: Tensor,
        response: Tensor,
        sampled_logprobs: Tensor,
        eos_id: int,
        pad_id: int,
        score_at: ScoreAt,
    ) -> "Batch":
        """Find the end of each response (B, T) and build the masks.

        score_at   the position of the reward that the score is added to
        after_eos    a  b  E  x     at x, the state after EOS (N+); at E if E is the last position
        last_token   a  b  E  x     at E, the last token; the response then has no state after it
        """
        eos_index, actions, states = eos_masks(response, eos_id, pad_id)
        after = (eos_index + 1).clamp(max=response.size(1) - 1)
        return cls(
            index=torch.arange(len(query), device=query.device),
            records=records,
            query=query,
            response=response,
            real=torch.cat((query != pad_id, actions), dim=1),
            actions=actions,
            states=states if score_at == "after_eos" else actions,
            in_loss=torch.ones_like(actions),
            eos_index=eos_index,
            score_index=after if score_at == "after_eos" else eos_index,
            has_eos=(response == eos_id).any(1),
            sampled_logprobs=sampled_logprobs,
            token_rewards=torch.zeros_like(response, dtype=torch.float),
        )

    def __len__(self) -> int:
        return len(self.query)

    @property
    def query_response(self) -> Tensor:
        """Ids of query and response (B, Q + T)."""
        return torch.cat((self.query, self.response), dim=1)

    @property
    def groups(self) -> Groups | None:
        """Adjacent rows with the same query; None: a model finds them."""
        if not self.shares_queries:
            return None
        return find_groups(self.query, self.real[:, : self.query.size(1)])

    @property
    def ratio_to(self) -> Tensor:
        """The ratio's old log-probabilities (B, T); the KL always uses the policy's."""
        return self.sampled_logprobs if self.ratio_to_sampler else self.logprobs

    @property
    def loss_actions(self) -> Tensor:
        """Mask (B, T) of the actions that count in the policy loss."""
        return self.actions & self.in_loss

    @property
    def loss_states(self) -> Tensor:
        """Mask (B, T) of the states that count in the value loss."""
        return self.states & self.in_loss

    def __getitem__(self, index: Tensor | slice) -> "Batch":
        """Select rows (b,) and drop the columns that are padding in all of them.

        query  # # q q | response  a E s #      keeps q q, a E, and s, the state after EOS
               # # # q |           E s # #
        """
        numbers = torch.arange(len(self))[index]  # (b,)
        rows = numbers.to(self.query.device)
        Q = self.query.size(1)
        first = int(self.real[rows, :Q].any(0).long().argmax())
        t = int(self.states[rows].any(0).sum())

        def cut(name: str, value: Any) -> Any:
            if name in ("trace", "shares_queries", "ratio_to_sampler"):  # not per row
                return value
            if name == "records":
                return [value[i] for i in numbers.tolist()]
            if name == "query":
                return value[rows, first:]
            if name == "real":
                return value[rows, first : Q + t]
            return value[rows, :t] if value.ndim == 2 else value[rows]

        selected = copy.copy(self)
        for name, value in vars(self).items():
            setattr(selected, name, cut(name, value))
        return selected

    def replace(self, rows: Tensor, other: "Batch") -> None:
        """Replace the responses in `rows` (b,) of this batch with the first b of `other`.

        The queries must match row by row, and both batches must have the same T.
        """
        T = self.response.size(1)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and name not in ("index", "query", "real"):
                value[rows] = getattr(other, name)[: len(rows)]
        self.real[rows, -T:] = self.actions[rows]

    def shuffled(self, generator: torch.Generator) -> "Batch":
        """Shuffle the rows, in the same order on every rank, at the beginning of an epoch."""
        if self.trace is not None:
            self.trace.append([])
        return self[torch.randperm(len(self), generator=generator)]

    def split(self, num: int) -> "Iterator[Batch]":
        """Yield `num` minibatches of equal size, except those in which no action counts."""
        size = len(self) // num
        for start in range(0, size * num, size):
            if self.loss_actions[start : start + size].any():
                yield self[start : start + size]

    def shard(self) -> "Batch":
        """Return this rank's rows."""
        return self[distributed.rank_slice(len(self))]

    def micro_batches(self, size: int) -> "Iterator[Batch]":
        """Yield all rows, at most `size` at a time, in `reading_order`; weights are cast once."""
        with kept_casts():
            for index in self.reading_order().split(size):
                yield self[index]

    def reading_order(self) -> Tensor:
        """Return indices (B,) that sort rows by length, which saves padding.

        Equal queries are next to each other, so that they are read once (shared_queries.py).
        """
        lengths = self.real.sum(1).cpu()  # (B,)
        queries, group = self.query.cpu().unique(dim=0, return_inverse=True)  # (G, Q), (B,)
        if len(queries) == len(self):
            return lengths.argsort()
        longest = torch.zeros_like(lengths).scatter_reduce(0, group, lengths, reduce="amax")[group]
        keys = list(zip(longest.tolist(), group.tolist(), lengths.tolist(), strict=True))
        return torch.tensor(sorted(range(len(self)), key=keys.__getitem__))

    @torch.no_grad()
    def read(self, function: Callable[["Batch"], Any], size: int) -> Any:
        """Apply `function` to the whole batch and return its results in the batch's order.

        function  micro-batch of at most `size` rows -> (b,), (b, t) or a tuple of several

        Each rank computes its share. Returns (B,) or (B, T), 0 in the columns that a micro-batch
        dropped, or a tuple of them, the same on every rank.
        """
        shard = self.shard()
        T = self.response.size(1)
        order = shard.reading_order()
        with kept_casts():
            results = [function(shard[index]) for index in order.split(size)]
        columns = zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True)
        gathered = []
        for pieces in columns:
            rows = torch.cat([F.pad(x, (0, T - x.size(1))) if x.ndim == 2 else x for x in pieces])
            in_order = torch.empty_like(rows)
            in_order[order.to(rows.device)] = rows
            gathered.append(distributed.all_gather_rows(in_order))
        return tuple(gathered) if isinstance(results[0], tuple) else gathered[0]


# write(query (b, q), real (b, q), T, temperature, eos_id=, pad_id=, uniforms=)
# -> response (b, T), logprobs (b, T): `nanorlhf.generate.generate` with a model
Write = Callable[..., tuple[Tensor, Tensor]]


def sample(
    write: Write,
    rows: Sequence[Demonstration],
    uniforms: Tensor,
    device: torch.device,
    temperature: float,
    size: int,
    eos_id: int,
    pad_id: int,
    score_at: ScoreAt,
) -> Batch:
    """Sample a response to each row's query with temperature only: any other filter would change
    the distribution in the ratio's denominator. [N+ 21]

    rows      the global batch; each rank samples its share, at most `size` rows at once
    uniforms  (B, T) each row's own random numbers: other ranks and rows don't change its response
    """
    T = uniforms.size(1)
    indices = range(len(rows))[distributed.rank_slice(len(rows))]
    order = sorted(indices, key=lambda i: len(rows[i].query))  # queries of similar length together
    written = []
    for index in micro_batches(order, size):
        query = left_pad([rows[i].query for i in index], pad_id).to(device)  # (b, q) [N+ 5]
        ids = {"eos_id": eos_id, "pad_id": pad_id}
        written.append(
            write(query, query != pad_id, T, temperature, uniforms=uniforms[index], **ids)
        )
    back = torch.tensor(order).argsort()
    response, sampled_logprobs = (
        distributed.all_gather_rows(torch.cat(pieces)[back.to(device)])
        for pieces in zip(*written, strict=True)
    )  # (B, T) without the query's ids
    query = left_pad([row.query for row in rows], pad_id).to(device)  # (B, Q)
    records = [row.record for row in rows]
    return Batch.of(records, query, response, sampled_logprobs, eos_id, pad_id, score_at)
