"""The recipes: settings of the four papers and of their embedded twins, one module per paper, one table per stage.

A table lists only what differs from the defaults of the stage's script.
"""

from importlib import import_module
from typing import TypeVar

Args = TypeVar("Args")
PAGES = {  # module: the stages of its recipes. A script imports only the pages with its stage
    "tldr": ("sft", "rm", "dpo", "ppo", "grpo", "summaries", "reward_models"),
    "stackoverflow": ("sft", "rm", "dpo", "ppo", "answers"),
    "rlcf": ("sft", "discriminator", "rlcf", "ppo", "grpo", "baselines", "programs"),
    "str": ("sft", "rm", "dpo", "ppo", "replies"),
    "real": ("sft", "rm", "dpo", "ppo", "grpo", "summaries", "reward_benchmark", "checked"),
    "cs336": ("sft", "grpo", "checked"),
    "sums": ("sft", "rm", "ppo", "grpo", "checked"),
}


def recipes(stage: str, args_class: type[Args]) -> dict[str, tuple[str, Args]]:
    """Return name -> (help, settings) for every recipe with this stage. Raises TypeError for a misspelt setting."""
    pages = [import_module(f"{__name__}.{page}") for page, stages in PAGES.items() if stage in stages]
    tables = {name: recipe for page in pages for name, recipe in page.RECIPES.items()}
    return {name: (table["help"], args_class(**table[stage])) for name, table in tables.items() if stage in table}
