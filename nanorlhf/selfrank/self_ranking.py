"""Evaluate self-ranking: its pairs and first answers against gold, its order against people's, and Figure 2."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from nanorlhf import distributed
from nanorlhf.dataset import Comparison, Demonstration, field, iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.evals.scores import gold_margins, row_scores
from nanorlhf.metrics.agreement import (
    RankedQuestion,
    annotator_kappas,
    consensus,
    kendall_tau,
    order_probability,
    pairwise_agreement,
)
from nanorlhf.metrics.intervals import bootstrap_interval, percentile_interval
from nanorlhf.model import ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.progress import Progress
from nanorlhf.reward_model import pair_scores
from nanorlhf.rewards.gold import Gold
from nanorlhf.selfrank.cluster_figure import cluster_figure
from nanorlhf.selfrank.ranked import Ranked
from nanorlhf.selfrank.sentence_encoder import embed
from nanorlhf.selfrank.text_rank import rank_order

Hits = list[bool | None]  # True: right, None: not counted


def read_meta(row: Demonstration | Comparison, where: str) -> dict:
    return field(row.record, "meta", dict, where) if "meta" in row.record else {}


def load_self_rank(path: Path) -> list[Ranked]:
    """Load the questions from a file written by `python -m data.self_rank`."""
    questions = []
    for where, row in iter_jsonl(path):
        query = field(row, "query", str, where)
        answers, weights = field(row, "answers", list[str], where), field(row, "weights", list[float], where)
        clusters, representatives = (field(row, name, list[int], where) for name in ("clusters", "representatives"))
        indices = [index for index in representatives if 0 <= index < len(answers)]
        if not (
            len(answers) == len(weights) == len(clusters) > 0
            and len(indices) == len(representatives)
            and sorted(clusters[index] for index in indices) == sorted(set(clusters))
        ):
            raise InputError(
                f"{where}: expected a text, a weight and a cluster for each answer, and one representative's index for "
                "each cluster: make the file with data.self_rank."
            )
        questions.append(Ranked(query, answers, weights, clusters, representatives))
    return questions


# -------------------------------------------------------------------------------------------- 1. pairs, noise, distance
@torch.no_grad()
def evaluate_pairs(
    rows: list[Comparison],
    reward_model: ScalarModel | None,
    gold: Gold | None,
    pad_id: int,
    batch_size: int,
    path: Path,
    seed: int,
    num_resamples: int,
) -> list[dict]:
    """Measure how often the reward model ranks pairs as self-ranking did and, with gold, how often that was right.

    Returns a row for all pairs, one per kind of noise, and one per distance in ranks.
    """
    columns: dict[str, Hits] = {}
    margins: list[float] = []
    if reward_model:
        with distributed.on_device(reward_model):
            for batch in Progress(micro_batches(rows, batch_size), desc="reward model", leave=False):
                margins += torch.sub(*pair_scores(reward_model, batch, pad_id)).tolist()
        columns["rm_accuracy"] = [margin > 0 for margin in margins]  # a tie counts as wrong
    if gold:
        gains = gold_margins(gold, rows)
        columns["chosen_better"] = [gain > 0 for gain in gains]
        columns["chosen_as_good"] = [gain >= 0 for gain in gains]  # or better
        columns["gold_agreement"] = [gain > 0 if gain else None for gain in gains]  # no order of an equal pair is right
        if reward_model:
            columns["rm_gold_agreement"] = [
                (margin > 0) == (gain > 0) if gain else None for margin, gain in zip(margins, gains, strict=True)
            ]
    groups = []
    for group, numbers in pair_groups(rows, path):
        group["num_pairs"] = len(numbers)
        for name, hits in columns.items():
            rate = share([hits[i] for i in numbers], [rows[i].record["query"] for i in numbers], seed, num_resamples)
            group[name], group[f"{name}_ci"] = rate or (None, None)
        groups.append(group)
    return groups


def pair_groups(rows: list[Comparison], path: Path) -> list[tuple[dict, list[int]]]:
    """Group all pairs, pairs by kind of noise, and pairs by distance in ranks; each group with its row numbers."""
    by_noise, by_distance = defaultdict(list), defaultdict(list)
    for number, row in enumerate(rows):
        where = f"{path}:{number + 1}"
        meta = read_meta(row, where)
        if "noise" in meta:
            by_noise["none" if meta["noise"] is None else field(meta, "noise", str, where)].append(number)
        if "rank_chosen" in meta:
            chosen, rejected = (field(meta, f"rank_{name}", int, where) for name in ("chosen", "rejected"))
            by_distance[rejected - chosen].append(number)
    groups: list[tuple[dict, list[int]]] = [({}, [*range(len(rows))])]
    groups += [({"noise": kind}, by_noise[kind]) for kind in sorted(by_noise, key=lambda k: (k != "none", k))]
    return groups + [({"distance": distance}, by_distance[distance]) for distance in sorted(by_distance)]


def share(hits: Hits, queries: list[str], seed: int, num_resamples: int) -> tuple[float, tuple[float, float]] | None:
    """Return the share of True among True and False, and its 95% interval.

    A resample draws whole questions: pairs from one question share answers, so they aren't independent.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # query -> True, all
    for hit, query in zip(hits, queries, strict=True):
        if hit is not None:
            counts[query][0] += hit
            counts[query][1] += 1
    if not counts:
        return None

    def ratio(counts_by_question: np.ndarray) -> np.ndarray:  # (..., questions, 2) -> (...)
        right, total = np.moveaxis(counts_by_question.sum(-2), -1, 0)
        return right / total

    counts_by_question = np.array([*counts.values()])  # (questions, 2)
    return float(ratio(counts_by_question)), percentile_interval(counts_by_question, ratio, seed, num_resamples)


