"""Overlap of replies with their references, as the STR paper measures dialogues and SQuAD.

Each row is one reply (`responses`) and one or several texts to compare it with (`references`). The functions return one
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

NO_WORDNET = SimpleNamespace(synsets=lambda word: [])  # stands in for WordNet: no word has a synonym
ARTICLES = re.compile(r"\b(a|an|the)\b")


# ----------------------------------------------------------------------------------------- 1. overlap with a reference
def tokenised(references: list[list[str]], responses: list[str]) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Split into words and runs of punctuation: `don't` becomes three tokens, as DailyDialog's `don ' t`.

    The paper names no tokenizer; this one is a regular expression that needs no NLTK data. Case is kept. Raises
    ValueError for a row without references, and where the two lists differ in length.
    """
    for row, (texts, response) in enumerate(zip(references, responses, strict=True)):
        if not texts:
            raise ValueError(f"row {row} has no reference: leave it out, or use squad_scores")
        yield [wordpunct_tokenize(text) for text in texts], wordpunct_tokenize(response)


def bleu4(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] Sentence BLEU by NLTK: 1- to 4-grams, counts clipped over all references, brevity penalty.

    The paper names no smoothing; we use method 1 of Chen and Cherry (2014): an order without matches counts as 0.1
    matches. A reply of fewer than 4 tokens has such orders, so it scores below 1 even where it equals its reference.
    """
    smooth = SmoothingFunction().method1
    return [float(sentence_bleu(*row, smoothing_function=smooth)) for row in tokenised(references, responses)]


def google_bleu(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] By NLTK: the minimum of precision and recall over all 1- to 4-grams; the best reference counts.

    The paper says "GLEU" and cites a parser-based metric (Mutton et al. 2007), but its scale and its library are those
    of NLTK's GLEU, which is Google-BLEU (Wu et al. 2016).
    """
    return [float(sentence_gleu(*row)) for row in tokenised(references, responses)]


def meteor(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] METEOR (Lavie and Agarwal 2007) by NLTK, in lower case; the best reference counts.

        P, R = matched tokens of the response's and of the reference's     F = P R / (.9 P + .1 R)
        METEOR = F (1 - .5 (chunks / matches)^3)        chunks: runs of matches that are adjacent in both

    So a one-word reply equal to its reference scores .5. NLTK matches repeated words from the end, where the metric is
    defined to minimise chunks. `meteor_matching` says what counts as a match.
    """
    words = meteor_wordnet() or NO_WORDNET
    return [float(meteor_score(*row, wordnet=words)) for row in tokenised(references, responses)]


def meteor_matching() -> str:
    """What METEOR matches here; reports say it, because scores with and without synonyms are not comparable."""
    return "exact and stem" if meteor_wordnet() is None else "exact, stem and WordNet synonyms"


def meteor_wordnet() -> object | None:
    """NLTK's WordNet reader, None where its data is not installed; nothing is downloaded.

    Raises InputError where the data is incomplete.
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
    """[STR squad] exact_match, precision, recall and f1 per row; exact_match and f1 equal SQuAD 2.0's official script.

        precision, recall = shared tokens, with repeats, as a share of the response's and of the reference's tokens
        f1                = 2 precision recall / (precision + recall)

    The reference with the best f1 counts, the first one in a tie; exact_match is 1 if any reference matches. A question
    without an answer has no reference (or `unanswerable`): all four are 1 for a response without tokens, else 0.
    The script computes precision and recall only on the way to f1; the paper reports them too.
    """
    scores: dict[str, list[float]] = {"exact_match": [], "precision": [], "recall": [], "f1": []}
    for texts, response in zip(references, responses, strict=True):
        tokens = squad_tokens(response)
        # as in the script: drop references without tokens, such as "the"; if none is left, there is no answer
        golds = [gold for gold in map(squad_tokens, texts) if gold] or [[]]
        overlaps = [token_overlap(gold, tokens) for gold in golds]
        best = max(overlaps, key=lambda overlap: overlap["f1"])
        for name, value in ({"exact_match": float(tokens in golds)} | best).items():
            scores[name].append(value)
    return scores


def squad_tokens(text: str) -> list[str]:
    """Lower-case words without ASCII punctuation and articles. `unanswerable` alone gives no tokens.

    >>> squad_tokens("The U.S. and an  ape's")
    ['us', 'and', 'apes']
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    tokens = ARTICLES.sub(" ", kept).split()
    return [] if tokens == ["unanswerable"] else tokens  # how the prompt spells SQuAD's empty answer


def token_overlap(reference: list[str], response: list[str]) -> dict[str, float]:
    if not reference or not response:  # avoids 0 / 0: both empty is right, one empty is wrong
        return dict.fromkeys(("precision", "recall", "f1"), float(reference == response))
    common = sum((Counter(reference) & Counter(response)).values())
    precision, recall = common / len(response), common / len(reference)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if common else 0.0,
    }
