"""Rankings by people and by the reward model: files, agreement and kappa, against examples worked by hand."""

import itertools
import json
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.errors import InputError
from nanorlhf.metrics import wilson_interval
from nanorlhf.metrics.agreement import (
    LabelledPair,
    RankedQuestion,
    annotator_kappas,
    cohen_kappa,
    consensus,
    fleiss_kappa,
    kendall_tau,
    load_labelled_pairs,
    load_rankings,
    order_probability,
    pair_agreement,
    pairwise_agreement,
)

RANKINGS = st.lists(st.permutations(range(4)), min_size=1, max_size=6)
TWO = st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(st.permutations(range(4)), min_size=n, max_size=n)] * 2))


# --------------------------------------------------------------------------------------------- reward model and people
def test_order_probability_counts_identical_rankings_only() -> None:
    people = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 2, 3]]
    model = [[0, 1, 2, 3], [3, 2, 0, 1], [1, 0, 2, 3]]  # the second differs in its last two answers
    result = order_probability(model, people)
    assert result == {
        "order_probability": pytest.approx(2 / 3),
        "order_probability_ci": wilson_interval(2 / 3, 3),
        "num_questions": 3,
        "chance": 1 / 24,
    }


def test_chance_is_the_share_of_right_orders_among_all() -> None:
    """The paper's 4.17%: each of the model's 24 possible orders against one order by people."""
    orders = list(itertools.permutations(range(4)))
    result = order_probability(orders, [[2, 0, 3, 1]] * 24)
    assert result["order_probability"] == result["chance"] == pytest.approx(0.0417, abs=5e-5)
    assert pairwise_agreement(orders, [[2, 0, 3, 1]] * 24) == 0.5
    assert kendall_tau(orders, [[2, 0, 3, 1]] * 24) == pytest.approx(0)


def test_agreement_on_pairs_by_hand() -> None:
    """b a d c against a b c d, best first: of 6 pairs, ab and cd are swapped."""
    assert pairwise_agreement([[1, 0, 3, 2]], [[0, 1, 2, 3]]) == pytest.approx(4 / 6)
    assert kendall_tau([[1, 0, 3, 2]], [[0, 1, 2, 3]]) == pytest.approx((4 - 2) / 6)


@given(TWO)
def test_pairwise_agreement_and_tau_are_their_definitions(both) -> None:
    right = [
        (one.index(i) < one.index(j)) == (other.index(i) < other.index(j))
        for one, other in zip(*both, strict=True)
        for i, j in itertools.combinations(range(4), 2)
    ]
    assert pairwise_agreement(*both) == pytest.approx(fmean(right))
    assert kendall_tau(*both) == pytest.approx(fmean(1 if same else -1 for same in right))


def test_rankings_that_are_not_permutations_are_rejected() -> None:
    for broken in ([[0, 1, 1, 3]], [[1, 2, 3, 4]], [0, 1, 2], []):
        with pytest.raises(ValueError, match="permutation"):
            order_probability(broken, broken)
    with pytest.raises(ValueError, match="same answers"):
        order_probability([[0, 1]], [[0, 1], [0, 1]])


@given(RANKINGS)
def test_consensus_is_by_mean_rank_with_ties_in_the_order_of_the_answers(rankings) -> None:
    order = consensus(rankings)
    keys = [(fmean(ranking.index(answer) for ranking in rankings), answer) for answer in order]
    assert sorted(order) == [0, 1, 2, 3] and keys == sorted(keys)


# -------------------------------------------------------------------------------------------------------------- kappa
def test_cohens_kappa_of_a_table_by_hand() -> None:
    """Both yes 20, both no 15, yes/no 5, no/yes 10: observed .7, expected .5 * .6 + .5 * .4 = .5, kappa .4."""
    ours = ["yes"] * 25 + ["no"] * 25
    theirs = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert cohen_kappa(ours, theirs) == pytest.approx(0.4)
    assert cohen_kappa(ours, ours) == 1 and cohen_kappa([0, 1], [1, 0]) == -1
    assert math.isnan(cohen_kappa([1, 1], [1, 1]))  # with a single label, chance agreement is 1


def test_fleiss_kappa_of_a_table_by_hand() -> None:
    """3 people, 4 items: agreeing pairs 3/3, 3/3, 1/3, 1/3, so 2/3; labels 7 and 5 of 12, so 74 / 144 = 37/72."""
    counts = [[3, 0], [0, 3], [2, 1], [2, 1]]
    assert fleiss_kappa(counts) == pytest.approx((2 / 3 - 37 / 72) / (1 - 37 / 72))
    assert math.isnan(fleiss_kappa([[2, 0], [2, 0]]))
    with pytest.raises(ValueError, match="2 to 3 labels"):
        fleiss_kappa([[3, 0], [1, 1]])


@given(TWO)
def test_cohens_expected_agreement_is_over_all_pairs_of_items(both) -> None:
    """Expected agreement compares one person's label of an item with the other's label of any item."""
    ours, theirs = ([label for ranking in rankings for label in ranking] for rankings in both)
    observed = fmean(a == b for a, b in zip(ours, theirs, strict=True))
    expected = fmean(a == b for a in ours for b in theirs)
    assert cohen_kappa(ours, theirs) == pytest.approx((observed - expected) / (1 - expected))


