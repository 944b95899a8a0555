"""docs/details.md as a part of a report: what each detail of the paper is, and where it stands."""

import html
import os
import re
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (N\+ \d+) \| (.+?) \| \[`(\S+):(\d+)`\]\S+ \| `(\S+)` \|$", re.MULTILINE)


def details_section(report: Path) -> str:
    """The numbered details of N+ as HTML, with links from the report's directory to the source; empty without the page.

    The links lead to files beside the run, not into a network: they are dead where the page is moved alone.
    """
    page = ROOT / "docs" / "details.md"
    rows = ROW.findall(page.read_text(encoding="utf-8")) if page.exists() else []
    if not rows:
        return ""
    here = os.path.relpath(ROOT, report.resolve().parent)
    lines = []
    for tag, claim, file, line, test in rows:
        link = f'<a href="{quote(f"{here}/{file}")}#L{line}"><code>{html.escape(f"{file}:{line}")}</code></a>'
        test_file, _, name = test.partition("::")
        proof = f'<a href="{quote(f"{here}/{test_file}")}"><code>{html.escape(name)}</code></a>'
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(claim))
        lines.append(f"<li><b>{html.escape(tag)}</b> {text}: {link}; proved by {proof}</li>")
    return (
        '<h2 id="details">The details of the paper, and where they stand</h2>'
        f'<details class="index"><summary>{len(rows)} of them</summary><ul>{"".join(lines)}</ul></details>'
    )
