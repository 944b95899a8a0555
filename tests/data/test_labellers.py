"""The dials of the embedded world's labellers: each has its stated effect, in exact expectation, and no other."""

import hashlib
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import tiny
from data.labellers import BREVITY, WORKERS, Dials, Labellers, preference_probability
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics.agreement import load_labelled_pairs, pair_agreement

SMALL = tiny.Args(num_demonstrations=60, num_comparisons=60, num_validation=20)
MANY = replace(SMALL, num_demonstrations=1, num_comparisons=1500, num_validation=1)
BEFORE_THE_DIALS = {  # sha256 of the files of SMALL, updated since only for the facts added to demonstrations
    "comparisons.train": "729fcb56ae115351b3b3bc6088bd951bd24ccc168ceb48dbc554a44440aca260",
    "comparisons.validation": "96dafbbe3d0ee915a72482765c48e3f263073c215ce23490331d608a48df6618",
    "sft.train": "f111556334c2bf4fcfd6b0b4a20141ed52bd7914fcdee31fcf635476233476ca",
    "sft.validation": "88dcdb2777fc7cb4a0af6faa0fe648690bff56d97fb00899a0cdc399ba86256b",
}
TURNED = {
    "temperature": 1.6, "taste_spread": 1.0, "random_workers": 4, "length_bonus": 0.5, "position_bonus": 1.0,
    "flip_rate": 0.25, "indifference": 1.5,
}  # fmt: skip


def make_pairs(**dials) -> list[dict]:
    return tiny.make_world(replace(MANY, **dials))["comparisons.train"]


@pytest.fixture(scope="module")
def ideal() -> list[dict]:
    return make_pairs()


def shown(row: dict) -> tuple[str, str]:
    """Return the two responses in the order shown to the worker."""
    return (row["chosen"], row["rejected"])[:: 1 if row["meta"]["choice"] == 0 else -1]


def words(text: str) -> int:
    return len(tiny.split_words(text))


def gold_difference(row: dict) -> float:
    first, second = (tiny.gold_score(row["query"], text) for text in shown(row))
    return first - second


def agrees(values: list[bool], expected: list[float]) -> bool:
    """Return whether the number of true values is within four standard errors of its expectation."""
    error = math.sqrt(sum(p * (1 - p) for p in expected))
    return abs(sum(values) - sum(expected)) < 4 * error


# ------------------------------------------------------------------------------------------ everything but the labels
def test_the_default_files_are_byte_for_byte_as_before_the_dials(tmp_path: Path) -> None:
    tiny.main(replace(SMALL, out=tmp_path))
    written = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*.jsonl")}
    assert written == BEFORE_THE_DIALS


@pytest.mark.parametrize("dial", TURNED)
def test_a_dial_changes_labels_but_not_posts_or_pairs(dial: str) -> None:
    straight, turned = (tiny.make_world(replace(SMALL, num_comparisons=400, **d)) for d in ({}, {dial: TURNED[dial]}))
    assert straight["sft.train"] == turned["sft.train"] and straight["sft.validation"] == turned["sft.validation"]
    before, after = straight["comparisons.train"], turned["comparisons.train"]
    assert [(row["query"], shown(row)) for row in before] == [(row["query"], shown(row)) for row in after]
    assert [row["meta"]["worker"] for row in before] == [row["meta"]["worker"] for row in after]
    assert [row["meta"]["choice"] for row in before] != [row["meta"]["choice"] for row in after]
    for row in after:  # gold scores are unchanged
        assert row["meta"]["gold_chosen"] == tiny.gold_score(row["query"], row["chosen"])
        assert row["meta"]["gold_rejected"] == tiny.gold_score(row["query"], row["rejected"])
        assert (row["meta"]["confidence"] > 5) == (row["meta"]["choice"] == 1)


def test_settings_of_training_comparisons_change_nothing_else() -> None:
    before = tiny.make_world(SMALL)
    for changes in ({"num_comparisons": 20}, {"summarisers": ("lead", "terse")}, {"num_triads": 3}):
        after = tiny.make_world(replace(SMALL, **changes))
        assert all(after[name] == before[name] for name in ("sft.train", "sft.validation", "comparisons.validation"))
        assert (after["comparisons.train"] == before["comparisons.train"]) == ("num_triads" in changes)


# --------------------------------------------------------------------------------------------------------- each dial
@pytest.mark.slow
def test_labels_at_any_temperature_match_bradley_terry() -> None:
    for temperature in (0.1, 1.6, 6.4):
        rows = [row for row in make_pairs(temperature=temperature) if gold_difference(row)]
        right = [row["meta"]["gold_chosen"] > row["meta"]["gold_rejected"] for row in rows]
        expected = [1 / (1 + math.exp(-abs(gold_difference(row)) / temperature)) for row in rows]
        assert agrees(right, expected), temperature


