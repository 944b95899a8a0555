"""Take a subset of a converted dataset: fewer rows, or one of two halves of the comparisons that share no query.

    python -m data.subset --data runs/real/all --out runs/real/first --half first
    python -m data.subset --data runs/real/all --out runs/real/second --half second --num-comparisons 300

A reward model that evaluates another one must be trained on different posts: --half first and --half second split
comparisons.train.jsonl by a hash of the query, so no query is in both. The other files, sft.{train,validation} and
comparisons.validation, are the same in both. The --num-... flags sample that many rows, also by a hash of the query,
so the order of the file doesn't matter.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.prepare import in_validation, jsonl_files
from nanorlhf.cli import PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import field, iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer

FILES = ("sft.train", "sft.validation", "comparisons.train", "comparisons.validation")


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path
    """directory of the converted files"""
    out: Path
    """directory for the subset and tokenizer.json; existing files are replaced"""
    half: Literal["first", "second", "both"] = "both"
    """which half of the training comparisons to keep, split by query"""
    num_demonstrations: PositiveInt | None = None
    """rows of sft.train; None: all"""
    num_comparisons: PositiveInt | None = None
    """rows of comparisons.train, after halving; None: all"""
    num_validation: PositiveInt | None = None
    """rows of each validation file; None: all"""
    seed: Seed = 1
    """seed of the halves and samples"""


def main(args: Args) -> None:
    check_ranges(args)
    if args.out.absolute() == args.data.absolute():
        raise InputError(f"--out must differ from --data; both are {args.out}.")
    files = [name for name in FILES if (args.data / f"{name}.jsonl").exists()]
    needed = "sft.train" if args.half == "both" else "comparisons.train"
    if needed not in files:
        raise InputError(f"--data {args.data} has no {needed}.jsonl.")
    tokenizer = load_tokenizer(args.data)
    limits = {"sft.train": args.num_demonstrations, "comparisons.train": args.num_comparisons}
    counts = {}
    with jsonl_files(args.out) as write:
        for name in files:
            rows = []
            for where, row in iter_jsonl(args.data / f"{name}.jsonl"):
                query = field(row, "query", str, where)
                # not just the query: its hash may have drawn the train/validation split
                in_second = in_validation(f"half\n{query}", 0.5, args.seed)
                if name != "comparisons.train" or args.half == "both" or in_second == (args.half == "second"):
                    digest = hashlib.sha256(f"{args.seed}\nsample\n{query}".encode()).hexdigest()
                    rows.append((digest, len(rows), row))
            if not rows:
                raise InputError(f"--half {args.half}: {args.data / name}.jsonl has no row in this half.")
            kept = sorted(rows, key=lambda entry: entry[:2])[: limits.get(name, args.num_validation)]
            counts[name] = len(kept)
            for _, _, row in sorted(kept, key=lambda entry: entry[1]):  # in the file's order
                write(name, row)
    tokenizer.save(args.out)
    print(f"written: {args.out}: " + ", ".join(f"{name}.jsonl ({count})" for name, count in counts.items()))


if __name__ == "__main__":
    run_module(main, Args)
