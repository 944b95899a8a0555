"""Pages of the site: README.md, docs/, experiments/, course/, kernels/, one per module, at the repository's paths.

Relative links between pages therefore work as in the repository. A link to a module or a pipeline leads to that file's
page, which shows its public docstrings and its source, in the version that the site is built from. home.md is the start
page, and each exercise has a page. mkdocs calls the functions named on_*.
"""

import re
from functools import cache
from html import escape
from itertools import cycle
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from docs.site import exercise_pages, formulas
from nanorlhf import __version__
from nanorlhf.report import microscope
from nanorlhf.report.details_index import with_lines

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "course/*.md", "docs/*.md", "docs/slides/*.md")
PAGES += ("kernels/README.md", "experiments/README.md", "experiments/*/README.md", ".github/SECURITY.md")
STATIC = (
    ".devcontainer/Dockerfile",
    ".ci/constraints.txt",
    ".binder/postBuild",
    "docs/*.png",
    "docs/*/*.png",
    "docs/*/*.svg",
    "docs/*.csv",
    "docs/*/*.csv",
    "experiments/*/*.png",
    "experiments/*/*.csv",
    "experiments/*/*.sh",
    "course/*.csv",
    "tools/mutants/*.csv",
    "kernels/*.csv",
    "course/*.ipynb",
    "course/notebooks/*.ipynb",
)
MICROSCOPE = "docs/microscope/demo.html"
SCRIPTS = ("nano.py", "train_sft.py", "train_rm.py", "train_ppo.py", "train_grpo.py", "train_dpo.py", "train_rlcf.py")
SCRIPTS += ("eval.py",)
PACKAGES = ("nanorlhf", "kernels", "data", "bench", "experiments", "course", "tools")
HIDDEN = ROOT / "course" / "bugs.py"  # the answers that `course reveal` prints
HOME = "docs/site/home.md"
SITE_FILES = {
    "look.css": ROOT / "nanorlhf" / "report" / "look.css",  # the reports' colours
    "style.css": HERE / "style.css",
    "access.js": HERE / "access.js",
    "iframe-worker.js": HERE / "iframe-worker.js",
    "card.png": HERE / "card.png",
}
CODE = "<!-- the source -->"  # on_post_page replaces this with the source
SHOWN = ("        # 2.3 ", "        # 2.6 ")  # the home page shows train_ppo.py between these comments
CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.DOTALL)
FLAG = re.compile(r"<[^>]*>|(?<![^\s>(\[])--[a-z][\w.-]*")  # or a tag, whose attributes may contain flags
MOST_IN_ONE_LINE, MOST_SIDE_BY_SIDE = 30, 60  # characters of a cell, and of the longest cells of a row, on a phone
ROWS = {"kl": "KL, nats", "rewards": "reward", "values": "value", "advantages": "advantage"}  # rows of the token table


