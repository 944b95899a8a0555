"""The embedded town, with a known right reply to every question -> dialogues in DailyDialog's format.

    python -m data.town --out runs/town --seed 1
    python -m data.dialogue --source runs/town/town --out runs/town/data --vocab-size 512

Visitors ask the town's clerks where a place is, when it opens and which tram goes there. Some clerks give the right
answer, some are mistaken and give another value, and some are new and don't know. For three places, most clerks give
last year's opening hours. These dialogues are the demonstrations: a policy fine-tuned on them gives the right answer
more often than any single wrong one, except where most clerks are wrong. `gold_score` below rates a reply. So the town
can show what real dialogues can't: whether the answer most similar to the others is the true one, and what training on
that assumption does to a policy. The three outdated opening hours, or rumours, are the counterexample.

    town/        dialogues_train.txt, and dialogues_validation.txt with clerks who all know the town
    elsewhere/   the same for a town with the same places and other facts: a base model trained on it knows the language
                 but not the answers
"""

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from nanorlhf.cli import Count, Seed, check_ranges, run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, write_text

# ------------------------------------------------------------------------------------------------------------ 1. facts
KINDS = ("where", "opens", "tram")
FACTS = {  # place: what it is next to, when it opens, which tram line goes there
    "bakery": ("church", "six", "four"),
    "library": ("river", "nine", "two"),
    "museum": ("castle", "ten", "seven"),
    "market": ("bridge", "seven", "five"),
    "hospital": ("tower", "eight", "one"),
    "theatre": ("fountain", "noon", "three"),
    "school": ("mill", "eight", "six"),
    "bank": ("town hall", "nine", "four"),
    "zoo": ("bridge", "ten", "three"),
    "post office": ("town hall", "seven", "five"),
}
RUMOURS = {"museum": "nine", "bank": "eight", "zoo": "noon"}  # last year's opening hours
# elsewhere, each place has the facts of the next place
ELSEWHERE = dict(zip(FACTS, [*FACTS.values()][1:] + [*FACTS.values()][:1], strict=True))
VALUES = {kind: sorted({facts[i] for facts in FACTS.values()}) for i, kind in enumerate(KINDS)}

# -------------------------------------------------------------------------------------------- 2. questions and replies
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Klara", "Leo", "Maria", "Nils",
    "Olga", "Paul", "Rosa", "Simon", "Tina", "Viktor",
)  # fmt: skip
GREETINGS = ("Excuse me .", "Hello .", "Good morning .", "Hi , I am {name} .", "Good day , my name is {name} .")
QUESTIONS = {
    "where": ("Where is the {place} ?", "How do I find the {place} ?", "I am looking for the {place} ."),
    "opens": ("When does the {place} open ?", "At what time can I visit the {place} ?", "Is the {place} open yet ?"),
    "tram": ("Which tram goes to the {place} ?", "Can I take a tram to the {place} ?", "What line is the {place} on ?"),
}
REPLIES = {
    "where": ("It is next to the {value} .", "You find it next to the {value} .", "The {place} is near the {value} ."),
    "opens": ("It opens at {value} .", "They open at {value} every day .", "The {place} is open from {value} ."),
    "tram": ("Take line {value} .", "You can take line {value} .", "The {place} is on line {value} ."),
}
EVASIONS = ("I do not know .", "I am new here .", "You could ask someone else .")
GOODBYES = ("Have a nice day .", "Enjoy your stay .", "You are welcome .")

# clerk: how many of ten
CLERKS = {"knows": 5, "is mistaken": 3, "is new": 2}


def split_sentences(text: str) -> list[str]:
    """Lower-case sentences with single spaces and without dots."""
    return [" ".join(part.split()) for part in text.lower().split(".") if part.strip()]


ASIDES = {sentence for text in GOODBYES for sentence in split_sentences(text)}
IGNORANT = {sentence for text in EVASIONS for sentence in split_sentences(text)}
# sentence: (kind, place, value) that it states; the place is None if "it" refers to the place in the question
STATEMENTS = {
    split_sentences(reply.format(place=place, value=value))[0]: (kind, place if "{place}" in reply else None, value)
    for kind, replies in REPLIES.items()
    for reply in replies
    for place in FACTS
    for value in VALUES[kind]
}
ASKED = {  # question: (kind, place) that it asks about
    question.lower().replace("{place}", place): (kind, place)
    for kind, questions in QUESTIONS.items()
    for question in questions
    for place in FACTS
}


