"""One GPT, by hand: GPT-2, GPT-Neo, GPT-NeoX (Pythia) and CodeGen are settings of `GPTConfig`.

Read from top to bottom: the settings, positions, attention, MLP, block, the trunk, and the two models that stand on
it: `GPT` with a head over the vocabulary and `ScalarModel` with a head of one number (reward and value model).
There is no dropout anywhere: with it the policy that sampled and the policy that is trained would differ, the ratio of
PPO's first epoch would not be 1 and the KL would be noise. [N+ 7]

Letters in shapes: B batch, L tokens seen so far, S tokens of this call (S = L without a cache), C width, H heads,
D = C / H, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab_size: int
    """rows of the embedding; [PAD] may lie beyond them"""
    n_ctx: int
    """longest sequence, query and response together"""
    d_model: int
    n_layer: int
    n_head: int
    d_mlp: int
    activation: str = "gelu"
    """gelu (exact), gelu_new (its tanh approximation) or relu"""
    positions: str = "rotary_half"
    """learned (GPT-2, GPT-Neo), rotary_half (NeoX: pairs i, i + r/2), rotary_interleaved (CodeGen: pairs 2i, 2i + 1)"""
    rotary_dim: int = 0
    """how many of a head's D channels are rotated; the rest carry no position"""
    rotary_base: float = 10000.0
    parallel_residual: bool = True
    """x + attention(norm(x)) + mlp(norm(x)) at once, instead of one after the other"""
    shared_norm: bool = False
    """one layer norm feeds attention and MLP alike (CodeGen)"""
    attention_windows: tuple[int | None, ...] | None = None
    """each layer's window: a token sees itself and window - 1 tokens before it; None sees all (GPT-Neo alternates)"""
    scale_attention: bool = True
    """divide attention logits by sqrt(D); GPT-Neo does not"""
    qkv_bias: bool = True
    attention_out_bias: bool = True
    head_bias: bool = False
    """a bias on the LM head (CodeGen)"""
    tied_head: bool = False
    """the LM head is the embedding matrix"""
    norm_eps: float = 1e-5
    architecture: str = "gpt_neox"
    """whose names the checkpoint on disk bears: gpt2, gpt_neo, gpt_neox or codegen"""

    def window(self, layer: int) -> int | None:
        return self.attention_windows[layer] if self.attention_windows else None


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


# ------------------------------------------------------------------------------------------------ positions and masks
def position_ids(mask: Tensor) -> Tensor:
    """(B, L) bool, True = real token -> (B, L): how many real tokens stand before each one; 0 at padding.

    With this a left-padded row sees the positions that it would see alone. Learned positions need it; rotary ones
    would forgive a shift.

        mask      . . # # # .      (# = real)
        position  0 0 0 1 2 0
    """
    return (mask.long().cumsum(1) - 1).masked_fill(~mask, 0)


def attention_mask(mask: Tensor, num_new: int, window: int | None) -> Tensor:
    """Which keys each new token may look at: real ones, not after itself, within the window.

    mask (B, L) -> (B, 1, S, L) bool. A token always sees itself: a padding token would otherwise see nothing at all,
    and the softmax over nothing is NaN. No real token ever looks at it.
    """
    L = mask.size(1)
    key = torch.arange(L, device=mask.device)  # (L,)
    query = key[L - num_new :, None]  # (S, 1)
    visible = key <= query  # (S, L)
    if window is not None:
        visible &= key > query - window
    return (visible & mask[:, None, None, :]) | (key == query)  # (B, 1, S, L)


def rotary_tables(config: GPTConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i / rotary_dim): two tensors (B, 1, S, rotary_dim / 2), float32."""
    exponents = torch.arange(0, config.rotary_dim, 2, device=positions.device).float() / config.rotary_dim
    # 1 / base^x and not base^-x: rounded as transformers rounds, or angles at position 2,000 would differ by 1e-4
    angles = positions[:, None, :, None].float() * (1 / config.rotary_base**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn pairs of channels of x (B, H, S, D) by their position's angle; channels beyond rotary_dim pass through."""
    rotary_dim = 2 * cos.size(-1)
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if interleaved:  # pairs (0, 1), (2, 3), ...
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:  # pairs (0, r/2), (1, r/2 + 1), ...
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


