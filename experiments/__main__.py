"""Studies of many runs in the embedded worlds. Finished runs are not repeated, so a table can grow.

    python -m experiments lab                              # labeller faults, one dial at a time
    python -m experiments compare --seeds 7 --grid-seed 8 --out runs/compare7
    python -m experiments mismatch --runs exact/none stale/tis
    python -m experiments staleness --sync-every 1 16
    python -m experiments programs --variants compiler tests
    python -m experiments discriminators --seeds 1
    python -m experiments sums --seeds 1 2 3 --jobs 2
    python -m experiments worlds --share 3/8 --phase final
    python -m experiments scaling --seeds 1 2 3 4
    python -m experiments tldr --seeds 1 --size-seeds 1
    python -m experiments leaderboard --entries my_entry.py
    python -m experiments lab --dry-run                    # print the commands

Each study has a folder with its page (README.md), runs (runs.py), tables and pictures (report.py), and results.
"""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from experiments.compare.runs import Compare, compare
from experiments.lab.runs import Lab, lab
from experiments.leaderboard.runs import Leaderboard, leaderboard
from experiments.mismatch.runs import Mismatch, mismatch
from experiments.mismatch.staleness import Staleness, staleness
from experiments.programs.runs import Discriminators, Programs, discriminators, programs
from experiments.runs import Args, Run, Words, execute
from experiments.scaling.runs import Scaling, scaling
from experiments.sums.runs import Sums, sums
from experiments.tldr.runs import Tldr, tldr
from experiments.worlds.runs import Worlds, hours_left, worlds
from nanorlhf.cli import command_line

RECIPES: dict[str, tuple[str, Args]] = {
    "lab": ("labeller faults, one dial at a time", Lab()),
    "compare": ("algorithms at equal cost", Compare()),
    "mismatch": ("samplers that differ from the policy", Mismatch()),
    "staleness": ("algorithms with stale samplers", Staleness()),
    "programs": ("programs, rewarded by static checks, tests or a discriminator", Programs()),
    "discriminators": ("accuracy of RLCF's discriminator while it trains", Discriminators()),
    "sums": ("a verifiable reward", Sums()),
    "worlds": ("equally tuned algorithms in many worlds", Worlds()),
    "scaling": ("over-optimisation by the size of the reward model, its data and the policy", Scaling()),
    "tldr": ("N+ by model size, DPO against the reward model, reward whitening", Tldr()),
    "leaderboard": ("entries that train a policy within a budget, ranked by the gold score", Leaderboard()),
}
PHASES: dict[type[Args], Callable[[Any], Iterator[list[Run]]]] = {
    Lab: lab, Compare: compare, Mismatch: mismatch, Staleness: staleness, Programs: programs,
    Discriminators: discriminators, Sums: sums, Worlds: worlds, Scaling: scaling, Tldr: tldr,
    Leaderboard: leaderboard,
}  # fmt: skip


def commands(args: Args) -> Iterator[Words]:
    """Yield the commands of all runs, without `python`."""
    for runs in PHASES[type(args)](replace(args, dry_run=True)):
        for run in dict.fromkeys(runs):
            yield (*run.words, *(["--overwrite"] if run.state is not None else []))


def main(args: Args) -> None:
    if args.dry_run:
        print("\n".join(shlex.join(("python", *words)) for words in commands(args)))
        if isinstance(args, Worlds):
            print(f"# about {hours_left(args):.1f} core hours for the runs that have no row in {args.csv}")
        return
    for runs in PHASES[type(args)](args):
        execute(runs, args.jobs)


if __name__ == "__main__":
    command_line(main, RECIPES)
