"""train_ppo.py end to end on a miniature: properties before, during and after an update."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import train_ppo
from nanorlhf import batch as batches
from nanorlhf import logprobs as readings
from nanorlhf.checkpoint import load_gpt, load_scalar, save
from nanorlhf.errors import InputError
from nanorlhf.logprobs import compared_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad
from nanorlhf.ppo import eos_masks
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from nanorlhf.training import optimizer, sampler, update_metrics
from nanorlhf.training.run import TIME_METRICS
from nanorlhf.training.settings import SamplerSettings
from tests.conftest import GPU, TINY, UNCLIPPED, interrupt_at, read_metrics
from tests.helpers.miniature_rlcf import Spy
from tests.test_train_sft import gradients  # noqa: F401  a fixture
from train_ppo import response_logprobs, response_values

EOS, PAD = 1, 99


@pytest.fixture(scope="module")
def miniature(miniature):
    """The miniature with a policy that sometimes samples EOS; otherwise masks would have no effect."""
    return replace(miniature, ppo=replace(miniature.ppo, sft=str(policy_that_stops(miniature.root))))


def policy_that_stops(root):
    """Copy the SFT policy with EOS raised to a probability of about 0.1 at each token."""
    policy, tokenizer = load_gpt(root / "sft"), load_tokenizer(root / "sft")
    direction = torch.randn(policy.config.d_model, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    with torch.no_grad():
        policy.transformer.norm.bias.add_(4 * direction)
        policy.lm_head.weight[tokenizer.eos_id].add_(0.5 * direction)
    save(policy, root / "sft_that_stops", tokenizer)
    return root / "sft_that_stops"


def spy_on(monkeypatch, name) -> Spy:
    """Record calls of a function of the script, and of the functions it calls to sample, to read and to log.

    `rollout_metrics` is called with a rollout's batch, scores after the EOS trick, exact KL, gold scores and beta.
    """
    return Spy(monkeypatch, name, train_ppo, update_metrics, sampler, readings, batches)


def small_rollout(model):
    query = left_pad([[5, 6, 7, 8], [9], [10, 11]], PAD)
    response = torch.tensor([[12, 13, EOS, PAD], [14, 15, 16, 17], [EOS, PAD, PAD, PAD]])
    _, actions, states = eos_masks(response, EOS, PAD)
    qr = torch.cat((query, response), dim=1)
    return qr, torch.cat((query != PAD, actions), dim=1), actions, states


@pytest.mark.parametrize("positions", ["rotary_half", "learned"])
def test_left_padding_does_not_change_the_logprobs_of_a_response(tiny_gpt, positions):
    """Learned positions (GPT-2) would shift with the padding; rotary positions would hide the shift."""
    if positions == "learned":
        tiny_gpt = GPT(replace(TINY, positions="learned", rotary_dim=0))
        torch.nn.init.normal_(tiny_gpt.transformer.positions.weight)
    qr, mask, actions, _ = small_rollout(tiny_gpt)
    qr, mask = F.pad(qr, (1, 0), value=PAD), F.pad(mask, (1, 0))  # queries are wider than responses
    logprobs, entropy = response_logprobs(tiny_gpt, qr, mask, actions, 0.7)
    for b in range(3):
        row = qr[b][mask[b]].tolist()
        n = int(actions[b].sum())
        table = (tiny_gpt.logits(tiny_gpt(torch.tensor([row])))[0].double() / 0.7).log_softmax(-1)[-n - 1 : -1]
        assert torch.allclose(logprobs[b, :n].double(), table[range(n), row[-n:]], atol=1e-5)
        assert torch.allclose(entropy[b, :n].double(), -(table.exp() * table).sum(-1), atol=1e-5)
        assert (logprobs[b, n:] == 0).all() and (entropy[b, n:] == 0).all()


def test_logprobs_and_entropies_have_the_gradients_of_rows_without_padding(tiny_gpt):
    model = tiny_gpt.double()
    qr, mask, actions, _ = small_rollout(model)
    coefficients = torch.randn(2, *actions.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    expected = 0.0
    for b in range(3):
        row, n = qr[b][mask[b]].tolist(), int(actions[b].sum())
        table = (model.logits(model(torch.tensor([row])))[0] / 0.7).log_softmax(-1)[-n - 1 : -1]
        terms = torch.stack((table[range(n), row[-n:]], -(table.exp() * table).sum(-1)))
        expected = expected + (coefficients[:, b, :n] * terms).sum()
    total = (coefficients * torch.stack(response_logprobs(model, qr, mask, actions, 0.7))).sum()
    slopes = [torch.autograd.grad(x, list(model.parameters())) for x in (total, expected)]
    assert all(torch.allclose(*pair, atol=1e-10) for pair in zip(*slopes, strict=True))


def test_two_policies_are_compared_by_the_whole_distribution_of_each_token(tiny_gpt):
    """Expected from each row without padding in float64: log p, log q, and sum_v p_v (log p_v - log q_v)."""
    ref_policy = GPT(replace(TINY, head_bias=True, logit_cap=3.0))
    for parameter in ref_policy.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    qr, mask, actions, _ = small_rollout(tiny_gpt)
    qr, mask = F.pad(qr, (1, 0), value=PAD), F.pad(mask, (1, 0))  # queries are wider than responses
    logprobs, ref_logprobs, kl = compared_logprobs(tiny_gpt, ref_policy, qr, mask, actions, 0.7)
    assert logprobs.requires_grad and not kl.requires_grad
    for b in range(3):
        row, n = qr[b][mask[b]].tolist(), int(actions[b].sum())
        log_p, log_q = (
            (model.logits(model(torch.tensor([row])))[0].double() / 0.7).log_softmax(-1)[-n - 1 : -1]
            for model in (tiny_gpt, ref_policy)
        )
        exact = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert exact.min() > 0.01
        pairs = (logprobs, log_p[range(n), row[-n:]]), (ref_logprobs, log_q[range(n), row[-n:]]), (kl, exact)
        for actual, expected in pairs:
            assert torch.allclose(actual[b, :n].double(), expected, atol=1e-5) and (actual[b, n:] == 0).all()


def test_value_t_is_read_at_the_state_before_token_t_and_the_last_one_at_eos(miniature):
    model = load_scalar(miniature.root / "rm")
    qr, mask, _, states = small_rollout(model)
    values = response_values(model, qr, mask, states)
    row = model(torch.tensor([[5, 6, 7, 8, 12, 13, EOS]]))[0]
    assert torch.allclose(values[0], row[3:7], atol=1e-5)  # before 12, before 13, before EOS, at EOS
    assert values[2, 1].item() != 0 and (values[2, 2:] == 0).all()


def test_the_ratio_of_the_first_minibatch_is_one(miniature, monkeypatch):
    """The sampler uses left padding, a KV cache and a temperature other than 1."""
    spy = spy_on(monkeypatch, "policy_loss")
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True, temperature=0.7))
    for (new_logprobs, logprobs, _, actions, *_), _ in spy.calls[:2]:  # two micro-batches before the first step
        assert ((new_logprobs - logprobs).exp() - 1).abs()[actions].max() < 1e-5
    (metrics,) = read_metrics(miniature.root / "ppo")
    assert metrics["policy/first_ratio_error"] < 1e-5
    assert metrics["policy/sampler_gap"] < 1e-4 and 0 < metrics["eos_rate"] < 1


def test_logprobs_of_the_sampler_are_used_on_request(miniature, monkeypatch):
    losses, recomputed, rollouts = (spy_on(monkeypatch, n) for n in ("policy_loss", "read_logprobs", "rollout_metrics"))
    args = replace(
        miniature.ppo,
        total_episodes=8,
        overwrite=True,
        micro_batch_size=8,
        sampler=SamplerSettings(correction="sampler_logprobs"),
    )
    train_ppo.main(args)
    ((batch, *_), _), ((_, old, *_), _) = rollouts.calls[0], losses.calls[0]
    assert batch.ratio_to is batch.sampled_logprobs and batch.logprobs is recomputed.calls[0][1][0]
    assert not torch.equal(batch.ratio_to, batch.logprobs)
    as_set = [sorted(map(tuple, x[:, : old.size(1)].tolist())) for x in (old, batch.ratio_to)]
    assert as_set[0] == as_set[1]


@pytest.mark.parametrize("score_at", ["after_eos", "last_token"])
@pytest.mark.parametrize("whitened", [False, True])
def test_rewards_are_the_kl_penalty_at_each_token_and_the_score_once(miniature, monkeypatch, score_at, whitened):
    """Expected from a double loop in float64, far from the reference [N+ 23, 24], then GAE by its definition."""
    estimates, rollouts = spy_on(monkeypatch, "gae"), spy_on(monkeypatch, "rollout_metrics")
    losses, value_losses = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "value_loss")
    train_ppo.main(
        replace(
            miniature.ppo, total_episodes=16, overwrite=True, lr=1e-3, kl_coef=3.0, score_at=score_at, gamma=0.9,
            whiten_rewards=whitened, micro_batch_size=8, num_ppo_epochs=1, missing_eos_score=-3.0, response_length=7,
        )
    )  # fmt: skip
    ((rewards, values, gamma, lam, _), _), ((batch, scores, *_), _) = estimates.calls[1], rollouts.calls[1]
    eos_id, T = load_tokenizer(miniature.root / "sft").eos_id, rewards.size(1)
    expected, states = torch.zeros(8, T, dtype=torch.float64), torch.zeros(8, T, dtype=torch.bool)
    actions, kl = torch.zeros(8, T, dtype=torch.bool), 0.0
    for b, ids in enumerate(batch.response.tolist()):
        end = ids.index(eos_id) if eos_id in ids else T - 1
        for t in range(end + 1):
            expected[b, t] = -3.0 * (batch.logprobs[b, t].item() - batch.ref_logprobs[b, t].item())
            kl += abs(expected[b, t].item())
        due = end if score_at == "last_token" else min(end + 1, T - 1)
        expected[b, due] += scores[b].item()
        assert (scores[b].item() == -3.0) == (eos_id not in ids)
        states[b, : due + 1] = True
        actions[b, : end + 1] = True
    assert kl > 0.1 and 0 < (scores == -3.0).sum() < 8
    if whitened:
        mean, std = expected[states].mean(), (expected[states].var(correction=0) + 1e-8).sqrt()
        expected = torch.where(states, (expected - mean) / std + mean, 0.0)
    assert torch.allclose(rewards.double(), expected, atol=1e-4)
    assert torch.equal(batch.states, states) and torch.equal(batch.actions, actions)

    advantages = torch.zeros(8, T, dtype=torch.float64)
    for b in range(8):
        last = int(states[b].sum()) - 1
        for t in range(last + 1):
            for s in range(t, last + 1):
                after = values[b, s + 1].item() if s < last else 0.0
                delta = expected[b, s].item() + gamma * after - values[b, s].item()
                advantages[b, t] += (gamma * lam) ** (s - t) * delta
    returns = torch.where(states, advantages + values.double(), 0.0)
    assert torch.allclose(batch.returns.double(), returns, atol=1e-4)
    advantages = (advantages - advantages[actions].mean()) / advantages[actions].std(correction=0)
    advantages = torch.where(actions, advantages, 0.0)
    assert torch.allclose(batch.advantages.double(), advantages, atol=1e-3)
    for spy, whole in ((losses, batch.advantages), (value_losses, batch.returns)):  # and the update trains on them
        used = spy.calls[1][0][2]
        by_row = sorted(map(tuple, used.tolist())), sorted(map(tuple, whole[:, : used.size(1)].tolist()))
        assert by_row[0] == by_row[1]


def test_a_dropped_response_reaches_no_loss_and_a_minibatch_of_them_is_skipped(miniature, monkeypatch):
    """With `in_loss` False, the gradient is the same as without the rows; a minibatch without actions takes no step."""
    plain = train_ppo.Sampler.correct
    dropped = [0, 2, 3]

    def correct(self, batch):
        batch.in_loss[dropped] = False
        return plain(self, batch)

    losses, value_losses = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "value_loss")
    monkeypatch.setattr(train_ppo.Sampler, "correct", correct)
    args = replace(miniature.ppo, total_episodes=8, overwrite=True, micro_batch_size=8, num_ppo_epochs=1)
    train_ppo.main(args)
    for spy in (losses, value_losses):
        ((*_, mask, _), (lost, _)), *_ = spy.calls
        kept = mask.any(1)
        assert kept.sum() == 5 and (lost[~kept] == 0).all() and (lost[kept] != 0).any()
    (metrics,) = read_metrics(args.out)
    counted = losses.calls[0][0][3].sum().item()
    assert metrics["policy/loss"] == pytest.approx(losses.calls[0][1][0].sum().item() / counted, abs=1e-6)
    dropped = list(range(8))
    before = len(losses.calls)
    train_ppo.main(args)
    assert len(losses.calls) == before and "policy/loss" not in read_metrics(args.out)[0]
    initial_policy, final_policy = load_gpt(args.sft), load_gpt(args.out)
    assert all(torch.equal(a, b) for a, b in zip(initial_policy.parameters(), final_policy.parameters(), strict=True))


def test_the_logged_statistics_equal_a_recount_of_the_unpadded_rows(miniature, monkeypatch):
    rollouts = spy_on(monkeypatch, "rollout_metrics")
    losses, value_losses = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "value_loss")
    args = replace(miniature.ppo, total_episodes=8, overwrite=True, num_ppo_epochs=2, micro_batch_size=8, lr=3e-3)
    train_ppo.main(args)
    (metrics,) = read_metrics(miniature.root / "ppo")
    (batch, scores, _, _, beta), _ = rollouts.calls[0]
    response, logprobs, ref_logprobs = batch.response, batch.logprobs, batch.ref_logprobs
    tokenizer = load_tokenizer(miniature.root / "sft")
    kl = k3 = entropy = length = states = 0.0
    for b, ids in enumerate(response.tolist()):
        n = ids.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in ids else len(ids)
        length += n
        states += min(n + 1, len(ids))
        for t in range(n):
            difference = (logprobs[b, t] - ref_logprobs[b, t]).item()
            kl += difference
            k3 += math.exp(-difference) - 1 + difference
            entropy -= logprobs[b, t].item()
    # each of the two epochs is one minibatch of all rows, in a different order
    clipped = ratios = approx_kl = pg_loss = vf_loss = vf_clipped = 0.0
    for (new_logprobs, old_logprobs, advantages, actions, *_), _ in losses.calls:
        for b, t in actions.nonzero().tolist():
            log_ratio, advantage = (new_logprobs - old_logprobs)[b, t].item(), advantages[b, t].item()
            ratios += math.exp(log_ratio) / 2
            approx_kl += 0.5 * log_ratio**2 / 2
            bounded = min(max(math.exp(log_ratio), 0.8), 1.2)
            pg_loss += max(-advantage * math.exp(log_ratio), -advantage * bounded) / 2
            clipped += (-advantage * bounded > -advantage * math.exp(log_ratio)) / 2
    for (new_values, values, returns, state_mask, *_), _ in value_losses.calls:
        for b, t in state_mask.nonzero().tolist():
            new, old, target = (x[b, t].item() for x in (new_values, values, returns))
            bounded = min(max(new, old - 0.2), old + 0.2)
            vf_loss += 0.5 * max((new - target) ** 2, (bounded - target) ** 2) / 2
            vf_clipped += ((bounded - target) ** 2 > (new - target) ** 2) / 2
    close = {"rel": 1e-6, "abs": 1e-5}
    assert metrics["objective/kl"] == pytest.approx(kl / 8, **close)
    assert metrics["objective/kl_k3"] == pytest.approx(k3 / 8, **close)
    assert metrics["objective/entropy"] == pytest.approx(entropy / 8, **close)
    assert metrics["objective/non_score_reward"] == pytest.approx(-beta * kl / 8, **close)
    assert metrics["objective/score"] == pytest.approx(scores.mean().item(), **close)
    assert metrics["objective/rlhf_reward"] == pytest.approx(scores.mean().item() - beta * kl / 8, **close)
    assert metrics["response_length"] == pytest.approx(length / 8, **close)
    assert metrics["policy/ratio"] == pytest.approx(ratios / length, **close)
    assert metrics["policy/approx_kl"] == pytest.approx(approx_kl / length, **close)
    assert metrics["policy/clip_fraction"] == pytest.approx(clipped / length, **close) and clipped > 0
    assert metrics["policy/loss"] == pytest.approx(pg_loss / length, **close)
    assert metrics["value/loss"] == pytest.approx(vf_loss / states, **close)
    assert metrics["value/clip_fraction"] == pytest.approx(vf_clipped / states, **close)
    assert metrics["eos_rate"] == sum(tokenizer.eos_id in ids for ids in response.tolist()) / 8
    assert 0 < metrics["eos_rate"] < 1 and length < 8 * 12  # rows that end early, and rows that don't end


def test_the_logged_kl_is_the_sum_over_a_responses_tokens(miniature, monkeypatch):
    """Recompute k1 and k3 from the log-probabilities in the second update, where policy and reference differ.

    An adaptive coefficient follows this KL.
    """
    spy, followed = spy_on(monkeypatch, "rollout_metrics"), []
    monkeypatch.setattr(train_ppo.KLCoefficient, "update", lambda control, *arguments: followed.append(arguments))
    train_ppo.main(replace(miniature.ppo, total_episodes=16, overwrite=True, lr=3e-3, kl_target=0.5))
    (batch, *_), _ = spy.calls[1]
    logprobs, ref_logprobs, eos_index = batch.logprobs, batch.ref_logprobs, batch.eos_index
    kl = k3 = 0.0
    for b, end in enumerate(eos_index.tolist()):
        for t in range(end + 1):
            difference = (logprobs[b, t] - ref_logprobs[b, t]).item()
            kl, k3 = kl + difference, k3 + math.exp(-difference) - 1 + difference
    metrics = read_metrics(miniature.root / "ppo")[1]
    assert metrics["objective/kl"] == pytest.approx(kl / 8, abs=1e-4) and abs(kl / 8) > 1e-2
    assert metrics["objective/kl_k3"] == pytest.approx(k3 / 8, abs=1e-4)
    assert followed[1] == (metrics["objective/kl"], 8)


def test_the_logged_entropy_equals_the_policys_over_counted_tokens(miniature, monkeypatch):
    """The entropy is over the whole vocabulary, at the sampling temperature, before the first step, without padding."""
    written = spy_on(monkeypatch, "sample")
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True, num_ppo_epochs=1))
    query, response = written.calls[0][1].query, written.calls[0][1].response
    policy, tokenizer = load_gpt(miniature.ppo.sft), load_tokenizer(miniature.ppo.sft)
    total = count = 0.0
    for q, r in zip(query.tolist(), response.tolist(), strict=True):
        q, r = ([i for i in ids if i != tokenizer.pad_id] for ids in (q, r))
        table = (policy.logits(policy(torch.tensor([q + r])))[0, len(q) - 1 : -1].double() / 0.7).log_softmax(-1)
        total -= (table.exp() * table).sum().item()
        count += len(r)
    (metrics,) = read_metrics(miniature.root / "ppo")
    assert metrics["policy/entropy"] == pytest.approx(total / count, abs=1e-4) and count < 8 * 12


def test_no_model_of_a_run_has_dropout(miniature, monkeypatch):
    """With dropout, the sampling policy would differ from the trained one: a ratio other than 1 and a noisy KL."""
    spies = [spy_on(monkeypatch, name) for name in ("compared_logprobs", "response_values")]
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True, num_ppo_epochs=1))
    arguments = [argument for spy in spies for call in spy.calls for argument in call[0]]
    models = {id(model): model for model in arguments if isinstance(model, torch.nn.Module)}.values()
    assert len(models) == 3  # policy, reference, value model; the reward model is the value model's class
    assert not [m for model in models for m in model.modules() if "dropout" in type(m).__name__.lower()]


def test_a_missing_eos_replaces_the_score_and_does_not_subtract_from_it(miniature, monkeypatch, tmp_path):
    """It checks the truncated response for the tokenizer's EOS, after the reward model's bias is applied. [N+ 23]"""
    rule = tmp_path / "rule.py"
    rule.write_text("def score(queries, responses): return [7.0] * len(responses)\n")
    spy = spy_on(monkeypatch, "rollout_metrics")
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True, response_length=12, reward=f"{rule}:score"))
    eos_id = load_tokenizer(miniature.root / "sft").eos_id
    (batch, scores, *_), _ = spy.calls[0]
    response = batch.response
    expected = [7.0 if eos_id in ids else -1.0 for ids in response.tolist()]
    assert scores.tolist() == expected and set(expected) == {-1.0, 7.0}
    spy.calls.clear()
    train_ppo.main(
        replace(miniature.ppo, total_episodes=8, overwrite=True, reward=f"{rule}:score", missing_eos_score=None)
    )
    assert spy.calls[0][0][1].tolist() == [7.0] * 8


def test_a_rule_needs_only_prompts(miniature, tmp_path, monkeypatch):
    """A reward function gets the rows' fields, and is called on one text before training."""
    (tmp_path / "sft.train.jsonl").write_text(
        "".join(json.dumps({"query": f"Tell {i}:", "meta": {"answer": i}}) + "\n" for i in range(8))
    )
    rule = tmp_path / "rule.py"
    rule.write_text(
        "def score(queries, responses, answer): return [n + 0 * ord(r[:1] or ' ') for n, r in zip(answer, responses)]"
    )
    spy = spy_on(monkeypatch, "rollout_metrics")
    train_ppo.main(
        replace(
            miniature.ppo, data=tmp_path, out=tmp_path / "ppo", total_episodes=8, reward=f"{rule}:score",
            missing_eos_score=None, gold=None,
        )
    )  # fmt: skip
    batch, scores, *_ = spy.calls[0][0]
    assert scores.tolist() == [record["meta"]["answer"] for record in batch.records]
    assert sorted(scores.tolist()) == [*range(8)]


