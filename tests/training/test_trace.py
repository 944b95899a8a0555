"""--trace saves the run's tensors of a few responses, and doesn't change the run."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import train_grpo
import train_ppo
from nanorlhf.checkpoint import load_gpt
from nanorlhf.errors import InputError
from nanorlhf.logprobs import response_logprobs
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.sampler import Sampler
from nanorlhf.training.settings import SamplerSettings
from nanorlhf.training.trace import read_trace, read_traces, save_trace, trace_path, traced_updates, unwhitened_rewards
from tests.conftest import UNCLIPPED, interrupt_at, weights
from tests.helpers.two_processes import on_processes
from tests.test_train_ppo import policy_that_stops


@pytest.fixture(scope="module")
def ppo(miniature, tmp_path_factory):
    """Settings of a run that sometimes samples EOS: three updates of 8 responses, two epochs."""
    sft = str(policy_that_stops(miniature.root))
    return replace(miniature.ppo, sft=sft, out=tmp_path_factory.mktemp("ppo") / "run", trace=4, lr=1e-3)


@pytest.fixture(scope="module")
def traced(ppo):
    train_ppo.main(ppo)
    return read_traces(ppo.out)


def grpo_settings(ppo, out):
    return replace(
        train_grpo.RECIPES["tiny"][1],
        data=ppo.data, device="cpu", out=out, sft=ppo.sft, reward_model=ppo.reward_model, max_query_length=160,
        response_length=12, total_episodes=24, batch_size=12, micro_batch_size=4, num_epochs=2, samples_per_query=3,
    )  # fmt: skip


def same(a, b, exactly=True):
    """Assert that two traces have equal tensors and texts."""
    for (x, about), (y, other) in zip(a, b, strict=True):
        assert x.keys() == y.keys() and about["texts"] == other["texts"]
        for name in x:
            assert torch.equal(x[name], y[name]) if exactly else torch.allclose(x[name], y[name], atol=1e-4), name


def test_first_last_and_evenly_spread_updates_are_traced():
    assert traced_updates(1) == [0] and traced_updates(10) == list(range(10))
    updates = traced_updates(1000)
    assert updates[0] == 0 and updates[-1] == 999 and len(updates) == 10
    assert {b - a for a, b in zip(updates, updates[1:], strict=False)} == {111}


def test_a_file_per_traced_update_of_as_many_responses(ppo, traced):
    assert sorted(path.name for path in (ppo.out / "trace").iterdir()) == [
        f"update-0000000{i}.safetensors" for i in range(3)
    ]
    for update, (tensors, about) in enumerate(traced):
        assert about["update"] == update and len(about["texts"]) == len(tensors["index"]) == 4
        assert tensors["new_logprobs"].shape == tensors["new_values"].shape == (2, 4, 12)


def test_a_response_without_eos_is_traced_where_there_is_one(ppo, tmp_path):
    train_ppo.main(replace(ppo, out=tmp_path / "all", trace=8))
    train_ppo.main(replace(ppo, out=tmp_path / "some", trace=4))
    for (every, _), (subset, _) in zip(read_traces(tmp_path / "all"), read_traces(tmp_path / "some"), strict=True):
        assert subset["has_eos"].all() == every["has_eos"].all()
        kl = (every["logprobs"] - every["ref_logprobs"]).sum(1)
        assert {int(kl.argmax()), int(every["advantages"].abs().amax(1).argmax())} <= set(subset["index"].tolist())


def test_the_tensors_follow_from_each_other_in_float64(ppo, traced):
    """Compute rewards, GAE by brute force, and whitening with the saved statistics, from the models' outputs."""
    for tensors, about in traced:
        x = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
        for i in range(4):
            states, actions = tensors["states"][i], tensors["actions"][i]
            T, end = int(states.sum()), int(tensors["eos_index"][i])
            assert int(actions.sum()) == end + 1
            reward = [-about["kl_coef"] * float(x["logprobs"][i, t] - x["ref_logprobs"][i, t]) for t in range(end + 1)]
            reward += [0.0] * (T - end - 1)
            reward[int(tensors["score_index"][i])] += float(x["scores"][i])
            values = [float(v) for v in x["values"][i, :T]]
            deltas = [reward[t] + ppo.gamma * (values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)]
            for t in range(T):
                advantage = sum((ppo.gamma * ppo.lam) ** (s - t) * deltas[s] for s in range(t, T))
                assert reward[t] == pytest.approx(float(x["rewards"][i, t]), abs=1e-5)
                assert advantage == pytest.approx(float(x["raw_advantages"][i, t]), abs=1e-4)
                assert advantage + values[t] == pytest.approx(float(x["returns"][i, t]), abs=1e-4)
                if actions[t]:
                    white = (advantage - about["advantage_mean"]) / (about["advantage_var"] + 1e-8) ** 0.5
                    assert white == pytest.approx(float(x["advantages"][i, t]), abs=1e-4)


