"""What is known of each model family in the Hugging Face layout: one `Family` each.

That is how config.json calls the settings of `GPTConfig`, what it doesn't say, how tensors are
called, and the order of q, k and v. layout.py reads and writes by it. To add a family, add it to
FAMILIES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kernels.attention import RotaryScaling
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.t5 import T5Config

# integer settings: the least and the largest, far above any model, far below what overflows
RANGES: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24), "n_ctx": (1, 2**28), "d_model": (1, 2**18), "n_layer": (1, 2**12),
    "n_head": (1, 2**12), "n_kv_head": (1, 2**12), "d_head": (1, 2**18), "d_mlp": (1, 2**20),
    "rotary_dim": (2, 2**18), "adapter_size": (1, 2**18), "n_decoder_layer": (1, 2**12),
    "num_buckets": (4, 2**16), "max_distance": (1, 2**28), "attention_divisor": (1, 2**18),
}  # fmt: skip


@dataclass(frozen=True)
class ConfigFile:
    """A config.json, or an object within it."""

    fields: dict[str, Any]
    where: str | Path

    def error(self, message: str) -> InputError:
        return InputError(f"{self.where}: {message}")

    def get(self, name: str, kind: type, default: Any = ..., least: float = 0, most: float = math.inf) -> Any:
        """A field of this type and range, or InputError. null is as if it were absent.

        default: None for a field that may be absent; without a default it must be there.
        """
        value: Any = self.fields.get(name)
        if value is None and default is not ...:
            if default is None:
                return None
            value = default
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        is_valid = type(value) is kind
        if is_valid and kind in (int, float):
            is_valid = least <= value <= most and value < math.inf
        if is_valid:
            return value
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
        wanted = names[kind]
        wanted += f" of at least {least}" if least else ""
        wanted += f" and at most {most}" if most < math.inf else ""
        raise self.error(f"{name} must be {wanted}, not {value!r:.80}.")


Setting = str | tuple[str, Any]  # field of config.json; with transformers' default, if it has one


@dataclass(frozen=True, kw_only=True)
class Family:
    transformers_class: str
    config_class: type[GPTConfig] = GPTConfig
    settings: dict[str, Setting]
    """of GPTConfig, and what config.json calls them"""
    fixed: dict[str, Any]
    """settings of GPTConfig that config.json doesn't have"""
    constants: dict[str, Any] = field(default_factory=dict)
    """fields of config.json that are always the same"""
    read: Callable[[ConfigFile, Any], dict[str, Any]] = lambda file, config: {}
    """the config so far -> what else config.json says"""
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    """its inverse: further fields of config.json"""
    prefix: str = "transformer."
    """of all tensors but the head's"""
    modules: dict[str, str]
    """our module: theirs; [qkv] stands for three tensors that we store as one"""
    qkv_groups: int | None = 1
    """number of groups of rows in a fused q, k, v, each with a share of all three; None: one per
    head. Ours has one group: q of all heads, then k, then v."""
    qkv_order: str = "qkv"
    """within a group"""
    transposed: bool = False
    """the weights of the blocks' linear layers are (in, out)"""
    fused_gate: str | None = None
    """the name of one tensor per block that holds the MLP's gate, then up; None: there are two"""


# ----------------------------------------------------------------- rotary positions in config.json
LENGTH = "original_max_position_embeddings"
SCALING: dict[str, dict[str, str]] = {  # rope_type: setting of RotaryScaling: field of rope_scaling
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "original_n_ctx": LENGTH, "few_turns": "low_freq_factor",
        "many_turns": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor", "original_n_ctx": LENGTH, "few_turns": "beta_slow",
        "many_turns": "beta_fast", "attention_factor": "attention_factor",
        "whole_pairs": "truncate",
    },
}  # fmt: skip
YARN_SCALES = ("mscale", "mscale_all_dim")


def read_rotary(
    file: ConfigFile,
    kinds: tuple[str, ...],
    share_names: tuple[str, ...],
    base_names: tuple[str, ...],
) -> tuple[float | None, float, ConfigFile | None]:
    """The fraction of a head's channels that is rotated, the base of the angles, and rope_scaling.

    transformers 4 writes numbers of their own, and rope_scaling; transformers 5 rope_parameters.
    """
    name = "rope_parameters" if file.fields.get("rope_parameters") else "rope_scaling"
    rope = file.fields.get(name) or {}
    kind = ""
    if isinstance(rope, dict):
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {*SCALING.get(kind, {}).values(), *(YARN_SCALES if kind == "yarn" else ())}
    if kind not in kinds or {key for key, value in rope.items() if value is not None} - known:
        only = f"only rope_type {' or '.join(kinds)}"
        raise file.error(f"{name} = {rope!r:.200} isn't implemented, {only}.")

    def number(names: tuple[str, ...], least: float) -> float | None:
        found = [fields.get(name) for fields in (file.fields, rope) for name in names]
        said = [value for value in found if value is not None]
        is_number = all(type(value) in (int, float) and least <= value < 2**63 for value in said)
        if not is_number or len(set(said)) > 1:
            wanted = f"one number of at least {least}"
            raise file.error(f"{' or '.join(names)} must be {wanted}, not {said!r:.80}.")
        return float(said[0]) if said else None

    share, base = number(share_names, 0), number(base_names, 1)
    scaling = ConfigFile({**rope, "rope_type": kind}, f"{file.where}: {name}")
    return share, 1e4 if base is None else base, scaling if kind != "default" else None


