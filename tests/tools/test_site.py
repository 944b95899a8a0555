"""`make docs`: the site builds without a warning, loads nothing from other hosts, and has no broken links.

With a browser: the pages are accessible in both themes, and on a phone.
"""

import ast
import html
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="pip install -e '.[docs]'")
pytest.importorskip("mkdocstrings", reason="pip install -e '.[docs]'")

from mkdocs.commands.build import build
from mkdocs.config import load_config

from course.bugs import BUGS
from course.edit import find_function
from course.exercises import EXERCISES, Exercise
from docs.site import exercise_pages, formulas
from docs.site.docstrings import as_markdown
from docs.site.pages import code_for_phones, table_for_phones
from nanorlhf import __version__
from tests.helpers.page_commands import check_page, read_page

ROOT = Path(__file__).resolve().parents[2]


class Html(HTMLParser):
    """A page's ids, links and loaded files, and the text of each line of source code."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.alts: dict[str, str] = {}  # picture -> alt text
        self.lines: dict[str, str] = {}
        self.line, self.skipped = "", 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])
        if tag == "img":
            self.alts[values["src"]] = values.get("alt", "")
        if tag == "span" and values.get("id", "").startswith("L-"):
            self.line = values["id"]
            self.lines[self.line] = ""
        self.skipped += tag == "span" and values.get("class") == "linenos"

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self.skipped = 0
        elif tag == "pre":
            self.line = ""

    def handle_data(self, data: str) -> None:
        if self.line and not self.skipped:
            self.lines[self.line] += data


def html_text(page: str) -> str:
    """Return the visible text of a page."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site. A strict build fails on warnings, so it raises if a link, an anchor or a menu page is missing."""
    out = tmp_path_factory.mktemp("site") / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "docs" / "site" / "mkdocs.yml"), site_dir=str(out), strict=True))
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow
def test_every_page_is_on_the_site_except_the_bugs_descriptions(site, pages) -> None:
    names = {path.relative_to(site).as_posix() for path in pages}
    texts = ["README.md", "course/README.md", "kernels/README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
    texts[0] = "readme.md"  # the root's index is the home page
    assert {name.replace("README.md", "index.md").replace(".md", ".html") for name in texts} <= names
    assert "index.html" in names
    assert {f"course/exercises/{exercise.name}.html" for exercise in EXERCISES} <= names
    assert {"train_ppo.py.html", "nanorlhf/ppo.py.html", "kernels/gae.py.html", "data/tiny.py.html"} <= names
    assert "course/grader/grade.py.html" in names and "course/bugs.py.html" not in names
    written = " ".join(path.read_text() for path in pages)
    assert not [bug.name for bug in BUGS if bug.symptom in written or f">{bug.name}<" in written]


@pytest.mark.slow
def test_the_site_has_no_broken_links(site, pages) -> None:
    lost = []
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost


@pytest.mark.slow
def test_the_demos_microscope_refers_to_current_lines(site, pages) -> None:
    text = (site / "docs" / "microscope" / "demo.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    for line in data["lines"]:
        file, _, number = line["source"].partition(":")
        assert line["expression"] in (ROOT / file).read_text().splitlines()[int(number) - 1]
    for name in ("lecture.html", "microscope.html"):
        assert "microscope/demo.html" in pages[site / "docs" / name].links


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site, pages) -> None:
    for path, page in pages.items():
        assert not [loaded for loaded in page.loaded if urlsplit(loaded).scheme not in ("", "data")], path
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", path.read_text()), path


@pytest.mark.slow
def test_a_link_to_a_line_leads_to_that_line(site, pages) -> None:
    links = [link for link in pages[site / "docs" / "details.html"].links if "#L-" in link]
    assert len(links) > 50
    for link in links:
        path, _, anchor = link.partition("#")
        source = ROOT / path.removeprefix("../").removesuffix(".html")
        expected = source.read_text().splitlines()[int(anchor.removeprefix("L-")) - 1]
        assert pages[(site / "docs" / path).resolve()].lines[anchor].strip("\n") == expected


@pytest.mark.slow
def test_the_drawing_of_a_docstring_keeps_its_columns(site) -> None:
    docstrings, _, source = (site / "nanorlhf" / "ppo.py.html").read_text().partition('class="highlight source"')
    drawing = "states     #  #  #  #  .  .      t &lt;= e + 1"
    assert source and drawing in re.sub(r"<[^>]+>", "", docstrings)


@pytest.mark.slow
def test_every_picture_has_alt_text(pages) -> None:
    alts = {(path.name, src): alt for path, page in pages.items() for src, alt in page.alts.items()}
    assert len(alts) > 20
    assert not [picture for picture, alt in alts.items() if len(alt.split()) < 3]


@pytest.mark.slow
def test_the_home_page_shows_the_current_loop_and_a_runs_numbers(site) -> None:
    text = html_text((site / "index.html").read_text())
    loop = (ROOT / "train_ppo.py").read_text().partition("        # 2.3 ")[2].partition("        # 2.6 ")[0]
    lines = [line.strip() for line in loop.splitlines() if line.strip()]
    assert len(lines) > 12 and all(line in text for line in lines)
    assert "neighbour" in text and "2.88" in text and "{{" not in text
    assert f"nanorlhf {__version__}" in text


@pytest.mark.slow
def test_a_page_links_to_the_previous_and_the_next(site) -> None:
    text = (site / "docs" / "lecture.html").read_text()
    assert re.search(r'<a href="nano.html" class="md-footer__link md-footer__link--prev"', text)
    assert "md-footer__link--next" in text


@pytest.mark.slow
def test_reports_and_site_share_a_style_sheet(site) -> None:
    assert (site / "look.css").read_text() == (ROOT / "nanorlhf/report/look.css").read_text()
    for text in ((ROOT / "nanorlhf/report" / name).read_text() for name in ("page.html", "microscope.html")):
        style = text.partition("<style>")[2].partition("</style>")[0]
        assert "look" in style and not re.search(r"#[0-9a-f]{6}", style)


# ----------------------------------------------------------------------------------------------------- 2. the exercises
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_an_exercises_page_has_the_task_and_no_solution(exercise: Exercise) -> None:
    text = exercise_pages.exercise_page(exercise)
    assert exercise.hint in text
    for function in exercise.functions:
        module, _, name = function.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        node = find_function(source, name)
        assert f"def {node.name}(" in text and (ast.get_docstring(node) or "").partition("\n")[0] in text
        body = node.body[1:] if ast.get_docstring(node) else node.body
        solution = {ast.unparse(statement) for statement in body}
        [shown] = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if f"def {node.name}(" in block]
        [written] = [child for child in ast.walk(ast.parse(shown)) if isinstance(child, ast.FunctionDef)]
        assert ast.unparse(written.body[-1]) == "..." and len(written.body) <= 2
        assert not solution & {ast.unparse(statement) for statement in written.body}
    page = read_page("docs/exercise.md", text)
    assert page.commands and not check_page(page).problems


