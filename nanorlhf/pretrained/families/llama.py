"""Llama and its descendants: Mistral, Qwen, OLMo 2, Phi-3."""

from dataclasses import replace
from typing import Any

from nanorlhf.config import GPTConfig
from nanorlhf.pretrained.families.neox import write_neox
from nanorlhf.pretrained.family import (
    RANGES,
    SCALING,
    ConfigFile,
    Family,
    Setting,
    read_rotary,
    read_scaling,
    write_scaling,
)

LAYER_KINDS = ("full_attention", "sliding_attention")


def read_llama(
    file: ConfigFile, config: GPTConfig, window: int | None = None, kinds: list | None = None
) -> dict[str, Any]:
    """Read rotary positions and windows; `kinds` are the kinds of the layers if layer_types is missing."""
    if config.n_head % config.kv_heads:
        heads = f"num_attention_heads {config.n_head}"
        raise file.error(f"num_key_value_heads {config.kv_heads} must divide {heads}.")
    usual = kinds or [LAYER_KINDS[window is not None]] * config.n_layer
    kinds = usual if file.fields.get("layer_types") is None else file.fields["layer_types"]
    is_list = isinstance(kinds, list) and len(kinds) == config.n_layer
    if not is_list or any(kind not in LAYER_KINDS for kind in kinds):
        layers = f"the kinds of {config.n_layer} layers, {' or '.join(LAYER_KINDS)}"
        raise file.error(f"layer_types {kinds!r:.80} must name {layers}.")
    names = ("partial_rotary_factor",), ("rope_theta",)
    share, base, rope = read_rotary(file, (*SCALING,), *names)
    if share not in (None, 1.0):
        raise file.error(f"partial_rotary_factor = {share} isn't implemented.")
    return {
        "attention_windows": tuple(window if kind != "full_attention" else None for kind in kinds),
        "rotary_dim": config.head_width,
        "rotary_base": base,
        "rotary_scaling": rope and read_scaling(rope, config.n_ctx),
    }


def write_llama(config: GPTConfig) -> dict[str, Any]:
    scaling = config.rotary_scaling
    return {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling and write_scaling(scaling),
        "sliding_window": next(filter(None, config.windows), None),
    }


def read_mistral(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    return read_llama(file, config, sliding_window(file))


def sliding_window(file: ConfigFile) -> int | None:
    has_window = file.fields.get("sliding_window", 4096) is not None  # null: no window
    return file.get("sliding_window", int, 4096 if has_window else None, 1, RANGES["n_ctx"][1])


def read_qwen(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    window = sliding_window(file)
    if not file.get("use_sliding_window", bool, False):
        window = None
    num_full = min(file.get("max_window_layers", int, 28), config.n_layer)
    kinds = ["full_attention"] * num_full + ["sliding_attention"] * (config.n_layer - num_full)
    return read_llama(file, config, window, kinds)


def write_qwen(config: GPTConfig) -> dict[str, Any]:
    return write_llama(config) | {
        "use_sliding_window": any(config.windows),
        "layer_types": [LAYER_KINDS[window is not None] for window in config.windows],
    }


LLAMA_SETTINGS: dict[str, Setting] = {
    "vocab_size": "vocab_size", "n_ctx": "max_position_embeddings", "d_model": "hidden_size",
    "d_head": ("head_dim", None), "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads", "d_mlp": "intermediate_size",
    "activation": ("hidden_act", "silu"), "norm_eps": ("rms_norm_eps", 1e-6),
    "tied_head": ("tie_word_embeddings", False),
}  # fmt: skip
BIAS = ("attention_bias", False)
NO_BIAS = {"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False}
LLAMA = Family(
    transformers_class="LlamaForCausalLM",
    settings=LLAMA_SETTINGS | {
        "n_kv_head": ("num_key_value_heads", None), "attention_out_bias": BIAS, "qkv_bias": BIAS,
        "mlp_bias": ("mlp_bias", False),
    },
    fixed={
        "positions": "rotary_half", "parallel_residual": False, "norm": "rms", "gated_mlp": True
    },
    read=read_llama,
    write=write_llama,
    prefix="model.",
    modules={
        "transformer.embedding": "embed_tokens", "transformer.blocks": "layers",
        "norm1": "input_layernorm", "attention.qkv": "self_attn.[qkv]_proj",
        "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj", "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
        "transformer.norm": "norm", "lm_head": "lm_head",
    },
)  # fmt: skip
MISTRAL = replace(
    LLAMA,
    transformers_class="MistralForCausalLM",
    settings=LLAMA_SETTINGS,
    fixed=LLAMA.fixed | NO_BIAS,
    read=read_mistral,
)
QWEN2 = replace(
    LLAMA,
    transformers_class="Qwen2ForCausalLM",
    settings=LLAMA_SETTINGS,
    fixed=LLAMA.fixed | NO_BIAS | {"qkv_bias": True},
    read=read_qwen,
    write=write_qwen,
)
QWEN3 = replace(
    QWEN2,
    transformers_class="Qwen3ForCausalLM",
    settings=LLAMA_SETTINGS | {"d_head": ("head_dim", 128), "attention_out_bias": BIAS, "qkv_bias": BIAS},
    fixed=LLAMA.fixed | {"qk_norm": True, "mlp_bias": False},
)
OLMO2 = replace(
    LLAMA,
    transformers_class="Olmo2ForCausalLM",
    settings=LLAMA_SETTINGS | {
        "n_kv_head": ("num_key_value_heads", None), "norm_eps": ("rms_norm_eps", 1e-5),
        "attention_out_bias": BIAS, "qkv_bias": BIAS,
    },
    fixed=LLAMA.fixed | {
        "pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_joint": True, "mlp_bias": False
    },
    modules=LLAMA.modules | {
        "post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"
    },
)  # fmt: skip


def read_phi3(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """Read rotary positions, perhaps for only some of a head's channels, and one window for all layers."""
    names = ("partial_rotary_factor",), ("rope_theta",)
    share, base, _ = read_rotary(file, ("default",), *names)
    window = None if file.fields.get("sliding_window") is None else sliding_window(file)
    return {
        "attention_windows": (window,) * config.n_layer,
        "rotary_dim": int(config.head_width * (1.0 if share is None else share)),
        "rotary_base": base,
    }


def write_phi3(config: GPTConfig) -> dict[str, Any]:
    neox = write_neox(config)
    return {
        "partial_rotary_factor": neox["rotary_pct"],
        "rope_theta": config.rotary_base,
        "sliding_window": config.windows[0],
    }


PHI3 = replace(
    LLAMA,
    transformers_class="Phi3ForCausalLM",
    settings=LLAMA_SETTINGS | {
        "n_kv_head": ("num_key_value_heads", None), "norm_eps": ("rms_norm_eps", 1e-5)
    },
    fixed=LLAMA.fixed | NO_BIAS,
    read=read_phi3,
    write=write_phi3,
    modules=LLAMA.modules | {"attention.qkv": "self_attn.qkv_proj"},
    fused_gate="mlp.gate_up_proj",
)  # fmt: skip

FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "phi3": PHI3,
}
