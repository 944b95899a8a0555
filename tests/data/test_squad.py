import json
import re
from dataclasses import replace

import pytest

from data import squad
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.rows import read

CONTEXT = "The Seine flows to the sea. Paris lies on it! Rouen lies further down. Le Havre is last."
TOKENIZER = train_tokenizer([f"Context: {CONTEXT}\nQuestion: Where?\nAnswer: Paris"] * 3, 320)


def qa(question, *answers, **more):
    """Return a question about CONTEXT; the positions of its answers are looked up."""
    return {
        "id": question,
        "question": question,
        "answers": [{"text": text, "answer_start": CONTEXT.index(text)} for text in answers],
        "is_impossible": not answers,
    } | more


def article(title, *qas):
    return {"title": title, "paragraphs": [{"qas": list(qas), "context": CONTEXT}]}


@pytest.fixture
def args(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer")
    (tmp_path / "squad").mkdir()
    return squad.Args(source=str(tmp_path / "squad"), out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))


def convert(args, *articles, name="train-v2.0.json", indent=None):
    if articles:
        text = json.dumps({"version": "v2.0", "data": articles}, indent=indent)
        (args.out.parent / "squad" / name).write_text(text)
    squad.main(args)
    return read(args.out)


@pytest.mark.parametrize("indent", [None, 1])  # published: one line; pretty-printed: many
def test_a_question_is_a_row_with_its_first_answer_and_all_references(args, indent):
    rows = convert(
        args,
        article("Seine", qa("Where's  Paris? ", "on it", "it", "on it"), qa("Who?", plausible_answers=[{"text": "x"}])),
        indent=indent,
    )
    meta = {"title": "Seine", "split": "train"}
    assert rows == {
        "sft.train": [
            {
                "query": f"Context: {CONTEXT}\nQuestion: Where's Paris?\nAnswer:",
                "response": " on it",
                "meta": {"id": "Where's  Paris? ", **meta, "is_impossible": False, "answers": ["on it", "it"]},
            },
            {
                "query": f"Context: {CONTEXT}\nQuestion: Who?\nAnswer:",
                "response": " unanswerable",
                "meta": {"id": "Who?", **meta, "is_impossible": True, "answers": []},
            },
        ]
    }


def test_the_split_is_read_from_the_file_name(args):
    for name in ("dev-v2.0.json", "train-v2.0.json"):
        rows = convert(args, article("Seine", qa(name, "Paris")), name=name)
    assert {name: row["meta"]["id"] for name, [row] in rows.items()} == {
        "sft.train": "train-v2.0.json",
        "sft.validation": "dev-v2.0.json",
    }
    assert list(convert(replace(args, files="dev*", out=args.out.parent / "dev"))) == ["sft.validation"]


@pytest.mark.parametrize(("name", "resplit"), [("squad.json", False), ("train-v2.0.json", True)])
def test_questions_about_an_article_are_in_the_same_split(args, name, resplit):
    articles = [article(f"t{i}", qa("Where?", "Paris"), qa("Who?")) for i in range(60)]
    rows = convert(replace(args, validation_share=0.3, resplit=resplit), *articles, name=name)
    titles = {split: {row["meta"]["title"] for row in split_rows} for split, split_rows in rows.items()}
    assert not titles["sft.train"] & titles["sft.validation"] and len(set.union(*titles.values())) == 60
    assert 8 <= len(titles["sft.validation"]) <= 28  # 18 expected, standard deviation 3.5
    assert sum(map(len, rows.values())) == 120


def test_questions_without_a_label_do_not_count_as_impossible(args, capsys):
    unlabelled, older = qa("Where?"), qa("Who?", "Paris")
    del unlabelled["is_impossible"], older["is_impossible"]  # as in the test sets and in SQuAD 1.1
    [row] = convert(args, article("Seine", unlabelled, older))["sft.train"]
    assert row["meta"]["id"] == "Who?" and row["meta"]["is_impossible"] is False
    assert re.search("^ +1  no label", capsys.readouterr().out, re.M)


# -------------------------------------------------------------------------------------------------------------- lengths
@pytest.mark.parametrize(
    ("kept", "answers_left"),
    [
        (CONTEXT, {"Where?", "Who?", "What?", "How?", "When?"}),
        ("The Seine flows to the sea. Paris lies on it! Rouen lies further down.", {"Where?", "Who?", "How?", "When?"}),
        ("The Seine flows to the sea. Paris lies on it!", {"Where?", "How?"}),
        ("The Seine flows to the sea.", {"How?"}),
    ],
)
def test_a_long_context_loses_whole_sentences_and_never_an_answer(args, kept, answers_left):
    """The limit just fits `kept` with the longest question, so the next sentence doesn't fit."""
    questions = (qa("Where?", "on it"), qa("Who?", "it", "Rouen"), qa("What?", "Le Havre"), qa("How?"))
    questions += (qa("When?", "it! Rouen"),)  # from one sentence into the next
    limit = max(len(TOKENIZER.encode(f"Context: {kept}\nQuestion: {q['id']}\nAnswer:")) for q in questions)
    rows = convert(replace(args, max_query_length=limit), article("Seine", *questions))["sft.train"]
    assert {row["meta"]["id"] for row in rows} == answers_left
    assert all(row["query"].startswith(f"Context: {kept}\nQuestion: ") for row in rows)
    assert all(reference in row["query"] for row in rows for reference in row["meta"]["answers"])


