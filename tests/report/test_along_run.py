"""Checkpoints along a run: how they are grouped, and the points of each curve against the KL."""

import numpy as np
import pytest

from nanorlhf.report.along_run import along_figures, earlier_checkpoints, policies_along

CHECKPOINTS = {
    "sft": "runs/sft",
    **{f"fast@{step}": f"runs/fast/checkpoints/step-{step:08}" for step in (2, 4, 6)},
    "by hand": "runs/other/checkpoints/step-00000002",
    "ppo": "runs/fast",
}


def row(kl, win_rate, **more) -> dict:
    ends = (win_rate - 0.1, win_rate + 0.2)
    return {"kl": kl, "gold_win_rate": win_rate, "gold_win_rate_ci": ends, "rougeL": win_rate / 2, **more}


@pytest.fixture
def result() -> dict:
    rows = (row(0.0, 0.4), row(1.0, 0.6), row(4.0, 0.8), row(-0.01, 0.3), row(9.0, 0.1), row(4.0, 0.8))
    gain = {"gold_score": {"mean": 1.5, "ci": (1.0, 2.5)}, "rm_score": {"mean": 3.0, "ci": (2.5, 3.5)}}
    return {
        "args": {"policies": [word for pair in CHECKPOINTS.items() for word in pair]},
        "policies": dict(zip(CHECKPOINTS, rows, strict=True)),
        "differences": {name: gain for name in CHECKPOINTS if name != "sft"},
    }


def points(figure) -> dict[str, tuple[list[float], list[float]]]:
    """Return each curve's x and y by label."""
    [axes] = figure.axes
    return {
        container.get_label(): tuple(container.lines[0].get_data()[i].tolist() for i in (0, 1))
        for container in axes.containers
    }


def test_checkpoints_are_grouped_by_run_and_only_the_last_one_counts_as_the_runs_result() -> None:
    assert policies_along(CHECKPOINTS) == {"fast": ["fast@2", "fast@4", "fast@6"], "runs/other": ["by hand"]}
    assert earlier_checkpoints(CHECKPOINTS) == {"fast@2", "fast@4"}
    assert policies_along({"sft": "runs/sft", "ppo": "someone/ppo"}) == {}


def test_curves_start_at_the_first_policy_and_follow_the_steps_even_where_the_kl_falls(result) -> None:
    wins, scores, overlap = along_figures(result)
    curves = points(wins)
    assert curves["fast, gold"] == ([0.0, 1.0, 4.0, 0.0], [0.4, 0.6, 0.8, 0.3])  # an estimate below 0 is drawn at 0
    assert curves["runs/other, gold"] == ([0.0, 9.0], [0.4, 0.1]) and len(curves) == 2  # no judge
    assert points(scores)["fast, gold"][1] == [0.0, 1.5, 1.5, 1.5]
    assert points(scores)["fast, reward model"][1] == [0.0, 3.0, 3.0, 3.0]
    assert points(overlap)["fast, ROUGE-L"][1] == pytest.approx([0.2, 0.3, 0.4, 0.15])


def test_the_axis_is_the_square_root_of_the_kl(result) -> None:
    axes = along_figures(result)[0].axes[0]
    x = axes.transData.transform([(kl, 0.5) for kl in (0.0, 1.0, 4.0, 9.0)])[:, 0]
    assert np.diff(x) == pytest.approx([x[1] - x[0]] * 3)
    assert axes.get_xlabel() == "KL to sft, nats (square-root scale)"


def test_bars_are_the_intervals(result) -> None:
    [axes] = along_figures(result)[0].axes
    [bars] = axes.containers[0].lines[2]
    assert np.array(bars.get_segments())[:, :, 1] == pytest.approx(
        np.array([(0.3, 0.6), (0.5, 0.8), (0.7, 1.0), (0.2, 0.5)])
    )


def test_the_judges_win_rate_is_a_second_curve_without_queries_that_it_has_not_judged(result) -> None:
    for name, rate in (("fast@2", 0.7), ("fast@6", 0.9)):
        result["policies"][name] |= {"judge_win_rate": rate, "judge_win_rate_ci": (rate, rate)}
    result["policies"]["fast@4"]["judge_win_rate"] = None
    assert points(along_figures(result)[0])["fast, judge"] == ([1.0, 0.0], [0.7, 0.9])


def test_without_kept_checkpoints_or_measures_nothing_is_drawn(result) -> None:
    policies = {name: result["policies"][name] for name in ("sft", "ppo")}
    plain = {"args": {"policies": ["sft", "runs/sft", "ppo", "runs/fast"]}, "policies": policies, "differences": {}}
    assert along_figures(plain) == []
    for name, numbers in result["policies"].items():
        result["policies"][name] = numbers | {"gold_win_rate": None}
    result["differences"] = {name: {} for name in result["differences"]}
    assert [figure.axes[0].get_title("left") for figure in along_figures(result)] == ["ROUGE-L against KL"]
