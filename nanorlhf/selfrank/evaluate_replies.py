"""STR's evaluation: one reply per question, and agreement with the self-ranking that trained the policy.

In: sft.{split}.jsonl and, if present, comparisons.validation.jsonl, self_rank.jsonl and people's rankings. Out: overlap
with references, reward model and gold scores with intervals, and measurements of the ranking.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import Count, Fraction, PositiveInt, TemperatureOrGreedy
from nanorlhf.dataset import (
    Comparison,
    Demonstration,
    field,
    is_chat,
    load_comparisons,
    load_demonstrations,
    response_ids,
)
from nanorlhf.errors import InputError
from nanorlhf.evals.model_loading import (
    check_model,
    check_reward_model,
    common_tokenizer,
    load_gold,
    load_model,
    load_policy,
    longest_pair,
    longest_text,
)
from nanorlhf.evals.scores import differences, endings, rm_scores, row_scores, sample
from nanorlhf.evals.settings import PolicyArgs, begin, named_policies
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.files import read_object
from nanorlhf.metrics import bootstrap_interval
from nanorlhf.metrics.agreement import RankedQuestion, load_rankings
from nanorlhf.model import ScalarModel
from nanorlhf.progress import Progress
from nanorlhf.rewards.gold import Gold
from nanorlhf.selfrank import reply_report
from nanorlhf.selfrank.ranked import Ranked
from nanorlhf.selfrank.self_ranking import (
    draw_answers,
    evaluate_first_answers,
    evaluate_order,
    evaluate_pairs,
    load_self_rank,
    read_meta,
)
from nanorlhf.selfrank.sentence_encoder import load_sentence_encoder
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.run_directory import read_metrics
from nanorlhf.training.supervised import autocast


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    """Evaluate replies. The last policy is compared with each earlier one."""

    split: Literal["validation", "test"] = "validation"
    """split with the questions"""
    reward_model: str | None
    """checkpoint directory or Hub id; None: no reward model scores"""
    rankings: tuple[Path, ...] = ()
    """files of `python -m data.rank`, answers ranked by people; none: no human study"""
    self_rank: Path | None = None
    """file of `python -m data.self_rank`, such as runs/str/data/self_rank.validation.jsonl; Figure 2 shows the answers
    to one of its questions"""
    encoder: str | None = None
    """encoder for Figure 2, directory or Hub id; in the paper one that wasn't used for ranking; None: no figure"""
    max_response_length: PositiveInt
    """longest response in the data in tokens, EOS included"""
    temperature: TemperatureOrGreedy = 0.8
    """sampling temperature of the replies; 0 is greedy"""
    top_p: Fraction = 0.95
    """nucleus sampling: the likeliest tokens that together reach this probability; 1: all"""
    num_resamples: Count = 2000
    """bootstrap resamples of the questions, for the 95% intervals"""
    gold: str | None = None
    """FILE.py:FUNCTION, function(query, reply) -> 0 to 1, 1 if the reply is right; or a larger reward model"""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The data, and the models that score replies."""

    args: Args
    device: torch.device
    policies: dict[str, str]  # name -> path
    tokenizer: Tokenizer
    rows: list[Demonstration]
    references: list[list[str]]  # one list per row
    is_squad: bool
    pairs: list[Comparison]  # from self-ranking
    self_ranked: list[Ranked]
    by_people: list[RankedQuestion]
    rows_by_people: list[Demonstration]  # their answers
    gold: Gold | None
    reward_model: ScalarModel | None

    @property
    def queries(self) -> list[str]:
        return [row.record["query"] for row in self.rows]


def main(args: Args) -> dict:
    inputs = load(args)
    from nanorlhf.selfrank.reply_overlap import meteor_matching  # imports NLTK and SciPy, a second, only needed here

    figure = drawn = None
    if args.encoder:
        encoder = load_sentence_encoder(args.encoder, device=inputs.device)
        figure, drawn = draw_answers(inputs.self_ranked, encoder, args.encoder)
    measured: dict[str, dict[str, np.ndarray]] = {}  # policy -> metric -> (questions, 1)
    texts, results = {}, {}  # by policy
    for name, path in Progress(inputs.policies.items(), desc="policies"):
        query, response = replies(path, inputs)
        texts[name], measured[name] = measure(query, response, inputs)
        results[name] = statistics(measured[name], args) | endings(response, inputs.tokenizer)
    result = {
        "policies": results,
        "reference": measure_references(inputs),
        "differences": differences(measured, args.seed, args.num_resamples),
        **agreement(inputs),
        "costs": training_costs(inputs),
        "figure": drawn,
        "meteor_matching": meteor_matching(),
        "num_questions": len(inputs.rows),
        "args": json_settings(args),
    }
    return write(result, figure, texts, measured, inputs)


# ----------------------------------------------------------------------------------------------------------- 1. inputs
def load(args: Args) -> Inputs:
    device = begin(args)
    if args.rankings and not args.reward_model:
        raise InputError("--rankings needs --reward-model, to compare people's rankings with the reward model's.")
    if args.encoder and not args.self_rank:
        raise InputError(f"--encoder {args.encoder} needs --self-rank, the file with the answers to draw.")
    policies = named_policies(args.policies)
    check_reward_model(args.reward_model)
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), args.reward_model], args.gold)
    Q, T = args.max_query_length, args.max_response_length
    path, pairs_path = args.data / f"sft.{args.split}.jsonl", comparisons_path(args)
    rows = list(load_demonstrations(path, tokenizer, Q, T)[: args.num_queries])
    references, is_squad = read_references(rows, path)
    has_pairs = pairs_path.exists() and (args.reward_model or args.gold)
    pairs = list(load_comparisons(pairs_path, tokenizer, Q, T)) if has_pairs else []
    self_ranked = load_self_rank(args.self_rank) if args.self_rank else []
    by_people = load_rankings(args.rankings)
    chat = is_chat(rows[0].record, f"{path}:1")  # the ranked questions come from these files
    rows_by_people = encode_answers(by_people, tokenizer, chat)
    longest = {
        str(path): longest_text(rows, args.response_length),
        str(pairs_path): longest_pair(pairs),
        "--rankings": max((len(row.query) + len(row.response) for row in rows_by_people), default=0),
    }
    for flag, model_path in (("--reward-model", args.reward_model), ("--gold", args.gold)):
        check_model(flag, model_path, tokenizer, longest)
    gold = load_gold(args.gold, args, tokenizer, device)
    reward_model = load_model(load_scalar, args.reward_model, args, device) if args.reward_model else None
    return Inputs(
        args=args, device=device, policies=policies, tokenizer=tokenizer, rows=rows, references=references,
        is_squad=is_squad, pairs=pairs, self_ranked=self_ranked, by_people=by_people, rows_by_people=rows_by_people,
        gold=gold, reward_model=reward_model,
    )  # fmt: skip


def comparisons_path(args: Args) -> Path:
    return args.data / "comparisons.validation.jsonl"


def encode_answers(questions: list[RankedQuestion], tokenizer: Tokenizer, chat: bool) -> list[Demonstration]:
    """Return all answers to all questions as ids."""
    return [
        Demonstration(tokenizer.encode(q.query, chat), response_ids(q.query, answer, tokenizer, chat), {})
        for q in questions
        for answer in q.answers
    ]


def read_references(rows: list[Demonstration], path: Path) -> tuple[list[list[str]], bool]:
    """Return the references of each row, and whether they are SQuAD's answers.

    The references are all answers that `meta` lists; otherwise the response, which for a question without an answer
    states that.
    """
    answers = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{number}"
        meta = read_meta(row, where)
        answers.append(field(meta, "answers", list[str], where) if "answers" in meta else None)
        if not all(answer.strip() for answer in answers[-1] or []):
            raise InputError(f"{where}: 'answers' in the field 'meta' must be a list of non-empty texts.")
        if (answers[-1] is None) != (answers[0] is None):
            raise InputError(f"{where}: only some rows have 'answers' in 'meta': evaluate SQuAD and dialogues apart.")
    references = [listed or [row.record["response"]] for listed, row in zip(answers, rows, strict=True)]
    return references, answers[0] is not None


# ------------------------------------------------------------------------------------------- 2. replies and scores
def replies(path: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return query and response. A separate function so that a policy is freed before the next one is loaded."""
    args = inputs.args
    policy = load_policy(path, inputs.rows, inputs.tokenizer, args, inputs.device)
    return sample(
        policy, inputs.rows, inputs.tokenizer, args, 1, temperature=args.temperature, top_p=args.top_p
    )  # fmt: skip