def test_values_and_rewards_after_the_end_do_not_move_the_advantages(miniature, monkeypatch):
    """Poison every state after the end: its value must not be used for bootstrapping."""
    spy = spy_on(monkeypatch, "gae")
    args = replace(miniature.ppo, total_episodes=8, overwrite=True)
    train_ppo.main(args)
    clean = spy.calls[0][1][0]
    assert (clean[:, -1] == 0).any() and (clean[:, -1] != 0).any()  # rows that end early, and rows that don't
    plain = ScalarModel.forward

    def poisoned(model, ids, mask=None, last=None, **rest):
        scores = plain(model, ids, mask, last=last, **rest)
        return scores if mask is None else torch.where(mask[:, -last:], scores, 1e6)  # None: no padding

    monkeypatch.setattr(ScalarModel, "forward", poisoned)
    spy.calls.clear()
    train_ppo.main(args)
    assert torch.equal(spy.calls[0][1][0], clean)


def test_the_rollout_stays_frozen_over_the_epochs(miniature, monkeypatch):
    """Advantages, returns and old logprobs are computed once per rollout, not per epoch, and don't change in place."""
    policy, value, advantage = (spy_on(monkeypatch, name) for name in ("policy_loss", "value_loss", "gae"))
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True, micro_batch_size=8, num_ppo_epochs=3))
    assert len(advantage.calls) == 1 and len(policy.calls) == 3

    def rows(tensor):  # minibatches are shuffled, so compare sets of rows
        return sorted(map(tuple, tensor.tolist()))

    for spy in (policy, value):
        for position in (1, 2):
            first, *rest = [rows(call[0][position]) for call in spy.calls]
            assert all(other == first for other in rest)


