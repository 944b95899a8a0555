"""The fits of experiments.scaling.report against curves with known coefficients, and the page that shows them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit

from experiments.__main__ import commands
from experiments.scaling.report import (
    CASES,
    COLUMNS,
    MARKS,
    PANELS,
    Args,
    Point,
    case_directory,
    difference_lines,
    finished,
    fit_lines,
    fit_table,
    fits,
    fitted,
    has_best_of,
    joined,
    main,
    page_text,
    pictures,
    points_text,
    read_points,
)
from experiments.scaling.runs import Scaling
from experiments.tables import csv_text
from nanorlhf.errors import InputError
from tests.helpers.page_commands import Command, parse_settings

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 2, 3)


def gain(d: np.ndarray, alpha: float, beta: float, method: str) -> np.ndarray:
    """The paper's formulas, as it writes them; d > 0."""
    return d * (alpha - beta * np.log(d)) if method == "rl" else d * (alpha - beta * d)


def curve(seed: int, case: str, method: str, alpha: float, beta: float, noise: float = 0.0) -> list[Point]:
    d = np.linspace(0, 6 if method == "rl" else 1.8, 40 if method == "rl" else 7)
    gold = np.concatenate([[0.0], gain(d[1:], alpha, beta, method)]) + 2.4
    gold += noise * np.random.default_rng(seed).standard_normal(len(d))
    return [
        Point(seed, case, method, i if method == "rl" else 2**i, x**2, y, x)
        for i, (x, y) in enumerate(zip(d.tolist(), gold.tolist(), strict=True))
    ]


@pytest.fixture
def points() -> list[Point]:
    """Two cases by PPO and by best of n in three worlds, whose coefficients differ by 0.1 from world to world."""
    curves = []
    for seed in SEEDS:
        shift = 0.1 * (seed - 2)
        curves += curve(seed, "base", "rl", 1.0 + shift, 0.8) + curve(seed, "reward model 32", "rl", 0.7 + shift, 0.9)
        curves += curve(seed, "base", "best-of-n", 1.2 + shift, 0.4)
    return curves


# ------------------------------------------------------------------------------------------------------------ the fits
@pytest.mark.parametrize("method", ["rl", "best-of-n"])
def test_a_fit_finds_the_coefficients_of_its_curve(method) -> None:
    fit = fitted(curve(1, "base", method, 1.1, 0.7), 2.4)
    assert (fit.alpha, fit.beta) == pytest.approx((1.1, 0.7))
    assert fit.explained == pytest.approx(1) and fit.other < 0.999
    assert fit.reach == pytest.approx(6 if method == "rl" else 1.8)
    assert fit.gold(np.array([0.0, 1.5])) == pytest.approx([2.4, 2.4 + gain(np.array(1.5), 1.1, 0.7, method)])


def test_measurements_average_five_consecutive_updates_or_a_single_n() -> None:
    golds = [2.0, 3.0, 3.0, 4.0, 3.0, 3.5, 3.0, 1.0, 1.0, 1.0, 1.0, 1.5]
    points = [Point(1, "base", "rl", i, i / 2, gold, 0.0) for i, gold in enumerate(golds)]
    fit = fitted(points[::-1], 2.0)  # in whichever order
    assert fit.best == pytest.approx((np.mean(golds[1:6]) - 2.0, 1.5))
    assert fit.end == pytest.approx((np.mean(golds[-5:]) - 2.0, 4.5))
    few = [replace(point, method="best-of-n", step=2**point.step) for point in points[:5]]
    assert fitted(few, 2.0).best == pytest.approx((2.0, 1.5)) and fitted(few, 2.0).end == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize("method", ["rl", "best-of-n"])
def test_a_noisy_curve_has_the_coefficients_of_scipy(method) -> None:
    points = curve(1, "base", method, 0.9, 0.5, noise=0.3)
    fit = fitted(points, 2.4)
    d, gold = np.sqrt([point.kl for point in points[1:]]), np.array([point.gold for point in points])

    def model(x: np.ndarray, alpha: float, beta: float) -> np.ndarray:
        return 2.4 + np.concatenate([[0], gain(x[1:], alpha, beta, method)])

    expected, _ = curve_fit(model, np.concatenate([[0], d]), gold, p0=(1, 1))
    assert (fit.alpha, fit.beta) == pytest.approx(expected, rel=1e-5)
    left = gold - model(np.concatenate([[0], d]), *expected)
    assert fit.explained == pytest.approx(1 - (left**2).sum() / ((gold - gold.mean()) ** 2).sum())


