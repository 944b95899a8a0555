"""Rules on the KL to the reference, from the metrics of PPO, GRPO and RLCF."""

import math
from statistics import median

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, Rows, mean, sum_error
from nanorlhf.rules.thresholds import limit

ESTIMATES = ("objective/kl", "objective/kl_k3", "objective/kl_exact")


def first_kl(record: Record) -> Finding | None:
    """Check that the KL is 0 before the first step, when policy and reference are the same model."""
    for row in record.rows_with(*ESTIMATES, "response_length"):
        largest = max(ESTIMATES, key=lambda name: abs(row[name]))
        most = limit("first_kl" if record.is_float32 else "first_kl_bfloat16") * row["response_length"]
        if row["step"] == 0 and abs(row[largest]) > most:
            shown = ", ".join(f"{name} {row[name]:.3g}" for name in ESTIMATES)
            return Finding(
                name="first-kl",
                seen=f"Before any step the KL is not 0: {shown} nats per response.",
                means="Policy and reference are still the same model, so they are evaluated differently: another "
                "temperature, mask or position, dropout, or another checkpoint.",
                where="read_logprobs in nanorlhf/logprobs.py, and reference in nanorlhf/peft.py",
            )
    return None


def kl_stays_zero(record: Record) -> Finding | None:
    """Check that a policy that moves away from its rollouts also moves away from the reference, unless that follows."""
    rows = record.rows_with(*ESTIMATES, "policy/approx_kl", "response_length")
    moved = mean(rows[:-1], "policy/approx_kl") * mean(rows, "response_length")  # nats per response and update
    furthest = max((abs(row[name]) for row in rows[1:] for name in ESTIMATES), default=math.nan)
    if record.number("reference.rate", 0.0) > 0 or len(rows) < 3:
        return None
    if not moved > limit("movement") or not furthest < limit("kl_per_movement") * moved:
        return None
    return Finding(
        name="kl-stays-zero",
        seen=f"The KL stays at 0 (at most {furthest:.1g} nats per response in {len(rows)} updates), although each "
        f"update moves the policy by about {moved:.2g}.",
        means="The reference moves with the policy: it is the policy itself instead of a frozen copy, or it includes "
        "the LoRA updates. No --kl-coef can constrain such a policy.",
        where="reference in nanorlhf/peft.py",
    )


def kl_negative(record: Record) -> Finding | None:
    """Check that the mean of k1 over the policy's own samples, which estimates a KL, is not significantly negative."""
    _, rows = record.quarters(*ESTIMATES, "response_length")
    if not is_below_zero(record, rows):
        return None
    return Finding(
        name="kl-negative",
        seen=f"In the last {len(rows)} updates objective/kl is {mean(rows, 'objective/kl'):.3g} nats per response, "
        "significantly below 0.",
        means="The expectation of log policy - log reference over the policy's samples can't be negative: the samples "
        "come from another distribution, the two are swapped, or the masks include tokens that were not sampled.",
        where="Sampler.writer in nanorlhf/training/sampler.py, and response_kl in nanorlhf/training/update_metrics.py",
    )


def is_below_zero(record: Record, rows: Rows) -> bool:
    """Test if objective/kl of these updates is below 0 by more than chance.

    Over the policy's samples E[reference / policy] = 1. So the product of reference / policy over n responses has
    expectation 1, for any n and any policies, and by Markov's inequality the sum of their k1 is below -a with a
    probability of at most exp(-a). A t-test doesn't work: k1 is large for rare responses, a small sample often has none
    of them, and its standard deviation is then too small.
    """
    if record.sampler == "other" or any("compile_rate" in row for row in rows):
        return False  # the position at which a program is truncated may depend on later tokens
    is_exact = record.is_float32 and record.sampler == "policy"
    rounding = limit("first_kl" if is_exact else "first_kl_bfloat16") * mean(rows, "response_length")
    return (mean(rows, "objective/kl") + rounding) * record.num_responses(rows) < -limit("kl_evidence")


