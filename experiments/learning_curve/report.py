"""Learning curve of a set of comparisons: accuracy on unseen pairs by the number of training pairs.

    python -m experiments.learning_curve.report --data runs/real/all --model HuggingFaceTB/SmolLM2-135M-Instruct

A curve of reward models takes a day, and a validation set with a tenth of the pairs leaves intervals too wide to answer
the question. Here we only train a linear layer, by ridge regression on a pretrained model's middle-layer features of
two responses. This takes minutes, so ten-fold cross-validation can test every pair; all pairs of a query are in one
fold. The baseline is length: which response has more characters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from nanorlhf.cli import Count, Fraction, PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import Comparison, load_comparisons
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.metrics.intervals import bootstrap_interval, percentile_interval
from nanorlhf.metrics.length_control import NEAR
from nanorlhf.progress import Progress
from nanorlhf.report.page import BLUE, ORANGE, aligned, number, panel, write_pictures
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.train_linear import load_lower_blocks, pair_features, query_numbers

FOLDS = 10
NUM_RESAMPLES = 2000  # of the pairs, for the line's intervals
PENALTIES = np.logspace(1, 6, 11)  # one is chosen by leave-one-out on the training pairs
LATER = (2, 10)  # extrapolate the curve to this many times the pairs


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path
    """directory with comparisons.train.jsonl; comparisons.validation.jsonl is added if it exists"""
    model: str
    """pretrained policy: checkpoint directory or Hub id"""
    out: Path | None = None
    """directory for learning_curve.png; None: only print the table"""
    depth: Fraction = 0.6
    """share of the model's blocks below the layer with the features"""
    num_sizes: Count = 4
    """points of the curve: all pairs of the training folds, half of them, a quarter, ..."""
    num_repeats: Count = 3
    """number of times the folds are drawn"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    max_response_length: PositiveInt = 256
    """longest response in tokens, EOS included"""
    batch_size: PositiveInt = 8
    """pairs per forward pass"""
    seed: Seed = 1
    """seed of the folds, their subsamples and the intervals"""


def length_difference(rows: list[Comparison]) -> np.ndarray:
    """Return the log ratio of the chosen and the rejected response's lengths in characters, (pairs,)."""
    texts = [(str(row.record["chosen"]), str(row.record["rejected"])) for row in rows]
    return np.array([np.log((1 + len(a)) / (1 + len(b))) for a, b in texts])


def unseen(
    inputs: np.ndarray, queries: np.ndarray, share: float, num_repeats: int, seed: int
) -> tuple[np.ndarray, float]:
    """Cross-validate. Returns whether each held-out pair is ranked right, (pairs, repeats), and mean training pairs.

    inputs (pairs, k): features of chosen minus rejected. queries (pairs,): id of each pair's query. share: share of the
    training folds' queries to use. A tie counts half.
    """
    try:
        from sklearn.linear_model import RidgeClassifierCV
    except ModuleNotFoundError as error:
        raise InputError("Learning curves need a library: install it with `pip install scikit-learn`.") from error

    scale = inputs.std(0)
    inputs = inputs / np.where(scale > 0, scale, 1)
    right = np.zeros((len(inputs), num_repeats))
    learnt = []
    for repeat in range(num_repeats):
        draw = np.random.default_rng((seed, repeat))
        order = draw.permutation(np.unique(queries))
        for fold in range(FOLDS):
            left_out = np.isin(queries, order[fold::FOLDS])
            rest = np.delete(order, np.s_[fold::FOLDS])
            train = np.flatnonzero(np.isin(queries, rest[: max(FOLDS, round(share * len(rest)))]))
            # swapping a pair's responses doesn't change its meaning: no intercept, and every other pair is swapped
            sign = np.where(np.arange(len(train)) % 2, 1, -1)
            model = RidgeClassifierCV(PENALTIES, fit_intercept=False).fit(inputs[train] * sign[:, None], sign)
            margin = model.decision_function(inputs[left_out])
            right[left_out, repeat] = (margin > 0) + 0.5 * (margin == 0)
            learnt.append(len(train))
    return right, float(np.mean(learnt))


def mean_cell(ours: np.ndarray, seed: int, sign: str = "") -> str:
    """Format the mean over pairs (pairs,) and its 95% interval as a table cell."""
    return number(ours.mean(), bootstrap_interval(ours[:, None], seed), 3, sign) if len(ours) else "-"


