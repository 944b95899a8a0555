"""Learning-rate schedules."""

import math

from nanorlhf.errors import InputError


def lr_factor(schedule: str, step: int, num_steps: int, warmup_steps: int = 0) -> float:
    """The factor on the peak learning rate at step 0, 1, ..., num_steps - 1.

    linear: 1 - step / num_steps [N+ 20];  cosine: half a cosine down to 0 [N+ 9, 10];  constant: 1.
    Before that, warmup_steps of linear warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (num_steps - warmup_steps)
    return {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress)), "constant": 1.0}[schedule]


def check_warmup(warmup_steps: int, num_steps: int) -> None:
    """Raise InputError for a warm-up that leaves no step at the peak learning rate; no steps need none."""
    if 0 < num_steps <= warmup_steps:
        raise InputError(
            f"--warmup-steps {warmup_steps} is not shorter than the {num_steps} steps of the schedule: lower it, or "
            "train for more epochs."
        )
