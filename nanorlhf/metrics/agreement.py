"""Agreement of annotators with the reward model and with each other: rankings (the human study of STR) and pairs.

Rankings are read from JSON Lines, one line per question and annotator, as `python -m data.rank` writes them:

    {"query": str, "answers": [str, ...], "ranking": [int, ...], "annotator": str, "representatives": bool}

`ranking` lists the answers' indices from 0, best first. `representatives` may be missing; true: the answers are from
different clusters of ISODATA. A question can be ranked with and without ISODATA. Below, a ranking is a list of indices;
several are (questions, m), m answers per question, and raise ValueError unless each row is a permutation of 0 to m-1.

Pairs labelled by several annotators are one line each, with the index of the response that each annotator prefers:

    {"query": str, "responses": [str, str], "preferred": {annotator: 0 or 1, ...}}
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import scipy  # .stats is loaded on first use, which most runs don't reach
from numpy.typing import ArrayLike

from nanorlhf.dataset import field, filled, iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics import wilson_interval


@dataclass(frozen=True)
class RankedQuestion:
    query: str
    answers: list[str]
    rankings: dict[str, list[int]]  # by annotator
    representatives: bool = False  # True: the answers are from different clusters of ISODATA


# ---------------------------------------------------------------------------------------------------------- 1. the file
def iter_rankings(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield the checked rows of one file, each with `file:line`. Raises InputError for a malformed row."""
    for where, row in iter_jsonl(path):
        field(row, "query", str, where)
        answers, ranking = field(row, "answers", list[str], where), field(row, "ranking", list[int], where)
        if len(answers) < 2:
            raise InputError(f"{where}: the field 'answers' must be a list of at least two texts.")
        if sorted(ranking) != list(range(len(answers))):
            raise InputError(
                f"{where}: the field 'ranking' is {ranking!r:.80}; expected each index from 0 to {len(answers) - 1} "
                "once, best first."
            )
        filled(row, "annotator", where)
        field({"representatives": False} | row, "representatives", bool, where)
        yield where, row


def load_rankings(paths: Iterable[str | Path]) -> list[RankedQuestion]:
    """Load the questions of one or several files, in order of first appearance; all have the same number of answers.

    A question with and without ISODATA counts as two. Raises InputError if two annotators ranked different lists of
    answers, or one ranked a question twice.
    """
    questions: dict[tuple[str, bool], RankedQuestion] = {}
    positions: dict[tuple[str, bool, str], str] = {}
    for path in paths:
        for where, row in iter_rankings(path):
            annotator, answers = row["annotator"], row["answers"]
            key = row["query"], row.get("representatives", False)
            question = questions.setdefault(key, RankedQuestion(key[0], answers, {}, key[1]))
            first = next(iter(questions.values()))
            if answers != question.answers:
                [*_, other] = question.rankings
                raise InputError(
                    f"{where}: the answers or their order differ from the ones that {other!r} ranked at "
                    f"{positions[*key, other]}: {annotator!r} must rank the same list."
                )
            if len(answers) != len(first.answers):
                raise InputError(
                    f"{where}: this question has {len(answers)} answers, others have {len(first.answers)}: evaluate "
                    "them separately."
                )
            if annotator in question.rankings:
                raise InputError(
                    f"{where}: {annotator!r} already ranked this question at {positions[*key, annotator]}; delete one "
                    "of the two lines."
                )
            positions[*key, annotator] = where
            question.rankings[annotator] = row["ranking"]
    return list(questions.values())


# ------------------------------------------------------------------------------------ 2. reward model and people
def consensus(rankings: Iterable[list[int]]) -> list[int]:
    """Combine the annotators' rankings of a question into one by mean rank, ties in the order of the answers.

    >>> consensus([[0, 1, 2, 3], [1, 0, 2, 3], [2, 1, 0, 3]])  # mean ranks from 0: 1, 2/3, 4/3, 3
    [1, 0, 2, 3]
    """
    ranks = answer_ranks(list(rankings))  # (annotators, m)
    return np.argsort(ranks.sum(0), kind="stable").tolist()  # sums order like means, and are exact


def order_probability(rm_rankings: ArrayLike, human_rankings: ArrayLike) -> dict:
    """[STR human study] Return the share of questions with identical rankings.

    Returns order_probability, order_probability_ci (95%, Wilson), num_questions, and chance, 1/m! (4.17% for m = 4).
    The paper's 83.33% can't be a share of its 100 questions, so we always report num_questions.
    """
    ours, theirs = paired(rm_rankings, human_rankings)
    share = float((ours == theirs).all(1).mean())
    return {
        "order_probability": share,
        "order_probability_ci": wilson_interval(share, len(ours)),
        "num_questions": len(ours),
        "chance": 1 / math.factorial(ours.shape[1]),
    }


