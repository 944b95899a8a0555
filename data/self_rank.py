"""A policy's own answers, ranked without people -> comparisons for a reward model. [STR]

    python -m data.self_rank --policy runs/str/sft --data runs/str/data --out runs/str/data
    python -m data.self_rank --policy runs/str/sft --data runs/str/data --out runs/str/quiet --noise 0

The queries of sft.{train,validation}.jsonl are answered --num-samples times each. Then, question by question:

    1. a sentence encoder makes vectors of the answers, their cosines are the edges of a graph, and TextRank says which
       answers are most like all others
    2. ISODATA sorts the answers into kinds; the one nearest to the centre of each represents it
    3. every representative is preferred to those at least --interval ranks below it
    4. some of the worse answers get noise: a few words changed, a negation more or less, or sentences shuffled

    comparisons.{train,validation}.jsonl   the pairs; meta has the ranks, clusters and weights of the two, which of the
                                           samples they are, and the kind of noise
    self_rank.{train,validation}.jsonl     {"query", "answers", "weights", "clusters", "representatives"}: the samples
                                           of a question, and the indices of its representatives, the best first

Equal answers stay: being given often is a vote. Empty ones are left out and counted, questions with answers of one kind
make no pair, and noise that would make the two answers of a pair equal is left off. A query that stands twice in a file
is asked once. What is written depends on --seed and not on --batch-size. train_rm.py reads sft.train.jsonl beside the
comparisons: where --out is another directory than --data, copy it there.
"""

import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data.prepare import jsonl_files, length_table
from nanorlhf import distributed
from nanorlhf.answers import sample_answers
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import run_module
from nanorlhf.dataset import field, iter_jsonl, response_ids
from nanorlhf.encoder import Encoder, load_encoder
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches
from nanorlhf.selfrank.isodata import isodata
from nanorlhf.selfrank.noise import add_noise
from nanorlhf.selfrank.ranked import Ranked, embed
from nanorlhf.selfrank.text_rank import DECIMALS, rank_order, text_rank
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer

SPLITS = ("train", "validation")
QUESTIONS_AT_ONCE = 1024  # whose answers are held in memory; fixed, as the samples depend on it


@dataclass(frozen=True, kw_only=True)
class Args:
    policy: str = "runs/str/sft"
    """that answers: checkpoint directory or Hub id"""
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """of sentences: directory or Hub id"""
    data: Path = Path("runs/str/data")
    """directory of sft.{train,validation}.jsonl, whose queries are answered"""
    out: Path = Path("runs/str/data")
    """directory of the JSON Lines; files of the same name are replaced"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the policy's"""
    num_queries: int | None = None
    """of each split, from the top of the file; None: all"""
    num_samples: int = 16
    """answers to each question"""
    temperature: float = 0.8
    """of the answers"""
    top_p: float = 0.95
    """only the likeliest tokens that reach this probability together are sampled; 1: all"""
    response_length: int = 100
    """tokens of an answer at most, EOS included, after noise too"""
    interval: int = 1
    """ranks from the better answer of a pair down to the worse at least; 1: neighbours are a pair too"""
    max_pairs: int | None = 10
    """of a question: those furthest apart stay, of equally far ones those with the better winner; None: all"""
    noise: float = 0.5
    """share of the pairs whose worse answer gets noise"""
    batch_size: int = 64
    """answers sampled at once; changes memory, not the result"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    seed: int = 1
    """of the samples, of ISODATA's first centroids and of the noise"""


# ------------------------------------------------------------------------------------- 1. what to do with the answers
def rank_answers(query: str, answers: list[str], vectors: np.ndarray, seed: int) -> Ranked:
    """By the unit vectors (m, d) of the answers.

    All m are ranked, and then thinned: the many votes make a better ranking than those of the few that stay.
    """
    weights = text_rank(vectors @ vectors.T)
    clusters, representatives = isodata(vectors, seed)
    order = [index for index in rank_order(weights).tolist() if index in representatives]
    return Ranked(query, answers, weights.round(DECIMALS).tolist(), clusters.tolist(), order)


def interval_pairs(num_ranks: int, interval: int, most: int | None) -> list[tuple[int, int]]:
    """[STR pairs] The ranks (winner, loser), from 0 on, that are at least `interval` apart; the furthest come first.

    >>> interval_pairs(3, interval=1, most=None)
    [(0, 2), (0, 1), (1, 2)]
    """
    pairs = [(winner, loser) for winner in range(num_ranks) for loser in range(winner + interval, num_ranks)]
    return sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))[:most]