def test_the_share_of_flipped_labels_is_the_flip_rate(ideal: list[dict]) -> None:
    for rate in (0.1, 0.25, 1.0):
        flipped = [a["chosen"] != b["chosen"] for a, b in zip(ideal, make_pairs(flip_rate=rate), strict=True)]
        assert agrees(flipped, [rate] * len(flipped)) if rate < 1 else all(flipped)


def test_a_flip_does_not_change_the_other_labels(ideal: list[dict]) -> None:
    """Flips use a separate generator: a higher rate adds flips to the flips of a lower rate."""
    few, many = ([a["chosen"] != b["chosen"] for a, b in zip(ideal, make_pairs(flip_rate=rate), strict=True)]
                 for rate in (0.1, 0.4))  # fmt: skip
    assert all(m for f, m in zip(few, many, strict=True) if f)


def test_the_longer_response_wins_as_often_as_the_bonus_implies() -> None:
    shares = []
    for bonus in (0.0, 0.3, -0.3, 1.0):
        rows = [row for row in make_pairs(length_bonus=bonus) if words(row["chosen"]) != words(row["rejected"])]
        expected = []
        for row in rows:
            first, second = map(words, shown(row))
            p = 1 / (1 + math.exp(-(gold_difference(row) + bonus * (first - second)) / 0.4))
            expected.append(p if first > second else 1 - p)
        longer = [words(row["chosen"]) > words(row["rejected"]) for row in rows]
        assert agrees(longer, expected), bonus
        shares.append(fmean(longer))
    none, small, negative, large = shares
    assert negative < none < small < large and none < 0.7 and large > 0.8


def test_the_first_response_wins_as_often_as_the_bonus_implies() -> None:
    shares = []
    for bonus in (0.0, 1.0, -1.0):
        rows = make_pairs(position_bonus=bonus)
        first = [row["meta"]["choice"] == 0 for row in rows]
        assert agrees(first, [1 / (1 + math.exp(-(gold_difference(row) + bonus) / 0.4)) for row in rows])
        shares.append(fmean(first))
    assert shares[2] < 0.45 < shares[0] < 0.55 < shares[1]


def test_random_workers_are_right_half_of_the_time_and_the_others_do_not_change(ideal: list[dict]) -> None:
    rows = make_pairs(random_workers=3)
    guessers, honest = (
        [i for i, row in enumerate(rows) if (row["meta"]["worker"] in WORKERS[:3]) == guesses and gold_difference(row)]
        for guesses in (True, False)
    )
    assert agrees([rows[i]["meta"]["gold_chosen"] > rows[i]["meta"]["gold_rejected"] for i in guessers],
                  [0.5] * len(guessers))  # fmt: skip
    assert [rows[i] for i in honest] == [ideal[i] for i in honest]


def test_tastes_are_lognormal_around_the_gold_scores_weights_and_differ_between_workers() -> None:
    logs = []
    for seed in range(40):
        labellers = Labellers(Dials(taste_spread=0.5), tiny.WEIGHTS, seed)
        assert len({tuple(weights.values()) for weights in labellers.weights.values()}) == len(WORKERS)
        logs += [math.log(weights[term] / tiny.WEIGHTS[term])
                 for weights in labellers.weights.values() for term in tiny.WEIGHTS]  # fmt: skip
    assert abs(fmean(logs)) < 4 * 0.5 / math.sqrt(len(logs))
    assert abs(fmean(x**2 for x in logs) - 0.25) < 4 * 0.25 * math.sqrt(2 / len(logs))
    plain = Labellers(Dials(), tiny.WEIGHTS, 1)
    assert all(weights == tiny.WEIGHTS for weights in plain.weights.values())


def test_only_the_named_summarisers_are_compared_in_training_and_all_in_validation() -> None:
    world = tiny.make_world(replace(SMALL, num_comparisons=300, num_validation=300, summarisers=("lead", "terse")))
    policies = {split: {name for row in world[f"comparisons.{split}"] for name in row["meta"]["policies"]}
                for split in ("train", "validation")}  # fmt: skip
    assert policies == {"train": {"lead", "terse"}, "validation": set(tiny.POLICIES)}


# ---------------------------------------------------------------------------------------------------------- cycles
QUERY = "POST: It was my sister. They just broke the lamp. We met in Paris. That person wants money.\n\nTL;DR:"
FOUR, THREE, TWO = (
    " my sister broke the lamp in Paris and wants money", " my sister broke the lamp in Paris", " my sister in Paris",
)  # fmt: skip


