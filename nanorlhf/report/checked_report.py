"""Tables, curves and report.html of an evaluation of answers that a program checks."""

from collections.abc import Iterable

from markupsafe import Markup

from nanorlhf.report.page import Lines, Page, Section, answer, draw_lines, markup, number, panel
from nanorlhf.report.run_curves import run_sections


def pass_table(result: dict) -> Lines:
    """One row per policy: pass@k with 95% intervals over queries."""
    rows = result["policies"]
    ks = list(next(iter(rows.values()))["pass_at_k"])
    lines = [[name, *(cell(row["pass_at_k"][k]) for k in ks)] for name, row in rows.items()]
    return [["policy", *(f"pass@{k}" for k in ks)], *lines]


def reward_table(result: dict) -> Lines:
    """One row per policy: the mean of each reward, EOS rate and length."""
    rows = result["policies"]
    labels = list(next(iter(rows.values()))["rewards"])
    lines = [
        [
            name,
            *(cell(row["rewards"][label]) for label in labels),
            *map(number, (row["eos_rate"], row["response_length"])),
        ]
        for name, row in rows.items()
    ]
    return [["mean of", *labels, "EOS rate", "length, tokens"], *lines]


def by_table(result: dict) -> Lines:
    """One row per policy: pass@1 for each value of the field that the evaluation was told apart by."""
    rows = result["policies"]
    values = list(next(iter(rows.values()))["by"])
    lines = [[name, *(number(row["by"][value], digits=3) for value in values)] for name, row in rows.items()]
    return [[f"pass@1 by {result['args']['by']}", *values], *lines] if values else []


def cell(measured: dict) -> str:
    return number(measured["mean"], measured["interval"], 3)


def page(result: dict, shown: Iterable[dict], runs: Iterable[str]) -> Page:
    figure, axes = panel("Solved by one of k samples", "k", "pass@k")
    axes.set_xscale("log", base=2)
    curves = {name: row["pass_at_k"] for name, row in result["policies"].items()}
    draw_lines(
        axes, {name: ([int(k) for k in row], [at["mean"] for at in row.values()]) for name, row in curves.items()}
    )
    n = result["num_samples"]
    return [
        markup.title("Answers that a program checks"),
        Section(
            "Solved",
            tables=[pass_table(result), reward_table(result), by_table(result)],
            notes=f"{n} samples of each of {result['num_queries']} queries; 95% intervals over queries.",
            figures=[figure],
        ),
        *run_sections(runs),
        Section("Samples", samples=[card(row, n) for row in shown]),
    ]


def card(row: dict, n: int) -> Markup:
    """A query, its reference and the first sample of each policy."""
    answers = [answer("reference", row["reference"], {})]
    for name, answered in row["policies"].items():
        answers.append(answer(name, answered["response"], {f"of {n} passed": float(answered["num_passed"])}))
    return markup.card(row["query"], answers)
