"""The verdict of each report follows from its numbers: a gain, no difference, a loss."""

import json

import pytest

from nanorlhf.report import benchmark_report, checked_report, reward_model_report
from nanorlhf.report.page import text
from nanorlhf.report.verdict import verdict
from nanorlhf.rlcf import program_report
from nanorlhf.selfrank import reply_report
from nanorlhf.stackoverflow import answer_report

UP, FLAT, DOWN = (0.02, 0.06), (-0.02, 0.02), (-0.06, -0.02)  # intervals of gains; their means are 0.04, 0 and -0.04


def mean(ends: tuple[float, float]) -> float:
    return sum(ends) / 2


# --------------------------------------------------------------------------------------------------- 1. checked answers
def checked(tmp_path, solved: tuple, layout: tuple = FLAT, reward: object = None, eos_rate: float = 1.0) -> dict:
    """Return a result of sft and ppo; solved and layout: intervals of PPO's gains; reward: --reward of its run."""
    (tmp_path / "args.json").write_text(json.dumps({"reward": reward}))
    rows = {
        name: {
            "pass_at_k": {"1": {"mean": rate, "interval": (rate - 0.02, rate + 0.02)}},
            "rewards": {key: {"mean": rate, "interval": (rate - 0.02, rate + 0.02)} for key in ("outcome", "layout")},
            "by": {},
            "eos_rate": eos_rate,
            "response_length": 9.0,
        }
        for name, rate in (("sft", 0.4), ("ppo", 0.4 + mean(solved)))
    }
    gains = {"pass@1": solved, "outcome": solved, "layout": layout}
    return {
        "args": {"policies": ["sft", "a/sft", "ppo", str(tmp_path)], "by": None},
        "num_queries": 50,
        "num_samples": 8,
        "policies": rows,
        "differences": {"ppo": {key: {"mean": mean(ends), "interval": ends} for key, ends in gains.items()}},
    }


@pytest.mark.parametrize(
    ("solved", "kind", "said"),
    [
        (
            UP,
            "good",
            "ppo solves 44% of queries with one sample (sft: 40%). Its pass@1 rose (+0.040 [+0.020, +0.060]).",
        ),
        (
            FLAT,
            "warn",
            "ppo solves 40% of queries with one sample (sft: 40%). It did not learn: its pass@1 did not change "
            "(+0.000 [-0.020, +0.020]).",
        ),
        (
            DOWN,
            "bad",
            "ppo solves 36% of queries with one sample (sft: 40%). It got worse: its pass@1 fell (-0.040 [-0.060, "
            "-0.020]).",
        ),
    ],
)
def test_checked_answers_are_judged_by_what_passes(tmp_path, solved, kind, said) -> None:
    result = checked(tmp_path, solved)
    assert verdict(checked_report.outcome(result, "ppo"), None) == (kind, said)
    shown = text(checked_report.page(result, [], []))
    assert said[said.index("(", 60) + 1 : said.index("]") + 1] in shown and "minus sft" in shown


@pytest.mark.parametrize("reward", ["rules.py:layout", ["rules.py:other", "rules.py:layout"]])
def test_a_run_trained_on_another_reward_is_over_optimised(tmp_path, reward) -> None:
    kind, said = checked_report.outcome(checked(tmp_path, DOWN, UP, reward), "ppo")[1:3]
    assert kind == "bad"
    assert said == (
        "It is over-optimised: its layout reward rose (+0.040 [+0.020, +0.060]) and its pass@1 fell (-0.040 [-0.060, "
        "-0.020])."
    )


@pytest.mark.parametrize("reward", [None, 3, "rules.py:outcome", ["rules.py:outcome", "rules.py:layout"]])
def test_a_run_trained_on_the_pass_reward_is_not_over_optimised(tmp_path, reward) -> None:
    assert "layout" not in checked_report.outcome(checked(tmp_path, DOWN, UP, reward), "ppo").change


def test_verdict_reports_truncated_checked_answers(tmp_path) -> None:
    kind, said = verdict(checked_report.outcome(checked(tmp_path, UP, eos_rate=0.5), "ppo"), None)
    assert kind == "warn" and "Only 50% of responses end with EOS; the others are truncated." in said


