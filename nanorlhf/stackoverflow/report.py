"""Tables and report.html of an evaluation with several answers per question. [SO table 1]"""

from pathlib import Path
from typing import Literal

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from nanorlhf.report.page import aligned, answer, curves, figures, markup, write_page
from nanorlhf.stackoverflow.figures import metric_at_k_figures, spearman_figure

# metric in eval.json: heading, digits
METRICS = {
    "gold_score": ("gold score", 2),
    "rm_regression": ("regression RM", 3),
    "rm_contrastive": ("contrastive RM", 2),
    "bleu": ("SacreBLEU", 3),
    "rouge1": ("ROUGE-1", 3),
    "rouge2": ("ROUGE-2", 3),
    "bertscore": ("BERTScore", 3),
}
RANKS = {"within": "within each question", "pooled": "over all answers"}
Lines = list[list[str]]


def metrics_of(result: dict) -> list[str]:
    """The measured metrics, in table order."""
    measured = next(iter(result["policies"].values()))["metrics"]
    return [metric for metric in METRICS if metric in measured]


def means(result: dict) -> Lines:
    """[SO table 1] Mean and standard deviation over all answers, per metric and policy."""
    metrics = metrics_of(result)
    lines = [["mean ± std over answers", *(METRICS[metric][0] for metric in metrics), "EOS rate", "length, tokens"]]
    known = result["reference"]
    cells = [f"{known[metric]:.{METRICS[metric][1]}f}" if metric in known else "-" for metric in metrics]
    lines.append(["the site's best answer", *cells, "-", "-"])
    for name, row in result["policies"].items():
        cells = []
        for metric in metrics:
            digits, numbers = METRICS[metric][1], row["metrics"][metric]
            cells.append(f"{numbers['mean']:.{digits}f} ± {numbers['std']:.{digits}f}")
        lines.append([name, *cells, f"{row['eos_rate']:.3f}", f"{row['response_length']:.1f}"])
    return lines


def best_of(result: dict) -> Lines:
    """[SO metric@k] Table 2: the best of all n answers to a question, mean over questions."""
    metrics, n = metrics_of(result), result["num_samples"]
    lines = [[f"metric@{n}", *(METRICS[metric][0] for metric in metrics)]]
    for name, row in result["policies"].items():
        lines.append([name, *(f"{row['metrics'][m]['at_k'][-1]:.{METRICS[m][1]}f}" for m in metrics)])
    return lines


def reciprocal_ranks(result: dict) -> Lines:
    """[SO mrr@k] Table 3: how early a useful answer comes when a metric ranks the answers; empty without labels."""
    metrics, n = metrics_of(result), result["num_samples"]
    labelled = {name: row for name, row in result["policies"].items() if "mrr_at_k" in row}
    lines = [[f"MRR@{n}", "questions", *(METRICS[metric][0] for metric in metrics)]]
    for name, row in labelled.items():
        lines.append([name, str(row["num_labelled"]), *(f"{row['mrr_at_k'][metric][-1]:.3f}" for metric in metrics)])
    return lines if labelled else []


def differences(result: dict, key: Literal["differences", "differences_of_best"]) -> Lines:
    """[SO significance] Each policy against the one before it, over all answers or by the best answer per question."""
    names = list(result["policies"])
    neighbours = set(zip(names[1:], names, strict=False))
    scores = "all answers" if key == "differences" else f"best of {result['num_samples']}"
    lines = [[f"difference, {scores}", "metric", "of means", "95% interval", "KS", "p", "Mann-Whitney p"]]
    for row in result[key]:
        if (row["ours"], row["theirs"]) in neighbours:
            heading, digits = METRICS[row["metric"]]
            low, high = row["mean_difference_ci"]
            interval = f"[{low:+.{digits}f}, {high:+.{digits}f}]"
            lines.append(
                [f"{row['ours']} - {row['theirs']}", heading, f"{row['mean_difference']:+.{digits}f}", interval,
                 f"{row['ks']:.3f}", f"{row['ks_p']:.1e}", f"{row['mann_whitney_p']:.1e}"]
            )  # fmt: skip
    return lines


