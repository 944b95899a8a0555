"""The slides: Markdown decks in docs/slides, turned into self-contained HTML pages to show and print.

The decks use Marp's dialect, so other programs can show them too: `---` separates slides, a comment is a speaker's
note, and each item of a `*` list appears with a key press.
"""

import base64
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from course.copies import ROOT
from course.handout import browser_here, print_page
from nanorlhf.errors import InputError
from nanorlhf.files import write_text

DECKS = ROOT / "docs" / "slides"
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
@page {{ size: 32cm 18cm; margin: 0; }}
body {{ margin: 0; font: clamp(16px, 2.6vw, 28px)/1.45 Georgia, serif; color: #1a1a1a; background: #fff; }}
section {{ box-sizing: border-box; width: 100vw; height: 100vh; padding: 6vh 7vw; display: none; }}
section.now {{ display: block; }}
h1 {{ font-size: 1.9em; line-height: 1.15; margin: .4em 0; }} h2 {{ font-size: 1.35em; margin: 0 0 .7em; }}
li {{ margin: .35em 0; }} li.later {{ visibility: hidden; }}
code, pre {{ font-size: .85em; background: #f2f2ee; }} code {{ padding: 0 .2em; overflow-wrap: anywhere; }}
pre {{ padding: .6em; overflow-x: auto; }}
pre code {{ font-size: 1em; padding: 0; overflow-wrap: normal; }}
img {{ display: block; width: 100%; max-height: 74vh; object-fit: contain; margin: .4em auto; }}
table {{ border-collapse: collapse; }} td, th {{ border: 1px solid #999; padding: .2em .6em; text-align: left; }}
aside {{ display: none; position: fixed; left: 0; right: 0; bottom: 0; padding: .8em 7vw; font-size: .7em;
  background: #fff7d6; }}
body.notes section.now aside {{ display: block; }}
@media print {{ body {{ font-size: 28px; }} section {{ display: block; width: 32cm; height: 18cm; padding: 1cm 2cm;
  break-after: page; overflow: hidden; }} li.later {{ visibility: visible; }} img {{ max-height: 13cm; }}
  aside {{ display: none; }} }}
</style>
<body>
{slides}
<script>
// right, space: next step or slide; left: back; n: speaker's notes
const slides = [...document.querySelectorAll("section")];
let at = Math.min(Math.max((parseInt(location.hash.slice(1)) || 1) - 1, 0), slides.length - 1);
const show = (steps) => {{
  slides.forEach((slide, i) => slide.classList.toggle("now", i === at));
  slides[at].querySelectorAll("li").forEach((step) => step.classList.toggle("later", !steps));
  history.replaceState(null, "", "#" + (at + 1));
}};
document.addEventListener("keydown", ({{ key }}) => {{
  if (key === "n") document.body.classList.toggle("notes");
  if (key === "ArrowRight" || key === " ") {{
    const step = slides[at].querySelector("li.later");
    if (step) step.classList.remove("later");
    else if (at < slides.length - 1) {{ at += 1; show(false); }}
  }}
  if (key === "ArrowLeft" && at > 0) {{ at -= 1; show(true); }}
}});
show(false);
</script>
"""
TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


def read_slides(deck: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the title of a deck and the (Markdown, note) of each slide."""
    text = deck.read_text(encoding="utf-8")
    _, settings, text = text.split("---\n", 2)
    [title] = re.findall(r'^title: "(.*)"$', settings, re.M)
    slides = []
    for slide in re.split(r"^---$", text, flags=re.M):
        notes = " ".join(note.strip() for note in re.findall(r"<!--(.*?)-->", slide, re.S))
        slides.append((re.sub(r"<!--.*?-->", "", slide, flags=re.S).strip(), notes))
    return title, slides


def make_page(deck: Path) -> str:
    """Return a deck as one HTML page with embedded pictures."""
    try:
        import markdown
    except ImportError as error:
        raise InputError("slides need a package: pip install markdown") from error

    def inline(match: re.Match[str]) -> str:
        file = (deck.parent / match[1]).resolve()
        return f'src="data:{TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"'

    title, slides = read_slides(deck)
    sections = []
    for text, note in slides:
        html = markdown.markdown(text, extensions=["tables"])
        html = re.sub(r'src="([^"]+)"', inline, html)
        sections.append(f"<section>\n{html}\n<aside>{markdown.markdown(note)}</aside></section>")
    return PAGE.format(title=title, slides="\n".join(sections))


def write_slides(out: Path, pdf: bool, on_done: Callable[[], object]) -> list[Path]:
    """Write every deck as an HTML page, and as a PDF if asked for; call `on_done` after each deck."""
    browser = browser_here() if pdf else ""
    pages = {deck.stem: make_page(deck) for deck in sorted(DECKS.glob("*.md"))}
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in pages.items():
        written.append(out / f"{name}.html")
        write_text(written[-1], text)
        if pdf:
            written.append(out / f"{name}.pdf")
            with tempfile.TemporaryDirectory() as profile:
                print_page((out / f"{name}.html").resolve().as_uri(), written[-1].resolve(), browser, Path(profile))
        on_done()
    return written