# --------------------------------------------------------------------------------- 2. first answers and the human study
def evaluate_first_answers(questions: list[Ranked], gold: Gold, seed: int, num_resamples: int) -> dict:
    """Measure how often TextRank's first answer is right, against one drawn at random. A gold score of 1 is right."""
    values = defaultdict(list)  # which answer -> [gold score, is right] for each question
    for question in questions:
        golds = gold.score_texts([question.query] * len(question.answers), question.answers)
        scores = np.array([[gold, gold >= 1] for gold in golds], dtype=float)[rank_order(question.weights)]  # (m, 2)
        values["first"].append(scores[0])
        values["random"].append(scores.mean(0))
        values["last"].append(scores[-1])
        values["any"].append(scores.max(0))
        values["first_minus_random"].append(scores[0] - scores.mean(0))
    result: dict = {"num_questions": len(questions)}
    for name, column in values.items():
        gold_scores, right = np.array(column).T  # (questions,)
        interval = bootstrap_interval(right[:, None], seed, num_resamples)
        result[name] = {"right": right.mean().item(), "right_ci": interval, "gold_score": gold_scores.mean().item()}
    return result


@torch.no_grad()
def evaluate_order(
    questions: list[RankedQuestion],
    rows: list[Demonstration],
    reward_model: ScalarModel,
    pad_id: int,
    batch_size: int,
    seed: int,
    num_resamples: int,
) -> list[dict]:
    """Measure how well the reward model's order agrees with people's, and people's with each other.

    rows: all answers as ids. Returns a row for the rankings without ISODATA, if any, and one for those with it.
    """
    scores = row_scores(reward_model, rows, pad_id, batch_size, "right").float()  # (questions * answers,)
    orders = [rank_order(row).tolist() for row in scores.view(len(questions), -1).tolist()]
    studies = []
    for representatives in sorted({question.representatives for question in questions}):
        numbers = [i for i, question in enumerate(questions) if question.representatives == representatives]
        ours, theirs = [orders[i] for i in numbers], [consensus(questions[i].rankings.values()) for i in numbers]
        pairs = [([our], [their]) for our, their in zip(ours, theirs, strict=True)]
        study = {"representatives": representatives, "num_answers": len(ours[0])} | order_probability(ours, theirs)
        for measure in (pairwise_agreement, kendall_tau):
            agreements = np.array([[measure(*pair)] for pair in pairs])
            interval = bootstrap_interval(agreements, seed, num_resamples)
            study[measure.__name__], study[f"{measure.__name__}_ci"] = measure(ours, theirs), interval
        several = any(len(questions[i].rankings) > 1 for i in numbers)
        kappas = annotator_kappas([questions[i] for i in numbers]) if several else None
        studies.append(study | {"annotators": kappas})
    return studies


# -------------------------------------------------------------------------------------------------------- 3. Figure 2
def draw_answers(questions: list[Ranked], encoder: Any, where: str) -> tuple[Figure, dict]:
    """[STR figure 2] Draw the question with the most clusters; return the figure and its data."""
    question = max(questions, key=lambda question: len(question.representatives))  # the first in a tie
    vectors = embed(set(question.answers), encoder)
    title = f"{len(question.answers)} answers to one question"
    in_rows = np.stack([vectors[answer] for answer in question.answers])  # (m, d)
    figure = cluster_figure(title, in_rows, question.weights, question.clusters, question.representatives)
    in_order = [
        {
            "text": question.answers[i],
            "weight": question.weights[i],
            "cluster": question.clusters[i],
            "representative": i in question.representatives,
        }
        for i in rank_order(question.weights).tolist()
    ]
    return figure, {"query": question.query, "encoder": where, "answers": in_order}
