"""PPO with a sampler that differs from the policy (rounded, filtered or stale), and its importance weights."""

from dataclasses import replace

import pytest
import torch

import train_grpo
import train_ppo
from kernels import processor
from nanorlhf.checkpoint import load_gpt
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling
from nanorlhf.grpo import ALGORITHMS
from nanorlhf.model import GPT
from nanorlhf.ppo import importance_weights
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import checks, sampler
from nanorlhf.training.sampler import Sampler
from nanorlhf.training.settings import SamplerSettings
from tests.conftest import GPU, TINY, interrupt_at, read_metrics, weights
from tests.helpers.miniature_rlcf import Spy
from tests.test_train_grpo import grpo_args
from tests.test_train_ppo import miniature, spy_on  # noqa: F401  its policy sometimes samples EOS

needs_int8 = pytest.mark.skipif(not processor.has_int8_matmul(), reason="this processor has no VNNI")
INT8_SAMPLER = SamplerSettings(dtype="int8")
INT8 = pytest.param("int8", marks=needs_int8)


@pytest.fixture
def ppo(miniature, tmp_path):  # noqa: F811
    """Two updates of four responses each, in a temporary directory."""
    return replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=16, micro_batch_size=8, num_ppo_epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", INT8])
def test_a_rounded_sampler_is_packed_once_per_rollout_and_the_first_ratio_stays_one(ppo, monkeypatch, dtype):
    spy = Spy(monkeypatch, "for_sampling", sampler)
    train_ppo.main(replace(ppo, sampler=SamplerSettings(dtype=dtype), micro_batch_size=1))
    assert [arguments[1] for arguments, _ in spy.calls] == [dtype, dtype]
    exact, rounded = replace(ppo, out=ppo.out.with_name("exact")), read_metrics(ppo.out)
    train_ppo.main(exact)
    for row, plain in zip(rounded, read_metrics(exact.out), strict=True):
        assert row["policy/first_ratio_error"] < 1e-5
        assert 10 * plain["policy/sampler_gap"] < row["policy/sampler_gap"] < 0.1
        assert abs(row["policy/tis_weight"] - 1) < 0.05 and row["policy/tis_clipped"] == 0
        assert abs(plain["policy/tis_weight"] - 1) < 1e-5


@needs_int8
@pytest.mark.parametrize("change", [{}, {"tune": "lora", "value_model": "shared"}, {"dtype": "bfloat16"}], ids=str)
def test_an_int8_samplers_logprobs_come_from_its_rounded_weights(ppo, monkeypatch, change):
    """Its logprobs equal the rounded model's, recomputed on its responses without a cache at the temperature.

    The learning rate is 0, because norms and biases are shared with the policy and would move before the recount.
    """
    samplers, batches = Spy(monkeypatch, "for_sampling", sampler), spy_on(monkeypatch, "rollout_metrics")
    train_ppo.main(replace(ppo, sampler=INT8_SAMPLER, lr=0.0, **change))
    for (_, sampling), ((batch, *_), _) in zip(samplers.calls, batches.calls, strict=True):
        T = batch.response.size(1)
        with torch.no_grad():
            logits = sampling.logits(sampling(batch.query_response, batch.real, last=T + 1)[:, :-1])
        logprobs = (logits / ppo.temperature).log_softmax(-1)
        ids = batch.response.clamp(max=logits.size(-1) - 1)[..., None]
        difference = (logprobs.gather(2, ids).squeeze(2) - batch.sampled_logprobs).masked_fill(~batch.actions, 0)
        # summing in another order can move a number across a rounding boundary
        assert difference.abs().max() < 0.02 and difference.abs().mean() < 2e-3


