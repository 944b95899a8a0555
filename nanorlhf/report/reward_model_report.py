"""Tables and figures of reward models and implicit rewards, as sections and as a separate page."""

from nanorlhf.report.calibration_figures import calibration_figure
from nanorlhf.report.judge_line import judge_line
from nanorlhf.report.page import Column, Lines, Page, Section, markup, number, plus_minus, tabulate
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Outcome, of_100, sign_of, verdict_section, worse

SETS = {"validation": "Validation pairs", "cnndm": "CNN/DM pairs"}
HEADINGS = {"all": "all pairs", "batch": "batch", "confidence": "confidence", "split": "split", "policies": "policies"}
NUM_POLICY_PAIRS = 10  # shown; eval.json has all


def accuracy_lines(table: list[dict], by: str, measure: str = "accuracy") -> Lines:
    """[N+ 16] Return one part of Table 5: accuracy, or another measure, by `by`; empty if no pair has that field."""
    rows = [row for row in table if row["by"] == by]
    if not rows:
        return []
    lines = [[HEADINGS[by], "pairs", *rows[0]["models"]]]
    for row in rows[:NUM_POLICY_PAIRS] if by == "policies" else rows:
        value = row["value"] or measure
        lines.append([value, str(row["num_pairs"]), *(plus_minus(**cell) for cell in row["models"].values())])
    return lines


def interval_lines(measured: dict, measure: str = "accuracy") -> Lines:
    """Return each model's accuracy with its 95% interval, and its gain over the first model, on a set of pairs."""
    rows_by_name = measured["intervals"]
    columns = [Column("accuracy", measure, 3), Column("gain", f"minus {next(iter(rows_by_name))}", 3, "+")]
    rows = [(name, {"accuracy": row, "gain": row["gain"]}) for name, row in rows_by_name.items()]
    return tabulate("95% intervals over pairs", columns, rows)


def gain_cell(gain: dict) -> str:
    return number(gain["mean"], gain["ci"], 3, "+")


def score_lines(result: dict) -> Lines:
    """Return statistics of the references' scores."""
    columns = [Column(statistic, statistic) for statistic in ("max", "mean", "min", "std")]
    return tabulate("reference scores", columns, result["references"].items())


def decider_lines(measured: dict) -> Lines:
    """Return how often labels and models agree with the gold score and prefer the longer response, per set of pairs."""
    deciders = measured["deciders"]
    rows = {"labels": deciders["labels"], "gold score": deciders["truth"], **deciders["models"]}
    columns = [Column("truth", "agrees with gold", 3), Column("longer", "prefers longer", 3)]
    if deciders["truth"] is None:
        del rows["gold score"], columns[0]
    return tabulate("preference by", columns, rows.items())


def agreement_line(agreement: dict) -> str:
    """Return annotators' agreement with each other and themselves on the pairs of agreement.jsonl."""
    kappas, shares = (number(agreement[key], digits=3) for key in ("fleiss_kappa", "circular_share"))
    return (
        f"{agreement['num_annotators']} annotators, {agreement['num_pairs']} pairs: Fleiss' kappa {kappas}; share of "
        f"circular triads {shares} of {agreement['num_triads']}"
    )


def notes(result: dict) -> list[str]:
    """Return sentences that explain the tables."""
    sentences = ["Accuracy is the share of pairs that a model ranks as people did; ties count as wrong."]
    if any(n > 1 for n in result["num_seeds"].values()):
        counts = ", ".join(f"{name} {n}" for name, n in result["num_seeds"].items())
        sentences.append(f"Mean ± standard deviation over seeds; number of seeds: {counts}.")
    if result["implicit"]:
        ratio = f"{result['dpo_beta']} * log(policy / {result['reference']})"
        sentences.append(f"Implicit reward of {', '.join(result['implicit'])}: {ratio}.")
    return sentences


