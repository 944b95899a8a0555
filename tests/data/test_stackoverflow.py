import csv
import doctest
import html
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import stackoverflow as so
from nanorlhf.checkpoint import save
from nanorlhf.dataset import load_comparisons, load_demonstrations, load_scored, load_unpaired, response_ids
from nanorlhf.errors import InputError
from nanorlhf.generate import sample_answers
from nanorlhf.model import GPT
from nanorlhf.padding import right_pad
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.conftest import TINY, run_program
from tests.data.rows import read

TOKENIZER = train_tokenizer(["Question: How to sort a list?\nIt is long.\nAnswer: use sorted, it is quick."] * 3, 340)


def question(number, title="How to sort a list?", body="<p>It is long.</p>\n", tags="<python><list>", **columns):
    date = {"CreationDate": "2021-03-04T05:06:07.123"}
    row = {"Id": number, "PostTypeId": 1, "Title": title, "Body": body, "Tags": tags, "OwnerUserId": 7, "Score": 3}
    return row | date | columns


def answer(number, parent, votes, body="<p>use sorted</p>\n", **columns):
    date = {"CreationDate": "2021-03-05T05:06:07.123"}
    row = {"Id": number, "PostTypeId": 2, "ParentId": parent, "Score": votes, "Body": body, "OwnerUserId": 8}
    return row | date | columns


LATE = {"CreationDate": "2022-01-01T00:00:00.000"}
VALIDATION = (question(900, title="How do I split a line?", **LATE), answer(901, 900, 1, **LATE))


def xml_row(row):
    attributes = " ".join(f'{n}="{html.escape(str(v)).replace(chr(10), "&#xA;")}"' for n, v in row.items())
    return f"  <row {attributes} />"


def xml(*rows, end="\n"):
    lines = ['<?xml version="1.0" encoding="utf-8"?>', "<posts>", *map(xml_row, rows), "</posts>"]
    return end.join(lines)


def write_csv(path, *rows, names=(*so.NEEDED, *so.OPTIONAL), start=""):
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(start)
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def args(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer")
    return so.Args(source=tmp_path / "Posts.xml", out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))


def convert(args, *rows):
    """Convert the dump's `rows` and return the rows written, by file."""
    args.source.write_text(xml(*rows))
    so.main(args)
    return read(args.out)


# ------------------------------------------------------------------------------------------- Algorithm 1 [SO alg 1]
# Four questions with one, one, one and two answers. s = votes / answers:
#     [1] -> 1   [2] -> 2   [-1] -> -1   [6, 1] -> 3, .5          sorted: -1 .5 1 2 3
# linear quartiles at indices 1 and 3 of 0..4: Q1 = .5, Q3 = 2, IQR = 1.5, fences .5 - 2.25 = -1.75, 2 + 2.25 = 4.25
# nothing is outside; largest inliers 3 and |-1|:  1/3, 2/3, -1/1, 3/3, .5/3
INSIDE = [[1], [2], [-1], [6, 1]]


def test_inliers_are_divided_by_the_largest_of_their_sign():
    scores = so.regression_scores(INSIDE)
    assert [[pytest.approx(s) for s in question] for question in scores] == [[1 / 3], [2 / 3], [-1], [1, 1 / 6]]
    assert so.regression_bounds(INSIDE) == so.Bounds(-1.75, 4.25, 3.0, 1.0)


# Nine answers to one question: votes / 9, so s = 0 -.9/9 .9/9 1.8/9 2.7/9 3.6/9 4.5/9 9/9 -18/9
#     s sorted: -2 -.1 0 .1 .2 .3 .4 .5 1       Q1 = s[2] = 0, Q3 = s[6] = .4, IQR .4, fences -.6 and 1.0
# outside: -2 (clipped: -1). 1 is on the fence, which counts as inside: largest inliers 1 and .1
WITH_OUTLIER = [[0, -0.9, 0.9, 1.8, 2.7, 3.6, 4.5, 9, -18]]


def test_outliers_are_clipped_and_do_not_change_the_scale():
    [scores] = so.regression_scores(WITH_OUTLIER)
    assert scores == [pytest.approx(s) for s in (0, -1, 0.1, 0.2, 0.3, 0.4, 0.5, 1, -1)]


# One question with eight answers, votes / 8:
#     s = .1 .2 .3 .4 .5 .6 .7 and 1.6 -> Q1 at index 1.75: .2 + .75 * .1 = .275, Q3 at 5.25: .6 + .25 * .1 = .625
#     IQR .35, fences -.25 and 1.15: 1.6 is an outlier, clipped to 1; the largest inlier .7 becomes 1
# With tight fences and a question with .8, below, the outlier keeps .8 while an inlier of .7 becomes 1:
#     s = .7 (nine times) and .8: Q1 = Q3 = .7, fences .7 and .7 -> .8 outside, clip(.8) = .8; .7 / .7 = 1
def test_an_outlier_may_score_less_than_an_inlier_unless_saturated():
    votes = [[0.7]] * 9 + [[0.8]]
    assert so.regression_scores(votes) == [[1.0]] * 9 + [[0.8]]
    assert so.regression_scores(votes, outliers="saturate") == [[1.0]] * 10
    below = [[0.7]] * 9 + [[0.1]]  # .1 is below the fence
    assert so.regression_scores(below)[-1] == [0.1]
    assert so.regression_scores(below, outliers="saturate")[-1] == [-1.0]
    eight = [[8 * s for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.6)]]
    assert so.regression_scores(eight)[0] == [pytest.approx(s / 0.7) for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)] + [1]


def test_bounds_of_the_train_split_apply_to_other_votes():
    bounds = so.regression_bounds(INSIDE)  # fences -1.75 and 4.25, largest inliers 3 and 1
    # 3/1 -> 3/3 = 1; 4 is inside and beyond 3: 1; -1.5 is inside and beyond -1: -1; 5 outside: clip 1; 2/2 = 1 -> 1/3
    votes = [[3], [4], [-1.5], [5], [2, 0]]
    assert so.regression_scores(votes, "clip", bounds) == [[1], [1], [-1], [1], [pytest.approx(1 / 3), 0]]
    positive = so.regression_bounds([[1], [2], [3]])  # fences 0 and 4; no negative inlier to divide by
    assert positive == so.Bounds(0.0, 4.0, 3.0, 0.0)
    assert so.regression_scores([[-0.5]], bounds=replace(positive, low=-1.0)) == [[-0.5]]  # inside: unchanged


votes_of_questions = st.lists(
    st.lists(st.integers(-20, 60), min_size=1, max_size=5), min_size=1, max_size=30
).filter(lambda votes: sum(map(len, votes)) > 1)  # fmt: skip


