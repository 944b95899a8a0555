"""Rules on the ratio of new to old probabilities and on the sampler, from the metrics of PPO, GRPO and RLCF."""

import math

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, Rows, mean, sum_error
from nanorlhf.rules.thresholds import limit


def typical_log_ratio(approx_kl: float) -> float:
    """Return sqrt(mean(x^2)) of the log ratios x from approx_kl = mean(x^2) / 2."""
    return math.sqrt(2 * max(0.0, approx_kl))


def first_ratio(record: Record) -> Finding | None:
    rows = record.rows_with("policy/first_ratio_error")
    error = max((row["policy/first_ratio_error"] for row in rows), default=math.nan)
    if not error > limit("first_ratio" if record.is_float32 else "first_ratio_bfloat16"):
        return None
    if record.ratio_is_to_the_sampler:
        return None
    return Finding(
        name="first-ratio",
        seen=f"Before any step a token's ratio is off 1 by {error:.2g} (policy/first_ratio_error).",
        means="The update computes other log-probabilities than the rollout for the same tokens and weights: another "
        "temperature, mask or position, dropout, or shifted labels.",
        where="response_logprobs in nanorlhf/logprobs.py and its two callers, read_logprobs and the training script",
    )


def mean_ratio(record: Record) -> Finding | None:
    """Check the mean ratio: for small log ratios x, |mean(exp x) - 1| is about |mean(x)| <= sqrt(mean(x^2))."""
    rows = [row for row in record.rows_with("policy/ratio", "policy/approx_kl") if row["policy/approx_kl"] < 0.01]

    def excess(row: dict[str, float]) -> float:
        return abs(row["policy/ratio"] - 1) - typical_log_ratio(row["policy/approx_kl"])

    off = [row for row in rows if excess(row) > limit("mean_ratio")]
    if len(off) < 2 or 2 * len(off) < len(rows):
        return None
    worst = max(off, key=excess)
    return Finding(
        name="mean-ratio",
        seen=f"policy/ratio is {worst['policy/ratio']:.4g} where policy/approx_kl, {worst['policy/approx_kl']:.2g}, "
        f"allows at most {typical_log_ratio(worst['policy/approx_kl']):.2g} off 1. This happens in {len(off)} of "
        f"{len(rows)} updates.",
        means="The mean is not over the actions: padding, where the ratio is 1, is in the sum but not in the count, "
        "or the other way round.",
        where="UpdateStatistics.add_tokens in nanorlhf/training/update_metrics.py",
    )


def sampler_gap(record: Record) -> Finding | None:
    rows = record.rows_with("policy/sampler_gap")
    is_exact = record.sampler == "policy" and record.is_float32
    gap = max((row["policy/sampler_gap"] for row in rows), default=math.nan)
    # the kept tokens have a total probability of at least top_p, so renormalising multiplies by at most 1 / top_p
    filtered = -math.log(min(1.0, max(record.number("sampler.top_p", 1.0), 1e-9)))
    if not gap > limit("sampler_gap" if is_exact else "sampler_gap_rounded") + filtered:
        return None
    if record.number("sampler.sync_every", 1) > 1 or record.settings.get("sampler.url") is not None:
        return None  # a stale copy may have any gap, and engines are checked where they are called
    return Finding(
        name="sampler-gap",
        seen=f"The sampler's log-probabilities are up to {gap:.2g} nats per token off the policy's "
        "(policy/sampler_gap).",
        means="Sampling and training differ in the temperature, a filter, or the positions and masks of cached "
        "decoding.",
        where="generate in nanorlhf/generate.py, and KVCache in nanorlhf/cache.py",
    )


def sampler_support(record: Record) -> Finding | None:
    """Check that policy / sampler averages 1 over samples, as it does if the sampler can draw every token.

    A filter that renormalises the kept tokens makes every weight the probability mass that it keeps.
    """
    rows = record.rows_with("policy/tis_weight", "policy/sampler_gap")
    weight, gap = mean(rows, "policy/tis_weight"), mean(rows, "policy/sampler_gap")
    is_known = record.number("sampler.top_p", 1.0) < 1  # the setting explains it
    if is_known or not gap > limit("sampler_support_gap") or not 1 - weight > limit("sampler_support") * gap:
        return None
    return Finding(
        name="sampler-support",
        seen=f"The policy's probabilities of the sampled tokens are {weight:.3g} times the sampler's on average "
        f"(policy/tis_weight), {gap:.2g} nats apart, nearly always below them.",
        means="The sampler drops improbable tokens (top-p, top-k, min-p) and renormalises the others, and the policy "
        "doesn't: ratios to the sampler are below 1 before the first step, and the dropped tokens are never tried.",
        where="--sampler.top-p, Sampler.writer in nanorlhf/training/sampler.py, and an engine's generation_config",
    )


