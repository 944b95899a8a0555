"""GSM8K's published records as rows, and the reward that checks their answers."""

import json
import re

import pytest

from data import gsm8k
from nanorlhf.errors import InputError
from nanorlhf.rewards.function import Responses, RewardFunction
from tests.conftest import ROOT
from tests.data.rows import read

BAGS = {
    "question": "Ann has 3 bags of 400 nuts and eats 2. How many nuts are left? ",
    "answer": "She has 3*400=<<3*400=1200>>1,200 nuts.\nSo 1200-2=<<1200-2=1198>>1,198 nuts are left.\n#### 1,198",
}


def product(a: int, b: int) -> dict:
    return {
        "question": f"Tom buys {a} boxes of {b} pens. How many pens has he?",
        "answer": f"He has {a} * {b} = <<{a}*{b}={a * b}>>{a * b} pens.\n#### {a * b}",
    }


def publish(directory, **files):
    directory.mkdir(exist_ok=True)
    for name, records in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(directory)


@pytest.fixture
def source(tmp_path):
    return publish(tmp_path / "published", train=[BAGS, product(2, 3), product(4, 5)], test=[product(6, 7)])


def test_a_record_becomes_a_question_and_steps_without_marks(source, tmp_path):
    gsm8k.main(gsm8k.Args(source=source, out=tmp_path / "out"))
    rows = read(tmp_path / "out")
    assert {name: len(part) for name, part in rows.items()} == {"sft.train": 3, "sft.validation": 1}
    question = "Ann has 3 bags of 400 nuts and eats 2. How many nuts are left?"
    assert rows["sft.train"][0] == {
        "query": f"{gsm8k.INSTRUCTION}Problem: {question}\nSolution: <think>",
        "response": " She has 3*400=1,200 nuts.\nSo 1200-2=1,198 nuts are left.\n</think> <answer>1198</answer>",
        "meta": {"question": question, "answer": "1198"},
    }
    assert rows["sft.validation"][0]["meta"]["answer"] == "42"


def test_every_reference_is_solved_and_only_by_its_own_row(source, tmp_path):
    gsm8k.main(gsm8k.Args(source=source, out=tmp_path / "out"))
    records = read(tmp_path / "out")["sft.train"]
    rule = RewardFunction(f"{ROOT / 'data' / 'gsm8k.py'}:solved", records)
    responses = [record["response"] for record in records]
    for turn in range(3):
        texts = responses[turn:] + responses[:turn]
        assert rule(Responses([""] * 3, texts, [[0]] * 3, records)) == [float(turn == 0)] * 3


def test_examples_are_training_rows_that_are_not_trained_on(source, tmp_path):
    gsm8k.main(gsm8k.Args(source=source, out=tmp_path / "out", shots=2))
    rows = read(tmp_path / "out")
    [train], [validation] = rows["sft.train"], rows["sft.validation"]
    for row in (train, validation):
        assert row["query"].count("Problem: ") == 3 and row["query"].startswith(
            gsm8k.INSTRUCTION + "Problem: Ann has 3"
        )
        assert row["query"].count("</think> <answer>") == 2 and row["query"].endswith("Solution: <think>")
        assert not re.search(r"<answer>\s*" + row["meta"]["answer"], row["query"])
    assert train["meta"]["answer"] == "20" and validation["meta"]["answer"] == "42"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("6*3</think> <answer>18</answer>", 1),
        ("6*3</think>\n<answer> $18.00 </answer>", 1),
        ("</think> <answer>6 * 3 = 18 eggs</answer>", 1),
        ("</think> <answer>18</answer> Problem: 1+1? <think></think> <answer>2</answer>", 1),
        ("</think> <answer>2</answer> or </think> <answer>18</answer>", 0),  # the first counts
        ("</think> <answer>180</answer>", 0),
        ("</think> <answer>18.5</answer>", 0),
        ("</think> <answer>-18</answer>", 0),
        ("</think> <answer>1/18</answer>", 0),
        ("</think> <answer>17 or 18</answer>", 1),  # the last number of the answer
        ("</think> <answer>18 or 17</answer>", 0),
        ("</think> <answer>18", 0),  # cut
        ("<answer>18</answer>", 0),  # the steps are not closed
        ("It is 18.", 0),
        ("</think> <answer></answer>", 0),
        ("</think> <answer>NaN</answer>", 0),
        ("</think> <answer>" + "9" * 5000 + "</answer>", 0),
        ("", 0),
    ],
)
def test_the_first_answer_counts_if_it_is_whole(response, score):
    assert gsm8k.solved([""], [response], ["18"]) == [score]
    assert gsm8k.tagged([""], [response]) == [float("</think>" in response and response.endswith("</answer>"))]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"question": "How many?", "answer": "It is 3."}, r"train.jsonl:1: 'answer' must end in a line like '#### 72'"),
        ({"question": "How many?", "answer": "\n#### many"}, "must end in a line like"),
        ({"question": "How many?", "answer": "\n#### 3\nMore."}, "must end in a line like"),
        ({"question": " ", "answer": "\n#### 3"}, "the field 'question' is empty"),
        ({"question": "How many?"}, "the field 'answer' is missing"),
    ],
)
def test_a_record_without_a_question_or_a_final_number_is_refused(record, sentence, tmp_path):
    source = publish(tmp_path / "published", train=[record])
    with pytest.raises(InputError, match=sentence):
        gsm8k.main(gsm8k.Args(source=source, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_files_without_a_split_and_too_many_examples_are_refused(source, tmp_path):
    with pytest.raises(InputError, match="no training rows are left after --shots 3"):
        gsm8k.main(gsm8k.Args(source=source, out=tmp_path / "out", shots=3))
    with pytest.raises(InputError, match="gsm8k.jsonl: expected train or test in the name of the file"):
        gsm8k.main(gsm8k.Args(source=publish(tmp_path / "other", gsm8k=[BAGS]), out=tmp_path / "out"))
