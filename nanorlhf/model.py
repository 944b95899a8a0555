"""One GPT, by hand: from GPT-2 and Pythia to Llama, Mistral and Qwen, all are settings of `GPTConfig`.

Top to bottom: settings, positions, attention, MLP, block, trunk, and the two models built on the trunk: `GPT` with a
head over the vocabulary, `ScalarModel` with one number per token (reward and value model).
There is no dropout: with it the policy that samples and the policy that is trained would differ, the ratio in PPO's
first epoch would not be 1, and the KL would be noise. [N+ 7]

Letters in shapes: B batch, L tokens, S tokens of this call (1 in a decode step, else all L), C width, H heads of the
queries, K heads of the keys and values (H, or fewer, each shared by a group of H / K queries), D width of a head,
V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.linear import Packed, linear, product_dtype, rounded, wide_linear


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Rotary positions beyond those of pre-training: which pairs of channels turn `factor` times as slowly."""

    kind: str
    """linear: all; llama3 and yarn: those that turn seldom within original_n_ctx, those in between in part"""
    factor: float
    original_n_ctx: int = 0
    """longest sequence of pre-training"""
    few_turns: float = 1.0
    """within original_n_ctx: a pair with fewer turns by the whole factor (low_freq_factor, beta_slow)"""
    many_turns: float = 32.0
    """a pair with more turns not at all (high_freq_factor, beta_fast)"""
    attention_factor: float = 1.0
    """multiplies q and k (yarn)"""
    whole_pairs: bool = True
    """yarn: the boundaries are rounded outwards to whole pairs"""


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
    """layer, or rms: divided by the root mean square alone, without bias"""
    qk_norm: bool = False
    """an RMS norm over the D channels of each head of q and of k (Qwen 3)"""
    positions: str = "rotary_half"
    """learned (GPT-2, GPT-Neo), rotary_half (NeoX: pairs i, i + r/2), rotary_interleaved (CodeGen: pairs 2i, 2i + 1),
    relative (T5, t5.py)"""
    rotary_dim: int = 0
    """number of a head's D channels that are rotated; the rest carry no position"""
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    parallel_residual: bool = True
    """x + attention(norm1(x)) + mlp(norm2(x)) instead of attention first, then MLP"""
    shared_norm: bool = False
    """attention and MLP share one layer norm (CodeGen)"""
    attention_windows: tuple[int | None, ...] | None = None
    """per layer: a token attends to itself and window - 1 tokens before it; None: to all (GPT-Neo alternates)"""
    scale_attention: bool = True
    """divide attention logits by sqrt(D); GPT-Neo does not"""
    qkv_bias: bool = True
    attention_out_bias: bool = True
    head_bias: bool = False
    """a bias on the LM head (CodeGen)"""
    tied_head: bool = False
    """the LM head is the embedding matrix"""
    head_scale: float = 1.0
    """multiplies the hidden states before the LM head (T5 with a tied one: 1 / sqrt(d_model))"""
    adapter_size: int = 0
    """bottleneck width of the adapter after each attention and each MLP; 0: no adapters"""
    norm_eps: float = 1e-5
    causal: bool = True
    """False: tokens attend in both directions, an encoder (RLCF's discriminator)"""
    architecture: str = "gpt_neox"
    """naming scheme of the checkpoint on disk, one of families.FAMILIES"""

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

    def window(self, layer: int) -> int | None:
        return self.attention_windows[layer] if self.attention_windows else None

    def trunk(self) -> "Transformer":
        """New random weights of what lies below the head; t5.py has an encoder and a decoder there."""
        return Transformer(self)


# -------------------------------------------------------------------------------------------------- positions and masks
def position_ids(mask: Tensor) -> Tensor:
    """(B, L) bool, True = real token -> (B, L): the number of real tokens before each one; 0 at padding.

    So a left-padded row has the positions it would have without padding. Learned positions need this; rotary ones are
    invariant to a shift.

        mask      . . # # # .      (# = real)
        position  0 0 0 1 2 0
    """
    return (mask.long().cumsum(1) - 1).masked_fill(~mask, 0)


