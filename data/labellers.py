"""Simulated labellers for the embedded TL;DR world, with adjustable errors.

By default, eight workers choose by the gold score with Bradley-Terry noise. Each setting adds one flaw of real labels.
For two responses, `first` and `second` in the order shown,

    difference = score(first) - score(second)       the gold score with the worker's weights (--taste-spread); 0 for a
                                                    worker who guesses (--random-workers)
               + length bonus * (words(first) - words(second))                  --length-bonus
               + position bonus                                                 --position-bonus

    P(first is preferred) = sigmoid(difference / temperature)                   --temperature

and then the label is flipped with probability --flip-rate. With these settings, each worker scores responses on one
scale and the majority's preferences are transitive. --indifference makes them cyclic, as in Tversky's *Intransitivity
of preferences* (1969): if two scores differ by less than it, the worker prefers the shorter response, by BREVITY per
word. Then a response that omits one fact beats the full one, a response that omits two facts beats that one, and yet
the full one beats the response that omits two.

The world's random generator draws one uniform number per label, whatever the settings; a separate generator draws the
rest. So two worlds with the same seed have the same pairs and differ only in their labels.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from nanorlhf.cli import FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, Range

NUM_WORKERS = 8
WORKERS = tuple(f"worker{number}" for number in range(NUM_WORKERS))
BREVITY = 0.5  # score per word in favour of the shorter of two similar responses


@dataclass(frozen=True, kw_only=True)
class Dials:
    temperature: PositiveFloat = 0.4
    """temperature of the Bradley-Terry noise; at 0.4 the gold score agrees with about 93% of the labels"""
    taste_spread: Annotated[float, Range("from 0 to 10", lambda x: 0 <= x <= 10)] = 0.0
    """standard deviation of the log of a worker's weights around the gold score's; 0: all workers agree"""
    random_workers: Annotated[int, Range(f"from 0 to {NUM_WORKERS}", lambda x: 0 <= x <= NUM_WORKERS)] = 0
    """number of workers, out of eight, who guess"""
    length_bonus: FiniteFloat = 0.0
    """added to the score for each word of a response"""
    position_bonus: FiniteFloat = 0.0
    """added to the score of the response shown first"""
    flip_rate: Fraction = 0.0
    """probability that a label is flipped"""
    indifference: NonNegativeFloat = 0.0
    """if scores differ by less than this, the shorter response is preferred, which makes preferences cyclic"""


class Labellers:
    """The eight workers of a world; weights: the gold score's weights, by term."""

    def __init__(self, dials: Dials, weights: Mapping[str, float], seed: int):
        self.dials = dials
        taste, self.slips = random.Random(f"tastes {seed}"), random.Random(f"slips {seed}")
        self.weights = {  # log-normal, so that no worker likes what the gold score dislikes
            worker: {term: weight * math.exp(dials.taste_spread * taste.gauss()) for term, weight in weights.items()}
            for worker in WORKERS
        }

    def difference(self, worker: str, scores: tuple[float, float], num_words: tuple[int, int]) -> float:
        """Return the first response's lead in the worker's view; scores: with the worker's weights."""
        dials = self.dials
        longer = num_words[0] - num_words[1]
        if WORKERS.index(worker) < dials.random_workers:
            return 0.0
        difference = scores[0] - scores[1]
        if abs(difference) < dials.indifference:
            difference = -BREVITY * longer
        return difference + dials.length_bonus * longer + dials.position_bonus

    def choose(self, difference: float, uniform: float) -> int:
        """Return 0 if the first response is preferred, 1 if the second; uniform: a random number from 0 to 1."""
        choice = 0 if uniform < preference_probability(difference, self.dials.temperature) else 1
        slip = self.slips.random() < self.dials.flip_rate
        return 1 - choice if slip else choice


def preference_probability(difference: float, temperature: float) -> float:
    """Return P(the first response is preferred) under Bradley-Terry; difference: the first score minus the second.

    >>> round(preference_probability(1.0, 0.4), 3)
    0.924
    """
    return 1 / (1 + math.exp(min(700.0, -difference / temperature)))  # beyond 709, exp overflows
