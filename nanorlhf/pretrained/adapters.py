"""LoRA updates in the format of the peft library: save them next to a policy, and merge them when loading."""

import json
import re
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.files import atomic, read_object, write_text
from nanorlhf.model import GPT
from nanorlhf.peft import LORA_SCALE, LoRALinear
from nanorlhf.pretrained.directories import MERGE
from nanorlhf.pretrained.family import ConfigFile, find_family
from nanorlhf.pretrained.layout import GATED, tensor_names, to_family, with_prefix
from nanorlhf.pretrained.weight_files import read_tensors, unwrapped


def save_updates(model: GPT, directory: Path, base: str) -> None:
    """Save LoRA updates in peft's format, so that peft can load them on top of checkpoint `base`.

    If a family stores q, k and v as one tensor, peft has a single update for it: we concatenate ours, so the ranks add
    up, and fill the rows that an update doesn't touch with zeros. The same goes for a fused gate and up.
    """
    config: GPTConfig = model.config
    family = find_family(config.architecture)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, LoRALinear):
            continue
        names = tensor_names(f"{path}.weight", config)
        downs = [down.detach().cpu() for down in layer.downs]
        ups = [up.detach().cpu() for up in layer.ups]
        if len(names) == 1:
            joined = torch.zeros(layer.out_features, layer.rank * len(ups))
            columns = joined.split(layer.rank, dim=1)
            for rows, up_columns, up in zip(layer.rows, columns, ups, strict=True):
                up_columns[rows] = up
            # converted like a bias: rows in the family's order, never transposed
            ups = to_family(f"{path}.bias", joined, config)
            downs = [torch.cat(downs)]
        else:
            stops = list(accumulate(config.qkv_rows[-len(names) :]))  # of q, k and v, or k and v
            names = [names[stops.index(rows.stop)] for rows in layer.rows]
        for name, down, up in zip(names, downs, ups, strict=True):
            module = name.removesuffix(".weight")
            ours = ".".join(path.split(".")[-2:])
            if family.fused_gate is not None and ours in GATED:
                module = module.replace(family.modules[ours], family.fused_gate)
            down_name, up_name = (f"base_model.model.{module}.lora_{x}.weight" for x in "AB")
            if family.fused_gate is not None and ours in GATED:
                other = torch.zeros_like(up)  # rows of the tensor's other half
                up = torch.cat((up, other) if ours == GATED[0] else (other, up))
                if down_name in tensors:
                    down = torch.cat((tensors[down_name], down))
                    up = torch.cat((tensors[up_name], up), dim=1)
            tensors |= {down_name: down.contiguous(), up_name: up.contiguous()}
            ranks[".".join(module.split(".")[-2:])] = len(down)
        rank = layer.rank  # the same in all layers
    other_ranks = {module: number for module, number in ranks.items() if number != rank}
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": LORA_SCALE * rank,
        "task_type": "SEQ_2_SEQ_LM" if config.num_decoder_blocks else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(ranks),
        "rank_pattern": other_ranks,
        "alpha_pattern": {module: LORA_SCALE * number for module, number in other_ranks.items()},
        "fan_in_fan_out": family.transposed,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    with atomic(directory / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    write_text(directory / "adapter_config.json", json.dumps(settings, indent=2) + "\n")


def with_saved_updates(
    tensors: dict[str, Tensor], config: GPTConfig, config_file: Path, file: Path
) -> dict[str, Tensor]:
    """Merge updates saved by peft into the tensors of a base model: W + scale B A.

    tensors       under the family's names, with q, k, v and the gate as stored in the file
    config_file   adapter_config.json
    file          the updates, and modules that were trained in full, such as a new head

    scale = lora_alpha / rank, or lora_alpha / sqrt(rank) with use_rslora. Raises InputError for
    other kinds of adapters.
    """
    settings = read_object(config_file)
    kind = settings.get("peft_type")
    if kind != "LORA" or settings.get("use_dora"):
        name = "DoRA" if kind == "LORA" else f"peft_type {kind!r:.40}"
        raise InputError(f"{config_file}: {name} isn't implemented, only LoRA: {MERGE}.")
    family = find_family(config.architecture)
    use_rslora = ConfigFile(settings, config_file).get("use_rslora", bool, False)
    merged = dict(tensors)
    updates = with_prefix(unwrapped(read_tensors(file), file), config, file)
    for name, tensor in updates.items():
        module, is_update, matrix = name.rpartition(".lora_")
        target = f"{module}.weight"
        if not is_update:
            merged[name] = tensor  # trained in full
            continue
        names = [f"{module}.lora_{letter}.weight" for letter in "AB"]
        if name not in names or target not in tensors or not all(other in updates for other in names):
            raise InputError(f"{file}: {name} doesn't match a layer of the base model: {MERGE}.")
        if matrix == "A.weight":  # merged together with B
            continue
        down, up = (updates[other].float() for other in names)  # (rank, K), (N, rank)
        weight = tensors[target].float()
        is_transposed = family.transposed and module != family.modules["lm_head"]
        shape = tuple(weight.t().shape if is_transposed else weight.shape)
        if weight.ndim != 2 or len(down) != up.size(-1) or (len(up), down.size(-1)) != shape:
            shapes = f"{tuple(up.shape)} x {tuple(down.shape)}"
            raise InputError(f"{file}: update of {target}: expected shape {shape}, got {shapes}.")
        rank = len(down)
        scale = lora_alpha(settings, module, config_file) / (rank**0.5 if use_rslora else rank)
        delta = scale * (up @ down)
        merged[target] = weight + (delta.t() if is_transposed else delta)
    return merged


def lora_alpha(settings: dict, module: str, config_file: Path) -> float:
    """Return the lora_alpha of a module; a regular expression in alpha_pattern may set it."""
    patterns = settings.get("alpha_pattern") or {}
    try:
        keys = [key for key in patterns if re.match(rf"(.*\.)?({key})$", module)]
    except (TypeError, re.error) as error:
        raise InputError(
            f"{config_file}: the keys of alpha_pattern must be regular expressions, got {patterns!r:.80}."
        ) from error
    if keys:
        return ConfigFile(patterns, config_file).get(keys[0], float)
    return ConfigFile(settings, config_file).get("lora_alpha", float)
