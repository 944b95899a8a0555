"""A person puts sampled answers in order, without seeing what the machine thought of them. [STR human study]

    python -m data.rank --source runs/str/data/self_rank.validation.jsonl --annotator ana --out rankings.ana.jsonl

Questions are drawn at random from --source; of each question's answers --num-answers different ones are shown, spread
evenly over the machine's ranking from the first to the last, in a shuffled order of each annotator's own. An answer to
`order` is all their numbers, best first: `2 1 4 3`. It is saved at once, so that stopping loses nothing, and the same
command goes on. Every annotator gets the same questions and answers, and writes a file of their own:

    source              {"query": str, "answers": [str, ...]}, best first, or in any order with "weights": [float, ...];
                        "representatives": [int, ...] is for --representatives, the paper's "with ISODATA"
    rankings.ana.jsonl  {"query": str, "answers": [str, ...], "ranking": [int, ...], "annotator": str}

Where the truth is known, `--simulate FILE.py:FUNCTION` asks it instead of a person: function(query, answer) -> number,
the higher the better, to which each annotator adds a noise of their own.

A ranking is of indices, best first, from 0, in the order of its own line's answers, which is that of the source.
`nanorlhf.metrics.agreement.load_rankings` reads the files of all annotators together.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanorlhf.cli import run_module
from nanorlhf.dataset import field, iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics.agreement import iter_rankings
from nanorlhf.reward import load_function
from nanorlhf.selfrank.text_rank import rank_order
from nanorlhf.terminal import printable

KEYS = "all numbers, best first (2 1 4 3), s skip (no ranking), b back, q quit"


@dataclass(frozen=True, kw_only=True)
class Args:
    source: Path
    """JSON Lines of questions with their answers, such as self_rank.validation.jsonl"""
    out: Path
    """JSON Lines of this annotator's rankings; a file that is there already is gone on with"""
    annotator: str
    """name of the person; the order of the answers on the screen depends on it"""
    num_answers: int = 4
    """answers a question, 2 to 9; questions with fewer different ones are left out"""
    num_questions: int = 100
    """questions, drawn from the file; if it has fewer, all. A higher number keeps those of a lower one"""
    representatives: bool = False
    """choose among the representatives of clusters only"""
    seed: int = 1
    """of the questions and of the order of their answers; the same for all annotators, and to go on"""
    simulate: str | None = None
    """FILE.py:FUNCTION(query, answer), such as data/town.py:gold_score: ranks instead of a person"""
    simulated_noise: float = 0.2
    """standard deviation of what each simulated annotator adds, in units of that function"""


def pick(row: dict, args: Args, where: str) -> list[str] | None:
    """The answers of a question that are shown, in the order of the file; None if it has too few different ones."""
    answers = field(row, "answers", list, where)
    if not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"{where}: the field 'answers' must hold texts only.")
    best_first = range(len(answers))
    if "weights" in row:
        weights = field(row, "weights", list, where)
        numbers = [weight for weight in weights if type(weight) in (int, float) and math.isfinite(weight)]
        if not len(numbers) == len(weights) == len(answers):
            raise InputError(f"{where}: the field 'weights' must hold a finite number for each answer.")
        best_first = rank_order(weights)
    if args.representatives:
        representatives = field(row, "representatives", list, where)
        if not all(type(index) is int and 0 <= index < len(answers) for index in representatives):
            raise InputError(f"{where}: the field 'representatives' must hold indices of answers.")
        best_first = [index for index in best_first if index in representatives]
    different = {}  # nobody can order two equal answers: the better one stands for both
    for index in best_first:
        different.setdefault(answers[index].strip(), index)
    if len(different) < args.num_answers:
        return None
    places = np.linspace(0, len(different) - 1, args.num_answers).round().astype(int)
    # in the order of the file, not of the ranking: a consensus breaks ties by it
    return [answers[index] for index in sorted(list(different.values())[place] for place in places)]


def load_questions(args: Args) -> tuple[dict[str, list[str]], int]:
    """The query and the chosen answers of all questions that have enough of them, and how many have not."""
    questions: dict[str, list[str]] = {}
    too_few = 0
    for where, row in iter_jsonl(args.source):
        query, answers = field(row, "query", str, where), pick(row, args, where)
        if answers is None:
            too_few += 1
        else:
            questions.setdefault(query, answers)  # a query is asked once
    if not questions:
        raise InputError(f"{args.source}: no question has {args.num_answers} different answers: lower --num-answers.")
    return questions, too_few


def read_rankings(args: Args, questions: dict[str, list[str]]) -> dict[str, dict]:
    """query -> row of --out, checked to be this annotator's and of these answers."""
    rankings = {}
    for where, row in iter_rankings(args.out):
        if row["annotator"] != args.annotator:
            raise InputError(f"{where}: ranked by {row['annotator']!r}: give {args.annotator!r} another --out.")
        if row["answers"] != questions.get(row["query"]):
            raise InputError(f"{where}: these flags choose no such answers: go on with those it was begun with.")
        if row["query"] in rankings:
            raise InputError(f"{where}: this question has a ranking further up already: delete one of the two lines.")
        rankings[row["query"]] = row
    return rankings


