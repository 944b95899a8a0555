"""PPO and best of n against reward models of several sizes, optimised until the gold score falls."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.runs import Args, Run, Words, evaluation, stage, world
from experiments.scaling import report
from nanorlhf.cli import Count, PositiveFloat, Seed
from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Scaling(Args):
    out: Path = Path("runs/scaling")
    seeds: tuple[Seed, ...] = (1, 2, 3, 4)
    cases: Words = tuple(report.CASES)
    """names from CASES in experiments/scaling/report.py"""
    lr: PositiveFloat = 4e-4
    """learning rate of PPO: slow enough for a curve, fast enough to go far"""
    total_episodes: Count = 4096
    """responses of a PPO run"""
    best_of: tuple[Count, ...] = (2, 4, 8, 16, 32, 64)
    """n in best of n"""
    num_demonstrations: Count = 8000
    num_queries: Count = 256
    """queries for the evaluation of best of n"""


def reward_models(directory: Path, seed: int, case: report.Case) -> list[Run]:
    """Return the runs of a case's reward models. The models of an ensemble differ by their seeds."""
    data, sft = directory / f"data_{case.num_comparisons}", directory / f"sft_{case.reward_model}"
    runs = []
    for i in range(1, case.num_members + 1):
        out = directory / f"rm_{case.reward_model}_{case.num_comparisons}_{i}"
        runs.append(stage(
            out, int(f"{seed}{i}"), "train_rm.py", "--data", data, "--sft", sft, "--num-epochs", 2,
            "--num-normalisation", 512, needs=(data / "tokenizer.json", sft / "summary.json"),
        ))  # fmt: skip
    return runs


def scaling(args: Scaling) -> Iterator[list[Run]]:
    """Yield the runs of all cases in each world; cases share data, initial policies and reward models if they can."""
    for name in args.cases:
        if name not in report.CASES:
            raise InputError(f"--cases {name!r}: choose from {', '.join(map(repr, report.CASES))}.")
    base = report.CASES[report.BASE]
    runs = []
    for seed in args.seeds:
        directory = args.out / str(seed)
        shared = directory / f"data_{base.num_comparisons}"
        for name in args.cases:
            case, out = report.CASES[name], report.case_directory(args.out, seed, name)
            for number in {base.num_comparisons, case.num_comparisons}:
                runs.append(world(
                    directory / f"data_{number}", seed, "--num-comparisons", number, "--num-validation", 512,
                    num_demonstrations=args.num_demonstrations,
                ))  # fmt: skip
            for width in {case.policy, case.reward_model}:
                runs.append(stage(
                    directory / f"sft_{width}", seed, "train_sft.py", "--n-layer", 3, "--d-model", width, "--n-head", 4,
                    "--data", shared, "--num-epochs", 1, needs=(shared / "tokenizer.json",),
                ))  # fmt: skip
            models = reward_models(directory, seed, case)
            runs += models
            policy = directory / f"sft_{case.policy}"
            needs = (policy / "summary.json", *(run.done for run in models if run.done is not None))
            members = [run.words[run.words.index("--out") + 1] for run in models]
            weights = ("--reward-weights", case.weights) if case.weights else ()
            runs.append(stage(
                out, seed, "train_ppo.py", "--data", shared, "--sft", policy, "--value-model", policy,
                "--reward-model", *members, "--lr", args.lr, "--num-ppo-epochs", 2,
                "--total-episodes", args.total_episodes, "--kl-coef", case.kl_coef, *weights, needs=needs,
            ))  # fmt: skip
            if report.has_best_of(case):
                policies = [word for n in args.best_of for word in (f"best-of-{n}", f"best-of-{n}:{policy}")]
                runs.append(evaluation(
                    out / "best_of", "tiny", "--data", shared, "--reward-model", *members, "--num-queries",
                    args.num_queries, "--temperature", 0.7, "--seed", seed, "--policies", "sft", policy, *policies,
                    needs=needs,
                ))  # fmt: skip
    yield runs
    if not args.dry_run:
        yield [Run(("-m", "experiments.scaling.report", "--runs", str(args.out)))]
