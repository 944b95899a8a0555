"""Model families in the Hugging Face layout: field names in config.json, tensor names, tensor layouts.

The differences are tables: the fields of config.json, the tensor names, and the row order of q, k and v. Llama's
descendants share one column of them. Nothing is dropped silently: a setting that our model doesn't have is an error.
"""

import math
import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.model import GPTConfig, RotaryScaling
from nanorlhf.t5 import T5Config

# ---------------------------------------------------------------------------------------- tables, one column per layout
# model_type in config.json: the class of transformers
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
FAMILIES = tuple(ARCHITECTURES)
LLAMA_LIKE = FAMILIES[5:]
TRUNK_PREFIX = ("transformer.", "transformer.", "gpt_neox.", "transformer.", "", "model.")

# fmt: off
# field of GPTConfig: field of config.json
FIELDS = {
    "vocab_size": ("vocab_size",) * 6,
    "n_ctx": ("n_positions", "max_position_embeddings", "max_position_embeddings", "n_positions", None,
              "max_position_embeddings"),
    "d_model": ("n_embd", "hidden_size", "hidden_size", "n_embd", "d_model", "hidden_size"),
    "n_layer": ("n_layer", "num_layers", "num_hidden_layers", "n_layer", "num_layers", "num_hidden_layers"),
    "n_head": ("n_head", "num_heads", "num_attention_heads", "n_head", "num_heads", "num_attention_heads"),
    "d_mlp": ("n_inner", "intermediate_size", "intermediate_size", "n_inner", "d_ff", "intermediate_size"),
    "activation": ("activation_function", "activation_function", "hidden_act", "activation_function",
                   "feed_forward_proj", "hidden_act"),
    "norm_eps": ("layer_norm_epsilon", "layer_norm_epsilon", "layer_norm_eps", "layer_norm_epsilon",
                 "layer_norm_epsilon", "rms_norm_eps"),
    "tied_head": ("tie_word_embeddings",) * 6,
}
# transformers' defaults where config.json omits the field or holds null
DEFAULTS = {
    "activation": ("gelu_new", "gelu_new", "gelu", "gelu_new", "relu", "silu"),
    "norm_eps": (1e-5, 1e-5, 1e-5, 1e-5, 1e-6, 1e-6),
    "tied_head": (True, True, False, False, True, False),
}
# our module name: theirs
MODULES = {
    "transformer.embedding": ("wte", "wte", "embed_in", "wte", "shared", "embed_tokens"),
    "transformer.positions": ("wpe", "wpe", None, None, None, None),
    "transformer.blocks": ("h", "h", "layers", "h", None, "layers"),
    "transformer.norm": ("ln_f", "ln_f", "final_layer_norm", "ln_f", "decoder.final_layer_norm", "norm"),
    # below, the modules of a block; {q,k,v} are three tensors that we store as one
    "norm1": ("ln_1", "ln_1", "input_layernorm", "ln_1", "layer.0.layer_norm", "input_layernorm"),
    "attention.qkv": ("attn.c_attn", "attn.attention.{q,k,v}_proj", "attention.query_key_value", "attn.qkv_proj",
                      "layer.0.SelfAttention.{q,k,v}", "self_attn.{q,k,v}_proj"),
    "attention.q_norm": (None, None, None, None, None, "self_attn.q_norm"),
    "attention.k_norm": (None, None, None, None, None, "self_attn.k_norm"),
    "attention.out": ("attn.c_proj", "attn.attention.out_proj", "attention.dense", "attn.out_proj",
                      "layer.0.SelfAttention.o", "self_attn.o_proj"),
    "norm2": ("ln_2", "ln_2", "post_attention_layernorm", None, "{mlp}.layer_norm", "post_attention_layernorm"),
    "mlp.gate": (None, None, None, None, "{mlp}.DenseReluDense.wi_0", "mlp.gate_proj"),
    "mlp.up": ("mlp.c_fc", "mlp.c_fc", "mlp.dense_h_to_4h", "mlp.fc_in", "{mlp}.DenseReluDense.{wi}", "mlp.up_proj"),
    "mlp.down": ("mlp.c_proj", "mlp.c_proj", "mlp.dense_4h_to_h", "mlp.fc_out", "{mlp}.DenseReluDense.wo",
                 "mlp.down_proj"),
    # transformers 5 calls NeoX's head lm_head in memory; in files it is embed_out, which both 4 and 5 read
    "lm_head": ("lm_head", "lm_head", "embed_out", "lm_head", "lm_head", "lm_head"),
}
T5_MODULES = {  # what only an encoder-decoder has
    "transformer.encoder_norm": "encoder.final_layer_norm",
    "transformer.encoder_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "transformer.decoder_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "cross_norm": "layer.1.layer_norm",
    "cross.q": "layer.1.EncDecAttention.q",
    "cross.kv": "layer.1.EncDecAttention.{k,v}",
    "cross.out": "layer.1.EncDecAttention.o",
}
MODULES |= {ours: (None, None, None, None, theirs, None) for ours, theirs in T5_MODULES.items()}
# fmt: on
# suffix of model_type with adapters: transformers then refuses the model, instead of silently dropping the adapters
ADAPTER = "_adapter"
HEADS = ("lm_head.", "embed_out.", "score.", "reward_bias")  # tensors without the trunk prefix
# masks and rotary tables that older versions of transformers saved with the weights; we compute them
BUFFERS = re.compile(
    r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask|embed_positions)$"
    r"|rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)$"
    r"|^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"  # of T5's, never used
)
ACTIVATIONS = {  # HF's name: ours; gelu_new, gelu_fast and gelu_pytorch_tanh are the same formula
    **{"gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_new"),
}
# settings of transformers that our model doesn't have, each with the value that means "not used"
UNSUPPORTED: dict[str, Any] = {
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,  # T5's is true
    "is_causal": True,
    "pruned_heads": {},
    "quantization_config": None,
    "per_layer_config": None,
}
RMS = {"positions": "rotary_half", "parallel_residual": False, "norm": "rms", "gated_mlp": True}
ALWAYS: dict[str, dict[str, Any]] = {  # properties of a whole family, which have no field in config.json
    "gpt2": {"positions": "learned", "parallel_residual": False},
    "gpt_neo": {"positions": "learned", "parallel_residual": False, "scale_attention": False, "qkv_bias": False},
    "gpt_neox": {"positions": "rotary_half"},
    "codegen": {
        **{"positions": "rotary_interleaved", "shared_norm": True, "head_bias": True},
        **{"qkv_bias": False, "attention_out_bias": False},
    },
    "t5": {},  # T5Config has them
    "llama": RMS,
    "mistral": RMS | {"qkv_bias": False, "attention_out_bias": False, "mlp_bias": False},
    "qwen2": RMS | {"qkv_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "qwen3": RMS | {"qk_norm": True, "mlp_bias": False},
}


# the largest sizes that a model may ask for: far above any that exists, far below what overflows or never ends
LARGEST = {
    "vocab_size": 2**24, "n_ctx": 2**28, "d_model": 2**18, "n_layer": 2**12, "n_head": 2**12, "kv_heads": 2**12,
    "head_width": 2**18, "d_mlp": 2**20, "adapter_size": 2**18,
}  # fmt: skip
LARGEST_T5 = {"num_decoder_blocks": 2**12, "num_buckets": 2**16, "max_distance": 2**28}


def check_fits(config: GPTConfig, where: str | Path, num_weights: int) -> None:
    """InputError for sizes above LARGEST, and for a model of more than `num_weights` weights.

    That many are in its files, or have room in memory. Counted without biases and norms, from the numbers alone: no
    model is made.
    """
    num_decoder_blocks = config.num_decoder_blocks if isinstance(config, T5Config) else 0
    for name, largest in (LARGEST | LARGEST_T5 if num_decoder_blocks else LARGEST).items():
        if getattr(config, name) > largest:
            raise InputError(f"{where}: {name} is {getattr(config, name)}, more than {largest}: lower it.")
    attention = 2 * (config.n_head + config.kv_heads) * config.head_width  # rows of q, k, v, and columns of the output
    mlp = (3 if config.gated_mlp else 2) * config.d_mlp
    rows = config.vocab_size + (config.n_ctx if config.positions == "learned" else 0)
    rows += config.n_layer * (attention + mlp) + num_decoder_blocks * (2 * attention + mlp)
    count = rows * config.d_model
    if count > num_weights:
        raise InputError(
            f"{where}: a model of these sizes has {count:,} weights, room is for {num_weights:,}: fix them."
        )


# ------------------------------------------------------------------------------------------- tensors: names and layouts
def of_family(row: tuple, config: GPTConfig) -> Any:
    """The entry for the model's family in a row of the tables."""
    return row[column_of(config.architecture)]


def column_of(family: str) -> int:
    return min(FAMILIES.index(family), len(TRUNK_PREFIX) - 1)


def tensor_names(name: str, config: GPTConfig) -> list[str]:
    """Our tensor name -> its names in a file: one, or several if q, k and v are stored separately."""
    module, _, kind = name.rpartition(".")
    block = re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", module)
    if block:
        blocks, number = of_family(MODULES["transformer.blocks"], config), int(block[1])
        theirs = of_family(MODULES[block[2]], config)
        if isinstance(config, T5Config):  # with us the decoder's blocks follow the encoder's
            in_decoder = number >= config.n_layer
            number -= config.n_layer if in_decoder else 0
            blocks = f"{'decoder' if in_decoder else 'encoder'}.block"
            theirs = theirs.replace("{mlp}", "layer.2" if in_decoder else "layer.1")
            theirs = theirs.replace("{wi}", "wi_1" if config.gated_mlp else "wi")
        theirs = f"{blocks}.{number}.{theirs}"
    elif module in MODULES:
        theirs = of_family(MODULES[module], config)
    else:
        return [name]  # score and reward_bias have no counterpart
    prefix = of_family(TRUNK_PREFIX, config) if module.startswith("transformer") else ""
    before, braces, rest = theirs.partition("{")
    letters, _, after = rest.partition("}")
    return [f"{prefix}{before}{letter}{after}.{kind}" for letter in letters.split(",")]


def _qkv_order(config: GPTConfig) -> tuple[int, list[int]]:
    """Row order of a fused q, k, v in the file: the number of groups, and the order within a group.

    Ours is one group: q of all heads, then k, then v. NeoX has a group q, k, v per head. CodeGen has four groups, one
    per core of the TPU it was trained on, in the order q, v, k.
    """
    return {"gpt_neox": (config.n_head, [0, 1, 2]), "codegen": (4, [0, 2, 1])}.get(config.architecture, (1, [0, 1, 2]))


def _is_conv1d(name: str, config: GPTConfig) -> bool:
    """GPT-2 stores the weights of its blocks' linear layers transposed, (in, out)."""
    return config.architecture == "gpt2" and re.search(r"(qkv|out|up|down)\.weight$", name) is not None


def to_family(name: str, tensor: Tensor, config: GPTConfig) -> list[Tensor]:
    """Our tensor in the layout of its family: one part for each of `tensor_names`."""
    groups, order = _qkv_order(config)
    if "attention.qkv" in name and groups > 1:  # (3 * G * rows, ...) -> (G * 3 * rows, ...)
        split = tensor.view(3, groups, -1, *tensor.shape[1:])
        tensor = split[order].transpose(0, 1).reshape(tensor.shape)
    if _is_conv1d(name, config):
        tensor = tensor.t()
    if len(tensor_names(name, config)) == 1:
        return [tensor]
    return [part.clone() for part in tensor.split(config.qkv_rows[-len(tensor_names(name, config)) :])]  # or k and v


def from_family(name: str, parts: list[Tensor], config: GPTConfig, rows: slice = slice(None)) -> Tensor:
    """The inverse of `to_family`; of `rows` of our tensor only, so that of a mapped file only these are read.

    May be a view into the parts.
    """
    parts = [part.t() for part in parts] if _is_conv1d(name, config) else parts
    if not re.search(r"\.(qkv|kv)\.", name):
        return parts[0][rows] if parts[0].ndim else parts[0]
    groups, order = _qkv_order(config)
    index = torch.arange(sum(map(len, parts)))
    if groups > 1:  # where our rows are in the file: (groups, 3, rows of a group) -> (3, groups, rows of a group)
        index = index.view(groups, 3, -1)[:, order].transpose(0, 1).flatten()
    index = index[rows]
    found = []
    for part in parts:  # one, or (q,) k and v, in ascending order of our rows
        found.append(part[index[(index >= 0) & (index < len(part))].to(part.device)])
        index = index - len(part)
    return found[0] if len(found) == 1 else torch.cat(found)


def with_prefix(tensors: dict[str, Tensor], config: GPTConfig, file: Path) -> dict[str, Tensor]:
    """Normalise tensor names: with the trunk's prefix, NeoX's head as embed_out, without buffers.

    T5's embedding may be there once more for each stack. Raises InputError if a tensor appears under two names.
    """
    if isinstance(config, T5Config):
        copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
        found = [tensors[name] for name in ("shared.weight", *copies) if name in tensors]
        if not all(torch.equal(embedding, found[0]) for embedding in found):
            raise InputError(
                f"{file}: encoder and decoder have different embeddings, which T5 shares: another model's?"
            )
        tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
        if found:
            tensors["shared.weight"] = found[0]
    prefix, head = of_family(TRUNK_PREFIX, config), of_family(MODULES["lm_head"], config)
    bare = not any(name.startswith(prefix) for name in tensors)  # the file holds only the trunk, as OpenAI's GPT-2
    renamed = {}
    for name, tensor in tensors.items():
        if BUFFERS.search(name):
            continue
        if name.startswith("lm_head."):
            name = head + name.removeprefix("lm_head")
        elif bare and not name.startswith(HEADS):
            name = prefix + name
        if name in renamed:
            raise InputError(f"{file} holds {name} under two names: remove one of them.")
        renamed[name] = tensor
    return renamed


# ---------------------------------------------------------------------------------------------------------- config.json
def parse_config(settings: dict, path: Path) -> GPTConfig:
    """The settings of config.json, as transformers 4 or 5 writes them -> GPTConfig. `path` is for the errors.

    Raises InputError for a value of the wrong kind or range and for a setting that isn't implemented.
    """

    def get(field: str, kind: Any, default: Any = None, least: float = 0, most: float = math.inf) -> Any:
        value = default if settings.get(field) is None else settings[field]
        value = float(value) if kind is float and type(value) is int and abs(value) < 2**63 else value
        if type(value) is not kind or (kind in (int, float) and not (least <= value <= most and value < math.inf)):
            wanted = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]
            at_least = f" of at least {least}" if least else ""
            at_least += f" and at most {most}" if most < math.inf else ""
            raise InputError(f"{path}: {field} must be {wanted}{at_least}, not {value!r:.80}: fix it.")
        return value

    model_type = settings.get("model_type")
    family = model_type.removesuffix(ADAPTER) if isinstance(model_type, str) else None
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"{path}: model_type {model_type!r} isn't one of {known}: name another checkpoint.")
    for field, unused in UNSUPPORTED.items():
        unused = family == "t5" if field == "is_encoder_decoder" else unused
        if settings.get(field) not in (None, unused):
            raise InputError(f"{path}: {field} = {settings[field]!r:.80} isn't implemented: name another checkpoint.")
    names = {ours: theirs for ours, row in FIELDS.items() if (theirs := row[column_of(family)])}
    defaults: dict[str, Any] = {ours: row[column_of(family)] for ours, row in DEFAULTS.items()}

    dimensions = [ours for ours in ("vocab_size", "n_ctx", "d_model", "n_layer", "n_head") if ours in names]
    values: dict[str, Any] = {ours: get(names[ours], int, least=1, most=LARGEST[ours]) for ours in dimensions}
    four_times = None if family in LLAMA_LIKE or family == "t5" else 4 * values["d_model"]
    values["d_mlp"] = get(names["d_mlp"], int, four_times, least=1, most=LARGEST["d_mlp"])
    values["norm_eps"] = get(names["norm_eps"], float, defaults["norm_eps"])
    values["tied_head"] = get(names["tied_head"], bool, defaults["tied_head"])
    if model_type != family:
        values["adapter_size"] = get("adapter_size", int, least=1, most=LARGEST["adapter_size"])
    activation = get(names["activation"], str, defaults["activation"])
    if family == "t5":
        activation, found = _t5(settings, values, activation, get, path)
        values |= found
    if activation not in ACTIVATIONS:
        raise InputError(f"{path}: {names['activation']} {activation!r} isn't one of {list(ACTIVATIONS)}: fix it.")
    values["activation"] = ACTIVATIONS[activation]
    head_width, rest = divmod(values["d_model"], values["n_head"])
    if family in ("qwen3", "t5") or (family in LLAMA_LIKE and settings.get("head_dim") is not None):
        field, usual = ("d_kv", 64) if family == "t5" else ("head_dim", 128)
        width = get(field, int, usual, least=1, most=LARGEST["head_width"])
        values["d_head"] = width if rest or width != head_width else None
        head_width = width
    elif rest or (family == "codegen" and values["n_head"] % 4):
        also = " and be a multiple of 4" if family == "codegen" else ""
        raise InputError(f"{path}: {names['n_head']} must divide {names['d_model']}{also}: fix one of them.")

    if family == "gpt2":
        values["scale_attention"] = get("scale_attn_weights", bool, True)
    elif family == "gpt_neo":
        window = get("window_size", int, 256, least=1, most=LARGEST["n_ctx"])
        values["attention_windows"] = _attention_windows(settings, values["n_layer"], window, path)
    elif family == "gpt_neox":
        rotary_share, values["rotary_base"], _ = _rotary_settings(settings, path, NEOX_ROTARY, ("default",))
        values["rotary_dim"] = int(head_width * rotary_share)  # rounded down, as transformers does
        values["parallel_residual"] = get("use_parallel_residual", bool, True)
        values["qkv_bias"] = values["attention_out_bias"] = get("attention_bias", bool, True)
    elif family == "codegen":
        values["rotary_dim"] = get("rotary_dim", int, least=2)
    elif family in LLAMA_LIKE:
        values |= _llama_like(family, settings, values, head_width, get, path)
    rotary_dim = values.get("rotary_dim", 0)
    # an odd number rotates one channel more; for CodeGen, transformers fails on it
    if rotary_dim + rotary_dim % 2 > head_width or (family == "codegen" and rotary_dim % 2):
        raise InputError(f"{path}: {rotary_dim} rotary channels don't fit a head of width {head_width}: fix it.")
    return (T5Config if family == "t5" else GPTConfig)(**values, **ALWAYS[family], architecture=family)


