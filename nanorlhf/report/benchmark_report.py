"""Tables and report.html of reward models on a benchmark: scores and length control."""

from nanorlhf.metrics.length_control import NEAR
from nanorlhf.report.calibration_figures import calibration_figure
from nanorlhf.report.page import Column, Lines, Page, Section, markup, number, plus_minus, tabulate
from nanorlhf.report.reward_model_report import decider_lines, notes
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Outcome, sign_of, verdict_section

COLUMNS = (  # of the table of length control
    Column("accuracy", "pair accuracy", 3),
    Column("near", "near", 3),
    Column("controlled", "controlled", 3),
    Column("margin_weight", "margin weight", 3),
    Column("length_weight", "length weight", 3),
)
ABOUT = {  # how the scores are computed
    "RewardBench": "A section is the mean of its subsets weighted by their published sizes, except that math-prm "
    "counts as much as all programs together. Overall is the mean of the four sections, without the prior sets.",
    "RewardBench 2": "The right answer must score higher than three wrong ones. Overall is the mean of six subsets. "
    "In Ties, all right answers must score higher than all wrong ones, by more than they differ from each other.",
    "RM-Bench": "Easy: the right answer has the preferred style. Normal: both have the same style. Hard: the wrong "
    "answer has the preferred style. Average is the mean of these three. Overall is the mean of the four domains; "
    "safety combines two subsets.",
}
LENGTH = (
    "Near: accuracy on pairs that differ in length by at most {near:.0%} of the longer response. Controlled: win rate "
    "at equal length predicted by AlpacaEval's regression (Dubois et al. 2024). Weights: coefficients of a logistic "
    "regression of the label on the model's margin and on the length difference, both scaled. If the margin's interval "
    "is above 0, the model knows more than which response is longer. Ties count half in this table."
)


def benchmark_lines(table: dict) -> Lines:
    """Format one of the benchmark's tables."""
    models = table["lines"][0]["models"]
    lines = [[table["name"], "rows", *models]]
    return lines + [
        [line["name"], f"{line['num_rows']:,}", *map(cell, line["models"].values())] for line in table["lines"]
    ]


def cell(measured: dict) -> str:
    """Format mean, standard deviation over seeds, and interval."""
    if measured["std"] is None:
        return number(measured["mean"], measured["interval"], 3)
    low, high = measured["interval"]
    return f"{plus_minus(measured['mean'], measured['std'])} [{low:.3f}, {high:.3f}]"


def outcome(result: dict, name: str) -> Outcome:
    """Return a model's outcome: its overall score, or the first one without overall; what it knows beyond length."""
    lines = {line["name"]: line["models"] for line in result["tables"][0]["lines"]}
    shown = "overall" if "overall" in lines else next(iter(lines))
    *_, rule = lines[shown]  # prefers the longer response
    scores = f"{name} scores {cell(lines[shown][name])} ({shown})"
    level = f"{scores}; the rule `{rule}` scores {lines[shown][rule]['mean']:.3f}."
    if "length" not in result:
        return Outcome(level, "good", "")
    weight = result["length"][name]["margin_weight"]
    kind, text = {
        1: ("good", "It knows more than which response is longer"),
        0: ("warn", "It isn't shown to know more than which response is longer"),
        -1: ("bad", "Beyond length it prefers the wrong response"),
    }[sign_of(weight["interval"])]
    return Outcome(level, kind, f"{text}: its margin weight is {number(weight['mean'], weight['interval'], 3)}.")


def page(result: dict, models: dict[str, list[str]]) -> Page:
    """Return the page; models: name -> run directories, one per seed."""
    benchmark = result["benchmark"] or "Pairs"
    about = f"{result['num_rows']:,} rows, {result['num_pairs']:,} pairs. {' '.join(notes(result))}"
    if unpaired := result["num_unpaired_ties"]:
        about += f" {unpaired:,} rows of Ties are excluded because their question has no second row."
    sections = [
        markup.title(f"Reward models on {benchmark}" if result["benchmark"] else "Reward models by subset"),
        verdict_section((outcome(result, name), runs) for name, runs in models.items()),
        Section(
            benchmark,
            about,
            tables=[benchmark_lines(table) for table in result["tables"]],
            notes=f"{ABOUT.get(benchmark, '')} Intervals are 95% over rows.".strip(),
        ),
    ]
    if "length" in result:
        sections.append(
            Section(
                "Length control",
                tables=[
                    tabulate("model", COLUMNS, result["length"].items()),
                    decider_lines({"deciders": result["deciders"]}),
                ],
                notes=LENGTH.format(near=NEAR),
                figures=[calibration_figure(name, row) for name, row in result["calibration"].items()],
                caption="Calibration: accuracy against the size of the margin.",
            )
        )
    return [*sections, *run_sections([run for runs in models.values() for run in runs])]
