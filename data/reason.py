"""Tasks generated and checked by the package reasoning-gym -> conversations, and a reward.

    python -m data.reason --out runs/reason/problems --seed 1
    python -m data.chat --source runs/reason/problems --out runs/reason/data
    python train_grpo.py reason                       # --reward data/reason.py:solved

There are two tasks, which SmolLM2-135M-Instruct solves in about one of ten attempts: sums of two numbers with one or
two digits, and products of two digits. --out gets train.jsonl and validation.jsonl: records for `data.chat` with a
prompt, a completion, the task, the answer and the package's entry. No question is in both.

The answer in a reply is its last number, so a model may write "4 + 7 = 11." The package checks if it is right.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType

from nanorlhf.cli import PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out

TASKS: dict[str, dict] = {  # the package's task name -> settings for small problems
    "chain_sum": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
    "products": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
}
NUM_PROBLEMS = {"chain_sum": 400, "products": 100}  # only 100 products of two digits exist
SYSTEM = "Reply with the answer alone."
NUM_TRIES = 100_000  # maximum number of problems drawn per task: small problems repeat often
NUMBER = re.compile(r"[-\N{MINUS SIGN}]?[0-9](?:[\w.,/:^%+\N{MINUS SIGN}-]*[0-9a-zA-Z%])?")  # whole: not the 5 of 11.5


@cache
def package() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:  # from the optional extra `reason`
        raise InputError("data/reason.py needs reasoning-gym: install it with `pip install reasoning-gym`.") from error
    return reasoning_gym


# ---------------------------------------------------------------------------------------------------------- 1. rewards
def answer_in(response: str) -> str:
    """Return the last number of a response as written, or "" if it has none.

    >>> answer_in("4 + 7 = 11."), answer_in("It is -3"), answer_in("I can't say.")
    ('11', '-3', '')
    >>> answer_in("It is 11.5."), answer_in("4-7"), answer_in("1,011")
    ('11.5', '4-7', '1,011')
    """
    return next(reversed(NUMBER.findall(response)), "").replace("\N{MINUS SIGN}", "-")


def solved(queries: list[str], responses: list[str], entry: list[str]) -> list[float]:
    """Return 1 for an answer that the package accepts, else 0. entry: the package's entry for each query, as JSON."""
    rewards = []
    for response, text in zip(responses, entry, strict=True):
        problem = json.loads(text)
        check = package().get_score_answer_fn(problem["metadata"]["source_dataset"])
        rewards.append(float(check(answer=answer_in(response), entry=problem) == 1))  # below 1: partly right
    return rewards


def says_a_number(queries: list[str], responses: list[str]) -> list[float]:
    """Return 1 for a response with any number, right or wrong: learning just the format of a reply earns this."""
    return [float(answer_in(response) != "") for response in responses]


# ---------------------------------------------------------------------------------------------------------- 2. records
def records(task: str, seed: int) -> Iterator[dict]:
    """Yield records of a task with distinct questions, from NUM_TRIES problems drawn by the package."""
    seen: set[str] = set()
    for entry in package().create_dataset(task, size=NUM_TRIES, seed=seed, **TASKS[task]):
        question, answer = entry["question"].strip(), entry["answer"]
        if question not in seen:
            seen.add(question)
            prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            yield dict(prompt=prompt, completion=answer, task=task, answer=answer, entry=json.dumps(entry))


@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("runs/reason/problems")
    """directory for train.jsonl and validation.jsonl; existing files are replaced"""
    seed: Seed = 1
    """seed of the problems and the split"""
    num_validation: PositiveInt = 150
    """rows of validation.jsonl; the others go to train.jsonl"""


def main(args: Args) -> None:
    check_ranges(args)
    if args.num_validation >= sum(NUM_PROBLEMS.values()):
        raise InputError(f"--num-validation {args.num_validation}: must be at most {sum(NUM_PROBLEMS.values()) - 1}.")
    check_out(args.out)
    rows = [row for task, count in NUM_PROBLEMS.items() for row in islice(records(task, args.seed), count)]
    random.Random(args.seed).shuffle(rows)
    for split, part in (("validation", rows[: args.num_validation]), ("train", rows[args.num_validation :])):
        write_jsonl(args.out / f"{split}.jsonl", part)
        print(f"{args.out / split}.jsonl: {len(part):,} rows")


if __name__ == "__main__":
    run_module(main, Args)
