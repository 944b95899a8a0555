"""The tables of the study of rewards for programs, from runs written by hand; its commands, and its rewards."""

import csv
import json
from pathlib import Path

import pytest

from experiments.__main__ import main as run_study
from experiments.programs.checks import fails, passes
from experiments.programs.report import Args, differences, main, policy_table
from experiments.programs.runs import ARMS, Programs, programs
from experiments.tables import by_policy_and_seed
from nanorlhf.errors import InputError
from tests.conftest import ROOT
from tests.helpers.page_commands import Command, parse_settings

PASSED = {"1": {"sft": 0.2, "tests": 0.7, "checks": 0.5}, "2": {"sft": 0.1, "tests": 0.9, "checks": 0.6}}


def write_evaluation(directory: Path, passed: dict[str, float]) -> None:
    directory.mkdir(parents=True)
    at_k = {
        name: [{"k": k, "pass": x * k / 4, "exec": x, "comp": 1.0} for k in (1, 4)]
        for name, x in passed.items()
    }  # fmt: skip
    policies = {name: {"at_k": rows} for name, rows in at_k.items()}
    (directory / "eval.json").write_text(json.dumps({"policies": policies}))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds, and the seed of the search."""
    for seed, passed in PASSED.items():
        write_evaluation(tmp_path / seed / "eval", passed)
        for name in ("tests", "checks"):
            run = tmp_path / seed / name
            run.mkdir()
            (run / "args.json").write_text(json.dumps({"lr": 3e-4}))
            rows = [{"step": i, "objective/kl": kl} for i, kl in enumerate((0.0, float(seed)))]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / seed / "trained").mkdir()
        summary = {"steps": 300.0, "validation_accuracy": 0.875, "num_validation_pairs": 40.0}
        (tmp_path / seed / "trained/summary.json").write_text(json.dumps(summary))
    write_evaluation(tmp_path / "8/eval", {"sft": 0.2, "tests-0.0001": 0.4, "tests-0.0003": 0.5})
    return tmp_path


def test_a_row_is_a_policy_with_its_values_at_each_seed(runs, tmp_path):
    assert main(Args(runs=runs, out=tmp_path / "out")) == ["programs.png"]
    rows = list(csv.DictReader((tmp_path / "out/programs.csv").open()))
    assert [(row["seed"], row["policy"]) for row in rows] == [(s, p) for s in "12" for p in ("sft", "checks", "tests")]
    assert rows[-1] == {
        "seed": "2", "policy": "tests", "lr": "0.0003", "pass@1": "0.225", "pass@4": "0.9", "ran@1": "0.9", "kl": "2",
    }  # fmt: skip
    page = (tmp_path / "out/programs.md").read_text()
    assert "| tests | 0.17 0.23 | 0.200 | 0.70 0.90 | 0.800 | 0.800 | 1.5 | 0.0003 |" in page
    assert "| tests | checks | +0.062 [-0.096, +0.221] | +0.250 [-0.385, +0.885] |" in page
    assert "| trained | 300 300 | 0.88 0.88 | 40 40 |" in page
    assert (tmp_path / "out/programs.png").read_bytes().startswith(b"\x89PNG")


def test_without_an_evaluation_the_error_names_the_command_for_one(tmp_path):
    with pytest.raises(InputError, match="python -m experiments programs"):
        main(Args(runs=tmp_path, out=tmp_path / "out"))


def test_each_reward_trains_with_its_best_learning_rate(runs):
    args = Programs(out=runs, seeds=(1,), variants=("tests",), lrs=(1e-4, 3e-4))
    search, final, _ = programs(args)
    tried = [run.words[run.words.index("--lr") + 1] for run in search if "train_ppo.py" in run.words]
    assert tried == ["0.0001", "0.0003"]
    [chosen] = [run for run in final if "train_ppo.py" in run.words]
    assert chosen.words[chosen.words.index("--lr") + 1] == "0.0003"
    *_, evaluation = final
    assert evaluation.words[evaluation.words.index("--policies") + 1 :: 2][:2] == ("sft", "tests")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variants": ("magic",)}, "--variants magic: expected one of"),
        ({"grid_seed": 2}, "--grid-seed 2 is also in --seeds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        next(programs(Programs(**settings)))


def test_every_command_is_one_that_its_program_takes():
    for phase in programs(Programs(seeds=(1,), lrs=(3e-4,), dry_run=True)):
        for run in phase:
            assert parse_settings(Command(("python", *run.words)))


@pytest.mark.slow
def test_the_study_in_miniature(tmp_path):
    """Two rewards at one rate, one update each, from the data to the tables."""
    args = Programs(
        out=tmp_path, seeds=(1,), variants=("compiler-pays-0", "tests"), lrs=(3e-4,), total_episodes=128,
        num_problems=(128, 4), jobs=2,
    )  # fmt: skip
    run_study(args)
    rows = list(csv.DictReader((tmp_path / "report/programs.csv").open()))
    assert [row["policy"] for row in rows] == ["sft", "compiler-pays-0", "tests"]
    assert all(0 <= float(row["pass@1"]) <= float(row["pass@4"]) <= 1 for row in rows)


def test_rewards_have_one_scale():
    """The highest score minus the lowest is 2, except where a program that passes gets 0."""
    record = {"prefix": "def f(n):\n", "suffix": "\n", "language": "python"}
    responses = ["    return n", "    return m", "    k = n\n    return n"]  # an undefined name, an unused variable
    assert fails([""] * 3, responses, [record] * 3) == [0, -1, -1]
    assert passes([""] * 3, responses, [record] * 3) == [1, -1, -1]
    unused_outside = record | {"prefix": "def f(n):\n    k = 1\n"}  # not the response's fault
    assert fails([""], ["    return n"], [unused_outside]) == [0]
    weight = ARMS["tests"][ARMS["tests"].index("--reward-weights") + 1]
    assert weight == "2"


def test_the_page_shows_the_tables_of_its_csv():
    page = (ROOT / "experiments/programs/README.md").read_text()
    with (ROOT / "experiments/programs/programs.csv").open(newline="") as stream:
        by_policy = by_policy_and_seed(csv.DictReader(stream))
    assert all(len(by_seed) >= 3 for by_seed in by_policy.values()) and by_policy.keys() == {"sft", *ARMS}
    for table in (policy_table(by_policy), differences(by_policy)):
        for line in table:
            assert f"| {' | '.join(line)} |" in page
