"""A person says of sampled answers which are useful, without seeing whose they are.

    python -m data.label --samples runs/stackoverflow/eval/samples.jsonl --out labels.jsonl

Questions are drawn at random from samples.jsonl, which eval.py writes; the answers of all policies to a question come
in one shuffled order. Every answer is saved at once, so that stopping loses nothing, and the same command goes on:

    samples.jsonl   {"query": str, "policies": {name: [{"response": str, ...}, ...]}, ...}       n answers a policy
    labels.jsonl    {"query": str, "policy": str, "index": int, "response": str, "useful": bool}   a label a line

`nanorlhf.metrics.labels.load_labels` makes arrays of them, for `nanorlhf.metrics.mrr_at_k`. [SO mrr@k]
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanorlhf.cli import run_module
from nanorlhf.dataset import field, iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics.labels import Item, read_labels
from nanorlhf.terminal import printable

KEYS = "y useful, n not useful, s skip (no label), b back, q quit"


@dataclass(frozen=True, kw_only=True)
class Args:
    samples: Path
    """samples.jsonl of an evaluation with several answers a question"""
    out: Path
    """labels.jsonl; one that is there already is gone on with"""
    num_questions: int = 100
    """questions, drawn from the file; if it has fewer, all. A higher number keeps those of a lower one"""
    seed: int = 1
    """of the questions and of the order of their answers; the same to go on"""


def load_samples(path: Path) -> list[dict]:
    """The rows of samples.jsonl, all with the same policies, and of each the same number of answers in every row."""
    rows, first = [], None
    for where, row in iter_jsonl(path):
        field(row, "query", str, where)
        policies = field(row, "policies", dict, where)
        for name in policies:
            for answer in field(policies, name, list, where):
                if not isinstance(answer, dict):
                    raise InputError(f"{where}: an answer of {name!r} is no object with a 'response': make it one.")
                field(answer, "response", str, where)
        sizes = {name: len(answers) for name, answers in policies.items()}
        first = first or sizes
        if not sizes or 0 in sizes.values() or sizes != first:
            raise InputError(f"{where}: answers {sizes}, first line {first}: a policy needs the same number in each.")
        rows.append(row)
    return rows


def choose(samples: list[dict], num_questions: int, seed: int) -> list[tuple[Item, str]]:
    """What is to be labelled, in the order in which it is shown: an answer's place, and its text."""
    first_row = {row["query"]: number for number, row in reversed(list(enumerate(samples)))}  # a query is asked once
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
    if args.num_questions < 1:
        raise InputError(f"--num-questions {args.num_questions}: must be at least 1.")
    if args.seed < 0:
        raise InputError(f"--seed {args.seed}: must be at least 0.")
    if args.out.is_dir():
        raise InputError(f"--out {args.out} is a directory: name a file.")
    samples = load_samples(args.samples)
    begun = args.out.exists() and args.out.stat().st_size > 0  # empty: the only label was taken back
    labels = read_labels(args.out, samples) if begun else {}
    items = choose(samples, args.num_questions, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def next_unlabelled(start: int) -> int:
        return next((i for i in range(start, len(items)) if items[i][0] not in labels), len(items))

    answers_a_question = sum(map(len, samples[0]["policies"].values()))
    num_rows, num_queries = len(samples), len({row["query"] for row in samples})
    print(f"{args.samples}: {num_queries} questions, {num_rows - num_queries} rows more that repeat one of them")
    print(f"{len(items) // answers_a_question} questions to label, {answers_a_question} answers each. {KEYS}")
    position = next_unlabelled(0)
    while position < len(items):
        item, response = items[position]
        question, number = divmod(position, answers_a_question)
        print("\n" + "=" * 80 + "\n" + printable(item[0]) + "\n" + "-" * 80)
        print((printable(response) or "(an empty answer)") + "\n" + "-" * 80)
        now = f" (now {'useful' if labels[item]['useful'] else 'not useful'})" if item in labels else ""
        num_labelled = sum(item in labels for item, _ in items)
        print(f"question {question + 1}, answer {number + 1}; {num_labelled} of {len(items)} labelled")
        try:
            key = input(f"useful{now}? y/n/s/b/q: ").strip().lower()
        except EOFError:  # Ctrl-D, or the end of what was piped in
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
            print(f"{key!r} is no key: {KEYS}")

    num_labelled = sum(item in labels for item, _ in items)
    print(f"\n{num_labelled} of {len(items)} answers labelled, {len(items) - num_labelled} left: {args.out}")


if __name__ == "__main__":
    run_module(main, Args)
