"""Every algorithm on sums, a task with a verifiable reward; other rewards, and other samplers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.mismatch.runs import CORRECTIONS, SAMPLERS
from experiments.runs import Args, Run, Words, evaluation, stage
from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sums(Args):
    out: Path = Path("runs/sums_study")
    seeds: tuple[int, ...] = (1, 2, 3)
    runs: Words = (
        *("ppo", "grpo", "rloo", "gspo", "dapo", "dr-grpo", "reinforce++", "cispo", "online-dpo"),
        *("ppo/process", "reinforce++/process", "ppo/learned", "grpo/learned", "ppo/leak", "grpo/leak"),
        *("ppo/bfloat16", "ppo/bfloat16,tis", "ppo/top-p", "ppo/top-p,tis"),
    )
    """ALGORITHM or ALGORITHM/VARIANT, from CHECKED and VARIANTS"""
    total_episodes: int = 15_360
    """sampled responses per run"""
    num_queries: int = 128
    """evaluation queries, each answered 64 times"""


CHECKED = {  # the outcome as reward, and the recipe's settings if the algorithm allows them
    "ppo": ("train_ppo.py", "sums"),
    "grpo": ("train_grpo.py", "sums"),
    "rloo": ("train_grpo.py", "sums", "--algorithm", "rloo"),
    "gspo": ("train_grpo.py", "sums", "--algorithm", "gspo"),
    "dapo": ("train_grpo.py", "sums", "--algorithm", "dapo", "--kl-coef", 0),
    "dr-grpo": ("train_grpo.py", "sums", "--algorithm", "dr_grpo"),
    "reinforce++": ("train_grpo.py", "sums", "--algorithm", "reinforce++"),
    "cispo": ("train_grpo.py", "sums", "--algorithm", "cispo", "--kl-coef", 0),
    "online-dpo": (
        *("train_grpo.py", "sums", "--algorithm", "online_dpo"),
        *("--num-epochs", 1, "--num-minibatches", 1, "--kl-coef", 0.1),
    ),
}
VARIANTS: dict[str, Words] = {
    "process": ("--reward", "data/sums.py:process"),
    "learned": (),  # --reward is the reward model of the seed
    "leak": ("--reward", "data/sums.py:outcome", "data/sums.py:layout", "--reward-weights", "1", "0.5"),
    "bfloat16": SAMPLERS["bfloat16"],
    "bfloat16,tis": SAMPLERS["bfloat16"] + CORRECTIONS["tis"],
    "top-p": SAMPLERS["top-p"],
    "top-p,tis": SAMPLERS["top-p"] + CORRECTIONS["tis"],
}


def sums(args: Sums) -> Iterator[list[Run]]:
    """Yield each seed's world, initial policy, reward model and runs, all with the same budget and evaluation."""
    runs = []
    for seed in args.seeds:
        directory = args.out / str(seed)
        data, sft, rm = directory / "data", directory / "sft", directory / "rm"
        command = ("-m", "data.sums", "--out", str(data), "--seed", str(seed))
        runs += [
            Run(command, data / "long/comparisons.train.jsonl"),
            stage(
                sft, seed, "train_sft.py", "sums", "--data", data / "short",
                needs=(data / "long/comparisons.train.jsonl",),
            ),
            stage(
                rm, seed, "train_rm.py", "sums", "--data", data / "long", "--sft", sft,
                needs=(sft / "summary.json",),
            ),
        ]  # fmt: skip
        policies: list[object] = ["sft", sft]
        for entry in args.runs:
            name, _, variant = entry.partition("/")
            if name not in CHECKED or variant not in ("", *VARIANTS):
                raise InputError(
                    f"--runs {entry}: expected ALGORITHM or ALGORITHM/VARIANT, from {[*CHECKED]} and {[*VARIANTS]}."
                )
            flags = ("--reward", str(rm)) if variant == "learned" else VARIANTS.get(variant, ())
            out = directory / entry.replace("/", "-")
            runs.append(stage(
                out, seed, *CHECKED[name], "--data", data / "long", "--sft", sft, "--total-episodes",
                args.total_episodes, *flags, needs=(rm / "summary.json",),
            ))  # fmt: skip
            policies += [out.name, out]
        trained = tuple(Path(str(out)) / "summary.json" for out in policies[3::2])
        runs.append(
            evaluation(
                directory / "eval", "sums", "--data", data / "long", "--num-queries", args.num_queries, "--seed", seed,
                "--policies", *policies, needs=trained,
            )
        )  # fmt: skip
    yield runs
    yield [Run(("-m", "experiments.sums.report", "--runs", str(args.out), "--out", str(args.out / "report")))]
