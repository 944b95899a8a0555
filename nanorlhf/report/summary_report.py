"""Tables and report.html of an evaluation of summaries, or of any responses with one reference per query. [N+]"""

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from nanorlhf.metrics.token_shift import KINDS
from nanorlhf.report.along_run import along_figures
from nanorlhf.report.details_index import INDEX, ROOT, read_details
from nanorlhf.report.judge_line import judge_line
from nanorlhf.report.page import Column, Lines, Page, Section, answer, markup, number, tabulate
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Gain, Outcome, change_of, of_100, outcomes_of, verdict_section
from nanorlhf.training.run_directory import flat_settings, read_settings

COLUMNS = (
    Column("gold_win_rate", "gold win rate", 3),
    Column("judge_win_rate", "judge win rate", 3),
    Column("judge_lc_win_rate", "length-controlled", 3),
    Column("gold_score", "gold score"),
    Column("rm_score", "RM score"),
    Column("rouge1", "ROUGE-1", 3),
    Column("rouge2", "ROUGE-2", 3),
    Column("rougeL", "ROUGE-L", 3),
    Column("eos_rate", "EOS rate", 3),
    Column("kl", "KL, nats"),
    Column("kl_estimate", "KL of best of n"),
    Column("distinct", "distinct responses"),
    Column("response_length", "length, tokens", 1),
)
LEGEND = {
    "unshifted": "1: same as greedy decoding",
    "marginal": "2 or 3",
    "shifted": "4 or more",
}


# ----------------------------------------------------------------------------------------- 1. verdict and main table
def outcome(result: dict, name: str) -> Outcome:
    """Return a policy's outcome: its win rate, and the gain of its scores over the first policy's."""
    measures = {"gold_score": "the gold score", "rm_score": "the reward model's score"}
    gains = {
        score: Gain(measures[score], found["ci"], number(found["mean"], found["ci"], sign="+"))
        for score, found in result["differences"].get(name, {}).items()
    }
    change = change_of(gains.get("gold_score"), gains.get("rm_score"))
    return Outcome(wins(result, name), *change, result["policies"][name]["eos_rate"])


def wins(result: dict, name: str) -> str:
    """Return a sentence with the win rates of a policy and of the first one; empty without gold score and judge."""
    policies = result["policies"]
    first = next(iter(policies))
    for key, judge in (("gold_win_rate", ""), ("judge_win_rate", ", according to the judge")):
        rate, of_first = policies[name].get(key), policies[first].get(key)
        if rate is not None:
            beside = f" ({first}: {round(100 * of_first)}%)" if name != first and of_first is not None else ""
            whom = "the references" if key == "gold_win_rate" else result["judge"]["against"]
            return f"{name} beats {whom} in {of_100(rate)} queries{beside}{judge}."
    return ""


def cells(result: dict) -> Lines:
    """Return the table as text, headings first; `-` for a missing number, no column if all rows lack it."""
    rows = {"reference": result["reference"], **result["policies"]}
    columns = [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows.values())]
    return tabulate("policy", columns, rows.items())


def overview(result: dict) -> Section:
    """Return the main table with notes on each policy's gains, the reward model and the LLM judge."""
    settings = result["args"]
    about = f"{result['num_queries']} validation queries, responses sampled at temperature {settings['temperature']}"
    judge = result.get("judge")
    judged = judge_line(judge, f"pairs with {judge['against']}") if judge else ""
    notes = filter(None, [*difference_lines(result), reward_model_line(result), judged])
    return Section(about=f"{about}; seed {settings['seed']}.", tables=[cells(result)], notes="\n".join(notes))


def difference_lines(result: dict) -> list[str]:
    """Return a line per policy with its gain over the first in each known score."""
    first, lines = next(iter(result["policies"])), []
    for name, scores in result["differences"].items():
        gains = [
            f"{score.replace('_', ' ')} {number(gain['mean'], gain['ci'], sign='+')}" for score, gain in scores.items()
        ]
        lines += [f"{name} minus {first}, paired by query: {', '.join(gains)}"] if gains else []
    return lines


def reward_model_line(result: dict) -> str:
    """Return the reward model's accuracy and its agreement with the gold score; empty without a reward model."""
    measured = result["reward_model"]
    if measured is None:
        return ""
    accuracy = number(measured["validation_accuracy"], measured["validation_accuracy_ci"], 3)
    line = f"reward model: accuracy {accuracy} on {measured['num_pairs']} validation pairs"
    if measured["gold_agreement"] is not None:
        line += f", agrees with the gold score on {measured['gold_agreement']:.3f} of them"
    return line


