import gzip
import json
import re
from dataclasses import replace

import pytest

from data import hh
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.rows import read

TOKENIZER = train_tokenizer(["\n\nHuman: my cat sat on the mat\n\nAssistant: it is fat"] * 3, 320)


def dialogue(*turns):
    """Alternating turns of human and assistant."""
    return "".join(f"\n\n{'Assistant' if i % 2 else 'Human'}: {turn}" for i, turn in enumerate(turns))


def pair(*shared, chosen=" yes", rejected=" no"):
    prompt = dialogue(*shared) + "\n\nAssistant:"
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}


@pytest.fixture
def args(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer")
    source = tmp_path / "harmless-base"
    source.mkdir()
    return hh.Args(
        source=str(source), out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), validation_share=0.0
    )


def convert(args, *records, name="test.jsonl"):
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()
    (args.out.parent / "harmless-base" / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    hh.main(args)
    return read(args.out)


@pytest.mark.parametrize("name", ["test.jsonl", "test.jsonl.gz"])
def test_the_query_is_the_shared_prefix_of_the_transcripts(args, name):
    rows = convert(args, pair("hi", "hello", "cat?", chosen=" my cat", rejected=" my mat"), name=name)
    query = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: cat?\n\nAssistant:"
    meta = {"batch": "harmless-base", "confidence": None, "split": "test", "policies": None}
    assert rows == {
        "comparisons.train": [{"query": query, "chosen": " my cat", "rejected": " my mat", "meta": meta}],
        "sft.train": [{"query": query, "response": " my cat", "meta": meta}],
    }


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (dialogue("a", "b", "c", "d"), dialogue("a", "x", "c", "d")),  # the first replies differ
        (dialogue("a", "b", "c", "d"), dialogue("a", "b", "x", "d")),  # the second questions differ
        (dialogue("a", "b"), dialogue("a", "b", "c", "d")),  # one ends earlier
        (dialogue("a", "b"), dialogue("x", "b")),  # nothing shared
        (dialogue("a", "b\n\nAssistant: c"), dialogue("a", "d")),  # one reply is two turns
    ],
)
def test_transcripts_that_differ_early_are_skipped(chosen, rejected):
    assert hh.split_pair(chosen, rejected) is None
    assert hh.split_pair(rejected, chosen) is None


def test_unusable_pairs_are_skipped_and_counted(args, capsys):
    rows = convert(
        replace(args, max_query_length=60, max_response_length=20),
        pair("a"),
        {"chosen": dialogue("a", "b", "c", "d"), "rejected": dialogue("a", "x", "c", "d")},
        pair("a", rejected=" "),
        pair("a", chosen=""),
        pair("a", chosen=" yes", rejected="yes"),
        pair("a", rejected=" no" * 50),
        pair("a", "b", "c" * 200),
    )
    assert {name: len(split_rows) for name, split_rows in rows.items()} == {"comparisons.train": 1, "sft.train": 1}
    printed = capsys.readouterr().out
    for count, reason in (
        (1, "transcripts that differ before the last turn"),
        (2, "an empty reply"),
        (1, "two identical responses"),
        (1, "a response longer than --max-response-length 20"),
        (1, "a last turn longer than --max-query-length 60"),
    ):
        assert re.search(rf"^ +{count}  {reason}$", printed, re.MULTILINE)


def test_a_long_query_loses_only_as_many_old_turns_as_needed(args, capsys):
    record = pair("my cat " * 20, "fat", "the mat", "it is", "sat?")
    short, shorter = (dialogue(*turns) + "\n\nAssistant:" for turns in (("the mat", "it is", "sat?"), ("sat?",)))
    length = len(TOKENIZER.encode(short))
    [row] = convert(replace(args, max_query_length=length), record)["comparisons.train"]
    assert row["query"] == short
    assert "1 of 1 queries lost their oldest turns" in capsys.readouterr().out
    [row] = convert(replace(args, max_query_length=length - 1), record)["comparisons.train"]
    assert row["query"] == shorter


