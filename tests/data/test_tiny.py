"""The synthetic world: its gold score against hand-worked values, its texts and labels against their description."""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import tiny
from data.labellers import Dials, Labellers
from data.tiny import Args, gold_score, make_world, write_post
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
IDEAL = Labellers(Dials(), tiny.WEIGHTS, 1)
SMALL = Args(num_demonstrations=60, num_comparisons=60, num_validation=20)
QUERY = (
    "SUBREDDIT: r/life\n\nTITLE: What now?\n\nPOST: I am so sad. This is about my sister. They just broke the lamp.\n"
    "We met in Paris. They want money.\n\nTL;DR:"
)
FACTS = ("my sister", "broke the lamp", "in Paris", "wants money")


# ---------------------------------------------------------------- the labeller
@pytest.mark.parametrize(
    ("response", "score"),
    [
        (" my sister broke the lamp in Paris and wants money", 4.0),  # all four facts, ten words
        (" My sister broke the lamp. In Paris, and wants money!", 4.0),  # case and punctuation don't matter
        (" my sister broke the lamp and wants money", 3.0),
        (" someone broke the lamp in Paris", 2.0),
        (" someone wants money", 1.0),
        (" someone", 0.0),  # a frame without a fact
        (" my boss broke the lamp in Paris and wants money", 3 - 1.5),  # one invention
        (" my boss in Oslo", -2 * 1.5),
        (" my sister broke the vase", 1 - 2 * 0.3),  # no event of this world: two words that no summary needs
        (" my sister sister", 1 - 0.3),
        (" my sister broke the lamp broke the lamp", 2 - 3 * 0.3),  # a repeated fact: each of its words
        (" my sister so i am sad", 1 - 4 * 0.3),
        (" my sister !!", 1 - 0.3),
        (" sad sad sad", -0.3 - 2 * 0.3),
        (" my sister broke the lamp in Paris and wants money and wants money so sad", 4 - 5 * 0.3 - 3 * 0.1),
        ("", -8.0),
        (" \n\t", -8.0),
        (" x y z" * 50, -8.0),  # no lower than an empty response
    ],
)
def test_gold_score_matches_values_worked_out_by_hand(response: str, score: float) -> None:
    assert gold_score(QUERY, response) == pytest.approx(score)


def test_mentioning_a_fact_always_raises_the_score() -> None:
    for count in range(4):
        for mentioned in combinations(FACTS, count):
            for fact in set(FACTS) - set(mentioned):
                assert gold_score(QUERY, " ".join((*mentioned, fact))) > gold_score(QUERY, " ".join(mentioned))


def test_an_invented_value_always_lowers_the_score() -> None:
    true_values = {"sister", "broke the lamp", "Paris", "money"}
    for slot in tiny.SLOTS:
        for value in {*tiny.SLOTS[slot], *tiny.OUTLANDISH[slot]} - true_values:
            for mentioned in combinations(FACTS, 2):
                assert gold_score(QUERY, " ".join((*mentioned, value))) < gold_score(QUERY, " ".join(mentioned))


def test_a_repeated_or_needless_word_always_lowers_the_score() -> None:
    summary = " my sister broke the lamp in Paris"
    for word in (*summary.split(), "sad", "zzz", "?"):
        assert gold_score(QUERY, f"{summary} {word}") < gold_score(QUERY, summary)


def test_length_by_itself_does_not_raise_the_score() -> None:
    """Length correlates with the score through coverage: at equal coverage the longer summary never wins."""
    short, long = " my sister in Paris", " my sister in Paris i am so sad it is a long story"
    assert gold_score(QUERY, long) < gold_score(QUERY, short) < gold_score(QUERY, " ".join(FACTS))


ALL_VALUES = [value for table in (tiny.SLOTS, tiny.OUTLANDISH) for values in table.values() for value in values]
WORDS = st.sampled_from(sorted(tiny.FRAME_WORDS) + [word for value in tiny.VALUES.values() for word in value] + ["sad"])
TEXTS = st.one_of(st.text(max_size=200), st.lists(WORDS, max_size=30).map(" ".join))