def sampled_entropy(record: Record) -> Finding | None:
    """Check that the samples' negative log-probabilities average to the entropy of the policy's distribution."""
    rows = record.rows_with("objective/entropy", "policy/entropy", "response_length")
    # if queries were resampled or dropped, DAPO's update uses other responses than the first samples
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
        means="Samples are more likely than they should be under the update's policy: they are filtered (top-p, top-k, "
        "greedy), or the update uses a higher temperature."
        if is_low
        else "Samples are less likely than they should be under the update's policy: they are drawn at a higher "
        "temperature, or their labels are shifted.",
        where="Sampler.writer in nanorlhf/training/sampler.py, and generate in nanorlhf/generate.py",
    )


def rows_with_advantages(rows: Rows) -> Rows:
    """Return the rows with nonzero advantages: in other rows nothing is learned or clipped.

    With a value model, even equal scores have advantages.
    """
    return [
        row
        for row in rows
        if row.get("groups/alike", 0.0) < 1 and ("value/loss" in row or row.get("objective/score_std", 1.0) != 0)
    ]


def clip_never(record: Record) -> Finding | None:
    """Check that some tokens are clipped once the policy moves far; not for CISPO, whose clip stops no token."""
    rows = record.rows_with("policy/clip_fraction", "policy/approx_kl")
    enough = limit("clip_never") * record.log_range * record.log_range / 2
    far = [row for row in rows_with_advantages(rows) if row["policy/approx_kl"] > enough]
    if any(row["policy/clip_fraction"] != 0 for row in rows) or record.algorithm == "cispo":
        return None
    if record.num_responses(far) < limit("responses"):
        return None
    furthest = max(row["policy/approx_kl"] for row in far)
    return Finding(
        name="clip-never",
        seen=f"No token was clipped in {len(rows)} updates, although policy/approx_kl reached {furthest:.2g}: "
        f"ratios off 1 by {typical_log_ratio(furthest):.2g} on average.",
        means="The old log-probabilities in the loss move with the policy, so the ratio is always 1 and nothing keeps "
        "the policy near its rollout.",
        where="the arguments of policy_loss in the training script: the rollout's log-probabilities, unchanged",
    )


def clip_often(record: Record) -> Finding | None:
    rows = record.rows_with("policy/clip_fraction")
    share = mean(rows, "policy/clip_fraction")
    is_gspo = record.algorithm == "gspo"
    # CISPO counts weights beyond either bound, the others only ratios beyond the bound on the advantage's side
    name = "clip_often_responses" if is_gspo else "clip_often_weights" if record.algorithm == "cispo" else "clip_often"
    if len(rows) < 2 or record.num_responses(rows) < limit("responses") or not share > limit(name):
        return None
    return Finding(
        name="clip-often",
        seen=f"On average {share:.0%} of the {'responses' if is_gspo else 'tokens'} are clipped.",
        means="The steps are too large for the rollout, or the ratio is not 1 before the first step."
        + " GSPO's clip range, 3e-4 and 4e-4, needs a small learning rate." * is_gspo,
        where="policy/first_ratio_error, then --lr, --clip-range, the number of epochs and --num-minibatches",
    )


def policy_rests(record: Record) -> Finding | None:
    rows = rows_with_advantages(record.rows_with("policy/approx_kl", "lr"))
    furthest = max((row["policy/approx_kl"] for row in rows), default=math.nan)
    peak = max((row["lr"] for row in rows), default=0.0)
    if record.steps_per_update < 2 or len(rows) < 2 or peak == 0 or not furthest < limit("movement"):
        return None  # with one step per update, all ratios are measured before the step
    return Finding(
        name="policy-rests",
        seen=f"The policy does not move: policy/approx_kl is at most {furthest:.1g} in {len(rows)} updates of "
        f"{record.steps_per_update:g} steps, with a learning rate of {peak:.2g}.",
        means="The learning rate is too small, the advantages are 0, or no gradient reaches the parameters. "
        "policy/approx_kl is also 0 if the old log-probabilities are recomputed at each step.",
        where="--lr, and the loop over epochs in the training script",
    )


RULES = (first_ratio, mean_ratio, sampler_gap, sampler_support, sampled_entropy, clip_never, clip_often, policy_rests)
