"""Evaluate reward models and DPO's implicit rewards on RewardBench, RewardBench 2 and RM-Bench.

In: comparisons.validation.jsonl of `data.rewardbench`, or any other, with accuracy by `subset` in meta. Out: the
benchmark's scores by subset and section, with 95% intervals; the same controlled for length; calibration. The baseline
is a rule that prefers the longer response.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from nanorlhf.checkpoint import is_reward_model
from nanorlhf.cli import Seed
from nanorlhf.dataset import Comparison, Demonstration, field, load_comparisons
from nanorlhf.errors import InputError
from nanorlhf.evals.model_loading import common_tokenizer, longest_pair
from nanorlhf.evals.reward_models import (
    RewardModelArgs,
    check_models,
    load_ref_policy,
    named_models,
    needed_ref_policy,
    scorer,
)
from nanorlhf.evals.settings import begin
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.metrics.benchmark_scores import SIZES, TIES, Row, benchmark_tables, unpaired_ties
from nanorlhf.metrics.length_control import (
    label_weights,
    length_controlled_win_rate,
    near_length_accuracy,
    share_interval,
)
from nanorlhf.metrics.pair_accuracy import calibration, deciders
from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches
from nanorlhf.progress import Progress
from nanorlhf.report import benchmark_report
from nanorlhf.tokenizer import Tokenizer

LONGER = "the longer one"  # name of the baseline rule in tables
Record = tuple[str, str, dict[int, int], dict[int, int], set[tuple[int, int]]]  # subset, id, chosen, rejected, pairs


@dataclass(frozen=True, kw_only=True)
class Args(RewardModelArgs):
    seed: Seed = 1
    """random seed of the bootstrap"""


def main(args: Args) -> dict:
    device = begin(args)
    models = named_models(args.reward_models)
    if LONGER in models:
        raise InputError(f"--reward-models {LONGER!r}: this name is reserved for the baseline rule; choose another.")
    checkpoints = args.reward_models[1::2]
    tokenizer = common_tokenizer(args.tokenizer, [*checkpoints, needed_ref_policy(args)])
    path = args.data / "comparisons.validation.jsonl"
    pairs = list(load_comparisons(path, tokenizer, args.max_query_length, args.max_response_length))
    check_models(args, tokenizer, {str(path): longest_pair(pairs)})
    benchmark, rows, responses = read_benchmark(pairs, path)
    ref_policy = load_ref_policy(args, tokenizer, device)

    scores = score_models(models, responses, ref_policy, tokenizer, device, args)
    lengths = np.array([len(text.response) - 1 for text in responses])  # (responses,) tokens without EOS
    scores[LONGER] = lengths[None].astype(float)
    compared = [row for row in rows if (benchmark, row.subset) != ("RewardBench 2", TIES)]  # one-word answers
    result = {
        "benchmark": benchmark,
        "num_rows": len(rows),
        "num_pairs": len(pairs),
        "num_unpaired_ties": len(unpaired_ties(rows)) if benchmark == "RewardBench 2" else 0,
        "tables": benchmark_tables(benchmark, rows, scores, args.seed),
        **(length_tables(compared, scores, lengths, args.seed) if compared else {}),
        "num_seeds": {name: len(seeds) for name, seeds in models.items()},
        "implicit": [name for name, seeds in models.items() if not all(map(is_reward_model, seeds))],
        "reference": Path(args.ref_policy).name,
        "dpo_beta": args.dpo_beta,
        "args": json_settings(args),
    }
    return write_evaluation(args, result, benchmark_report.page(result, models))


# ------------------------------------------------------------------------------------------------------------- 1. data
def read_benchmark(pairs: list[Comparison], path: Path) -> tuple[str | None, list[Row], list[Demonstration]]:
    """Return the benchmark's name, its rows, and their distinct responses; without a benchmark, one row per pair.

    Raises InputError for a malformed `meta`, for a record with missing or repeated pairs, for records that share a
    number, and for Ties in which no question has both its rows.
    """
    responses: list[Demonstration] = []
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # query, response -> index

    def index(pair: Comparison, response: list[int]) -> int:
        key = tuple(pair.query), tuple(response)
        if key not in known:
            known[key] = len(responses)
            responses.append(Demonstration(pair.query, response, pair.record))
        return known[key]

    names: set[str | None] = set()
    records: dict[int, Record] = {}
    for number, pair in enumerate(pairs):
        where = f"{path}:{number + 1}"
        meta = field(pair.record, "meta", dict, where) if "meta" in pair.record else {}
        names.add(field(meta, "benchmark", str, where) if "benchmark" in meta else None)
        record, i, j, name = number, 0, 0, ""
        if None not in names:
            record, i, j = (field(meta, key, int, where) for key in ("record", "chosen", "rejected"))
            name = field(meta, "id", str, where)
        subset = field(meta, "subset", str, where) if meta.get("subset") is not None else "all pairs"
        known_subset, known_name, chosen, rejected, seen = records.setdefault(record, (subset, name, {}, {}, set()))
        if (i, j) in seen or (subset, name) != (known_subset, known_name):
            raise InputError(
                f"{where}: record {record} repeats a pair, or differs in subset or id from the lines before it; each "
                "record needs a unique number."
            )
        chosen[i], rejected[j] = index(pair, pair.chosen), index(pair, pair.rejected)
        seen.add((i, j))
    if len(names) > 1 or not names <= {None, *SIZES}:
        raise InputError(f"{path}: 'benchmark' in the field 'meta' must be the same in all rows: {', '.join(SIZES)}.")
    [benchmark] = names
    check_records(benchmark, records, path)
    rows = [
        Row(subset, name, [chosen[i] for i in sorted(chosen)], [rejected[j] for j in sorted(rejected)])
        for subset, name, chosen, rejected, _ in records.values()
    ]
    if benchmark == "RewardBench 2":
        check_ties(rows, path)
    return benchmark, rows, responses


def check_records(benchmark: str | None, records: dict[int, Record], path: Path) -> None:
    """Check that each record pairs every chosen with every rejected response, as many of each as the benchmark has."""
    for record, (subset, _, chosen, rejected, seen) in records.items():
        sizes = len(chosen), len(rejected)
        if benchmark is not None and not (benchmark == "RewardBench 2" and subset == TIES):
            sizes = SIZES[benchmark]
        if seen != set(product(*map(range, sizes))):
            raise InputError(
                f"{path}: the pairs of record {record} aren't the ones of {benchmark}; convert the benchmark again "
                "with data.rewardbench."
            )


def check_ties(rows: list[Row], path: Path) -> None:
    """Check that ids in Ties are unique, and that at least one question has both its rows."""
    ties = [row.id for row in rows if row.subset == TIES]
    if repeated := [name for name, count in Counter(ties).items() if count > 1]:
        raise InputError(f"{path}: several records of {TIES} have the id {repeated[0]!r}; convert the benchmark again.")
    if ties and len(unpaired_ties(rows)) == len(ties):
        raise InputError(
            f"{path}: no question of {TIES} has both its records, ref:N and tied:N; convert all records of the "
            "benchmark with data.rewardbench, or none of these."
        )


# ----------------------------------------------------------------------------------------------------------- 2. scores
def score_models(
    models: dict[str, list[str]],
    responses: list[Demonstration],
    ref_policy: GPT | None,
    tokenizer: Tokenizer,
    device: torch.device,
    args: Args,
) -> dict[str, np.ndarray]:
    """Return name -> scores by each of its checkpoints, (seeds, responses)."""
    scores = {}
    for name, checkpoints in models.items():
        seeds = Progress(checkpoints, desc=name, leave=False)
        columns = [score_responses(checkpoint, responses, ref_policy, tokenizer, device, args) for checkpoint in seeds]
        scores[name] = np.stack(columns)
    return scores


def score_responses(
    checkpoint: str,
    responses: list[Demonstration],
    ref_policy: GPT | None,
    tokenizer: Tokenizer,
    device: torch.device,
    args: Args,
) -> np.ndarray:
    """Return a model's score of each response, (responses,)."""
    order = sorted(range(len(responses)), key=lambda i: len(responses[i].query) + len(responses[i].response))
    scores = np.zeros(len(responses))
    with scorer(checkpoint, ref_policy, args.dpo_beta, tokenizer, device, args) as (_, score):
        for batch in micro_batches(order, args.batch_size):  # sorted by length: less padding
            scores[batch] = score([responses[i] for i in batch]).double().cpu().numpy()
    return scores


