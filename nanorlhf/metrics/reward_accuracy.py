"""Does a reward model rank pairs as people did, and is it as sure of it as it should be?

A margin is the score of the chosen response less that of the rejected one. Margins below are arrays (seeds, pairs):
several models that differ by their seed alone, on the same pairs. A standard deviation over seeds is that of a sample
(n - 1), and None of a single seed.
"""

import re
from collections import defaultdict

import numpy as np

from nanorlhf.dataset import Comparison, field
from nanorlhf.errors import InputError

BIN_WIDTH = 0.5  # of |margin|, in score units
FEW = 10  # pairs: a bin with fewer says nothing much


# --------------------------------------------------------------------------------------------------------- 1. accuracy
def pair_groups(rows: list[Comparison], path: str) -> dict[tuple[str, str], list[int]]:
    """[N+ 16] Which rows are of each batch, confidence, split and pair of policies: (by, value) -> their indices.

    In the order of a table: all of them, then by by, numbers in a value counted as numbers, pairs by how many they are.
    A row that lacks something in its `meta` is in no group of it; the two policies of a pair have no order.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        where = f"{path}:{index + 1}"
        meta = field(row.record, "meta", dict, where) if "meta" in row.record else {}
        for by, kind in (("batch", str), ("confidence", int), ("split", str)):
            if meta.get(by) is not None:
                groups[by, str(field(meta, by, kind, where))].append(index)
        if meta.get("policies") is not None:
            policies = field(meta, "policies", list, where)
            if len(policies) != 2 or not all(isinstance(name, str) for name in policies):
                raise InputError(f"{where}: 'policies' in the field 'meta' must be two names: mend or delete the line.")
            groups["policies", " / ".join(sorted(policies))].append(index)

    def place(group: tuple[str, str]) -> tuple:
        by, value = group
        number = re.search(r"\d+", value)
        order = -len(groups[group]) if by == "policies" else int(number[0]) if number else 0
        return ("batch", "confidence", "split", "policies").index(by), order, value

    return {("all", ""): list(range(len(rows)))} | {group: groups[group] for group in sorted(groups, key=place)}


def mean_and_std(values: np.ndarray) -> dict[str, float | None]:
    """Over seeds; NaN is a seed that has no such value."""
    values = values[~np.isnan(values)]
    return {
        "mean": float(values.mean()) if len(values) else None,
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
    }


def accuracy_table(groups: dict[tuple[str, str], list[int]], margins: dict[str, np.ndarray]) -> list[dict]:
    """[N+ 16] Table 5: of each group of pairs, how many there are, and the share that each model ranks as people did.

    margins: model -> (seeds, pairs). A tie is wrong. Each row has by, value, num_pairs and models: name -> mean, std.
    """
    return [
        {
            "by": by,
            "value": value,
            "num_pairs": len(indices),
            "models": {name: mean_and_std((m[:, indices] > 0).mean(1)) for name, m in margins.items()},
        }
        for (by, value), indices in groups.items()
    ]


# ------------------------------------------------------------------------------------------------------ 2. calibration
def calibration(margins: np.ndarray) -> dict:
    """[N+ 18] How often is a margin of some size right? Bradley-Terry says sigmoid(|margin|); Figure 7, right.

    margins (seeds, pairs). Bins of BIN_WIDTH on |margin| from 0 to the 99.5% quantile of the margins of all seeds,
    rounded to that width; what lies beyond is one more bin, which the figure leaves out. Gives

        bins   of each its middle, its pairs (mean over seeds), and mean and std of its accuracy over seeds
        ece    expected calibration error: |accuracy - mean of sigmoid(|margin|)| of a bin, mean over the pairs; over
               seeds as mean and std
    """
    steps = max(1, round(float(np.quantile(margins, 0.995)) / BIN_WIDTH))
    size, right = np.abs(margins), margins > 0  # (seeds, pairs)
    bins = np.minimum((size / BIN_WIDTH).astype(int), steps)  # (seeds, pairs) `steps` is the one beyond
    confidence = 1 / (1 + np.exp(-size))
    accuracies, gaps = np.full((len(margins), steps), np.nan), np.zeros(len(margins))
    for seed in range(len(margins)):
        for b in np.unique(bins[seed]):
            inside = bins[seed] == b  # (pairs,)
            accuracy = right[seed, inside].mean()
            gaps[seed] += inside.mean() * abs(accuracy - confidence[seed, inside].mean())
            if b < steps:
                accuracies[seed, b] = accuracy
    return {
        "bins": [
            {
                "middle": (b + 0.5) * BIN_WIDTH,
                "num_pairs": float((bins == b).sum(1).mean()),
                **mean_and_std(accuracies[:, b]),
            }
            for b in range(steps)
        ],
        "num_beyond": float((bins == steps).sum(1).mean()),
        "ece": mean_and_std(gaps),
    }


def score_statistics(scores: np.ndarray) -> dict[str, dict[str, float | None]]:
    """max, mean, min and std over the responses of scores (seeds, responses), each as mean and std over seeds."""
    columns = {"max": scores.max(1), "mean": scores.mean(1), "min": scores.min(1), "std": scores.std(1)}
    return {name: mean_and_std(column) for name, column in columns.items()}
