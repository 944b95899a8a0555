"""How far a healthy run goes, and where the doctor speaks: the one table of its thresholds (docs/doctor.md shows it).

Healthy runs: 28 of train_ppo.py and train_grpo.py on the demo's world, with 22 settings, and two of train_sft.py,
train_rm.py and train_dpo.py each. Of 33 more, with other seeds and settings, none had a finding. These have models of
half a million parameters; docs/doctor.md counts 162 later ones, among them a real model with LoRA. What a larger model,
a GPU or another batch size adds is a guess, so thresholds lie far from what was seen: a false alarm costs more than a
missed finding.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Threshold:
    value: float
    unit: str
    source: str
    """what healthy runs reach, or why the value follows from the formula"""


THRESHOLDS = {
    # ---------------------------------------------------------------------------------------------- any trend, rounding
    "rows": Threshold(value=8, unit="rows", source="a trend compares the first quarter of a run with the last"),
    "chance": Threshold(value=5, unit="standard errors", source="of a mean over responses; added to the others"),
    "responses": Threshold(
        value=50, unit="responses", source="fewer are too few for a share, a deviation, or that something never happens"
    ),
    "rare_nats": Threshold(
        value=40, unit="nats", source="added to chance for a sum of log-probabilities: a few tokens of eight nats"
    ),
    "rounding": Threshold(
        value=1e-3, unit="of the largest number", source="traces recomputed in float64; healthy: 3e-7"
    ),
    # --------------------------------------------------------------------------------------------------------- KL
    "first_kl": Threshold(value=1e-4, unit="nats per token", source="healthy: 0, in float32 and in bfloat16"),
    "first_kl_bfloat16": Threshold(
        value=1e-2, unit="nats per token", source="healthy: 0; a sharded policy may round otherwise than its reference"
    ),
    "kl_evidence": Threshold(
        value=15, unit="nats", source="a sum of k1 below minus this has a chance of at most exp(-15) = 3e-7"
    ),
    "kl_per_movement": Threshold(
        value=1e-2,
        unit="of one update's movement",
        source="the largest KL over policy/approx_kl times response_length; healthy: 18 and more",
    ),
    "kl_agreement": Threshold(
        value=0.3, unit="of objective/kl_exact", source="objective/kl over the run, off 1; healthy: 0.04"
    ),
    "k3_excess": Threshold(
        value=1.0,
        unit="of objective/kl_exact",
        source="objective/kl_k3 over the run, above 1; healthy: 0.5, which is a heavy tail",
    ),
    "kl_per_token": Threshold(
        value=1.5, unit="nats per token", source="the last quarter, with a penalty; healthy: 0.4, without one 1.1"
    ),
    # ----------------------------------------------------------------------------------------------------- the ratio
    "first_ratio": Threshold(value=1e-3, unit="of the ratio", source="healthy: 6e-6; a GPU's kernels round otherwise"),
    "first_ratio_bfloat16": Threshold(
        value=0.6,
        unit="of the ratio",
        source="the largest of a run; healthy: 0.002 from scratch, 0.28 in 58 updates of a pretrained policy",
    ),
    "mean_ratio": Threshold(
        value=0.05,
        unit="above sqrt(2 policy/approx_kl)",
        source="the mean of small log ratios is below that root; healthy: always below",
    ),
    "sampler_gap": Threshold(value=1e-4, unit="nats per token", source="healthy: 2e-7, the sampler is the policy"),
    "sampler_gap_rounded": Threshold(
        value=0.2, unit="nats per token", source="a rounded, filtered or bfloat16 sampler; healthy: 0.02"
    ),
    "entropy_low": Threshold(
        value=0.7, unit="of policy/entropy", source="sampled over distribution; healthy: 0.94 and more"
    ),
    "entropy_high": Threshold(
        value=1.5, unit="of policy/entropy", source="sampled over distribution; healthy: 1.15 and less"
    ),
    "clip_never": Threshold(
        value=0.5,
        unit="of log(1 + clip range)^2 / 2",
        source="policy/approx_kl at which tokens must be clipped; healthy without a clipped token: 0.004",
    ),
    "clip_often": Threshold(value=0.3, unit="of tokens", source="mean of a run; healthy: 0.04"),
    "clip_often_weights": Threshold(
        value=0.6, unit="of tokens", source="mean of a run of CISPO, whose weights are clipped in both directions"
    ),
    "clip_often_responses": Threshold(
        value=0.6, unit="of responses", source="mean of a run of GSPO, whose range is narrow; healthy: 0.39"
    ),
    "movement": Threshold(
        value=1e-10,
        unit="policy/approx_kl",
        source="the largest of a run; healthy: 5e-3, with LoRA 7e-7; the rounding of float32: 1e-12",
    ),
    # ------------------------------------------------------------------------------------------------------- responses
    "eos_fall": Threshold(value=0.2, unit="of responses", source="healthy: 0.02"),
    "eos_rate": Threshold(value=0.2, unit="of responses", source="healthy: 0.97 and more"),
    "length_collapse": Threshold(value=0.3, unit="of the first length", source="healthy: 0.97 to 1.5"),
    "length_limit": Threshold(value=0.95, unit="of --response-length", source="from below 0.8; healthy: 0.48"),
    "entropy_left": Threshold(value=0.02, unit="of the first entropy", source="healthy: 0.16 and more"),
    # ---------------------------------------------------------------------------------------------- rewards and values
    "score_gain": Threshold(
        value=0.1, unit="standard deviations", source="of the score, with a KL above 1 nat; healthy: 0.25 and more"
    ),
    "score_gain_healthy": Threshold(
        value=0.25, unit="standard deviations", source="the least that a healthy run gained, with a KL above 1 nat"
    ),
    "reward_fall": Threshold(
        value=0.25, unit="standard deviations", source="of score minus KL penalty; healthy runs gain 0.04 and more"
    ),
    "gold_fall": Threshold(
        value=0.2, unit="of the gain to the best", source="gold score, while the score rises; healthy: 0.1"
    ),
    "value_error": Threshold(
        value=1.0,
        unit="of the scores' variance",
        source="2 value/loss in the last quarter; healthy: 0.13 to 0.4, with LoRA 2.1",
    ),
    "value_fall": Threshold(
        value=0.7, unit="of the first quarter", source="value/loss in the last quarter, as well; healthy: 0.08 to 0.46"
    ),
    "value_vanishes": Threshold(
        value=0.02, unit="of the scores' variance", source="2 value/loss in the first quarter; healthy: 0.35 and more"
    ),
    "start_score": Threshold(
        value=4, unit="standard deviations", source="of the reward model on demonstrations; healthy: 0.4"
    ),
    "start_shift": Threshold(
        value=0.33, unit="of the reward model's shift", source="the first score is as near to it; healthy: 1.1 off"
    ),
    "groups_alike": Threshold(value=0.9, unit="of the traced groups", source="healthy: 0.03"),
    "refills": Threshold(value=30, unit="queries", source="sampled again in vain in a whole run; healthy: 0"),
    # ------------------------------------------------------------------------------------------------------ supervised
    "loss_fall": Threshold(
        value=0.05,
        unit="of the first quarter's loss",
        source="of SFT of a new model, to the last quarter; healthy: 0.8",
    ),
    "loss_rise": Threshold(
        value=0.05, unit="of the first quarter's loss", source="of other models; healthy: a fall, of DPO by 0.15"
    ),
    "overfit": Threshold(value=0.05, unit="of the lowest validation loss", source="healthy: 0"),
    "accuracy": Threshold(value=0.53, unit="of the pairs", source="of 100 and more; healthy: 0.84 and more"),
    "accuracy_weak": Threshold(
        value=0.6,
        unit="of the pairs",
        source="a weak model of real preferences; three standard errors must be below it",
    ),
    "padding_difference": Threshold(
        value=1e-3, unit="standard deviations", source="of the scores; healthy: 2e-7, the rounding of float32"
    ),
    "padding_difference_bfloat16": Threshold(
        value=0.1, unit="standard deviations", source="of the scores, which autocast rounds to three digits"
    ),
    "chosen_fall": Threshold(
        value=2, unit="margins", source="by which the chosen responses' reward falls below 0; healthy: 0.2"
    ),
    "text_length": Threshold(
        value=1.5, unit="of response_length", source="tokens of the samples' texts; healthy: 1.03"
    ),
}


def limit(name: str) -> float:
    return THRESHOLDS[name].value
