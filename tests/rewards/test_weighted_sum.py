"""Combined rewards: the weighted sum, the names, the metrics, and errors before training."""

from dataclasses import replace

import pytest
import torch

import train_grpo
import train_ppo
from nanorlhf.checkpoint import load_gpt, load_scalar, save
from nanorlhf.dataset import load_demonstrations
from nanorlhf.doctor.diagnosis import read_and_examine_traces
from nanorlhf.errors import InputError
from nanorlhf.grpo import ALGORITHMS
from nanorlhf.reward_model import Scores
from nanorlhf.rewards.weighted_sum import Rewards, items, load_rewards, parse, scoring_models
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import update_metrics
from nanorlhf.training.checks import check_reward
from tests.conftest import read_metrics, weights
from tests.helpers.miniature_rlcf import Spy
from tests.rewards.letters import make_batch


class FixedReward:
    """A reward with preset scores."""

    models = ()

    def __init__(self, label, scores, token_rewards=None, applies=(True, True)):
        self.name, self.label = f"--reward {label}", label
        self.scores = torch.tensor(scores)
        self.token_rewards = torch.zeros(2, 4) if token_rewards is None else torch.tensor(token_rewards)
        self.applies = torch.tensor(applies)

    def score(self, batch):
        return Scores(self.scores, self.token_rewards, self.applies)

    def metrics(self):
        return {f"reward/{self.label}_extra": 1.0}


TOKENS = [[0.0, 1.0, 0.0, 2.0], [4.0, 0.0, 0.0, 0.0]]


def test_scores_and_rewards_per_token_are_weighted_sums():
    rewards = Rewards([FixedReward("a", [1.0, 2.0]), FixedReward("b", [0.5, 0.0], TOKENS)], [2.0, -0.5])
    scores, token_rewards = rewards.score(make_batch())
    assert scores.tolist() == [1.75, 4.0]
    assert token_rewards.tolist() == [[0.0, -0.5, 0.0, -1.0], [-2.0, 0.0, 0.0, 0.0]]


def test_a_metric_is_the_mean_before_the_weight_over_the_responses_that_the_reward_applies_to():
    partial = FixedReward("some", [0.0, 7.0], applies=(False, True))
    none = FixedReward("none", [0.0, 0.0], applies=(False, False))
    rewards = Rewards([FixedReward("b", [0.5, 0.0], TOKENS), partial, none], [0.0, 3.0, 1.0])
    scores, _ = rewards.score(make_batch())
    assert scores.tolist() == [0.0, 21.0]  # a reward that doesn't apply counts as 0
    metrics = rewards.metrics()
    assert metrics["reward/b"] == (3.5 + 4.0) / 2 and metrics["reward/some"] == 7.0 and "reward/none" not in metrics
    assert metrics["reward/none_extra"] == 1.0


def test_equal_names_are_numbered():
    names = ["score", "score", "rm", "score", "disagreement", "score_2"]
    rewards = Rewards([FixedReward(name, [0.0, 0.0]) for name in names], [1.0] * 6)
    labels = [reward.label for reward in rewards.rewards]
    assert labels == ["score", "score_2", "rm", "score_3", "disagreement_2", "score_2_2"]


def test_parse_returns_kind_and_path():
    kinds = {"a/b.py:f": "function", "rule.py": "function", "runs/rm": "model", "owner/name": "model"}
    assert all(parse(item) == (kind, item) for item, kind in kinds.items())
    assert parse("teacher:runs/sft") == ("teacher", "runs/sft") and parse("judge:j.toml") == ("judge", "j.toml")
    assert items(None) == () and items("a") == ("a",) and items(("a", "b")) == ("a", "b")


def test_a_reward_replaces_the_reward_model_and_only_models_are_read():
    models = scoring_models(("rule.py:f", "runs/rm", "teacher:runs/sft", "judge:j.toml"), "runs/other")
    assert [(flag, path) for flag, path, _ in models] == [("--reward", "runs/rm"), ("--reward", "runs/sft")]
    assert [path for _, path, _ in scoring_models(None, ("a", "b"))] == ["a", "b"]


@pytest.mark.parametrize(
    ("reward_model", "reward", "reward_weights", "sentence"),
    [
        (None, None, None, "--reward-model None leaves nothing to score with"),
        ("rm", ("a.py:f", "b.py:g"), (1.0,), r"--reward-weights 1: expected 2, one for each --reward\."),
        (("rm", "rm2"), None, (1.0, 2.0, 3.0), "--reward-weights 1 2 3: expected 2, one for each --reward-model"),
        ("rm", "a.py:f", "min", "--reward-weights min works with --reward-model only: with --reward, pass one weight"),
        ("rm", None, "mean", "--reward-weights mean needs several models in --reward-model"),
    ],
)
def test_weights_that_match_no_rewards_raise_input_error(reward_model, reward, reward_weights, sentence):
    with pytest.raises(InputError, match=sentence):
        check_reward(reward_model, reward, reward_weights)


