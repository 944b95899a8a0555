"""T5 in plain PyTorch: an encoder reads the query, a decoder writes the response. CodeT5 is one.

The rest is the GPT's code with other settings: RMS norms, no biases, and attention logits that are
not divided by sqrt(D). `GPT` and `ScalarModel` put their heads on this trunk too. (Raffel et al.
2020)

    query    q q q  -> encoder, each token sees all others   -> memory (B, Q, C)
    decoder  S a b  -> causal, and cross-attention to memory -> hidden states that predict a, b, ...
             S = start_id

Letters in shapes as in model.py; Q tokens of the query, N = T + 1 inputs of the decoder.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import attend_one
from kernels.linear import matmul_dtype
from nanorlhf.cache import KVCache
from nanorlhf.config import GPTConfig
from nanorlhf.layers import AdaptedLinear, Linear, add_norm, norm
from nanorlhf.masks import ALL, attention_bias, attention_mask
from nanorlhf.model import Bias, Block, Cache, Transformer, trunk
from nanorlhf.shared_queries import Groups, find_groups


@dataclass(frozen=True, kw_only=True)
class T5Config(GPTConfig):
    n_ctx: int = 2**28
    """sequences have no maximum length: positions are relative"""
    n_decoder_layer: int | None = None
    """blocks of the decoder; None: as many as the encoder's n_layer"""
    num_buckets: int = 32
    """number of distance ranges, each with its own bias"""
    max_distance: int = 128
    """tokens that are farther apart share the last bucket"""
    start_id: int = 0
    """the decoder's first input"""
    query_start_id: int | None = None
    """added before the query in the encoder (CodeT5's <s>); None: nothing"""
    query_end_id: int | None = None
    """added after it (</s>), as in pre-training; without it, only positions mark the query's end"""
    activation: str = "relu"
    norm: str = "rms"
    norm_eps: float = 1e-6
    positions: str = "relative"
    parallel_residual: bool = False
    scale_attention: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    architecture: str = "t5"

    @property
    def num_decoder_blocks(self) -> int:
        return self.n_layer if self.n_decoder_layer is None else self.n_decoder_layer


