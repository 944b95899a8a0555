"""What the doctor says when something is wrong."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, in four sentences."""

    name: str
    """of the check, as docs/troubleshooting.md lists it: `first-ratio`"""
    seen: str
    """what was seen, with its numbers"""
    means: str
    """what it usually means"""
    where: str
    """where to look: a file and a function, or a setting"""

    def __str__(self) -> str:
        text = f"{self.name}: {self.seen} {self.means} Look at {self.where}. See docs/troubleshooting.md."
        return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")


ORDER = (
    # data, models, sampling
    *("crash", "seam", "held-out", "order", "families", "padding", "padding-difference", "dropout", "model-gradient"),
    *("pad-sampled", "sampler-logprobs", "sampler-gap", "sampler-distribution", "sampled-entropy", "random-numbers"),
    *("text-after-eos", "masks", "cut-programs"),
    # what models say of texts, and the stages before PPO
    *("readings", "first-margin", "supervised-gradient", "loss-flat", "over-fitting"),
    *("sft-eos-rate", "accuracy-at-chance", "chosen-falls", "ties", "normalisation", "start-score"),
    *("reference-moves", "first-kl", "kl-stays-zero", "reference-point"),
    # scores, rewards, advantages
    *("score-at-the-end", "rule-inputs", "scores-alike", "missing-eos-score", "score-placement", "reward-sum"),
    *("token-rewards", "kl-penalty", "baseline", "gae", "returns", "whitening", "group-advantages"),
    *("groups-alike", "refills-in-vain"),
    # the loss, its gradient, the step
    *("first-ratio", "nan-after-the-end", "clipping", "slopes", "gradients", "micro-batches", "two-models"),
    *("exact-gradient", "frozen-weights", "optimizer", "schedule", "policy-stays", "policy-rests"),
    # what is logged, and what becomes of the run
    *("statistics", "mean-ratio", "kl-estimators", "kl-negative", "kl-controller", "clip-never", "clip-often"),
    *("value-vanishes", "value-explains-nothing", "kl-exploding", "entropy-gone", "eos-rate", "length-collapse"),
    *("length-limit", "skipped-steps", "not-finite", "score-flat", "reward-falls", "over-optimised"),
    *("checkpoint", "seeds", "resuming", "processes"),
)
"""the findings' names from the input to the end of a run: one bug shows first where it is, and then in what follows"""
FOLLOWING = "these may follow:"


def nearest_first(findings: Sequence[Finding]) -> list[Finding]:
    """Order findings by how near to the input they are; those of one name stay in their order."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.name))


def paragraphs(findings: Sequence[Finding]) -> str:
    """Return the first finding, and below a heading those that may follow from it."""
    first, *others = map(str, findings)
    return "\n\n".join([first, *([FOLLOWING] if others else []), *others])


def report(findings: Sequence[Finding]) -> int:
    """Print a paragraph per finding; returns the exit status, 1 where there is one."""
    print(paragraphs(findings) if findings else "nothing found")
    return 1 if findings else 0