def test_the_value_model_learns_the_returns(miniature, monkeypatch):
    value, advantage = spy_on(monkeypatch, "value_loss"), spy_on(monkeypatch, "gae")
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True, micro_batch_size=8, num_ppo_epochs=1))
    ((_, _, targets, state_mask, *_), _), returns = value.calls[0], advantage.calls[0][1][1]
    assert state_mask.sum() > 8 and sorted(map(tuple, targets.tolist())) == sorted(
        map(tuple, returns[:, : targets.size(1)].tolist())
    )


def test_the_batch_straddles_the_end_of_the_queries_and_every_query_comes_before_one_comes_twice(
    miniature, monkeypatch
):
    spy, rollouts = spy_on(monkeypatch, "batch_indices"), spy_on(monkeypatch, "rollout_metrics")
    train_ppo.main(replace(miniature.ppo, total_episodes=72, overwrite=True, num_ppo_epochs=1, batch_size=24))
    exact = [row["objective/kl_exact"] for row in read_metrics(miniature.ppo.out)]
    assert exact == pytest.approx([exact_kl.sum().item() / 24 for (_, _, exact_kl, *_), _ in rollouts.calls])
    assert exact[0] < 1e-6 < exact[2]
    seen = [i for _, indices in spy.calls for i in indices]
    assert len(seen) == 72 and sorted(seen[:64]) == list(range(64))


