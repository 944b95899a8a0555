"""Noise on the worse answer of a pair, so that the reward model sees more kinds of wrong text.

    ngram      delete one to three words, replace them by as many words of another answer, or insert such words
    negation   remove one ("is not" -> "is", "can't" -> "can"), or add one after an auxiliary verb if there is none
    shuffle    reorder the sentences

The paper puts "not" before a verb. Finding verbs takes a tagger, so we use a list of auxiliaries. The lists are
English. Each function returns None if it doesn't apply; a result is never empty and never equals the text.
"""

import re

import numpy as np

MAX_NGRAM = 3
AUXILIARIES = "am|is|are|was|were|do|does|did|have|has|had|can|could|will|would|shall|should|may|might|must".split("|")
STEMS = {"ca": "can", "wo": "will", "sha": "shall", "ai": "is"}  # of contractions that lose more than "n't"
# isn't, isn’t; also is n't and isn ’ t, as in tokenised corpora
CONTRACTION = re.compile(rf"\b({'|'.join([*AUXILIARIES, 'need', *STEMS])}) ?n ?['’] ?t\b", re.IGNORECASE)
NEGATION = re.compile(rf"{CONTRACTION.pattern}|\bcannot\b|\s?\b(?:not|never)\b", re.IGNORECASE)
AUXILIARY = re.compile(rf"(?:\b(?:{'|'.join(AUXILIARIES)})|\b ?['’] ?(?:m|re|ve|ll))\b(?! ?['’-])", re.IGNORECASE)


def add_noise(text: str, other_texts: list[str], rng: np.random.Generator) -> tuple[str, str] | None:
    """[STR noise] Add noise of one type, drawn from those that apply. Returns the text and the type, or None.

    `other_texts` are the texts that new words are taken from. The result is stripped.
    """
    for kind in rng.permutation(["ngram", "negation", "shuffle"]).tolist():
        if kind == "ngram":
            noisy = ngram_noise(text, other_texts, rng)
        else:
            noisy = (negation_noise if kind == "negation" else shuffle_noise)(text, rng)
        if noisy is not None:
            return noisy, kind
    return None


def ngram_noise(text: str, other_texts: list[str], rng: np.random.Generator) -> str | None:
    """Delete, replace or insert one to three whitespace-separated words."""
    words = re.findall(r"\s+\S+", " " + text.strip())  # each with the whitespace before it
    operations = [(name, n) for name in ("delete", "replace", "insert") for n in range(1, MAX_NGRAM + 1)]
    for name, n in rng.permutation(np.array(operations, dtype=object)):
        starts = len(words) + 1 - (0 if name == "insert" else n)  # positions where the n-gram may begin
        if starts < 1 or (name == "delete" and n == len(words)):
            continue
        start = int(rng.integers(starts))
        end = start if name == "insert" else start + n
        new = []
        if name != "delete":
            old = [word.strip() for word in words[start:end]]
            donors = [other.split() for other in other_texts]
            ngrams = [donor[i : i + n] for donor in donors for i in range(len(donor) - n + 1)]
            ngrams = [ngram for ngram in ngrams if ngram != old]
            if not ngrams:
                continue
            new = [" " + word for word in ngrams[rng.integers(len(ngrams))]]
        return "".join(words[:start] + new + words[end:]).strip()
    return None


def negation_noise(text: str, rng: np.random.Generator) -> str | None:
    """Remove one negation, or add one to a text without any."""
    negations = list(NEGATION.finditer(text))
    change = without_negation if negations else with_negation
    matches = negations or AUXILIARY.finditer(text)
    results = [(text[: match.start()] + change(match[0]) + text[match.end() :]).strip() for match in matches]
    results = [result for result in results if result]
    return results[rng.integers(len(results))] if results else None


def without_negation(negation: str) -> str:
    """Return a match of NEGATION without its negation.

    >>> [without_negation(words) for words in ("isn't", "Won ’ t", "cannot", " never")]
    ['is', 'Will', 'can', '']
    """
    contraction = CONTRACTION.fullmatch(negation)
    if contraction is None:
        return negation.removesuffix("not") if negation.lower() == "cannot" else ""
    stem = STEMS.get(contraction[1].lower(), contraction[1])
    return stem.capitalize() if contraction[1][0].isupper() else stem


def with_negation(auxiliary: str) -> str:
    """Negate an auxiliary.

    >>> [with_negation(verb) for verb in ("is", "can", "'ll")]
    ['is not', 'cannot', "'ll not"]
    """
    return auxiliary + ("not" if auxiliary.lower() == "can" else " not")


def shuffle_noise(text: str, rng: np.random.Generator) -> str | None:
    """Reorder the sentences but not the whitespace between them. A sentence ends in .!? before whitespace."""
    pieces = re.split(r"(?<=[.!?])(\s+)", text.strip())
    sentences = pieces[::2]
    if len(set(sentences)) < 2:
        return None
    while pieces[::2] == sentences:
        pieces[::2] = rng.permutation(np.array(sentences, dtype=object)).tolist()
    return "".join(pieces)
