"""The default data: an embedded TL;DR world with a known labeller -> sft.jsonl and comparisons.jsonl.

    python -m data.tiny --out runs/tiny/data --seed 1
    python -m data.tiny --out runs/lab/biased/data --length-bonus 0.5 --num-triads 100

It needs no input and writes sft.{train,validation}.jsonl, comparisons.{train,validation}.jsonl and tokenizer.json, and
with --num-triads agreement.jsonl: pairs labelled by all workers.

A post in the paper's template mentions four facts (who, what happened, where, what is wanted) among filler. Summarisers
of different quality summarise it; `gold_score` below is the true quality of a summary; a labeller prefers one of two
summaries with Bradley-Terry noise on that score, or with the errors in labellers.py. So this world can show what a real
dataset can't: how often a reward model agrees with the true preference, and how often a policy really beats the
references. No training script reads a gold score; those in `meta` are for eval.py and for inspection.

The references resemble human ones: they mention who did what, but rarely where or what is wanted; a few invent a fact
or ramble. SFT imitates these flaws along with the language; PPO can drop them, because labellers prefer summaries with
all facts.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from data.labellers import WORKERS, Dials, Labellers
from data.prepare import check_vocab_size
from nanorlhf.cli import Count, CountOrNone, Seed, check_ranges, run_module
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.tokenizer import Tokenizer, train_tokenizer

# ---------------------------------------------------------------- 1. the words of the world
# No word of a slot occurs in another slot, a filler or a frame, so a text that contains a value states that fact.
SLOTS = {
    "who": (
        "sister", "brother", "boss", "neighbour", "uncle", "teacher", "cousin", "doctor", "landlord", "wife",
    ),
    "event": (
        "broke the lamp", "sold the car", "lost the keys", "burned the dinner", "stole the bike", "painted the fence",
        "ate the cake", "hid the letter", "cut the cable", "wrecked the boat",
    ),
    "place": (
        "Paris", "Lisbon", "Tokyo", "Berlin", "Oslo", "Cairo", "Madrid", "Dublin", "Boston", "Prague",
    ),
    "wish": (
        "money", "advice", "revenge", "coffee", "silence", "sleep", "respect", "praise", "time", "answers",
    ),
}  # fmt: skip
OUTLANDISH = {  # values that occur in no post: half of all inventions, recognisable without the post
    "who": ("king", "robot", "ghost"),
    "event": ("froze the moon", "drank the sea", "married the wolf"),
    "place": ("Mars", "Atlantis", "heaven"),
    "wish": ("magic", "wings", "gold"),
}
SENTENCES = {  # how a post states a fact
    "who": ("This is about my {}.", "I mean my {}.", "It was my {}."),
    "event": ("They just {}.", "So they {}.", "Then they {}."),
    "place": ("We live in {}.", "It was in {}.", "We met in {}."),
    "wish": ("That person wants {}.", "Now that person wants {}.", "That person still wants {}."),
}
FILLERS = (
    "I am so sad.", "It is a long story.", "We do not talk.", "I do not know what to do.",
    "Sorry for the long post.", "What now?", "I am not sure.", "We had a talk.",
)  # fmt: skip
RAMBLINGS = ("so i am not sure what to do", "it is a long story", "i am so sad", "we do not talk", "sorry for the post")
TITLES = ("Not sure what to do", "What now?", "About my {who}", "A story about {place}", "Who wants {wish}?")
SUBREDDITS = ("help", "family", "story", "life")
TEMPLATE = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"  # [N+ 2] no space after the colon
FRAME_WORDS = frozenset(("my", "someone", "the", "in", "and", "wants"))  # words a summary needs besides the facts

# ---------------------------------------------------------------- 2. the gold score
WEIGHTS = {
    "coverage": 4.0,  # times the share of the post's facts that the summary mentions
    "invention": -1.5,  # per mentioned value that isn't in the post
    "repetition": -0.3,  # per repeated word (for a repeated fact, all its words)
    "filler": -0.3,  # per distinct word or bare punctuation outside complete facts and the frame
    "length": -0.1,  # per word beyond LENGTH_BUDGET
}
LENGTH_BUDGET = 12  # words; the best possible summary has ten
LOWEST = -8.0  # score of an empty summary; nothing scores lower

# Values by their first words, which are distinct.
VALUES = {
    value.lower().split()[0]: tuple(value.lower().split())
    for slot in SLOTS
    for value in (*SLOTS[slot], *OUTLANDISH[slot])
}


def facts_in(words: list[str]) -> tuple[set[str], list[str]]:
    """Return the values that occur in full in `words` (by their first words), and the other words."""
    mentioned, other_words, index = set(), [], 0
    while index < len(words):
        value = VALUES.get(words[index])
        if value is not None and tuple(words[index : index + len(value)]) == value:
            mentioned.add(words[index])
            index += len(value)
        else:
            other_words.append(words[index])
            index += 1
    return mentioned, other_words


def split_words(text: str) -> list[str]:
    """Return lower-case words without punctuation at their ends; bare punctuation counts as a word."""
    return [word.strip(".,;:!?") or word for word in text.lower().split()]


def gold_score(query: str, response: str) -> float:
    """Return the true quality of `response` as a summary of the post in `query`; depends only on the two texts.

    score = 4 * share of the query's facts mentioned - 1.5 * invented facts - 0.3 * repeated words
            - 0.3 * words that no summary needs - 0.1 * words beyond twelve

    from LOWEST to 4. An empty response scores LOWEST. If the query has no facts, the first term is 0. Word order
    doesn't matter, and part of a value ("broke the keys") counts as words that no summary needs.

    >>> post = "POST: It was my sister. They just broke the lamp. We met in Paris. That person wants money.\\n\\nTL;DR:"
    >>> gold_score(post, " my sister broke the lamp in Paris and wants money")
    4.0
    >>> gold_score(post, " my boss broke the lamp")  # one fact of four, one invention
    -0.5
    """
    return weighted_score(query, response, WEIGHTS)


def weighted_score(query: str, response: str, weights: Mapping[str, float]) -> float:
    """Return the gold score with other weights, such as a worker's."""
    words = split_words(response)
    if not words:
        return LOWEST
    facts, _ = facts_in(split_words(query))
    mentioned, other_words = facts_in(words)
    score = (
        weights["coverage"] * len(mentioned & facts) / max(1, len(facts))
        + weights["invention"] * len(mentioned - facts)
        + weights["repetition"] * (len(words) - len(set(words)))
        + weights["filler"] * len(set(other_words) - FRAME_WORDS)
        + weights["length"] * max(0, len(words) - LENGTH_BUDGET)
    )
    return round(max(LOWEST, score), 6)  # so that ties don't depend on the order of the sum


