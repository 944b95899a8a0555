"""Four model families in the Hugging Face layout: field names in config.json, tensor names, tensor layouts.

The differences are tables: the fields of config.json, the tensor names, and the row order of q, k and v. Nothing is
dropped silently: a setting that our model doesn't have is an error.
"""

import math
import re
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.model import GPTConfig

# ---------------------------------------------------------------------------------------- tables, one column per family
FAMILIES = ("gpt2", "gpt_neo", "gpt_neox", "codegen")
ARCHITECTURES = ("GPT2LMHeadModel", "GPTNeoForCausalLM", "GPTNeoXForCausalLM", "CodeGenForCausalLM")
TRUNK_PREFIX = ("transformer.", "transformer.", "gpt_neox.", "transformer.")

# fmt: off
# field of GPTConfig: field of config.json
FIELDS = {
    "vocab_size": ("vocab_size",          "vocab_size",              "vocab_size",              "vocab_size"),
    "n_ctx":      ("n_positions",         "max_position_embeddings", "max_position_embeddings", "n_positions"),
    "d_model":    ("n_embd",              "hidden_size",             "hidden_size",             "n_embd"),
    "n_layer":    ("n_layer",             "num_layers",              "num_hidden_layers",       "n_layer"),
    "n_head":     ("n_head",              "num_heads",               "num_attention_heads",     "n_head"),
    "d_mlp":      ("n_inner",             "intermediate_size",       "intermediate_size",       "n_inner"),
    "activation": ("activation_function", "activation_function",     "hidden_act",              "activation_function"),
    "norm_eps":   ("layer_norm_epsilon",  "layer_norm_epsilon",      "layer_norm_eps",          "layer_norm_epsilon"),
    "tied_head":  ("tie_word_embeddings", "tie_word_embeddings",     "tie_word_embeddings",     "tie_word_embeddings"),
}
# transformers' defaults where config.json omits the field or holds null
DEFAULTS = {
    "activation": ("gelu_new",            "gelu_new",                "gelu",                    "gelu_new"),
    "norm_eps":   (1e-5,                  1e-5,                      1e-5,                      1e-5),
    "tied_head":  (True,                  True,                      False,                     False),
}
# our module name: theirs
MODULES = {
    "transformer.embedding": ("wte",      "wte",                         "embed_in",                  "wte"),
    "transformer.positions": ("wpe",      "wpe",                         None,                        None),
    "transformer.blocks":    ("h",        "h",                           "layers",                    "h"),
    "transformer.norm":   ("ln_f",        "ln_f",                        "final_layer_norm",          "ln_f"),
    # below, the modules of a block; {q,k,v} are three tensors that we store as one
    "norm1":              ("ln_1",        "ln_1",                        "input_layernorm",           "ln_1"),
    "attention.qkv":      ("attn.c_attn", "attn.attention.{q,k,v}_proj", "attention.query_key_value", "attn.qkv_proj"),
    "attention.out":      ("attn.c_proj", "attn.attention.out_proj",     "attention.dense",           "attn.out_proj"),
    "norm2":              ("ln_2",        "ln_2",                        "post_attention_layernorm",  None),
    "mlp.up":             ("mlp.c_fc",    "mlp.c_fc",                    "mlp.dense_h_to_4h",         "mlp.fc_in"),
    "mlp.down":           ("mlp.c_proj",  "mlp.c_proj",                  "mlp.dense_4h_to_h",         "mlp.fc_out"),
    # transformers 5 calls NeoX's head lm_head in memory; in files it is embed_out, which both 4 and 5 read
    "lm_head":            ("lm_head",     "lm_head",                     "embed_out",                 "lm_head"),
}
# fmt: on
# suffix of model_type with adapters: transformers then refuses the model, instead of silently dropping the adapters
ADAPTER = "_adapter"
HEADS = ("lm_head.", "embed_out.", "score.", "reward_bias")  # tensors without the trunk prefix
# masks and rotary tables that older versions of transformers saved with the weights; we compute them
BUFFERS = re.compile(
    r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask|embed_positions)$"
    r"|rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)$"
)
ACTIVATIONS = {  # HF's name: ours; gelu_new, gelu_fast and gelu_pytorch_tanh are the same formula
    **{"gelu": "gelu", "gelu_python": "gelu", "relu": "relu"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_new"),
}
# settings of transformers that our model doesn't have, each with the value that means "not used"
UNSUPPORTED: dict[str, Any] = {
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "is_causal": True,
    "pruned_heads": {},
    "quantization_config": None,
    "per_layer_config": None,
}
ALWAYS: dict[str, dict[str, Any]] = {  # properties of a whole family, which have no field in config.json
    "gpt2": {"positions": "learned", "parallel_residual": False},
    "gpt_neo": {"positions": "learned", "parallel_residual": False, "scale_attention": False, "qkv_bias": False},
    "gpt_neox": {"positions": "rotary_half"},
    "codegen": {
        **{"positions": "rotary_interleaved", "shared_norm": True, "head_bias": True},
        **{"qkv_bias": False, "attention_out_bias": False},
    },
}


# the largest sizes that a model may ask for: far above any that exists, far below what overflows or never ends
LARGEST = {
    "vocab_size": 2**24, "n_ctx": 2**28, "d_model": 2**18, "n_layer": 2**12, "n_head": 2**12, "d_mlp": 2**20,
    "adapter_size": 2**18,
}  # fmt: skip


def check_fits(config: GPTConfig, where: str | Path, num_weights: int) -> None:
    """InputError for sizes above LARGEST, and for a model of more than `num_weights` weights.

    That many are in its files, or have room in memory. Counted without biases and norms, from the numbers alone: no
    model is made.
    """
    for name, largest in LARGEST.items():
        if getattr(config, name) > largest:
            raise InputError(f"{where}: {name} is {getattr(config, name)}, more than {largest}: lower it.")
    block = config.d_model * (4 * config.d_model + 2 * config.d_mlp)
    rows = config.vocab_size + (config.n_ctx if config.positions == "learned" else 0)
    count = config.n_layer * block + rows * config.d_model
    if count > num_weights:
        raise InputError(
            f"{where}: a model of these sizes has {count:,} weights, room is for {num_weights:,}: fix them."
        )


# ------------------------------------------------------------------------------------------- tensors: names and layouts
def of_family(row: tuple, config: GPTConfig) -> Any:
    """The entry for the model's family in a row of the tables."""
    return row[FAMILIES.index(config.architecture)]


def tensor_names(name: str, config: GPTConfig) -> list[str]:
    """Our tensor name -> its names in a file: one, or three if q, k and v are stored separately."""
    module, _, kind = name.rpartition(".")
    block = re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", module)
    if block:
        theirs = f"{of_family(MODULES['transformer.blocks'], config)}.{block[1]}.{of_family(MODULES[block[2]], config)}"
    elif module in MODULES:
        theirs = of_family(MODULES[module], config)
    else:
        return [name]  # score and reward_bias have no counterpart
    prefix = of_family(TRUNK_PREFIX, config) if module.startswith("transformer") else ""
    letters = "qkv" if "{q,k,v}" in theirs else " "
    return [f"{prefix}{theirs.replace('{q,k,v}', letter)}.{kind}" for letter in letters]


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
    if "attention.qkv" in name:  # (3 * G * rows, ...) -> (G * 3 * rows, ...)
        groups, order = _qkv_order(config)
        split = tensor.view(3, groups, -1, *tensor.shape[1:])
        tensor = split[order].transpose(0, 1).reshape(tensor.shape)
    if _is_conv1d(name, config):
        tensor = tensor.t()
    parts = len(tensor_names(name, config))
    return [tensor] if parts == 1 else [part.clone() for part in tensor.chunk(parts)]


def from_family(name: str, parts: list[Tensor], config: GPTConfig, rows: slice = slice(None)) -> Tensor:
    """The inverse of `to_family`; of `rows` of our tensor only, so that of a mapped file only these are read.

    May be a view into the parts.
    """
    parts = [part.t() for part in parts] if _is_conv1d(name, config) else parts
    if "attention.qkv" not in name:
        return parts[0][rows] if parts[0].ndim else parts[0]
    groups, order = _qkv_order(config)
    # where our rows are in the file: (groups, 3, rows of a group) -> (3, groups, rows of a group)
    index = torch.arange(sum(map(len, parts))).view(groups, 3, -1)[:, order].transpose(0, 1).flatten()[rows]
    found = []
    for part in parts:  # one, or q, k and v, in ascending order of our rows
        found.append(part[index[(index >= 0) & (index < len(part))].to(part.device)])
        index = index - len(part)
    return found[0] if len(found) == 1 else torch.cat(found)


def with_prefix(tensors: dict[str, Tensor], config: GPTConfig, file: Path) -> dict[str, Tensor]:
    """Normalise tensor names: with the trunk's prefix, NeoX's head as embed_out, without buffers.

    Raises InputError if a tensor appears under two names.
    """
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
        if settings.get(field) not in (None, unused):
            raise InputError(f"{path}: {field} = {settings[field]!r:.80} isn't implemented: name another checkpoint.")
    names = {ours: row[FAMILIES.index(family)] for ours, row in FIELDS.items()}
    defaults: dict[str, Any] = {ours: row[FAMILIES.index(family)] for ours, row in DEFAULTS.items()}

    dimensions = ("vocab_size", "n_ctx", "d_model", "n_layer", "n_head")
    values: dict[str, Any] = {ours: get(names[ours], int, least=1, most=LARGEST[ours]) for ours in dimensions}
    values["d_mlp"] = get(names["d_mlp"], int, 4 * values["d_model"], least=1, most=LARGEST["d_mlp"])
    values["norm_eps"] = get(names["norm_eps"], float, defaults["norm_eps"])
    values["tied_head"] = get(names["tied_head"], bool, defaults["tied_head"])
    if model_type != family:
        values["adapter_size"] = get("adapter_size", int, least=1, most=LARGEST["adapter_size"])
    activation = get(names["activation"], str, defaults["activation"])
    if activation not in ACTIVATIONS:
        raise InputError(f"{path}: {names['activation']} {activation!r} isn't one of {list(ACTIVATIONS)}: fix it.")
    values["activation"] = ACTIVATIONS[activation]
    head_width, rest = divmod(values["d_model"], values["n_head"])
    if rest or (family == "codegen" and values["n_head"] % 4):
        also = " and be a multiple of 4" if family == "codegen" else ""
        raise InputError(f"{path}: {names['n_head']} must divide {names['d_model']}{also}: fix one of them.")

    if family == "gpt2":
        values["scale_attention"] = get("scale_attn_weights", bool, True)
    elif family == "gpt_neo":
        window = get("window_size", int, 256, least=1, most=LARGEST["n_ctx"])
        values["attention_windows"] = _attention_windows(settings, values["n_layer"], window, path)
    elif family == "gpt_neox":
        rotary_share, values["rotary_base"] = _rotary_settings(settings, path)
        values["rotary_dim"] = int(head_width * rotary_share)  # rounded down, as transformers does
        values["parallel_residual"] = get("use_parallel_residual", bool, True)
        values["qkv_bias"] = values["attention_out_bias"] = get("attention_bias", bool, True)
    else:
        values["rotary_dim"] = get("rotary_dim", int, least=2)
    rotary_dim = values.get("rotary_dim", 0)
    # an odd number rotates one channel more; for CodeGen, transformers fails on it
    if rotary_dim + rotary_dim % 2 > head_width or (family == "codegen" and rotary_dim % 2):
        raise InputError(f"{path}: {rotary_dim} rotary channels don't fit a head of width {head_width}: fix it.")
    return GPTConfig(**values, **ALWAYS[family], architecture=family)


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


def _rotary_settings(settings: dict, path: Path) -> tuple[float, float]:
    """NeoX: the fraction of a head's channels that is rotated, and the base of the angles.

    transformers 4 writes rotary_pct and rotary_emb_base (and rope_scaling), transformers 5 writes rope_parameters.
    """
    field = "rope_parameters" if settings.get("rope_parameters") else "rope_scaling"
    rope = settings.get(field) or {}
    known = {"rope_type": "default", "type": "default", "rope_theta": None, "partial_rotary_factor": None}
    if not isinstance(rope, dict) or any(known.get(key, value) not in (None, value) for key, value in rope.items()):
        raise InputError(f"{path}: {field} = {rope!r:.80} isn't implemented, only rope_type 'default'.")
    numbers = []
    for *spellings, default in (("rotary_pct", "partial_rotary_factor", 0.25), ("rotary_emb_base", "rope_theta", 1e4)):
        said = [source[name] for source in (settings, rope) for name in spellings if source.get(name) is not None]
        if any(type(value) not in (int, float) or not 0 <= value < 2**63 or value != said[0] for value in said):
            raise InputError(f"{path}: {' or '.join(spellings)} must be one number, not {said!r:.80}: fix it.")
        numbers.append(float(said[0] if said else default))
    return numbers[0], numbers[1]


def config_object(config: GPTConfig) -> dict:
    """GPTConfig -> config.json as transformers 4 writes it, which 5 reads too.

    Raises InputError for a setting that the family's config.json can't express.
    """
    family = config.architecture
    settings = {
        "model_type": family,
        **{of_family(row, config): getattr(config, ours) for ours, row in FIELDS.items()},
    }
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
    else:
        settings["rotary_dim"] = config.rotary_dim

    if config.adapter_size:
        settings |= {"model_type": family + ADAPTER, "adapter_size": config.adapter_size}

    # a family can't express all of GPTConfig: reading it back must give the same
    if not any(config.attention_windows or ()):
        config = replace(config, attention_windows=None)
    for name, got in asdict(parse_config(settings, Path("config.json"))).items():
        if got != getattr(config, name):
            value = getattr(config, name)
            raise InputError(f"a {family} checkpoint can't express {name} = {value!r}, only {got!r}: change it.")
    return settings
