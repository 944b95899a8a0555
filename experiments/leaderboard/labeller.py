"""Labellers drawn from a secret, and the data of the worlds that they label.

    python -m experiments.leaderboard.labeller --secret-file runs/secret --number 1 --out runs/leaderboard/data

Every positive weight of the public gold score has the same best response, the summary with all four facts. So an entry
with the public score would win under labellers who only weigh its terms differently, as with --taste-spread. A secret
labeller differs in kind: two of the four facts, drawn from the secret, are wanted, and the other two lower the score.
The sizes of all weights are drawn as for --taste-spread 0.5.
"""

import hashlib
import io
import math
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from data import tiny
from data.labellers import Dials, preference_probability
from nanorlhf.cli import Count, run_module
from nanorlhf.dataset import iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_text

Score = Callable[[str, str], float]
TASTE_SPREAD = 0.5  # standard deviation of the log of a weight
SLOT_OF = {
    value.lower().split()[0]: slot for slot in tiny.SLOTS for value in (*tiny.SLOTS[slot], *tiny.OUTLANDISH[slot])
}


@dataclass(frozen=True)
class Labeller:
    """A labeller who values each fact separately; `weights` are for the gold score's other terms."""

    values: dict[str, float]  # slot -> value of stating the post's fact, below 0 if it is unwanted
    weights: dict[str, float]

    def score(self, query: str, response: str) -> float:
        """Return the labeller's gold score, LOWEST for an empty response.

        score = sum of the values of the stated facts + the other terms of `data.tiny.gold_score`, with these weights
        """
        rest = tiny.weighted_score(query, response, self.weights | {"coverage": 0.0})
        facts, _ = tiny.facts_in(tiny.split_words(query))
        stated, _ = tiny.facts_in(tiny.split_words(response))
        return round(max(tiny.LOWEST, rest + sum(self.values[SLOT_OF[fact]] for fact in stated & facts)), 6)


def draw_labeller(secret: str, number: int) -> Labeller:
    """Return the labeller of a world of the secret set, 1 or more.

    Worlds 1 and 2, 3 and 4, and so on are pairs: the second labeller wants the two facts that the first doesn't.
    """
    pair = (number + 1) // 2
    wanted = random.Random(f"facts {secret} {pair}").sample([*tiny.SLOTS], 2)
    if number % 2 == 0:
        wanted = [slot for slot in tiny.SLOTS if slot not in wanted]
    rng = random.Random(f"weights {secret} {number}")

    def size() -> float:
        return math.exp(TASTE_SPREAD * rng.gauss())

    values = {slot: size() if slot in wanted else -size() for slot in tiny.SLOTS}
    return Labeller(values, {term: weight * size() for term, weight in tiny.WEIGHTS.items() if term != "coverage"})


def gold_score(secret: str | None, number: int) -> Score:
    """Return the gold score of a world; secret None: of the public set."""
    return tiny.gold_score if secret is None else draw_labeller(secret, number).score


def secret_number(purpose: str, secret: str, number: int) -> int:
    """Return a seed that can't be guessed without the secret, from 0 to 2^63 - 1."""
    digest = hashlib.sha256(f"{purpose} {secret} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def read_secret(path: Path | None) -> str | None:
    """Read a secret from a file. Raises InputError if it is empty."""
    if path is None:
        return None
    if not (secret := read_text(path).strip()):
        raise InputError(f"--secret-file {path} is empty: write a secret into it, such as 32 random characters.")
    return secret


def relabel(row: dict, score: Score, rng: random.Random) -> dict:
    """Return a comparison with the choice of this labeller, by Bradley-Terry, and without meta."""
    difference = score(row["query"], row["chosen"]) - score(row["query"], row["rejected"])
    keeps = rng.random() < preference_probability(difference, Dials().temperature)
    chosen, rejected = (row["chosen"], row["rejected"]) if keeps else (row["rejected"], row["chosen"])
    return {"query": row["query"], "chosen": chosen, "rejected": rejected}


@dataclass(frozen=True, kw_only=True)
class Args:
    secret_file: Path
    """file with the secret"""
    number: Count
    """number of the world"""
    out: Path
    """directory for the same files as data.tiny writes, without meta"""
    num_demonstrations: Count = 8000
    num_comparisons: Count = 1600
    num_validation: Count = 512


def main(args: Args) -> None:
    """Write a world's data: texts from a secret seed, comparisons labelled by its labeller."""
    secret = read_secret(args.secret_file)
    assert secret is not None
    check_out(args.out)
    unfinished = args.out.with_name(f"{args.out.name}.unfinished")
    texts = tiny.Args(
        out=unfinished, seed=secret_number("texts", secret, args.number), num_demonstrations=args.num_demonstrations,
        num_comparisons=args.num_comparisons, num_validation=args.num_validation,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()):  # statistics of the public labels
        tiny.main(texts)
    score, rng = gold_score(secret, args.number), random.Random(f"labels {secret} {args.number}")
    for path in unfinished.glob("*.jsonl"):
        rows = [row for _, row in iter_jsonl(path)]
        if path.name.startswith("comparisons."):
            write_jsonl(path, [relabel(row, score, rng) for row in rows])
        else:
            write_jsonl(path, [{"query": row["query"], "response": row["response"]} for row in rows])
    shutil.rmtree(args.out, ignore_errors=True)
    unfinished.rename(args.out)
    print(f"written to {args.out}: the texts and labels of world {args.number}")


if __name__ == "__main__":
    run_module(main, Args)