def test_the_initial_gold_score_is_the_mean_measured_at_zero_kl(points) -> None:
    """By both methods and in all cases of a world, of the policies of that width."""
    added = [Point(1, "reward model 32", "best-of-n", 1, 0.0, 3.0, 0.0), Point(1, "policy 32", "rl", 0, 0.0, 9.0, 0.0)]
    curve_fits = fits([*points, *added], "rl")
    assert curve_fits["base"][1].start == pytest.approx((3 * 2.4 + 3.0) / 4) and curve_fits["base"][2].start == 2.4
    assert fits([point for point in points if point.kl > 0], "rl") == {}


def test_too_few_points_and_mixed_methods_are_refused(points) -> None:
    with pytest.raises(ValueError, match="at least three points, got 2"):
        fitted(points[:2], 2.4)
    with pytest.raises(ValueError, match="too many"):
        fitted(points, 2.4)


# ---------------------------------------------------------------------------------------------------------- the tables
def test_the_tables_have_means_over_worlds_and_differences_within_them(points) -> None:
    by_case = fits(points, "rl")
    assert [*by_case] == ["base", "reward model 32"] and [*by_case["base"]] == [1, 2, 3]
    head, base, _ = fit_table(by_case)
    half = 4.302653 * 0.1 / math.sqrt(3)  # of 0.9, 1 and 1.1
    assert base[:2] == ["base", f"1.00 [{1 - half:.2f}, {1 + half:.2f}]"]
    last = np.linspace(0, 6, 40)[-5:]
    assert head[-1] == "KL at the end" and base[-1].startswith(f"{np.mean(last**2):.1f} [")
    _, *lines = difference_lines(points)
    by_quantity = {line[2]: line for line in lines if line[:2] == ["rl", "reward model 32"]}
    for quantity, gap in (("alpha", -0.3), ("beta", 0.1)):  # in every world the same: intervals without width
        assert by_quantity[quantity][3] == "3"
        assert [float(x) for x in by_quantity[quantity][4:]] == pytest.approx([gap] * 3)
    assert float(by_quantity["end"][4]) == pytest.approx(np.mean(last * (-0.3 - 0.1 * np.log(last))), rel=1e-5)
    best = [by_case["reward model 32"][seed].best[0] - by_case["base"][seed].best[0] for seed in SEEDS]
    assert float(by_quantity["best"][4]) == pytest.approx(np.mean(best), rel=1e-5)


def test_the_csv_of_fits_has_every_case_in_every_world(points) -> None:
    head, *lines = fit_lines(points)
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    assert len(rows) == 9 and [row["seed"] for row in rows[:3]] == ["1", "2", "3"]
    assert [(row["alpha"], row["beta"], row["r2"]) for row in rows[3:5]] == [("0.6", "0.9", "1"), ("0.7", "0.9", "1")]
    [last] = [row for row in rows if (row["method"], row["seed"]) == ("best-of-n", "2")]
    assert float(last["end_kl"]) == pytest.approx(1.8**2) and float(last["r2_other_formula"]) < 0.999
    assert float(last["end_gain"]) == pytest.approx(gain(np.array(1.8), 1.2, 0.4, "best-of-n"), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- the CSV
def test_points_are_read_as_they_were_written(tmp_path, points) -> None:
    path = tmp_path / "scaling.csv"
    path.write_text(points_text(points))
    loaded = read_points(path)
    assert points_text(loaded) == points_text(points) and len(loaded) == len(points)
    assert loaded[5].gold == pytest.approx(points[5].gold, rel=1e-4)


def test_new_curves_replace_known_ones_and_others_stay(points) -> None:
    other, longer = curve(4, "base", "rl", 1.0, 0.5), curve(2, "base", "rl", 2.0, 0.5)[:7]
    merged = joined(points, [*other, *longer])
    assert [point for point in merged if point.seed == 4] == other
    assert [p for p in merged if (p.seed, p.case, p.method) == (2, "base", "rl")] == longer
    assert len(merged) == len(points) + len(other) - 40 + 7 and joined(merged, [])[:20] == merged[:20]
    assert [(p.seed, p.case) for p in merged] == sorted((p.seed, p.case) for p in merged)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("1,base,rl,0,0.5,2.4", 2),
        ("1,base,rl,0,-0.5,2.4,1", 2),
        ("1,base,rl,0,0.5,nan,1", 2),
        ("1,nobody,rl,0,0.5,2.4,1", 2),
        ("1,base,sft,0,0.5,2.4,1", 2),
        ("one,base,rl,0,0.5,2.4,1", 2),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, where) -> None:
    path = tmp_path / "scaling.csv"
    path.write_text(f"{','.join(COLUMNS)}\n{line}\n")
    with pytest.raises(InputError, match=f"scaling.csv:{where}: expected seed,case,.* got '{line}'"):
        read_points(path)
    path.write_text(line + "\n")
    with pytest.raises(InputError, match="scaling.csv:1: the columns must be seed,case"):
        read_points(path)


