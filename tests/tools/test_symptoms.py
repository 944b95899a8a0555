"""Tests of tools.symptoms, which measures what a bug changes in the metrics of a run."""

import csv
import json
import math
from dataclasses import replace

import pytest

from course.bugs import bug_named
from nanorlhf.errors import InputError
from tools import symptoms
from tools.doctor import start
from tools.symptoms import Args, Case, distance, healthy_case, main, read_means, read_table


# ------------------------------------------------------------------------------------------------------------- the tool
def write_run(run, rows, summary=None) -> None:
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))


def test_metrics_are_averaged_over_the_first_the_next_four_and_the_last_five_updates(tmp_path) -> None:
    rows = [{"step": step, "episode": 8 * step, "loss": float(step)} for step in range(12)]
    rows[5] |= {"validation_loss": 4.0}
    rows[11] |= {"validation_loss": 2.0}
    write_run(tmp_path / "sft", rows, {"loss": 11.0, "eos_rate": 0.5, "seconds": 9.0})
    assert read_means(tmp_path / "sft") == {
        (0, "loss", "1"): 0.0, (1, "loss", "2-5"): 2.5, (2, "loss", "8-12"): 9.0,
        (0, "validation_loss", "6"): 4.0, (2, "validation_loss", "12"): 2.0, (2, "eos_rate", "end"): 0.5,
    }  # fmt: skip
    write_run(tmp_path / "ppo", rows[:7])  # stopped: it may have trained for another update
    assert read_means(tmp_path / "ppo") == {(0, "loss", "1"): 0.0, (1, "loss", "2-5"): 2.5}


@pytest.mark.parametrize(
    ("values", "expected"),
    [((2.5,), 0.0), ((5.0,), 1.0), ((5.0, 9.0), 1.0), ((0.0, -5.0), 0.5), ((5.0, -9.0), 0.0), ((math.nan,), math.inf)],
)
def test_the_nearer_seed_counts_and_the_unit_is_the_width_of_the_healthy_range(values, expected) -> None:
    assert distance(values, 1.0, 3.0) == expected


def test_a_range_of_equal_values_is_as_wide_as_rounding_errors() -> None:
    assert distance([0.5001], 0.5, 0.5) == pytest.approx(1.0) and distance([2001.0], 2000.0, 2000.0) == 5.0


def test_a_bug_is_compared_with_runs_of_the_same_stages() -> None:
    assert healthy_case(("rm",), 2) == Case(None, ("rm", "ppo"), 2) and healthy_case(("ppo",), 1).stages == ("ppo",)


def made_run(directory, case: Case, loss: float, score: float) -> None:
    for stage in case.stages:
        rows = [{"step": step, "value/loss": loss, "objective/score": score, "lr": 0.1} for step in range(12)]
        write_run(case.directory(directory) / stage, rows, {})
    (case.directory(directory) / "key").write_text(case.key)


def test_the_table_has_the_largest_differences_and_keeps_the_rows_of_other_bugs(tmp_path, monkeypatch) -> None:
    bug = replace(bug_named("kl-of-the-wrong-sign"), symptom="value/lr rises.")
    other = replace(bug_named("rewards-for-returns"), symptom="The lr is too high.")
    for seed, loss in ((1, 1.0), (2, 1.2), (3, 0.8)):
        made_run(tmp_path, Case(None, ("ppo",), seed), loss, 2.0 * seed)
    made_run(tmp_path, Case(bug, ("ppo",), 1), 2.0, 3.0)
    made_run(tmp_path, Case(bug, ("ppo",), 2), 3.2, 4.0)
    made_run(tmp_path, Case(other, ("ppo",), 1), 1.0, 2.0)
    monkeypatch.setattr(symptoms, "PER_WINDOW", 1)
    file = tmp_path / "table.csv"
    for bugs in ([other], [bug]):
        symptoms.write_table(file, bugs, tmp_path)
    rows = [row for row in read_table(file) if row["bug"] == bug.name]
    assert [tuple(row.values())[1:] for row in rows] == [
        ("ppo", "value/loss", "1", "1", "0.8", "1.2", "2", "3.2", "2"),
        ("ppo", "value/loss", "2-5", "1", "0.8", "1.2", "2", "3.2", "2"),
        ("ppo", "value/loss", "8-12", "1", "0.8", "1.2", "2", "3.2", "2"),
        ("ppo", "objective/score", "8-12", "2", "2", "6", "3", "4", "0"),
    ]
    unchanged = [row for row in read_table(file) if row["bug"] == other.name]
    assert [row["metric"] for row in unchanged if row["updates"] == "2-5"] == ["value/loss", "lr"]
    assert {(row["seed_1"] == row["healthy"], row["seed_2"], row["ranges"]) for row in unchanged} == {(True, "", "0")}
    assert symptoms.changes_nothing(Case(other, ("ppo",), 1), tmp_path)
    assert not symptoms.changes_nothing(Case(bug, ("ppo",), 1), tmp_path)


def test_a_missing_demo_and_an_unknown_bug_are_errors(tmp_path) -> None:
    with pytest.raises(InputError, match="has no data: run `make demo` first"):
        main(Args(demo=tmp_path))
    for name in ("data", "sft", "rm"):
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match="--bugs unheard-of: unknown bug"):
        main(Args(demo=tmp_path, bugs=("unheard-of",)))


@pytest.mark.slow
def test_a_bug_is_trained_stopped_continued_and_measured(tmp_path, miniature, monkeypatch) -> None:
    small = ("--max-query-length", "160", "--total-episodes", "160", "--batch-size", "8")
    monkeypatch.setattr(
        symptoms,
        "start",
        lambda tree, stage, demo, out, flags, *rest: start(tree, stage, demo, out, flags + small, *rest),
    )
    monkeypatch.setattr(symptoms, "HEALTHY_SEEDS", (1,))
    args = {"demo": miniature.root, "out": tmp_path / "out", "table": tmp_path / "table.csv", "jobs": 1, "num_seeds": 1}
    args |= {"bugs": ("ratio-over-padding",)}
    main(Args(**args, early=True))
    run = tmp_path / "out/ratio-over-padding/1/ppo"
    assert not (run / "summary.json").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= 5
    assert {row["updates"] for row in read_table(tmp_path / "table.csv")} == {"1", "2-5"}
    main(Args(**args))
    with (tmp_path / "table.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["updates"] for row in rows} == {"1", "2-5", "16-20"}
    [ratio] = [row for row in rows if (row["metric"], row["updates"]) == ("policy/ratio", "1")]
    assert float(ratio["healthy"]) < 1.1 < float(ratio["seed_1"]) and float(ratio["ranges"]) > 1