def test_reward_models_with_weights_are_a_sum(miniature, tmp_path):
    tokenizer = load_tokenizer(miniature.root / "rm")
    paths = (str(miniature.root / "rm"), str(tmp_path / "rm"))
    other = load_scalar(paths[0])
    with torch.no_grad():
        other.score.weight.mul_(-2)
    save(other, paths[1], tokenizer)
    device = torch.device("cpu")
    both = load_rewards(None, paths, (1.0, 0.25), tokenizer, device, 2)
    first, second = (load_rewards(None, path, None, tokenizer, device, 2).score(make_batch())[0] for path in paths)
    assert torch.allclose(both.score(make_batch())[0], first + 0.25 * second, atol=1e-6) and not first.allclose(second)
    assert set(both.metrics()) == {"reward/rm", "reward/rm_2"}


# -------------------------------------------------------------------------------------------------- before training
FUNCTIONS = """
def answered(queries, responses, gold, records):
    assert all(record["meta"]["gold"] == number for record, number in zip(records, gold))
    return [number + len(text) for text, number in zip(responses, gold)]

def dense(queries, responses, response_ids):
    return [[0.01 * id for id in ids] for ids in response_ids]

def seldom(queries, responses):
    return [1.0 if "a" in text else None for text in responses]

def late(queries, responses, response_ids):
    return [0.0 if text == reference else [1.0] * len(ids)
            for text, reference, ids in zip(responses, REFERENCES, response_ids)]

def broken(queries, responses):
    return [float("nan")] * len(responses)

def asks(queries, responses, solution):
    return solution
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return lambda name: f"{path}:{name}"


def grpo_args(miniature, out, **changes):
    ppo = {name: getattr(miniature.ppo, name) for name in ("data", "device", "sft", "max_query_length", "reward_model")}
    args = replace(train_grpo.RECIPES["tiny"][1], **ppo, out=out, response_length=12, total_episodes=8, batch_size=8)
    return replace(args, micro_batch_size=4, num_epochs=1, samples_per_query=2, **changes)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"reinforce++"}))
def test_algorithms_that_compare_responses_refuse_rewards_per_token_before_training(
    miniature, functions, tmp_path, algorithm
):
    kl_coef = 0.0 if ALGORITHMS[algorithm].is_without_kl else 0.05
    args = grpo_args(miniature, tmp_path / "out", algorithm=algorithm, reward=functions("dense"), kl_coef=kl_coef)
    args = replace(args, missing_eos_score=None)
    sentence = f"my_rewards.py:dense returns rewards per token, but --algorithm {algorithm} compares whole responses"
    with pytest.raises(InputError, match=sentence):
        train_grpo.main(replace(args, num_minibatches=1))
    assert not args.out.exists()


def test_late_rewards_per_token_raise_input_error_at_the_rollout():
    rewards = Rewards([FixedReward("dense", [0.0, 0.0], TOKENS)], [1.0], whole_only="--algorithm rloo")
    with pytest.raises(InputError, match="--reward dense returns rewards per token, but --algorithm rloo compares"):
        rewards.score(make_batch())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", r"my_rewards.py:\d+ returned nan for the response"),
        ("asks", r"my_rewards.py:\d+ has the parameter 'solution', but no row .* \(fields: .*gold"),
        ("late", r"my_rewards.py:\d+ raises NameError"),
        ("nowhere", "doesn't define a function nowhere"),
    ],
)
def test_a_bad_function_is_refused_before_training(miniature, functions, tmp_path, name, sentence):
    args = replace(miniature.ppo, out=tmp_path / "out", reward=(functions("dense"), functions(name)))
    with pytest.raises(InputError, match=sentence):
        train_ppo.main(args)
    assert not args.out.exists()


# ------------------------------------------------------------------------------------------------------------- in a run
def test_three_rewards_at_once_in_ppo(miniature, functions, tmp_path, monkeypatch):
    """One reads a field of the row, one is per token, one is a reward model: sum, GAE, metrics and value model."""
    rollouts, gaes = Spy(monkeypatch, "rollout_metrics", update_metrics), Spy(monkeypatch, "gae", train_ppo)
    model_path = str(miniature.root / "rm")
    args = replace(
        miniature.ppo, out=tmp_path / "ppo", total_episodes=8, num_ppo_epochs=1, lr=0.0, score_at="last_token"
    )
    args = replace(
        args, reward=(functions("answered"), functions("dense"), model_path), reward_weights=(1.0, 0.2, -2.0)
    )
    args = replace(args, missing_eos_score=-3.0, whiten_rewards=False, reward_workers=1, trace=8)
    train_ppo.main(args)
    ((batch, scores, *_), _), ((rewards, *_), _) = rollouts.calls[0], gaes.calls[0]
    model, tokenizer = load_scalar(model_path), load_tokenizer(model_path)
    expected: dict[str, list[float]] = {"answered": [], "dense": [], "rm": []}
    whole = []
    for b in range(8):
        ids = batch.response[b][batch.actions[b]].tolist()
        expected["answered"].append(batch.records[b]["meta"]["gold"] + len(tokenizer.decode(ids)))
        expected["dense"].append(sum(0.01 * i for i in ids))
        expected["rm"].append(model(batch.query_response[b][batch.real[b]][None])[0, -1].item())
        score = -3.0
        if tokenizer.eos_id in ids:
            score = expected["answered"][b] - 2 * expected["rm"][b]
        assert scores[b].item() == pytest.approx(score, abs=1e-4)
        kl = batch.logprobs[b] - batch.ref_logprobs[b]
        for t, token in enumerate(ids):  # the score is at the last token
            reward = 0.2 * 0.01 * token - args.kl_coef * kl[t].item() + (t == len(ids) - 1) * score
            assert rewards[b, t].item() == pytest.approx(reward, abs=1e-4)
        assert (rewards[b, len(ids) :] == 0).all()
        whole.append(score + 0.2 * expected["dense"][b])
    (metrics,) = read_metrics(args.out)
    for name, values in expected.items():
        assert metrics[f"reward/{name}"] == pytest.approx(sum(values) / 8, rel=1e-4)
    assert metrics["objective/score"] == pytest.approx(sum(whole) / 8, rel=1e-4)
    rlhf_reward = metrics["objective/score"] - args.kl_coef * metrics["objective/kl"]
    assert metrics["objective/rlhf_reward"] == pytest.approx(rlhf_reward, rel=1e-4)
    assert torch.equal(weights(load_scalar(args.out / "value_model")), weights(model))  # [N+ 22] lr is 0
    assert read_and_examine_traces(args.out, tokenizer) == []  # the doctor counts rewards per token


def test_a_process_reward_in_reinforce_plus_plus(miniature, functions, tmp_path, monkeypatch):
    """A_t is the return from t on, of rewards per token and the final score, whitened over the batch."""
    spy = Spy(monkeypatch, "rollout_metrics", update_metrics)
    args = grpo_args(miniature, tmp_path / "out", algorithm="reinforce++", kl_coef=0.1, gamma=0.9)
    args = replace(args, reward=(functions("seldom"), functions("dense")), missing_eos_score=None, trace=8)
    train_grpo.main(args)
    ((batch, scores, *_), _) = spy.calls[0]
    tokenizer = load_tokenizer(args.sft)
    returns = []
    for b in range(8):
        ids = batch.response[b][batch.actions[b]].tolist()
        score = float("a" in tokenizer.decode(ids))
        assert scores[b].item() == score
        kl = (batch.logprobs[b] - batch.ref_logprobs[b]).tolist()
        rewards = [0.01 * token - 0.1 * kl[t] for t, token in enumerate(ids)]
        rewards[-1] += score
        returns.append([sum(0.9 ** (s - t) * r for s, r in enumerate(rewards) if s >= t) for t in range(len(ids))])
    flat = torch.tensor([x for row in returns for x in row], dtype=torch.float64)
    expected = (flat - flat.mean()) / flat.std(correction=0)
    assert torch.allclose(batch.advantages[batch.actions].double(), expected, atol=1e-3)
    (metrics,) = read_metrics(args.out)
    assert "reward/dense" in metrics and metrics.get("reward/seldom", 1.0) == 1.0
    assert read_and_examine_traces(args.out, tokenizer) == []


def test_no_value_model_starts_from_a_teacher(miniature, tmp_path):
    args = replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=8, num_ppo_epochs=1, lr=0.0)
    train_ppo.main(replace(args, reward=f"teacher:{miniature.root / 'sft'}"))
    trunk = load_scalar(args.out / "value_model").transformer
    assert torch.equal(weights(trunk), weights(load_gpt(miniature.root / "sft").transformer))


def test_functions_are_tried_on_the_references_of_two_rows(miniature, tmp_path):
    """The call is the same as in a rollout: texts, and ids with EOS."""
    path = tmp_path / "rule.py"
    path.write_text("seen = []\ndef score(*given, response_ids): seen.append((*given, response_ids)); return [0, 0]\n")
    tokenizer = load_tokenizer(miniature.root / "sft")
    rows = load_demonstrations(miniature.root / "data" / "sft.train.jsonl", tokenizer, None)
    rewards = load_rewards(f"{path}:score", None, None, tokenizer, torch.device("cpu"), 8, rows=rows)
    [(queries, responses, ids)] = rewards.rewards[0].function.function.__globals__["seen"]
    assert queries == [row.record["query"] for row in rows[:2]] and ids == [row.response for row in rows[:2]]
    assert responses == [row.record["response"] for row in rows[:2]] and ids[0][-1] == tokenizer.eos_id
