"""The page template: text never becomes markup, and the package contains the template. Curves of long runs."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from nanorlhf.report.page import MOST_POINTS, markup, thinned, write_page
from nanorlhf.report.run_curves import ppo_figures, rm_figures, sft_figures

ROOT = Path(__file__).resolve().parents[2]
EVIL = "<script>alert('1')</script>\"&{{ 7 * 7 }}"
SAFE = "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&#34;&amp;{{ 7 * 7 }}"


@pytest.mark.parametrize(
    "made",
    [
        markup.page(EVIL, [EVIL]),
        markup.heading(EVIL, EVIL),
        markup.quiet(EVIL),
        markup.bullets([EVIL]),
        markup.folded(EVIL, EVIL),
        markup.table([[EVIL], [EVIL]]),
        markup.image(EVIL, ""),
        markup.figures([EVIL], EVIL),
        markup.card(EVIL, [EVIL]),
        markup.answer(EVIL, EVIL, EVIL),
        markup.answer("name", "", "", [(EVIL, 1)]),
        markup.legend(EVIL, {"marginal": EVIL}),
        markup.program(EVIL, "passed", 0.5, "", (EVIL, EVIL, EVIL), EVIL),
        markup.program("name", "passed", None, EVIL, None, ""),
        markup.ranked(EVIL, [{"text": EVIL, "representative": True, "weight": 1.0, "cluster": 0}]),
        markup.index("root", [("N+ 1", EVIL, "a.py", "1", "b.py", EVIL)]),
    ],
)
def test_no_text_becomes_markup(made) -> None:
    assert SAFE in made and "alert('" not in made and "49" not in made


def test_a_token_shows_its_rank() -> None:
    tokens = markup.tokens([(" so", 1), ("<b>", 5)])
    assert tokens == (
        '<span class="unshifted" title="rank 1"> so</span><span class="shifted" title="rank 5">&lt;b&gt;</span>'
    )


def test_the_blamed_text_is_marked_and_blank_text_pointed_at() -> None:
    code = re.search(r"<pre>(.*)</pre>", markup.program("p", "compile_error", None, "ab;c", ("a", "b;", "c"), ""))
    assert code[1] == "a<mark>b;</mark>c"
    code = re.search("<pre>(.*)</pre>", markup.program("p", "compile_error", None, "a c", ("a", " ", "c"), ""))
    assert code[1] == "a<mark>(here)</mark> c"
    assert "<pre><i>empty</i></pre>" in markup.program("p", "passed", None, "", None, "")


def test_a_page_is_whole_html_without_a_network(tmp_path) -> None:
    write_page(tmp_path / "page.html", "runs/eval", [markup.quiet("one"), "", markup.quiet("two")])
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>\n<html") and page.rstrip().endswith("</body></html>")
    assert '<p class="quiet">one</p>' in page and "<title>nanorlhf: runs/eval</title>" in page
    assert not re.search(r"https?:|url\(", page)


def test_non_python_files_are_package_data() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {file for package, globs in data.items() for glob in globs
               for file in (ROOT / package.replace(".", "/")).glob(glob)}  # fmt: skip
    files = [path for path in (ROOT / "nanorlhf").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path for path in files if path.suffix != ".py"} == shipped
    assert ROOT / "nanorlhf/report/page.html" in shipped


@pytest.mark.parametrize("length", [0, 1, MOST_POINTS])
def test_a_curve_of_few_points_is_drawn_as_it_is(length) -> None:
    points = np.arange(length, dtype=float)
    assert all(column is points for column in thinned(points, points))


def test_a_long_curve_is_drawn_as_the_means_of_consecutive_points() -> None:
    points = np.random.default_rng(0).normal(size=3 * MOST_POINTS - 1)
    blocks = [points[i : i + 3] for i in range(0, len(points), 3)]
    (means,) = thinned(points)
    assert means == pytest.approx([sum(block) / len(block) for block in blocks])
    points[[3, 6, 7]] = np.inf, np.inf, -np.inf
    (spoiled,) = thinned(points)
    assert (
        spoiled[1] == np.inf and np.isnan(spoiled[2]) and (np.delete(spoiled, [1, 2]) == np.delete(means, [1, 2])).all()
    )


def test_the_curves_of_a_long_run_have_few_points() -> None:
    names = ("objective/score", "gold_score", "objective/kl", "response_length", "eos_rate", "loss", "accuracy")
    rows = [{"step": i, **dict.fromkeys(names, float(i))} for i in range(50_000)]
    axes = [figure.axes[0] for draw in (ppo_figures, rm_figures, sft_figures) for figure in draw(rows)]
    lines = [line.get_xdata() for panel in axes for line in panel.lines if line.get_label() != "chance"]
    points = [dots.get_offsets() for panel in axes for dots in panel.collections]
    assert {MOST_POINTS} == {len(x) for x in (*lines, *points) if len(x)}
