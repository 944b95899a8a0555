"""Rules on EOS, length and entropy of the responses, from the metrics of PPO, GRPO and RLCF."""

import math

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, Rows, mean, pooled_error
from nanorlhf.rules.thresholds import limit


def chance_of_fall(record: Record, rows: Rows, std: float) -> float:
    """Bound the chance difference between two quarters of the run, for responses with this standard deviation.

    For a length, and for a response's entropy, callers pass the mean, which is about the standard deviation.
    """
    return math.sqrt(2) * pooled_error(std, record.num_responses(rows))


def eos_rate(record: Record) -> Finding | None:
    first, last = record.quarters("eos_rate")
    if any("compile_rate" in row for row in record.rows):  # a program that is truncated at its error has no EOS
        return None
    before, after = mean(first, "eos_rate"), mean(last, "eos_rate")
    chance = chance_of_fall(record, last, math.sqrt(max(0.0, after * (1 - after), before * (1 - before))))
    is_one_token = record.number("response_length", 2) == 1  # need not be EOS
    if not after < before - limit("eos_fall") - chance and (not after < limit("eos_rate") or is_one_token):
        return None
    if record.num_responses(last) < limit("responses"):
        return None
    trick = record.settings.get("missing_eos_score")
    return Finding(
        name="eos-rate",
        seen=f"{after:.0%} of the responses end in EOS, {before:.0%} at the beginning of the run "
        f"(--missing-eos-score {trick}).",
        means="The policy doesn't learn to stop: EOS is masked, the score of an unfinished response is not replaced, "
        "or --response-length is too short. If the rate is low from the beginning, SFT did not teach it.",
        where="eos_masks in nanorlhf/ppo.py, the EOS trick in the training script, demonstration_loss in train_sft.py",
    )


def length_collapse(record: Record) -> Finding | None:
    first, last = record.quarters("response_length")
    before, after = mean(first, "response_length"), mean(last, "response_length")
    if not after < limit("length_collapse") * before or before - after < chance_of_fall(record, last, before):
        return None
    return Finding(
        name="length-collapse",
        seen=f"Responses shrink from {before:.3g} to {after:.3g} tokens.",
        means="Empty responses get the highest reward: each token's KL costs more than the score gains, or the score "
        "doesn't depend on the response.",
        where="--kl-coef, and the scores in samples.jsonl",
    )


def length_limit(record: Record) -> Finding | None:
    first, last = record.quarters("response_length")
    before, after = mean(first, "response_length"), mean(last, "response_length")
    longest = record.number("response_length", 0)
    if not after > limit("length_limit") * longest > 0 or not before < 0.8 * longest:
        return None
    if longest < limit("rows") or after - before < chance_of_fall(record, last, before):
        return None  # with a limit of a few tokens, responses may well reach it
    return Finding(
        name="length-limit",
        seen=f"Responses grow from {before:.3g} to {after:.3g} tokens; the limit is {longest:g}.",
        means="Nothing makes the policy stop: the score favours length, or a response without EOS keeps its score.",
        where="--missing-eos-score, and the scores in samples.jsonl",
    )


def entropy_gone(record: Record) -> Finding | None:
    first, last = record.quarters("policy/entropy")
    before, after = mean(first, "policy/entropy"), mean(last, "policy/entropy")
    if not after < limit("entropy_left") * before or before - after < chance_of_fall(record, last, before):
        return None
    return Finding(
        name="entropy-gone",
        seen=f"policy/entropy fell from {before:.2g} to {after:.2g} nats per token.",
        means="The policy has collapsed to a single response: the learning rate is too high, the KL coefficient too "
        "low, or all advantages have the same sign.",
        where="--lr, --kl-coef, and whiten in nanorlhf/ppo.py",
    )


RULES = (eos_rate, length_collapse, length_limit, entropy_gone)
