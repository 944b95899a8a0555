"""Tables and figures of reward models and implicit rewards: as text, as a section, and as a page of their own."""

from pathlib import Path

from markupsafe import Markup

from nanorlhf.report.page import aligned, curves, figures, markup, write_page
from nanorlhf.report.reward_figures import calibration_figure

SETS = {"validation": "Validation pairs", "cnndm": "CNN/DM pairs"}
HEADINGS = {"all": "all pairs", "batch": "batch", "confidence": "confidence", "split": "split", "policies": "policies"}
NUM_POLICY_PAIRS = 10  # shown; eval.json has all
Lines = list[list[str]]


def number(cell: dict[str, float | None], digits: int = 3) -> str:
    """The mean, and the standard deviation where there are several seeds."""
    if cell["mean"] is None:
        return "-"
    return f"{cell['mean']:.{digits}f}" + ("" if cell["std"] is None else f" ± {cell['std']:.{digits}f}")


def accuracy_lines(table: list[dict], by: str) -> Lines:
    """[N+ 16] One part of Table 5: accuracy by `by`; empty if no pair has that field."""
    rows = [row for row in table if row["by"] == by]
    if not rows:
        return []
    lines = [[HEADINGS[by], "pairs", *rows[0]["models"]]]
    for row in rows[:NUM_POLICY_PAIRS] if by == "policies" else rows:
        value = row["value"] or "accuracy"
        lines.append([value, str(row["num_pairs"]), *(number(cell) for cell in row["models"].values())])
    return lines


def score_lines(result: dict) -> Lines:
    """Statistics of the references' scores."""
    columns = ("max", "mean", "min", "std")
    lines = [["score of the references", *columns]]
    return lines + [[name, *(number(row[c], 2) for c in columns)] for name, row in result["references"].items()]


def decider_lines(measured: dict) -> Lines:
    """Who agrees with the truth, and who prefers the longer response; of a set of pairs."""
    found = measured["deciders"]
    if found["truth"] is None:
        rows = {"labels": found["labels"], **found["models"]}
        return [["decider", "prefers the longer"], *([name, number(row["longer"])] for name, row in rows.items())]
    rows = {"labels": found["labels"], "the truth": found["truth"], **found["models"]}
    lines = [["decider", "agrees with the truth", "prefers the longer"]]
    return lines + [[name, number(row["truth"]), number(row["longer"])] for name, row in rows.items()]


def agreement_line(agreement: dict) -> str:
    """How people agree with each other and with themselves on the pairs of agreement.jsonl."""
    kappas, shares = (
        "-" if agreement[key] is None else f"{agreement[key]:.3f}" for key in ("fleiss_kappa", "circular_share")
    )
    return (
        f"{agreement['num_annotators']} annotators of {agreement['num_pairs']} pairs: Fleiss' kappa {kappas}; "
        f"{shares} of {agreement['num_triads']} triads are circular"
    )


def first_shown_line(measured: dict) -> str:
    share = measured["first_shown"]
    return "" if share is None else f"the labels prefer the response shown first in {share:.3f} of the pairs"


def notes(result: dict) -> list[str]:
    """What the tables show."""
    sentences = ["Accuracy is the share of pairs that a model ranks as people did; a tie counts as wrong."]
    if any(n > 1 for n in result["num_seeds"].values()):
        counts = ", ".join(f"{n} of {name}" for name, n in result["num_seeds"].items())
        sentences.append(f"Mean ± standard deviation over seeds: {counts}.")
    if result["implicit"]:
        ratio = f"{result['dpo_beta']} * log(policy / {result['reference']})"
        sentences.append(f"The reward of {', '.join(result['implicit'])} is implicit: {ratio}.")
    return sentences


def tables(result: dict) -> str:
    """For the terminal: Table 5 without the pairs of policies, calibration errors and notes."""
    parts = []
    for name, measured in result["sets"].items():
        table = measured["accuracy"]
        parts += [aligned(lines) for by in HEADINGS if by != "policies" and (lines := accuracy_lines(table, by))]
        parts[-1] += "\n" + ", ".join(
            f"calibration error of {model} {number(row['ece'])}" for model, row in measured["calibration"].items()
        )
        parts[-1] += f" ({SETS[name]})"
        if "deciders" in measured:
            parts.append("\n".join(filter(None, (aligned(decider_lines(measured)), first_shown_line(measured)))))
    if result.get("agreement"):
        parts.append(agreement_line(result["agreement"]))
    return "\n\n".join([*parts, aligned(score_lines(result)), "\n".join(notes(result))])


def section(result: dict) -> Markup:
    """Tables and calibration of each set of pairs."""
    parts = [markup.heading("Reward models", "reward-models"), markup.quiet(" ".join(notes(result)))]
    for name, measured in result["sets"].items():
        table = measured["accuracy"]
        parts.append(markup.subheading(f"{SETS[name]}: accuracy"))
        parts.append(markup.columns([markup.table(lines) for by in HEADINGS if (lines := accuracy_lines(table, by))]))
        hidden = sum(row["by"] == "policies" for row in table) - NUM_POLICY_PAIRS
        if hidden > 0:
            parts.append(markup.quiet(f"{hidden} more pairs of policies, with fewer comparisons, are in eval.json."))
        drawn = [calibration_figure(model, row) for model, row in measured["calibration"].items()]
        caption = (
            "Calibration: accuracy against the size of the margin. Above the curve, the model is right more often than "
            "its margins claim (underconfident); below it, less often (overconfident). The calibration error is the "
            "distance to the curve, mean over all pairs."
        )
        parts.append(figures(drawn, caption))
        if "deciders" in measured:
            parts.append(markup.table(decider_lines(measured)))
            parts.append(markup.quiet(first_shown_line(measured)))
    if result.get("agreement"):
        parts.append(markup.paragraph(agreement_line(result["agreement"])))
    return Markup("\n").join([*parts, markup.table(score_lines(result))])


def write_report(path: Path, result: dict, runs: list[str]) -> None:
    """Write report.html of an evaluation of reward models only, whole or not at all."""
    parts = [markup.title("Reward models"), section(result), *(text for _, text in sorted(map(curves, runs)))]
    write_page(path, str(result["args"]["out"]), parts)
