"""Tests that each rule finds a run with one wrong number, and finds nothing in healthy runs."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from nanorlhf.errors import InputError
from nanorlhf.rules.metric_rules import examine_metrics
from nanorlhf.rules.record import Record
from nanorlhf.training.run_directory import flat_settings
from tests.rules.healthy import PPO_SETTINGS, RM_SETTINGS, dpo_rows, ppo_rows, rm_rows, supervised_rows


def finding_names(settings: dict, rows: list[dict], summary: dict | None = None) -> list[str]:
    findings = examine_metrics(Record(settings=flat_settings(settings), rows=rows, summary=summary or {}))
    return [finding.name for finding in findings]


def ppo(change=None, **settings) -> list[str]:
    """Return the findings of the healthy PPO run with other settings, and each row updated with `change(row)`."""
    rows = ppo_rows()
    for row in rows:
        row |= change(row) if change is not None else {}
    return finding_names(PPO_SETTINGS | settings, rows)


def sampler(**settings) -> dict:
    return {"sampler": PPO_SETTINGS["sampler"] | settings}


HEALTHY = {
    "ppo": (PPO_SETTINGS, ppo_rows()),
    "ppo, just begun": (PPO_SETTINGS, ppo_rows()[:1]),
    "no row": (PPO_SETTINGS, []),
    "grpo": (PPO_SETTINGS, [{k: v for k, v in row.items() if k != "value/loss"} for row in ppo_rows()]),
    "rm": (RM_SETTINGS, rm_rows()),
    "rlcf": (  # the discriminator learns too, so the score falls for programs of the same quality
        PPO_SETTINGS | {"discriminator_lr": 1e-4},
        [
            row | {"objective/score": -0.1 * row["step"], "objective/rlhf_reward": -0.2 * row["step"]}
            for row in ppo_rows()
        ],
    ),
    "dpo": (RM_SETTINGS | {"beta": 0.05}, dpo_rows()),
    "sft": (RM_SETTINGS, supervised_rows()),
    "another program's": ({}, [{"step": 0, "loss": 1.0, "discriminator/accuracy": 0.5}]),
}


def test_the_score_of_a_frozen_discriminator_must_rise():
    settings, rows = HEALTHY["rlcf"]
    assert {"score-flat", "reward-falls"} <= set(finding_names(settings | {"discriminator_lr": 0.0}, rows))


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_no_findings(kind):
    assert finding_names(*HEALTHY[kind], {"eos_rate": 1.0, "validation_loss": 0.9}) == []


SICK = {
    "first-kl": lambda row: {"objective/kl": 0.8} if row["step"] == 0 else {},
    "kl-stays-zero": lambda row: dict.fromkeys(("objective/kl", "objective/kl_k3", "objective/kl_exact"), 0.0),
    "kl-negative": lambda row: {"objective/kl": -0.2 * row["step"]},
    "kl-estimators": lambda row: {"objective/kl": row["objective/kl"] * row["response_length"] / 24},
    "kl-exploding": lambda row: {
        name: 10 * row[name] for name in ("objective/kl", "objective/kl_k3", "objective/kl_exact")
    },
    "first-ratio": lambda row: {"policy/first_ratio_error": 0.01},
    "mean-ratio": lambda row: {"policy/ratio": 1.2},
    "sampler-gap": lambda row: {"policy/sampler_gap": 0.01},
    "sampled-entropy": lambda row: {"objective/entropy": 0.4 * row["objective/entropy"]},
    "clip-never": lambda row: {"policy/clip_fraction": 0.0, "policy/approx_kl": 0.02},
    "clip-often": lambda row: {"policy/clip_fraction": 0.5},
    "policy-rests": lambda row: {"policy/approx_kl": 0.0},
    "eos-rate": lambda row: {"eos_rate": 1 - row["step"] / 20},
    "length-collapse": lambda row: (
        {"response_length": 1.5, "objective/entropy": 1.5 * row["policy/entropy"]} if row["step"] > 8 else {}
    ),
    "length-limit": lambda row: (
        {"response_length": 24.0, "objective/entropy": 24 * row["policy/entropy"]} if row["step"] > 8 else {}
    ),
    "entropy-gone": lambda row: {"policy/entropy": 1e-4, "objective/entropy": 1e-3} if row["step"] > 8 else {},
    "scores-alike": lambda row: {"objective/score_std": 0.0},
    "identical-responses": lambda row: {"groups/alike": 1.0},
    "refills-in-vain": lambda row: {"groups/alike": 0.25, "groups/refilled": 6.0, "groups/dropped": 0.25},
    "score-flat": lambda row: {"objective/score": 0.4, "objective/rlhf_reward": 0.4 - 0.1 * row["objective/kl"]},
    "reward-falls": lambda row: {"objective/rlhf_reward": -0.2 * row["step"]},
    "over-optimised": lambda row: {"gold_score": 2.5 - 0.3 * row["step"]},
    "value-explains-nothing": lambda row: {"value/loss": 2.0},
    "value-vanishes": lambda row: {"value/loss": 0.01},
    "not-finite": lambda row: {"policy/loss": math.nan} if row["step"] == 5 else {},
    "skipped-steps": lambda row: {"skipped_steps": 1} if row["step"] > 5 else {},
}


@pytest.mark.parametrize("name", SICK)
def test_one_wrong_metric_is_found(name):
    assert ppo(SICK[name]) == [name]


def test_a_moving_reference_may_stay_at_the_policy():
    assert ppo(SICK["kl-stays-zero"], reference={"rate": 0.5, "every": 1}) == []
    assert ppo(SICK["kl-stays-zero"], reference={"rate": 0.0, "every": 1}) == ["kl-stays-zero"]


@pytest.mark.parametrize("correction", ["none", "tis", "sampler_logprobs"])
def test_a_first_kl_is_found_with_any_sampler_and_correction(correction):
    """The KL between policy and reference doesn't depend on the sampler."""
    assert ppo(SICK["first-kl"], **sampler(top_p=0.5, correction=correction)) == ["first-kl"]


