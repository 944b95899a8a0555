"""What all reports share: the table for the terminal, figures, and report.html, of which page.html is the template."""

import base64
import io
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorlhf.metrics.token_shift import KINDS, kind_of
from nanorlhf.report.details_index import INDEX, ROOT, read_details
from nanorlhf.training.run_directory import Rows, read_metrics, read_settings

# column of the table: key in eval.json, heading, digits
COLUMNS = (
    ("gold_win_rate", "gold win rate", 3),
    ("judge_win_rate", "judge win rate", 3),
    ("gold_score", "gold score", 2),
    ("rm_score", "RM score", 2),
    ("rouge1", "ROUGE-1", 3),
    ("rouge2", "ROUGE-2", 3),
    ("rougeL", "ROUGE-L", 3),
    ("eos_rate", "EOS rate", 3),
    ("kl", "KL, nats", 2),
    ("kl_estimate", "KL of best of n", 2),
    ("distinct", "distinct responses", 2),
    ("response_length", "length, tokens", 1),
)
LEGEND = {
    "unshifted": "first: greedy decoding writes it too",
    "marginal": "second or third",
    "shifted": "fourth or lower",
}
matplotlib.rcParams["text.parse_math"] = False  # names in figures are text: `$\\bad$` is no mathematics
BLUE, ORANGE, GREY = "#1f5fa8", "#c4620a", "#8a8f98"
# colour and marker of each line, distinct in greyscale too; reused where there are more lines
LINES = (
    *((BLUE, "o"), (ORANGE, "s"), ("#2c8a57", "^"), ("#8a4fa3", "D")),
    *((GREY, "v"), ("#1c2024", "x"), ("#c2447a", "P"), ("#9a7b1c", "*")),
)
# the template's macros, which return markup; whatever text they are given is escaped
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)
TEMPLATES.filters["kind"] = kind_of
markup: Any = TEMPLATES.get_template("page.html").module


# ------------------------------------------------------------------------------------------------------- 1. the table
def cells(result: dict) -> list[list[str]]:
    """The table as text, headings first; `-` where a row lacks a number, no column where all rows lack it."""
    rows = {"reference": result["reference"], **result["policies"]}
    columns = [column for column in COLUMNS if any(row.get(column[0]) is not None for row in rows.values())]
    lines = [["policy", *(heading for _, heading, _ in columns)]]
    for name, row in rows.items():
        line = [name]
        for key, _, digits in columns:
            text = "-" if row.get(key) is None else f"{row[key]:.{digits}f}"
            if row.get(f"{key}_ci"):
                low, high = row[f"{key}_ci"]
                text += f" [{low:.3f}, {high:.3f}]"
            line.append(text)
        lines.append(line)
    return lines


def table(result: dict) -> str:
    """The table for the terminal, with a line about the reward model and one about the LLM judge."""
    lines = [*difference_lines(result), reward_model_line(result), judge_line(result)]
    return "\n".join([aligned(cells(result)), *filter(None, lines)])


def aligned(lines: list[list[str]]) -> str:
    """Lines of cells for the terminal: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        padded = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        texts.append("  ".join([line[0].ljust(widths[0]), *padded]))
    return "\n".join(texts)


def difference_lines(result: dict) -> list[str]:
    """What each policy gains over the first, by the scores that are known."""
    first, lines = next(iter(result["policies"])), []
    for name, scores in result["differences"].items():
        gains = [
            f"{score.replace('_', ' ')} {gain['mean']:+.2f} [{gain['ci'][0]:+.2f}, {gain['ci'][1]:+.2f}]"
            for score, gain in scores.items()
        ]
        lines += [f"{name} against {first}, query by query: {', '.join(gains)}"] if gains else []
    return lines


def reward_model_line(result: dict) -> str:
    """The reward model's accuracy, and how often the gold score agrees with it; empty without a reward model."""
    measured = result["reward_model"]
    if measured is None:
        return ""
    low, high = measured["validation_accuracy_ci"]
    agreement = measured["gold_agreement"]
    return (
        f"reward model: accuracy {measured['validation_accuracy']:.3f} [{low:.3f}, {high:.3f}] on "
        f"{measured['num_pairs']} validation pairs"
        + (f", agrees with the gold score on {agreement:.3f} of them" if agreement is not None else "")
    )