@pytest.mark.slow
@given(TEXTS, TEXTS)
def test_any_two_texts_have_a_score_within_the_bounds(query: str, response: str) -> None:
    score = gold_score(query, response)
    assert tiny.LOWEST <= score <= tiny.WEIGHTS["coverage"]
    assert score >= gold_score(query, "")


@given(st.lists(WORDS, max_size=30).map(" ".join))
def test_gold_score_equals_a_naive_search_for_every_value(response: str) -> None:
    """Compute the same formula naively, by searching the text for each value."""
    words = response.lower().split()
    mentioned, needless = set(), [word for word in words if word not in tiny.FRAME_WORDS]
    for value in map(str.lower, ALL_VALUES):
        times = sum(words[i : i + len(value.split())] == value.split() for i in range(len(words)))
        if times:
            mentioned.add(value)
        for word in [word for word in value.split() if word != "the"] * times:
            needless.remove(word)
    facts = {"sister", "broke the lamp", "paris", "money"}
    expected = len(mentioned & facts) - 1.5 * len(mentioned - facts)
    expected -= 0.3 * (len(words) - len(set(words)) + len(set(needless))) + 0.1 * max(0, len(words) - 12)
    assert gold_score(QUERY, response) == pytest.approx(max(-8.0, expected) if words else -8.0)


# ---------------------------------------------------------------- the words
def test_no_word_of_a_slot_means_anything_else() -> None:
    """`the` in an event is a frame word; every other word of a value occurs only in that value."""
    values = [value.lower().split() for value in ALL_VALUES]
    slot_words = [word for value in values for word in value if word != "the"]
    assert max(Counter(slot_words).values()) == 1
    texts = [*tiny.FILLERS, *tiny.RAMBLINGS, *tiny.TITLES, *tiny.SUBREDDITS, tiny.TEMPLATE, *tiny.FRAME_WORDS]
    texts += [sentence for sentences in tiny.SENTENCES.values() for sentence in sentences]
    assert not set(slot_words) & {word for text in texts for word in tiny.split_words(text)}
    assert len(tiny.VALUES) == len(values)


def test_a_post_states_exactly_its_four_facts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        post = write_post(rng)
        mentioned, _ = tiny.facts_in(tiny.split_words(post.query))
        assert mentioned == {fact.lower().split()[0] for fact in post.facts}


# ---------------------------------------------------------------- the summarisers
def draw_summaries(policy: str, count: int = 1500) -> list[tuple[tiny.Post, str]]:
    rng = random.Random(policy)
    posts = [write_post(rng) for _ in range(count)]
    return [(post, tiny.POLICIES[policy](post, rng)) for post in posts]


def test_references_usually_mention_who_did_what_and_rarely_more() -> None:
    """The most frequent continuation must not be the best, or greedy imitation would be perfect already."""
    summaries = draw_summaries("reference", 4000)
    golds = [gold_score(post.query, summary) for post, summary in summaries]
    assert 0.05 < fmean(gold == 4.0 for gold in golds) < 0.12
    endings = [summary.split(post.facts[1])[-1].split()[:1] for post, summary in summaries if post.facts[1] in summary]
    assert max((endings.count(word), word) for word in ([], ["in"], ["and"]))[1] == []  # most stop after the event


def test_two_references_to_one_post_win_evenly() -> None:
    rng = random.Random(0)
    wins = []
    for _ in range(4000):
        post = write_post(rng)
        first, second = (gold_score(post.query, tiny.POLICIES["reference"](post, rng)) for _ in range(2))
        wins.append((first > second) + 0.5 * (first == second))
    assert abs(fmean(wins) - 0.5) < 0.025  # 4 standard errors of at most 0.5 / sqrt(4000) are 0.03