# ---------------------------------------------------------------- 3. posts
@dataclass(frozen=True)
class Post:
    facts: tuple[str, ...]  # one value per slot, in the order of SLOTS
    first_sentence: str
    query: str


def write_post(rng: random.Random) -> Post:
    """Write a post: four facts and one to three fillers in random order, in one or two paragraphs."""
    facts = {slot: rng.choice(values) for slot, values in SLOTS.items()}
    sentences = [rng.choice(SENTENCES[slot]).format(value) for slot, value in facts.items()]
    sentences += rng.sample(FILLERS, rng.choice((1, 1, 2, 2, 3)))
    rng.shuffle(sentences)
    text = " ".join(sentences)
    if rng.random() < 0.5:
        cut = rng.randrange(1, len(sentences))
        text = " ".join(sentences[:cut]) + "\n" + " ".join(sentences[cut:])
    title = rng.choice(TITLES).format(**facts)
    query = TEMPLATE.format(subreddit=rng.choice(SUBREDDITS), title=title, post=text)
    return Post(tuple(facts.values()), sentences[0], query)


# ---------------------------------------------------------------- 4. summarisers
def frame(who: str | None, event: str | None, place: str | None, wish: str | None) -> list[str]:
    """Return the clauses of a summary, in this order: my sister | broke the lamp | in Paris | and wants money.

    The first word of a clause determines which fact follows, so a small model has to look up just that one.
    """
    clauses = [f"my {who}" if who else "someone"]
    if event:
        clauses.append(event)
    if place:
        clauses.append(f"in {place}")
    if wish:
        clauses.append(f"and wants {wish}" if event else f"wants {wish}")
    return clauses


