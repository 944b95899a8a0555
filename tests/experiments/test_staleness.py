"""The table and picture of the study of stale samplers, from evaluations written by hand; and its commands."""

from pathlib import Path

import pytest
from scipy import stats

from experiments.__main__ import commands
from experiments.compare.report import read_policies
from experiments.mismatch.staleness import ALGORITHMS, RATIO, Staleness, staleness
from experiments.mismatch.staleness_report import Args, draw, main, make_table, mean_gap, read_curves
from experiments.runs import execute
from nanorlhf.errors import InputError
from tests.experiments.test_compare import row, updates, write, write_run

WIN_RATES = {  # at two seeds
    "ppo,none,1": (0.9, 0.8),
    "ppo,none,8": (0.7, 0.5),
    "ppo,ratio,8": (0.8, 0.8),
    "online-dpo,none,1": (0.9, 0.9),
    "online-dpo,none,8": (0.9, 0.8),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for i, seed in enumerate(("1", "2")):
        directory = tmp_path / "staleness" / seed
        policies = {"sft": row(2.0)} | {name: row(10 * rates[i], kl=1.0 + i) for name, rates in WIN_RATES.items()}
        write(directory / "eval/eval.json", {"policies": policies})
        for name in WIN_RATES:
            rows = [line | {"policy/sampler_gap": 0.1 * j} for j, line in enumerate(updates([1.0] * 3, 9.0, 1.0))]
            write_run(directory / name, rows, {"total_episodes": 24, "value_coef": 0.1})
    return tmp_path / "staleness"


def test_a_row_has_means_over_seeds_and_what_a_stale_sampler_costs_against_a_fresh_one(runs: Path) -> None:
    headings, *rows = make_table(read_curves(read_policies(runs)))
    lines = {tuple(cells[:3]): dict(zip(headings, cells, strict=True)) for cells in rows}
    assert [*lines] == [tuple(name.split(",")) for name in WIN_RATES]  # no second row for the fresh sampler
    stale = lines["ppo", "none", "8"]
    half = stats.t.ppf(0.975, 1) * stats.sem([-0.2, -0.3])
    assert stale["gold win rate minus fresh"] == f"-0.250 [{-0.25 - half:+.3f}, {-0.25 + half:+.3f}]"
    assert stale["seeds"] == "2" and stale["gap, nats"] == "0.100" and stale["gold win rate"].startswith("0.600 ± ")
    assert lines["ppo", "ratio", "8"]["gold win rate minus fresh"].startswith("-0.050 [")  # the same fresh sampler
    assert lines["ppo", "none", "1"]["gold win rate minus fresh"] == "-"


def test_each_line_of_the_picture_starts_at_the_fresh_sampler(runs: Path) -> None:
    win_rates, kls = draw(read_curves(read_policies(runs))).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in win_rates.lines}
    assert lines == {
        "ppo": ([1, 8], pytest.approx([0.85, 0.6])),
        "ppo, ratio to the sampler": ([1, 8], pytest.approx([0.85, 0.8])),
        "online-dpo": ([1, 8], pytest.approx([0.9, 0.85])),
    }
    assert all(list(line.get_ydata()) == [1.5, 1.5] for line in kls.lines)


def test_the_page_and_the_picture_are_written(runs: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "report"
    assert main(Args(runs=runs, out=out)) == ["staleness.png"]
    assert (out / "staleness.png").read_bytes().startswith(b"\x89PNG")
    assert "-0.250" in (out / "staleness.html").read_text() and "-0.250" in capsys.readouterr().out


def test_other_evaluations_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "1/eval/eval.json", {"policies": {"sft": row(2.0), "ppo": row(3.0)}})
    with pytest.raises(InputError, match="no policy is named ALGORITHM,CORRECTION,SYNC_EVERY"):
        main(Args(runs=tmp_path, out=tmp_path / "report"))


def test_only_staleness_and_its_correction_differ_between_the_runs_of_an_algorithm() -> None:
    trained: dict[str, set[tuple[str, ...]]] = {}
    for words in commands(Staleness(seeds=(1,), sync_every=(1, 4))):
        flags = " ".join(words)
        if "--sampler.sync-every" in words:
            name, correction, age = words[words.index("--out") + 1].split("/")[-1].split(",")
            assert f"--sampler.sync-every {age}" in flags
            assert ("--sampler.correction sampler_logprobs" in flags) == (correction == "ratio")
            trained.setdefault(name, set()).add(words[: words.index("--sampler.sync-every")])
            assert "epochs 1 " in flags and "--batch-size 32" in flags
    assert trained.keys() == ALGORITHMS.keys() and all(len(common) == 1 for common in trained.values())
    assert {"ppo", "rloo"} == set(RATIO)


@pytest.mark.slow
def test_the_study_in_miniature(tmp_path: Path) -> None:
    args = Staleness(
        out=tmp_path / "runs", sync_every=(1, 2), seeds=(1,), grid_seed=2, lrs=("1e-3",), total_episodes=64,
        num_demonstrations=600, num_comparisons=192, num_queries=8,
    )  # fmt: skip
    for runs in staleness(args):
        execute(runs, 2)
    curves = read_curves(read_policies(args.out))
    assert curves.keys() == {("online-dpo", "none"), *((name, kind) for name in RATIO for kind in ("none", "ratio"))}
    for ages in curves.values():
        [fresh], [stale] = ages[1], ages[2]
        assert mean_gap(fresh) < 1e-5 < mean_gap(stale), "the second of two rollouts is from a stale sampler"
    assert (args.out / "report/staleness.png").exists()