def measure(query: Tensor, response: Tensor, inputs: Inputs) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the replies' texts and every metric, (questions, 1)."""
    from nanorlhf.selfrank.reply_overlap import bleu4, google_bleu, meteor, squad_scores

    args, tokenizer, references = inputs.args, inputs.tokenizer, inputs.references
    texts = [tokenizer.decode(ids) for ids in response.tolist()]
    columns = {metric.__name__: metric(references, texts) for metric in (bleu4, google_bleu, meteor)}
    if inputs.is_squad:
        columns |= squad_scores(references, texts)
    with autocast(args.dtype, inputs.device):
        if inputs.gold:
            columns["gold_score"] = inputs.gold.score_ids(inputs.queries, query, response)
        if inputs.reward_model:
            rm = rm_scores(inputs.reward_model, query, response, tokenizer.pad_id, args.batch_size)
            columns["rm_score"] = rm
    return texts, {metric: np.array(column)[:, None] for metric, column in columns.items()}


def measure_references(inputs: Inputs) -> dict[str, float]:
    args, rows = inputs.args, inputs.rows
    reference = {"response_length": fmean(len(row.response) for row in rows)}
    with autocast(args.dtype, inputs.device):
        if inputs.gold:
            reference["gold_score"] = fmean(inputs.gold.score_rows(rows))
        if inputs.reward_model:
            scores = row_scores(inputs.reward_model, rows, inputs.tokenizer.pad_id, args.batch_size, "left")
            reference["rm_score"] = scores.mean().item()
    return reference


