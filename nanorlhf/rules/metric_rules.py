"""The rules of `doctor run` that need only metrics and settings. Each training run prints their findings at its end."""

import math

from nanorlhf.rules import kl_rules, ratio_rules, response_rules, score_rules, supervised_rules
from nanorlhf.rules.finding import Finding, nearest_first
from nanorlhf.rules.record import Record

NOT_FINITE = ("loss", "validation_loss", "policy/loss", "value/loss", "objective/kl", "objective/score")


def not_finite(record: Record) -> Finding | None:
    bad = [(name, row["step"]) for row in record.rows for name in NOT_FINITE if not math.isfinite(row.get(name, 0.0))]
    if not bad:
        return None
    name, step = bad[0]
    return Finding(
        name="not-finite",
        seen=f"{name} is not finite at step {step:g}, the first of {len(bad)} such values.",
        means="A logarithm of 0, a division by a count of 0, or steps so large that the weights overflow.",
        where="--lr and --dtype, and the metrics of the preceding steps",
    )


def skipped_steps(record: Record) -> Finding | None:
    rows = record.rows_with("skipped_steps")
    skipped = max((row["skipped_steps"] for row in rows), default=0)
    if not skipped > 0:
        return None
    return Finding(
        name="skipped-steps",
        seen=f"{skipped:g} optimizer steps were skipped in {len(rows)} logged steps because the loss or the gradient "
        "was not finite.",
        means="NaN or infinity at a masked position that is multiplied by 0, a bfloat16 overflow, or a learning rate "
        "that is too high.",
        where="--lr and --dtype, and the losses in nanorlhf/ppo.py",
    )


def examine_metrics(record: Record) -> list[Finding]:
    """Return the findings, nearest to the input first. Rules whose metrics the run doesn't log are skipped.

    Raises InputError for a setting that must be a number but isn't.
    """
    rules = (
        *(not_finite, skipped_steps),
        *ratio_rules.RULES,
        *kl_rules.RULES,
        *response_rules.RULES,
        *score_rules.RULES,
        *supervised_rules.RULES,
    )
    return nearest_first([finding for rule in rules if (finding := rule(record)) is not None])
