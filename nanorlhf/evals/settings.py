"""The settings that evaluations share, and what names their policies."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from nanorlhf import launch
from nanorlhf.cli import NonNegativeInt, PositiveInt, Seed, check_ranges, named_pairs
from nanorlhf.errors import InputError
from nanorlhf.files import check_out


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Of every evaluation."""

    data: Path
    """directory of the JSON Lines files"""
    out: Path
    """directory of eval.json, report.html and, where texts are sampled, samples.jsonl"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first model's"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """bfloat16: forward passes under autocast, whose products' weights are stored in it; auto: the faster, by
    what the processor or GPU has"""
    batch_size: PositiveInt = 64
    """rows per forward pass; changes memory, not the result"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    offload: bool = False
    """keep the models in CPU memory, and only the one that computes on the device"""
    overwrite: bool = False
    """replace an evaluation that --out already holds"""


@dataclass(frozen=True, kw_only=True)
class PolicyArgs(EvalArgs):
    """Of every evaluation that samples from policies."""

    policies: tuple[str, ...]
    """pairs of a name and its checkpoint directory or Hub id"""
    seed: Seed = 1
    """fixes the samples and the bootstrap resamples"""
    num_queries: PositiveInt | None = None
    """queries that each policy answers, from the top of the file; None: all"""
    response_length: PositiveInt
    """maximum number of sampled tokens, EOS included"""
    num_report_samples: NonNegativeInt = 24
    """queries whose responses are shown in report.html; samples.jsonl has all"""


def begin(args: EvalArgs, writes: bool = True) -> torch.device:
    """Check the settings; returns the device. Raises InputError, before anything is written."""
    check_ranges(args)
    if writes and (args.out / "eval.json").exists() and not args.overwrite:
        raise InputError(f"--out {args.out} holds an evaluation: choose another directory, or pass --overwrite.")
    if writes:
        check_out(args.out)
    return launch.setup(args.device)


def named_policies(words: tuple[str, ...]) -> dict[str, str]:
    """("sft", DIR, "ppo", DIR) -> {"sft": DIR, "ppo": DIR}"""
    policies = dict(named_pairs("--policies", words))
    if 2 * len(policies) != len(words) or "reference" in policies:
        raise InputError(
            f"--policies {' '.join(words)}: names must differ, and `reference` is taken by the data's references."
        )
    return policies


def best_of(place: str) -> tuple[int, str]:
    """best-of-16:DIR -> 16, DIR: the one of 16 responses that the reward model likes best; other places -> 1, place"""
    match = re.fullmatch(r"best-of-(\d+):(.+)", place)
    if match and not 2 <= int(match[1][:9]) <= 10**6:
        raise InputError(f"--policies {place}: N of best-of-N must be from 2 to 1,000,000.")
    return (int(match[1]), match[2]) if match else (1, place)
