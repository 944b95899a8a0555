"""Questions to work out on paper, with different numbers for each student, so that copied answers are wrong.

`start --student NAME` draws the numbers from the name and writes QUESTIONS.md. The student fills in its last lines.
`grade` reads them without running any of the student's code. Each answer is one number, correct to two decimals.
"""

import hashlib
import math
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from course.copies import read_mark, read_untrusted
from nanorlhf.errors import InputError

FILE = "QUESTIONS.md"
TOLERANCE = 0.011  # two decimals, the last one rounded up or down
WORDS = ("boat", "lamp", "letter", "violin", "ladder", "garden", "engine", "window", "parrot", "ticket", "bottle")


@dataclass(frozen=True)
class Question:
    name: str
    text: str
    answer: float


def student_seed(student: str) -> int:
    """Return a student's seed, drawn from the name; case and surrounding spaces don't matter."""
    return int.from_bytes(hashlib.sha256(student.strip().casefold().encode(errors="backslashreplace")).digest()[:4])


def draw_questions(student: str) -> list[Question]:
    rng = random.Random(student_seed(student))
    return [make(rng) for make in MAKERS]


def number(rng: random.Random, low: float, high: float) -> float:
    """Draw a number with one decimal, never 0."""
    return rng.choice([n / 10 for n in range(round(10 * low), round(10 * high) + 1) if n])


def several(rng: random.Random, count: int, low: float, high: float) -> list[float]:
    """Draw distinct numbers with one decimal, never 0."""
    return [n / 10 for n in rng.sample([n for n in range(round(10 * low), round(10 * high) + 1) if n], count)]


def listed(numbers: list[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


def bradley_terry(rng: random.Random) -> Question:
    chosen, rejected = several(rng, 2, -3, 3)
    text = (
        f"The reward model gives the chosen summary {chosen:g} and the rejected one {rejected:g}. "
        "What is the loss of this pair?"
    )
    return Question("pair", text, math.log1p(math.exp(rejected - chosen)))


def kl_reward(rng: random.Random) -> Question:
    policy, reference = several(rng, 3, -3, -0.1), several(rng, 3, -3, -0.1)
    score, beta = number(rng, -2, 3), rng.choice([0.05, 0.1, 0.2])
    text = (
        f"A response of three tokens, `{' '.join(rng.sample(WORDS, 3))}`, has the log-probabilities {listed(policy)} "
        f"under the policy and {listed(reference)} under the reference, and the score {score:g}. beta is {beta:g}. "
        "What is the sum of its rewards?"
    )
    return Question("rewards", text, score - beta * (sum(policy) - sum(reference)))


def gae(rng: random.Random) -> Question:
    rewards, values = several(rng, 3, -1, 2), several(rng, 3, -1, 2)
    lam = rng.choice([0.5, 0.8, 0.9])
    advantage, following = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + following - value + lam * advantage
        following = value
    text = (
        f"The last three steps of an episode have the rewards {listed(rewards)} and the values {listed(values)}. "
        f"gamma is 1 and lambda is {lam:g}. What is the advantage of the first of these steps?"
    )
    return Question("advantage", text, advantage)


def whitened(rng: random.Random) -> Question:
    numbers = several(rng, 4, -3, 3)
    mean = sum(numbers) / 4
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / 4)
    text = f"A rollout has the advantages {listed(numbers)}. What is the first one after whitening?"
    return Question("whitened", text, (numbers[0] - mean) / deviation)


def clipped(rng: random.Random) -> Question:
    advantage, shift = number(rng, -2, 2), number(rng, -0.6, 0.6)
    ratio = math.exp(shift)
    text = (
        f"An update has changed the log-probability of the token `{rng.choice(WORDS)}` by {shift:g}. Its advantage is "
        f"{advantage:g} and the clip range is 0.2. What is its policy loss?"
    )
    return Question("clipped", text, max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)))


def leave_one_out(rng: random.Random) -> Question:
    scores = several(rng, 4, -2, 4)
    text = f"Four responses to a query have the rewards {listed(scores)}. What is RLOO's advantage for the first one?"
    return Question("group", text, scores[0] - sum(scores[1:]) / 3)


def pass_at(rng: random.Random) -> Question:
    n, right, k = rng.randint(6, 12), rng.randint(2, 4), rng.randint(2, 4)
    text = f"Of {n} programs, {right} pass. What is pass@{k}?"
    return Question("pass", text, 1 - math.comb(n - right, k) / math.comb(n, k))


MAKERS: tuple[Callable[[random.Random], Question], ...] = (
    bradley_terry,
    kl_reward,
    gae,
    whitened,
    clipped,
    leave_one_out,
    pass_at,
)


def sheet(student: str) -> str:
    """Return a student's questions as Markdown, with a line for each answer."""
    questions = draw_questions(student)
    lines = [f"# Questions for {student}", "", "Only you have these numbers. Write each answer with two decimals.", ""]
    lines += [f"{i}. {question.text}" for i, question in enumerate(questions, start=1)]
    return "\n".join([*lines, "", *(f"{question.name} =" for question in questions), ""])


def right_answers(directory: Path) -> tuple[str, int] | None:
    """Return (the copy's student, the number of right answers), or None for a copy without questions."""
    student = read_mark(directory).get("student")
    if not isinstance(student, str):
        return None
    text = ""
    with suppress(InputError):  # without the file, no answer is right
        text = read_untrusted(directory, FILE).decode(errors="replace")
    answers = dict(re.findall(r"^(\w+) = *([-+]?[0-9]{1,6}(?:\.[0-9]{1,9})?)\s*$", text, re.M))
    questions = draw_questions(student)
    return student, sum(
        question.name in answers and abs(float(answers[question.name]) - question.answer) < TOLERANCE
        for question in questions
    )