@given(votes_of_questions)
def test_the_fences_match_the_standard_library_and_scores_are_from_minus_1_to_1(votes):
    shares = [vote / len(question) for question in votes for vote in question]
    q1, _, q3 = statistics.quantiles(shares, n=4, method="inclusive")
    bounds = so.regression_bounds(votes)
    assert (bounds.low, bounds.high) == (pytest.approx(q1 - 1.5 * (q3 - q1)), pytest.approx(q3 + 1.5 * (q3 - q1)))
    for outliers in ("clip", "saturate"):
        scores = so.regression_scores(votes, outliers)
        assert [len(question) for question in scores] == [len(question) for question in votes]
        assert all(-1 <= score <= 1 for question in scores for score in question)
    ranked = sorted(zip(shares, (score for question in scores for score in question), strict=True))
    assert all(a[1] <= b[1] for a, b in zip(ranked, ranked[1:], strict=False))  # saturate is monotone


def test_votes_without_a_scale_are_refused():
    for votes in ([], [[]], [[math.nan]], [[1], [math.inf]]):
        with pytest.raises(InputError):
            so.regression_scores(votes)
    with pytest.raises(InputError):
        so.regression_scores([[1]], outliers="drop")


# ------------------------------------------------------------------------------------------- Algorithm 2 [SO alg 2]
def as_tuples(lists):
    return tuple(map(tuple, lists))


def test_contrastive_scores_are_those_worked_out_by_hand():
    # v:       -5  -1  0  1            2              3            4              7       8         100
    # log2(1+v):       0  1            1.58           2            2.32           3       3.17      6.66
    votes = [-5, -1, 0, 1, 2, 3, 4, 7, 8, 100]
    assert so.contrastive_scores(votes, [False] * 10) == [-1, -1, 0, 1, 2, 2, 3, 3, 4, 7]
    assert so.contrastive_scores(votes, [True] * 10) == [-1, -1, 1, 2, 3, 3, 4, 4, 5, 8]  # negative stays -1
    nested = [[3, -1], [], [0]], [[True, True], [], [False]]
    assert so.contrastive_scores(*nested) == so.contrastive_scores(*map(as_tuples, nested)) == [[3, -1], [], [0]]


def test_docstring_examples():
    assert doctest.testmod(so) == (0, 1)


@given(st.integers(0, 2**40))
def test_the_ceiling_of_the_logarithm_is_the_number_of_bits(votes):
    assert so.contrastive_scores([votes], [False]) == [votes.bit_length()]


# ----------------------------------------------------------------------------------------------- rows of the contract
def test_a_question_becomes_a_demonstration_scores_labels_and_comparisons(args, capsys):
    rows = convert(
        args,
        question(5, body="<p>It is <em>long</em> &amp; old.</p>\n\n<p>x &lt; y</p>\n", AcceptedAnswerId=8),
        answer(6, 5, 4),  # contrastive 3
        answer(8, 5, 3, "<p>call sort</p>"),  # accepted: 2 + 1 = 3, a tie: the accepted answer wins
        answer(9, 5, 0, "<p>no idea</p>"),  # 0
        *VALIDATION,
    )
    query = "Question: How to sort a list?\nIt is long & old.\nx < y\nAnswer:"
    [sft] = rows["sft.train"]
    about = {"question_id": 5, "question_date": "2021-03-04T05:06:07.123000+00:00", "num_answers": 3}
    accepted = {"answer_id": 8, "votes": 3, "accepted": True, "contrastive": 3, "generated": False}
    accepted |= {"answer_date": "2021-03-05T05:06:07.123000+00:00"}
    assert sft == {"query": query, "response": "call sort", "meta": about | accepted}
    # votes / 3: 1.33 1 0, quartiles .5 and 1.17, fences -.5 and 2.17: no outlier, divided by the largest
    scored = [(row["query"], row["response"], pytest.approx(row["score"])) for row in rows["scored.train"]]
    assert scored == [(query, "call sort", 0.75), (query, "use sorted", 1), (query, "no idea", 0)]
    assert rows["scored.train"][0]["meta"] == about | accepted
    [pair] = rows["comparisons.train"]  # none with the answer that has the same score
    assert (pair["query"], pair["chosen"], pair["rejected"]) == (query, "call sort", "no idea")
    rejected = accepted | {"answer_id": 9, "votes": 0, "accepted": False, "contrastive": 0}
    assert pair["meta"] == about | {"chosen": accepted, "rejected": rejected}
    printed = capsys.readouterr().out
    assert re.search(r" 1  pair: two answers with the same score$", printed, re.MULTILINE)
    assert [(row["query"], row["response"], row["label"]) for row in rows["unpaired.train"]] == [
        (query, "call sort", True), (query, "use sorted", True)
    ]  # fmt: skip  # a score of 0 is neither good nor bad
    assert re.search(r" 1  label: a score of 0$", printed, re.MULTILINE)
    both_splits = [f"{kind}.{split}" for kind in ("scored", "sft", "unpaired") for split in ("train", "validation")]
    assert list(rows) == ["comparisons.train", *both_splits]
    scaling = json.loads((args.out / "scaling.json").read_text())
    assert scaling == {"low": pytest.approx(-0.5), "high": pytest.approx(1.16666666 + 1), "largest_negative": 0,
                       "largest_positive": pytest.approx(4 / 3), "outliers": "clip"}  # fmt: skip