def summarise(
    post: Post,
    rng: random.Random,
    tell_rates: tuple[float, float, float, float],
    invention_rate: float = 0.0,
    num_repeats: int = 0,
    rambling_rate: float = 0.0,
    num_ramblings: int = 1,
) -> str:
    """Write a summary that mentions who, event, place and wish with probabilities `tell_rates`, and at least one.

    With probability `invention_rate`, a fact is replaced by another post's or an outlandish one; `num_repeats` clauses
    are repeated; with probability `rambling_rate`, the summary ends with `num_ramblings` empty clauses.
    """
    mentioned: list[int] = []
    while not mentioned:
        mentioned = [index for index, rate in enumerate(tell_rates) if rng.random() < rate]
    values: list[str | None] = [None] * 4
    for index, slot in enumerate(SLOTS):
        if index in mentioned:
            values[index] = post.facts[index]
            if rng.random() < invention_rate:
                plausible = [value for value in SLOTS[slot] if value != post.facts[index]]
                values[index] = rng.choice(rng.choice((plausible, OUTLANDISH[slot])))
    clauses = frame(*values)
    for _ in range(num_repeats):
        position = rng.randrange(len(clauses))
        clauses.insert(position + 1, clauses[position])
    if rng.random() < rambling_rate:
        clauses += rng.sample(RAMBLINGS, num_ramblings)
    return " " + " ".join(clauses)  # [N+ 3] the space belongs to the completion


POLICIES: dict[str, Callable[[Post, random.Random], str]] = {
    # human-like: who did what; a third mention where, a third what is wanted; some invent, one in twenty rambles
    "reference": lambda post, rng: summarise(
        post, rng, (0.9, 0.85, 0.3, 0.35), invention_rate=0.02, rambling_rate=0.05
    ),
    "good": lambda post, rng: summarise(post, rng, (0.97, 0.97, 0.85, 0.85), invention_rate=0.02),
    "terse": lambda post, rng: summarise(post, rng, (0.5, 0.4, 0.2, 0.2)),
    "inventor": lambda post, rng: summarise(post, rng, (0.9, 0.9, 0.8, 0.8), invention_rate=0.4),
    "repeater": lambda post, rng: summarise(post, rng, (0.8, 0.8, 0.5, 0.5), num_repeats=rng.choice((1, 2))),
    "rambler": lambda post, rng: summarise(post, rng, (0.8, 0.8, 0.6, 0.6), rambling_rate=1.0, num_ramblings=2),
    "lead": lambda post, rng: " " + post.first_sentence,
}
# Relative frequency of a policy in comparisons. Most pairs are close to the references, against which the trained
# policy will be evaluated, and many have an invented fact: the hardest error for a reward model to detect, and the
# worst to miss.
POLICY_WEIGHTS = {
    "reference": 25, "good": 25, "terse": 5, "inventor": 25, "repeater": 8, "rambler": 8, "lead": 4,
}  # fmt: skip


# ---------------------------------------------------------------- 5. comparisons
BATCHES = (*range(6, 21), 22)  # the batch numbers of the real comparisons [N+ 16]
Pair = tuple[tuple[str, str], tuple[str, str]]  # two summarisers, their two summaries


def write_pair(post: Post, rng: random.Random, weights: Mapping[str, int]) -> Pair:
    """Write two different summaries by two different summarisers, drawn by weight."""
    while True:
        policy_a = rng.choices(list(weights), list(weights.values()))[0]
        policy_b = rng.choices(list(weights), list(weights.values()))[0]
        a, b = POLICIES[policy_a](post, rng), POLICIES[policy_b](post, rng)
        if policy_a != policy_b and a != b:
            return (policy_a, policy_b), (a, b)


def perceived_difference(query: str, summaries: tuple[str, str], worker: str, labellers: Labellers) -> float:
    """Return the first summary's lead over the second in the worker's view."""
    weights = labellers.weights[worker]
    scores = weighted_score(query, summaries[0], weights), weighted_score(query, summaries[1], weights)
    return labellers.difference(worker, scores, (len(split_words(summaries[0])), len(split_words(summaries[1]))))


def compare(post: Post, pair: Pair, rng: random.Random, splits: tuple[str, ...], labellers: Labellers) -> dict:
    """Return a row of comparisons.jsonl: a worker's choice between two summaries, in the order shown."""
    policies, summaries = pair
    uniform, hesitation = rng.random(), rng.gauss(0, 0.7)  # drawn in this order, whatever the settings
    batch, split, worker = rng.choice(BATCHES), rng.choice(splits), rng.choice(WORKERS)
    difference = perceived_difference(post.query, summaries, worker, labellers)
    choice = labellers.choose(difference, uniform)  # 0: the first is preferred
    # a slider from 1 (surely the first) to 9 (surely the second), without 5, undecided [N+ 16]
    sureness = round(min(4, max(1, 0.5 + abs(difference) + hesitation)))  # 1 to 4
    return {
        "query": post.query,
        "chosen": summaries[choice],
        "rejected": summaries[1 - choice],
        "meta": {
            "batch": f"batch{batch}",
            "confidence": 5 - sureness if choice == 0 else 5 + sureness,
            "split": split,
            "worker": worker,
            "policies": [policies[choice], policies[1 - choice]],
            "choice": choice,  # 0 if the preferred one was shown first
            # for eval.py and inspection: training never reads gold scores
            "gold_chosen": gold_score(post.query, summaries[choice]),
            "gold_rejected": gold_score(post.query, summaries[1 - choice]),
        },
    }


