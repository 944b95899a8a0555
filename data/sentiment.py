"""A known reward: the sentiment of a text by VADER, a lexicon of 7,500 words with rules for "not", "very" and "!".

    python train_ppo.py sentiment                       # --reward data/sentiment.py:score

VADER (Hutto and Gilbert 2014) scores a text from -1 (negative) to 1 (positive); the package vaderSentiment contains the
lexicon. This reward is a demonstration: it's easy to see how the policy exploits it.
"""

from functools import cache
from typing import Any

from nanorlhf.errors import InputError


@cache
def analyser() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:  # from the optional extra `real`
        raise InputError("data/sentiment.py needs VADER: install it with `pip install vaderSentiment`.") from error
    return SentimentIntensityAnalyzer()


def score(queries: list[str], responses: list[str]) -> list[float]:
    """Return a score from -1 to 1 per response; queries are ignored."""
    return [analyser().polarity_scores(response)["compound"] for response in responses]


def gold_score(query: str, response: str) -> float:
    """Score one response, for --gold: this reward is its own gold score."""
    return score([query], [response])[0]
