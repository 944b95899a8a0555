"""The recipes: settings of the four papers and of their embedded twins, one module per paper, one table per stage.

A table lists only what differs from the defaults of the stage's script.
"""

from typing import TypeVar

from nanorlhf.recipes import real, rlcf, stackoverflow, sums, tldr
from nanorlhf.recipes import str as self_ranking

Args = TypeVar("Args")
PAGES = (tldr, stackoverflow, rlcf, self_ranking, real, sums)


def recipes(stage: str, args_class: type[Args]) -> dict[str, tuple[str, Args]]:
    """Return name -> (help, settings) for every recipe with this stage. Raises TypeError for a misspelt setting."""
    tables = {name: recipe for page in PAGES for name, recipe in page.RECIPES.items()}
    return {name: (table["help"], args_class(**table[stage])) for name, table in tables.items() if stage in table}
