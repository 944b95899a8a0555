"""Accuracy and calibration of reward models on pairs that people ranked, and the length bias of both.

A margin is the chosen response's score minus the rejected one's. Margins are arrays (seeds, pairs): models that differ
only in their seed, on the same pairs. Standard deviations over seeds are sample ones (n - 1), None for a single seed.
"""

import re
from collections import defaultdict

import numpy as np

from nanorlhf.dataset import Comparison, field
from nanorlhf.errors import InputError
from nanorlhf.metrics.intervals import t_interval, wilson_interval

BIN_WIDTH = 0.5  # of |margin|, in score units
FEW = 10  # pairs: a bin with fewer is drawn hollow


# --------------------------------------------------------------------------------------------------------- 1. accuracy
def pair_groups(rows: list[Comparison], path: str) -> dict[tuple[str, str], list[int]]:
    """[N+ 16] Group row indices by batch, confidence, split and pair of policies: (by, value) -> indices.

    In table order: all rows first, then each `by`, its values sorted by their number, policy pairs by frequency. A row
    without a field in its `meta` is in none of the field's groups; the two policies of a pair are unordered. Raises
    InputError for a malformed `meta`.
    """
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        where = f"{path}:{index + 1}"
        meta = field(row.record, "meta", dict, where) if "meta" in row.record else {}
        for by, kind in (("batch", str), ("confidence", int), ("split", str)):
            if meta.get(by) is not None:
                groups[by, str(field(meta, by, kind, where))].append(index)
        if meta.get("policies") is not None:
            policies = field(meta, "policies", list[str], where)
            if len(policies) != 2:
                raise InputError(f"{where}: 'policies' in the field 'meta' must be two names.")
            groups["policies", " / ".join(sorted(policies))].append(index)

    def sort_key(group: tuple[str, str]) -> tuple:
        by, value = group
        number = re.search(r"\d+", value)
        order = -len(groups[group]) if by == "policies" else int(number[0]) if number else 0
        return ("batch", "confidence", "split", "policies").index(by), order, value

    return {("all", ""): list(range(len(rows)))} | {group: groups[group] for group in sorted(groups, key=sort_key)}


def mean_and_std(values: np.ndarray) -> dict[str, float | None]:
    """Return mean and std of values (seeds,); NaN marks a seed without a value."""
    values = values[~np.isnan(values)]
    return {
        "mean": float(values.mean()) if len(values) else None,
        "std": float(values.std(ddof=1)) if len(values) > 1 else None,
    }


def accuracy_table(groups: dict[tuple[str, str], list[int]], margins: dict[str, np.ndarray]) -> list[dict]:
    """[N+ 16] Return Table 5: per group, the number of pairs and the share that each model ranks as people did.

    margins: model -> (seeds, pairs). Ties are wrong. Each row has by, value, num_pairs and models: name -> mean, std.
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


def accuracy_intervals(margins: dict[str, np.ndarray]) -> dict[str, dict]:
    """Return each model's accuracy on all pairs with its 95% interval, and its gain over the first model.

    margins: model -> (seeds, pairs). The accuracy has a Wilson interval. The gain, {"mean", "ci"}, is paired: Student's
    t over pairs that both models rank; None for the first model and for a single pair.
    """
    right = {name: (m > 0).mean(0) for name, m in margins.items()}  # (pairs,) share of seeds
    first = next(iter(right))
    intervals: dict[str, dict] = {}
    for name, shares in right.items():
        ends = None if name == first else t_interval(shares - right[first])
        intervals[name] = {
            "mean": float(shares.mean()),
            "ci": wilson_interval(float(shares.mean()), len(shares)),
            "gain": ends and {"mean": float((shares - right[first]).mean()), "ci": ends},
        }
    return intervals


# ------------------------------------------------------------------------------------------------------ 2. calibration
def calibration(margins: np.ndarray) -> dict:
    """[N+ 18] Return accuracy by the size of the margin; Bradley-Terry predicts sigmoid(|margin|). Figure 7, right.

    margins (seeds, pairs). Bins of BIN_WIDTH on |margin| cover 0 to the 99.5% quantile of all seeds' margins, rounded
    to that width; larger margins share one more bin, which the figure omits. Returns

        bins        per bin its middle, its number of pairs (mean over seeds), and its accuracy (mean, std over seeds)
        num_beyond  number of pairs in the omitted bin, mean over seeds
        ece         expected calibration error: |accuracy - mean of sigmoid(|margin|)| per bin, averaged over pairs;
                    mean and std over seeds
    """
    steps = max(1, round(float(np.quantile(margins, 0.995)) / BIN_WIDTH))
    size, right = np.abs(margins), margins > 0  # (seeds, pairs)
    bins = np.minimum((size / BIN_WIDTH).astype(int), steps)  # (seeds, pairs) bin `steps` is the omitted one
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
    """Return max, mean, min and std of scores (seeds, responses) over responses, each as mean and std over seeds."""
    columns = {"max": scores.max(1), "mean": scores.mean(1), "min": scores.min(1), "std": scores.std(1)}
    return {name: mean_and_std(column) for name, column in columns.items()}


# ------------------------------------------------------------------------------------ 3. gold, length and position
def deciders(margins: dict[str, np.ndarray], lengths: np.ndarray, golds: np.ndarray | None) -> dict:
    """Measure how often the labels, the gold score and each model prefer the better and the longer response.

    margins: model -> (seeds, pairs); lengths (pairs, 2) of the chosen and the rejected response; golds (pairs,), the
    chosen response's gold score minus the rejected one's, or None. Returns labels, truth (gold, or None) and models:
    name -> decider. Each decider has the mean and std over seeds of

        truth    share of pairs where it prefers the response with the higher gold score
        longer   share of pairs where it prefers the longer response

    Pairs with equal gold scores, or lengths, are excluded; a decider's own ties count as wrong.
    """
    longer = lengths[:, 0] - lengths[:, 1]  # (pairs,)

    def share(margin: np.ndarray, target: np.ndarray | None) -> dict[str, float | None]:
        if target is None or not target.any():
            return {"mean": None, "std": None}
        return mean_and_std((margin[:, target != 0] * target[target != 0] > 0).mean(1))

    def decider(margin: np.ndarray) -> dict[str, dict]:
        return {"truth": share(margin, golds), "longer": share(margin, longer)}

    return {
        "labels": decider(np.ones((1, len(lengths)))),
        "truth": None if golds is None else decider(golds[None]),
        "models": {name: decider(margin) for name, margin in margins.items()},
    }


def first_shown_share(rows: list[Comparison], path: str) -> float | None:
    """Return how often the response shown first was preferred, as a share; None if no `meta` has a `choice`.

    `choice` is 0 or 1, the position of the preferred response. Raises InputError for a malformed one.
    """
    choices = []
    for index, row in enumerate(rows):
        if row.record.get("meta", {}).get("choice") is not None:
            choices.append(field(row.record["meta"], "choice", int, f"{path}:{index + 1}"))
    return float(np.mean(np.equal(choices, 0))) if choices else None
