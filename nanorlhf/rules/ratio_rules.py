"""What the ratio of new to old probabilities says, and the sampler beside it: of PPO, GRPO and RLCF, by metrics."""

import math

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, Rows, mean, sum_error
from nanorlhf.rules.thresholds import limit


def typical_log_ratio(approx_kl: float) -> float:
    """sqrt(mean(x^2)) of the log ratios x, from half that mean."""
    return math.sqrt(2 * max(0.0, approx_kl))


def first_ratio(record: Record) -> Finding | None:
    rows = record.having("policy/first_ratio_error")
    error = max((row["policy/first_ratio_error"] for row in rows), default=math.nan)
    if not error > limit("first_ratio" if record.is_float32 else "first_ratio_bfloat16"):
        return None
    if record.ratio_is_to_the_sampler:
        return None
    return Finding(
        name="first-ratio",
        seen=f"Before any step a token's ratio is off 1 by {error:.2g} (policy/first_ratio_error).",
        means="The update computes other log-probabilities than the rollout for the same tokens and the same weights: "
        "another temperature, mask or position, dropout, or labels that are shifted.",
        where="response_logprobs in nanorlhf/logprobs.py and its two callers, read_logprobs and the training script",
    )


def mean_ratio(record: Record) -> Finding | None:
    """|mean(exp x) - 1| is about |mean(x)|, at most sqrt(mean(x^2)), where log ratios x are small."""
    rows = [row for row in record.having("policy/ratio", "policy/approx_kl") if row["policy/approx_kl"] < 0.01]

    def excess(row: dict[str, float]) -> float:
        return abs(row["policy/ratio"] - 1) - typical_log_ratio(row["policy/approx_kl"])

    off = [row for row in rows if excess(row) > limit("mean_ratio")]
    if len(off) < 2 or 2 * len(off) < len(rows):
        return None
    worst = max(off, key=excess)
    return Finding(
        name="mean-ratio",
        seen=f"policy/ratio is {worst['policy/ratio']:.4g} where policy/approx_kl, {worst['policy/approx_kl']:.2g}, "
        f"allows at most {typical_log_ratio(worst['policy/approx_kl']):.2g} off 1; {len(off)} of {len(rows)} updates "
        "are like this.",
        means="The mean is not over the tokens that count: padding, where the ratio is 1, is summed but not counted, "
        "or the other way round.",
        where="UpdateStatistics.add_tokens in nanorlhf/training/update_metrics.py",
    )


def sampler_gap(record: Record) -> Finding | None:
    rows = record.having("policy/sampler_gap")
    is_exact = record.sampler == "policy" and record.is_float32
    gap = max((row["policy/sampler_gap"] for row in rows), default=math.nan)
    # tokens that together have top_p or more are renormalised, by at most 1 / top_p
    filtered = -math.log(min(1.0, max(record.number("sampler.top_p", 1.0), 1e-9)))
    if not gap > limit("sampler_gap" if is_exact else "sampler_gap_rounded") + filtered:
        return None
    if record.number("sampler.sync_every", 1) > 1 or record.settings.get("sampler.url") is not None:
        return None  # a stale copy may be anywhere, and an engine is checked where it is called
    return Finding(
        name="sampler-gap",
        seen=f"The sampler's log-probabilities are up to {gap:.2g} nats per token off those of the policy "
        "(policy/sampler_gap).",
        means="Sampling and training disagree about the same tokens: the temperature, a filter, or the positions and "
        "masks of cached decoding.",
        where="generate in nanorlhf/generate.py, and KVCache in nanorlhf/cache.py",
    )


