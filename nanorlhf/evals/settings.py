"""Settings shared by evaluations, and the parsing of --policies."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanorlhf import launch
from nanorlhf.cli import NonNegativeInt, PositiveInt, Seed, check_ranges, named_pairs
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.training.run_directory import kept_checkpoints

ALONG = "along:"


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Settings shared by all evaluations."""

    data: Path
    """directory of the JSON Lines files"""
    out: Path
    """output directory for eval.json, report.html and, if texts are sampled, samples.jsonl"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first model's"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """bfloat16: forward passes under autocast, with the matmul weights stored in bfloat16; auto: bfloat16 on a
    GPU that supports it or a processor with AMX, else float32"""
    batch_size: PositiveInt = 64
    """rows per forward pass; affects memory use, not the result"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    offload: bool = False
    """keep the models in CPU memory, except the one that is computing"""
    overwrite: bool = False
    """replace an existing evaluation in --out"""


@dataclass(frozen=True, kw_only=True)
class PolicyArgs(EvalArgs):
    """Settings shared by evaluations that sample from policies."""

    policies: tuple[str, ...]
    """pairs of a name and its checkpoint directory or Hub id; along:RUN takes all checkpoints that --keep-every left in
    a run directory"""
    seed: Seed = 1
    """random seed of the samples and the bootstrap"""
    num_queries: PositiveInt | None = None
    """number of queries that each policy answers, from the top of the file; None: all"""
    response_length: PositiveInt
    """maximum number of sampled tokens, EOS included"""
    num_report_samples: NonNegativeInt = 24
    """number of queries shown with their responses in report.html; samples.jsonl has all"""


def begin(args: EvalArgs, writes: bool = True) -> torch.device:
    """Check the settings and return the device. Raises InputError before anything is written."""
    check_ranges(args)
    if writes and (args.out / "eval.json").exists() and not args.overwrite:
        raise InputError(f"--out {args.out} already has an evaluation; choose another directory or pass --overwrite.")
    if writes:
        check_out(args.out)
    return launch.setup(args.device, args.dtype)


def named_policies(words: tuple[str, ...]) -> dict[str, str]:
    """("sft", DIR, "ppo", DIR) -> {"sft": DIR, "ppo": DIR}"""
    policies = dict(named_pairs("--policies", words))
    if 2 * len(policies) != len(words) or "reference" in policies:
        raise InputError(
            f"--policies {' '.join(words)}: names must differ, and `reference` is reserved for the data's references."
        )
    return policies


def with_kept_checkpoints(words: tuple[str, ...]) -> tuple[str, ...]:
    """("ppo", "along:RUN") -> ("ppo@10", "RUN/checkpoints/step-00000010", "ppo@20", ...); other pairs are unchanged."""
    expanded: list[str] = []
    for name, path in named_pairs("--policies", words):
        if not path.startswith(ALONG):
            expanded += name, path
            continue
        run = path.removeprefix(ALONG)
        kept = {step: kept for step, kept in kept_checkpoints(run).items() if (kept / "config.json").exists()}
        if not kept:
            raise InputError(f"--policies {name} {path}: {run} has no kept checkpoints; train it with --keep-every.")
        for step, checkpoint in kept.items():
            expanded += f"{name}@{step}", str(checkpoint)
    return tuple(expanded)


def best_of(path: str) -> tuple[int, str]:
    """best-of-16:DIR -> 16, DIR: of 16 responses, the one with the highest reward model score; PATH -> 1, PATH"""
    match = re.fullmatch(r"best-of-(\d+):(.+)", path)
    if match and not 2 <= int(match[1][:9]) <= 10**6:
        raise InputError(f"--policies {path}: N in best-of-N must be between 2 and 1,000,000.")
    return (int(match[1]), match[2]) if match else (1, path)