def make_comparisons(
    question: Ranked, donors: list[str], tokenizer: Tokenizer, args: Args, rng: np.random.Generator, left_out: Counter
) -> list[dict]:
    """The rows of a question. `donors` are texts that noise may take words from."""
    rows = []
    for ranks in interval_pairs(len(question.representatives), args.interval, args.max_pairs):
        winner, loser = (question.representatives[rank] for rank in ranks)
        chosen, rejected, kind = question.answers[winner], question.answers[loser], None
        chosen_ids = response_ids(question.query, chosen, tokenizer)
        if rng.random() < args.noise:
            noisy, noise = add_noise(rejected, donors, rng) or (None, None)
            noisy_ids = noisy and response_ids(question.query, noisy, tokenizer)
            if noisy is None:
                left_out["noise on an answer that no type applies to"] += 1
            elif noisy_ids == chosen_ids:
                left_out["noise that makes the worse answer the better one"] += 1
            elif len(noisy_ids) > args.response_length:
                left_out[f"noise that makes an answer longer than --response-length {args.response_length}"] += 1
            else:
                rejected, kind = noisy, noise
        if response_ids(question.query, rejected, tokenizer) == chosen_ids:  # a tokenizer may tell less than we do
            left_out["pairs of two answers that are the same"] += 1
            continue
        meta = {"noise": kind, "num_representatives": len(question.representatives)}
        for column, rank, index in zip(("chosen", "rejected"), ranks, (winner, loser), strict=True):
            meta[f"rank_{column}"] = rank + 1  # among the representatives
            meta[f"weight_{column}"] = question.weights[index]
            meta[f"cluster_{column}"] = question.clusters[index]
            meta[f"sample_{column}"] = index  # in `answers` of self_rank.jsonl: the text before noise
        rows.append({"query": question.query, "chosen": chosen, "rejected": rejected, "meta": meta})
    return rows


# -------------------------------------------------------------------------------------------------------- 2. the models
def sample_texts(
    policy: GPT, queries: list[str], tokenizer: Tokenizer, args: Args, seed: int, left_out: Counter
) -> list[list[str]]:
    """The answers to each query that can be used, in the order in which they were sampled."""
    _, responses = sample_answers(
        policy, [tokenizer.encode(query) for query in queries], tokenizer, args.num_samples,
        args.response_length - 1,  # an answer gets its EOS in any case
        args.batch_size, seed, args.temperature, top_p=args.top_p,
    )  # fmt: skip
    texts = [tokenizer.decode(ids).strip() for ids in responses.tolist()]
    answers = []
    for query, samples in zip(queries, micro_batches(texts, args.num_samples), strict=True):
        answers.append([])
        for text in samples:
            if not text:
                left_out["answers that are empty"] += 1
            elif len(response_ids(query, text, tokenizer)) > args.response_length:  # bytes that are no text do grow
                left_out[f"answers longer than --response-length {args.response_length} when read again"] += 1
            else:
                answers[-1].append(text)
    return answers


def answer_and_rank(
    queries: list[str], policy: GPT, encoder: Encoder, tokenizer: Tokenizer, args: Args, seeds: list[int],
    left_out: Counter, seconds: Counter,
) -> list[Ranked]:  # fmt: skip
    """Those of the queries that have an answer. seeds: of the samples, and of each query's clusters."""
    clock = [time.perf_counter()]
    answers = sample_texts(policy, queries, tokenizer, args, seeds[0], left_out)
    clock.append(time.perf_counter())
    vectors = embed({text for texts in answers for text in texts}, encoder)
    clock.append(time.perf_counter())
    ranked = [
        rank_answers(query, texts, np.stack([vectors[text] for text in texts]), seed)
        for query, texts, seed in zip(queries, answers, seeds[1:], strict=True)
        if texts
    ]
    clock.append(time.perf_counter())
    seconds.update(dict(zip(("sampling", "encoding", "ranking and clustering"), np.diff(clock), strict=True)))
    return ranked


def check(args: Args) -> None:
    """What can't be, before anything is loaded."""
    least = {"num_queries": 1, "num_samples": 2, "response_length": 2, "interval": 1, "max_pairs": 1, "batch_size": 1}
    for name, bound in least.items():
        if getattr(args, name) is not None and getattr(args, name) < bound:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be at least {bound}.")
    for name, high in {"temperature": 100, "top_p": 1, "noise": 1, "seed": 2**63 - 1}.items():
        if not 0 <= getattr(args, name) <= high:  # NaN isn't either
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be from 0 to {high}.")
    if args.interval >= args.num_samples:
        raise InputError(f"--interval {args.interval}: it must be below --num-samples {args.num_samples}.")
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file: name a directory.")


def read_queries(path: Path, most: int | None) -> list[str]:
    """The different queries of an sft file, in its order."""
    queries: dict[str, None] = {}
    for where, row in iter_jsonl(path):
        query = field(row, "query", str, where)
        if not query.strip():
            raise InputError(f"{where}: the field 'query' is empty: delete the line or fill it.")
        queries[query] = None
    return list(queries)[:most]


