"""The teacher reward: minus the KL from policy to teacher, per token."""

from dataclasses import replace

import pytest
import torch

import train_ppo
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.rewards.teacher import Teacher
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.conftest import TINY, read_metrics
from tests.test_train_ppo import policy_that_stops

CPU, TEMPERATURE = torch.device("cpu"), 0.7


def log_distributions(model, ids, tokenizer):
    """Return the model's log-probabilities at the temperature after each position of one text, in float64: (L, V)."""
    logits = model.logits(model(torch.tensor([ids])))[0].double() / TEMPERATURE
    allowed = torch.arange(logits.size(1)) < tokenizer.vocab_size
    allowed[tokenizer.pad_id : tokenizer.pad_id + 1] = False
    return torch.where(allowed, logits, -torch.inf).log_softmax(-1)


def of_ids(query, response, tokenizer):
    return Batch.of(
        [{}] * len(query),
        query,
        response,
        torch.zeros(response.shape),
        tokenizer.eos_id,
        tokenizer.pad_id,
        "last_token",
    )


@pytest.fixture(scope="module")
def teacher_path(miniature):
    return str(policy_that_stops(miniature.root))


@torch.no_grad()
def test_a_tokens_reward_is_minus_its_k1_of_the_policy_from_the_teacher(miniature, teacher_path):
    tokenizer, policy = load_tokenizer(teacher_path), load_gpt(miniature.root / "sft").double()
    teacher = Teacher(teacher_path, tokenizer, CPU, 1, TEMPERATURE)
    teacher.model.double()
    pad, eos = tokenizer.pad_id, tokenizer.eos_id
    queries, responses = [[40, 41, 42], [50]], [[60, 61, eos], [70, 71, 72, 73]]
    query = torch.tensor([[40, 41, 42], [pad, pad, 50]])
    batch = of_ids(query, torch.tensor([[60, 61, eos, pad], [70, 71, 72, 73]]), tokenizer)
    batch.logprobs = torch.full((2, 4), torch.nan, dtype=torch.float64)  # NaN where no token was chosen
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for b, (asked, said) in enumerate(zip(queries, responses, strict=True)):
        ours, theirs = (log_distributions(model, asked + said, tokenizer) for model in (policy, teacher.model))
        for t, token in enumerate(said):
            position = len(asked) - 1 + t
            batch.logprobs[b, t] = ours[position, token]
            expected[b, t] = -(ours[position, token] - theirs[position, token])
    result = teacher.score(batch)
    assert torch.allclose(result.token_rewards, expected, atol=1e-12) and expected.abs().max() > 0.1
    assert result.scores.tolist() == [0.0, 0.0] and result.applies.all()


@torch.no_grad()
def test_its_expectation_is_minus_the_kl(miniature, teacher_path):
    """Sum over all tokens of the vocabulary, weighted by the policy: minus KL(policy || teacher)."""
    tokenizer, policy = load_tokenizer(teacher_path), load_gpt(miniature.root / "sft").double()
    teacher = Teacher(teacher_path, tokenizer, CPU, 64, TEMPERATURE)
    teacher.model.double()
    tokens = torch.tensor([i for i in range(tokenizer.vocab_size) if i != tokenizer.pad_id])
    asked = [40, 41, 42]
    ours, theirs = (log_distributions(model, asked, tokenizer)[-1] for model in (policy, teacher.model))
    batch = of_ids(torch.tensor([asked]).expand(len(tokens), 3), tokens[:, None], tokenizer)
    batch.logprobs = ours[tokens, None]
    rewards = teacher.score(batch).token_rewards[:, 0]
    p, q = ours[tokens].exp(), theirs[tokens].exp()
    assert p.sum().item() == pytest.approx(1) and q.sum().item() == pytest.approx(1)
    kl = (p * (p / q).log()).sum().item()
    assert (p * rewards).sum().item() == pytest.approx(-kl, abs=1e-12)
    assert kl > 0.05 and abs(kl - (q * (q / p).log()).sum().item()) > 0.01


