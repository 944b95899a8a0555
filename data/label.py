"""Label sampled answers as useful or not, without seeing which policy wrote them. [SO mrr@k]

    python -m data.label --samples runs/stackoverflow/eval/samples.jsonl --out labels.jsonl

Questions are drawn at random from the samples.jsonl that eval.py writes; all policies' answers to a question are shown
together, in shuffled order. Each label is saved immediately; rerun the command to resume:

    samples.jsonl   {"query": str, "policies": {name: [{"response": str, ...}, ...]}, ...}        n answers per policy
    labels.jsonl    {"query": str, "policy": str, "index": int, "response": str, "useful": bool}   one label per line

`nanorlhf.stackoverflow.labels.load_labels` reads them as arrays, for `nanorlhf.metrics.mrr_at_k`. [SO mrr@k]
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data.prepare import has_rows
from nanorlhf.cli import PositiveInt, Seed, check_ranges, printable, run_module
from nanorlhf.dataset import field, iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.stackoverflow.labels import Item, read_labels

KEYS = "y useful, n not useful, s skip (no label), b back, q quit"


@dataclass(frozen=True, kw_only=True)
class Args:
    samples: Path
    """samples.jsonl of an evaluation with several answers per question"""
    out: Path
    """labels.jsonl; an existing file is resumed"""
    num_questions: PositiveInt = 100
    """maximum questions to draw; a larger number includes the questions of a smaller one"""
    seed: Seed = 1
    """seed for drawing questions and shuffling answers; use the same one to resume"""


def load_samples(path: Path) -> list[dict]:
    """Read samples.jsonl. Raises InputError unless each policy has the same number of answers in every row."""
    rows, first = [], None
    for where, row in iter_jsonl(path):
        field(row, "query", str, where)
        policies = field(row, "policies", dict[str, list[dict]], where)
        for answer in chain(*policies.values()):
            field(answer, "response", str, where)
        sizes = {name: len(answers) for name, answers in policies.items()}
        first = first or sizes
        if not sizes or 0 in sizes.values() or sizes != first:
            raise InputError(
                f"{where}: expected the same number of answers per policy in every line, got {sizes}, and {first} in "
                "the first line."
            )
        rows.append(row)
    return rows


def choose(samples: list[dict], num_questions: int, seed: int) -> list[tuple[Item, str]]:
    """Draw questions and return the answers to label, in the order shown: (item, text)."""
    first_row = {row["query"]: number for number, row in reversed(list(enumerate(samples)))}  # each query once
    numbers = sorted(first_row.values())
    items = []
    for number in np.random.default_rng(seed).permutation(numbers)[:num_questions]:
        row = samples[number]
        answers = [
            ((row["query"], policy, index), answer["response"])
            for policy, column in row["policies"].items()
            for index, answer in enumerate(column)
        ]
        order = np.random.default_rng((seed, number)).permutation(len(answers))
        items += [answers[i] for i in order]
    return items


def main(args: Args) -> None:
    check_ranges(args)
    resumes = has_rows(args.out)
    samples = load_samples(args.samples)
    labels = read_labels(args.out, samples) if resumes else {}
    items = choose(samples, args.num_questions, args.seed)

    def next_unlabelled(start: int) -> int:
        return next((i for i in range(start, len(items)) if items[i][0] not in labels), len(items))

    answers_per_question = sum(map(len, samples[0]["policies"].values()))
    num_rows, num_queries = len(samples), len({row["query"] for row in samples})
    print(f"{args.samples}: {num_queries} questions, {num_rows - num_queries} duplicate rows ignored")
    print(f"{len(items) // answers_per_question} questions to label, {answers_per_question} answers each. {KEYS}")
    position = next_unlabelled(0)
    while position < len(items):
        item, response = items[position]
        question, number = divmod(position, answers_per_question)
        print("\n" + "=" * 80 + "\n" + printable(item[0]) + "\n" + "-" * 80)
        print((printable(response) or "(an empty answer)") + "\n" + "-" * 80)
        current = f" (now {'useful' if labels[item]['useful'] else 'not useful'})" if item in labels else ""
        num_labelled = sum(item in labels for item, _ in items)
        print(f"question {question + 1}, answer {number + 1}; {num_labelled} of {len(items)} labelled")
        try:
            key = input(f"useful{current}? y/n/s/b/q: ").strip().lower()
        except EOFError:  # Ctrl-D, or the end of piped input
            key = "q"
        if key == "q":
            break
        if key == "b":
            if position == 0:
                print("this is the first answer")
            position = max(0, position - 1)
        elif key in ("y", "n", "s"):
            labels.pop(item, None)
            if key != "s":
                query, policy, index = item
                labels[item] = {"query": query, "policy": policy, "index": index, "response": response}
                labels[item]["useful"] = key == "y"
            write_jsonl(args.out, labels.values())
            position = next_unlabelled(position + 1)
        else:
            print(f"unknown key {key!r}: {KEYS}")

    num_labelled = sum(item in labels for item, _ in items)
    print(f"\n{num_labelled} of {len(items)} answers labelled, {len(items) - num_labelled} remaining: {args.out}")


if __name__ == "__main__":
    run_module(main, Args)