def test_policies_rank_in_quality_as_their_names_suggest() -> None:
    means = {
        name: fmean(gold_score(post.query, summary) for post, summary in draw_summaries(name)) for name in tiny.POLICIES
    }
    assert means["good"] > means["reference"] > means["terse"] > means["lead"] > means["rambler"]
    assert means["reference"] > means["repeater"] > means["inventor"]


# ---------------------------------------------------------------- the labels
def draw_metas(rng: random.Random, count: int, splits: tuple[str, ...] = ("train",)) -> list[dict]:
    posts = [write_post(rng) for _ in range(count)]
    pairs = [tiny.write_pair(post, rng, tiny.POLICY_WEIGHTS) for post in posts]
    return [tiny.compare(*both, rng, splits, IDEAL)["meta"] for both in zip(posts, pairs, strict=True)]


def test_labels_agree_with_bradley_terry_in_expectation() -> None:
    """If gold scores differ by d, the better response is chosen with probability 1 / (1 + exp(-d / temperature))."""
    pairs = draw_metas(random.Random(0), 6000)
    by_difference = {}
    for meta in pairs:
        difference = meta["gold_chosen"] - meta["gold_rejected"]
        by_difference.setdefault(round(abs(difference), 1), []).append(difference > 0)
    tested = 0
    for difference, better_chosen in by_difference.items():
        expected = 1 / (1 + math.exp(-difference / 0.4))
        if difference > 0 and len(better_chosen) * (1 - expected) >= 10:  # enough upsets for a normal interval
            error = math.sqrt(expected * (1 - expected) / len(better_chosen))
            assert abs(fmean(better_chosen) - expected) < 4 * error, difference
            tested += 1
    assert tested >= 5


def test_the_best_possible_reward_model_agrees_with_nine_labels_in_ten() -> None:
    world = make_world(replace(SMALL, num_comparisons=4000))
    assert 0.91 < tiny.ceiling(world["comparisons.train"]) < 0.95


def test_the_ceiling_counts_a_tie_as_half_right() -> None:
    rows = [{"meta": {"gold_chosen": a, "gold_rejected": b}} for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 0))]
    assert tiny.ceiling(rows) == pytest.approx(2.5 / 4)


def test_confidence_points_at_the_choice_and_grows_with_the_difference() -> None:
    metas = draw_metas(random.Random(0), 3000, ("valid1", "valid2"))
    assert {meta["confidence"] for meta in metas} == {1, 2, 3, 4, 6, 7, 8, 9}
    assert all((meta["confidence"] > 5) == (meta["choice"] == 1) for meta in metas)
    assert 0.45 < fmean(meta["choice"] for meta in metas) < 0.55
    assert {meta["split"] for meta in metas} == {"valid1", "valid2"}
    assert {meta["batch"] for meta in metas} == {f"batch{number}" for number in (*range(6, 21), 22)}
    agreement = {
        sureness: fmean(m["gold_chosen"] > m["gold_rejected"] for m in metas if abs(m["confidence"] - 5) == sureness)
        for sureness in (1, 2, 3, 4)
    }
    assert agreement[1] < agreement[2] < agreement[3] < agreement[4]


def test_pairs_are_two_texts_by_two_policies_with_their_gold_scores() -> None:
    rows = make_world(replace(SMALL, num_comparisons=400))["comparisons.train"]
    for row in rows:
        assert row["chosen"] != row["rejected"]
        assert len(set(row["meta"]["policies"])) == 2
        assert row["meta"]["gold_chosen"] == gold_score(row["query"], row["chosen"])
        assert row["meta"]["gold_rejected"] == gold_score(row["query"], row["rejected"])
    assert len({frozenset(row["meta"]["policies"]) for row in rows}) > 10


# ---------------------------------------------------------------- the files
@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "data"
    tiny.main(replace(SMALL, out=out, num_demonstrations=400, num_comparisons=400, num_validation=100))
    return out


