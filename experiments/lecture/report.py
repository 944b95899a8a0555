"""The five pictures of docs/lecture.md, drawn from finished runs.

    python -m experiments.lecture.report --runs runs/tiny --out runs/tiny/lecture
    python -m experiments.lecture.report --pictures masks tokens

    masks               the initial policy's responses to three queries, and their masks
    tokens              one response token by token: KL, rewards and values, advantages
    training            PPO's scores and KL by update
    overoptimisation    both scores over sqrt(KL): PPO, and PPO with a high learning rate and no KL penalty
    calibration         how often a margin is right, for the reward model and DPO

`make demo` makes the runs for all but `overoptimisation`, which needs those of `make overoptimise`. Out: NAME.svg for
each picture; the numbers of `tokens` are printed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from experiments.tables import part
from kernels import gae
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.cli import run_module
from nanorlhf.dataset import Demonstration, field, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.files import atomic, check_out, read_object
from nanorlhf.generate import sample_answers
from nanorlhf.metrics.token_rewards import token_rewards
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad
from nanorlhf.ppo import eos_masks
from nanorlhf.report.calibration_figures import draw_calibration
from nanorlhf.report.page import BLUE, GREY, ORANGE, aligned, draw, label_axes, svg
from nanorlhf.report.run_curves import draw_against_kl
from nanorlhf.report.token_report import Tokens, numbers, token_lines
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, token_bytes
from nanorlhf.training.run_directory import Rows, read_metrics, read_settings

Picture = Literal["masks", "tokens", "training", "overoptimisation", "calibration"]
NUM_SAMPLES, RESPONSE_LENGTH = 64, 8  # for masks: 8 tokens cut off some of the initial policy's summaries
FIRST, LAST = 3, 2  # query tokens shown at either end
MASKED, REAL, BLANK = "#c9ced6", "#e4eefa", "#ffffff"
SCORES = [("objective/score", "reward model", BLUE), ("gold_score", "gold score, hidden from PPO", ORANGE)]


@dataclass(frozen=True, kw_only=True)
class Args:
    runs: Path = Path("runs/tiny")
    """directory of the runs of `make demo` and `make overoptimise`"""
    pictures: tuple[Picture, ...] = get_args(Picture)
    """pictures to draw"""
    out: Path = Path("runs/tiny/lecture")
    """directory for the pictures"""


# ---------------------------------------------------------------------------------------------------------- 1. reading
def finished(runs: Path, name: str) -> Path:
    """Return a run's directory. Raises InputError if it hasn't finished."""
    if not (runs / name / "summary.json").is_file():
        maker = "make overoptimise" if "fast" in name else "make demo"
        raise InputError(f"--runs {runs} has no finished run {name}: run `{maker}` first.")
    return runs / name


def scored_metrics(runs: Path, name: str) -> Rows:
    """Read the metrics of a PPO run that logged gold scores."""
    rows = read_metrics(finished(runs, name))
    if not rows or not {"objective/kl", "gold_score", *(key for key, _, _ in SCORES)} <= rows[-1].keys():
        raise InputError(f"{runs / name}: a score or the KL is missing: expected a run of `train_ppo.py --gold`.")
    return rows


def load_policy(directory: Path, tokenizer: Tokenizer) -> GPT:
    """Load a checkpoint that can't sample [PAD]."""
    return load_gpt(directory).forbid(tokenizer.pad_id, tokenizer.vocab_size)