def _t5(settings: dict, values: dict, projection: str, get: Callable, path: Path) -> tuple[str, dict]:
    """The activation that feed_forward_proj names, and what only an encoder-decoder has.

    The first T5s scale what a tied head reads, version 1.1 has a head of its own. transformers 5 writes
    tie_word_embeddings: true for both, and tells them apart by scale_decoder_outputs.
    """
    gate, _, activation = projection.rpartition("-")
    if gate not in ("", "gated"):
        raise InputError(f"{path}: feed_forward_proj {projection!r:.80} isn't gated-ACTIVATION or ACTIVATION: fix it.")
    found: dict[str, Any] = {"gated_mlp": gate == "gated"}
    num_blocks = get("num_decoder_layers", int, values["n_layer"], least=1, most=LARGEST_T5["num_decoder_blocks"])
    found["n_decoder_layer"] = None if num_blocks == values["n_layer"] else num_blocks
    most = LARGEST_T5["num_buckets"]
    found["num_buckets"] = get("relative_attention_num_buckets", int, 32, least=4, most=most)
    exact = found["num_buckets"] // 2  # of the decoder, which has more of them than the encoder has to each side
    most = LARGEST_T5["max_distance"]
    found["max_distance"] = get("relative_attention_max_distance", int, 128, least=exact + 1, most=most)
    last = values["vocab_size"] - 1
    found["start_id"] = get("decoder_start_token_id", int, 0, most=last)
    # what the tokenizers of T5 and CodeT5 put around every text
    for ours, theirs in (("query_start_id", "bos_token_id"), ("query_end_id", "eos_token_id")):
        found[ours] = None if settings.get(theirs) is None else get(theirs, int, most=last)
    is_scaled = get("scale_decoder_outputs", bool, values["tied_head"])
    if is_scaled and not values["tied_head"]:
        raise InputError(f"{path}: scale_decoder_outputs needs tie_word_embeddings: set both to true or both to false.")
    found |= {"tied_head": is_scaled, "head_scale": values["d_model"] ** -0.5 if is_scaled else 1.0}
    return "gelu_new" if projection == "gated-gelu" else activation, found  # which is how T5 1.1 has been trained


