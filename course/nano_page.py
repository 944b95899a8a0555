"""Write docs/nano.md from nano.py: the comments become prose next to the code.

python -m course.nano_page        # writes docs/nano.md
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, PAGE = ROOT / "nano.py", ROOT / "docs" / "nano.md"
RULE = re.compile(r"# -{3,} (?P<title>.+)")


def split_blocks(source: str) -> list[tuple[str, list[str], list[str]]]:
    """Split nano.py into (title, prose, code) at each unindented comment block; most have no title."""
    blocks: list[tuple[str, list[str], list[str]]] = []
    title, prose, code = "", [], []
    for line in source.splitlines():
        if line.startswith("#"):
            if code:
                blocks.append((title, prose, code))
                title, prose, code = "", [], []
            rule = RULE.fullmatch(line)
            if rule:
                title = rule["title"]
            else:
                prose.append(line.removeprefix("#").removeprefix(" "))
        elif line or code:
            code.append(line)
    return [*blocks, (title, prose, code)]


def page(source: str) -> str:
    """Return the whole page as Markdown."""
    about = ast.get_docstring(ast.parse(source))
    assert about is not None
    title, _, about = about.partition(": ")
    after = source[source.index('"""', 3) + 3 :]
    lines = [
        f"# {title}", "", "<!-- written by `python -m course.nano_page` from nano.py -->", "",
        about[0].upper() + about[1:], "", "This page is all of [nano.py](../nano.py).",
    ]  # fmt: skip
    for heading, prose, code in split_blocks(after):
        if heading:
            lines += ["", f"## {heading}"]
        text = "\n".join(code).strip("\n")
        block = ["```python", text, "```"]
        if prose:
            prose = [re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", r"[docs/\1](\1\2)", line) for line in prose]
            block = ['<div class="columns" markdown="1">', '<div markdown="1">', "", *prose, "", "</div>", ""] + block
            block += ["", "</div>"]
        lines += ["", *block]
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page(SOURCE.read_text()))
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
