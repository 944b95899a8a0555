"""The reward of RLCF: what a compiler says of a program, and what a discriminator says of those that pass."""

import weakref
from typing import Any

import torch
from torch import Tensor

from nanorlhf.dataset import Demonstration
from nanorlhf.reward import RewardModel
from nanorlhf.rlcf.adversarial import Adversary
from nanorlhf.rlcf.discriminator import grounding
from nanorlhf.rlcf.error_profile import profile_metrics
from nanorlhf.rlcf.feedback import Checked, check_responses, training_compiler
from nanorlhf.rlcf.localisation import truncate_at_error
from nanorlhf.tokenizer import Tokenizer, token_bytes


class Compiler(RewardModel):
    """[RLCF alg 1] A program that fails is cut after the token to blame, for -1; a discriminator scores the others."""

    def __init__(self, args: Any, tokenizer: Tokenizer, record: dict, device: torch.device):
        self.name, self.models = f"--discriminator {args.discriminator}", []
        self.args, self.tokenizer = args, tokenizer
        self.compiler, self.pieces = training_compiler(record, args.error_prone_jar), token_bytes(tokenizer)
        weakref.finalize(self, self.compiler.close)  # its process ends with the run
        self.adversary = Adversary(args, device) if args.discriminator is not None else None
        if self.adversary is not None:
            self.parts = {"discriminator": self.adversary.discriminator, "discriminator_steps": self.adversary.steps}
        self.findings: list[tuple[list[dict], Checked]] = []  # of this rollout: records, and what the compiler said

    def score(self, rows: list[Demonstration], query: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        records = [row.record for row in rows]
        checked = check_responses(records, response, self.compiler, self.pieces, self.tokenizer.eos_id)
        self.findings.append((records, checked))
        passes = checked.passes if self.args.compiler else torch.ones_like(checked.passes)  # (b,)
        comparison, kept = passes.float(), passes.nonzero().flatten().tolist()
        if self.adversary is not None and kept:  # D(x, y', y) > 0: the sampled program looks more real than the written
            queries, written = ([records[i][name] for i in kept] for name in ("query", "response"))
            comparison[kept] = self.adversary.discriminator.compare(queries, [checked.texts[i] for i in kept], written)
        scores = grounding(passes, torch.ones_like(passes), comparison)  # what people wrote passes
        if self.args.compiler and self.args.localise:
            response = truncate_at_error(response, checked.error_index, self.tokenizer.pad_id)
        return response, scores

    def learn(self, progress: float) -> dict[str, float]:
        findings, self.findings = self.findings, []
        metrics = profile_metrics([checked for _, checked in findings])
        return metrics if self.adversary is None else metrics | self.adversary.turn(findings, progress)
