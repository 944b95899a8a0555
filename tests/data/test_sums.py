"""The embedded world of sums: work against Python's arithmetic, rewards against hand-worked values, and the files."""

import json
import random
from pathlib import Path

import pytest

from data import sums
from nanorlhf.dataset import response_ids
from nanorlhf.errors import InputError
from nanorlhf.rewards.function import Responses, RewardFunction
from nanorlhf.tokenizer import load_tokenizer

REWARDS = Path(sums.__file__)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sums")
    sums.main(sums.Args(out=out, num_demonstrations=400, num_queries=200, num_comparisons=300, num_validation=50))
    return out


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def value(text: str) -> int:
    """Evaluate with Python."""
    return eval(text)


# ------------------------------------------------------------------------------------------------------------ 1. work
@pytest.mark.parametrize("digits", [1, 2])
def test_each_line_of_right_work_keeps_the_value_and_has_one_operation_fewer(digits):
    rng = random.Random(0)
    for num_terms in range(2, 9):
        for _ in range(50):
            query = sums.problem(num_terms, digits, rng)
            lines = sums.work(query)
            assert [value(line) for line in lines] == [value(query)] * (num_terms - 1)
            operations = [line.count("+") + line.count("-") for line in [query, *lines]]
            assert operations == list(range(num_terms - 1, -1, -1))


@pytest.mark.parametrize("digits", [1, 2])
def test_intermediate_totals_have_no_sign_and_no_more_digits(digits):
    rng = random.Random(0)
    for _ in range(300):
        for line in sums.work(sums.problem(7, digits, rng)):
            assert not line.startswith("-")
            assert max(len(number) for number in line.replace("-", "+").split("+")) <= digits


def test_a_query_that_is_not_a_sum_is_rejected():
    with pytest.raises(InputError, match="'How are you' is not from data.sums"):
        sums.work("How are you")


def test_a_slip_has_one_wrong_line():
    rng = random.Random(0)
    for _ in range(300):
        query = sums.problem(5, 1, rng)
        lines = sums.slip(query, rng)
        right = sums.right_lines(query, "\n" + "\n".join(lines))
        assert right.count(False) == 1, (query, lines)
        assert lines != sums.work(query)


# --------------------------------------------------------------------------------------------------------- 2. rewards
def test_the_outcome_checks_the_last_line_and_solved_checks_all_lines():
    queries = ["5+3-6+7"] * 5
    responses = ["\n8-6+7\n2+7\n9", "\n9", "\n8-6+7\n1+7\n9", "\n8-6+7\n2+7\n8", ""]
    assert sums.outcome(queries, responses) == [1, 1, 1, 0, 0]
    assert sums.outcome(queries, responses, [9, 9, 9, 8, 9]) == [1, 1, 1, 1, 0]
    assert sums.solved(queries, responses) == [1, 0, 0, 0, 0]
    assert sums.gold_score(queries[0], responses[0]) == 1


def test_process_rewards_are_at_the_tokens_that_end_right_lines(world):
    tokenizer = load_tokenizer(world / "long")
    query, response = "5+3-6+7", "\n8-6+7\n1+7\n8"  # the second line is wrong, the third follows from it
    ids = response_ids(query, response, tokenizer)
    [rewards] = sums.process([query], [response], [ids])
    assert len(rewards) == len(ids)
    rewarded = {i: reward for i, reward in enumerate(rewards) if reward}
    assert rewarded == {6: pytest.approx(1 / 3), len(ids) - 1: pytest.approx(1 / 3)}
    assert tokenizer.decode([ids[6]]) == "\n" and ids[-1] == tokenizer.eos_id


def test_process_rewards_of_right_work_sum_to_one_and_extra_lines_add_nothing(world):
    tokenizer = load_tokenizer(world / "long")
    for row in read_rows(world / "long/sft.train.jsonl")[:50]:
        for more, total in (("", 1.0), ("\n3", 1.0)):
            ids = response_ids(row["query"], row["response"] + more, tokenizer)
            [rewards] = sums.process([row["query"]], [row["response"] + more], [ids])
            assert sum(rewards) == pytest.approx(total)


