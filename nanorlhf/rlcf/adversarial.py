"""The discriminator within PPO: after each update of the policy it learns to tell its programs. [RLCF section 4]"""

from typing import Any

import torch

from nanorlhf import distributed
from nanorlhf.padding import micro_batches
from nanorlhf.rlcf.discriminator import load_discriminator
from nanorlhf.rlcf.feedback import Checked
from nanorlhf.training.optimizer import FiniteSteps


class Adversary:
    """A discriminator D and the optimizer that trains it against the policy, unless --freeze-discriminator."""

    def __init__(self, args: Any, device: torch.device):
        self.frozen, self.compiles = args.freeze_discriminator, args.compiler
        self.lr, self.micro_batch_size = args.discriminator_lr, args.micro_batch_size
        self.discriminator, self.device = load_discriminator(args.discriminator, device), device
        optimizer = torch.optim.AdamW(self.discriminator.parameters(), lr=self.lr, fused=True)
        self.steps = FiniteSteps(optimizer, args, f"lower --discriminator-lr ({self.lr})")
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def turn(self, findings: list[tuple[list[dict], Checked]], progress: float) -> dict[str, float]:
        """One step that lowers D(x, y', y), the policy's program y' compared with the written one y; returns metrics.

        findings  of this rank's rollout: records, and what the compiler said of the policy's programs for them
        progress  the schedule's factor on the learning rate
        The metrics are of before the step, over all ranks: the mean of D, and the share of programs it found out.
        """
        pairs = [
            (record, text)
            for records, checked in findings
            for record, text, passes in zip(records, checked.texts, checked.passes.tolist(), strict=True)
            if (passes or not self.compiles) and text != record["response"]  # D(x, y, y) is 0: nothing to learn
        ]
        model = self.discriminator
        totals = torch.tensor([0.0, 0.0, len(pairs)], device=self.device)  # D, found out, count
        num_pairs = distributed.all_sum(totals.clone())[2].clamp(min=1)
        self.steps.optimizer.zero_grad()
        for some in micro_batches(pairs, self.micro_batch_size):
            queries, written = ([record[name] for record, _ in some] for name in ("query", "response"))
            with self.autocast, torch.set_grad_enabled(not self.frozen):
                comparison = model.compare(queries, [text for _, text in some], written)
            if not self.frozen:
                (comparison.sum() / num_pairs).backward()
            totals[:2] += torch.stack((comparison.detach().sum(), (comparison < 0).sum()))
        score, accuracy = (distributed.all_sum(totals)[:2] / num_pairs).tolist()
        if not self.frozen:
            for parameter in model.parameters():  # a rank on which nothing passed has no gradients
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            distributed.sum_gradients(model)
            self.steps.set_lr(self.lr * progress)
            self.steps.step(model.parameters(), score)
        metrics = {"discriminator/score": score, "discriminator/accuracy": accuracy}
        return metrics | {"discriminator/skipped_steps": self.steps.skipped}
