"""A known reward: how cheerful a text sounds to VADER, a lexicon of 7,500 words with rules for "not", "very" and "!".

    python train_ppo.py sentiment                       # --reward data/sentiment.py:score

VADER (Hutto and Gilbert 2014) gives each text a number from -1 (negative) to 1 (positive); the package vaderSentiment
has the lexicon. It is a demonstration: one sees at once what the policy does to please the reward.
"""

from functools import cache
from typing import Any

from nanorlhf.errors import InputError


@cache
def analyser() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:  # of the optional extra `real`
        raise InputError("data/sentiment.py needs VADER: install it with `pip install vaderSentiment`.") from error
    return SentimentIntensityAnalyzer()


def score(queries: list[str], responses: list[str]) -> list[float]:
    """From -1 to 1 per response; the query doesn't count."""
    return [analyser().polarity_scores(response)["compound"] for response in responses]


def gold_score(query: str, response: str) -> float:
    """The same for one response: here the reward is the gold score."""
    return score([query], [response])[0]