def test_validation_is_scored_with_the_scale_of_train(args):
    train = [row for n in range(10, 50, 10) for row in (question(n), answer(n + 1, n, n // 10))]  # votes 1 2 3 4
    rows = convert(args, *train, VALIDATION[0], answer(901, 900, 2, **LATE))
    # quartiles 1.75 and 3.25, fences -.5 and 5.5: largest inlier 4; on its own 2 would be 1
    assert [row["score"] for row in rows["scored.validation"]] == [0.5]
    assert [row["score"] for row in rows["scored.train"]] == [0.25, 0.5, 0.75, 1.0]
    outlier = answer(901, 900, 7, **LATE)
    assert convert(args, *train, VALIDATION[0], outlier)["scored.validation"][0]["score"] == 1.0


def test_the_best_answer_is_by_score_then_accepted_then_votes_then_earliest(args):
    early, late = {"CreationDate": "2021-03-05T00:00:00"}, {"CreationDate": "2021-03-06T00:00:00"}
    for answers, best in (
        ((answer(11, 10, 2), answer(12, 10, 5)), 12),
        ((answer(11, 10, 2), answer(12, 10, 1)), 11),  # accepted 12: 1 + 1 = 2 as well
        ((answer(11, 10, 5), answer(13, 10, 6)), 13),  # both 3
        ((answer(11, 10, 5, **late), answer(13, 10, 5, **early)), 13),
    ):
        for accepted in [12] if best == 11 else [None]:
            optional = {"AcceptedAnswerId": accepted} if accepted else {}
            rows = convert(args, question(10, **optional), *answers, *VALIDATION)
            assert rows["sft.train"][0]["meta"]["answer_id"] == (12 if accepted else best)
    # an accepted answer with negative votes gets no bonus
    rows = convert(args, question(10, AcceptedAnswerId=11), answer(11, 10, -1), answer(12, 10, 0), *VALIDATION)
    assert rows["sft.train"][0]["meta"]["answer_id"] == 12


def test_two_identical_answers_are_not_a_pair(args, capsys):
    rows = convert(args, question(10), answer(11, 10, 9), answer(12, 10, 0, "use sorted"), *VALIDATION)
    assert "comparisons.train" not in rows
    assert len(rows["scored.train"]) == 2
    printed = capsys.readouterr().out
    assert " 1  two identical responses\n" in printed
    assert "note: no comparisons.train.jsonl: no question has two answers with different scores." in printed


def test_the_loaders_of_training_take_the_files(args):
    rows = convert(args, question(10), answer(11, 10, 9), answer(12, 10, -9, "call sort"), *VALIDATION)
    load = TOKENIZER, 512, 512
    assert len(load_demonstrations(args.out / "sft.train.jsonl", *load)) == 1
    assert [row.score for row in load_scored(args.out / "scored.train.jsonl", *load)] == [1.0, -1.0]
    best, worst = (TOKENIZER.encode(text) + [TOKENIZER.eos_id] for text in (" use sorted", " call sort"))
    labelled = load_unpaired(args.out / "unpaired.train.jsonl", *load)
    assert [(row.chosen, row.rejected) for row in labelled] == [(best, []), ([], worst)]
    [pair] = load_comparisons(args.out / "comparisons.train.jsonl", *load)
    assert pair.record == rows["comparisons.train"][0]
    assert load_tokenizer(args.out).encode("sort") == TOKENIZER.encode("sort")


# ----------------------------------------------------------------------------------------------------- the two formats
def test_xml_and_csv_give_the_same_rows_with_any_line_ends_and_byte_order_marks(args, tmp_path):
    posts = (
        question(10, 'How to "sort", by é?', "<p>One,\n\ntwo</p>", AcceptedAnswerId=11), answer(11, 10, 4),
        answer(12, 10, -3, "<p>no</p>"), *VALIDATION,
    )  # fmt: skip
    expected = convert(args, *posts)
    assert expected["sft.train"][0]["query"] == 'Question: How to "sort", by é?\nOne,\n\ntwo\nAnswer:'
    args.source.write_bytes(b"\xef\xbb\xbf" + xml(*posts, end="\r\n").encode())
    so.main(args)
    assert read(args.out) == expected
    as_pandas = [{n: f"{v}.0" if n in ("ParentId", "AcceptedAnswerId") else v for n, v in p.items()} for p in posts]
    for source, rows, start in (("a.csv", posts, ""), ("b.csv", posts, "\ufeff"), ("c.CSV", as_pandas, "")):
        so.main(replace(args, source=write_csv(tmp_path / source, *rows, start=start), out=tmp_path / source[0]))
        assert read(tmp_path / source[0]) == expected


def test_tags_are_read_in_both_forms_and_as_whole_words(args):
    tags = {10: "<python>", 20: "|list|python|", 30: "<python-3.x>", 40: "|cpython|", 50: "<Python>", 60: ""}
    posts = [p for n, t in tags.items() for p in (question(n, tags=t), answer(n + 1, n, 0))]
    numbers = lambda rows: [row["meta"]["question_id"] for row in rows["sft.train"]]  # noqa: E731
    assert numbers(convert(args, *posts, *VALIDATION)) == [10, 20, 50]
    assert numbers(convert(replace(args, tag="Python"), *posts, *VALIDATION)) == [10, 20, 50]
    assert numbers(convert(replace(args, tag="python-3.x"), *posts, question(900, tags="|python-3.x|", **LATE),
                           VALIDATION[1])) == [30]  # fmt: skip
    for everything in (None, ""):
        assert numbers(convert(replace(args, tag=everything), *posts, *VALIDATION)) == list(tags)


def test_an_answer_may_come_before_its_question(args, capsys):
    posts = question(10), answer(11, 10, 1), answer(12, 30, 2), question(30), answer(31, 99, 0), *VALIDATION
    rows = convert(args, *posts)
    assert [(row["meta"]["question_id"], row["meta"]["answer_id"]) for row in rows["sft.train"]] == [(10, 11), (30, 12)]
    printed = capsys.readouterr().out
    assert " 1  answer: ParentId is not a question in the file; first: row 5 (Id 31)\n" in printed


# ---------------------------------------------------------------------------------------------------------- the filter
@pytest.mark.parametrize(("kind", "expression", "title"), so.KINDS)
def test_each_expression_matches_its_example_and_only_usage_passes(kind, expression, title):
    assert re.search(expression, title, re.IGNORECASE)
    assert so.is_api_usage(title, "It is long.") == (kind == "usage")
    # no other expression drops the example of this one
    if kind != "usage" and kind != "error":
        other_expressions = [e for k, e, _ in so.KINDS if k != "usage" and e != expression]
        assert not re.search("|".join(other_expressions), title, re.IGNORECASE)


@pytest.mark.parametrize(
    ("title", "body", "expected"),
    [
        ("Sorting a list", "How can I sort a list?\n\nIt is long.", True),
        ("Sorting a list", "I have a list. How can I sort it?", False),  # not in the first sentence
        ("Sorting a list", "It is long.\nHow can I sort it?", False),
        ("TypeError in my program", "It is long.", False),
        ("How can I fix this TypeError?", "How to sort a list?", False),
        ("HOW TO SORT", "x", True),
        ("What’s the best way to sort?", "x", True),
        ("What’s the difference between a list and a tuple?", "How do I sort?", False),
        ("sort() doesn’t work", "How do I sort?", False),
        ("Why is it slow?", "How can I sort?", False),
        ("How do I get the difference between two dates?", "x", True),
        ("How do I make sorting work with None?", "x", True),
        ("How to parse a book title", "x", True),
        ("Show to", "Somehow tomorrow", False),
        ("What does this error mean?", "", False),
    ],
)
def test_title_and_first_sentence_decide_the_kind_of_a_question(title, body, expected):
    assert so.is_api_usage(title, body) == expected


@pytest.mark.parametrize(
    ("body", "dropped"),
    [
        ("<p>see <a href='x'>this</a></p>", True),
        ("<p><img src='x'/></p>", True),
        ("<P>use <CODE>sorted</CODE></P>", True),
        ("<pre>x</pre>", True),
        ("<p><abbr>api</abbr> <address>x</address> <codec></p>", False),
        ("<p>the tag &lt;a&gt; and &lt;code&gt;</p>", False),
    ],
)
def test_posts_with_pictures_links_or_code_are_dropped(args, body, dropped):
    posts = question(10, body=body), answer(11, 10, 1), question(20), answer(21, 20, 1, body), answer(22, 20, 1)
    rows = convert(args, *posts, *VALIDATION)["scored.train"]
    assert [row["meta"]["answer_id"] for row in rows] == ([22] if dropped else [11, 21, 22])


def test_other_markup_is_reduced_to_its_text(args):
    posts = question(10, body="<p>see <a href='x'>this</a></p>"), answer(11, 10, 1, "<p>use <code>sorted</code></p>")
    posts += question(20), answer(21, 20, 1, "<img src='x'>see")
    rows = convert(replace(args, drop_markup=("img",)), *posts, *VALIDATION)
    [row] = rows["sft.train"]
    assert (row["query"], row["response"]) == ("Question: How to sort a list?\nsee this\nAnswer:", "use sorted")
    assert len(convert(replace(args, drop_markup=()), *posts, *VALIDATION)["sft.train"]) == 2


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<p>a &amp;lt; b &lt; c</p>", "a &lt; b < c"),
        ("<p>a<br>\nb<BR/>c<br />d</p>", "a\nb\nc\nd"),
        ("<p>a</p>\n\n<ul>\n<li>x</li>\n<li>y</li>\n</ul>\n\n<hr>\n\n<p>b</p>\n", "a\n\nx\ny\n\nb"),
        ("<p>a<!-- language: python --> b</p>", "a b"),
        ("no markup &amp; a\r\nline", "no markup & a\nline"),
        ("<pre><code>if x:\n\n    y\n</code></pre>", "if x:\n\n    y"),
        ("<p>\n \n</p>", ""),
        ("https://example.org/a", "https://example.org/a"),
        ("<p>&#xD83D; 😀 &#x1F600;</p>", "� 😀 😀"),  # half a surrogate pair isn't a character
        ("<b>" * 3000 + "x", "x"),
    ],
)
def test_html_becomes_text(body, text, recwarn):
    assert so.to_text(body) == text
    assert not recwarn.list


def test_the_table_counts_what_each_step_leaves(args, capsys):
    convert(
        args,
        {"Id": 1, "PostTypeId": 4}, {"Id": 2, "PostTypeId": 5},
        question(10), answer(11, 10, 1), answer(12, 10, 0, "<a>x</a>"), answer(13, 10, 0, "<p> </p>"),
        question(20, tags="<java>"), answer(21, 20, 1),
        question(30, body="<img>"), answer(31, 30, 1),
        question(40, title="Why?"), answer(41, 40, 1), answer(42, 43, 1),
        question(50, body="<p></p>"), answer(51, 50, 1),
        question(60),
        question(70), answer(71, 70, 1, "use sorted, " * 200),
        *VALIDATION,
    )  # fmt: skip
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [(int(line.split()[0]), line.split(maxsplit=1)[1]) for line in lines] == [
        (20, "rows"),
        (8, "questions"),
        (8, "with a unique Id"),
        (7, "with --tag python"),
        (6, "without --drop-markup img a code pre"),
        (5, "with a title, a text and a date"),
        (4, "with --question-filter api-usage"),
        (10, "answers"),
        (9, "to a question in the file"),
        (5, "to a question kept above"),
        (4, "without --drop-markup img a code pre"),
        (3, "with a unique Id, a score, a text and a date"),
        (2, "within --max-length 512"),
    ]


def test_unusable_posts_are_skipped_and_counted_with_the_first_location(args, capsys):
    without = lambda row, *names: {k: v for k, v in row.items() if k not in names}  # noqa: E731
    rows = convert(
        args,
        without(question(1), "Id"), question("x"), question(2**31), question(0),
        question(10), question(10, title="How to split?"),
        question(20, title=" "), question(30, CreationDate="yesterday"), without(question(40), "CreationDate"),
        question(50, body="<p>&nbsp;</p>"),
        answer(11, 10, 1), answer(11, 10, 5), without(answer(12, 10, 1), "ParentId"), answer(13, "x", 1),
        answer(14, 7, 1), answer(15, 20, 1), answer(16, 10, "many"), answer(17, 10, 1.5),
        without(answer(18, 10, 1), "Score"),
        answer(19, 10, 1, CreationDate="2021-99-01"), answer(22, 10, 1, ""), without(answer(23, 10, 1), "Id"),
        answer(24, -1, 1), answer(25, 10, "9" * 5000),
        *VALIDATION,
    )  # fmt: skip
    assert [row["meta"]["answer_id"] for row in rows["scored.train"]] == [11]
    printed = capsys.readouterr().out
    for count, reason in (
        (4, "question: Id missing or not a number; first: row 1"),
        (1, "question: duplicate Id; first: row 6 (Id 10)"),
        (1, "question: an empty title; first: row 7 (Id 20)"),
        (1, "question: an empty text; first: row 10 (Id 50)"),
        (2, "question: CreationDate missing or unreadable; first: row 8 (Id 30)"),
        (1, "answer: duplicate Id; first: row 12 (Id 11)"),
        (2, "answer: ParentId missing or not a number; first: row 13 (Id 12)"),
        (2, "answer: ParentId is not a question in the file; first: row 15 (Id 14)"),
        (4, "answer: Score missing or not a whole number; first: row 17 (Id 16)"),
        (1, "answer: CreationDate missing or unreadable; first: row 20 (Id 19)"),
        (1, "answer: an empty text; first: row 21 (Id 22)"),
        (1, "answer: Id missing or not a number; first: row 22"),
    ):
        assert re.search(rf"^ +{count}  {re.escape(reason)}$", printed, re.MULTILINE), reason


def test_posts_by_deleted_users_are_kept_and_counted(args, capsys):
    posts = [{k: v for k, v in post.items() if k != "OwnerUserId"} for post in (question(10), answer(11, 10, 1))]
    rows = convert(args, *posts, answer(12, 10, 0, "call sort"), *VALIDATION)
    assert len(rows["scored.train"]) == 2
    assert "kept posts by deleted users: 1 questions, 1 answers\n" in capsys.readouterr().out


def test_a_csv_row_is_located_by_its_first_line(args, tmp_path, capsys):
    posts = question(10, body="two\nlines"), answer(11, 10, "x"), answer(12, 10, 1), *VALIDATION
    so.main(replace(args, source=write_csv(tmp_path / "a.csv", *posts)))
    assert "Score missing or not a whole number; first: line 4 (Id 11)\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ the split
def test_questions_after_the_split_date_in_utc_are_validation(args):
    moments = {
        10: "2021-12-14T23:59:59.999", 20: "2021-12-15T00:00:00.000", 30: "2021-12-15T00:30:00+01:00",
        40: "2021-12-14T23:30:00-01:00", 50: "2021-12-14", 60: "2021-12-15 10:00:00Z",
    }  # fmt: skip
    # the dates of answers don't matter
    posts = [p for n, m in moments.items() for p in (question(n, CreationDate=m), answer(n + 1, n, 1, **LATE))]
    rows = convert(args, *posts)
    numbers = {split: [row["meta"]["question_id"] for row in rows[f"sft.{split}"]] for split in ("train", "validation")}
    assert numbers == {"train": [10, 30, 50], "validation": [20, 40, 60]}


def test_a_date_that_leaves_a_split_empty_is_rejected_with_the_range(args):
    posts = (
        question(10),
        answer(11, 10, 1),
        *VALIDATION,
        question(950, CreationDate="2030-01-01"),
    )  # no answer: not kept
    for day, split in (("2021-03-03", "train"), ("2022-01-01", "validation")):
        with pytest.raises(
            InputError,
            match=f"--split-date {day} leaves no questions for {split}; the .* kept are from 2021-03-04 to 2022-01-01",
        ):
            convert(replace(args, split_date=day), *posts)
        assert not args.out.exists()


# -------------------------------------------------------------------------------------------------------------- lengths
words = st.lists(
    st.sampled_from(["sort", "list", " ", " ", ". ", "\n", "\n\n", "xq", "é", "😀", "Answer", ":"]), max_size=60
)


@settings(max_examples=200)
@given(words.map("".join), st.integers(-5, 60))
def test_the_end_of_a_question_is_cut_until_the_query_fits(text, limit):
    text = text.strip() or "x"
    count = lambda head: len(TOKENIZER.encode(f"Question: {head}\nAnswer:"))  # noqa: E731
    query = so.make_query(text, TOKENIZER, limit)
    fitting = [text[:end].rstrip() for end in range(1, len(text) + 1) if count(text[:end].rstrip()) <= limit]
    if query is None:
        assert not [head for head in fitting if head] or limit < count("x") + 4  # a character can be several tokens
        return
    head = query.removeprefix("Question: ").removesuffix("\nAnswer:")
    assert text.startswith(head) and head == head.rstrip() != "" and count(head) <= limit
    if count(text) <= limit:
        assert head == text
    else:  # within two tokens of the longest that fits
        assert count(max(fitting, key=len)) - count(head) <= 2


def test_the_question_is_cut_and_the_answer_is_not(args):
    body = "It is long. " * 40
    long_answer, short_answer = "use sorted, " * 10 + "please", "use sorted"
    posts = question(10, body=body), answer(11, 10, 4, long_answer), answer(12, 10, 0, short_answer), *VALIDATION
    rows = convert(replace(args, max_length=100), *posts)
    for name, columns in (("sft", ["response"]), ("scored", ["response"]), ("comparisons", ["chosen", "rejected"])):
        for row in rows[f"{name}.train"]:
            assert row["query"].startswith("Question: How to sort a list?\nIt is long") and row["query"].endswith(
                "\nAnswer:"
            )
            length = len(TOKENIZER.encode(row["query"]))
            longest = max(len(response_ids(row["query"], row[column], TOKENIZER)) for column in columns)
            assert 97 <= length + longest <= 100  # a pair's query leaves room for the longer one
            assert {row[column] for column in columns} <= {long_answer, short_answer}
    rows = convert(replace(args, max_length=100, max_query_length=30), *posts)
    assert {28 <= len(TOKENIZER.encode(row["query"])) <= 30 for row in rows["scored.train"]} == {True}


def test_a_split_with_only_answers_that_are_too_long_is_rejected(args):
    long_answer = answer(901, 900, 1, "use sorted, " * 200, **LATE)
    with pytest.raises(
        InputError, match="leaves no questions for validation; the questions kept are from 2021-03-04 to 2021-03-04"
    ):
        convert(args, question(10), answer(11, 10, 1), VALIDATION[0], long_answer)
    assert not args.out.exists()


def test_an_answer_that_leaves_no_room_is_skipped(args, capsys):
    # the published code slices q[: 512 - len(answer) - 7]; a negative number keeps most of the question
    posts = question(10), answer(11, 10, 4, "use sorted, " * 40), answer(12, 10, 0, "call sort"), *VALIDATION
    rows = convert(replace(args, max_length=60), *posts)
    assert [row["response"] for row in rows["scored.train"]] == ["call sort"]
    assert rows["sft.train"][0]["meta"]["num_answers"] == 1  # it doesn't divide the votes either
    assert " 1  answer: no room for the question in --max-length 60\n" in capsys.readouterr().out
    rows = convert(replace(args, max_response_length=20), *posts)
    assert [row["response"] for row in rows["scored.train"]] == ["call sort"]
    assert " 1  answer: longer than --max-response-length 20\n" in capsys.readouterr().out


def test_the_published_count_of_seven_template_tokens_is_close_to_gpt2s(real_data):
    tokenizer = load_tokenizer(real_data / "tokenizers" / "gpt2")
    text, response = "How to sort a list?\nIt is long.", "Use sorted."
    both = len(tokenizer.encode(so.make_query(text, tokenizer, 512))) + len(response_ids(so.AFTER, response, tokenizer))
    # "Question" ":" "\n" "Answer" ":" and EOS; spaces belong to the words after them
    assert both - len(tokenizer.encode(" " + text)) - len(tokenizer.encode(" " + response)) == 6


def test_a_tokenizer_is_trained_on_the_train_split_only(args, tmp_path):
    posts = question(10, body="zebra " * 30), answer(11, 10, 1, "giraffe"), question(12), answer(13, 12, 0, "giraffe")
    late = question(900, body="ostrich " * 30, **LATE), answer(901, 900, 1, "ostrich")
    args = replace(args, tokenizer=None, vocab_size=400)
    convert(args, *posts, *late)
    tokenizer = load_tokenizer(args.out)
    assert len(tokenizer.encode(" zebra")) == len(tokenizer.encode(" giraffe")) == 1 < len(tokenizer.encode(" ostrich"))
    assert len(load_demonstrations(args.out / "sft.train.jsonl", tokenizer, 512, 512)) == 2


# ---------------------------------------------------------------------------------------------------- generated answers
@pytest.fixture
def policy(tmp_path):
    torch.manual_seed(0)
    model = GPT(replace(TINY, vocab_size=TOKENIZER.vocab_size, n_ctx=96))
    save(model, tmp_path / "policy", TOKENIZER)
    return str(tmp_path / "policy")


SINGLES = [p for n in range(10, 90, 10) for p in (question(n, body=f"It is {n} long."), answer(n + 1, n, n // 10))]


def test_single_answers_get_a_generated_one_that_is_worse(args, policy, monkeypatch):
    def readable(*arguments):
        """Turn samples into words: the text of a random policy gets longer when re-encoded."""
        query, responses = sample_answers(*arguments)
        texts = ["".join(f" {('sort', 'a', 'list', 'use')[i % 4]}" for i in ids[:5]) for ids in responses.tolist()]
        return query, right_pad([TOKENIZER.encode(text) + [TOKENIZER.eos_id] for text in texts], TOKENIZER.pad_id)

    monkeypatch.setattr("nanorlhf.generate.sample_answers", readable)
    two = question(200), answer(201, 200, 5), answer(202, 200, 0, "call sort")
    plain = convert(args, *SINGLES, *two, *VALIDATION)
    args = replace(args, tokenizer=None, generated_by=policy, max_response_length=16)
    rows = convert(args, *SINGLES, *two, *VALIDATION)
    for split, singles in (("train", 8), ("validation", 1)):
        generated = [row for row in rows[f"scored.{split}"] if row["meta"]["generated"]]
        assert [row["meta"]["question_id"] for row in generated] == (
            [*range(10, 90, 10)] if split == "train" else [900]
        )
        human = [row for row in rows[f"scored.{split}"] if not row["meta"]["generated"]]
        assert human == plain[f"scored.{split}"]  # rows and scores of human answers don't change
        assert rows[f"sft.{split}"] == plain[f"sft.{split}"]
        pairs = [row for row in rows[f"comparisons.{split}"] if row["meta"]["rejected"]["generated"]]
        texts = {row["meta"]["question_id"]: row["response"] for row in generated}
        assert len(pairs) == singles and not any(row["meta"]["chosen"]["generated"] for row in pairs)
        for row in pairs:
            assert row["rejected"] == texts[row["meta"]["question_id"]] != row["chosen"] == "use sorted"
        assert len(rows[f"comparisons.{split}"]) - singles == len(plain.get(f"comparisons.{split}", []))
        assert generated[0]["meta"]["answer_id"] is generated[0]["meta"]["votes"] is None
    convert(replace(args, out=args.out.with_name("again")), *SINGLES, *two, *VALIDATION)
    assert read(args.out.with_name("again")) == rows
    other = convert(replace(args, seed=2), *SINGLES, *two, *VALIDATION)
    assert other["scored.train"] != rows["scored.train"] and other["sft.train"] == rows["sft.train"]


def test_scores_of_generated_answers_are_normal_around_minus_a_half(args, policy, monkeypatch):
    posts = [p for n in range(1000, 8990, 10) for p in (question(n), answer(n + 1, n, 1))]
    call = TOKENIZER.encode(" call sort") + [TOKENIZER.eos_id]
    monkeypatch.setattr("nanorlhf.generate.sample_answers", lambda p, q, *a: (None, torch.tensor([call] * len(q))))
    rows = convert(replace(args, generated_by=policy, max_response_length=16), *posts, *VALIDATION)["scored.train"]
    scores = [row["score"] for row in rows if row["meta"]["generated"]]
    assert len(scores) == 799
    assert abs(statistics.fmean(scores) + 0.5) < 0.015  # 4 standard errors of .1 / sqrt(799) = .0035
    assert abs(statistics.pstdev(scores) - 0.1) < 0.01  # 4 of .1 / sqrt(2 * 799) = .0025


def test_empty_identical_and_long_generated_answers_are_skipped(args, policy, monkeypatch, capsys):
    texts = ["", " \n", " use sorted", " call sort", " sort it " * 60]
    ids = [TOKENIZER.encode(text) + [TOKENIZER.eos_id] for text in texts]
    response = torch.tensor([row + [TOKENIZER.pad_id] * (max(map(len, ids)) - len(row)) for row in ids])
    asked = []

    def sample(policy, queries, tokenizer, num_samples, max_new_tokens, batch_size, seed, temperature):
        asked.append((len(queries), num_samples, max_new_tokens, batch_size, seed, temperature))
        assert [tokenizer.decode(query) for query in queries][0].startswith(
            "Question: How to sort a list?\nIt is 10 long."
        )
        return None, response

    monkeypatch.setattr("nanorlhf.generate.sample_answers", sample)
    args = replace(args, generated_by=policy, max_length=96, max_query_length=48, batch_size=3, temperature=0.7, seed=5)
    rows = convert(args, *SINGLES[:8], *VALIDATION)
    assert asked == [(5, 1, 48, 3, 5, 0.7)]
    assert [row["response"] for row in rows["scored.train"] if row["meta"]["generated"]] == ["call sort"]
    assert "scored.validation" in rows and "comparisons.validation" not in rows
    printed = capsys.readouterr().out
    assert " 2  generated answer: empty\n" in printed and " 1  generated answer: identical to the human's\n" in printed
    assert " 1  generated answer: no room for the question in --max-length 96\n" in printed


def test_a_generated_answer_that_grows_when_re_encoded_is_skipped(args, policy, monkeypatch, capsys):
    """Half a character is one token when sampled, and is decoded to U+FFFD, which is three."""
    half = TOKENIZER.encode("\N{ROCKET}")[:1] * 6 + [TOKENIZER.eos_id]
    monkeypatch.setattr("nanorlhf.generate.sample_answers", lambda p, q, *a: (None, torch.tensor([half] * len(q))))
    rows = convert(replace(args, generated_by=policy, max_response_length=8), *SINGLES, *VALIDATION)
    assert not any(row["meta"]["generated"] for row in rows["scored.train"])
    assert " 9  generated answer: longer than --max-response-length 8\n" in capsys.readouterr().out


def test_a_policy_that_does_not_fit_is_rejected(args, policy, tmp_path):
    args = replace(args, generated_by=policy)
    with pytest.raises(
        InputError, match=r"have \d+ tokens, more than the 96 positions of .*policy; lower --max-length"
    ):
        convert(args, *SINGLES, *VALIDATION)
    train_tokenizer(["How to sort a list by a key that is long" * 9], 500).save(tmp_path / "other")
    small = replace(TINY, vocab_size=100)
    save(GPT(small), tmp_path / "small", None)
    for changes, reason in (
        (
            {"generated_by": str(tmp_path / "small"), "tokenizer": policy},
            "ids, but the embedding of .*small has only 100 rows",
        ),
        ({"generated_by": str(tmp_path / "nowhere")}, "nowhere"),
        ({"generated_by": policy, "device": "abacus"}, "--device abacus: must be auto, cpu"),
    ):
        with pytest.raises(InputError, match=reason):
            convert(replace(args, **changes), *SINGLES, *VALIDATION)
        assert not args.out.exists()


# ----------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r":1:1: malformed XML \(no element found\)"),
        ("<posts>\n<row Id='1'></posts>", r":2:15: malformed XML \(mismatched tag\)"),
        ("<posts>\n  <row Id='1' Id='2'/></posts>", r":2:\d+: malformed XML \(duplicate attribute\)"),
        ("<posts><row Body='a & b'/></posts>", r":1:22: malformed XML \(not well-formed"),
        ("<posts>\n<row Id='1'/>\n", r":3:1: malformed XML \(no element found\)"),
        ("<?xml version='1.0' encoding='xyz'?><posts/>", r":1: can't read this XML \(unknown encoding: xyz\)"),
        ("<?xml version='1.0' encoding='shift_jis'?><posts/>", r":1: can't read this XML \(multi-byte enc"),
        (b"<posts><row Body='\xff'/></posts>", r":1:19: malformed XML \(not well-formed"),
    ],
)
def test_broken_xml_is_reported_with_line_and_column(args, text, reason):
    args.source.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=f"Posts.xml{reason}") as error:
        so.main(args)
    assert "\n" not in str(error.value)
    assert not args.out.exists()


HEADER = ",".join(so.NEEDED)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            b"",
            "a.csv: the first line lacks the columns Id, PostTypeId, ParentId, CreationDate, Score",
        ),
        (
            b"Id,PostTypeId,CreationDate,Score,Body\n",
            "a.csv: the first line lacks the columns ParentId, Title, Tags.",
        ),
        (f"{HEADER}\n1,1\n".encode(), "a.csv:2: expected 8 fields"),
        (f"{HEADER}\n1,1,,2021-01-01,3,b,t,<a>,more\n".encode(), "a.csv:2: expected 8 fields"),
        (f"{HEADER}\n1,1,,d,3,b\xff,t,a\n".encode("latin-1"), r"a.csv:2: not UTF-8 \(byte 10\)"),
        (f'{HEADER}\n1,1,,d,3,"b\n\n'.encode(), r"a.csv:3: malformed CSV \(unexpected end of data\)."),
        (f'{HEADER}\n1,1,,d,3,"b"c,t,a\n'.encode(), r"a.csv:2: malformed CSV \(',' expected after '\"'\)"),
    ],
)
def test_a_broken_csv_is_reported_with_its_line(args, tmp_path, text, reason):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(InputError, match=reason) as error:
        so.main(replace(args, source=tmp_path / "a.csv"))
    assert "\n" not in str(error.value)
    assert not args.out.exists()


