"""HTML to plain text."""

import html
import re

from bs4 import BeautifulSoup


def to_text(body: str) -> str:
    """Return the text of an HTML body, with a newline for <br> and at most one blank line in a row."""
    if "<" in body:
        body = re.sub(r"<br\s*/?>[ \t]*\n?", "\n", body, flags=re.IGNORECASE)
        body = BeautifulSoup(body, "html.parser").get_text()
    else:
        body = html.unescape(body)
    # the look-behind makes a search start once per run of spaces, not at each space
    return re.sub(r"(?<![ \t])[ \t]*\n(?:[ \t]*\n)+", "\n\n", body.replace("\r\n", "\n")).strip()
