"""Read labels of useful answers: the labels.jsonl written by `python -m data.label`."""

from pathlib import Path

import numpy as np

from nanorlhf.dataset import field, iter_jsonl
from nanorlhf.errors import InputError

Item = tuple[str, str, int]  # query, policy, index of the answer


def read_labels(path: Path, samples: list[dict]) -> dict[Item, dict]:
    """Read the rows of labels.jsonl by item. Raises InputError for a label of an answer that isn't in `samples`."""
    answers = {
        (row["query"], policy, index): answer["response"]
        for row in reversed(samples)  # of two rows with the same query, the first has the labels
        for policy, column in row["policies"].items()
        for index, answer in enumerate(column)
    }
    labels: dict[Item, dict] = {}
    for where, row in iter_jsonl(path):
        for name, kind in {"query": str, "policy": str, "index": int, "useful": bool}.items():
            field(row, name, kind, where)
        item = row["query"], row["policy"], row["index"]
        if item not in answers or row.get("response", answers[item]) != answers[item]:
            raise InputError(f"{where}: the samples don't contain this answer; pass the labels of these samples.")
        if item in labels:
            raise InputError(f"{where}: this answer already has a label; delete one of the two lines.")
        labels[item] = row
    return labels


def load_labels(path: Path, samples: list[dict]) -> dict[str, np.ndarray]:
    """Load labels as policy -> (questions, n), rows as in `samples`: 1 useful, 0 not, NaN without a label.

    Of two samples with the same query, the first has the labels.
    """
    labels = read_labels(path, samples)
    columns = {name: np.full((len(samples), len(answers)), np.nan) for name, answers in samples[0]["policies"].items()}
    first_row = {row["query"]: number for number, row in reversed(list(enumerate(samples)))}
    for (query, policy, index), row in labels.items():
        columns[policy][first_row[query], index] = row["useful"]
    return columns