def load_policy(args: Args, tokenizer: Tokenizer, queries: list[str], device: torch.device) -> GPT:
    policy = load_gpt(args.policy, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    check_vocabulary(tokenizer, policy.config.vocab_size, args.policy)
    longest = max(len(tokenizer.encode(query)) for query in queries)
    if longest + args.response_length > policy.config.n_ctx:
        raise InputError(
            f"the longest query of --data {args.data} has {longest} tokens: with --response-length "
            f"{args.response_length} that is more than the {policy.config.n_ctx} positions of {args.policy}: lower "
            "--response-length, or shorten the queries."
        )
    return policy


# --------------------------------------------------------------------------------------------------------- 3. the files
def main(args: Args) -> None:
    check(args)
    queries = {split: read_queries(args.data / f"sft.{split}.jsonl", args.num_queries) for split in SPLITS}
    device = distributed.setup(args.device)
    tokenizer = load_tokenizer(args.tokenizer or args.policy)
    policy = load_policy(args, tokenizer, queries["train"] + queries["validation"], device)
    encoder = load_encoder(args.encoder, device=device)
    embed({"a word"}, encoder)  # what can't be used shows before the sampling

    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    left_out: Counter[str] = Counter()  # by reason
    lengths: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # (file, column) -> how often which length
    seconds: Counter[str] = Counter()
    parts = [
        (split, part, asked)
        for split in SPLITS
        for part, asked in enumerate(micro_batches(queries[split], QUESTIONS_AT_ONCE))
    ]
    progress = tqdm(total=sum(map(len, queries.values())), desc="questions", unit="", leave=False)
    with jsonl_files(args.out) as write, progress:
        for split, part, asked in parts:
            if split == "validation" and not counts["train"]["pairs"]:
                break
            # what comes before noise draws its seeds first: --noise changes nothing else
            rng = np.random.default_rng((args.seed, SPLITS.index(split), part))
            seeds = rng.integers(2**63, size=1 + len(asked)).tolist()
            ranked = answer_and_rank(asked, policy, encoder, tokenizer, args, seeds, left_out, seconds)
            counts[split]["questions"] += len(asked)
            left_out["questions without an answer"] += len(asked) - len(ranked)
            for place, question in enumerate(ranked):
                write(f"self_rank.{split}", asdict(question))
                counts[split]["answers"] += len(question.answers)
                counts[split]["different answers"] += len(set(question.answers))
                counts[split]["kinds of answers"] += len(question.representatives)
                if len(question.representatives) <= args.interval:
                    left_out[f"questions with {args.interval} or fewer kinds of answers: no pair"] += 1
                # words that noise brings in are those of another question: the winner's would mend the loser
                other = (place + 1 + rng.integers(max(1, len(ranked) - 1))) % len(ranked)
                donors = ranked[other].answers if other != place else []
                for row in make_comparisons(question, donors, tokenizer, args, rng, left_out):
                    about = {"batch": "self_rank", "confidence": None, "split": split, "policies": None}
                    write(f"comparisons.{split}", row | {"meta": about | row["meta"]})
                    counts[split]["pairs"] += 1
                    if row["meta"]["noise"]:
                        counts[split][f"pairs with noise: {row['meta']['noise']}"] += 1
                    lengths[f"comparisons.{split}", "query"][len(tokenizer.encode(row["query"]))] += 1
                    for column in ("chosen", "rejected"):
                        ids = response_ids(row["query"], row[column], tokenizer)
                        lengths[f"comparisons.{split}", column][len(ids)] += 1
            progress.update(len(asked))
        left_out = +left_out  # without the zeros
        if not counts["train"]["pairs"]:
            why = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise InputError(
                f"--policy {args.policy}: no pair came of {counts['train']['answers']} answers to "
                f"{len(queries['train'])} train queries ({why}): nothing was written; raise --temperature, "
                "--num-samples or --num-queries, or train the policy longer."
            )
    for name, wanted in (("comparisons", "pairs"), ("self_rank", "answers")):
        if not counts["validation"][wanted]:  # those of an earlier run would not belong to this train split
            (args.out / f"{name}.validation.jsonl").unlink(missing_ok=True)

    print(f"{'train':>10} {'validation':>10}")
    for name in dict.fromkeys((*counts["train"], *counts["validation"])):
        print(f"{counts['train'][name]:10,} {counts['validation'][name]:10,}  {name}")
    print("\nleft out")
    for reason, count in sorted(left_out.items()):
        print(f"{count:10,}  {reason}")
    if not left_out:
        print("         0  nothing")
    print("\n" + length_table(lengths))
    print("\nseconds: " + ", ".join(f"{what} {value:.1f}" for what, value in seconds.items()))
    print(f"written: {args.out}: comparisons and self_rank of " + " and ".join(SPLITS))
    if not counts["validation"]["pairs"]:
        print("note: no comparisons.validation.jsonl: no pair came of the validation queries.")


if __name__ == "__main__":
    run_module(main, Args)