def attention_mask(mask: Tensor, window: int | None, causal: bool = True) -> Tensor:
    """Which keys each token may attend to: real, not after itself (if causal), within the window.

    mask (B, L) -> (B, 1, L, L) bool. Every token attends to itself: otherwise a padding token would attend to nothing,
    and a softmax over nothing is NaN. No real token attends to padding.
    """
    key = torch.arange(mask.size(1), device=mask.device)  # (L,)
    query = key[:, None]  # (L, 1)
    visible = key <= query if causal else torch.ones_like(key == query)  # (L, L)
    if window is not None:
        visible &= key > query - window
    return (visible & mask[:, None, None, :]) | (key == query)


def branch_mask(mask: Tensor, branch: Tensor) -> Tensor:
    """`attention_mask` where a row holds several responses to its query: a token sees the query and its own response.

    mask (B, L), branch (B, L): 0 in the query, 1, 2, ... in its responses -> (B, 1, L, L) bool. A token's position is
    the number of tokens that it sees before itself, so each response is as it would be in a row of its own.

        ids       q q q a b x y z
        branch    0 0 0 1 1 2 2 2
        position  0 1 2 3 4 3 4 5
    """
    own = branch[:, :, None] == branch[:, None, :]  # (B, L, L)
    return attention_mask(mask, None) & (own | (branch == 0)[:, None, :])[:, None]


def causal_suffices(mask: Tensor) -> bool:
    """Whether causal attention keeps padding out by itself: no real token of mask (B, L) comes after padding.

    Then a GPU needs no bias, which would rule out flash attention; asking waits for it. A CPU keeps the bias: its
    kernel takes one, and its sums stay those of batches with other padding.
    """
    return has_causal_kernel(mask.device) and not bool((mask[:, 1:] & ~mask[:, :-1]).any())


