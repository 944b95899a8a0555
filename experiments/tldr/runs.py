"""The recipe `tiny` at several sizes and seeds, and variants at one size that test an explanation.

OUT/SEED/data                 the embedded world
OUT/SEED/SIZE/RUN             sft, rm, dpo, ppo and, at the base size, variants
OUT/SEED/SIZE/eval            eval.py on all policies
OUT/SEED/SIZE/probe.json      experiments.tldr.probe
OUT/GRID_SEED/BASE/RUN-lr-LR  the reward model and DPO at other learning rates
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.runs import Args, Run, Words, evaluation, stage, world
from nanorlhf.cli import Count, PositiveFloat, Seed
from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Tldr(Args):
    out: Path = Path("runs/tldr_study")
    recipe: Literal["tiny", "tldr"] = "tiny"
    """tiny: models from scratch in the embedded world of each seed; tldr: checkpoints on the data in runs/tldr/data"""
    sizes: Words = ("32", "64", "128")
    """widths of two-layer models; with the recipe tldr, checkpoint directories or Hub ids"""
    base: str = "128"
    """the size, one of --sizes, that runs at all seeds"""
    seeds: tuple[Seed, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """seeds of the base size"""
    size_seeds: tuple[Seed, ...] = (1, 2, 3, 4)
    """those that also run the other sizes, and at the base size the tests of explanations"""
    gold: str | None = None
    """FILE.py:FUNCTION or a larger reward model; None: the recipe's"""
    lrs: tuple[PositiveFloat, ...] = (3e-4, 1e-3, 3e-3)
    """learning rates to try at the base size, for the reward model and for DPO; all other runs use the recipe's"""
    grid_seed: Seed = 9
    """seed of these runs"""
    num_rows: Count = 6400
    """demonstrations of an embedded world, and its comparisons"""


PAIRWISE = {"rm": "train_rm.py", "dpo": "train_dpo.py"}  # the two that learn from comparisons
Variants = dict[str, tuple[str, str, Words]]  # run -> its kind, its initial policy, and what differs from the kind's
WHITENED: Variants = {"whitened": ("ppo", "sft", ("--whiten-rewards",))}
OFFSET = (  # a tenth of the reward model's score, plus 1; the KL penalty shrinks as the score does
    *("--reward", "rm", "experiments/tldr/constant.py:one", "--reward-weights", "0.1", "1", "--kl-coef", "0.01"),
    *("--value-model", "sft"),
)
EXPLANATIONS: Variants = {
    # why DPO ranks better than the reward model
    "rm-pooled": ("rm", "pooled", ()),
    "rm-untaught": ("rm", "untaught", ()),
    "dpo-untaught": ("dpo", "untaught", ()),
    # why whitening rewards doesn't shorten responses
    "offset": ("ppo", "sft", OFFSET),
    "offset-whitened": ("ppo", "sft", (*OFFSET, "--whiten-rewards")),
}
UNTAUGHT = ("--num-epochs", "0.01", "--warmup-steps", "0")  # of SFT: four steps, which teach hardly any language


def run_directory(out: Path, seed: int, size: str) -> Path:
    """Return the directory of a size's runs at a seed; a checkpoint is named by the last part of its path."""
    return out / str(seed) / Path(size).name


def tldr(args: Tldr) -> Iterator[list[Run]]:
    """Yield the runs of all sizes and seeds, then the report."""
    if args.base not in args.sizes:
        raise InputError(f"--base {args.base}: expected one of --sizes {' '.join(args.sizes)}.")
    if args.grid_seed in args.seeds:
        raise InputError(f"--grid-seed {args.grid_seed} is also in --seeds.")
    if unknown := set(args.size_seeds) - set(args.seeds):
        raise InputError(f"--size-seeds {min(unknown)}: expected some of --seeds.")
    runs = learning_rates(args)
    for seed in args.seeds:
        for size in args.sizes if seed in args.size_seeds else (args.base,):
            variants = WHITENED | (EXPLANATIONS if seed in args.size_seeds else {})
            runs += seed_runs(args, seed, size, variants if size == args.base else {})
    yield runs
    yield [Run((
        "-m", "experiments.tldr.report", "--runs", str(args.out), "--out", str(args.out / "report"),
        "--sizes", *(Path(size).name for size in args.sizes), "--base", Path(args.base).name,
    ))]  # fmt: skip


