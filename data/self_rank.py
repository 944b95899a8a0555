"""A policy's own answers, ranked without human labels -> comparisons.jsonl for a reward model. [STR]

    python -m data.self_rank --policy runs/str/sft --data runs/str/data --out runs/str/data
    python -m data.self_rank --policy runs/str/sft --data runs/str/data --out runs/str/quiet --noise 0

The policy answers each query of sft.{train,validation}.jsonl --num-samples times. Then, for each question:

    1. a sentence encoder embeds the answers, and TextRank ranks them on a graph with their cosines as edge weights: an
       answer that is more similar to the others ranks higher
    2. ISODATA clusters the answers, so that paraphrases don't form pairs; the answer nearest to a cluster's centre
       represents it
    3. each representative is preferred to those at least --interval ranks below it
    4. some of the worse answers get noise: a few words changed, a negation added or removed, or sentences shuffled

    comparisons.{train,validation}.jsonl   the pairs; meta has the ranks, clusters, weights and sample indices of both
                                           answers, their similarity, and the kind of noise
    self_rank.{train,validation}.jsonl     {"query", "answers", "weights", "clusters", "representatives", "chat"}: the
                                           answers to a question, and the indices of its representatives, best first

Duplicate answers are kept: each is a vote. Empty answers are skipped, a question with a single cluster gives no pairs,
and noise isn't applied if it would make both answers of a pair equal. A query that occurs twice in a file is answered
once. The files depend on --seed but not on --batch-size. If --out differs from --data, sft.{train,validation}.jsonl
are copied to it, because train_rm.py reads them too.
"""

import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np

from data.prepare import LengthTable, jsonl_files, list_reasons, print_skipped
from data.sampling import SPLITS, SamplingArgs, load_policy, longest_query, read_queries
from nanorlhf import launch
from nanorlhf.cli import Fraction, NonNegativeFloat, PositiveInt, Range, check_ranges, run_module
from nanorlhf.dataset import response_ids
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.generate import sample_answers
from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches
from nanorlhf.progress import Progress
from nanorlhf.selfrank.isodata import Limits, isodata
from nanorlhf.selfrank.noise import add_noise
from nanorlhf.selfrank.ranked import Ranked
from nanorlhf.selfrank.sentence_encoder import embed, load_sentence_encoder
from nanorlhf.selfrank.text_rank import DECIMALS, rank_order, text_rank
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

QUESTIONS_AT_ONCE = 1024  # answered before ranking; fixed, because the samples depend on it


@dataclass(frozen=True, kw_only=True)
class Args(SamplingArgs):
    policy: str = "runs/str/sft"
    """policy to sample answers from: checkpoint directory or Hub id"""
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """sentence encoder: directory or Hub id"""
    data: Path = Path("runs/str/data")
    """directory of sft.{train,validation}.jsonl with the queries"""
    out: Path = Path("runs/str/data")
    """directory for the JSON Lines; existing files are replaced"""
    num_samples: Annotated[int, Range("at least 2", lambda x: x >= 2)] = 16
    """answers per question"""
    temperature: Annotated[float, Range("from 0 to 100", lambda x: 0 <= x <= 100)] = 0.8
    """sampling temperature"""
    top_p: Fraction = 0.95
    """nucleus sampling: sample from the most likely tokens with this total probability (1: all tokens)"""
    response_length: Annotated[int, Range("at least 2", lambda x: x >= 2)] = 100
    """maximum tokens of an answer including EOS, also after noise"""
    min_cluster_size: PositiveInt = Limits.min_size
    """ISODATA: merge clusters of at most this many answers into the nearest one"""
    max_cluster_share: Fraction = Limits.max_share
    """ISODATA: split clusters with at least this share of a question's answers"""
    max_variance: NonNegativeFloat = Limits.max_variance
    """ISODATA: split clusters with a larger mean squared distance to their centre; embeddings have length 1"""
    join_distance: NonNegativeFloat = Limits.join_distance
    """ISODATA: join clusters if their representatives are closer than this squared distance (0: none)"""
    interval: PositiveInt = 1
    """minimum difference between the ranks of a pair (1: adjacent ranks)"""
    max_pairs: PositiveInt | None = 10
    """maximum pairs per question: those furthest apart first, then those with the better winner (None: all)"""
    noise: Fraction = 0.5
    """share of pairs whose worse answer gets noise"""


# ------------------------------------------------------------------------------------------- 1. ranking and comparisons
def interval_pairs(num_ranks: int, interval: int, limit: int | None) -> list[tuple[int, int]]:
    """[STR pairs] Return pairs of 0-based ranks (winner, loser) at least `interval` apart, furthest apart first.

    >>> interval_pairs(3, interval=1, limit=None)
    [(0, 2), (0, 1), (1, 2)]
    """
    pairs = [(winner, loser) for winner in range(num_ranks) for loser in range(winner + interval, num_ranks)]
    return sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))[:limit]


