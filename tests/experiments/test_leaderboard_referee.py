"""The referee's counter, what an entry can see, and entries in the sandbox in a world in miniature."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train_rm
import train_sft
from data import tiny
from experiments.leaderboard import referee
from experiments.leaderboard.referee import Args, Counter, Refused, copy_world, main, take_policy
from nanorlhf.checkpoint import load_scalar
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.recipes import recipes
from nanorlhf.reward_model import response_scores
from nanorlhf.tokenizer import load_tokenizer
from tests.helpers.shared_directories import made_once

ENTRIES = Path(__file__).resolve().parents[2] / "experiments/leaderboard/entries"
IMPORTS = "import os, time, torch\n"


def make_world(root: Path) -> None:
    """Train an initial policy and a reward model for a few steps."""
    tiny.main(tiny.Args(out=root / "data", num_demonstrations=96, num_comparisons=64, num_validation=24))
    common = {"data": root / "data", "device": "cpu", "warmup_steps": 0, "num_epochs": 2.0}
    sft = replace(
        train_sft.RECIPES["tiny"][1], **common, out=root / "sft", n_layer=1, d_model=32, n_head=2, num_samples=4
    )  # fmt: skip
    train_sft.main(sft)
    rm = train_rm.RECIPES["tiny"][1]
    train_rm.main(replace(rm, **common, out=root / "rm", sft=str(root / "sft"), num_normalisation=None))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "leaderboard_world", make_world)


@pytest.fixture
def args(world, tmp_path) -> Args:
    return Args(world=world, number=1, entry="sft", out=tmp_path / "row.json", budget=64, num_queries=8)


def refusal(args: Args, source: str) -> str:
    """Run an entry and return why it was refused."""
    entry = args.out.parent / "entry.py"
    entry.write_text(IMPORTS + source)
    result = main(replace(args, entry=str(entry)))
    assert json.loads(args.out.read_text()) == result and "gold_win_rate" not in result
    return result["refused"]


def request(queries: list, responses: list) -> bytes:
    return json.dumps({"queries": queries, "responses": responses}).encode()


# ------------------------------------------------------------------------------------------------------- 1. the counter
def test_scores_are_the_reward_models_and_are_counted(world) -> None:
    tokenizer = load_tokenizer(str(world / "rm"))
    rows = load_demonstrations(world / "data/sft.train.jsonl", tokenizer, 80, 24)[:6]
    counter = Counter(world / "rm", budget=10)
    queries, responses = [row.record["query"] for row in rows], [row.response for row in rows]
    reply = json.loads(counter.answer(request(queries, responses)))
    with torch.no_grad():
        expected = response_scores(load_scalar(world / "rm"), list(rows), tokenizer.pad_id, "right")
    assert reply["scores"] == pytest.approx(expected.tolist(), abs=1e-5) and counter.num_scored == 6
    counter.answer(request(queries[:4], responses[:4]))
    assert counter.num_scored == 10
    with pytest.raises(Refused, match="budget: it asked for the scores of 11 responses instead of 10"):
        counter.answer(request(queries[:1], responses[:1]))
    assert counter.num_scored == 10


@pytest.mark.parametrize(
    ("queries", "responses"),
    [
        ([], []), (["a"], []), ([1], [[5]]), ([""], [[5]]), (["a"], [[]]), (["a"], [[5] * 25]), (["a"], [[5.0]]),
        (["a"], [[True]]), (["a"], [[-1]]), (["a"], [[10**9]]), (["a"], "b"), ("a", [[5]]), (["my " * 81], [[5]]),
    ],
)  # fmt: skip
def test_a_request_that_is_not_valid_is_refused_before_it_is_counted(world, queries, responses) -> None:
    counter = Counter(world / "rm", budget=10)
    with pytest.raises(Refused, match="request: "):
        counter.answer(request(queries, responses))
    assert counter.num_scored == 0


@pytest.mark.parametrize("message", [b"", b"{", b"[]", b"\xff", b"{}"])
def test_a_message_that_is_not_a_request_is_refused(world, message) -> None:
    with pytest.raises((Refused, InputError)):
        Counter(world / "rm", budget=10).answer(message)


def test_padding_in_a_response_is_refused(world) -> None:
    pad_id = load_tokenizer(str(world / "rm")).pad_id
    with pytest.raises(Refused, match="without .PAD."):
        Counter(world / "rm", budget=10).answer(request(["a"], [[5, pad_id]]))


# ------------------------------------------------------------------------------------------------ 2. what an entry sees
def test_an_entry_sees_no_gold_score_and_no_query_of_the_evaluation(world, tmp_path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_world(world, copy)
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    kinds = (f"data/{kind}.{split}.jsonl" for kind in ("sft", "comparisons") for split in ("train", "validation"))
    assert files == {*kinds, "data/tokenizer.json", *(f"sft/{name}" for name in names)}
    held_out = (world / "data/sft.validation.jsonl").read_text().splitlines()
    for path in (copy / "data").glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row.keys() <= {"query", "response", "chosen", "rejected"} for row in rows)
        assert not {row["query"] for row in rows} & {json.loads(line)["query"] for line in held_out}
    train = (copy / "data/comparisons.train.jsonl").read_text().splitlines()
    assert len(train) == 64 and (copy / "data/comparisons.validation.jsonl").read_text().splitlines() == train[:64]


def test_only_the_weights_of_a_policy_are_taken(world, tmp_path) -> None:
    written = tmp_path / "world/policy"
    written.mkdir(parents=True)
    weights = written / "model.safetensors"
    with pytest.raises(Refused, match="policy: train returned no policy"):
        take_policy(weights, world / "sft", tmp_path / "none")
    weights.symlink_to(world / "rm/model.safetensors")
    with pytest.raises(Refused, match="policy: train returned no policy"):
        take_policy(weights, world / "sft", tmp_path / "none")
    weights.unlink()
    weights.write_bytes(bytes(2 * (world / "sft/model.safetensors").stat().st_size + 1))
    with pytest.raises(Refused, match="policy: it is larger than the initial policy"):
        take_policy(weights, world / "sft", tmp_path / "none")
    weights.write_bytes(b"new")
    (written / "config.json").write_text("{}")
    take_policy(weights, world / "sft", tmp_path / "taken")
    assert (tmp_path / "taken/model.safetensors").read_bytes() == b"new"
    assert (tmp_path / "taken/config.json").read_text() == (world / "sft/config.json").read_text()


def test_the_evaluation_agrees_with_eval_py(args, world, tmp_path) -> None:
    settings = recipes("summaries", type(evaluation.RECIPES["tiny"][1]))["tiny"][1]
    measured = evaluation.main(
        replace(
            settings, data=world / "data", out=tmp_path / "eval", policies=("sft", str(world / "sft")), seed=1,
            reward_model=str(world / "rm"), num_queries=8, temperature=0.7, num_distinct_samples=4, device="cpu",
        )
    )["policies"]["sft"]  # fmt: skip
    result = main(args)
    assert {name: result[name] for name in referee.MEASURED} == {name: measured[name] for name in referee.MEASURED}
    assert result["num_scored"] == 0 and result["refused"] == ""


def test_a_secret_world_is_judged_by_its_own_labeller(args, tmp_path) -> None:
    (tmp_path / "secret").write_text("for tests")
    public, secret = main(args), main(replace(args, secret_file=tmp_path / "secret"))
    assert public["gold_score"] != secret["gold_score"] and public["rm_score"] == secret["rm_score"]


# -------------------------------------------------------------------------------------------- 3. entries in the sandbox
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "rejection"])
def test_an_entry_trains_within_its_budget(args, name) -> None:
    """CI runs one world of two first entries: one calls a training script, the other `World.score`."""
    result = main(replace(args, entry=str(ENTRIES / f"{name}.py")))
    assert result["refused"] == "" and result["num_scored"] == 64
    assert abs(result["kl"]) > 1e-4 and 0 <= result["gold_win_rate"] <= 1


@pytest.mark.slow
def test_an_entry_beyond_its_budget_is_refused_even_if_it_catches_the_error(args) -> None:
    reason = refusal(
        args,
        """
