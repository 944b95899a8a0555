"""Read the details index (docs/details.md). A row names a file and a tag; the line is found by the tag."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "details.md"
ROW = re.compile(
    r"^\| (?P<tag>(?:N\+|SO|RLCF|STR) [^|]+) \| (?P<claim>.+) \| \[`(?P<file>\S+)`\]\(\.\./(?P<link>\S+)\) \| "
    r"(?P<tests>`tests/[\w/]+\.py::\w+`(?:, `tests/[\w/]+\.py::\w+`)*) \|$",
    re.MULTILINE,
)


def tags_of(line: str) -> set[str]:
    """Return the tags of a source line.

    >>> sorted(tags_of("x = whiten(x)  # [N+ 24, 25] and [RLCF alg 1]"))
    ['N+ 24', 'N+ 25', 'RLCF alg 1']
    """
    return {
        f"{paper} {part.strip()}"
        for paper, tag in re.findall(r"\[(N\+|SO|RLCF|STR) ([^\]]+)\]", line)
        for part in tag.split(",")
    }


def line_of(tag: str, source: str) -> int | None:
    """Return the number of the last line with the tag: flags and docstrings come before the implementation."""
    lines = source.splitlines()
    return max((number for number, line in enumerate(lines, start=1) if tag in tags_of(line)), default=None)


def read_details(index: Path = INDEX) -> list[tuple[str, ...]]:
    """Return tag, claim, file, line, test file and test of each detail of N+; empty if `index` doesn't exist."""
    if not index.exists():
        return []
    details = []
    for row in ROW.finditer(index.read_text(encoding="utf-8")):
        if row["tag"].startswith("N+"):
            line = line_of(row["tag"], (ROOT / row["file"]).read_text(encoding="utf-8"))
            test = row["tests"].partition(",")[0].strip("`")
            details.append((row["tag"], row["claim"], row["file"], str(line), *test.split("::")))
    return details


def with_lines(page: str) -> str:
    """Return the page docs/details.md with links to files pointing to the line with the row's tag."""

    def link(row: re.Match[str]) -> str:
        file = row["file"]
        line = line_of(row["tag"], (ROOT / file).read_text(encoding="utf-8"))
        return row[0].replace(f"[`{file}`](../{file})", f"[`{file}:{line}`](../{file}#L{line})")

    return ROW.sub(link, page)
