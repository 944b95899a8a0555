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
    """A question with its m answers: a row of self_rank.jsonl."""

    query: str
    answers: list[str]  # in the order in which they were sampled
    weights: list[float]  # TextRank's, of each answer
    clusters: list[int]  # ISODATA's, of each answer
    representatives: list[int]  # index of an answer of each cluster, the highest weight first


def embed(texts: set[str], encoder: Encoder) -> dict[str, np.ndarray]:
    """The unit vector (d,) of each text. Texts of one length go together: padding is work too."""
    in_order = sorted(texts, key=lambda text: (len(text), text))
    batches = tqdm(micro_batches(in_order, TEXTS_AT_ONCE), desc="encoder", unit=" batches", leave=False)
    vectors = [row for batch in batches for row in sentence_embeddings(batch, encoder, TEXTS_AT_ONCE).double().numpy()]
    if not np.isfinite(vectors).all():
        raise InputError(f"--encoder {encoder.where}: its vectors are not finite: its weights are damaged.")
    return dict(zip(in_order, vectors, strict=True))
