"""Rank sampled answers as an annotator, without seeing the self-ranking. [STR human study]

    python -m data.rank --source runs/str/data/self_rank.validation.jsonl --annotator ana --out rankings.ana.jsonl

Questions are drawn at random from --source. For each question, --num-answers different answers are shown, evenly spaced
over the self-ranking from first to last, in an order that depends on the annotator, who types all numbers, best first:
`2 1 4 3`. Each ranking is saved immediately; rerun the command to resume. All annotators get the same questions and
answers, and each writes a separate file:

    source              {"query": str, "answers": [str, ...]}, best first, or in any order with "weights": [float, ...];
                        --representatives, the paper's "with ISODATA", needs "representatives": [int, ...]
    rankings.ana.jsonl  {"query": str, "answers": [str, ...], "ranking": [int, ...], "annotator": str,
                        "representatives": bool}

"ranking" contains 0-based indices into the answers of the same line, best first; the answers are in the source's order.
`nanorlhf.metrics.agreement.load_rankings` reads the files of all annotators together.

If the true quality is known, `--simulate FILE.py:FUNCTION` replaces the person: function(query, answer) -> number,
higher is better; noise is added for each annotator.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from data.prepare import has_rows
from nanorlhf.cli import NonNegativeFloat, PositiveInt, Range, Seed, check_ranges, printable, run_module
from nanorlhf.dataset import field, iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics.agreement import iter_rankings
from nanorlhf.rewards.function import load_function, score_response
from nanorlhf.selfrank.text_rank import rank_order

KEYS = "all numbers, best first (2 1 4 3), s skip (no ranking), b back, q quit"


@dataclass(frozen=True, kw_only=True)
class Args:
    source: Path
    """JSON Lines of questions with their answers, such as self_rank.validation.jsonl"""
    out: Path
    """JSON Lines of this annotator's rankings; an existing file is resumed"""
    annotator: str
    """name of the person; determines the order of the answers on screen"""
    num_answers: Annotated[int, Range("from 2 to 9", lambda x: 2 <= x <= 9)] = 4
    """answers per question, 2 to 9; questions with fewer different answers are skipped"""
    num_questions: PositiveInt = 100
    """maximum questions to draw; a larger number includes the questions of a smaller one"""
    representatives: bool = False
    """show only the representatives of clusters"""
    seed: Seed = 1
    """seed of the questions and the order of answers; use the same one for all annotators and to resume"""
    simulate: str | None = None
    """FILE.py:FUNCTION(query, answer) ranks instead of a person, such as data/town.py:gold_score"""
    simulated_noise: NonNegativeFloat = 0.2
    """standard deviation of a simulated annotator's noise, in units of that function"""


def pick(row: dict, num_answers: int, representatives_only: bool, where: str) -> list[str] | None:
    """Pick the answers to show for a question, in the file's order; None if too few differ."""
    answers = field(row, "answers", list[str], where)
    best_first = range(len(answers))
    if "weights" in row:
        weights = field(row, "weights", list[float], where)
        if len(weights) != len(answers):
            raise InputError(f"{where}: the field 'weights' must have a finite number for each answer.")
        best_first = rank_order(weights)
    if representatives_only:
        representatives = field(row, "representatives", list[int], where)
        if not all(0 <= index < len(answers) for index in representatives):
            raise InputError(f"{where}: the field 'representatives' must have indices of answers.")
        best_first = [index for index in best_first if index in representatives]
    different = {}  # text -> index of the best answer with that text
    for index in best_first:
        different.setdefault(answers[index].strip(), index)
    if len(different) < num_answers:
        return None
    ranks = np.linspace(0, len(different) - 1, num_answers).round().astype(int)
    # in the file's order, not the ranking's, because a consensus breaks ties by this order
    return [answers[index] for index in sorted(list(different.values())[rank] for rank in ranks)]


def load_questions(args: Args) -> tuple[dict[str, list[str]], int]:
    """Return query -> answers to show, for questions with enough answers, and the number of other rows."""
    questions: dict[str, list[str]] = {}
    too_few = 0
    for where, row in iter_jsonl(args.source):
        query = field(row, "query", str, where)
        answers = pick(row, args.num_answers, args.representatives, where)
        if answers is None:
            too_few += 1
        else:
            questions.setdefault(query, answers)  # each query once
    if not questions:
        raise InputError(f"{args.source}: no question has {args.num_answers} different answers.")
    return questions, too_few


