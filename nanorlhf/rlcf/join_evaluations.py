"""Join evaluations of policies with different tokenizers into one table. [RLCF tables 1-3]

    python -m nanorlhf.rlcf.join_evaluations runs/rlcf/eval/eval.json runs/codet5/eval/eval.json

One run of eval.py evaluates policies that share a tokenizer. All evaluations must have the same problems, ks,
temperatures, number of samples and top-p. Intervals are 95%, over problems.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import read_object
from nanorlhf.report.page import Lines, aligned, percent
from nanorlhf.rlcf.evaluate_programs import SUCCESSES

SHARED = ("ks", "temperatures", "num_samples", "top_p")  # settings that pass@k depends on


@dataclass(frozen=True, kw_only=True)
class Args:
    evals: tyro.conf.Positional[tuple[Path, ...]]
    """eval.json files of eval.py rlcf"""


def check(path: Path, result: dict, first_path: Path, first: dict) -> None:
    """Raise InputError if two evaluations can't be compared."""
    if result["problems"] != first["problems"]:
        raise InputError(f"{path} and {first_path} have different problems: evaluate both on the same code.test.jsonl.")
    for name in SHARED:
        ours, theirs = result["args"][name], first["args"][name]
        if ours != theirs:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{path} and {first_path} differ in {flag}, {ours} and {theirs}: evaluate one again.")


def rows(evaluations: dict[Path, dict]) -> Iterator[list[str]]:
    """Yield a row per policy, each k at its best temperature."""
    for path, result in evaluations.items():
        for name, policy in result["policies"].items():
            cells = [percent(at[success], at[f"{success}_ci"]) for success in SUCCESSES for at in policy["at_k"]]
            temperatures = " / ".join(str(at["temperature"]) for at in policy["at_k"])
            yield [f"{path.parent}: {name}", f"{policy['parameters'] / 1e6:,.1f}", *cells, temperatures]


def main(args: Args) -> Lines:
    """Print and return the table."""
    evaluations: dict[Path, dict] = {}
    for path in args.evals:
        result = read_object(path)
        if "problems" not in result:
            raise InputError(f"{path} wasn't written by this version's eval.py rlcf: evaluate again.")
        evaluations[path] = result
    if not evaluations:
        raise InputError("expected at least one eval.json.")
    first_path, first = next(iter(evaluations.items()))
    for path, result in evaluations.items():
        check(path, result, first_path, first)
    columns = [f"{success}@{k}" for success in SUCCESSES for k in first["args"]["ks"]]
    lines = [["%", "million parameters", *columns, "temperature"], *rows(evaluations)]
    print(aligned(lines))
    return lines


if __name__ == "__main__":
    run_module(main, Args)
