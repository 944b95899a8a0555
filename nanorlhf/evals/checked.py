"""Answers that a program checks: how many of n samples per query pass, pass@k, and what else can be counted.

In: sft.validation.jsonl, whose rows hold what the functions of --rewards ask for. Out: pass@k of the first function (a
response passes where it returns 1), the mean of the others, by 95% intervals over queries; the same by a field of the
rows. samples.jsonl has how many samples of each query passed, and one of them.
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


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data, and the functions that check responses."""

    args: Args
    device: torch.device
    policies: dict[str, str]  # name -> place
    tokenizer: Tokenizer
    rows: list[Demonstration]
    functions: dict[str, RewardFunction]  # the first says whether a response passes
    groups: dict[str, np.ndarray]  # value of --by -> True for its rows

    @property
    def records(self) -> list[dict]:
        return [row.record for row in self.rows]


def main(args: Args) -> dict:
    inputs = load(args)
    texts: dict[str, list[str]] = {}  # policy -> its first response to each query
    scores: dict[str, dict[str, np.ndarray]] = {}  # policy -> reward -> (queries, n)
    results = {}
    for name, place in Progress(inputs.policies.items(), desc="policies"):
        response = answers(place, inputs)
        texts[name], scores[name] = measure(response, inputs)
        results[name] = statistics(scores[name], inputs) | endings(response, inputs.tokenizer)
    result = {
        "args": settings_of(args),
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
    groups = groups_of(rows, args.by)
    return Inputs(
        args=args, device=device, policies=policies, tokenizer=tokenizer, rows=rows, functions=functions, groups=groups
    )  # fmt: skip


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


# ------------------------------------------------------------------------------------------- 2. responses and scores
def answers(place: str, inputs: Inputs) -> Tensor:
    """n responses to each query, (queries * n, T); a function, so that a policy is gone before the next is loaded."""
    args = inputs.args
    policy = load_policy(place, inputs.rows, inputs.tokenizer, args, inputs.device)
    _, response = sample(
        policy, inputs.rows, inputs.tokenizer, args, args.num_samples, temperature=args.temperature
    )  # fmt: skip
    return response


def measure(response: Tensor, inputs: Inputs) -> tuple[list[str], dict[str, np.ndarray]]:
    """The first response to each query as text, and what each function gives, (queries, n)."""
    n = inputs.args.num_samples
    given = responses_of(response, inputs.records, inputs.tokenizer, n)
    scores = {
        name: np.array([total(value, function) for value in function(given)]).reshape(-1, n)
        for name, function in inputs.functions.items()
    }
    return given.responses[::n], scores


def responses_of(response: Tensor, records: list[dict], tokenizer: Tokenizer, n: int) -> Responses:
    """What reward functions read; response (queries * n, T), the n of a query consecutive."""
    ids = [[i for i in row if i != tokenizer.pad_id] for row in response.tolist()]
    repeated = [record for record in records for _ in range(n)]
    return Responses([record["query"] for record in repeated], [tokenizer.decode(row) for row in ids], ids, repeated)


def total(value: float | list[float] | None, function: RewardFunction) -> float:
    """The reward of a response, the sum of those per token."""
    if value is None:
        raise InputError(f"{function.name}: it returned None for a response, so there is nothing to evaluate.")
    return sum(value) if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------------- 3. compare
def statistics(scores: dict[str, np.ndarray], inputs: Inputs) -> dict:
    """One policy: pass@k, the mean of each reward, and pass@1 by --by."""
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
    """Which responses pass, (queries, n): those to which the first function gives 1."""
    return next(iter(scores.values())) == 1


def gains(scores: dict[str, dict[str, np.ndarray]], seed: int) -> dict[str, dict[str, dict]]:
    """What each policy has more than the first, query by query: pass@1 and the mean of each reward."""
    measured = {name: {"pass@1": passes(columns).astype(float)} | columns for name, columns in scores.items()}
    first, *others = measured
    return {
        name: {key: mean_and_interval(x - measured[first][key], seed) for key, x in measured[name].items()}
        for name in others
    }


def mean_and_interval(values: np.ndarray, seed: int) -> dict:
    """Of values (queries, n), with the 95% interval over queries."""
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