def has_causal_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def attention_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as 0 and -inf to add to the attention logits: made once, not once per layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def rotary_frequencies(config: GPTConfig, device: torch.device) -> Tensor:
    """Radians per position of each pair of channels: base^(-2i / r), some of them slowed down; (r / 2,), float32."""
    r, scaling = config.rotary_dim, config.rotary_scaling
    # 1 / base^x, not base^-x: rounds as transformers does; otherwise angles at position 2,000 differ by 1e-4
    frequencies = 1 / config.rotary_base ** (torch.arange(0, r, 2, device=device).float() / r)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    few, many, length = scaling.few_turns, scaling.many_turns, scaling.original_n_ctx
    if scaling.kind == "llama3":  # from few to many turns, linear in the number of turns
        kept = ((length / (2 * math.pi / frequencies) - few) / (many - few)).clamp(0, 1)
    else:  # yarn: linear in the number of the pair

        def pair(turns: float) -> float:
            return r * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

        first, last = pair(many), pair(few)
        if scaling.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, r - 1)
        ramp = (torch.arange(r // 2, device=device).float() - first) / (last - first if last > first else 1e-3)
        kept = 1 - ramp.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency: two tensors (B, S, 1, rotary_dim / 2), float32."""
    angles = positions[:, :, None, None].float() * rotary_frequencies(config, positions.device)
    cos, sin = angles.cos(), angles.sin()
    factor = config.rotary_scaling.attention_factor if config.rotary_scaling else 1.0
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


class RotatedHeads(torch.autograd.Function):
    """Split the joint projection into q, k, v and rotate q and k by the angles of their positions.

    qkv (B, S, H + 2K, D), cos and sin of `rotary_tables` -> q (B, H, S, D), k and v (B, K, S, D); channels beyond
    rotary_dim pass through. Works in place, as nothing else reads qkv, and saves only the tables: backward rotates the
    gradient back.
    """

    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return heads(turn_(qkv.detach(), cos, sin, n_head, interleaved), n_head)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = torch.cat([g.transpose(1, 2) for g in grads], dim=2)  # (B, S, H + 2K, D)
        return turn_(grad, cos, -sin, grads[0].size(1), ctx.interleaved), None, None, None, None


def heads(qkv: Tensor, n_head: int) -> tuple[Tensor, ...]:
    """(B, S, H + 2K, D) -> q (B, H, S, D), k and v (B, K, S, D)."""
    kv_heads = (qkv.size(2) - n_head) // 2
    return qkv.transpose(1, 2).split([n_head, kv_heads, kv_heads], dim=1)


def turn_(qkv: Tensor, cos: Tensor, sin: Tensor, n_head: int, interleaved: bool) -> Tensor:
    """Rotate q and k of (B, S, H + 2K, D) in place, in float32 at least, by pairs (0, 1), (2, 3) or (0, r/2), ...

    A pair (a, b) is the complex number a + ib, and turning it is one product: (a + ib)(cos + i sin).
    """
    qk = qkv[:, :, : (n_head + qkv.size(2)) // 2, : 2 * cos.size(-1)]  # (B, S, H + K, r)
    a, b = (qk[..., 0::2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)
    wide = torch.promote_types(qk.dtype, torch.float32)
    turned = torch.complex(a.to(wide), b.to(wide)).mul_(torch.complex(cos, sin))  # (B, S, H + K, r / 2)
    a.copy_(turned.real)
    b.copy_(turned.imag)
    return qkv


class KVCache:
    """Keys, values and position tables in buffers that are allocated once and updated in place.

    Prefill takes the query in one call; each later call takes one token per row. query_mask (B, Q) True = real; the
    num_new tokens after the query are all real. `at` is a tensor, not a number, so that the CUDA graph of one step
    can be replayed for all of them; so a GPU attends to the whole buffer each step, a CPU to the part written so far.
    """

    def __init__(self, config: GPTConfig, query_mask: Tensor, num_new: int, dtype: torch.dtype, whole: bool = False):
        B, Q = query_mask.shape
        self.whole = whole or query_mask.is_cuda
        self.config, self.length = config, 0  # tokens in the cache; the model advances it after each call
        self.prefill = Q  # of these, those of the first call
        shape = (config.n_layer, B, config.kv_heads, Q + num_new, config.head_width)
        # a CPU multiplies one query by all keys up to three times as fast if a channel's numbers lie side by side
        layout = (0, 1, 2, 3, 4) if query_mask.is_cuda else (0, 1, 2, 4, 3)
        self.keys = torch.empty_permuted(shape, layout, device=query_mask.device, dtype=dtype)
        self.values = torch.empty(shape, device=query_mask.device, dtype=dtype)
        if self.whole:  # the unwritten part is read too: 0 * uninitialised memory might be NaN
            self.keys.zero_(), self.values.zero_()
        mask = F.pad(query_mask, (0, num_new), value=True)  # (B, L)
        self.positions = position_ids(mask)  # (B, L)
        self.rotary = rotary_tables(config, self.positions) if config.positions.startswith("rotary") else None
        self.at = torch.full((1,), Q, device=query_mask.device)  # column of the next token
        self.index = torch.arange(Q + num_new, device=query_mask.device)  # (L,)
        # added to attention logits, 0 or -inf: at first the query's real tokens are visible, then one more each step
        self.bias = torch.zeros((B, config.n_head, 1, Q + num_new), device=query_mask.device, dtype=dtype)
        self.bias.masked_fill_(~mask[:, None, None, :] | (self.index >= Q), -torch.inf)

    def next_token(self) -> tuple[Tensor, tuple[Tensor, Tensor] | None, dict[int | None, Tensor]]:
        """Positions (B, 1), rotary tables and, for each window, the bias (B, H, 1, L) of the next token."""
        self.bias.index_fill_(3, self.at, 0.0)
        bias = self.bias[..., : self.end]
        windows = {self.config.window(layer) for layer in range(self.config.n_layer)}
        biases = {
            window: bias if window is None else bias.masked_fill(self.index[: self.end] <= self.at - window, -torch.inf)
            for window in windows
        }
        rotary = None
        if self.rotary is not None:
            cos, sin = self.rotary
            rotary = cos.index_select(1, self.at), sin.index_select(1, self.at)
        return self.positions.index_select(1, self.at), rotary, biases

    @property
    def end(self) -> int:
        """Number of columns that a decode step attends to."""
        return self.bias.size(3) if self.whole else self.length + 1

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key, value (B, K, S, D) of the new tokens -> the keys and values that they may attend to."""
        keys, values = self.keys[layer], self.values[layer]  # (B, K, Q + num_new, D)
        if self.length and self.whole:
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
        """Keep only these rows: the others have ended."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.positions, self.bias = self.positions[rows], self.bias[rows]
        if self.rotary is not None:
            cos, sin = self.rotary
            self.rotary = cos[rows], sin[rows]


# -------------------------------------------------------------------------------------------------------------- a block
class Linear(nn.Linear):
    """`nn.Linear` through `kernels.linear`, followed by an activation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: str | None = None,
        activation: str | None = None,
    ):
        super().__init__(in_features, out_features, bias, device)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.activation)


def beside(weight: Tensor, values: Tensor) -> nn.Parameter:
    """New weights with the device and dtype of `weight`; a weight that is only in its file is on the meta device."""
    return nn.Parameter(values.to(weight.dtype) if weight.is_meta else values.to(weight))


