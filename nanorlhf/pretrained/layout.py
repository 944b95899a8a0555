"""Convert between our model and the files of its family (families/): config.json, tensor names, layouts.

Nothing is dropped silently: a setting that our model doesn't have raises an error.
"""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.pretrained.family import FILES, RANGES, ConfigFile, find_family

# suffixes of model_type: they make transformers raise an error, instead of dropping adapters or the mean pooling
ADAPTER, POOLED = "_adapter", "_mean_pooled"
GATED = ("mlp.gate", "mlp.up")
# tensors without the prefix
HEADS = ("lm_head.", "embed_out.", "score.", "classifier.", "v_head.", "reward_bias")
# masks and rotary tables saved by older versions of transformers, and a bias that T5 never used
BUFFERS = re.compile(
    r"(^|\.)(attn|attention)\.(bias|masked_bias|causal_mask|embed_positions)$"
    r"|rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)$"
    r"|^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"
)
ACTIVATIONS = {  # theirs: ours
    **{"gelu": "gelu", "gelu_python": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_new"),
}
# fields that our model doesn't have, each with the value that means "not used"
UNSUPPORTED: dict[str, Any] = {
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    "is_encoder_decoder": False, "is_causal": True, "pruned_heads": {},
    "per_layer_config": None, "use_bidirectional_attention": False,
}  # fmt: skip
# settings that may be None, and the properties that resolve None
RESOLVED = {
    "n_kv_head": "kv_heads",
    "d_head": "head_width",
    "n_decoder_layer": "num_decoder_blocks",
}


def check_fits(config: GPTConfig, where: str | Path, num_weights: int) -> None:
    """Raise InputError for sizes above RANGES, and for a model with more than `num_weights` weights.

    num_weights: how many are in the files or fit into memory. We count without biases and norms,
    from the config, without creating a model.
    """
    for name, (_, most) in RANGES.items():
        size = getattr(config, name, None) or 0
        if size > most:
            raise InputError(f"{where}: {name} must be at most {most}, got {size}.")
    num_decoder_blocks = config.num_decoder_blocks
    # rows of q, k and v, and columns of the output
    attention = 2 * (config.n_head + config.kv_heads) * config.head_width
    mlp = (3 if config.gated_mlp else 2) * config.d_mlp
    rows = config.vocab_size + (config.n_ctx if config.positions == "learned" else 0)
    rows += config.n_layer * (attention + mlp) + num_decoder_blocks * (2 * attention + mlp)
    count = rows * config.d_model
    if count > num_weights:
        sizes = f"a model of these sizes has {count:,} weights"
        raise InputError(f"{where}: {sizes}, more than the limit of {num_weights:,}.")


# ----------------------------------------------------------------------- tensors: names and layouts
def tensor_names(name: str, config: GPTConfig) -> list[str]:
    """Translate our tensor name to its names in a file: one, or several if q, k and v are separate."""
    family = find_family(config.architecture)
    module, _, kind = name.rpartition(".")
    block = re.fullmatch(r"transformer\.blocks\.(\d+)\.(.+)", module)
    if block:
        number = int(block[1])
        theirs = f"{family.modules['transformer.blocks']}.#.{family.modules[block[2]]}"
        if config.num_decoder_blocks:  # in our model the decoder's blocks follow the encoder's
            in_decoder = number >= config.n_layer
            number -= config.n_layer if in_decoder else 0
            theirs = theirs.format(
                stack="decoder" if in_decoder else "encoder",
                mlp="layer.2" if in_decoder else "layer.1",
                wi="wi_1" if config.gated_mlp else "wi",
            )
        theirs = theirs.replace("#", str(number))
    elif module in family.modules:
        theirs = family.modules[module]
    else:
        return [name]  # score and reward_bias have no counterpart
    prefix = family.prefix if module.startswith("transformer") else ""
    before, _, rest = theirs.partition("[")
    letters, _, after = rest.partition("]")
    return [f"{prefix}{before}{letter}{after}.{kind}" for letter in letters or [""]]


def qkv_layout(config: GPTConfig) -> tuple[int, list[int]]:
    """Return the number of groups of a fused q, k, v in the file, and the order of q, k and v in a group."""
    family = find_family(config.architecture)
    groups = config.n_head if family.qkv_groups is None else family.qkv_groups
    return groups, ["qkv".index(letter) for letter in family.qkv_order]


def is_transposed(name: str, config: GPTConfig) -> bool:
    is_linear = re.search(r"(qkv|out|up|down)\.weight$", name) is not None
    return find_family(config.architecture).transposed and is_linear


def to_family(name: str, tensor: Tensor, config: GPTConfig) -> list[Tensor]:
    """Convert our tensor to the layout of its family: one tensor for each of `tensor_names`."""
    groups, order = qkv_layout(config)
    if "attention.qkv" in name and groups > 1:  # (3 * G * rows, ...) -> (G * 3 * rows, ...)
        split = tensor.view(3, groups, -1, *tensor.shape[1:])
        if order != [0, 1, 2]:  # indexing on the meta device makes PyTorch import sympy
            split = split[order]
        tensor = split.transpose(0, 1).reshape(tensor.shape)
    if is_transposed(name, config):
        tensor = tensor.t()
    num_tensors = len(tensor_names(name, config))
    if num_tensors == 1:
        return [tensor]
    return [part.clone() for part in tensor.split(config.qkv_rows[-num_tensors:])]  # or k and v


def from_family(name: str, tensors: list[Tensor], config: GPTConfig, rows: slice = slice(None)) -> Tensor:
    """Invert `to_family`. May return a view; from a memory-mapped file only `rows` are read."""
    if is_transposed(name, config):
        tensors = [tensor.t() for tensor in tensors]
    if not re.search(r"\.(qkv|kv)\.", name):
        return tensors[0][rows] if tensors[0].ndim else tensors[0]
    groups, order = qkv_layout(config)
    index = torch.arange(sum(map(len, tensors)))
    if groups > 1:  # positions of our rows in the file: (groups, 3, rows) -> (3, groups, rows)
        index = index.view(groups, 3, -1)[:, order].transpose(0, 1).flatten()
    index = index[rows]
    pieces = []
    for tensor in tensors:  # one, or (q,) k and v, in the order of our rows
        pieces.append(tensor[index[(index >= 0) & (index < len(tensor))].to(tensor.device)])
        index = index - len(tensor)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def with_prefix(tensors: dict[str, Tensor], config: GPTConfig, file: Path) -> dict[str, Tensor]:
    """Normalise tensor names: add the family's prefix and name of the head, drop buffers.

    T5's file may have a copy of the embedding for each stack. Raises InputError if a tensor appears
    under two names.
    """
    if config.num_decoder_blocks:
        copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
        embeddings = [tensors[name] for name in ("shared.weight", *copies) if name in tensors]
        if not all(torch.equal(embedding, embeddings[0]) for embedding in embeddings):
            raise InputError(f"{file}: encoder and decoder have different embeddings, but T5 shares one.")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
        if embeddings:
            tensors["shared.weight"] = embeddings[0]
    family = find_family(config.architecture)
    # the file may contain only the trunk, like OpenAI's GPT-2
    is_bare = not any(name.startswith(family.prefix) for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        if BUFFERS.search(name):
            continue
        if name.startswith("lm_head."):
            name = family.modules["lm_head"] + name.removeprefix("lm_head")
        elif is_bare and not name.startswith(HEADS):
            name = family.prefix + name
        if name in renamed:
            raise InputError(f"{file} has {name} under two names: remove one of them.")
        renamed[name] = tensor
    return renamed


def split_gates(tensors: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Split the MLP's gate and up into two tensors if the family stores them as one."""
    family = find_family(config.architecture)
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if family.fused_gate is not None and family.fused_gate in name and tensor.ndim == 2:
            names = [name.replace(family.fused_gate, family.modules[ours]) for ours in GATED]
            separate |= zip(names, tensor.tensor_split(2), strict=True)
        else:
            separate[name] = tensor
    return separate


def fuse_gates(tensors: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Invert `split_gates`."""
    family, fused = find_family(config.architecture), dict(tensors)
    if family.fused_gate is not None:
        gate, up = (family.modules[ours] for ours in GATED)
        for name in [name for name in tensors if gate in name]:
            halves = fused.pop(name), fused.pop(name.replace(gate, up))
            fused[name.replace(gate, family.fused_gate)] = torch.cat(halves)
    return fused


# -------------------------------------------------------------------------------------- config.json
def parse_config(settings: dict, path: Path) -> GPTConfig:
    """Convert the fields of config.json, as written by transformers 4 or 5, to a GPTConfig.

    Raises InputError, naming `path`, for a value of the wrong type or range, and for an unsupported
    setting.
    """
    file = ConfigFile(settings, path)
    model_type = settings.get("model_type")
    known = model_type.removesuffix(POOLED) if isinstance(model_type, str) else ""
    name = known.removesuffix(ADAPTER)
    if name not in FILES:
        raise file.error(f"model_type {model_type!r} isn't one of {', '.join(FILES)}.")
    family = find_family(name)
    for quantised in ("quantization_config", "quantization"):  # transformers' and MLX's field
        if settings.get(quantised) is not None:
            raise file.error(
                f"the weights are quantised ({quantised} {settings[quantised]!r:.80}): pass the checkpoint that they "
                "were made from."
            )
    for theirs, unused in UNSUPPORTED.items():
        if settings.get(theirs) not in (None, family.constants.get(theirs, unused)):
            raise file.error(f"{theirs} = {settings[theirs]!r:.80} isn't implemented.")

    values: dict[str, Any] = {}
    for ours, spec in family.settings.items():
        theirs, default = spec if isinstance(spec, tuple) else (spec, ...)
        if ours in RANGES:
            values[ours] = file.get(theirs, int, default, *RANGES[ours])
        elif ours.endswith("_id"):
            values[ours] = file.get(theirs, int, default, most=values["vocab_size"] - 1)
        else:
            values[ours] = file.get(theirs, type(default), default)
    values["d_mlp"] = values["d_mlp"] or 4 * values["d_model"]
    if known != name:
        values["adapter_size"] = file.get("adapter_size", int, ..., *RANGES["adapter_size"])
    values["mean_pooled"] = model_type != known
    config = family.config_class(**family.fixed | values, architecture=name)

    groups = family.qkv_groups or 1
    has_width = config.d_head is not None or config.d_model % config.n_head == 0
    if not has_width or config.n_head % groups:
        heads = f"{family.settings['n_head']} must divide {family.settings['d_model']}"
        raise file.error(heads + (f" and be a multiple of {groups}." if groups > 1 else "."))
    config = replace(config, **family.read(file, config))
    if config.activation not in ACTIVATIONS:
        theirs, activations = family.settings["activation"][0], ", ".join(ACTIVATIONS)
        raise file.error(f"{theirs} {config.activation!r} isn't one of {activations}.")
    config = replace(config, activation=ACTIVATIONS[config.activation])
    # an odd number rotates one more channel; transformers fails on one set in config.json
    is_odd = config.rotary_dim % 2
    if config.rotary_dim + is_odd > config.head_width or (is_odd and "rotary_dim" in values):
        width = f"a head of width {config.head_width}"
        raise file.error(f"{config.rotary_dim} rotary channels don't fit {width}.")
    return canonical(config)


def canonical(config: GPTConfig) -> GPTConfig:
    """Set each setting to None if its value is what None resolves to."""
    none: dict[str, Any] = {}
    if not any(config.windows):
        none["attention_windows"] = none["local_rotary_base"] = None
    if (config.local_rotary_base, None) == (config.rotary_base, config.rotary_scaling):
        none["local_rotary_base"] = None
    if config.n_kv_head == config.n_head:
        none["n_kv_head"] = None
    if config.d_head and config.d_head * config.n_head == config.d_model:
        none["d_head"] = None
    if getattr(config, "n_decoder_layer", None) == config.n_layer:
        none["n_decoder_layer"] = None
    return replace(config, **none)


def config_object(config: GPTConfig) -> dict[str, Any]:
    """Convert a GPTConfig to config.json as written by transformers 4, which 5 also reads.

    Raises InputError for a setting that the family's config.json can't express.
    """
    name = config.architecture
    family = find_family(name)
    settings: dict[str, Any] = {"model_type": name}
    for ours, spec in family.settings.items():
        theirs = spec[0] if isinstance(spec, tuple) else spec
        settings[theirs] = getattr(config, RESOLVED.get(ours, ours))
    settings |= family.constants | family.write(config)
    if config.adapter_size:
        settings |= {"model_type": name + ADAPTER, "adapter_size": config.adapter_size}
    if config.mean_pooled:
        settings["model_type"] += POOLED

    # a family can't express all of GPTConfig: reading it back must give the same
    config, reread = canonical(config), parse_config(settings, Path("config.json"))
    for ours in [setting.name for setting in fields(config)]:
        value, got = getattr(config, ours), getattr(reread, ours)
        if got != value:
            raise InputError(f"a {name} checkpoint can't express {ours} = {value!r}, only {got!r}.")
    return settings