# ------------------------------------------------------------------------------- relative positions
def relative_buckets(distance: Tensor, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Return the bucket of each distance, key minus query in tokens, any shape.

    int64 in [0, num_buckets). Half of the buckets have one distance each, the other half have
    ranges that grow geometrically up to max_distance. If attention isn't causal, keys after the
    query use the upper half of all buckets. (Raffel et al. 2020, 2.1)

        8 buckets, max_distance 16, causal    distance  0  -1  -2  -3  -4  -5  -6  -8  -16  -99
                                              bucket    0   1   2   3   4   4   5   6    7    7
    """
    num = num_buckets if causal else num_buckets // 2  # per side
    after = torch.where(distance > 0, 0 if causal else num, 0)
    far = -distance.clamp(max=0) if causal else distance.abs()
    exact = num // 2
    # rounded as in transformers, in float32: at the edge of a range the last bit matters
    ranges = torch.log(far.clamp(min=1).float() / exact)
    ranges = ranges / math.log(max_distance / exact) * (num - exact)
    return after + torch.where(far < exact, far, (exact + ranges.long()).clamp(max=num - 1))


def relative_bias(table: nn.Embedding, length: int, config: T5Config, causal: bool) -> Tensor:
    """Return the bias of each query (rows) and key on the attention logits, (1, H, length, length).

    table (num_buckets, H); the result has the dtype of queries and keys. Each row is a window of
    one vector of biases, for distances from -(length - 1) to length - 1.
    """
    distance = torch.arange(1 - length, length, device=table.weight.device)  # (2 length - 1,)
    buckets = relative_buckets(distance, config.num_buckets, config.max_distance, causal)
    line = table(buckets)  # (2 length - 1, H)
    return line.T.unfold(1, length, 1).flip(1)[None].to(matmul_dtype(table.weight))


@torch.no_grad()
def look_back(table: nn.Embedding, config: T5Config, causal: bool) -> None:
    """Make each head h but the last prefer the token h + 1 back, which weighs e^3 times more.

    table (num_buckets, H) is new. AdamW moves a bias by at most the learning rate per step.
    Initialised near zero, as in transformers, no head of a small model would attend to a single
    token after its few hundred steps (docs/rlcf.md).
    """
    heads = torch.arange(config.n_head - 1)
    buckets = relative_buckets(-1 - heads, config.num_buckets, config.max_distance, causal)
    table.weight[buckets, heads] += 3.0


# ----------------------------------------------------------------------------- the decoder's block
class CrossAttention(nn.Module):
    """The decoder's tokens attend to the query's, without positions."""

    def __init__(self, config: T5Config):
        super().__init__()
        self.config = config
        C, width = config.d_model, config.n_head * config.head_width
        self.q = Linear(C, width, bias=False)
        self.kv = Linear(C, 2 * width, bias=False)
        self.out = Linear(width, C, bias=False)
        if config.adapter_size:
            self.out = AdaptedLinear(self.out, config.adapter_size)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """memory (B, Q, C) -> (B, H, Q, D) each."""
        H, D = self.config.n_head, self.config.head_width
        kv = self.kv(memory).view(*memory.shape[:2], 2, H, D)
        return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """x (B, S, C), keys and values (B, H, Q, D), bias (B, 1 or H, 1, Q) -> (B, S, C)"""
        B, S, _ = x.shape
        H, D = self.config.n_head, self.config.head_width
        q = self.q(x).view(B, S, H, D).transpose(1, 2)  # (B, H, S, D)
        if bias.size(1) > 1 and not q.is_cuda:  # a decode step
            y = attend_one(q, keys, values, bias, 1.0)
        else:
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=1.0)
        return self.out(y.transpose(1, 2).flatten(2))


class DecoderBlock(Block):
    """Self-attention, attention to the query, MLP, each added to the residual stream."""

    def __init__(self, config: T5Config):
        super().__init__(config)
        self.cross_norm = norm(config)
        self.cross = CrossAttention(config)

    def forward(
        self,
        x: Tensor,
        bias: Bias,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        layer: int,
        wanted: slice | Tensor,
        memory: Tensor | None = None,  # (B, Q, C); None: their keys and values are in the cache
        memory_bias: Tensor | None = None,  # (B, 1 or H, 1, Q)
    ) -> Tensor:
        """x (B, S, C) -> (B, S, C)"""
        assert memory_bias is not None
        assert cache is None or isinstance(cache, DecoderCache)
        _, normed = add_norm(x, None, self.norm1)
        attended = self.attention(normed, bias, rotary, cache, layer, wanted)
        x, normed = add_norm(x, attended, self.cross_norm)
        if memory is None:
            assert cache is not None
            keys, values = cache.memory[layer]
        else:
            keys, values = self.cross.keys_and_values(memory)
            if cache is not None:
                cache.memory.append((keys.contiguous(), values.contiguous()))
        attended = self.cross(normed, keys, values, memory_bias)
        x, normed = add_norm(x, attended, self.norm2)
        return x + self.mlp(normed)


class DecoderCache(KVCache):
    """The decoder's keys and values, as in a GPT, and the query's, computed in the first call."""

    def __init__(self, config: T5Config, query_mask: Tensor, num_new: int, dtype: torch.dtype):
        decoder = replace(config, n_layer=config.num_decoder_blocks)
        start_mask = torch.ones_like(query_mask[:, :1])
        super().__init__(decoder, start_mask, num_new, dtype)
        self.memory: list[tuple[Tensor, Tensor]] = []  # by layer, (B, H, Q, D) each
        # set by the first call
        self.relative = torch.empty(0)  # (1, H, N, N)
        self.memory_bias = torch.empty(0)  # (B, H, 1, Q)

    def next_bias(self) -> Tensor:
        """Return the next token's bias (B, H, 1, N) on the logits; -inf at tokens to come."""
        return self.next_biases()[0] + self.relative.index_select(2, self.at)[..., : self.end]

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        self.memory_bias = self.memory_bias[rows]


# --------------------------------------------------------------------------------------- the trunk
class EncoderDecoder(Transformer):
    """Embedding, the encoder's blocks, the decoder's blocks, final norm.

    `blocks` contains the encoder's blocks, then the decoder's.
    """

    config: T5Config

    def __init__(self, config: T5Config):
        super().__init__(config)
        self.blocks.extend(DecoderBlock(config) for _ in range(config.num_decoder_blocks))
        self.encoder_norm = norm(config)
        self.encoder_bias = nn.Embedding(config.num_buckets, config.n_head)
        self.decoder_bias = nn.Embedding(config.num_buckets, config.n_head)
        self.initialise()
        look_back(self.encoder_bias, config, causal=False)
        look_back(self.decoder_bias, config, causal=True)

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialise like a GPT, except for the query projections and the embeddings.

        Query projections are multiplied by 1 / sqrt(D), because attention does not divide by it.
        Embeddings have a standard deviation of 1/2: smaller ones would drown in the first blocks'
        outputs (docs/rlcf.md).
        """
        super().initialise()
        nn.init.normal_(self.embedding.weight, std=0.5)
        H, D = self.config.n_head, self.config.head_width
        for block in self.blocks:
            block.attention.qkv.weight[: H * D] *= D**-0.5
            if isinstance(block, DecoderBlock):
                block.cross.q.weight *= D**-0.5
                block.cross.out.weight /= math.sqrt(2 * self.config.n_layer)

    def cache(self, query_mask: Tensor, num_new: int, dtype: torch.dtype) -> DecoderCache:
        return DecoderCache(self.config, query_mask, num_new, dtype)

    def enclosed(self, query: Tensor, query_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Add the start and end ids to query and query_mask (B, Q), padded on either side.

        . . q q q .      . s q q q e .
        """
        if self.config.query_end_id is not None:
            before, after = F.pad(query_mask, (1, 0)), F.pad(query_mask, (0, 1))  # (B, Q + 1)
            query = F.pad(query, (0, 1)).masked_fill(before & ~after, self.config.query_end_id)
            query_mask = before | after
        if self.config.query_start_id is not None:
            before, after = F.pad(query_mask, (1, 0)), F.pad(query_mask, (0, 1))  # (B, Q + 2)
            query = F.pad(query, (1, 0)).masked_fill(after & ~before, self.config.query_start_id)
            query_mask = before | after
        return query, query_mask

    def encode(self, query: Tensor, query_mask: Tensor) -> Tensor:
        """query, query_mask (B, Q) True = real -> memory (B, Q, C)"""
        Q = query.size(1)
        relative = relative_bias(self.encoder_bias, Q, self.config, causal=False)  # (1, H, Q, Q)
        mask = attention_mask(query_mask, None, causal=False)  # (B, 1, Q, Q)
        bias = attention_bias(mask, relative.dtype) + relative  # (B, H, Q, Q)
        x = self.embedding(query.masked_fill(~query_mask, 0))  # (B, Q, C)
        for layer, block in enumerate([*self.blocks][: self.config.n_layer]):
            x = self.run(block, x, bias, None, None, layer, ALL)
        return self.encoder_norm(x)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
        query_length: Tensor | int | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """Run query and response in one row, like a GPT: ids, mask (B, L) -> hidden (B, L, C).

        The hidden state at a response token is the decoder's after it has read this token. At the
        query's last token, the decoder has read the start id and predicts the first response token.
        Earlier hidden states are meaningless.

            ids       . q q q | a b E      Q = 4, L = 7
            decoder         S   a b E      hidden at columns 3 to 6; last = 4 returns only these

        query_length is where the responses begin: a number for left-padded queries, (B,) for
        right-padded texts; None: all but the first of the `last` tokens are response. With a cache,
        first pass the query with last = 1, then ids (B, 1), the next token of each row.
        """
        if cache is not None and cache.length:
            assert isinstance(cache, DecoderCache)
            return self.decode(ids, cache.next_bias(), None, cache.memory_bias, cache)
        L = ids.size(1)
        if query_length is None:
            assert last is not None, "an encoder-decoder needs query_length or last"
            query_length = L - last + 1
        if isinstance(query_length, Tensor):
            first, width = int(query_length.min()) - 1, int(query_length.max())
            begin = query_length[:, None]
        else:
            first, width = query_length - 1, query_length
            begin = torch.full_like(ids[:, :1], query_length)
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        column = torch.arange(L, device=ids.device)
        is_query = mask & (column < begin)
        query, query_mask = self.enclosed(ids[:, :width], is_query[:, :width])  # (B, Q)
        groups = find_groups(query, query_mask) if groups is None else groups
        if len(groups.first) < len(query):
            memory = self.encode(query[groups.first], query_mask[groups.first])[groups.group]
        else:
            memory = self.encode(query, query_mask)
        # a row of only padding attends to all of it: a softmax over nothing is NaN
        readable = query_mask | ~query_mask.any(1, keepdim=True)
        dtype = matmul_dtype(self.embedding.weight)  # dtype of queries and keys
        memory_bias = attention_bias(readable[:, None, None], dtype)  # (B, 1, 1, Q)

        is_start, is_response = column == begin - 1, mask & (column >= begin)  # (B, L)
        inputs = ids.masked_fill(~is_response, 0).masked_fill(is_start, self.config.start_id)
        inputs = inputs[:, first:]  # (B, N)
        N = inputs.size(1)
        if isinstance(cache, DecoderCache):
            num_all = cache.index.numel()
            cache.relative = relative_bias(self.decoder_bias, num_all, self.config, causal=True)
            cache.memory_bias = memory_bias.expand(-1, self.config.n_head, -1, -1).contiguous()
            relative = cache.relative[:, :, :N, :N]
        else:
            relative = relative_bias(self.decoder_bias, N, self.config, causal=True)
        visible = attention_mask((is_start | is_response)[:, first:], None)  # (B, 1, N, N)
        bias = attention_bias(visible, relative.dtype) + relative  # (B, H, N, N)
        hidden = self.decode(inputs, bias, memory, memory_bias, cache)  # (B, N, C)
        missing = (L if last is None else last) - N
        return F.pad(hidden, (0, 0, missing, 0)) if missing > 0 else hidden[:, -missing:]

    def decode(
        self,
        ids: Tensor,
        bias: Tensor,
        memory: Tensor | None,
        memory_bias: Tensor,
        cache: KVCache | None,
    ) -> Tensor:
        """ids (B, S), bias (B, H, S, N), memory and its bias as in a block -> hidden (B, S, C)"""
        x, S = self.embedding(ids), ids.size(1)
        for layer, block in enumerate([*self.blocks][self.config.n_layer :]):
            x = self.run(block, x, bias, None, cache, layer, ALL, memory, memory_bias)
        if cache is not None:
            cache.advance(S)
        return self.norm(x)


@trunk.register
def encoder_decoder(config: T5Config) -> EncoderDecoder:
    return EncoderDecoder(config)
