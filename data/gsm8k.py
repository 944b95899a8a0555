"""GSM8K, as published (Hub: openai/gsm8k) -> sft.jsonl, and rewards that check the answer.

    python -m data.gsm8k --source DIR --out runs/cs336/data
    python -m data.gsm8k --source openai/gsm8k --files 'main/*' --out runs/cs336/data

A record has a question and an answer. The answer is a line per step with calculator marks, then `#### ` and a number:

    question   Ann has 3 bags of 4 nuts and eats 2. How many nuts are left?
    answer     She has 3*4=<<3*4=12>>12 nuts.\\nSo 12-2=<<12-2=10>>10 nuts are left.\\n#### 10

    query      INSTRUCTION, the question, and a tag that opens the steps
    response   the steps without marks, then `</think> <answer>10</answer>`
    meta       question, answer (the number, without commas)

The files' names give the split, and test becomes validation. --shots puts worked examples before each question, for a
model that was not trained on instructions: the first training rows, which are then not trained on. Rewards:

    data/gsm8k.py:solved     1 if the number between the answer's tags is right
    data/gsm8k.py:tagged     1 if there are tags, whatever is between them

Only the first answer counts: a base model may continue with another problem.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from data.prepare import SPLITS, SourceArgs, jsonl_files, read_records, source_files, split_in_path
from data.reason import answer_in
from nanorlhf.cli import NonNegativeInt, check_ranges, run_module
from nanorlhf.dataset import filled
from nanorlhf.errors import InputError

INSTRUCTION = (
    "Solve the problem step by step between <think> and </think>, then write only the number between <answer> and "
    "</answer>.\n\n"
)
MARK = re.compile(r"<<[^<>]*>>")
FINAL = re.compile(r"\n#### *(-?[0-9][0-9,]*(?:\.[0-9]+)?) *$")
TAGGED = re.compile(r"</think>\s*<answer>(.*?)</answer>", re.DOTALL)


# ---------------------------------------------------------------------------------------------------------- 1. rewards
def number(text: str) -> Decimal | None:
    """Return the last number of a text without commas or its unit; None for no number, or for one like 1/2 or 4-7.

    >>> [str(number(text)) for text in ("$1,018.50", "5 + 13 = 18", "18 eggs", "18%", "-3", "1/2", "none")]
    ['1018.50', '18', '18', '18', '-3', 'None', 'None']
    """
    match = re.fullmatch(r"(-?[0-9]+(?:\.[0-9]+)?)(?:[a-zA-Z]+|%)?", answer_in(text).replace(",", ""))
    return Decimal(match[1]) if match else None


def solved(queries: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """Return 1 if the number in the first answer of a response is right, else 0. answer: from the rows.

    >>> solved([""] * 3, ["6*3</think> <answer>18.0</answer>", "It is 18.", "</think><answer>8</answer>"], ["18"] * 3)
    [1.0, 0.0, 0.0]
    """
    pairs = zip(map(TAGGED.search, responses), answer, strict=True)
    return [float(match is not None and number(match[1]) == Decimal(right)) for match, right in pairs]


def tagged(queries: list[str], responses: list[str]) -> list[float]:
    """Return 1 for a response with an answer between its tags, right or wrong, else 0."""
    return [float(TAGGED.search(response) is not None) for response in responses]


# ------------------------------------------------------------------------------------------------------------- 2. rows
@dataclass(frozen=True, kw_only=True)
class Args(SourceArgs):
    out: Path = Path("runs/cs336/data")
    """directory for the JSON Lines; existing files are replaced"""
    shots: NonNegativeInt = 0
    """worked examples before each question: the first rows of the training set"""


def read_row(record: dict, where: str) -> dict:
    """Return the row of a record, without an instruction or examples. Raises InputError without a final `#### N`."""
    question, answer = filled(record, "question", where).strip(), filled(record, "answer", where).rstrip()
    match = FINAL.search(answer)
    if match is None:
        raise InputError(f"{where}: 'answer' must end in a line like '#### 72', not {answer[-40:]!r}.")
    steps, final = MARK.sub("", answer[: match.start()]), match[1].replace(",", "")
    return {
        "query": f"Problem: {question}\nSolution: <think>",
        "response": f" {steps}\n</think> <answer>{final}</answer>",
        "meta": {"question": question, "answer": final},
    }


def main(args: Args) -> None:
    check_ranges(args)
    splits: dict[str, list[dict]] = defaultdict(list)
    for path, inside in source_files(args):
        published = split_in_path(inside)
        if published is None:
            raise InputError(f"{path}: expected train or test in the name of the file.")
        split = "validation" if published == "test" else SPLITS[published]
        splits[split] += [read_row(record, where) for where, record in read_records(path)]
    examples, splits["train"] = splits["train"][: args.shots], splits["train"][args.shots :]
    if not splits["train"]:
        raise InputError(f"--source {args.source}: no training rows are left after --shots {args.shots}.")
    before = INSTRUCTION + "".join(f"{row['query']}{row['response']}\n\n" for row in examples)
    with jsonl_files(args.out) as write:
        for split, rows in splits.items():
            for row in rows:
                write(f"sft.{split}", row | {"query": before + row["query"]})
    for split, rows in splits.items():
        print(f"{args.out}/sft.{split}.jsonl: {len(rows):,} rows")


if __name__ == "__main__":
    run_module(main, Args)
