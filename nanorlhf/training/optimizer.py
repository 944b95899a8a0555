"""Optimizer steps that skip a loss or gradient of NaN, and which weights are trained and which decay."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanorlhf import distributed
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.training.settings import SupervisedArgs


class FiniteSteps:
    """Steps of an optimizer; those whose loss or gradient is not finite are skipped and counted.

    A skipped step leaves weights and optimizer state as they are. More than --max-skipped-steps in a row raise
    InputError with `advice`, which names what to change.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, args: Any, advice: str):
        self.optimizer, self.limit = optimizer, args.max_skipped_steps
        self.advice = f"{advice}; {args.out} keeps the last checkpoint before it."
        self.skipped, self.in_a_row = 0, 0

    def step(self, parameters: Iterable[nn.Parameter], loss: float, max_norm: float | None = None) -> bool:
        """Take a step, its gradient clipped to max_norm unless that is None; returns whether it was taken.

        Loss and gradients are those of the global batch, so all ranks decide alike.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not math.isfinite(loss) or not distributed.full_tensor(norm).isfinite():
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if self.in_a_row > self.limit:
                raise InputError(
                    f"loss or gradient are not finite in {self.in_a_row} step(s) in a row (the loss is {loss}): "
                    f"{self.advice}"
                )
            return False
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        self.optimizer.step()
        self.in_a_row = 0
        return True

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict) -> None:
        distributed.load_optimizer(self.optimizer, state["optimizer"])
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]


def adamw_steps(model: nn.Module, args: SupervisedArgs) -> FiniteSteps:
    """Steps of AdamW on the weights of a model that are trained."""
    groups = parameter_groups(model.parameters(), args.weight_decay, args.decay_vectors)
    # fused: one pass over the weights instead of one per operation
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, fused=True)  # [N+ 9, 10]
    return FiniteSteps(optimizer, args, f"lower --lr ({args.lr})")


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay_vectors: bool) -> list[dict]:
    """Parameter groups for AdamW: all in one, or biases and layer norms (1-D) in a second one without weight decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if decay_vectors:
        return [{"params": trained, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def train_linear_layers(model: ScalarModel) -> None:
    """Freeze all but the first and the last block, the linear layers between them, and the head. [SO rm]

    Embeddings, the layer norms between and the final one stay as they are.
    """
    blocks = model.transformer.blocks
    model.requires_grad_(False)
    for part in (blocks[0], blocks[-1], model.score):
        part.requires_grad_(True)
    for module in blocks.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)