def test_the_first_epoch_begins_at_ratio_1_and_the_next_has_moved(traced):
    for tensors, _ in traced:
        gap = (tensors["new_logprobs"] - tensors["logprobs"]).abs() * tensors["actions"]
        assert gap[0].max() < 1e-4 < gap[1].max()
        assert torch.allclose(tensors["new_values"][0], tensors["values"] * tensors["states"], atol=1e-4)


def test_the_fixed_responses_are_read_by_each_policy(ppo, traced):
    """The initial policy at the first update; later updates still use the responses of the first one."""
    first, _ = traced[0]
    policy, tokenizer = load_gpt(ppo.sft), load_tokenizer(ppo.sft)
    policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    ids = torch.cat((first["query"], first["response"]), 1)
    real = torch.cat((first["query"] != tokenizer.pad_id, first["actions"]), 1)
    with torch.no_grad():
        expected, _ = response_logprobs(policy, ids, real, first["actions"], ppo.temperature)
    assert torch.allclose(first["fixed_logprobs"], expected, atol=1e-4)
    later = [tensors["fixed_logprobs"] for tensors, _ in traced[1:]]
    assert all((x != first["fixed_logprobs"]).any() and (x[~first["actions"]] == 0).all() for x in later)


def test_each_policy_answers_the_fixed_queries_anew(ppo, traced, tmp_path):
    """The first answers are the responses themselves; an unchanged policy repeats its answers."""
    assert traced[0][1]["answers"] == ["".join(texts).removesuffix("[EOS]") for texts in traced[0][1]["texts"]]
    assert traced[1][1]["answers"] != traced[2][1]["answers"] or traced[1][1]["answers"] != traced[0][1]["answers"]
    train_ppo.main(replace(ppo, out=tmp_path / "still", lr=0.0))
    _, second, third = (about["answers"] for _, about in read_traces(tmp_path / "still"))
    assert second == third and len(second) == 4


def test_tracing_changes_no_weight(ppo, traced, tmp_path):
    train_ppo.main(replace(ppo, out=tmp_path / "plain", trace=0))
    assert not (tmp_path / "plain" / "trace").exists()
    assert torch.equal(weights(load_gpt(tmp_path / "plain")), weights(load_gpt(ppo.out)))


def test_a_resumed_run_has_the_trace_of_an_uninterrupted_one(ppo, traced, tmp_path, monkeypatch):
    args = replace(ppo, out=tmp_path / "run", save_every=1)
    with monkeypatch.context() as patch:
        interrupt_at(3, patch, train_ppo.update_metrics, "log_update")  # after the trace of update 2, before its state
        with pytest.raises(KeyboardInterrupt):
            train_ppo.main(args)
    assert trace_path(args.out, 2).exists()
    train_ppo.main(replace(args, resume=True))
    same(read_traces(args.out), traced)


