"""Blocks of ```math as drawings: TeX, laid out by matplotlib, as SVG in the colour of the text around it.

Nothing is loaded and no script runs, so a formula shows without a network. Of TeX there is what `mathtext` knows.
"""

from html import escape
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextToPath

SCALE = 1.3  # of a letter to those of the text: indices stay readable
COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


def fence(source: str, *_: Any, **__: Any) -> str:
    """A custom fence of pymdownx.superfences. Raises ValueError for what is no formula."""
    tex = " ".join(source.split())
    drawing = TextToPath()
    vertices, codes = drawing.get_text_path(FontProperties(math_fontfamily="stix"), f"${tex}$", ismath=True)
    points = np.array(vertices) * (1, -1)  # SVG counts downwards
    is_drawn = np.array(codes) != Path.CLOSEPOLY
    points -= points[is_drawn].min(0)
    width, height = points[is_drawn].max(0)
    steps: list[str] = []
    last = None
    for px, py, code in zip(*points.T, codes, strict=True):
        if code == Path.CLOSEPOLY:
            steps.append("Z")
        else:  # the points of a curve follow each other under one letter
            steps.append(f"{'' if code == last else COMMANDS[code]}{px:.0f} {py:.0f}")
        last = None if code in (Path.CLOSEPOLY, Path.MOVETO) else code
    return (
        f'<div class="formula">'
        f'<svg role="img" aria-label="{escape(tex)}" viewBox="0 0 {width:.1f} {height:.1f}" '
        f'style="width: {SCALE * width / drawing.FONT_SCALE:.2f}em"><path d="{" ".join(steps)}"/></svg></div>'
    )
