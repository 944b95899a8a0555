"""The description of a model family in the Hugging Face layout: a `Family`.

It maps the settings of `GPTConfig` to fields of config.json, adds the settings that config.json
doesn't have, and gives the tensor names and the order of q, k and v. layout.py uses it to read and
write checkpoints. To add a family, define it in the module of its relatives in families/, and list
it in `FILES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.attention import RotaryScaling
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError

# integer settings: minimum and maximum, which is far above any model but can't overflow
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
        """Return a field of this type and range, or raise InputError. null counts as missing.

        default: for a missing field, possibly None; without a default the field is required.
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


Setting = str | tuple[str, Any]  # field of config.json, with transformers' default if there is one


@dataclass(frozen=True, kw_only=True)
class Family:
    transformers_class: str
    config_class: type[GPTConfig] = GPTConfig
    settings: dict[str, Setting]
    """settings of GPTConfig, and their fields in config.json"""
    fixed: dict[str, Any]
    """settings of GPTConfig that config.json doesn't have"""
    constants: dict[str, Any] = field(default_factory=dict)
    """fields of config.json with a constant value"""
    read: Callable[[ConfigFile, Any], dict[str, Any]] = lambda file, config: {}
    """(file, config so far) -> the remaining settings from config.json"""
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    """the inverse of `read`: the remaining fields of config.json"""
    prefix: str = "transformer."
    """prefix of all tensor names except the head's"""
    modules: dict[str, str]
    """our module: theirs; [qkv] stands for three tensors that we store as one"""
    qkv_groups: int | None = 1
    """number of groups of rows in a fused q, k, v, each with a share of all three; None: one per
    head. Ours has one group: q of all heads, then k, then v."""
    qkv_order: str = "qkv"
    """order within a group"""
    transposed: bool = False
    """the weights of the blocks' linear layers are (in, out)"""
    fused_gate: str | None = None
    """name of the tensor in each block that contains the MLP's gate, then up; None: two tensors"""


FILES = {  # model_type in config.json: module in families/
    "gpt2": "gpt2",
    "gpt_neo": "gpt2",
    "gpt_neox": "neox",
    "codegen": "neox",
    "gptj": "neox",
    "t5": "t5",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "olmo2": "llama",
    "phi3": "llama",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
}


def find_family(model_type: str) -> Family:
    """Return a supported family. A run needs only one or two: modules are imported at first use."""
    module = import_module(f"nanorlhf.pretrained.families.{FILES[model_type]}")
    families: dict[str, Family] = module.FAMILIES
    return families[model_type]


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
    """Return the fraction of a head's channels that is rotated, the base of the angles, and rope_scaling.

    transformers 4 writes separate numbers and rope_scaling; transformers 5 writes rope_parameters.
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
        values = [fields.get(name) for fields in (file.fields, rope) for name in names]
        present = [value for value in values if value is not None]
        is_number = all(type(value) in (int, float) and least <= value < 2**63 for value in present)
        if not is_number or len(set(present)) > 1:
            wanted = f"one number of at least {least}"
            raise file.error(f"{' or '.join(names)} must be {wanted}, not {present!r:.80}.")
        return float(present[0]) if present else None

    share, base = number(share_names, 0), number(base_names, 1)
    scaling = ConfigFile({**rope, "rope_type": kind}, f"{file.where}: {name}")
    return share, 1e4 if base is None else base, scaling if kind != "default" else None


def read_scaling(rope: ConfigFile, n_ctx: int) -> RotaryScaling:
    """Read rope_scaling as transformers does; raise InputError for invalid numbers."""

    def number(name: str, default: Any = ...) -> float:
        return rope.get(name, float, default, least=1e-6, most=2.0**63)

    def yarn_factor(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    kind, factor = rope.fields["rope_type"], number("factor")
    if kind == "linear":
        return RotaryScaling(kind=kind, factor=factor)
    options: dict[str, Any] = {"original_n_ctx": int(number(LENGTH, n_ctx))}
    if kind == "llama3":
        options["few_turns"] = number("low_freq_factor")
        options["many_turns"] = number("high_freq_factor")
        if not options["few_turns"] < options["many_turns"]:
            raise rope.error("low_freq_factor must be below high_freq_factor.")
    else:
        options["few_turns"] = number("beta_slow", 1.0)
        options["many_turns"] = number("beta_fast", 32.0)
        usual = yarn_factor(1.0)
        if all(rope.fields.get(name) for name in YARN_SCALES):
            usual = yarn_factor(number("mscale")) / yarn_factor(number("mscale_all_dim"))
        options["attention_factor"] = number("attention_factor", usual)
        options["whole_pairs"] = rope.get("truncate", bool, True)
    return RotaryScaling(kind=kind, factor=factor, **options)


def write_scaling(scaling: RotaryScaling) -> dict[str, Any]:
    """Invert `read_scaling`."""
    fields = {theirs: getattr(scaling, ours) for ours, theirs in SCALING[scaling.kind].items()}
    return {"rope_type": scaling.kind} | fields
