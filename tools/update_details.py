"""Put the line numbers of docs/details.md right: `python -m tools.update_details`.

A row points at a tag in the code: `[N+ 23]` at train_ppo.py:618. After an edit the tag stands elsewhere, and this moves
the row to the nearest line of the same file that carries it, or, where the file has lost it, to the one file that has.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DETAILS = ROOT / "docs" / "details.md"
ROW = re.compile(
    r"^\| (?P<tag>(?:N\+|SO|RLCF|STR) [^|]+) \| .+ \| (?P<place>\[`(?P<file>\S+):(?P<line>\d+)`\]"
    r"\(\.\./(?P<link>\S+)#L(?P<link_line>\d+)\)) \| "
    r"(?P<tests>`tests/[\w/]+\.py::\w+`(?:, `tests/[\w/]+\.py::\w+`)*) \|$",
    re.MULTILINE,
)
Tagged = dict[str, dict[str, list[int]]]


def tags_of(line: str) -> set[str]:
    """What a line is tagged with: `[N+ 24, 25]` are two details."""
    return {
        f"{paper} {part.strip()}"
        for paper, tag in re.findall(r"\[(N\+|SO|RLCF|STR) ([^\]]+)\]", line)
        for part in tag.split(",")
    }


def tagged_lines(sources: dict[str, str]) -> Tagged:
    """tag -> file -> the numbers of its lines that carry the tag, ascending."""
    found: Tagged = {}
    for file, text in sources.items():
        for number, line in enumerate(text.splitlines(), start=1):
            for tag in tags_of(line):
                found.setdefault(tag, {}).setdefault(file, []).append(number)
    return found


def read_sources(root: Path = ROOT) -> dict[str, str]:
    """The text of every file that may hold a tag, by its path from the root."""
    files = [*root.glob("train_*.py"), root / "eval.py"]
    files += [path for package in ("nanorlhf", "data") for path in (root / package).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}


def with_true_lines(page: str, tagged: Tagged) -> tuple[str, list[str]]:
    """The page with the line of every row put right, and a sentence for each row whose tag is nowhere or in doubt."""
    problems = []

    def place_of(row: re.Match[str]) -> str:
        tag, file, line = row["tag"], row["file"], int(row["line"])
        files = tagged.get(tag, {})
        if file not in files:
            if len(files) != 1:
                problems.append(f"{tag} is not in {file} any more, but in {' and '.join(files) or 'no file'}")
                return row[0]
            [file] = files
        line = min(files[file], key=lambda number: (abs(number - line), number))
        return row[0].replace(row["place"], f"[`{file}:{line}`](../{file}#L{line})")

    return ROW.sub(place_of, page), problems


if __name__ == "__main__":
    page, problems = with_true_lines(DETAILS.read_text(encoding="utf-8"), tagged_lines(read_sources()))
    DETAILS.write_text(page, encoding="utf-8")
    sys.exit("\n".join(f"docs/details.md: {problem}" for problem in problems) or None)
