"""Answers that a program checks: how many of n samples per query pass, pass@k, and what else can be counted.

In: sft.validation.jsonl, whose rows hold what the functions of --rewards ask for. Out: pass@k of the first function (a
response passes where it returns 1), the mean of the others, by 95% intervals over queries; the same by a field of the
rows. samples.jsonl has how many samples of each query passed, and one of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch

from nanorlhf.cli import Count, PositiveInt, Temperature
from nanorlhf.dataset import Demonstration, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.evals.model_loading import common_tokenizer, load_policy
from nanorlhf.evals.scores import endings, sample
from nanorlhf.evals.settings import PolicyArgs, begin, named_policies
from nanorlhf.evals.writing import settings_of, write_evaluation
from nanorlhf.metrics import bootstrap_interval, pass_at_k
from nanorlhf.progress import Progress
from nanorlhf.report import checked_report
from nanorlhf.rewards.function import Responses, RewardFunction, fields_of
from nanorlhf.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    rewards: tuple[str, ...]
    """FILE.py:FUNCTION of a reward each (docs/rewards.md): the first says whether a response passes, by 1"""
    num_samples: Count = 64
    """responses to each query, n"""
    by: str | None = None
    """field of the rows' meta, for each value of which pass@1 is told apart; None: none"""
    max_response_length: PositiveInt
    """longest response of the data in tokens, EOS included"""
    temperature: Temperature = 1.0
    """of the responses"""


def main(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    device = begin(args)
    policies = named_policies(args.policies)
    tokenizer = common_tokenizer(args.tokenizer, policies.values())
    Q, T = args.max_query_length, args.max_response_length
    path = args.data / "sft.validation.jsonl"
    rows = list(load_demonstrations(path, tokenizer, Q, T, needs_response=False)[: args.num_queries])
    records = [row.record for row in rows]
    functions = [RewardFunction(where, records) for where in args.rewards]
    names = [where.rpartition(":")[2] for where in args.rewards]
    if len(set(names)) < len(names):
        raise InputError(f"--rewards {' '.join(args.rewards)}: the functions' names must differ.")
    groups = groups_of(rows, args.by)
    n = args.num_samples
    ks = [2**i for i in range(n.bit_length())]  # 1, 2, 4, ... up to n

    # ---------------------------------------------------------------------------------------- 2. responses and scores
    results, texts, num_passed, differences = {}, {}, {}, {}  # by policy
    first: dict[str, np.ndarray] = {}  # the first policy's pass@1 and rewards, (queries, n)
    for name, place in Progress(policies.items(), desc="policies"):
        _, response = sample(
            load_policy(place, rows, tokenizer, args, device),  # no variable: gone before the next is loaded
            rows, tokenizer, args, n, temperature=args.temperature,
        )  # fmt: skip
        given = responses_of(response, records, tokenizer, n)
        scores = {  # (queries, n)
            label: np.array([total(value, function) for value in function(given)]).reshape(-1, n)
            for label, function in zip(names, functions, strict=True)
        }
        passed = scores[names[0]] == 1
        counts = passed.sum(1)  # (queries,)
        at_k = {k: np.array([[pass_at_k(n, int(c), k)] for c in counts]) for k in ks}  # (queries, 1)
        results[name] = {
            "pass_at_k": {str(k): mean_and_interval(values, args.seed) for k, values in at_k.items()},
            "rewards": {label: mean_and_interval(values, args.seed) for label, values in scores.items()},
            "by": {value: float(passed[rows].mean()) for value, rows in groups.items()},
            **endings(response, tokenizer),
        }
        measured = {"pass@1": passed.astype(float)} | scores
        if first:
            differences[name] = {key: mean_and_interval(x - first[key], args.seed) for key, x in measured.items()}
        first = first or measured
        texts[name], num_passed[name] = given.responses[::n], counts.tolist()

    # -------------------------------------------------------------------------------------------------------- 3. output
    result = {
        "args": settings_of(args),
        "num_queries": len(rows),
        "num_samples": n,
        "policies": results,
        "differences": differences,  # from the first policy
    }

    def samples() -> Iterator[dict]:
        for i, record in enumerate(records):
            answered = {name: {"response": texts[name][i], "num_passed": num_passed[name][i]} for name in policies}
            yield {"query": record["query"], "reference": record.get("response"), "policies": answered}

    page = checked_report.page(result, list(samples())[: args.num_report_samples], policies.values())
    return write_evaluation(args, result, page, {"samples.jsonl": samples()})


def groups_of(rows: list[Demonstration], field: str | None) -> dict[str, np.ndarray]:
    """Value of a field -> True for its rows. Raises InputError where a row lacks it."""
    if field is None:
        return {}
    values = [fields_of(row.record).get(field) for row in rows]
    if None in values:
        raise InputError(f"--by {field}: a row of sft.validation.jsonl has no such field in its meta.")
    texts = list(map(str, values))
    ordered = sorted(set(texts), key=lambda text: (len(text), text))  # 4, 5, 10
    return {value: np.array([text == value for text in texts]) for value in ordered}


def responses_of(response: torch.Tensor, records: list[dict], tokenizer: Tokenizer, n: int) -> Responses:
    """What reward functions read; response (queries * n, T), the n of a query consecutive."""
    ids = [[i for i in row if i != tokenizer.pad_id] for row in response.tolist()]
    repeated = [record for record in records for _ in range(n)]
    return Responses([record["query"] for record in repeated], [tokenizer.decode(row) for row in ids], ids, repeated)


def total(value: float | list[float] | None, function: RewardFunction) -> float:
    """The reward of a response, the sum of those per token."""
    if value is None:
        raise InputError(f"{function.name}: it returned None for a response, so there is nothing to evaluate.")
    return sum(value) if isinstance(value, list) else value


def mean_and_interval(values: np.ndarray, seed: int) -> dict:
    """Of values (queries, n), with the 95% interval over queries."""
    return {"mean": fmean(values.mean(1)), "interval": bootstrap_interval(values, seed)}
