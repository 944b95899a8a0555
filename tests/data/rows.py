"""What the tests of the data modules share."""

import json
from pathlib import Path


def read(out: Path) -> dict[str, list[dict]]:
    """The rows of every JSON Lines file in a directory, by file name without its ending."""
    files = sorted(out.glob("*.jsonl"))
    return {path.name[: -len(".jsonl")]: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
