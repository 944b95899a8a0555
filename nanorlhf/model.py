"""One GPT, by hand: GPT-2, Pythia, Llama, Qwen, Gemma and others are settings of `GPTConfig`.

Two models are built on the trunk: `GPT` with a head over the vocabulary, `ScalarModel` with one
number per token (reward and value model).

There is no dropout: the policy that samples and the policy that is trained would differ, the ratio
in PPO's first epoch would not be 1, and the KL would be noise. [N+ 7]

Letters in shapes: B batch, L tokens, S tokens of this call (1 in a decode step, else all L), C
width, H heads of the queries, K heads of the keys and values (H, or fewer, each shared by a group
of H / K queries), D width of a head, V vocabulary.
"""

import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.attention import (
    RotaryScaling,
    attend_capped,
    attend_one,
    rotary_tables,
    rotated_heads,
    split_heads,
)
from kernels.cuda_graph import replays
from kernels.linear import Packed, cast, cast_head, linear, matmul_dtype, wide_linear

RotarySettings = tuple[float, RotaryScaling | None]  # base and scaling
# cos and sin, (B, S, 1, rotary_dim / 2) each
RotaryTables = dict[RotarySettings, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab_size: int
    """rows of the embedding; the id of [PAD] may lie outside"""
    n_ctx: int
    """longest sequence in tokens, query plus response"""
    d_model: int
    n_layer: int
    n_head: int
    n_kv_head: int | None = None
    """heads of keys and values, which groups of query heads share (GQA); None: n_head"""
    d_head: int | None = None
    """width of a head; None: d_model / n_head"""
    d_mlp: int
    activation: str = "gelu"
    """gelu (exact), gelu_new (its tanh approximation), relu or silu"""
    gated_mlp: bool = False
    """down(activation(gate(x)) * up(x)): SwiGLU with silu"""
    mlp_bias: bool = True
    norm: str = "layer"
    """layer, rms: divided by the root mean square alone, without bias, or rms_offset: rms with
    1 + weight in place of weight (Gemma)"""
    pre_norm: bool = True
    """norm the input of attention and of the MLP"""
    post_norm: bool = False
    """norm their output before it is added to the residual stream (Gemma; OLMo 2: this alone)"""
    qk_norm: bool = False
    """an RMS norm over the D channels of each head of q and of k (Qwen 3)"""
    qk_norm_joint: bool = False
    """qk_norm over all heads of q and all heads of k at once (OLMo 2)"""
    embedding_scale: float = 1.0
    """multiplies the embeddings (Gemma: sqrt(d_model))"""
    positions: str = "rotary_half"
    """learned (GPT-2, GPT-Neo), rotary_half (NeoX: pairs i, i + r/2), rotary_interleaved (CodeGen:
    pairs 2i, 2i + 1), relative (T5, t5.py)"""
    rotary_dim: int = 0
    """number of a head's D channels that are rotated; the rest carry no position"""
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    local_rotary_base: float | None = None
    """base in the layers with a window, which then have no scaling (Gemma 3); None: rotary_base"""
    parallel_residual: bool = True
    """x + attention(norm1(x)) + mlp(norm2(x)) instead of attention first, then MLP"""
    shared_norm: bool = False
    """attention and MLP share one layer norm (CodeGen)"""
    attention_windows: tuple[int | None, ...] | None = None
    """per layer: a token attends to itself and the window - 1 tokens before it; None: to all
    (GPT-Neo alternates)"""
    scale_attention: bool = True
    """divide attention logits by sqrt(D); GPT-Neo does not"""
    attention_divisor: int | None = None
    """the square root of this divides attention logits; None: of D (Gemma)"""
    attention_cap: float | None = None
    """bounds attention logits: cap * tanh(logit / cap) (Gemma 2)"""
    qkv_bias: bool = True
    attention_out_bias: bool = True
    head_bias: bool = False
    """a bias on the LM head (CodeGen)"""
    tied_head: bool = False
    """the LM head is the embedding matrix"""
    head_scale: float = 1.0
    """multiplies the hidden states before the LM head (T5 with a tied one: 1 / sqrt(d_model))"""
    logit_cap: float | None = None
    """bounds the LM head's logits: cap * tanh(logit / cap) (Gemma 2)"""
    adapter_size: int = 0
    """bottleneck width of the adapter after each attention and each MLP; 0: no adapters"""
    mean_pooled: bool = False
    """a scalar model's score at a token is the mean over its response so far, not that token's"""
    norm_eps: float = 1e-5
    causal: bool = True
    """False: tokens attend in both directions, an encoder (RLCF's discriminator)"""
    architecture: str = "gpt_neox"
    """names on disk, a key of pretrained.families.FAMILIES"""

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.n_head

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of q, of k and of v in attention's joint projection."""
        return [heads * self.head_width for heads in (self.n_head, self.kv_heads, self.kv_heads)]

    @property
    def windows(self) -> list[int | None]:
        """By layer."""
        return [*(self.attention_windows or [None] * self.n_layer)]

    @property
    def rotary_settings(self) -> list[RotarySettings]:
        """Base and scaling, by layer."""
        usual = local = self.rotary_base, self.rotary_scaling
        if self.local_rotary_base is not None:
            local = self.local_rotary_base, None
        return [usual if window is None else local for window in self.windows]

    def rotary_tables(self, positions: Tensor) -> RotaryTables:
        """Tables of the angles at positions (B, S), by base and scaling; {} if none rotate."""
        if not self.positions.startswith("rotary"):
            return {}
        settings = set(self.rotary_settings)
        return {each: rotary_tables(positions, self.rotary_dim, *each) for each in settings}

    def trunk(self) -> "Transformer":
        """All below the head, with new random weights; T5's is an encoder and a decoder (t5.py)."""
        return Transformer(self)


# --------------------------------------------------------------------------------------- positions
def position_ids(mask: Tensor) -> Tensor:
    """(B, L) bool, True = real token -> (B, L): the number of real tokens before each one.

    0 at padding. So a left-padded row has the positions it would have without padding. Learned
    positions need this; rotary ones are invariant to a shift.

        mask      . . # # # .      (# = real)
        position  0 0 0 1 2 0
    """
    return (mask.long().cumsum(1) - 1).masked_fill(~mask, 0)


# ------------------------------------------------------------------------------------------- masks
def attention_mask(mask: Tensor, window: int | None, causal: bool = True) -> Tensor:
    """Which keys each token may attend to: real, not after itself (if causal), within the window.

    mask (B, L) -> (B, 1, L, L) bool. Every token attends to itself: otherwise a padding token would
    attend to nothing, and a softmax over nothing is NaN. No real token attends to padding. A window
    is the token itself and the window - 1 before it; what comes after is up to `causal` alone.
    """
    key = torch.arange(mask.size(1), device=mask.device)  # (L,)
    query = key[:, None]  # (L, 1)
    visible = key <= query if causal else torch.ones_like(key == query)  # (L, L)
    if window is not None:
        visible &= key > query - window
    return (visible & mask[:, None, None, :]) | (key == query)


def branch_mask(mask: Tensor, branch: Tensor) -> Tensor:
    """`attention_mask` for rows of several responses: a token sees the query and its own response.

    mask (B, L), branch (B, L): 0 in the query, 1, 2, ... in its responses -> (B, 1, L, L) bool. A
    token's position is the number of tokens that it sees before itself, so each response is as it
    would be in a row of its own.

        ids       q q q a b x y z
        branch    0 0 0 1 1 2 2 2
        position  0 1 2 3 4 3 4 5
    """
    own = branch[:, :, None] == branch[:, None, :]  # (B, L, L)
    return attention_mask(mask, None) & (own | (branch == 0)[:, None, :])[:, None]


def attention_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the attention logits, 0 or -inf: made once, not once per layer."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, -torch.inf)


def causal_suffices(mask: Tensor) -> bool:
    """Whether no real token of mask (B, L) comes after padding, on a device with a causal kernel.

    Causal attention then keeps padding out by itself. Asking waits for the GPU.
    """
    return has_causal_kernel(mask.device) and not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def has_causal_kernel(device: torch.device) -> bool:
    """A GPU: its flash attention takes no bias. A CPU's kernel does, and then a row's sums don't
    depend on the other rows' padding.
    """
    return device.type == "cuda"


def positions_and_biases(
    config: GPTConfig,
    ids: Tensor,
    mask: Tensor | None,
    branch: Tensor | None,
    last: int,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Positions (B, L), and for each layer what is added to its attention logits, (B, 1, L, L).

    None stands for PyTorch's causal kernel, which needs no bias.

        case                               bias            why
        no mask                            None            all tokens are real
        padding only after the text, GPU   None            causal attention never reaches it
          its last layer, if last < L      attention_mask  the causal kernel takes L queries
        several responses per row          branch_mask     no response may see another
        padding before the text, windows,
          capped logits, a CPU,
          both directions                  attention_mask  it says what each token may see

    A decode step has its own: `KVCache.next_token`.
    """
    L = ids.size(1)
    is_plain = not any(config.windows) and config.attention_cap is None
    only_causal = config.causal and is_plain and branch is None
    if mask is None and only_causal and last == L:
        return torch.arange(L, device=ids.device).expand_as(ids), [None] * config.n_layer
    if mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    positions = position_ids(mask)
    if only_causal and causal_suffices(mask):
        biases: list[Tensor | None] = [None] * config.n_layer
        if last < L:
            biases[-1] = attention_bias(attention_mask(mask, None)[:, :, -last:], dtype)
        return positions, biases

    windows = set(config.windows)
    if branch is None:
        masks = {window: attention_mask(mask, window, config.causal) for window in windows}
    else:
        seen = branch_mask(mask, branch)
        positions = (seen.sum(3)[:, 0] - 1).masked_fill(~mask, 0)  # (B, L)
        query, key = positions[:, None, :, None], positions[:, None, None, :]
        masks = {window: seen & (query - key < window) if window else seen for window in windows}
    by_window = {window: attention_bias(masks[window], dtype) for window in windows}
    return positions, [by_window[window] for window in config.windows]


# ------------------------------------------------------------------------------------ the KV cache
class KVCache:
    """Keys, values and position tables in buffers that are allocated once and updated in place.

    Prefill takes the query in one call; each later call takes one token per row. query_mask (B, Q)
    True = real; the num_new tokens after the query are all real. `at` is a tensor, not a number, so
    that a CUDA graph of one step can be replayed for all of them. For the same reason a GPU attends
    to the whole buffer in each step, which gives all steps one shape; a CPU to the part written so
    far.
    """

    def __init__(
        self,
        config: GPTConfig,
        query_mask: Tensor,
        num_new: int,
        dtype: torch.dtype,
    ):
        B, Q = query_mask.shape
        device = query_mask.device
        self.config = config
        self.fixed_shape = replays(device)
        self.length = 0  # tokens in the cache; the model advances it after each call
        self.prefill = Q  # of these, those of the first call
        shape = (config.n_layer, B, config.kv_heads, Q + num_new, config.head_width)
        # a CPU multiplies one query by all keys up to three times as fast if a channel's numbers
        # lie side by side
        layout = (0, 1, 2, 3, 4) if query_mask.is_cuda else (0, 1, 2, 4, 3)
        self.keys = torch.empty_permuted(shape, layout, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        if self.fixed_shape:  # what is not written yet is read too: it must not be NaN
            self.keys.zero_()
            self.values.zero_()
        mask = F.pad(query_mask, (0, num_new), value=True)  # (B, L)
        self.positions = position_ids(mask)  # (B, L)
        self.rotary = config.rotary_tables(self.positions)
        self.at = torch.full((1,), Q, device=device)  # column of the next token
        self.index = torch.arange(Q + num_new, device=device)  # (L,)
        # 0 or -inf: at first the query's real tokens are visible, then one more in each step
        self.bias = torch.zeros((B, config.n_head, 1, Q + num_new), device=device, dtype=dtype)
        self.bias.masked_fill_(~mask[:, None, None, :] | (self.index >= Q), -torch.inf)

    def next_token(self) -> tuple[Tensor, RotaryTables, list[Tensor]]:
        """The next token's positions (B, 1), rotary tables, and bias in each layer (B, H, 1, L)."""
        self.bias.index_fill_(3, self.at, 0.0)
        bias = self.bias[..., : self.end]
        biases: dict[int | None, Tensor] = {None: bias}
        for window in self.config.windows:
            if window is not None and window not in biases:
                too_far = self.index[: self.end] <= self.at - window
                biases[window] = bias.masked_fill(too_far, -torch.inf)
        rotary = {}
        for settings, (cos, sin) in self.rotary.items():
            rotary[settings] = cos.index_select(1, self.at), sin.index_select(1, self.at)
        positions = self.positions.index_select(1, self.at)
        return positions, rotary, [biases[window] for window in self.config.windows]

    @property
    def end(self) -> int:
        """Number of columns that a decode step attends to."""
        return self.bias.size(3) if self.fixed_shape else self.length + 1

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key, value (B, K, S, D) of new tokens -> the keys and values they may attend to.

        The query's from column 0 on; a later token's in column `length`, which is also in `at`, by
        which a CUDA graph finds it.
        """
        keys, values = self.keys[layer], self.values[layer]  # (B, K, Q + num_new, D)
        if self.length and self.fixed_shape:
            keys.index_copy_(2, self.at, key)
            values.index_copy_(2, self.at, value)
        else:  # writing a slice takes half the time of index_copy_
            end = self.length + key.size(2)
            keys[:, :, self.length : end], values[:, :, self.length : end] = key, value
        return (keys[:, :, : self.end], values[:, :, : self.end]) if self.length else (key, value)

    def advance(self, num_tokens: int) -> None:
        if self.length:
            self.at += 1
        self.length += num_tokens

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows with these indices (n,): the others have ended."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.positions, self.bias = self.positions[rows], self.bias[rows]
        for settings, (cos, sin) in self.rotary.items():
            self.rotary[settings] = cos[rows], sin[rows]


# ----------------------------------------------------------------------------------------- a block
class Linear(nn.Linear):
    """`nn.Linear` through `kernels.linear`, followed by an activation."""

    activation: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.activation)


def param_like(weight: Tensor, values: Tensor) -> nn.Parameter:
    """A new parameter with the dtype of `weight` and, unless that is not read yet, its device."""
    return nn.Parameter(values.to(weight.dtype) if weight.is_meta else values.to(weight))


class AdaptedLinear(Linear):
    """A layer, then a bottleneck, added to its output: y + up(gelu(down(y))). [STR adapter]

    Takes over the weights of the `layer` it replaces. `up` starts at 0, so the adapter starts as
    the identity.
    """

    def __init__(self, layer: Linear, size: int):
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        C = layer.out_features
        self.adapter_down = param_like(layer.weight, torch.randn(size, C) / math.sqrt(C))
        self.adapter_down_bias = param_like(layer.weight, torch.zeros(size))
        self.adapter_up = param_like(layer.weight, torch.zeros(C, size))
        self.adapter_up_bias = param_like(layer.weight, torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)  # (..., C)
        bottleneck = linear(y, self.adapter_down, self.adapter_down_bias, "gelu")  # (..., size)
        return y + linear(bottleneck, self.adapter_up, self.adapter_up_bias)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight: in float32 under autocast too, then cast back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """An RMS norm with 1 + weight in place of weight: weight decay draws the factor to 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


def norm(config: GPTConfig, width: int | None = None) -> nn.LayerNorm | RMSNorm:
    """A norm over `width` channels; None: over the d_model of the residual stream."""
    kind = {"layer": nn.LayerNorm, "rms": RMSNorm, "rms_offset": OffsetRMSNorm}[config.norm]
    return kind(width or config.d_model, eps=config.norm_eps)


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
        bias: Tensor | None,  # (B, 1 or H, S, L) added to the logits; None: causal, with last = S
        rotary: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
        last: int,  # how many of the S tokens are computed, from the end
    ) -> Tensor:
        B, S, _ = x.shape
        H, K, D = self.config.n_head, self.config.kv_heads, self.config.head_width
        qkv = self.qkv(x).view(B, S, H + 2 * K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([H, K, K], dim=2)
            if self.config.qk_norm_joint:
                q = self.q_norm(q.flatten(2)).view_as(q)
                k = self.k_norm(k.flatten(2)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
            qkv = torch.cat((q, k, v), dim=2)
        if rotary is None:
            q, k, v = split_heads(qkv, H)  # (B, H, S, D), (B, K, S, D) twice
        else:
            interleaved = self.config.positions == "rotary_interleaved"
            q, k, v = rotated_heads(qkv, *rotary, H, interleaved)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, K, L, D)
        if last < S:
            assert bias is not None
            q, bias = q[:, :, -last:], bias[:, :, -last:]
        scale = (self.config.attention_divisor or D) ** -0.5 if self.config.scale_attention else 1.0
        if self.config.attention_cap is not None:
            assert bias is not None
            y = attend_capped(q, k, v, bias, scale, self.config.attention_cap)
        elif cache is not None and cache.length and not q.is_cuda:
            assert bias is not None
            y = attend_one(q, k, v, bias, scale)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=K < H
            )
        return self.out(y.transpose(1, 2).reshape(B, last, H * D))


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
        return self.down(self.up(x) if self.gate is None else self.gate(x) * self.up(x))


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
        bias: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
        last: int,
    ) -> Tensor:
        """x (B, S, C) -> (B, last, C): the last tokens, which still attend to the earlier ones."""
        normed = self.norm1(x)
        attended = self.post_norm1(self.attention(normed, bias, rotary, cache, layer, last))
        x, normed = x[:, -last:], normed[:, -last:]
        if self.parallel:
            normed = normed if self.shared_norm else self.norm2(x)
            return x + attended + self.post_norm2(self.mlp(normed))
        x = x + attended
        return x + self.post_norm2(self.mlp(self.norm2(x)))


