"""How far a healthy run goes, and where the doctor speaks: the one table of its thresholds (docs/doctor.md shows it).

Healthy runs: the demo's of three seeds, and 23 of train_ppo.py and train_grpo.py with other settings. All have models
of half a million parameters. What a larger model, a GPU or another batch size adds is a guess, so thresholds lie far
from what was seen: a false alarm costs more than a missed finding.
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
    "rounding": Threshold(value=1e-3, unit="of the largest number", source="traces recomputed in float64: below 1e-5"),
    # --------------------------------------------------------------------------------------------------------- KL
    "first_kl": Threshold(value=1e-4, unit="nats per token", source="healthy: 0, in float32 and in bfloat16"),
    "first_kl_bfloat16": Threshold(
        value=1e-2, unit="nats per token", source="healthy: 0; a sharded policy may round otherwise than its reference"
    ),
    "kl_per_movement": Threshold(
        value=1e-3,
        unit="of policy/approx_kl",
        source="objective/kl per token over what one update moves; healthy: 0.5 and more from the second update on",
    ),
    "kl_agreement": Threshold(
        value=0.3, unit="of objective/kl_exact", source="objective/kl over the run; healthy: within 0.04 of it"
    ),
    "k3_excess": Threshold(
        value=1.0, unit="of objective/kl_exact", source="objective/kl_k3 over the run; healthy: 0.45 below to 0.5 above"
    ),
    "kl_per_token": Threshold(
        value=1.5, unit="nats per token", source="the last quarter, with a penalty; healthy: 0.5, without one 1.2"
    ),
    # ----------------------------------------------------------------------------------------------------- the ratio
    "first_ratio": Threshold(value=1e-3, unit="of the ratio", source="healthy: 5e-6; a GPU's kernels round otherwise"),
    "first_ratio_bfloat16": Threshold(value=0.2, unit="of the ratio", source="the largest of a batch; healthy: 0.03"),
    "mean_ratio": Threshold(
        value=0.05,
        unit="above sqrt(2 policy/approx_kl)",
        source="the mean of small log ratios is below that root; healthy: always below",
    ),
    "sampler_gap": Threshold(value=1e-3, unit="nats per token", source="healthy: 2e-7, the sampler is the policy"),
    "sampler_gap_rounded": Threshold(
        value=0.2, unit="nats per token", source="a rounded, filtered or bfloat16 sampler; healthy: 0.03"
    ),
    "entropy_low": Threshold(
        value=0.7, unit="of policy/entropy", source="sampled over distribution; healthy: 0.98 and more"
    ),
    "entropy_high": Threshold(
        value=1.5, unit="of policy/entropy", source="sampled over distribution; healthy: 1.15 and less"
    ),
    "clip_never": Threshold(
        value=0.25,
        unit="of log(1 + clip range)^2 / 2",
        source="policy/approx_kl at which tokens must be clipped; healthy without a clipped token: 0.003",
    ),
    "clip_often": Threshold(value=0.3, unit="of tokens", source="mean of a run; healthy: 0.04"),
    "movement": Threshold(value=1e-8, unit="policy/approx_kl", source="the largest of a run; healthy: 5e-3"),
    # ------------------------------------------------------------------------------------------------------- responses
    "eos_fall": Threshold(value=0.2, unit="of responses", source="healthy: 0.02"),
    "eos_rate": Threshold(value=0.2, unit="of responses", source="healthy: 0.9 and more"),
    "length_collapse": Threshold(value=0.3, unit="of the first length", source="healthy runs grow, to 1.6 times"),
    "length_limit": Threshold(value=0.95, unit="of --response-length", source="from below 0.8; healthy: 0.47"),
    "entropy_left": Threshold(value=0.02, unit="of the first entropy", source="healthy: 0.18 and more"),
    # ---------------------------------------------------------------------------------------------- rewards and values
    "score_gain": Threshold(
        value=0.1, unit="standard deviations", source="of the score, with a KL above 1 nat; healthy: 0.3 and more"
    ),
    "reward_fall": Threshold(
        value=0.25, unit="standard deviations", source="of score minus KL penalty; healthy runs gain 0.2 and more"
    ),
    "gold_fall": Threshold(
        value=0.2, unit="of the gain to the best", source="gold score, while the score rises; healthy: 0.1"
    ),
    "value_error": Threshold(
        value=1.0, unit="of the scores' variance", source="2 value/loss in the last quarter; healthy: 0.13 to 0.4"
    ),
    "value_fall": Threshold(
        value=0.7, unit="of the first quarter", source="and 2 value/loss is still above; healthy: 0.45, with LoRA"
    ),
    "value_vanishes": Threshold(
        value=0.02, unit="of the scores' variance", source="2 value/loss in the first quarter; healthy: 0.5 and more"
    ),
    "start_score": Threshold(
        value=4, unit="standard deviations", source="of the reward model on demonstrations; healthy: 0.3"
    ),
    "groups_alike": Threshold(value=0.9, unit="of the traced groups", source="healthy: 0.1"),
    # ------------------------------------------------------------------------------------------------------ supervised
    "loss_fall": Threshold(
        value=0.02, unit="of the first loss", source="over the run; healthy: 0.3 and more (DPO 0.2)"
    ),
    "overfit": Threshold(value=0.05, unit="of the lowest validation loss", source="healthy: 0"),
    "accuracy": Threshold(value=0.53, unit="of the pairs", source="of 100 and more; healthy: 0.82 and more"),
    "padding_difference": Threshold(
        value=1e-3, unit="standard deviations", source="of the scores; healthy: 1e-7, the rounding of float32"
    ),
    "padding_difference_bfloat16": Threshold(
        value=0.1, unit="standard deviations", source="of the scores, which autocast rounds to three digits"
    ),
    "chosen_fall": Threshold(
        value=2, unit="margins", source="by which the chosen responses' reward falls below 0; healthy: 0.2"
    ),
    "text_length": Threshold(value=1.5, unit="of response_length", source="tokens of the samples' texts; healthy: 1.1"),
}


def limit(name: str) -> float:
    return THRESHOLDS[name].value
