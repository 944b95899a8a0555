"""Model settings: GPT-2, Pythia, Llama, Qwen, Gemma and others are instances of `GPTConfig`."""

from dataclasses import dataclass

from torch import Tensor

from kernels.attention import RotaryScaling, rotary_tables

RotarySettings = tuple[float, RotaryScaling | None]  # base and scaling
# cos and sin, (B, S, 1, rotary_dim / 2) each
RotaryTables = dict[RotarySettings, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab_size: int
    """rows of the embedding; the id of [PAD] may be outside"""
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
    """layer, rms (divides by the root mean square, without mean or bias), or rms_offset (rms with
    1 + weight instead of weight, Gemma)"""
    pre_norm: bool = True
    """norm the input of attention and of the MLP"""
    post_norm: bool = False
    """norm their output before it is added to the residual stream (Gemma; OLMo 2: no pre_norm)"""
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
    """attention logits are divided by the square root of this (Gemma); None: of D"""
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
    """family, which sets the names on disk: a key of pretrained.family.FILES"""

    @property
    def num_decoder_blocks(self) -> int:
        """Number of decoder blocks, after an encoder's n_layer (t5.py); 0 for a GPT."""
        return 0

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.n_head

    @property
    def qkv_rows(self) -> list[int]:
        """Rows of q, k and v in attention's joint projection."""
        return [heads * self.head_width for heads in (self.n_head, self.kv_heads, self.kv_heads)]

    @property
    def windows(self) -> list[int | None]:
        """Attention window of each layer."""
        return [*(self.attention_windows or [None] * self.n_layer)]

    @property
    def rotary_settings(self) -> list[RotarySettings]:
        """Rotary base and scaling of each layer."""
        usual = local = self.rotary_base, self.rotary_scaling
        if self.local_rotary_base is not None:
            local = self.local_rotary_base, None
        return [usual if window is None else local for window in self.windows]

    def rotary_tables(self, positions: Tensor) -> RotaryTables:
        """Compute cos and sin at positions (B, S), by base and scaling; {} without rotary ones."""
        if not self.positions.startswith("rotary"):
            return {}
        settings = set(self.rotary_settings)
        return {each: rotary_tables(positions, self.rotary_dim, *each) for each in settings}
