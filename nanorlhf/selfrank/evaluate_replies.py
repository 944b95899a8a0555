"""One reply per question, and who agrees with the ranking that trained the policy: STR.

In: sft.{split}.jsonl; comparisons.validation.jsonl, self_rank.jsonl and people's rankings if there are any. Out:
overlap with references, reward model and gold scores with intervals, and what is known of the ranking.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch

from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import Count, Fraction, PositiveInt, TemperatureOrGreedy
from nanorlhf.dataset import Demonstration, field, is_chat, load_comparisons, load_demonstrations, response_ids
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
from nanorlhf.evals.writing import settings_of, write_evaluation
from nanorlhf.metrics import bootstrap_interval
from nanorlhf.metrics.agreement import load_rankings
from nanorlhf.progress import Progress
from nanorlhf.selfrank import reply_report
from nanorlhf.selfrank.self_ranking import (
    draw_answers,
    evaluate_first_answers,
    evaluate_order,
    evaluate_pairs,
    load_self_rank,
    meta_of,
)
from nanorlhf.selfrank.sentence_encoder import load_sentence_encoder
from nanorlhf.training.supervised import autocast


@dataclass(frozen=True, kw_only=True)
class Args(PolicyArgs):
    """The last policy is compared with each of those before it."""

    split: Literal["validation", "test"] = "validation"
    """whose questions are answered"""
    reward_model: str | None
    """checkpoint directory or Hub id; None leaves its scores out"""
    rankings: tuple[Path, ...] = ()
    """answers ranked by people, files of `python -m data.rank`; none leaves the human study out"""
    self_rank: Path | None = None
    """answers ranked by `python -m data.self_rank`, such as runs/str/data/self_rank.validation.jsonl; Figure 2 shows
    those to one of its questions"""
    encoder: str | None = None
    """of Figure 2, directory or Hub id; in the paper one that had no part in the ranking; None leaves it out"""
    max_response_length: PositiveInt
    """longest response of the data in tokens, EOS included"""
    temperature: TemperatureOrGreedy = 0.8
    """of the replies; 0 is greedy"""
    top_p: Fraction = 0.95
    """sample from the likeliest tokens that together reach this probability; 1: all"""
    num_resamples: Count = 2000
    """bootstrap resamples of the questions, for the 95% intervals"""
    gold: str | None = None
    """FILE.py:FUNCTION, function(query, reply) -> 0 to 1, 1 where the reply is right, or a larger reward model"""


def main(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    device = begin(args)
    if args.rankings and not args.reward_model:
        raise InputError("--rankings needs --reward-model: people's rankings are compared with the reward model's.")
    if args.encoder and not args.self_rank:
        raise InputError(f"--encoder {args.encoder}: it draws answers of --self-rank: name that file too.")
    policies = named_policies(args.policies)
    check_reward_model(args.reward_model)
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), args.reward_model], args.gold)
    Q, T = args.max_query_length, args.max_response_length
    path, pairs_path = args.data / f"sft.{args.split}.jsonl", args.data / "comparisons.validation.jsonl"
    rows = list(load_demonstrations(path, tokenizer, Q, T)[: args.num_queries])
    queries = [row.record["query"] for row in rows]
    references, is_squad = references_of(rows, path)
    has_pairs = pairs_path.exists() and (args.reward_model or args.gold)
    comparisons = list(load_comparisons(pairs_path, tokenizer, Q, T)) if has_pairs else []
    self_ranked = load_self_rank(args.self_rank) if args.self_rank else []
    by_people = load_rankings(args.rankings)
    chat = is_chat(rows[0].record, f"{path}:1")  # then the ranked questions, drawn from these files, are chats too
    ranked_rows = [
        Demonstration(tokenizer.encode(q.query, chat), response_ids(q.query, answer, tokenizer, chat), {})
        for q in by_people
        for answer in q.answers
    ]
    precision = autocast(args.dtype, device)
    longest = {
        str(path): longest_text(rows, args.response_length),
        str(pairs_path): longest_pair(comparisons),
        "--rankings": max((len(row.query) + len(row.response) for row in ranked_rows), default=0),
    }
    for flag, place in (("--reward-model", args.reward_model), ("--gold", args.gold)):
        check_model(flag, place, tokenizer, longest)
    gold = load_gold(args.gold, args, tokenizer, device)
    reward_model = load_model(load_scalar, args.reward_model, args, device) if args.reward_model else None
    figure = drawn = None
    if args.encoder:
        figure, drawn = draw_answers(self_ranked, load_sentence_encoder(args.encoder, device=device), args.encoder)

    # --------------------------------------------------------------------------------------------------- 2. the replies
    # brings NLTK and SciPy: a second, which no other evaluation should wait
    from nanorlhf.selfrank.overlap import bleu4, google_bleu, meteor, meteor_matching, squad_scores

    measured: dict[str, dict[str, np.ndarray]] = {}  # policy -> metric -> (questions, 1)
    texts, results = {}, {}  # by policy

    for name, place in Progress(policies.items(), desc="policies"):
        decoding = {"temperature": args.temperature, "top_p": args.top_p}
        query, response = sample(
            load_policy(place, rows, tokenizer, args, device),  # no variable: gone before the next is loaded
            rows, tokenizer, args, 1, **decoding,
        )  # fmt: skip
        replies = texts[name] = [tokenizer.decode(ids) for ids in response.tolist()]
        columns = {metric.__name__: metric(references, replies) for metric in (bleu4, google_bleu, meteor)}
        if is_squad:
            columns |= squad_scores(references, replies)
        with precision:
            if gold:
                columns["gold_score"] = gold.of_ids(queries, query, response)
            if reward_model:
                rm = rm_scores(reward_model, query, response, tokenizer.pad_id, args.batch_size)
                columns["rm_score"] = rm
        measured[name] = {metric: np.array(column)[:, None] for metric, column in columns.items()}
        results[name] = {
            "metrics": {  # [STR tables]
                metric: {
                    "mean": float(scores.mean()),
                    "mean_ci": bootstrap_interval(scores, args.seed, args.num_resamples),
                }
                for metric, scores in measured[name].items()
            },
            **endings(response, tokenizer),
        }

    # ------------------------------------------------------------------- 3. the references, and what ranked the answers
    reference = {"response_length": fmean(len(row.response) for row in rows)}
    pad_id, batch_size, seed, num_resamples = tokenizer.pad_id, args.batch_size, args.seed, args.num_resamples
    ranking = first_answers = people = None
    with precision, torch.no_grad():
        if gold:
            reference["gold_score"] = fmean(gold.of_rows(rows))
        if reward_model:
            scores = row_scores(reward_model, rows, pad_id, batch_size, "left")
            reference["rm_score"] = scores.mean().item()
        if comparisons:
            ranking = evaluate_pairs(
                comparisons, reward_model, gold, pad_id, batch_size, pairs_path, seed, num_resamples
            )
        if self_ranked and gold and gold.model is None:  # of a reward model's score nothing is known to be right
            first_answers = evaluate_first_answers(self_ranked, gold, seed, num_resamples)
        if by_people and reward_model:
            people = evaluate_order(by_people, ranked_rows, reward_model, pad_id, batch_size, seed, num_resamples)

    # --------------------------------------------------------------------------------------------------------- 4. write
    result = {
        "policies": results,
        "reference": reference,
        "differences": differences(measured, args.seed, args.num_resamples),
        "self_ranking": ranking,
        "first_answers": first_answers,
        "human_study": people,
        "figure": drawn,
        "meteor_matching": meteor_matching(),
        "num_questions": len(rows),
        "args": settings_of(args),
    }
    samples = [
        {
            "query": question,
            "references": references[i],
            "policies": {
                name: {"response": texts[name][i]} | {metric: scores[i].item() for metric, scores in columns.items()}
                for name, columns in measured.items()
            },
        }
        for i, question in enumerate(queries)
    ]
    runs = [place for place in (*policies.values(), args.reward_model) if place]
    shown = samples[: args.num_report_samples]
    return write_evaluation(args, result, reply_report.page(result, figure, runs, shown), {"samples.jsonl": samples})


def references_of(rows: list[Demonstration], path: Path) -> tuple[list[list[str]], bool]:
    """What each reply is compared with, and whether that is SQuAD's answers.

    All answers that `meta` lists; else the response, which for a question without an answer says so.
    """
    answers = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{number}"
        meta = meta_of(row, where)
        answers.append(field(meta, "answers", list[str], where) if "answers" in meta else None)
        if not all(answer.strip() for answer in answers[-1] or []):
            raise InputError(f"{where}: 'answers' in the field 'meta' must hold texts only, none of them empty.")
        if (answers[-1] is None) != (answers[0] is None):
            raise InputError(f"{where}: 'answers' in the field 'meta' are in some rows only: part SQuAD and dialogues.")
    references = [found or [row.record["response"]] for found, row in zip(answers, rows, strict=True)]
    return references, answers[0] is not None
