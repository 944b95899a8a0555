"""Which pages the site has: README.md, docs/, course/, kernels/, and one per module, at their paths in the repository.

So the relative links of a page lead where they lead in the repository; one to a module or to what make reads leads to
the page of that file, which holds its public docstrings and its source. mkdocs calls the functions named on_*.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from nanorlhf.report import microscope
from nanorlhf.report.details_index import with_lines

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "course/*.md", "docs/*.md", "docs/slides/*.md")
PAGES += ("kernels/README.md",)
STATIC = (
    "Dockerfile",
    "constraints.txt",
    "docs/*.png",
    "docs/*/*.png",
    "docs/*/*.svg",
    "docs/*.csv",
    "docs/*/*.csv",
    "course/*.csv",
    "kernels/*.csv",
    "course/*.ipynb",
    "course/notebooks/*.ipynb",
)
MICROSCOPE = "docs/microscope/demo.html"
SCRIPTS = ("nano.py", "train_sft.py", "train_rm.py", "train_ppo.py", "train_grpo.py", "train_dpo.py", "train_rlcf.py")
SCRIPTS += ("eval.py", "bench.py")
PACKAGES = ("nanorlhf", "kernels", "data", "course", "tools")
HIDDEN = ROOT / "course" / "bugs.py"  # what `course reveal` tells
OF_SITE = ("style.css", "iframe-worker.js")


def sources() -> list[str]:
    """The files that have a page of their own, as paths from the root: scripts, modules by package, what make reads."""
    modules = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.stat().st_size)
    modules.remove(HIDDEN)
    modules.sort(key=lambda path: (PACKAGES.index(path.relative_to(ROOT).parts[0]), str(path.parent)))
    return [*SCRIPTS, *(path.relative_to(ROOT).as_posix() for path in modules), "Makefile"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for pattern in (*PAGES, *STATIC):
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    demo = microscope.page_of(microscope.page_data(ROOT / MICROSCOPE))  # its lines of code have the numbers of now
    files.append(File.generated(config, MICROSCOPE, content=demo))
    for name in OF_SITE:
        files.append(File.generated(config, name, abs_src_path=str(HERE / name)))
    folders: dict[str, list[dict[str, str]]] = {}
    for source in sources():
        files.append(File.generated(config, source + ".md", content=page_of(source)))
        folder, _, name = source.rpartition("/")
        folders.setdefault(folder, []).append({name: source + ".md"})
    assert config.nav is not None
    config.nav.append({"Code": folders.pop("") + [{f"{folder}/": pages} for folder, pages in folders.items()]})
    return files


def page_of(source: str) -> str:
    """The Markdown of a source file's page; `on_page_content` appends the source."""
    text = f"# {source}\n\n"
    if source.endswith(".py"):
        text += f"::: {source.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}\n\n"
    return text + "## Source\n"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Links to source files become links to their pages: `../nanorlhf/ppo.py#L9` to `../nanorlhf/ppo.py.md#L-9`.

    The rows of the details index get the line numbers that they lack.
    """
    known = set(sources())
    if page.file.src_uri == "docs/details.md":
        markdown = with_lines(markdown)

    def link(match: re.Match[str]) -> str:
        target = (ROOT / page.file.src_uri).parent / match[1]
        try:
            name = target.resolve().relative_to(ROOT).as_posix()
        except ValueError:
            return match[0]
        return f"]({match[1]}.md{f'#L-{match[2]}' if match[2] else '#source'})" if name in known else match[0]

    return re.sub(r"\]\(([^)#:\s]+)(?:#L(\d+))?\)", link, markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    source = page.file.src_uri.removesuffix(".md")
    if source not in sources():
        return html
    text = (ROOT / source).read_text()
    assert page.present_anchor_ids is not None
    page.present_anchor_ids |= {f"L-{number}" for number in range(1, text.count("\n") + 1)}
    # linespans: every line is a <span id="L-9">; the search knows the docstrings already
    formatter = HtmlFormatter(cssclass="highlight source", linespans="L", linenos="inline", wrapcode=True)
    code = highlight(text, get_lexer_for_filename(source), formatter)
    return f"{html}<div data-search-exclude>{code}</div>"