def test_a_truncated_response_gets_no_reward_for_its_last_line(world):
    tokenizer = load_tokenizer(world / "long")
    ids = response_ids("1+2-1", "\n3-1\n2", tokenizer)[:-1]  # no EOS: another digit could follow
    assert sum(sums.process(["1+2-1"], ["\n3-1\n2"], [ids])[0]) == 0.5


def test_invalid_utf8_has_no_process_reward():
    assert sums.process(["1+2-1"], ["\n3-1\n\N{REPLACEMENT CHARACTER}"], [[11, 4, 5, 6, 11, 200]]) == [[0.0] * 6]


def test_the_layout_flaw_rewards_less_work_whatever_its_contents():
    query = "5+3-6+7"
    right, short, wrong = sums.layout([query] * 3, ["\n8-6+7\n2+7\n9", "\n4", "\n1+1+1\n1+1\n1"])
    assert right == wrong == 1 and short == 3
    assert sums.outcome([query], ["\n4"]) == [0.0]


@pytest.mark.parametrize("name", ["outcome", "process", "solved", "layout"])
def test_training_can_call_each_reward_on_the_rows_of_the_world(world, name):
    records = read_rows(world / "long/sft.validation.jsonl")
    tokenizer = load_tokenizer(world / "long")
    texts = [record["query"] for record in records], [record["response"] for record in records]
    ids = [response_ids(*pair, tokenizer) for pair in zip(*texts, strict=True)]
    values = RewardFunction(f"{REWARDS}:{name}", records)(Responses(*texts, ids, records))
    totals = [sum(value) if isinstance(value, list) else value for value in values]
    assert totals == pytest.approx([1.0] * len(records))


# ----------------------------------------------------------------------------------------------------------- 3. files
def test_files_depend_only_on_the_seed(world, tmp_path):
    sizes = dict(num_demonstrations=400, num_queries=200, num_comparisons=300, num_validation=50)
    for seed in (1, 2):
        sums.main(sums.Args(out=tmp_path / str(seed), seed=seed, **sizes))
    names = [path.relative_to(world) for path in world.rglob("*.jsonl")]
    assert len(names) == 6
    for name in names:
        assert (tmp_path / "1" / name).read_text() == (world / name).read_text()
        assert (tmp_path / "2" / name).read_text() != (world / name).read_text()


def test_validation_problems_do_not_occur_in_training(world):
    train, validation = (
        {row["query"] for path in world.rglob(f"*.{split}.jsonl") for row in read_rows(path)}
        for split in ("train", "validation")
    )
    assert not train & validation


def test_demonstrations_are_short_and_right_and_queries_are_long(world):
    terms = {
        name: [row["meta"]["num_lines"] + 1 for row in read_rows(world / f"{name}/sft.train.jsonl")]
        for name in ("short", "long")
    }
    assert set(terms["long"]) == {5, 6} and set(terms["short"]) <= {2, 3, 4, 5, 6}
    assert terms["short"].count(2) > terms["short"].count(3) > terms["short"].count(4) > terms["short"].count(6)
    for row in read_rows(world / "short/sft.train.jsonl"):
        assert sums.solved([row["query"]], [row["response"]]) == [1.0]
        assert row["meta"]["answer"] == value(row["query"])


def test_each_comparison_has_right_work_and_a_slip(world):
    for row in read_rows(world / "long/comparisons.train.jsonl"):
        assert sums.solved([row["query"]] * 2, [row["chosen"], row["rejected"]]) == [1.0, 0.0]


@pytest.mark.parametrize("terms", [(1, 4), (6, 5)])
def test_impossible_terms_are_rejected(tmp_path, terms):
    with pytest.raises(InputError, match="--terms: expected the minimum number of terms, at least 2"):
        sums.main(sums.Args(out=tmp_path, terms=terms))