def parse_order(typed: str, num_answers: int) -> list[int] | None:
    """`2 1 4 3`, also `2,1,4,3` or `2143` -> [1, 0, 3, 2]; None for what doesn't name every answer once."""
    digits = "".join(typed.replace(",", " ").split())
    if sorted(digits) != [str(number) for number in range(1, num_answers + 1)]:
        return None
    return [int(digit) - 1 for digit in digits]


def simulate(args: Args, questions: dict[str, list[str]], chosen: list[str]) -> Iterator[dict]:
    """The rows of an annotator who ranks by --simulate and noise."""
    score = load_function("--simulate", args.simulate)
    for query in chosen:
        answers = questions[query]
        # by the texts: one more question leaves the noise of the others
        rng = np.random.default_rng((args.seed, *args.annotator.encode(), *query.encode()))
        looks = [score(query, answer) for answer in answers] + rng.normal(0, args.simulated_noise, len(answers))
        ranking = rank_order(looks).tolist()
        yield {"query": query, "answers": answers, "ranking": ranking, "annotator": args.annotator}


def main(args: Args) -> None:
    if not 2 <= args.num_answers <= 9:
        raise InputError(f"--num-answers {args.num_answers}: must be from 2 to 9.")
    if args.num_questions < 1:
        raise InputError(f"--num-questions {args.num_questions}: must be at least 1.")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: must be at least 0.")
    if not 0 <= args.simulated_noise < math.inf:  # NaN isn't either
        raise InputError(f"--simulated-noise {args.simulated_noise}: must be a number from 0 on.")
    if not args.annotator.strip():
        raise InputError("--annotator is empty: name the person.")
    if args.out.is_dir():
        raise InputError(f"--out {args.out} is a directory: name a file.")
    questions, too_few = load_questions(args)
    begun = args.out.exists() and args.out.stat().st_size > 0  # empty: the only ranking was taken back
    rankings = read_rankings(args, questions) if begun else {}
    queries = list(questions)
    chosen = np.random.default_rng(args.seed).permutation(len(queries))[: args.num_questions]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.simulate:
        if rankings:
            raise InputError(f"--out {args.out} holds rankings already: name another file for simulated ones.")
        write_jsonl(args.out, simulate(args, questions, [queries[i] for i in chosen]))
        print(f"{len(chosen)} questions ranked as {args.simulate} says, with noise: {args.out}")
        return

    def next_unranked(start: int) -> int:
        return next((i for i in range(start, len(chosen)) if queries[chosen[i]] not in rankings), len(chosen))

    n = args.num_answers
    print(f"{args.source}: {len(queries)} questions, {too_few} rows more with fewer than {n} different answers")
    print(f"{len(chosen)} questions to rank, {n} answers each. {KEYS}")
    position = next_unranked(0)
    while position < len(chosen):
        query = queries[chosen[position]]
        answers = questions[query]
        # an order of each annotator's own: a liking for what stands on top must not look like agreement
        seed = (args.seed, chosen[position], *args.annotator.encode())
        shown = np.random.default_rng(seed).permutation(n).tolist()  # indices of answers
        print("\n" + "=" * 80 + "\n" + printable(query) + "\n" + "-" * 80)
        for number, index in enumerate(shown, start=1):
            print(f"[{number}] {printable(answers[index]) or '(an empty answer)'}\n" + "-" * 80)
        now = ""
        if query in rankings:
            now = f" (now {' '.join(str(shown.index(index) + 1) for index in rankings[query]['ranking'])})"
        num_ranked = sum(queries[i] in rankings for i in chosen)
        print(f"question {position + 1}; {num_ranked} of {len(chosen)} ranked")
        try:
            typed = input(f"order{now}? best first, or s/b/q: ").strip().lower()
        except EOFError:  # Ctrl-D, or the end of what was piped in
            typed = "q"
        if typed == "q":
            break
        order = parse_order(typed, n)
        if typed == "b":
            if position == 0:
                print("this is the first question")
            position = max(0, position - 1)
        elif typed == "s" or order is not None:
            rankings.pop(query, None)
            if order is not None:
                ranking = [shown[i] for i in order]
                row = {"query": query, "answers": answers, "ranking": ranking, "annotator": args.annotator}
                rankings[query] = row
            write_jsonl(args.out, rankings.values())
            position = next_unranked(position + 1)
        else:
            print(f"{typed!r} doesn't name each of 1 to {n} once: {KEYS}")

    num_ranked = sum(queries[i] in rankings for i in chosen)
    print(f"\n{num_ranked} of {len(chosen)} questions ranked, {len(chosen) - num_ranked} left: {args.out}")


if __name__ == "__main__":
    run_module(main, Args)
