"""Several answers to each question, measured by overlap and by reward models: SO.

In: sft.validation.jsonl, and labels of `python -m data.label` if there are any. Out: per metric its mean over answers,
metric@k, rank correlations, MRR@k, and how the policies differ.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import Count, Fraction, NonNegativeInt, PositiveInt, TemperatureOrGreedy
from nanorlhf.dataset import load_demonstrations
from nanorlhf.evals import common
from nanorlhf.metrics import bootstrap_interval, metric_at_k, mrr_at_k, rouge_scores, sentence_bleu, spearman_matrix
from nanorlhf.metrics.bert_score import bert_score
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.pretrained.encoder import load_encoder
from nanorlhf.progress import Progress
from nanorlhf.stackoverflow import report
from nanorlhf.stackoverflow.labels import load_labels
from nanorlhf.training.supervised import autocast

OVERLAP = ("bleu", "rouge1", "rouge2", "bertscore")  # metrics that compare an answer with the reference


@dataclass(frozen=True, kw_only=True)
class Args(common.PolicyArgs):
    """Each policy is compared with every one before it."""

    regression_model: str | None
    """reward model: checkpoint directory or Hub id; None leaves its scores out"""
    contrastive_model: str | None
    """reward model: checkpoint directory or Hub id; None leaves its scores out"""
    encoder: str | None = None
    """of BERTScore: directory or Hub id; None leaves it out"""
    encoder_layer: PositiveInt | None = None
    """whose token vectors BERTScore compares, such as 17 of roberta-large; None: the last"""
    labels: Path | None = None
    """answers marked useful or not by `python -m data.label`; None leaves MRR@k out"""
    num_samples: Count = 10
    """answers per question"""
    max_response_length: PositiveInt
    """longest response of the data in tokens, EOS included"""
    temperature: TemperatureOrGreedy = 1.0
    """of the answers; 0 is greedy"""
    top_k: NonNegativeInt = 50
    """sample from this many of the likeliest tokens; 0: all"""
    top_p: Fraction = 0.9
    """sample from the likeliest tokens that together reach this probability; 1: all"""
    no_repeat_ngram_size: NonNegativeInt = 2
    """no n-gram of question and answer occurs twice; 0: off"""
    ranks: Literal["within", "pooled"] = "within"
    """of Spearman's correlation: within each question, or over all answers"""
    num_resamples: Count = 2000
    """bootstrap resamples of the questions, for the 95% intervals"""
    gold: str | None = None
    """FILE.py:FUNCTION or a larger reward model, whose score is the true one; None: unknown"""


