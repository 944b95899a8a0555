"""Metrics of replies against values computed by hand, brute force, and a second version of SQuAD's script."""

import json
import math
import random
from pathlib import Path

import nltk
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.corpus import LazyCorpusLoader, WordNetCorpusReader

from nanorlhf.errors import InputError
from nanorlhf.selfrank import reply_overlap as reply_metrics
from nanorlhf.selfrank.reply_overlap import bleu4, google_bleu, meteor, meteor_matching, squad_scores, squad_tokens

WORDS = st.lists(st.sampled_from("abcde"), max_size=8).map(" ".join)
ROWS = st.tuples(st.lists(WORDS.filter(bool), min_size=1, max_size=3), WORDS)


@pytest.fixture(autouse=True)
def no_wordnet(monkeypatch) -> None:
    """Make the results independent of the installed NLTK data; a WordNet that was loaded once would stay loaded."""
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(reply_metrics, "wordnet", LazyCorpusLoader("wordnet", WordNetCorpusReader, object()))


# ----------------------------------------------------------------------------------------------------- 1. by hand
def test_bleu_of_texts_counted_by_hand() -> None:
    """`the cat sat on mat` against `the cat sat on the mat`: 5/5, 3/4, 2/3, 1/2 n-grams match; 5 tokens against 6."""
    assert bleu4([["the cat sat on the mat"]], ["the cat sat on mat"]) == pytest.approx(
        [(1 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25 * math.exp(1 - 6 / 5)]
    )


def test_bleu_counts_an_order_without_matches_as_a_tenth_of_a_match() -> None:
    """`a b x` against `a b c`: 2/3 words, 1/2 bigrams, 0/1 trigrams, and no 4-gram to match."""
    assert bleu4([["a b c"]], ["a b x"]) == pytest.approx([(2 / 3 * 1 / 2 * 0.1 * 0.1) ** 0.25])
    assert bleu4([["yes"]], ["yes"]) == pytest.approx([0.1**0.75])  # below 1 although equal


def test_bleu_clips_each_ngram_by_its_maximum_count_over_references() -> None:
    """`a a a b c` for `a a b` and `a b c`: words 2 + 1 + 1 of 5, bigrams aa, ab, bc of 4, trigrams aab, abc of 3."""
    assert bleu4([["a a b", "a b c"]], ["a a a b c"]) == pytest.approx([(4 / 5 * 3 / 4 * 2 / 3 * 0.1 / 2) ** 0.25])


def test_google_bleu_is_the_minimum_of_precision_and_recall() -> None:
    """`a b c` has 3 + 2 + 1 n-grams and `a b c d` 4 + 3 + 2 + 1: recall 6/10, precision 6/6, and the reverse."""
    assert google_bleu([["a b c d"], ["a b c"]], ["a b c", "a b c d"]) == pytest.approx([0.6, 0.6])
    assert google_bleu([["x y", "a b"]], ["a b"]) == [1.0]  # the best reference


def test_meteor_of_texts_counted_by_hand() -> None:
    """`on a mat sat the cat` against `the cat sat on a mat here`: 6 of 6 and 6 of 7 match, in 3 chunks."""
    precision, recall = 6 / 6, 6 / 7
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    score = meteor([["the cat sat on a mat here"]], ["on a mat sat the cat"])
    assert score == pytest.approx([mean * (1 - 0.5 * (3 / 6) ** 3)])


def test_nltk_does_not_match_repeated_words_in_the_fewest_chunks() -> None:
    """`on the mat sat the cat`: each `the` matches the one in the same half, so there are 6 chunks, not 3."""
    assert meteor([["the cat sat on the mat"]], ["on the mat sat the cat"]) == pytest.approx([1 - 0.5 * (6 / 6) ** 3])


def test_meteor_matches_stems_and_ignores_case() -> None:
    """`Dogs barked` against `the dog barks loudly`: 2 of 2 and 2 of 4 match, in one chunk."""
    precision, recall = 2 / 2, 2 / 4
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    assert meteor([["the dog barks loudly"]], ["Dogs barked"]) == pytest.approx([mean * (1 - 0.5 * (1 / 2) ** 3)])
    assert bleu4([["the dog barks loudly"]], ["The Dog"]) == [0]  # BLEU is case-sensitive


def test_contractions_are_tokenised_as_in_dailydialog() -> None:
    rows = [["I don ' t know ."]], ["I don't know."]
    assert bleu4(*rows) == google_bleu(*rows) == [1.0] and meteor(*rows) == pytest.approx([1 - 0.5 / 6**3])


@pytest.mark.parametrize("metric", [bleu4, google_bleu, meteor])
def test_an_empty_reply_scores_zero_and_a_row_without_references_is_an_error(metric) -> None:
    assert metric([["a b"], [""], [""]], ["", "", "a"]) == [0.0, 0.0, 0.0]
    assert metric([], []) == []
    with pytest.raises(ValueError, match="row 1 has no reference"):
        metric([["a"], []], ["a", "a"])
    with pytest.raises(ValueError):
        metric([["a"]], ["a", "b"])


# ------------------------------------------------------------------------------------------------- 2. by brute force
def ngrams(tokens: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def matches(reference: list, response: list) -> int:
    """The size of the multiset intersection."""
    left = list(reference)
    return sum(1 for element in response if element in left and left.remove(element) is None)


@given(ROWS)
def test_bleu_is_its_definition(row) -> None:
    references, response = [text.split() for text in row[0]], row[1].split()
    logs = []
    for n in range(1, 5):
        grams = ngrams(response, n)
        clipped = sum(
            min(grams.count(gram), max(ngrams(reference, n).count(gram) for reference in references))
            for gram in set(grams)
        )
        logs.append(math.log((clipped or 0.1) / max(1, len(grams))))
    if not any(word in reference for word in response for reference in references):
        expected = 0.0
    else:
        closest = min((abs(len(reference) - len(response)), len(reference)) for reference in references)[1]
        expected = math.exp(min(0, 1 - closest / len(response)) + sum(logs) / 4)
    assert bleu4([row[0]], [row[1]]) == pytest.approx([expected])


@given(ROWS)
def test_google_bleu_is_its_definition(row) -> None:
    ours = [gram for n in range(1, 5) for gram in ngrams(row[1].split(), n)]
    best = 0.0
    for text in row[0]:
        theirs = [gram for n in range(1, 5) for gram in ngrams(text.split(), n)]
        common = matches(theirs, ours)
        best = max(best, min(common / len(theirs), common / len(ours) if ours else 0.0))
    assert google_bleu([row[0]], [row[1]]) == pytest.approx([best])


@given(st.permutations("abcdefg"), st.integers(0, 7), st.integers(1, 7))
def test_meteor_of_words_that_occur_once_is_its_definition(words, num_response, num_reference) -> None:
    """Without repeated words there is only one alignment."""
    response, reference = words[:num_response], "abcdefg"[:num_reference]
    positions = [reference.index(word) if word in reference else None for word in response]
    count = sum(position is not None for position in positions)
    expected = 0.0
    if count:
        follows = sum(a is not None and b == a + 1 for a, b in zip(positions, positions[1:], strict=False))
        precision, recall = count / num_response, count / num_reference
        mean = 1 / (0.1 / precision + 0.9 / recall)
        expected = mean * (1 - 0.5 * ((count - follows) / count) ** 3)
    assert meteor([[" ".join(reference)]], [" ".join(response)]) == pytest.approx([expected])


# ------------------------------------------------------------------------------------------------------- 3. WordNet
def test_without_wordnet_meteor_matches_no_synonyms_and_reports_it() -> None:
    assert meteor_matching() == "exact and stem"
    assert meteor([["the car"], ["the car"]], ["the auto", "the cars"]) == pytest.approx([0.5 * 0.5, 1 - 0.5 / 2**3])


@pytest.fixture
def tiny_wordnet(no_wordnet, tmp_path, monkeypatch) -> Path:
    """WordNet files with one noun synset, {car, auto}."""
    directory = tmp_path / "corpora" / "wordnet"
    directory.mkdir(parents=True)
    for part in ("noun", "verb", "adj", "adv"):
        for name in (f"data.{part}", f"index.{part}", f"{part}.exc"):
            (directory / name).write_text("")
    (directory / "lexnames").write_text("00\tnoun.artifact\t1\n")
    (directory / "data.noun").write_text("00000000 00 n 02 car 0 auto 0 000 | a vehicle  \n")
    (directory / "index.noun").write_text("auto n 1 0 1 0 00000000  \ncar n 1 0 1 0 00000000  \n")
    (directory / "index.sense").write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    return directory


def test_with_wordnet_meteor_matches_synonyms_and_reports_it(tiny_wordnet) -> None:
    assert meteor_matching() == "exact, stem and WordNet synonyms"
    assert meteor([["the car"], ["the car"]], ["the auto", "the bus"]) == pytest.approx([1 - 0.5 / 2**3, 0.5 * 0.5])


def test_an_incomplete_wordnet_is_reported_in_one_sentence(tiny_wordnet) -> None:
    (tiny_wordnet / "lexnames").unlink()
    with pytest.raises(InputError, match="WordNet data is incomplete .*lexnames"):
        meteor_matching()


# --------------------------------------------------------------------------------------------------------- 4. SQuAD
def official(references: list[str], response: str) -> tuple[float, float]:
    """Exact match and F1 as SQuAD 2.0's script defines them, written differently: by character, F1 = 2 c / (p + g)."""

    def tokens(text: str) -> list[str]:
        pieces = [""]  # words, and the single characters between them
        for c in text.lower():
            if c in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~":
                continue
            if c.isalnum():
                pieces[-1] += c
            else:
                pieces += [c, ""]
        return "".join(" " if piece in ("a", "an", "the") else piece for piece in pieces).split()

    ours = tokens(response)
    golds = [tokens(text) for text in references if tokens(text)] or [[]]
    f1s = [2 * matches(gold, ours) / (len(gold) + len(ours)) if gold and ours else gold == ours for gold in golds]
    return float(ours in golds), float(max(f1s))


def questions(real_data) -> list[list[str]]:
    articles = json.loads((real_data / "squad_v2" / "dev-v2.0.json").read_text())["data"]
    asked = [question for article in articles for part in article["paragraphs"] for question in part["qas"]]
    return [[answer["text"] for answer in question["answers"]] for question in asked]


def test_exact_match_and_f1_of_real_answers_are_those_of_squads_script(real_data) -> None:
    generator = random.Random(0)
    rows, texts = [], questions(real_data)
    pool = [answer for answers in texts for answer in answers]
    for answers in texts:
        answer = generator.choice(answers or pool)  # also for unanswerable questions
        changed = [
            answer,
            answer.upper() + ".",
            f"the {answer}, of course",
            " ".join(answer.split()[:-1]),
            answer + " " + answer,
            generator.choice(pool),
            "",
        ]
        rows.append((answers, generator.choice(changed)))
    scores = squad_scores(*map(list, zip(*rows, strict=True)))
    expected = [official(*row) for row in rows]
    assert scores["exact_match"] == [match for match, _ in expected]
    assert scores["f1"] == pytest.approx([f1 for _, f1 in expected])
    for precision, recall, f1 in zip(scores["precision"], scores["recall"], scores["f1"], strict=True):
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall) if f1 else 0)
    assert {0.0, 1.0} < set(scores["f1"]) and 0.1 < sum(scores["exact_match"]) / len(rows) < 0.9


