"""One GPT in plain PyTorch: GPT-2, Pythia, Llama, Qwen, Gemma and others are configs (config.py).

Two models share the trunk: `GPT` has a head over the vocabulary, `ScalarModel` outputs one number
per token (reward model and value model).

There is no dropout: with it, the policy that samples would differ from the policy that is trained,
the ratio in PPO's first epoch would not be 1, and the KL would be noisy. [N+ 7]

Letters in shapes: B batch, L tokens, S tokens of this call (1 in a decode step, else all L), C
model width, H query heads, K key and value heads (H, or fewer, each shared by H / K query heads), D
head width, V vocabulary.
"""

import math
import typing
from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.attention import attend_capped, attend_one, rotated_heads, split_heads, store_rotated
from kernels.compiled_blocks import compiled_block
from kernels.decode import Columns, decode_attention
from kernels.linear import Packed, cast, cast_head, wide_linear
from nanorlhf.cache import KVCache
from nanorlhf.config import GPTConfig, RotaryTables
from nanorlhf.layers import AdaptedLinear, Linear, add_norm, gated_linear, norm
from nanorlhf.masks import ALL
from nanorlhf.packing import Bounds, PackedPrefill, attend_packed
from nanorlhf.reading import read
from nanorlhf.shared_queries import Groups, QueryKeys

Bias = Tensor | Bounds | Columns | None  # what a layer's queries attend to
Cache = KVCache | PackedPrefill | QueryKeys  # `append` takes a layer's new keys and values


# ----------------------------------------------------------------------------------------- a block
class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        H, K, D = config.n_head, config.kv_heads, config.head_width
        self.qkv = Linear(config.d_model, sum(config.qkv_rows), bias=config.qkv_bias)
        joint = config.qk_norm_joint
        self.q_norm = norm(config, H * D if joint else D) if config.qk_norm else None
        self.k_norm = norm(config, K * D if joint else D) if config.qk_norm else None
        self.out = Linear(H * D, config.d_model, bias=config.attention_out_bias)
        if config.adapter_size:
            self.out = AdaptedLinear(self.out, config.adapter_size)

    def forward(
        self,
        x: Tensor,  # (B, S, C)
        bias: Bias,  # (B, 1 or H, n, L) added to the logits; None: causal
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        layer: int,
        wanted: slice | Tensor,  # compute only these n of the S tokens
    ) -> Tensor:
        B, S, _ = x.shape
        H, K, D = self.config.n_head, self.config.kv_heads, self.config.head_width
        qkv = self.qkv(x).view(B, S, H + 2 * K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([H, K, K], dim=2)
            if self.config.qk_norm_joint:
                q, k = q.flatten(2), k.flatten(2)
            q, k = self.q_norm(q).view(B, S, H, D), self.k_norm(k).view(B, S, K, D)
            qkv = torch.cat((q, k, v), dim=2)
        interleaved = self.config.positions == "rotary_interleaved"
        if rotary and isinstance(cache, KVCache) and cache.is_static:  # on a GPU, one kernel
            q, k, v = store_rotated(qkv, *rotary, H, interleaved, *cache.slot(layer))
        else:  # q (B, H, S, D), k and v (B, K, S, D)
            q, k, v = rotated_heads(qkv, *rotary, H, interleaved) if rotary else split_heads(qkv, H)
            if cache is not None:
                k, v = cache.append(layer, k, v)  # (B, K, L, D)
        q = q[:, :, wanted]
        scale = (self.config.attention_divisor or D) ** -0.5 if self.config.scale_attention else 1.0
        if isinstance(bias, Bounds):
            y = attend_packed(q, k, v, bias, scale)
        elif isinstance(bias, Columns):
            y = decode_attention(q, k, v, bias, scale)
        elif self.config.attention_cap is not None:
            assert bias is not None
            y = attend_capped(q, k, v, bias, scale, self.config.attention_cap)
        elif cache is not None and cache.length and not q.is_cuda:
            assert bias is not None
            y = attend_one(q, k, v, bias, scale)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=bool(K < H)
            )
        return self.out(y.transpose(1, 2).reshape(B, -1, H * D))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        C, bias = config.d_model, config.mlp_bias
        self.gate = Linear(C, config.d_mlp, bias) if config.gated_mlp else None
        self.up = Linear(C, config.d_mlp, bias)
        (self.gate or self.up).activation = config.activation
        self.down = Linear(config.d_mlp, C, bias)
        if config.adapter_size:
            self.down = AdaptedLinear(self.down, config.adapter_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) if self.gate is None else gated_linear(self.gate, self.up, x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.parallel = config.parallel_residual
        self.shared_norm = config.shared_norm
        self.norm1 = norm(config) if config.pre_norm else nn.Identity()
        self.attention = Attention(config)
        self.post_norm1 = norm(config) if config.post_norm else nn.Identity()
        self.norm2 = norm(config) if config.pre_norm and not config.shared_norm else nn.Identity()
        self.mlp = MLP(config)
        self.post_norm2 = norm(config) if config.post_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        bias: Bias,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        layer: int,
        wanted: slice | Tensor,
    ) -> Tensor:
        """x (B, S, C) -> (B, n, C): the wanted tokens, which still attend to the earlier ones."""
        _, normed = add_norm(x, None, self.norm1)
        attended = self.post_norm1(self.attention(normed, bias, rotary, cache, layer, wanted))
        x, normed = x[:, wanted], normed[:, wanted]
        if self.parallel:
            normed = normed if self.shared_norm else add_norm(x, None, self.norm2)[1]
            return x + attended + self.post_norm2(self.mlp(normed))
        x, normed = add_norm(x, attended, self.norm2)
        return x + self.post_norm2(self.mlp(normed))