def test_the_weights_multiply_the_advantages_of_the_loss(ppo, monkeypatch):
    losses, batches = spy_on(monkeypatch, "policy_loss"), spy_on(monkeypatch, "rollout_metrics")
    monkeypatch.setattr(sampler, "TIS_CLIP", 0.603)
    for correction in ("none", "tis"):
        settings = SamplerSettings(top_p=0.6, correction=correction)
        train_ppo.main(replace(ppo, out=ppo.out.with_name(correction), sampler=settings, total_episodes=8))
    ((batch, *_), _), ((repeated, *_), _) = batches.calls
    assert torch.equal(batch.response, repeated.response)
    (plain, _), (corrected, _) = losses.calls
    order = batch.real.sum(1).argsort()  # one micro-batch of a shuffled minibatch, matched by logprobs
    plain_advantages = {tuple(row.tolist()): advantages for row, advantages in zip(plain[1], plain[2], strict=True)}
    expected, _ = importance_weights(batch.logprobs, batch.sampled_logprobs, batch.actions, 0.603)
    by_row = {tuple(batch.logprobs[b, : plain[1].size(1)].tolist()): expected[b, : plain[1].size(1)] for b in order}
    for row, advantages in zip(corrected[1], corrected[2], strict=True):
        key = tuple(row.tolist())
        assert torch.allclose(advantages, plain_advantages[key] * by_row[key], atol=1e-6)
    (row,) = read_metrics(ppo.out.with_name("tis"))
    ratio = (batch.logprobs - batch.sampled_logprobs).exp()[batch.actions]
    assert row["policy/tis_weight"] == pytest.approx(ratio.clamp(max=0.603).mean().item(), rel=1e-5)
    assert row["policy/tis_clipped"] == pytest.approx((ratio > 0.603).float().mean().item())
    assert 0 < row["policy/tis_clipped"] < 1


@pytest.mark.parametrize("correction", ["icepop", "sequence_tis", "sequence_mis"])
def test_the_weights_of_a_correction_are_recomputed_row_by_row(ppo, monkeypatch, correction):
    """A stale sampler has weights on both sides of 1, the upper bound here."""
    returned, batches = [], spy_on(monkeypatch, "rollout_metrics")
    correct = Sampler.correct
    monkeypatch.setattr(
        Sampler, "correct", lambda self, batch: (returned.append(correct(self, batch)), returned[-1])[1]
    )
    monkeypatch.setattr(sampler, "MASKED", {"icepop": (0.7, 1.0), "sequence_mis": (0.0, 1.0)})
    monkeypatch.setattr(sampler, "TIS_CLIP", 1.0)
    settings = SamplerSettings(sync_every=2, correction=correction)
    train_ppo.main(replace(ppo, sampler=settings, total_episodes=16, lr=1e-2))
    (_, ((batch, *_), _)), (_, (weights, metrics)) = batches.calls, returned
    num_zero, kept = 0, set()
    for i in range(len(batch)):
        mask = batch.actions[i]
        ratio = (batch.logprobs[i][mask].double() - batch.sampled_logprobs[i][mask].double()).exp()
        whole = ratio.prod().expand_as(ratio)
        expected = {
            "icepop": torch.where((ratio >= 0.7) & (ratio <= 1), ratio, 0.0),
            "sequence_tis": whole.clamp(max=1),
            "sequence_mis": torch.where(whole <= 1, whole, 0.0),
        }[correction]
        num_zero += (expected == 0).sum().item()
        kept |= set(expected[(expected > 0) & (expected < 1)].tolist())
        assert torch.allclose(weights[i][mask].double(), expected, rtol=1e-4) and not weights[i][~mask].any()
    assert len(kept) > 1 and ("policy/masked" in metrics) == (correction != "sequence_tis")
    if correction != "sequence_tis":
        assert metrics["policy/masked"] == pytest.approx(num_zero / batch.actions.sum().item())
        assert 0 < metrics["policy/masked"] < 1