# --------------------------------------------------------------------------------------------------------- 2. programs
def programs(passes: tuple, compiles: tuple) -> dict:
    """Return a result of sft and rlcf at one temperature, with intervals of RLCF's gains at k = 1."""
    rows = {}
    for name, rate in (("sft", 0.2), ("rlcf", 0.2 + mean(passes))):
        best = {"k": 1, "temperature": 0.2, "exec": rate, "comp": 0.5}
        best |= {"pass": rate, "pass_ci": (rate - 0.02, rate + 0.02), "comp_ci": (0.4, 0.6)}
        rows[name] = {"at_k": [best], "temperatures": [{"temperature": 0.2, "eos_rate": 1.0}]}
    gains = {"pass": passes, "exec": passes, "comp": compiles}
    return {
        "args": {"policies": ["sft", "a", "rlcf", "b"], "ks": [1]},
        "policies": rows,
        "differences": {"rlcf": {key: {"mean": mean(ends), "ci": ends} for key, ends in gains.items()}},
    }


POINTS = {UP: "+4.00 [+2.00, +6.00] points", FLAT: "+0.00 [-2.00, +2.00] points", DOWN: "-4.00 [-6.00, -2.00] points"}


@pytest.mark.parametrize(
    ("passes", "compiles", "kind", "said"),
    [
        (UP, UP, "good", f"Its pass@1 rose ({POINTS[UP]}); its comp@1 rose as well ({POINTS[UP]})."),
        (
            FLAT,
            FLAT,
            "warn",
            f"It did not learn: its pass@1 did not change ({POINTS[FLAT]}), and neither did its comp@1 "
            f"({POINTS[FLAT]}).",
        ),
        (
            FLAT,
            UP,
            "warn",
            f"More of its programs compile ({POINTS[UP]}), but its pass@1 did not change ({POINTS[FLAT]}).",
        ),
        (
            DOWN,
            UP,
            "bad",
            f"It is over-optimised: its comp@1 rose ({POINTS[UP]}) and its pass@1 fell ({POINTS[DOWN]}).",
        ),
        (
            DOWN,
            DOWN,
            "bad",
            f"It got worse: its pass@1 fell ({POINTS[DOWN]}); its comp@1 fell as well ({POINTS[DOWN]}).",
        ),
    ],
)
def test_programs_are_judged_by_what_passes_and_what_compiles(passes, compiles, kind, said) -> None:
    result = programs(passes, compiles)
    level = f"rlcf solves {round(20 + 100 * mean(passes))}% of problems with 1 sample (sft: 20%)."
    assert verdict(program_report.outcome(result, "rlcf"), None) == (kind, f"{level} {said}")
    cells = " ".join(program_report.differences(result)[1])
    assert all(POINTS[ends].removesuffix(" points") in cells for ends in (passes, compiles))


