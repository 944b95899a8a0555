"""Read what a training run left in its directory, for evaluations and reports."""

import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nanorlhf.dataset import field, parse_object
from nanorlhf.errors import InputError
from nanorlhf.files import read_lines, read_object

LARGEST = 1e39  # of a metric: float32 ends before
Rows = list[dict[str, float]]  # of metrics.jsonl


def whole_rows(path: Path) -> Iterator[dict]:
    """The rows of metrics.jsonl or samples.jsonl, without a last row that a kill or a full disk cut.

    Such a row is said on stderr. Raises InputError for anything else that is no row.
    """
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if not line.endswith(b"\n") and line.startswith(b"{"):
            say_that_cut(where)
            break
        row = parse_object(line, where)
        field(row, "step", int, where)
        yield row


@cache
def say_that_cut(where: str) -> None:
    """Once per file, although several readers open it."""
    print(f"{where}: the last row is cut and left out.", file=sys.stderr)


def read_metrics(run: str | Path) -> Rows:
    """The rows of a run's metrics.jsonl; empty if there is none, as for a model from the Hub.

    null, which is written for a number that is not finite, is read as NaN. Raises InputError for a broken row before
    the last, for a value that is no number of float32's range, and for a file without rows.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    rows = list(whole_rows(path))
    if not rows:
        raise InputError(f"{path} has no row: delete it to go on without the run's curves.")
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if value is None:
                row[name] = math.nan
            elif type(value) not in (int, float) or LARGEST < abs(value) < math.inf:
                raise InputError(f"{path}:{number}: the field {name!r:.80} must be a number, {LARGEST:.0e} at most.")
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
