"""Gemma 2 and Gemma 3."""

from dataclasses import replace
from typing import Any

from nanorlhf.config import GPTConfig
from nanorlhf.pretrained.families.llama import (
    BIAS,
    LAYER_KINDS,
    LLAMA,
    LLAMA_SETTINGS,
    read_llama,
    sliding_window,
    write_llama,
)
from nanorlhf.pretrained.family import ConfigFile, read_rotary


def read_gemma2(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """Every second layer has a window, starting with the first."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.n_layer)]
    caps = {
        "attention_cap": read_cap(file, "attn_logit_softcapping", 50.0),
        "logit_cap": read_cap(file, "final_logit_softcapping", 30.0),
    }
    scale = {"embedding_scale": config.d_model**0.5}
    return read_llama(file, config, sliding_window(file), kinds) | caps | scale


def read_cap(file: ConfigFile, name: str, default: float | None) -> float | None:
    if name in file.fields and file.fields[name] is None:  # null: no cap
        return None
    return file.get(name, float, default, least=1e-3)


def write_gemma2(config: GPTConfig) -> dict[str, Any]:
    return write_llama(config) | write_gemma(config) | {"attn_logit_softcapping": config.attention_cap}


def write_gemma(config: GPTConfig) -> dict[str, Any]:
    is_tanh = config.activation == "gelu_new"
    return {
        "layer_types": [LAYER_KINDS[window is not None] for window in config.windows],
        # transformers fails without a window, even if no layer has one
        "sliding_window": next(filter(None, config.windows), 4096),
        "final_logit_softcapping": config.logit_cap,
        # the only name that vLLM accepts
        "hidden_activation": "gelu_pytorch_tanh" if is_tanh else config.activation,
    }


def read_gemma3(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """Every sixth layer has no window; layers with a window have a separate rotary base.

    It is rope_local_base_freq in transformers 4, and in transformers 5 rope_parameters per kind of layer.
    """
    period = file.get("sliding_window_pattern", int, 6, 1)
    full, local = LAYER_KINDS
    kinds = [local if i % period else full for i in range(1, config.n_layer + 1)]
    if file.fields.get("attn_logit_softcapping") is not None:
        raise file.error("attn_logit_softcapping isn't implemented for Gemma 3.")
    by_kind = file.fields.get("rope_parameters") or {}
    is_by_kind = isinstance(by_kind, dict) and not set(by_kind) - {full, local}
    if not is_by_kind or not all(isinstance(rope, dict | None) for rope in by_kind.values()):
        raise file.error(f"rope_parameters = {by_kind!r:.200} must be by kind, {full} and {local}.")

    def of_kind(kind: str, base_name: str, base: float) -> ConfigFile:
        rope = by_kind.get(kind) or {}
        has_base = file.fields.get(base_name) is not None or "rope_theta" in rope
        more = {} if has_base else {base_name: base}
        return ConfigFile(file.fields | {"rope_parameters": rope} | more, file.where)

    local_file = of_kind(local, "rope_local_base_freq", 1e4)
    local_file.fields.update(rope_scaling=None, rope_theta=None)
    _, local_base, _ = read_rotary(local_file, ("default",), (), ("rope_local_base_freq", "rope_theta"))
    full_file = of_kind(full, "rope_theta", 1e6)
    return read_llama(full_file, config, sliding_window(file), kinds) | {
        "local_rotary_base": local_base,
        "logit_cap": read_cap(file, "final_logit_softcapping", None),
        "embedding_scale": config.d_model**0.5,
    }


def write_gemma3(config: GPTConfig) -> dict[str, Any]:
    local_base = config.local_rotary_base or config.rotary_base
    return write_llama(config) | write_gemma(config) | {"rope_local_base_freq": local_base}


GEMMA2 = replace(
    LLAMA,
    transformers_class="Gemma2ForCausalLM",
    settings=LLAMA_SETTINGS | {
        "d_head": ("head_dim", 256), "activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "attention_divisor": ("query_pre_attn_scalar", 256), "tied_head": ("tie_word_embeddings", True),
        "attention_out_bias": BIAS, "qkv_bias": BIAS,
    },
    fixed=LLAMA.fixed | {"norm": "rms_offset", "post_norm": True, "mlp_bias": False},
    read=read_gemma2,
    write=write_gemma2,
    modules=LLAMA.modules | {
        "post_norm1": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    },
)  # fmt: skip
GEMMA3 = replace(
    GEMMA2,
    transformers_class="Gemma3ForCausalLM",
    fixed=GEMMA2.fixed | {"qk_norm": True},
    read=read_gemma3,
    write=write_gemma3,
)

FAMILIES = {
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
}
