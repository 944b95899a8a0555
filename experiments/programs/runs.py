"""PPO on programs with static checks, tests or a discriminator as the reward, and the discriminator's learning."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from experiments.runs import Args, Run, Words, evaluation, stage
from experiments.tables import evaluated, part
from nanorlhf.cli import Count
from nanorlhf.errors import InputError

TESTS, CHECKS = "tests:experiments/programs/tests.toml", "experiments/programs/checks.py"
DISCRIMINATORS: dict[str, Words] = {
    "untrained": ("--num-triplet-epochs", "0", "--warmup-steps", "0", "--num-pair-epochs", "0"),
    "brief": (),  # the recipe's, which takes about twenty steps
    "trained": ("--num-triplet-epochs", "5", "--num-rows", "None", "--num-pair-epochs", "20"),
}
ARMS: dict[str, Words] = {  # the highest score minus the lowest is 2, or 1 if a program that passes the checks gets 0
    "imitation": ("train_sft.py", "rlcf-tiny", "--num-epochs", "2"),
    # train_rlcf.py cuts a failing program at the error, which gets -1
    "compiler": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "None"),
    "compiler-pays-0": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "None", "--pass-score", "0"),
    "rlcf-untrained-frozen": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "untrained", "--freeze-discriminator"),
    "rlcf-brief": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "brief"),
    "rlcf-trained": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "trained"),
    "rlcf-trained-frozen": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "trained", "--freeze-discriminator"),
    "discriminator-only": ("train_rlcf.py", "rlcf-tiny", "--discriminator", "trained", "--no-compiler"),
    # train_ppo.py scores the whole response
    "checks": ("train_ppo.py", "rlcf-tiny", "--reward", f"{CHECKS}:passes"),
    "tests": ("train_ppo.py", "rlcf-tiny", "--reward", TESTS, "--reward-weights", "2"),
    "tests-and-checks": ("train_ppo.py", "rlcf-tiny", "--reward", TESTS, f"{CHECKS}:fails"),
}
CURVES: dict[str, Words] = {  # discriminators whose accuracy is measured while they train
    "trained": DISCRIMINATORS["trained"],
    "only-pairs": ("--num-triplet-epochs", "0", "--warmup-steps", "0", "--num-rows", "None", "--num-pair-epochs", "20"),
}
LIMITS = ("--max-query-length", "160", "--max-response-length", "128")  # of a program, in tokens


@dataclass(frozen=True, kw_only=True)
class Programs(Args):
    out: Path = Path("runs/programs_study")
    language: Literal["java", "python"] = "python"
    seeds: tuple[int, ...] = (1, 2, 3)
    variants: Words = tuple(ARMS)
    """rewards, of ARMS"""
    grid_seed: int = 8
    """seed of the search for the learning rate"""
    lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    """learning rates to search, for each reward"""
    total_episodes: Count = 2560
    """programs sampled per run"""
    num_problems: tuple[Count, Count] = (1200, 128)
    """problems with tests: for PPO, and for the evaluation"""


def programs(args: Programs) -> Iterator[list[Run]]:
    """Yield the search for the learning rates, then the runs of each seed."""
    for name in args.variants:
        if name not in ARMS:
            raise InputError(f"--variants {name}: expected one of {[*ARMS]}.")
    if args.grid_seed in args.seeds:
        raise InputError(f"--grid-seed {args.grid_seed} is also in --seeds: search at another seed.")
    tries = {f"{name}-{lr:g}": (name, lr) for name in args.variants for lr in args.lrs}
    yield seed_runs(args, args.grid_seed, tries, num_samples=2)
    chosen = dict.fromkeys(args.variants, args.lrs[0]) if args.dry_run else best_lrs(args)
    yield [run for seed in args.seeds for run in seed_runs(args, seed, {name: (name, chosen[name]) for name in chosen})]
    yield [Run(("-m", "experiments.programs.report", "--runs", str(args.out), "--out", str(args.out / "report")))]


def best_lrs(args: Programs) -> dict[str, float]:
    """Return each reward's learning rate with the highest pass@1 at the grid seed."""
    path = args.out / str(args.grid_seed) / "eval/eval.json"
    policies = evaluated(path)

    def solved(name: str, lr: float) -> float:
        return part(policies, str(path), f"{name}-{lr:g}", "at_k")[0]["pass"]

    return {name: max(args.lrs, key=partial(solved, name)) for name in args.variants}


