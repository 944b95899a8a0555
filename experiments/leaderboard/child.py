"""The process of an entry: call its `train` in a sandbox, and save the policy that it returns.

referee.py starts `python -m experiments.leaderboard.child` and answers its requests through two pipes. This process
can't read the reward model, the evaluation or data/: the sandbox doesn't contain them.
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch

from experiments.leaderboard import world
from nanorlhf.cli import parse_flags
from nanorlhf.sandbox.python_harness import receive, send
from nanorlhf.training.run import write_checkpoint


@dataclass(frozen=True, kw_only=True)
class Args:
    entry: Path
    """file with `train(world) -> policy`"""
    directory: Path
    """the world's copy for this entry; the policy is saved in DIRECTORY/policy"""
    seed: int
    budget: int
    calls: int
    """descriptor of the pipe for requests"""
    replies: int
    """descriptor of the pipe for replies"""


calls = count()


def score_rollout(queries: list[str], responses: list[str], response_ids: list[list[int]]) -> list[float]:
    """Score a rollout of a training script: `world.reward`.

    The first call only tries the function on two references before training, which is not worth two of the budget.
    """
    if next(calls) == 0:
        return [0.0] * len(queries)
    assert world.current is not None
    return world.current.score(queries, response_ids)


def ask(args: Args, request: bytes) -> bytes:
    send(args.calls, request)
    return receive(args.replies)


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    world.current = world.World(
        directory=args.directory, seed=args.seed, budget=args.budget, ask=partial(ask, args)
    )  # fmt: skip
    spec = importlib.util.spec_from_file_location("entry", args.entry)
    assert spec is not None and spec.loader is not None
    entry = importlib.util.module_from_spec(spec)
    sys.modules["entry"] = entry  # for its dataclasses
    spec.loader.exec_module(entry)
    policy = entry.train(world.current)
    write_checkpoint(policy, args.directory / "policy", world.current.tokenizer)


if __name__ == "__main__":
    # not run_module: the referee reports the last line of a traceback
    main(parse_flags(Args, sys.argv[1:], "python -m experiments.leaderboard.child"))
