"""The paper's LLM judge of two summaries: a chat model behind a URL, or a file of earlier verdicts.

The judge sees the query and two summaries, A and B, in an order that is drawn from the seed for each pair. An answer
that doesn't end in a verdict is `unparsed`: it is counted separately, not replaced by a coin flip. The requests are
sent by nanorlhf/rewards/endpoint.py.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from nanorlhf import dataset
from nanorlhf.errors import InputError

WIN = {"ours": 1.0, "tie": 0.5, "theirs": 0.0}  # a verdict's weight in the win rate; others are excluded
NO_VERDICT = ("unparsed", "unanswered")

# the paper's prompt, word for word, so that win rates are comparable
PROMPT = """Which of the following summaries does a better job of summarizing the most important points in the given \
forum post, without including unimportant or irrelevant details? Judge based on accuracy, coverage, and coherence.

### Post:
{query}

### Summary A:
{a}

### Summary B:
{b}

### Instructions:
FIRST provide a one-sentence comparison of the two summaries, explaining which you prefer and why. SECOND, on a new \
line, state only "A" or "B" to indicate your choice. Your response should use the format:
Comparison: <one-sentence comparison and explanation>
Preferred: <"A" or "B">"""


class Pair(NamedTuple):
    query: str
    ours: str
    theirs: str


def make_prompt(pair: Pair, ours_first: bool) -> str:
    a, b = (pair.ours, pair.theirs) if ours_first else (pair.theirs, pair.ours)
    return PROMPT.format(query=pair.query.strip(), a=a.strip(), b=b.strip())


def parse(answer: str) -> Literal["A", "B"] | None:
    """Parse the verdict in the last line: A, "A", **A** or Summary A, with or without `Preferred:`; else None.

    >>> parse('Comparison: the first one invents a car.\\nPreferred: "B"')
    'B'
    >>> parse("Comparison: both are good.\\nPreferred: A or B")
    """
    plain = answer.replace("**", "").strip()
    if plain.count("Preferred:") > 1:  # two verdicts
        return None
    match = re.fullmatch(r'(Preferred:\s*)?("?)(Summary )?([AB])\2', plain[plain.rfind("\n") + 1 :].strip())
    if match is None:
        return None
    return "A" if match[4] == "A" else "B"


def orders(pair: Pair, seed: int, both: bool) -> list[bool]:
    """Draw whether our summary is A, from the seed and the texts: each evaluation gives a pair the same prompt."""
    if both:
        return [True, False]
    return [hashlib.sha256(json.dumps([seed, *pair]).encode()).digest()[0] % 2 == 0]


def judge_pairs(
    pairs: list[Pair], seed: int, both_orders: bool, ask: Callable[[list[str]], dict[str, str]]
) -> list[dict]:
    """Return one row per pair: its texts, the order of each presentation, the answers, and which is `preferred`.

    `ask` maps prompts to answers and may omit some. With both orders, a pair counts only if both answers have a
    verdict, and is a tie if the verdicts differ. Two equal texts are a tie without asking the judge.
    """
    shown = [[] if pair.ours.strip() == pair.theirs.strip() else orders(pair, seed, both_orders) for pair in pairs]
    prompts = [[make_prompt(pair, first) for first in firsts] for pair, firsts in zip(pairs, shown, strict=True)]
    answers = ask(list(dict.fromkeys(prompt for group in prompts for prompt in group)))
    rows = []
    for pair, firsts, group in zip(pairs, shown, prompts, strict=True):
        replies = [answers.get(prompt) for prompt in group]
        verdicts = [parse(answer or "") for answer in replies]
        if None in replies:
            preferred = "unanswered"
        elif None in verdicts:
            preferred = "unparsed"
        else:
            choices = {"ours" if (v == "A") == first else "theirs" for v, first in zip(verdicts, firsts, strict=True)}
            preferred = choices.pop() if len(choices) == 1 else "tie"
        rows.append({**pair._asdict(), "ours_first": firsts, "answers": replies, "preferred": preferred})
    return rows


def load_verdicts(path: Path) -> dict[Pair, str]:
    """Load earlier verdicts, by this judge or any other: rows {"query", "ours", "theirs", "preferred"}."""
    verdicts: dict[Pair, str] = {}
    for where, record in dataset.iter_jsonl(path):
        *texts, preferred = (dataset.field(record, name, str, where) for name in (*Pair._fields, "preferred"))
        if preferred not in (*WIN, *NO_VERDICT):
            raise InputError(
                f"{where}: the field 'preferred' is {preferred!r}; expected one of {', '.join((*WIN, *NO_VERDICT))}."
            )
        pair = Pair(*(text.strip() for text in texts))
        if verdicts.setdefault(pair, preferred) != preferred:
            raise InputError(f"{where}: an earlier line has the same pair with 'preferred' {verdicts[pair]!r}.")
    return verdicts