def test_a_lost_quotation_mark_does_not_swallow_a_csv(args, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f'{HEADER}\n1,1,,d,3,"b,t,a\n' + "2,1,,d,3,b,t,a\n" * 10_000)
    with pytest.raises(InputError, match=r"a.csv:\d+: malformed CSV \(field larger than field limit \(131072\)\)"):
        so.main(replace(args, source=path))


@pytest.mark.parametrize(
    ("posts", "changes", "reason"),
    [
        ((), {}, "0 'rows': --source must be the Posts.xml of a site"),
        (({"Id": 1, "PostTypeId": 4},), {}, "1 'rows', but 0 'questions': --source must be the Posts.xml"),
        ((question("x"),), {}, "1 'questions', but 0 'with a unique Id': the file is damaged"),
        ((question(1),), {"tag": "rust"}, "but 0 'with --tag rust': --tag None keeps all tags"),
        (
            (question(1, body="<a>x</a>"),),
            {},
            "1 'with --tag python', but 0 'without --drop-markup img a code pre': pass few",
        ),
        ((question(1, body=""),), {}, "but 0 'with a title, a text and a date': the file is damaged"),
        (
            (question(1, title="Why?"),),
            {},
            "but 0 'with --question-filter api-usage': --question-filter all keeps every kind",
        ),
        ((question(1),), {}, "1 'with --question-filter api-usage', but 0 'answers': the file must have answers"),
        (
            (question(1), answer(2, 9, 1)),
            {},
            "1 'answers', but 0 'to a question in the file': the file",
        ),
        (
            (question(1), question(2, tags="<c>"), answer(3, 2, 1)),
            {},
            "1 'to a question in the file', but 0 'to a question kept above': relax --tag",
        ),
        ((question(1), answer(3, 1, 1, "<a>")), {}, "but 0 'without --drop-markup img a code pre'"),
        (
            (question(1), answer(3, 1, "x")),
            {},
            "but 0 'with a unique Id, a score, a text and a date': the file",
        ),
        ((question(1), answer(3, 1, 1), *VALIDATION), {"max_length": 6}, "but 0 'within --max-length 6': raise it"),
    ],
)
def test_if_nothing_is_left_the_error_names_the_step_and_the_flag(args, posts, changes, reason):
    with pytest.raises(InputError, match=rf"--source .*Posts.xml: no questions left: .*{re.escape(reason)}") as error:
        convert(replace(args, **changes), *posts)
    assert "\n" not in str(error.value)
    assert not args.out.exists()