class Blocks(nn.ModuleList):
    """A `ModuleList` of blocks, typed as such."""

    def __iter__(self) -> Iterator[Block]:
        return typing.cast(Iterator[Block], super().__iter__())


# --------------------------------------------------------------------------------------- the trunk
def init_std(config: GPTConfig) -> float:
    return 0.02 * math.sqrt(768 / config.d_model)


class Transformer(nn.Module):
    """Embedding, blocks and final norm: the trunk of the language model and the scalar model."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        C = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, C)
        self.positions = nn.Embedding(config.n_ctx, C) if config.positions == "learned" else None
        self.blocks = Blocks(Block(config) for _ in range(config.n_layer))
        self.norm = norm(config)
        # save only a block's input and recompute the block in the backward pass
        self.checkpoint_activations = False
        # compile the blocks: fewer, larger kernels on a GPU
        self.compile_blocks = False
        self.share_queries = True
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialise like GPT-2: weights N(0, std), biases 0.

        Layers that write to the residual stream get std / sqrt(2 * n_layer). std is GPT-2's 0.02 at
        width 768 and scales with 1 / sqrt(width): at width 128, with a fixed 0.02, a model took up
        to ten times as long to learn to copy a word from its query.
        """
        std = init_std(self.config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=std / math.sqrt(2 * self.config.n_layer))

    def cache(self, query_mask: Tensor, num_new: int, dtype: torch.dtype) -> KVCache:
        """Allocate a cache for queries (B, Q) and num_new tokens after each of them."""
        return KVCache(self.config, query_mask, num_new, dtype)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
        query_length: Tensor | int | None = None,
        groups: Groups | None = None,
    ) -> Tensor:
        """ids (B, L) -> hidden (B, L, C) after the final norm.

        mask          (B, L), True = real token; None: all are real
        cache         first pass the query, then ids (B, 1), the next token of each row, and no mask
        last          return the hidden states of the last `last` tokens only, (B, last, C); the
                      last block computes no others
        query_length  where the responses begin, for an encoder-decoder (t5.py); ignored here
        groups        rows whose query, all but the last - 1 columns, is read once; None: find them
        """
        S = ids.size(1)
        last = S if last is None else last
        if cache is not None and cache.length:
            positions, rotary, decode_biases = cache.next_token()
            x = self.run_blocks(ids, positions, decode_biases, cache, rotary=rotary)
        else:
            x = read(self, ids, mask, cache, last, groups)
        if cache is not None:
            cache.advance(S)
        return self.norm(x)

    def run_blocks(
        self,
        ids: Tensor,
        positions: Tensor,
        biases: Sequence[Bias],
        cache: Cache | None,
        wanted: slice | Tensor = ALL,
        rotary: RotaryTables | None = None,
    ) -> Tensor:
        """ids, positions (B, S), a bias per layer -> (B, n, C) at `wanted`, not normalised."""
        rotary = self.config.rotary_tables(positions) if rotary is None else rotary
        x = self.embedding(ids)  # (B, S, C)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.positions is not None:
            x = x + self.positions(positions)
        tables = [rotary.get(settings) for settings in self.config.rotary_settings]
        for layer, (block, bias) in enumerate(zip(self.blocks, biases, strict=True)):
            tokens = wanted if layer + 1 == self.config.n_layer else ALL
            x = self.run(block, x, bias, tables[layer], cache, layer, tokens)
        return x

    def run(self, block: Block, x: Tensor, *arguments: Any) -> Tensor:
        """Run a block; with checkpoint_activations, the backward pass recomputes it.

        Blocks that read or write a cache aren't compiled: it changes in Python.
        """
        run = compiled_block(block) if self.compile_blocks and arguments[2] is None else block
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(run, x, *arguments, use_reentrant=False)
        return run(x, *arguments)