def initial_policy(args: Tldr, seed: int, size: str, name: str = "sft", flags: Words = ()) -> tuple[Path, list[Run]]:
    """Return the data of a seed, and the runs that make it and the policy `name`, trained on its demonstrations."""
    out = run_directory(args.out, seed, size) / name
    if args.recipe == "tldr":
        data = Path("runs/tldr/data")
        return data, [stage(out, seed, "train_sft.py", "tldr", "--model", size, "--data", data, *flags)]
    data = args.out / str(seed) / "data"
    needs = (data / "tokenizer.json",)
    return data, [
        world(data, seed, "--num-comparisons", args.num_rows, num_demonstrations=args.num_rows),
        stage(out, seed, "train_sft.py", "tiny", "--d-model", size, "--data", data, *flags, needs=needs),
    ]


def learning_rates(args: Tldr) -> list[Run]:
    """Return the reward models, DPO policies and probes at each of --lrs, and the policy that they start from."""
    data, runs = initial_policy(args, args.grid_seed, args.base)
    directory = run_directory(args.out, args.grid_seed, args.base)
    for lr in args.lrs:
        for name, script in PAIRWISE.items():
            runs.append(stage(
                directory / f"{name}-lr-{lr:g}", args.grid_seed, script, args.recipe, "--data", data,
                "--sft", directory / "sft", "--lr", lr, needs=(directory / "sft/summary.json",),
            ))  # fmt: skip
        rm, dpo = (directory / f"{name}-lr-{lr:g}" for name in PAIRWISE)
        runs.append(probe(data, directory / "sft", rm, dpo, directory / f"probe-lr-{lr:g}.json"))
    return runs


def probe(data: Path, sft: Path, rm: Path, dpo: Path, out: Path) -> Run:
    """Return a run of experiments.tldr.probe."""
    flags = ("--data", data, "--sft", sft, "--reward-model", rm, "--policy", dpo, "--out", out)
    return Run(("-m", "experiments.tldr.probe", *map(str, flags)), out, (rm / "summary.json", dpo / "summary.json"))


def seed_runs(args: Tldr, seed: int, size: str, variants: Variants) -> list[Run]:
    """Return the runs of a size at a seed, their evaluation and their probe."""
    directory = run_directory(args.out, seed, size)
    data, runs = initial_policy(args, seed, size)
    sft, rm = directory / "sft", directory / "rm"
    gold = ("--gold", args.gold) if args.gold else ()
    done = {"sft": sft / "summary.json", "untaught": directory / "untaught/summary.json"}
    done["pooled"] = directory / "pooled/config.json"
    if variants.keys() & EXPLANATIONS.keys():
        runs += initial_policy(args, seed, size, "untaught", UNTAUGHT)[1]
        copy = ("-m", "experiments.tldr.pooled", "--sft", str(sft), "--out", str(directory / "pooled"))
        runs.append(Run(copy, done["pooled"], (done["sft"],)))
    plain: Variants = {kind: (kind, "sft", ()) for kind in (*PAIRWISE, "ppo")}
    for name, (kind, initial, flags) in (plain | variants).items():
        script, needs = PAIRWISE.get(kind, "train_ppo.py"), done[initial]
        if kind == "ppo":
            flags, needs = (*flags, "--reward-model", str(rm), *gold), rm / "summary.json"
        paths = {"rm": str(rm), "sft": str(sft)}  # as words of a variant's flags
        words = (script, args.recipe, "--data", data, "--sft", directory / initial, *(paths.get(w, w) for w in flags))
        runs.append(stage(directory / name, seed, *words, needs=(needs,)))
    policies = ["sft", "ppo", "dpo", *(variants.keys() & WHITENED.keys())]
    finished = tuple(directory / name / "summary.json" for name in (*policies, "rm"))
    runs.append(evaluation(
        directory / "eval", args.recipe, "--data", data, "--reward-model", rm, "--implicit-rewards", "dpo", *gold,
        "--seed", seed, "--policies", *(word for name in policies for word in (name, directory / name)), needs=finished,
    ))  # fmt: skip
    runs.append(probe(data, sft, rm, directory / "dpo", directory / "probe.json"))
    return runs