class AdaptedLinear(Linear):
    """A layer that writes to the residual stream, followed by an adapter: y + up(gelu(down(y))). [STR adapter]

    Takes over the weights of the `layer` it replaces. `up` starts at 0, so the adapter starts as the identity.
    """

    def __init__(self, layer: Linear, size: int):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        C = layer.out_features
        self.adapter_down = beside(layer.weight, torch.randn(size, C) / math.sqrt(C))
        self.adapter_down_bias = beside(layer.weight, torch.zeros(size))
        self.adapter_up = beside(layer.weight, torch.zeros(C, size))
        self.adapter_up_bias = beside(layer.weight, torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)  # (..., C)
        bottleneck = linear(y, self.adapter_down, self.adapter_down_bias, "gelu")  # (..., adapter_size)
        return y + linear(bottleneck, self.adapter_up, self.adapter_up_bias)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 also under autocast, as layer norms are; the result as x."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def norm(config: GPTConfig) -> nn.LayerNorm | RMSNorm:
    kind = {"layer": nn.LayerNorm, "rms": RMSNorm}[config.norm]
    return kind(config.d_model, eps=config.norm_eps)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        H, D = config.n_head, config.head_width
        self.qkv = Linear(config.d_model, sum(config.qkv_rows), bias=config.qkv_bias)
        self.q_norm = RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, eps=config.norm_eps) if config.qk_norm else None
        self.out = Linear(H * D, config.d_model, bias=config.attention_out_bias)
        if config.adapter_size:
            self.out = AdaptedLinear(self.out, config.adapter_size)

    def forward(
        self,
        x: Tensor,  # (B, S, C)
        visible: Tensor | None,  # (B, 1 or H, S, L) added to the logits; None: causal, no padding, last = S
        rotary: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
        last: int,  # compute only the last so many of the S tokens
    ) -> Tensor:
        B, S, _ = x.shape
        H, K, D = self.config.n_head, self.config.kv_heads, self.config.head_width
        qkv = self.qkv(x).view(B, S, H + 2 * K, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([H, K, K], dim=2)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=2)
        interleaved = self.config.positions == "rotary_interleaved"
        if rotary is not None and qkv.requires_grad:
            q, k, v = RotatedHeads.apply(qkv, *rotary, H, interleaved)  # (B, H, S, D), (B, K, S, D) twice
        else:
            q, k, v = heads(qkv if rotary is None else turn_(qkv, *rotary, H, interleaved), H)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, K, L, D)
        if last < S:
            assert visible is not None
            q, visible = q[:, :, -last:], visible[:, :, -last:]
        scale = q.size(-1) ** -0.5 if self.config.scale_attention else 1.0
        if cache is not None and cache.length and not q.is_cuda:
            assert visible is not None
            y = attend_one(q, k, v, visible, scale)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=K < H
            )  # fmt: skip
        return self.out(y.transpose(1, 2).reshape(B, last, H * D))