def test_a_single_policy_has_no_gains() -> None:
    result = programs(UP, UP) | {"differences": {}}
    del result["policies"]["rlcf"]
    assert verdict(program_report.outcome(result, "sft"), []) == (
        "good", "sft solves 20% of problems with 1 sample. Nothing looks wrong."
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- 3. answers, replies
def compared(gains: dict[str, tuple], settings: dict) -> dict:
    """Return a result of base, sft and ppo; gains: metric -> interval of PPO's gain over SFT, different over base."""
    rows = {
        name: {"metrics": {metric: {"mean": level} for metric in gains}, "eos_rate": 1.0, "response_length": 9.0}
        for name, level in (("base", 0.0), ("sft", 0.5), ("ppo", 0.6))
    }
    differences = [
        {"ours": ours, "theirs": theirs, "metric": metric, "mean_difference": mean(ends), "mean_difference_ci": ends}
        for ours, theirs, of_pair in (("sft", "base", None), ("ppo", "base", None), ("ppo", "sft", gains))
        for metric, ends in (of_pair or dict.fromkeys(gains, (0.3, 0.5))).items()
    ]
    words = ["base", "a/base", "sft", "a/sft", "ppo", "a/ppo"]
    return {"args": {"policies": words} | settings, "policies": rows, "differences": differences}


def answers(gold: tuple | None, rm: tuple | None, ppo: str = "a/ppo") -> dict:
    """Return a result with two reward models; the contrastive score fell, rm is the regression model's gain."""
    gains = {"gold_score": gold, "rm_regression": rm, "rm_contrastive": rm and DOWN, "bleu": FLAT}
    settings = {"regression_model": "a/regression", "contrastive_model": "a/contrastive"}
    result = compared({metric: ends for metric, ends in gains.items() if ends}, settings)
    result["args"]["policies"][-1] = ppo
    return result


@pytest.mark.parametrize(
    ("gold", "rm", "kind", "said"),
    [
        (UP, UP, "good", "The gold score rose (+0.04 [+0.02, +0.06]); the regression RM's score rose as well (+0.040"),
        (FLAT, FLAT, "warn", "It did not learn: the gold score did not change (+0.00 [-0.02, +0.02]), and neither"),
        (
            DOWN,
            UP,
            "bad",
            "It is over-optimised: the regression RM's score rose (+0.040 [+0.020, +0.060]) and the gold",
        ),
        (DOWN, DOWN, "bad", "It got worse: the gold score fell (-0.04 [-0.06, -0.02]);"),
        (
            None,
            UP,
            "good",
            "The regression RM's score rose (+0.040 [+0.020, +0.060]); this doesn't show whether the responses",
        ),
        (None, None, "warn", "It did not learn: the SacreBLEU did not change (+0.000 [-0.020, +0.020])."),
    ],
)
def test_answers_are_judged_against_the_policy_before(gold, rm, kind, said) -> None:
    result_kind, change = answer_report.outcome(answers(gold, rm), "ppo")[1:3]
    assert result_kind == kind and change.startswith(said)


def test_answers_are_judged_by_the_reward_model_that_trained_the_policy(tmp_path) -> None:
    (tmp_path / "args.json").write_text('{"reward_model": "a/contrastive"}')
    outcome = answer_report.outcome(answers(DOWN, UP, str(tmp_path)), "ppo")
    assert "the contrastive RM's score fell as well" in outcome.change
    assert outcome.level == "The mean gold score of ppo is 0.60 (sft: 0.50)."


@pytest.mark.parametrize(
    ("gains", "kind", "said"),
    [
        (
            {"gold_score": UP, "rm_score": UP},
            "good",
            "The gold score rose (+4.00 [+2.00, +6.00]); the RM score rose as well",
        ),
        (
            {"gold_score": FLAT, "rm_score": DOWN},
            "warn",
            "It did not learn: the gold score did not change (+0.00 [-2.00, +2.00])",
        ),
        (
            {"gold_score": DOWN, "rm_score": UP},
            "bad",
            "It is over-optimised: the RM score rose (+0.04 [+0.02, +0.06]) and",
        ),
        (
            {"gold_score": DOWN, "rm_score": FLAT},
            "bad",
            "It got worse: the gold score fell (-4.00 [-6.00, -2.00]); the RM",
        ),
        ({"f1": UP, "bleu4": DOWN}, "good", "The F1 rose (+4.00 [+2.00, +6.00])."),
        ({"bleu4": DOWN}, "bad", "It got worse: the BLEU-4 fell (-4.00 [-6.00, -2.00])."),
        (
            {"bleu4": DOWN, "rm_score": FLAT},
            "warn",
            "It did not learn: the RM score did not change (+0.00 [-0.02, +0.02]).",
        ),
    ],
)
def test_replies_are_judged_against_the_policy_before(gains, kind, said) -> None:
    result = compared(gains, {})
    result_kind, change = reply_report.outcome(result, "ppo")[1:3]
    assert result_kind == kind and change.startswith(said)
    table = reply_report.differences(result, tuple(reply_report.METRICS[metric] for metric in gains))
    assert [line[0] for line in table[1:]] == ["sft - base", "ppo - sft", "ppo - base"]
    assert said[said.index("(") + 1 : said.index("]") + 1] in " ".join(table[2])


# ---------------------------------------------------------------------------------------------------- 4. reward models
def reward_models(ends: tuple, gain: tuple | None = None, truth: float | None = None) -> dict:
    """Return a result of rm and dpo; ends: interval of dpo's accuracy, gain: interval of its gain over rm."""
    first = {"mean": 0.7, "ci": (0.68, 0.72), "gain": None}
    second = {"mean": mean(ends), "ci": ends, "gain": gain and {"mean": mean(gain), "ci": gain}}
    models = {name: {"truth": {"mean": share}} for name, share in (("rm", truth), ("dpo", truth))}
    deciders = {"labels": {"truth": {"mean": 0.75}}, "models": models}
    return {"sets": {"validation": {"intervals": {"rm": first, "dpo": second}, "deciders": deciders}}}


@pytest.mark.parametrize(
    ("ends", "gain", "kind", "said"),
    [
        ((0.72, 0.76), UP, "good", "(0.740 [0.720, 0.760]). That is more than rm (+0.040 [+0.020, +0.060])."),
        ((0.68, 0.72), FLAT, "good", "(0.700 [0.680, 0.720]). That is not different from rm (+0.000 [-0.020"),
        ((0.64, 0.68), DOWN, "warn", "(0.660 [0.640, 0.680]). That is less than rm (-0.040 [-0.060, -0.020])."),
        ((0.48, 0.52), None, "warn", "(0.500 [0.480, 0.520]), which is no better than chance."),
        ((0.40, 0.44), DOWN, "bad", "(0.420 [0.400, 0.440]), which is worse than chance. That is less than rm"),
    ],
)
def test_reward_models_are_judged_against_chance_and_the_first(ends, gain, kind, said) -> None:
    result = reward_models(ends, gain)
    outcome = reward_model_report.outcome(result, "dpo")
    reported = verdict(outcome, None)
    assert reported[0] == kind
    assert reported[1].startswith(f"dpo ranks {round(100 * mean(ends))}% of validation pairs as people did {said}")
    cells = " ".join(reward_model_report.interval_lines(result["sets"]["validation"])[2])
    assert said[1 : said.index("]") + 1] in cells
    assert gain is None or f"{mean(gain):+.3f} [{gain[0]:+.3f}, {gain[1]:+.3f}]" in cells


def test_reward_model_verdict_reports_agreement_with_gold() -> None:
    said = "It agrees with the gold score on 84% of pairs, the labels on 75% of pairs."
    assert reward_model_report.outcome(reward_models((0.68, 0.72), truth=0.84), "rm").change == said


# ------------------------------------------------------------------------------------------------------- 5. benchmarks
@pytest.mark.parametrize(
    ("weight", "kind", "said"),
    [
        (UP, "good", "It knows more than which response is longer: its margin weight is 0.040 [0.020, 0.060]."),
        (FLAT, "warn", "It isn't shown to know more than which response is longer: its margin weight is 0.000"),
        (
            DOWN,
            "bad",
            "Beyond length it prefers the wrong response: its margin weight is -0.040 [-0.060, -0.020].",
        ),
    ],
)
def test_benchmark_verdict_depends_on_the_margin_weight(weight, kind, said) -> None:
    models = {"rm": {"mean": 0.71, "std": None, "interval": (0.69, 0.73)}}
    models["the longer one"] = {"mean": 0.55, "std": None, "interval": (0.5, 0.6)}
    result = {
        "tables": [{"name": "accuracy", "lines": [{"name": "all pairs", "num_rows": 9, "models": models}]}],
        "length": {"rm": {"margin_weight": {"mean": mean(weight), "interval": weight}}},
    }
    result_kind, result_text = verdict(benchmark_report.outcome(result, "rm"), None)
    level = "rm scores 0.710 [0.690, 0.730] (all pairs); the rule `the longer one` scores 0.550."
    assert result_kind == kind and result_text.startswith(f"{level} {said}")