def test_finished_runs_become_points_and_others_are_left_out(tmp_path) -> None:
    for seed, is_finished in ((1, True), (2, False)):
        directory = case_directory(tmp_path, seed, "6,400 comparisons")
        (directory / "best_of").mkdir(parents=True)
        row = {"step": 0, "objective/kl_exact": 0.5, "gold_score": 2.5, "objective/score": 0.25, "objective/kl": 9.0}
        (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        if is_finished:
            (directory / "summary.json").write_text("{}")
    assert finished(tmp_path) == [Point(1, "6,400 comparisons", "rl", 0, 0.5, 2.5, 0.25)]
    policies = {
        "sft": {"kl_estimate": None, "gold_score": 2.4, "rm_score": 0.1},
        "best-of-4": {"kl_estimate": 0.6, "gold_score": 3.0, "rm_score": 0.9},
    }
    path = case_directory(tmp_path, 1, "6,400 comparisons") / "best_of/eval.json"
    path.write_text(json.dumps({"policies": policies}))
    [_, initial_point, best_point] = finished(tmp_path)
    assert initial_point == Point(1, "6,400 comparisons", "best-of-n", 1, 0.0, 2.4, 0.1)
    assert best_point == replace(initial_point, step=4, kl=0.6, gold=3.0, proxy=0.9)
    with pytest.raises(InputError, match="empty has no finished run of `python -m experiments scaling`"):
        finished(tmp_path / "empty")


# ------------------------------------------------------------------------------------------------------------ the page
def test_the_page_gets_its_tables_and_pictures(tmp_path, points) -> None:
    args = Args(csv=tmp_path / "scaling.csv", page=tmp_path / "page.md", out=tmp_path / "pictures")
    args.csv.write_text(points_text(points))
    args.page.write_text(f"# Page\n\n{MARKS[0]}\nbefore\n{MARKS[1]}\n")
    main(args)
    text = args.page.read_text()
    assert "### PPO\n\n|" in text and "### Best of n\n\n|" in text and "before" not in text
    assert "](scaling_rl.png)" in text and "scaling_best_of" not in text  # a single case has no panel
    assert (args.out / "scaling_rl.png").read_bytes().startswith(b"\x89PNG")
    main(args)
    assert args.page.read_text() == text


def test_the_pages_tables_are_those_of_its_csv() -> None:
    points = read_points(ROOT / "experiments/scaling/scaling.csv")
    assert f"{MARKS[0]}\n\n{page_text(points)}\n\n{MARKS[1]}" in (ROOT / "experiments/scaling/README.md").read_text()
    csv = (ROOT / "experiments/scaling/scaling_differences.csv").read_text()
    assert csv == csv_text(difference_lines(points))
    assert (ROOT / "experiments/scaling/scaling_fits.csv").read_text() == csv_text(fit_lines(points))
    assert all((ROOT / "experiments/scaling" / name).exists() for name in pictures(points))


# ------------------------------------------------------------------------------------------------------------ the runs
def test_every_command_is_one_that_its_program_takes_and_what_cases_share_is_made_once(tmp_path) -> None:
    words = list(commands(Scaling(out=tmp_path, seeds=(7,))))
    settings = [parse_settings(Command(("python", *one))) for one in words]
    assert all(settings) and len({one.out for one in settings}) == len(settings)
    programs = [one[0] if one[0] != "-m" else one[1] for one in words]
    assert {name: programs.count(name) for name in set(programs)} == {
        "data.tiny": 3, "train_sft.py": 3, "train_rm.py": 7, "train_ppo.py": len(CASES),
        "eval.py": sum(map(has_best_of, CASES.values())),
    }  # fmt: skip
    by_out = {one.out.name: one for one in settings}
    assert by_out["base"].kl_coef == 0 and by_out["KL-coefficient-0.05"].kl_coef == 0.05
    assert by_out["uncertainty-of-three"].reward_weights == "uncertainty"
    assert len(by_out["mean-of-three"].reward_model) == 3
    assert {name for cases in PANELS.values() for name in cases} == {*CASES}


def test_an_unknown_case_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="--cases 'policy 256': choose from 'base', "):
        list(commands(Scaling(out=tmp_path, cases=("policy 256",))))
