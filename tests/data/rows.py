"""Helpers shared by the tests of the data modules."""

import json
from pathlib import Path


def read(out: Path) -> dict[str, list[dict]]:
    """Return the rows of each JSON Lines file in a directory, by file name without suffix."""
    files = sorted(out.glob("*.jsonl"))
    return {path.name[: -len(".jsonl")]: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