def test_with_the_exact_kl_rewards_average_zero_and_their_gradient_is_the_kls(miniature, teacher_path):
    """Over all tokens of the vocabulary: E[r] = 0, E[r d log p] = -d KL(policy || teacher), with less variance."""
    tokenizer, policy = load_tokenizer(teacher_path), load_gpt(miniature.root / "sft").double()
    policy = policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    tokens = torch.tensor([i for i in range(tokenizer.vocab_size) if i != tokenizer.pad_id])
    asked, rewards = [40, 41, 42], {}
    for exact in (None, policy):
        teacher = Teacher(teacher_path, tokenizer, CPU, 64, TEMPERATURE, exact)
        teacher.model.double()
        with torch.no_grad():
            ours, theirs = (log_distributions(model, asked, tokenizer)[-1][tokens] for model in (policy, teacher.model))
        batch = of_ids(torch.tensor([asked]).expand(len(tokens), 3), tokens[:, None], tokenizer)
        batch.logprobs = ours[:, None]
        rewards[exact is not None] = teacher.score(batch).token_rewards[:, 0]

    logits = ours.clone().requires_grad_(True)
    logs = logits.log_softmax(0)
    kl = (logs.exp() * (logs - theirs)).sum()
    (gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (estimate,) = torch.autograd.grad((ours.exp() * rewards[True] * logs).sum(), logits)
    assert (ours.exp() * rewards[True]).sum().item() == pytest.approx(0, abs=1e-12)
    assert torch.allclose(estimate, -gradient, atol=1e-12) and gradient.abs().max() > 1e-3
    assert teacher.metrics() == {"reward/teacher_kl": pytest.approx(kl.item(), abs=1e-9)}
    second_moments = [(ours.exp() * x**2).sum().item() for x in (rewards[True], rewards[False])]
    assert second_moments[0] < 0.99 * second_moments[1]


@torch.no_grad()
def mean_kl(path, teacher, tokenizer, rows) -> float:
    """Return KL(policy || teacher) in nats per token, from the full distributions after each token of texts."""
    policy, kls = load_gpt(path), []
    for ids in rows:
        ours, theirs = (log_distributions(model, ids, tokenizer) for model in (policy, teacher))
        kls.append((ours.exp() * torch.where(ours.isfinite(), ours - theirs, 0.0)).sum(-1).mean().item())
    return sum(kls) / len(kls)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["teacher", "exact_teacher"])
def test_a_run_that_is_rewarded_by_a_teacher_comes_nearer_to_it(miniature, teacher_path, tmp_path, kind):
    """With --kl-coef 0 this is the only objective. The KL is measured with full distributions on fixed texts."""
    args = replace(miniature.ppo, out=tmp_path / "ppo", reward=f"{kind}:{teacher_path}", kl_coef=0.0, lr=3e-3)
    args = replace(args, gamma=1.0 if kind == "teacher" else 0.0)
    args = replace(args, total_episodes=32 * 12, batch_size=32, micro_batch_size=32, temperature=TEMPERATURE)
    args = replace(args, missing_eos_score=None, schedule="constant", max_query_length=160)
    train_ppo.main(args)
    rows = read_metrics(args.out)
    first, last = (-row["reward/teacher"] if kind == "teacher" else row["reward/teacher_kl"] for row in rows[::11])
    assert last < 0.5 * first and first > 1
    for row in rows:
        assert row["objective/rlhf_reward"] == pytest.approx(row["reward/teacher"], abs=1e-4)
    tokenizer, teacher = load_tokenizer(teacher_path), load_gpt(teacher_path)
    samples = [[40, 41, 42, 60, 61, 62], [50, 51, 52, 53]]
    before, after = (mean_kl(path, teacher, tokenizer, samples) for path in (args.sft, args.out))
    assert after < 0.5 * before, (before, after)


def test_a_teacher_of_another_vocabulary_is_refused_before_training(miniature, tmp_path):
    tokenizer = train_tokenizer(["another vocabulary"], 300)
    save(GPT(replace(TINY, vocab_size=tokenizer.vocab_size)), tmp_path / "foreign", tokenizer)
    args = replace(miniature.ppo, out=tmp_path / "ppo", reward=f"teacher:{tmp_path / 'foreign'}")
    with pytest.raises(InputError, match="--reward .*foreign: its tokenizer differs from"):
        train_ppo.main(args)
    assert not args.out.exists()
