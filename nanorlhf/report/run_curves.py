"""Training curves of one run: supervised fine-tuning, a reward model, DPO, or PPO and its relatives."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorlhf.errors import InputError
from nanorlhf.report.page import BLUE, GREY, ORANGE, Section, draw, markup, panel, series, thinned
from nanorlhf.training.run_directory import Rows, read_metrics, read_settings


def run_sections(runs: Iterable[str]) -> list[Section]:
    """Return the curves of run directories, by stage: SFT, reward models and DPO, PPO, then runs without metrics."""
    return [section for _, _, section in sorted((curves(run) for run in runs), key=lambda found: found[:2])]


def stage_of(run: str, rows: Rows) -> int:
    """Return the stage of a run directory, as in `curves`, from its metrics. Raises InputError if they match none."""
    if not rows:
        return 4
    if {"objective/kl", "objective/score", "eos_rate"} <= rows[-1].keys():
        return 3
    for stage, name in ((2, "accuracy"), (1, "loss")):
        if any(name in row for row in rows):
            return stage
    path = Path(run) / "metrics.jsonl"
    raise InputError(
        f"{path} isn't from a training run: the last row lacks objective/kl, objective/score or eos_rate, and no row "
        "has accuracy or loss."
    )


def curves(run: str) -> tuple[int, str, Section]:
    """Return a run's stage (1 SFT, 2 reward model or DPO, 3 PPO, 4 no metrics), its name and its curves."""
    rows = read_metrics(run)
    name = Path(run).name
    if not rows:
        none = f"{run} has no metrics.jsonl, so there are no curves."
        return 4, name, Section(name, markup.paragraph(none))
    last, stage = rows[-1], stage_of(run, rows)
    if stage == 3:
        title = str(read_settings(run).get("algorithm", "PPO")).upper()
        drawn = ppo_figures(rows)
        caption = (
            f"{len(rows)} updates. Last update: score {last['objective/score']:.2f}, KL {last['objective/kl']:.2f} "
            f"nats, EOS rate {last['eos_rate']:.0%}. Signs of trouble: a first score far from 0, the mean score of the "
            "references; an exploding KL; a falling EOS rate."
        )
    elif stage == 2:
        title, drawn = "reward model", rm_figures(rows)
        caption = "Accuracy on training batches is noisy; validation uses all held-out rows."
        if any("chosen_reward" in row for row in rows):
            title = "DPO"
            caption += " If the margin grows while both rewards fall, both responses are becoming less likely."
    else:
        title, drawn = "supervised fine-tuning", sft_figures(rows)
        caption = "Negative log-likelihood of the reference responses."
    return stage, name, Section(f"{name}: {title}", figures=drawn, caption=caption)


def sft_figures(rows: Rows) -> list[Figure]:
    """Draw training and validation loss."""
    figure, axes = panel("Loss", "step", "nats per token")
    draw(axes, rows, "loss", "training batch, running mean", BLUE, smoothed=True)
    draw(axes, rows, "validation_loss", "validation", ORANGE)
    axes.legend(frameon=False)
    return [figure]


def rm_figures(rows: Rows) -> list[Figure]:
    """Draw loss and accuracy; for DPO also the implicit rewards."""
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
    """Draw score, KL, length and EOS rate; if the run logged gold scores, also both scores against sqrt(KL)."""
    scores = [("objective/score", "proxy (reward model)", BLUE)]
    if any("gold_score" in row for row in rows):
        scores.append(("gold_score", "gold (not used in training)", ORANGE))
    figure, axes = panel("Rollout score", "update", "score")
    for key, label, color in scores:
        draw(axes, rows, key, label, color)
    axes.legend(frameon=False, loc="lower right")
    figures = [figure]
    for key, title, unit in (
        ("objective/kl", "KL to the reference", "nats per response"),
        ("response_length", "Response length", "tokens"),
        ("eos_rate", "Responses ending in EOS", "share"),
    ):
        figure, axes = panel(title, "update", unit)
        draw(axes, rows, key, title, BLUE)
        if key == "eos_rate":
            axes.set_ylim(0, 1.03)
        figures.append(figure)
    if len(scores) == 2:
        figure, axes = panel("Proxy and gold score against KL", "sqrt(KL)", "score, change since the first update")
        draw_against_kl(axes, rows, scores)
        figures.append(figure)
    return figures


def draw_against_kl(axes: Axes, rows: Rows, scores: Sequence[tuple[str, str, str]]) -> None:
    """Draw scores against the distance from the reference, a point per update; scores: metric, label, color."""
    for key, label, color in scores:
        distance, value = thinned(*series(rows, key, "objective/kl"))
        axes.scatter(np.sqrt(distance.clip(min=0)), value - value[:1], s=14, color=color, label=label, alpha=0.8)
    axes.legend(frameon=False)