def test_no_validation_story_occurs_in_training() -> None:
    def stories(name: str) -> set[frozenset[str]]:
        return {frozenset(tiny.facts_in(tiny.split_words(row["query"]))[0]) for row in world[name]}

    # holds out enough stories that a tenth of the training posts would have one by chance
    world = make_world(replace(SMALL, num_demonstrations=1000, num_comparisons=1000, num_validation=2000))
    held_out = stories("sft.validation") | stories("comparisons.validation")
    assert len(held_out) > 3000
    assert not held_out & (stories("sft.train") | stories("comparisons.train"))


def test_the_loaders_accept_every_row_at_the_recipes_length_limits(written: Path) -> None:
    tokenizer = load_tokenizer(written)
    for split, count in (("train", 400), ("validation", 100)):
        assert len(load_demonstrations(written / f"sft.{split}.jsonl", tokenizer, 72, 24)) == count
        assert len(load_comparisons(written / f"comparisons.{split}.jsonl", tokenizer, 72, 24)) == count


def test_queries_end_without_a_space_and_responses_start_with_one(written: Path) -> None:
    rows = [json.loads(line) for path in written.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(rows) == 1000
    for row in rows:
        assert row["query"].startswith("SUBREDDIT: r/")
        assert row["query"].endswith("\n\nTL;DR:")
        for response in (row[key] for key in ("response", "chosen", "rejected") if key in row):
            assert response.startswith(" ")
            assert response == " " + response.strip()


def test_every_word_of_a_fact_is_one_token_even_in_a_small_world(tmp_path: Path) -> None:
    tiny.main(replace(SMALL, out=tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    words = {word for values in tiny.SLOTS.values() for value in values for word in value.split()}
    assert [word for word in words if len(tokenizer.encode(" " + word)) > 1] == []
    assert tokenizer.vocab_size <= SMALL.vocab_size


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.slow
def test_the_seed_fixes_every_byte_in_every_process(tmp_path: Path) -> None:
    """One process has another PYTHONHASHSEED, and so another order of sets."""
    small = Args(num_demonstrations=30, num_comparisons=30, num_validation=10)
    for name, seed in (("a", 3), ("c", 4)):
        tiny.main(replace(small, out=tmp_path / name, seed=seed))
    sizes = ["--num-demonstrations", "30", "--num-comparisons", "30", "--num-validation", "10"]
    subprocess.run(
        [sys.executable, "-m", "data.tiny", "--out", str(tmp_path / "b"), "--seed", "3", *sizes],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"},
        check=True,
        capture_output=True,
    )
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) == 6
    assert digests(tmp_path / "a")["sft.train.jsonl"] != digests(tmp_path / "c")["sft.train.jsonl"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_demonstrations": 0}, "--num-demonstrations 0"),
        ({"num_comparisons": -1}, "--num-comparisons -1"),
        ({"num_validation": 0}, "--num-validation 0"),
        ({"num_validation": 10**6}, "--num-validation 1000000"),
        ({"vocab_size": 256}, "--vocab-size 256"),
        ({"vocab_size": 10**12}, "--vocab-size 1000000000000: must be at most 1,048,576"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_impossible_settings_are_rejected_and_nothing_is_written(tmp_path: Path, wrong: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        tiny.main(replace(SMALL, out=tmp_path / "data", **wrong))
    assert not (tmp_path / "data").exists()


def test_an_output_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    with pytest.raises(InputError, match="is a file"):
        tiny.main(replace(SMALL, out=tmp_path / "data"))
    assert (tmp_path / "data").read_text() == "mine"


def test_the_tables_show_a_post_with_its_summaries_and_the_ceiling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.main(replace(SMALL, out=tmp_path))
    printed = capsys.readouterr().out
    assert "TL;DR:" in printed and "labeller ceiling" in printed and "policy pairs" in printed
    assert all(f"  {policy}" in printed for policy in tiny.POLICIES)