def kl_estimators(record: Record) -> Finding | None:
    """Check that k1 and k3 agree with kl_exact, which they estimate, summed over the run and in most updates.

    k3 is heavy-tailed: a single token that is much likelier under the reference can outweigh all others. This happens
    in few updates, so the median is compared as well.
    """
    rows = [row for row in record.rows_with(*ESTIMATES) if row["objective/kl_exact"] > 0]
    exact = sum(row["objective/kl_exact"] for row in rows)
    nats = exact * record.number("batch_size", 1)  # over all responses; k1 has about twice this variance
    if not nats > 0 or record.sampler == "other" or kl_negative(record) is not None:
        return None
    chance = sum_error(nats)
    k1, k3 = (sum(row[name] for row in rows) / exact for name in ESTIMATES[:2])
    median_k1, median_k3 = (median(row[name] / row["objective/kl_exact"] for row in rows) for name in ESTIMATES[:2])
    if min(abs(k1 - 1), abs(median_k1 - 1)) > limit("kl_agreement") + chance and (k1 < 1) == (median_k1 < 1):
        name, ratio = "objective/kl", k1
        means = (
            "k1 should average to the exact KL. If it is a multiple, there is a mean in place of a sum (over T columns "
            "including padding), a wrong sign, or a mask that excludes tokens."
        )
        where = "response_kl in nanorlhf/training/update_metrics.py"
    elif len(rows) >= limit("rows") / 2 and min(k3, median_k3) - 1 > limit("k3_excess") + chance:
        name, ratio = "objective/kl_k3", k3
        means = (
            "With the wrong sign of the log ratio, k3 is not the KL from policy to reference and grows much faster. "
            "Samples from another distribution than the policy's have the same effect."
        )
        where = "k3 in kernels/kl.py"
    else:
        return None
    return Finding(
        name="kl-estimators",
        seen=f"Over {len(rows)} updates {name} sums to {ratio:.3g} times objective/kl_exact, {exact:.3g} nats.",
        means=means,
        where=where,
    )


def kl_exploding(record: Record) -> Finding | None:
    _, rows = record.quarters(*ESTIMATES, "response_length")
    kl, length = mean(rows, "objective/kl"), mean(rows, "response_length")
    beta = record.number("kl_coef", 0.0)
    if not kl > limit("kl_per_token") * length > 0 or beta == 0 or record.algorithm == "online_dpo":
        return None  # online DPO's beta is not the weight of a penalty
    return Finding(
        name="kl-exploding",
        seen=f"With --kl-coef {beta:g} the KL has reached {kl:.3g} nats per response, {kl / length:.2g} per token.",
        means="The penalty doesn't constrain the policy: it is too small or has the wrong sign, or the learning rate "
        "is far too high.",
        where="the rewards in train_ppo.py (or the loss in train_grpo.py), --kl-coef and --lr",
    )


def kl_controller(record: Record) -> Finding | None:
    """Check that the adaptive coefficient rises while the KL is above its target, and falls while it is below."""
    if record.settings.get("kl_target") is None:
        return None
    target = record.number("kl_target", math.nan)
    rows = record.rows_with("objective/kl", "objective/kl_coef")
    changes = [
        (row["objective/kl"] - target, after["objective/kl_coef"] - row["objective/kl_coef"])
        for row, after in zip(rows, rows[1:], strict=False)
    ]
    changes = [(error, change) for error, change in changes if error * change != 0]
    wrong = sum(error * change < 0 for error, change in changes)
    if len(changes) < 4 or wrong <= len(changes) / 2:
        return None
    return Finding(
        name="kl-controller",
        seen=f"After {wrong} of {len(changes)} updates objective/kl_coef moved in the wrong direction: it must rise if "
        f"objective/kl is above --kl-target {target:g}, and fall if it is below.",
        means="The error has the wrong sign, or the controller gets another KL than the logged KL per response.",
        where="KLCoefficient.update in nanorlhf/ppo.py, and beta.update in train_ppo.py",
    )


RULES = (first_kl, kl_stays_zero, kl_negative, kl_estimators, kl_exploding, kl_controller)
