"""Tables and pictures of `experiments scaling`: the fits of Gao et al. 2022 to gold scores over KL.

    python -m experiments.scaling.report --runs runs/scaling   # the CSV from finished runs, then the page and pictures
    python -m experiments.scaling.report                       # the page and pictures from the CSV

With d the square root of the KL to the initial policy, in nats, and R the gain in gold score over it, section 1 of
*Scaling Laws for Reward Model Overoptimization* has

    R = d (alpha - beta d)          for best of n
    R = d (alpha - beta log d)      for reinforcement learning

Both are fitted by least squares in each world. The initial policy's gold score is measured, not fitted.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.tables import csv_text, evaluated, markdown, with_tables
from nanorlhf.cli import run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_text, write_text
from nanorlhf.metrics import t_interval
from nanorlhf.report.page import LINES, Lines, label_axes, number, write_pictures
from nanorlhf.training.run_directory import read_metrics


@dataclass(frozen=True, kw_only=True)
class Case:
    """A policy and the reward models it is trained against. Widths are of three-layer models."""

    policy: int = 64
    reward_model: int = 64
    num_comparisons: int = 1600
    num_members: int = 1
    """reward models of an ensemble"""
    weights: str | None = None
    """how their scores are combined; None: their mean"""
    kl_coef: float = 0


BASE = "base"
CASES = {
    BASE: Case(),
    "reward model 32": Case(reward_model=32),
    "reward model 128": Case(reward_model=128),
    "400 comparisons": Case(num_comparisons=400),
    "6,400 comparisons": Case(num_comparisons=6400),
    "policy 32": Case(policy=32),
    "policy 128": Case(policy=128),
    "mean of three": Case(num_members=3),
    "uncertainty of three": Case(num_members=3, weights="uncertainty"),
    "KL coefficient 0.05": Case(kl_coef=0.05),
}
PANELS = {
    "Reward model's width": ("reward model 32", BASE, "reward model 128"),
    "Its comparisons": ("400 comparisons", BASE, "6,400 comparisons"),
    "Policy's width": ("policy 32", BASE, "policy 128"),
    "Ensembles and a penalty": (BASE, "mean of three", "uncertainty of three", "KL coefficient 0.05"),
}
METHODS = {"rl": "PPO", "best-of-n": "best of n"}
TOGETHER = {"rl": 5, "best-of-n": 1}  # consecutive points that are averaged to one measurement
COLUMNS = ("seed", "case", "method", "step", "kl", "gold", "proxy")
MARKS = ("<!-- the tables of python -m experiments.scaling.report -->", "<!-- the end of the tables -->")


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path | None = None
    """directory of the runs of `experiments scaling`, whose points are written to the CSV; None: only read the CSV"""
    csv: Path = Path("experiments/scaling/scaling.csv")
    """a row for each update and each n; curves that --runs doesn't have are kept"""
    page: Path = Path("experiments/scaling/README.md")
    """page whose tables are replaced, between its two marks"""
    out: Path = Path("experiments/scaling")
    """directory of scaling_differences.csv, scaling_fits.csv and the plots"""


@dataclass(frozen=True)
class Point:
    seed: int
    case: str
    method: str
    step: int
    """update, or n"""
    kl: float
    """to the initial policy, nats per response"""
    gold: float
    proxy: float
    """score of the reward models, the objective; 0 on average for the initial policy"""


# ---------------------------------------------------------------------------------------------------------- 1. the CSV
def case_directory(runs: Path, seed: int, case: str) -> Path:
    """Return the directory of a case in a world: its PPO run and, in best_of/, the evaluation of best of n."""
    return runs / str(seed) / case.replace(" ", "-").replace(",", "")


def has_best_of(case: Case) -> bool:
    """Return True if best of n applies: it has no KL penalty, and eval.py takes one reward model."""
    return case.num_members == 1 and case.kl_coef == 0


