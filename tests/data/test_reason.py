"""Problems from reasoning-gym as conversations, and the reward based on the package's check."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data import chat, reason
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.rewards.function import Responses, RewardFunction
from tests.conftest import ROOT
from tests.helpers.chat_templates import chat_tokenizer

SOLVED = f"{ROOT / 'data' / 'reason.py'}:solved"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    pytest.importorskip("reasoning_gym", reason="it makes the problems: pip install reasoning-gym")
    out = tmp_path_factory.mktemp("reason")
    subprocess.run([sys.executable, "-m", "data.reason", "--out", str(out), "--seed", "1"], cwd=ROOT, check=True)
    return out


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_questions_are_distinct(world):
    train, validation = (read_rows(world / f"{split}.jsonl") for split in ("train", "validation"))
    assert len(train) == 350 and len(validation) == 150
    assert len({row["prompt"][-1]["content"] for row in train + validation}) == 500
    assert Counter(row["task"] for row in train + validation) == reason.NUM_PROBLEMS


def test_answers_match_python(world):
    for row in read_rows(world / "train.jsonl"):
        question = row["prompt"][-1]["content"]
        assert int(row["answer"]) == eval(re.search(r"-?\d+ [-+*] \d+", question)[0])


def test_the_seed_decides(world, tmp_path):
    for seed in (1, 2):
        reason.main(reason.Args(out=tmp_path, seed=seed))
        assert ((tmp_path / "train.jsonl").read_bytes() == (world / "train.jsonl").read_bytes()) == (seed == 1)


def test_the_package_judges_the_last_number_of_a_reply(world):
    records = read_rows(world / "train.jsonl")[:6]
    rule = RewardFunction(SOLVED, records)

    def scores(texts: list[str]) -> list:
        return rule(Responses([""] * 6, texts, [[0]] * 6, records))

    right = [row["answer"] for row in records]
    assert scores(right) == scores([f"It is {answer}." for answer in right]) == [1] * 6
    assert scores([f"{answer}, or rather 12345" for answer in right]) == [0] * 6
    assert scores([f"{answer}0" for answer in right]) == [0] * 6  # where the package gives partial credit
    assert scores([f"-{answer}" if int(answer) > 0 else answer.strip("-") for answer in right]) == [0] * 6
    assert scores(["no number", "", "a dozen"] * 2) == [0] * 6


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("It is 11.", "11"),
        ("**11**", "11"),
        ("4+7=11", "11"),
        ("\N{MINUS SIGN}3", "-3"),
        ("(-3)", "-3"),
        ("1: 11%", "11%"),
    ]
    + [(whole, whole) for whole in ("11.5", "1,011", "1e3", "4-7", "22/2", "4+7", "10:11")],
)
def test_part_of_a_number_is_not_an_answer(response, answer):
    """The answer in a reply that ends in 11.5 is not 5."""
    assert reason.answer_in(response) == answer


def test_what_counts_as_a_number():
    assert reason.says_a_number([""] * 3, ["It is 4.", "four", "-1"]) == [1, 0, 1]


def test_the_recipe_reads_the_files_converted_by_chat(world, tmp_path):
    chat_tokenizer("chatml").save(tmp_path / "tokenizer")
    chat.main(chat.Args(source=str(world), out=tmp_path / "data", tokenizer=str(tmp_path / "tokenizer")))
    tokenizer = chat_tokenizer("chatml")
    rows = load_demonstrations(tmp_path / "data" / "sft.train.jsonl", tokenizer, 512, 256)
    assert {row.record["meta"]["task"] for row in rows} == set(reason.TASKS)
    assert RewardFunction(SOLVED, [row.record for row in rows]).columns == ("entry",)


def test_training_needs_at_least_one_problem(tmp_path):
    with pytest.raises(InputError, match="--num-validation 500: must be at most 499"):
        reason.main(reason.Args(out=tmp_path / "out", num_validation=500))
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_an_input_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reason.package.cache_clear()
    with pytest.raises(InputError, match="install it with `pip install reasoning-gym`"):
        reason.solved([""], [""], ["{}"])
