"""Read the files of a training run, for evaluations and reports."""

import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nanorlhf.dataset import field, parse_object
from nanorlhf.errors import InputError
from nanorlhf.files import read_lines, read_object

LARGEST = 1e39  # no metric is larger: it is beyond float32's range
Rows = list[dict[str, float]]  # of metrics.jsonl
CHECKPOINTS = "checkpoints"


def whole_rows(path: Path) -> Iterator[dict]:
    """Yield the rows of metrics.jsonl or samples.jsonl, except a last row that was cut by a kill or a full disk.

    A cut row is reported on stderr. Raises InputError for any other malformed row.
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
    """Report a cut row once per file, although several readers open it."""
    print(f"{where}: ignoring the last row, which is incomplete.", file=sys.stderr)


def read_metrics(run: str | Path) -> Rows:
    """Return the rows of a run's metrics.jsonl; empty if the file doesn't exist, as for a model from the Hub.

    null, which is written for a non-finite number, is read as NaN. Raises InputError for a malformed row before the
    last, a value outside float32's range, and an empty file.
    """
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    rows = list(whole_rows(path))
    if not rows:
        raise InputError(f"{path} has no complete row: delete it to continue without the run's curves.")
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if value is None:
                row[name] = math.nan
            elif type(value) not in (int, float) or LARGEST < abs(value) < math.inf:
                raise InputError(f"{path}:{number}: the field {name!r:.80} must be a number of at most {LARGEST:.0e}.")
    return rows


def read_settings(run: str | Path) -> dict:
    """Return the settings in a run's args.json; empty if the file doesn't exist."""
    path = Path(run) / "args.json"
    return read_object(path) if path.exists() else {}


def kept_checkpoints(run: str | Path) -> dict[int, Path]:
    """Return the checkpoints that --keep-every left in a run directory: number of steps -> directory, in order."""
    paths = sorted((Path(run) / CHECKPOINTS).glob(f"step-{8 * '[0-9]'}"))
    return {int(path.name.removeprefix("step-")): path for path in paths}


def run_of(checkpoint: str) -> str:
    """Return the run directory of a checkpoint that --keep-every left; any other checkpoint is its own run."""
    directory = Path(checkpoint).parent
    return str(directory.parent) if directory.name == CHECKPOINTS else checkpoint


def flat_settings(settings: dict) -> dict[str, Any]:
    """Flatten the settings to one level: those of a group get the names of their flags, such as `sampler.top_p`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": setting for inner, setting in value.items()}
        else:
            flat[name] = value
    return flat