# ---------------------------------------------------------------------------------------------------------- 3. compare
def statistics(columns: dict[str, np.ndarray], args: Args) -> dict:
    """[STR tables] Return the mean of each metric, with its interval."""
    return {
        "metrics": {
            metric: {
                "mean": float(scores.mean()),
                "mean_ci": bootstrap_interval(scores, args.seed, args.num_resamples),
            }
            for metric, scores in columns.items()
        }
    }


@torch.no_grad()
def agreement(inputs: Inputs) -> dict[str, dict | list[dict] | None]:
    """Measure agreement with self-ranking on its pairs and its first answers, and the reward model's with people."""
    args, gold, reward_model, pad_id = inputs.args, inputs.gold, inputs.reward_model, inputs.tokenizer.pad_id
    ranking = first_answers = None
    people: list[dict] = []
    with autocast(args.dtype, inputs.device):
        if inputs.pairs:
            ranking = evaluate_pairs(
                inputs.pairs, reward_model, gold, pad_id, args.batch_size, comparisons_path(args), args.seed,
                args.num_resamples,
            )  # fmt: skip
        if inputs.self_ranked and gold and gold.model is None:  # a model's score never means "right"
            first_answers = evaluate_first_answers(inputs.self_ranked, gold, args.seed, args.num_resamples)
        if inputs.by_people and reward_model:
            people = evaluate_order(
                inputs.by_people, inputs.rows_by_people, reward_model, pad_id, args.batch_size, args.seed,
                args.num_resamples,
            )  # fmt: skip
    return {"self_ranking": ranking, "first_answers": first_answers, "human_study": people}


def training_costs(inputs: Inputs) -> dict[str, dict[str, float]]:
    """Return the cost of the runs that the policies and the reward model came from, except models without a run."""
    reward_model = inputs.args.reward_model
    costs = {}
    for name, path in (inputs.policies | ({"reward model": reward_model} if reward_model else {})).items():
        where = Path(path) / "summary.json"
        summary, rows = read_object(where) if where.exists() else {}, read_metrics(path)
        if rows and "num_trained_parameters" in summary:
            costs[name] = {
                "num_trained_parameters": field(summary, "num_trained_parameters", int, str(where)),
                # a reward model's last row has only the final validation
                "num_examples": max(int(row.get("episode", 0)) for row in rows),
                "seconds": field(summary, "seconds", float, str(where)),
            }
    return costs


# ------------------------------------------------------------------------------------------------------------ 4. write
def write(
    result: dict,
    figure: Figure | None,
    texts: dict[str, list[str]],
    measured: dict[str, dict[str, np.ndarray]],
    inputs: Inputs,
) -> dict:
    samples = [
        {
            "query": question,
            "references": inputs.references[i],
            "policies": {
                name: {"response": texts[name][i]} | {metric: scores[i].item() for metric, scores in columns.items()}
                for name, columns in measured.items()
            },
        }
        for i, question in enumerate(inputs.queries)
    ]
    args = inputs.args
    runs = [path for path in (*inputs.policies.values(), args.reward_model) if path]
    page = reply_report.page(result, figure, runs, samples[: args.num_report_samples])
    return write_evaluation(args, result, page, {"samples.jsonl": samples})
