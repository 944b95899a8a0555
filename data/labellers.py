"""The simulated people who label pairs in the embedded TL;DR world, and settings that make them less than ideal.

By default, eight workers prefer by the gold score with Bradley-Terry noise. Each setting is a way in which real labels
differ from that. For two responses, `first` and `second` in the order shown,

    difference = score(first) - score(second)       the worker's own score: the gold score with the worker's weights
                                                    (--taste-spread); 0 for a worker who guesses (--random-workers)
               + length bonus * (words(first) - words(second))                  --length-bonus
               + position bonus                                                 --position-bonus

    P(first is preferred) = sigmoid(difference / temperature)                   --temperature

and then the label is reversed with probability --flip-rate. So far each worker has one score, and the majority's
preferences are transitive. --indifference breaks that, as in Tversky's *Intransitivity of preferences* (1969): of two
scores that differ by less, the shorter response is preferred, by BREVITY per word. Then a response without one fact is
preferred to the full one, a response without two facts to that one, and yet the full one to the response without two.

The world's generator draws one uniform number per label, whatever the settings; another generator draws the rest. So
two worlds of the same seed have the same pairs and differ only in their labels.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from nanorlhf.cli import FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, Range

NUM_WORKERS = 8
WORKERS = tuple(f"worker{number}" for number in range(NUM_WORKERS))
BREVITY = 0.5  # score per word, if a worker sees no other difference


@dataclass(frozen=True, kw_only=True)
class Dials:
    temperature: PositiveFloat = 0.4
    """temperature of the Bradley-Terry noise; at 0.4 the gold score agrees with about 93% of the labels"""
    taste_spread: Annotated[float, Range("from 0 to 10", lambda x: 0 <= x <= 10)] = 0.0
    """standard deviation of the log of a worker's weights around the gold score's; 0: all workers agree"""
    random_workers: Annotated[int, Range(f"from 0 to {NUM_WORKERS}", lambda x: 0 <= x <= NUM_WORKERS)] = 0
    """number of workers, of eight, who guess"""
    length_bonus: FiniteFloat = 0.0
    """score that a worker adds per word of a response"""
    position_bonus: FiniteFloat = 0.0
    """score that a worker adds to the response shown first"""
    flip_rate: Fraction = 0.0
    """probability that a label is reversed"""
    indifference: NonNegativeFloat = 0.0
    """scores that differ by less look the same, and the shorter response is preferred, which makes cycles"""


class Labellers:
    """The eight workers of a world with these settings; weights: the gold score's, by term."""

    def __init__(self, dials: Dials, weights: Mapping[str, float], seed: int):
        self.dials = dials
        taste, self.slips = random.Random(f"tastes {seed}"), random.Random(f"slips {seed}")
        self.weights = {  # log-normal, so that no worker likes what the gold score dislikes
            worker: {term: weight * math.exp(dials.taste_spread * taste.gauss()) for term, weight in weights.items()}
            for worker in WORKERS
        }

    def difference(self, worker: str, scores: tuple[float, float], num_words: tuple[int, int]) -> float:
        """How much better the worker thinks the first of two responses is; scores: by the worker's weights."""
        dials = self.dials
        longer = num_words[0] - num_words[1]
        if WORKERS.index(worker) < dials.random_workers:
            return 0.0
        difference = scores[0] - scores[1]
        if abs(difference) < dials.indifference:
            difference = -BREVITY * longer
        return difference + dials.length_bonus * longer + dials.position_bonus

    def choose(self, difference: float, uniform: float) -> int:
        """0 if the first is preferred, 1 if the second; `uniform` from 0 to 1 decides, unless the worker slips."""
        choice = 0 if uniform < preference_probability(difference, self.dials.temperature) else 1
        slip = self.slips.random() < self.dials.flip_rate
        return 1 - choice if slip else choice


def preference_probability(difference: float, temperature: float) -> float:
    """Bradley-Terry: P(the first is preferred); difference: the first score minus the second.

    >>> round(preference_probability(1.0, 0.4), 3)
    0.924
    """
    return 1 / (1 + math.exp(min(700.0, -difference / temperature)))  # beyond 709, exp overflows
