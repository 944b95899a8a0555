"""A known reward: how cheerful a text sounds to VADER, a lexicon of 7,500 words with rules for "not", "very" and "!".

    python train_ppo.py sentiment                       # --reward data/sentiment.py:score

VADER (Hutto and Gilbert 2014) gives each text a number from -1, the darkest, to 1; the lexicon comes with the package
vaderSentiment. What the policy finds to please it is seen at once, which is what it is for.
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
    """From -1 to 1 per response; what was said before it doesn't count."""
    return [analyser().polarity_scores(response)["compound"] for response in responses]


def gold_score(query: str, response: str) -> float:
    """The same of one response: here the reward is the truth."""
    return score([query], [response])[0]