def test_overwrite_deletes_the_trace(ppo, tmp_path):
    args = replace(ppo, out=tmp_path / "run")
    train_ppo.main(args)
    train_ppo.main(replace(args, trace=0, total_episodes=8, overwrite=True))
    assert not (args.out / "trace").exists()


def test_micro_batches_do_not_change_the_trace(ppo, tmp_path):
    """Up to rounding; nothing is clipped, because a kink would amplify it."""
    traces = []
    for size in (8, 3):
        train_ppo.main(replace(ppo, **UNCLIPPED, out=tmp_path / str(size), micro_batch_size=size, lr=1e-5, trace=8))
        traces.append(read_traces(tmp_path / str(size)))
    same(*traces, exactly=False)


def test_grpo_traces_whole_groups(ppo, tmp_path):
    """4 responses are rounded up to two groups of 3; the advantages follow from each group's scores."""
    args = replace(grpo_settings(ppo, tmp_path / "grpo"), trace=4)
    train_grpo.main(args)
    for tensors, about in read_traces(args.out):
        assert about["algorithm"] == "grpo" and "values" not in tensors
        groups = (tensors["index"] // 3).view(2, 3)
        assert (groups == groups[:, :1]).all() and groups[0, 0] != groups[1, 0]
        scores = tensors["scores"].double().view(2, 3)
        expected = (scores - scores.mean(1, keepdim=True)) / (scores.var(1, correction=0, keepdim=True) + 1e-8).sqrt()
        assert torch.allclose(tensors["advantages"].double(), expected.view(6, 1).expand(6, 12), atol=1e-3)


def test_importance_weights_multiply_the_traced_advantages(ppo, tmp_path):
    sampler = SamplerSettings(correction="tis", dtype="bfloat16")
    train_ppo.main(replace(ppo, out=tmp_path / "tis", sampler=sampler, total_episodes=8))
    [(tensors, about)] = read_traces(tmp_path / "tis")
    white = (tensors["raw_advantages"] - about["advantage_mean"]) / (about["advantage_var"] + 1e-8) ** 0.5
    weight = (tensors["logprobs"] - tensors["sampled_logprobs"]).exp().clamp(max=2.0)
    expected = torch.where(tensors["actions"], white * weight, 0.0)
    assert torch.allclose(tensors["advantages"], expected, atol=1e-4)


def train_on(responses, args):
    """Run train_ppo, dropping all other responses of each rollout from the loss."""

    def correct(sampler, batch):
        batch.in_loss[[i for i in range(len(batch)) if i not in responses]] = False
        return 1.0, {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "correct", correct)
        train_ppo.main(args)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_response_that_no_step_read_has_no_numbers_and_shifts_no_epoch(ppo, tmp_path, processes):
    """Only one of 8 responses counts: one step per epoch uses it and a dropped one; the other steps are skipped."""
    args = replace(ppo, out=tmp_path / "run", num_minibatches=4, trace=8, num_ppo_epochs=3)
    if processes == 1:
        train_on([5], args)
    else:
        on_processes(partial(train_on, [5]), args, tmp_path)
    for tensors, _ in read_traces(args.out):
        read = ~tensors["new_logprobs"].isnan().any(2)  # (E, n)
        assert (read == ~tensors["new_values"].isnan().any(2)).all()
        assert read.sum(1).tolist() == [2, 2, 2] and read[:, 5].all()
        gap = ((tensors["new_logprobs"][:, 5] - tensors["logprobs"][5]).abs() * tensors["actions"][5]).amax(1)
        assert gap[0] < 1e-4 < gap[1] < gap[2]


def test_a_run_that_drops_every_response_ends_with_its_trace(ppo, tmp_path):
    args = replace(ppo, out=tmp_path / "run")
    train_on([], args)
    for tensors, _ in read_traces(args.out):
        assert tensors["new_logprobs"].shape == tensors["new_values"].shape == (2, 4, 12)
        assert tensors["new_logprobs"].isnan().all() and not tensors["in_loss"].any()


def test_reward_statistics_are_traced_only_where_rewards_are_whitened(ppo, traced, tmp_path):
    """Whitening the rewards with these statistics gives the run's rewards."""
    assert not [name for _, about in traced for name in about if name.startswith("reward_")]
    train_ppo.main(replace(ppo, out=tmp_path / "run", whiten_rewards=True))
    for tensors, about in read_traces(tmp_path / "run"):
        rewards = -about["kl_coef"] * (tensors["logprobs"].double() - tensors["ref_logprobs"]) * tensors["actions"]
        rewards[range(4), tensors["score_index"]] += tensors["scores"]
        mean, std = about["reward_mean"], (about["reward_var"] + 1e-8) ** 0.5
        expected = torch.where(tensors["states"], (rewards - mean) / std + mean, 0.0)
        assert torch.allclose(tensors["rewards"].double(), expected, atol=1e-5)


def test_rewards_are_a_tokens_own_minus_beta_times_kl_and_the_score_once():
    """A worked example: a response of two tokens, scored after them, and one of three, scored at its last token."""
    tensors = {
        "actions": torch.tensor([[True, True, False, False], [True, True, True, False]]),
        "logprobs": torch.tensor([[-1.0, -2.0, torch.nan, torch.nan], [-3.0, -1.0, -2.0, torch.nan]]),
        "ref_logprobs": torch.tensor([[-2.0, -2.5, torch.nan, torch.nan], [-1.0, -1.0, -4.0, torch.nan]]),
        "scores": torch.tensor([7.0, -5.0]),
        "score_index": torch.tensor([2, 2]),
        "token_rewards": torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 2.0, 0.0]]),
    }
    expected = [[-0.5, -0.25, 7.0, 0.0], [1.25, 0.0, -4.0, 0.0]]
    assert unwhitened_rewards(tensors, 0.5).tolist() == expected


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_whitens_the_returns_that_are_traced(ppo, tmp_path, gamma):
    """Checked against returns, mean and variance from a double loop in float64."""
    args = replace(grpo_settings(ppo, tmp_path / "run"), algorithm="reinforce++", gamma=gamma, trace=12)
    train_grpo.main(args)
    for tensors, about in read_traces(args.out):
        counted, rows = [], []
        for i, end in enumerate(tensors["eos_index"].tolist()):
            kl = (tensors["logprobs"][i].double() - tensors["ref_logprobs"][i]).tolist()
            rewards = [-args.kl_coef * kl[t] + (t == end) * tensors["scores"][i].item() for t in range(end + 1)]
            returns = [sum(gamma ** (s - t) * rewards[s] for s in range(t, end + 1)) for t in range(end + 1)]
            assert tensors["rewards"][i, : end + 1].tolist() == pytest.approx(rewards, abs=1e-5)
            assert tensors["returns"][i, : end + 1].tolist() == pytest.approx(returns, abs=1e-5)
            counted += returns
            rows.append(returns)
        mean = sum(counted) / len(counted)
        variance = sum((x - mean) ** 2 for x in counted) / len(counted)
        assert (about["return_mean"], about["return_var"]) == pytest.approx((mean, variance), abs=1e-5)
        for i, returns in enumerate(rows):
            expected = [(x - mean) / (variance + 1e-8) ** 0.5 for x in returns]
            assert tensors["advantages"][i, : len(returns)].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "fsdp"])