def test_k3_in_the_wrong_direction_is_found():
    assert ppo(lambda row: {"objective/kl_k3": 4 * row["objective/kl_exact"]}) == ["kl-estimators"]


def test_samples_that_are_too_unlikely_are_found():
    assert ppo(lambda row: {"objective/entropy": 3 * row["objective/entropy"]}) == ["sampled-entropy"]


@pytest.mark.parametrize(
    "name, settings",
    [
        ("sampled-entropy", sampler(top_p=0.5)),
        ("kl-negative", sampler(top_p=0.5)),
        ("kl-estimators", sampler(sync_every=4)),
        ("sampler-gap", sampler(dtype="int8")),
        ("sampler-gap", {"dtype": "bfloat16"}),
        ("sampler-gap", sampler(top_p=0.5)),
        ("clip-often", {"algorithm": "gspo"}),
        ("first-ratio", {"dtype": "bfloat16"}),
        ("first-ratio", sampler(dtype="int8", correction="sampler_logprobs")),
        ("kl-exploding", {"kl_coef": 0.0}),
        ("clip-never", {"clip_range": 10.0}),
        ("policy-rests", {"num_ppo_epochs": 1}),
        ("value-explains-nothing", {"whiten_rewards": True}),
        ("clip-never", {"algorithm": "cispo", "clip_range": [1.0, 4.0]}),
        ("clip-never", {"algorithm": "cispo"}),
        ("clip-never", {"clip_range": [1.0, 0.2]}),  # no lower bound
        ("clip-often", {"algorithm": "cispo"}),
        ("kl-exploding", {"algorithm": "online_dpo"}),
        ("reward-falls", {"algorithm": "grpo"}),  # the score rises
        ("length-limit", {"response_length": 4}),
        *((name, {"batch_size": 2}) for name in ("clip-often", "eos-rate", "length-collapse", "entropy-gone")),
        *(
            (name, {"batch_size": 2})
            for name in ("scores-alike", "identical-responses", "value-vanishes", "value-explains-nothing")
        ),
    ],
)
def test_a_setting_that_explains_the_number_disables_its_rule(name, settings):
    assert ppo(SICK[name], **settings) == []


@pytest.mark.parametrize("name", ["clip-never", "policy-rests"])
def test_updates_without_advantages_need_neither_move_nor_clip(name):
    assert name not in ppo(lambda row: SICK[name](row) | {"groups/alike": 1.0})
    assert ppo(lambda row: SICK[name](row) | {"groups/alike": 0.5}) == [name]


def test_grpos_score_must_not_fall_but_its_penalty_may_grow():
    """Its KL is weighed against normalised scores; the deviation here is 0.01."""

    def small(row: dict) -> dict:
        score = 0.01 * row["objective/score"]
        return {
            "objective/score": score,
            "objective/score_std": 0.01,
            "objective/rlhf_reward": score - 0.1 * row["step"],
        }

    grpo = {"algorithm": "grpo", "kl_coef": 0.1}
    assert ppo(lambda row: small(row) | {"value/loss": 2e-5}, **grpo) == []
    falls = ppo(lambda row: small(row) | {"value/loss": 2e-5, "objective/score": -0.01 * row["step"]}, **grpo)
    assert falls == ["reward-falls"]


