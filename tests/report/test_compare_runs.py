"""Comparison of runs: groups, bands, win rates and settings, from synthetic run directories."""

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from nanorlhf.errors import InputError
from nanorlhf.report.compare_runs import (
    Args,
    curve_figure,
    groups,
    in_words,
    main,
    mean_and_sd,
    outcome,
    over_optimisation_figure,
    read_runs,
    size_figure,
    whitening_figures,
)
from nanorlhf.report.page import MOST_POINTS

pytestmark = pytest.mark.usefixtures("undrawn")
SCORES = {"a": [0.0, 1.0, 2.0, 2.5], "b": [0.5, 2.0, 4.0], "c": [1.0, 3.0, 3.0, 9.0]}


def make_run(directory: Path, scores=(0.0, 1.0, 2.0), size=10, gold=True, summary=None, **settings) -> Path:
    directory.mkdir(parents=True)
    rows = [
        {"step": i, "episode": 8 * (i + 1), "objective/score": s, "objective/kl": float(i * i)}
        | ({"gold_score": 2 - s} if gold else {})
        for i, s in enumerate(scores)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "args.json").write_text(json.dumps({"seed": 1, "lr": 1e-3, "whiten_rewards": False} | settings))
    if summary:
        (directory / "summary.json").write_text(json.dumps(summary))
    save_file({"w": np.zeros((size, 2), dtype=np.float32), "b": np.zeros(3)}, directory / "model.safetensors")
    return directory


def pairs(**paths: list[Path]) -> tuple[str, ...]:
    return tuple(word for name, group in paths.items() for path in group for word in (name, str(path)))


@pytest.fixture
def seeds(tmp_path):
    return [make_run(tmp_path / name, scores, seed=i) for i, (name, scores) in enumerate(SCORES.items())]


def test_mean_and_band_are_over_seeds_at_episodes_that_all_of_them_logged(tmp_path, seeds) -> None:
    runs = read_runs(Args(runs=pairs(ppo=seeds), out=tmp_path / "out"))
    x, mean, sd = mean_and_sd(runs, "objective/score")
    assert x.tolist() == [8, 16, 24]
    columns = list(zip(*(scores[:3] for scores in SCORES.values()), strict=True))
    assert mean.tolist() == pytest.approx([statistics.mean(column) for column in columns])
    assert sd.tolist() == pytest.approx([statistics.stdev(column) for column in columns])
    x, mean, sd = mean_and_sd(runs[:1], "objective/score")
    assert mean.tolist() == SCORES["a"] and sd.tolist() == [0] * 4


def test_there_is_one_curve_per_name_that_has_the_metric(tmp_path, seeds) -> None:
    bare = make_run(tmp_path / "bare", gold=False)
    by_name = groups(read_runs(Args(runs=pairs(ppo=seeds, bare=[bare]), out=tmp_path / "out")))
    assert [len(curve_figure(by_name, key, "t", "u").axes[0].lines) for key in ("gold_score", "objective/kl")] == [1, 2]
    assert curve_figure(by_name, "eos_rate", "t", "u") is None
    (legend,) = curve_figure(by_name, "objective/kl", "t", "u").legends
    assert [text.get_text() for text in legend.get_texts()] == ["ppo (3 seeds)", "bare"]


def test_a_long_run_is_compared_with_few_points_and_without_a_warning(tmp_path, seeds, recwarn) -> None:
    runs = read_runs(Args(runs=pairs(ppo=seeds[:1]), out=tmp_path / "out"))
    spoiled = dict.fromkeys(("objective/score", "gold_score", "objective/kl"), math.inf)
    rows = [{"step": i, "episode": i, "objective/score": i, "gold_score": -i, "objective/kl": i} for i in range(50_000)]
    by_name = {
        "ppo": [replace(runs[0], rows=rows + [{"step": i, "episode": i, **spoiled} for i in range(50_000, 60_000)])]
    }
    for figure in (curve_figure(by_name, "objective/kl", "t", "u"), over_optimisation_figure(by_name)):
        assert all(len(line.get_xdata()) == MOST_POINTS for line in figure.axes[0].lines)
    assert not recwarn.list


def test_a_name_with_two_sizes_makes_two_groups(tmp_path) -> None:
    small, big = make_run(tmp_path / "small", size=10), make_run(tmp_path / "big", size=10**6)
    other = make_run(tmp_path / "other", size=10)
    by_name = groups(read_runs(Args(runs=pairs(ppo=[small, big], no_kl=[other]), out=tmp_path / "out")))
    assert {name: [run.size for run in group] for name, group in by_name.items()} == {
        "ppo, 23": [23], "ppo, 2M": [2_000_003], "no_kl": [23],
    }  # fmt: skip
    assert [in_words(size) for size in (999, 751_000, 6_900_000_000, None)] == ["999", "751k", "6.9B", "size unknown"]


