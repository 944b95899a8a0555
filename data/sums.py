"""The embedded world of sums, with answers that a program checks -> sft.jsonl and comparisons.jsonl.

    python -m data.sums --out runs/sums --seed 1
    python -m data.sums --out runs/harder --terms 6 8 --digits 2

A problem is a sum of several terms. Each line of the work carries out the first operation, until a number is left:

    query       5+3-6+7
    response    8-6+7
                2+7
                9

    short/      sft.{train,validation}.jsonl: correct demonstrations of short problems
    long/       the same files for longer problems, with the queries for reinforcement learning, and
                comparisons.{train,validation}.jsonl: correct work and work with a slip, for a reward model

Each additional term halves the frequency of a demonstration, so the policy of `train_sft.py sums` has seen few long
problems: it drops terms in them, and errors add up line by line. No intermediate total is negative or has more digits
than a term can have. A token is a character. Rewards, for --reward:

    data/sums.py:outcome    1 for the right number on the last line
    data/sums.py:process    for each line, at the token that ends it: whether it follows from the previous line
    data/sums.py:solved     1 if all lines of the work are right
    data/sums.py:layout     for short work in the right format. It has a deliberate flaw: skipping work is rewarded

`gold_score` is the outcome of one response, for --gold.
"""

import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from nanorlhf.cli import Count, PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.tokenizer import train_tokenizer

VOCAB_SIZE = 257  # <|endoftext|> and the 256 bytes: no two characters are merged


# ------------------------------------------------------------------------------------------------------- 1. arithmetic
def reduced(line: str) -> str | None:
    """Return the next line, with the first operation carried out; None after a number or anything but a sum.

    >>> [reduced(line) for line in ("13-3+9", "10+9", "2-5+9", "-3+9", "19", "3+-9")]
    ['10+9', '19', '-3+9', '6', None, None]
    """
    match = re.fullmatch(r"(-?[0-9]+)([+-][0-9]+)((?:[+-][0-9]+)*)", line)
    return f"{int(match[1]) + int(match[2])}{match[3]}" if match else None


def work(query: str) -> list[str]:
    """Return all lines of the right work, the answer last. Raises InputError if the query is not a sum.

    >>> work("5+8-3+9")
    ['13-3+9', '10+9', '19']
    """
    lines = []
    line = reduced(query)
    while line is not None:
        lines.append(line)
        line = reduced(line)
    if not lines:
        raise InputError(f"the query {query!r:.80} is not from data.sums, so the answer is unknown.")
    return lines


def split_lines(response: str) -> list[str]:
    """Return the lines of a response, which starts with a newline."""
    return response.removeprefix("\n").split("\n")


def right_lines(query: str, response: str) -> list[bool]:
    """Return, for each line of a response, whether it follows from the previous line, whether or not that is right.

    >>> right_lines("5+8-3+9", "\\n12-3+9\\n9+9\\n18")
    [False, True, True]
    """
    lines = split_lines(response)
    return [line == reduced(before) for before, line in zip([query, *lines], lines, strict=False)]


# ---------------------------------------------------------------------------------------------------------- 2. rewards
def outcome(queries: list[str], responses: list[str], answer: list[int] | None = None) -> list[float]:
    """Return 1 for the right number on the last line, else 0. answer: from the rows; None: computed from the query."""
    answers = [int(work(query)[-1]) for query in queries] if answer is None else answer
    return [float(split_lines(text)[-1] == str(right)) for text, right in zip(responses, answers, strict=True)]


def solved(queries: list[str], responses: list[str]) -> list[float]:
    """Return 1 if all lines of the work are right, else 0. `outcome` also rewards a correct guess; this doesn't.

    >>> solved(["5+3-2"] * 2, ["\\n8-2\\n6", "\\n6"]), outcome(["5+3-2"] * 2, ["\\n8-2\\n6", "\\n6"])
    ([1.0, 0.0], [1.0, 1.0])
    """
    return [float(split_lines(text) == work(query)) for query, text in zip(queries, responses, strict=True)]


def process(queries: list[str], responses: list[str], response_ids: list[list[int]]) -> list[list[float]]:
    """Return a reward per token, including EOS: 1 / (lines of the right work) at the end of each right line, else 0.

    A line ends at the newline after it, or at EOS: until then, another digit may follow. So the last line of a
    truncated response gets no reward. The rewards of a response add up to at most 1, because no line follows from a
    number.

    >>> process(["1+2-1"], ["\\n3-1\\n2"], [[11, 3, 13, 1, 11, 2, 0]])
    [[0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.5]]
    """
    rewards = []
    for query, response, ids in zip(queries, responses, response_ids, strict=True):
        token_rewards = [0.0] * len(ids)
        if response.isascii():  # otherwise characters aren't tokens
            share, end = 1 / len(work(query)), int(response.startswith("\n"))
            for line, is_right in zip(split_lines(response), right_lines(query, response), strict=True):
                end += len(line)
                if is_right and end < len(ids):
                    token_rewards[end] = share
                end += 1  # the newline
        rewards.append(token_rewards)
    return rewards


