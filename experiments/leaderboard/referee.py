"""Run an entry in one world: sandbox, budget, evaluation by the gold score.

    python -m experiments.leaderboard.referee --world runs/leaderboard/public/1 --number 1 --budget 1024 \\
        --entry experiments/leaderboard/entries/rloo.py --out runs/leaderboard/row.json

The entry runs in a sandbox (nanorlhf/sandbox) that contains a copy of the world's data and initial policy, PyTorch, the
library, the kernels and the training scripts. It has no network. It has neither data/, with the public gold score, nor
the evaluation's queries, nor the reward model: that one is in this process, which scores responses on request and
counts them. This process takes from the entry only the weights of a policy and samples from it.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from experiments.leaderboard.labeller import gold_score, read_secret
from experiments.leaderboard.world import MAX_QUERY, MAX_RESPONSE
from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import Count, PositiveFloat, run_module
from nanorlhf.dataset import iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.evals import summaries
from nanorlhf.evals.scores import rm_scores
from nanorlhf.files import check_out, parse_json
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.recipes import recipes
from nanorlhf.sandbox.execution import (
    Worker,
    best_way,
    check_setup,
    finish,
    receive,
    start,
    temporary_directory,
    user_id,
)
from nanorlhf.sandbox.python_harness import send
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.run import write_json

ROOT = Path(__file__).resolve().parents[2]
# what an entry may import, besides installed packages
CODE = (
    "nanorlhf", "kernels", *(f"train_{name}.py" for name in ("sft", "rm", "ppo", "grpo", "dpo")),
    "experiments/__init__.py", *(f"experiments/leaderboard/{name}.py" for name in ("__init__", "world", "child")),
)  # fmt: skip
CONFIG = ("config.json", "tokenizer.json", "tokenizer_config.json")  # of a checkpoint
REPEATED = 64  # training rows that an entry's validation files repeat
MEASURED = ("gold_win_rate", "gold_score", "rm_score", "kl", "entropy", "distinct", "eos_rate", "response_length")


@dataclass(frozen=True, kw_only=True)
class Args:
    world: Path
    """directory of the world: data, sft, rm"""
    number: Count
    """number of the world, the seed of the entry and the evaluation"""
    entry: str
    """file of an entry; or sft, or best-of-N, which answers with the initial policy"""
    out: Path
    """file for the result, JSON"""
    budget: Count = 1024
    """responses that the reward model scores for the entry"""
    secret_file: Path | None = None
    """file with the secret of the secret set; None: the world is one of the public set"""
    minutes: PositiveFloat = 20
    """time limit; of processor time, twice as much"""
    memory_mib: Count = 6144
    """memory limit of all processes of the entry"""
    threads: Count = 1
    """threads of PyTorch, which an entry may change; with one, results don't depend on the number of cores"""
    num_queries: Count = 256
    """validation queries that the policy answers"""


class Refused(Exception):
    """An entry broke a rule, which the message names."""


