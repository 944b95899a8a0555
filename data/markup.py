"""The text in HTML."""

import html
import re

from bs4 import BeautifulSoup


def to_text(body: str) -> str:
    """The text of an HTML body, with a newline for <br> and never two blank lines in a row."""
    if "<" in body:
        body = re.sub(r"<br\s*/?>[ \t]*\n?", "\n", body, flags=re.IGNORECASE)
        body = BeautifulSoup(body, "html.parser").get_text()
    else:
        body = html.unescape(body)
    # the look-behind: a search starts once in a run of spaces, not at each of them
    return re.sub(r"(?<![ \t])[ \t]*\n(?:[ \t]*\n)+", "\n\n", body.replace("\r\n", "\n")).strip()
