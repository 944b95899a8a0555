"""Building blocks of reports: sections of tables, figures and samples, for the terminal and for report.html.

page.html is the HTML template.
"""

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanorlhf.files import atomic, write_text
from nanorlhf.metrics.token_shift import classify
from nanorlhf.training.run_directory import Rows

Lines = list[list[str]]  # rows of a table's cells; the first has the headings
matplotlib.rcParams["text.parse_math"] = False  # names in figures are plain text: don't parse `$\\bad$` as math
MOST_POINTS = 2000  # per curve: more look the same, and make pages of many megabytes
BLUE, ORANGE, GREY = "#1f5fa8", "#c4620a", "#8a8f98"
# colour and marker of each line, distinguishable in greyscale; reused cyclically
LINES = (
    *((BLUE, "o"), (ORANGE, "s"), ("#2c8a57", "^"), ("#8a4fa3", "D")),
    *((GREY, "v"), ("#1c2024", "x"), ("#c2447a", "P"), ("#9a7b1c", "*")),
)
# the same with each line style
STYLES = tuple((color, marker, line) for line in ("-", "--", ":") for color, marker in LINES)
# the template's macros, which return markup; text passed to them is escaped
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
)
TEMPLATES.filters["kind"] = classify
markup: Any = TEMPLATES.get_template("page.html").module


# -------------------------------------------------------------------------------------------------------- 1. sections
@dataclass(frozen=True)
class Section:
    """One section of a report, in the order of its fields; empty fields and tables without rows are omitted.

    The whole section is omitted if it has no tables, figures, samples or `about`.
    """

    title: str = ""
    about: str | Markup = ""  # Markup is shown only on the page
    tables: Sequence[Lines] = ()
    notes: str = ""  # below the tables, one paragraph per line
    figures: Sequence[Figure] = ()
    caption: str = ""  # below the figures
    samples: Sequence[Markup] = ()  # cards, below a search field
    anchor: str = ""  # the heading's id, for links
    narrow: bool = False  # show tables side by side

    @property
    def filled(self) -> list[Lines]:
        return [lines for lines in self.tables if len(lines) > 1]

    def html(self) -> Markup:
        if not (self.about or self.filled or self.figures or self.samples):
            return Markup()
        about = self.about if isinstance(self.about, Markup) else self.about and markup.quiet(self.about)
        tables = [markup.table(lines) for lines in self.filled]
        parts = [
            markup.heading(self.title, self.anchor) if self.title else "",
            about,
            *([markup.columns(tables)] if self.narrow and tables else tables),
            *(map(markup.quiet, filter(None, self.notes.split("\n"))) if self.filled else ()),
            markup.figures(list(map(image, self.figures)), self.caption) if self.figures else "",
            *([markup.search(), *self.samples] if self.samples else []),
        ]
        return Markup("\n").join(part for part in parts if part)

    def text(self) -> str:
        """Return the section's tables and text for the terminal; empty if it has neither."""
        about = "" if isinstance(self.about, Markup) else self.about
        if not (about or self.filled):
            return ""
        tables = "\n\n".join(map(aligned, self.filled))
        return "\n".join(filter(None, [self.title, tables, about, self.notes if self.filled else ""]))


Page = Sequence[Section | Markup]


def text(page: Page) -> str:
    """Return the tables and texts of all sections for the terminal."""
    return "\n\n".join(filter(None, (part.text() for part in page if isinstance(part, Section))))


def number(value: float | None, ends: Sequence[float] | None = None, digits: int = 2, sign: str = "") -> str:
    """Format a number and its interval as a table cell.

    >>> number(0.5), number(0.5, (0.25, 1), 1, "+"), number(None)
    ('0.50', '+0.5 [+0.2, +1.0]', '-')
    """
    if value is None:
        return "-"
    text, *limits = (f"{x:{sign}.{digits}f}" for x in (value, *(ends or ())))
    return f"{text} [{', '.join(limits)}]" if limits else text


def percent(value: float | None, ends: Sequence[float] | None = None, sign: str = "") -> str:
    """Format a share with `number`, in percent."""
    return number(value if value is None else 100 * value, ends and [100 * end for end in ends], 2, sign)


def plus_minus(mean: float | None, std: float | None, digits: int = 3) -> str:
    """Format a mean and its standard deviation, if any, as a table cell.

    >>> plus_minus(1200.0, 0.5, 1), plus_minus(0.5, None), plus_minus(None, None)
    ('1,200.0 ± 0.5', '0.500', '-')
    """
    if mean is None:
        return "-"
    return f"{mean:,.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


class Column(NamedTuple):
    """A column of `tabulate`."""

    key: str  # in the rows
    heading: str
    digits: int = 2
    sign: str = ""  # "+" for differences; like `factor`, it doesn't apply to mean ± standard deviation
    factor: int = 1  # 100 for percent

    def cell(self, row: Mapping[str, Any]) -> str:
        """Format a row's number and its interval, at KEY_ci, or a dictionary of its mean and spread.

        >>> Column("f1", "F1", factor=100).cell({"f1": 0.5, "f1_ci": (0.25, 0.75)})
        '50.00 [25.00, 75.00]'
        >>> Column("f1", "F1").cell({"f1": {"mean": 0.5, "std": 0.25}}), Column("f1", "F1").cell({})
        ('0.50 ± 0.25', '-')
        """
        value, ends = row.get(self.key), row.get(f"{self.key}_ci")
        if isinstance(value, Mapping):
            if "std" in value:
                return plus_minus(value["mean"], value["std"], self.digits)
            ends = next((value[name] for name in ("interval", "ci", "mean_ci") if name in value), None)
            value = value["mean"]
        if value is None:
            return "-"
        return number(self.factor * value, ends and [self.factor * end for end in ends], self.digits, self.sign)


