"""Findings of the doctor, their order and their printed form."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that the doctor has found."""

    name: str
    """name of the check as listed in docs/troubleshooting.md, such as `first-ratio`"""
    seen: str
    """the symptom, with its numbers"""
    means: str
    """the usual cause"""
    where: str
    """where to look: a file and a function, or a setting"""

    def __str__(self) -> str:
        text = f"{self.name}: {self.seen} {self.means} Look at {self.where}. See docs/troubleshooting.md."
        return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")


ORDER = (
    # data, models, sampling
    *("crash", "seam", "held-out", "order", "families", "padding", "padding-difference", "dropout", "model-gradient"),
    *("pad-sampled", "sampler-logprobs", "sampler-support", "sampler-gap", "sampler-distribution", "sampled-entropy"),
    *("random-numbers", "identical-responses"),
    *("text-after-eos", "masks", "cut-programs"),
    # model outputs, and the stages before PPO
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
    # metrics, and the run as a whole
    *("statistics", "mean-ratio", "kl-estimators", "kl-negative", "kl-controller", "clip-never", "clip-often"),
    *("value-vanishes", "value-explains-nothing", "kl-exploding", "entropy-gone", "eos-rate", "length-collapse"),
    *("length-limit", "skipped-steps", "not-finite", "score-flat", "reward-falls", "over-optimised"),
    *("checkpoint", "seeds", "resuming", "processes"),
)
"""names of findings from the input to the end of a run: a bug also causes findings downstream"""
FOLLOWING = "these may follow:"


def nearest_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sort findings by their distance from the input; the sort is stable."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.name))


def paragraphs(findings: Sequence[Finding]) -> str:
    """Return the first finding as text, followed under a heading by the findings that it may have caused."""
    first, *following = map(str, findings)
    return "\n\n".join([first, *([FOLLOWING] if following else []), *following])


def report(findings: Sequence[Finding]) -> int:
    """Print a paragraph per finding, and return the exit status: 1 if there are findings, else 0."""
    print(paragraphs(findings) if findings else "no findings")
    return 1 if findings else 0
