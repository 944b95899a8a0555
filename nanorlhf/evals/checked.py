"""Evaluate answers that a program can check: pass@k over n samples per query, and the mean of other rewards.

In: sft.validation.jsonl, whose rows have the fields that the functions of --rewards need. Out: pass@k of the first
function (a response passes if it returns 1) and the mean of each function, with 95% intervals over queries; pass@1 by a
field of the rows. samples.jsonl has the number of samples of each query that passed, and one of the samples.
"""

from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from nanorlhf.cli import Count, PositiveInt, Temperature
from nanorlhf.dataset import Demonstration, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.evals.model_loading import common_tokenizer, load_policy
from nanorlhf.evals.scores import endings, sample
from nanorlhf.evals.settings import PolicyArgs, begin, named_policies
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.metrics import bootstrap_interval, pass_at_k
from nanorlhf.progress import Progress
from nanorlhf.report import checked_report
from nanorlhf.rewards.function import Responses, RewardFunction, row_fields
from nanorlhf.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    rewards: tuple[str, ...]
    """reward functions as FILE.py:FUNCTION (docs/rewards.md); a response passes if the first one returns 1"""
    num_samples: Count = 64
    """responses per query, n"""
    by: str | None = None
    """field of the rows' meta to break pass@1 down by; None: no breakdown"""
    max_response_length: PositiveInt
    """longest response of the data in tokens, EOS included"""
    temperature: Temperature = 1.0
    """sampling temperature"""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data and the functions that check responses."""

    args: Args
    device: torch.device
    policies: dict[str, str]  # name -> checkpoint
    tokenizer: Tokenizer
    rows: list[Demonstration]
    functions: dict[str, RewardFunction]  # the first decides whether a response passes
    groups: dict[str, np.ndarray]  # value of --by -> True for its rows

    @property
    def records(self) -> list[dict]:
        return [row.record for row in self.rows]


def main(args: Args) -> dict:
    inputs = load(args)
    texts: dict[str, list[str]] = {}  # policy -> its first response to each query
    scores: dict[str, dict[str, np.ndarray]] = {}  # policy -> reward -> (queries, n)
    results = {}
    for name, checkpoint in Progress(inputs.policies.items(), desc="policies"):
        response = answers(checkpoint, inputs)
        texts[name], scores[name] = measure(response, inputs)
        results[name] = statistics(scores[name], inputs) | endings(response, inputs.tokenizer)
    result = {
        "args": json_settings(args),
        "num_queries": len(inputs.rows),
        "num_samples": args.num_samples,
        "policies": results,
        "differences": gains(scores, args.seed),  # from the first policy
    }
    return write(result, texts, scores, inputs)


# ----------------------------------------------------------------------------------------------------------- 1. inputs
def load(args: Args) -> Inputs:
    device = begin(args)
    policies = named_policies(args.policies)
    tokenizer = common_tokenizer(args.tokenizer, policies.values())
    path, Q, T = args.data / "sft.validation.jsonl", args.max_query_length, args.max_response_length
    rows = list(load_demonstrations(path, tokenizer, Q, T, needs_response=False)[: args.num_queries])
    records = [row.record for row in rows]
    functions = {where.rpartition(":")[2]: RewardFunction(where, records) for where in args.rewards}
    if len(functions) < len(args.rewards):
        raise InputError(f"--rewards {' '.join(args.rewards)}: the functions' names must differ.")
    groups = group_masks(rows, args.by)
    return Inputs(
        args=args, device=device, policies=policies, tokenizer=tokenizer, rows=rows, functions=functions, groups=groups
    )  # fmt: skip


def group_masks(rows: list[Demonstration], field: str | None) -> dict[str, np.ndarray]:
    """Return value of the field -> mask of its rows, (rows,). Raises InputError if a row lacks the field."""
    if field is None:
        return {}
    values = [row_fields(row.record).get(field) for row in rows]
    if None in values:
        raise InputError(f"--by {field}: a row of sft.validation.jsonl doesn't have this field in its meta.")
    texts = list(map(str, values))
    ordered = sorted(set(texts), key=lambda text: (len(text), text))  # 4, 5, 10
    return {value: np.array([text == value for text in texts]) for value in ordered}


# ------------------------------------------------------------------------------------------- 2. responses and scores
def answers(checkpoint: str, inputs: Inputs) -> Tensor:
    """Sample n responses to each query, (queries * n, T), and free the policy before the next one is loaded."""
    args = inputs.args
    policy = load_policy(checkpoint, inputs.rows, inputs.tokenizer, args, inputs.device)
    _, response = sample(
        policy, inputs.rows, inputs.tokenizer, args, args.num_samples, temperature=args.temperature
    )  # fmt: skip
    return response


def measure(response: Tensor, inputs: Inputs) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the first response to each query as text, and each function's rewards, (queries, n)."""
    n = inputs.args.num_samples
    batch = make_responses(response, inputs.records, inputs.tokenizer, n)
    scores = {
        name: np.array([total(value, function) for value in function(batch)]).reshape(-1, n)
        for name, function in inputs.functions.items()
    }
    return batch.responses[::n], scores