def sections(result: dict) -> list[Section]:
    """Return Table 5, calibration and length preference of each set of pairs, and the references' scores."""
    caption = (
        "Calibration: accuracy against the size of the margin. Above the curve, the model is right more often than "
        "its margins predict (underconfident); below it, less often (overconfident). The calibration error is the mean "
        "distance to the curve over all pairs."
    )
    parts = [Section("Reward models", " ".join(notes(result)), anchor="reward-models")]
    for name, measured in result["sets"].items():
        table = measured["accuracy"]
        errors = (f"{model} {plus_minus(**row['ece'])}" for model, row in measured["calibration"].items())
        lines = [f"Calibration error: {', '.join(errors)}."]
        hidden = sum(row["by"] == "policies" for row in table) - NUM_POLICY_PAIRS
        if hidden > 0:
            lines.append(f"eval.json has {hidden} more pairs of policies, with fewer comparisons.")
        parts.append(
            Section(
                f"{SETS[name]}: accuracy",
                tables=[interval_lines(measured), *(accuracy_lines(table, by) for by in HEADINGS)],
                narrow=True,
                notes="\n".join(lines),
                figures=[calibration_figure(model, row) for model, row in measured["calibration"].items()],
                caption=caption,
            )
        )
        if "deciders" in measured:
            share = measured["first_shown"]
            line = "" if share is None else f"the labels prefer the first response shown in {share:.3f} of the pairs"
            parts.append(Section(tables=[decider_lines(measured)], notes=line))
        if name == "validation" and result.get("judge"):
            parts.append(judge_section(result["judge"], table[0]["num_pairs"]))
    agreement = agreement_line(result["agreement"]) if result.get("agreement") else ""
    return [*parts, Section(tables=[score_lines(result)], notes=agreement)]


def judge_section(judge: dict, num_pairs: int) -> Section:
    """[N+ 17] Return how often the labels and the models prefer what the judge prefers, on the validation pairs."""
    tables, agreement = [], judge["agreement"]
    if agreement:  # the judge preferred a response at least once
        tables = [accuracy_lines(agreement["accuracy"], by, "agreement") for by in HEADINGS]
        tables = [interval_lines(agreement, "agreement"), *tables]
    line = judge_line(judge, f"{num_pairs} pairs")
    about = f"Share of pairs where labels and models prefer the response that the judge prefers. {line}."
    return Section("Validation pairs: agreement with the judge", about, tables, narrow=True)


def outcome(result: dict, name: str) -> Outcome:
    """Return a model's outcome on the validation pairs: against chance, the first model and, if known, gold."""
    measured = result["sets"]["validation"]
    row, first = measured["intervals"][name], next(iter(measured["intervals"]))
    chance = {1: "", 0: ", which is no better than chance", -1: ", which is worse than chance"}
    above = sign_of(row["ci"], 0.5)
    accuracy = number(row["mean"], row["ci"], 3)
    level = f"{name} ranks {of_100(row['mean'])} validation pairs as people did ({accuracy}){chance[above]}."
    kind = {1: "good", 0: "warn", -1: "bad"}[above]
    sentences = []
    if row["gain"]:
        sign = sign_of(row["gain"]["ci"])
        texts = {1: f"more than {first}", 0: f"not different from {first}", -1: f"less than {first}"}
        sentences.append(f"That is {texts[sign]} ({gain_cell(row['gain'])}).")
        kind = worse(kind, "warn" if sign < 0 else "good")
    deciders = measured.get("deciders")
    if deciders and deciders["models"][name]["truth"]["mean"] is not None:
        ours, labels = (of_100(of["truth"]["mean"]) for of in (deciders["models"][name], deciders["labels"]))
        sentences.append(f"It agrees with the gold score on {ours} pairs, the labels on {labels} pairs.")
    return Outcome(level, kind, " ".join(sentences))


def page(result: dict, models: dict[str, list[str]]) -> Page:
    """Return the page of an evaluation of reward models; models: name -> run directories, one per seed."""
    return [
        markup.title("Reward models"),
        verdict_section((outcome(result, name), runs) for name, runs in models.items()),
        *sections(result),
        *run_sections([run for runs in models.values() for run in runs]),
    ]
