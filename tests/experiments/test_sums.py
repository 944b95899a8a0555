"""The tables and pictures of the study, from runs written by hand; and its runs."""

import csv
import json
import re
from pathlib import Path

import pytest

from experiments.sums.report import (
    COMPARED,
    Args,
    differences,
    happened,
    leak_table,
    main,
    make_tables,
    markdown,
    read_policies,
)
from experiments.sums.runs import Sums, sums
from nanorlhf.errors import InputError
from tests.conftest import ROOT


def write_run(directory: Path, layouts: list[float], refilled: float = 0.0) -> None:
    """Updates of 32 responses of 10 tokens, whose layout rewards are given."""
    directory.mkdir(parents=True)
    rows = [
        {"step": i, "episode": 32 * (i + 1), "response_length": 10.0, "reward/outcome": 0.5, "reward/layout": layout}
        | {"groups/refilled": refilled}
        for i, layout in enumerate(layouts)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps({"seconds": 7.0}))


def evaluated(solved: float) -> dict:
    measured = {"mean": solved, "interval": [0.0, 1.0]}
    rewards = {"solved": measured, "outcome": {"mean": solved + 0.1}, "process": {"mean": solved + 0.2}}
    at_k = {str(k): {"mean": min(1.0, solved * k), "interval": [0.0, 1.0]} for k in (1, 2, 4, 8, 64)}
    return {"pass_at_k": at_k, "rewards": rewards, "by": {}, "eos_rate": 1.0, "response_length": 20.0}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds of the start, PPO and DAPO; one of GRPO with the leak."""
    runs = tmp_path / "study"
    for seed, solved in (("1", 0.2), ("2", 0.4)):
        policies = {"sft": evaluated(0.1), "ppo": evaluated(solved), "dapo": evaluated(solved)}
        write_run(runs / seed / "ppo", [1.0, 1.0])
        write_run(runs / seed / "dapo", [1.0, 1.0], refilled=2.0)
        if seed == "1":
            policies["grpo-leak"] = evaluated(0.0)
            write_run(runs / seed / "grpo-leak", [1.0, 1.6, 1.2, 2.0, 3.0])
        (runs / seed / "eval").mkdir(parents=True)
        (runs / seed / "eval/eval.json").write_text(json.dumps({"policies": policies}))
    return runs


def test_a_row_is_a_policy_with_numbers_by_seed_and_means_over_seeds(runs, tmp_path):
    main(Args(runs=runs, out=tmp_path / "out"))
    tables = make_tables(csv.DictReader((tmp_path / "out/sums.csv").open()))
    assert list(tables) == ["The outcome as reward", "Other rewards"]  # no run had another sampler
    headings, *rows = tables["The outcome as reward"]
    cells = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert list(cells) == ["sft", "ppo", "dapo"]
    assert cells["ppo"]["solved"] == "0.20 0.40" and cells["ppo"]["pass@64"] == "1.00 1.00"
    assert (
        cells["ppo"]["right answer"] == "0.30 0.50"
        and cells["ppo"]["seconds"] == "7"
        and cells["sft"]["seconds"] == "-"
    )
    assert cells["ppo"]["length"] == "20.0"
    lines = list(csv.DictReader((tmp_path / "out/sums.csv").open()))
    tokens = {(line["seed"], line["policy"]): line["tokens"] for line in lines}
    assert tokens["1", "sft"] == "" and tokens["1", "ppo"] == "640"
    assert tokens["1", "dapo"] == str(2 * (32 + 2 * 16) * 10)
    assert [row[0] for row in tables["Other rewards"][1:]] == ["sft", "grpo-leak"]


def test_differences_are_paired_by_seed(runs, tmp_path):
    main(Args(runs=runs, out=tmp_path / "out"))
    headings, ppo, dapo, leak = differences(csv.DictReader((tmp_path / "out/sums.csv").open()), "sft")
    assert headings == ["policy", "solved", "pass@64", "right steps"]
    assert ppo[:2] == ["ppo", "+0.200 [-1.071, +1.471]"]  # 0.1 and 0.3; half a width of t(0.975, 1) * 0.1
    assert dapo[1:] == ppo[1:] and leak[:2] == ["grpo-leak", "-0.100"]  # one seed: no interval
    [_, against, _] = differences(csv.DictReader((tmp_path / "out/sums.csv").open()), "ppo")
    assert against[:2] == ["dapo", "+0.000 [+0.000, +0.000]"]
    assert "### Minus ppo, seed by seed" in (tmp_path / "out/sums.md").read_text()


@pytest.mark.parametrize(
    ("solved", "kind", "said"),
    [
        ((0.30, 0.32), "good", "better than sft: ppo (+0.210 [+0.083, +0.337])."),
        ((0.05, 0.20), "warn", "no difference shown: ppo (+0.025 [-0.928, +0.978])."),
        ((0.02, 0.03), "bad", "worse than sft: ppo (-0.075 [-0.139, -0.011])."),
    ],
)
def test_the_page_begins_with_who_solves_more_than_the_initial_policy(solved, kind, said):
    rows = [{"policy": "sft", "seed": seed, "pass@1": "0.1"} for seed in "12"]
    rows += [{"policy": "ppo", "seed": seed, "pass@1": str(x)} for seed, x in zip("12", solved, strict=True)]
    section = happened(rows, []).html()
    assert f'class="happened {kind}"' in section and f"By pass@1, seed by seed, {said}" in section
    empty = dict.fromkeys(COMPARED, "")
    [_, line] = differences([empty | row for row in rows], "sft")
    assert line[1] in said


def test_the_page_reports_how_many_found_the_leak_and_single_seeds(runs, tmp_path):
    main(Args(runs=runs, out=tmp_path / "out"))
    [said] = re.findall(r'<p class="happened warn">(.*?)</p>', (tmp_path / "out/sums.html").read_text())
    assert said.endswith("one seed, so no interval: grpo-leak. 1 of 1 runs with a reward for layout found the leak.")
    assert happened([{"policy": "sft", "seed": "1", "pass@1": "0.1"}], []).html() == ""


def test_a_difference_of_an_unmeasured_metric_is_omitted():
    """Fewer than 64 samples per query have no pass@64."""
    row = dict.fromkeys(COMPARED, "0.5")
    rows = [
        row | {"policy": policy, "seed": seed, "pass@64": of_64}
        for policy, seed, of_64 in (("sft", "1", ""), ("sft", "2", "0.25"), ("ppo", "1", ""), ("ppo", "2", "0.75"))
    ]
    [headings, ppo] = differences(rows, "sft")
    assert dict(zip(headings, ppo, strict=True))["pass@64"] == "+0.500"
    [headings, ppo] = differences([row | {"pass@64": ""} for row in rows], "sft")
    assert dict(zip(headings, ppo, strict=True))["pass@64"] == "-"


def test_the_leak_is_found_where_it_stays_above_the_limit(runs):
    [_, line] = leak_table(read_policies(runs))[:2]
    assert leak_table(read_policies(runs))[0][2] == "found at update"
    assert line == ["ppo", "1", "never", "1.00", "0.500"]
    assert ["grpo-leak", "1", "3", "3.00", "0.500"] in leak_table(read_policies(runs))


def test_the_page_the_table_and_the_pictures_are_written(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(Args(runs=runs, out=out)) == ["pass_at_k.png", "training.png", "leak.png"]
    assert all(
        (out / name).read_bytes().startswith(b"\x89PNG") for name in ("pass_at_k.png", "training.png", "leak.png")
    )
    assert "| ppo | 0.20 0.40 | 1.00 1.00 | 0.30 0.50 |" in (out / "sums.md").read_text()
    assert "grpo-leak" in (out / "sums.html").read_text() and "Other rewards" in capsys.readouterr().out


def test_all_can_read_the_page(runs, tmp_path, unreadable):
    main(Args(runs=runs, out=tmp_path / "out"))
    assert not unreadable(tmp_path / "out" / "sums.html")


def test_without_an_evaluation_the_error_names_the_command_for_one(tmp_path):
    with pytest.raises(InputError, match="no SEED there has an evaluation"):
        main(Args(runs=tmp_path, out=tmp_path / "out"))


def test_a_broken_evaluation_is_named(runs):
    (runs / "2/eval/eval.json").write_text(json.dumps({"policies": {"sft": {}}}))
    with pytest.raises(InputError, match="2/eval/eval.json: pass_at_k is missing"):
        read_policies(runs)


def test_the_page_shows_the_tables_of_its_csv():
    page = (ROOT / "experiments/sums/README.md").read_text()
    with (ROOT / "experiments/sums/sums.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["seed"] for row in rows} == {"1", "2", "3"}
    tables = [*make_tables(rows).values()]
    assert len(tables) == 3 and all(markdown(table) in page for table in tables)


def test_the_page_quotes_the_differences_of_its_csv():
    page = (ROOT / "experiments/sums/README.md").read_text()
    with (ROOT / "experiments/sums/sums.csv").open(newline="") as stream:
        headings, *lines = differences(list(csv.DictReader(stream)), "sft")
    by_name = {line[0]: dict(zip(headings, line, strict=True)) for line in lines}
    quoted = [by_name[name]["pass@64"] for name in ("ppo", "grpo", "rloo", "gspo", "ppo-process")]
    quoted += [by_name["ppo"]["solved"], by_name["ppo-process"]["right steps"]]
    assert all(text in page for text in quoted)


def test_the_study_evaluates_all_it_trains_and_refuses_names_it_does_not_know():
    args = Sums(seeds=(4,), runs=("ppo", "grpo/learned"))
    runs, _ = sums(args)
    *_, evaluation = runs
    assert evaluation.words[evaluation.words.index("--policies") + 1 :: 2][:3] == ("sft", "ppo", "grpo-learned")
    learned = next(run for run in runs if "runs/sums_study/4/grpo-learned" in run.words)
    assert learned.words[learned.words.index("--reward") + 1] == "runs/sums_study/4/rm"
    for entry in ("ppo/magic", "a2c"):
        with pytest.raises(InputError, match=f"--runs {entry}: expected ALGORITHM"):
            list(sums(Sums(runs=(entry,))))
