"""What a set of comparisons can teach: how accuracy on unseen pairs grows with the number of pairs.

    python -m experiments.learning_curve.report --data runs/real/all --model HuggingFaceTB/SmolLM2-135M-Instruct

A curve of reward models takes a day, and a tenth of the pairs, kept for validation, leaves an interval as wide as the
question. Here nothing is trained but a linear layer: ridge regression on what a pretrained model's middle
layer says of two responses. That takes minutes, so every pair can be an unseen one, in ten-fold cross-validation; all
pairs of a query are in one fold. The rule to beat is length: which of the two is longer, in characters.
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
PENALTIES = np.logspace(1, 6, 11)  # of which the training pairs choose one, each left out once
LATER = (2, 10)  # times as many pairs as there are: where the curve is extrapolated to


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path
    """directory with comparisons.train.jsonl; comparisons.validation.jsonl is added where it exists"""
    model: str
    """pretrained policy: checkpoint directory or Hub id"""
    out: Path | None = None
    """directory of learning_curve.png; None: the table alone"""
    depth: Fraction = 0.6
    """share of the model's blocks below the layer that is read"""
    num_sizes: Count = 4
    """points of the curve: all pairs of the training folds, half of them, a quarter, ..."""
    num_repeats: Count = 3
    """how often the folds are drawn"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    max_response_length: PositiveInt = 256
    """longest response in tokens, EOS included"""
    batch_size: PositiveInt = 8
    """pairs read at a time"""
    seed: Seed = 1
    """fixes the folds, the samples of them and the intervals"""


def length_difference(rows: list[Comparison]) -> np.ndarray:
    """(pairs,): log of the chosen response's characters over the rejected one's."""
    texts = [(str(row.record["chosen"]), str(row.record["rejected"])) for row in rows]
    return np.array([np.log((1 + len(a)) / (1 + len(b))) for a, b in texts])


def unseen(
    inputs: np.ndarray, queries: np.ndarray, share: float, num_repeats: int, seed: int
) -> tuple[np.ndarray, float]:
    """Whether each pair was ranked right while its fold was left out, (pairs, repeats); the mean pairs learnt from.

    inputs (pairs, k): features of chosen minus rejected. queries (pairs,): an id of each pair's query. share: of the
    training folds' queries. A tie counts half.
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
            others = np.delete(order, np.s_[fold::FOLDS])
            train = np.flatnonzero(np.isin(queries, others[: max(FOLDS, round(share * len(others)))]))
            # a pair the other way round is the same statement: no constant, and half of them are turned
            sign = np.where(np.arange(len(train)) % 2, 1, -1)
            model = RidgeClassifierCV(PENALTIES, fit_intercept=False).fit(inputs[train] * sign[:, None], sign)
            margin = model.decision_function(inputs[left_out])
            right[left_out, repeat] = (margin > 0) + 0.5 * (margin == 0)
            learnt.append(len(train))
    return right, float(np.mean(learnt))


def mean_cell(ours: np.ndarray, seed: int, sign: str = "") -> str:
    """The mean over pairs (pairs,) and its 95% interval as a cell of a table."""
    return number(ours.mean(), bootstrap_interval(ours[:, None], seed), 3, sign) if len(ours) else "-"


def on_the_line(right: np.ndarray, num_pairs: Sequence[float], at: float) -> np.ndarray:
    """The accuracy at `at` pairs of the line through accuracy against log(pairs), by least squares.

    right (resamples, pairs, sizes), num_pairs (sizes,) -> (resamples,).
    """
    x = np.log(num_pairs)
    accuracy = right.mean(1)  # (resamples, sizes)
    slope = accuracy @ (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    return accuracy.mean(1) + slope * (np.log(at) - x.mean())


def picture(right: np.ndarray, num_pairs: Sequence[float], by_length: float, seed: int) -> Figure:
    figure, axes = panel("Accuracy on unseen pairs", "pairs learnt from", "share ranked right")
    accuracy = right.mean(0)  # (sizes,)
    ends = [bootstrap_interval(ours[:, None], seed) for ours in right.T]
    axes.errorbar(num_pairs, accuracy, np.abs(np.array(ends).T - accuracy), color=BLUE, marker="o", capsize=3)
    further = [num_pairs[0], num_pairs[0] * LATER[-1]]
    line = [on_the_line(right[None], num_pairs, at)[0] for at in further]
    axes.plot(further, line, color=BLUE, linestyle=":", label="linear layer, and its line")
    axes.axhline(by_length, color=ORANGE, linestyle="--", label="length alone")
    axes.set_xscale("log")
    shown = [*num_pairs, further[-1]]
    axes.set_xticks(shown, [f"{size:,.0f}" for size in shown])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False)
    return figure


def main(args: Args) -> None:
    """Print the table; with --out write the picture."""
    check_ranges(args)
    if args.num_sizes < 2:
        raise InputError("--num-sizes 1: a curve needs at least 2.")
    if args.out is not None:
        check_out(args.out)
    tokenizer = load_tokenizer(args.model)
    Q, T = args.max_query_length, args.max_response_length
    sets = [load_comparisons(args.data / "comparisons.train.jsonl", tokenizer, Q, T)]
    if (validation := args.data / "comparisons.validation.jsonl").exists():
        sets.append(load_comparisons(validation, tokenizer, Q, T))
    rows = [row for some in sets for row in some]
    queries = query_numbers(rows, args.data)
    policy = load_lower_blocks(args.model, tokenizer, args.data, sets, args.depth)

    lengths = length_difference(rows)
    by_length = unseen(lengths[:, None], queries, 1.0, args.num_repeats, args.seed)[0].mean(1)  # (pairs,)
    inputs = pair_features(policy, rows, tokenizer.pad_id, args.batch_size)
    sizes = Progress([0.5**halvings for halvings in range(args.num_sizes)], desc="sizes")
    found = [unseen(inputs, queries, share, args.num_repeats, args.seed) for share in sizes]
    right = np.column_stack([ours.mean(1) for ours, _ in found])  # (pairs, sizes)
    num_pairs = [learnt for _, learnt in found]

    near = -np.expm1(-np.abs(lengths)) <= NEAR
    at_near = number(by_length[near].mean() if near.any() else None, digits=3)
    print(
        f"{len(rows):,} pairs of {queries.max() + 1:,} queries. The longer response is preferred in "
        f"{(lengths > 0).mean():.3f}; length alone ranks {by_length.mean():.3f} right, and "
        f"{at_near} of the {near.sum():,} pairs whose lengths differ by {NEAR:.0%} or less.\n"
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
    said = [f"{at:,.0f} pairs give {line_cell(partial(on_the_line, num_pairs=num_pairs, at=at))}" for at in later]
    print(f"\nA doubling adds {doubling}. If that goes on, {' and '.join(said)}.")
    if args.out is not None:
        write_pictures(args.out, {"learning_curve.png": picture(right, num_pairs, by_length.mean(), args.seed)})


if __name__ == "__main__":
    run_module(main, Args)