@pytest.mark.parametrize("correction", ["none", "tis", "sampler_logprobs"])
def test_a_policy_equal_to_its_reference_pays_no_kl_for_any_sampler(ppo, monkeypatch, correction):
    """Exactly: rewards contain only the score, and the logged KL is 0, with top-p 0.7 and before any step."""
    rollouts, advantages = spy_on(monkeypatch, "rollout_metrics"), spy_on(monkeypatch, "gae")
    losses = spy_on(monkeypatch, "policy_loss")
    settings = SamplerSettings(top_p=0.7, correction=correction)
    train_ppo.main(replace(ppo, sampler=settings, total_episodes=8, kl_coef=10.0))
    (((batch, scores, *_), _),), (((rewards, *_), _),) = rollouts.calls, advantages.calls
    expected = torch.zeros_like(rewards)
    expected[torch.arange(len(batch)), batch.score_index] = scores
    assert torch.equal(rewards, expected) and (batch.sampled_logprobs - batch.logprobs).abs().max() > 0.1
    (row,) = read_metrics(ppo.out)
    assert row["objective/kl"] == row["objective/kl_k3"] == row["objective/non_score_reward"] == 0
    assert row["objective/kl_exact"] == pytest.approx(0, abs=1e-5)
    assert row["objective/entropy"] == pytest.approx(-batch.logprobs.sum(1).mean().item())
    ((_, old, *_), _), *_ = losses.calls  # the requested ratio
    taken_to = batch.sampled_logprobs if correction == "sampler_logprobs" else batch.logprobs
    rows = {tuple(row) for row in taken_to[:, : old.size(1)].tolist()}
    assert {tuple(row) for row in old.tolist()} == rows and batch.logprobs is not batch.sampled_logprobs
    assert (row["policy/first_ratio_error"] < 1e-4) == (correction != "sampler_logprobs")


@pytest.mark.parametrize("correction", ["none", "sampler_logprobs"])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "rloo", "reinforce++", "online_dpo"])
def test_advantages_without_a_value_model_ignore_the_samplers_kl(ppo, monkeypatch, algorithm, correction):
    """The same in train_grpo.py, with the KL in the reward or in the loss."""
    seen, divided = [], []

    def advantages(judged):
        seen.append(judged.kl)
        return usual.advantages(judged)

    def policy_loss(new_logprobs, old, *rest):
        divided.append(old)
        return usual.policy_loss(new_logprobs, old, *rest)

    usual = ALGORITHMS[algorithm]
    monkeypatch.setitem(ALGORITHMS, algorithm, replace(usual, advantages=advantages, policy_loss=policy_loss))
    rollouts = Spy(monkeypatch, "rollout_metrics", train_grpo.update_metrics)
    args = grpo_args(ppo, algorithm=algorithm, samples_per_query=2, num_epochs=1, total_episodes=8)
    train_grpo.main(replace(args, sampler=SamplerSettings(top_p=0.7, correction=correction)))
    ((batch, *_), _), (row,) = rollouts.calls[0], read_metrics(ppo.out)
    assert len(seen) == 1 and not seen[0].any() and row["objective/kl"] == row["objective/kl_k3"] == 0
    taken_to = batch.sampled_logprobs if correction == "sampler_logprobs" else batch.logprobs
    rows = {tuple(row) for row in taken_to[:, : divided[0].size(1)].tolist()}
    assert {tuple(row) for row in divided[0].tolist()} == rows


def test_top_p_weights_equal_the_probability_mass_that_was_kept(ppo, monkeypatch):
    """They are between p and 1: the filter raises all kept probabilities by the same factor."""
    batches = spy_on(monkeypatch, "rollout_metrics")
    train_ppo.main(replace(ppo, sampler=SamplerSettings(top_p=0.6), total_episodes=8))
    (((batch, *_), _),) = batches.calls
    ratio = (batch.logprobs - batch.sampled_logprobs).exp()[batch.actions]
    assert 0.6 - 1e-4 < ratio.min() and ratio.max() < 1 + 1e-4 and ratio.min() < 0.8


