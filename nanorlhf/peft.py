"""Parameter-efficient fine-tuning: LoRA, BitFit and adapters, the baselines of STR.

    full      all parameters
    adapter   adds a bottleneck after each attention and each MLP: about 2.5% of the parameters
    bitfit    the biases, also in layer norms
    lora      adds low-rank updates to linear layers, by default to attention's q and v

Everything else is frozen, including embeddings and LM head; a scalar model's head is always
trained. Before training, the model computes the same as before. Call `merge` before saving. LoRA
and BitFit save an ordinary checkpoint; one with adapters can be read only by this project. With
LoRA the frozen weights serve twice: `reference` is the policy without its updates. Updates that the
library peft saved, ours too, are merged into their base model as it is loaded.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kernels.linear import ACTIVATIONS, linear
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.files import atomic, read_object, write_text
from nanorlhf.model import GPT, AdaptedLinear, Linear, ScalarModel, param_like
from nanorlhf.pretrained.directories import MERGE
from nanorlhf.pretrained.families import family_of
from nanorlhf.pretrained.families.family import ConfigFile
from nanorlhf.pretrained.layout import GATED, tensor_names, to_family, with_prefix
from nanorlhf.pretrained.weight_files import read_tensors, unwrapped

M = TypeVar("M", bound=GPT | ScalarModel)
ADAPTER_SHARE = 0.025  # of the model's parameters; the paper: 2 to 3%
LORA_RANK = 8  # not in the paper, nor is the scale
LORA_SCALE = 2.0
"""factor of the updates, alpha / rank: the usual one"""
Target = Literal["q", "k", "v", "out", "gate", "up", "down"]
QUERY_AND_VALUE: tuple[Target, ...] = ("q", "v")
TARGETS = {  # of a layer; q and kv are cross-attention's
    **{"qkv": ("q", "k", "v"), "q": ("q",), "kv": ("k", "v"), "out": ("out",)},
    **{"gate": ("gate",), "up": ("up",), "down": ("down",)},
}


# ------------------------------------------------------------------------------ 1. what is trained
def tune(
    model: GPT | ScalarModel,
    how: str,
    rank: int = LORA_RANK,
    targets: tuple[Target, ...] = QUERY_AND_VALUE,
) -> None:
    """Add what `how` (full, adapter, bitfit or lora) trains and freeze the rest.

    rank and targets (q, k, v, out, gate, up, down) are LoRA's. Raises InputError for any
    other `how`, and for a model that has nothing of the kind.
    """
    if how not in ("full", "adapter", "bitfit", "lora"):
        raise InputError(f"--tune {how}: must be full, adapter, bitfit or lora.")
    model.requires_grad_(how == "full")
    if isinstance(model, ScalarModel):
        model.score.requires_grad_(True)
    if how == "lora":  # [STR lora]
        add_updates(model, rank, targets)
    elif how == "bitfit":  # [STR bitfit]
        for name, parameter in model.transformer.named_parameters():
            parameter.requires_grad_(name.endswith(".bias"))
        if not any(parameter.requires_grad for parameter in model.transformer.parameters()):
            raise InputError(f"--tune bitfit: a {model.config.architecture} model has no biases.")
    elif how == "adapter":  # [STR adapter]
        if not model.config.adapter_size:  # a checkpoint may already have some
            add_adapters(model)
        for name, parameter in model.transformer.named_parameters():
            parameter.requires_grad_(".adapter_" in name)


def add_adapters(model: GPT | ScalarModel) -> None:
    """Add a bottleneck after attention and after the MLP, before the residual sum."""
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [(parent, name) for parent, name in linear_layers(model) if name in ("out", "down")]
    # a bottleneck has two matrices (C, size); its two biases are negligible
    size = max(1, round(ADAPTER_SHARE * num_parameters / (len(layers) * 2 * config.d_model)))
    model.config = model.transformer.config = replace(config, adapter_size=size)
    for parent, name in layers:
        setattr(parent, name, AdaptedLinear(getattr(parent, name), size))


# ----------------------------------------------------------------------------------------- 2. LoRA
class LoRALinear(Linear):
    """A linear layer with low-rank updates (Hu et al. 2021), each of some of its rows. [STR lora]

        y = W x,  then  y[rows] += LORA_SCALE * up down x

    rows: those of q and of v, say, of q, k and v. Takes over the weights of the `layer` it
    replaces. `up` starts at 0, `down` like any linear layer.
    """

    def __init__(self, layer: Linear, rows: list[slice], rank: int):
        K, N, has_bias = layer.in_features, layer.out_features, layer.bias is not None
        super().__init__(K, N, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.activation = layer.activation
        self.rows, self.rank = rows, rank
        self.downs, self.ups = nn.ParameterList(), nn.ParameterList()
        for some in rows:
            down = torch.empty(rank, K).uniform_(-(K**-0.5), K**-0.5)
            up = torch.zeros(some.stop - some.start, rank)
            self.downs.append(param_like(layer.weight, down))
            self.ups.append(param_like(layer.weight, up))

    def updates(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """rows, down (rank, K) and up (rows, rank), LORA_SCALE within it."""
        for some, down, up in zip(self.rows, self.downs, self.ups, strict=True):
            yield some, down, up * LORA_SCALE

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)"""
        y = linear(x, self.weight, self.bias)
        for some, down, up in self.updates():
            y[..., some].add_(linear(linear(x, down), up))
        return ACTIVATIONS[self.activation][0](y)

    @torch.no_grad()
    def merged(self) -> Linear:
        """An ordinary layer that computes the same."""
        layer = self.without_updates()
        layer.weight = nn.Parameter(self.weight.clone())
        for some, down, up in self.updates():
            layer.weight[some] += up @ down
        return layer

    def without_updates(self) -> Linear:
        """The layer that was replaced, with the same weights."""
        has_bias = self.bias is not None
        layer = Linear(self.in_features, self.out_features, has_bias, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        layer.activation = self.activation
        return layer


def add_updates(model: GPT | ScalarModel, rank: int, targets: tuple[Target, ...]) -> None:
    config, found = model.config, set[str]()
    q, k, _ = config.qkv_rows
    spans = {
        "qkv": {"q": slice(0, q), "k": slice(q, q + k), "v": slice(q + k, q + 2 * k)},
        "kv": {"k": slice(0, k), "v": slice(k, 2 * k)},
    }
    for parent, name in linear_layers(model):
        layer = getattr(parent, name)
        updated = [target for target in TARGETS[name] if target in targets]
        if updated and isinstance(layer, AdaptedLinear):
            raise InputError(f"--lora-targets {updated[0]}: the checkpoint has adapters there.")
        if updated:
            all_rows = slice(0, layer.out_features)
            rows = [spans.get(name, {}).get(target, all_rows) for target in updated]
            setattr(parent, name, LoRALinear(layer, rows, rank))
        found.update(updated)
    for target in targets:
        if target not in found:
            architecture = config.architecture
            raise InputError(f"--lora-targets {target}: a {architecture} model has no such layer.")


def linear_layers(model: GPT | ScalarModel) -> Iterator[tuple[nn.Module, str]]:
    """The linear layers of all blocks: the module that holds each, and its name there."""
    for block in model.transformer.blocks:
        for part in ("attention", "mlp", "cross"):  # cross: of T5's decoder
            parent: Any = getattr(block, part, None)
            for name in TARGETS:
                if getattr(parent, name, None) is not None:
                    yield parent, name


def has_updates(model: GPT | ScalarModel) -> bool:
    return any(isinstance(module, LoRALinear) for module in model.modules())


def replace_updated(model: M, new: Callable[[LoRALinear], Linear]) -> M:
    """New modules on the same tensors, `new(layer)` in place of each layer with updates."""
    tensors = (*model.parameters(), *model.buffers())
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for parent, name in linear_layers(other):
        if isinstance(layer := getattr(parent, name), LoRALinear):
            setattr(parent, name, new(layer))
    return other


def merge(model: M) -> M:
    """The model to save: LoRA's updates are merged into the weights, all other tensors are shared.

    `model` itself is unchanged and can be trained further.
    """
    return replace_updated(model, LoRALinear.merged)


def reference(policy: GPT) -> GPT:
    """The frozen policy that the KL is taken to: a copy, or with LoRA the policy's own weights
    without the updates.

    Call it before training and, as sharding replaces a model's weights, before sharding.
    """
    if has_updates(policy):
        return replace_updated(policy, LoRALinear.without_updates)
    return copy.deepcopy(policy).requires_grad_(False)


# -------------------------------------------------------------------------------- 3. peft's format
def save_updates(model: GPT, directory: Path, base: str) -> None:
    """Write LoRA's updates as the library peft does, which loads them on top of checkpoint `base`.

    Where a family stores q, k and v as one tensor, peft has one update of it: ours concatenated,
    with the sum of their ranks, and zeros at the rows that the one or the other leaves alone. The
    same where it stores gate and up as one.
    """
    config: GPTConfig = model.config
    family = family_of(config.architecture)
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
            for some, some_columns, up in zip(layer.rows, columns, ups, strict=True):
                some_columns[some] = up
            # as a bias: its rows in their order, and never transposed
            ups = to_family(f"{path}.bias", joined, config)
            downs = [torch.cat(downs)]
        else:
            stops = list(accumulate(config.qkv_rows[-len(names) :]))  # of q, k and v, or k and v
            names = [names[stops.index(some.stop)] for some in layer.rows]
        for name, down, up in zip(names, downs, ups, strict=True):
            module = name.removesuffix(".weight")
            ours = ".".join(path.split(".")[-2:])
            if family.fused_gate is not None and ours in GATED:
                module = module.replace(family.modules[ours], family.fused_gate)
            down_name, up_name = (f"base_model.model.{module}.lora_{x}.weight" for x in "AB")
            if family.fused_gate is not None and ours in GATED:
                other = torch.zeros_like(up)  # the rows of the tensor's other half
                up = torch.cat((up, other) if ours == GATED[0] else (other, up))
                if down_name in tensors:
                    down = torch.cat((tensors[down_name], down))
                    up = torch.cat((tensors[up_name], up), dim=1)
            tensors |= {down_name: down.contiguous(), up_name: up.contiguous()}
            ranks[".".join(module.split(".")[-2:])] = len(down)
        rank = layer.rank  # the same in all
    others = {module: number for module, number in ranks.items() if number != rank}
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": LORA_SCALE * rank,
        "task_type": "SEQ_2_SEQ_LM" if config.num_decoder_blocks else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {module: LORA_SCALE * number for module, number in others.items()},
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
    """The tensors of a base model with the updates that peft saved merged: W + scale B A.

    tensors       under the family's names, q, k, v and the gate as they are stored
    config_file   adapter_config.json
    file          the updates, and modules that were trained whole, such as a new head

    scale = lora_alpha / rank, or with use_rslora lora_alpha / sqrt(rank). Raises InputError for
    another kind of adapter.
    """
    settings = read_object(config_file)
    kind = settings.get("peft_type")
    if kind != "LORA" or settings.get("use_dora"):
        name = "DoRA" if kind == "LORA" else f"peft_type {kind!r:.40}"
        raise InputError(f"{config_file}: {name} isn't implemented, only LoRA: {MERGE}.")
    family = family_of(config.architecture)
    use_rslora = ConfigFile(settings, config_file).get("use_rslora", bool, False)
    merged = dict(tensors)
    updates = with_prefix(unwrapped(read_tensors(file), file), config, file)
    for name, tensor in updates.items():
        module, is_update, matrix = name.rpartition(".lora_")
        target = f"{module}.weight"
        if not is_update:
            merged[name] = tensor  # trained whole
            continue
        names = [f"{module}.lora_{letter}.weight" for letter in "AB"]
        if (
            name not in names
            or target not in tensors
            or not all(other in updates for other in names)
        ):
            raise InputError(
                f"{file}: {name} isn't an update of a layer of the base model: {MERGE}."
            )
        if matrix == "A.weight":  # the other half of the same update
            continue
        down, up = (updates[other].float() for other in names)  # (rank, K), (N, rank)
        weight = tensors[target].float()
        is_transposed = family.transposed and module != family.modules["lm_head"]
        shape = tuple(weight.t().shape if is_transposed else weight.shape)
        if weight.ndim != 2 or len(down) != up.size(-1) or (len(up), down.size(-1)) != shape:
            shapes = f"{tuple(up.shape)} x {tuple(down.shape)}"
            raise InputError(
                f"{file}: the update of {target} has shape {shapes} instead of {shape}."
            )
        rank = len(down)
        scale = lora_alpha(settings, module, config_file) / (rank**0.5 if use_rslora else rank)
        delta = scale * (up @ down)
        merged[target] = weight + (delta.t() if is_transposed else delta)
    return merged


def lora_alpha(settings: dict, module: str, config_file: Path) -> float:
    """lora_alpha of a module, which a regular expression in alpha_pattern may set."""
    patterns = settings.get("alpha_pattern") or {}
    try:
        keys = [key for key in patterns if re.match(rf"(.*\.)?({key})$", module)]
    except (TypeError, re.error) as error:
        raise InputError(
            f"{config_file}: alpha_pattern {patterns!r:.80} must have regular expressions as names."
        ) from error
    if keys:
        return ConfigFile(patterns, config_file).get(keys[0], float)
    return ConfigFile(settings, config_file).get("lora_alpha", float)