def read_rankings(path: Path, annotator: str, questions: dict[str, list[str]]) -> dict[str, dict]:
    """Read --out: query -> row. Raises InputError if a row is by another annotator or ranks other answers."""
    rankings = {}
    for where, row in iter_rankings(path):
        if row["annotator"] != annotator:
            raise InputError(f"{where}: ranked by {row['annotator']!r}, not by {annotator!r}.")
        if row["answers"] != questions.get(row["query"]):
            raise InputError(f"{where}: ranks other answers than these flags select; resume with the original flags.")
        if row["query"] in rankings:
            raise InputError(f"{where}: duplicate ranking of this question.")
        rankings[row["query"]] = row
    return rankings


def parse_order(typed: str, num_answers: int) -> list[int] | None:
    """Parse `2 1 4 3`, `2,1,4,3` or `2143` to [1, 0, 3, 2]; None unless each answer appears exactly once."""
    digits = "".join(typed.replace(",", " ").split())
    if sorted(digits) != [str(number) for number in range(1, num_answers + 1)]:
        return None
    return [int(digit) - 1 for digit in digits]


def ranking_row(args: Args, query: str, answers: list[str], ranking: list[int]) -> dict:
    about = {"annotator": args.annotator, "representatives": args.representatives}
    return {"query": query, "answers": answers, "ranking": ranking, **about}


def simulate(args: Args, questions: dict[str, list[str]], chosen: list[str]) -> Iterator[dict]:
    """Yield the rows of an annotator who ranks by --simulate plus noise."""
    function = load_function("--simulate", args.simulate)
    for query in chosen:
        answers = questions[query]
        # seeded by the query, so that other questions don't change the noise
        rng = np.random.default_rng((args.seed, *args.annotator.encode(), *query.encode()))
        scores = [score_response("--simulate", args.simulate, function, query, answer) for answer in answers]
        noisy = scores + rng.normal(0, args.simulated_noise, len(answers))
        yield ranking_row(args, query, answers, rank_order(noisy).tolist())


def main(args: Args) -> None:
    check_ranges(args)
    if not args.annotator.strip():
        raise InputError("--annotator is empty.")
    resumes = has_rows(args.out)
    questions, too_few = load_questions(args)
    rankings = read_rankings(args.out, args.annotator, questions) if resumes else {}
    queries = list(questions)
    chosen = np.random.default_rng(args.seed).permutation(len(queries))[: args.num_questions]
    if args.simulate:
        if rankings:
            raise InputError(f"--out {args.out} already has rankings.")
        rows = [*simulate(args, questions, [queries[i] for i in chosen])]
        write_jsonl(args.out, rows)
        print(f"{len(chosen)} questions ranked by {args.simulate} with noise: {args.out}")
        return

    def next_unranked(start: int) -> int:
        return next((i for i in range(start, len(chosen)) if queries[chosen[i]] not in rankings), len(chosen))

    n = args.num_answers
    print(f"{args.source}: {len(queries)} questions; {too_few} rows skipped with fewer than {n} different answers")
    print(f"{len(chosen)} questions to rank, {n} answers each. {KEYS}")
    position = next_unranked(0)
    while position < len(chosen):
        query = queries[chosen[position]]
        answers = questions[query]
        # shuffled per annotator, so that a shared bias to the top of the screen doesn't look like agreement
        seed = (args.seed, chosen[position], *args.annotator.encode())
        shown = np.random.default_rng(seed).permutation(n).tolist()  # indices of answers
        print("\n" + "=" * 80 + "\n" + printable(query) + "\n" + "-" * 80)
        for number, index in enumerate(shown, start=1):
            print(f"[{number}] {printable(answers[index]) or '(an empty answer)'}\n" + "-" * 80)
        current = ""
        if query in rankings:
            current = f" (now {' '.join(str(shown.index(index) + 1) for index in rankings[query]['ranking'])})"
        num_ranked = sum(queries[i] in rankings for i in chosen)
        print(f"question {position + 1}; {num_ranked} of {len(chosen)} ranked")
        try:
            typed = input(f"order{current}? best first, or s/b/q: ").strip().lower()
        except EOFError:  # Ctrl-D, or the end of piped input
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
                rankings[query] = ranking_row(args, query, answers, ranking)
            write_jsonl(args.out, rankings.values())
            position = next_unranked(position + 1)
        else:
            print(f"{typed!r} doesn't have each of 1 to {n} exactly once: {KEYS}")

    num_ranked = sum(queries[i] in rankings for i in chosen)
    print(f"\n{num_ranked} of {len(chosen)} questions ranked, {len(chosen) - num_ranked} remaining: {args.out}")


if __name__ == "__main__":
    run_module(main, Args)