def make_comparisons(
    question: Ranked, vectors: np.ndarray, donors: list[str], tokenizer: Tokenizer, args: Args,
    rng: np.random.Generator, skipped: Counter,
) -> list[dict]:  # fmt: skip
    """Return the rows of comparisons.jsonl for a question with unit vectors (m, d); noise takes words from `donors`."""
    rows = []
    for ranks in interval_pairs(len(question.representatives), args.interval, args.max_pairs):
        winner, loser = (question.representatives[rank] for rank in ranks)
        chosen, rejected, kind = question.answers[winner], question.answers[loser], None
        chosen_ids = response_ids(question.query, chosen, tokenizer, question.chat)
        if rng.random() < args.noise:
            noisy, noise = add_noise(rejected, donors, rng) or (None, None)
            noisy_ids = noisy and response_ids(question.query, noisy, tokenizer, question.chat)
            if noisy is None:
                skipped["noise: no kind of noise fits the answer"] += 1
            elif noisy_ids == chosen_ids:
                skipped["noise: it would make the worse answer equal to the better one"] += 1
            elif len(noisy_ids) > args.response_length:
                skipped[f"noise: it would make the answer longer than --response-length {args.response_length}"] += 1
            else:
                rejected, kind = noisy, noise
        rejected_ids = response_ids(question.query, rejected, tokenizer, question.chat)
        if rejected_ids == chosen_ids:  # different texts can have the same tokens
            skipped["pairs of two identical answers"] += 1
            continue
        meta = {"noise": kind, "num_representatives": len(question.representatives)}
        meta["similarity"] = round(float(vectors[winner] @ vectors[loser]), DECIMALS)  # cosine, before noise
        for column, rank, index in zip(("chosen", "rejected"), ranks, (winner, loser), strict=True):
            meta[f"rank_{column}"] = rank + 1  # among the representatives
            meta[f"weight_{column}"] = question.weights[index]
            meta[f"cluster_{column}"] = question.clusters[index]
            meta[f"sample_{column}"] = index  # index into `answers` of self_rank.jsonl: the text before noise
        texts = {"query": question.query, "chosen": chosen, "rejected": rejected}
        rows.append(texts | ({"chat": True} if question.chat else {}) | {"meta": meta})
    return rows


# -------------------------------------------------------------------------------------------------------- 2. the models
def sample_texts(
    policy: GPT, queries: dict[str, bool], tokenizer: Tokenizer, args: Args, seed: int, skipped: Counter
) -> list[list[str]]:
    """Return the usable answers to each query, in the order sampled."""
    _, responses = sample_answers(
        policy, [tokenizer.encode(query, chat) for query, chat in queries.items()], tokenizer, args.num_samples,
        args.response_length - 1,  # leaves room for EOS
        args.batch_size, seed, args.temperature, top_p=args.top_p,
    )  # fmt: skip
    texts = [tokenizer.decode(ids).strip() for ids in responses.tolist()]
    answers = []
    for (query, chat), samples in zip(queries.items(), micro_batches(texts, args.num_samples), strict=True):
        answers.append([])
        for text in samples:
            if not text:
                skipped["empty answers"] += 1
            elif len(response_ids(query, text, tokenizer, chat)) > args.response_length:  # invalid UTF-8 gets longer
                skipped[f"answers longer than --response-length {args.response_length} when re-encoded"] += 1
            else:
                answers[-1].append(text)
    return answers


def answer_and_rank(
    queries: dict[str, bool], policy: GPT, encoder: Any, tokenizer: Tokenizer, args: Args, seeds: list[int],
    skipped: Counter, seconds: Counter,
) -> list[tuple[Ranked, np.ndarray]]:  # fmt: skip
    """Return the ranked answers and their unit vectors (m, d) for each query with answers.

    seeds: one for sampling, then one per query for ISODATA.
    """
    clock = [time.perf_counter()]
    answers = sample_texts(policy, queries, tokenizer, args, seeds[0], skipped)
    clock.append(time.perf_counter())
    vectors = embed({text for texts in answers for text in texts}, encoder)
    clock.append(time.perf_counter())
    limits = Limits(args.min_cluster_size, args.max_cluster_share, args.max_variance, args.join_distance)
    ranked = []
    for (query, chat), texts, seed in zip(queries.items(), answers, seeds[1:], strict=True):
        if texts:
            embedded = np.stack([vectors[text] for text in texts])
            # over all answers, not just the representatives: more votes make a better ranking
            weights = text_rank(embedded @ embedded.T)
            clusters, representatives = isodata(embedded, seed, limits)
            order = [index for index in rank_order(weights).tolist() if index in representatives]
            question = Ranked(query, texts, weights.round(DECIMALS).tolist(), clusters.tolist(), order, chat)
            ranked.append((question, embedded))
    clock.append(time.perf_counter())
    seconds.update(dict(zip(("sampling", "encoding", "ranking and clustering"), np.diff(clock), strict=True)))
    return ranked


