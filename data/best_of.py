"""Best-of-n sampling: a policy's best answer to each query -> sft.jsonl, demonstrations for train_sft.py.

    python -m data.best_of --policy runs/tiny/sft --reward-model runs/tiny/rm --out runs/tiny/best_of
    python train_sft.py --model runs/tiny/sft --data runs/tiny/best_of --out runs/tiny/sft_best_of

This is rejection sampling as in Llama 2 (Touvron et al. 2023) or, alternated with fine-tuning, expert iteration
(Anthony et al. 2017). The policy samples --num-samples answers to each distinct query of sft.{train,validation}.jsonl;
a reward model, an ensemble or a rule scores them, and the highest score wins. An answer can't win if it has no EOS, is
empty, or is longer than --response-length when re-encoded; a query without a usable answer is skipped.

    sft.{train,validation}.jsonl   the winners; meta has the score, the mean score of all answers and their number
    best_of.json                   the cost of sampling: answers, their tokens, seconds, peak memory; written last

The references in --data are not copied: evaluate against them with eval.py --data. The files depend on --seed but not
on --batch-size. Finished samples are kept in --out, and --resume continues from there.
"""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import numpy as np
import torch

from data.prepare import converted_files
from data.sampling import SPLITS, SamplingArgs, load_policy, longest_query, read_queries
from nanorlhf import launch
from nanorlhf.batch import Batch
from nanorlhf.cli import FiniteFloat, Fraction, NumWorkers, PositiveInt, Range, check_ranges, run_module
from nanorlhf.dataset import Demonstration, field, iter_jsonl, response_ids, sampled_rows, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, to_json
from nanorlhf.generate import sample_answers
from nanorlhf.metrics.best_of import best_of_n_bound
from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches
from nanorlhf.progress import Progress
from nanorlhf.rewards.weighted_sum import Rewards, load_rewards, scoring_models
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from nanorlhf.training.checks import check_other_model, check_reward
from nanorlhf.training.run import peak_resident_bytes, write_json

PARTIAL, COST = "best_of.partial.jsonl", "best_of.json"
QUERIES_AT_ONCE = 64  # answered before the winners are saved; fixed, because the samples depend on it


@dataclass(frozen=True, kw_only=True)
class Args(SamplingArgs):
    policy: str = "runs/tiny/sft"
    """policy to sample answers from: checkpoint directory or Hub id"""
    reward_model: str | tuple[str, ...] | None = "runs/tiny/rm"
    """reward model that scores the answers; several paths: an ensemble"""
    reward: str | tuple[str, ...] | None = None
    """replaces --reward-model; one or more of: FILE.py:FUNCTION, a reward model's directory, judge:FILE.toml"""
    reward_weights: Literal["mean", "min", "uncertainty"] | tuple[FiniteFloat, ...] | None = None
    """how several scores become one: a weight for each (None: 1); for several reward models their mean (None), min, or
    uncertainty, mean - 0.1 * variance"""
    reward_workers: NumWorkers = 0
    """processes that call the functions of --reward; 0: this one"""
    data: Path = Path("runs/tiny/data")
    """directory of sft.{train,validation}.jsonl with the queries"""
    out: Path = Path("runs/tiny/best_of")
    """directory for the JSON Lines; existing files are replaced"""
    num_validation_queries: PositiveInt | None = None
    """queries of the validation split (None: same as --num-queries)"""
    num_samples: Annotated[int, Range("from 2 to a million", lambda x: 2 <= x <= 10**6)] = 16
    """answers per query, the n of best-of-n"""
    temperature: Annotated[float, Range("above 0, 100 at most", lambda x: 0 < x <= 100)] = 0.7
    """sampling temperature"""
    top_p: Fraction = 1.0
    """nucleus sampling: sample from the most likely tokens with this total probability (1: all tokens)"""
    response_length: Annotated[int, Range("at least 2", lambda x: x >= 2)] = 24
    """maximum tokens of an answer including EOS"""
    resume: bool = False
    """continue an interrupted run in --out"""
    overwrite: bool = False
    """replace an interrupted run in --out"""


