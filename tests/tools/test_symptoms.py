"""Tests of tools.symptoms, and of the symptoms in the lists of bugs, which may quote only its table."""

import ast
import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from course.bugs import BUGS, Bug, bug_named
from course.copies import ROOT, path_and_name
from course.edit import find_function, replaced
from nanorlhf import dataset
from nanorlhf.errors import InputError
from tools import symptoms
from tools.doctor import bug_stages, start
from tools.other_bugs import OTHER_BUGS
from tools.symptoms import Args, Case, Row, distance, healthy_case, main, read_means, read_table

ALL_BUGS = (*BUGS, *OTHER_BUGS)
TABLE = read_table(ROOT / "course/symptoms.csv")
ROWS = {bug.name: [row for row in TABLE if row["bug"] == bug.name] for bug in ALL_BUGS}


# ------------------------------------------------------------------------------------------------------------ the texts
class Quote(NamedTuple):
    """METRIC is SICK instead of LOWEST to HIGHEST, or instead of the healthy value at seed 1, which is both."""

    metric: str
    updates: str
    sick: str
    lowest: str
    highest: str


NUMBER = r"-?\d+(?:\.\d+)?"
RANGE = rf"(?P<sick>{NUMBER}) instead of (?P<lowest>{NUMBER})(?: to (?P<highest>{NUMBER}))?"
QUOTE = re.compile(
    rf"(?P<metric>[a-z_]+(?:/[a-z0-9_]+)?) (?:is {RANGE} in (?P<updates>the first update|updates 2 to 5)|ENDS)".replace(
        "ENDS", rf"ends at {RANGE}".replace("?P<", "?P<last_")
    )
)
UPDATES = {"the first update": "1", "updates 2 to 5": "2-5"}


def quotes(text: str) -> Iterator[Quote]:
    for match in QUOTE.finditer(text):
        last = "" if match["updates"] else "last_"
        sick, lowest, highest = (match[last + name] for name in ("sick", "lowest", "highest"))
        yield Quote(match["metric"], UPDATES.get(match["updates"], "last"), sick, lowest, highest or lowest)


def rounds_to(value: str, quoted: str) -> bool:
    """Return whether a number of the table, which has four digits, rounds to a number of the text; 0 means 0.000."""
    decimals = len(quoted.partition(".")[2]) if float(quoted) else 3
    return abs(float(value) - float(quoted)) <= 0.5 * 10**-decimals + 5e-4 * abs(float(value))


def is_in_the_table(quote: Quote, rows: list[dict[str, str]]) -> bool:
    single = quote.lowest == quote.highest
    return any(
        row["metric"] == quote.metric
        and (row["updates"] == quote.updates or (quote.updates == "last" and row["updates"] not in UPDATES.values()))
        and rounds_to(row["seed_1"], quote.sick)
        and rounds_to(row["healthy" if single else "lowest"], quote.lowest)
        and rounds_to(row["healthy" if single else "highest"], quote.highest)
        for row in rows
    )


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name)
def test_a_symptom_quotes_the_table_and_no_other_number(bug: Bug) -> None:
    for quote in quotes(bug.symptom):
        assert is_in_the_table(quote, ROWS[bug.name]), quote
    without_names = re.sub(r"[a-z_]+/[a-z0-9_]+|--[a-z-]+ 1\b|GPT-2", "", QUOTE.sub("", bug.symptom))
    assert not re.search(r"\d", without_names), without_names


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name)
def test_a_symptom_states_what_was_not_measured_and_what_does_not_change(bug: Bug) -> None:
    rows = ROWS[bug.name]
    assert rows or "not measured" in bug.symptom.lower()
    unchanged = bool(rows) and all(row["seed_1"] == row["healthy"] for row in rows)
    ends = {row["stage"] for row in rows if row["updates"] not in UPDATES.values()}
    whole = ends == {row["stage"] for row in rows}  # otherwise PPO stopped after five updates
    sentence = "No metric of a default run changes" if whole else "No metric of the first five updates changes"
    assert unchanged == bug.symptom.startswith(sentence)


def gives_all_seeds_one_order(bug: Bug) -> bool:
    """Return whether a bug only makes all seeds read the data in one order, which a healthy run may have too.

    Then no metric of a run can show it. But its two runs share this order, so both can leave the healthy range by
    chance. For other bugs, two seeds make this unlikely.
    """
    path, function = path_and_name(bug.where)
    if path != Path("nanorlhf/dataset.py"):  # where batch_indices is
        return False
    source = replaced((ROOT / path).read_text(), function, bug.old, bug.new, bug.number)
    names = dict(vars(dataset))
    exec(ast.unparse(find_function(source, "batch_indices")), names)
    first, second = ([names["batch_indices"](50, 50, epoch, seed) for epoch in range(2)] for seed in symptoms.SEEDS)
    return first == second and first[0] != first[1] and all(sorted(order) == list(range(50)) for order in first)


@pytest.mark.parametrize("bug", ALL_BUGS, ids=lambda bug: bug.name)
def test_only_at_level_3_no_metric_leaves_the_healthy_range_by_nearly_its_width_but_by_chance(bug: Bug) -> None:
    rows = ROWS[bug.name]
    if rows:
        unseen = max(float(row["ranges"]) for row in rows) < 0.9 or gives_all_seeds_one_order(bug)
        assert unseen == (bug.level == 3)
    else:
        assert bug.level == 3 or bug_stages(bug)


def test_one_order_for_all_seeds_must_reshuffle_each_epoch_and_contain_each_row_once() -> None:
    bug = bug_named("seed-is-ignored")
    draw = "np.random.default_rng(epoch)"
    for old, new, expected in (
        (bug.old, draw, True),
        (bug.old, "np.random.default_rng((seed, epoch + 1))", False),
        (bug.old, "np.random.default_rng(0)", False),
        (f"{bug.old}.permutation(num_rows)", f"{draw}.integers(num_rows, size=num_rows)", False),
    ):
        assert gives_all_seeds_one_order(replace(bug, old=old, new=new)) == expected, new
    assert not gives_all_seeds_one_order(bug_named("no-leading-blank"))


def test_a_quote_must_agree_in_metric_updates_and_each_number() -> None:
    values = ["b", "ppo", "value/loss", "1", "3.747", "3.1", "3.9", "3.66", "", "0"]
    row = dict(zip(Row._fields, values, strict=True))
    rows = [row, row | {"updates": "16-20", "seed_1": "0.5551", "healthy": "0.321"}]
    for text, agrees in (
        ("value/loss is 3.66 instead of 3.75 in the first update", True),
        ("value/loss is 3.7 instead of 3.1 to 3.9 in the first update", True),
        ("value/loss is 3.67 instead of 3.75 in the first update", False),
        ("value/loss is 3.66 instead of 3.74 in the first update", False),
        ("value/loss is 3.66 instead of 3.1 to 3.8 in the first update", False),
        ("value/loss is 3.66 instead of 3.75 in updates 2 to 5", False),
        ("value/loss ends at 3.66 instead of 3.75", False),
        ("value/loss ends at 0.56 instead of 0.32", True),
        ("policy/loss is 3.66 instead of 3.75 in the first update", False),
    ):
        [quote] = quotes(f"At first, {text}.")
        assert is_in_the_table(quote, rows) == agrees, text
    assert rounds_to("1.3e-07", "0") and not rounds_to("0.004", "0") and not rounds_to("0.4", "0")


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