@singledispatch
def trunk(config: GPTConfig) -> Transformer:
    """Build the model below the head, with random weights; T5's has two stacks (t5.py)."""
    return Transformer(config)


# ---------------------------------------------------------------------------------- the two models
class GPT(nn.Module):
    """The language model. Returns hidden states: logits are computed only where they are needed."""

    # where the weights are (distributed.py), if they aren't all here
    elsewhere: Any = None

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = trunk(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        nn.init.normal_(self.lm_head.weight, std=init_std(config))
        if config.head_bias:
            nn.init.zeros_(self.lm_head.bias)
        if config.tied_head:
            self.lm_head.weight = self.transformer.embedding.weight
        # (V,) bool; None: every id may be sampled
        self.register_buffer("forbidden", None, persistent=False)

    def forbid(self, pad_id: int, num_ids: int) -> "GPT":
        """Give probability 0 to [PAD] and to the LM head's padding rows, ids >= num_ids.

        Pythia's head has 50,304 rows and [PAD] is row 50,277: sampling it would cut the response.
        Returns the model.
        """
        weight = self.lm_head.weight  # on the meta device until it is read from the file
        device = "cpu" if weight.is_meta else weight.device
        ids = torch.arange(self.config.vocab_size, device=device)
        forbidden = (ids >= num_ids) | (ids == pad_id)
        self.forbidden = forbidden if forbidden.any() else None
        return self

    @property
    def head_bias(self) -> Tensor | None:
        """Bias (V,) on hidden @ lm_head.weight.T, -inf at forbidden ids; None: no bias."""
        bias = self.lm_head.bias
        if self.forbidden is None:
            return bias
        if bias is None:
            bias = torch.zeros_like(self.forbidden, dtype=torch.float)
        return bias.masked_fill(self.forbidden, -torch.inf)

    def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """ids, mask (B, L) -> hidden (B, L, C), the LM head's input; see `Transformer.forward`."""
        hidden = self.transformer(ids, mask, **kwargs)
        return hidden if self.config.head_scale == 1 else hidden * self.config.head_scale

    def logits(self, hidden: Tensor, head: Tensor | Packed | None = None) -> Tensor:
        """hidden (..., C) -> logits (..., V), -inf at forbidden ids.

        head: `cast_head(lm_head.weight)`, computed once for many calls. Autocast casts the inputs
        of the matmul, as in `linear_logprobs`, but not the logits: with SmolLM2-135M on a post,
        casting them moved up to 2% of the probability to other tokens, and up to half of it at
        temperature 0.01.
        """
        head = cast_head(self.lm_head.weight) if head is None else head
        (hidden,) = cast(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return wide_linear(hidden, head, self.head_bias, self.config.logit_cap)


class ScalarModel(nn.Module):
    """The trunk with one output per token: reward model, or value model copied from it. [N+ 22]"""

    elsewhere: Any = None

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = trunk(config)
        self.score = nn.Linear(config.d_model, 1)
        # [N+ 11] N(0, 1 / sqrt(d_model + 1)): initial rewards are of order one, as hidden states
        # are normalised
        nn.init.normal_(self.score.weight, std=1 / math.sqrt(config.d_model + 1))
        nn.init.zeros_(self.score.bias)
        # [N+ 15] subtracted from every score, so that the demonstrations' mean score is 0; saved
        # with the weights
        self.register_buffer("reward_bias", torch.zeros(()))
        # an id to skip at the end of a text: a reward model that transformers trained with
        # [PAD] = EOS has its score before EOS
        self.skipped_id: int | None = None

    def forward(self, ids: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """ids, mask (B, L) -> scores (B, L), or (B, last), in float32, one per token.

        The caller picks the scores that count. Takes the arguments of `Transformer.forward`.
        """
        hidden = self.transformer(ids, mask, **kwargs)
        # in bf16, scores within 0.4% of each other would tie
        with torch.autocast(hidden.device.type, enabled=False):
            scores = self.score(hidden.float()).squeeze(-1) - self.reward_bias  # (B, last)
        if not self.config.mean_pooled:
            return scores
        begin = torch.as_tensor(kwargs.get("query_length", 0), device=ids.device).view(-1, 1)
        in_response = torch.arange(ids.size(1), device=ids.device) >= begin  # (B or 1, L)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        S = scores.size(1)
        return mean_so_far(scores, in_response[:, -S:] & real[:, -S:])


def mean_so_far(scores: Tensor, in_response: Tensor) -> Tensor:
    """Replace each token's score with the mean over its response up to this token.

    scores (B, S), in_response (B, S) bool -> (B, S); scores outside the response are kept.

        scores 5 1 3 2    in_response . # # #    ->    5 1 2 2
    """
    total = torch.where(in_response, scores, 0.0).cumsum(1)
    return torch.where(in_response, total / in_response.cumsum(1).clamp(min=1), scores)