def test_a_stale_sampler_gets_the_policys_weights_at_every_second_update(ppo, monkeypatch):
    used, batches = Spy(monkeypatch, "for_sampling", sampler), spy_on(monkeypatch, "rollout_metrics")
    seen = []
    monkeypatch.setattr(Sampler, "sync", recorded(Sampler.sync, seen))
    train_ppo.main(replace(ppo, sampler=SamplerSettings(sync_every=2), total_episodes=32, lr=1e-2))
    (before, at0), (_, at1), (_, at2), (_, at3) = seen
    assert torch.equal(at0, before) and torch.equal(at1, at0) and torch.equal(at3, at2) and not torch.equal(at2, at0)
    assert torch.equal(at2, seen[2][0])  # the policy's weights at that time
    gaps = [row["policy/sampler_gap"] for row in read_metrics(ppo.out)]
    assert max(gaps[0], gaps[2]) < 1e-4 and min(gaps[1], gaps[3]) > 1e-3
    assert len(used.calls) == len(batches.calls) == 4
    assert all(row["policy/first_ratio_error"] < 1e-5 for row in read_metrics(ppo.out))


def recorded(plain, seen):
    def sync(sampler, update):
        plain(sampler, update)
        seen.append((weights(sampler.policy), weights(sampler.source)))

    return sync


@pytest.mark.parametrize("change", [{}, {"tune": "lora"}], ids=str)
def test_a_run_resumes_between_two_sampler_updates(ppo, monkeypatch, change):
    """Equal to the last bit: the stale weights are part of the state."""
    settings = SamplerSettings(sync_every=3, correction="tis")
    args = replace(ppo, sampler=settings, total_episodes=32, save_every=2, lr=1e-2, **change)
    whole, broken = replace(args, out=ppo.out.with_name("whole")), replace(args, out=ppo.out.with_name("broken"))
    train_ppo.main(whole)
    interrupt_at(3, monkeypatch, train_ppo, "gae")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    train_ppo.main(replace(broken, resume=True))
    assert torch.equal(weights(load_gpt(whole.out)), weights(load_gpt(broken.out)))
    gaps = [[row["policy/sampler_gap"] for row in read_metrics(args.out)] for args in (whole, broken)]
    assert gaps[0] == gaps[1] and gaps[0][2] > gaps[0][1] > 1e-3


def test_the_policy_itself_samples_by_default(ppo):
    policy = GPT(TINY)
    sampler = Sampler(policy, load_tokenizer(ppo.sft), train_ppo.Args(), "last_token")
    assert for_sampling(sampler.source, sampler.settings.dtype) is policy and sampler.state() == {}
    assert sampler.settings.top_p == 1 and sampler.engine is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "int8"}, "--sampler.dtype int8 is not supported on this processor, which has no VNNI"),
        ({"top_p": 0.0}, "--sampler.top-p 0 would always sample"),
        ({"top_p": 1.5}, "--sampler.top-p 1.5: must be from 0 to 1"),
        ({"sync_every": 0}, "--sampler.sync-every 0: must be at least 1"),
        ({"sync_every": 2}, "--sampler.sync-every 2 can't be combined with --shard"),
    ],
    ids=str,
)
def test_conflicting_settings_are_rejected_before_anything_is_written(ppo, monkeypatch, change, sentence):
    monkeypatch.setattr(checks, "has_int8_matmul", lambda: False)
    with pytest.raises(InputError, match=sentence):
        train_ppo.main(replace(ppo, sampler=SamplerSettings(**change), shard="fsdp"))
    assert not ppo.out.exists()


def test_int8_is_rejected_on_a_gpu(ppo, monkeypatch):
    monkeypatch.setattr(checks, "has_int8_matmul", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda", "cuda:0"):
        with pytest.raises(InputError, match="is not supported on a GPU: pass bfloat16 or same"):
            checks.check_sampler(replace(ppo, sampler=INT8_SAMPLER, device=device))
    checks.check_sampler(replace(ppo, sampler=INT8_SAMPLER, device="cpu"))


@pytest.mark.parametrize("device", [GPU])
def test_int8_is_rejected_before_a_run_on_a_gpu(ppo, device):
    with pytest.raises(InputError, match="is not supported on a GPU: pass bfloat16 or same"):
        train_ppo.main(replace(ppo, sampler=INT8_SAMPLER, device=device))
    assert not ppo.out.exists()