def test_responses_of_one_token_need_not_be_eos():
    def rarely(row: dict) -> dict:
        return {"eos_rate": 0.1, "response_length": 1.0, "objective/entropy": row["policy/entropy"]}

    assert "eos-rate" not in ppo(rarely, response_length=1) and "eos-rate" in ppo(rarely)


def test_a_filter_that_only_the_sampler_renormalises_differs_from_rounding():
    """Kept mass 0.965: all weights are below 1. Rounding moves weights to both sides of 1, so their mean is 1."""

    def weights(mean: float):
        return lambda row: {"policy/sampler_gap": 0.04, "policy/tis_weight": mean}

    assert ppo(weights(0.965), **sampler(dtype="bfloat16")) == ["sampler-support"]
    assert ppo(weights(0.965)) == ["sampler-support", "sampler-gap"]
    assert ppo(weights(0.99), **sampler(dtype="bfloat16")) == ppo(weights(0.965), **sampler(top_p=0.9)) == []
    url = {"url": "http://localhost:8000"}
    assert ppo(weights(0.965), **sampler(**url)) == ["sampler-support"] and ppo(weights(0.99), **sampler(**url)) == []


def test_copies_differ_from_hopeless_and_from_trivial_queries():
    """Some query has different scores, no scores differ, or the policy has a single response."""
    copies = SICK["identical-responses"]
    assert ppo(lambda row: copies(row) | ({"groups/alike": 0.9} if row["step"] == 7 else {})) == []
    assert ppo(lambda row: copies(row) | {"objective/score_std": 0.0}) == ["scores-alike"]
    certain = {"objective/entropy": 0.08, "policy/entropy": 0.01}
    assert ppo(lambda row: copies(row) | certain | {"response_length": 8.0}) == []


def test_gaps_beyond_top_p_and_many_clipped_responses_are_found():
    assert ppo(lambda row: {"policy/sampler_gap": 1.0}, **sampler(top_p=0.5)) == ["sampler-gap"]
    assert ppo(lambda row: {"policy/clip_fraction": 0.65}, algorithm="gspo") == ["clip-often"]


def test_one_resampled_query_with_different_scores_is_enough():
    groups = {"groups/alike": 0.25, "groups/refilled": 6.0, "groups/dropped": 0.25}
    assert ppo(lambda row: groups | ({"groups/dropped": 0.125} if row["step"] == 9 else {})) == []
    assert ppo(lambda row: groups | {"groups/refilled": 2.0}) == []  # too few


def test_the_noise_of_a_small_batch_is_not_a_finding():
    def noisy(row: dict) -> dict:
        return {"objective/kl": 0.5 * row["objective/kl_exact"], "objective/kl_k3": 1.6 * row["objective/kl_exact"]}

    assert ppo(noisy, batch_size=2) == [] and ppo(noisy) == ["kl-estimators"]


def test_the_noise_of_a_small_kl_is_not_a_finding():
    """With 128 responses and a KL of 0.001 nats, k1 is larger by chance."""

    def begun(row: dict) -> dict:
        return {"objective/kl": 0.01, "objective/kl_k3": 1e-3, "objective/kl_exact": 1e-3} if row["step"] else {}

    rows = [row | begun(row) for row in ppo_rows()[:2]]
    assert finding_names(PPO_SETTINGS, rows) == []


def test_a_controller_that_lowers_beta_above_the_target_is_found():
    def adaptive(sign: float) -> list[str]:
        return ppo(lambda row: {"objective/kl_coef": 0.1 * (1 + sign * 0.01) ** row["step"]}, kl_target=0.1)

    assert adaptive(-1) == ["kl-controller"] and adaptive(1) == []


def test_truncated_programs_need_no_eos():
    assert ppo(lambda row: SICK["eos-rate"](row) | {"compile_rate": 0.5}) == []


