"""Parameter-efficient fine-tuning: LoRA, BitFit and adapters, the baselines of STR.

    full      all parameters
    adapter   adds a bottleneck after each attention and each MLP: about 2.5% of the parameters
    bitfit    the biases, also in layer norms
    lora      adds low-rank updates to linear layers, by default to attention's q and v

Everything else is frozen, including embeddings and LM head; a scalar model's head is always
trained. Tuning doesn't change the model's outputs until it is trained. Call `merge` before saving.
LoRA and BitFit save an ordinary checkpoint; only this project can read one with adapters. With
LoRA, the frozen weights are also the reference's: `reference` is the policy without its updates.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kernels.linear import ACTIVATIONS, linear
from nanorlhf.errors import InputError
from nanorlhf.layers import AdaptedLinear, Linear, param_like
from nanorlhf.model import GPT, ScalarModel

M = TypeVar("M", bound=GPT | ScalarModel)
ADAPTER_SHARE = 0.025  # fraction of the model's parameters; the paper: 2 to 3%
LORA_RANK = 8  # the paper gives neither rank nor scale
LORA_SCALE = 2.0
"""factor of the updates, alpha / rank; the usual value"""
Target = Literal["q", "k", "v", "out", "gate", "up", "down"]
QUERY_AND_VALUE: tuple[Target, ...] = ("q", "v")
TARGETS = {  # of each layer; q and kv are in cross-attention
    **{"qkv": ("q", "k", "v"), "q": ("q",), "kv": ("k", "v"), "out": ("out",)},
    **{"gate": ("gate",), "up": ("up",), "down": ("down",)},
}


# ------------------------------------------------------------------------- 1. trainable parameters
def tune(
    model: GPT | ScalarModel,
    how: str,
    rank: int = LORA_RANK,
    targets: tuple[Target, ...] = QUERY_AND_VALUE,
) -> None:
    """Add the parameters that `how` (full, adapter, bitfit or lora) trains, and freeze the rest.

    rank and targets (q, k, v, out, gate, up, down) are for LoRA. Raises InputError for any other
    `how`, and for a model without biases or without the targets.
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
    """A linear layer with low-rank updates to some of its rows (Hu et al. 2021). [STR lora]

        y = W x,  then  y[rows] += LORA_SCALE * up down x

    rows: one slice per update, for example q's and v's rows of a qkv layer. Takes over the weights
    of the `layer` it replaces. `up` starts at 0, `down` like any linear layer.
    """

    def __init__(self, layer: Linear, rows: list[slice], rank: int):
        K, N, has_bias = layer.in_features, layer.out_features, layer.bias is not None
        super().__init__(K, N, has_bias, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.activation = layer.activation
        self.rows, self.rank = rows, rank
        self.downs, self.ups = nn.ParameterList(), nn.ParameterList()
        for span in rows:
            down = torch.empty(rank, K).uniform_(-(K**-0.5), K**-0.5)
            up = torch.zeros(span.stop - span.start, rank)
            self.downs.append(param_like(layer.weight, down))
            self.ups.append(param_like(layer.weight, up))

    def updates(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, down (rank, K) and up (rows, rank); up includes LORA_SCALE."""
        for span, down, up in zip(self.rows, self.downs, self.ups, strict=True):
            yield span, down, up * LORA_SCALE

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self.activation)

    def project(self, x: Tensor, activation: str | None) -> Tensor:
        """x (..., K) -> (..., N)"""
        y = linear(x, self.weight, self.bias)
        for span, down, up in self.updates():
            y[..., span].add_(linear(linear(x, down), up))
        return ACTIVATIONS[activation][0](y)

    @torch.no_grad()
    def merged(self) -> Linear:
        """Return an ordinary layer that computes the same."""
        layer = self.without_updates()
        layer.weight = nn.Parameter(self.weight.clone())
        for span, down, up in self.updates():
            layer.weight[span] += up @ down
        return layer

    def without_updates(self) -> Linear:
        """Return the layer that was replaced, with the same weights."""
        has_bias = self.bias is not None
        layer = Linear(self.in_features, self.out_features, has_bias, device="meta")
        layer.weight, layer.bias = self.weight, self.bias
        layer.activation = self.activation
        return layer


def add_updates(model: GPT | ScalarModel, rank: int, targets: tuple[Target, ...]) -> None:
    config, updated_targets = model.config, set[str]()
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
        updated_targets.update(updated)
    for target in targets:
        if target not in updated_targets:
            architecture = config.architecture
            raise InputError(f"--lora-targets {target}: a {architecture} model has no such layer.")


def linear_layers(model: GPT | ScalarModel) -> Iterator[tuple[nn.Module, str]]:
    """Yield the linear layers of all blocks: the parent module and the layer's name in it."""
    for block in model.transformer.blocks:
        for part in ("attention", "mlp", "cross"):  # cross: in T5's decoder
            parent: Any = getattr(block, part, None)
            for name in TARGETS:
                if getattr(parent, name, None) is not None:
                    yield parent, name


def has_updates(model: GPT | ScalarModel) -> bool:
    return any(isinstance(module, LoRALinear) for module in model.modules())


def share(model: M) -> M:
    """Copy the modules; the copy shares all tensors, and may get other ones."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def replace_updated(model: M, new: Callable[[LoRALinear], Linear]) -> M:
    """Return `share(model)` with `new(layer)` for each layer with updates."""
    copied = share(model)
    for parent, name in linear_layers(copied):
        if isinstance(layer := getattr(parent, name), LoRALinear):
            setattr(parent, name, new(layer))
    return copied


def merge(model: M) -> M:
    """Return the model to save: LoRA's updates are merged, all other tensors are shared.

    `model` itself is unchanged and can be trained further.
    """
    return replace_updated(model, LoRALinear.merged)


def reference(policy: GPT) -> GPT:
    """Return the frozen reference policy for the KL: a copy, or with LoRA the policy's own weights
    without the updates.

    Call it before training, and before sharding, which replaces a model's weights.
    """
    if has_updates(policy):
        return replace_updated(policy, LoRALinear.without_updates)
    return copy.deepcopy(policy).requires_grad_(False)
