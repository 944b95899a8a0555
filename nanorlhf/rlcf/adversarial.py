"""Training step of the discriminator, which learns to distinguish the policy's programs from written ones.
[RLCF section 4]
"""

from contextlib import AbstractContextManager

import torch

from nanorlhf import distributed
from nanorlhf.padding import micro_batches
from nanorlhf.rlcf.discriminator import Discriminator
from nanorlhf.training.optimizer import FiniteSteps


def adversarial_step(
    discriminator: Discriminator,
    steps: FiniteSteps,
    pairs: list[tuple[dict, str]],
    micro_batch_size: int,
    autocast: AbstractContextManager,
    frozen: bool,
) -> dict[str, float]:
    """Take one step that lowers D(x, y', y), where y' is the policy's program and y the written one; return metrics.

    pairs   this rank's pairs: an example's record and the policy's program for it
    frozen  only measure
    The metrics are from before the step, over all ranks: the mean of D and the share of programs it recognised.
    """
    device = next(discriminator.mlp.parameters()).device
    totals = torch.tensor([0.0, 0.0, len(pairs)], device=device)  # D, recognised, count
    num_pairs = distributed.all_sum(totals.clone())[2].clamp(min=1)
    steps.zero_grad()
    for batch in micro_batches(pairs, micro_batch_size):
        with autocast, torch.set_grad_enabled(not frozen):
            comparison = discriminator.compare_pairs(batch)
        if not frozen:
            (comparison.sum() / num_pairs).backward()
        totals[:2] += torch.stack((comparison.detach().sum(), (comparison < 0).sum()))
    score, accuracy = (distributed.all_sum(totals)[:2] / num_pairs).tolist()
    if not frozen:
        for parameter in discriminator.parameters():  # a rank where no program passed has no gradients
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        distributed.sum_gradients(discriminator)
        steps.step(discriminator.parameters(), score)
    metrics = {"discriminator/score": score, "discriminator/accuracy": accuracy}
    return metrics | {"discriminator/skipped_steps": steps.skipped}


@torch.no_grad()
def compare_with_written(discriminator: Discriminator, pairs: list[tuple[dict, str]], size: int) -> torch.Tensor:
    """Return D(x, y', y), (n,): above 0 if the sampled program y' looks more human-written than the written one, y."""
    none = torch.zeros(0, device=next(discriminator.mlp.parameters()).device)
    return torch.cat([none, *map(discriminator.compare_pairs, micro_batches(pairs, size))])
