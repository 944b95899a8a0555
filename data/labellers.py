"""The people who label pairs in the embedded TL;DR world, and the dials that make them worse than ideal.

As the dials stand, eight workers prefer by the gold score with Bradley-Terry noise. Every dial is a way in which real
labels differ from that. Of two responses, `first` and `second` in the order in which they are shown,

    difference = score(first) - score(second)       the worker's own score: the gold score with weights of the worker
                                                    (--taste-spread); 0 for a worker who guesses (--random-workers)
               + length bonus * (words(first) - words(second))                  --length-bonus
               + position bonus                                                 --position-bonus

    P(first is preferred) = sigmoid(difference / temperature)                   --temperature

and then the answer is reversed with a probability of --flip-rate. Those are noise or taste: each worker still has one
score, so the preferences of the majority are transitive. --indifference breaks that, as in Tversky's *Intransitivity of
preferences* (1969): two scores that differ by less look the same, and the shorter response is preferred, by BREVITY per
word. One that tells one fact less is then preferred to one that tells all, one that tells two less to that one, and yet
one that tells all to one that tells two less.

A uniform number per label comes from the world's generator whatever the dials are; what a dial has to draw besides
comes from a generator of its own. So two worlds of the same seed have the same pairs, and differ in their labels alone.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from nanorlhf.cli import FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, Range

NUM_WORKERS = 8
WORKERS = tuple(f"worker{number}" for number in range(NUM_WORKERS))
BREVITY = 0.5  # score per word, where a worker sees no other difference


@dataclass(frozen=True, kw_only=True)
class Dials:
    temperature: PositiveFloat = 0.4
    """of the Bradley-Terry noise; at 0.4 the gold score itself agrees with about 93% of the labels"""
    taste_spread: Annotated[float, Range("from 0 to 10", lambda x: 0 <= x <= 10)] = 0.0
    """standard deviation of the logarithms of a worker's weights around the gold score's; 0: all have the same taste"""
    random_workers: Annotated[int, Range(f"from 0 to {NUM_WORKERS}", lambda x: 0 <= x <= NUM_WORKERS)] = 0
    """how many of the eight workers guess"""
    length_bonus: FiniteFloat = 0.0
    """per word of a response, added to what a worker thinks of it"""
    position_bonus: FiniteFloat = 0.0
    """added to what a worker thinks of the response shown first"""
    flip_rate: Fraction = 0.0
    """probability that a label is reversed"""
    indifference: NonNegativeFloat = 0.0
    """scores that differ by less look the same, and the shorter response is preferred: this makes cycles"""


class Labellers:
    """The eight workers of a world with these dials; weights are those of the gold score, by term."""

    def __init__(self, dials: Dials, weights: Mapping[str, float], seed: int):
        self.dials = dials
        taste, self.slips = random.Random(f"tastes {seed}"), random.Random(f"slips {seed}")
        self.weights = {  # log-normal, so that no worker likes what the gold score dislikes
            worker: {term: weight * math.exp(dials.taste_spread * taste.gauss()) for term, weight in weights.items()}
            for worker in WORKERS
        }

    def difference(self, worker: str, scores: tuple[float, float], num_words: tuple[int, int]) -> float:
        """How much better the worker thinks the first of two responses is; scores are by the worker's weights."""
        dials, longer = self.dials, num_words[0] - num_words[1]
        if WORKERS.index(worker) < dials.random_workers:
            return 0.0
        difference = scores[0] - scores[1]
        if abs(difference) < dials.indifference:
            difference = -BREVITY * longer
        return difference + dials.length_bonus * longer + dials.position_bonus

    def choose(self, difference: float, uniform: float) -> int:
        """0: the first is preferred, 1: the second. `uniform` from 0 to 1 decides, and then perhaps a slip."""
        choice = 0 if uniform < preference_probability(difference, self.dials.temperature) else 1
        slip = self.slips.random() < self.dials.flip_rate
        return 1 - choice if slip else choice


def preference_probability(difference: float, temperature: float) -> float:
    """Bradley-Terry: P(the first is preferred), with `difference` the first one's score minus the second one's.

    >>> round(preference_probability(1.0, 0.4), 3)
    0.924
    """
    return 1 / (1 + math.exp(min(700.0, -difference / temperature)))  # beyond 709, exp overflows
