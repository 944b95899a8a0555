"""What the doctor says when something is wrong."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, in four sentences."""

    name: str
    """of the check, as docs/troubleshooting.md lists it: `first-ratio`"""
    seen: str
    """what was seen, with its numbers"""
    means: str
    """what it usually means"""
    where: str
    """where to look: a file and a function, or a setting"""
    page: str
    """which page explains it: docs/metrics.md"""

    def __str__(self) -> str:
        text = f"{self.name}: {self.seen} {self.means} Look at {self.where}. See {self.page}."
        return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")


def report(findings: Sequence[Finding]) -> int:
    """Print a paragraph per finding; returns the exit status, 1 where there is one."""
    print("\n\n".join(map(str, findings)) if findings else "nothing found")
    return 1 if findings else 0
