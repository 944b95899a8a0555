"""Optimizer steps that skip a loss or gradient of NaN, and which parameters are trained and which decay."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from nanorlhf import distributed
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.training.settings import RunArgs

MAX_SKIPPED_STEPS = 3
"""in a row: a rare overflow passes, a diverged run does not recover"""


class FiniteSteps:
    """An optimizer that skips and counts the steps whose loss or gradient is not finite.

    A skipped step leaves parameters and optimizer state as they are. More than MAX_SKIPPED_STEPS in a row raise
    InputError, which says `advice` and that the last checkpoint in `out` is from before them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, out: Path, advice: str):
        self.optimizer = optimizer
        self.advice = f"{advice}; {out} keeps the last checkpoint before it."
        self.skipped = 0
        self.in_a_row = 0

    def step(self, parameters: Iterable[nn.Parameter], loss: float, max_norm: float | None = None) -> bool:
        """Clip the gradient to max_norm, unless that is None, and take a step; returns whether it was taken.

        Loss and gradients belong to the global batch, so all ranks decide alike.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not math.isfinite(loss) or not distributed.full_tensor(norm).isfinite():
            self.skipped += 1
            self.in_a_row += 1
            if self.in_a_row > MAX_SKIPPED_STEPS:
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

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict) -> None:
        distributed.load_optimizer(self.optimizer, state["optimizer"])
        self.skipped = state["skipped"]
        self.in_a_row = state["in_a_row"]


def adamw_steps(
    args: RunArgs, parameters: Iterable[nn.Parameter], decay_vectors: bool = True, advice: str | None = None
) -> FiniteSteps:
    """Steps of AdamW as --lr and --adam say."""
    groups = parameter_groups(parameters, args.adam.weight_decay, decay_vectors)
    # [N+ 9, 10, 20] eps 1e-5, not PyTorch's 1e-8
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam.betas, eps=args.adam.eps, fused=True)
    return FiniteSteps(optimizer, args.out, advice or f"lower --lr ({args.lr})")


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay_vectors: bool) -> list[dict]:
    """AdamW's parameter groups: one, or a second one without weight decay for biases and layer norms (1-D)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if decay_vectors:
        return [{"params": trained, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def train_linear_layers(model: ScalarModel) -> None:
    """[SO rm] Freeze all but the first and the last block, the linear layers between them, and the head.

    Frozen are the embeddings, the layer norms between those blocks and the final one.
    """
    blocks = model.transformer.blocks
    model.requires_grad_(False)
    for trained in (blocks[0], blocks[-1], model.score):
        trained.requires_grad_(True)
    for module in blocks.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)


# -------------------------------------------------------------------------------------------------- the learning rate
def lr_factor(schedule: str, step: int, num_steps: int, warmup_steps: int = 0) -> float:
    """The factor on the peak learning rate at step 0, 1, ..., num_steps - 1.

    linear: 1 - step / num_steps [N+ 20];  cosine: half a cosine down to 0 [N+ 9, 10];  constant: 1.
    Before that, warmup_steps of linear warm-up, from 1 / warmup_steps to 1, then the schedule over the other steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (num_steps - warmup_steps)
    return {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}[schedule]


def check_warmup(warmup_steps: int, num_steps: int) -> None:
    """Raise InputError for a warm-up that leaves no step at the peak learning rate; 0 steps need none."""
    if 0 < num_steps <= warmup_steps:
        raise InputError(f"--warmup-steps {warmup_steps} is not shorter than the {num_steps} steps of the schedule.")
