"""How good a reply is against the references of its question, as the STR paper measures dialogues and SQuAD.

A row is a reply (`responses`) and what it is measured against (`references`), one text or several. Each function gives
a number from 0 to 1 a row; the paper's tables hold the means times 100.
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

NO_WORDNET = SimpleNamespace(synsets=lambda word: [])  # to NLTK a WordNet in which no word has a synonym
ARTICLES = re.compile(r"\b(a|an|the)\b")


# ----------------------------------------------------------------------------------------- 1. overlap with a reference
def tokenised(references: list[list[str]], responses: list[str]) -> Iterator[tuple[list[list[str]], list[str]]]:
    """Words and runs of punctuation: `don't` is the three tokens that DailyDialog writes as `don ' t`.

    The paper names no tokenizer; this one is a regular expression and needs none of NLTK's data. Case stays. Raises
    ValueError for a row without a reference, and where the two lists differ in length.
    """
    for row, (texts, response) in enumerate(zip(references, responses, strict=True)):
        if not texts:
            raise ValueError(f"row {row} has no reference: leave it out, or measure it by squad_scores")
        yield [wordpunct_tokenize(text) for text in texts], wordpunct_tokenize(response)


def bleu4(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] Sentence BLEU by NLTK: 1- to 4-grams, clipped by the reference that has most, brevity penalty.

    The paper names no smoothing; ours is method 1 of Chen and Cherry (2014): an order without a match counts as one
    with 0.1 matches. A reply shorter than 4 tokens has such orders too: even one equal to its reference is below 1.
    """
    smooth = SmoothingFunction().method1
    return [float(sentence_bleu(*row, smoothing_function=smooth)) for row in tokenised(references, responses)]


def google_bleu(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] The smaller of precision and recall of all 1- to 4-grams together, of the best reference, by NLTK.

    The paper says "GLEU" and cites a metric that parses its sentences (Mutton et al. 2007), but its scale and its
    library are those of NLTK's GLEU, which is this one (Wu et al. 2016). So it goes by the other's name.
    """
    return [float(sentence_gleu(*row)) for row in tokenised(references, responses)]


def meteor(references: list[list[str]], responses: list[str]) -> list[float]:
    """[STR metrics] METEOR (Lavie and Agarwal 2007) of the best reference, by NLTK, which takes all in lower case.

        P, R = matched tokens of the response's and of the reference's     F = P R / (.9 P + .1 R)
        METEOR = F (1 - .5 (chunks / matches)^3)        chunks: runs of matches that follow each other in both

    So one word equal to its reference has .5. A word that is there twice NLTK matches from the end on, and not, as the
    metric is defined, so that chunks are fewest. What counts as a match is said by `meteor_matching`.
    """
    words = meteor_wordnet() or NO_WORDNET
    return [float(meteor_score(*row, wordnet=words)) for row in tokenised(references, responses)]


def meteor_matching() -> str:
    """What METEOR matches here, for the table to say: its numbers with and without synonyms don't compare."""
    return "exact and stem" if meteor_wordnet() is None else "exact, stem and WordNet synonyms"


def meteor_wordnet() -> object | None:
    """NLTK's reader of WordNet, where NLTK's data has it; nothing is downloaded."""
    try:
        wordnet.ensure_loaded()
    except LookupError:
        return None
    except OSError as error:
        raise InputError(f"NLTK's data of WordNet is incomplete ({error}): download it again or remove it.") from error
    return wordnet


# ------------------------------------------------------------------------------------------------------------- 2. SQuAD
def squad_scores(references: list[list[str]], responses: list[str]) -> dict[str, list[float]]:
    """[STR squad] exact_match, precision, recall and f1 of each row, the first and the last as SQuAD 2.0's own script.

        precision, recall = tokens in common, counted with repeats, of the response's and of the reference's
        f1                = 2 precision recall / (precision + recall)

    Of several references the one with the best f1 counts, the first of equal ones; exact_match is 1 if any is the
    same. A question without an answer has no reference (or `unanswerable`): all four are 1 for a response without
    tokens, else 0. That script takes precision and recall for steps on the way; the paper reports them too.
    """
    scores: dict[str, list[float]] = {"exact_match": [], "precision": [], "recall": [], "f1": []}
    for texts, response in zip(references, responses, strict=True):
        tokens = squad_tokens(response)
        # as that script: a reference such as "the" says nothing, and if none says anything the question has no answer
        golds = [gold for gold in map(squad_tokens, texts) if gold] or [[]]
        overlaps = [token_overlap(gold, tokens) for gold in golds]
        best = max(overlaps, key=lambda overlap: overlap["f1"])
        for name, value in ({"exact_match": float(tokens in golds)} | best).items():
            scores[name].append(value)
    return scores


def squad_tokens(text: str) -> list[str]:
    """Lower case, without ASCII punctuation, then without articles, cut at blanks. `unanswerable` alone is no token.

    >>> squad_tokens("The U.S. and an  ape's")
    ['us', 'and', 'apes']
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    tokens = ARTICLES.sub(" ", kept).split()
    return [] if tokens == ["unanswerable"] else tokens  # how the prompt spells SQuAD's empty answer


def token_overlap(reference: list[str], response: list[str]) -> dict[str, float]:
    if not reference or not response:  # no division: both empty is right, one empty is wrong
        return dict.fromkeys(("precision", "recall", "f1"), float(reference == response))
    common = sum((Counter(reference) & Counter(response)).values())
    precision, recall = common / len(response), common / len(reference)
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if common else 0.0,
    }