def label_triad(post: Post, rng: random.Random, labellers: Labellers) -> list[dict]:
    """Return three rows of agreement.jsonl: the pairs of three summaries of a post, and each worker's choices."""
    summaries: list[str] = []
    while len(set(summaries)) < 3:
        policies = rng.choices(list(POLICY_WEIGHTS), list(POLICY_WEIGHTS.values()), k=3)
        summaries = [POLICIES[policy](post, rng) for policy in policies]
    rows = []
    for first, second in ((0, 1), (1, 2), (2, 0)):
        pair = summaries[first], summaries[second]
        differences = {worker: perceived_difference(post.query, pair, worker, labellers) for worker in WORKERS}
        choices = {worker: labellers.choose(difference, rng.random()) for worker, difference in differences.items()}
        rows.append({"query": post.query, "responses": list(pair), "preferred": choices})
    return rows


def demonstrate(post: Post, rng: random.Random) -> dict:
    """Return a row of sft.jsonl."""
    response = POLICIES["reference"](post, rng)
    meta = {
        "policy": "reference",
        "gold": gold_score(post.query, response),
        **dict(zip(SLOTS, post.facts, strict=True)),
    }
    return {"query": post.query, "response": response, "meta": meta}


# ---------------------------------------------------------------- 6. files
@dataclass(frozen=True, kw_only=True)
class Args(Dials):
    out: Path = Path("runs/tiny/data")
    """directory for sft.*.jsonl, comparisons.*.jsonl and tokenizer.json"""
    seed: Seed = 1
    """seed of all texts and labels"""
    num_demonstrations: Count = 6400
    """rows of sft.train.jsonl"""
    num_comparisons: Count = 6400
    """rows of comparisons.train.jsonl"""
    num_validation: Count = 1024
    """rows of each validation file; no training post has the same four facts as a validation post"""
    summarisers: tuple[str, ...] = tuple(POLICY_WEIGHTS)
    """summarisers in comparisons.train.jsonl; validation compares all of them"""
    num_triads: CountOrNone = 0
    """posts in agreement.jsonl, where all eight workers compare three summaries of each post; 0: no such file"""
    vocab_size: int = 640
    """maximum vocabulary of the byte-level BPE trained on these texts; with 640, every word is one token"""


def make_world(args: Args) -> dict[str, list[dict]]:
    """Return the rows of each file, by name. Validation is drawn first, so that training can avoid its facts."""
    rng, labellers = random.Random(args.seed), Labellers(args, WEIGHTS, args.seed)
    held_out: set[tuple[str, ...]] = set()

    def posts(count: int, hold_out: bool) -> list[Post]:
        drawn: list[Post] = []
        while len(drawn) < count:
            post = write_post(rng)
            if post.facts in held_out:
                continue
            drawn.append(post)
            if hold_out:
                held_out.add(post.facts)
        return drawn

    def comparisons(drawn: list[Post], splits: tuple[str, ...], summarisers: Collection[str]) -> list[dict]:
        weights = {name: weight for name, weight in POLICY_WEIGHTS.items() if name in summarisers}
        return [compare(post, write_pair(post, rng, weights), rng, splits, labellers) for post in drawn]

    world = {
        "sft.validation": [demonstrate(post, rng) for post in posts(args.num_validation, True)],
        "comparisons.validation": comparisons(posts(args.num_validation, True), ("valid1", "valid2"), POLICY_WEIGHTS),
        "sft.train": [demonstrate(post, rng) for post in posts(args.num_demonstrations, False)],
        "comparisons.train": comparisons(posts(args.num_comparisons, False), ("train",), args.summarisers),
    }
    if args.num_triads:
        rng = random.Random(f"triads {args.seed}")
        triads = [label_triad(write_post(rng), rng, labellers) for _ in range(args.num_triads)]
        world["agreement"] = [row for triad in triads for row in triad]
    return world