def test_rows_above_the_limits_are_counted_by_reason(args, capsys):
    needed = len(TOKENIZER.encode("Context: The Seine flows to the sea.\nQuestion: How?\nAnswer:"))
    long_answer = qa("How?", "The Seine flows to the sea")
    limits = replace(args, max_query_length=needed, max_response_length=4)
    convert(limits, article("Seine", qa("How?", "sea"), qa("How?", "Le Havre"), qa("How " * 40), long_answer))
    printed = capsys.readouterr().out
    for reason in (
        f"an answer after the cut at --max-query-length {needed}",
        f"a first sentence too long for --max-query-length {needed}",
        "a response longer than --max-response-length 4",
    ):
        assert re.search(f"^ +1  {reason}$", printed, re.M), reason


def test_a_tokenizer_is_trained_on_the_train_split(args):
    convert(replace(args, tokenizer=None, vocab_size=400), article("Seine", qa("Where?", "Paris"), qa("Who?")))
    tokenizer = load_tokenizer(args.out)
    assert 300 < tokenizer.vocab_size <= 400 and len(tokenizer.encode("Context: The Seine flows")) < 10


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"title": "x"}, r"data\[0\]: the field 'paragraphs' is missing"),
        ({"title": "x", "paragraphs": [3]}, r"data\[0\]: the field 'paragraphs\[0\]' must be dict, not int"),
        (article("x", {"id": "1", "question": "Who?"}), r"qas\[0\]: the field 'answers' is missing"),
        (article("x", qa(" ", "Paris")), r"qas\[0\]: the field 'question' is empty"),
        (article("x", qa("Who?", "Paris", is_impossible=True)), r"qas\[0\]: 'is_impossible' and 'answers' contradict"),
        (article("x", qa("Who?", is_impossible=False)), r"qas\[0\]: 'is_impossible' and 'answers' contradict"),
        (article("x", qa("Who?", "Paris", is_impossible="no")), r"the field 'is_impossible' must be bool"),
        (
            article("x", qa("Who?"), qa("Who?", answers=[{"text": "Paris", "answer_start": 3}], is_impossible=False)),
            r"data\[0\] paragraphs\[0\] qas\[1\] answers\[0\]: the context doesn't have 'Paris' at 3",
        ),
        (
            article("x", qa("Who?", answers=[{"text": "t.", "answer_start": -2}], is_impossible=False)),
            "the context doesn't have 't.' at -2",
        ),
    ],
)
def test_a_malformed_record_is_located_and_nothing_is_written(args, broken, reason):
    with pytest.raises(InputError, match=rf"train-v2.0.json:1 ?.*{reason}"):
        convert(args, broken)
    assert not args.out.exists()


def test_other_and_empty_files_are_rejected(args):
    source = args.out.parent / "squad" / "train-v2.0.json"
    source.write_text('{"rows": []}')
    with pytest.raises(InputError, match="the field 'data' is missing"):
        squad.main(args)
    source.write_text('{"data": []}')
    with pytest.raises(InputError, match="no usable rows .the source is empty."):
        squad.main(args)
    with pytest.raises(InputError, match="--max-response-length 0"):
        squad.main(replace(args, max_response_length=0))
    assert not args.out.exists()


# --------------------------------------------------------------------------------------------------------- real slices
@pytest.mark.slow
def test_real_squad_has_a_row_per_labelled_question_that_fits(real_data, args, capsys):
    args = replace(args, source=str(real_data / "squad_v2"), tokenizer=str(real_data / "tokenizers" / "gpt2"))
    rows = convert(args)
    expected = {}
    for name, split in (("train-v2.0.json", "sft.train"), ("dev-v2.0.json", "sft.validation")):
        for entry in json.loads((real_data / "squad_v2" / name).read_text())["data"]:
            for paragraph in entry["paragraphs"]:
                for question in paragraph["qas"]:
                    references = {answer["text"] for answer in question["answers"]}
                    expected[question["id"]] = (split, references, paragraph["context"], question["question"].strip())
    got = {row["meta"]["id"]: (name, row) for name, split_rows in rows.items() for row in split_rows}
    assert len(got) == sum(map(len, rows.values())) == 3780 + 3585
    lost = expected.keys() - got.keys()
    assert len(lost) == 4 and "4  an answer after the cut at --max-query-length 512" in capsys.readouterr().out
    assert all(expected[question_id][1] for question_id in lost)
    num_cut = 0
    for question_id, (name, row) in got.items():
        split, references, context, asked = expected[question_id]
        kept, question = re.fullmatch(r"Context: (.*)\nQuestion: (.*)\nAnswer:", row["query"], re.S).groups()
        assert name == split and set(row["meta"]["answers"]) == references and question == " ".join(asked.split())
        assert row["response"][1:] in references if references else row["response"] == " unanswerable"
        assert context.startswith(kept) and all(reference in kept for reference in references)
        if kept != context:
            num_cut += 1
            assert kept.rstrip('"”)')[-1] in ".!?…" and context[len(kept)].isspace()
    tokenizer = load_tokenizer(args.out)
    whole = (f"Context: {context}\nQuestion: {asked}\nAnswer:" for _, _, context, asked in expected.values())
    assert num_cut + len(lost) == sum(len(q) > 1200 and len(tokenizer.encode(q)) > 512 for q in whole) == 78
    impossible = {name: sum(row["meta"]["is_impossible"] for row in split_rows) for name, split_rows in rows.items()}
    assert impossible == {"sft.train": 160, "sft.validation": 1869}
    row = load_demonstrations(args.out / "sft.train.jsonl", tokenizer, 512, 100)[0]
    assert row.query + row.response[:-1] == tokenizer.encode(row.record["query"] + row.record["response"])
