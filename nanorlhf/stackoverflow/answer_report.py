"""Tables and report.html of an evaluation with several answers per question. [SO table 1]"""

from typing import Literal

import numpy as np
from markupsafe import Markup

from nanorlhf.report.page import Column, Lines, Page, Section, answer, markup, number, tabulate
from nanorlhf.report.run_curves import run_sections
from nanorlhf.report.verdict import Gain, Outcome, change_of, outcomes_of, verdict_section
from nanorlhf.stackoverflow.figures import metric_at_k_figures, spearman_figure
from nanorlhf.training.run_directory import read_settings

COLUMNS = (
    Column("gold_score", "gold score"),
    Column("rm_regression", "regression RM", 3),
    Column("rm_contrastive", "contrastive RM"),
    Column("bleu", "SacreBLEU", 3),
    Column("rouge1", "ROUGE-1", 3),
    Column("rouge2", "ROUGE-2", 3),
    Column("bertscore", "BERTScore", 3),
)
ENDINGS = (Column("eos_rate", "EOS rate", 3), Column("response_length", "length, tokens", 1))
METRICS = {column.key: column for column in COLUMNS}
RANKS = {"within": "within each question", "pooled": "over all answers"}
MODELS = {"rm_regression": "regression_model", "rm_contrastive": "contrastive_model"}  # metric -> setting


def columns_of(result: dict) -> list[Column]:
    """Return the columns of the measured metrics."""
    measured = next(iter(result["policies"].values()))["metrics"]
    return [column for column in COLUMNS if column.key in measured]


def means(result: dict) -> Lines:
    """[SO table 1] Return mean and standard deviation over all answers, per metric and policy."""
    policies = [(name, row | row["metrics"]) for name, row in result["policies"].items()]
    rows = [("the site's best answer", result["reference"]), *policies]
    return tabulate("mean ± std over answers", [*columns_of(result), *ENDINGS], rows)


def best_of(result: dict) -> Lines:
    """[SO metric@k] Return Table 2: the best of all n answers to a question, mean over questions."""
    rows = [
        (name, {metric: measured["at_k"][-1] for metric, measured in row["metrics"].items()})
        for name, row in result["policies"].items()
    ]
    return tabulate(f"metric@{result['num_samples']}", columns_of(result), rows)


def reciprocal_ranks(result: dict) -> Lines:
    """[SO mrr@k] Return Table 3: mean reciprocal ranks of useful answers, by metric; empty without labels."""
    metrics = [Column("chance", "chance"), *columns_of(result)]
    columns = [Column("num_labelled", "questions", 0), *(column._replace(digits=3) for column in metrics)]
    rows = [
        (name, row | {metric: at_k[-1] for metric, at_k in row["mrr_at_k"].items()})
        for name, row in result["policies"].items()
        if "mrr_at_k" in row
    ]
    return tabulate(f"MRR@{result['num_samples']}", columns, rows) if rows else []


def ranks_over_chance(result: dict) -> Lines:
    """Return how far each metric's mean reciprocal rank is above a random order's; empty without labels."""
    columns = [column._replace(digits=3, sign="+") for column in columns_of(result)]
    rows = [(name, row["mrr_over_chance"]) for name, row in result["policies"].items() if "mrr_over_chance" in row]
    return tabulate(f"MRR@{result['num_samples']} - chance", columns, rows) if rows else []


def differences(result: dict, key: Literal["differences", "differences_of_best"]) -> Lines:
    """[SO significance] Compare each policy with the one before it, over all answers or the best one per question."""
    names = list(result["policies"])
    neighbours = set(zip(names[1:], names, strict=False))
    scores = "all answers" if key == "differences" else f"best of {result['num_samples']}"
    lines = [[f"difference, {scores}", "metric", "of means", "95% interval", "KS", "KS p", "Mann-Whitney p"]]
    for row in result[key]:
        if (row["ours"], row["theirs"]) in neighbours:
            _, heading, digits, *_ = METRICS[row["metric"]]
            low, high = row["mean_difference_ci"]
            interval = f"[{low:+.{digits}f}, {high:+.{digits}f}]"
            lines.append(
                [f"{row['ours']} - {row['theirs']}", heading, f"{row['mean_difference']:+.{digits}f}", interval,
                 f"{row['ks']:.3f}", f"{row['ks_p']:.1e}", f"{row['mann_whitney_p']:.1e}"]
            )  # fmt: skip
    return lines


