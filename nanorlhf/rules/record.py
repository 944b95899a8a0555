"""What a run has written, as the rules read it: settings, one row of metrics per step, the summary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanorlhf.errors import InputError
from nanorlhf.rules.thresholds import limit

Rows = Sequence[dict[str, float]]
LARGEST = 1e39
"""of a setting: float32 ends before"""


@dataclass(frozen=True, kw_only=True)
class Record:
    settings: dict[str, Any]
    """of args.json, in one level: `sampler.top_p`"""
    rows: Rows
    """of metrics.jsonl"""
    summary: dict[str, Any]
    """of summary.json; empty while the run goes on"""

    def number(self, name: str, default: float) -> float:
        """Return a setting, `default` for a script that lacks it and for None. Raises InputError for what is no number.

        NaN, infinity and numbers that no script takes are refused as well.
        """
        value = self.settings.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise InputError(f"args.json: the field {name!r} must be a number, not {value!r:.80}.")
        return value

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far the ratio may fall below 1, and rise above; infinite for a script that does not clip."""
        value = self.settings.get("clip_range")
        if isinstance(value, list) and len(value) == 2 and all(type(x) in (int, float) for x in value):
            return value[0], value[1]
        both = self.number("clip_range", math.inf)
        return both, both

    @property
    def log_range(self) -> float:
        """The larger of the two distances from a ratio of 1 to its bounds, in nats; infinite without a lower bound."""
        lower, upper = self.clip_range
        return max(-math.log1p(-lower) if lower < 1 else math.inf, math.log1p(max(0.0, upper)))

    @property
    def algorithm(self) -> Any:
        """The algorithm of train_grpo.py; None for the other scripts."""
        return self.settings.get("algorithm")

    def num_responses(self, rows: Rows) -> float:
        return len(rows) * self.number("batch_size", 1)

    def having(self, *names: str) -> Rows:
        """The rows that hold all of these metrics."""
        needed = set(names)
        return [row for row in self.rows if row.keys() >= needed]

    def quarters(self, *names: str) -> tuple[Rows, Rows]:
        """The first and the last quarter of them; both empty where there are too few to speak of a trend."""
        rows = self.having(*names)
        size = len(rows) // 4 if len(rows) >= limit("rows") else 0
        return rows[:size], rows[len(rows) - size :]

    @property
    def is_float32(self) -> bool:
        return self.settings.get("dtype", "float32") == "float32"

    @property
    def sampler(self) -> str:
        """What samples: `policy`; `rounded`, nearly the policy; or `other`, another distribution."""
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
    """NaN without rows."""
    return sum(row[name] for row in rows) / len(rows) if rows else math.nan


def variance_of(rows: Rows, name: str) -> float:
    """Variance over all responses of rows that log a mean, `name`, and a deviation, `name`_std; NaN without rows."""
    average = mean(rows, name)
    if not rows:
        return math.nan
    deviations, shifts = [row[f"{name}_std"] for row in rows], [row[name] - average for row in rows]
    return sum(x * x for x in (*deviations, *shifts)) / len(rows)


def row_noise(rows: Rows, name: str) -> float:
    """Standard deviation of one row's value around the trend, from the differences of neighbouring rows.

    It contains what a batch's own deviation does not: queries that are harder than others.
    """
    steps = [after[name] - row[name] for row, after in zip(rows, rows[1:], strict=False)]
    return math.sqrt(sum(step * step for step in steps) / max(1, 2 * len(steps)))


def sum_error(nats: float) -> float:
    """How far chance takes a sum of surprises or log-ratios from its expectation `nats` > 0, as a share of it.

    The variance of the sum is about twice the expectation where all terms are small. A few rare tokens of eight nats
    each are the other part: Bernstein's bound at exp(-15).
    """
    return limit("chance") * math.sqrt(2 / nats) + limit("rare_nats") / nats


def pooled_error(std: float, num_responses: float) -> float:
    """How far chance takes a mean over so many responses: `chance` standard errors."""
    return limit("chance") * std / math.sqrt(max(1.0, num_responses))
