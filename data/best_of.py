"""The best of a policy's answers to each query -> sft.jsonl: demonstrations for train_sft.py.

    python -m data.best_of --policy runs/tiny/sft --reward-model runs/tiny/rm --out runs/tiny/best_of
    python train_sft.py --model runs/tiny/sft --data runs/tiny/best_of --out runs/tiny/sft_best_of

This is rejection sampling as Llama 2 has it (Touvron et al. 2023) or, in turns with fine-tuning, expert iteration
(Anthony et al. 2017). The policy answers each query of sft.{train,validation}.jsonl --num-samples times; a reward
model, an ensemble or a rule scores the answers; the highest score wins. An answer without EOS, an empty one, and one
that is longer than --response-length when it is encoded again can't win; a query without any other is left out and
counted. A query that occurs twice in a file is answered once.

    sft.{train,validation}.jsonl   the winners; meta has the score, the mean score of all answers and their number
    best_of.json                   what the sampling cost: answers, their tokens, seconds, peak memory; written last

The references of --data are not copied: evaluate against those, with eval.py --data. The files depend on --seed but
not on --batch-size. What is sampled is kept in --out while it grows, and --resume goes on from there.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
from tqdm import tqdm

from data.prepare import LengthTable, check_out, jsonl_files, print_left_out
from data.sampling import SPLITS, load_policy, read_queries
from nanorlhf import launch
from nanorlhf.answers import sample_answers
from nanorlhf.cli import Fraction, NonNegativeFloat, PositiveInt, Range, Seed, check_ranges, run_module
from nanorlhf.dataset import field, response_ids, sampled_rows, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics.best_of import best_of_n_bound
from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches
from nanorlhf.reward import Ensemble, RewardModel, Rule, places
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from nanorlhf.training.checks import check_beside, check_ensemble
from nanorlhf.training.run import peak_resident_bytes, write_json

PARTIAL, COST = "best_of.partial.jsonl", "best_of.json"
QUERIES_AT_ONCE = 64  # answered before the winners are written; fixed, because the samples depend on it


@dataclass(frozen=True, kw_only=True)
class Args:
    policy: str = "runs/tiny/sft"
    """policy that answers: checkpoint directory or Hub id"""
    reward_model: str | tuple[str, ...] | None = "runs/tiny/rm"
    """scores the answers; several are an ensemble"""
    ensemble: Ensemble = "mean"
    """score of several reward models: mean, lowest, or mean - uncertainty coef * variance"""
    uncertainty_coef: NonNegativeFloat = 0.1
    """lambda of --ensemble uncertainty, per score unit"""
    reward: str | None = None
    """FILE.py:FUNCTION, a rule that scores instead: function(queries, responses), two lists of texts -> numbers"""
    data: Path = Path("runs/tiny/data")
    """directory of sft.{train,validation}.jsonl, whose queries are answered"""
    out: Path = Path("runs/tiny/best_of")
    """directory for the JSON Lines; existing files are replaced"""
    tokenizer: str | None = None
    """directory, file or Hub id (None: the policy's)"""
    num_queries: PositiveInt | None = None
    """queries per split, from the top of the file (None: all)"""
    num_validation_queries: PositiveInt | None = None
    """of the validation split (None: as many as --num-queries)"""
    num_samples: Annotated[int, Range("from 2 to a million", lambda x: 2 <= x <= 10**6)] = 16
    """answers per query, n of the best of n"""
    temperature: Annotated[float, Range("above 0, 100 at most", lambda x: 0 < x <= 100)] = 0.7
    """sampling temperature"""
    top_p: Fraction = 1.0
    """nucleus sampling: sample from the most likely tokens with this total probability (1: all tokens)"""
    response_length: Annotated[int, Range("at least 2", lambda x: x >= 2)] = 24
    """maximum tokens of an answer including EOS"""
    batch_size: PositiveInt = 64
    """answers sampled and scored at once; changes memory, not the result"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    seed: Seed = 1
    """fixes the samples"""
    resume: bool = False
    """go on with the sampling that --out holds"""
    overwrite: bool = False
    """start anew where --out holds a sampling that was interrupted"""


# ---------------------------------------------------------------------------------------------------- 1. the best of n
@torch.no_grad()
def best_answers(
    queries: dict[str, bool], policy: GPT, scheme: RewardModel, tokenizer: Tokenizer, args: Args, seed: int
) -> tuple[list[dict | None], int]:
    """The row of sft.jsonl for each query, None where no answer can win; and how many tokens were sampled."""
    ids = [tokenizer.encode(query, chat) for query, chat in queries.items()]
    query, response = sample_answers(
        policy, ids, tokenizer, args.num_samples, args.response_length, args.batch_size, seed, args.temperature,
        top_p=args.top_p,
    )  # fmt: skip
    pieces = zip(*(micro_batches(part, args.batch_size) for part in (query, response)), strict=True)
    scores = torch.cat([scheme.score([], q, r)[1].float() for q, r in pieces])  # (B * n,)
    if not scores.isfinite().all():
        raise InputError(f"{scheme.name} gave a score that is not finite: fix it.")
    samples = zip(response.tolist(), scores.tolist(), strict=True)
    groups = micro_batches(list(samples), args.num_samples)
    rows: list[dict | None] = []
    for (text, chat), group in zip(queries.items(), groups, strict=True):
        usable = ((score, answer) for ids, score in group if (answer := answer_text(text, ids, tokenizer, chat, args)))
        best = max(usable, key=lambda pair: pair[0], default=None)
        if best is None:
            rows.append(None)
            continue
        mean = fmean(score for _, score in group)
        meta = {"score": best[0], "mean_score": mean, "num_samples": len(group)}
        rows.append({"query": text, "response": best[1], **({"chat": True} if chat else {}), "meta": meta})
    return rows, int((response != tokenizer.pad_id).sum())


def answer_text(query: str, ids: list[int], tokenizer: Tokenizer, chat: bool, args: Args) -> str | None:
    """The text of sampled ids; None where it could not be a demonstration."""
    text = tokenizer.decode(ids).strip()
    if not text or tokenizer.eos_id not in ids:
        return None
    return text if len(response_ids(query, text, tokenizer, chat)) <= args.response_length else None


# ------------------------------------------------------------------------------------------------------------ 2. files
def begin_sampling(args: Args, path: Path) -> list[dict]:
    """Open the file of what is sampled; returns the parts that it holds already, if the sampling is resumed.

    Its first line holds the settings that the samples depend on; InputError where they differ.
    """
    if args.resume and not path.exists():
        raise InputError(f"--resume: {path} isn't there: start without --resume.")
    if path.exists() and not args.resume and not args.overwrite and path.read_bytes().count(b"\n") > 1:
        raise InputError(
            f"--out {args.out} holds an interrupted sampling: pass --resume, or --overwrite to start anew."
        )
    names = ("policy", "reward_model", "ensemble", "uncertainty_coef", "reward", "data", "tokenizer", "num_queries")
    names += ("num_validation_queries", "num_samples", "temperature", "top_p", "response_length", "seed")
    settings = {name: str(getattr(args, name)) for name in names}
    rows = sampled_rows(path, settings) if args.resume else []
    kinds = {"split": str, "rows": list, "num_tokens": int, "seconds": float}
    parts = [{name: field(row, name, kind, at) for name, kind in kinds.items()} for at, row in rows]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / COST).unlink(missing_ok=True)  # of winners that these replace
    write_jsonl(path, [settings, *parts])
    return parts


def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out)
    check_ensemble(args)
    if args.reward is None and args.reward_model is None:
        raise InputError("--reward-model None leaves nothing to score with: name a reward model or a --reward.")
    if args.out.resolve() == args.data.resolve():
        raise InputError(f"--out {args.out} is --data: the winners would replace the demonstrations: name another.")
    most = {"train": args.num_queries, "validation": args.num_validation_queries or args.num_queries}
    queries = {split: read_queries(args.data / f"sft.{split}.jsonl", most[split]) for split in SPLITS}
    device = launch.setup(args.device)
    tokenizer = load_tokenizer(args.tokenizer or args.policy)
    policy = load_policy(args, tokenizer, queries["train"] | queries["validation"], device)
    longest = max(len(tokenizer.encode(query, chat)) for of in queries.values() for query, chat in of.items())
    if args.reward is None:
        members = places(args.reward_model)
        for place in members:
            check_beside("--reward-model", place, tokenizer, longest + args.response_length, args.policy)
        scheme = RewardModel(members, tokenizer, device, args.ensemble, args.uncertainty_coef)
    else:
        scheme = Rule(args.reward, tokenizer)

    path = args.out / PARTIAL
    parts = begin_sampling(args, path)
    asked = [
        (split, number, dict(part))
        for split in SPLITS
        for number, part in enumerate(micro_batches(list(queries[split].items()), QUERIES_AT_ONCE))
    ]
    with path.open("a", encoding="ascii") as file, tqdm(total=len(asked), initial=len(parts), desc="parts") as progress:
        for split, number, some in asked[len(parts) :]:
            seed = int(np.random.default_rng((args.seed, SPLITS.index(split), number)).integers(2**63))
            start = time.perf_counter()
            rows, num_tokens = best_answers(some, policy, scheme, tokenizer, args, seed)
            seconds = time.perf_counter() - start
            parts.append({"split": split, "rows": rows, "num_tokens": num_tokens, "seconds": seconds})
            file.write(json.dumps(parts[-1]) + "\n")
            file.flush()
            progress.update()

    left_out = Counter("queries without an answer that ends" for part in parts for row in part["rows"] if row is None)
    found = {
        split: [row for part in parts if part["split"] == split for row in part["rows"] if row] for split in SPLITS
    }
    for split, rows in found.items():
        if not rows:
            path.unlink()  # to resume it would end here again
            raise InputError(
                f"--policy {args.policy}: none of its answers to the {len(queries[split])} {split} queries can win: "
                "nothing was written; raise --response-length, or train it longer."
            )
    lengths = LengthTable()
    with jsonl_files(args.out) as write:
        for split, rows in found.items():
            for row in rows:
                write(f"sft.{split}", row)
                of_query = tokenizer.encode(row["query"], "chat" in row)
                of_response = response_ids(row["query"], row["response"], tokenizer, "chat" in row)
                lengths.add(f"sft.{split}", len(of_query), response=len(of_response))
    n = args.num_samples
    cost = {
        "num_answers": n * sum(map(len, queries.values())),
        **{name: sum(part[name] for part in parts) for name in ("num_tokens", "seconds")},
        "peak_resident_bytes": peak_resident_bytes(),
    }
    write_json(args.out / COST, cost)
    path.unlink()  # what was sampled is only done with once the winners are there

    for split, rows in found.items():
        best, mean = (fmean(row["meta"][name] for row in rows) for name in ("score", "mean_score"))
        print(f"{split}: {len(rows):,} queries, mean score of the best of {n}: {best:.3f}, of all answers: {mean:.3f}")
    print(f"the best of {n} is at most {best_of_n_bound(n):.2f} nats from the policy")
    print_left_out(left_out)
    print(f"\n{lengths}\n\nwritten: {args.out}: sft of {' and '.join(SPLITS)}")


if __name__ == "__main__":
    run_module(main, Args)