def judge_line(result: dict) -> str:
    """The judge, the pairs without a verdict and why, and how often the reward model agrees. [N+ 17]"""
    judge = result.get("judge")
    if not judge:
        return ""
    parts = [f"judge {judge['name']}: a verdict on {judge['judge_pairs']} pairs with {judge['against']}"]
    parts.append(f"{judge['judge_unparsed']} unparsed, {judge['judge_unanswered']} unanswered")
    if "num_calls" in judge:
        parts.append(f"{judge['num_calls']} calls")
    if judge["first_rate"] is not None:
        parts.append(f"A preferred in {judge['first_rate']:.3f} of its answers")
    if judge["rm_agreement"] is not None:
        low, high = judge["rm_agreement_ci"]
        parts.append(
            f"the reward model agrees on {judge['rm_agreement']:.3f} [{low:.3f}, {high:.3f}] of the "
            f"{judge['rm_agreement_pairs']} without ties"
        )
    why = judge.get("stopped") or judge.get("last_error")
    return "; ".join(parts) + (f"; {'stopped asking' if judge.get('stopped') else 'last error'}: {why}" if why else "")


# ------------------------------------------------------------------------------------------------------ 2. the figures
def series(rows: Rows, key: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """The points (x, metric) of the rows that have both: two arrays (points,)."""
    points = [(row[x], row[key]) for row in rows if key in row and x in row]
    xs, values = np.array(points, dtype=float).reshape(-1, 2).T
    return xs, values


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Running mean over `width` points, fewer at the ends."""
    kernel = np.ones(max(1, min(width, len(values))))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def draw(axes: Axes, rows: Rows, key: str, label: str, color: str, smoothed: bool = False) -> None:
    """The curve of one metric; smoothed: a running mean, with the single points faint behind it."""
    steps, values = series(rows, key)
    if smoothed:
        axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
        values = smooth(values, len(values) // 20)
    axes.plot(steps, values, color=color, label=label, linewidth=1.8, marker="o" if len(steps) < 12 else None, ms=4)


def draw_against_kl(axes: Axes, rows: Rows, scores: Sequence[tuple[str, str, str]]) -> None:
    """Scores against the distance from the reference, a point per update; scores: metric, label, color."""
    for key, label, color in scores:
        distance, value = series(rows, key, "objective/kl")
        axes.scatter(np.sqrt(distance.clip(min=0)), value - value[:1], s=14, color=color, label=label, alpha=0.8)
    axes.legend(frameon=False)


def panel(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with a single panel, so that a narrow screen can stack them."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    label_axes(axes, title, x_label, y_label)
    return figure, axes


def label_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """The looks of every panel."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def sft_figures(rows: Rows) -> list[Figure]:
    """Training and validation loss."""
    figure, axes = panel("Loss", "step", "nats per token")
    draw(axes, rows, "loss", "training batch, running mean", BLUE, smoothed=True)
    draw(axes, rows, "validation_loss", "validation", ORANGE)
    axes.legend(frameon=False)
    return [figure]


def rm_figures(rows: Rows) -> list[Figure]:
    """Loss and accuracy; for DPO also the implicit rewards."""
    regression = any("absolute_error" in row for row in rows)
    loss, axes = panel("Loss", "step", "squared error" if regression else "-log sigmoid(margin), nats")
    draw(axes, rows, "loss", "training batch, running mean", BLUE, smoothed=True)
    draw(axes, rows, "validation_loss", "validation", ORANGE)
    title = "Scores with the right sign" if regression else "Pairs ranked as the labeller did"
    accuracy, axes = panel(title, "step", "share")
    draw(axes, rows, "accuracy", "training batch, running mean", BLUE, smoothed=True)
    draw(axes, rows, "validation_accuracy", "validation", ORANGE)
    axes.axhline(0.5, color=GREY, linewidth=1, linestyle=":", label="chance")
    axes.legend(frameon=False, loc="lower right")
    if not any("chosen_reward" in row for row in rows):
        return [loss, accuracy]
    rewards, axes = panel("Implicit rewards", "step", "beta * log(policy / reference)")
    for key, label, color in (("chosen_reward", "chosen", BLUE), ("rejected_reward", "rejected", ORANGE)):
        draw(axes, rows, key, label, color, smoothed=True)
    axes.legend(frameon=False)
    return [loss, accuracy, rewards]


def ppo_figures(rows: Rows) -> list[Figure]:
    """Score, KL, length and EOS rate; where the run logged gold scores, also both scores against sqrt(KL)."""
    scores = [("objective/score", "proxy: the reward model", BLUE)]
    if any("gold_score" in row for row in rows):
        scores.append(("gold_score", "gold: the labeller, hidden from PPO", ORANGE))
    figure, axes = panel("Score of the rollouts", "update", "score")
    for key, label, color in scores:
        draw(axes, rows, key, label, color)
    axes.legend(frameon=False, loc="lower right")
    figures = [figure]
    for key, title, unit in (
        ("objective/kl", "KL to the reference", "nats per response"),
        ("response_length", "Response length", "tokens"),
        ("eos_rate", "Responses that end in EOS", "share"),
    ):
        figure, axes = panel(title, "update", unit)
        draw(axes, rows, key, title, BLUE)
        if key == "eos_rate":
            axes.set_ylim(0, 1.03)
        figures.append(figure)
    if len(scores) == 2:
        figure, axes = panel("What the KL buys", "sqrt(KL)", "score, change since the first update")
        draw_against_kl(axes, rows, scores)
        figures.append(figure)
    return figures


def svg(figure: Figure) -> bytes:
    """A figure as SVG; the same figure always gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "nanorlhf"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def image(figure: Figure) -> Markup:
    """A figure as an <img> with its SVG inside."""
    return markup.image(figure.axes[0].get_title("left"), base64.b64encode(svg(figure)).decode())


def figures(drawn: Sequence[Figure], caption: str = "") -> Markup:
    """Figures side by side, with one caption."""
    return markup.figures(list(map(image, drawn)), caption)


def curves(run: str) -> tuple[int, Markup]:
    """The stage of a run directory (1 SFT, 2 reward model or DPO, 3 PPO, 4 no metrics), and its curves."""
    rows = read_metrics(run)
    name = Path(run).name
    if not rows:
        none = f"{run} holds no metrics.jsonl, so there are no curves."
        return 4, markup.heading(name) + markup.paragraph(none)
    last = rows[-1]
    if {"objective/kl", "objective/score", "eos_rate"} <= last.keys():
        title = str(read_settings(run).get("algorithm", "PPO")).upper()
        stage, drawn = 3, ppo_figures(rows)
        caption = (
            f"{len(rows)} updates; the last one has a score of {last['objective/score']:.2f}, a KL of "
            f"{last['objective/kl']:.2f} nats and an EOS rate of {last['eos_rate']:.0%}. Three signs of trouble: a "
            "first score far from 0, the mean score of the references; a KL that explodes; a falling EOS rate."
        )
    elif any("accuracy" in row for row in rows):
        stage, title, drawn = 2, "reward model", rm_figures(rows)
        caption = "Accuracy on a training batch is noisy; validation uses all held-out rows."
        if any("chosen_reward" in row for row in rows):
            title = "DPO"
            caption += " The margin may grow while both rewards fall: then both responses became less likely."
    else:
        stage, title, drawn = 1, "supervised fine-tuning", sft_figures(rows)
        caption = "Negative log-likelihood of the reference responses."
    return stage, markup.heading(f"{name}: {title}") + figures(drawn, caption)


# --------------------------------------------------------------------------------------------------------- 3. the page
def answer(
    name: str, text: str, scores: dict[str, float | None], pieces: list[tuple[str, int]] | None = None
) -> Markup:
    """A response and its scores; with `pieces` (tokens and their ranks), coloured by token."""
    known = " · ".join(f"{label} {value:z.2f}" for label, value in scores.items() if value is not None)
    return markup.answer(name, text.strip(), known, pieces)


def sample_card(sample: dict, shift: dict[str, list[tuple[str, int]]]) -> Markup:
    """A query and its responses side by side; shift: name -> tokens and their ranks under the base model."""
    scores = {"RM": sample.get("reference_rm_score"), "gold": sample["reference_gold_score"]}
    answers = [answer("reference", sample["reference"], scores, shift.get("reference"))]
    for name, policy in sample["policies"].items():
        scores = {"RM": policy["rm_score"], "gold": policy["gold_score"]}
        answers.append(answer(name, policy["response"], scores, shift.get(name)))
    return markup.card(sample["query"], answers)


def length_section(drawn: list[Figure]) -> Markup:
    """The figures of length_figures.py with their caption."""
    caption = (
        "Wins by length: each point is a ninth of the range of a policy's length ratios, hollow if it has fewer than "
        "ten pairs; the curve is a logistic fit to all pairs, absent where the ratio separates wins from losses. "
        "Win rate and length: with Wilson's 95% interval."
    )
    return markup.heading("Wins and length") + figures(drawn, caption)


def shift_lines(result: dict) -> list[list[str]]:
    """The share of each policy's tokens by their rank under the base model."""
    shift = result["token_shift"]
    lines = [[f"tokens by rank under {shift['base']}", "1", "2 or 3", "4 or more"]]
    return lines + [[name, *(f"{100 * row[kind]:.1f}%" for kind in KINDS)] for name, row in shift["shares"].items()]


def settings_section(settings: dict, runs: list[str]) -> Markup:
    """The settings of the evaluation and of each run directory."""
    blocks = {"this evaluation": settings} | {run: saved for run in runs if (saved := read_settings(run))}
    parts = [markup.heading("Settings", "settings")]
    for name, block in blocks.items():
        lines = [["setting", "value"], *([key, str(value)] for key, value in block.items())]
        parts.append(markup.folded(name, markup.table(lines)))
    return Markup().join(parts)


def write_report(
    path: Path,
    result: dict,
    runs: list[str],
    samples: list[dict],
    shifts: Sequence[dict] = (),
    sections: Sequence[Markup] = (),
) -> None:
    """Write report.html, whole or not at all: settings, the table, the curves of `runs`, and `samples` side by side.

    shifts: per sample, name -> tokens and their ranks under the base model. sections: each with its heading.
    """
    settings = result["args"]
    about = f"{result['num_queries']} validation queries, responses sampled at temperature {settings['temperature']}"
    notes = (
        "Gold win rate and ROUGE are against each query's reference; a tie counts half; intervals are Wilson's, 95%. "
        f"KL is to {next(iter(result['policies']))}, estimated on samples at temperature {settings['kl_temperature']}. "
        "The RM score is the one at the last token, without the EOS trick. The best of n is at most log n - (n - 1) / "
        "n nats from the policy it samples, which counts as its KL; an estimate stands beside it. The gains over the "
        "first policy are paired by query, with 95% bootstrap intervals."
    )
    pairs: list[tuple[dict, dict]] = list(zip_longest(samples, shifts, fillvalue={}))
    parts = [
        markup.title("What each stage gained"),
        markup.quiet(f"{about}; seed {settings['seed']}."),
        markup.navigation(),
        markup.table(cells(result)),
        *map(markup.paragraph, difference_lines(result)),
        markup.paragraph(reward_model_line(result)),
        markup.paragraph(judge_line(result)),
        markup.quiet(notes),
        settings_section(settings, runs),
        *(text for _, text in sorted(map(curves, runs))),
        *sections,
        markup.heading("Samples side by side", "samples"),
        markup.legend(result["token_shift"]["base"], LEGEND),
        markup.table(shift_lines(result)),
        markup.search(),
        *(sample_card(*pair) for pair in pairs),
        details_section(path),
    ]
    write_page(path, str(settings["out"]), parts)


def details_section(report: Path, index: Path = INDEX) -> Markup:
    """The numbered details of N+, with links from the report's directory to the source.

    Empty where `index` does not exist or has no rows. The links are relative paths to the source tree, so they break
    where report.html is moved alone.
    """
    rows = read_details(index)
    return markup.index(os.path.relpath(ROOT, report.resolve().parent), rows) if rows else Markup()


def write_page(path: Path, title: str, parts: Sequence[str]) -> None:
    """Write a page, whole or not at all; parts that are not Markup are escaped."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        page = markup.page(title, parts)
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair, in a path
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