def _attention_windows(settings: dict, n_layer: int, window: int, path: Path) -> tuple[int | None, ...] | None:
    """GPT-Neo: attention_layers is each layer's kind; attention_types is the same as [[kinds, repeats], ...]."""
    types, layers = settings.get("attention_types"), settings.get("attention_layers")
    if types is None:
        types = [[["global", "local"], 12]] if layers is None else [[layers, 1]]
    try:
        repeated = (kind for group, times in types for _ in range(times) for kind in group)
        kinds = [*islice(repeated, n_layer + 1)]  # however often it says to repeat
    except (TypeError, ValueError):  # not of that form
        kinds = []
    if len(kinds) != n_layer or any(kind not in ("global", "local") for kind in kinds) or layers not in (None, kinds):
        raise InputError(
            f"{path}: attention_types {types!r:.80} and attention_layers {layers!r:.80} must name the kinds of "
            f"{n_layer} layers, global or local, and agree: fix them."
        )
    return tuple(window if kind == "local" else None for kind in kinds) if "local" in kinds else None


def _llama_like(family: str, settings: dict, values: dict, head_width: int, get: Callable, path: Path) -> dict:
    """Of Llama's descendants: heads of keys and values, biases, windows and rotary positions."""
    n_head, n_layer, found = values["n_head"], values["n_layer"], {}
    kv_heads = get("num_key_value_heads", int, n_head if family == "llama" else None, least=1, most=LARGEST["kv_heads"])
    if n_head % kv_heads:
        raise InputError(f"{path}: num_key_value_heads {kv_heads} must divide num_attention_heads {n_head}: fix one.")
    found["n_kv_head"] = kv_heads if kv_heads < n_head else None
    if family in ("llama", "qwen3"):
        found["qkv_bias"] = found["attention_out_bias"] = get("attention_bias", bool, False)
    if family == "llama":
        found["mlp_bias"] = get("mlp_bias", bool, False)

    window, kinds = None, settings.get("layer_types")
    if family != "llama" and settings.get("sliding_window", 4096) is not None:  # null: none
        window = get("sliding_window", int, 4096, least=1, most=LARGEST["n_ctx"])
    if family in ("qwen2", "qwen3"):
        window = window if get("use_sliding_window", bool, False) else None
        first = get("max_window_layers", int, 28)
        if kinds is None:
            kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(n_layer)]
    kinds = ["sliding_attention" if window else "full_attention"] * n_layer if kinds is None else kinds
    names = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != n_layer or any(kind not in names for kind in kinds):
        raise InputError(f"{path}: layer_types {kinds!r:.80} must name the kinds of {n_layer} layers, {names}: fix it.")
    if window and "sliding_attention" in kinds:
        found["attention_windows"] = tuple(window if kind == "sliding_attention" else None for kind in kinds)

    kinds_of_scaling = ("default", "linear", "llama3", "yarn")
    share, found["rotary_base"], scaling = _rotary_settings(settings, path, LLAMA_ROTARY, kinds_of_scaling)
    if share != 1:
        raise InputError(f"{path}: partial_rotary_factor = {share} isn't implemented for {family}: name another.")
    found["rotary_dim"] = head_width
    found["rotary_scaling"] = scaling and _rotary_scaling(scaling, values["n_ctx"], path)
    return found