# -------------------------------------------------------------------------------------------------------- 2. the masks
def three_responses(runs: Path, rows: list[Demonstration], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the shortest, the median and the longest of the initial policy's responses to `rows`.

    Sampled as in PPO: query (3, Q) left-padded, response (3, RESPONSE_LENGTH), [PAD] after EOS.
    """
    settings, where = read_settings(finished(runs, "ppo")), f"{runs / 'ppo'}/args.json"
    seed, temperature = field(settings, "seed", int, where), field(settings, "temperature", float, where)
    policy, queries = load_policy(finished(runs, "sft"), tokenizer), [row.query for row in rows]
    _, response = sample_answers(policy, queries, tokenizer, 1, RESPONSE_LENGTH, len(rows), seed, temperature)
    lengths = (response != tokenizer.pad_id).sum(1) + (response != tokenizer.eos_id).all(1)  # (B,) cut ones last
    chosen = lengths.argsort(stable=True)[[0, len(rows) // 2, len(rows) - 1]]  # (3,)
    return left_pad([queries[i] for i in chosen.tolist()], tokenizer.pad_id), response[chosen]


def masks_figure(query: Tensor, response: Tensor, tokenizer: Tokenizer) -> Figure:
    """Draw the tokens of a batch, masked ones in grey, and each response's two masks below it.

    query (B, Q) left-padded, response (B, T). Only the ends of a query are shown. The row of `states` marks the
    position that gets the score.
    """
    eos_index, actions, states = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)  # (B, T)
    (B, Q), T = query.shape, response.size(1)
    is_scored = torch.arange(T) == (eos_index + 1).clamp(max=T - 1)[:, None]  # (B, T)
    width = FIRST + 1 + LAST + T
    figure = Figure(figsize=(0.7 * width, 1.05 * B + 0.1), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-0.05, width + 0.05), ylim=(4 * B - 0.95, -0.9))
    axes.set_axis_off()
    axes.text(0, -0.3, f"query, Q = {Q}", fontsize=9, fontweight="bold")
    axes.text(width - T, -0.3, f"response, T = {T}", fontsize=9, fontweight="bold")
    for b in range(B):
        top = 4 * b
        ends = torch.cat((query[b, :FIRST], query[b, Q - LAST :]))
        names = [*token_names(ends, tokenizer), *token_names(response[b], tokenizer)]
        names.insert(FIRST, "...")
        is_real = [*(ends != tokenizer.pad_id).tolist(), *actions[b].tolist()]
        is_real.insert(FIRST, True)
        draw_cells(axes, 0, top, names, [REAL if real else MASKED for real in is_real])
        masks = {"actions": actions[b].tolist(), "states": states[b].tolist()}
        for line, (name, counted) in enumerate(masks.items(), start=1):
            words = ["score" if line == 2 and scored else "" for scored in is_scored[b].tolist()]
            colors = [BLANK if counts else MASKED for counts in counted]
            draw_cells(axes, width - T, top + line, words, colors)
            axes.text(width - T - 0.15, top + line + 0.5, name, ha="right", va="center", fontsize=8, family="monospace")
    return figure


def token_names(ids: Tensor, tokenizer: Tokenizer) -> list[str]:
    """Return a name for each id (n,) that fits in a cell."""
    pieces = token_bytes(tokenizer)
    special = {tokenizer.pad_id: "[PAD]", tokenizer.eos_id: "EOS"}
    texts = [special.get(i) or repr(pieces[i].decode(errors="replace"))[1:-1] for i in ids.tolist()]
    return [text if len(text) <= 9 else text[:8] + "." for text in texts]


def draw_cells(axes: Axes, x: float, y: float, words: list[str], colors: list[str]) -> None:
    """Draw a row of unit squares starting at (x, y)."""
    for i, (word, color) in enumerate(zip(words, colors, strict=True)):
        axes.add_patch(Rectangle((x + i, y), 1, 1, facecolor=color, edgecolor=GREY, linewidth=0.6))
        axes.text(x + i + 0.5, y + 0.5, word, ha="center", va="center", fontsize=8)


# ---------------------------------------------------------------------------------------------------- 3. token by token
def token_columns(runs: Path, row: Demonstration, tokenizer: Tokenizer) -> Tokens:
    """Return `token_rewards` of the policy's greedy response, and their GAE advantages before whitening."""
    directory = finished(runs, "ppo")
    settings, where = read_settings(directory), f"{directory}/args.json"
    gamma, lam, temperature = (field(settings, name, float, where) for name in ("gamma", "lam", "temperature"))
    policy, ref_policy = (load_policy(finished(runs, name), tokenizer) for name in ("ppo", "sft"))
    length = field(settings, "response_length", int, where)
    # (1, Q), (1, T)
    query, response = sample_answers(policy, [row.query], tokenizer, 1, length, 1, seed=0, temperature=0)
    reward_model = load_scalar(finished(runs, "rm"))
    tokens = token_rewards(str(directory), policy, ref_policy, reward_model, query, response, tokenizer, temperature)
    if "value" not in tokens:
        raise InputError(f"{directory} has no value model: expected a run of PPO.")
    rewards, values = (torch.tensor([tokens[name]]) for name in ("reward", "value"))  # (1, states)
    return tokens | {"advantage": gae(rewards, values, gamma, lam)[0][0].tolist()}


def tokens_figure(tokens: Tokens) -> Figure:
    """Draw one response token by token: KL, rewards and values, advantages."""
    figure = Figure(figsize=(0.62 * len(tokens["text"]) + 1.6, 6.2), layout="constrained")
    kl, rewards, advantages = figure.subplots(3, 1, sharex=True)
    positions = range(len(tokens["text"]))
    label_axes(kl, "logprobs - ref_logprobs", "", "nats")
    kl.bar(positions, numbers(tokens, "kl"), color=GREY)
    label_axes(rewards, "rewards and values", "", "score units")
    rewards.bar(positions, numbers(tokens, "reward"), color=ORANGE, label="rewards")
    rewards.plot(
        positions, numbers(tokens, "value"), color=BLUE, marker="o", markersize=4, linewidth=1.6, label="values"
    )
    rewards.legend(frameon=False)
    label_axes(advantages, "advantages, before whitening", "", "score units")
    advantages.bar(positions, numbers(tokens, "advantage"), color=BLUE)
    names = [{"": "after EOS", "[EOS]": "EOS"}.get(text) or repr(text)[1:-1] for text in tokens["text"]]
    advantages.set_xticks(positions, names, rotation=40, ha="right")
    for axes in (kl, rewards, advantages):
        axes.axhline(0, color=GREY, linewidth=0.8)
    return figure


# -------------------------------------------------------------------------------------------------------------- 4. runs
def training_figure(rows: Rows) -> Figure:
    """Draw both scores of the rollouts, and the KL."""
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    label_axes(left, "Score of the rollouts", "update", "score")
    for key, label, color in SCORES:
        draw(left, rows, key, label, color)
    left.legend(frameon=False)
    label_axes(right, "KL to the reference", "update", "nats per response")
    draw(right, rows, "objective/kl", "", BLUE)
    return figure


def overoptimisation_figure(runs: dict[str, Rows]) -> Figure:
    """Draw a panel per run on the same axes; runs: title -> metrics."""
    figure = Figure(figsize=(5.2 * len(runs), 3.4), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(runs), sharex=True, sharey=True), runs.items(), strict=True):
        label_axes(axes, title, "sqrt(KL)", "score, change since the first update")
        draw_against_kl(axes, rows, SCORES)
    return figure