# ----------------------------------------------------------------------------------------------- 3. length statistics
def length_tables(rows: list[Row], scores: dict[str, np.ndarray], lengths: np.ndarray, seed: int) -> dict:
    """Measure how accuracy depends on length: scores name -> (seeds, responses), lengths (responses,) in tokens.

    All rows have the same number of pairs. Returns calibration and deciders of the models, and length: name ->

        accuracy       share of pairs ranked as labelled; a tie counts half, so the rule gets 0.5 on pairs of equal
                       length
        near           the same on pairs of about equal length
        controlled     at equal length: `length_controlled_win_rate` of the chosen responses; None for the rule
        margin_weight, length_weight   predictors of the label, see `label_weights`; the rule has only length
    """
    pair_lengths = pair_values(rows, lengths)  # (rows, pairs, 2)
    differences = pair_lengths[..., 0] - pair_lengths[..., 1]
    margins = {  # name -> (rows, pairs, seeds)
        name: np.stack([-np.diff(pair_values(rows, seed_scores))[..., 0] for seed_scores in column], axis=-1)
        for name, column in scores.items()
    }
    model_margins = {name: m.reshape(-1, m.shape[2]).T for name, m in margins.items() if name != LONGER}  # (seeds, n)
    numbers = {}
    for name, m in margins.items():
        right = (np.sign(m) + 1) / 2
        shares = right.mean((1, 2))  # (rows,)
        controlled = None if name == LONGER else length_controlled_win_rate(right, differences, seed)
        weights = label_weights(np.zeros_like(m) if name == LONGER else m, differences, seed)
        numbers[name] = {
            "accuracy": {"mean": float(shares.mean()), "interval": share_interval(shares, seed)},
            "near": near_length_accuracy(right, pair_lengths, seed),
            "controlled": controlled and {"mean": controlled[0], "interval": controlled[1]},
            "margin_weight": None if name == LONGER else weights["margin"],
            "length_weight": weights["length"],
        }
    return {
        "length": numbers,
        "deciders": deciders(model_margins, pair_lengths.reshape(-1, 2), None),
        "calibration": {name: calibration(column) for name, column in model_margins.items()},
    }


def pair_values(rows: list[Row], values: np.ndarray) -> np.ndarray:
    """Return the values of the chosen and the rejected response of each pair: (responses,) -> (rows, pairs, 2)."""
    return values[[list(product(row.chosen, row.rejected)) for row in rows]]
