"""Weights that follow the policy's: a moving reference (TR-DPO), and the average that Elastic Reset returns to."""

from dataclasses import dataclass

import torch
from torch import nn

from nanorlhf.cli import Fraction, PositiveInt
from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """Settings of a reference that follows the policy (Gorbatovski et al. 2024, Learn Your Reference Model)."""

    rate: Fraction = 0.0
    """alpha in reference = alpha * policy + (1 - alpha) * reference; 1: a copy of the policy; 0: a fixed reference"""
    every: PositiveInt = 1
    """steps between these updates (in PPO and GRPO: rollouts), each before a step"""

    def check(self, tune: str, shard: str) -> None:
        """Raise InputError for settings that have no effect or need a second copy of the policy's weights."""
        if self.rate == 0 and self.every > 1:
            raise InputError(f"--reference.every {self.every} needs a --reference.rate above 0.")
        if self.rate > 0:
            check_full_copy(f"--reference.rate {self.rate:g}", tune, shard)

    def is_due(self, step: int) -> bool:
        """Return whether the reference moves before this step, so that a run ends with the last step's reference."""
        return self.rate > 0 and step > 0 and step % self.every == 0


@dataclass(frozen=True, kw_only=True)
class ElasticResetSettings:
    """Settings of Elastic Reset (Noukhovitch et al. 2023, Language Model Alignment with Elastic Reset)."""

    every: PositiveInt | None = None
    """rollouts between resets of the policy to its moving average, and of the average to the initial policy; None: no
    resets"""
    decay: Fraction = 0.995
    """average = decay * average + (1 - decay) * policy after each rollout's steps"""

    def check(self, reference: ReferenceSettings, tune: str, shard: str) -> None:
        """Raise InputError for settings that have no effect, or that need weights which the run doesn't keep."""
        if self.every is None:
            if self.decay != ElasticResetSettings().decay:
                raise InputError(f"--elastic-reset.decay {self.decay:g} needs --elastic-reset.every.")
            return
        check_full_copy(f"--elastic-reset.every {self.every}", tune, shard)
        if reference.rate > 0:
            raise InputError(
                f"--elastic-reset.every {self.every} can't be combined with --reference.rate {reference.rate:g}: the "
                "average returns to the initial policy, which is the fixed reference."
            )

    def is_due(self, update: int) -> bool:
        """Return whether the policy is reset before this update; a run doesn't end with a reset."""
        return self.every is not None and update > 0 and update % self.every == 0


def check_full_copy(flag: str, tune: str, shard: str) -> None:
    """Check that the reference is a full copy of the policy on this process, with weights that may change."""
    if tune == "lora":
        raise InputError(f"{flag} can't be combined with --tune lora: the reference shares the policy's weights.")
    if shard != "none":
        raise InputError(f"{flag} can't be combined with --shard {shard}: it needs full copies of the weights.")


@torch.no_grad()
def move(model: nn.Module, target: nn.Module, rate: float) -> None:
    """Set each weight of the model to rate * target + (1 - rate) * weight; a rate of 1 copies the target's bits."""
    for weight, towards in zip(model.parameters(), target.parameters(), strict=True):
        weight.lerp_(towards, rate)