SUPERVISED = {
    "loss-flat": (supervised_rows, lambda row: {"loss": 2 + 0.01 * row["step"]} if "loss" in row else {}),
    "over-fitting": (supervised_rows, lambda row: {"validation_loss": 1.6} if row["step"] == 39 else {}),
    "accuracy-at-chance": (rm_rows, lambda row: {"validation_accuracy": 0.51} if row["step"] == 40 else {}),
    "padding-difference": (rm_rows, lambda row: {"padding_difference": 0.1} if row["step"] == 40 else {}),
    "first-margin": (dpo_rows, lambda row: {"margin": 0.2} if row["step"] == 0 else {}),
    "chosen-falls": (dpo_rows, lambda row: {"validation_chosen_reward": -2.0} if row["step"] == 40 else {}),
}


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
@pytest.mark.parametrize("name", ["first-margin", "chosen-falls"])
def test_rewards_without_a_reference_need_not_start_at_0_nor_stay_there(name, loss):
    make_rows, change = SUPERVISED[name]
    assert finding_names(RM_SETTINGS | {"beta": 0.05, "loss": loss}, [row | change(row) for row in make_rows()]) == []


@pytest.mark.parametrize("name", SUPERVISED)
def test_one_wrong_metric_of_a_supervised_run_is_found(name):
    make_rows, change = SUPERVISED[name]
    rows = [row | change(row) for row in make_rows()]
    assert finding_names(RM_SETTINGS | {"beta": 0.05}, rows) == [name]


@pytest.mark.parametrize("level", [-1.0, 0.0, 0.5])
def test_a_constant_loss_does_not_rise(level):
    """Robust DPO's loss may be below 0, and a hinge loss may end at 0."""
    rows = [row | {name: level for name in ("loss", "validation_loss") if name in row} for row in dpo_rows()]
    assert finding_names(RM_SETTINGS | {"beta": 0.05}, rows) == []


def test_a_loss_that_rises_within_its_noise_is_not_a_finding():
    noisy = [row | {"loss": 2.0 + (-1) ** row["step"] + 0.01 * row["step"]} for row in supervised_rows()]
    assert finding_names(RM_SETTINGS, noisy) == []


@pytest.mark.parametrize("accuracy, pairs, expected", [(0.51, 1000, True), (0.58, 100, False), (0.52, 100, False)])
def test_a_weak_model_measured_on_few_pairs_is_not_a_finding(accuracy, pairs, expected):
    rows = rm_rows()
    rows[-1] |= {"validation_accuracy": accuracy, "num_validation_pairs": pairs}
    assert (finding_names(RM_SETTINGS, rows) == ["accuracy-at-chance"]) == expected
    assert finding_names(RM_SETTINGS | {"loss": "simpo"}, rows) == []


def test_equal_scores_have_no_padding_finding():
    rows = rm_rows()
    rows[-1] |= {"reward_std": 0.0}
    assert finding_names(RM_SETTINGS, rows) == []


NUMBERS = st.sampled_from([0.0, -1.0, 1e-300, 1e39, math.inf, -math.inf, math.nan, 3])
ODD = st.sampled_from(
    [0, -3, 1, 1e300, 10**400, math.inf, math.nan, None, "many", [], [1], [2.0, -5.0], {"a": 1}, True]
)


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_rules_never_crash(data):
    """Even values that no script writes give no crash: rules find nothing, or InputError names the setting."""
    names = sorted({name for rows in (ppo_rows(), rm_rows(), dpo_rows()) for row in rows for name in row} - {"step"})
    changed = data.draw(st.dictionaries(st.sampled_from([*names, "groups/alike", "groups/dropped"]), NUMBERS))
    rows = [row | changed for row in (*ppo_rows(), *rm_rows()[-1:], *dpo_rows())]
    known = [*PPO_SETTINGS, "algorithm", "beta", "loss", "lr", "discriminator_lr", "num_samples", "sampler.top_p"]
    args = PPO_SETTINGS | data.draw(st.dictionaries(st.sampled_from(known), ODD))
    try:
        finding_names(args, rows, {"eos_rate": data.draw(NUMBERS), "validation_loss": 0.9})
    except InputError as error:
        assert "args.json: the field" in str(error)


def test_a_new_models_loss_must_fall_and_a_pretrained_ones_may_stay():
    flat = [row | {"loss": 2.0} for row in supervised_rows()]
    sft = RM_SETTINGS | {"architecture": "gpt"}
    assert (
        finding_names(sft | {"model": None}, flat) == ["loss-flat"]
        and finding_names(sft | {"model": "gpt2"}, flat) == []
    )


def test_a_policy_that_does_not_stop_after_sft_is_found():
    assert finding_names(RM_SETTINGS, supervised_rows(), {"eos_rate": 0.0, "validation_loss": 0.9}) == ["sft-eos-rate"]


def test_a_setting_that_is_not_a_number_is_an_error():
    with pytest.raises(InputError, match="args.json: the field 'batch_size' must be a number, not 'many'."):
        ppo(batch_size="many")