# spellings, and the default
NEOX_ROTARY = (("rotary_pct", "partial_rotary_factor", 0.25), ("rotary_emb_base", "rope_theta", 1e4))
LLAMA_ROTARY = (("partial_rotary_factor", 1.0), ("rope_theta", 1e4))
SCALING = {  # fields of rope_scaling by its rope_type
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
}  # fmt: skip


def _rotary_settings(
    settings: dict, path: Path, spelt: tuple, kinds: tuple[str, ...]
) -> tuple[float, float, dict | None]:
    """The fraction of a head's channels that is rotated, the base of the angles, and their scaling, None for none.

    transformers 4 writes numbers of their own (and rope_scaling), transformers 5 writes rope_parameters.
    """
    field = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    rope = settings.get(field) or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else ""
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *SCALING.get(kind, ())}
    if kind not in kinds or {key for key, value in rope.items() if value is not None} - known:
        raise InputError(f"{path}: {field} = {rope!r:.200} isn't implemented, only rope_type {' or '.join(kinds)}.")
    numbers = []
    for *spellings, default in spelt:
        said = [source[name] for source in (settings, rope) for name in spellings if source.get(name) is not None]
        if any(type(value) not in (int, float) or not 0 <= value < 2**63 or value != said[0] for value in said):
            raise InputError(f"{path}: {' or '.join(spellings)} must be one number, not {said!r:.80}: fix it.")
        numbers.append(float(said[0] if said else default))
    return numbers[0], numbers[1], None if kind == "default" else {**rope, "kind": kind}