def question(number: int, **rankings: list[int]) -> RankedQuestion:
    return RankedQuestion(f"question {number}", list("abcd"), rankings)


def test_kappa_of_rankings_worked_by_hand() -> None:
    """Ranks of a b c d are 1 2 3 4 (ana), 1 2 4 3 (ben), 2 1 4 3 (eva): 2, 0 and 2 of 4 the same; chance is 1/4."""
    asked = [question(0, ana=[0, 1, 2, 3], ben=[0, 1, 3, 2], eva=[1, 0, 3, 2])]
    kappa = fmean((share - 1 / 4) / (3 / 4) for share in (2 / 4, 0 / 4, 2 / 4))
    kappas = annotator_kappas(asked)
    assert kappas.pop("cohen_kappa") == pytest.approx(kappa) and kappas.pop("fleiss_kappa") == pytest.approx(kappa)
    assert kappas == {"num_pairs": 3, "num_common": 1, "num_annotators": 3}


@given(st.lists(st.tuples(*[st.permutations(range(4))] * 3), min_size=1, max_size=5))
def test_where_all_rank_all_questions_both_kappas_are_equal(rows) -> None:
    kappas = annotator_kappas([question(i, ana=a, ben=b, eva=e) for i, (a, b, e) in enumerate(rows)])
    assert kappas["cohen_kappa"] == pytest.approx(kappas["fleiss_kappa"])


def test_cohen_skips_pairs_without_a_common_question_and_fleiss_uses_questions_that_all_ranked() -> None:
    order, reverse = [0, 1, 2, 3], [3, 2, 1, 0]
    apart = [question(0, ana=order, ben=order), question(1, ben=order, eva=reverse)]
    kappas = annotator_kappas(apart)
    assert kappas["cohen_kappa"] == pytest.approx((1 - 1 / 3) / 2) and kappas["num_pairs"] == 2
    assert kappas["fleiss_kappa"] is None and kappas["num_common"] == 0
    kappas = annotator_kappas([*apart, question(2, ana=order, ben=order, eva=order)])
    assert kappas["fleiss_kappa"] == 1 and kappas["num_common"] == 1 and kappas["num_pairs"] == 3


def test_random_rankings_have_a_kappa_near_0() -> None:
    rng = np.random.default_rng(0)
    asked = [question(i, **{name: rng.permutation(4).tolist() for name in ("ana", "ben", "eva")}) for i in range(400)]
    assert abs(annotator_kappas(asked)["cohen_kappa"]) < 0.05


def test_kappa_of_one_annotator_is_rejected() -> None:
    with pytest.raises(InputError, match="no question is ranked by two"):
        annotator_kappas([question(0, ana=[0, 1, 2, 3]), question(1, ben=[0, 1, 2, 3])])


# --------------------------------------------------------------------------------------------------------------- files
GOOD = {"query": "q", "answers": ["a", "b", "c"], "ranking": [2, 0, 1], "annotator": "ana"}


def test_rankings_of_several_files_are_joined_by_question(tmp_path) -> None:
    (tmp_path / "ana.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"query": "p"}) + "\n")
    (tmp_path / "ben.jsonl").write_text(json.dumps(GOOD | {"annotator": "ben", "ranking": [0, 1, 2]}) + "\n")
    assert load_rankings([tmp_path / "ana.jsonl", tmp_path / "ben.jsonl"]) == [
        RankedQuestion("q", ["a", "b", "c"], {"ana": [2, 0, 1], "ben": [0, 1, 2]}),
        RankedQuestion("p", ["a", "b", "c"], {"ana": [2, 0, 1]}),
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ranking": [0, 1]}, "expected each index from 0 to 2 once"),
        ({"ranking": [0, 1, 1]}, "'ranking' is"),
        ({"ranking": [1, 2, 3]}, "'ranking' is"),
        ({"ranking": [2, True, 0]}, r"'ranking\[1\]' must be int, not bool"),
        ({"ranking": ["a", "b", "c"]}, r"'ranking\[0\]' must be int, not str"),
        ({"ranking": []}, "'ranking' is"),
        ({"answers": ["a", "b", 3]}, r"'answers\[2\]' must be str"),
        ({"answers": ["a"], "ranking": [0]}, "'answers' must be a list of at least two texts"),
        ({"annotator": " "}, "'annotator' is empty"),
        ({"annotator": 3}, "'annotator' must be str"),
        ({}, "'ana' already ranked this question at .*r.jsonl:1"),
        ({"annotator": "ben", "answers": ["b", "a", "c"]}, "differ from the ones that 'ana' ranked at .*:1: 'ben'"),
        ({"query": "p", "answers": ["a", "b"], "ranking": [1, 0]}, "2 answers, others have 3"),
    ],
)
def test_a_broken_line_is_reported_with_file_and_line(tmp_path, change, sentence) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(InputError, match=f"r.jsonl:2: .*{sentence}"):
        load_rankings([tmp_path / "r.jsonl"])