def test_over_optimisation_starts_at_0_and_gold_falls_as_the_proxy_rises(tmp_path, seeds) -> None:
    runs = read_runs(Args(runs=pairs(ppo=seeds[:2]), out=tmp_path / "out"))
    axes = over_optimisation_figure({"ppo": runs}).axes[0]
    proxy, gold = axes.lines[:2]
    assert len(axes.lines) == 4 and [line.get_label() for line in (proxy, gold)] == ["ppo, proxy", "ppo, gold"]
    # scores 0 1 2 2.5 at sqrt(KL) 0 1 2 3: running means over three points, two at the ends
    assert proxy.get_xdata() == pytest.approx([0.5, 1, 2, 2.5])
    assert proxy.get_ydata() == pytest.approx([0.5, 1, 5.5 / 3, 2.25])
    assert gold.get_ydata() == pytest.approx(-proxy.get_ydata())
    bare = make_run(tmp_path / "bare", gold=False)
    runs = read_runs(Args(runs=pairs(ppo=[bare]), out=tmp_path / "out"))
    assert over_optimisation_figure({"ppo": runs}) is None


def make_eval(directory: Path, policies: dict[str, Path], rows: dict[str, dict], judge=None) -> Path:
    directory.mkdir()
    words = [str(word) for pair in policies.items() for word in pair]
    result = {"args": {"policies": words}, "policies": rows, "judge": judge}
    (directory / "eval.json").write_text(json.dumps(result))
    return directory


def test_win_rates_come_from_evaluations_of_the_same_directory_and_means_are_over_seeds(tmp_path) -> None:
    paths = [make_run(tmp_path / f"{size}_{seed}", size=size, seed=seed) for size in (10, 1000) for seed in (1, 2)]
    rates = [0.4, 0.5, 0.6, 0.9]
    named = {f"p{i}": path for i, path in enumerate(paths)}
    rows = {f"p{i}": {"gold_win_rate": rate} for i, rate in enumerate(rates)}
    evals = (make_eval(tmp_path / "eval", named, rows),)
    stranger = make_run(tmp_path / "stranger", size=10)
    runs = read_runs(Args(runs=pairs(ppo=[*paths, stranger]), out=tmp_path / "out", evals=evals))
    assert [run.win_rate for run in runs] == [*rates, None] and {run.decided_by for run in runs[:4]} == {
        "the gold score"
    }
    axes = size_figure(runs, "win_rate", "t", "u").axes[0]
    line = axes.containers[0][0]
    assert line.get_xdata().tolist() == [23, 2003] and line.get_ydata() == pytest.approx([0.45, 0.75])
    assert size_figure(runs[:2], "win_rate", "t", "u") is None
    # a judge's win rate against the references replaces the gold score's; one against a policy doesn't count
    rows["p0"]["judge_win_rate"] = 0.7
    both = {
        against: make_eval(tmp_path / against, named, rows, {"against": against}) for against in ("reference", "sft")
    }
    for against, expected in (("reference", (0.7, "the judge")), ("sft", (0.4, "the gold score"))):
        run = read_runs(Args(runs=pairs(ppo=paths), out=tmp_path / "out", evals=(both[against],)))[0]
        assert (run.win_rate, run.decided_by) == expected


def test_whitening_is_compared_between_runs_that_share_all_other_settings(tmp_path) -> None:
    plain = [make_run(tmp_path / f"p{i}", seed=i, out=f"p{i}") for i in range(2)]
    white = [make_run(tmp_path / f"w{i}", seed=i, out=f"w{i}", whiten_rewards=True) for i in range(2)]
    fast = make_run(tmp_path / "fast", lr=1e-2)
    figures = whitening_figures(read_runs(Args(runs=pairs(a=plain, b=white, c=[fast]), out=tmp_path / "out")))
    (legend,) = figures[0].legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "rewards not whitened (2 seeds)",
        "rewards whitened (2 seeds)",
    ]
    assert [figure.axes[0].get_title("left") for figure in figures] == [
        "Rollout score, by whitening", "Rollout gold score, by whitening",
        "KL to the reference, by whitening",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "is_drawn"),
    [
        ({"trace": 4, "gold": "data/tiny.py:gold_score", "reward_workers": 2}, True),
        ({"save_every": 7, "resume": True, "overwrite": True}, True),
        ({"device": "cuda", "processes": 2, "micro_batch_size": 4, "offload": True, "shard": "fsdp"}, True),
        ({"lr": 1e-2}, False),
        ({"kl_coef": 0.1}, False),
        ({"dtype": "bfloat16"}, False),
        ({"reward": "data/tiny.py:gold_score"}, False),
    ],
    ids=str,
)
def test_whitening_ignores_settings_for_logging_and_hardware(settings, is_drawn, tmp_path) -> None:
    plain = make_run(tmp_path / "plain", **settings)
    white = make_run(tmp_path / "white", whiten_rewards=True)
    runs = read_runs(Args(runs=pairs(plain=[plain], white=[white]), out=tmp_path / "out"))
    assert bool(whitening_figures(runs)) == is_drawn


