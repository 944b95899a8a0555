"""Convert plain-text docstrings to Markdown: drawings, formulas and tables are recognised by their columns."""

import re
from itertools import groupby

import griffe


class PlainText(griffe.Extension):
    """Convert each docstring after it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Turn indented lines, columns and doctests into code blocks, indented dashes into lists, the rest into paragraphs.

    >>> print(as_markdown("A mean.\\n    mean = sum / n\\nOver <all> rows."))
    A mean.
    <BLANKLINE>
        mean = sum / n
    <BLANKLINE>
    Over &lt;all> rows.
    """
    blocks = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        is_list = any(line.startswith("    - ") for line in lines)
        is_doctest = lines[0].lstrip().startswith(">>>")
        has_columns = any(re.search(r"^\S.*\S {2,}\S", line) for line in lines)
        for is_indented, group in groupby(lines, lambda line: line.startswith("    ")):
            run = list(group)
            if is_list and is_indented:
                blocks.append("\n".join(escaped(line[4:]) for line in run))
            elif is_indented:
                blocks.append("\n".join(run))
            elif is_doctest or has_columns:
                blocks.append("\n".join("    " + line for line in run))
            else:
                blocks.append("\n".join(map(escaped, run)))
    return "\n\n".join(blocks)


def escaped(line: str) -> str:
    """Escape a line of text, except for backticks."""
    pieces = line.split("`")
    pieces[::2] = [re.sub(r"([*_\[\]\\])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)
