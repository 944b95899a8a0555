"""Choose how a model reads a padded batch.

    case                                              rows                   attention
    a GPU from sm_80 on, bfloat16 or float16,         packed: no padding     FlashAttention,
      causal, heads of up to 256 channels                (packing.py)        windows too
    float32, capped logits, both directions,          padded                 a bias (masks.py), or
      an older GPU or PyTorch, a CPU                                         the causal kernel
    adjacent rows with the same query,                the query once, then   either of these
      if that saves a twentieth of the tokens          the responses
                                                       (shared_queries.py)

T5 (t5.py) and decode steps (cache.py) have their own biases.
"""

from typing import Any, Protocol

from torch import Tensor, nn

from kernels.linear import matmul_dtype
from nanorlhf.cache import KVCache
from nanorlhf.config import GPTConfig
from nanorlhf.masks import positions_and_biases
from nanorlhf.packing import can_pack, read_packed
from nanorlhf.shared_queries import Groups, find_groups, read_queries_once

# share queries if they and the responses have at most this share of the tokens of whole rows: a
# CPU gains nothing above (a GPU: not measured)
MOST_TOKENS = 0.95


class Trunk(Protocol):
    """The parts of a `Transformer` that reading needs."""

    config: GPTConfig
    embedding: nn.Embedding
    share_queries: bool

    def run_blocks(self, *arguments: Any, **settings: Any) -> Tensor: ...


def read(
    trunk: Trunk,
    ids: Tensor,
    real: Tensor | None,
    cache: KVCache | None,
    last: int,
    groups: Groups | None,
) -> Tensor:
    """Return the hidden states of the last `last` tokens, before the final norm.

    ids, real (B, L), True = real token; None: all are -> (B, last, C). groups None: find them,
    unless the model is sharded. With groups, a sharded model always runs its blocks twice.
    """
    config, run_blocks = trunk.config, trunk.run_blocks
    dtype = matmul_dtype(trunk.embedding.weight)  # dtype of queries and keys
    if real is not None:
        ids = ids.masked_fill(~real, 0)  # [PAD] may be outside the embedding
        packs = can_pack(config, ids.device, dtype)
        if cache is None and config.causal:
            if groups is None and trunk.share_queries and 1 < last < ids.size(1):
                Q = ids.size(1) - last + 1
                groups = find_groups(ids[:, :Q], real[:, :Q])
            B, L = len(ids), ids.size(1)
            if groups is not None and (pays(groups, B, L, last) or not trunk.share_queries):
                windows = config.windows
                return read_queries_once(run_blocks, windows, ids, real, groups, last, dtype, packs)
        if packs:
            return read_packed(run_blocks, config.windows, ids, real, cache, last)
    positions, biases = positions_and_biases(config, ids, real, last, dtype)
    return run_blocks(ids, positions, biases, cache, slice(-last, None))


def pays(groups: Groups, B: int, L: int, last: int) -> bool:
    """Return whether sharing queries saves enough of the tokens in B rows of L columns."""
    return len(groups.first) * (L - last + 1) + B * (last - 1) <= MOST_TOKENS * B * L