# -------------------------------------------------------------------------------------------------------- 2. the page
def sample_card(sample: dict, shift: dict[str, list[tuple[str, int]]]) -> Markup:
    """Return a card of a query and its responses; shift: name -> tokens and their ranks under the base model."""
    scores = {"RM": sample.get("reference_rm_score"), "gold": sample["reference_gold_score"]}
    answers = [answer("reference", sample["reference"], scores, shift.get("reference"))]
    for name, policy in sample["policies"].items():
        scores = {"RM": policy["rm_score"], "gold": policy["gold_score"]}
        answers.append(answer(name, policy["response"], scores, shift.get(name)))
    return markup.card(sample["query"], answers)


def length_section(drawn: list[Figure]) -> Section:
    """Return the section with the figures of length_figures.py."""
    caption = (
        "Wins by length: points are nine bins over the range of a policy's length ratios, hollow if a bin has fewer "
        "than ten pairs; the curve is a logistic regression on all pairs. "
        "Win rate and length: the bars are Wilson 95% intervals."
    )
    return Section("Wins and length", figures=drawn, caption=caption)


def along_section(result: dict) -> Section:
    """Return the section with the figures of along_run.py, empty without checkpoints kept along a run."""
    caption = (
        f"Each point is a checkpoint that --keep-every left; the curves start at {next(iter(result['policies']))}. "
        "Scores are paired by query. The bars are 95% intervals over queries."
    )
    return Section("Along a run", figures=along_figures(result), caption=caption, anchor="along")


def shift_lines(result: dict) -> Lines:
    """Return the share of each policy's tokens by rank under the base model."""
    shift = result["token_shift"]
    lines = [[f"tokens by rank under {shift['base']}", "1", "2 or 3", "4 or more"]]
    return lines + [[name, *(f"{100 * row[kind]:.1f}%" for kind in KINDS)] for name, row in shift["shares"].items()]


def settings_section(settings: dict, runs: list[str]) -> Markup:
    """Return the settings of the evaluation and of each run directory."""
    blocks = {"this evaluation": settings} | {run: saved for run in runs if (saved := read_settings(run))}
    parts = [markup.heading("Settings", "settings")]
    for name, block in blocks.items():
        lines = [["setting", "value"], *([key, str(value)] for key, value in flat_settings(block).items())]
        parts.append(markup.folded(name, markup.table(lines)))
    return Markup().join(parts)


def page(
    result: dict, runs: list[str], samples: list[dict], shifts: Sequence[dict] = (), sections: Page = ()
) -> list[Section | Markup]:
    """Return the page: verdict, main table, settings, the curves of `runs`, `sections`, and `samples` side by side.

    shifts: per sample, name -> tokens and their ranks under the base model.
    """
    settings = result["args"]
    notes = (
        "Gold win rate and ROUGE compare with each query's reference; ties count half; intervals are 95% Wilson "
        f"intervals. KL is to {next(iter(result['policies']))}, estimated on samples at temperature "
        f"{settings['kl_temperature']}. The RM score is read at the last token, without the EOS trick. For best-of-n, "
        "KL includes the upper bound log n - (n - 1) / n nats to the sampled policy; the next column has an estimate "
        "instead. Gains over the first policy are paired by query, with 95% bootstrap intervals."
    )
    if result.get("judge"):
        notes += (
            " Length-controlled: the judge's win rate at equal length, predicted by AlpacaEval's regression on the "
            "length difference (Dubois et al. 2024), with a 95% bootstrap interval."
        )
    pairs: list[tuple[dict, dict]] = list(zip_longest(samples, shifts, fillvalue={}))
    base = result["token_shift"]["base"]
    return [
        markup.title("Results by training stage"),
        verdict_section(outcomes_of(result, outcome)),
        markup.navigation(),
        overview(result),
        markup.quiet(notes),
        settings_section(settings, runs),
        *run_sections(runs),
        *sections,
        Section(
            "Samples side by side",
            markup.legend(base, LEGEND) + markup.table(shift_lines(result)),
            samples=[sample_card(*pair) for pair in pairs],
            anchor="samples",
        ),
        details_section(Path(settings["out"]) / "report.html"),
    ]


def details_section(report: Path, index: Path = INDEX) -> Markup:
    """Return the numbered details of N+ with links from the report's directory to the source.

    Empty if `index` doesn't exist or has no rows. The links are relative paths to the source tree, so they break if
    report.html is moved.
    """
    rows = read_details(index)
    return markup.index(os.path.relpath(ROOT, report.resolve().parent), rows) if rows else Markup()