def sampled_entropy(record: Record) -> Finding | None:
    """Minus the log-probability of what was sampled averages to the entropy of the distribution it comes from."""
    rows = record.having("objective/entropy", "policy/entropy", "response_length")
    # DAPO's update reads other responses than were sampled first, where queries were sampled again or dropped
    rows = [row for row in rows if row.get("groups/refilled", 0) == row.get("groups/dropped", 0) == 0]
    expected = sum(row["policy/entropy"] * row["response_length"] for row in rows)
    sampled = sum(row["objective/entropy"] for row in rows)
    nats = record.number("batch_size", 1) * expected
    if record.sampler == "other" or not nats > 0:
        return None
    chance = sum_error(nats)
    if limit("entropy_low") - chance < sampled / expected < limit("entropy_high") + chance:
        return None
    is_low = sampled < expected
    return Finding(
        name="sampled-entropy",
        seen=f"Over {len(rows)} updates the samples' objective/entropy is {sampled / expected:.2g} of policy/entropy "
        "times response_length.",
        means="Samples are likelier than the update's policy makes them: they are filtered (top-p, top-k, greedy), or "
        "the update reads the policy at a higher temperature."
        if is_low
        else "Samples are less likely than the update's policy makes them: they are drawn at a higher temperature, or "
        "their labels are shifted.",
        where="Sampler.writer in nanorlhf/training/sampler.py, and generate in nanorlhf/generate.py",
    )


def with_advantages(rows: Rows) -> Rows:
    """Those in which some response was better than others to its query: elsewhere nothing is learned or clipped.

    With a value model even equal scores have advantages.
    """
    return [
        row
        for row in rows
        if row.get("groups/alike", 0.0) < 1 and ("value/loss" in row or row.get("objective/score_std", 1.0) != 0)
    ]


def clip_never(record: Record) -> Finding | None:
    """Not of CISPO: its clip bounds a weight, far above 1 and not below, and stops no token."""
    rows = record.having("policy/clip_fraction", "policy/approx_kl")
    enough = limit("clip_never") * record.log_range * record.log_range / 2
    far = [row for row in with_advantages(rows) if row["policy/approx_kl"] > enough]
    if any(row["policy/clip_fraction"] != 0 for row in rows) or record.algorithm == "cispo":
        return None
    if record.num_responses(far) < limit("responses"):
        return None
    furthest = max(row["policy/approx_kl"] for row in far)
    return Finding(
        name="clip-never",
        seen=f"No token was ever clipped in {len(rows)} updates, although policy/approx_kl reached {furthest:.2g}: "
        f"ratios off 1 by {typical_log_ratio(furthest):.2g} on average.",
        means="The ratio in the loss is taken to log-probabilities that move along with the policy, so it is always 1 "
        "and nothing holds the policy near its rollout.",
        where="the arguments of policy_loss in the training script: the rollout's log-probabilities, without change",
    )


def clip_often(record: Record) -> Finding | None:
    rows = record.having("policy/clip_fraction")
    share = mean(rows, "policy/clip_fraction")
    is_gspo = record.algorithm == "gspo"
    # CISPO counts a weight beyond either bound, the others a ratio beyond the one that its advantage points to
    name = "clip_often_responses" if is_gspo else "clip_often_weights" if record.algorithm == "cispo" else "clip_often"
    if len(rows) < 2 or record.num_responses(rows) < limit("responses") or not share > limit(name):
        return None
    return Finding(
        name="clip-often",
        seen=f"On average {share:.0%} of the {'responses' if is_gspo else 'tokens'} are clipped.",
        means="The steps are too large for the rollout, or the ratio is not 1 before the first one."
        + " GSPO's clip range, 3e-4 and 4e-4, is made for small learning rates." * is_gspo,
        where="--lr, --clip-range, the number of epochs and --num-minibatches; first policy/first_ratio_error",
    )


def policy_rests(record: Record) -> Finding | None:
    rows = with_advantages(record.having("policy/approx_kl", "lr"))
    furthest = max((row["policy/approx_kl"] for row in rows), default=math.nan)
    peak = max((row["lr"] for row in rows), default=0.0)
    if record.steps_per_update < 2 or len(rows) < 2 or peak == 0 or not furthest < limit("movement"):
        return None  # with one step per update every ratio is measured before it
    return Finding(
        name="policy-rests",
        seen=f"The policy does not move: policy/approx_kl is at most {furthest:.1g} in {len(rows)} updates of "
        f"{record.steps_per_update:g} steps, with a learning rate of {peak:.2g}.",
        means="The learning rate is too small, advantages are 0, or no gradient reaches the parameters. Where the "
        "old log-probabilities are read anew at each step, this number is 0 as well.",
        where="--lr, and the loop over epochs in the training script",
    )


RULES = (first_ratio, mean_ratio, sampler_gap, sampled_entropy, clip_never, clip_often, policy_rests)