# ------------------------------------------------------------------------------------------------------ 3. the formulas
def test_a_formula_is_drawn_with_its_tex_as_label() -> None:
    drawn = formulas.fence("\\frac{a}{b} < 1\n", "math", "formula", {}, None)
    assert 'aria-label="\\frac{a}{b} &lt; 1"' in drawn and "<path d=" in drawn and "currentColor" not in drawn
    box = [float(x) for x in re.search(r'viewBox="([^"]+)"', drawn)[1].split()]
    points = [int(x) for x in re.findall(r"-?\d+", re.search(r' d="([^"]+)"', drawn)[1])]
    assert box[:2] == [0, 0] and min(points) == 0
    assert abs(max(points[::2]) - box[2]) <= 0.5 and abs(max(points[1::2]) - box[3]) <= 0.5


def test_an_invalid_formula_fails_the_build() -> None:
    with pytest.raises(ValueError, match="frac"):
        formulas.fence("\\frac{a}")


def test_every_formula_of_the_pages_can_be_drawn() -> None:
    blocks = [
        block for path in ROOT.glob("docs/*.md") for block in re.findall(r"```math\n(.*?)```", path.read_text(), re.S)
    ]
    assert len(blocks) > 8
    for block in blocks:
        assert "<path" in formulas.fence(block)


def test_equations_in_one_block_are_drawn_separately() -> None:
    drawn = formulas.fence("a = b \\qquad c = d")
    assert re.findall(r'aria-label="([^"]+)"', drawn) == ["a = b", "c = d"] and drawn.count('class="formula"') == 1


# ----------------------------------------------------------------------------------------------------- 4. on a phone
SENTENCE = "<code>f</code> is described by a long sentence with its purpose and its reason."


