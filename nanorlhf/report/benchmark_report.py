"""Tables and report.html of reward models on a benchmark: its scores, and what length has to do with them."""

from nanorlhf.metrics.length_control import NEAR
from nanorlhf.report.calibration_figures import calibration_figure
from nanorlhf.report.page import Lines, Page, Section, markup, number, plus_minus
from nanorlhf.report.reward_model_report import decider_lines, notes
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Outcome, sign_of, verdict_section

ABOUT = {  # what the scores count
    "RewardBench": "A section is the mean of its subsets by their published sizes, but math-prm counts as much as all "
    "programs together. Overall is the mean of the four sections, without the prior sets.",
    "RewardBench 2": "The right answer must score higher than three wrong ones. Overall is the mean of six subsets. "
    "In Ties, all right answers must score higher than all wrong ones, and by more than they differ from each other.",
    "RM-Bench": "Easy: the right answer has the style that readers like more. Normal: both have the same style. Hard: "
    "the wrong answer has it. Average is their mean, overall that of the four domains, safety both of its subsets.",
}
LENGTH = (
    "Near: accuracy on pairs whose lengths differ by at most {near:.0%} of the longer one. Controlled: what the "
    "regression of AlpacaEval predicts where lengths are equal (Dubois et al. 2024). The weights are those of a "
    "logistic regression of the label on the model's margin and on the difference of lengths, both scaled. Where the "
    "margin's interval is above 0, the model knows more than which response is longer. Here a tie counts half."
)


def benchmark_lines(table: dict) -> Lines:
    """One of the benchmark's tables."""
    models = table["lines"][0]["models"]
    lines = [[table["name"], "rows", *models]]
    return lines + [
        [line["name"], f"{line['num_rows']:,}", *map(cell, line["models"].values())] for line in table["lines"]
    ]


def cell(measured: dict) -> str:
    """Mean, standard deviation over seeds, and interval."""
    if measured["std"] is None:
        return number(measured["mean"], measured["interval"], 3)
    low, high = measured["interval"]
    return f"{plus_minus(measured['mean'], measured['std'])} [{low:.3f}, {high:.3f}]"


def length_lines(result: dict) -> Lines:
    """A line per model, and one of the rule that the longer response is better."""
    columns = {
        "accuracy": "accuracy of pairs",
        "near": "near",
        "controlled": "controlled",
        "margin_weight": "weight of margin",
        "length_weight": "weight of length",
    }
    lines = [["by", *columns.values()]]
    for name, found in result["length"].items():
        known = [found[key] for key in columns]
        lines.append([name, *(number(at["mean"], at["interval"], 3) if at else "-" for at in known)])
    return lines


def outcome(result: dict, name: str) -> Outcome:
    """What a model is worth: its overall score, or the first where there is none; what it knows beyond length."""
    lines = {line["name"]: line["models"] for line in result["tables"][0]["lines"]}
    place = "overall" if "overall" in lines else next(iter(lines))
    *_, rule = lines[place]  # the longer response is better
    scores = f"{name} scores {cell(lines[place][name])} ({place})"
    level = f"{scores}; the rule `{rule}` scores {lines[place][rule]['mean']:.3f}."
    if "length" not in result:
        return Outcome(level, "good", "")
    weight = result["length"][name]["margin_weight"]
    kind, said = {
        1: ("good", "It knows more than which response is longer"),
        0: ("warn", "It shows no knowledge beyond which response is longer"),
        -1: ("bad", "Beyond length it prefers the wrong response"),
    }[sign_of(weight["interval"])]
    return Outcome(level, kind, f"{said}: the weight of its margin is {number(weight['mean'], weight['interval'], 3)}.")


def page(result: dict, models: dict[str, list[str]]) -> Page:
    """The page; models: name -> run directories, one per seed."""
    benchmark = result["benchmark"] or "Pairs"
    about = f"{result['num_rows']:,} rows, {result['num_pairs']:,} pairs. {' '.join(notes(result))}"
    if unpaired := result["num_unpaired_ties"]:
        about += f" {unpaired:,} rows of Ties are left out: their question lacks its other row."
    found = [
        markup.title(f"Reward models on {benchmark}" if result["benchmark"] else "Reward models by subset"),
        verdict_section((outcome(result, name), runs) for name, runs in models.items()),
        Section(
            benchmark,
            about,
            tables=[benchmark_lines(table) for table in result["tables"]],
            notes=f"{ABOUT.get(benchmark, '')} 95% intervals over rows.".strip(),
        ),
    ]
    if "length" in result:
        found.append(
            Section(
                "What is left where lengths are equal",
                tables=[length_lines(result), decider_lines({"deciders": result["deciders"]})],
                notes=LENGTH.format(near=NEAR),
                figures=[calibration_figure(name, row) for name, row in result["calibration"].items()],
                caption="Calibration: accuracy against the size of the margin.",
            )
        )
    return [*found, *run_sections([run for runs in models.values() for run in runs])]
