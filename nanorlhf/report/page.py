"""What all reports share: the table for the terminal, figures, and report.html, one file that needs no network."""

import base64
import html
import io
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorlhf.metrics.token_shift import KINDS, to_html
from nanorlhf.report.details_index import details_section
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
    ("response_length", "length, tokens", 1),
)
LEGEND = {
    "unshifted": "first: greedy decoding writes it too",
    "marginal": "second or third",
    "shifted": "fourth or lower",
}
matplotlib.rcParams["text.parse_math"] = False  # names in figures are text: `$\\bad$` is no mathematics
BLUE, ORANGE, GREY = "#1f5fa8", "#c4620a", "#8a8f98"
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2024; background: #fff; margin: 0 auto; max-width: 68rem;
  padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p, figcaption { max-width: 46rem; } .quiet, figcaption { color: #565d66; font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .6rem; text-align: right; vertical-align: bottom; border-bottom: 1px solid #dfe3e8; }
td { white-space: nowrap; } th { font-weight: 600; color: #565d66; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
td:first-child { white-space: normal; } h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
nav a { margin-right: 1rem; } a { color: #1f5fa8; } code { font-size: .85em; overflow-wrap: anywhere; }
.blocks { columns: 22rem auto; column-gap: 2.5rem; } .blocks .wide { break-inside: avoid; margin-bottom: 1.2rem; }
details { margin: .3rem 0; } summary { cursor: pointer; } figure details table { margin-top: .5rem; }
.unshifted { background: #e4eefa; } .marginal { background: #ffecb0; } .shifted { background: #ffc8bf; }
.legend span, .answers span { border-radius: 2px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
input[type=search] { font: inherit; padding: .35rem .6rem; width: min(100%, 24rem); box-sizing: border-box; }
small { color: #565d66; } figure { margin: 1rem 0 1.6rem; }
figure div { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
figure img { width: 100%; max-width: 33rem; break-inside: avoid; } figure .wide { display: block; }
figure .wide img { width: auto; max-width: none; height: 17rem; }
.sample { border: 1px solid #dfe3e8; border-radius: 6px; margin: 0 0 1rem; overflow: hidden; break-inside: avoid; }
pre { margin: 0; padding: .7rem 1rem; background: #f5f7f9; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .85rem/1.45 ui-monospace, monospace; } .sample > pre { max-height: 22rem; overflow-y: auto; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
.answers div { padding: .6rem 1rem; border-top: 1px solid #dfe3e8; overflow-wrap: anywhere; }
.answers b { display: block; font-size: .85rem; color: #1f5fa8; }
@media (max-width: 40rem) { body { padding: 1rem .8rem 3rem; } table { font-size: .85rem; }
  th, td { padding: .35rem .45rem; } }
@media print { @page { margin: 15mm; } body { max-width: none; padding: 0; font-size: 10.5pt; }
  nav, .search { display: none; } .blocks { columns: 14rem auto; } .wide { margin-bottom: .8rem; }
  .index::details-content { content-visibility: visible; block-size: auto; }
  .sample > pre { max-height: none; } .wide { overflow: visible; }
  table { font-size: 8pt; } th, td { padding: .2rem .3rem; } tr, h2, h3 { break-inside: avoid; break-after: auto; }
  h2, h3 { break-after: avoid; } figure img { max-width: 48%; } figure div { display: block; }
  figure .wide img { max-width: 100%; height: auto; } a { color: inherit; text-decoration: none; } }
"""
SEARCH = """<p class="search">
<input type="search" id="search" placeholder="search words" aria-label="search the samples">
<output id="found" class="quiet"></output></p>
<script>
addEventListener("DOMContentLoaded", () => {
  const cards = [...document.querySelectorAll(".sample")], texts = cards.map(card => card.textContent.toLowerCase());
  document.getElementById("search").addEventListener("input", event => {
    const words = event.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
    const hits = texts.map(text => words.every(word => text.includes(word)));
    cards.forEach((card, i) => { card.hidden = !hits[i]; });
    document.getElementById("found").textContent =
      words.length ? `${hits.filter(Boolean).length} of ${cards.length}` : "";
  });
});
</script>"""


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
    return "\n".join([aligned(cells(result)), *filter(None, [reward_model_line(result), judge_line(result)])])


def aligned(lines: list[list[str]]) -> str:
    """Lines of cells for the terminal: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        padded = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        texts.append("  ".join([line[0].ljust(widths[0]), *padded]))
    return "\n".join(texts)


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


def panel(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A figure with a single panel, so that a narrow screen can stack them."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


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
        for key, label, color in scores:
            distance, value = series(rows, key, "objective/kl")
            axes.scatter(np.sqrt(distance.clip(min=0)), value - value[:1], s=14, color=color, label=label, alpha=0.8)
        axes.legend(frameon=False)
        figures.append(figure)
    return figures


def image(figure: Figure) -> str:
    """A figure as an <img> with its SVG inside."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "nanorlhf"}):  # the same figure always gives the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(figure.axes[0].get_title("left"))}" src="data:image/svg+xml;base64,{data}">'


def curves(run: str) -> tuple[int, str]:
    """The stage of a run directory (1 SFT, 2 reward model or DPO, 3 PPO, 4 no metrics), and its curves as HTML."""
    rows = read_metrics(run)
    name = html.escape(Path(run).name)
    if not rows:
        return 4, f"<h2>{name}</h2><p>{html.escape(run)} holds no metrics.jsonl, so there are no curves.</p>"
    last = rows[-1]
    if {"objective/kl", "objective/score", "eos_rate"} <= last.keys():
        stage, title, figures = 3, "PPO", ppo_figures(rows)
        caption = (
            f"{len(rows)} updates; the last one has a score of {last['objective/score']:.2f}, a KL of "
            f"{last['objective/kl']:.2f} nats and an EOS rate of {last['eos_rate']:.0%}. Three signs of trouble: a "
            "first score far from 0, the mean score of the references; a KL that explodes; a falling EOS rate."
        )
    elif any("accuracy" in row for row in rows):
        stage, title, figures = 2, "reward model", rm_figures(rows)
        caption = "Accuracy on a training batch is noisy; validation uses all held-out rows."
        if any("chosen_reward" in row for row in rows):
            title = "DPO"
            caption += " The margin may grow while both rewards fall: then both responses became less likely."
    else:
        stage, title, figures = 1, "supervised fine-tuning", sft_figures(rows)
        caption = "Negative log-likelihood of the reference responses."
    images = "".join(map(image, figures))
    text = f"<h2>{name}: {title}</h2><figure><div>{images}</div><figcaption>{caption}</figcaption></figure>"
    return stage, text


# --------------------------------------------------------------------------------------------------------- 3. the page
def answer(name: str, text: str, scores: dict[str, float | None], pieces: list[tuple[str, int]] | None = None) -> str:
    """A response and its scores; with `pieces` (tokens and their ranks), coloured by token."""
    known = " · ".join(f"{label} {value:z.2f}" for label, value in scores.items() if value is not None)
    shown = to_html(pieces) if pieces else html.escape(text.strip()) or "<i>empty</i>"
    return f"<div><b>{html.escape(name)}</b>{shown}<br><small>{known}</small></div>"


def sample_card(sample: dict, shift: dict[str, list[tuple[str, int]]]) -> str:
    """A query and its responses side by side; shift: name -> tokens and their ranks under the base model."""
    scores = {"RM": sample.get("reference_rm_score"), "gold": sample["reference_gold_score"]}
    answers = [answer("reference", sample["reference"], scores, shift.get("reference"))]
    for name, policy in sample["policies"].items():
        scores = {"RM": policy["rm_score"], "gold": policy["gold_score"]}
        answers.append(answer(name, policy["response"], scores, shift.get(name)))
    query = html.escape(sample["query"])
    return f'<div class="sample"><pre>{query}</pre><div class="answers">{"".join(answers)}</div></div>'


def length_section(figures: list[Figure]) -> str:
    """The figures of length_figures.py with their caption, as HTML."""
    caption = (
        "Wins by length: each point is a ninth of the range of a policy's length ratios, hollow if it has fewer than "
        "ten pairs; the curve is a logistic fit to all pairs, absent where the ratio separates wins from losses. "
        "Win rate and length: with Wilson's 95% interval."
    )
    images = "".join(map(image, figures))
    return f"<h2>Wins and length</h2><figure><div>{images}</div><figcaption>{caption}</figcaption></figure>"


def shift_lines(result: dict) -> list[list[str]]:
    """The share of each policy's tokens by their rank under the base model."""
    shift = result["token_shift"]
    lines = [[f"tokens by rank under {shift['base']}", "1", "2 or 3", "4 or more"]]
    return lines + [[name, *(f"{100 * row[kind]:.1f}%" for kind in KINDS)] for name, row in shift["shares"].items()]


def settings_section(settings: dict, runs: list[str]) -> str:
    """The settings of the evaluation and of each run directory."""
    blocks = {"this evaluation": settings}
    for run in runs:
        if saved := read_settings(run):
            blocks[run] = saved
    parts = ['<h2 id="settings">Settings</h2>']
    for name, block in blocks.items():
        lines = [["setting", "value"], *([key, str(value)] for key, value in block.items())]
        parts.append(f"<details><summary>{html.escape(name)}</summary>{html_table(lines)}</details>")
    return "".join(parts)


def write_report(
    path: Path,
    result: dict,
    runs: list[str],
    samples: list[dict],
    shifts: Sequence[dict] = (),
    sections: Sequence[str] = (),
) -> None:
    """Write report.html, whole or not at all: settings, the table, the curves of `runs`, and `samples` side by side.

    shifts: per sample, name -> tokens and their ranks under the base model. sections: HTML, each with its heading.
    """
    settings = result["args"]
    about = f"{result['num_queries']} validation queries, responses sampled at temperature {settings['temperature']}"
    notes = (
        "Gold win rate and ROUGE are against each query's reference; a tie counts half; intervals are Wilson's, 95%. "
        f"KL is to {next(iter(result['policies']))}, estimated on samples at temperature {settings['kl_temperature']}. "
        "The RM score is the one at the last token, without the EOS trick."
    )
    legend = "".join(f'<span class="{kind}">{words}</span> ' for kind, words in LEGEND.items())
    base = html.escape(result["token_shift"]["base"])
    pairs: list[tuple[dict, dict]] = list(zip_longest(samples, shifts, fillvalue={}))
    parts = [
        f'<h1>What each stage gained</h1><p class="quiet">{html.escape(about)}; seed {settings["seed"]}.</p>',
        '<nav><a href="#settings">settings</a><a href="#samples">samples</a>'
        '<a href="#details">details of the paper</a></nav>',
        html_table(cells(result)),
        f"<p>{html.escape(reward_model_line(result))}</p><p>{html.escape(judge_line(result))}</p>",
        f'<p class="quiet">{html.escape(notes)}</p>',
        settings_section(settings, runs),
        *(text for _, text in sorted(map(curves, runs))),
        *sections,
        '<h2 id="samples">Samples side by side</h2>',
        f'<p class="legend">Tokens coloured by their rank under {base}: {legend}</p>',
        html_table(shift_lines(result)),
        SEARCH,
        *(sample_card(*pair) for pair in pairs),
        details_section(path),
    ]
    write_page(path, str(settings["out"]), "\n".join(parts))


def html_table(lines: list[list[str]]) -> str:
    """Lines of cells as HTML; the first line holds the headings."""
    head = "".join(f"<th>{html.escape(cell).replace('-', '&#8209;')}</th>" for cell in lines[0])  # ROUGE-1 stays whole
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in lines[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def write_page(path: Path, title: str, body: str) -> None:
    """Write one HTML file that needs no network, whole or not at all."""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>nanorlhf: {html.escape(title)}</title><link rel="icon" href="data:,">
<style>{STYLE}</style></head><body>
{body}
</body></html>
"""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair, in a path
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