def on_the_line(right: np.ndarray, num_pairs: Sequence[float], at: float) -> np.ndarray:
    """Return the accuracy at `at` pairs on the least-squares line through accuracy over log(pairs).

    right (resamples, pairs, sizes), num_pairs (sizes,) -> (resamples,).
    """
    x = np.log(num_pairs)
    accuracy = right.mean(1)  # (resamples, sizes)
    slope = accuracy @ (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return accuracy.mean(1) + slope * (np.log(at) - x.mean())


def picture(right: np.ndarray, num_pairs: Sequence[float], by_length: float, seed: int) -> Figure:
    figure, axes = panel("Accuracy on unseen pairs", "training pairs", "share ranked right")
    accuracy = right.mean(0)  # (sizes,)
    ends = [bootstrap_interval(ours[:, None], seed) for ours in right.T]
    axes.errorbar(num_pairs, accuracy, np.abs(np.array(ends).T - accuracy), color=BLUE, marker="o", capsize=3)
    further = [num_pairs[0], num_pairs[0] * LATER[-1]]
    line = [on_the_line(right[None], num_pairs, at)[0] for at in further]
    axes.plot(further, line, color=BLUE, linestyle=":", label="linear layer, with fitted line")
    axes.axhline(by_length, color=ORANGE, linestyle="--", label="only length")
    axes.set_xscale("log")
    shown = [*num_pairs, further[-1]]
    axes.set_xticks(shown, [f"{size:,.0f}" for size in shown])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)
    return figure


def main(args: Args) -> None:
    """Print the table; with --out, write the picture."""
    check_ranges(args)
    if args.num_sizes < 2:
        raise InputError("--num-sizes must be at least 2, got 1.")
    if args.out is not None:
        check_out(args.out)
    tokenizer = load_tokenizer(args.model)
    Q, T = args.max_query_length, args.max_response_length
    sets = [load_comparisons(args.data / "comparisons.train.jsonl", tokenizer, Q, T)]
    if (validation := args.data / "comparisons.validation.jsonl").exists():
        sets.append(load_comparisons(validation, tokenizer, Q, T))
    rows = [row for comparisons in sets for row in comparisons]
    queries = query_numbers(rows, args.data)
    policy = load_lower_blocks(args.model, tokenizer, args.data, sets, args.depth)

    lengths = length_difference(rows)
    by_length = unseen(lengths[:, None], queries, 1.0, args.num_repeats, args.seed)[0].mean(1)  # (pairs,)
    inputs = pair_features(policy, rows, tokenizer.pad_id, args.batch_size)
    sizes = Progress([0.5**halvings for halvings in range(args.num_sizes)], desc="sizes")
    results = [unseen(inputs, queries, share, args.num_repeats, args.seed) for share in sizes]
    right = np.column_stack([ours.mean(1) for ours, _ in results])  # (pairs, sizes)
    num_pairs = [learnt for _, learnt in results]

    near = -np.expm1(-np.abs(lengths)) <= NEAR
    at_near = number(by_length[near].mean() if near.any() else None, digits=3)
    print(
        f"{len(rows):,} pairs of {queries.max() + 1:,} queries. The longer response is preferred in "
        f"{(lengths > 0).mean():.3f}; length by itself ranks {by_length.mean():.3f} right, and "
        f"{at_near} of the {near.sum():,} pairs with lengths that differ by {NEAR:.0%} or less.\n"
    )
    table = [["pairs", "accuracy", "minus length's", "nearly equal lengths"]]
    for size, ours in zip(num_pairs, right.T, strict=True):
        columns = (ours, ""), (ours - by_length, "+"), (ours[near], "")
        table.append([f"{size:,.0f}", *(mean_cell(column, args.seed, sign) for column, sign in columns)])
    print(aligned(table))

    def line_cell(statistic: Callable[[np.ndarray], np.ndarray], sign: str = "") -> str:
        ends = percentile_interval(right, statistic, args.seed, NUM_RESAMPLES)
        return number(float(statistic(right[None])[0]), ends, 3, sign)

    doubling = line_cell(lambda drawn: on_the_line(drawn, num_pairs, 2) - on_the_line(drawn, num_pairs, 1), "+")
    later = [times * num_pairs[0] for times in LATER]
    predictions = [
        f"{at:,.0f} pairs give {line_cell(partial(on_the_line, num_pairs=num_pairs, at=at))}" for at in later
    ]
    print(f"\nDoubling the pairs adds {doubling}. If this continues, {' and '.join(predictions)}.")
    if args.out is not None:
        write_pictures(args.out, {"learning_curve.png": picture(right, num_pairs, by_length.mean(), args.seed)})


if __name__ == "__main__":
    run_module(main, Args)
