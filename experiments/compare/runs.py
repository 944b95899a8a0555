"""Every algorithm from the same initial policy at the same cost, each tuned on a grid in a separate world."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.compare.report import best_point, to_flags
from experiments.runs import START, Args, Run, Words, evaluation, stage, world


@dataclass(frozen=True, kw_only=True)
class Compare(Args):
    out: Path = Path("runs/compare")
    algorithms: Words = (
        *("ppo", "rloo", "grpo", "dr-grpo", "reinforce++", "gspo", "dapo", "cispo", "online-dpo"),
        *("dpo", "kto", "orpo", "simpo"),
        "rejection",
    )
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    grid_seed: int = 5
    """seed of the world for choosing the learning rate and the KL coefficient"""
    lrs: Words = ("3e-4", "1e-3")
    kl_coefs: Words = ("0.02", "0.1")
    best_of: tuple[int, ...] = (4, 16, 64)
    """n in best of n"""


PPO = ("train_ppo.py", "--num-ppo-epochs", 2)
GROUPED = ("train_grpo.py", "--num-epochs", 2, "--samples-per-query")
WITHOUT_KL = ("train_grpo.py", "--kl-coef", 0, "--samples-per-query", 4)
# 1,024 responses each, plus those that DAPO resamples
ON_POLICY = {
    "ppo": PPO,
    "ppo-soft": (*PPO, "--reference.rate", 0.1),
    "ppo-hard": (*PPO, "--reference.rate", 1, "--reference.every", 5),
    "ppo-reset": (*PPO, "--elastic-reset.every", 5, "--elastic-reset.decay", 0.8),
    "rloo": (*GROUPED, 4, "--algorithm", "rloo"),
    "grpo": (*GROUPED, 4, "--algorithm", "grpo"),
    "dr-grpo": (*GROUPED, 4, "--algorithm", "dr_grpo"),
    "reinforce++": (*GROUPED, 1, "--algorithm", "reinforce++"),
    "gspo": (*GROUPED, 4, "--algorithm", "gspo", "--clip-range", 0.03, 0.04),
    "dapo": (*WITHOUT_KL, "--algorithm", "dapo"),
    "cispo": (*WITHOUT_KL, "--algorithm", "cispo"),
    "online-dpo": ("train_grpo.py", "--num-epochs", 1, "--samples-per-query", 4, "--algorithm", "online_dpo"),
}
# no sampled responses; one epoch over the comparisons
OFFLINE = {
    "dpo": (),
    "dpo-soft": ("--reference.rate", 0.1),
    "dpo-hard": ("--reference.rate", 1, "--reference.every", 25),
    "kto": ("--loss", "kto"),
    "orpo": ("--loss", "orpo"),
    "simpo": ("--loss", "simpo", "--labels.target-margin", 1),
}
# the setting that keeps the policy near its initial weights, if it isn't the KL coefficient; ORPO's and SimPO's beta
# scales something else
CONSTRAINTS = {
    **dict.fromkeys(("dpo", "dpo-soft", "dpo-hard"), ("beta", ("0.02", "0.1"))),
    "kto": ("beta", ("0.02", "0.1")),
    "orpo": ("beta", ("0.1", "1")),
    "simpo": ("beta", ("2", "10")),
    "rejection": ("num-epochs", ("4", "16")),
    "dapo": ("num-epochs", ("1", "2")),
    "cispo": ("num-epochs", ("1", "2")),
}


def algorithm(name: str, directory: Path, num_responses: int = 1024, winners: str = "winners") -> tuple[object, ...]:
    """Return the command of an algorithm in the world at `place`."""
    data, sft = directory / "data", directory / "sft"
    if name in OFFLINE:
        return "train_dpo.py", "--data", data, "--sft", sft, *OFFLINE[name]
    if name == "rejection":
        return "train_sft.py", "--model", sft, "--data", directory / winners, "--warmup-steps", 0
    script, *flags = ON_POLICY[name]
    models = ("--data", data, "--sft", sft, "--reward-model", directory / "rm")
    return script, *models, "--total-episodes", num_responses, *flags


def compared_world(
    directory: Path, seed: int, num_demonstrations: int = 8000, num_comparisons: int = 1600
) -> list[Run]:
    """Return the runs that make a world's data, initial policy and reward model."""
    data, sft, rm = (directory / name for name in ("data", "sft", "rm"))
    return [
        world(
            data, seed, "--num-comparisons", num_comparisons, "--num-validation", 512,
            num_demonstrations=num_demonstrations,
        ),
        stage(sft, seed, *START, "--data", data, "--num-epochs", 1, needs=(data / "tokenizer.json",)),
        stage(
            rm, seed, "train_rm.py", "--data", data, "--sft", sft, "--num-epochs", 2, "--num-normalisation", 512,
            needs=(sft / "summary.json",),
        ),
    ]  # fmt: skip