def make_responses(response: Tensor, records: list[dict], tokenizer: Tokenizer, n: int) -> Responses:
    """Build the input of reward functions; response (queries * n, T), the n of a query consecutive."""
    ids = [[i for i in row if i != tokenizer.pad_id] for row in response.tolist()]
    repeated = [record for record in records for _ in range(n)]
    return Responses([record["query"] for record in repeated], [tokenizer.decode(row) for row in ids], ids, repeated)


def total(value: float | list[float] | None, function: RewardFunction) -> float:
    """Return a response's reward; rewards per token are summed."""
    if value is None:
        raise InputError(f"{function.name} returned None for a response, which can't be evaluated.")
    return sum(value) if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------------- 3. compare
def statistics(scores: dict[str, np.ndarray], inputs: Inputs) -> dict:
    """Return one policy's pass@k, the mean of each reward, and pass@1 by --by."""
    n, seed = inputs.args.num_samples, inputs.args.seed
    ks = [2**i for i in range(n.bit_length())]  # 1, 2, 4, ... up to n
    passed = passes(scores)
    at_k = {k: np.array([[pass_at_k(n, int(c), k)] for c in passed.sum(1)]) for k in ks}  # (queries, 1)
    return {
        "pass_at_k": {str(k): mean_and_interval(values, seed) for k, values in at_k.items()},
        "rewards": {name: mean_and_interval(values, seed) for name, values in scores.items()},
        "by": {value: float(passed[rows].mean()) for value, rows in inputs.groups.items()},
    }


def passes(scores: dict[str, np.ndarray]) -> np.ndarray:
    """Return a mask of the responses that pass, (queries, n): the first function returned 1."""
    return next(iter(scores.values())) == 1


def gains(scores: dict[str, dict[str, np.ndarray]], seed: int) -> dict[str, dict[str, dict]]:
    """Return each policy's gain over the first, paired by query: in pass@1 and in the mean of each reward."""
    measured = {name: {"pass@1": passes(columns).astype(float)} | columns for name, columns in scores.items()}
    first, *rest = measured
    return {
        name: {key: mean_and_interval(x - measured[first][key], seed) for key, x in measured[name].items()}
        for name in rest
    }


def mean_and_interval(values: np.ndarray, seed: int) -> dict:
    """Return the mean of values (queries, n) and its 95% interval over queries."""
    return {"mean": fmean(values.mean(1)), "interval": bootstrap_interval(values, seed)}


# ------------------------------------------------------------------------------------------------------------ 4. write
def write(result: dict, texts: dict[str, list[str]], scores: dict[str, dict[str, np.ndarray]], inputs: Inputs) -> dict:
    num_passed = {name: passes(columns).sum(1).tolist() for name, columns in scores.items()}
    samples = [
        {
            "query": record["query"],
            "reference": record.get("response"),
            "policies": {
                name: {"response": texts[name][i], "num_passed": num_passed[name][i]} for name in inputs.policies
            },
        }
        for i, record in enumerate(inputs.records)
    ]
    page = checked_report.page(result, samples[: inputs.args.num_report_samples], inputs.policies.values())
    return write_evaluation(inputs.args, result, page, {"samples.jsonl": samples})