def test_two_processes_trace_what_one_does(ppo, tmp_path, shard):
    train_ppo.main(replace(ppo, **UNCLIPPED, out=tmp_path / "one", lr=1e-5, trace=8))
    args = replace(ppo, **UNCLIPPED, out=tmp_path / "two", lr=1e-5, trace=8, shard=shard)
    on_processes(train_ppo.main, args, tmp_path)
    same(read_traces(tmp_path / "one"), read_traces(tmp_path / "two"), exactly=False)


def test_more_responses_than_a_rollout_has_are_refused(ppo, tmp_path):
    with pytest.raises(InputError, match="--trace 9: a rollout has only --batch-size 8 responses"):
        train_ppo.main(replace(ppo, out=tmp_path / "run", trace=9))
    assert not (tmp_path / "run").exists()


def test_a_damaged_trace_is_named(ppo, traced, tmp_path):
    with pytest.raises(InputError, match="has no trace: train with --trace 4"):
        read_traces(tmp_path)
    path = tmp_path / "update-00000000.safetensors"
    path.write_bytes(trace_path(ppo.out, 0).read_bytes()[:100])
    with pytest.raises(InputError, match=r"update-00000000.safetensors: damaged \(.+\): delete it"):
        read_trace(path)
    tensors, about = traced[0]
    for missing, sentence in (
        ("scores", "missing tensor scores"),
        ("returns", "missing tensor returns"),
        ("update", "update"),
        ("algorithm", "algorithm"),
        ("texts", "texts"),
        ("advantage_var", "the field 'advantage_var' must be a number"),
    ):
        kept = {name: x for name, x in tensors.items() if name != missing}
        said = {name: x for name, x in about.items() if name != missing}
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "args.json").write_text(json.dumps({}))
        save_trace(tmp_path / "a" / "x.safetensors", kept, said)
        with pytest.raises(InputError, match=sentence):
            read_trace(tmp_path / "a" / "x.safetensors")
    for wrong, sentence in (
        ({"values": torch.zeros(2, 3)}, r"values: expected shape \(4, \d+\), got \(2, 3\)"),
        ({"new_values": tensors["new_values"][:1]}, r"new_values: expected shape .*, got \(1, "),
        ({"query": tensors["query"][:, 0]}, r"query: expected shape .*, got \(4,\)"),
        ({"scores": tensors["rewards"]}, r"scores: expected shape \(4,\), got"),
        ({"actions": tensors["actions"].float()}, "actions: expected bool, got float"),
        ({"response": tensors["response"].float()}, "response: expected int, got float"),
        ({"logprobs": tensors["actions"]}, "logprobs: expected float, got bool"),
        ({name: x[:0] if name.startswith("new_") else x for name, x in tensors.items()}, "has no epochs"),
        ({"eos_index": tensors["eos_index"] + 99}, "eos_index must be from 0 to 11"),
        ({"score_index": -1 - tensors["score_index"]}, "score_index must be from 0 to 11"),
        ({"actions": tensors["actions"] & False}, "a response has no first token"),
    ):
        save_trace(tmp_path / "a" / "x.safetensors", tensors | wrong, about)
        with pytest.raises(InputError, match=sentence):
            read_trace(tmp_path / "a" / "x.safetensors")
    for wrong, sentence in (
        ({"queries": [5] * 4}, r"'queries\[0\]' must be str, not int"),
        ({"texts": ["abc"] * 4}, r"'texts\[0\]' must be list, not str"),
        ({"texts": [[5]] * 4}, r"'texts\[0\]\[0\]' must be str, not int"),
        ({"texts": [["a"] * 13] * 4}, "texts must have at most 12 tokens per response"),
        ({"answers": ["a"]}, "answers must have 4 items"),
        ({"kl_coef": "x"}, "the field 'kl_coef' must be float, not str"),
        ({"kl_coef": 10**30}, "the field 'kl_coef' is an integer with more than 64 bits"),
    ):
        save_trace(tmp_path / "a" / "x.safetensors", tensors, about | wrong)
        with pytest.raises(InputError, match=sentence):
            read_trace(tmp_path / "a" / "x.safetensors")
    whitened = about | {"settings": about["settings"] | {"whiten_rewards": True}}
    save_trace(tmp_path / "a" / "x.safetensors", tensors, whitened)
    with pytest.raises(InputError, match="the field 'reward_mean' must be a number"):
        read_trace(tmp_path / "a" / "x.safetensors")