def test_precision_and_recall_are_those_of_the_reference_with_the_best_f1() -> None:
    """Against `x y z w`, the reference `x y` has F1 2/3, P 1/2, R 1; `x q` has P 1/4, R 1/2; no exact match."""
    scores = squad_scores([["x q", "x y"]], ["x y z w"])
    assert scores == {"exact_match": [0.0], "precision": [0.5], "recall": [1.0], "f1": [pytest.approx(2 / 3)]}


def test_repeated_tokens_count_as_often_as_they_occur_in_both() -> None:
    scores = squad_scores([["very very big"]], ["very very very small"])
    assert scores["precision"] == [2 / 4] and scores["recall"] == [2 / 3]


@pytest.mark.parametrize("references", [[], [""], ["unanswerable"], [" Unanswerable."], ["the"], ["", "..."]])
def test_a_question_without_an_answer_expects_an_empty_response(references) -> None:
    responses = ["", " unanswerable", "Unanswerable!", "the", "?", "unanswerable question", "France"]
    for column in squad_scores([references] * 7, responses).values():
        assert column == [1.0] * 5 + [0.0] * 2


def test_unanswerable_is_wrong_where_there_is_an_answer_and_references_of_articles_only_are_dropped() -> None:
    assert [column for column in squad_scores([["France"]], ["unanswerable"]).values()] == [[0.0]] * 4
    scores = squad_scores([["the", "The France"]], [""])
    assert scores["f1"] == [0.0]  # an empty answer must not match the empty one of two references


def test_normalisation_removes_ascii_punctuation_and_keeps_unicode() -> None:
    assert squad_tokens("A 'Déjà-Vu',\tan THE\u00a0théâtre «the end» another") == [
        "déjàvu", "théâtre", "«", "end»", "another",
    ]  # fmt: skip
    assert squad_tokens("10–a–12") == ["10–", "–12"]  # an article is replaced by a space, punctuation by nothing
    assert squad_scores([["BEYONCÉ"], ["10–12"]], ["beyoncé", "1012"])["exact_match"] == [
        1.0,
        0.0,
    ]  # an en dash is kept