def finished(runs: Path) -> list[Point]:
    """Read the points of all finished runs. Raises InputError if there are none or one is malformed."""
    points = []
    for seed in sorted(int(directory.name) for directory in runs.glob("[0-9]*") if directory.name.isdigit()):
        for name in CASES:
            directory = case_directory(runs, seed, name)
            if (directory / "summary.json").exists():
                for row in read_metrics(directory):
                    keys = ("objective/kl_exact", "gold_score", "objective/score")
                    kl, gold, proxy = (field(row, key, float, str(directory / "metrics.jsonl")) for key in keys)
                    points.append(Point(seed, name, "rl", int(row["step"]), kl, gold, proxy))
            path = directory / "best_of/eval.json"
            if path.exists():
                for policy, values in evaluated(path).items():
                    n = int(policy.removeprefix("best-of-")) if policy.startswith("best-of-") else 1
                    kl = field(values, "kl_estimate", float, str(path)) if n > 1 else 0.0
                    gold, proxy = (field(values, key, float, str(path)) for key in ("gold_score", "rm_score"))
                    points.append(Point(seed, name, "best-of-n", n, kl, gold, proxy))
    if not points:
        raise InputError(f"--runs {runs} has no finished run of `python -m experiments scaling`.")
    return points


def joined(known: Iterable[Point], new: Sequence[Point]) -> list[Point]:
    """Replace known curves by new ones, and sort all by world, case and method."""
    curves = {(point.seed, point.case, point.method) for point in new}
    points = [point for point in known if (point.seed, point.case, point.method) not in curves] + [*new]
    rank = {name: i for i, name in enumerate((*CASES, *METHODS))}
    return sorted(points, key=lambda point: (point.seed, rank[point.case], rank[point.method], point.step))


def points_text(points: Iterable[Point]) -> str:
    lines = ((p.seed, p.case, p.method, p.step, *(f"{x:.5g}" for x in (p.kl, p.gold, p.proxy))) for p in points)
    return csv_text([COLUMNS, *lines])


def read_points(path: Path) -> list[Point]:
    """Read a CSV written by `points_text`. Raises InputError with the line number for a malformed line."""
    lines = list(csv.reader(read_text(path).splitlines()))
    if not lines or tuple(lines[0]) != COLUMNS:
        raise InputError(f"{path}:1: the columns must be {','.join(COLUMNS)}.")
    points = []
    for i, line in enumerate(lines[1:], start=2):
        try:
            seed, case, method, step, kl, gold, proxy = line
            point = Point(int(seed), case, method, int(step), float(kl), float(gold), float(proxy))
            if case not in CASES or method not in METHODS or point.kl < 0 or not math.isfinite(point.gold + point.kl):
                raise ValueError
        except ValueError:
            raise InputError(f"{path}:{i}: expected {','.join(COLUMNS)}, got {','.join(line)[:80]!r}.") from None
        points.append(point)
    return points


# ---------------------------------------------------------------------------------------------------------- 2. the fits
@dataclass(frozen=True)
class Fit:
    """Fit to the points of one case in one world, along with measurements."""

    method: str
    alpha: float
    beta: float
    start: float
    """measured gold score at d = 0"""
    explained: float
    """R^2, the explained share of the gold score's variance; negative if worse than its mean"""
    other: float
    """R^2 with the other method's formula"""
    reach: float
    """largest d"""
    best: tuple[float, float]
    """maximum of R and the KL there, means over TOGETHER consecutive points"""
    end: tuple[float, float]
    """R and KL at the end, means over TOGETHER points"""

    def gold(self, d: np.ndarray) -> np.ndarray:
        return self.start + self.alpha * d - self.beta * bend(d, self.method)


def bend(d: np.ndarray, method: str) -> np.ndarray:
    """Return d log d (0 at 0) for RL, d^2 for best of n."""
    return d * np.log(np.where(d > 0, d, 1.0)) if method == "rl" else d**2


