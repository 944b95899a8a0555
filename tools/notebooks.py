"""Build the notebooks in course/notebooks from the Markdown files next to them and from the lecture.

    python -m tools.notebooks

A block fenced as `python NAME` becomes a code cell, the text between blocks becomes Markdown cells.
`<!-- lecture: TITLE -->` inserts that section of docs/lecture.md without its pictures. Edit the Markdown, not the
notebooks.
"""

import json
import re
from pathlib import Path

from tools.repository import repository

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "course" / "notebooks"
FENCE = re.compile(r"^```python ([\w-]+)\n(.*?)^```$", re.M | re.S)


def section(title: str) -> str:
    """Return a section of the lecture without pictures, the commands that draw them, and links to other pages."""
    text = (ROOT / "docs" / "lecture.md").read_text(encoding="utf-8")
    start = text.index(f"## {title}\n")
    text = text[start : text.index("\n## ", start + 1)]
    text = re.sub(r"!\[[^]]*\]\([^)]*\)\n+`python [^`]*`\n+", "", text)
    return re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).strip()


def badges(name: str) -> str:
    """Return links that open a notebook of the public repository on Colab and on Binder."""
    file = f"course/notebooks/{name}.ipynb"
    colab = f"https://colab.research.google.com/github/{repository()}/blob/main/{file}"
    binder = f"https://mybinder.org/v2/gh/{repository()}/main?labpath={file.replace('/', '%2F')}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})\n"
        f"[![Open in Binder](https://mybinder.org/badge_logo.svg)]({binder})\n"
    )


def notebook(page: Path) -> dict:
    """Convert a page to a notebook in Jupyter's format 4.5, without outputs; badges follow its title."""
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    text = f"{title}\n\n{badges(page.stem)}\n{rest}"
    text = re.sub(r"<!-- lecture: (.*?) -->", lambda match: section(match[1]), text)
    cells: list[dict] = []

    def add(kind: str, id_: str, source: str, **more: object) -> None:
        if source.strip():
            lines = source.strip("\n").splitlines(keepends=True)
            cells.append({"cell_type": kind, "id": id_, "metadata": {}, "source": lines} | more)

    end = 0
    for match in FENCE.finditer(text):
        add("markdown", f"before-{match[1]}", text[end : match.start()])
        add("code", match[1], match[2], execution_count=None, outputs=[])
        end = match.end()
    add("markdown", "end", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        file = page.with_suffix(".ipynb")
        file.write_text(json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