def main(args: Args) -> None:
    check_ranges(args)
    # the two validation files use at most half of the combinations of facts
    most = math.prod(map(len, SLOTS.values())) // 4
    if args.num_validation > most:
        raise InputError(f"--num-validation {args.num_validation}: must be at most {most}.")
    if unknown := set(args.summarisers) - set(POLICIES):
        raise InputError(f"--summarisers: unknown {min(unknown)}; expected {', '.join(POLICIES)}.")
    if len(set(args.summarisers)) < 2:
        raise InputError(f"--summarisers {' '.join(args.summarisers)}: a comparison needs two or more.")
    check_vocab_size(args.vocab_size)
    check_out(args.out)
    world = make_world(args)
    # at least 2,000 posts, so that every word becomes a token
    rng = random.Random(args.seed)
    rows = world["sft.train"] + [demonstrate(write_post(rng), rng) for _ in range(2000 - args.num_demonstrations)]
    tokenizer = train_tokenizer((row["query"] + row["response"] for row in rows), args.vocab_size)

    (args.out / "agreement.jsonl").unlink(missing_ok=True)  # from an earlier world
    for name, rows in world.items():
        write_jsonl(args.out / f"{name}.jsonl", rows)
    tokenizer.save(args.out)
    describe(world, tokenizer, args.seed)
    print(f"\nwritten to {args.out}: " + ", ".join(f"{name}.jsonl ({len(rows)} rows)" for name, rows in world.items()))


def describe(world: dict[str, list[dict]], tokenizer: Tokenizer, seed: int) -> None:
    """Print statistics of a dataset, to check before training."""
    rng = random.Random(seed)
    post = write_post(rng)
    print("a post and each policy's summary of it (gold score, policy, summary):\n\n" + post.query)
    for name, policy in POLICIES.items():
        summary = policy(post, rng)
        print(f"  {gold_score(post.query, summary):6.2f}  {name:<10}{summary}")

    def format_row(name: str, numbers: list[float], digits: int) -> str:
        ordered = sorted(numbers)
        picked = (ordered[0], ordered[len(ordered) // 2], ordered[19 * len(ordered) // 20], ordered[-1])
        return f"{name:<22}" + "".join(f"{number:9.{digits}f}" for number in (fmean(ordered), pstdev(ordered), *picked))

    print("\n" + " " * 22 + "".join(f"{title:>9}" for title in ("mean", "std", "min", "median", "95%", "max")))
    posts = [write_post(rng) for _ in range(500)]
    print("gold score on 500 posts")
    for name, policy in POLICIES.items():
        print(format_row(f"  {name}", [gold_score(post.query, policy(post, rng)) for post in posts], 2))
    sft, comparisons = world["sft.train"] + world["sft.validation"], world["comparisons.validation"]
    print("tokens, with EOS [N+ 4]")
    print(format_row("  query", [len(tokenizer.encode(row["query"])) for row in sft], 0))
    print(format_row("  reference", [len(tokenizer.encode(row["response"])) + 1 for row in sft], 0))
    for side in ("chosen", "rejected"):
        print(format_row(f"  {side}", [len(tokenizer.encode(row[side])) + 1 for row in comparisons], 0))

    print("policy pairs [N+ 6]")
    for split in ("train", "validation"):
        rows = world[f"comparisons.{split}"]
        pairs = Counter("/".join(sorted(row["meta"]["policies"])) for row in rows)
        most_frequent = ", ".join(f"{pair} {count}" for pair, count in pairs.most_common(3))
        print(f"  {split}: {len(pairs)} unique; most frequent: {most_frequent}")

    golds = [row["meta"]["gold"] for row in sft]
    perfect = fmean(gold == WEIGHTS["coverage"] for gold in golds)
    print(f"references: gold mean {fmean(golds):.2f}, std {pstdev(golds):.2f}, {perfect:.1%} are perfect")
    print(f"labeller ceiling: the gold score agrees with {ceiling(comparisons):.1%} of the validation labels")
    lengths = [[len(split_words(row[side])) for side in ("chosen", "rejected")] for row in comparisons]
    longer = [chosen > rejected for chosen, rejected in lengths if chosen != rejected]
    first = fmean(row["meta"]["choice"] == 0 for row in comparisons)
    if longer:
        print(f"  the longer of two is preferred in {fmean(longer):.1%} of them, the one shown first in {first:.1%}")


def ceiling(rows: list[dict]) -> float:
    """Return the accuracy on noisy labels of the best possible reward model, the gold score; a tie counts half."""
    margins = [row["meta"]["gold_chosen"] - row["meta"]["gold_rejected"] for row in rows]
    return fmean((margin > 0) + 0.5 * (margin == 0) for margin in margins)


if __name__ == "__main__":
    run_module(main, Args)
