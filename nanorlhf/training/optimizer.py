"""Optimizer steps that skip non-finite losses and gradients, parameter groups, and the learning rate schedule."""

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
"""in a row: an occasional overflow is harmless, but a diverged run does not recover"""


class FiniteSteps:
    """An optimizer that skips and counts steps with a non-finite loss or gradient.

    A skipped step changes neither parameters nor optimizer state. More than MAX_SKIPPED_STEPS in a row raise InputError
    with `advice`; `out` keeps the last checkpoint before them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, out: Path, advice: str):
        self.optimizer = optimizer
        self.advice = f"{advice}; {out} keeps the last checkpoint before it."
        self.skipped = 0
        self.in_a_row = 0

    def step(self, parameters: Iterable[nn.Parameter], loss: float, max_norm: float | None = None) -> bool:
        """Clip the gradient to max_norm (None: no clipping) and take a step; return False if it was skipped.

        Loss and gradients are those of the global batch, so all ranks decide alike.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not math.isfinite(loss) or not distributed.full_tensor(norm).isfinite():
            self.skipped += 1
            self.in_a_row += 1
            if self.in_a_row > MAX_SKIPPED_STEPS:
                raise InputError(
                    f"loss or gradient is not finite for {self.in_a_row} step(s) in a row (the loss is {loss}): "
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
    """Return AdamW with the settings of --lr and --adam, as FiniteSteps."""
    groups = parameter_groups(parameters, args.adam.weight_decay, decay_vectors)
    # [N+ 9, 10, 20] eps 1e-5, not PyTorch's 1e-8
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam.betas, eps=args.adam.eps, fused=True)
    return FiniteSteps(optimizer, args.out, advice or f"lower --lr ({args.lr})")


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay_vectors: bool) -> list[dict]:
    """Return AdamW's parameter groups: one, or two if biases and layer norms (1-D) don't decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if decay_vectors:
        return [{"params": trained, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def train_linear_layers(model: ScalarModel) -> None:
    """Train the first and the last block, the linear layers between them, and the head [SO rm].

    The embeddings, the layer norms of the blocks in between and the final layer norm are frozen.
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
    """Return the factor on the peak learning rate at step 0, 1, ..., num_steps - 1.

    linear: 1 - step / num_steps [N+ 20];  cosine: half a cosine down to 0 [N+ 9, 10];  constant: 1.
    The first warmup_steps warm up linearly, from 1 / warmup_steps to 1; the schedule covers the remaining steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (num_steps - warmup_steps)
    return {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}[schedule]


def check_warmup(warmup_steps: int, num_steps: int) -> None:
    """Raise InputError if the warm-up leaves no step at the peak learning rate; a run of 0 steps needs none."""
    if 0 < num_steps <= warmup_steps:
        raise InputError(f"--warmup-steps {warmup_steps} must be less than the {num_steps} steps of the run.")
