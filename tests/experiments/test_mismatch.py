"""The table and pictures of the study, from runs written by hand; and its runs."""

import json
import re
from pathlib import Path

import pytest

from experiments.mismatch.report import BY_UPDATE, UPDATE_COLUMNS, Args, main, make_table, read_runs, sampler_figure
from experiments.mismatch.runs import CORRECTIONS, SAMPLERS, Mismatch
from nanorlhf.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def train(directory: Path, gap: float, num_updates: int = 3) -> None:
    """Updates whose gaps are `gap` times 1, 2, 3; all other numbers are the update's."""
    directory.mkdir(parents=True)
    keys = {key for key, _, _ in UPDATE_COLUMNS} | BY_UPDATE.keys()
    rows = [
        {"step": i} | dict.fromkeys(keys, float(i)) | {"policy/sampler_gap": gap * (i + 1)} for i in range(num_updates)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds each of the exact sampler and of int8, one of stale; int8's second seed has not been evaluated."""
    runs = tmp_path / "mismatch"
    for directory, gap in (("exact/none/1", 0.0), ("exact/none/2", 0.0), ("int8/tis/1", 0.1), ("int8/tis/2", 0.3)):
        train(runs / directory, gap)
    train(runs / "stale" / "none" / "1", 1.0, num_updates=2)
    (runs / "base" / "rm" / "best").mkdir(parents=True)
    (runs / "eval").mkdir()
    golds = {"sft": 1.0, "exact-none-1": 3.0, "exact-none-2": 4.0, "int8-tis-1": 2.5, "stale-none-1": 2.0}
    policies = {name: {"gold_score": x, "gold_win_rate": None, "kl": 2 * x} for name, x in golds.items()}
    (runs / "eval" / "eval.json").write_text(json.dumps({"policies": policies}))
    return runs


def test_each_row_is_a_setting_and_its_numbers_are_means_over_seeds(runs: Path) -> None:
    headings, *rows = make_table(read_runs(runs))
    lines = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [(line["sampler"], line["correction"], line["seeds"]) for line in lines] == [
        ("exact", "none", "2"), ("int8", "tis", "2"), ("stale", "none", "1"),
    ]  # fmt: skip
    exact, int8, stale = lines
    assert int8["gap, nats"] == "0.4000 ± 0.2828"  # of 0.2 and 0.6, means over updates
    assert stale["gap, nats"] == "1.5000" and stale["ratio"] == "0.500"
    assert exact["gold score"] == "3.50 ± 0.71" and exact["KL, nats"] == "7.00 ± 1.41"
    assert int8["gold score"] == "2.50" and int8["gold win rate"] == "-"


def test_without_an_evaluation_the_columns_on_policies_are_omitted(runs: Path) -> None:
    (runs / "eval" / "eval.json").unlink()
    assert make_table(read_runs(runs))[0][-1] == "truncated"


@pytest.mark.parametrize(
    ("int8", "kind", "said"),
    [
        ((3.3, 4.32), "good", "better than the exact sampler: int8/tis (+0.31 [+0.18, +0.44])"),
        ((2.5, 4.1), "warn", "no difference shown: int8/tis (-0.20 [-4.01, +3.61])"),
        ((2.0, 3.02), "bad", "worse than the exact sampler: int8/tis (-0.99 [-1.12, -0.86])"),
    ],
)
def test_the_page_begins_with_who_is_better_than_the_exact_sampler(
    runs: Path, tmp_path: Path, int8, kind, said
) -> None:
    evaluation = runs / "eval" / "eval.json"
    result = json.loads(evaluation.read_text())
    for seed, gold in enumerate(int8, start=1):
        result["policies"][f"int8-tis-{seed}"] = {"gold_score": gold, "gold_win_rate": None, "kl": 1.0}
    evaluation.write_text(json.dumps(result))
    main(Args(runs=runs, out=tmp_path / "report"))
    page = (tmp_path / "report" / "mismatch.html").read_text()
    text = f"By the gold score, seed by seed, {said}; one seed, so no interval: stale/none."
    assert f'<p class="happened {kind}">{text}</p>' in page
    assert said.partition("(")[2][:-1] in [line[-1] for line in make_table(read_runs(runs))]


def test_a_panel_has_a_line_per_correction_and_one_for_the_exact_sampler(runs: Path) -> None:
    train(runs / "int8" / "none" / "1", 0.5)
    settings = read_runs(runs)
    figure = sampler_figure([setting for setting in settings if setting.sampler == "int8"], settings[0])
    panels = {axes.get_title("left"): axes for axes in figure.axes}
    assert list(panels) == [title for title, _ in BY_UPDATE.values()]
    lines = {line.get_label(): list(line.get_ydata()) for line in panels["Sampler against policy"].lines}
    assert list(lines) == ["none", "tis", "exact sampler"]
    assert lines["tis"][1] == pytest.approx(0.4) and lines["exact sampler"] == [0.0] * 3


def test_an_unfinished_seed_shortens_the_mean(runs: Path) -> None:
    train(runs / "stale" / "none" / "2", 3.0, num_updates=1)
    *_, stale = read_runs(runs)
    [line] = sampler_figure([stale], None).axes[0].lines
    assert list(line.get_ydata()) == [pytest.approx(2.0)]


def test_the_page_and_a_picture_per_sampler_are_written(runs: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "report"
    assert main(Args(runs=runs, out=out)) == ["int8.png", "stale.png"]
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("int8.png", "stale.png"))
    assert "0.4000 ± 0.2828" in (out / "mismatch.html").read_text() and "0.4000 ± 0.2828" in capsys.readouterr().out


def test_all_can_read_the_page(runs: Path, tmp_path: Path, unreadable) -> None:
    main(Args(runs=runs, out=tmp_path / "out"))
    assert not unreadable(tmp_path / "out" / "mismatch.html")


def test_unreadable_input_is_reported_in_one_sentence(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for directory in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(InputError, match="has a PPO run: run `python -m experiments mismatch` first"):
            read_runs(directory)
    (runs / "stale" / "none" / "1" / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    with pytest.raises(InputError, match="policy/sampler_gap is missing"):
        read_runs(runs)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="is a file"):
        main(Args(runs=runs, out=file))


def test_each_sampler_and_correction_of_the_table_has_flags_and_the_page_has_its_rows() -> None:
    pairs = [entry.split("/") for entry in Mismatch().runs]
    assert {sampler for sampler, _ in pairs} == SAMPLERS.keys()
    assert {correction for _, correction in pairs} == CORRECTIONS.keys()
    rows = re.findall(r"^\| (\S+) \| (none|tis|ratio) \|", (ROOT / "experiments/mismatch/README.md").read_text(), re.M)
    assert [list(row) for row in rows] == pairs
