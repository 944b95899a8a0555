"""Evaluate several answers per question by overlap and by reward models: SO.

In: sft.validation.jsonl and, optionally, labels from `python -m data.label`. Out: per metric its mean over answers,
metric@k, rank correlations, MRR@k, and the differences between policies.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import Count, FiniteFloat, Fraction, NonNegativeInt, PositiveInt, TemperatureOrGreedy
from nanorlhf.dataset import Demonstration, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.evals.model_loading import check_model, common_tokenizer, load_gold, load_model, load_policy, longest_text
from nanorlhf.evals.scores import differences, endings, rm_scores, sample
from nanorlhf.evals.settings import PolicyArgs, begin, named_policies
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.metrics import (
    bootstrap_interval,
    chance_mrr_at_k,
    metric_at_k,
    mrr_at_k,
    rouge_scores,
    sentence_bleu,
    spearman_matrix,
)
from nanorlhf.metrics.bert_score import bert_score
from nanorlhf.model import ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.pretrained.encoder import Encoder, load_encoder
from nanorlhf.progress import Progress
from nanorlhf.rewards.gold import Gold
from nanorlhf.stackoverflow import answer_report
from nanorlhf.stackoverflow.labels import load_labels
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.supervised import autocast

OVERLAP = ("bleu", "rouge1", "rouge2", "bertscore")  # metrics that compare an answer with the reference


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    """Each policy is compared with all policies before it."""

    regression_model: str | None
    """regression reward model: checkpoint directory or Hub id; None: no scores"""
    contrastive_model: str | None
    """contrastive reward model: checkpoint directory or Hub id; None: no scores"""
    encoder: str | None = None
    """encoder for BERTScore: directory or Hub id; None: no BERTScore"""
    encoder_layer: PositiveInt | None = None
    """layer whose token vectors BERTScore compares, such as 17 of roberta-large; None: the last"""
    labels: Path | None = None
    """labels of useful answers from `python -m data.label`; None: no MRR@k, without --useful-from"""
    useful_from: FiniteFloat | None = None
    """lowest gold score of a useful answer, for MRR@k without --labels"""
    num_samples: Count = 10
    """answers per question"""
    max_response_length: PositiveInt
    """longest response of the data in tokens, EOS included"""
    temperature: TemperatureOrGreedy = 1.0
    """sampling temperature; 0: greedy"""
    top_k: NonNegativeInt = 50
    """sample from this many of the most likely tokens; 0: all"""
    top_p: Fraction = 0.9
    """sample from the most likely tokens that together reach this probability; 1: all"""
    no_repeat_ngram_size: NonNegativeInt = 2
    """size of n-grams that may not repeat in question and answer; 0: off"""
    ranks: Literal["within", "pooled"] = "within"
    """ranks of Spearman's correlation: within each question, or over all answers"""
    num_resamples: Count = 2000
    """bootstrap resamples of the questions, for the 95% intervals"""
    gold: str | None = None
    """FILE.py:FUNCTION or a larger reward model: the gold score; None: no gold"""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data and the models that score answers."""

    args: Args
    device: torch.device
    policies: dict[str, str]  # name -> checkpoint
    reward_checkpoints: dict[str, str | None]
    tokenizer: Tokenizer
    rows: list[Demonstration]
    gold: Gold | None
    reward_models: dict[str, ScalarModel]
    encoder: Encoder | None

    @property
    def queries(self) -> list[str]:
        return [row.record["query"] for row in self.rows]

    @property
    def references(self) -> list[str]:
        return [row.record["response"] for row in self.rows]


def main(args: Args) -> dict:
    inputs = load(args)
    n = args.num_samples
    measured, texts = {}, {}  # by policy
    results: dict[str, dict] = {}
    for name, checkpoint in Progress(inputs.policies.items(), desc="policies"):
        query, response = answers(checkpoint, inputs)
        texts[name], measured[name] = measure(query, response, n, inputs)
        results[name] = endings(response, inputs.tokenizer)
    human = measure_references(inputs)
    samples = sample_rows(texts, measured, inputs)
    labels = load_labels(args.labels, samples) if args.labels else {}  # policy -> (questions, n), NaN: no label
    if args.useful_from is not None and not labels:
        labels = {name: (columns["gold_score"] >= args.useful_from) * 1.0 for name, columns in measured.items()}

    for name, columns in measured.items():
        results[name] |= statistics(columns, args)
        if labels:
            results[name] |= reciprocal_ranks(columns, labels[name], args)
    best = {  # the best of all answers to a question: policy -> metric -> (questions, 1)
        name: {metric: scores.max(axis=1, keepdims=True) for metric, scores in columns.items()}
        for name, columns in measured.items()
    }
    result = {
        "policies": results,
        "reference": {metric: float(human[metric].mean()) for metric in human if metric not in OVERLAP},
        "differences": differences(measured, args.seed, args.num_resamples),
        "differences_of_best": differences(best, args.seed, args.num_resamples),  # [SO significance] of Table 2
        "num_questions": len(inputs.rows),
        "num_samples": n,
        "encoder": inputs.encoder.name if inputs.encoder else None,
        "args": json_settings(args),
    }
    runs = [checkpoint for checkpoint in (*inputs.policies.values(), *inputs.reward_checkpoints.values()) if checkpoint]
    shown = samples[: args.num_report_samples]
    return write_evaluation(args, result, answer_report.page(result, runs, shown), {"samples.jsonl": samples})


def load(args: Args) -> Inputs:
    if args.useful_from is not None and args.gold is None:
        raise InputError(f"--useful-from {args.useful_from} is a gold score: pass --gold or --useful-from None.")
    device = begin(args)
    policies = named_policies(args.policies)
    checkpoints = {"rm_regression": args.regression_model, "rm_contrastive": args.contrastive_model}
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), *checkpoints.values()], args.gold)
    path, Q, T = args.data / "sft.validation.jsonl", args.max_query_length, args.max_response_length
    rows = list(load_demonstrations(path, tokenizer, Q, T)[: args.num_queries])
    longest = {str(path): longest_text(rows, args.response_length)}
    flags = {"--regression-model": args.regression_model, "--contrastive-model": args.contrastive_model}
    for flag, checkpoint in (flags | {"--gold": args.gold}).items():
        check_model(flag, checkpoint, tokenizer, longest)
    return Inputs(
        args=args,
        device=device,
        policies=policies,
        reward_checkpoints=checkpoints,
        tokenizer=tokenizer,
        rows=rows,
        gold=load_gold(args.gold, args, tokenizer, device),
        reward_models={
            name: load_model(load_scalar, checkpoint, args, device)
            for name, checkpoint in checkpoints.items()
            if checkpoint
        },
        # BERTScore is ours: bert-score 0.3.13, the last, calls a tokenizer method that transformers 5 no longer has
        encoder=load_encoder(args.encoder, args.encoder_layer, device) if args.encoder else None,
    )


def answers(checkpoint: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Sample n answers per question, as query and response, and free the policy before the next one is loaded."""
    args = inputs.args
    policy = load_policy(checkpoint, inputs.rows, inputs.tokenizer, args, inputs.device)
    return sample(
        policy, inputs.rows, inputs.tokenizer, args, args.num_samples, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, no_repeat_ngram_size=args.no_repeat_ngram_size,
    )  # fmt: skip


