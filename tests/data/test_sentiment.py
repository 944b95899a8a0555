"""The sentiment reward for film dialogues."""

import sys

import pytest

from data import sentiment
from nanorlhf.errors import InputError
from nanorlhf.rewards.function import load_function
from tests.conftest import ROOT


def test_positive_words_score_higher_and_the_query_is_ignored():
    pytest.importorskip("vaderSentiment", reason="the known reward needs its lexicon: pip install vaderSentiment")
    happy, plain, sad = sentiment.score(["I hate you."] * 3, [" I love it!", " The door is open.", " It's horrible."])
    assert 1 >= happy > 0.5 > plain == 0 > -0.5 > sad >= -1
    assert sentiment.gold_score("I hate you.", " I love it!") == happy
    rule = load_function("--reward", f"{ROOT / 'data' / 'sentiment.py'}:score")
    assert rule(["I hate you."], [" I love it!"]) == [happy]


def test_a_missing_lexicon_is_an_input_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    sentiment.analyser.cache_clear()
    with pytest.raises(InputError, match="install it with `pip install vaderSentiment`"):
        sentiment.score([""], [""])
