"""The verdict of a report: learned, over-optimised, not learned, and the doctor's findings."""

import json

import pytest

from nanorlhf.report.summary_report import outcome
from nanorlhf.report.verdict import findings_of, outcomes_of, verdict, verdict_section
from nanorlhf.rules.finding import Finding

FINDING = Finding(name="kl-grows", seen="The KL doubled.", means="Beta is too small.", where="--kl-coef")
OVER = Finding(name="over-optimised", seen="Gold fell.", means="It exploits errors.", where="--kl-coef")


def evaluation(gold: tuple | None, rm: tuple | None, wins: float | None = 0.96, eos_rate: float = 1.0) -> dict:
    """Return an evaluation of sft and ppo; gold and rm: intervals of PPO's gains."""
    gains = {
        name: {"mean": sum(ends) / 2, "ci": list(ends)}
        for name, ends in (("gold_score", gold), ("rm_score", rm))
        if ends is not None
    }
    row = {"gold_win_rate": wins, "eos_rate": eos_rate}
    return {
        "args": {"policies": ["sft", "a/sft", "ppo", "a/ppo"]},
        "policies": {"sft": {"gold_win_rate": wins and 0.42, "eos_rate": 1.0}, "ppo": row},
        "differences": {"ppo": gains},
    }


def test_a_policy_that_is_better_by_both_scores_is_good() -> None:
    kind, text = verdict(outcome(evaluation((1.8, 2.2), (1.7, 1.9)), "ppo"), [])
    assert kind == "good"
    assert text == (
        "ppo beats the references in 96% of queries (sft: 42%). The gold score rose (+2.00 [+1.80, +2.20]); the "
        "reward model's score rose as well (+1.80 [+1.70, +1.90]). Nothing looks wrong."
    )


@pytest.mark.parametrize(
    ("gold", "said"),
    [((-1.2, -0.8), "fell (-1.00 [-1.20, -0.80])"), ((-0.1, 0.1), "did not rise (+0.00 [-0.10, +0.10])")],
)
def test_a_gain_only_in_the_reward_model_score_means_over_optimisation(gold, said) -> None:
    kind, text = verdict(outcome(evaluation(gold, (2.5, 3.0), wins=0.2), "ppo"), [])
    assert kind == "bad" and "ppo beats the references in 20% of queries (sft: 42%)." in text
    assert (
        f"It is over-optimised: the reward model's score rose (+2.75 [+2.50, +3.00]) and the gold score {said}." in text
    )
    assert "Nothing looks wrong" not in text


def test_unchanged_scores_mean_that_it_did_not_learn() -> None:
    kind, text = verdict(outcome(evaluation((-0.1, 0.1), (-0.2, 0.1), wins=0.43), "ppo"), [])
    said = (
        "It did not learn: the gold score did not change (+0.00 [-0.10, +0.10]), and neither did the reward model's "
        "score (-0.05 [-0.20, +0.10])."
    )
    assert kind == "warn" and said in text and text.endswith("The run's metrics show no problem.")


@pytest.mark.parametrize(
    ("gold", "rm", "kind", "said"),
    [
        ((-2, -1), (-2, -1), "bad", "It got worse"),
        ((1, 2), (-1, 1), "warn", "the reward model's score did not change"),
        ((-1, 1), (-2, -1), "warn", "and the reward model's score fell"),
        ((1, 2), None, "good", "The gold score rose"),
        ((-1, 1), None, "warn", "It did not learn"),
        ((-2, -1), None, "bad", "It got worse"),
        (None, (1, 2), "good", "this doesn't show whether the responses are better"),
        (None, (-1, 1), "warn", "It did not learn"),
        (None, (-2, -1), "warn", "fell"),
        (None, None, "good", "ppo beats"),
    ],
)
def test_verdict_uses_the_scores_that_are_known(gold, rm, kind, said) -> None:
    result_kind, text = verdict(outcome(evaluation(gold, rm), "ppo"), None)
    assert result_kind == kind and said in text and "looks wrong" not in text


def test_verdict_includes_the_doctors_findings() -> None:
    kind, text = verdict(outcome(evaluation((1, 2), (1, 2)), "ppo"), [FINDING])
    assert kind == "warn" and text.endswith("Training run: The KL doubled. Beta is too small. (kl-grows)")
    assert verdict(outcome(evaluation((1, 2), (1, 2)), "ppo"), [FINDING, OVER])[0] == "bad"
    assert (
        verdict(outcome(evaluation((-2, -1), (-2, -1)), "ppo"), [FINDING])[0] == "bad"
    )  # a milder finding doesn't improve the verdict


def test_verdict_reports_truncated_responses() -> None:
    kind, text = verdict(outcome(evaluation((1, 2), (1, 2), eos_rate=0.801), "ppo"), None)
    assert kind == "warn" and "Only 80% of responses end with EOS; the others are truncated." in text


def test_judge_win_rates_name_the_judge_and_the_opponent() -> None:
    result = evaluation(None, None, wins=None) | {"judge": {"against": "sft"}}
    result["policies"]["ppo"]["judge_win_rate"] = 0.615
    assert verdict(outcome(result, "ppo"), None)[1] == "ppo beats sft in 62% of queries, according to the judge."


def test_a_single_policy_is_judged_by_its_run(tmp_path) -> None:
    result = evaluation(None, None)
    result["args"]["policies"], result["differences"] = ["sft", str(tmp_path)], {}
    del result["policies"]["ppo"]
    write_run(tmp_path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": float("nan")}])
    section = verdict_section(outcomes_of(result, outcome)).html()
    assert "sft beats the references in 42% of queries." in section and "(not-finite)" in section
    assert section.count("<p") == 1 and 'class="happened warn"' in section


def test_runs_without_metrics_and_unreadable_ones(tmp_path) -> None:
    result = evaluation((1, 2), (1, 2))
    result["args"]["policies"] = ["sft", "a/sft", "ppo", str(tmp_path)]
    assert findings_of(str(tmp_path)) is None
    assert "looks wrong" not in verdict_section(outcomes_of(result, outcome)).html()
    write_run(tmp_path, [{"step": 0, "policy/loss": 1.0, "policy/ratio": 1.0}], clip_range="wide")
    assert (
        "The doctor can&#39;t read the run: args.json: the field"
        in verdict_section(outcomes_of(result, outcome)).html()
    )


def test_best_of_n_of_the_first_policy_has_no_separate_run(tmp_path) -> None:
    result = evaluation((1, 2), (1, 2))
    write_run(tmp_path, [{"step": 0, "loss": float("nan")}])
    result["args"]["policies"] = ["sft", str(tmp_path), "ppo", f"best-of-16:{tmp_path}"]
    assert "not-finite" not in verdict_section(outcomes_of(result, outcome)).html()


def write_run(run, rows: list[dict], **settings) -> None:
    (run / "args.json").write_text(json.dumps(settings))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