def _rotary_scaling(rope: dict, n_ctx: int, path: Path) -> RotaryScaling:
    """rope_scaling as transformers reads it; InputError for a number that is missing or makes no sense."""

    def number(name: str, default: float | None = None, least: float = 0.0) -> float:
        value: Any = default if rope.get(name) is None else rope[name]
        if type(value) not in (int, float) or not least < value < 2**63:
            raise InputError(
                f"{path}: {name} of rope_scaling must be a number above {least:g}, not {value!r:.80}: fix it."
            )
        return float(value)

    kind, factor = rope["kind"], number("factor")
    if kind == "linear":
        return RotaryScaling(kind=kind, factor=factor)
    length = int(number("original_max_position_embeddings", n_ctx, least=1))
    if kind == "llama3":
        few, many = number("low_freq_factor"), number("high_freq_factor")
        if not few < many:
            raise InputError(f"{path}: low_freq_factor {few} must be below high_freq_factor {many}: fix one of them.")
        return RotaryScaling(kind=kind, factor=factor, original_n_ctx=length, few_turns=few, many_turns=many)

    def attention(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    usual = attention(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        usual = attention(number("mscale")) / attention(number("mscale_all_dim"))
    if rope.get("truncate") not in (None, True, False):
        raise InputError(
            f"{path}: truncate of rope_scaling must be true or false, not {rope['truncate']!r:.80}: fix it."
        )
    return RotaryScaling(
        kind=kind, factor=factor, original_n_ctx=length, few_turns=number("beta_slow", 1.0),
        many_turns=number("beta_fast", 32.0), attention_factor=number("attention_factor", usual),
        whole_pairs=rope.get("truncate") is not False,
    )  # fmt: skip


def _rope_scaling(scaling: RotaryScaling) -> dict:
    """The inverse of `_rotary_scaling`."""
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    found["original_max_position_embeddings"] = scaling.original_n_ctx
    if scaling.kind == "llama3":
        return found | {"low_freq_factor": scaling.few_turns, "high_freq_factor": scaling.many_turns}
    found |= {"beta_slow": scaling.few_turns, "beta_fast": scaling.many_turns, "truncate": scaling.whole_pairs}
    return found | {"attention_factor": scaling.attention_factor}


def config_object(config: GPTConfig) -> dict:
    """GPTConfig -> config.json as transformers 4 writes it, which 5 reads too.

    Raises InputError for a setting that the family's config.json can't express.
    """
    family = config.architecture
    names = {ours: of_family(row, config) for ours, row in FIELDS.items()}
    settings = {"model_type": family} | {theirs: getattr(config, ours) for ours, theirs in names.items() if theirs}
    if family == "gpt2":
        settings["scale_attn_weights"] = config.scale_attention
        settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # [N+ 7] their default is 0.1
    elif family == "gpt_neo":
        windows = [config.window(layer) for layer in range(config.n_layer)]
        settings["attention_types"] = [[["local" if window else "global" for window in windows], 1]]
        settings["window_size"] = next(filter(None, windows), 256)
    elif family == "gpt_neox":
        head_width = config.d_model // config.n_head
        share = config.rotary_dim / head_width
        if int(head_width * share) < config.rotary_dim:  # rounded down too far to give the same integer back
            share = math.nextafter(share, math.inf)
        settings |= {"rotary_pct": share, "rotary_emb_base": config.rotary_base}
        settings |= {"use_parallel_residual": config.parallel_residual, "attention_bias": config.qkv_bias}
    elif family == "codegen":
        settings["rotary_dim"] = config.rotary_dim
    elif isinstance(config, T5Config):
        activation = "gelu" if config.gated_mlp and config.activation == "gelu_new" else config.activation
        settings |= {
            "is_encoder_decoder": True,
            "d_kv": config.head_width,
            "num_decoder_layers": config.num_decoder_blocks,
            "relative_attention_num_buckets": config.num_buckets,
            "relative_attention_max_distance": config.max_distance,
            "feed_forward_proj": f"gated-{activation}" if config.gated_mlp else activation,
            "decoder_start_token_id": config.start_id,
            "bos_token_id": config.query_start_id,
            "eos_token_id": config.query_end_id,
            "dropout_rate": 0.0,  # [N+ 7] their default is 0.1
            # transformers 5 gives its cache as many layers as the encoder has
            "use_cache": config.num_decoder_blocks <= config.n_layer,
        }
    else:
        settings |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_width}
        settings |= {"rope_theta": config.rotary_base, "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
        settings["rope_scaling"] = _rope_scaling(config.rotary_scaling) if config.rotary_scaling else None
        windows = [config.window(layer) for layer in range(config.n_layer)]
        settings["sliding_window"] = next(filter(None, windows), None)
        if family.startswith("qwen"):
            settings["use_sliding_window"] = any(windows)
            settings["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]

    if config.adapter_size:
        settings |= {"model_type": family + ADAPTER, "adapter_size": config.adapter_size}

    # a family can't express all of GPTConfig: reading it back must give the same
    if not any(config.attention_windows or ()):
        config = replace(config, attention_windows=None)
    if config.n_kv_head == config.n_head:
        config = replace(config, n_kv_head=None)
    if config.d_head and config.d_head * config.n_head == config.d_model:
        config = replace(config, d_head=None)
    if isinstance(config, T5Config) and config.n_decoder_layer == config.n_layer:
        config = replace(config, n_decoder_layer=None)
    reread = parse_config(settings, Path("config.json"))
    for name in (field.name for field in fields(config)):
        value, got = getattr(config, name), getattr(reread, name)
        if got != value:
            raise InputError(f"a {family} checkpoint can't express {name} = {value!r}, only {got!r}: change it.")
    return settings