def parse_query(query: str) -> tuple[str, str]:
    """Return the (kind, place) that a query from `data.dialogue` asks about. Raises InputError for other queries."""
    text = query.lower()
    topic = next((topic for question, topic in ASKED.items() if question in text), None)
    if topic is None:
        raise InputError(f"the query {query!r} is not from data.town, so the right reply is unknown.")
    return topic


def gold_score(query: str, reply: str) -> float:
    """Score the correctness of `reply` from 0 to 1; depends only on the two texts.

    1 for the right fact in a clerk's sentence; 0.5 with an additional sentence that no clerk uses (missing words, a
    negation); 0.25 for admitting ignorance; 0 for anything else, and for any false statement.

    >>> query = "Dialogue:\\nHello . When does the zoo open ?\\nReply:"
    >>> [gold_score(query, reply) for reply in (" It opens at ten . Have a nice day .", " I am new here .")]
    [1.0, 0.25]
    >>> [gold_score(query, reply) for reply in (" It opens at noon .", " It does not open at ten .", "")]
    [0.0, 0.0, 0.0]
    """
    kind, place = parse_query(query)
    stated, num_unknown = set(), 0
    for sentence in split_sentences(reply):
        if sentence in STATEMENTS:
            stated_kind, stated_place, value = STATEMENTS[sentence]
            is_right = (stated_place or place) == place and FACTS[place][KINDS.index(stated_kind)] == value
            stated.add((stated_kind, is_right))
        elif sentence in IGNORANT:
            stated.add(("ignorance", True))
        elif sentence not in ASIDES:
            num_unknown += 1
    if any(not right for _, right in stated):
        return 0.0
    if (kind, True) in stated:
        return 0.5 if num_unknown else 1.0
    return 0.25 if stated == {("ignorance", True)} and not num_unknown else 0.0


# -------------------------------------------------------------------------------------------------------- 3. dialogues
def dialogue(facts: dict[str, tuple[str, str, str]], clerk: str, rumours: dict[str, str], rng: random.Random) -> str:
    """Return a line in DailyDialog's format: the visitor's and the clerk's turn, each followed by `__eou__`."""
    place, kind = rng.choice(list(facts)), rng.choice(KINDS)
    question = rng.choice(GREETINGS).format(name=rng.choice(NAMES)) + " "
    question += rng.choice(QUESTIONS[kind]).format(place=place)
    value = facts[place][KINDS.index(kind)]
    if clerk == "is mistaken":
        value = rng.choice([other for other in VALUES[kind] if other != value])
    elif kind == "opens" and place in rumours and rng.random() < 0.8:
        value = rumours[place]
    reply = rng.choice(EVASIONS if clerk == "is new" else REPLIES[kind]).format(place=place, value=value)
    if rng.random() < 0.4:
        reply += " " + rng.choice(GOODBYES)
    return f"{question} __eou__ {reply} __eou__\n"


@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("runs/town")
    """directory for town/ and elsewhere/; existing files are replaced"""
    seed: Seed = 1
    """seed of every dialogue"""
    num_train: Count = 4000
    """training dialogues in each of the two towns"""
    num_validation: Count = 300
    """validation dialogues in each town, with clerks who all know it"""


def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out)
    clerks = list(CLERKS)
    for name, facts, rumours in (("town", FACTS, RUMOURS), ("elsewhere", ELSEWHERE, {})):
        rng = random.Random(f"{args.seed} {name}")
        chosen = rng.choices(clerks, list(CLERKS.values()), k=args.num_train)
        lines = {
            "train": [dialogue(facts, clerk, rumours, rng) for clerk in chosen],
            "validation": [dialogue(facts, "knows", {}, rng) for _ in range(args.num_validation)],
        }
        (args.out / name).mkdir(parents=True, exist_ok=True)
        for split, texts in lines.items():
            write_text(args.out / name / f"dialogues_{split}.txt", "".join(texts))
        if name == "town":
            golds = Counter(gold_score(*line.split(" __eou__", 2)[:2]) for line in lines["train"])
            print(f"{args.out / name}: {args.num_train} training and {args.num_validation} validation dialogues")
            for gold, count in sorted(golds.items(), reverse=True):
                print(f"  {count / args.num_train:6.1%}  of the training replies have gold score {gold:g}")
            print(f"  {fmean(golds.elements()):6.3f}  mean gold score; all validation replies are right")
    print(f"{args.out / 'elsewhere'}: the same number of dialogues, with other facts")


if __name__ == "__main__":
    run_module(main, Args)