class KVCache:
    """Keys and values of the tokens seen so far, in buffers that are allocated once, for `max_length` tokens."""

    def __init__(self, config: GPTConfig, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layer, batch_size, config.n_head, max_length, config.d_model // config.n_head)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0  # tokens held; the model moves it on after each call

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value (B, H, S, D) of the new tokens -> those of all L tokens."""
        end = self.length + key.size(2)
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows only: the others have ended."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


# ------------------------------------------------------------------------------------------------------------- a block
class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.qkv_bias)
        self.out = nn.Linear(config.d_model, config.d_model, bias=config.attention_out_bias)

    def forward(
        self,
        x: Tensor,  # (B, S, C)
        visible: Tensor | None,  # (B, 1, S, L); None = plainly causal
        rotary: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        layer: int,
    ) -> Tensor:
        B, S, C = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        if rotary is not None:
            interleaved = self.config.positions == "rotary_interleaved"
            q, k = rotate(q, *rotary, interleaved), rotate(k, *rotary, interleaved)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H, L, D)
        scale = None if self.config.scale_attention else 1.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale)
        return self.out(y.transpose(1, 2).reshape(B, S, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_mlp)
        self.activation = ACTIVATIONS[config.activation]
        self.down = nn.Linear(config.d_mlp, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.parallel = config.parallel_residual
        self.norm1 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = None if config.shared_norm else nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *attention_arguments) -> Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed, *attention_arguments)
        if self.parallel:
            return x + attended + self.mlp(normed if self.norm2 is None else self.norm2(x))
        x = x + attended
        return x + self.mlp(self.norm2(x))


# ----------------------------------------------------------------------------------------------------------- the trunk
def init_std(config: GPTConfig) -> float:
    return 0.02 * math.sqrt(768 / config.d_model)


class Transformer(nn.Module):
    """Embedding, blocks, final norm: what the language model and the scalar model have in common."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.n_ctx, config.d_model) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """GPT-2's: N(0, std), biases 0, and the layers that write to the residual stream narrower with depth.

        std is 0.02 at its width of 768 and 1 / sqrt(width) of that elsewhere: at a width of 128 a fixed 0.02 took a
        model up to ten times as long to learn to copy a word from its query.
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

    def forward(self, ids: Tensor, mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """ids (B, S), mask (B, L) True = real token -> hidden (B, S, C) after the final norm.

        With a cache, ids are the S new tokens and mask covers all L = cache.length + S. mask None: all are real.
        """
        config, S = self.config, ids.size(1)
        if mask is None and (cache is not None or config.attention_windows):
            mask = ids.new_ones((ids.size(0), S + (cache.length if cache else 0)), dtype=torch.bool)
        if mask is None:
            positions = torch.arange(S, device=ids.device).expand_as(ids)  # (B, S)
            visible = dict.fromkeys([None])
        else:
            positions = position_ids(mask)[:, -S:]
            ids = ids.masked_fill(~mask[:, -S:], 0)  # [PAD] may lie outside the embedding
            windows = {config.window(layer) for layer in range(config.n_layer)}
            visible = {window: attention_mask(mask, S, window) for window in windows}
        x = self.embedding(ids)  # (B, S, C)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(positions)
        else:
            rotary = rotary_tables(config, positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, visible[config.window(layer)], rotary, cache, layer)
        if cache is not None:
            cache.length += S
        return self.norm(x)


# ------------------------------------------------------------------------------------------------------ the two models
class GPT(nn.Module):
    """The language model. Calling it gives hidden states; logits are made only where somebody needs them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        nn.init.normal_(self.lm_head.weight, std=init_std(config))
        if config.head_bias:
            nn.init.zeros_(self.lm_head.bias)
        if config.tied_head:
            self.lm_head.weight = self.transformer.embedding.weight
        self.register_buffer("forbidden", None, persistent=False)  # (V,) bool, or None: every id may be emitted

    def forbid(self, pad_id: int, num_ids: int) -> "GPT":
        """Take [PAD], and the rows of a padded embedding that no token owns (ids >= num_ids), out of the distribution.

        Pythia's head has 50,304 rows and [PAD] would be row 50,277: a model that samples it cuts its own response.
        """
        ids = torch.arange(self.config.vocab_size, device=self.lm_head.weight.device)
        forbidden = (ids >= num_ids) | (ids == pad_id)
        self.forbidden = forbidden if forbidden.any() else None
        return self

    @property
    def head_bias(self) -> Tensor | None:
        """(V,) what is added to hidden @ lm_head.weight.T: the head's own bias, -inf at forbidden ids."""
        if self.forbidden is None:
            return self.lm_head.bias
        bias = (
            self.lm_head.bias if self.lm_head.bias is not None else torch.zeros_like(self.forbidden, dtype=torch.float)
        )
        return bias.masked_fill(self.forbidden, -torch.inf)

    def forward(self, ids: Tensor, mask: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """ids (B, S), mask (B, L) -> hidden (B, S, C) after the final norm; see `Transformer.forward`."""
        return self.transformer(ids, mask, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., C) -> logits (..., V), -inf at forbidden ids."""
        return F.linear(hidden, self.lm_head.weight, self.head_bias)


class ScalarModel(nn.Module):
    """The same trunk with one number a token: the reward model, and the value model that starts as its copy. [N+ 22]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.score = nn.Linear(config.d_model, 1)
        # [N+ 11] N(0, 1 / sqrt(d_model + 1)): the first rewards are of order one on normed hidden states
        nn.init.normal_(self.score.weight, std=1 / math.sqrt(config.d_model + 1))
        nn.init.zeros_(self.score.bias)
        # [N+ 15] subtracted from every score, so that the demonstrations have mean 0; saved with the weights
        self.register_buffer("reward_bias", torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """ids (B, L), mask (B, L) -> scores (B, L) in float32, one at every token; only some of them mean anything."""
        hidden = self.transformer(ids, mask)
        with torch.autocast(hidden.device.type, enabled=False):  # two bf16 scores that differ by 0.4% would be a tie
            return self.score(hidden.float()).squeeze(-1) - self.reward_bias