def train(world):
    row = world.demonstrations[0]
    try:
        for _ in range(world.budget + 1):
            world.score([row.record["query"]], [row.response])
    except BaseException:
        pass
    return world.load(world.sft)
""",
    )
    assert reason == "budget: it asked for the scores of 65 responses instead of 64"


@pytest.mark.slow
def test_an_entry_that_reads_the_gold_function_is_refused(args) -> None:
    reason = refusal(args, "from data.tiny import gold_score\ndef train(world): return world.load(world.sft)\n")
    assert reason == "error: ModuleNotFoundError: No module named 'data'"


@pytest.mark.slow
def test_an_entry_cannot_read_files_outside_its_world_or_open_connections(args, world) -> None:
    """The gold function's source, the reward model and the evaluation's queries don't exist there."""
    for path in (Path(tiny.__file__), world / "rm/model.safetensors", world / "data/sft.validation.jsonl"):
        assert path.is_file()
        reason = refusal(args, f"def train(world): return open({str(path)!r}, 'rb')\n")
        assert reason.startswith("error: FileNotFoundError: [Errno 2]") and str(path) in reason
    reason = refusal(args, "import socket\ndef train(world): return socket.socket()\n")
    assert reason == "error: PermissionError: [Errno 1] Operation not permitted"


@pytest.mark.slow
def test_an_entry_past_its_time_or_memory_is_refused(args) -> None:
    slow = replace(args, minutes=0.5)
    assert refusal(slow, "def train(world): time.sleep(1000)\n") == "time: more than 0.5 minutes"
    greedy = replace(args, memory_mib=1500)
    reason = refusal(greedy, "def train(world):\n    while True: kept = torch.ones(2**31, dtype=torch.uint8)\n")
    assert reason == "memory" or reason.startswith("error: RuntimeError")


@pytest.mark.slow
def test_an_entry_must_return_a_policy_of_the_initial_shape(args) -> None:
    assert refusal(args, "def train(world): os._exit(0)\n") == "policy: train returned no policy"
    reason = refusal(
        args,
        """
from dataclasses import replace
from nanorlhf.model import GPT
def train(world): return GPT(replace(world.load(world.sft).config, n_layer=2))
""",
    )
    assert reason.startswith("policy: ")
    assert os.path.exists(args.out)
