"""PPO with samplers that differ from the policy."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.lab.runs import Lab, labels
from experiments.runs import Args, Run, Words, evaluation, stage
from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Mismatch(Args):
    out: Path = Path("runs/mismatch")
    seed: int = 1
    """seed of the world"""
    runs: Words = (
        *("exact/none", "bfloat16/none", "bfloat16/tis", "int8/none", "int8/tis", "stale/none", "stale/tis"),
        *("stale/ratio", "top-p/none", "top-p/tis", "top-p/ratio"),
    )
    """SAMPLER/CORRECTION, of SAMPLERS and CORRECTIONS; int8 needs a CPU with VNNI"""
    seeds: tuple[int, ...] = (1, 2, 3)


SAMPLERS: dict[str, Words] = {
    "exact": (),
    "bfloat16": ("--sampler.dtype", "bfloat16"),
    "int8": ("--sampler.dtype", "int8"),
    "stale": ("--sampler.sync-every", "8"),
    "top-p": ("--sampler.top-p", "0.9"),
}
CORRECTIONS: dict[str, Words] = {
    "none": (),
    "tis": ("--sampler.correction", "tis"),
    "ratio": ("--sampler.correction", "sampler_logprobs"),
}


def mismatch(args: Mismatch) -> Iterator[list[Run]]:
    """Yield the runs. All share the laboratory's base policy and reward model; evaluation samples exactly."""
    yield labels(Lab(out=args.out, seed=args.seed), "base")
    data, sft, rm = args.out / "base/data", args.out / "sft", args.out / "base/rm"
    runs, policies = [], []
    for entry in args.runs:
        sampler, _, correction = entry.partition("/")
        if sampler not in SAMPLERS or correction not in CORRECTIONS:
            raise InputError(f"--runs {entry}: write it as SAMPLER/CORRECTION, of {[*SAMPLERS]} and {[*CORRECTIONS]}.")
        for seed in args.seeds:
            out = args.out / entry / str(seed)
            flags = SAMPLERS[sampler] + CORRECTIONS[correction]
            runs.append(stage(
                out, seed, "train_ppo.py", "--data", data, "--sft", sft, "--reward-model", rm,
                "--total-episodes", 1280, "--kl-coef", 0.05, *flags,
            ))  # fmt: skip
            policies += [f"{sampler}-{correction}-{seed}", out]
    yield runs
    yield [
        evaluation(
            args.out / "eval", "tiny", "--data", data, "--reward-model", rm, "--num-queries", 256,
            "--num-report-samples", 0, "--seed", args.seed, "--policies", "sft", sft, *policies,
        )
    ]  # fmt: skip
    yield [Run(("-m", "experiments.mismatch.report", "--runs", str(args.out), "--out", str(args.out / "report")))]
