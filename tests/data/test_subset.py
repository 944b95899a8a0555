"""Halves and samples of a dataset: disjoint by query, and independent of the order of the rows."""

import json
from dataclasses import replace

import pytest

from data import subset
from data.prepare import in_validation
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import train_tokenizer
from tests.data.rows import read

PAIRS = [{"query": f"q{i % 40}", "chosen": f"a{i}", "rejected": "b", "meta": {}} for i in range(60)]  # 20 queries twice
DEMONSTRATIONS = [{"query": f"q{i}", "response": f"r{i}", "meta": {}} for i in range(30)]


@pytest.fixture
def args(tmp_path):
    train_tokenizer(["a b"], 300).save(tmp_path / "data")
    for name in ("sft.train", "sft.validation"):
        write(tmp_path / "data", name, DEMONSTRATIONS)
    for name in ("comparisons.train", "comparisons.validation"):
        write(tmp_path / "data", name, PAIRS)
    return subset.Args(data=tmp_path / "data", out=tmp_path / "out")


def write(directory, name, rows):
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_halves_share_no_query_and_lose_no_pair(args, tmp_path):
    halves = []
    for half in ("first", "second"):
        subset.main(subset.Args(data=args.data, out=tmp_path / half, half=half))
        halves.append(read(tmp_path / half))
    first, second = (half["comparisons.train"] for half in halves)
    assert not {row["query"] for row in first} & {row["query"] for row in second}
    assert sorted(row["chosen"] for row in first + second) == sorted(row["chosen"] for row in PAIRS)
    assert 15 < len(first) < 45
    for half in halves:
        assert half["comparisons.validation"] == PAIRS and half["sft.train"] == DEMONSTRATIONS


def test_the_halves_are_balanced_within_a_training_split_drawn_with_the_same_seed(args, tmp_path):
    queries = [query for i in range(1200) if not in_validation(query := f"post {i}", 0.4, args.seed)]
    write(args.data, "comparisons.train", [{"query": q, "chosen": "a", "rejected": "b", "meta": {}} for q in queries])
    subset.main(replace(args, half="first"))
    share = len(read(args.out)["comparisons.train"]) / len(queries)
    assert abs(share - 0.5) < 4 * (0.25 / len(queries)) ** 0.5


def test_a_sample_is_independent_of_the_order_and_keeps_it(args, tmp_path):
    settings = {"num_demonstrations": 7, "num_comparisons": 9, "num_validation": 5}
    subset.main(subset.Args(data=args.data, out=tmp_path / "a", **settings))
    write(args.data, "sft.train", DEMONSTRATIONS[::-1])
    subset.main(subset.Args(data=args.data, out=tmp_path / "b", **settings))
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    assert a["sft.train"] == b["sft.train"][::-1] and a["sft.train"] != DEMONSTRATIONS[:7]
    numbers = [int(row["query"][1:]) for row in a["sft.train"]]
    assert numbers == sorted(numbers)
    assert {name: len(rows) for name, rows in a.items()} == {
        "sft.train": 7, "sft.validation": 5, "comparisons.train": 9, "comparisons.validation": 5
    }  # fmt: skip
    assert (tmp_path / "a" / "tokenizer.json").exists()


def test_data_without_comparisons_has_no_halves(args, tmp_path):
    for name in ("comparisons.train", "comparisons.validation"):
        (args.data / f"{name}.jsonl").unlink()
    subset.main(args)
    assert read(args.out).keys() == {"sft.train", "sft.validation"}
    with pytest.raises(InputError, match="has no comparisons.train.jsonl"):
        subset.main(subset.Args(data=args.data, out=tmp_path / "half", half="first"))
    assert not (tmp_path / "half").exists()


def test_out_must_differ_from_data(args):
    with pytest.raises(InputError, match="--out must differ from --data"):
        subset.main(subset.Args(data=args.data, out=args.data))


def test_a_damaged_tokenizer_is_an_error_and_nothing_is_written(args):
    (args.data / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="the field .model. is missing"):
        subset.main(args)
    assert not args.out.exists()
