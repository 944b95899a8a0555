"""docs/rewards.md: its functions, its judge file, its error messages. tests/tools/test_docs.py runs its commands."""

import re
import shlex
import sys
import tomllib
from collections import Counter
from dataclasses import replace

import pytest

import train_grpo
import train_ppo
from nanorlhf import cli
from nanorlhf.errors import InputError
from nanorlhf.rewards import unit_tests
from nanorlhf.rewards.function import Responses, RewardFunction
from nanorlhf.rewards.function_reward import FunctionReward
from nanorlhf.rewards.judge import FIELDS, read_settings
from nanorlhf.rewards.weighted_sum import Rewards
from nanorlhf.rewards.workers import Workers
from nanorlhf.training.checks import check_reward
from tests.conftest import ROOT, read_metrics
from tests.evals.test_judge import chat, reply, serve  # noqa: F401  (serve is a fixture)
from tests.rewards.letters import Letters, make_batch

PAGE = (ROOT / "docs" / "rewards.md").read_text()
BLOCKS = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE, re.S))
RECORDS = [{"query": "q", "response": "r", "meta": {"answer": "4", "level": 1}}] * 2
INPUTS = Responses(["q", "q"], ["abc", "a"], [[1, 2, 3, 98], [1]], RECORDS)


@pytest.fixture
def function(tmp_path):
    """Write a file and load a function from it."""

    def load(text, name="score", records=RECORDS, path="my.py"):
        (tmp_path / path).write_text(text)
        return RewardFunction(f"{tmp_path / path}:{name}", records)

    return load


def test_the_pages_functions(function):
    text = BLOCKS["my_rewards.py"]
    rows = [{"query": "q", "response": "r", "meta": {"place": "Paris", "who": "boss"}}] * 2
    inputs = Responses(["q", "q"], [" my boss in Paris", " the boss"], [[1] * 12, [1]], rows)
    assert function(text, "told", rows)(inputs) == [2.0, 1.0]
    assert function(text, "brief", rows)(inputs) == [[0.0] * 10 + [-0.1] * 2, [0.0]]
    assert function(text, "polite", rows)(inputs) == [0.0, -1.0]
    assert function(BLOCKS["trl_rewards.py"], "format_reward", rows)(inputs) == [1.0, 0.0]
    slow = function(BLOCKS["slow_reward.py"], "run_tests")
    assert (slow.time_limit, slow.timeout_score) == (5, -1.0) and slow(INPUTS) == [1.0, 1.0]


