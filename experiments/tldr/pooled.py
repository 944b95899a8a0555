"""Copy a policy so that reward models trained from it score the mean over a response's tokens instead of the last one.

python -m experiments.tldr.pooled --sft runs/tiny/sft --out runs/tiny/pooled
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.cli import run_module
from nanorlhf.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Args:
    sft: str
    """checkpoint directory"""
    out: Path
    """directory of the copy"""


def main(args: Args) -> None:
    policy = load_gpt(args.sft)
    policy.config = replace(policy.config, mean_pooled=True)
    save(policy, args.out, load_tokenizer(args.sft))


if __name__ == "__main__":
    run_module(main, Args)
