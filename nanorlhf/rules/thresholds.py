"""The thresholds of the doctor's rules. docs/doctor.md lists the values of healthy runs.

They were set on healthy runs: with train_ppo.py and train_grpo.py 28 runs of 22 settings in the demo's world, and two
each with train_sft.py, train_rm.py and train_dpo.py. Another 33, with other seeds and settings, had no findings. These
models have half a million parameters; docs/doctor.md counts 162 later runs, including a real model with LoRA. The
effect of a larger model, a GPU or another batch size is a guess, so the thresholds are far from the observed values: a
false alarm costs more than a missed finding.
"""

THRESHOLDS = {
    # ---------------------------------------------------------------------------------------------- any trend, rounding
    "rows": 8,  # rows
    "chance": 5,  # standard errors
    "responses": 50,  # responses
    "rare_nats": 40,  # nats
    "rounding": 1e-3,  # of the largest number
    # --------------------------------------------------------------------------------------------------------- KL
    "first_kl": 1e-4,  # nats per token
    "first_kl_bfloat16": 1e-2,  # nats per token
    "kl_evidence": 15,  # nats
    "kl_per_movement": 1e-2,  # of one update's movement
    "kl_agreement": 0.3,  # of objective/kl_exact
    "k3_excess": 1.0,  # of objective/kl_exact
    "kl_per_token": 1.5,  # nats per token
    # ----------------------------------------------------------------------------------------------------- the ratio
    "first_ratio": 1e-3,  # from a ratio of 1
    "first_ratio_bfloat16": 0.6,  # from a ratio of 1
    "mean_ratio": 0.05,  # above sqrt(2 policy/approx_kl)
    "sampler_gap": 1e-4,  # nats per token
    "sampler_gap_rounded": 0.2,  # nats per token
    "entropy_low": 0.7,  # times policy/entropy
    "entropy_high": 1.5,  # times policy/entropy
    "clip_never": 0.5,  # times log(1 + clip range)^2 / 2
    "clip_often": 0.3,  # of tokens
    "clip_often_weights": 0.6,  # of tokens
    "clip_often_responses": 0.6,  # of responses
    "movement": 1e-10,  # in policy/approx_kl
    # ------------------------------------------------------------------------------------------------------- responses
    "eos_fall": 0.2,  # of responses
    "eos_rate": 0.2,  # of responses
    "length_collapse": 0.3,  # times the first length
    "length_limit": 0.95,  # times --response-length
    "entropy_left": 0.02,  # times the first entropy
    # ---------------------------------------------------------------------------------------------- rewards and values
    "score_gain": 0.1,  # standard deviations
    "score_gain_healthy": 0.25,  # standard deviations
    "reward_fall": 0.25,  # standard deviations
    "gold_fall": 0.2,  # of the best gain
    "value_error": 1.0,  # times the scores' variance
    "value_fall": 0.7,  # times the first quarter's
    "value_vanishes": 0.02,  # times the scores' variance
    "start_score": 4,  # standard deviations
    "start_shift": 0.33,  # of the reward model's shift
    "groups_alike": 0.9,  # of traced groups
    "refills": 30,  # queries
    # ------------------------------------------------------------------------------------------------------ supervised
    "loss_fall": 0.05,  # of the first quarter's loss
    "loss_rise": 0.05,  # of the first quarter's loss
    "overfit": 0.05,  # of the lowest validation loss
    "accuracy": 0.53,  # of pairs
    "accuracy_weak": 0.6,  # of pairs
    "padding_difference": 1e-3,  # standard deviations
    "padding_difference_bfloat16": 0.1,  # standard deviations
    "chosen_fall": 2,  # margins
    "text_length": 1.5,  # times response_length
}


def limit(name: str) -> float:
    return THRESHOLDS[name]
