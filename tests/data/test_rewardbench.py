"""Miniature files in the formats of RewardBench, RewardBench 2 and RM-Bench -> rows of pairs."""

import json
import re
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from data import rewardbench
from nanorlhf.dataset import load_comparisons
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.rows import read
from tests.helpers.chat_templates import chat_tokenizer

PAIR = {
    "prompt": "my cat sat?", "chosen": "it is a cat.", "chosen_model": "a", "rejected": "no.", "rejected_model": "b",
    "subset": "alpacaeval-easy", "id": 0,
}  # fmt: skip
BEST_OF_4 = {
    "id": "17", "prompt": "what is it?", "chosen": ["a cat."], "rejected": ["a mat.", "no.", "it sat."],
    "num_correct": 1, "num_incorrect": 3, "total_completions": 4, "models": ["m"], "subset": "Math",
    "additional_metadata": {"category": None, "models": ["m"]},
}  # fmt: skip
TIES = [
    BEST_OF_4 | {"id": "ref:3", "subset": "Ties", "rejected": ["a mat."]},
    BEST_OF_4 | {"id": "tied:3", "subset": "Ties", "chosen": ["a cat.", "my cat."], "rejected": ["a mat.", "no."]},
]
STYLES = {
    "id": "chat/0", "prompt": "say yes or no", "domain": "chat",
    "chosen": ["yes", "yes, a cat is it.", "# yes\n\n- cat"], "rejected": ["no", "no, it is a mat.", "# no\n\n- mat"],
}  # fmt: skip


@pytest.fixture
def args(tmp_path):
    train_tokenizer(["say yes or no, my cat sat on the mat", "what is it? it is a cat."] * 3, 300).save(
        tmp_path / "tokenizer"
    )
    (tmp_path / "source").mkdir()
    return rewardbench.Args(
        source=str(tmp_path / "source"), out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer")
    )


def convert(args, *records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (args.out.parent / "source" / "rows.jsonl").write_text(text)
    rewardbench.main(args)
    return read(args.out)


def test_a_pair_of_rewardbench_is_a_row(args):
    rows = convert(args, PAIR, PAIR | {"subset": "hep-go", "id": 1})
    meta = {"benchmark": "RewardBench", "subset": "alpacaeval-easy", "id": "0", "record": 0, "chosen": 0, "rejected": 0}
    first, second = rows["comparisons.validation"]
    texts = {"query": "my cat sat?", "chosen": "it is a cat.", "rejected": "no."}
    assert list(rows) == ["comparisons.validation"] and first == texts | {"meta": meta}
    assert second["meta"] == meta | {"subset": "hep-go", "id": "1", "record": 1}


def test_a_record_of_rewardbench_2_is_a_row_for_each_wrong_answer_and_ties_for_each_pair(args, capsys):
    rows = convert(args, BEST_OF_4, *TIES)["comparisons.validation"]
    assert [(row["chosen"], row["rejected"]) for row in rows[:3]] == [("a cat.", r) for r in BEST_OF_4["rejected"]]
    assert [row["meta"]["rejected"] for row in rows[:3]] == [0, 1, 2]
    assert {row["meta"]["benchmark"] for row in rows} == {"RewardBench 2"}
    tied = [row for row in rows if row["meta"]["id"] == "tied:3"]
    assert [(row["meta"]["chosen"], row["meta"]["rejected"]) for row in tied] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    printed = capsys.readouterr().out
    assert "RewardBench 2: 3 records" in printed and re.search(r"^ +2  Ties$", printed, re.MULTILINE)
    assert "note: no comparisons.train.jsonl: benchmarks have no training split" in printed


def test_a_record_of_rm_bench_is_a_matrix_of_styles(args):
    rows = convert(args, STYLES)["comparisons.validation"]
    assert [(row["meta"]["chosen"], row["meta"]["rejected"]) for row in rows] == [(i, j) for i in range(3)
                                                                                   for j in range(3)]  # fmt: skip
    for row in rows:
        assert row["chosen"] == STYLES["chosen"][row["meta"]["chosen"]]
        assert row["rejected"] == STYLES["rejected"][row["meta"]["rejected"]]
        assert row["meta"]["benchmark"] == "RM-Bench" and row["meta"]["subset"] == "chat"


@pytest.mark.parametrize("record", [PAIR, BEST_OF_4, STYLES], ids=["RewardBench", "RewardBench 2", "RM-Bench"])
def test_an_array_in_json_and_parquet_give_the_rows_of_json_lines(args, record):
    rows = convert(args, record)
    source = args.out.parent / "source"
    (source / "rows.jsonl").unlink()
    (source / "total_dataset.json").write_text(json.dumps([record]))
    rewardbench.main(args)
    assert read(args.out) == rows
    (source / "total_dataset.json").unlink()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), source / "test-00000-of-00001.parquet")
    rewardbench.main(args)
    assert read(args.out) == rows


