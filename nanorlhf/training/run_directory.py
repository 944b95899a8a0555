"""What a training run left in its directory, as evaluations and reports read it."""

import json
from pathlib import Path

Rows = list[dict[str, float]]  # of metrics.jsonl


def read_metrics(run: str) -> Rows:
    """The rows of a run directory's metrics.jsonl; empty where there is none, as for a model from the Hub."""
    path = Path(run) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
