"""Rows with the same query read it once.

GRPO, RLOO, online DPO and best-of-n have k responses per query, in adjacent rows. The rows' queries
are one row of a first pass, and all responses attend to its keys and values in a second one:

    rows  . q q q a b E        queries    . q q q  -> keys, values, hidden state of the last token
          . q q q x y #        responses  a b E    -> attend to q q q and themselves
          p p p p c E #                   x y #

With queries of 512 tokens and responses of 53, k = 4 takes 724 tokens per query instead of 2,260,
and k = 8 takes 936 instead of 4,520. Results differ from those of separate rows by rounding only.

Every rank must gather a sharded model's blocks equally often, also a rank whose micro-batch has no
equal queries. Such a model therefore shares queries only if its caller passes the groups, and then
always makes two passes: comparisons do so, and GRPO (`Batch.groups`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanorlhf.masks import attention_bias, attention_mask, position_ids
from nanorlhf.packing import Packing


class Groups(NamedTuple):
    """Adjacent rows with the same query: G groups of B rows."""

    first: Tensor  # (G,) index of each group's first row
    group: Tensor  # (B,) the group of each row


def pairs(num: int, device: torch.device) -> Groups:
    """Return the groups of `num` comparisons, two adjacent rows each."""
    first = torch.arange(0, 2 * num, 2, device=device)
    return Groups(first, torch.arange(num, device=device).repeat_interleave(2))


def find_groups(query: Tensor, mask: Tensor) -> Groups:
    """query, mask (B, Q), True = real -> the groups of adjacent rows with equal queries."""
    query = query.masked_fill(~mask, -1)
    is_first = torch.ones(len(query), dtype=torch.bool, device=query.device)
    is_first[1:] = (query[1:] != query[:-1]).any(1)
    return Groups(is_first.nonzero().squeeze(1), is_first.cumsum(0) - 1)  # waits for a GPU


class QueryKeys:
    """Stores the keys and values of G queries, (G, K, Q, D) in each layer, with their gradient."""

    length = 0  # no decode steps

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.layers[layer] = key, value
        return key, value


class QueryAndResponseKeys(QueryKeys):
    """Puts the keys and values of each response's query before its own."""

    def __init__(self, queries: QueryKeys, join: Callable[[Tensor, Tensor], Tensor]):
        self.queries = queries
        self.join = join  # keys of the queries and of the responses -> of the whole rows

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query_key, query_value = self.queries.layers[layer]
        return self.join(query_key, key), self.join(query_value, value)


def read_queries_once(
    run_blocks: Callable[..., Tensor],  # Transformer's
    windows: Sequence[int | None],  # sliding window of each layer
    ids: Tensor,
    real: Tensor,
    groups: Groups,
    last: int,
    dtype: torch.dtype,  # of queries and keys
    packed: bool,
) -> Tensor:
    """Return the hidden states of the query's last token and of the response, not normalised.

    ids, real (B, L), queries in the first L - last + 1 columns -> (B, last, C)
    """
    Q = ids.size(1) - last + 1
    positions = position_ids(real)  # (B, L)
    query_ids, query_positions = ids[groups.first, :Q], positions[groups.first, :Q]  # (G, Q)
    response_ids, response_positions = ids[:, Q:], positions[:, Q:]  # (B, last - 1)
    keys = QueryKeys()
    if packed:
        queries, responses = Packing(real[groups.first, :Q], 1), Packing(real[:, Q:], last - 1)
        indices = (queries.indices()[groups.group], len(queries.row) + responses.indices())
        order = torch.cat(indices, dim=1)[real]  # (M,) keys of each row, one after the other
        joined = QueryAndResponseKeys(keys, lambda q, r: torch.cat((q, r), dim=2)[:, :, order])
        bounds = queries.bounds(windows)
        query = queries.run(run_blocks, query_ids, query_positions, bounds, keys)
        bounds = responses.bounds(windows, real)
        response = responses.run(run_blocks, response_ids, response_positions, bounds, joined)
    else:
        query_biases, response_biases = {}, {}
        for window in set(windows):
            visible = attention_mask(real, window)  # (B, 1, L, L)
            query_biases[window] = attention_bias(visible[groups.first, :, :Q, :Q], dtype)
            response_biases[window] = attention_bias(visible[:, :, Q:], dtype)
        joined = QueryAndResponseKeys(
            keys, lambda q, r: torch.cat((q[groups.group], r), dim=2)
        )  # (B, K, L, D)
        biases = [query_biases[window] for window in windows]
        biases[-1] = biases[-1][:, :, -1:]
        query = run_blocks(query_ids, query_positions, biases, keys, slice(-1, None))  # (G, 1, C)
        biases = [response_biases[window] for window in windows]
        response = run_blocks(response_ids, response_positions, biases, joined)
    return torch.cat((query[groups.group], response), dim=1)