def notes(result: dict) -> list[str]:
    """What the tables rest on, and what was left out."""
    settings = result["args"]
    sentences = [
        f"{result['num_questions']} questions, {result['num_samples']} answers each; temperature "
        f"{settings['temperature']}, top-k {settings['top_k']}, top-p {settings['top_p']}, no repeated "
        f"{settings['no_repeat_ngram_size']}-gram, seed {settings['seed']}."
    ]
    if result["encoder"]:
        sentences.append(f"BERTScore is the raw F1 with {result['encoder']}.")
    else:
        sentences.append("BERTScore is left out: --encoder names the directory or Hub id of an encoder.")
    if not reciprocal_ranks(result):
        sentences.append("MRR@k is left out: it needs --labels, which `python -m data.label` makes.")
    return sentences


def tables(result: dict) -> str:
    """All tables and notes, for the terminal."""
    parts = [means(result), best_of(result), reciprocal_ranks(result)]
    parts += [differences(result, key) for key in ("differences", "differences_of_best")]
    return "\n\n".join([*(aligned(lines) for lines in parts if len(lines) > 1), "\n".join(notes(result))])


# ------------------------------------------------------------------------------------------------------------ the page
def sample_card(sample: dict) -> Markup:
    """A question, the site's answer, and the first answer of each policy."""
    answers = [answer("the site's best answer", sample["reference"], {})]
    for name, column in sample["policies"].items():
        numbers = {METRICS[metric][0]: column[0][metric] for metric in METRICS if metric in column[0]}
        answers.append(answer(name, column[0]["response"], numbers))
    return markup.card(sample["query"], answers)


def write_report(
    path: Path, result: dict, measured: dict[str, dict[str, np.ndarray]], runs: list[str], samples: list[dict]
) -> None:
    """Write report.html, whole or not at all: tables, figures, the curves of `runs`, and `samples` side by side.

    measured: policy -> metric -> (questions, n), from which `result` was computed.
    """
    metrics = metrics_of(result)
    named: dict[str, dict[str, ArrayLike]]
    named = {name: {METRICS[metric][0]: columns[metric] for metric in metrics} for name, columns in measured.items()}
    curves_at_k = metric_at_k_figures(named)
    heat_maps = [
        spearman_figure(
            name,
            [METRICS[metric][0] for metric in row["spearman"]["metrics"]],
            np.array(row["spearman"]["matrix"]),
        )
        for name, row in result["policies"].items()
    ]
    n = result["num_samples"]
    ranked = reciprocal_ranks(result)
    parts = [
        markup.title("What each stage gained"),
        markup.quiet(" ".join(notes(result))),
        markup.table(means(result)),
        markup.heading(f"The best of {n}"),
        markup.table(best_of(result)),
        figures(
            curves_at_k,
            "Expected best score among k answers, mean over questions; k = 1 is the mean score. A rising curve means "
            "that the answers differ, so that choosing among them pays.",
        ),
        markup.heading("How early a useful answer comes") + markup.table(ranked) if ranked else "",
        markup.heading("Do they differ?"),
        markup.table(differences(result, "differences")),
        markup.quiet(
            "The interval resamples whole questions. Both p-values treat all answers as independent; answers to the "
            "same question are not, so the p-values are too small. The best answers are one a question, which mends "
            "that:"
        ),
        markup.table(differences(result, "differences_of_best")),
        markup.heading("Do the metrics agree?"),
        figures(
            heat_maps,
            f"Spearman's rank correlation, ranks {RANKS[result['args']['ranks']]}. 1: both metrics give the same "
            "order; 0: their orders are unrelated; a dash: one metric gives all answers the same score.",
        ),
        *(text for _, text in sorted(map(curves, runs))),
        markup.heading("Samples side by side"),
        markup.search(),
        *map(sample_card, samples),
    ]
    write_page(path, str(result["args"]["out"]), parts)