# ------------------------------------------------------------------------------------------------------------ 3. files
def main(args: Args) -> None:
    check_ranges(args)
    if args.interval >= args.num_samples:
        raise InputError(f"--interval {args.interval}: must be below --num-samples {args.num_samples}.")
    check_out(args.out)
    queries = {split: read_queries(args.data / f"sft.{split}.jsonl", args.num_queries) for split in SPLITS}
    device = launch.setup(args.device)
    tokenizer = load_tokenizer(args.tokenizer or args.policy)
    policy = load_policy(args.policy, tokenizer, device)
    longest_query(queries, tokenizer, args.response_length, policy, args.policy)
    encoder = load_sentence_encoder(args.encoder, device=device)

    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    skipped: Counter[str] = Counter()  # reason -> how often
    similarities: dict[str, list[float]] = {split: [] for split in SPLITS}  # within the pairs
    lengths = LengthTable()
    seconds: Counter[str] = Counter()
    chunks = [
        (split, number, chunk_queries)
        for split in SPLITS
        for number, chunk_queries in enumerate(micro_batches(list(queries[split].items()), QUESTIONS_AT_ONCE))
    ]
    progress = Progress(total=sum(map(len, queries.values())), desc="questions", unit="", leave=False)
    no_pair = {"comparisons.validation": "the validation queries gave no pairs"}
    no_answer = {"self_rank.validation": "the validation queries have no answers, or the train queries gave no pairs"}
    with jsonl_files(args.out, no_pair | no_answer) as write, progress:
        for split, number, chunk_queries in chunks:
            if split == "validation" and not counts["train"]["pairs"]:
                break
            # seeds are drawn before the noise, so that --noise changes nothing else
            rng = np.random.default_rng((args.seed, SPLITS.index(split), number))
            seeds = rng.integers(2**63, size=1 + len(chunk_queries)).tolist()
            ranked = answer_and_rank(dict(chunk_queries), policy, encoder, tokenizer, args, seeds, skipped, seconds)
            counts[split]["questions"] += len(chunk_queries)
            skipped["questions without an answer"] += len(chunk_queries) - len(ranked)
            for index, (question, vectors) in enumerate(ranked):
                write(f"self_rank.{split}", asdict(question))
                counts[split]["answers"] += len(question.answers)
                counts[split]["different answers"] += len(set(question.answers))
                counts[split]["clusters of answers"] += len(question.representatives)
                if len(question.representatives) <= args.interval:
                    skipped[f"questions with {args.interval} or fewer clusters of answers: no pairs"] += 1
                # noise takes words from another question's answers: the winner's words would improve the loser
                other = (index + 1 + rng.integers(max(1, len(ranked) - 1))) % len(ranked)
                donors = ranked[other][0].answers if other != index else []
                for row in make_comparisons(question, vectors, donors, tokenizer, args, rng, skipped):
                    about = {"batch": "self_rank", "confidence": None, "split": split, "policies": None}
                    write(f"comparisons.{split}", row | {"meta": about | row["meta"]})
                    counts[split]["pairs"] += 1
                    similarities[split].append(row["meta"]["similarity"])
                    if row["meta"]["noise"]:
                        counts[split][f"pairs with noise: {row['meta']['noise']}"] += 1
                    chosen_length, rejected_length = (
                        len(response_ids(row["query"], row[column], tokenizer, question.chat))
                        for column in ("chosen", "rejected")
                    )
                    query_length = len(tokenizer.encode(row["query"], question.chat))
                    lengths.add(f"comparisons.{split}", query_length, chosen=chosen_length, rejected=rejected_length)
            progress.update(len(chunk_queries))
        skipped = +skipped  # drops zeros
        if not counts["train"]["pairs"]:
            raise InputError(
                f"--policy {args.policy}: no pairs from {counts['train']['answers']} answers to "
                f"{len(queries['train'])} train queries ({list_reasons(skipped)}); nothing was written. Raise "
                "--temperature, --num-samples or --num-queries, or train the policy longer."
            )
    if args.out.resolve() != args.data.resolve():
        for split in SPLITS:
            shutil.copyfile(args.data / f"sft.{split}.jsonl", args.out / f"sft.{split}.jsonl")
    print(f"{'train':>10} {'validation':>10}")
    for name in dict.fromkeys((*counts["train"], *counts["validation"])):
        print(f"{counts['train'][name]:10,} {counts['validation'][name]:10,}  {name}")
    means = (f"{fmean(values):10.3f}" if values else " " * 10 for values in similarities.values())
    print(" ".join(means) + "  mean similarity (cosine) within a pair, before noise")
    print_skipped(skipped)
    print(f"\n{lengths}")
    print("\nseconds: " + ", ".join(f"{what} {value:.1f}" for what, value in seconds.items()))
    print(f"written: {args.out}: comparisons and self_rank of " + " and ".join(SPLITS))


if __name__ == "__main__":
    run_module(main, Args)