def seed_runs(args: Programs, seed: int, settings: dict[str, tuple[str, float]], num_samples: int = 4) -> list[Run]:
    """Return the world of a seed, its initial policy, its discriminators, its runs and their evaluation.

    settings: directory of a run -> its reward and learning rate.
    """
    directory = args.out / str(seed)
    bench, data, sft = directory / "bench", directory / "data", directory / "sft"
    num_train, num_test = map(str, args.num_problems)
    made = ("--language", args.language, "--seed", str(seed))
    runs = [
        Run(
            ("-m", "data.programs", "--out", str(directory), "--num-bench", num_train, "1", num_test, *made),
            bench / "code.test.jsonl",
        ),
        Run(
            (
                *("-m", "data.codenet", "--source", str(directory / "sources"), "--out", str(data)),
                *("--vocab-size", "512", "--no-nested", *LIMITS, *made),
            ),
            data / "tokenizer.json",
            (bench / "code.test.jsonl",),
        ),
        stage(sft, seed, "train_sft.py", "rlcf-tiny", "--data", data, needs=(data / "tokenizer.json",)),
    ]
    for name, flags in DISCRIMINATORS.items():
        command = ("-m", "nanorlhf.rlcf.train_discriminator", "rlcf-tiny", "--data", data, "--sft", sft, *flags)
        if any(name in ARMS[reward] for reward, _ in settings.values()):
            runs.append(stage(directory / name, seed, *command, needs=(sft / "summary.json",)))
    policies: list[object] = ["sft", sft]
    for out, (reward, lr) in settings.items():
        words = (str(directory / word) if word in DISCRIMINATORS else word for word in ARMS[reward])
        start = ("--model", sft) if reward == "imitation" else ("--sft", sft, "--total-episodes", args.total_episodes)
        needs = (sft, *(directory / name for name in DISCRIMINATORS if name in ARMS[reward]))
        runs.append(stage(
            directory / out, seed, *words, *start, "--data", bench, "--lr", lr,
            needs=tuple(needed / "summary.json" for needed in needs),
        ))  # fmt: skip
        policies += [out, directory / out]
    runs.append(evaluation(
        directory / "eval", "rlcf-tiny", "--data", bench, "--seed", seed, "--temperatures", 0.6,
        "--num-samples", num_samples, "--ks", 1, num_samples, "--curves", "None", "--policies", *policies,
        needs=tuple(directory / out / "summary.json" for out in settings),
    ))  # fmt: skip
    return runs


@dataclass(frozen=True, kw_only=True)
class Discriminators(Args):
    out: Path = Path("runs/discriminators")
    language: Literal["java", "python"] = "python"
    seeds: tuple[int, ...] = (1, 2, 3)
    num_problems: Count = 1200
    """problems with programs; half of them are held out"""
    eval_every: Count = 50
    """steps between validations"""


def discriminators(args: Discriminators) -> Iterator[list[Run]]:
    """Yield a policy for each seed and the discriminators of CURVES, measured on programs for as many other problems as
    they train on.
    """
    runs = []
    for seed in args.seeds:
        directory = args.out / str(seed)
        data, sft, sources = directory / "data", directory / "sft", directory / "sources"
        made = ("--language", args.language, "--seed", str(seed))
        number = ("--num-problems", str(args.num_problems), "--num-bench", "1", "1", "1")
        shared = ("--vocab-size", "512", "--no-nested", "--validation-share", "0.5", *LIMITS)
        runs += [
            Run(("-m", "data.programs", "--out", str(directory), *number, *made), directory / "bench/code.test.jsonl"),
            Run(
                ("-m", "data.codenet", "--source", str(sources), "--out", str(data), *shared, *made),
                data / "tokenizer.json",
                (directory / "bench/code.test.jsonl",),
            ),
            # with half of the programs held out, validation would take longer than training
            stage(
                sft, seed, "train_sft.py", "rlcf-tiny", "--data", data, "--eval-every", 10_000,
                needs=(data / "tokenizer.json",),
            ),
        ]  # fmt: skip
        for name, flags in CURVES.items():
            command = ("-m", "nanorlhf.rlcf.train_discriminator", "rlcf-tiny", "--data", data, "--sft", sft)
            needs = (sft / "summary.json",)
            runs.append(stage(directory / name, seed, *command, *flags, "--eval-every", args.eval_every, needs=needs))
    yield runs
    report = args.out / "report"
    yield [Run(("-m", "experiments.programs.learning_curve", "--runs", str(args.out), "--out", str(report)))]
