"""Noise by examples, and properties for any text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorlhf.selfrank.noise import add_noise, negation_noise, ngram_noise, shuffle_noise


def draws(function, *arguments, num=60) -> set:
    """The results over different seeds."""
    return {function(*arguments, np.random.default_rng(seed)) for seed in range(num)}


# ------------------------------------------------------------------------------------------------------------ negation
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is not far.", "It is far."),
        ("I don't know.", "I do know."),
        ("It isn’t far", "It is far"),
        ("I can't swim", "I can swim"),
        ("I cannot swim", "I can swim"),
        ("Won't you?", "Will you?"),
        ("We shan't", "We shall"),
        ("you needn't", "you need"),
        ("I never go", "I go"),
        ("Not bad", "bad"),
        ("I don ’ t know .", "I do know ."),  # tokenised as in DailyDialog
        ("I ca n't swim .", "I can swim ."),  # tokenised as in the Penn Treebank
        ("one line\nthat is not\nall", "one line\nthat is\nall"),
    ],
)
def test_a_single_negation_is_removed(text, expected):
    assert draws(negation_noise, text) == {expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is far.", "It is not far."),
        ("I can swim", "I cannot swim"),
        ("Can you?", "Cannot you?"),
        ("You DO know", "You DO not know"),
        ("I'm here", "I'm not here"),
        ("I ’ m here", "I ’ m not here"),
        ("they ’ll go", "they ’ll not go"),
    ],
)
def test_without_a_negation_a_single_auxiliary_gets_one(text, expected):
    assert draws(negation_noise, text) == {expected}


def test_one_of_several_positions_is_drawn():
    assert draws(negation_noise, "I am here and it was late") == {
        "I am not here and it was late",
        "I am here and it was not late",
    }
    assert draws(negation_noise, "It isn't far, not at all") == {"It is far, not at all", "It isn't far, at all"}


@pytest.mark.parametrize("text", ["", "Yes.", "Tomorrow at noon", "not", "Never", "a canal, an island, a knot", "it's"])
def test_a_text_without_auxiliary_or_with_only_a_negation_gets_no_negation_noise(text):
    assert draws(negation_noise, text) == {None}


# -------------------------------------------------------------------------------------------------------------- shuffle
def test_sentences_are_reordered_and_the_whitespace_between_them_kept():
    text = "One. Two?\nThree!"
    expected = {"One. Three!\nTwo?", "Two? One.\nThree!", "Two? Three!\nOne.", "Three! One.\nTwo?", "Three! Two?\nOne."}
    assert draws(shuffle_noise, text) == expected
    assert draws(shuffle_noise, "I see . Fine .") == {"Fine . I see ."}


@pytest.mark.parametrize("text", ["", "One sentence.", "no end", "Yes. Yes. Yes.", "3.14 is a number."])
def test_one_sentence_or_equal_ones_cannot_be_shuffled(text):
    assert draws(shuffle_noise, text) == {None}


# -------------------------------------------------------------------------------------------------------------- n-grams
def test_up_to_three_words_are_deleted_replaced_or_inserted_and_no_more():
    texts = draws(ngram_noise, "a b c d", ["x y z w"], num=600)
    deleted = {"b c d", "a c d", "a b d", "a b c", "c d", "a d", "a b", "d", "a"}
    new = {1: ["x", "y", "z", "w"], 2: ["x y", "y z", "z w"], 3: ["x y z", "y z w"]}
    words = "a b c d".split()
    replaced = {" ".join(words[:i] + [g] + words[i + n :]) for n in new for g in new[n] for i in range(5 - n)}
    inserted = {" ".join(words[:i] + [g] + words[i:]) for n in new for g in new[n] for i in range(5)}
    assert texts <= deleted | replaced | inserted
    assert deleted <= texts and len(texts & replaced) > 20 and len(texts & inserted) > 20
    assert len(deleted | replaced | inserted) == 9 + (16 + 9 + 4) + (20 + 15 + 10)


def test_new_words_are_adjacent_in_one_other_answer():
    texts = draws(ngram_noise, "a", ["x y", "z"])  # nothing can be deleted
    assert texts == {"x", "y", "z", "a x", "a y", "a z", "x a", "y a", "z a", "x y a", "a x y"}
    assert draws(ngram_noise, "a", ["a"]) == {"a a"}  # replacing it by itself isn't noise


def test_without_other_answers_words_can_only_be_deleted():
    assert draws(ngram_noise, "a b\nc", []) == {"b\nc", "a\nc", "a b", "a", "c"}
    assert draws(ngram_noise, "a", []) == draws(ngram_noise, "a", [" "]) == draws(ngram_noise, "", []) == {None}


# ------------------------------------------------------------------------------------------------------------------ all
def test_only_types_that_apply_are_drawn_each_as_often():
    def kinds(text, other_texts):
        results = [add_noise(text, other_texts, np.random.default_rng(seed)) for seed in range(600)]
        return {kind: sum(noise[1] == kind for noise in results) for kind in {noise[1] for noise in results}}

    counts = kinds("It is far. Go home.", ["x"])
    assert set(counts) == {"ngram", "negation", "shuffle"} and all(150 < count < 250 for count in counts.values())
    counts = kinds("It is far.", ["x"])
    assert set(counts) == {"ngram", "negation"} and all(240 < count < 360 for count in counts.values())
    assert kinds("Yes", ["x"]) == {"ngram": 600}
    assert add_noise("Yes", [], np.random.default_rng(0)) is None


TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from("is not can't cannot . ! yes\n \t I'm n't never x. Don ’ t".split(" ")), max_size=8).map(
        " ".join
    ),
)


@given(TEXTS, st.lists(TEXTS, max_size=3), st.integers(0, 10**6))
@settings(deadline=None)
def test_noise_changes_the_text_leaves_some_of_it_and_depends_on_the_generator_only(text, other_texts, seed):
    result = add_noise(text, other_texts, np.random.default_rng(seed))
    assert result == add_noise(text, other_texts, np.random.default_rng(seed))
    if result is None:
        assert len(text.split()) <= 1  # of two words, one can be deleted
    else:
        assert result[0].split() != text.split() and result[0].strip() == result[0] != ""
