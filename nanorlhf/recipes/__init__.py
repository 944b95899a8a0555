"""The settings of the four papers and of their embedded twins: a page per paper, a table per stage.

A table states only what differs from the defaults of the stage's script.
"""

from typing import TypeVar

from nanorlhf.recipes import real, rlcf, stackoverflow, sums, tldr
from nanorlhf.recipes import str as self_ranking

Args = TypeVar("Args")
PAGES = (tldr, stackoverflow, rlcf, self_ranking, real, sums)


def recipes(stage: str, args_class: type[Args]) -> dict[str, tuple[str, Args]]:
    """Name -> (help, settings) of every recipe that has this stage; a misspelt setting is a TypeError."""
    tables = {name: recipe for page in PAGES for name, recipe in page.RECIPES.items()}
    return {name: (table["help"], args_class(**table[stage])) for name, table in tables.items() if stage in table}
