"""Rules on scores and values, from the metrics of PPO, GRPO and RLCF."""

import math

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, Rows, mean, pooled_error, response_variance, row_noise
from nanorlhf.rules.thresholds import limit


def score_quarters(record: Record) -> tuple[Rows, Rows, float, float]:
    """Return first and last quarter, the scores' standard deviation, and the chance bound for a difference of means.

    The deviation is taken over both quarters: if rewards are sparse, all scores of one quarter may be equal. The chance
    bound is at least that of the rows' means, because the responses of a row share queries. Returns no rows if the
    score comes from a discriminator that learns to tell the policy from people: such a score may fall.
    """
    names = ("objective/score", "objective/score_std", "objective/kl", "objective/rlhf_reward")
    first, last = record.quarters(*names) if record.number("discriminator_lr", 0) == 0 else ([], [])
    variances = [response_variance(rows, "objective/score") for rows in (first, last)]
    std = math.sqrt(sum(variances) / 2)
    noise = math.sqrt(2 / max(1, len(last))) * row_noise(record.rows_with(*names), "objective/score")
    chance = max(math.sqrt(2) * pooled_error(std, record.num_responses(last)), limit("chance") * noise)
    return first, last, std, chance


def scores_alike(record: Record) -> Finding | None:
    rows = record.rows_with("objective/score_std")
    is_few = len(rows) < 2 or record.num_responses(rows) < 10 * limit("responses")  # rewards may be sparse
    if is_few or record.number("batch_size", 1) < 2 or any(row["objective/score_std"] != 0 for row in rows):
        return None
    return Finding(
        name="scores-alike",
        seen=f"In each of {len(rows)} rollouts, all responses have the same score (objective/score_std is 0).",
        means="The reward carries no signal: it doesn't depend on the response, it is saturated, or no response has an "
        "EOS and each gets --missing-eos-score. Advantages are then noise, or 0.",
        where="the reward (--reward or --reward-model), and samples.jsonl",
    )


def identical_responses(record: Record) -> Finding | None:
    """Check that some query has responses with different scores, if scores differ between queries."""
    rows = record.rows_with("groups/alike", "objective/score_std", "objective/entropy")
    differ = [row for row in rows if row["objective/score_std"] > 0]
    is_few = record.num_responses(differ) < 10 * limit("responses")  # rewards may be sparse
    if is_few or any(row["groups/alike"] < 1 for row in rows) or mean(differ, "objective/entropy") < 1:
        return None
    return Finding(
        name="identical-responses",
        seen=f"In each of {len(rows)} updates all responses to a query have the same score (groups/alike is 1), "
        f"although scores differ between queries and a response has {mean(differ, 'objective/entropy'):.3g} nats of "
        "entropy.",
        means="The responses to a query are copies: their random numbers are shared, as with one seed per request. Or "
        "the reward reads only the query.",
        where="the generator and the uniform random numbers in train_grpo.py, the seeds in training/engine_client.py",
    )


def refills_in_vain(record: Record) -> Finding | None:
    """Check that some of the groups that DAPO resamples get different scores."""
    rows = record.rows_with("groups/alike", "groups/refilled", "groups/dropped")
    refilled = sum(row["groups/refilled"] for row in rows)
    if not refilled > limit("refills") or any(row["groups/dropped"] < row["groups/alike"] for row in rows):
        return None
    return Finding(
        name="refills-in-vain",
        seen=f"In {len(rows)} updates {refilled:g} queries whose responses all had the same score were resampled, and "
        "no query then had different scores: groups/dropped is never below groups/alike.",
        means="New responses keep the scores of the old ones or are drawn with the same random numbers; or the policy "
        "has collapsed to one response per query.",
        where="refill in nanorlhf/grpo.py",
    )


def score_flat(record: Record) -> Finding | None:
    first, last, std, chance = score_quarters(record)
    gain = mean(last, "objective/score") - mean(first, "objective/score")
    kl = mean(last, "objective/kl")
    # also three standard errors below what healthy runs gain
    enough = min(limit("score_gain") * std, limit("score_gain_healthy") * std - 0.6 * chance)
    if not (kl > 1 and std > 0 and chance < 0.5 * std and gain < enough):
        return None
    return Finding(
        name="score-flat",
        seen=f"The policy has moved {kl:.3g} nats from the reference, and the score changed by {gain:+.2g} (its "
        f"standard deviation is {std:.2g}).",
        means="The policy doesn't learn from the score: its sign is wrong, it is added at a masked position or read "
        "before the response, or the KL penalty has the wrong sign. Or the steps are too large, in particular without "
        "a KL penalty; or the initial policy solves too few problems for a reward of 0 or 1.",
        where="the rewards in train_ppo.py, end_scores in nanorlhf/reward_model.py, score_index in nanorlhf/batch.py",
    )


def reward_falls(record: Record) -> Finding | None:
    first, last, std, chance = score_quarters(record)
    # GRPO and GSPO weigh the KL against normalised scores; online DPO's beta is not the weight of a penalty
    is_score = record.algorithm in ("grpo", "gspo", "online_dpo")
    name, what = ("score", "score") if is_score else ("rlhf_reward", "score minus the KL penalty")
    before, after = mean(first, f"objective/{name}"), mean(last, f"objective/{name}")
    if not is_score:
        kl = max(0.0, mean(last, "objective/kl"), mean(first, "objective/kl"))
        chance += math.sqrt(2) * pooled_error(
            record.number("kl_coef", 0.0) * math.sqrt(2 * kl), record.num_responses(last)
        )
    if not before - after > limit("reward_fall") * std + chance or record.settings.get("kl_target") is not None:
        return None  # an adaptive coefficient changes the objective
    return Finding(
        name="reward-falls",
        seen=f"The objective, the {what}, fell from {before:.3g} to {after:.3g}; the KL is "
        f"{mean(last, 'objective/kl'):.3g} nats.",
        means="The gradient of the score or of the KL has the wrong sign, or the steps are so large that the policy "
        "diverges.",
        where="the rewards in train_ppo.py, policy_loss in nanorlhf/ppo.py, --lr",
    )