def test_pairs_with_the_same_opening_are_in_the_same_split(args):
    records = [pair(f"question {i % 50}", "yes", f"and {i}") for i in range(200)]
    rows = convert(replace(args, validation_share=0.3), *records)
    openings = {
        split: {row["query"].split("\n\nAssistant:")[0] for row in rows[f"comparisons.{split}"]}
        for split in ("train", "validation")
    }
    assert not openings["train"] & openings["validation"]
    assert len(openings["train"]) + len(openings["validation"]) == 50
    assert 5 <= len(openings["validation"]) <= 25  # 15 expected, standard deviation 3.2
    for split in openings:
        assert [row["query"] for row in rows[f"sft.{split}"]] == [row["query"] for row in rows[f"comparisons.{split}"]]


def test_published_splits_can_be_kept_by_two_runs(args):
    convert(replace(args, validation_share=1.0), pair("a"))
    rows = convert(replace(args, validation_share=0.0), pair("b"))
    assert list(rows) == ["comparisons.train", "comparisons.validation", "sft.train", "sft.validation"]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "malformed JSON"),
        ({"chosen": dialogue("a", "b")}, "the field 'rejected' is missing"),
        ({"chosen": [], "rejected": dialogue("a", "b")}, "the field 'chosen' must be str, not list"),
        ({"chosen": dialogue("a", "b"), "rejected": "b"}, "'rejected' is not a transcript"),
    ],
)
def test_a_malformed_pair_is_reported_with_file_and_line_and_nothing_is_written(args, record, reason):
    with pytest.raises(InputError, match=rf"test.jsonl:2: {reason}"):
        convert(args, pair("a"), record)
    assert not args.out.exists()


def test_no_usable_pair_is_an_error(args):
    with pytest.raises(InputError, match=r"no usable rows \(1 x an empty reply\); nothing was written"):
        convert(args, pair("a", chosen=""))
    assert not args.out.exists()


@pytest.mark.slow
def test_real_hh_has_all_pairs_but_eight_known_odd_ones(real_data, tmp_path, capsys):
    tokenizer_file = real_data / "tokenizers" / "gpt_neox_20b" / "20B_tokenizer.json"
    args = hh.Args(
        source=str(real_data / "hh_rlhf"), out=tmp_path, tokenizer=str(tokenizer_file), max_response_length=600
    )
    hh.main(args)
    printed = capsys.readouterr().out
    assert re.search(r"^ +4  transcripts that differ before the last turn$", printed, re.MULTILINE)
    assert re.search(r"^ +4  an empty reply$", printed, re.MULTILINE)
    tokenizer = load_tokenizer(tmp_path)
    rows = {
        split: load_comparisons(tmp_path / f"comparisons.{split}.jsonl", tokenizer, 512, 600)
        for split in ("train", "validation")
    }
    assert len(rows["train"]) + len(rows["validation"]) == 1788 - 8
    assert len(load_demonstrations(tmp_path / "sft.train.jsonl", tokenizer, 512, 600)) == len(rows["train"])
    queries = {split: {row.record["query"] for row in split_rows} for split, split_rows in rows.items()}
    assert not queries["train"] & queries["validation"]
    with gzip.open(real_data / "hh_rlhf" / "harmless-base" / "test.jsonl.gz", "rt") as file:
        transcripts = {(record["chosen"], record["rejected"]) for record in map(json.loads, file)}
    num_cut = 0
    for row in [*rows["train"], *rows["validation"]]:
        record = row.record
        chosen, rejected = record["query"] + record["chosen"], record["query"] + record["rejected"]
        if (chosen, rejected) not in transcripts:  # whole turns were dropped at the start
            num_cut += 1
            assert any(c.endswith(chosen) and r.endswith(rejected) for c, r in transcripts)
            assert record["query"].startswith("\n\nHuman:")
        assert row.query + row.chosen[:-1] == tokenizer.encode(chosen)  # tokenised separately and together they agree
    assert f"\n{num_cut} of 1780 queries lost their oldest turns" in printed
