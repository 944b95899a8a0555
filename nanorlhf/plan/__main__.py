"""Estimate a script's GPU memory and the flags that make it fit, without loading or training anything.

    nanorlhf plan train_ppo tldr --sft EleutherAI/pythia-1b-deduped
    nanorlhf plan eval tldr --policies sft runs/tldr/sft ppo runs/tldr/ppo

Recipes and flags are the script's.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nanorlhf import __main__ as nanorlhf
from nanorlhf.cli import one_sentence, read_settings
from nanorlhf.errors import InputError
from nanorlhf.plan.evaluation import eval_plan
from nanorlhf.plan.training import dpo_plan, rm_plan, rollout_plan, sft_plan

PLANS: dict[str, Callable[[ModuleType, Any], str]] = {
    "train_sft": lambda script, args: sft_plan(args, args.model, args.num_samples),
    "train_rm": lambda script, args: rm_plan(args, args.sft, args.loss),
    "train_dpo": lambda script, args: dpo_plan(
        args, args.sft, args.loss not in script.NO_REFERENCE, args.reference.rate > 0
    ),
    "train_ppo": lambda script, args: rollout_plan(args, args.value_model),
    "train_grpo": lambda script, args: rollout_plan(args, has_value_model=False),
    "train_rlcf": lambda script, args: rollout_plan(args, args.value_model),
    "eval": lambda script, args: eval_plan(args),
}


def main(words: list[str]) -> None:
    """Print the plan of the script named by the first word; exits with 2 if a model's shape is unknown."""
    name = words[0].removesuffix(".py") if words else "--help"
    if name in ("-h", "--help"):
        print(__doc__)
        return
    with one_sentence():
        if name not in PLANS:
            raise InputError(f"nanorlhf plan {name}: unknown script; expected one of {', '.join(PLANS)}.")
        if nanorlhf.TREE != nanorlhf.PACKAGE:  # the scripts are next to nanorlhf/
            sys.path.insert(0, str(nanorlhf.TREE))
        script = importlib.import_module(str(nanorlhf.find_module(name)))
        print(PLANS[name](script, read_settings(f"nanorlhf plan {name}", words[1:], script.RECIPES)))


if __name__ == "__main__":
    main(sys.argv[1:])
