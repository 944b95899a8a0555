"""Overlap of replies with their references, the STR paper's metrics for dialogues and SQuAD.

Each row is one reply (`responses`) and one or more texts to compare it with (`references`). The functions return one
number per row, from 0 to 1; the paper's tables show the means times 100.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

from nltk.corpus import wordnet
from nltk.tokenize import wordpunct_tokenize
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from nltk.translate.gleu_score import sentence_gleu
from nltk.translate.meteor_score import meteor_score

from nanorlhf.errors import InputError

NO_WORDNET = SimpleNamespace(synsets=lambda word: [])  # replaces WordNet: no word has a synonym
ARTICLES = re.compile(r"\b(a|an|the)\b")


# ----------------------------------------------------------------------------------------- 1. overlap with a reference
def tokenised(references: list[list[str]], responses: list[str]) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Split into words and runs of punctuation: `don't` becomes three tokens, like DailyDialog's `don ' t`.

    The paper doesn't name a tokenizer. This one is a regular expression and needs no NLTK data. Case is kept. Raises
    ValueError for a row without references, or if the two lists differ in length.
    """
    for row, (texts, response) in enumerate(zip(references, responses, strict=True)):
        if not texts:
            raise ValueError(f"row {row} has no reference: drop it, or use squad_scores")
        yield [wordpunct_tokenize(text) for text in texts], wordpunct_tokenize(response)


def bleu4(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] Return NLTK's sentence BLEU: 1- to 4-grams, counts clipped over all references, brevity penalty.

    The paper doesn't name a smoothing. We use method 1 of Chen and Cherry (2014): an order without matches counts as
    0.1 matches. A reply of fewer than 4 tokens has such orders, so it scores below 1 even if it equals its reference.
    """
    smooth = SmoothingFunction().method1
    return [float(sentence_bleu(*row, smoothing_function=smooth)) for row in tokenised(references, responses)]


def google_bleu(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] Return NLTK's GLEU: the minimum of precision and recall over all 1- to 4-grams, for the best
    reference.

    The paper writes "GLEU" and cites a parser-based metric (Mutton et al. 2007), but its scale and library match NLTK's
    GLEU, which is Google-BLEU (Wu et al. 2016).
    """
    return [float(sentence_gleu(*row)) for row in tokenised(references, responses)]


def meteor(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] Return NLTK's METEOR (Lavie and Agarwal 2007) in lower case, for the best reference.

        P, R = share of the response's and the reference's tokens that match     F = P R / (.9 P + .1 R)
        METEOR = F (1 - .5 (chunks / matches)^3)        chunks: runs of matches that are adjacent in both

    So a one-word reply equal to its reference scores .5. NLTK matches repeated words from the end, although the metric
    is defined to minimise chunks. `meteor_matching` returns what counts as a match.
    """
    words = meteor_wordnet() or NO_WORDNET
    return [float(meteor_score(*row, wordnet=words)) for row in tokenised(references, responses)]


def meteor_matching() -> str:
    """Return what METEOR matches here, for reports: scores with and without synonyms are not comparable."""
    return "exact and stem" if meteor_wordnet() is None else "exact, stem and WordNet synonyms"


def meteor_wordnet() -> object | None:
    """Return NLTK's WordNet reader, or None if its data isn't installed. Downloads nothing.

    Raises InputError if the data is incomplete.
    """
    try:
        wordnet.ensure_loaded()
    except LookupError:
        return None
    except OSError as error:
        raise InputError(f"NLTK's WordNet data is incomplete ({error}): download it again or remove it.") from error
    return wordnet


# ------------------------------------------------------------------------------------------------------------- 2. SQuAD
def squad_scores(references: list[list[str]], responses: list[str]) -> dict[str, list[float]]:
    """[STR squad] Return exact_match, precision, recall and f1 per row.

    exact_match and f1 equal those of SQuAD 2.0's official script.

        precision, recall = shared tokens, with repeats, as a share of the response's and of the reference's tokens
        f1                = 2 precision recall / (precision + recall)

    The reference with the best f1 counts, the first in a tie; exact_match is 1 if any reference matches. A question
    without an answer has no reference (or `unanswerable`): all four are 1 for a response without tokens, else 0. The
    script computes precision and recall only to get f1; the paper reports them too.
    """
    scores: dict[str, list[float]] = {"exact_match": [], "precision": [], "recall": [], "f1": []}
    for texts, response in zip(references, responses, strict=True):
        tokens = squad_tokens(response)
        # as in the script: drop references without tokens, such as "the"; if none are left, there isn't an answer
        golds = [gold for gold in map(squad_tokens, texts) if gold] or [[]]
        overlaps = [token_overlap(gold, tokens) for gold in golds]
        best = max(overlaps, key=lambda overlap: overlap["f1"])
        for name, value in ({"exact_match": float(tokens in golds)} | best).items():
            scores[name].append(value)
    return scores


def squad_tokens(text: str) -> list[str]:
    """Return lower-case words without ASCII punctuation and articles. The text `unanswerable` gives no tokens.

    >>> squad_tokens("The U.S. and an  ape's")
    ['us', 'and', 'apes']
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    tokens = ARTICLES.sub(" ", kept).split()
    return [] if tokens == ["unanswerable"] else tokens  # the prompt's word for SQuAD's empty answer


def token_overlap(reference: list[str], response: list[str]) -> dict[str, float]:
    if not reference or not response:  # avoids 0 / 0: right if both are empty, wrong if one is
        return dict.fromkeys(("precision", "recall", "f1"), float(reference == response))
    common = sum((Counter(reference) & Counter(response)).values())
    precision, recall = common / len(response), common / len(reference)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if common else 0.0,
    }
