"""The embedded Q&A site: its gold score against values worked out by hand, its Posts.xml against the dump's format."""

import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import site
from data.site import Args, gold_score
from nanorlhf.errors import InputError

QUERY = "Question: How do I sort a list in Python?\nMy list is called prices and it has to be fast.\nAnswer:"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (" use sorted. pass prices to it. it runs in native code.", 4.0),
        (" It runs in native code. Pass prices to it! Use sorted", 4.0),  # order, case and the last dot don't matter
        (" use sorted.", 2.0),
        (" use max.", -1.0),  # a wrong function
        (" you want Collections.sort.", -1.0),  # right in Java only; its dot doesn't end a sentence
        (" use sorted. give it books as input.", 2 - 0.5),  # a wrong name
        (" use sorted. it works offline.", 2 - 0.5),  # not the asker's wish
        (" use sorted. did you solve it?", 2 - 0.5),  # chatter
        (" use sorted. use sorted.", 2 - 0.5),  # a repeated sentence
        (" use sorted. try sorted.", 2.0),  # the same fact in other words
        (" use sorted. try max. you want split.", 2 - 2.0),
        (" sorted sorted sorted", 2.0),
        (" it depends.", -0.5),
        (" " + "very " * 22 + "use sorted.", 2 - 0.1 * 4),  # 24 words, four beyond twenty
        ("", -4.0),
        (" ...", -4.0),
        (" no." * 60, -4.0),  # no lower than an empty answer
    ],
)
def test_gold_score_matches_values_worked_out_by_hand(response, score):
    assert gold_score(QUERY, response) == pytest.approx(score)


def test_words_that_are_facts_occur_in_no_other_sentence():
    facts = site.FUNCTIONS | set(site.NAMES)
    frames = [*site.USES, *site.CALLS, *site.CHATTER, *site.BODIES, *site.ASIDES, *site.TITLES, *site.WISHES]
    for frame in frames:
        assert not facts & set(frame.lower().replace("?", " ").replace(".", " ").split())
    for task in site.TASKS:  # otherwise the title would name the object
        assert not set(site.NAMES) & set(task.split())
    assert len(site.FUNCTIONS) == 2 * len(site.TASKS) and len(site.GRANTS) == len(site.WISHES)


def test_banning_repeated_bigrams_bans_no_good_answer():
    def pairs(text):
        words = re.findall(r"\w+|[^\w\s]|\n", text)
        return list(zip(words, words[1:], strict=False))

    for seed in range(2000):
        rng = random.Random(seed)
        question = site.ask(rng, "python")
        use, call = rng.choice(site.USES), rng.choice(site.CALLS)
        parts = use.format(function=question.function), call.format(name=question.name), site.WISHES[question.wish]
        fresh = pairs(f"{' '.join(parts)}.")
        assert gold_score(question.query, f"{' '.join(parts)}.") == 4.0
        assert len(set(fresh)) == len(fresh) and not set(fresh) & set(pairs(question.query))


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_two_texts_have_a_score_within_the_bounds(query, response):
    assert site.LOWEST <= gold_score(query, response) <= 4.0


def test_authors_rank_in_quality_as_their_names_suggest():
    rng = random.Random(0)
    means = {}
    for author in site.AUTHORS:
        questions = [site.ask(rng, "python") for _ in range(300)]
        means[author] = fmean(gold_score(q.query, site.answer(q, author, rng)) for q in questions)
    assert means["expert"] > means["regular"] > means["hasty"] > means["chatty"] > means["confused"]
    assert means["expert"] > 3.5 and means["confused"] < 0.5


def test_better_answers_get_more_votes_and_are_accepted_more_often():
    rng = random.Random(0)
    golds = [3.0, 1.0, -1.0]
    votes = [site.cast_votes(golds, rng) for _ in range(400)]
    good, middling, bad = (fmean(column) for column in zip(*votes, strict=True))
    assert good > 1 > abs(middling) and bad < -1
    accepted = Counter(site.accept(golds, rng) for _ in range(400))
    assert accepted[0] > 10 * accepted[2] and accepted[None] > 0


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    args = Args(out=tmp_path_factory.mktemp("site"), num_questions=200)
    site.main(args)
    return args, [dict(row.attrib) for row in ElementTree.parse(args.out / "Posts.xml").getroot()]


def test_the_file_is_in_the_format_of_the_dump(posts):
    _, rows = posts
    ids = [int(row["Id"]) for row in rows]
    assert ids == list(range(1, len(rows) + 1))
    questions = {row["Id"]: row for row in rows if row["PostTypeId"] == "1"}
    answers = [row for row in rows if row["PostTypeId"] == "2"]
    assert len(questions) + len(answers) == len(rows)
    for row in answers:
        question = questions[row["ParentId"]]
        assert question["CreationDate"] < row["CreationDate"] and int(row["Score"]) > -200
    for row in questions.values():
        answer_ids = {answer["Id"] for answer in answers if answer["ParentId"] == row["Id"]}
        assert int(row["AnswerCount"]) == len(answer_ids) > 0
        assert row.get("AcceptedAnswerId") in {None, *answer_ids}
        assert row["Tags"] in ("<python>", "<java>") and row["Body"].startswith("<p>")
    assert any("OwnerUserId" not in row for row in questions.values())  # deleted users


def test_the_file_has_both_splits_and_posts_for_every_filter(posts):
    _, rows = posts
    dates = [row["CreationDate"] for row in rows if row["PostTypeId"] == "1"]
    late = sum(date > "2021-12-14" for date in dates) / len(dates)
    assert dates == sorted(dates) and late == pytest.approx(0.12, abs=0.03)
    bodies = " ".join(row["Body"] for row in rows)
    assert all(tag in bodies for tag in ("<code>", "<a href", "<img ", "<em>"))
    assert any("error" in row.get("Title", "").lower() for row in rows)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(posts, tmp_path):
    args, _ = posts
    again, other = replace(args, out=tmp_path / "again"), replace(args, out=tmp_path / "other", seed=2)
    for each in (again, other):
        site.main(each)
    first, second, third = ((each.out / "Posts.xml").read_bytes() for each in (args, again, other))
    assert first == second != third


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_questions": 3}, "--num-questions 3: must be at least 10"),
        ({"validation_share": 1.0}, "--validation-share 1.0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_impossible_settings_are_rejected(tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        site.main(replace(Args(out=tmp_path / "site"), **change))
    assert not (tmp_path / "site").exists()