def tabulate(corner: str, columns: Sequence[Column], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Lines:
    """Return the headings, the first one `corner`, and a line per named row."""
    heading = [corner, *(column.heading for column in columns)]
    return [heading, *([name, *(column.cell(row) for column in columns)] for name, row in rows)]


def aligned(lines: list[list[str]]) -> str:
    """Format lines of cells for the terminal: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        padded = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        texts.append("  ".join([line[0].ljust(widths[0]), *padded]))
    return "\n".join(texts)


def write_page(path: Path, title: str, page: Page) -> None:
    """Write a page atomically."""
    parts = [part.html() if isinstance(part, Section) else part for part in page]
    write_text(path, markup.page(title, parts))


def write_study(path: Path, runs: Path, page: Page, pictures: dict[str, Figure]) -> list[str]:
    """Write the page of a study of `runs`, with its pictures as PNG next to it, and print its tables.

    pictures: file name -> figure. Returns the file names.
    """
    write_pictures(path.parent, pictures)
    write_page(path, str(runs), page)
    print(f"{text(page)}\n\nwritten: {', '.join([str(path), *pictures])}")
    return list(pictures)


def write_pictures(directory: Path, pictures: dict[str, Figure]) -> None:
    """Write pictures, file name -> figure, as PNG; create the directory if needed."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        with atomic(directory / name) as temporary, temporary.open("wb") as file:
            figure.savefig(file, format="png", dpi=100)


def write_gallery(
    path: Path, runs: Path, title: str, happened: Sequence[tuple[str, str]], table: Lines, drawn: dict[str, Figure]
) -> list[str]:
    """Call `write_study` with one table and a figure per name; return the file names, NAME.png.

    happened: the verdict in words, pairs of good, warn or bad and a paragraph.
    """
    sections = [Section(name, figures=[figure], anchor=name) for name, figure in drawn.items()]
    page = [markup.title(title), Section(about=markup.verdict(happened)), Section(tables=[table]), *sections]
    return write_study(path, runs, page, {f"{name}.png": figure for name, figure in drawn.items()})


# ------------------------------------------------------------------------------------------------------- 2. figures
def series(rows: Rows, key: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """Return x and the metric of the rows that have both, two arrays (points,)."""
    both = [row for row in rows if key in row and x in row]
    return np.array([row[x] for row in both], dtype=float), np.array([row[key] for row in both], dtype=float)


def thinned(*columns: np.ndarray) -> Iterator[np.ndarray]:
    """Average consecutive points so that at most MOST_POINTS remain; fewer points are unchanged."""
    size = -(-len(columns[0]) // MOST_POINTS)
    for column in columns:
        if size > 1:
            starts = np.arange(0, len(column), size)
            with np.errstate(invalid="ignore", over="ignore"):  # diverged runs
                column = np.add.reduceat(column, starts) / np.diff(starts, append=len(column))
        yield column


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Return the running mean over `width` points, fewer at the ends."""
    kernel = np.ones(max(1, min(width, len(values))))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def draw(axes: Axes, rows: Rows, key: str, label: str, color: str, smoothed: bool = False) -> None:
    """Draw the curve of one metric; smoothed: draw the running mean, with the points faint behind it."""
    steps, values = thinned(*series(rows, key))
    if smoothed:
        axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
        values = smooth(values, len(values) // 20)
    axes.plot(steps, values, color=color, label=label, linewidth=1.8, marker="o" if len(steps) < 12 else None, ms=4)


def draw_lines(axes: Axes, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw a line with markers for each name; lines: name -> x, y."""
    for (name, points), (color, marker) in zip(lines.items(), cycle(LINES), strict=False):
        axes.plot(*points, color=color, marker=marker, markersize=4, linewidth=1.8, label=name)
    axes.legend(frameon=False)


def panel(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Create a figure with a single panel, so that panels stack on narrow screens."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    label_axes(axes, title, x_label, y_label)
    return figure, axes


def label_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set title, axis labels and the style shared by all panels."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG; the same figure always gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "nanorlhf"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def image(figure: Figure) -> Markup:
    """Return a figure as an <img> with embedded SVG."""
    return markup.image(figure.axes[0].get_title("left"), base64.b64encode(svg(figure)).decode())


# -------------------------------------------------------------------------------------------------------- 3. samples
def answer(
    name: str, text: str, scores: dict[str, float | None], pieces: list[tuple[str, int]] | None = None
) -> Markup:
    """Return a response and its scores; with `pieces` (tokens and their ranks), tokens are coloured."""
    known = " · ".join(f"{label} {value:z.2f}" for label, value in scores.items() if value is not None)
    return markup.answer(name, text.strip(), known, pieces)