def test_unusable_sources_and_flags_are_rejected(args, tmp_path):
    args.source.write_text(xml(question(10), answer(11, 10, 1), *VALIDATION))
    (tmp_path / "Posts.7z").write_bytes(b"7z")
    (tmp_path / "folder.xml").mkdir()
    for changes, reason in (
        (
            {"source": tmp_path / "Posts.7z"},
            "Posts.7z: unsupported file type; expected an unpacked .xml or .csv",
        ),
        ({"source": tmp_path / "none.xml"}, "none.xml: no such file"),
        ({"source": tmp_path / "folder.xml"}, "folder.xml: no such file"),
        ({"max_length": 0}, "--max-length 0: must be at least 1"),
        ({"max_query_length": -1}, "--max-query-length -1: must be at least 1"),
        ({"max_response_length": 0}, "--max-response-length 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"temperature": math.nan}, "--temperature nan: must be 0 or from 10"),
        ({"seed": -1}, "--seed -1: must be from 0 to"),
        ({"vocab_size": 299, "tokenizer": None}, "--vocab-size 299: must be at least 300"),
        ({"vocab_size": 400}, "--vocab-size trains a tokenizer and --tokenizer names one: pass only one of them"),
        (
            {"vocab_size": 400, "tokenizer": None, "generated_by": "x"},
            "--vocab-size trains a tokenizer and --generated-by names",
        ),
        ({"drop_markup": ("<a>",)}, "--drop-markup '<a>': write HTML elements without brackets"),
        ({"split_date": "14.12.2021"}, "--split-date '14.12.2021': must be a date such as 2021-12-14"),
        ({"out": args.source}, "--out .*Posts.xml is a file, not a directory"),
        ({"tokenizer": str(tmp_path / "folder.xml")}, "folder.xml has no tokenizer"),
    ):
        with pytest.raises(InputError, match=reason) as error:
            so.main(replace(args, **changes))
        assert "\n" not in str(error.value)
        assert not args.out.exists()


def test_a_failed_conversion_keeps_earlier_files_and_a_later_one_removes_stale_pairs(args):
    before = convert(args, question(10), answer(11, 10, 9), answer(12, 10, 0, "call sort"), *VALIDATION)
    args.source.write_text("<posts><row")
    with pytest.raises(InputError):
        so.main(args)
    assert read(args.out) == before
    after = convert(args, question(10), answer(11, 10, 9), *VALIDATION)
    assert "comparisons.train" in before and "comparisons.train" not in after
    assert not [path for path in args.out.iterdir() if path.name.startswith(".") or path.name.endswith(".tmp")]


def test_the_command_writes_the_files_and_ends_with_one_line_and_code_2_on_bad_input(args, capsys):
    args.source.write_text(xml(question(10, tags="<c>"), answer(11, 10, 1), *VALIDATION))
    flags = ["--source", str(args.source), "--out", str(args.out), "--tokenizer", args.tokenizer]
    run_program("data.stackoverflow", *flags, "--tag", "None", "--drop-markup", "img", "a")
    assert "scored.train.jsonl (1), scored.validation.jsonl (1), sft.train.jsonl (1)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run_program("data.stackoverflow", *flags, "--tag", "rust")
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert re.fullmatch(r"error: --source \S+Posts.xml: no questions left[^\n]*--tag None keeps all.*\n", printed)


# ---------------------------------------------------------------------------------------------------------- a long dump
def write_long_dump(path: Path, megabytes: int) -> int:
    """Write a Posts.xml of this size and return its number of rows; fifty questions pass the filters.

    Half of the other questions have no python tag and half contain code. Questions and answers have about 2 kB each.
    """
    kept = [p for n in range(1, 101, 2) for p in (question(n, **(LATE if n > 90 else {})), answer(n + 1, n, n % 7))]
    filler = "<p>" + "It is a long list, and it should be sorted by a key. " * 35 + "</p>\n"
    rows = [xml_row(post) for post in kept]
    templates = [
        xml_row(question("ID", tags="<java>", body=filler)), xml_row(answer("ID", "PARENT", 1, filler)),
        xml_row(question("ID", body=filler + "<code>x</code>")), xml_row(answer("ID", "PARENT", 1, filler)),
    ]  # fmt: skip
    number = 101
    with path.open("w", encoding="utf-8") as file:
        file.write('<?xml version="1.0" encoding="utf-8"?>\n<posts>\n' + "\n".join(rows) + "\n")
        while file.tell() < megabytes * 2**20:
            for _ in range(200):
                for offset, template in enumerate(templates):
                    row = template.replace('"ID"', f'"{number + offset}"').replace(
                        '"PARENT"', f'"{number + offset - 1}"'
                    )
                    file.write(row + "\n")
                number += 4
        file.write("</posts>\n")
    return number - 1


MEASURE = """
import re, sys
from pathlib import Path
from data import stackoverflow
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # kB
before = peak()
source, out, tokenizer = sys.argv[1:]
stackoverflow.main(stackoverflow.Args(source=Path(source), out=Path(out), tokenizer=tokenizer))
print("PEAK", before, peak())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured by Linux's /proc")
def test_a_long_dump_needs_little_memory(args):
    """Set NANORLHF_DUMP_MB=1000 for a long dump."""
    megabytes = int(os.environ.get("NANORLHF_DUMP_MB", 20))
    num_rows = write_long_dump(args.source, megabytes)
    command = [sys.executable, "-c", MEASURE, str(args.source), str(args.out), args.tokenizer]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    args.source.unlink()
    assert done.returncode == 0, done.stderr
    assert f"{num_rows:,}  rows" in done.stdout
    assert "sft.train.jsonl (45)" in done.stdout and "sft.validation.jsonl (5)" in done.stdout
    before, peak = map(int, re.search(r"PEAK (\d+) (\d+)", done.stdout).groups())
    print(
        f"{megabytes} MB: {seconds:.1f} s, peak {peak / 1024:.0f} MB, {(peak - before) / 1024:.0f} MB used by the dump"
    )
    assert peak - before < 10 * 1024  # keeping the rows would take at least twice that


# ------------------------------------------------------------------------------------------------------- the real dumps
@pytest.mark.parametrize(
    ("site", "day", "drop", "num_rows", "num_sft", "num_scored"),
    [
        ("quantumcomputing", "2018-07-15", ("img",), 1675, (269, 59), (417, 93)),
        ("ai", "2016-10-15", ("img", "pre"), 1066, (221, 45), (420, 88)),
    ],
)
@pytest.mark.slow
def test_real_dumps_become_rows(real_data, tmp_path, capsys, site, day, drop, num_rows, num_sft, num_scored):
    args = so.Args(
        source=real_data / "stackexchange" / f"{site}.stackexchange.com" / "Posts.xml", out=tmp_path, tag=None,
        question_filter="all", drop_markup=drop, split_date=day, tokenizer=str(real_data / "tokenizers" / "gpt2"),
    )  # fmt: skip
    so.main(args)
    assert f"{num_rows:,}  rows\n" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path)
    for split, sft, scored in zip(("train", "validation"), num_sft, num_scored, strict=True):
        demonstrations = load_demonstrations(tmp_path / f"sft.{split}.jsonl", tokenizer, None, None)
        answers = load_scored(tmp_path / f"scored.{split}.jsonl", tokenizer, None, None)
        pairs = load_comparisons(tmp_path / f"comparisons.{split}.jsonl", tokenizer, None, None)
        assert (len(demonstrations), len(answers)) == (sft, scored)
        assert max(len(row.query) + len(row.response) for row in [*demonstrations, *answers]) <= 512
        assert max(len(row.query) + max(len(row.chosen), len(row.rejected)) for row in pairs) <= 512
        for row in pairs:
            meta = row.record["meta"]
            assert meta["chosen"]["contrastive"] > meta["rejected"]["contrastive"]
        assert not any(re.search(r"</?(?:p|a|code|em)\b", row.record["response"]) for row in answers)
        assert {row.record["meta"]["question_date"][:10] > day for row in demonstrations} == {split == "validation"}