@cache
def sources() -> list[str]:
    """Return the source files that get a page, as paths from the root: scripts, modules by package, pipelines."""
    modules = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.stat().st_size)
    modules.remove(HIDDEN)
    modules.sort(key=lambda path: (PACKAGES.index(path.relative_to(ROOT).parts[0]), str(path.parent)))
    modules += sorted((ROOT / "pipelines").glob("*.sh"))
    return [*SCRIPTS, *(path.relative_to(ROOT).as_posix() for path in modules), "Makefile"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.copyright = f"nanorlhf {__version__}"
    fences = [{"name": "math", "class": "formula", "format": formulas.fence}]
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": fences}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for pattern in (*PAGES, *STATIC):
        for path in sorted(ROOT.glob(pattern)):
            file = File.generated(
                config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED
            )
            file.dest_uri = file.dest_uri.removeprefix(".")  # a server may not serve hidden files
            files.append(file)
    demo = microscope.page_of(microscope.page_data(ROOT / MICROSCOPE))  # with current line numbers
    files.append(File.generated(config, MICROSCOPE, content=demo))
    for name, path in SITE_FILES.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    home, readme = File.generated(config, HOME, content=home_page()), files.get_file_from_path("README.md")
    assert readme is not None
    home.name, home.dest_uri, readme.name, readme.dest_uri = "index", "index.html", "readme", "readme.html"
    files.append(home)
    exercises = []
    for path, text in exercise_pages.pages():
        files.append(File.generated(config, path, content=text))
        exercises.append(path)
    folders: dict[str, list[dict[str, str]]] = {}
    for source in sources():
        files.append(File.generated(config, source + ".md", content=source_page(source)))
        folder, _, name = source.rpartition("/")
        folders.setdefault(folder, []).append({name: source + ".md"})
    assert config.nav is not None
    [course] = (item["Course"] for item in config.nav if "Course" in item)
    course.append({"Exercises": exercises})
    config.nav.append({"Code": folders.pop("") + [{f"{folder}/": pages} for folder, pages in folders.items()]})
    return files


def source_page(source: str) -> str:
    """Return the Markdown of a source file's page; `on_page_content` appends the source."""
    text = f"# {source}\n\n"
    if source.endswith(".py"):
        text += f"::: {source.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}\n\n"
    return text + "## Source\n"


def home_page() -> str:
    """Fill home.md with lines of the training loop and with a response from the demo's PPO run and its numbers."""
    lines = (ROOT / "train_ppo.py").read_text().splitlines()
    first, last = (next(i for i, line in enumerate(lines) if line.startswith(start)) for start in SHOWN)
    code = "\n".join(line.removeprefix("        ") for line in lines[first:last]).rstrip()
    data = microscope.page_data(ROOT / MICROSCOPE)
    response = data["updates"][-1]["responses"][0]
    post = response["query"].partition("POST: ")[2].partition("\n\nTL;DR")[0]
    text = (HERE / "home.md").read_text()
    for name, value in {
        "loop_link": f"../../train_ppo.py#L{first + 1}",
        "loop": f"```python\n{code}\n```",
        "post": f"The post: *{' '.join(post.split())}* In PPO's last rollout the summary below scores "
        f"{response['constants']['score']:.2f}:",
        "tokens": token_table(response),
    }.items():
        assert f"{{{{ {name} }}}}" in text, name
        text = text.replace(f"{{{{ {name} }}}}", value)
    return text


def token_table(response: dict) -> str:
    """Return an HTML table of a response's numbers by token, blue if positive, orange if negative."""
    tokens = [*response["texts"], "(after EOS)"]
    head = "".join(f"<th scope='col'>{escape(token.strip())}</th>" for token in tokens)
    body = ""
    for key, name in ROWS.items():
        cells = [*response["cells"][key], None][: len(tokens)]
        most = max(abs(x) for x in cells if x is not None)
        body += f"<tr><th scope='row'>{name}</th>"
        for x in cells:
            shade = 0 if x is None else round(40 * abs(x) / most)
            colour = "orange" if x is not None and x < 0 else "blue"
            style = f"background: color-mix(in srgb, var(--{colour}) {shade}%, transparent)"
            body += f'<td style="{style}">{"" if x is None else f"{x:z.2f}"}</td>'
        body += "</tr>"
    caption = "<caption>KL, reward, value and advantage of each token</caption>"
    table = f"<table>{caption}<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="numbers">{table}</div>'


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Link to the pages of source files: `../nanorlhf/ppo.py#L9` becomes `../nanorlhf/ppo.py.md#L-9`.

    Add missing line numbers to the details index.
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


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Label the theme's search field for screen readers, and add the code to a source file's page.

    The code is added here because indexing it would double the search's time, and docstrings are indexed already.
    """
    output = output.replace('role="dialog">', 'role="dialog" aria-label="Search">')
    if CODE not in output:
        return output
    source = page.file.src_uri.removesuffix(".md")
    # linespans: every line is a <span id="L-9">
    formatter = HtmlFormatter(cssclass="highlight source", linespans="L", linenos="inline", wrapcode=True)
    return output.replace(CODE, highlight((ROOT / source).read_text(), get_lexer_for_filename(source), formatter))


def table_for_phones(match: re.Match[str]) -> str:
    """Return a table in a <div> with a class for phones.

    A table with short cells scrolls next to its first column. If the cells are sentences, each row becomes a block, and
    each cell follows its column's heading.
    """
    head, split, body = match[0].partition("<tbody>")
    headings = [plain(cell) for cell in CELL.findall(head)]
    rows = [[len(plain(cell)) for cell in CELL.findall(row)] for row in body.split("</tr>")[:-1]]
    longest = [max(column) for column in zip(*rows, strict=True)]
    if max(longest[1:]) <= MOST_IN_ONE_LINE:
        return f'<div class="scrolls short">{match[0]}</div>'
    if sum(longest) <= MOST_SIDE_BY_SIDE:
        return f'<div class="scrolls">{match[0]}</div>'
    labels = cycle(headings)
    body = re.sub("<td", lambda _: f'<td data-heading="{next(labels)}"', body)
    return f'<div class="scrolls stacks">{head}{split}{body}</div>'


def picture_for_phones(match: re.Match[str], page: Page) -> str:
    """Return the <p> of a picture. A wide one scrolls, so that its letters can be read; a narrow PNG shrinks."""
    with ((ROOT / page.file.dest_uri).parent / match[1]).open("rb") as file:
        head = file.read(20)  # a PNG's width is in bytes 16 to 19
    is_narrow = head.startswith(b"\x89PNG") and int.from_bytes(head[16:]) < 600
    return "<p>" if is_narrow else '<p class="scrolls">'


def plain(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html).strip()


def code_for_phones(match: re.Match[str]) -> str:
    """Mark shell commands and plain text without columns: their lines may wrap."""
    is_shell = match[0].startswith(('<div class="language-sh', '<div class="language-bash'))
    is_plain = "<span class=" not in match[0] and not re.search(r"\S {2,}(?![ =>#-])", plain(match[0]))
    return match[0].replace("highlight", "highlight wraps", 1) if is_shell or is_plain else match[0]


def on_page_content(html: str, page: Page, **_: object) -> str:
    html = html.replace("<th></th>", "<td></td>")  # an empty cell isn't a heading
    html = re.sub(r'<p>(?=<img[^>]*src="([^"]+)")', lambda match: picture_for_phones(match, page), html)
    html = re.sub(r"<table>.*?</table>", table_for_phones, html, flags=re.DOTALL)
    html = re.sub(r'<div class="(?:language-\w+ )?highlight">.*?</div>', code_for_phones, html, flags=re.DOTALL)
    html = FLAG.sub(lambda match: match[0] if match[0][0] == "<" else f'<span class="flag">{match[0]}</span>', html)
    source = page.file.src_uri.removesuffix(".md")
    if source not in sources():
        return html
    num_lines = (ROOT / source).read_text().count("\n")
    assert page.present_anchor_ids is not None
    page.present_anchor_ids |= {f"L-{number}" for number in range(1, num_lines + 1)}
    return html + CODE
