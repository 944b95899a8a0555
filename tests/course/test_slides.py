"""The decks: existing pictures, a note for each slide, formulas shown step by step, self-contained pages."""

import re
import shutil

import pytest

from course.copies import ROOT
from course.sessions import SESSIONS
from course.slides import DECKS, make_page, read_slides, write_slides
from tests.helpers.browser import MISFITS

DECK_FILES = sorted(DECKS.glob("*.md"))


def test_each_session_has_a_deck_with_its_title() -> None:
    titles = [f"{number}. {session.title}" for number, session in enumerate(SESSIONS, 1)]
    assert [read_slides(deck)[0] for deck in DECK_FILES] == titles


@pytest.mark.parametrize("deck", DECK_FILES, ids=lambda deck: deck.stem)
def test_a_deck_has_notes_pictures_and_steps(deck) -> None:
    title, slides = read_slides(deck)
    assert title.startswith(f"{deck.stem}. ") and len(slides) >= 10
    for text, note in slides:
        assert text.startswith(("# ", "## ")) and len(note) > 20, text
        assert len(text.splitlines()) <= 16
        for line in text.splitlines():  # a formula is a separate step
            assert not re.match(r"- |\d\. ", line), line
            assert " = " not in line or line.startswith(("* ", "    ", "![")), line
    pictures = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", deck.read_text())
    assert pictures and all(len(alt) > 20 and (deck.parent / file).is_file() for alt, file in pictures)


def test_a_page_is_self_contained() -> None:
    pytest.importorskip("markdown")
    for deck in DECK_FILES:
        page = make_page(deck)
        assert page.count("<section>") == len(read_slides(deck)[1]) == page.count("<aside>")
        assert all(src.startswith("data:image/") for src in re.findall(r'src="([^"]{0,40})', page))
        assert not re.search(r'(?:href|src)="https?:', page)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 400])
def test_every_slide_fits_into_the_window(tmp_path, browser, width) -> None:
    pytest.importorskip("markdown")
    for path in write_slides(tmp_path, False, int):
        browser.show(width, "light")
        browser.open(path.as_uri())
        problems = browser.ask(f"slides.map((_, i) => {{ at = i; show(true); return {MISFITS}; }})")
        assert problems == [[]] * len(problems), path.name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium here")
def test_the_decks_are_printed(tmp_path) -> None:
    pytest.importorskip("markdown")
    told: list[int] = []
    written = write_slides(tmp_path, True, lambda: told.append(1))
    assert len(written) == 16 and len(told) == 8
    assert all(path.read_bytes().startswith(b"%PDF") for path in written if path.suffix == ".pdf")


def test_the_numbers_on_slides_equal_the_pages_that_report_them() -> None:
    """Percentages and decimals come from the lecture or the exam, except for settings in formulas."""
    pages = [(ROOT / page).read_text() for page in ("docs/lecture.md", "course/exam.md", "course/exam-answers.md")]
    settings = {"0.2", "0.8", "1.2", "0.5"}
    made_up = {"1.0", "1.5"}  # a value before and after a token, in a speaker's example
    checked = 0
    for deck in DECK_FILES:
        for number in re.findall(r"(?<![\w.])\d+\.\d+|\d+%", re.sub(r"\(.*?\)", "", deck.read_text())):
            if number not in settings | made_up:
                assert any(re.search(rf"(?<![\d.]){re.escape(number)}", page) for page in pages), (deck.name, number)
                checked += 1
    assert checked > 15
    table = (ROOT / "README.md").read_text()
    for policy in ("sft", "ppo"):
        (rate,) = re.findall(rf"^ +{policy} +(0\.\d+) \[", table, re.M)
        assert f"* `{policy}`: {float(rate):.0%}" in (DECKS / "1.md").read_text()
    assert "make demo` now (two minutes on two cores)" in (DECKS / "1.md").read_text()
    assert "make demo              # the runs, two minutes on two cores" in pages[0]
    assert (ROOT / "course/module.md").read_text().count("make demo`, 2 |") == 2