# ---------------------------------------------------------------------------------------------------- 1. the best of n
@torch.no_grad()
def best_answers(
    queries: dict[str, bool], records: dict[str, dict], policy: GPT, reward: Rewards, tokenizer: Tokenizer, args: Args,
    seed: int,
) -> tuple[list[dict | None], int]:  # fmt: skip
    """Return a row of sft.jsonl for each query, None if no answer can win, and the number of sampled tokens.

    records: query -> its row, with the fields for reward functions
    """
    ids = [tokenizer.encode(query, chat) for query, chat in queries.items()]
    query, response = sample_answers(
        policy, ids, tokenizer, args.num_samples, args.response_length, args.batch_size, seed, args.temperature,
        top_p=args.top_p,
    )  # fmt: skip
    repeated = [records[text] for text in queries for _ in range(args.num_samples)]
    no_logprobs = torch.zeros_like(response, dtype=torch.float32)
    batch = Batch.of(repeated, query, response, no_logprobs, tokenizer.eos_id, tokenizer.pad_id, "last_token")
    scores, token_rewards = reward.score(batch)
    scores = scores + token_rewards.sum(1)  # (B * n,)
    if not scores.isfinite().all():
        raise InputError(f"{reward.name} returned a score that is not finite.")
    samples = zip(response.tolist(), scores.tolist(), strict=True)
    groups = micro_batches(list(samples), args.num_samples)
    rows: list[dict | None] = []
    for (text, chat), group in zip(queries.items(), groups, strict=True):
        answers = ((score, answer_text(text, ids, tokenizer, chat, args.response_length)) for ids, score in group)
        usable = ((score, answer) for score, answer in answers if answer is not None)
        best = max(usable, key=lambda pair: pair[0], default=None)
        if best is None:
            rows.append(None)
            continue
        mean = fmean(score for _, score in group)
        meta = {"score": best[0], "mean_score": mean, "num_samples": len(group)}
        rows.append({"query": text, "response": best[1], **({"chat": True} if chat else {}), "meta": meta})
    return rows, int((response != tokenizer.pad_id).sum())


def rows_by_query(path: Path) -> dict[str, dict]:
    """Return the rows of a file by query; if queries repeat, the last one counts."""
    return {record["query"]: record for _, record in iter_jsonl(path)}


def answer_text(query: str, ids: list[int], tokenizer: Tokenizer, chat: bool, response_length: int) -> str | None:
    """Decode sampled ids; None if the text can't be a demonstration."""
    text = tokenizer.decode(ids).strip()
    if not text or tokenizer.eos_id not in ids:
        return None
    return text if len(response_ids(query, text, tokenizer, chat)) <= response_length else None


# ------------------------------------------------------------------------------------------------------------ 2. files
def begin_sampling(args: Args, path: Path) -> list[dict]:
    """Start the file of samples, or with --resume check it; return the chunks that it already has.

    Its first line has the settings that determine the samples. Raises InputError if they differ.
    """
    if args.resume and not path.exists():
        raise InputError(f"--resume: {path} does not exist.")
    if path.exists() and not args.resume and not args.overwrite and path.read_bytes().count(b"\n") > 1:
        raise InputError(f"--out {args.out} has an interrupted run: pass --resume or --overwrite.")
    names = ("policy", "reward_model", "reward", "reward_weights", "data", "tokenizer", "num_queries")
    names += ("num_validation_queries", "num_samples", "temperature", "top_p", "response_length", "seed")
    settings = {name: str(getattr(args, name)) for name in names}
    rows = sampled_rows(path, settings) if args.resume else []
    kinds = {"split": str, "rows": list, "num_tokens": int, "seconds": float}
    chunks = [{name: field(row, name, kind, where) for name, kind in kinds.items()} for where, row in rows]
    (args.out / COST).unlink(missing_ok=True)  # belongs to winners that will be replaced
    write_jsonl(path, [settings, *chunks])
    return chunks