# ------------------------------------------------------------------------------------------------- 1. the reward model
class Counter:
    """Score responses for an entry with the world's reward model, as long as its budget lasts."""

    def __init__(self, rm: Path, budget: int):
        self.rm, self.budget, self.num_scored = rm, budget, 0
        self.tokenizer = load_tokenizer(str(rm))

    @cached_property
    def model(self):
        return load_scalar(self.rm).requires_grad_(False)

    def answer(self, request: bytes) -> bytes:
        """Return the reply to `World.score`. Raises Refused for a request beyond the budget or one that isn't valid."""
        queries, responses = self.read(request)
        if self.num_scored + len(responses) > self.budget:
            raise Refused(
                f"budget: it asked for the scores of {self.num_scored + len(responses):,} responses instead of "
                f"{self.budget:,}"
            )
        self.num_scored += len(responses)
        pad_id = self.tokenizer.pad_id
        query = left_pad([self.tokenizer.encode(text) for text in queries], pad_id)  # (B, Q)
        response = right_pad(responses, pad_id)  # (B, T)
        return json.dumps({"scores": rm_scores(self.model, query, response, pad_id, 64)}).encode()

    def read(self, request: bytes) -> tuple[list[str], list[list[int]]]:
        """Parse a request; the entry may have written anything."""
        parsed = parse_json(request, "request")
        fields = parsed if isinstance(parsed, dict) else {}
        queries, responses = fields.get("queries"), fields.get("responses")
        if not (
            isinstance(queries, list) and isinstance(responses, list) and 0 < len(queries) == len(responses)
        ) or not all(isinstance(text, str) and text for text in queries):
            raise Refused("request: expected as many responses as queries, at least one, and queries that are texts")
        for ids in responses:
            if not isinstance(ids, list) or not 0 < len(ids) <= MAX_RESPONSE or not all(map(self.is_token, ids)):
                raise Refused(f"request: a response must have from 1 to {MAX_RESPONSE} token ids, without [PAD]")
        if any(len(self.tokenizer.encode(text)) > MAX_QUERY for text in queries):
            raise Refused(f"request: a query must have at most {MAX_QUERY} tokens")
        return queries, responses

    def is_token(self, number: object) -> bool:
        return type(number) is int and 0 <= number < self.tokenizer.vocab_size and number != self.tokenizer.pad_id


# ------------------------------------------------------------------------------------------------------ 2. the sandbox
def copy_world(world: Path, directory: Path) -> None:
    """Copy what an entry may see, without meta, which has gold scores, and without the evaluation's queries."""
    data = directory / "data"
    data.mkdir()
    (directory / "sft").mkdir()
    for name in ("model.safetensors", *CONFIG):  # samples.jsonl has queries of the evaluation
        shutil.copy(world / "sft" / name, directory / "sft")
    shutil.copy(world / "data/tokenizer.json", data)
    for name, fields in (("sft", ("query", "response")), ("comparisons", ("query", "chosen", "rejected"))):
        rows = [
            {field: row[field] for field in fields} for _, row in iter_jsonl(world / "data" / f"{name}.train.jsonl")
        ]
        write_jsonl(data / f"{name}.train.jsonl", rows)
        write_jsonl(data / f"{name}.validation.jsonl", rows[:REPEATED])


def give_to(directory: Path, uid: int | None) -> None:
    """Let the unprivileged user of the sandbox change these files."""
    if uid is not None:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, uid, uid)


@contextmanager
def sandbox() -> Iterator[Worker]:
    """Yield the worker of the sandbox. Raises InputError if this system can't restrict files and network."""
    way, supported = best_way()
    if way == "limits" and not all(supported.values()):
        raise InputError("this system can't restrict an entry's files and network: run the leaderboard on another one.")
    with temporary_directory() as box:
        yield Worker(0, box, way, set(), threading.Event(), ThreadPoolExecutor(1))