# ----------------------------------------------------------------------------------------------------- people and pairs
def labelled(*choices: str, names: str = "abc") -> list[LabelledPair]:
    """Return one pair, each with a different query, per text of choices: one digit per person, `-` for no label."""
    return [
        LabelledPair(str(i), ("x", "y"), {n: int(digit) for n, digit in zip(names, row, strict=True) if digit != "-"})
        for i, row in enumerate(choices)
    ]


def test_kappas_of_pairs_by_hand() -> None:
    """Fleiss: observed (1 + 1/3 + 1 + 1/3) / 4 = 2/3, half of all labels are 0, so (2/3 - 1/2) / (1/2).

    Cohen: a and b agree on 3 of 4, expected 3/4 * 1/2 + 1/4 * 1/2, so 1/2; b and c likewise; a and c agree on 2 of 4,
    expected 3/4 * 1/4 + 1/4 * 3/4, so 1/5.
    """
    agreement = pair_agreement(labelled("000", "001", "111", "011"))
    assert agreement == {
        "cohen_kappa": pytest.approx((1 / 2 + 1 / 2 + 1 / 5) / 3),
        "fleiss_kappa": pytest.approx(1 / 3),
        "num_annotators": 3,
        "num_pairs": 4,
        "num_common": 4,
        "circular_share": None,
        "num_triads": 0,
    }


def test_pairs_that_not_all_have_labelled_count_for_those_who_have() -> None:
    agreement = pair_agreement(labelled("000", "001", "111", "011", "0-0", "1--"))
    assert agreement["num_common"] == 4 and agreement["fleiss_kappa"] == pytest.approx(1 / 3)
    a, c = (0, 0, 1, 0, 0), (0, 1, 1, 1, 0)
    assert agreement["cohen_kappa"] == pytest.approx((1 / 2 + 1 / 2 + cohen_kappa(a, c)) / 3)


@pytest.mark.parametrize("choices", [("0", "1"), ("00", "00"), ("0-", "-1")])
def test_agreement_without_data_is_none(choices) -> None:
    agreement = pair_agreement(labelled(*choices, names="ab"[: len(choices[0])]))
    assert agreement["cohen_kappa"] is None and agreement["fleiss_kappa"] is None


def test_always_choosing_the_first_agrees_only_by_chance() -> None:
    assert pair_agreement(labelled("000", "000", "000", "001"))["fleiss_kappa"] < 0


def triad(*winners: str, query: str = "q", who: str = "a") -> list[LabelledPair]:
    """Return the pairs x y, y z and z x with their winners."""
    pairs = zip(("xy", "yz", "zx"), winners, strict=True)
    return [LabelledPair(query, (pair[0], pair[1]), {who: pair.index(winner)}) for pair, winner in pairs]


def test_a_triad_is_circular_where_each_of_three_wins_once() -> None:
    """Two of the eight outcomes are circular."""
    outcomes = list(itertools.product("xy", "yz", "zx"))
    shares = [pair_agreement(triad(*winners))["circular_share"] for winners in outcomes]
    assert [o for o, share in zip(outcomes, shares, strict=True) if share] == [("x", "y", "z"), ("y", "z", "x")]
    assert fmean(shares) == 0.25


def test_triads_are_per_annotator_and_query() -> None:
    both = triad("x", "y", "z") + triad("x", "y", "x", who="b")
    assert pair_agreement(both)["circular_share"] == 0.5 and pair_agreement(both)["num_triads"] == 2
    split = triad("x", "y", "z")[:2] + triad("x", "y", "z", query="p")[2:] + triad("x", "y", "z", who="b")[2:]
    assert pair_agreement(split)["num_triads"] == 0
    four = [LabelledPair("q", pair, {"a": 0}) for pair in itertools.combinations("wxyz", 2)]
    assert pair_agreement(four)["num_triads"] == 4 and pair_agreement(four)["circular_share"] == 0


PAIR = {"query": "q", "responses": ["x", "y"], "preferred": {"ana": 0, "ben": 1}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"responses": ["x"]}, "'responses' must be a list of two different texts"),
        ({"responses": ["x", "x"]}, "'responses' must be a list of two different texts"),
        ({"responses": ["x", 3]}, r"'responses\[1\]' must be str"),
        ({"preferred": {}}, "'preferred' must have a choice"),
        ({"preferred": {"ana": 2}}, "'preferred' must have a choice"),
        ({"preferred": {"ana": True}}, r"'preferred\[ana\]' must be int, not bool"),
        ({"preferred": [0]}, "'preferred' must be dict"),
        ({"query": None}, "'query' must be str"),
    ],
)
def test_a_broken_pair_is_reported_with_file_and_line(tmp_path, change, sentence) -> None:
    path = tmp_path / "agreement.jsonl"
    path.write_text(json.dumps(PAIR) + "\n")
    assert load_labelled_pairs(path) == [LabelledPair("q", ("x", "y"), {"ana": 0, "ben": 1})]
    path.write_text(json.dumps(PAIR) + "\n" + json.dumps(PAIR | change) + "\n")
    with pytest.raises(InputError, match=f"agreement.jsonl:2: .*{sentence}"):
        load_labelled_pairs(path)
