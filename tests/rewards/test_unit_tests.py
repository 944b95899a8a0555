"""The reward by tests: scores, metrics, its settings, and training with it on rows of a code file."""

import sys
from dataclasses import replace

import pytest
import torch

import train_grpo
import train_ppo
from nanorlhf.batch import Batch
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.rewards.unit_tests import UnitTests
from tests.conftest import read_metrics

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
PAD, EOS = 0, 1
RESPONSES = ["    return n * n\n", "    return n + 2\n", "    return n / 0\n", "    return (\n", "    exit(0)\n"]
ROW = {
    "query": "The square.", "response": "", "language": "python", "prefix": "def f(n):\n", "suffix": "",
    "tests": "assert f(2) == 4\nassert f(3) == 9\nassert f(1) == 3\nassert f(0) == 0\n",
}  # fmt: skip
RIGHT = ROW | {"tests": "assert f(2) == 4\nassert f(3) == 9\n"}


class Texts:
    """A tokenizer with an id per response."""

    pad_id, eos_id = PAD, EOS

    def decode(self, ids):
        return "".join(RESPONSES[i - 2] for i in ids if i > EOS)


def batch_of(record):
    query, response = torch.full((5, 1), 2), torch.tensor([[2 + i, EOS, PAD] for i in range(5)])
    return Batch.of([record] * 5, query, response, torch.zeros(5, 3), EOS, PAD, "last_token")


@pytest.fixture
def settings_file(tmp_path):
    def write(text):
        (tmp_path / "tests.toml").write_text(text)
        return str(tmp_path / "tests.toml")

    return write


def test_the_score_is_the_share_of_tests_and_a_compile_error_has_its_own():
    tests = UnitTests("", Texts(), [ROW])
    result = tests.score(batch_of(ROW))
    # n * n fails f(1) == 3; n + 2 fails three of four but not f(2) == 4 and f(1) == 3; 1 / 0 and exit(0) all
    assert result.scores.tolist() == [0.75, 0.5, 0.0, -1.0, 0.0]
    assert result.applies.all() and not result.token_rewards.any()
    metrics = tests.metrics()
    assert {name: value for name, value in metrics.items() if value} == {
        "reward/tests_wrong_answer": 0.4, "reward/tests_exception": 0.2, "reward/tests_compile_error": 0.2,
        "reward/tests_exit": 0.2,
    }  # fmt: skip
    assert metrics["reward/tests_passed"] == 0


def test_all_or_nothing(settings_file):
    tests = UnitTests(settings_file('score = "all"\ncompile_error = -0.5\n'), Texts(), [RIGHT])
    assert tests.score(batch_of(RIGHT)).scores.tolist() == [1.0, 0.0, 0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('score = "most"', "sets score = 'most': must be share or all"),
        ("timeout = 0", "sets timeout = 0: must be above 0, at most 3600"),
        ("workers = 1.5", ".*the field 'workers' must be int, not float"),
        ("time = 1", "has the unknown field 'time'; known fields: score, compile_error"),
        ("score =", "isn't a TOML file"),
    ],
)
def test_a_wrong_setting_is_refused(settings_file, text, message):
    with pytest.raises(InputError, match=rf"tests.toml.*{message}"):
        UnitTests(settings_file(text), Texts(), [ROW])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, {"query": "a"}], "row 2 of --data: the field 'language' is missing"),
        ([ROW | {"tests": " \n"}], "row 1 of --data has no tests"),
        ([ROW, ROW | {"language": "java"}], "--data has programs in java and python"),
    ],
)
def test_a_row_without_tests_is_refused_before_training(rows, message):
    with pytest.raises(InputError, match=f"^--reward tests: {message}"):
        UnitTests("", Texts(), rows)


@pytest.mark.slow
@pytest.mark.parametrize("module", [train_grpo, train_ppo])
def test_training_on_a_code_file_logs_the_kinds_of_verdict(rlcf, tmp_path, module):
    rows = [ROW | {"query": f"the sum of the prices, plus {i}", "tests": "assert f(2) == 4"} for i in range(8)]
    write_jsonl(tmp_path / "data/code.train.jsonl", rows)
    args = replace(
        module.RECIPES["rlcf-tiny"][1], data=tmp_path / "data", out=tmp_path / "out", sft=str(rlcf.ppo.sft),
        total_episodes=8, batch_size=8, num_minibatches=1, response_length=8, max_query_length=84, device="cpu",
    )  # fmt: skip
    module.main(args)
    [metrics] = read_metrics(tmp_path / "out")
    kinds = {name: value for name, value in metrics.items() if name.startswith("reward/tests_")}
    assert sum(kinds.values()) == pytest.approx(1) and "reward/tests" in metrics
