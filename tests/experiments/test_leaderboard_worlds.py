"""Secret labellers, and what an entry gains from the public gold score in their worlds."""

import math
import random
from collections import Counter
from statistics import fmean

import pytest

from data import tiny
from experiments.leaderboard import labeller
from experiments.leaderboard.labeller import Labeller, draw_labeller, read_secret, relabel, secret_number
from nanorlhf.dataset import iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics import win_rate
from tests.experiments.copied_gold import perfect_summary

POST = tiny.TEMPLATE.format(
    subreddit="help", title="What now?",
    post="It was my sister. They just broke the lamp. We met in Paris. That person wants money.",
)  # fmt: skip
FULL = " my sister broke the lamp in Paris and wants money"


def summary(post: tiny.Post, slots) -> str:
    facts = (fact if slot in slots else None for slot, fact in zip(tiny.SLOTS, post.facts, strict=True))
    return " " + " ".join(tiny.frame(*facts))


# ----------------------------------------------------------------------------------------------------- 1. the labellers
def test_a_labeller_adds_the_values_of_the_stated_facts_and_the_other_terms() -> None:
    one = Labeller(
        {"who": 2.0, "event": -1.0, "place": 0.5, "wish": -0.25},
        {"invention": -3.0, "repetition": -0.5, "filler": -0.125, "length": -0.1},
    )
    assert one.score(POST, FULL) == 1.25
    assert one.score(POST, " my sister in Paris") == 2.5
    assert one.score(POST, " my boss in Paris") == 0.5 - 3.0  # an invention has no value
    assert one.score(POST, " my sister my sister hello") == 2.0 - 2 * 0.5 - 0.125
    assert one.score(POST, " ") == tiny.LOWEST


def test_equal_values_and_the_public_weights_give_the_public_gold_score() -> None:
    public = Labeller(dict.fromkeys(tiny.SLOTS, tiny.WEIGHTS["coverage"] / 4), tiny.WEIGHTS)
    rng = random.Random(1)
    for _ in range(300):
        post = tiny.write_post(rng)
        response = tiny.POLICIES[rng.choice([*tiny.POLICIES])](post, rng)
        assert public.score(post.query, response) == pytest.approx(tiny.gold_score(post.query, response), abs=1e-6)


def test_a_labeller_wants_two_facts_and_its_pair_the_other_two() -> None:
    wanted = Counter()
    for secret in map(str, range(150)):
        odd, even = (
            {slot for slot, value in draw_labeller(secret, number).values.items() if value > 0} for number in (3, 4)
        )
        assert len(odd) == len(even) == 2 and odd | even == {*tiny.SLOTS}
        wanted[frozenset(odd)] += 1
    assert len(wanted) == 6 and min(wanted.values()) > 10  # every pair of facts: 25 expected
    assert all(weight < 0 for weight in draw_labeller("a", 1).weights.values())


def test_a_labeller_depends_on_the_secret_and_the_number_only() -> None:
    assert draw_labeller("a", 1) == draw_labeller("a", 1)
    drawn = [draw_labeller(secret, number).weights["invention"] for secret in "ab" for number in (1, 2)]
    assert len({*drawn}) == 4
    numbers = {secret_number(purpose, secret, number) for purpose in "xy" for secret in "ab" for number in (1, 2)}
    assert len(numbers) == 8 and all(0 <= number < 2**63 for number in numbers)


def test_sizes_are_drawn_as_for_a_taste_spread_of_one_half() -> None:
    logs = [math.log(abs(value)) for n in range(1, 501) for value in draw_labeller("spread", n).values.values()]
    assert fmean(logs) == pytest.approx(0, abs=0.05)
    assert math.sqrt(fmean(log**2 for log in logs)) == pytest.approx(0.5, abs=0.03)