def test_the_page_shows_figures_and_reasons_for_missing_ones(tmp_path, seeds, capsys) -> None:
    rms = [make_run(tmp_path / f"rm{i}", size=10**i, summary={"validation_accuracy": 0.6 + i / 10}) for i in (1, 2)]
    for directory in rms:
        (directory / "metrics.jsonl").write_text('{"step": 0, "accuracy": 0.5}\n')
    missing = main(Args(runs=pairs(ppo=seeds, rm=rms), out=tmp_path / "new" / "out"))
    page = (tmp_path / "new" / "out" / "compare.html").read_text()
    titles = re.findall(r'<img alt="([^"]*)" src="data:', page)
    assert titles == [
        "Rollout score", "Rollout gold score", "KL to the reference", "Proxy and gold score against KL",
        "Reward model accuracy",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in missing] == ["Size", "Reward whitening (Figure 11)"]
    assert "win rate (Figure 1): not drawn because no name has win rates in --evals for two sizes." in page
    assert all(line in capsys.readouterr().out for line in missing[:1]) and "0.700" in page
    bare = main(Args(runs=pairs(rm=rms[:1]), out=tmp_path / "bare"))
    assert len(bare) == 5 and "<img" not in (tmp_path / "bare" / "compare.html").read_text()


@pytest.mark.parametrize(
    ("scores", "kind", "said"),
    [
        (
            [3.0, 3.1],
            "bad",
            "It is over-optimised: the training score rose (+3.050 [+2.415, +3.685]) and the gold",
        ),
        (
            [-1.0, 1.0],
            "warn",
            "It did not learn: the gold score did not change (+0.000 [-12.706, +12.706]), and neither",
        ),
        ([-3.0, -3.1], "warn", "The gold score rose (+3.050 [+2.415, +3.685]); the training score fell (-3.050 ["),
    ],
)
def test_the_page_begins_with_what_each_name_gained(tmp_path, scores, kind, said) -> None:
    """The gold score of these runs is 2 minus the score."""
    paths = [make_run(tmp_path / str(i), (0.0, 0.5, last)) for i, last in enumerate(scores)]
    for path in paths:
        rows = [json.loads(line) | {"eos_rate": 1.0} for line in (path / "metrics.jsonl").read_text().splitlines()]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(Args(runs=pairs(ppo=paths), out=tmp_path / "out"))
    page = (tmp_path / "out" / "compare.html").read_text()
    [(css_class, text)] = re.findall(r'<p class="happened (\w+)">(.*?)</p>', page)
    assert css_class == kind and text.startswith(f"ppo has 2 runs. {said}")
    assert said.partition("(")[2].partition(")")[0] in page.partition("<table")[2].replace("\u2011", "-")


def test_a_single_run_has_no_interval(tmp_path) -> None:
    runs = read_runs(Args(runs=pairs(ppo=[make_run(tmp_path / "a")]), out=tmp_path / "out"))
    assert outcome("ppo", runs)[:3] == (
        "ppo is a single run, without intervals.",
        "warn",
        "Training changed the gold score by -2.000 and the training score by +2.000.",
    )


def test_all_can_read_the_page(tmp_path, seeds, unreadable) -> None:
    main(Args(runs=pairs(ppo=seeds), out=tmp_path))
    assert not unreadable(tmp_path / "compare.html")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda root, run: {"runs": ("ppo",)}, "expected pairs of name and directory"),
        (lambda root, run: {"runs": ()}, "expected pairs of name and directory"),
        (lambda root, run: {"runs": ("a", str(run), "b", f"{run}/.")}, "a directory is repeated"),
        (lambda root, run: {"runs": ("a", str(root / "no"))}, "has no metrics.jsonl"),
        (lambda root, run: {"evals": (root / "no",)}, "no/eval.json does not exist"),
        (lambda root, run: (run / "args.json").write_text("{") and {}, "args.json:1: malformed JSON"),
        (lambda root, run: (run / "summary.json").write_text("[]") and {}, "summary.json: expected a JSON object"),
        (lambda root, run: (run / "metrics.jsonl").write_text("{}\n") and {}, "metrics.jsonl:1: the field 'step'"),
        (lambda root, run: (run / "model.safetensors").write_text("x") and {}, "model.safetensors: damaged"),
        (lambda root, run: (root / "out").write_text("x") and {}, "out is a file"),
    ],
)
def test_bad_input_raises_input_error_and_writes_nothing(tmp_path, change, sentence) -> None:
    run = make_run(tmp_path / "run")
    arguments = {"runs": ("ppo", str(run)), "out": tmp_path / "out"} | change(tmp_path, run)
    with pytest.raises(InputError, match=sentence):
        main(Args(**arguments))
    assert not (tmp_path / "out").is_dir()
