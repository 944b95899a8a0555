"""Report of one response per token: reward logits (N+ Figure 6), and PPO's rewards, values and KL (Figure 9)."""

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorlhf.report.page import BLUE, GREY, ORANGE, Column, image, markup, panel, tabulate

# the columns of `token_rewards`: the text of each token, and numbers or None
Tokens = dict[str, list]
WIDTH = 5.2  # figure width in inches, fits 21 tokens
COLUMNS = {"rm_logit": "RM logit", "kl": "KL, nats", "reward": "reward", "value": "value", "advantage": "advantage"}


def numbers(tokens: Tokens, name: str) -> np.ndarray:
    """Return a column (T,), with NaN for None."""
    return np.array(tokens[name], dtype=float)


def token_axes(title: str, y_label: str, texts: list[str]) -> tuple[Figure, Axes]:
    """Create a panel with the tokens of a response along the x axis."""
    figure, axes = panel(title, "", y_label)
    figure.set_size_inches(max(WIDTH, 0.24 * len(texts)), 3.4)
    axes.set_xticks(range(len(texts)), [repr(text)[1:-1] for text in texts], rotation=60, ha="right", fontsize=8)
    axes.axhline(0, color=GREY, linewidth=0.8)
    return figure, axes


def reward_logit_figure(name: str, tokens: Tokens) -> Figure:
    """Draw N+ Figure 6: the reward model's logit at each token; the last one, orange, is the score."""
    figure, axes = token_axes(f"{name}: reward logits", "RM logit", tokens["text"])
    logits = numbers(tokens, "rm_logit")
    last = np.flatnonzero(~np.isnan(logits))[-1]
    axes.bar(range(len(logits)), logits, color=[ORANGE if i == last else BLUE for i in range(len(logits))])
    return figure


def ppo_figure(name: str, tokens: Tokens) -> Figure:
    """Draw N+ Figure 9: rewards as bars, values and KL as lines."""
    figure, axes = token_axes(f"{name}: rewards, values and KL", "score units; KL in nats", tokens["text"])
    axes.bar(range(len(tokens["text"])), numbers(tokens, "reward"), color=ORANGE, alpha=0.75, label="reward")
    axes.plot(numbers(tokens, "value"), color=BLUE, marker="o", markersize=3.5, linewidth=1.6, label="value")
    axes.plot(numbers(tokens, "kl"), color="#2c8a57", marker="^", markersize=3.5, linewidth=1.2, label="KL")
    axes.legend(frameon=False)
    return figure


def token_lines(tokens: Tokens) -> list[list[str]]:
    """Return the table of one response: headings, then one line per token."""
    columns = [Column(key, heading) for key, heading in COLUMNS.items() if key in tokens]
    rows = [{key: column[i] for key, column in tokens.items()} for i in range(len(tokens["text"]))]
    return tabulate("token", columns, [(repr(row["text"])[1:-1], row) for row in rows])


def section(query: str, policies: dict[str, Tokens]) -> Markup:
    """Return the section of one query with each policy's response per token."""
    about = (
        "The reward model was trained only on its logit at the last token, so earlier logits mean little. PPO's reward "
        "is -beta * KL at each token, plus the score at the end. The value is predicted before the token."
    )
    parts = [markup.heading("One response per token", "tokens"), markup.quiet(about), markup.query(query)]
    figures = [reward_logit_figure(name, tokens) for name, tokens in policies.items() if "rm_logit" in tokens]
    figures += [ppo_figure(name, tokens) for name, tokens in policies.items() if "value" in tokens]
    for is_long in (False, True):  # short responses side by side; long ones scroll
        if drawn := [image(figure) for figure in figures if (figure.get_figwidth() > WIDTH) == is_long]:
            parts.append(markup.figures(drawn, scroll=is_long))
    for name, tokens in policies.items():
        parts.append(markup.folded(f"{name}: table", markup.table(token_lines(tokens))))
    return Markup("\n").join(parts)