def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out)
    check_reward(args.reward_model, args.reward, args.reward_weights)
    if any(kind is GPT for _, _, kind in scoring_models(args.reward, args.reward_model)):
        raise InputError("--reward teacher only works in training: pass a reward model or a function.")
    if args.out.resolve() == args.data.resolve():
        raise InputError(f"--out {args.out} is --data: the winners would overwrite the demonstrations.")
    most = {"train": args.num_queries, "validation": args.num_validation_queries or args.num_queries}
    queries = {split: read_queries(args.data / f"sft.{split}.jsonl", most[split]) for split in SPLITS}
    device = launch.setup(args.device)
    tokenizer = load_tokenizer(args.tokenizer or args.policy)
    policy = load_policy(args.policy, tokenizer, device)
    longest = longest_query(queries, tokenizer, args.response_length, policy, args.policy)
    for flag, model_path, _ in scoring_models(args.reward, args.reward_model):
        check_other_model(flag, model_path, tokenizer, longest + args.response_length, args.policy)
    records = {split: rows_by_query(args.data / f"sft.{split}.jsonl") for split in SPLITS}
    reward = load_rewards(
        args.reward, args.reward_model, args.reward_weights, tokenizer, device, args.batch_size,
        workers=args.reward_workers, rows=[Demonstration([], [], record) for record in records["train"].values()],
    )  # fmt: skip

    path = args.out / PARTIAL
    chunks = begin_sampling(args, path)
    to_answer = [
        (split, number, dict(chunk))
        for split in SPLITS
        for number, chunk in enumerate(micro_batches(list(queries[split].items()), QUERIES_AT_ONCE))
    ]
    progress = Progress(total=len(to_answer), initial=len(chunks), desc="chunks")
    with path.open("a", encoding="ascii") as file, progress:
        for split, number, chunk_queries in to_answer[len(chunks) :]:
            seed = int(np.random.default_rng((args.seed, SPLITS.index(split), number)).integers(2**63))
            start = time.perf_counter()
            rows, num_tokens = best_answers(chunk_queries, records[split], policy, reward, tokenizer, args, seed)
            seconds = time.perf_counter() - start
            chunks.append({"split": split, "rows": rows, "num_tokens": num_tokens, "seconds": seconds})
            file.write(to_json(chunks[-1]) + "\n")
            file.flush()
            progress.update()

    rows_by_split: dict[str, list[dict]] = {split: [] for split in SPLITS}
    skipped: Counter[str] = Counter()
    for chunk in chunks:
        for row in chunk["rows"]:
            if row is None:
                skipped["queries without a usable answer"] += 1
            else:
                rows_by_split[chunk["split"]].append(row)
    for split, rows in rows_by_split.items():
        if not rows:
            path.unlink()  # a resumed run would fail here again
            raise InputError(
                f"--policy {args.policy}: no usable answer to any of the {len(queries[split])} {split} queries; "
                "nothing was written. Raise --response-length, or train the policy longer."
            )
    with converted_files(args.out, args.policy, tokenizer, skipped) as write:
        for split, rows in rows_by_split.items():
            for row in rows:
                write(split, row, "--response-length", args.response_length)
    n = args.num_samples
    cost = {
        "num_answers": n * sum(map(len, queries.values())),
        "num_tokens": sum(chunk["num_tokens"] for chunk in chunks),
        "seconds": sum(chunk["seconds"] for chunk in chunks),
        "peak_resident_bytes": peak_resident_bytes(),
    }
    write_json(args.out / COST, cost)
    path.unlink()  # the samples are needed until the winners are written

    for split, rows in rows_by_split.items():
        best, mean = (fmean(row["meta"][name] for row in rows) for name in ("score", "mean_score"))
        print(f"{split}: {len(rows):,} queries; mean score: best of {n} {best:.3f}, all answers {mean:.3f}")
    print(f"KL(best of {n} || policy) is at most {best_of_n_bound(n):.2f} nats")


if __name__ == "__main__":
    run_module(main, Args)