def fitted(points: Sequence[Point], start: float) -> Fit:
    """Fit the gain in gold score by least squares. Raises ValueError for fewer than three points, or two methods."""
    [method] = {point.method for point in points}
    if len(points) < 3:
        raise ValueError(f"fitting two coefficients takes at least three points, got {len(points)}")
    d, gold = np.sqrt([point.kl for point in points]), np.array([point.gold for point in points])
    coefficients, explained = {}, {}
    for name in METHODS:
        columns = np.stack([d, -bend(d, name)], 1)  # (points, 2)
        coefficients[name] = np.linalg.lstsq(columns, gold - start, rcond=None)[0]
        left = gold - start - columns @ coefficients[name]
        explained[name] = 1 - float((left**2).mean() / gold.var())
    alpha, beta = map(float, coefficients[method])
    [other_method] = METHODS.keys() - {method}
    kept = np.ones(n := min(TOGETHER[method], len(points))) / n
    order = np.argsort([point.step for point in points], kind="stable")
    gains, kls = (np.convolve(x[order], kept, "valid") for x in (gold - start, d**2))
    best, end = ((float(gains[i]), float(kls[i])) for i in (gains.argmax(), -1))
    return Fit(method, alpha, beta, start, explained[method], explained[other_method], float(d.max()), best, end)


def fits(points: Sequence[Point], method: str) -> dict[str, dict[int, Fit]]:
    """Return case -> seed -> fit. The initial gold score is the mean of that policy's points at KL 0 in that world."""
    starts: dict[tuple[int, int], list[float]] = {}
    groups: dict[str, dict[int, list[Point]]] = {}
    for point in points:
        if point.kl == 0:
            starts.setdefault((point.seed, CASES[point.case].policy), []).append(point.gold)
        if point.method == method:
            groups.setdefault(point.case, {}).setdefault(point.seed, []).append(point)
    by_case: dict[str, dict[int, Fit]] = {}
    for case in CASES:
        for seed, case_points in groups.get(case, {}).items():
            start = starts.get((seed, CASES[case].policy))
            if start and len(case_points) > 2:
                by_case.setdefault(case, {})[seed] = fitted(case_points, fmean(start))
    return by_case


# ----------------------------------------------------------------------------------------------------- 3. the page
def over_worlds(values: Sequence[float], digits: int = 2) -> str:
    """Format the mean and its 95% interval by Student's t."""
    return number(fmean(values), t_interval(values), digits)


def fit_table(by_case: dict[str, dict[int, Fit]], with_end: bool = True) -> Lines:
    """Return the fits of each case, means over worlds. with_end: gain and KL at the end too."""
    lines = [["", "alpha", "beta", "gain at best", *["gain at the end", "KL at the end"] * with_end]]
    for case, by_seed in by_case.items():
        case_fits = list(by_seed.values())
        line = [
            case,
            over_worlds([fit.alpha for fit in case_fits]),
            over_worlds([fit.beta for fit in case_fits]),
            over_worlds([fit.best[0] for fit in case_fits]),
        ]
        if with_end:
            line += [over_worlds([fit.end[i] for fit in case_fits], digits) for i, digits in ((0, 2), (1, 1))]
        lines.append(line)
    return lines


def fit_lines(points: Sequence[Point]) -> Lines:
    """Return the lines of scaling_fits.csv: the fit of every case in every world."""
    lines = [
        [
            *("method", "case", "seed", "alpha", "beta", "r2", "r2_other_formula"),
            *("best_gain", "best_kl", "end_gain", "end_kl"),
        ]
    ]
    for method in METHODS:
        for case, by_seed in fits(points, method).items():
            for seed, fit in by_seed.items():
                numbers = (fit.alpha, fit.beta, fit.explained, fit.other, *fit.best, *fit.end)
                lines.append([method, case, str(seed), *(f"{x:.6g}" for x in numbers)])
    return lines


def gaps_to_base(by_case: dict[str, dict[int, Fit]], case: str) -> dict[str, list[float]]:
    """Return a case minus the base in the worlds that both have: alpha, beta, and the gain at best and at the end."""
    base = by_case.get(BASE, {})
    both = [(by_case[case][seed], base[seed]) for seed in sorted(by_case[case].keys() & base.keys())]
    return {
        "alpha": [ours.alpha - theirs.alpha for ours, theirs in both],
        "beta": [ours.beta - theirs.beta for ours, theirs in both],
        "best": [ours.best[0] - theirs.best[0] for ours, theirs in both],
        "end": [ours.end[0] - theirs.end[0] for ours, theirs in both],
    }


