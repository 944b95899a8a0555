"""The details index (docs/details.md) as data: each detail of N+, its source line and its test."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "details.md"
ROW = re.compile(r"^\| (N\+ \d+) \| (.+?) \| \[`(\S+):(\d+)`\]\S+ \| `(\S+)`(?:, `\S+`)* \|$", re.MULTILINE)


def read_details(index: Path = INDEX) -> list[tuple[str, ...]]:
    """Tag, claim, file, line, test's file and test's name of each detail of N+; none where `index` doesn't exist."""
    rows = ROW.findall(index.read_text(encoding="utf-8")) if index.exists() else []
    return [(*row, *test.partition("::")[::2]) for *row, test in rows]
