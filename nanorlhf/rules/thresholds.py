"""The thresholds of the doctor's rules: value, unit, and the values of healthy runs.

They were set on healthy runs: with train_ppo.py and train_grpo.py 28 runs of 22 settings in the demo's world, and two
each with train_sft.py, train_rm.py and train_dpo.py. Another 33, with other seeds and settings, had no findings. These
models have half a million parameters; docs/doctor.md counts later runs, including a real model with LoRA. The
effect of a larger model, a GPU or another batch size is a guess, so the thresholds are far from the observed values: a
false alarm costs more than a missed finding.
"""

THRESHOLDS = {
    # ---------------------------------------------------------------------------------------------- any trend, rounding
    "rows": 8,  # rows; first against last quarter
    "chance": 5,  # standard errors; added to other limits
    "responses": 50,  # responses; minimum for shares and deviations
    "rare_nats": 40,  # nats; added to sums of log-probabilities
    "rounding": 1e-3,  # of the largest number; healthy: 3e-7
    # --------------------------------------------------------------------------------------------------------- KL
    "first_kl": 1e-4,  # nats per token; healthy: 0
    "first_kl_bfloat16": 1e-2,  # nats per token; healthy: 0
    "kl_evidence": 15,  # nats; a sum of k1 below -15 has a probability of at most 3e-7
    "kl_per_movement": 1e-2,  # of one update's movement; healthy: at least 18
    "kl_agreement": 0.3,  # of objective/kl_exact; healthy: 0.04
    "k3_excess": 1.0,  # of objective/kl_exact; healthy: 0.5
    "kl_per_token": 1.5,  # nats per token; healthy: 0.4, without a penalty 1.1
    # ----------------------------------------------------------------------------------------------------- the ratio
    "first_ratio": 1e-3,  # from a ratio of 1; healthy: 6e-6
    "first_ratio_bfloat16": 0.6,  # from a ratio of 1; healthy: 0.002 from scratch, 0.28 pretrained
    "mean_ratio": 0.05,  # above sqrt(2 policy/approx_kl); healthy: below 0
    "sampler_gap": 1e-4,  # nats per token; healthy: 2e-7
    "sampler_gap_rounded": 0.2,  # nats per token; healthy: 0.02
    "sampler_support_gap": 0.01,  # nats per token; smaller gaps are not judged
    "sampler_support": 0.5,  # of policy/sampler_gap; healthy: 0.18, a stale sampler; top-p 0.8: 0.96
    "entropy_low": 0.7,  # times policy/entropy; healthy: at least 0.94
    "entropy_high": 1.5,  # times policy/entropy; healthy: at most 1.15
    "clip_never": 0.5,  # times log(1 + clip range)^2 / 2; 0.004 without a clipped token
    "clip_often": 0.3,  # of tokens; healthy: 0.04
    "clip_often_weights": 0.6,  # of tokens; CISPO
    "clip_often_responses": 0.6,  # of responses; healthy: 0.39, GSPO
    "movement": 1e-10,  # in policy/approx_kl; healthy: 5e-3, with LoRA 7e-7
    # ------------------------------------------------------------------------------------------------------- responses
    "eos_fall": 0.2,  # of responses; healthy: 0.02
    "eos_rate": 0.2,  # of responses; healthy: at least 0.97
    "length_collapse": 0.3,  # times the first length; healthy: 0.97 to 1.5
    "length_limit": 0.95,  # times --response-length; healthy: 0.48
    "entropy_left": 0.02,  # times the first entropy; healthy: at least 0.16
    # ---------------------------------------------------------------------------------------------- rewards and values
    "score_gain": 0.1,  # standard deviations; healthy: at least 0.25
    "score_gain_healthy": 0.25,  # standard deviations; smallest gain, at a KL above 1 nat
    "reward_fall": 0.25,  # standard deviations; healthy: gain of at least 0.04
    "gold_fall": 0.2,  # of the best gain; healthy: 0.1
    "value_error": 1.0,  # times the scores' variance; healthy: 0.13 to 0.4, with LoRA 2.1
    "value_fall": 0.7,  # times the first quarter's; healthy: 0.08 to 0.46
    "value_vanishes": 0.02,  # times the scores' variance; healthy: at least 0.35
    "start_score": 4,  # standard deviations; healthy: 0.4
    "start_shift": 0.33,  # of the reward model's shift; healthy: 1.1
    "groups_alike": 0.9,  # of traced groups; healthy: 0.03
    "refills": 30,  # queries; healthy: 0
    # ------------------------------------------------------------------------------------------------------ supervised
    "loss_fall": 0.05,  # of the first quarter's loss; healthy: 0.8
    "loss_rise": 0.05,  # of the first quarter's loss; healthy: fall, of DPO by 0.15
    "overfit": 0.05,  # of the lowest validation loss; healthy: 0
    "accuracy": 0.53,  # of pairs; healthy: at least 0.84
    "accuracy_weak": 0.6,  # of pairs; by three standard errors
    "padding_difference": 1e-3,  # standard deviations; healthy: 2e-7
    "padding_difference_bfloat16": 0.1,  # standard deviations; rounding to three digits
    "chosen_fall": 2,  # margins; healthy: 0.2
    "text_length": 1.5,  # times response_length; healthy: 1.03
}


def limit(name: str) -> float:
    return THRESHOLDS[name]
