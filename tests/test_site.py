"""`make docs`: the site builds without a warning, loads nothing from elsewhere, and each link leads somewhere."""

import json
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
from docs.site.docstrings import as_markdown

ROOT = Path(__file__).resolve().parent.parent


class Html(HTMLParser):
    """The ids of a page, what it links to and what it loads; the text of each line of source."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.lines: dict[str, str] = {}
        self.line, self.skipped = "", 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])
        if tag == "span" and found.get("id", "").startswith("L-"):
            self.line = found["id"]
            self.lines[self.line] = ""
        self.skipped += tag == "span" and found.get("class") == "linenos"

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self.skipped = 0
        elif tag == "pre":
            self.line = ""

    def handle_data(self, data: str) -> None:
        if self.line and not self.skipped:
            self.lines[self.line] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Raises where a link, an anchor or a page of the menu is missing: a warning ends a strict build."""
    out = tmp_path_factory.mktemp("site") / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "docs" / "site" / "mkdocs.yml"), site_dir=str(out), strict=True))
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow
def test_every_page_of_the_repository_is_there_and_none_that_tells_a_bug(site, pages) -> None:
    names = {path.relative_to(site).as_posix() for path in pages}
    texts = ["README.md", "course/README.md", "kernels/README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
    assert {name.replace("README.md", "index.md").replace(".md", ".html") for name in texts} <= names
    assert {"train_ppo.py.html", "nanorlhf/ppo.py.html", "kernels/gae.py.html", "data/tiny.py.html"} <= names
    assert "course/grade.py.html" in names and "course/bugs.py.html" not in names
    written = " ".join(path.read_text() for path in pages)
    assert not [bug.name for bug in BUGS if bug.symptom in written or f">{bug.name}<" in written]


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_and_a_place_in_it(site, pages) -> None:
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
def test_the_demos_microscope_names_the_lines_that_the_code_has_now(site, pages) -> None:
    text = (site / "docs" / "microscope" / "demo.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    for line in data["lines"]:
        file, _, number = line["source"].partition(":")
        assert line["expression"] in (ROOT / file).read_text().splitlines()[int(number) - 1]
    for name in ("lecture.html", "microscope.html"):
        assert "microscope/demo.html" in pages[site / "docs" / name].links


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site, pages) -> None:
    for path, page in pages.items():
        assert not [loaded for loaded in page.loaded if urlsplit(loaded).scheme not in ("", "data")], path
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", path.read_text()), path


@pytest.mark.slow
def test_a_link_to_a_line_leads_to_that_line(site, pages) -> None:
    links = [link for link in pages[site / "docs" / "details.html"].links if "#L-" in link]
    assert len(links) > 50
    for link in links:
        path, _, place = link.partition("#")
        source = ROOT / path.removeprefix("../").removesuffix(".html")
        expected = source.read_text().splitlines()[int(place.removeprefix("L-")) - 1]
        assert pages[(site / "docs" / path).resolve()].lines[place].strip("\n") == expected


@pytest.mark.slow
def test_the_drawing_of_a_docstring_keeps_its_columns(site) -> None:
    docstrings, _, source = (site / "nanorlhf" / "ppo.py.html").read_text().partition('class="highlight source"')
    drawing = "states     #  #  #  #  .  .      t &lt;= e + 1"
    assert source and drawing in re.sub(r"<[^>]+>", "", docstrings)


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
