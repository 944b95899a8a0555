"""Figures on generated programs: pass rates, also by problem, temperatures, errors, and training curves."""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from nanorlhf.metrics import bootstrap_interval
from nanorlhf.report.page import LINES, draw, draw_lines, panel, series
from nanorlhf.rlcf.error_profile import CATEGORIES
from nanorlhf.training.run_directory import Rows

CURVES = {  # metric of train_ppo and of RLCF's baselines: title, unit
    "compile_rate": ("Responses that pass the static checks", "share"),
    "discriminator/accuracy": ("Discriminator accuracy", "share"),
    **{f"errors/{name}": (f"Errors: {name.replace('_', ' ')}", "per response") for name in CATEGORIES},
    "objective/entropy": ("Entropy of the policy", "nats per response"),
    "objective/kl": ("KL to the initial policy", "nats per response"),
}


NUM_GROUPS = 4  # of problems, by the length of their query


def line_color(number: int) -> str:
    return LINES[number % len(LINES)][0]


def at_k_figures(policies: dict[str, list[dict]]) -> list[Figure]:
    """Draw one panel of pass@k, one of exec@k and comp@k at the smallest k; one colour per policy, 95% intervals.

    policies: name -> `at_k` of eval.json.
    """
    first = next(iter(policies.values()))
    groups = {
        "Programs that pass": [("pass", j, f"pass@{row['k']}") for j, row in enumerate(first)],
        "Programs that run, and that compile": [(name, 0, f"{name}@{first[0]['k']}") for name in ("exec", "comp")],
    }
    figures = []
    for title, bars in groups.items():
        figure, axes = panel(title, "", "%")
        width = 0.8 / len(policies)
        for number, (policy, rows) in enumerate(policies.items()):
            heights = np.array([100 * rows[j][metric] for metric, j, _ in bars])
            ends = np.array([[100 * x for x in rows[j][f"{metric}_ci"]] for metric, j, _ in bars]).T  # (2, bars)
            whiskers = np.abs(ends - heights)
            x = np.arange(len(bars)) + (number - (len(policies) - 1) / 2) * width
            axes.bar(
                x, heights, 0.92 * width, yerr=whiskers, color=line_color(number), label=policy,
                error_kw={"elinewidth": 1, "ecolor": "#1c2024", "capsize": 2},
            )  # fmt: skip
        axes.set_xticks(range(len(bars)), [label for *_, label in bars])
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        figures.append(figure)
    return figures


def error_figure(policies: dict[str, dict[str, float]]) -> Figure:
    """[RLCF figure 4] Draw errors per response by category, one bar per policy; omit categories without errors."""
    shown = [name for name in CATEGORIES if any(errors[name] for errors in policies.values())]
    figure, axes = panel("Errors by category", "errors per response", "")
    figure.set_size_inches(5.2, 1.4 + 0.3 * len(shown) * max(1, len(policies) / 2))
    height = 0.8 / len(policies)
    for number, (policy, errors) in enumerate(policies.items()):
        y = np.arange(len(shown)) + (number - (len(policies) - 1) / 2) * height
        axes.barh(y, [errors[name] for name in shown], 0.92 * height, color=line_color(number), label=policy)
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name in shown])
    axes.invert_yaxis()  # the first category on top
    axes.grid(False, axis="y")
    axes.legend(frameon=False)
    return figure


def problem_figures(passed: dict[str, list[int]], num_samples: int, lengths: list[int], seed: int) -> list[Figure]:
    """Draw the share of samples that pass per problem, sorted; and its mean by the length of the query.

    passed: policy -> number of samples that pass, per problem. The second figure has groups of equal size and 95%
    intervals over problems; with fewer than two problems per group it is left out.
    """
    shares = {policy: 100 * np.array(counts) / num_samples for policy, counts in passed.items()}  # (problems,) each
    first, axes = panel("Programs that pass, by problem", "% of problems, easiest first", "% of samples")
    for number, (policy, values) in enumerate(shares.items()):
        axes.stairs(np.sort(values)[::-1], np.linspace(0, 100, len(values) + 1), color=line_color(number), label=policy)
    axes.legend(frameon=False)
    if len(lengths) < 2 * NUM_GROUPS:
        return [first]
    second, axes = panel("Programs that pass, by length", "median tokens of the query", "%")
    groups = np.array_split(np.argsort(lengths, kind="stable"), NUM_GROUPS)
    middles = [float(np.median(np.array(lengths)[group])) for group in groups]
    for number, (policy, values) in enumerate(shares.items()):
        means = np.array([values[group].mean() for group in groups])
        ends = np.array([bootstrap_interval(values[group][:, None], seed) for group in groups]).T  # (2, groups)
        axes.errorbar(
            middles, means, np.abs(ends - means), color=line_color(number), marker="o", capsize=2, label=policy
        )
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return [first, second]


def temperature_figures(policies: dict[str, list[dict]], ks: Iterable[int]) -> list[Figure]:
    """Draw one panel per k, pass@k over temperature with one curve per policy; nothing for a single temperature.

    policies: name -> `temperatures` of eval.json. The more confident a policy, the higher the temperature of its best
    pass@k for k above 1.
    """
    if len(next(iter(policies.values()))) < 2:
        return []
    figures = []
    for j, k in enumerate(ks):
        figure, axes = panel(f"pass@{k} over temperature", "temperature of the samples", "%")
        lines = {}
        for policy, rows in policies.items():
            lines[policy] = [row["temperature"] for row in rows], [100 * row["pass_at_k"][j] for row in rows]
        draw_lines(axes, lines)
        axes.set_ylim(bottom=0)
        figures.append(figure)
    return figures


def training_figures(runs: dict[str, Rows], policies: Iterable[str] = ()) -> list[Figure]:
    """[RLCF figure 11] Draw compile rate, errors by category, discriminator accuracy, entropy and KL over updates.

    One line per run. runs: name -> rows of metrics.jsonl; a run with the name of a policy gets its colour. A run
    without a metric has no line; a metric that no run has, or an error category that never occurs, has no panel.
    """
    figures = []
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*policies, *runs]))}
    for key, (title, unit) in CURVES.items():
        curves = {name: series(rows, key)[1] for name, rows in runs.items()}
        is_error = key.startswith("errors/")
        if not any(values.any() if is_error else len(values) for values in curves.values()):
            continue
        figure, axes = panel(title, "update", unit)
        for name, rows in runs.items():
            if len(curves[name]):
                draw(axes, rows, key, name, line_color(numbers[name]), smoothed=True)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.03 if unit == "share" else None)
        axes.legend(frameon=False)
        figures.append(figure)
    return figures