def test_a_majority_vote_rewards_the_querys_most_common_answer(function):
    majority = function(BLOCKS["vote.py"], "majority", [])
    queries = ["1+1+1", "1+1+1", "2+2+2", "1+1+1", "2+2+2"]
    responses = ["\n2+1\n3", "\n9+1\n4", "\n4", "\n3", ""]
    # the workings don't vote, another query's answers don't either, and the first of equal answers wins
    assert majority(Responses(queries, responses, [[1]] * 5, [{}] * 5)) == [1.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_majority_vote_gets_all_responses_to_a_query_in_one_call(miniature, tmp_path, monkeypatch, micro_batch_size):
    (tmp_path / "vote.py").write_text(BLOCKS["vote.py"])
    calls, call = [], RewardFunction.__call__
    monkeypatch.setattr(
        RewardFunction, "__call__", lambda self, batch: calls.append(batch.queries) or call(self, batch)
    )
    args = replace(
        train_grpo.RECIPES["tiny"][1],
        data=miniature.ppo.data, sft=miniature.ppo.sft, out=tmp_path / "out", device="cpu", reward_model=None,
        gold=None, reward=f"{tmp_path}/vote.py:majority", max_query_length=160, response_length=12, num_epochs=1,
        total_episodes=16, batch_size=16, samples_per_query=4, micro_batch_size=micro_batch_size,
    )  # fmt: skip
    train_grpo.main(args)
    _, *rollout = calls  # the first call is a try before the training
    assert len(rollout) == 4 // micro_batch_size
    assert all(count == 4 for queries in rollout for count in Counter(queries).values())


FINITE = "it must return a finite number, a list with one per token, or None."
SENTENCES = {
    "a field that no row has": "my.py:3 has the parameter 'solution', but no row of the data has this field in its "
    "meta (fields: answer, level).",
    "a wrong number of values": "my.py:3 returned 1 values for 2 responses.",
    "NaN or infinity": f"my.py:3 returned nan for the response 'abc': {FINITE}",
    "text": f"my.py:3 returned 'good' for the response 'abc': {FINITE}",
    "a list of the wrong length": "my.py:3 returned 3 rewards for the response 'abc', which has 4 tokens with its EOS.",
    "an exception": "my.py:4 raises ZeroDivisionError: division by zero.",
    "rewards per token in GRPO": "returns rewards per token, but --algorithm grpo compares whole responses: return "
    "their sum, or train with train_ppo.py or --algorithm reinforce++.",
    "a weight too few": "--reward-weights 1: expected 2, one for each --reward.",
    "a worker that dies": "a worker process ended (exit code 3) while scoring responses.",
}
MISTAKES = {
    "a field that no row has": "\n\ndef score(q, r, solution): ...",
    "a wrong number of values": "\n\ndef score(q, r): return [1.0]",
    "NaN or infinity": "\n\ndef score(q, r): return [float('nan')] * 2",
    "text": "\n\ndef score(q, r): return ['good'] * 2",
    "a list of the wrong length": "\n\ndef score(q, r): return [[1.0] * 3, 0]",
    "an exception": "\n\ndef score(q, r):\n    return 1 / 0",
    "a worker that dies": "import os\ndef score(q, r): os._exit(3)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sentence_of_a_mistake_in_a_function(function, tmp_path, mistake):
    with pytest.raises(InputError) as caught:
        reward = function(MISTAKES[mistake])
        (Workers(reward, 1) if "worker" in mistake else reward)(INPUTS)
    said = str(caught.value).replace(f"{tmp_path}/", "")
    assert SENTENCES[mistake] in said and said.startswith("--reward my.py:score")


def test_the_other_sentences_and_the_one_on_the_page(tmp_path):
    (tmp_path / "my.py").write_text("def score(q, r, response_ids): return [[1.0] * len(ids) for ids in response_ids]")
    rule = FunctionReward(f"{tmp_path}/my.py:score", Letters(), 8, RECORDS)
    with pytest.raises(InputError) as caught:
        Rewards([rule], [1.0], whole_only="--algorithm grpo").score(make_batch())
    assert SENTENCES["rewards per token in GRPO"] in str(caught.value)
    with pytest.raises(InputError) as caught:
        check_reward(None, ("a.py:f", "b.py:g"), (1.0,))
    assert SENTENCES["a weight too few"] in str(caught.value)
    [example] = re.findall(r"^ {4}(my\.py.+)$", PAGE.split("## Errors")[1], re.M)
    assert example == SENTENCES["a field that no row has"]


def test_the_judges_fields_and_defaults_are_those_of_the_page(tmp_path):
    section = PAGE.split("## LLM judges")[1].split("## Tests of programs")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|([^|]*)\|", section, re.M)
    printed = {}
    for names, defaults in rows:
        names = re.findall(r"`(\w+)`", names)
        values = [word.strip("` ") for word in defaults.split(",")]
        printed |= dict(zip(names, values if len(values) == len(names) else values * len(names), strict=True))
    defaults = {name: str(default if default is not None else "") for name, (_, default) in FIELDS.items()}
    assert printed == {name: value.removesuffix(".0") for name, value in defaults.items()}
    (tmp_path / "judge.toml").write_text(BLOCKS["judge.toml"])
    settings = read_settings("--reward", str(tmp_path / "judge.toml"))
    assert settings["max_calls"] == 20000 and settings["scale"] == 0.1


def test_the_pages_settings_of_tests_are_the_defaults(tmp_path):
    (tmp_path / "tests.toml").write_text(BLOCKS["tests.toml"])
    assert unit_tests.read_settings("--reward", str(tmp_path / "tests.toml")) == unit_tests.DEFAULTS
    assert list(tomllib.loads(BLOCKS["tests.toml"])) == list(unit_tests.DEFAULTS)


def test_the_pages_judge_rewards_a_run(miniature, serve, tmp_path, monkeypatch):  # noqa: F811
    """Run the page's command with the miniature's paths and the URL of a running server."""
    server, endpoint = serve(reply(body=chat("It tells little.\nScore: 4")))
    monkeypatch.chdir(tmp_path)
    url = tomllib.loads(BLOCKS["judge.toml"])["url"]
    (tmp_path / "judge.toml").write_text(BLOCKS["judge.toml"].replace(url, endpoint.url))
    [command] = re.findall(r"^(python train_ppo.py --reward judge:.*)$", PAGE, re.M)
    monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
    parsed = []
    cli.command_line(parsed.append, train_ppo.RECIPES)
    args = replace(miniature.ppo, reward=parsed[0].reward, out=parsed[0].out, total_episodes=8)
    train_ppo.main(replace(args, missing_eos_score=None, gold=None))
    (metrics,) = read_metrics(tmp_path / "runs" / "tiny" / "ppo_judge")
    assert metrics["reward/judge"] == metrics["objective/score"] == pytest.approx(0.4)
    assert "Judge whether the summary says what matters" in server.seen[0][2]["messages"][-1]["content"]
    assert (tmp_path / "runs" / "judge.jsonl").exists()


def test_a_function_with_a_tuple_of_rewards_from_the_command_line(monkeypatch):
    """--reward takes one or several items, and --reward-weights numbers or a word."""
    words = "train_grpo.py --reward a.py:f b.py:g runs/rm --reward-weights 1 0.2 -1 --reward-workers 3"
    monkeypatch.setattr(sys, "argv", words.split())
    parsed = []
    cli.command_line(parsed.append, train_grpo.RECIPES)
    assert parsed[0].reward == ("a.py:f", "b.py:g", "runs/rm") and parsed[0].reward_weights == (1.0, 0.2, -1.0)
    assert parsed[0].reward_workers == 3
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--reward-model", "a", "b", "--reward-weights", "min"])
    cli.command_line(parsed.append, train_grpo.RECIPES)
    assert parsed[1].reward_weights == "min" and parsed[1].reward_model == ("a", "b")
