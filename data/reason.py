"""Tasks of the package reasoning-gym, which makes and checks them -> conversations, and the reward.

    python -m data.reason --out runs/reason/problems --seed 1
    python -m data.chat --source runs/reason/problems --out runs/reason/data
    python train_grpo.py reason                       # --reward data/reason.py:solved

Two tasks that SmolLM2-135M-Instruct solves in about one of ten tries: sums of two numbers with one or two digits, and
products of two digits. --out gets train.jsonl and validation.jsonl, records of a prompt and a completion for
`data.chat`, with the task, the answer and the package's own entry; no question is in both.

The answer of a reply is its last number, so that a model may say "4 + 7 = 11." The package decides if it is right.
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

TASKS: dict[str, dict] = {  # by the package's name: the settings that make problems small enough
    "chain_sum": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2),
    "products": dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1),
}
NUM_PROBLEMS = {"chain_sum": 400, "products": 100}  # there are no more products of two digits
SYSTEM = "Reply with the answer alone."
NUM_TRIES = 100_000  # problems that are drawn for a task at most: small ones come again and again
NUMBER = re.compile(r"[-\N{MINUS SIGN}]?[0-9](?:[\w.,/:^%+\N{MINUS SIGN}-]*[0-9a-zA-Z%])?")  # whole: not the 5 of 11.5


@cache
def package() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:  # of the optional extra `reason`
        raise InputError("data/reason.py needs reasoning-gym: install it with `pip install reasoning-gym`.") from error
    return reasoning_gym


# ---------------------------------------------------------------------------------------------------------- 1. rewards
def answer_in(response: str) -> str:
    """The last number of a response, as it is written; without one, nothing.

    >>> answer_in("4 + 7 = 11."), answer_in("It is -3"), answer_in("I can't say.")
    ('11', '-3', '')
    >>> answer_in("It is 11.5."), answer_in("4-7"), answer_in("1,011")
    ('11.5', '4-7', '1,011')
    """
    return next(reversed(NUMBER.findall(response)), "").replace("\N{MINUS SIGN}", "-")


def solved(queries: list[str], responses: list[str], entry: list[str]) -> list[float]:
    """1 for an answer that the package accepts, else 0. entry: the package's own of each query, as JSON."""
    rewards = []
    for response, text in zip(responses, entry, strict=True):
        problem = json.loads(text)
        check = package().get_score_answer_fn(problem["metadata"]["source_dataset"])
        rewards.append(float(check(answer=answer_in(response), entry=problem) == 1))  # less: part of the answer
    return rewards


def says_a_number(queries: list[str], responses: list[str]) -> list[float]:
    """Whether a response has an answer at all, be it wrong: what learning the form of a reply can bring."""
    return [float(answer_in(response) != "") for response in responses]


# ---------------------------------------------------------------------------------------------------------- 2. records
def records(task: str, seed: int) -> Iterator[dict]:
    """Records of a task, each question once, for as long as the package makes new ones."""
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
    """seed of every problem, and of which are held out"""
    num_validation: PositiveInt = 150
    """rows of validation.jsonl; the others are in train.jsonl"""


def main(args: Args) -> None:
    check_ranges(args)
    if args.num_validation >= sum(NUM_PROBLEMS.values()):
        raise InputError(f"--num-validation {args.num_validation}: no more than {sum(NUM_PROBLEMS.values()) - 1} fit.")
    check_out(args.out)
    rows = [row for task, count in NUM_PROBLEMS.items() for row in islice(records(task, args.seed), count)]
    random.Random(args.seed).shuffle(rows)
    for split, part in (("validation", rows[: args.num_validation]), ("train", rows[args.num_validation :])):
        write_jsonl(args.out / f"{split}.jsonl", part)
        print(f"{args.out / split}.jsonl: {len(part):,} rows")


if __name__ == "__main__":
    run_module(main, Args)