def attend_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention of a decode step on a CPU: q (B, H, 1, D), k and v (B, K, L, D), bias (B, H, 1, L) -> (B, H, 1, D).

    Two batched products: PyTorch's fused kernel is built for many tokens and takes 1.5 times as long for one. The
    queries that share keys and values are the rows of one product.
    """
    B, K = k.shape[:2]
    rows = q.reshape(B * K, -1, q.size(-1))  # (B * K, H / K, D)
    bias = bias.reshape(B * K, -1, bias.size(-1))  # (B * K, H / K, L)
    logits = torch.baddbmm(bias, rows, k.flatten(0, 1).mT, alpha=scale)
    return torch.bmm(logits.softmax(-1), v.flatten(0, 1)).view_as(q)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        C, bias = config.d_model, config.mlp_bias
        self.gate = Linear(C, config.d_mlp, bias, activation=config.activation) if config.gated_mlp else None
        self.up = Linear(C, config.d_mlp, bias, activation=None if config.gated_mlp else config.activation)
        self.down = Linear(config.d_mlp, C, bias)
        if config.adapter_size:
            self.down = AdaptedLinear(self.down, config.adapter_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) if self.gate is None else self.gate(x) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.parallel = config.parallel_residual
        self.norm1 = norm(config)
        self.attention = Attention(config)
        self.norm2 = None if config.shared_norm else norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        visible: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
        last: int,
    ) -> Tensor:
        """x (B, S, C) -> (B, last, C): the last tokens, which still attend to the earlier ones."""
        normed = self.norm1(x)
        attended = self.attention(normed, visible, rotary, cache, layer, last)
        x, normed = x[:, -last:], normed[:, -last:]
        if self.parallel:
            return x + attended + self.mlp(normed if self.norm2 is None else self.norm2(x))
        assert self.norm2 is not None
        x = x + attended
        return x + self.mlp(self.norm2(x))


class Blocks(nn.ModuleList):
    """A `ModuleList` of blocks, typed as such."""

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())


# ------------------------------------------------------------------------------------------------------------ the trunk
def init_std(config: GPTConfig) -> float:
    return 0.02 * math.sqrt(768 / config.d_model)


class Transformer(nn.Module):
    """Embedding, blocks, final norm: the part that the language model and the scalar model share."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.n_ctx, config.d_model) if config.positions == "learned" else None
        self.blocks = Blocks(Block(config) for _ in range(config.n_layer))
        self.norm = norm(config)
        self.checkpoint_activations = False  # save only a block's input and recompute it in the backward pass
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """GPT-2's: weights N(0, std), biases 0; layers that write to the residual stream: std / sqrt(2 * n_layer).

        std is GPT-2's 0.02 at width 768 and scales with 1 / sqrt(width): at width 128 a fixed 0.02 took a model up to
        ten times as long to learn to copy a word from its query.
        """
        std = init_std(self.config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for writer in (block.attention.out, block.mlp.down):
                nn.init.normal_(writer.weight, std=std / math.sqrt(2 * self.config.n_layer))

    def cache(self, query_mask: Tensor, num_new: int, dtype: torch.dtype, whole: bool = False) -> KVCache:
        """A new cache for queries (B, Q) and num_new tokens after each of them."""
        return KVCache(self.config, query_mask, num_new, dtype, whole)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
        query_length: Tensor | int | None = None,
        branch: Tensor | None = None,
    ) -> Tensor:
        """ids (B, L), mask (B, L) True = real token -> hidden (B, L, C) after the final norm. mask None: all are real.

        With a cache: first the query, then ids (B, 1), the next token of each row, without a mask. With `last`: only
        the last so many tokens, hidden (B, last, C), and the last block computes no more. query_length, where the
        responses begin, is for an encoder-decoder: here one stack reads query and response alike. branch (B, L) says
        which response a token is of where a row holds several (`branch_mask`).
        """
        visible: Mapping[int | None, Tensor | None]  # by window
        last_visible: Tensor | None = None  # of the last block, where it differs
        config, S = self.config, ids.size(1)
        last = S if last is None else last
        if cache is not None and cache.length:
            positions, rotary, visible = cache.next_token()
        else:
            if mask is None and (config.attention_windows or last < S or not config.causal or branch is not None):
                mask = torch.ones_like(ids, dtype=torch.bool)
            if mask is None:
                positions = torch.arange(S, device=ids.device).expand_as(ids)  # (B, L)
                visible = {None: None}
            else:
                positions = position_ids(mask)
                ids = ids.masked_fill(~mask, 0)  # [PAD] may lie outside the embedding
                windows = {config.window(layer) for layer in range(config.n_layer)}
                dtype = product_dtype(self.embedding.weight)  # of queries and keys
                if branch is not None:
                    seen = branch_mask(mask, branch)
                    positions = (seen.sum(3)[:, 0] - 1).masked_fill(~mask, 0)  # (B, L)
                    query, key = positions[:, None, :, None], positions[:, None, None, :]
                    masks = {window: seen if window is None else seen & (query - key < window) for window in windows}
                    visible = {window: attention_bias(masks[window], dtype) for window in windows}
                elif windows == {None} and config.causal and causal_suffices(mask):
                    visible = {None: None}
                    if last < S:  # the causal kernel takes as many queries as keys
                        last_visible = attention_bias(attention_mask(mask, None)[:, :, -last:], dtype)
                else:
                    masks = {window: attention_mask(mask, window, config.causal) for window in windows}
                    visible = {window: attention_bias(masks[window], dtype) for window in windows}
            rotary = None if self.positions is not None else rotary_tables(config, positions)
        x = self.embedding(ids)  # (B, S, C)
        if self.positions is not None:
            x = x + self.positions(positions)
        for layer, block in enumerate(self.blocks):
            wanted, bias = S, visible[config.window(layer)]
            if layer + 1 == config.n_layer:
                wanted, bias = last, bias if last_visible is None else last_visible
            x = self.run(block, x, bias, rotary, cache, layer, wanted)
        if cache is not None:
            cache.advance(S)
        return self.norm(x)

    def run(self, block: Block, *arguments: Any) -> Tensor:
        """A block's output; with checkpoint_activations the backward pass computes it again."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)


# ------------------------------------------------------------------------------------------------------- the two models
class GPT(nn.Module):
    """The language model. Its forward pass returns hidden states; logits are computed only where they are needed."""

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
        self.register_buffer("forbidden", None, persistent=False)  # (V,) bool, or None: every id may be emitted

    def forbid(self, pad_id: int, num_ids: int) -> "GPT":
        """Give probability 0 to [PAD] and to the padding rows of the LM head (ids >= num_ids). Returns the model.

        Pythia's head has 50,304 rows and [PAD] is row 50,277: sampling it would cut the response.
        """
        weight = self.lm_head.weight  # on the meta device while it is only in its file
        ids = torch.arange(self.config.vocab_size, device="cpu" if weight.is_meta else weight.device)
        forbidden = (ids >= num_ids) | (ids == pad_id)
        self.forbidden = forbidden if forbidden.any() else None
        return self

    @property
    def head_bias(self) -> Tensor | None:
        """(V,) added to hidden @ lm_head.weight.T: the head's bias, -inf at forbidden ids. None: nothing to add."""
        if self.forbidden is None:
            return self.lm_head.bias
        bias = (
            self.lm_head.bias if self.lm_head.bias is not None else torch.zeros_like(self.forbidden, dtype=torch.float)
        )
        return bias.masked_fill(self.forbidden, -torch.inf)

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
        query_length: Tensor | int | None = None,
        branch: Tensor | None = None,
    ) -> Tensor:
        """ids, mask (B, L) -> hidden (B, L, C), what the LM head reads; see `Transformer.forward`."""
        hidden = self.transformer(ids, mask, cache, last, query_length, branch)
        return hidden if self.config.head_scale == 1 else hidden * self.config.head_scale

    def rounded_head(self) -> Tensor | Packed:
        """The LM head's weights (V, C), rounded to autocast's dtype where it is on; a sampler's may be packed."""
        if isinstance(self.lm_head.weight, Packed):
            return self.lm_head.weight
        (weight,) = rounded(self.lm_head.weight)
        return weight if weight.is_cuda else weight.to(self.lm_head.weight.dtype)  # no CPU product widens its factors

    def logits(self, hidden: Tensor, head: Tensor | Packed | None = None) -> Tensor:
        """hidden (..., C) -> logits (..., V), -inf at forbidden ids; head: `rounded_head()`, made once for many calls.

        Autocast rounds the factors, as in `linear_logprobs`, but not the logits: of SmolLM2-135M's distribution on a
        post that moved up to 2% of the probability to other tokens, and at temperature 0.01 up to half of it.
        """
        head, (hidden,) = self.rounded_head() if head is None else head, rounded(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return wide_linear(hidden, head, self.head_bias)


class ScalarModel(nn.Module):
    """The trunk with one number per token: the reward model, and the value model that starts as its copy. [N+ 22]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = config.trunk()
        self.score = nn.Linear(config.d_model, 1)
        # [N+ 11] N(0, 1 / sqrt(d_model + 1)): initial rewards are of order one, as hidden states are normalised
        nn.init.normal_(self.score.weight, std=1 / math.sqrt(config.d_model + 1))
        nn.init.zeros_(self.score.bias)
        # [N+ 15] subtracted from every score, so that the demonstrations have mean 0; saved with the weights
        self.register_buffer("reward_bias", torch.zeros(()))

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        last: int | None = None,
        query_length: Tensor | int | None = None,
        branch: Tensor | None = None,
    ) -> Tensor:
        """ids (B, L), mask (B, L) -> scores (B, L) in float32, one per token; the caller picks those that count.

        With `last`: only those of the last so many tokens, (B, last); the rest as in `Transformer.forward`.
        """
        hidden = self.transformer(ids, mask, last=last, query_length=query_length, branch=branch)
        with torch.autocast(hidden.device.type, enabled=False):  # in bf16, scores within 0.4% of each other would tie
            return self.score(hidden.float()).squeeze(-1) - self.reward_bias
