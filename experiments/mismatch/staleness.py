"""PPO, RLOO and online DPO with samplers that are several updates old. Each is tuned with a fresh one."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.compare.report import best_point, to_flags
from experiments.compare.runs import compared_world, judged
from experiments.runs import Args, Run, Words, stage
from nanorlhf.cli import Count


@dataclass(frozen=True, kw_only=True)
class Staleness(Args):
    out: Path = Path("runs/staleness")
    sync_every: tuple[Count, ...] = (1, 4, 8, 16)
    """updates between copies of the policy to the sampler"""
    seeds: tuple[int, ...] = (1, 2, 3)
    grid_seed: int = 5
    """seed of the world for choosing the learning rate, with a fresh sampler"""
    lrs: Words = ("3e-4", "1e-3")
    total_episodes: Count = 1024
    """responses of a run, in rollouts of 32"""
    num_demonstrations: Count = 8000
    num_comparisons: Count = 1600
    num_queries: Count = 256
    """queries of the final evaluation"""


# one optimizer step on each of 32 rollouts, so that without staleness all data is from the policy that is updated
ALGORITHMS: dict[str, tuple[object, ...]] = {
    "ppo": ("train_ppo.py", "--num-ppo-epochs", 1),
    "rloo": ("train_grpo.py", "--algorithm", "rloo", "--samples-per-query", 4, "--num-epochs", 1),
    "online-dpo": ("train_grpo.py", "--algorithm", "online_dpo", "--samples-per-query", 4, "--num-epochs", 1),
}
RATIO = ("ppo", "rloo")
"""algorithms that also run with the clipped ratio to the stale sampler; online DPO's loss has no ratio"""


def policy(args: Staleness, name: str, directory: Path, out: Path, seed: int, *flags: object) -> Run:
    script, *settings = ALGORITHMS[name]
    return stage(
        out, seed, script, "--data", directory / "data", "--sft", directory / "sft", "--reward-model", directory / "rm",
        "--total-episodes", args.total_episodes, "--batch-size", 32, "--kl-coef", 0.05, *settings, *flags,
    )  # fmt: skip


def staleness(args: Staleness) -> Iterator[list[Run]]:
    """Yield the runs. A policy's directory is SEED/ALGORITHM,CORRECTION,SYNC_EVERY."""
    grid_world = args.out / str(args.grid_seed)
    directories = {seed: args.out / str(seed) for seed in (*args.seeds, args.grid_seed)}
    sizes = args.num_demonstrations, args.num_comparisons
    yield [run for seed, directory in directories.items() for run in compared_world(directory, seed, *sizes)]
    points = [f"lr/{lr}" for lr in args.lrs]
    grids = {name: args.out / "grid" / name for name in ALGORITHMS}
    yield [
        policy(args, name, grid_world, grid / point, args.grid_seed, *to_flags(point).split())
        for name, grid in grids.items()
        for point in points
    ]
    yield [
        judged(grid, grid_world, args.grid_seed, [word for point in points for word in (point, grid / point)])
        for grid in grids.values()
    ]
    runs, evaluations = [], []
    for seed in args.seeds:
        directory, policies = args.out / str(seed), []
        for name, grid in grids.items():
            path = grid / "eval/eval.json"
            flags = to_flags(best_point(path) if path.exists() else points[0]).split()  # --dry-run may come first
            for sync_every in args.sync_every:
                stale = (*flags, "--sampler.sync-every", sync_every)
                for correction in ("none", "ratio") if name in RATIO and sync_every > 1 else ("none",):
                    corrected = ("--sampler.correction", "sampler_logprobs") if correction == "ratio" else ()
                    entry = f"{name},{correction},{sync_every}"
                    runs.append(policy(args, name, directory, directory / entry, seed, *stale, *corrected))
                    policies += [entry, directory / entry]
        evaluations.append(judged(directory, directory, seed, policies, args.num_queries))
    yield runs
    yield evaluations
    yield [
        Run(("-m", "experiments.mismatch.staleness_report", "--runs", str(args.out), "--out", str(args.out / "report")))
    ]
