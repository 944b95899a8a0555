"""Parameter-efficient fine-tuning: LoRA, BitFit and adapters, the baselines of STR. Call `merge` before saving.

    full      all parameters
    adapter   adds a bottleneck after each attention and each MLP: about 2.5% of the model's parameters
    bitfit    the biases, including those of the layer norms
    lora      adds low-rank updates to attention's q and v

Everything else is frozen, including embeddings and LM head. Before training, the model computes the same as before.
LoRA and BitFit save a plain checkpoint; one with adapters can be read only by this project.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from kernels.linear import linear
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, AdaptedLinear, GPTConfig, Linear, beside

ADAPTER_SHARE = 0.025  # of the model's parameters; the paper: 2 to 3%
LORA_RANK, LORA_ALPHA = 8, 16.0  # not in the paper


class LoRALinear(Linear):
    """Attention's joint projection to q, k and v with low-rank updates of q and v (Hu et al. 2021). [STR lora]

        q = W_q x + alpha / rank * up_q down_q x        v likewise, k unchanged

    Takes over the weights of the `layer` it replaces. `up` starts at 0, `down` like any linear layer.
    """

    def __init__(self, layer: Linear, config: GPTConfig, rank: int, alpha: float):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        C, self.rows = layer.in_features, config.qkv_rows
        self.q_down, self.v_down = (
            beside(layer.weight, torch.empty(rank, C).uniform_(-(C**-0.5), C**-0.5)) for _ in "qv"
        )
        self.q_up, self.v_up = (beside(layer.weight, torch.zeros(self.rows[part], rank)) for part in (0, 2))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, C) -> (B, S, (H + 2K) * D)"""
        q, k, v = super().forward(x).split(self.rows, dim=-1)
        q = q + linear(linear(x, self.q_down), self.q_up) * self.scale
        v = v + linear(linear(x, self.v_down), self.v_up) * self.scale
        return torch.cat((q, k, v), dim=-1)

    @torch.no_grad()
    def merged(self) -> Linear:
        """A plain layer that computes the same."""
        layer = Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        q, v = self.q_up @ self.q_down, self.v_up @ self.v_down  # (H * D, C), (K * D, C)
        layer.weight = nn.Parameter(self.weight + self.scale * torch.cat((q, torch.zeros_like(v), v)))
        layer.bias = self.bias
        return layer


def tune(model: GPT, how: str) -> None:
    """Add what `how` (full, adapter, bitfit or lora) trains and freeze the rest; InputError for any other `how`."""
    if how not in ("full", "adapter", "bitfit", "lora"):
        raise InputError(f"--tune {how}: must be full, adapter, bitfit or lora.")
    model.requires_grad_(how == "full")
    if how == "lora":  # [STR lora]
        for block in model.transformer.blocks:
            block.attention.qkv = LoRALinear(block.attention.qkv, model.config, LORA_RANK, LORA_ALPHA)
    elif how == "bitfit":  # [STR bitfit]
        for name, parameter in model.transformer.named_parameters():
            parameter.requires_grad_(name.endswith(".bias"))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InputError(f"--tune bitfit: a {model.config.architecture} model has no biases: choose another way.")
    elif how == "adapter":  # [STR adapter]
        if not model.config.adapter_size:  # a checkpoint may already have some
            add_adapters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".adapter_" in name)


def add_adapters(model: GPT) -> None:
    """Add two bottlenecks per block, each after a branch and before the residual sum, in parallel blocks too."""
    config, num_parameters = model.config, sum(parameter.numel() for parameter in model.parameters())
    # a bottleneck has two matrices (C, size); its two biases are negligible
    size = max(1, round(ADAPTER_SHARE * num_parameters / (config.n_layer * 2 * 2 * config.d_model)))
    model.config = model.transformer.config = replace(config, adapter_size=size)
    for block in model.transformer.blocks:
        block.attention.out = AdaptedLinear(block.attention.out, size)
        block.mlp.down = AdaptedLinear(block.mlp.down, size)


def merge(model: GPT) -> GPT:
    """The model to save: LoRA's updates are merged into the weights, all other tensors are shared with `model`.

    `model` itself is unchanged and can be trained further.
    """
    tensors = (*model.parameters(), *model.buffers())
    plain = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})  # new modules, same tensors
    for block in plain.transformer.blocks:
        if isinstance(block.attention.qkv, LoRALinear):
            block.attention.qkv = block.attention.qkv.merged()
    return plain
