"""The files of a run as the rules read them: settings, one row of metrics per step, the summary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanorlhf.errors import InputError
from nanorlhf.rules.thresholds import limit

Rows = Sequence[dict[str, float]]
LARGEST = 1e39
"""bound for settings, just above float32's largest number"""


@dataclass(frozen=True, kw_only=True)
class Record:
    settings: dict[str, Any]
    """args.json, flattened: `sampler.top_p`"""
    rows: Rows
    """metrics.jsonl"""
    summary: dict[str, Any]
    """summary.json; empty while the run is in progress"""

    def number(self, name: str, default: float) -> float:
        """Return a setting, or `default` if it is None or the script doesn't have it.

        Raises InputError unless it is a finite number that fits into float32.
        """
        value = self.settings.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise InputError(f"args.json: the field {name!r} must be a number, not {value!r:.80}.")
        return value

    @property
    def clip_range(self) -> tuple[float, float]:
        """The PPO clip range below and above 1; infinite for a script that doesn't clip."""
        value = self.settings.get("clip_range")
        if isinstance(value, list) and len(value) == 2 and all(type(x) in (int, float) for x in value):
            return value[0], value[1]
        both = self.number("clip_range", math.inf)
        return both, both

    @property
    def log_range(self) -> float:
        """The larger distance of the clip range's two ends from a ratio of 1, in nats; infinite without a lower end."""
        lower, upper = self.clip_range
        return max(-math.log1p(-lower) if lower < 1 else math.inf, math.log1p(max(0.0, upper)))

    @property
    def algorithm(self) -> Any:
        """The algorithm of train_grpo.py; None for the other scripts."""
        return self.settings.get("algorithm")

    def num_responses(self, rows: Rows) -> float:
        return len(rows) * self.number("batch_size", 1)

    def rows_with(self, *names: str) -> Rows:
        """Return the rows that contain all of these metrics."""
        needed = set(names)
        return [row for row in self.rows if row.keys() >= needed]

    def quarters(self, *names: str) -> tuple[Rows, Rows]:
        """Return the first and the last quarter of these rows; both are empty if there are too few for a trend."""
        rows = self.rows_with(*names)
        size = len(rows) // 4 if len(rows) >= limit("rows") else 0
        return rows[:size], rows[len(rows) - size :]

    @property
    def is_float32(self) -> bool:
        return self.settings.get("dtype", "float32") == "float32"

    @property
    def sampler(self) -> str:
        """The sampling distribution: `policy`; `rounded`, close to the policy; or `other`."""
        is_stale = self.number("sampler.sync_every", 1) > 1
        if self.settings.get("sampler.url") is not None or self.number("sampler.top_p", 1.0) < 1 or is_stale:
            return "other"
        return "policy" if self.settings.get("sampler.dtype", "same") == "same" else "rounded"

    @property
    def ratio_is_to_the_sampler(self) -> bool:
        return self.settings.get("sampler.correction") == "sampler_logprobs" and self.sampler != "policy"

    @property
    def steps_per_update(self) -> float:
        return self.number("num_minibatches", 1) * self.number("num_ppo_epochs", self.number("num_epochs", 1))


def mean(rows: Rows, name: str) -> float:
    """Return the mean of a metric, NaN without rows."""
    return sum(row[name] for row in rows) / len(rows) if rows else math.nan


def response_variance(rows: Rows, name: str) -> float:
    """Return the variance over all responses from the rows' means, `name`, and deviations, `name`_std; NaN if none."""
    average = mean(rows, name)
    if not rows:
        return math.nan
    deviations, shifts = [row[f"{name}_std"] for row in rows], [row[name] - average for row in rows]
    return sum(x * x for x in (*deviations, *shifts)) / len(rows)


def row_noise(rows: Rows, name: str) -> float:
    """Estimate the standard deviation of a row's value around the trend from differences of neighbouring rows.

    Unlike the deviation within a batch, it includes that some queries are harder than others.
    """
    steps = [after[name] - row[name] for row, after in zip(rows, rows[1:], strict=False)]
    return math.sqrt(sum(step * step for step in steps) / max(1, 2 * len(steps)))


def sum_error(nats: float) -> float:
    """Bound the chance deviation of a sum of surprisals or log-ratios from its expectation `nats` > 0, relative to it.

    If all terms are small, the variance of the sum is about twice the expectation. The second term covers a few rare
    tokens of eight nats each: Bernstein's bound at exp(-15).
    """
    return limit("chance") * math.sqrt(2 / nats) + limit("rare_nats") / nats


def pooled_error(std: float, num_responses: float) -> float:
    """Bound the chance deviation of a mean over `num_responses`: `chance` standard errors."""
    return limit("chance") * std / math.sqrt(max(1.0, num_responses))