def calibrations_figure(models: dict[str, dict]) -> Figure:
    """Draw a panel per model; models: name -> result of `calibration` in metrics/pair_accuracy.py."""
    figure = Figure(figsize=(5.2 * len(models), 3.4), layout="constrained")
    for axes, (name, measured) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
        draw_calibration(axes, name, measured)
    return figure


# ---------------------------------------------------------------------------------------------------- 5. the pictures
def draw_picture(name: Picture, runs: Path) -> tuple[Figure, str]:
    """Draw a picture; return it and the text to print with it."""
    if name == "training":
        return training_figure(scored_metrics(runs, "ppo")), ""
    if name == "overoptimisation":
        metrics = {}
        for run in ("ppo", "ppo_fast_no_kl"):
            rows, settings = scored_metrics(runs, run), read_settings(runs / run)
            lr, beta = (field(settings, key, float, f"{runs / run}/args.json") for key in ("lr", "kl_coef"))
            metrics[f"{run}: lr {lr:g}, beta {beta:g}"] = rows
        return overoptimisation_figure(metrics), ""
    if name == "calibration":
        path = runs / "eval" / "eval.json"
        if not path.is_file():
            raise InputError(f"--runs {runs} has no evaluation eval: run `make demo` first.")
        return calibrations_figure(
            part(read_object(path), str(path), "rewards", "sets", "validation", "calibration")
        ), ""

    tokenizer = load_tokenizer(finished(runs, "ppo"))
    demonstrations = load_demonstrations(runs / "data" / "sft.validation.jsonl", tokenizer, None, None)
    if name == "masks":
        return masks_figure(*three_responses(runs, list(demonstrations[:NUM_SAMPLES]), tokenizer), tokenizer), ""
    tokens = token_columns(runs, demonstrations[0], tokenizer)
    return tokens_figure(tokens), demonstrations[0].record["query"] + "\n\n" + aligned(token_lines(tokens))


def main(args: Args) -> list[str]:
    """Draw the pictures, then write them; return the file names."""
    check_out(args.out)
    drawn = {name: draw_picture(name, args.runs) for name in args.pictures}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (figure, text) in drawn.items():
        with atomic(args.out / f"{name}.svg") as temporary:
            temporary.write_bytes(svg(figure))
        if text:
            print(text)
        print(f"written: {args.out / name}.svg")
    return [f"{name}.svg" for name in drawn]


if __name__ == "__main__":
    run_module(main, Args)