def outcome(result: dict, name: str) -> Outcome:
    """Return a policy's outcome relative to the one before it: gold score, and score of the reward model it trained on.

    Without either, SacreBLEU is used.
    """
    names, found = list(result["policies"]), [column.key for column in columns_of(result)]
    before = names[names.index(name) - 1] if name != names[0] else None
    rewarded = trainer(result, name, [metric for metric in found if metric in MODELS])
    true = "gold_score" if "gold_score" in found else None if rewarded else "bleu"
    shown = true or rewarded or "bleu"
    _, heading, digits, *_ = METRICS[shown]
    means = {policy: row["metrics"][shown]["mean"] for policy, row in result["policies"].items()}
    beside = f" ({before}: {means[before]:.{digits}f})" if before else ""
    level = f"The mean {heading} of {name} is {means[name]:.{digits}f}{beside}."
    gains = {
        row["metric"]: Gain(measure_of(row["metric"]), row["mean_difference_ci"], gain_cell(row))
        for row in result["differences"]
        if (row["ours"], row["theirs"]) == (name, before)
    }
    return Outcome(level, *change_of(gains.get(true), gains.get(rewarded)), result["policies"][name]["eos_rate"])


def trainer(result: dict, name: str, models: list[str]) -> str | None:
    """Return the reward model in the settings of a policy's run, else the first one."""
    words, settings = result["args"]["policies"], result["args"]
    reward_model = read_settings(words[words.index(name) + 1]).get("reward_model")
    return next((model for model in models if settings[MODELS[model]] == reward_model), models[0] if models else None)


def measure_of(metric: str) -> str:
    """Return a metric's name for use within sentences."""
    return f"the {METRICS[metric].heading}" + ("'s score" if metric in MODELS else "")


def gain_cell(row: dict) -> str:
    return number(row["mean_difference"], row["mean_difference_ci"], METRICS[row["metric"]].digits, "+")


def notes(result: dict) -> str:
    """Return sentences on the evaluation's settings and on omitted metrics."""
    settings = result["args"]
    sentences = [
        f"{result['num_questions']} questions, {result['num_samples']} answers each; temperature "
        f"{settings['temperature']}, top-k {settings['top_k']}, top-p {settings['top_p']}, no repeated "
        f"{settings['no_repeat_ngram_size']}-gram, seed {settings['seed']}."
    ]
    if result["encoder"]:
        sentences.append(f"BERTScore is the raw F1 with {result['encoder']}.")
    else:
        sentences.append("BERTScore is omitted: pass an encoder's directory or Hub id with --encoder.")
    if not reciprocal_ranks(result):
        sentences.append("MRR@k is omitted: it needs --labels, written by `python -m data.label`, or --useful-from.")
    return " ".join(sentences)


# ------------------------------------------------------------------------------------------------------------ the page
def sample_card(sample: dict) -> Markup:
    """Return a card of a question, the site's best answer, and the first answer of each policy."""
    answers = [answer("the site's best answer", sample["reference"], {})]
    for name, column in sample["policies"].items():
        numbers = {heading: column[0][metric] for metric, heading, *_ in COLUMNS if metric in column[0]}
        answers.append(answer(name, column[0]["response"], numbers))
    return markup.card(sample["query"], answers)


def page(result: dict, runs: list[str], samples: list[dict]) -> Page:
    """Return the page: tables, figures, the curves of `runs`, and `samples` side by side."""
    policies = result["policies"]
    at_k = {
        column.heading: {name: row["metrics"][column.key]["at_k"] for name, row in policies.items()}
        for column in columns_of(result)
    }
    heat_maps = []
    for name, row in policies.items():
        headings = [METRICS[metric].heading for metric in row["spearman"]["metrics"]]
        heat_maps.append(spearman_figure(name, headings, np.array(row["spearman"]["matrix"])))
    return [
        markup.title("Results by training stage"),
        verdict_section(outcomes_of(result, outcome)),
        Section(about=notes(result), tables=[means(result)]),
        Section(
            f"Best of {result['num_samples']} answers",
            tables=[best_of(result)],
            figures=metric_at_k_figures(at_k),
            caption="Expected best score among k answers, mean over questions; k = 1 is the mean score. If the curve "
            "rises, the answers differ and choosing among them helps.",
        ),
        Section("Rank of the first useful answer", tables=[reciprocal_ranks(result), ranks_over_chance(result)]),
        Section(
            "Differences between policies",
            tables=[differences(result, "differences")],
            notes="The interval resamples whole questions. Both p-values treat all answers as independent, but answers "
            "to the same question aren't, so the p-values are too small. The next table avoids this: it has only the "
            "best answer to each question.",
        ),
        Section(tables=[differences(result, "differences_of_best")]),
        Section(
            "Agreement of metrics",
            figures=heat_maps,
            caption=f"Spearman's rank correlation, ranks {RANKS[result['args']['ranks']]}. 1: both metrics give the "
            "same order; 0: the orders are unrelated; dash: a metric gives all answers the same score.",
        ),
        *run_sections(runs),
        Section("Samples side by side", samples=list(map(sample_card, samples))),
    ]