def test_with_a_chat_template_the_records_are_conversations(args):
    chat_tokenizer("chatml", args.out.parent / "chatty")
    rows = convert(replace(args, tokenizer=str(args.out.parent / "chatty")), BEST_OF_4)["comparisons.validation"]
    system = "<|im_start|>system\nBe kind.<|im_end|>\n"
    query = f"{system}<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert [row["query"] for row in rows] == [query] * 3 and all(row["chat"] for row in rows)
    tokenizer = load_tokenizer(args.out)
    assert tokenizer.backend.id_to_token(tokenizer.eos_id) == "<|im_end|>"
    [first, *_] = load_comparisons(args.out / "comparisons.validation.jsonl", tokenizer, None, None)
    assert first.record["chosen"] == "a cat." and first.chosen[-1] == tokenizer.eos_id


def test_a_template_replaces_the_one_that_a_tokenizer_lacks(args):
    tokenizer = chat_tokenizer("chatml")
    bare = replace(tokenizer, chat_template=None)
    bare.save(args.out.parent / "bare")
    template = args.out.parent / "template.jinja"
    template.write_text(tokenizer.chat_template)
    [row] = convert(replace(args, tokenizer=str(args.out.parent / "bare"), template=template), PAIR)[
        "comparisons.validation"
    ]
    assert row["chat"] and row["query"].endswith("<|im_start|>assistant\n")


def test_a_record_is_skipped_as_a_whole(args, capsys):
    long, empty = "cat " * 60, " "
    rows = convert(
        replace(args, max_query_length=20, max_response_length=30),
        STYLES,
        STYLES | {"chosen": ["yes", long, "yes"]},
        STYLES | {"rejected": ["no", empty, "no"]},
        STYLES | {"rejected": ["no", " yes ", "no"]},
        STYLES | {"prompt": long},
    )["comparisons.validation"]
    assert len(rows) == 9
    printed = capsys.readouterr().out
    for reason in (
        "a response longer than --max-response-length 30",
        "an empty prompt or response",
        "a response that is both chosen and rejected",
        "a prompt longer than --max-query-length 20",
    ):
        assert re.search(rf"^ +1  {reason}$", printed, re.MULTILINE), reason
    assert "RM-Bench: 1 records" in printed


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "unknown benchmark: the record has neither the field"),
        (PAIR | {"rejected": ["no."]}, "the field 'rejected' must be str, not list"),
        (PAIR | {"id": None}, "the field 'id' must be str, not NoneType"),
        (BEST_OF_4 | {"rejected": ["no."]}, "'chosen' and 'rejected' have 1 and 1 responses; expected 1 and 3"),
        (BEST_OF_4 | {"rejected": [1, 2, 3]}, "the field 'rejected[0]' must be str, not int"),
        (TIES[0] | {"chosen": []}, "'chosen' and 'rejected' have 0 and 1 responses; expected at least 1 and 1"),
        (TIES[0] | {"id": "3"}, "the field 'id' is '3'; Ties has ref:N and tied:N"),
        (STYLES | {"chosen": ["yes"]}, "'chosen' and 'rejected' have 1 and 3 responses; expected 3 and 3"),
        (STYLES | {"prompt": 3}, "the field 'prompt' must be str, not int"),
    ],
)
def test_a_malformed_record_is_reported_with_file_and_line_and_nothing_is_written(args, record, sentence):
    with pytest.raises(InputError, match=re.escape(f"rows.jsonl:1: {sentence}")):
        convert(args, record)
    assert not args.out.exists()


def test_ids_in_ties_are_unique(args):
    with pytest.raises(InputError, match="rows.jsonl:3: duplicate record of Ties with the id 'ref:3'"):
        convert(args, TIES[0], BEST_OF_4, TIES[0])
    assert not args.out.exists()


def test_two_benchmarks_need_two_conversions(args):
    with pytest.raises(InputError, match="rows.jsonl:2: a record of RM-Bench after one of RewardBench; .*--files"):
        convert(args, PAIR, STYLES)
    assert not args.out.exists()
