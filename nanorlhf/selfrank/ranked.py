"""A question with answers that self-ranking has ranked."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranked:
    """A question and its m answers: a row of self_rank.jsonl."""

    query: str
    answers: list[str]  # in sampling order
    weights: list[float]  # TextRank's, per answer
    clusters: list[int]  # ISODATA's, per answer
    representatives: list[int]  # one answer index per cluster, highest weight first
    chat: bool = False  # True if the query was formatted by a chat template
