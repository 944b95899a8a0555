"""--advantages: each estimator against its paper's formula in float64, in expectation over all responses, in a run."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

import train_ppo
from kernels import gae
from nanorlhf.checkpoint import load_gpt
from nanorlhf.errors import InputError
from nanorlhf.ppo import (
    grpo,
    kl_loss,
    kl_penalised_rewards,
    policy_loss,
    reinforce_plus_plus,
    rloo,
)
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.resume import states
from tests.conftest import UNCLIPPED, interrupt_at, read_metrics, weights
from tests.test_train_ppo import policy_that_stops, spy_on
from tests.test_train_sft import gradients  # noqa: F401  a fixture

NAN = float("nan")
MASK = torch.tensor([[0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]]).bool()  # lengths 3, 1, 2, 3; two queries
SCORES = torch.tensor([1.0, 4.0, -2.0, 0.0], dtype=torch.float64)


def some_kl() -> torch.Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# --------------------------------------------------------------------------------------------- 1. the papers' formulas
def test_rloo_subtracts_the_mean_reward_of_the_querys_other_responses():
    kl = some_kl()
    advantages = rloo(SCORES, torch.where(MASK, NAN, kl), MASK, 0.5, 2)
    totals = [SCORES[i].item() - 0.5 * sum(kl[i, t].item() for t in range(3) if not MASK[i, t]) for i in range(4)]
    for i, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        for t in range(3):
            expected = 0.0 if MASK[i, t] else 9 / 4 * (totals[i] - totals[other])  # 9 tokens, 4 responses
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_of_three_is_the_distance_from_the_mean_of_the_two_others():
    scores, mask = torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, 1).bool()
    advantages = rloo(scores, torch.zeros(3, 1), mask, 0.1, 3)
    assert advantages[:, 0].tolist() == [1 - 4, 2 - 3.5, 6 - 1.5]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_the_loss_of_grpo_is_equation_3_of_its_paper(scale):
    """Written out for each response: clipped ratios less beta * k3, a mean over tokens or their sum, mean over i."""
    torch.manual_seed(1)
    new, old, reference = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    new.requires_grad_(True)
    advantages, weights = grpo(SCORES, MASK, 0.3, 2, scale)
    loss = policy_loss(new, old, advantages, MASK, 0.2)[0] + kl_loss(new, reference, weights, MASK)
    (gradient,) = torch.autograd.grad(loss, new)

    expected = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        group = SCORES[:2] if i < 2 else SCORES[2:]
        advantage = SCORES[i] - group.mean()
        if scale == "std":
            advantage = advantage / math.sqrt(((group - group.mean()) ** 2).mean().item())
        terms = []
        for t in range(3):
            if not MASK[i, t]:
                ratio, other = (new[i, t] - old[i, t]).exp(), (reference[i, t] - new[i, t]).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                terms.append(surrogate - 0.3 * (other - other.log() - 1))
        expected = expected - sum(terms) / (len(terms) if scale == "std" else 1) / 4
    (expected_gradient,) = torch.autograd.grad(expected, new)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-7)
    assert torch.allclose(gradient, expected_gradient, atol=1e-7) and gradient.abs().max() > 0.01


def test_a_group_with_equal_scores_teaches_nothing():
    scores = torch.full((8,), 0.1)
    advantages, _ = grpo(scores, torch.zeros(8, 2).bool(), 0.1, 4, "std")
    assert advantages.abs().max() < 1e-3


def test_reinforce_plus_plus_normalises_the_rewards_to_go_over_the_batch():
    kl = some_kl()
    for gamma in (1.0, 0.9):
        advantages = reinforce_plus_plus(SCORES, torch.where(MASK, NAN, kl), MASK, 0.5, gamma)
        to_go = {}
        for i in range(4):
            last = int((~MASK[i]).sum()) - 1
            for t in range(last + 1):
                penalties = sum(gamma ** (s - t) * kl[i, s].item() for s in range(t, last + 1))
                to_go[i, t] = gamma ** (last - t) * SCORES[i].item() - 0.5 * penalties
        mean = sum(to_go.values()) / len(to_go)
        std = math.sqrt(sum((x - mean) ** 2 for x in to_go.values()) / len(to_go))
        for i, t in itertools.product(range(4), range(3)):
            expected = (to_go[i, t] - mean) / std if (i, t) in to_go else 0.0
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-6)


def test_a_weight_of_zero_keeps_even_an_infinite_kl_out_of_loss_and_gradient():
    new = torch.tensor([[-200.0, -1.0], [-1.0, NAN]], requires_grad=True)
    reference, mask = torch.tensor([[0.0, -2.0], [-1.5, NAN]]), torch.tensor([[False, False], [False, True]])
    loss = kl_loss(new, reference, torch.tensor([[0.0], [2.0]]), mask)
    loss.backward()
    assert loss.item() == pytest.approx(2 * (math.exp(-0.5) - 1 + 0.5) / 3)
    assert new.grad.tolist() == [[0.0, 0.0], [pytest.approx(2 * (1 - math.exp(-0.5)) / 3), 0.0]]


# ------------------------------------------------------------------------------------------------- 2. the expectations
BETA = 0.4
RESPONSES = [(0,)] + [(a, b) for a in (1, 2) for b in (0, 1, 2)]  # token 0 is EOS, two tokens at most


class World:
    """A tabular softmax policy over all seven responses, a reference, and a score for each response."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.table, self.ref_table = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(2))
        self.table.requires_grad_(True)  # row 0: the first token; row a: the token after a
        self.scores = 2 * torch.randn(len(RESPONSES), dtype=torch.float64, generator=generator)
        self.mask = torch.tensor([[False, len(response) == 1] for response in RESPONSES])
        self.logprobs, self.ref_logprobs = self.of(self.table), self.of(self.ref_table)  # (7, 2)
        self.probabilities = self.logprobs.sum(1).exp()  # (7,)
        self.kl = (self.logprobs - self.ref_logprobs).detach()

    def of(self, table: torch.Tensor) -> torch.Tensor:
        logs, zero = table.log_softmax(-1), torch.zeros((), dtype=torch.float64)
        rows = [[logs[0, r[0]], logs[r[0], r[1]] if len(r) == 2 else zero] for r in RESPONSES]
        return torch.stack([torch.stack(row) for row in rows])

    def gradient(self, objective: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(objective, self.table, retain_graph=True)[0]

    def truth(self, beta: float = BETA) -> torch.Tensor:
        """The gradient of E[score - beta KL], by the sum over all responses."""
        log_ratios = (self.logprobs - self.ref_logprobs).sum(1)
        return self.gradient((self.probabilities * (self.scores - beta * log_ratios)).sum())

    def expected_gradient(self, k: int, scale: str | None = None, beta: float = BETA) -> torch.Tensor:
        """Minus the gradient of the loss, over all k-tuples of responses to the one query, by their probability.

        scale: of GRPO; None: of RLOO.
        """
        total = torch.zeros((), dtype=torch.float64)
        for tuple_ in itertools.product(range(len(RESPONSES)), repeat=k):
            rows = list(tuple_)
            mask, new, old = self.mask[rows], self.logprobs[rows], self.logprobs[rows].detach()
            if scale is None:
                loss, _ = policy_loss(new, old, rloo(self.scores[rows], self.kl[rows], mask, beta, k), mask, 0.2)
            else:
                advantages, kl_weights = grpo(self.scores[rows], mask, beta, k, scale)
                loss = policy_loss(new, old, advantages, mask, 0.2)[0]
                loss = loss + kl_loss(new, self.ref_logprobs[rows], kl_weights, mask)
            total = total - self.probabilities[rows].prod().detach() * loss
        return self.gradient(total)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("k", [2, 3])
def test_the_gradient_of_rloo_is_unbiased_for_score_minus_kl(world, k):
    assert torch.allclose(world.expected_gradient(k), world.truth(), atol=1e-12)
    assert world.truth().abs().max() > 0.1


def test_the_gradient_with_any_baseline_of_the_state_is_unbiased_for_score_minus_kl(world):
    """PPO's at lambda = 1 and a ratio of 1, whatever the value model says."""
    values = torch.tensor([[0.7, 5.0 * response[0]] for response in RESPONSES], dtype=torch.float64)
    eos_index = (~world.mask).sum(1) - 1
    rewards, _ = kl_penalised_rewards(
        world.logprobs.detach(), world.ref_logprobs, world.scores, eos_index, BETA, "last_token"
    )
    advantages, _ = gae(rewards, values, 1.0, 1.0, world.mask)
    advantages = advantages * world.probabilities[:, None].detach()
    loss, _ = policy_loss(world.logprobs, world.logprobs.detach(), advantages, world.mask, 0.2, torch.tensor(1))
    assert torch.allclose(-world.gradient(loss), world.truth(), atol=1e-12)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_dividing_by_the_standard_deviation_and_by_lengths_biases_grpo_and_dr_grpo_does_neither(world):
    """Without a KL, Dr. GRPO's gradient is (k - 1) / k of the true one: its baseline holds the response itself."""
    for k in (2, 3):
        unscaled = world.expected_gradient(k, "none", beta=0.0)
        assert torch.allclose(unscaled, (k - 1) / k * world.truth(0.0), atol=1e-12)
        scaled = world.expected_gradient(k, "std", beta=0.0)
        assert cosine(scaled, world.truth(0.0)) < 0.99


def test_the_kl_in_the_loss_of_grpo_has_the_gradient_of_the_kl_from_the_reference(world):
    """d k3 = (1 - ref / policy) d log policy: in expectation at each state, the gradient of KL(reference || policy)."""
    without, with_kl = (world.expected_gradient(2, "none", beta=beta) for beta in (0.0, BETA))
    first = world.table.log_softmax(-1)[0].exp().detach()
    reach = torch.stack((torch.ones((), dtype=torch.float64), first[1], first[2]))  # of the three states
    reference, policy = world.ref_table.log_softmax(-1), world.table.log_softmax(-1)
    reverse = (reach[:, None] * reference.exp() * (reference - policy)).sum()
    assert torch.allclose(with_kl - without, -BETA * world.gradient(reverse), atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- 3. the run
KINDS = {
    "rloo": {"advantages": "rloo", "samples_per_query": 4},
    "grpo": {"advantages": "grpo", "samples_per_query": 4, "kl_coef": 0.5},
    "dr. grpo": {"advantages": "grpo", "samples_per_query": 2, "grpo_scale": "none", "kl_coef": 0.5},
    "reinforce++": {"advantages": "reinforce++", "samples_per_query": 1},
}


@pytest.fixture(scope="module")
def start(miniature) -> train_ppo.Args:
    """A policy that sometimes samples EOS, and one update of eight responses."""
    sft = str(policy_that_stops(miniature.root))
    return replace(miniature.ppo, sft=sft, out=miniature.root / "ppo_advantages", overwrite=True, total_episodes=8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_of_a_run_takes_the_papers_gradient_and_no_value_model(
    start,
    kind,
    monkeypatch,
    gradients,  # noqa: F811
):
    """From single unpadded responses in float64; at a ratio of 1 and with the policy far from its reference."""
    settings, reference = KINDS[kind], str(start.out.parent / "sft")
    args = replace(start, num_ppo_epochs=2, rollout_logprobs="sampler", **settings)
    monkeypatch.setattr(train_ppo, "reference", lambda policy: load_gpt(reference).requires_grad_(False))
    sampler = spy_on(monkeypatch, "rollout")
    train_ppo.main(args)
    assert not (args.out / "value_model").exists()
    (metrics,) = read_metrics(args.out)
    assert metrics["policy/first_ratio_error"] < 1e-4 and "value/loss" not in metrics and metrics["objective/kl"] > 1

    batch, tokenizer, k, beta = sampler.calls[0][1], load_tokenizer(args.sft), args.samples_per_query, args.kl_coef
    policy, ref_policy = (
        load_gpt(place).forbid(tokenizer.pad_id, tokenizer.vocab_size).double() for place in (args.sft, reference)
    )
    logs = []
    for query, response in zip(batch.query.tolist(), batch.response.tolist(), strict=True):
        query, response = ([i for i in ids if i != tokenizer.pad_id] for ids in (query, response))
        of_models = []
        for model in (policy, ref_policy):
            logits = model.logits(model(torch.tensor([query + response])))[0, len(query) - 1 : -1] / args.temperature
            of_models.append(logits.log_softmax(-1)[range(len(response)), response])
        logs.append(of_models)
    ended = (batch.response == tokenizer.eos_id).any(1).tolist()
    scores = [score if end else -1.0 for score, end in zip(batch.scores.double().tolist(), ended, strict=True)]
    assert len({len(new) for new, _ in logs}) > 1 and 0 < sum(ended) < 8
    kls = [(new - ref).detach() for new, ref in logs]
    objective = torch.zeros((), dtype=torch.float64)
    if kind == "reinforce++":
        to_go = [[scores[i] - beta * kl[t:].sum().item() for t in range(len(kl))] for i, kl in enumerate(kls)]
        every = torch.tensor([x for row in to_go for x in row], dtype=torch.float64)
        for (new, _), row in zip(logs, to_go, strict=True):
            normalised = (torch.tensor(row, dtype=torch.float64) - every.mean()) / every.std(correction=0)
            objective = objective + (normalised * new).sum() / len(every)
    for i, (new, ref) in enumerate(logs):
        group = range(i // k * k, i // k * k + k)
        if kind == "rloo":
            rewards = {j: scores[j] - beta * kls[j].sum().item() for j in group}
            baseline = sum(rewards[j] for j in group if j != i) / (k - 1)
            objective = objective + (rewards[i] - baseline) * new.sum() / 8
        elif "grpo" in kind:
            of_group = torch.tensor([scores[j] for j in group], dtype=torch.float64)
            advantage = scores[i] - of_group.mean()
            k3 = (ref - new).exp() - 1 - (ref - new)
            if kind == "grpo":
                objective = objective + (advantage / of_group.std(correction=0) * new - beta * k3).mean() / 8
            else:
                objective = objective + (advantage * new - beta * k3).sum() / 8
    trained = list(policy.parameters())
    expected = -torch.cat([g.flatten() for g in torch.autograd.grad(objective, trained)])
    assert expected.abs().max() > 1e-3
    assert torch.allclose(gradients[0].double(), expected, atol=2e-4 * expected.abs().max().item())


def test_the_responses_to_a_query_are_rows_in_a_row(start, monkeypatch):
    indices, rollouts = spy_on(monkeypatch, "batch_indices"), spy_on(monkeypatch, "rollout")
    train_ppo.main(replace(start, total_episodes=16, **KINDS["rloo"]))
    for (_, chosen), (_, batch) in zip(indices.calls, rollouts.calls, strict=True):
        assert len(chosen) == 2 and len(batch.query) == 8
        for g in range(2):
            assert (batch.query[4 * g : 4 * g + 4] == batch.query[4 * g]).all()
            assert len({tuple(row) for row in batch.response[4 * g : 4 * g + 4].tolist()}) > 1
    samples = [json.loads(line) for line in (start.out / "samples.jsonl").open()]
    assert len({sample["query"] for sample in samples}) == len(samples) == 4  # one of each group


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_the_micro_batch_size_does_not_change_the_gradient(start, kind, gradients):  # noqa: F811
    """Micro-batches cut groups in two, and so do minibatches. Equal to rounding."""
    runs = []
    for size in (1, 3, 8):
        gradients.clear()
        args = replace(start, micro_batch_size=size, rollout_batch_size=size, num_minibatches=2, **UNCLIPPED)
        train_ppo.main(replace(args, **KINDS[kind]))
        runs.append(torch.stack(gradients))
    assert runs[0].abs().max() > 1e-2
    for steps in runs[:-1]:
        assert torch.allclose(steps, runs[-1], atol=1e-4)


def test_resuming_without_a_value_model_equals_the_uninterrupted_run(start, tmp_path, monkeypatch):
    """To the last bit; no state holds a value model."""
    args = replace(start, total_episodes=32, save_every=2, kl_target=0.01, **KINDS["grpo"])
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_ppo.main(whole)
    interrupt_at(4, monkeypatch, train_ppo, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    state = torch.load(states(broken.out)[0] / "state.pt")
    assert "policy" in state and "value_model" not in state
    assert len(state["steps"]["optimizer"]["state"]) == len(list(load_gpt(args.sft).parameters()))
    train_ppo.main(replace(broken, overwrite=False, resume=True))
    assert torch.equal(weights(load_gpt(whole.out)), weights(load_gpt(broken.out)))
    kept, expected = (
        [{name: x for name, x in row.items() if name != "episodes_per_second"} for row in read_metrics(a.out)]
        for a in (broken, whole)
    )
    assert kept == expected


def test_the_value_model_of_a_run_that_is_replaced_goes_with_it(start):
    train_ppo.main(start)
    assert (start.out / "value_model" / "config.json").exists()
    train_ppo.main(replace(start, **KINDS["rloo"]))
    assert not (start.out / "value_model").exists() and (start.out / "model.safetensors").exists()


def test_a_run_without_a_value_model_learns_a_rule(start, tmp_path):
    """The signs are right end to end: a rule that rewards short responses makes them shorter."""
    rule = tmp_path / "rule.py"
    rule.write_text("def score(queries, responses): return [-len(r) / 4 for r in responses]\n")
    args = replace(
        start, reward=f"{rule}:score", total_episodes=8 * 32, batch_size=32, micro_batch_size=32, lr=3e-3,
        missing_eos_score=-20.0, num_ppo_epochs=4,
    )  # fmt: skip
    for kind in ("rloo", "grpo", "reinforce++"):
        train_ppo.main(replace(args, **KINDS[kind] | {"kl_coef": 0.0}))
        rows = read_metrics(args.out)
        last = sum(row["objective/score"] for row in rows[-4:]) / 4
        assert rows[0]["objective/score"] < -4 and last > -1 and rows[-1]["eos_rate"] > 0.9, (kind, last)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"advantages": "rloo"}, "--advantages rloo compares a query's responses: pass --samples-per-query 2"),
        ({"samples_per_query": 3}, "--batch-size 8 holds no whole groups of --samples-per-query 3"),
        ({"samples_per_query": 0}, "--samples-per-query 0"),
        ({**KINDS["grpo"], "value_model": "x"}, "--advantages grpo has no value model.*leave out --value-model"),
        ({**KINDS["grpo"], "tune": "lora", "share_trunk": True}, "--share-trunk"),
        ({**KINDS["reinforce++"], "whiten_rewards": True}, "--whiten-rewards"),
        ({**KINDS["reinforce++"], "whiten_advantages": False}, "--no-whiten-advantages"),
        ({**KINDS["rloo"], "gamma": 0.9}, "--gamma 0.9: --advantages rloo takes a response as a whole"),
        ({"grpo_scale": "none"}, "--grpo-scale none is of --advantages grpo, not gae"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(start, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        train_ppo.main(replace(start, out=tmp_path / "ppo", **change))
    assert not (tmp_path / "ppo").exists()
