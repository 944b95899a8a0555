"""Render ```math blocks as SVG in the colour of the surrounding text, with matplotlib's TeX layout.

Formulas need no scripts and no network. Only the TeX that `mathtext` supports works.
"""

from html import escape
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextToPath

SCALE = 1.3  # letter size relative to the text, so that indices stay readable
COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


def fence(source: str, *_: Any, **__: Any) -> str:
    r"""Format a custom fence of pymdownx.superfences. Raises ValueError if the source isn't a formula.

    Equations separated by \qquad are drawn separately, so that a narrow page can put them below each other.
    """
    equations = " ".join(source.split()).split(r" \qquad ")
    return f'<div class="formula">{"".join(map(draw, equations))}</div>'


def draw(tex: str) -> str:
    drawing = TextToPath()
    vertices, codes = drawing.get_text_path(FontProperties(math_fontfamily="stix"), f"${tex}$", ismath=True)
    points = np.array(vertices) * (1, -1)  # SVG's y axis points down
    is_drawn = np.array(codes) != Path.CLOSEPOLY
    points -= points[is_drawn].min(0)
    width, height = points[is_drawn].max(0)
    steps: list[str] = []
    last = None
    for px, py, code in zip(*points.T, codes, strict=True):
        if code == Path.CLOSEPOLY:
            steps.append("Z")
        else:  # the points of a curve share one command letter
            steps.append(f"{'' if code == last else COMMANDS[code]}{px:.0f} {py:.0f}")
        last = None if code in (Path.CLOSEPOLY, Path.MOVETO) else code
    return (
        f'<svg role="img" aria-label="{escape(tex)}" viewBox="0 0 {width:.1f} {height:.1f}" '
        f'style="--width: {SCALE * width / drawing.FONT_SCALE:.2f}em"><path d="{" ".join(steps)}"/></svg>'
    )
