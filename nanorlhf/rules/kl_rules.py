"""What the KL to the reference says: of PPO, GRPO and RLCF, by their metrics."""

import math
from statistics import median

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, Rows, mean, sum_error
from nanorlhf.rules.thresholds import limit

ESTIMATES = ("objective/kl", "objective/kl_k3", "objective/kl_exact")


def first_kl(record: Record) -> Finding | None:
    """Before the first step policy and reference are the same model."""
    for row in record.having(*ESTIMATES, "response_length"):
        largest = max(ESTIMATES, key=lambda name: abs(row[name]))
        most = limit("first_kl" if record.is_float32 else "first_kl_bfloat16") * row["response_length"]
        if row["step"] == 0 and abs(row[largest]) > most:
            shown = ", ".join(f"{name} {row[name]:.3g}" for name in ESTIMATES)
            return Finding(
                name="first-kl",
                seen=f"Before any step the KL is not 0: {shown} nats per response.",
                means="Policy and reference are still the same model, so they are read in two ways: at two "
                "temperatures, with two masks or positions, with dropout, or from two checkpoints.",
                where="read_logprobs in nanorlhf/logprobs.py, and reference in nanorlhf/peft.py",
            )
    return None


def kl_stays_zero(record: Record) -> Finding | None:
    """The policy moves away from its own rollouts, and not from the reference."""
    rows = record.having(*ESTIMATES, "policy/approx_kl", "response_length")
    moved = mean(rows[:-1], "policy/approx_kl") * mean(rows, "response_length")  # nats per response and update
    furthest = max((abs(row[name]) for row in rows[1:] for name in ESTIMATES), default=math.nan)
    if len(rows) < 3 or not moved > limit("movement") or not furthest < limit("kl_per_movement") * moved:
        return None
    return Finding(
        name="kl-stays-zero",
        seen=f"The KL stays at 0 (at most {furthest:.1g} nats per response in {len(rows)} updates), although each "
        f"update moves the policy by about {moved:.2g}.",
        means="The reference moves along: it is the policy itself, not a frozen copy of it, or it keeps LoRA's "
        "updates. No --kl-coef holds such a policy.",
        where="reference in nanorlhf/peft.py",
    )


def kl_negative(record: Record) -> Finding | None:
    """The mean of k1 under the policy's own samples is a KL: not below 0 by more than chance."""
    _, rows = record.quarters(*ESTIMATES, "response_length")
    if not is_below_zero(record, rows):
        return None
    return Finding(
        name="kl-negative",
        seen=f"In the last {len(rows)} updates objective/kl is {mean(rows, 'objective/kl'):.3g} nats per response, "
        "below 0 by more than chance.",
        means="The mean of log policy - log reference over the policy's samples can't be negative: the samples come "
        "from another distribution, the two are swapped, or the masks count what was not sampled.",
        where="Sampler.writer in nanorlhf/training/sampler.py, and response_kl in nanorlhf/training/update_metrics.py",
    )


def is_below_zero(record: Record, rows: Rows) -> bool:
    """Whether objective/kl of these updates is further below 0 than chance takes it.

    Over the policy's samples E[reference / policy] = 1. So the product of reference / policy over n responses has the
    expectation 1, for any n and any policies, and by Markov's inequality the sum of their k1 is below -a with a
    probability of at most exp(-a). A t-test would not do: a few responses rarely contain the rare ones by which k1 is
    far above 0, and their deviation is then too small.
    """
    if record.sampler == "other" or any("compile_rate" in row for row in rows):
        return False  # where a program is cut may depend on what follows
    is_exact = record.is_float32 and record.sampler == "policy"
    rounding = limit("first_kl" if is_exact else "first_kl_bfloat16") * mean(rows, "response_length")
    return (mean(rows, "objective/kl") + rounding) * record.num_responses(rows) < -limit("kl_evidence")


def kl_estimators(record: Record) -> Finding | None:
    """k1 and k3 estimate what kl_exact computes: their sums over a run agree, and so do those of most updates.

    k3 has no variance to speak of, as one token that the reference finds far likelier may outweigh all others. It does
    so in few updates.
    """
    rows = [row for row in record.having(*ESTIMATES) if row["objective/kl_exact"] > 0]
    exact = sum(row["objective/kl_exact"] for row in rows)
    nats = exact * record.number("batch_size", 1)  # of all responses; the variance of their k1 is about twice that
    if not nats > 0 or record.sampler == "other" or kl_negative(record) is not None:
        return None
    chance = sum_error(nats)
    k1, k3 = (sum(row[name] for row in rows) / exact for name in ESTIMATES[:2])
    median_k1, median_k3 = (median(row[name] / row["objective/kl_exact"] for row in rows) for name in ESTIMATES[:2])
    if min(abs(k1 - 1), abs(median_k1 - 1)) > limit("kl_agreement") + chance and (k1 < 1) == (median_k1 < 1):
        name, ratio = "objective/kl", k1
        means = (
            "k1 should average to the exact KL. A multiple of it is a mean where a sum belongs (over T columns with "
            "their padding), another sign, or a mask that leaves tokens out."
        )
        where = "response_kl in nanorlhf/training/update_metrics.py"
    elif len(rows) >= limit("rows") / 2 and min(k3, median_k3) - 1 > limit("k3_excess") + chance:
        name, ratio = "objective/kl_k3", k3
        means = (
            "With the sign of its log ratio swapped k3 is not the KL from policy to reference and grows far faster. "
            "Samples of another distribution than the policy's do the same."
        )
        where = "k3 in kernels/kl.py"
    else:
        return None
    return Finding(
        name="kl-estimators",
        seen=f"Over {len(rows)} updates {name} sums to {ratio:.3g} of objective/kl_exact, {exact:.3g} nats.",
        means=means,
        where=where,
    )


def kl_exploding(record: Record) -> Finding | None:
    _, rows = record.quarters(*ESTIMATES, "response_length")
    kl, length = mean(rows, "objective/kl"), mean(rows, "response_length")
    beta = record.number("kl_coef", 0.0)
    if not kl > limit("kl_per_token") * length > 0 or beta == 0 or record.algorithm == "online_dpo":
        return None  # of online DPO beta is not the weight of a penalty
    return Finding(
        name="kl-exploding",
        seen=f"With --kl-coef {beta:g} the KL has reached {kl:.3g} nats per response, {kl / length:.2g} per token.",
        means="The penalty does not hold the policy: it is too small, of the wrong sign, or the learning rate is far "
        "too high.",
        where="the rewards in train_ppo.py (or the loss in train_grpo.py), --kl-coef and --lr",
    )


def kl_controller(record: Record) -> Finding | None:
    """The adaptive coefficient rises while the KL is above its target, and falls below it."""
    if record.settings.get("kl_target") is None:
        return None
    target = record.number("kl_target", math.nan)
    rows = record.having("objective/kl", "objective/kl_coef")
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
        seen=f"After {wrong} of {len(changes)} updates objective/kl_coef went the wrong way: it must rise where "
        f"objective/kl is above --kl-target {target:g} and fall where it is below.",
        means="The error has the wrong sign, or the controller is fed another KL than the one of a response that is "
        "logged.",
        where="KLCoefficient.update in nanorlhf/ppo.py, and beta.update in train_ppo.py",
    )


RULES = (first_kl, kl_stays_zero, kl_negative, kl_estimators, kl_exploding, kl_controller)