# ------------------------------------------------------------------------------------------ 2. what the secret protects
def test_the_best_response_by_the_public_score_gains_nothing_on_average_in_secret_worlds() -> None:
    """In 40 worlds of 100 posts, against the references; the labellers' own best responses show the possible gain."""
    public, best = [], []
    for number in range(1, 41):
        judge, rng = draw_labeller("protection", number), random.Random(number)
        posts = [tiny.write_post(rng) for _ in range(100)]
        references = [judge.score(post.query, tiny.POLICIES["reference"](post, rng)) for post in posts]
        wanted = [slot for slot, value in judge.values.items() if value > 0]
        public.append(win_rate([judge.score(post.query, summary(post, tiny.SLOTS)) for post in posts], references))
        best.append(win_rate([judge.score(post.query, summary(post, wanted)) for post in posts], references))
    assert 0.4 < fmean(public) < 0.6 and min(public) < 0.25
    assert fmean(best) > 0.9 and min(best) > 0.75


def test_without_unwanted_facts_the_public_best_response_would_win_under_every_labeller() -> None:
    rng = random.Random(2)
    posts = [tiny.write_post(rng) for _ in range(50)]
    for number in range(1, 11):
        drawn = draw_labeller("positive", number)
        positive = Labeller({slot: abs(value) for slot, value in drawn.values.items()}, drawn.weights)
        for post in posts:
            best = positive.score(post.query, summary(post, tiny.SLOTS))
            assert all(best >= positive.score(post.query, write(post, rng)) for write in tiny.POLICIES.values())


def test_the_copying_entry_writes_the_best_summary_by_the_public_score() -> None:
    assert perfect_summary(POST) == FULL
    rng = random.Random(3)
    assert all(
        tiny.gold_score(query, perfect_summary(query)) == 4
        for query in (tiny.write_post(rng).query for _ in range(200))
    )


# ---------------------------------------------------------------------------------------------------------- 3. the data
def test_a_label_follows_bradley_terry_and_not_the_public_label() -> None:
    judge = Labeller(dict.fromkeys(tiny.SLOTS, 0.0) | {"who": 0.3}, dict.fromkeys(tiny.WEIGHTS, 0.0))
    a, b = " my sister", " someone"
    rows = [{"query": POST, "chosen": a, "rejected": b, "meta": {}}, {"query": POST, "chosen": b, "rejected": a}]
    expected = 1 / (1 + math.exp(-0.3 / 0.4))  # 0.68
    for row in rows:
        rng = random.Random(4)
        labelled = [relabel(row, judge.score, rng) for _ in range(4000)]
        assert fmean(new["chosen"] == a for new in labelled) == pytest.approx(expected, abs=0.025)
        assert all({new["chosen"], new["rejected"]} == {a, b} and "meta" not in new for new in labelled)


def test_a_secret_world_has_its_own_texts_and_no_notes(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("for tests\n")
    sizes = {"num_demonstrations": 40, "num_comparisons": 60, "num_validation": 8}
    for name, number in (("one", 1), ("again", 1), ("two", 2)):
        labeller.main(labeller.Args(secret_file=secret, number=number, out=tmp_path / name, **sizes))
    files = {path.name: path.read_text() for path in (tmp_path / "one").glob("*.jsonl")}
    assert {*files} == {f"{kind}.{split}.jsonl" for kind in ("sft", "comparisons") for split in ("train", "validation")}
    assert files == {path.name: path.read_text() for path in (tmp_path / "again").glob("*.jsonl")}
    assert files != {path.name: path.read_text() for path in (tmp_path / "two").glob("*.jsonl")}
    assert "meta" not in "".join(files.values()) and "gold_" not in "".join(files.values())
    judge = draw_labeller("for tests", 1)
    rows = [row for _, row in iter_jsonl(tmp_path / "one/comparisons.train.jsonl")]
    scores = [[judge.score(row["query"], row[side]) for side in ("chosen", "rejected")] for row in rows]
    clear = [chosen > rejected for chosen, rejected in scores if abs(chosen - rejected) > 1]
    assert len(clear) > 20 and fmean(clear) > 0.9
    assert not (tmp_path / "one.unfinished").exists()


def test_an_empty_secret_is_refused(tmp_path) -> None:
    (tmp_path / "secret").write_text(" \n")
    with pytest.raises(InputError, match="secret is empty"):
        read_secret(tmp_path / "secret")
    assert read_secret(None) is None
