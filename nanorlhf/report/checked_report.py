"""Tables, curves and report.html of an evaluation of answers that a program can check."""

from collections.abc import Iterable

from markupsafe import Markup

from nanorlhf.report.page import Column, Lines, Page, Section, answer, draw_lines, markup, number, panel, tabulate
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Gain, Outcome, change_of, of_100, outcomes_of, verdict_section
from nanorlhf.training.run_directory import read_settings

COLUMNS = (  # of the table of rewards, after the rewards
    Column("eos_rate", "EOS rate"),
    Column("response_length", "length, tokens"),
)


def pass_table(result: dict) -> Lines:
    """Return one row per policy: pass@k with 95% intervals over queries."""
    rows = [(name, row["pass_at_k"]) for name, row in result["policies"].items()]
    return tabulate("policy", [Column(k, f"pass@{k}", 3) for k in rows[0][1]], rows)


def reward_table(result: dict) -> Lines:
    """Return one row per policy: the mean of each reward, EOS rate and length."""
    policies = result["policies"].items()  # a reward may have the name of a column
    rows = [(name, row | {f"mean {label}": mean for label, mean in row["rewards"].items()}) for name, row in policies]
    columns = [Column(f"mean {label}", label, 3) for label in rows[0][1]["rewards"]]
    return tabulate("mean reward", [*columns, *COLUMNS], rows)


def by_table(result: dict) -> Lines:
    """Return one row per policy: pass@1 for each value of the --by field."""
    rows = result["policies"]
    values = list(next(iter(rows.values()))["by"])
    lines = [[name, *(number(row["by"][value], digits=3) for value in values)] for name, row in rows.items()]
    return [[f"pass@1 by {result['args']['by']}", *values], *lines] if values else []


def difference_table(result: dict) -> Lines:
    """Return each policy's gain over the first, paired by query: in pass@1 and in the mean of each reward."""
    first, row = next(iter(result["policies"].items()))
    columns = [Column(key, key, 3, "+") for key in ("pass@1", *row["rewards"])]
    return tabulate(f"minus {first}", columns, result["differences"].items())


def outcome(result: dict, name: str) -> Outcome:
    """Return a policy's outcome: the share it solves, and the gains in that and in its training reward."""
    policies = result["policies"]
    first, row, gains = next(iter(policies)), policies[name], result["differences"].get(name, {})
    beside = f" ({first}: {round(100 * policies[first]['pass_at_k']['1']['mean'])}%)" if gains else ""
    level = f"{name} solves {of_100(row['pass_at_k']['1']['mean'])} queries with one sample{beside}."
    gain_of = {}
    for key, gain in gains.items():
        measure = f"its {key}" if key == "pass@1" else f"its {key} reward"
        gain_of[key] = Gain(measure, gain["interval"], number(gain["mean"], gain["interval"], 3, "+"))
    words = result["args"]["policies"]
    trained_on = rewarded(words[words.index(name) + 1], list(row["rewards"]))
    return Outcome(level, *change_of(gain_of.get("pass@1"), gain_of.get(trained_on)), row["eos_rate"])


def rewarded(run: str, labels: list[str]) -> str:
    """Return the reward that a run was trained on; empty if it is the first one, which decides what passes."""
    named = read_settings(run).get("reward")
    functions = [str(word).rpartition(":")[2] for word in (named if isinstance(named, list) else [named])]
    return "" if labels[0] in functions else next((label for label in labels if label in functions), "")


def page(result: dict, shown: Iterable[dict], runs: Iterable[str]) -> Page:
    figure, axes = panel("Solved by at least one of k samples", "k", "pass@k")
    axes.set_xscale("log", base=2)
    curves = {name: row["pass_at_k"] for name, row in result["policies"].items()}
    draw_lines(
        axes, {name: ([int(k) for k in row], [at["mean"] for at in row.values()]) for name, row in curves.items()}
    )
    n = result["num_samples"]
    return [
        markup.title("Verifiable answers"),
        verdict_section(outcomes_of(result, outcome)),
        Section(
            "Solved",
            tables=[pass_table(result), reward_table(result), difference_table(result), by_table(result)],
            notes=f"{n} samples per query, {result['num_queries']} queries; 95% intervals over queries; differences "
            "are paired by query.",
            figures=[figure],
        ),
        *run_sections(runs),
        Section("Samples", samples=[card(row, n) for row in shown]),
    ]


def card(row: dict, n: int) -> Markup:
    """Return a card of a query, its reference and the first sample of each policy."""
    answers = [answer("reference", row["reference"], {})] if row["reference"] else []
    for name, answered in row["policies"].items():
        answers.append(answer(name, answered["response"], {f"passed of {n}:": float(answered["num_passed"])}))
    return markup.card(row["query"], answers)