class Blocks(nn.ModuleList):
    """A `ModuleList` of blocks, typed as such."""

    def __iter__(self) -> Iterator[Block]:
        return typing.cast(Iterator[Block], super().__iter__())


# --------------------------------------------------------------------------------------- the trunk
def init_std(config: GPTConfig) -> float:
    return 0.02 * math.sqrt(768 / config.d_model)


class Transformer(nn.Module):
    """Embedding, blocks, final norm: what the language model and the scalar model share."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        C = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, C)
        self.positions = nn.Embedding(config.n_ctx, C) if config.positions == "learned" else None
        self.blocks = Blocks(Block(config) for _ in range(config.n_layer))
        self.norm = norm(config)
        # save only a block's input and compute the block again in the backward pass
        self.checkpoint_activations = False
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """As GPT-2: weights N(0, std), biases 0.

        Layers that write to the residual stream get std / sqrt(2 * n_layer). std is GPT-2's 0.02 at
        width 768 and scales with 1 / sqrt(width): at width 128 a fixed 0.02 took a model up to ten
        times as long to learn to copy a word from its query.
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
        """A new cache for queries (B, Q) and num_new tokens after each of them."""
        return KVCache(self.config, query_mask, num_new, dtype)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
        query_length: Tensor | int | None = None,
        branch: Tensor | None = None,
    ) -> Tensor:
        """ids (B, L) -> hidden (B, L, C) after the final norm.

        mask          (B, L), True = real token; None: all are real
        cache         first the query, then ids (B, 1), the next token of each row, without a mask
        last          hidden states of the last `last` tokens only, (B, last, C): the last block
                      computes no others
        query_length  where the responses begin, for an encoder-decoder (t5.py); ignored here
        branch        (B, L), the response that a token belongs to, if a row has several
        """
        S = ids.size(1)
        last = S if last is None else last
        biases: Sequence[Tensor | None]
        if cache is not None and cache.length:
            positions, rotary, biases = cache.next_token()
        else:
            dtype = matmul_dtype(self.embedding.weight)  # of queries and keys
            positions, biases = positions_and_biases(self.config, ids, mask, branch, last, dtype)
            rotary = self.config.rotary_tables(positions)
            if mask is not None:
                ids = ids.masked_fill(~mask, 0)  # [PAD] may lie outside the embedding
        x = self.embedding(ids)  # (B, S, C)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.positions is not None:
            x = x + self.positions(positions)
        tables = [rotary.get(settings) for settings in self.config.rotary_settings]
        for layer, (block, bias) in enumerate(zip(self.blocks, biases, strict=True)):
            is_last_block = layer + 1 == self.config.n_layer
            num = last if is_last_block else S
            x = self.run(block, x, bias, tables[layer], cache, layer, num)
        if cache is not None:
            cache.advance(S)
        return self.norm(x)

    def run(self, block: Block, *arguments: Any) -> Tensor:
        """A block's output; with checkpoint_activations the backward pass computes it again."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)


# ---------------------------------------------------------------------------------- the two models
class GPT(nn.Module):
    """The language model. Returns hidden states: logits are computed only where they are needed."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = config.trunk()
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        nn.init.normal_(self.lm_head.weight, std=init_std(config))
        if config.head_bias:
            nn.init.zeros_(self.lm_head.bias)
        if config.tied_head:
            self.lm_head.weight = self.transformer.embedding.weight
        # (V,) bool, or None: every id may be emitted
        self.register_buffer("forbidden", None, persistent=False)

    def forbid(self, pad_id: int, num_ids: int) -> "GPT":
        """Give probability 0 to [PAD] and to the LM head's padding rows, ids >= num_ids.

        Pythia's head has 50,304 rows and [PAD] is row 50,277: sampling it would cut the response.
        Returns the model.
        """
        weight = self.lm_head.weight  # on the meta device until it is read from its file
        device = "cpu" if weight.is_meta else weight.device
        ids = torch.arange(self.config.vocab_size, device=device)
        forbidden = (ids >= num_ids) | (ids == pad_id)
        self.forbidden = forbidden if forbidden.any() else None
        return self

    @property
    def head_bias(self) -> Tensor | None:
        """(V,) added to hidden @ lm_head.weight.T, -inf at forbidden ids; None: nothing to add."""
        bias = self.lm_head.bias
        if self.forbidden is None:
            return bias
        if bias is None:
            bias = torch.zeros_like(self.forbidden, dtype=torch.float)
        return bias.masked_fill(self.forbidden, -torch.inf)

    def forward(self, ids: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        """ids, mask (B, L) -> hidden (B, L, C), the LM head's input; see `Transformer.forward`."""
        hidden = self.transformer(ids, mask, **others)
        return hidden if self.config.head_scale == 1 else hidden * self.config.head_scale

    def logits(self, hidden: Tensor, head: Tensor | Packed | None = None) -> Tensor:
        """hidden (..., C) -> logits (..., V), -inf at forbidden ids.

        head: `cast_head(lm_head.weight)`, made once for many calls. Autocast casts the factors, as
        in `linear_logprobs`, but not the logits: for SmolLM2-135M on a post that moved up to 2% of
        the probability to other tokens, and at temperature 0.01 up to half of it.
        """
        head = cast_head(self.lm_head.weight) if head is None else head
        (hidden,) = cast(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return wide_linear(hidden, head, self.head_bias, self.config.logit_cap)


class ScalarModel(nn.Module):
    """The trunk with one number per token: reward model, or value model, its copy. [N+ 22]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = config.trunk()
        self.score = nn.Linear(config.d_model, 1)
        # [N+ 11] N(0, 1 / sqrt(d_model + 1)): initial rewards are of order one, as hidden states
        # are normalised
        nn.init.normal_(self.score.weight, std=1 / math.sqrt(config.d_model + 1))
        nn.init.zeros_(self.score.bias)
        # [N+ 15] subtracted from every score, so that the demonstrations have mean 0; saved with
        # the weights
        self.register_buffer("reward_bias", torch.zeros(()))
        # an id that the score skips at the end of a text: where transformers trained a reward model
        # with [PAD] = EOS, it was the score before EOS
        self.skipped_id: int | None = None

    def forward(self, ids: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        """ids, mask (B, L) -> scores (B, L), or (B, last), in float32, one per token.

        The caller picks those that count; takes the arguments of `Transformer.forward`.
        """
        hidden = self.transformer(ids, mask, **others)
        # in bf16, scores within 0.4% of each other would tie
        with torch.autocast(hidden.device.type, enabled=False):
            scores = self.score(hidden.float()).squeeze(-1) - self.reward_bias  # (B, last)
        if not self.config.mean_pooled:
            return scores
        branch = others.get("branch")
        if branch is None:  # one response, from the end of the query on
            begin = torch.as_tensor(others.get("query_length", 0), device=ids.device).view(-1, 1)
            branch = (torch.arange(ids.size(1), device=ids.device) >= begin).long()  # (B or 1, L)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        S = scores.size(1)
        return mean_so_far(scores, branch[:, -S:] * real[:, -S:])


def mean_so_far(scores: Tensor, branch: Tensor) -> Tensor:
    """Each token's score becomes the mean from the start of its response up to it.

    scores (B, S), branch (B, S) -> (B, S): 1 or 2 in a response, 0 where scores stay.

        scores 5 1 3 2    branch 0 1 1 2    ->    5 1 2 2
    """
    for response in (1, 2):
        inside = branch == response
        mean = torch.where(inside, scores, 0.0).cumsum(1) / inside.cumsum(1).clamp(min=1)
        scores = torch.where(inside, mean, scores)
    return scores