def layout(queries: list[str], responses: list[str]) -> list[float]:
    """Reward work that looks right and is short: share of lines that are a sum or number, times expected lines / lines.

    Right work gets 1. The contents of the lines aren't checked, and skipping lines is rewarded more than writing them:
    this flaw is deliberate.

    >>> layout(["5+3-6+1"] * 3, ["\\n8-6+1\\n2+1\\n3", "\\n8-6+1\\n???\\n3", "\\n7"])
    [1.0, 0.6666666666666666, 3.0]
    """
    shapes = re.compile(r"-?[0-9]+(?:[+-][0-9]+)*")
    rewards = []
    for query, lines in zip(queries, map(split_lines, responses), strict=True):
        well_formed = sum(shapes.fullmatch(line) is not None for line in lines)
        rewards.append(well_formed / len(lines) * len(work(query)) / len(lines))
    return rewards


def gold_score(query: str, response: str) -> float:
    """Return the outcome of one response."""
    return outcome([query], [response])[0]


# --------------------------------------------------------------------------------------------------------- 3. problems
def problem(num_terms: int, digits: int, rng: random.Random) -> str:
    """Draw a sum; each intermediate total is non-negative and has at most `digits` digits."""
    limit = 10**digits
    total = rng.randrange(limit)
    text = str(total)
    for _ in range(num_terms - 1):
        after = rng.randrange(limit)
        text += f"{after - total:+}"
        total = after
    return text


def problems(count: int, weights: dict[int, float], digits: int, held_out: bool, rng: random.Random) -> list[str]:
    """Draw problems with numbers of terms by weight; a tenth of all problems, by hash, is held out for validation."""
    drawn: list[str] = []
    while len(drawn) < count:
        [num_terms] = rng.choices(list(weights), list(weights.values()))
        query = problem(num_terms, digits, rng)
        if (zlib.crc32(query.encode()) % 10 == 0) == held_out:
            drawn.append(query)
    return drawn


def slip(query: str, rng: random.Random) -> list[str]:
    """Return work with one wrong line (off by one, or without the last term) and lines that follow from it."""
    lines = work(query)
    wrong = rng.randrange(len(lines))
    number, rest = re.match(r"([0-9]+)(.*)", lines[wrong]).groups()  # type: ignore[union-attr]  # always matches
    if rest and rng.random() < 0.3:
        line = number + re.sub(r"[+-][0-9]+$", "", rest)
    else:
        line = f"{abs(int(number) + rng.choice((-1, 1)))}{rest}"
    return [*lines[:wrong], line, *(work(line) if reduced(line) else [])]


def demonstration(query: str) -> dict:
    lines = work(query)
    meta = {"answer": int(lines[-1]), "num_lines": len(lines)}
    return {"query": query, "response": "\n" + "\n".join(lines), "meta": meta}


def comparison(query: str, rng: random.Random) -> dict:
    right = demonstration(query)
    rejected = "\n" + "\n".join(slip(query, rng))
    return {"query": query, "chosen": right["response"], "rejected": rejected, "meta": right["meta"]}


# ------------------------------------------------------------------------------------------------------------ 4. files
@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("runs/sums")
    """directory for short/ and long/; existing files are replaced"""
    seed: Seed = 1
    """seed of all problems and slips"""
    demonstration_terms: tuple[PositiveInt, PositiveInt] = (2, 6)
    """minimum and maximum number of terms of a short problem"""
    terms: tuple[PositiveInt, PositiveInt] = (5, 6)
    """minimum and maximum number of terms of a long problem"""
    digits: PositiveInt = 1
    """maximum number of digits of a term"""
    num_demonstrations: Count = 20_000
    """rows of short/sft.train.jsonl"""
    num_queries: Count = 6400
    """rows of long/sft.train.jsonl"""
    num_comparisons: Count = 6400
    """rows of long/comparisons.train.jsonl"""
    num_validation: Count = 512
    """rows of each validation file"""


def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out)
    rng = random.Random(args.seed)
    fewest, most = args.demonstration_terms
    short = {n: 2.0**-n for n in range(fewest, most + 1)}  # each additional term halves the share
    fewest, most = args.terms
    long = {n: 1.0 for n in range(fewest, most + 1)}
    for flag, weights in (("--demonstration-terms", short), ("--terms", long)):
        if min(weights, default=0) < 2:
            raise InputError(f"{flag}: expected the minimum number of terms, at least 2, and the maximum.")
    files: dict[str, list[dict]] = {}
    for folder, weights, count in (("short", short, args.num_demonstrations), ("long", long, args.num_queries)):
        for split, rows in (("validation", args.num_validation), ("train", count)):
            drawn = problems(rows, weights, args.digits, split == "validation", rng)
            files[f"{folder}/sft.{split}"] = [demonstration(query) for query in drawn]
    for split, rows in (("validation", args.num_validation), ("train", args.num_comparisons)):
        drawn = problems(rows, long, args.digits, split == "validation", rng)
        files[f"long/comparisons.{split}"] = [comparison(query, rng) for query in drawn]
    tokenizer = train_tokenizer((), VOCAB_SIZE)
    for folder in ("short", "long"):
        tokenizer.save(args.out / folder)
    for name, written in files.items():
        write_jsonl(args.out / f"{name}.jsonl", written)
        longest = max(max(len(row[key]) for key in row if key != "meta") for row in written)
        print(f"{args.out / name}.jsonl: {len(written):,} rows, the longest text has {longest} characters")


if __name__ == "__main__":
    run_module(main, Args)
