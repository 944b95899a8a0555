"""The learning curve of RLCF's discriminator, from runs written by hand; and its commands."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.programs.learning_curve import Args, curves_of, main, table
from experiments.programs.runs import Discriminators, discriminators
from nanorlhf.errors import InputError
from nanorlhf.rlcf import train_discriminator
from tests.helpers.page_commands import Command, parse_settings


def write_run(directory: Path, steps: list[tuple[str, float | None]], accuracy: float) -> None:
    """steps: per step, what it trains on and the accuracy measured after it."""
    directory.mkdir(parents=True)
    rows = [
        {"step": i, f"{stage}/loss": 0.1, "lr": 0.1} | ({} if measured is None else {"validation_accuracy": measured})
        for i, (stage, measured) in enumerate(steps)
    ]
    summary = {"steps": len(steps), "validation_accuracy": accuracy, "num_validation_pairs": 100}
    rows.append({"step": len(steps)} | summary)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    steps = [("triplet", None), ("triplet", 0.5), ("discriminator", None), ("discriminator", 0.75)]
    write_run(tmp_path / "10/trained", [*steps, ("discriminator", None)], 0.8)
    write_run(tmp_path / "2/trained", steps, 0.75)
    write_run(tmp_path / "2/only-pairs", steps[2:], 0.75)
    return tmp_path


def test_each_validation_is_one_line_with_the_steps_before_it(runs, tmp_path):
    assert main(Args(runs=runs, out=tmp_path / "out")) == ["discriminator.png"]
    rows = list(csv.DictReader((tmp_path / "out/discriminator.csv").open()))
    assert [tuple(row.values()) for row in rows] == [
        ("2", "trained", "2", "triplets", "0.5000", "100"),
        ("2", "trained", "4", "pairs", "0.7500", "100"),
        ("2", "only-pairs", "2", "pairs", "0.7500", "100"),
        ("10", "trained", "2", "triplets", "0.5000", "100"),
        ("10", "trained", "4", "pairs", "0.7500", "100"),
        ("10", "trained", "5", "pairs", "0.8000", "100"),
    ]
    assert (tmp_path / "out/discriminator.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_the_wilson_interval_of_the_last_accuracy(runs, tmp_path):
    main(Args(runs=runs, out=tmp_path / "out"))
    with (tmp_path / "out/discriminator.csv").open() as stream:
        head, *lines = table(curves_of(csv.DictReader(stream)))
    # Wilson, by hand: (0.8 + z²/200 ± z sqrt(0.8 * 0.2 / 100 + z²/40000)) / (1 + z²/100), z = 1.96
    assert head[0] == "discriminator" and ["trained", "10", "100", "5", "0.80 [0.71, 0.87]", "5"] in lines


def test_without_a_finished_run_the_error_names_the_command_for_one(tmp_path):
    with pytest.raises(InputError, match="python -m experiments discriminators"):
        main(Args(runs=tmp_path, out=tmp_path / "out"))


def test_every_command_is_one_that_its_program_takes():
    for phase in discriminators(Discriminators(seeds=(1,))):
        for run in phase:
            assert parse_settings(Command(("python", *run.words)))


@pytest.mark.slow
def test_the_curve_of_a_real_run(rlcf, tmp_path):
    """A line every second step and one after the last, with the accuracy and the number of pairs of its summary."""
    args = replace(rlcf.discriminator, out=tmp_path / "1/trained", eval_every=2)
    summary = train_discriminator.main(args)
    main(Args(runs=tmp_path, out=tmp_path / "out"))
    rows = list(csv.DictReader((tmp_path / "out/discriminator.csv").open()))
    steps = int(summary["steps"])
    assert [int(row["step"]) for row in rows] == [*range(2, steps, 2), steps]
    assert [row["stage"] for row in rows] == sorted((row["stage"] for row in rows), reverse=True)  # triplets first
    assert float(rows[-1]["accuracy"]) == pytest.approx(summary["validation_accuracy"], abs=1e-4)
    assert {row["pairs"] for row in rows} == {str(summary["num_validation_pairs"])}