@pytest.mark.parametrize(("num_minibatches", "clips"), [(1, UNCLIPPED), (2, UNCLIPPED), (1, {})])
def test_the_micro_batch_size_does_not_change_the_gradient(miniature, gradients, num_minibatches, clips):  # noqa: F811
    """Neither does the number of responses sampled at once. The responses have different lengths.

    Equal up to rounding: in all steps without clipping, in the first step with it. After an AdamW step, one gradient
    may differ by more, because a gradient near 0 moves its weight by the learning rate in the direction of its sign.
    """
    args = replace(miniature.ppo, total_episodes=8, num_minibatches=num_minibatches, value_coef=1.0, **clips)
    args, runs = replace(args, out=miniature.root / "ppo_micro", overwrite=True), []
    for size in (1, 2, 3, 8):
        gradients.clear()
        train_ppo.main(replace(args, micro_batch_size=size))
        runs.append(torch.stack(gradients))
    assert len(runs[0]) == 2 * num_minibatches and runs[0].abs().max() > 1e-2
    for steps in runs[:-1]:
        for step in range(len(steps) if clips else 1):
            assert (steps[step] - runs[-1][step]).norm() < 5e-5 * runs[-1][step].norm()


@pytest.mark.parametrize("change", [{}, {"offload": True}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_gradient_on_a_device_equals_float32_on_a_cpu(miniature, gradients, monkeypatch, device, change):  # noqa: F811
    """Both use the same responses, because rounding could flip a token and change the update."""
    args = replace(miniature.ppo, total_episodes=8, num_ppo_epochs=1, value_coef=1.0)
    args, written = replace(args, out=miniature.root / "ppo_device", overwrite=True), spy_on(monkeypatch, "generate")
    train_ppo.main(args)
    ((_, result),) = written.calls
    monkeypatch.setattr(sampler, "generate", lambda model, query, *_, **__: tuple(x.to(query.device) for x in result))
    train_ppo.main(replace(args, device=device, micro_batch_size=3, **change))
    expected, actual = (gradient.double().cpu() for gradient in gradients)
    assert expected.abs().max() > 1e-2
    assert (actual - expected).norm() < (0.05 if "dtype" in change else 1e-4) * expected.norm()


def test_trimming_micro_batches_changes_no_gradient(miniature, gradients, monkeypatch):  # noqa: F811
    """Each micro-batch is trimmed to its longest query and response; compare with keeping every column.

    Equal up to rounding, without clipping.
    """
    args = replace(miniature.ppo, total_episodes=8, out=miniature.root / "ppo_trim", overwrite=True)
    args = replace(args, micro_batch_size=3, value_coef=1.0, **UNCLIPPED)
    spy = spy_on(monkeypatch, "response_logprobs")
    train_ppo.main(args)
    widths = {(ids.size(1), actions.size(1)) for (_, ids, _, actions, _), _ in spy.calls}
    assert len(widths) > 1 and any(t < 12 for _, t in widths)
    trimmed = torch.stack(gradients)

    def untrimmed(batch, index):
        subset, rows = copy.copy(batch), torch.arange(len(batch))[index]
        for name, value in vars(batch).items():
            setattr(subset, name, [value[i] for i in rows.tolist()] if name == "records" else value[rows])
        return subset

    monkeypatch.setattr(batches.Batch, "__getitem__", untrimmed)
    gradients.clear()
    train_ppo.main(args)
    assert trimmed.abs().max() > 1e-2 and torch.allclose(trimmed, torch.stack(gradients), atol=1e-5)


def test_the_value_model_starts_as_the_reward_model(miniature, monkeypatch):
    spy = spy_on(monkeypatch, "response_values")
    train_ppo.main(replace(miniature.ppo, total_episodes=8, overwrite=True))
    (_, qr, mask, states), values = spy.calls[0]
    reward_model = load_scalar(miniature.root / "rm")
    with torch.no_grad():
        expected = response_values(reward_model, qr, mask, states)
    assert torch.allclose(values, expected, atol=1e-6) and reward_model.reward_bias != 0


def test_a_trained_value_model_continues_learning(miniature, monkeypatch, tmp_path):
    """The first values of a second run use its head, and that run changes it."""
    first, second = tmp_path / "first", tmp_path / "second"
    train_ppo.main(replace(miniature.ppo, total_episodes=16, out=first))
    spy = spy_on(monkeypatch, "response_values")
    train_ppo.main(replace(miniature.ppo, total_episodes=8, out=second, value_model=str(first / "value_model")))
    (_, qr, mask, states), values = spy.calls[0]
    before, after = (load_scalar(out / "value_model") for out in (first, second))
    with torch.no_grad():
        assert torch.allclose(values, response_values(before, qr, mask, states), atol=1e-6)
        assert (response_values(after, qr, mask, states) - values)[states].abs().max() > 1e-3


def test_a_gold_model_is_logged_and_changes_nothing(miniature, tmp_path):
    args = replace(miniature.ppo, total_episodes=16, missing_eos_score=None, gold=None)
    train_ppo.main(replace(args, out=tmp_path / "without"))
    train_ppo.main(replace(args, out=tmp_path / "with", gold=str(miniature.root / "rm")))
    rows = zip(read_metrics(tmp_path / "without"), read_metrics(tmp_path / "with"), strict=True)
    for without, with_gold in rows:  # the reward model itself is the gold model, so the two scores are the same
        gold = with_gold.pop("gold_score")
        assert gold == pytest.approx(with_gold["objective/score"], abs=1e-5) and abs(gold) > 1e-3
        zeros = dict.fromkeys(TIME_METRICS, 0)
        assert without | zeros == with_gold | zeros
    other = train_tokenizer(["another vocabulary"], 300)
    save(ScalarModel(replace(TINY, vocab_size=other.vocab_size)), tmp_path / "foreign", other)
    with pytest.raises(InputError, match="--gold .*foreign: its tokenizer differs from"):
        train_ppo.main(replace(args, out=tmp_path / "both", gold=str(tmp_path / "foreign")))


def test_resuming_equals_the_uninterrupted_run(miniature, monkeypatch):
    """Equal to the last bit."""
    args = replace(miniature.ppo, total_episodes=32, save_every=2, gold="data/tiny.py:gold_score", kl_target=0.01)
    whole = replace(args, out=miniature.root / "ppo_whole", overwrite=True)
    train_ppo.main(whole)
    broken = replace(args, out=miniature.root / "ppo_broken", overwrite=True)
    interrupt_at(4, monkeypatch, train_ppo, "gae")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    train_ppo.main(replace(broken, overwrite=False, resume=True))
    for a, b in zip(load_gpt(whole.out).parameters(), load_gpt(broken.out).parameters(), strict=True):
        assert torch.equal(a, b)
    kept = [{k: v for k, v in row.items() if k not in TIME_METRICS} for row in read_metrics(broken.out)]
    assert kept == [{k: v for k, v in row.items() if k not in TIME_METRICS} for row in read_metrics(whole.out)]


def test_a_run_killed_after_its_last_save_finishes(miniature, tmp_path):
    args = replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=16)
    whole = train_ppo.main(args)
    before = (args.out / "metrics.jsonl").read_text(), (args.out / "samples.jsonl").read_text()
    (args.out / "summary.json").unlink()
    assert train_ppo.main(replace(args, resume=True)) == whole
    summary = json.loads((args.out / "summary.json").read_text())
    assert {name: summary[name] for name in whole} == whole
    assert ((args.out / "metrics.jsonl").read_text(), (args.out / "samples.jsonl").read_text()) == before


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(miniature, monkeypatch):
    args = replace(miniature.ppo, out=miniature.root / "ppo_nan", overwrite=True, save_every=1)
    monkeypatch.setattr(optimizer, "MAX_SKIPPED_STEPS", 1)
    plain, calls = train_ppo.policy_loss, []

    def explodes(*arguments):
        calls.append(1)
        loss, clipped = plain(*arguments)
        return (loss * float("nan"), clipped) if len(calls) > 6 else (loss, clipped)

    monkeypatch.setattr(train_ppo, "policy_loss", explodes)
    with pytest.raises(InputError, match=r"for 2 step\(s\) in a row \(the loss is nan\): lower --lr"):
        train_ppo.main(args)
    assert all(p.isfinite().all() for p in load_gpt(args.out).parameters())
    assert not (args.out / "summary.json").exists()


def test_one_nan_loss_skips_one_step_and_no_metric(miniature, tmp_path, monkeypatch):
    """Six steps of two micro-batches; the second update skips its first step, so its metrics come from the other."""
    args = replace(miniature.ppo, out=tmp_path / "ppo")
    plain, calls, losses = train_ppo.policy_loss, [], []

    def explodes(*arguments):
        calls.append(1)
        loss, clipped = plain(*arguments)
        losses.append(torch.tensor([loss.sum().item(), arguments[3].sum().item()]))  # and its number of tokens
        return (loss * float("nan"), clipped) if len(calls) == 6 else (loss, clipped)

    monkeypatch.setattr(train_ppo, "policy_loss", explodes)
    train_ppo.main(args)
    metrics = read_metrics(args.out)
    assert [row["skipped_steps"] for row in metrics] == [0, 1, 1]
    steps = [total / count for total, count in (losses[i] + losses[i + 1] for i in range(0, 12, 2))]
    assert metrics[1]["policy/loss"] == pytest.approx(steps[3].item(), abs=1e-6)
    assert metrics[2]["policy/loss"] == pytest.approx((steps[4] + steps[5]).item() / 2, abs=1e-6)


def test_ppo_learns_a_rule(miniature, tmp_path):
    """All signs are right end to end: rewarding short responses makes them shorter."""
    rule = tmp_path / "rule.py"
    rule.write_text("def score(queries, responses): return [-len(r) / 4 for r in responses]\n")
    args = replace(
        miniature.ppo, out=tmp_path / "ppo", reward=f"{rule}:score", total_episodes=16 * 32, batch_size=32,
        micro_batch_size=32, lr=3e-3, kl_coef=0.0, missing_eos_score=-20.0, value_coef=1.0, num_ppo_epochs=4,
    )  # fmt: skip
    train_ppo.main(args)
    metrics = read_metrics(args.out)
    change = {
        name: sum(row[name] for row in metrics[-4:]) / 4 - sum(row[name] for row in metrics[:4]) / 4
        for name in ("objective/score", "response_length", "eos_rate")
    }
    assert change["objective/score"] > 2 and change["response_length"] < -2 and change["eos_rate"] > 0.05


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 8, "num_minibatches": 3}, "--batch-size 8 must be a multiple of 3: --num-minibatches 3"),
        ({"total_episodes": 4}, "--total-episodes 4 is less than one --batch-size 8"),
        ({"temperature": 0.0}, "--temperature 0.0"),
        ({"reward_model": None}, "--reward-model None"),
        ({"response_length": 4096}, "positions of"),
        ({"sft": "/nowhere"}, "/nowhere"),
        ({"reward_model": "/nowhere"}, "/nowhere"),
        ({"device": "cuda:7"}, "--device"),
    ],
)
def test_bad_settings_are_rejected_before_anything_is_written(miniature, tmp_path, change, sentence):
    out = tmp_path / "ppo"
    with pytest.raises(InputError, match=sentence):
        train_ppo.main(replace(miniature.ppo, out=out, **change))
    assert not out.exists()