def test_ignoring_small_differences_makes_preferences_cyclic() -> None:
    """4, 3 and 2 facts in 10, 7 and 4 words. One fact fewer isn't noticed, and 3 words count 1.5; two facts count 2."""
    labellers = Labellers(Dials(indifference=1.5), tiny.WEIGHTS, 1)
    differences = [
        tiny.perceived_difference(QUERY, pair, "worker0", labellers) for pair in pairwise((FOUR, TWO, THREE, FOUR))
    ]
    assert [words(text) for text in (FOUR, THREE, TWO)] == [10, 7, 4]
    assert differences == pytest.approx([2.0, BREVITY * 3, BREVITY * 3])  # each preferred to the next
    sharp = Labellers(Dials(), tiny.WEIGHTS, 1)
    assert [tiny.perceived_difference(QUERY, pair, "worker0", sharp) for pair in pairwise((FOUR, TWO, THREE, FOUR))] \
        == pytest.approx([2.0, -1.0, -1.0])  # fmt: skip


def agreement(tmp_path: Path, **dials) -> dict:
    world = tiny.make_world(replace(SMALL, num_triads=150, **dials))
    write_jsonl(tmp_path / "agreement.jsonl", world["agreement"])
    return pair_agreement(load_labelled_pairs(tmp_path / "agreement.jsonl"))


def test_cycles_are_counted_in_the_triads(tmp_path: Path) -> None:
    calm = agreement(tmp_path, temperature=0.01)
    assert calm["num_annotators"] == 8 and calm["num_pairs"] == calm["num_common"] == 450
    assert calm["num_triads"] == 150 * 8
    assert calm["circular_share"] < 0.02  # only from ties
    assert agreement(tmp_path, temperature=0.01, indifference=1.5)["circular_share"] > calm["circular_share"] + 0.05


def test_guessers_agree_by_chance_and_ideal_workers_agree(tmp_path: Path) -> None:
    """With eight guessers, kappa is 0 and a quarter of the triads are circular; 3600 labels for 450 pairs."""
    guess = agreement(tmp_path, random_workers=8)
    assert abs(guess["fleiss_kappa"]) < 4 / math.sqrt(450 * 28)  # the 28 pairs of workers are nearly independent
    assert abs(guess["circular_share"] - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1200)
    kappas = [agreement(tmp_path, random_workers=n)["fleiss_kappa"] for n in (0, 4)]
    assert kappas[0] > 0.6 > 0.35 > kappas[1] > 0.05


def test_taste_costs_agreement(tmp_path: Path) -> None:
    kappas = [agreement(tmp_path, taste_spread=spread)["fleiss_kappa"] for spread in (0.0, 2.0)]
    assert kappas[1] < kappas[0] - 0.1


def test_a_world_without_triads_removes_the_triads_of_the_world_it_replaces(tmp_path: Path) -> None:
    tiny.main(replace(SMALL, out=tmp_path, num_triads=2))
    rows = [json.loads(line) for line in (tmp_path / "agreement.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["preferred"].keys() == set(WORKERS) for row in rows)
    tiny.main(replace(SMALL, out=tmp_path))
    assert not (tmp_path / "agreement.jsonl").exists()


# ------------------------------------------------------------------------------------------------------- the formula
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_preferences_are_probabilities_for_any_scores(difference: float, temperature: float) -> None:
    p = preference_probability(difference, temperature)
    assert 0 <= p <= 1
    assert p + preference_probability(-difference, temperature) == pytest.approx(1)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": 0.0}, "--temperature 0.0: must be above 0"),
        ({"taste_spread": -1.0}, "--taste-spread -1.0: must be from 0 to 10"),
        ({"random_workers": 9}, "--random-workers 9: must be from 0 to 8"),
        ({"length_bonus": math.inf}, "--length-bonus inf: must be a finite number"),
        ({"position_bonus": math.nan}, "--position-bonus nan"),
        ({"flip_rate": 1.1}, "--flip-rate 1.1: must be from 0 to 1"),
        ({"indifference": -0.1}, "--indifference -0.1"),
        ({"num_triads": -1}, "--num-triads -1"),
        ({"summarisers": ("good", "better")}, "--summarisers: unknown better; expected reference, good"),
        ({"summarisers": ("good", "good")}, "--summarisers good good: a comparison needs two or more"),
    ],
)
def test_a_dial_out_of_range_is_rejected_and_nothing_is_written(tmp_path: Path, wrong: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        tiny.main(replace(SMALL, out=tmp_path / "data", **wrong))
    assert not (tmp_path / "data").exists()