def pairwise_agreement(rm_rankings: ArrayLike, human_rankings: ArrayLike) -> float:
    """[STR human study] Return the share of answer pairs that both rank in the same order; chance is 1/2."""
    ours, theirs = map(answer_ranks, paired(rm_rankings, human_rankings))
    first, second = np.triu_indices(ours.shape[1], k=1)  # the pairs
    return float(((ours[:, first] < ours[:, second]) == (theirs[:, first] < theirs[:, second])).mean())


def kendall_tau(rm_rankings: ArrayLike, human_rankings: ArrayLike) -> float:
    """[STR human study] Return Kendall's tau of the two rankings, mean over questions; chance is 0.

    Without ties it equals 2 * pairwise_agreement - 1; tau is the scale usually reported.
    """
    pairs = zip(*map(answer_ranks, paired(rm_rankings, human_rankings)), strict=True)
    return fmean(float(scipy.stats.kendalltau(ours, theirs).statistic) for ours, theirs in pairs)


# ------------------------------------------------------------------------------------------ 3. people and people
def annotator_kappas(questions: list[RankedQuestion]) -> dict:
    """[STR human study] Return `kappas` of the answers' ranks; num_common counts questions.

    The paper reports "kappa" without naming the kind. An annotator gives each rank once per question, so chance is
    exactly 1/m, and if everyone ranks every question, the two kappas are equal. Raises InputError if no question has
    two rankings.
    """
    labels: dict[str, dict] = defaultdict(dict)  # annotator -> (question, answer) -> rank
    for i, question in enumerate(questions):
        for name, ranks in zip(question.rankings, answer_ranks(list(question.rankings.values())), strict=True):
            labels[name] |= {(i, answer): int(rank) for answer, rank in enumerate(ranks)}
    result = kappas(labels)
    if not result["num_pairs"]:
        raise InputError("no question is ranked by two annotators; kappa needs at least one.")
    return result | {"num_common": result["num_common"] // len(questions[0].answers)}


def kappas(labels: Mapping[str, Mapping[Hashable, int]]) -> dict:
    """Measure how much num_annotators agree beyond chance; labels: annotator -> item -> label, from 0.

        cohen_kappa    per pair of annotators, on the items that both labelled; mean over the num_pairs such pairs
        fleiss_kappa   all annotators, on the num_common items that all labelled

    Pairs of annotators with a chance agreement of 1 are skipped; a kappa without data is None.
    """
    cohen = []
    for ours, theirs in itertools.combinations(labels.values(), 2):
        shared = [item for item in ours if item in theirs]
        if shared:
            cohen.append(cohen_kappa([ours[item] for item in shared], [theirs[item] for item in shared]))
    cohen = [kappa for kappa in cohen if not math.isnan(kappa)]
    common = [item for item in next(iter(labels.values())) if all(item in labelled for labelled in labels.values())]
    fleiss = math.nan
    if common and len(labels) > 1:
        table = np.array([[labelled[item] for labelled in labels.values()] for item in common])  # (items, annotators)
        fleiss = fleiss_kappa((table[:, :, None] == np.arange(table.max() + 1)).sum(1))
    return {
        "cohen_kappa": fmean(cohen) if cohen else None,
        "num_pairs": len(cohen),
        "fleiss_kappa": None if math.isnan(fleiss) else fleiss,
        "num_common": len(common),
        "num_annotators": len(labels),
    }


def cohen_kappa(ours: ArrayLike, theirs: ArrayLike) -> float:
    """Return Cohen's kappa (1960) of two people's labels (items,): (observed - expected) / (1 - expected).

    observed   share of items with the same label
    expected   the same for two people who label at random, each with their own label frequencies

    NaN if expected is 1. Raises ValueError unless both label the same items, at least one.
    """
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.shape != theirs.shape or ours.ndim != 1 or not ours.size:
        raise ValueError(f"labels are {ours.shape} and {theirs.shape}: expected the same items, at least one")
    observed = (ours == theirs).mean()
    expected = sum((ours == label).mean() * (theirs == label).mean() for label in np.unique(ours))
    return float((observed - expected) / (1 - expected)) if expected < 1 else math.nan


def fleiss_kappa(counts: ArrayLike) -> float:
    """Return Fleiss' kappa (1971) from counts (items, labels): how many people gave each item each label.

    observed   share of pairs of people who agree on an item, mean over items
    expected   the same for pairs who label at random, with the label frequencies of all people

    NaN if expected is 1. Raises ValueError unless all rows have the same sum, at least 2.
    """
    counts = np.asarray(counts)
    num_people = counts.sum(1)
    if num_people.min() != num_people.max() or num_people[0] < 2:
        raise ValueError(
            f"items have {num_people.min()} to {num_people.max()} labels: expected the same number, at least 2"
        )
    n = num_people[0]
    observed = (counts * (counts - 1)).sum(1).mean() / (n * (n - 1))
    expected = (counts.mean(0) / n) @ (counts.mean(0) / n)
    return float((observed - expected) / (1 - expected)) if expected < 1 else math.nan


# ----------------------------------------------------------------------------------------------- 4. people and pairs
@dataclass(frozen=True)
class LabelledPair:
    query: str
    responses: tuple[str, str]  # in the order shown
    preferred: dict[str, int]  # annotator -> 0 the first, 1 the second


def load_labelled_pairs(path: str | Path) -> list[LabelledPair]:
    """Load the pairs of one file. Raises InputError for a malformed row."""
    pairs = []
    for where, row in iter_jsonl(path):
        query, responses = field(row, "query", str, where), field(row, "responses", list[str], where)
        preferred = field(row, "preferred", dict[str, int], where)
        if len(responses) != 2 or responses[0] == responses[1]:
            raise InputError(f"{where}: the field 'responses' must be a list of two different texts.")
        if not preferred or not {*preferred.values()} <= {0, 1}:
            raise InputError(f"{where}: the field 'preferred' must have a choice, 0 or 1, of at least one annotator.")
        pairs.append(LabelledPair(query, (responses[0], responses[1]), preferred))
    return pairs


def pair_agreement(pairs: list[LabelledPair]) -> dict:
    """Measure how much annotators agree on pairs, and how often one contradicts themselves.

    cohen_kappa, fleiss_kappa   as in `kappas`; num_common of the num_pairs pairs are labelled by all num_annotators
    circular_share   share of the num_triads with a cycle, A preferred to B, B to C and C to A (Kendall and Babington
                     Smith 1940); a triad is one annotator's comparisons of three responses to a query. Chance: 1/4
    """
    labels: dict[str, dict] = defaultdict(dict)  # annotator -> number of the pair -> preferred
    for i, pair in enumerate(pairs):
        for name, choice in pair.preferred.items():
            labels[name][i] = choice
    triads = circular_triads(pairs)
    shares = {"circular_share": fmean(triads) if triads else None, "num_triads": len(triads)}
    return kappas(labels) | {"num_pairs": len(pairs)} | shares


def circular_triads(pairs: list[LabelledPair]) -> list[bool]:
    """Return, for each annotator and three responses to a query with all three pairs compared, if there is a cycle."""
    winners: dict[tuple[str, str], dict[frozenset[str], str]] = defaultdict(dict)  # annotator, query -> pair -> winner
    for pair in pairs:
        for annotator, choice in pair.preferred.items():
            winners[annotator, pair.query][frozenset(pair.responses)] = pair.responses[choice]
    triads = []
    for winner in winners.values():
        later = defaultdict(set)  # text -> texts it was compared with that sort after it
        for a, b in map(sorted, winner):
            later[a].add(b)
        for a, b in map(sorted, winner):
            for c in later[a] & later[b]:
                won = {winner[frozenset(pair_texts)] for pair_texts in ((a, b), (a, c), (b, c))}
                triads.append(len(won) == 3)  # in a cycle each of the three wins once
    return triads


# ------------------------------------------------------------------------------------------------------------ 5. arrays
def answer_ranks(rankings: ArrayLike) -> np.ndarray:
    """Return the rank of each answer, from 0: rankings (questions, m) -> (questions, m)."""
    return np.argsort(checked(rankings), axis=1)


def paired(rm_rankings: ArrayLike, human_rankings: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    ours, theirs = checked(rm_rankings), checked(human_rankings)
    if ours.shape != theirs.shape:
        raise ValueError(f"rankings are {ours.shape} and {theirs.shape}: expected the same answers")
    return ours, theirs


def checked(rankings: ArrayLike) -> np.ndarray:
    array = np.asarray(rankings)
    if array.ndim != 2 or array.size == 0 or (np.sort(array, axis=1) != np.arange(array.shape[1])).any():
        raise ValueError(f"rankings {array.shape} must be (questions, m), each row a permutation of 0 to m-1")
    return array
