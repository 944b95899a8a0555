"""Labeller faults, one dial at a time: worlds, reward models and policies."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.runs import START, Args, Run, Words, evaluation, flag, stage, world


@dataclass(frozen=True, kw_only=True)
class Lab(Args):
    """Study labeller faults. An entry FLAG/VALUE is a flag of data.tiny and names the directory of its runs.

    A comma separates several values.
    """

    out: Path = Path("runs/lab")
    seed: int = 1
    labellers: Words = (
        *("temperature/0.1", "temperature/1.6", "temperature/6.4", "flip-rate/0.2", "flip-rate/0.4"),
        *("num-comparisons/200", "num-comparisons/6400", "random-workers/3", "random-workers/6"),
    )
    """labellers for whom only a reward model is trained"""
    policies: Words = (
        *("base", "length-bonus/0.3", "length-bonus/0.6"),
        *("summarisers/reference,good", "summarisers/terse,lead,rambler,repeater"),
    )
    """labellers for whom a reward model and a policy are trained"""
    remedies: Words = ("kl-coef/0.2", "reward-weights/uncertainty")
    """flags of train_ppo.py, each run against the reward model of BIASED"""


BIASED = "length-bonus/0.6"
# names of the base among the values of each dial, and of the biased labeller among the remedies
BASE = (
    "temperature/0.4",
    "flip-rate/0",
    "num-comparisons/1600",
    "random-workers/0",
    "length-bonus/0",
    "summarisers/all",
)
UNTREATED = "remedy/none"


def labels(args: Lab, entry: str) -> list[Run]:
    """Return the runs for a labeller: its world, the common initial policy, a reward model and its evaluation."""
    directory, sft = args.out / entry, args.out / "sft"
    base = world(args.out / "base/data", args.seed, "--num-comparisons", 1600, "--num-triads", 100)
    data = world(directory / "data", args.seed, "--num-comparisons", 1600, "--num-triads", 100, *flag(entry))
    needs = (args.out / "base/data/tokenizer.json",)
    return [
        base,
        stage(sft, args.seed, *START, "--num-epochs", 1.5, "--data", args.out / "base/data", needs=needs),
        data,
        reward_model(args, entry, "rm", args.seed),
        evaluation(
            directory / "eval_rm", "tiny-rm", "--data", directory / "data", "--reward-models", "rm", directory / "rm",
            "--ref-policy", sft, needs=(directory / "rm/summary.json",),
        ),
    ]  # fmt: skip


def reward_model(args: Lab, entry: str, name: str, seed: int) -> Run:
    directory, sft = args.out / entry, args.out / "sft"
    return stage(
        directory / name, seed, "train_rm.py", "--data", directory / "data", "--sft", sft, "--num-epochs", 2,
        "--num-normalisation", 512, needs=(directory / "data/tokenizer.json", sft / "summary.json"),
    )  # fmt: skip


def trained_policy(args: Lab, name: str, entry: str, members: Words = ("rm",), flags: Words = ()) -> list[Run]:
    """Return the runs of PPO in directory `name` against a labeller's reward models, and its evaluation."""
    directory, sft, out = args.out / entry, args.out / "sft", args.out / name
    models = [directory / member for member in members]
    return [
        stage(
            out / "ppo", args.seed, "train_ppo.py", "--data", directory / "data", "--sft", sft,
            "--reward-model", *models, "--total-episodes", 1280, "--kl-coef", 0.05, *flags,
            needs=tuple(model / "summary.json" for model in models),
        ),
        evaluation(
            out / "eval", "tiny", "--data", directory / "data", "--policies", "sft", sft, "ppo", out / "ppo",
            "--reward-model", directory / "rm", "--num-queries", 256, "--seed", args.seed,
            needs=(out / "ppo/summary.json",),
        ),
    ]  # fmt: skip


def lab(args: Lab) -> Iterator[list[Run]]:
    runs = []
    for entry in args.remedies:
        members: Words = ("rm",)
        if entry.startswith("reward-weights/"):  # two more reward models on the same labels
            members = ("rm", "rm_2", "rm_3")
        runs += labels(args, BIASED)
        runs += [reward_model(args, BIASED, name, int(f"{args.seed}{name[3:]}")) for name in members[1:]]
        runs += trained_policy(args, f"remedy/{entry.replace('/', ',')}", BIASED, members, flag(entry))
    for entry in args.policies:
        runs += labels(args, entry)
        runs += trained_policy(args, entry, entry)
    for entry in args.labellers:
        runs += labels(args, entry)
    yield runs
    if not args.dry_run:
        for link, target in {**dict.fromkeys(BASE, "base"), UNTREATED: BIASED}.items():
            (args.out / link).parent.mkdir(parents=True, exist_ok=True)
            (args.out / link).unlink(missing_ok=True)
            (args.out / link).symlink_to(Path("..") / target)
    yield [Run(("-m", "experiments.lab.report", "--runs", str(args.out), "--out", str(args.out / "report")))]