@pytest.mark.parametrize(
    ("cells", "kind"),
    [(["ppo", "0.91"], "scrolls short"), (["ppo", 9 * "0.91"], "scrolls"), (["ppo", SENTENCE], "scrolls stacks")],
)
def test_a_row_of_sentences_becomes_a_block_with_headings(cells, kind) -> None:
    head = "<thead><tr><th>name</th><th>the <b>why</b></th></tr></thead>"
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    table = f"<table>{head}<tbody><tr>{body}</tr></tbody></table>"
    html = re.sub(".+", table_for_phones, table)
    assert html.startswith(f'<div class="{kind}"><table>')
    headings = ["name", "the why"] if kind == "scrolls stacks" else []
    assert re.findall('data-heading="([^"]*)"', html) == headings
    assert html_text(html) == html_text(table)


@pytest.mark.parametrize(
    ("language", "code", "wraps"),
    [
        ("sh", "a --b     # c", True),
        ("text", "loss   = -log p", True),
        ("text", "  indented", True),
        ("text", "policy   score\nppo      0.91", False),
        ("python", '<span class="n">x</span>', False),
    ],
)
def test_commands_and_sentences_wrap_but_columns_do_not(language, code, wraps) -> None:
    html = f'<div class="language-{language} highlight"><pre><code><span id="line-0-1">{code}</span></code></pre></div>'
    marked = re.sub("(?s).+", code_for_phones, html)
    assert ("wraps" in marked) == wraps and marked.replace(" wraps", "") == html


# ----------------------------------------------------------------------------------------------------- 5. in a browser
# one page of each kind, because pages of a kind have the same problems
KINDS = ("index", "readme", "docs/lecture", "docs/algorithms", "docs/nano", "docs/stackoverflow", "kernels/gae.py",
         "course/exercises/index", "course/exercises/whitening", "docs/microscope/demo",
         "nanorlhf/doctor/__main__.py")  # fmt: skip
SEARCH = """new Promise(done => {
  const field = document.querySelector("[data-md-component=search-query]");
  field.value = "whiten"; field.focus(); field.dispatchEvent(new Event("keyup", {bubbles: true}));
  const look = () => document.querySelector(".md-search-result__item a")?.href;
  const timer = setInterval(() => { if (look()) { clearInterval(timer); done(look()); } }, 100);
  setTimeout(() => { clearInterval(timer); done(look() ?? null); }, 20000);
})"""


@pytest.mark.slow
def test_every_kind_of_page_is_accessible_at_two_widths(site, pages, unreadable) -> None:
    """`make accessibility` checks every page, which takes minutes. 404.html is skipped: its styles have absolute
    addresses and need a server."""
    names = sorted(pages) if os.environ.get("ALL_PAGES") else [site / f"{name}.html" for name in KINDS]
    wrong = [problem for page in names for problem in unreadable(page)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_text_fits_on_a_phone(site, pages, browser) -> None:
    """Pages of modules look alike, as do exercises, so one of each is checked."""
    alike = re.compile(r"\.(py|sh)\.html$|/exercises/(?!index|whitening)")
    texts = [page for page in sorted(pages) if not alike.search(page.as_posix())]
    assert len(texts) > 50
    wrong = [problem for page in [*texts, site / "train_ppo.py.html"] for problem in browser.misfits(page, 400)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_search_finds_a_function_without_a_server(site, browser) -> None:
    browser.show(1200, "light")
    browser.open((site / "index.html").as_uri())
    address = browser.ask(SEARCH)
    assert address is not None and (site / urlsplit(address).path.removeprefix(str(site)).lstrip("/")).exists()


# ---------------------------------------------------------------------------------------------------------- 6. the text
@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("a * b * c_d [x] <y> `a*b`", r"a \* b \* c\_d \[x\] &lt;y> `a*b`"),
        ("A mean.\n    m = s / n\nOver rows.", "A mean.\n\n    m = s / n\n\nOver rows."),
        ("b     size\nlong  the rest", "    b     size\n    long  the rest"),
        (">>> f(1)\n2", "    >>> f(1)\n    2"),
        ("Left out:\n    - a\n    - b", "Left out:\n\n- a\n- b"),
        ("One.\n\nTwo.", "One.\n\nTwo."),
    ],
)
def test_a_docstring_becomes_markdown(docstring, markdown) -> None:
    assert as_markdown(docstring) == markdown