def read_scaling(rope: ConfigFile, n_ctx: int) -> RotaryScaling:
    """rope_scaling as transformers reads it; InputError for numbers that make no sense."""

    def number(name: str, default: Any = ...) -> float:
        return rope.get(name, float, default, least=1e-6, most=2.0**63)

    def yarn_factor(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    kind, factor = rope.fields["rope_type"], number("factor")
    if kind == "linear":
        return RotaryScaling(kind=kind, factor=factor)
    found: dict[str, Any] = {"original_n_ctx": int(number(LENGTH, n_ctx))}
    if kind == "llama3":
        found["few_turns"] = number("low_freq_factor")
        found["many_turns"] = number("high_freq_factor")
        if not found["few_turns"] < found["many_turns"]:
            raise rope.error("low_freq_factor must be below high_freq_factor.")
    else:
        found["few_turns"] = number("beta_slow", 1.0)
        found["many_turns"] = number("beta_fast", 32.0)
        usual = yarn_factor(1.0)
        if all(rope.fields.get(name) for name in YARN_SCALES):
            usual = yarn_factor(number("mscale")) / yarn_factor(number("mscale_all_dim"))
        found["attention_factor"] = number("attention_factor", usual)
        found["whole_pairs"] = rope.get("truncate", bool, True)
    return RotaryScaling(kind=kind, factor=factor, **found)


def write_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    """The inverse of `read_scaling`."""
    fields = {theirs: getattr(scaling, ours) for ours, theirs in SCALING[scaling.kind].items()}
    return {"rope_type": scaling.kind} | fields


# -------------------------------------------------------------------------------- GPT-2 and GPT-Neo
GPT2_SETTINGS: dict[str, Setting] = {
    "vocab_size": "vocab_size", "n_ctx": "n_positions", "d_model": "n_embd", "n_layer": "n_layer",
    "n_head": "n_head", "d_mlp": ("n_inner", None), "norm_eps": ("layer_norm_epsilon", 1e-5),
    "activation": ("activation_function", "gelu_new"), "tied_head": ("tie_word_embeddings", True),
}  # fmt: skip
GPT2 = Family(
    transformers_class="GPT2LMHeadModel",
    settings=GPT2_SETTINGS | {"scale_attention": ("scale_attn_weights", True)},
    fixed={"positions": "learned", "parallel_residual": False},
    # [N+ 7] their default is 0.1
    constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    modules={
        "transformer.embedding": "wte", "transformer.positions": "wpe", "transformer.blocks": "h",
        "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        "transformer.norm": "ln_f", "lm_head": "lm_head",
    },
    transposed=True,
)  # fmt: skip


def read_neo(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """attention_layers names each layer's kind; attention_types is [[kinds, repeats], ...]."""
    window = file.get("window_size", int, 256, 1, RANGES["n_ctx"][1])
    types, layers = file.fields.get("attention_types"), file.fields.get("attention_layers")
    if types is None:
        types = [[["global", "local"], 12]] if layers is None else [[layers, 1]]
    try:
        repeated = (kind for group, times in types for _ in range(times) for kind in group)
        kinds = [*islice(repeated, config.n_layer + 1)]  # however often it says to repeat
    except (TypeError, ValueError):  # not of that form
        kinds = []
    is_known = len(kinds) == config.n_layer and all(kind in ("global", "local") for kind in kinds)
    if not is_known or layers not in (None, kinds):
        raise file.error(
            f"attention_types {types!r:.80} and attention_layers {layers!r:.80} must name the "
            f"kinds of {config.n_layer} layers, global or local, and agree."
        )
    return {"attention_windows": tuple(window if kind == "local" else None for kind in kinds)}


def write_neo(config: GPTConfig) -> dict[str, Any]:
    kinds = ["local" if window else "global" for window in config.windows]
    window = next(filter(None, config.windows), 256)
    return {"attention_types": [[kinds, 1]], "window_size": window}


GPT_NEO = Family(
    transformers_class="GPTNeoForCausalLM",
    settings=GPT2_SETTINGS | {
        "n_ctx": "max_position_embeddings", "d_model": "hidden_size", "n_layer": "num_layers",
        "n_head": "num_heads", "d_mlp": ("intermediate_size", None),
    },
    fixed=GPT2.fixed | {"scale_attention": False, "qkv_bias": False},
    read=read_neo,
    write=write_neo,
    modules=GPT2.modules | {
        "attention.qkv": "attn.attention.[qkv]_proj", "attention.out": "attn.attention.out_proj"
    },
)  # fmt: skip


# ----------------------------------------------------------------------------- GPT-NeoX, CodeGen, GPT-J
def read_neox(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    names = ("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")
    share, base, _ = read_rotary(file, ("default",), *names)
    # rounded down, as transformers does
    rotary_dim = int(config.head_width * (0.25 if share is None else share))
    return {"rotary_dim": rotary_dim, "rotary_base": base}


def write_neox(config: GPTConfig) -> dict[str, Any]:
    share = config.rotary_dim / config.head_width
    if int(config.head_width * share) < config.rotary_dim:  # would not be the same when read again
        share = math.nextafter(share, math.inf)
    return {"rotary_pct": share, "rotary_emb_base": config.rotary_base}


GPT_NEOX = Family(
    transformers_class="GPTNeoXForCausalLM",
    settings={
        "vocab_size": "vocab_size", "n_ctx": "max_position_embeddings", "d_model": "hidden_size",
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "d_mlp": ("intermediate_size", None), "activation": ("hidden_act", "gelu"),
        "norm_eps": ("layer_norm_eps", 1e-5), "tied_head": ("tie_word_embeddings", False),
        "parallel_residual": ("use_parallel_residual", True),
        "attention_out_bias": ("attention_bias", True), "qkv_bias": ("attention_bias", True),
    },
    fixed={"positions": "rotary_half"},
    read=read_neox,
    write=write_neox,
    prefix="gpt_neox.",
    modules={
        "transformer.embedding": "embed_in", "transformer.blocks": "layers",
        "norm1": "input_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense", "norm2": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        "transformer.norm": "final_layer_norm",
        # transformers 5 calls it lm_head in memory; in files it is embed_out, which 4 and 5 read
        "lm_head": "embed_out",
    },
    qkv_groups=None,
)  # fmt: skip
CODEGEN = Family(
    transformers_class="CodeGenForCausalLM",
    settings=GPT2_SETTINGS | {
        "rotary_dim": "rotary_dim", "tied_head": ("tie_word_embeddings", False)
    },
    fixed={
        "positions": "rotary_interleaved", "shared_norm": True, "head_bias": True,
        "qkv_bias": False, "attention_out_bias": False,
    },
    modules=GPT2.modules | {
        "attention.qkv": "attn.qkv_proj", "attention.out": "attn.out_proj",
        "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
    },
    qkv_groups=4,  # one per core of the TPU it was trained on
    qkv_order="qvk",
)  # fmt: skip
GPTJ = replace(
    CODEGEN,
    transformers_class="GPTJForCausalLM",
    modules=CODEGEN.modules | {"attention.qkv": "attn.[qkv]_proj"},
    qkv_groups=1,
    qkv_order="qkv",
)


# ----------------------------------------------------------------------------------------------- T5
def read_t5(file: ConfigFile, config: T5Config) -> dict[str, Any]:
    """The activation that feed_forward_proj names, and whether the head is the embedding.

    The first T5s scale what a tied head reads, version 1.1 has a head of its own. transformers 5
    writes tie_word_embeddings: true for both, and tells them apart by scale_decoder_outputs.
    """
    projection = config.activation
    gate, _, activation = projection.rpartition("-")
    if gate not in ("", "gated"):
        raise file.error(f"feed_forward_proj {projection!r:.80} isn't gated-ACTIVATION or ACTIVATION.")
    if projection == "gated-gelu":
        activation = "gelu_new"  # which is how T5 1.1 has been trained
    exact = config.num_buckets // 2  # of the decoder; the encoder has half as many on each side
    file.get("relative_attention_max_distance", int, config.max_distance, exact + 1)
    is_scaled = file.get("scale_decoder_outputs", bool, config.tied_head)
    if is_scaled and not config.tied_head:
        raise file.error("scale_decoder_outputs needs tie_word_embeddings: both true, or both false.")
    return {
        "gated_mlp": gate == "gated",
        "activation": activation,
        "tied_head": is_scaled,
        "head_scale": config.d_model**-0.5 if is_scaled else 1.0,
    }


def write_t5(config: T5Config) -> dict[str, Any]:
    projection = f"gated-{config.activation}" if config.gated_mlp else config.activation
    return {
        "feed_forward_proj": "gated-gelu" if projection == "gated-gelu_new" else projection,
        # transformers 5 gives its cache as many layers as the encoder has
        "use_cache": config.num_decoder_blocks <= config.n_layer,
    }


RELATIVE = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5 = Family(
    transformers_class="T5ForConditionalGeneration",
    config_class=T5Config,
    settings={
        "vocab_size": "vocab_size", "d_model": "d_model", "n_layer": "num_layers",
        "n_decoder_layer": ("num_decoder_layers", None), "n_head": "num_heads",
        "d_head": ("d_kv", 64), "d_mlp": "d_ff", "activation": ("feed_forward_proj", "relu"),
        "norm_eps": ("layer_norm_epsilon", 1e-6), "tied_head": ("tie_word_embeddings", True),
        "num_buckets": ("relative_attention_num_buckets", 32),
        "max_distance": ("relative_attention_max_distance", 128),
        "start_id": ("decoder_start_token_id", 0),
        # what the tokenizers of T5 and CodeT5 put around every text
        "query_start_id": ("bos_token_id", None), "query_end_id": ("eos_token_id", None),
    },
    fixed={},  # T5Config has them
    constants={"is_encoder_decoder": True, "dropout_rate": 0.0},  # [N+ 7] their default is 0.1
    read=read_t5,
    write=write_t5,
    prefix="",
    modules={
        "transformer.embedding": "shared", "transformer.blocks": "{stack}.block",
        "norm1": "layer.0.layer_norm", "attention.qkv": "layer.0.SelfAttention.[qkv]",
        "attention.out": "layer.0.SelfAttention.o", "cross_norm": "layer.1.layer_norm",
        "cross.q": "layer.1.EncDecAttention.q", "cross.kv": "layer.1.EncDecAttention.[kv]",
        "cross.out": "layer.1.EncDecAttention.o", "norm2": "{mlp}.layer_norm",
        "mlp.gate": "{mlp}.DenseReluDense.wi_0", "mlp.up": "{mlp}.DenseReluDense.{wi}",
        "mlp.down": "{mlp}.DenseReluDense.wo", "transformer.norm": "decoder.final_layer_norm",
        "transformer.encoder_norm": "encoder.final_layer_norm",
        "transformer.encoder_bias": f"encoder.{RELATIVE}",
        "transformer.decoder_bias": f"decoder.{RELATIVE}", "lm_head": "lm_head",
    },
)  # fmt: skip


# -------------------------------------------------------------------- Llama and its descendants
LAYER_KINDS = ("full_attention", "sliding_attention")


def read_llama(
    file: ConfigFile, config: GPTConfig, window: int | None = None, kinds: list | None = None
) -> dict[str, Any]:
    """Rotary positions and windows; `kinds` are the layers' where layer_types doesn't say."""
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
    has_window = file.fields.get("sliding_window", 4096) is not None  # null: none
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
    """Some of a head's channels may be rotated, and all layers have the window."""
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


# -------------------------------------------------------------------------------------------- Gemma
def read_gemma2(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """Every second layer has a window, from the first on."""
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.n_layer)]
    caps = {
        "attention_cap": read_cap(file, "attn_logit_softcapping", 50.0),
        "logit_cap": read_cap(file, "final_logit_softcapping", 30.0),
    }
    scale = {"embedding_scale": config.d_model**0.5}
    return read_llama(file, config, sliding_window(file), kinds) | caps | scale


def read_cap(file: ConfigFile, name: str, default: float | None) -> float | None:
    if name in file.fields and file.fields[name] is None:  # null: none
        return None
    return file.get(name, float, default, least=1e-3)


def write_gemma2(config: GPTConfig) -> dict[str, Any]:
    return write_llama(config) | write_gemma(config) | {"attn_logit_softcapping": config.attention_cap}


def write_gemma(config: GPTConfig) -> dict[str, Any]:
    is_tanh = config.activation == "gelu_new"
    return {
        "layer_types": [LAYER_KINDS[window is not None] for window in config.windows],
        # transformers fails without one, also if no layer has it
        "sliding_window": next(filter(None, config.windows), 4096),
        "final_logit_softcapping": config.logit_cap,
        # vLLM knows this name alone
        "hidden_activation": "gelu_pytorch_tanh" if is_tanh else config.activation,
    }


def read_gemma3(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """Every sixth layer has no window; those with one have a rotary base of their own.

    transformers 4 has rope_local_base_freq for it, transformers 5 rope_parameters for each kind.
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

# -------------------------------------------------------------------------------------- all of them
FAMILIES = {  # by model_type in config.json
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "codegen": CODEGEN,
    "gptj": GPTJ,
    "t5": T5,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
}