def measure(query: Tensor, response: Tensor, n: int, inputs: Inputs) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the texts and all metrics, (questions, n), of n answers per question. [SO table 1]"""
    args, tokenizer = inputs.args, inputs.tokenizer
    texts = [tokenizer.decode(ids) for ids in response.tolist()]
    references = [reference for reference in inputs.references for _ in range(n)]
    rouges = rouge_scores(references, texts)
    columns = {"bleu": sentence_bleu(references, texts), "rouge1": rouges["rouge1"], "rouge2": rouges["rouge2"]}
    if inputs.encoder:
        columns["bertscore"] = bert_score(references, texts, inputs.encoder)
    with autocast(args.dtype, inputs.device):
        for name, model in inputs.reward_models.items():
            columns[name] = rm_scores(model, query, response, tokenizer.pad_id, args.batch_size)
        if inputs.gold:
            questions = [question for question in inputs.queries for _ in range(n)]
            columns["gold_score"] = inputs.gold.score_ids(questions, query, response)
    return texts, {name: np.array(column).reshape(-1, n) for name, column in columns.items()}


def measure_references(inputs: Inputs) -> dict[str, np.ndarray]:
    pad_id = inputs.tokenizer.pad_id
    query = left_pad([row.query for row in inputs.rows], pad_id).to(inputs.device)
    response = right_pad([row.response for row in inputs.rows], pad_id).to(inputs.device)
    _, human = measure(query, response, 1, inputs)
    return human


def sample_rows(texts: dict[str, list[str]], measured: dict[str, dict[str, np.ndarray]], inputs: Inputs) -> list[dict]:
    """Return the rows of samples.jsonl."""
    n = inputs.args.num_samples
    return [
        {
            "query": row.record["query"],
            "reference": row.record["response"],
            "policies": {
                name: [
                    {"response": texts[name][i * n + j]}
                    | {metric: float(scores[i, j]) for metric, scores in columns.items()}
                    for j in range(n)
                ]
                for name, columns in measured.items()
            },
        }
        for i, row in enumerate(inputs.rows)
    ]


def statistics(columns: dict[str, np.ndarray], args: Args) -> dict:
    """Return mean, std and best of k per metric, and rank correlations; columns: metric -> (questions, n)."""
    names, spearman = spearman_matrix({**columns}, within_questions=args.ranks == "within")  # [SO spearman]
    ks = range(1, args.num_samples + 1)
    return {
        "metrics": {
            metric: {
                "mean": float(scores.mean()),
                "std": float(scores.std()),
                "mean_ci": bootstrap_interval(scores, args.seed, args.num_resamples),
                "at_k": [metric_at_k(scores, k) for k in ks],  # [SO metric@k] the expected best of k answers
            }
            for metric, scores in columns.items()
        },
        "spearman": {"metrics": names, "matrix": spearman.tolist()},
    }


def reciprocal_ranks(columns: dict[str, np.ndarray], labels: np.ndarray, args: Args) -> dict:
    """Return one policy's MRR@k by each metric, over fully labelled questions; labels (questions, n).

    mrr_over_chance: MRR@n minus a random order's, with its interval.
    """
    labelled = ~np.isnan(labels).any(axis=1)  # (questions,)
    result: dict = {"num_labelled": int(labelled.sum())}
    if labelled.any():
        useful, ks = labels[labelled], range(1, labels.shape[1] + 1)
        result["mrr_at_k"] = {"chance": [chance_mrr_at_k(useful, k) for k in ks]}  # [SO mrr@k]
        result["mrr_over_chance"] = {}
        for metric, scores in columns.items():
            result["mrr_at_k"][metric] = [mrr_at_k(scores[labelled], useful, k) for k in ks]
            gains = np.array(  # (questions, 1)
                [
                    [mrr_at_k([row], [marks], len(row)) - chance_mrr_at_k([marks], len(row))]
                    for row, marks in zip(scores[labelled], useful, strict=True)
                ]
            )
            interval = bootstrap_interval(gains, args.seed, args.num_resamples)
            result["mrr_over_chance"] |= {metric: float(gains.mean()), f"{metric}_ci": interval}
    return result