def difference_lines(points: Sequence[Point]) -> Lines:
    """Return the lines of scaling_differences.csv: every case minus the base, with 95% intervals over worlds."""
    lines = [["method", "case", "quantity", "worlds", "difference", "low", "high"]]
    for method in METHODS:
        by_case = fits(points, method)
        for case in by_case:
            for quantity, gaps in gaps_to_base(by_case, case).items():
                if gaps and case != BASE:
                    ends = [f"{end:.6g}" for end in t_interval(gaps) or ()] or ["", ""]
                    lines.append([method, case, quantity, str(len(gaps)), f"{fmean(gaps):.6g}", *ends])
    return lines


def draw_figure(points: Sequence[Point], method: str) -> Figure | None:
    """Draw gold score, fits and proxy score over sqrt(KL), a panel per question. Dots are updates or n."""
    by_case = fits(points, method)
    panels = {title: [case for case in cases if by_case.get(case)] for title, cases in PANELS.items()}
    panels = {title: cases for title, cases in panels.items() if len(cases) > 1}
    if not panels:
        return None
    num_rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(8.4, 3.9 * num_rows), layout="constrained")
    for i, (title, cases) in enumerate(panels.items()):
        axes = figure.add_subplot(num_rows, 2, i + 1, sharey=figure.axes[0] if i else None)
        label_axes(axes, title, "square root of the KL, nats", "score")
        for case, (color, _) in zip(cases, LINES, strict=False):
            draw(axes, [p for p in points if (p.case, p.method) == (case, method)], by_case[case], case, color)
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw(axes: Axes, points: Sequence[Point], by_seed: dict[int, Fit], case: str, color: str) -> None:
    d = np.sqrt([point.kl for point in points])
    axes.plot(d, [point.gold for point in points], ".", color=color, alpha=0.2, markersize=3)
    for i, fit in enumerate(by_seed.values()):
        grid = np.linspace(0, fit.reach, 80)
        axes.plot(grid, fit.gold(grid), color=color, linewidth=1.2, label="" if i else case)
    order, proxy = np.argsort(d), np.array([point.proxy for point in points])
    bins = np.array_split(order, min(8, len(order)))  # of equal size
    axes.plot([d[i].mean() for i in bins], [proxy[i].mean() for i in bins], "--", color=color, linewidth=0.9)


def pictures(points: Sequence[Point]) -> dict[str, Figure]:
    drawn = {"scaling_rl.png": draw_figure(points, "rl"), "scaling_best_of.png": draw_figure(points, "best-of-n")}
    return {name: figure for name, figure in drawn.items() if figure}


def page_text(points: Sequence[Point]) -> str:
    """Return the text between the page's marks."""
    sections = []
    names = pictures(points)
    for (method, title), name in zip(METHODS.items(), ("scaling_rl.png", "scaling_best_of.png"), strict=True):
        by_case = fits(points, method)
        if not by_case:
            continue
        sections += [f"### {title[0].upper()}{title[1:]}", markdown(fit_table(by_case, with_end=method == "rl"))]
        if name in names:
            sections.append(f"![Gold and proxy score of {title} over the square root of the KL]({name})")
    return "\n\n".join(sections) or "No runs yet."


def main(args: Args) -> None:
    """Write the CSV if --runs is given, then the page's tables and the pictures."""
    check_out(args.out)
    points = read_points(args.csv) if args.csv.exists() or args.runs is None else []
    if args.runs is not None:
        points = joined(points, finished(args.runs))
    page = with_tables(read_text(args.page), args.page, page_text(points), MARKS)
    write_pictures(args.out, pictures(points))
    if args.runs is not None:
        write_text(args.csv, points_text(points))
    write_text(args.out / "scaling_differences.csv", csv_text(difference_lines(points)))
    write_text(args.out / "scaling_fits.csv", csv_text(fit_lines(points)))
    write_text(args.page, page)
    print(f"written: {args.page} and its pictures, from {len(points):,} points")


if __name__ == "__main__":
    run_module(main, Args)
