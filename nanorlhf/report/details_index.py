"""The details index (docs/details.md) as a section of a report: each detail of N+, its source line and its test."""

import html
import os
import re
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "details.md"
ROW = re.compile(r"^\| (N\+ \d+) \| (.+?) \| \[`(\S+):(\d+)`\]\S+ \| `(\S+)`(?:, `\S+`)* \|$", re.MULTILINE)


def details_section(report: Path, index: Path = INDEX) -> str:
    """The numbered details of N+ as HTML, with links from the report's directory to the source.

    Empty where `index` does not exist or has no rows. The links are relative paths to the source tree, so they break
    where report.html is moved alone.
    """
    rows = ROW.findall(index.read_text(encoding="utf-8")) if index.exists() else []
    if not rows:
        return ""
    root = os.path.relpath(ROOT, report.resolve().parent)
    lines = []
    for tag, claim, file, line, test in rows:
        link = f'<a href="{quote(f"{root}/{file}")}#L{line}"><code>{html.escape(f"{file}:{line}")}</code></a>'
        test_file, _, name = test.partition("::")
        proof = f'<a href="{quote(f"{root}/{test_file}")}"><code>{html.escape(name)}</code></a>'
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(claim))
        lines.append(f"<li><b>{html.escape(tag)}</b> {text}: {link}; proved by {proof}</li>")
    return (
        '<h2 id="details">The details of the paper, and where they are implemented</h2>'
        f'<details class="index"><summary>{len(rows)} details</summary><ul>{"".join(lines)}</ul></details>'
    )