def train(args: Args, worker: Worker, counter: Counter) -> Path:
    """Run the entry and return its policy's weights. Raises Refused if it breaks a rule or fails."""
    entry, directory = Path(args.entry).resolve(), worker.box / "world"
    directory.mkdir()
    copy_world(args.world, directory)
    give_to(directory, user_id(worker))
    prefix = Path(sys.prefix).resolve()
    requests, requests_fd = os.pipe()
    replies_fd, replies = os.pipe()
    argv = [
        "/usr/bin/env", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", f"OMP_NUM_THREADS={args.threads}",
        "OMP_WAIT_POLICY=PASSIVE", str(prefix / "bin/python"), "-m", "experiments.leaderboard.child",
        "--entry", str(entry), "--directory", str(directory), "--seed", str(args.number),
        "--budget", str(args.budget), "--calls", str(requests_fd), "--replies", str(replies_fd),
    ]  # fmt: skip
    readonly: list[Path | str] = [prefix, sys.base_prefix, entry, *(ROOT / name for name in CODE)]
    seconds = 60 * args.minutes
    deadline = time.monotonic() + seconds
    started = start(
        worker, worker.box, argv, seconds, args.memory_mib, readonly, (directory,), (requests_fd, replies_fd)
    )  # fmt: skip
    os.close(requests_fd)
    os.close(replies_fd)
    ending = worker.watcher.submit(finish, worker, *started)
    refusal: Exception | None = None
    try:
        while True:
            send(replies, counter.answer(receive(requests, deadline)))
    except (EOFError, BrokenPipeError, TimeoutError):  # it ended, or it will be ended by the time limit
        pass
    except (Refused, InputError, ValueError) as error:  # ValueError: a message that is too long
        refusal = error
        started[0].terminate()
    finally:
        os.close(requests)
        os.close(replies)
        limit, status, output = ending.result()
    check_setup(limit)
    if refusal is not None:
        raise Refused(str(refusal))
    if limit:
        raise Refused({"timeout": f"time: more than {args.minutes:g} minutes"}.get(limit, limit))
    if status:
        raise Refused(f"error: {output.strip().splitlines()[-1] if output.strip() else f'exit status {status}'}")
    return directory / "policy/model.safetensors"


def take_policy(weights: Path, sft: Path, directory: Path) -> None:
    """Make a checkpoint of the entry's weights in the initial policy's shape; nothing else of it is used."""
    if weights.is_symlink() or weights.parent.is_symlink() or not weights.is_file():
        raise Refused("policy: train returned no policy")
    if weights.stat().st_size > 2 * (sft / "model.safetensors").stat().st_size:
        raise Refused("policy: it is larger than the initial policy")
    directory.mkdir()
    for name in CONFIG:
        shutil.copy(sft / name, directory)
    shutil.copy(weights, directory)


# --------------------------------------------------------------------------------------------------- 3. the evaluation
def evaluate(args: Args, policy: str, out: Path) -> dict[str, float | None]:
    """Measure a policy as `eval.py tiny` does, at the training temperature and with the world's own gold score."""
    settings = recipes("summaries", summaries.Args)["tiny"][1]
    sft = str(args.world / "sft")
    settings = replace(
        settings, data=args.world / "data", out=out, reward_model=str(args.world / "rm"), seed=args.number,
        policies=("sft", sft, *(() if policy == sft else ("entry", policy))), num_queries=args.num_queries,
        temperature=0.7, num_distinct_samples=4, device="cpu",
    )  # fmt: skip
    inputs = summaries.load(settings)
    assert inputs.gold is not None
    inputs.gold.function = gold_score(read_secret(args.secret_file), args.number)
    reference = summaries.measure_references(inputs)
    measured, _ = summaries.measure_policy("sft" if policy == sft else "entry", inputs, reference)
    return {name: measured.numbers[name] for name in MEASURED}


def main(args: Args) -> dict:
    check_out(args.out.parent)
    is_file = args.entry.endswith(".py")
    if is_file and not Path(args.entry).is_file():
        raise InputError(f"--entry {args.entry}: no such file.")
    counter = Counter(args.world / "rm", args.budget)
    began = time.monotonic()
    result: dict = {"refused": "", "seconds": 0.0}
    with sandbox() as worker:
        policy = str(args.world / "sft")
        if args.entry.startswith("best-of-"):
            policy = f"{args.entry}:{policy}"
        try:
            if is_file:
                weights = train(args, worker, counter)
                result["seconds"] = time.monotonic() - began
                policy = str(worker.box / "policy")
                take_policy(weights, args.world / "sft", worker.box / "policy")
                try:
                    result |= evaluate(args, policy, worker.box / "eval")
                except InputError as error:  # not finite, another shape
                    raise Refused(f"policy: {error}") from None
            else:
                result |= evaluate(args, policy, worker.box / "eval")
        except Refused as refusal:
            result["refused"] = str(refusal).replace(str(worker.box), "WORLD")
    result["num_scored"] = counter.num_scored
    write_json(args.out, result)
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_module(main, Args)