def main(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    device = common.begin(args)
    policies = common.named_policies(args.policies)
    places = {"rm_regression": args.regression_model, "rm_contrastive": args.contrastive_model}
    tokenizer = common.common_tokenizer(args.tokenizer, [*policies.values(), *places.values()], args.gold)
    path, Q, T = args.data / "sft.validation.jsonl", args.max_query_length, args.max_response_length
    rows = list(load_demonstrations(path, tokenizer, Q, T)[: args.num_queries])
    queries, references = ([row.record[name] for row in rows] for name in ("query", "response"))
    longest = {f"{args.data}/sft.validation.jsonl": common.longest_text(rows, args.response_length)}
    flags = {"--regression-model": args.regression_model, "--contrastive-model": args.contrastive_model}
    for flag, place in (flags | {"--gold": args.gold}).items():
        common.check_model(flag, place, tokenizer, longest)
    gold = common.load_gold(args.gold, args, tokenizer, device)
    reward_models = {
        name: common.load_model(load_scalar, place, args, device) for name, place in places.items() if place
    }
    # BERTScore is ours: bert-score 0.3.13, the last, calls a tokenizer method that transformers 5 no longer has
    encoder = load_encoder(args.encoder, args.encoder_layer, device) if args.encoder else None
    precision = autocast(args.dtype, device)

    def measure(query: Tensor, response: Tensor, n: int) -> tuple[list[str], dict[str, np.ndarray]]:
        """Texts and every metric, (questions, n), of n answers to each question. [SO table 1]"""
        texts = [tokenizer.decode(ids) for ids in response.tolist()]
        truths = [reference for reference in references for _ in range(n)]
        rouges = rouge_scores(truths, texts)
        columns = {"bleu": sentence_bleu(truths, texts), "rouge1": rouges["rouge1"], "rouge2": rouges["rouge2"]}
        if encoder:
            columns["bertscore"] = bert_score(truths, texts, encoder)
        with precision:
            for name, model in reward_models.items():
                columns[name] = common.rm_scores(model, query, response, tokenizer.pad_id, args.batch_size)
            if gold:
                columns["gold_score"] = gold.of_ids([q for q in queries for _ in range(n)], query, response)
        return texts, {name: np.array(column).reshape(len(rows), n) for name, column in columns.items()}

    # -------------------------------------------------------------------------------------------------- 2. the answers
    measured, texts = {}, {}  # by policy
    results: dict[str, dict] = {}

    decoding = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "no_repeat_ngram_size")}
    for name, place in Progress(policies.items(), desc="policies"):
        query, response = common.sample(
            common.load_policy(place, rows, tokenizer, args, device),  # no variable: gone before the next is loaded
            rows, tokenizer, args, args.num_samples, **decoding,
        )  # fmt: skip
        texts[name], measured[name] = measure(query, response, args.num_samples)
        results[name] = common.endings(response, tokenizer)
    query = left_pad([row.query for row in rows], tokenizer.pad_id).to(device)
    response = right_pad([row.response for row in rows], tokenizer.pad_id).to(device)
    _, human = measure(query, response, 1)

    samples = [
        {
            "query": question,
            "reference": references[i],
            "policies": {
                name: [
                    {"response": texts[name][i * args.num_samples + j]}
                    | {metric: float(scores[i, j]) for metric, scores in measured[name].items()}
                    for j in range(args.num_samples)
                ]
                for name in policies
            },
        }
        for i, question in enumerate(queries)
    ]
    labels = load_labels(args.labels, samples) if args.labels else {}  # policy -> (questions, n), NaN: no label

    # ------------------------------------------------------------------------------------------------ 3. the statistics
    for name, columns in measured.items():
        results[name] |= statistics(columns, args)
        if labels:
            results[name] |= reciprocal_ranks(columns, labels[name])
    best = {  # the best of all answers to a question: policy -> metric -> (questions, 1)
        name: {metric: scores.max(axis=1, keepdims=True) for metric, scores in columns.items()}
        for name, columns in measured.items()
    }
    result = {
        "policies": results,
        "reference": {metric: float(human[metric].mean()) for metric in human if metric not in OVERLAP},
        "differences": common.differences(measured, args.seed, args.num_resamples),
        "differences_of_best": common.differences(best, args.seed, args.num_resamples),  # [SO significance] of Table 2
        "num_questions": len(rows),
        "num_samples": args.num_samples,
        "encoder": args.encoder,
        "args": common.settings_of(args),
    }

    # --------------------------------------------------------------------------------------------------------- 4. write
    runs = [place for place in (*policies.values(), *places.values()) if place]
    shown = samples[: args.num_report_samples]
    return common.write_evaluation(args, result, report.page(result, runs, shown), {"samples.jsonl": samples})


def statistics(columns: dict[str, np.ndarray], args: Args) -> dict:
    """One policy's answers, metric -> (questions, n): mean, spread and the best of k, and how metrics correlate."""
    names, spearman = spearman_matrix({**columns}, within_questions=args.ranks == "within")  # [SO spearman]
    ks = range(1, args.num_samples + 1)
    return {
        "metrics": {
            metric: {
                "mean": float(scores.mean()),
                "std": float(scores.std()),
                "mean_ci": bootstrap_interval(scores, args.seed, args.num_resamples),
                "at_k": [metric_at_k(scores, k) for k in ks],  # [SO metric@k] the best of k answers, expected
            }
            for metric, scores in columns.items()
        },
        "spearman": {"metrics": names, "matrix": spearman.tolist()},
    }


def reciprocal_ranks(columns: dict[str, np.ndarray], labels: np.ndarray) -> dict:
    """MRR@k of one policy by each metric, over the questions whose answers are all labelled; labels (questions, n)."""
    labelled = ~np.isnan(labels).any(axis=1)  # (questions,)
    found: dict = {"num_labelled": int(labelled.sum())}
    if labelled.any():
        found["mrr_at_k"] = {  # [SO mrr@k]
            metric: [mrr_at_k(scores[labelled], labels[labelled], k) for k in range(1, labels.shape[1] + 1)]
            for metric, scores in columns.items()
        }
    return found
