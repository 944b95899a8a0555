"""Rules on the metrics of SFT, reward models and DPO."""

import math

from nanorlhf.rules.finding import Finding
from nanorlhf.rules.record import Record, mean, row_noise
from nanorlhf.rules.thresholds import limit


def loss_flat(record: Record) -> Finding | None:
    """Check that a new model's loss falls far, and that a pretrained model's, which may fall early, doesn't rise."""
    is_new = "architecture" in record.settings and record.settings.get("model") is None
    first, last = record.quarters("loss")
    before, after = mean(first, "loss"), mean(last, "loss")
    # relative to the size of the loss, because robust DPO's may be below 0
    least = -limit("loss_fall") * abs(before) if is_new else limit("loss_rise") * abs(before)
    chance = limit("chance") * row_noise(record.rows_with("loss"), "loss") * math.sqrt(2 / max(1, len(first)))
    if len(first) < 5 or not record.rows_with("validation_loss") or not after - before > least + chance:
        return None
    return Finding(
        name="loss-flat",
        seen=f"The training loss is {before:.4g} in the first quarter and {after:.4g} in the last.",
        means="The model doesn't learn: the learning rate is too small or far too large, the labels are masked, or "
        "chosen and rejected responses are swapped.",
        where="--lr and --warmup-steps, and the loss in the training script",
    )


def overfit(record: Record) -> Finding | None:
    losses = [row["validation_loss"] for row in record.rows_with("validation_loss")]
    # a loss near 0, or below it as in robust DPO, is compared with the initial loss
    size = max(abs(min(losses)), 0.1 * abs(losses[0])) if losses else 0.0
    if len(losses) < 2 or not losses[-1] - min(losses) > limit("overfit") * size > 0:
        return None
    return Finding(
        name="over-fitting",
        seen=f"The validation loss rises from its minimum, {min(losses):.4g}, to {losses[-1]:.4g} at the end.",
        means="The model memorises its training data, or the learning rate is too high.",
        where="--num-epochs and --lr; OUT/best is the checkpoint with the lowest validation loss",
    )


def sft_eos(record: Record) -> Finding | None:
    rate = record.summary.get("eos_rate")
    if "validation_loss" not in record.summary or not isinstance(rate, int | float) or not rate < limit("eos_rate"):
        return None
    if record.number("num_samples", 64) < 4:
        return None
    return Finding(
        name="sft-eos-rate",
        seen=f"After SFT {rate:.0%} of the samples end in EOS.",
        means="The policy doesn't learn to stop: EOS has no loss, for example because labels equal to [PAD] are masked "
        "and [PAD] is EOS, or the data's responses are longer than --max-response-length. Or there were too few steps.",
        where="demonstration_loss in train_sft.py, and --num-epochs",
    )


def at_chance(record: Record) -> Finding | None:
    """Check the validation accuracy of a reward model, or of DPO's implicit reward."""
    rows = record.rows_with("validation_accuracy", "num_validation_pairs")
    if not rows or rows[-1]["num_validation_pairs"] < 100 or not has_reference(record):
        return None  # ORPO and SimPO rank by likelihood, which needn't begin at chance or end above it
    accuracy, count = rows[-1]["validation_accuracy"], rows[-1]["num_validation_pairs"]
    # at chance, and by three standard errors not a weak model measured on few pairs
    if not accuracy < limit("accuracy") or not accuracy + 3 * math.sqrt(0.25 / count) < limit("accuracy_weak"):
        return None
    return Finding(
        name="accuracy-at-chance",
        seen=f"The model ranks {accuracy:.1%} of {count:g} validation pairs correctly.",
        means="The model can't tell chosen from rejected responses: their scores are read at the wrong token, the "
        "pairs are mixed up, or the learning rate is wrong.",
        where="the loss in the training script, end_scores in nanorlhf/reward_model.py, and --lr",
    )


def padding_difference(record: Record) -> Finding | None:
    rows = record.rows_with("padding_difference", "reward_std")
    name = "padding_difference" if record.is_float32 else "padding_difference_bfloat16"
    if not rows or not rows[-1]["padding_difference"] > limit(name) * rows[-1]["reward_std"] > 0:
        return None
    return Finding(
        name="padding-difference",
        seen=f"The scores of demonstrations change by {rows[-1]['padding_difference']:.2g} when they are padded on the "
        f"left, as in PPO, instead of on the right (standard deviation {rows[-1]['reward_std']:.2g}).",
        means="Scores depend on padding: the mask, the position ids, or the token at which the score is read.",
        where="end_index in nanorlhf/reward_model.py, attention_mask and position_ids in nanorlhf/masks.py",
    )


def has_reference(record: Record) -> bool:
    """Check if the implicit rewards of train_dpo.py are log-ratios to a reference; ORPO's and SimPO's aren't."""
    return record.settings.get("loss") not in ("orpo", "simpo")


def dpo_start(record: Record) -> Finding | None:
    row = next((row for row in record.rows_with("margin", "chosen_reward", "loss") if row["step"] == 0), None)
    beta = record.number("beta", 1.0)
    # for a response of 100 tokens
    rounding = 100 * beta * limit("first_kl" if record.is_float32 else "first_kl_bfloat16")
    if row is None or not has_reference(record):
        return None
    if not max(abs(row["margin"]), abs(row["chosen_reward"])) > rounding:
        return None
    return Finding(
        name="first-margin",
        seen=f"Before any step the margin is {row['margin']:.3g} and the chosen responses' reward "
        f"{row['chosen_reward']:.3g}.",
        means="Policy and reference are still the same model, so both must be 0: the two are evaluated differently.",
        where="pair_logprobs in nanorlhf/dpo.py, and the reference in train_dpo.py",
    )


def chosen_falls(record: Record) -> Finding | None:
    rows = record.rows_with("validation_chosen_reward", "validation_margin")
    if not rows or not has_reference(record):
        return None
    chosen, margin = rows[-1]["validation_chosen_reward"], rows[-1]["validation_margin"]
    beta = record.number("beta", math.nan)
    if not (-chosen > limit("chosen_fall") * max(0.0, margin) and -chosen > 10 * beta > 0):
        return None
    return Finding(
        name="chosen-falls",
        seen=f"The chosen responses' reward fell to {chosen:.3g}, {chosen / beta:.3g} nats per response, for a margin "
        f"of {margin:.3g}.",
        means="DPO lowers the log-probabilities of both responses of a pair. Here the chosen ones fall far more than "
        "the margin grows, so the policy forgets how to write them.",
        where="--lr (smaller), --beta (larger) and --num-epochs of train_dpo.py",
    )


RULES = (loss_flat, overfit, sft_eos, at_chance, padding_difference, dpo_start, chosen_falls)