def sampled_winners(directory: Path, seed: int, name: str = "winners", num_responses: int = 1024) -> Run:
    """Return the run that samples the best of 16 responses to each query, rejection sampling's data.

    Four queries are for validation.
    """
    rm, winners = directory / "rm", directory / name
    sampled = (
        "-m", "data.best_of", "--policy", directory / "sft", "--reward-model", rm, "--data", directory / "data",
        "--out", winners, "--num-queries", num_responses // 16 - 4, "--num-validation-queries", 4,
        "--num-samples", 16, "--seed", seed,
    )  # fmt: skip
    return Run(
        tuple(map(str, sampled)), winners / "best_of.json", needs=(rm / "summary.json",),
        state=winners / "best_of.partial.jsonl",
    )  # fmt: skip


def judged(out: Path, directory: Path, seed: int, policies: list[object], num_queries: int = 128) -> Run:
    """Return the evaluation of some policies at their training temperature."""
    return evaluation(
        out / "eval", "tiny", "--data", directory / "data", "--reward-model", directory / "rm",
        "--num-queries", num_queries, "--temperature", 0.7, "--num-distinct-samples", 4, "--seed", seed,
        "--policies", "sft", directory / "sft", *policies,
    )  # fmt: skip


def points(args: Compare, name: str) -> list[str]:
    """Return the points of an algorithm's grid, FLAG/VALUE/FLAG/VALUE, which also name their runs' directories."""
    constraint, values = CONSTRAINTS.get(name, ("kl-coef", args.kl_coefs))
    return [f"lr/{lr}/{constraint}/{value}" for lr in args.lrs for value in values]


def compare(args: Compare) -> Iterator[list[Run]]:
    grid_world = args.out / str(args.grid_seed)
    directories = {seed: args.out / str(seed) for seed in (*args.seeds, args.grid_seed)}
    with_winners = "rejection" in args.algorithms
    yield [
        run
        for seed, directory in directories.items()
        for run in (*compared_world(directory, seed), *([sampled_winners(directory, seed)] if with_winners else []))
    ]
    yield [
        stage(args.out / "grid" / name / point, args.grid_seed, *algorithm(name, grid_world), *to_flags(point).split())
        for name in args.algorithms
        for point in points(args, name)
    ]
    grids = {name: args.out / "grid" / name for name in args.algorithms}
    evaluations = []
    for name, grid in grids.items():
        policies: list[object] = [word for point in points(args, name) for word in (point, grid / point)]
        evaluations.append(judged(grid, grid_world, args.grid_seed, policies))
    yield evaluations
    runs = []
    for name, grid in grids.items():
        path = grid / "eval/eval.json"
        point = best_point(path) if path.exists() else points(args, name)[0]  # --dry-run may come first
        for seed in args.seeds:
            directory = args.out / str(seed)
            runs.append(stage(directory / name, seed, *algorithm(name, directory), *to_flags(point).split()))
    yield runs
    evaluations = []
    for seed in args.seeds:
        directory = args.out / str(seed)
        policies = [word for name in args.algorithms for word in (name, directory / name)]
        policies += [word for n in args.best_of for word in (f"best-of-{n}", f"best-of-{n}:{directory / 'sft'}")]
        evaluations.append(judged(directory, directory, seed, policies))
    yield evaluations
    yield [Run(("-m", "experiments.compare.report", "--runs", str(args.out), "--out", str(args.out / "report")))]
