"""Read what a training run left in its directory, for evaluations and reports."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanorlhf.dataset import field, parse_object
from nanorlhf.errors import InputError
from nanorlhf.files import read_lines, read_object

Rows = list[dict[str, float]]  # of metrics.jsonl


def whole_rows(path: Path) -> Iterator[dict]:
    """The rows of metrics.jsonl or samples.jsonl, without a last row that a kill or a full disk cut."""
    for number, line in read_lines(path):
        if line.endswith(b"\n"):
            row = parse_object(line, f"{path}:{number}")
            field(row, "step", int, f"{path}:{number}")
            yield row


def read_metrics(run: str | Path) -> Rows:
    """The rows of a run's metrics.jsonl; empty if there is none, as for a model from the Hub.

    Raises InputError for a broken row before the last, and for a value that is not a number.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    rows = list(whole_rows(path))
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():  # also NaN, such as the deviation of one score
            if type(value) not in (int, float) or (type(value) is int and abs(value) >= 2**63):
                raise InputError(f"{path}:{number}: the field {name!r:.80} must be a number.")
    return rows


def read_settings(run: str | Path) -> dict:
    """The settings in a run's args.json; empty if there is none."""
    path = Path(run) / "args.json"
    return read_object(path) if path.exists() else {}


def flat_settings(settings: dict) -> dict[str, Any]:
    """One level: the settings of a group have the names of their flags, such as `sampler.top_p`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": setting for inner, setting in value.items()}
        else:
            flat[name] = value
    return flat
