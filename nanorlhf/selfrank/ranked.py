"""A question whose answers are ranked without people, and the answers' embeddings that the ranking is made from."""

from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from nanorlhf.encoder import Encoder, sentence_embeddings
from nanorlhf.errors import InputError
from nanorlhf.padding import micro_batches

TEXTS_AT_ONCE = 256  # encoder batch; fixed, because rounding depends on it


@dataclass(frozen=True)
class Ranked:
    """A question and its m answers: a row of self_rank.jsonl."""

    query: str
    answers: list[str]  # in sampling order
    weights: list[float]  # TextRank's, per answer
    clusters: list[int]  # ISODATA's, per answer
    representatives: list[int]  # one answer index per cluster, highest weight first
    chat: bool = False  # whether a chat template has written the query


def embed(texts: set[str], encoder: Encoder) -> dict[str, np.ndarray]:
    """The unit vector (d,) of each text, in batches of similar length. Raises InputError for NaN or infinity."""
    in_order = sorted(texts, key=lambda text: (len(text), text))
    batches = tqdm(micro_batches(in_order, TEXTS_AT_ONCE), desc="encoder", unit=" batches", leave=False)
    vectors = [row for batch in batches for row in sentence_embeddings(batch, encoder, TEXTS_AT_ONCE).double().numpy()]
    if not np.isfinite(vectors).all():
        raise InputError(f"--encoder {encoder.where}: its vectors are not finite: its weights are damaged.")
    return dict(zip(in_order, vectors, strict=True))
