"""RLCF's evaluation: sample several programs per problem at several temperatures, compile and run them.

In: code.test.jsonl, problems with tests. Out: pass@k, exec@k and comp@k, verdicts, and compiler errors.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.cli import Count, Fraction, PositiveInt, Seconds, TemperatureOrGreedy, Workers
from nanorlhf.dataset import Demonstration, load_programs
from nanorlhf.errors import InputError
from nanorlhf.evals.model_loading import common_tokenizer, load_policy
from nanorlhf.evals.scores import endings
from nanorlhf.evals.settings import PolicyArgs, begin, named_policies
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.generate import sample_answers
from nanorlhf.metrics import bootstrap_interval, pass_at_k
from nanorlhf.padding import micro_batches
from nanorlhf.progress import Progress
from nanorlhf.rlcf import program_report
from nanorlhf.rlcf.compilers import Diagnostic, first_error
from nanorlhf.rlcf.discriminator import Discriminator, load_discriminator
from nanorlhf.rlcf.error_profile import error_category, error_profile
from nanorlhf.rlcf.feedback import compiler_for, make_programs
from nanorlhf.sandbox.execution import Verdict, isolation, make_program, run_programs
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.supervised import autocast

SUCCESSES = {"pass": "passed", "exec": "executed", "comp": "compiled"}  # criterion of success -> field of a verdict
Texts = dict[tuple[str, float], list[str]]  # (policy, temperature) -> n responses per problem, one after the other


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    curves: tuple[str, ...] = ()
    """more run directories whose training curves the report shows, e.g. for an ablation"""
    discriminator: str | None = None
    """checkpoint directory; shows D(x, y', y) next to each sample y' for a problem with a written program y"""
    num_samples: Count
    """responses per problem and temperature"""
    ks: tuple[PositiveInt, ...]
    """k in pass@k, exec@k and comp@k, ascending; at most --num-samples"""
    temperatures: tuple[TemperatureOrGreedy, ...] = (0.2, 0.6, 0.8)
    """sampling temperatures, ascending; the report shows the best one; 0 is greedy"""
    top_p: Fraction = 0.95
    """nucleus sampling: the likeliest tokens that together reach this probability; 1: all"""
    cut_queries: bool = False
    """cut longer queries to their last --max-query-length tokens; otherwise they are an error"""
    timeout: Seconds = 10.0
    """seconds of wall clock that a program may run"""
    workers: Workers = 8
    """programs compiled and run in parallel"""
    weak_isolation: bool = False
    """run programs even if the system can't restrict their files or network"""
    error_prone_jar: str | None = None
    """ErrorProne's jars as a class path: its errors count in the error profile, as in training"""
    num_resamples: Count = 2000
    """bootstrap resamples of the problems, for the 95% intervals"""


@dataclass(frozen=True)
class Outcome:
    """Results of checking and running a response."""

    diagnostics: list[Diagnostic]  # from the static checks of its program
    verdict: Verdict  # from running its program with the tests
    span: tuple[int, int]  # [start, end) of the response in its program, in characters
    score: float | None = None  # D(x, y', y), the discriminator's comparison with the written program

    @cached_property
    def error(self) -> Diagnostic | None:
        return first_error(self.diagnostics, *self.span)


Outcomes = dict[tuple[int, str], Outcome]  # (index of the problem, response) -> its outcome


def main(args: Args) -> dict:
    device = begin(args)
    check(args)
    policies = named_policies(args.policies)
    tokenizer = common_tokenizer(args.tokenizer, policies.values())
    rows = load_problems(args, tokenizer)
    language = rows[0].record["language"]
    check_machine(language, args)
    discriminator = load_discriminator(args.discriminator, device) if args.discriminator is not None else None

    texts: Texts = {}
    results: dict[str, dict] = {}  # by policy
    for name, path in Progress(policies.items(), desc="policies"):
        num_parameters, responses = answers(path, rows, tokenizer, args, device)
        results[name] = {"parameters": num_parameters, "at_k": [], "temperatures": []}
        for temperature, response in responses.items():
            texts[name, temperature] = [tokenizer.decode(ids) for ids in response.tolist()]
            results[name]["temperatures"].append({"temperature": temperature, **endings(response, tokenizer)})

    outcomes = check_and_run(texts, rows, args)
    if discriminator is not None:
        with autocast(args.dtype, device):
            add_scores(outcomes, [row.record for row in rows], discriminator, args.batch_size)
    differences = add_statistics(results, texts, outcomes, args)
    result = {
        "policies": results,
        "differences": differences,  # from the first policy
        "num_problems": len(rows),
        "problems": digest(rows),
        "query_lengths": [len(row.query) for row in rows],
        "language": language,
        "num_programs": len(outcomes),
        "isolation": isolation(),
        "args": json_settings(args),
    }
    return write(result, policies, rows, texts, outcomes, args)


# ------------------------------------------------------------------------------------------ 1. problems and the sandbox
def check(args: Args) -> None:
    check_ascending("ks", args.ks)
    check_ascending("temperatures", args.temperatures)
    k, n = args.ks[-1], args.num_samples
    if k > n:
        raise InputError(f"--ks {k} exceeds --num-samples {n}: there must be at least k samples per problem.")


def check_ascending(flag: str, values: tuple[float, ...]) -> None:
    if not values or list(values) != sorted(set(values)):
        raise InputError(f"--{flag} {' '.join(map(str, values))}: expected at least one value, distinct and ascending.")


def load_problems(args: Args, tokenizer: Tokenizer) -> list[Demonstration]:
    path, longest = args.data / "code.test.jsonl", args.max_query_length
    limit = None if args.cut_queries else longest
    rows = list(load_programs(path, tokenizer, limit, None, needs_response=False)[: args.num_queries])
    if args.cut_queries:  # the program keeps the whole query
        num_cut = sum(len(row.query) > longest for row in rows)
        print(f"{num_cut} of {len(rows)} queries cut to their last {longest} tokens")
        rows = [replace(row, query=row.query[-longest:]) for row in rows]
    for number, row in enumerate(rows, start=1):
        if not row.record["tests"].strip():
            raise InputError(f"{path}:{number}: the field 'tests' is empty: fill it in or delete the line.")
    return rows


def digest(rows: list[Demonstration]) -> str:
    """Return a hash of the problems' texts and tests, which is the same for every tokenizer."""
    texts = [[row.record["query"], row.record["tests"]] for row in rows]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def check_machine(language: str, args: Args) -> None:
    """Print how programs are isolated. Fail now, not after hours of sampling, if none can run or a jar is missing."""
    print("programs run isolated from this machine\n" + "\n".join(f"  {sentence}" for sentence in isolation()))
    run_programs([], language, weak_isolation=args.weak_isolation)
    compiler_for(language, args.error_prone_jar).close()


# ------------------------------------------------------------------------------------------ 2. responses and outcomes
def answers(
    path: str, rows: list[Demonstration], tokenizer: Tokenizer, args: Args, device: torch.device
) -> tuple[int, dict[float, Tensor]]:
    """Return the policy's number of parameters, and temperature -> n responses per problem (problems * n, T).

    A function of its own so that a policy is freed before the next one is loaded.
    """
    policy = load_policy(path, rows, tokenizer, args, device)
    queries = [row.query for row in rows]
    responses = {}
    with autocast(args.dtype, device), distributed.on_device(policy):
        for temperature in args.temperatures:
            _, responses[temperature] = sample_answers(
                policy, queries, tokenizer, args.num_samples, args.response_length, args.batch_size, args.seed,
                temperature=temperature, top_p=args.top_p,
            )  # fmt: skip
    return sum(parameter.numel() for parameter in policy.parameters()), responses


def check_and_run(texts: Texts, rows: list[Demonstration], args: Args) -> Outcomes:
    """Compile and execute each distinct response to each problem once.

    Responses that fail the static checks are executed too: this costs 13 ms of compilation, and a program that is
    incomplete without its tests may be complete with them.
    """
    n, language = args.num_samples, rows[0].record["language"]
    distinct = [*dict.fromkeys((i // n, text) for column in texts.values() for i, text in enumerate(column))]
    programs, spans = make_programs([rows[i].record for i, _ in distinct], [text for _, text in distinct])
    diagnostics = []
    with compiler_for(language, args.error_prone_jar, args.workers) as compiler:
        size = args.batch_size
        for start in Progress(range(0, len(programs), size), desc="static checks", unit=" batches", leave=False):
            diagnostics += compiler.check(programs[start : start + size], spans[start : start + size])
    tested = [make_program(rows[i].record, text) for i, text in distinct]
    verdicts = run_programs(tested, language, args.timeout, args.workers, weak_isolation=args.weak_isolation)
    return dict(zip(distinct, map(Outcome, diagnostics, verdicts, spans), strict=True))


@torch.no_grad()
def add_scores(outcomes: Outcomes, records: list[dict], discriminator: Discriminator, batch_size: int) -> None:
    """Add D(x, y', y) to the outcomes of problems with a written program, as in figures 1 and 14 of the paper."""
    known = [key for key in outcomes if records[key[0]]["response"]]
    for batch in Progress(micro_batches(known, batch_size), desc="discriminator", unit=" batches", leave=False):
        scores = discriminator.compare_pairs([(records[i], text) for i, text in batch])
        for key, score in zip(batch, scores.tolist(), strict=True):
            outcomes[key] = replace(outcomes[key], score=score)


# ------------------------------------------------------------------------------------------------------ 3. statistics
def add_statistics(
    results: dict[str, dict], texts: Texts, outcomes: Outcomes, args: Args
) -> dict[str, dict[str, dict]]:
    """Add statistics to each policy's results; return the gains over the first policy at the smallest k."""
    first: dict[str, np.ndarray] = {}  # successes of the first policy, (problems, 1)
    differences: dict[str, dict] = {}
    for name, row in results.items():
        values = []  # one entry per temperature
        for at in row["temperatures"]:
            column = [outcomes[i // args.num_samples, text] for i, text in enumerate(texts[name, at["temperature"]])]
            numbers, successes = statistics(column, args)
            at |= numbers
            values.append(successes)
        row["at_k"] = best_at_k(values, args)
        best = values[args.temperatures.index(row["at_k"][0]["temperature"])]
        at_first_k = {success: by_problem[:, [0]] for success, by_problem in best.items()}
        if first:
            gains = {success: by_problem - first[success] for success, by_problem in at_first_k.items()}
            differences[name] = {
                success: {"mean": float(gain.mean()), "ci": bootstrap_interval(gain, args.seed, args.num_resamples)}
                for success, gain in gains.items()
            }
        first = first or at_first_k
    return differences


def statistics(column: list[Outcome], args: Args) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the statistics of one policy at one temperature, and success -> (problems, K), one column per k.

    column: n outcomes per problem.
    """
    values, n = {}, args.num_samples
    scores = [outcome.score for outcome in column if outcome.error is None and outcome.score is not None]
    for success, attribute in SUCCESSES.items():
        counts = (
            np.array([getattr(outcome.verdict, attribute) for outcome in column]).reshape(-1, n).sum(1)
        )  # (problems,)
        values[success] = np.array([[pass_at_k(n, int(c), k) for k in args.ks] for c in counts])
    return {
        **{f"{success}_at_k": by_problem.mean(0).tolist() for success, by_problem in values.items()},
        "num_passed": np.array([outcome.verdict.passed for outcome in column]).reshape(-1, n).sum(1).tolist(),
        "reasons": dict(Counter(outcome.verdict.reason for outcome in column)),
        "errors": error_profile([outcome.diagnostics for outcome in column], [outcome.span for outcome in column]),
        "compile_rate": fmean(outcome.error is None for outcome in column),
        "discriminator": fmean(scores) if scores else None,  # over programs without an error, as in training
    }, values


def best_at_k(values: list[dict[str, np.ndarray]], args: Args) -> list[dict]:
    """[RLCF evaluation] Return, for each k, the temperature with the best pass@k, and exec@k and comp@k there.

    values: per temperature, success -> (problems, K). In a tie the lower temperature wins. Values are compared to 9
    digits, since the 17th depends on summation order.
    """
    rows = []
    for j, k in enumerate(args.ks):
        passes = [round(float(by_success["pass"][:, j].mean()), 9) for by_success in values]
        best = passes.index(max(passes))
        row: dict = {"k": k, "temperature": args.temperatures[best]}
        for success, by_problem in values[best].items():
            row[success] = float(by_problem[:, j].mean())
            row[f"{success}_ci"] = bootstrap_interval(by_problem[:, [j]], args.seed, args.num_resamples)
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------- 4. output
def write(
    result: dict, policies: dict[str, str], rows: list[Demonstration], texts: Texts, outcomes: Outcomes, args: Args
) -> dict:
    records, n = [row.record for row in rows], args.num_samples
    tasks = [str(record.get("meta", {}).get("task_id", number)) for number, record in enumerate(records, start=1)]

    def sample(name: str, temperature: float, index: int) -> dict:
        """Return a row of samples.jsonl."""
        problem, text = index // n, texts[name, temperature][index]
        row = {"task": tasks[problem], "policy": name, "temperature": temperature, "response": text}
        return row | described(outcomes[problem, text], len(text), result["language"])

    samples = (sample(name, t, index) for (name, t), column in texts.items() for index in range(len(column)))
    best = {name: row["at_k"][0]["temperature"] for name, row in result["policies"].items()}
    cards = [
        {
            "task": tasks[problem],
            "query": record["query"],
            "policies": {name: sample(name, temperature, problem * n) for name, temperature in best.items()},
        }
        for problem, record in enumerate(records[: args.num_report_samples])
    ]
    runs = {path: name for name, path in policies.items()}
    for path in args.curves:
        runs.setdefault(path, Path(path).name or path)
    return write_evaluation(args, result, program_report.page(result, runs, cards), {"samples.jsonl": samples})


def described(outcome: Outcome, length: int, language: str) -> dict:
    """Return an outcome as written to samples.jsonl. The blamed span is in characters of the response, or its end if
    the error is outside.
    """
    (start, end), verdict, error = outcome.span, outcome.verdict, None
    if outcome.error is not None:
        inside = start <= outcome.error.last < end
        error = {
            "category": error_category(outcome.error),
            "message": outcome.error.message,
            "start": max(outcome.error.start - start, 0) if inside else length,
            "end": outcome.error.end - start if inside else length,
        }
    output_lines = verdict.output.strip().splitlines() or [""]
    return {
        **{name: getattr(verdict, name) for name in ("compiled", "executed", "passed", "reason")},
        "output": output_lines[0] if language == "java" else output_lines[-1],  # the line with the exception
        "error": error,
        "discriminator": outcome.score,
    }