def overoptimised(record: Record) -> Finding | None:
    """Check that the gold score doesn't fall below its best quarter while the score that is trained on still rises."""
    rows = record.rows_with("gold_score", "objective/score")
    size = len(rows) // 4 if len(rows) >= limit("rows") else 0
    if not size:
        return None
    quarters = [rows[i * size : (i + 1) * size] for i in range(3)] + [rows[-size:]]
    gold = [mean(quarter, "gold_score") for quarter in quarters]
    score = [mean(quarter, "objective/score") for quarter in quarters]
    best = max(range(4), key=gold.__getitem__)
    noise = row_noise(rows, "gold_score")
    fall = gold[best] - gold[3]
    enough = limit("gold_fall") * max(0.0, gold[best] - gold[0]) + limit("chance") * noise * math.sqrt(2 / size)
    if not (fall > enough and score[3] >= score[best]):
        return None
    return Finding(
        name="over-optimised",
        seen=f"In the four quarters of the run gold_score was {', '.join(f'{x:.3g}' for x in gold)}, and the trained "
        f"score {', '.join(f'{x:.3g}' for x in score)}.",
        means="The policy exploits the reward model: its score still rises while the true quality falls.",
        where="--kl-coef (larger), --lr (smaller), --total-episodes (fewer), or a better reward model",
    )


def value_explains_nothing(record: Record) -> Finding | None:
    first, last = record.quarters("value/loss", "objective/score_std")
    last = [row for row in last if "objective/score" in row and "objective/kl" in row]
    beta = record.number("kl_coef", 0.0)
    # variance of the returns: the penalty varies too, and its variance is about twice the KL
    variance = response_variance(last, "objective/score") + beta * beta * 2 * max(0.0, mean(last, "objective/kl"))
    error, initial_error = 2 * mean(last, "value/loss"), 2 * mean(first, "value/loss")
    if not variance > 0 or record.num_responses(last) < limit("responses"):
        return None
    if not error > max(limit("value_error") * variance, limit("value_fall") * initial_error):
        return None
    if record.settings.get("whiten_rewards"):  # returns then have another unit than scores
        return None
    return Finding(
        name="value-explains-nothing",
        seen=f"In the last quarter the squared error of the values, {error:.2g}, is larger than the variance of the "
        f"scores, {variance:.2g} (first quarter: {initial_error:.2g}): a constant would predict better.",
        means="The value model doesn't learn returns: its targets, mask or position are wrong, or its steps are too "
        "small.",
        where="value_loss in nanorlhf/ppo.py, response_values in nanorlhf/logprobs.py, --value-coef and --lr",
    )


def value_vanishes(record: Record) -> Finding | None:
    first, _ = record.quarters("value/loss", "objective/score_std", "objective/entropy")
    best = min(first, key=lambda row: row["value/loss"], default=None)
    if best is None or record.settings.get("whiten_rewards") or record.num_responses(first) < limit("responses"):
        return None
    if mean(first, "objective/entropy") < 1:  # each query has about one answer, so its score is predictable
        return None
    variance = best["objective/score_std"] * best["objective/score_std"]
    if not 2 * best["value/loss"] < limit("value_vanishes") * variance:
        return None
    return Finding(
        name="value-vanishes",
        seen=f"value/loss falls to {best['value/loss']:.2g} at update {best['step']:g}, where the variance of the "
        f"scores is {variance:.2g}.",
        means="Returns can't be predicted that well that early. The targets must be something else: a token's reward, "
        "or the values.",
        where="returns, the second result of gae in kernels/gae.py, and value_loss's arguments in the script",
    )


def start_score(record: Record, reward_model: Record) -> Finding | None:
    """Check that the initial policy scores about as well as demonstrations, which normalisation gave a mean of 0."""
    shift, std = (reward_model.summary.get(name) for name in ("reward_mean_before_normalisation", "reward_std"))
    row = next((row for row in record.rows_with("objective/score", "eos_rate") if row["step"] == 0), None)
    is_shifted = reward_model.number("num_normalisation", 1) != 0
    if row is None or row["eos_rate"] < 0.9 or not is_shifted:
        return None
    if not isinstance(shift, int | float) or not isinstance(std, int | float) or not std > 0:
        return None
    score = row["objective/score"]
    # a policy somewhat worse than demonstrations also scores below 0, so only a large shift is evidence
    is_unshifted = abs(shift) > std and abs(score - shift) < limit("start_shift") * abs(shift)
    if not (is_unshifted or abs(score) > limit("start_score") * std):
        return None
    return Finding(
        name="start-score",
        seen=f"Before any step responses score {score:.3g} on average. Demonstrations score 0 on average (the reward "
        f"model was shifted by {shift:.3g}; the standard deviation is {std:.3g}).",
        means="The scores differ from the trained reward model's: its normalisation is lost (the bias is saved but "
        "never subtracted), or they are read at another token, with another padding side or template.",
        where="ScalarModel.forward in nanorlhf/model.py, end_scores in nanorlhf/reward_model.py, train_rm.py",
    )


RULES = (
    scores_alike,
    identical_responses,
    refills_in_vain,
    score_flat,
    reward_falls,
    overoptimised,
    value_explains_nothing,
    value_vanishes,
)
