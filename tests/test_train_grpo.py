"""train_grpo.py: each algorithm against its paper's formula in float64, in exact expectation, and in a run."""

import copy
import itertools
import json
import math
import re
import time
from dataclasses import fields, replace
from statistics import fmean, pstdev
from types import SimpleNamespace

import pytest
import torch

import train_grpo
import train_ppo
from kernels import gae, k3
from nanorlhf import batch as batches
from nanorlhf import grpo, reading
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import command_line
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.grpo import ALGORITHMS
from nanorlhf.ppo import policy_loss
from nanorlhf.shared_queries import Groups
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import loading, sampler, update_metrics
from nanorlhf.training.resume import states
from nanorlhf.training.run import TIME_METRICS
from nanorlhf.training.settings import SamplerSettings
from tests.conftest import ROOT, UNCLIPPED, interrupt_at, read_metrics, weights
from tests.helpers.miniature_rlcf import Spy
from tests.test_train_ppo import policy_that_stops
from tests.test_train_sft import gradients  # noqa: F401  a fixture

ACTIONS = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()  # lengths 3, 1, 2, 3; two queries
SCORES = torch.tensor([1.0, 4.0, -2.0, 0.0], dtype=torch.float64)
NONE = torch.zeros(4, 3, dtype=torch.float64)  # no rewards per token


def random_kl() -> torch.Tensor:
    kl = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.where(ACTIONS, kl, 0.0)


def settings(k: int, kl_coef: float, gamma: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(samples_per_query=k, kl_coef=kl_coef, gamma=gamma)


def compute_loss(
    name: str,
    new: torch.Tensor,
    ref: torch.Tensor,
    scores: torch.Tensor,
    kl: torch.Tensor,
    actions: torch.Tensor,
    args: SimpleNamespace,
    old: torch.Tensor | None = None,
    clip_range: float | tuple[float, float] | None = None,
) -> torch.Tensor:
    """Compute the loss of one minibatch like the script's loop."""
    algorithm = ALGORITHMS[name]
    advantages = algorithm.advantages(
        grpo.Inputs(scores, kl, NONE, actions, args.samples_per_query, args.kl_coef, args.gamma)
    )
    old = new.detach() if old is None else old
    losses, _ = algorithm.policy_loss(new, old, advantages, actions, clip_range or algorithm.clip_range)
    if algorithm.has_kl_loss:
        losses = losses + args.kl_coef * k3(*(torch.where(actions, x, 0.0) for x in (new, ref)))
    return algorithm.mean_loss(losses, actions, actions.any(1).sum(), actions.sum())


# --------------------------------------------------------------------------------------------- 1. the papers' formulas
def test_rloo_subtracts_the_mean_reward_of_the_querys_other_responses():
    kl = random_kl()
    advantages = grpo.rloo(grpo.Inputs(SCORES, kl, NONE, ACTIONS, 2, 0.5, 1.0))
    totals = [SCORES[i].item() - 0.5 * sum(kl[i, t].item() for t in range(3) if ACTIONS[i, t]) for i in range(4)]
    for i, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        for t in range(3):
            assert advantages[i, t].item() == pytest.approx(totals[i] - totals[other], abs=1e-12)


def test_leave_one_out_of_three_is_the_distance_from_the_mean_of_the_two_others():
    scores = torch.tensor([1.0, 2.0, 6.0])
    advantages = grpo.rloo(
        grpo.Inputs(scores, torch.zeros(3, 1), torch.zeros(3, 1), torch.ones(3, 1).bool(), 3, 0.1, 1.0)
    )
    assert advantages[:, 0].tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5], abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_the_loss_of_grpo_is_equation_3_of_its_paper(name):
    """Expected per response: clipped ratios minus beta * k3, mean or sum over tokens, then mean over i."""
    torch.manual_seed(1)
    new, old, reference = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    new.requires_grad_(True)
    loss = compute_loss(name, new, reference, SCORES, random_kl(), ACTIONS, settings(2, 0.3), old)
    (gradient,) = torch.autograd.grad(loss, new)

    expected = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        group = SCORES[:2] if i < 2 else SCORES[2:]
        advantage = SCORES[i] - group.mean()
        if name == "grpo":
            advantage = advantage / math.sqrt(((group - group.mean()) ** 2).mean().item())
        terms = []
        for t in range(3):
            if ACTIONS[i, t]:
                ratio, other = (new[i, t] - old[i, t]).exp(), (reference[i, t] - new[i, t]).exp()
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                terms.append(surrogate - 0.3 * (other - other.log() - 1))
        expected = expected - sum(terms) / (len(terms) if name == "grpo" else 1) / 4
    (expected_gradient,) = torch.autograd.grad(expected, new)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-7)
    assert torch.allclose(gradient, expected_gradient, atol=1e-7) and gradient.abs().max() > 0.01


def test_maxrl_divides_the_distance_from_the_mean_by_the_mean():
    scores = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.float64)
    none = torch.zeros(16, 1, dtype=torch.float64)
    inputs = grpo.Inputs(scores, none, none, torch.ones(16, 1).bool(), 4, 0.0, 1.0)
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, *[0] * 8]
    assert grpo.maxrl(inputs)[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InputError, match="--algorithm maxrl needs scores of at least 0; got -1"):
        grpo.maxrl(replace(inputs, scores=-scores))


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "reinforce++"])
@pytest.mark.parametrize("score", [0.7, 0.1, -1e6])
def test_a_group_with_equal_scores_teaches_exactly_nothing(name, score):
    """The float32 mean of seven 0.7 is 0.70000005; divided by a deviation near 0, that would become a signal."""
    scores = torch.full((14,), abs(score) if name == "maxrl" else score)  # which refuses scores below 0
    compute_advantages, none = ALGORITHMS[name].advantages, torch.zeros(14, 2)
    assert (compute_advantages(grpo.Inputs(scores, none, none, torch.ones(14, 2).bool(), 7, 0.1, 1.0)) == 0).all()


def test_reinforce_plus_plus_normalises_the_rewards_to_go_over_the_batch():
    kl, r = random_kl(), torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 0.0], [0.0, -0.5, 0.0], [1.0, 1.0, 1.0]]).double()
    for gamma in (1.0, 0.9):
        advantages = grpo.reinforce_plus_plus(grpo.Inputs(SCORES, kl, r, ACTIONS, 1, 0.5, gamma))
        to_go = {}
        for i in range(4):
            last = int(ACTIONS[i].sum()) - 1
            for t in range(last + 1):
                rewards = sum(gamma ** (s - t) * (r[i, s] - 0.5 * kl[i, s]).item() for s in range(t, last + 1))
                to_go[i, t] = gamma ** (last - t) * SCORES[i].item() + rewards
        mean = sum(to_go.values()) / len(to_go)
        std = math.sqrt(sum((x - mean) ** 2 for x in to_go.values()) / len(to_go))
        for i, t in itertools.product(range(4), range(3)):
            expected = (to_go[i, t] - mean) / std if (i, t) in to_go else 0.0
            assert advantages[i, t].item() == pytest.approx(expected, abs=1e-6)


def some_logprobs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New, old and reference log-probabilities (4, 3), NaN after the end; some ratios exceed any small clip range."""
    generator = torch.Generator().manual_seed(4)
    old, ref = (-3 * torch.rand(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    new = old + 0.4 * torch.randn(4, 3, dtype=torch.float64, generator=generator)
    new, old, ref = (torch.where(ACTIONS, x, torch.nan) for x in (new, old, ref))
    return new.requires_grad_(True), old, ref


def normalised(scores: list[float], k: int) -> list[float]:
    """Compute (score - mean) / standard deviation of each group of k with Python's statistics."""
    groups = [scores[i // k * k : i // k * k + k] for i in range(len(scores))]
    return [(x - fmean(group)) / pstdev(group) for x, group in zip(scores, groups, strict=True)]


def surrogate(ratio: torch.Tensor, advantage: float, low: float, high: float) -> torch.Tensor:
    return torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)


def gspo_objective(new, old, ref, beta, low, high):
    """Equations 5 and 7, and our KL: k3 at each token, averaged over the response."""
    total = torch.zeros((), dtype=torch.float64)
    for i, advantage in enumerate(normalised(SCORES.tolist(), 2)):
        tokens = [t for t in range(3) if ACTIONS[i, t]]
        length = len(tokens)
        s = torch.stack([new[i, t] - old[i, t] for t in tokens]).sum().div(length).exp()
        total = total + surrogate(s, advantage, low, high) / 4
        for t in tokens:
            other = (ref[i, t] - new[i, t]).exp()
            total = total - beta * (other - other.log() - 1) / length / 4
    return total


def dapo_objective(new, old, ref, beta, low, high):
    """Equation 8, with the scores of equation 13: at most three tokens, with a penalty on the last 0.6."""
    lengths = [3, 1, 2, 3]
    penalties = {1: 0.0, 2: 0.0, 3: -1.0}  # 2 <= 3 - 0.6
    advantages = normalised([x + penalties[n] for x, n in zip(SCORES.tolist(), lengths, strict=True)], 2)
    total = torch.zeros((), dtype=torch.float64)
    for i, t in ACTIONS.nonzero().tolist():
        total = total + surrogate((new[i, t] - old[i, t]).exp(), advantages[i], low, high)
    return total / 9


def cispo_objective(new, old, ref, beta, low, high):
    """Equations 4 and 5."""
    advantages, total = normalised(SCORES.tolist(), 2), torch.zeros((), dtype=torch.float64)
    for i, t in ACTIONS.nonzero().tolist():
        weight = min(max(math.exp(new[i, t].item() - old[i, t].item()), low), high)
        total = total + weight * advantages[i] * new[i, t]
    return total / 9


def rloo_objective(new, old, ref, beta, low, high):
    """After the first step, we add PPO's per-token clip to the paper's REINFORCE."""
    kl, total = random_kl(), torch.zeros((), dtype=torch.float64)
    rewards = [SCORES[i].item() - beta * kl[i].sum().item() for i in range(4)]
    for i, t in ACTIONS.nonzero().tolist():
        advantage = rewards[i] - rewards[i ^ 1]  # with two responses, the baseline is the other one
        total = total + surrogate((new[i, t] - old[i, t]).exp(), advantage, low, high)
    return total / 4


OBJECTIVES = {"gspo": gspo_objective, "dapo": dapo_objective, "cispo": cispo_objective, "rloo": rloo_objective}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("clip_range", [None, (0.1, 0.3), 0.15])
def test_loss_and_gradient_after_some_steps_equal_the_papers_equation(name, clip_range):
    new, old, ref = some_logprobs()
    beta = 0.3 if name in ("gspo", "rloo") else 0.0
    loss = compute_loss(name, new, ref, SCORES, random_kl(), ACTIONS, settings(2, beta), old, clip_range)
    (gradient,) = torch.autograd.grad(loss, new)
    below, above = {None: ALGORITHMS[name].clip_range, 0.15: (0.15, 0.15)}.get(clip_range, clip_range)
    expected = -OBJECTIVES[name](new, old, ref, beta, 1 - below, 1 + above)
    (expected_gradient,) = torch.autograd.grad(expected, new)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-7)
    assert torch.allclose(gradient[ACTIONS], expected_gradient[ACTIONS], atol=1e-7)
    assert (gradient[~ACTIONS] == 0).all() and gradient.abs().max() > 0.01


def test_the_papers_clip_ranges():
    """GSPO section 5.1, DAPO section 4.1, MiniMax-M1 section 3.1: no lower bound, as a ratio is never below 1 - 1."""
    ranges = {name: algorithm.clip_range for name, algorithm in ALGORITHMS.items()}
    assert ranges["gspo"] == (3e-4, 4e-4) and ranges["dapo"] == (0.2, 0.28) and ranges["cispo"][0] == 1
    assert all(ranges[name] == (0.2, 0.2) for name in ("grpo", "dr_grpo", "rloo", "reinforce++"))


def test_a_gspo_response_is_clipped_as_a_whole_and_cispo_keeps_every_gradient():
    """One of three tokens has ratio 8, the others 1: the response's ratio is 8^(1/3) = 2."""
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[0.0, math.log(8), 0.0]], dtype=torch.float64, requires_grad=True)
    advantages, actions = torch.ones(1, 3, dtype=torch.float64), torch.ones(1, 3).bool()
    slopes = {}
    for name, high in (("gspo", 0.9), ("gspo", 1.1), ("cispo", 0.9)):
        losses, is_clipped = ALGORITHMS[name].policy_loss(new, old, advantages, actions, (0.5, high))
        slopes[name, high] = torch.autograd.grad(losses.sum(), new)[0].tolist()[0], is_clipped.tolist()[0]
    assert slopes["gspo", 0.9] == ([0, 0, 0], [True] * 3)
    assert slopes["gspo", 1.1] == (pytest.approx([-2, -2, -2]), [False] * 3)
    assert slopes["cispo", 0.9] == (pytest.approx([-1, -1.9, -1]), [False, True, False])


def test_the_overlong_penalty_is_equation_13_with_the_papers_lengths():
    lengths = [1, 16384, 17408, 18432, 20480]
    actions = torch.arange(20480) < torch.tensor(lengths)[:, None]
    assert grpo.overlong_penalty(actions).tolist() == pytest.approx([0, 0, -0.25, -0.5, -1])


@pytest.mark.parametrize("k", [2, 4])
def test_the_gradient_of_online_dpo_equals_dpo_on_the_best_and_worst_response(k):
    """Eight responses per query, with equal scores in the last group; mean over queries."""
    generator = torch.Generator().manual_seed(7)
    ref = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    new = (ref + torch.randn(8, 3, dtype=torch.float64, generator=generator)).requires_grad_(True)
    actions = torch.cat((ACTIONS, ACTIONS.flip(0)))
    scores = torch.tensor([0.5, 2.0, -1.0, 1.0, 3.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    kl = torch.where(actions, (new - ref).detach(), 0.0)
    loss = compute_loss("online_dpo", new, ref, scores, kl, actions, settings(k, 0.7))
    (gradient,) = torch.autograd.grad(loss, new)

    sums = [(sum(new[i, t] for t in range(3) if actions[i, t]), sum(ref[i, t] for t in range(3) if actions[i, t]))
            for i in range(8)]  # fmt: skip
    pairs = {2: [(1, 0), (3, 2)], 4: [(1, 2)]}[k]
    expected = torch.zeros((), dtype=torch.float64)
    for best, worst in pairs:
        margin = 0.7 * ((sums[best][0] - sums[best][1]) - (sums[worst][0] - sums[worst][1]))
        expected = expected + (1 + (-margin).exp()).log() / (8 // k)  # -log sigmoid
    (expected_gradient,) = torch.autograd.grad(expected, new)
    assert torch.allclose(gradient, expected_gradient, atol=1e-12) and gradient.abs().max() > 0.01
    assert (gradient[4:] == 0).all()


def as_a_batch(rows: list[Demonstration], response: list[int], logprob: float) -> batches.Batch:
    """A batch with one response per query; 8 is EOS and 0 [PAD]."""
    query, responses = torch.tensor([row.query for row in rows]), torch.tensor([response] * len(rows))
    sampled = torch.full(responses.shape, logprob)
    batch = batches.Batch.of([row.record for row in rows], query, responses, sampled, 8, 0, "last_token")
    batch.logprobs = sampled
    return batch


def some_queries(num: int) -> list[Demonstration]:
    """Queries of one token, two of each: 1, 1, 2, 2, ..."""
    return [Demonstration([1 + i // 2], [], {"query": str(i // 2)}) for i in range(2 * num)]


@pytest.mark.parametrize("world_size", [1, 4])
def test_queries_with_equal_scores_are_resampled_and_then_dropped(world_size, monkeypatch):
    """Queries 2 and 4 of four have equal scores; query 2 differs after one resample, query 4 never does."""
    monkeypatch.setattr(grpo.distributed, "world_size", lambda: world_size)
    queries = some_queries(4)
    batch = as_a_batch(queries, [9, 9, 9], -1.0)
    scores = torch.tensor([0.0, 1.0, 5.0, 5.0, 2.0, 3.0, 7.0, 7.0])
    asked, generator = [], torch.Generator().manual_seed(1)

    def rollout(rows, uniforms, update):
        assert uniforms.shape == (len(rows), 3) and len(rows) % world_size == 0 and update == 5
        asked.append([row.query[0] for row in rows])
        scores = [-1.0 if row.query == [2] and i % 2 else 4.0 for i, row in enumerate(rows)]
        return as_a_batch(rows, [20 + len(asked), 8, 0], -5.0), torch.tensor(scores), None

    metrics = grpo.refill(batch, scores, queries, 2, 3, rollout, 5, generator)
    assert asked[0][:4] == [2, 2, 4, 4] and [row[:2] for row in asked[1:]] == [[4, 4], [4, 4]]
    assert metrics == {"groups/refilled": 4, "groups/refilled_tokens": 8 * 2, "groups/dropped": 0.25}
    assert scores.tolist() == [0, 1, 4, -1, 2, 3, 4, 4]
    assert batch.response[:, 0].tolist() == [9, 9, 21, 21, 9, 9, 23, 23] and batch.query[:, 0].tolist() == [
        1, 1, 2, 2, 3, 3, 4, 4
    ]  # fmt: skip
    assert batch.in_loss.all(1).tolist() == [True] * 6 + [False] * 2
    assert batch.real[:, 1:].tolist() == batch.actions.tolist() and batch.actions.sum(1).tolist() == [3, 3, 2, 2] * 2
    assert batch.logprobs[:, 0].tolist() == [-1, -1, -5, -5, -1, -1, -5, -5] and batch.has_eos.sum() == 4
    drawn = torch.Generator().manual_seed(1)
    for n in (4, 2, 2):  # for any number of ranks
        torch.rand((n, 3), generator=drawn, dtype=torch.float64)
    assert torch.equal(generator.get_state(), drawn.get_state())


def test_without_refills_nothing_is_sampled_or_dropped():
    queries = some_queries(2)
    batch = as_a_batch(queries, [9, 9], -1.0)
    assert grpo.refill(batch, torch.zeros(4), queries, 2, 0, None, 0, None) == {} and batch.in_loss.all()


# ------------------------------------------------------------------------------------------------ 2. exact expectations
BETA = 0.4
RESPONSES = [(0,)] + [(a, b) for a in (1, 2) for b in (0, 1, 2)]  # token 0 is EOS; at most two tokens


class World:
    """A tabular softmax policy over all seven responses, a reference, and a score for each response."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.table, self.ref_table = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(2))
        self.table.requires_grad_(True)  # row 0: the first token; row a: the token after a
        self.scores = 2 * torch.randn(len(RESPONSES), dtype=torch.float64, generator=generator)
        self.actions = torch.tensor([[True, len(response) == 2] for response in RESPONSES])
        self.logprobs, self.ref_logprobs = self.look_up(self.table), self.look_up(self.ref_table)  # (7, 2)
        self.probabilities = self.logprobs.sum(1).exp()  # (7,)
        self.kl = (self.logprobs - self.ref_logprobs).detach()

    def look_up(self, table: torch.Tensor) -> torch.Tensor:
        logs, zero = table.log_softmax(-1), torch.zeros((), dtype=torch.float64)
        rows = [[logs[0, r[0]], logs[r[0], r[1]] if len(r) == 2 else zero] for r in RESPONSES]
        return torch.stack([torch.stack(row) for row in rows])

    def gradient(self, objective: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(objective, self.table, retain_graph=True)[0]

    def true_gradient(self, beta: float = BETA) -> torch.Tensor:
        """Return the gradient of E[score - beta KL], summing over all responses."""
        log_ratios = (self.logprobs - self.ref_logprobs).sum(1)
        return self.gradient((self.probabilities * (self.scores - beta * log_ratios)).sum())

    def expected_gradient(self, name: str, k: int, beta: float = BETA) -> torch.Tensor:
        """Return minus the loss's gradient in expectation over all k-tuples of responses to the query."""
        total = torch.zeros((), dtype=torch.float64)
        for tuple_ in itertools.product(range(len(RESPONSES)), repeat=k):
            rows = list(tuple_)
            models = self.logprobs[rows], self.ref_logprobs[rows]
            loss = compute_loss(name, *models, self.scores[rows], self.kl[rows], self.actions[rows], settings(k, beta))
            total = total - self.probabilities[rows].prod().detach() * loss
        return self.gradient(total)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("k", [2, 3])
def test_the_gradient_of_rloo_is_unbiased_for_score_minus_kl(world, k):
    assert torch.allclose(world.expected_gradient("rloo", k), world.true_gradient(), atol=1e-12)
    assert world.true_gradient().abs().max() > 0.1


def test_the_gradient_with_any_baseline_of_the_state_is_unbiased_for_score_minus_kl(world):
    """PPO's gradient at lambda = 1 and ratio 1, for any value model."""
    values = torch.tensor([[0.7, 5.0 * response[0]] for response in RESPONSES], dtype=torch.float64)
    rewards = -BETA * world.kl
    rewards[torch.arange(len(RESPONSES)), world.actions.sum(1) - 1] += world.scores
    advantages, _ = gae(rewards, values, 1.0, 1.0, world.actions)
    advantages = advantages * world.probabilities[:, None].detach()
    losses, _ = policy_loss(world.logprobs, world.logprobs.detach(), advantages, world.actions, 0.2)
    assert torch.allclose(-world.gradient(losses.sum()), world.true_gradient(), atol=1e-12)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("right", [{1}, {0, 3, 5}])
def test_maxrl_has_the_gradient_of_the_first_terms_of_the_log_probability_of_a_right_response(world, right, k):
    """k samples give k - 1 terms: the paper's k, less the one that subtracting the mean only of solved groups costs."""
    checked = copy.copy(world)
    checked.scores = torch.tensor([float(i in right) for i in range(len(RESPONSES))], dtype=torch.float64)
    p = (checked.probabilities * checked.scores).sum()
    assert 0.01 < p < 0.7
    series = -sum((1 - p) ** j / j for j in range(1, k))
    assert torch.allclose(checked.expected_gradient("maxrl", k, 0.0), checked.gradient(series), atol=1e-7)
    if k > 2:
        assert (checked.gradient(series) - checked.gradient(p)).abs().max() > 0.01


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_dividing_by_the_standard_deviation_and_by_lengths_biases_grpo_and_dr_grpo_does_neither(world):
    """Without a KL, Dr. GRPO's gradient is (k - 1) / k of the true one: its baseline includes the response itself."""
    for k in (2, 3):
        unscaled = world.expected_gradient("dr_grpo", k, beta=0.0)
        assert torch.allclose(unscaled, (k - 1) / k * world.true_gradient(0.0), atol=1e-12)
        scaled = world.expected_gradient("grpo", k, beta=0.0)
        assert cosine(scaled, world.true_gradient(0.0)) < 0.99


def test_the_kl_in_the_loss_of_grpo_has_the_gradient_of_the_kl_from_the_reference(world):
    """d k3 = (1 - ref / policy) d log policy, whose expectation in each state is the gradient of KL(ref || policy)."""
    without, with_kl = (world.expected_gradient("dr_grpo", 2, beta=beta) for beta in (0.0, BETA))
    first = world.table.log_softmax(-1)[0].exp().detach()
    reach = torch.stack((torch.ones((), dtype=torch.float64), first[1], first[2]))  # per state
    reference, policy = world.ref_table.log_softmax(-1), world.table.log_softmax(-1)
    reverse = (reach[:, None] * reference.exp() * (reference - policy)).sum()
    assert torch.allclose(with_kl - without, -BETA * world.gradient(reverse), atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- 3. the run
KINDS = {
    "rloo": {"algorithm": "rloo", "samples_per_query": 4},
    "grpo": {"algorithm": "grpo", "samples_per_query": 4, "kl_coef": 0.5},
    "dr_grpo": {"algorithm": "dr_grpo", "samples_per_query": 2, "kl_coef": 0.5},
    "maxrl": {"algorithm": "maxrl", "samples_per_query": 4, "kl_coef": 0.0},
    "reinforce++": {"algorithm": "reinforce++", "samples_per_query": 1},
    "gspo": {"algorithm": "gspo", "samples_per_query": 4, "kl_coef": 0.5, "clip_range": None},
    "dapo": {"algorithm": "dapo", "samples_per_query": 2, "kl_coef": 0.0, "clip_range": None},
    "cispo": {"algorithm": "cispo", "samples_per_query": 4, "kl_coef": 0.0, "clip_range": None},
    "online_dpo": {"algorithm": "online_dpo", "samples_per_query": 4, "kl_coef": 0.5, "num_epochs": 1},
}


def spy_on(monkeypatch, name) -> Spy:
    """Record calls of a function of the script, and of the functions it calls to sample and to log."""
    return Spy(monkeypatch, name, train_grpo, update_metrics, sampler, batches)


def spy_on_loss(monkeypatch, name) -> list[tuple]:
    """Record the arguments and results of an algorithm's policy loss."""
    algorithm, calls = ALGORITHMS[name], []

    def policy_loss(*args):
        calls.append((args, algorithm.policy_loss(*args)))
        return calls[-1][1]

    monkeypatch.setitem(ALGORITHMS, name, replace(algorithm, policy_loss=policy_loss))
    return calls


def grpo_args(ppo: train_ppo.Args, **changes) -> train_grpo.Args:
    """Copy the settings that both scripts share, and set others."""
    names = {field.name for field in fields(train_grpo.Args)}
    return train_grpo.Args(**{name: value for name, value in vars(ppo).items() if name in names} | changes)


@pytest.fixture(scope="module")
def single_update(miniature) -> train_grpo.Args:
    """One update of eight responses, from a policy that sometimes samples EOS."""
    args = grpo_args(miniature.ppo, num_epochs=2, out=miniature.root / "grpo", overwrite=True, **KINDS["rloo"])
    return replace(args, sft=str(policy_that_stops(miniature.root)), total_episodes=8)


@pytest.fixture(scope="module")
def coarse(single_update, tmp_path_factory) -> train_grpo.Args:
    """DAPO with a rule that has two scores, so that some queries' responses have equal scores."""
    rule = tmp_path_factory.mktemp("coarse") / "rule.py"
    rule.write_text("def score(queries, responses): return [float(len(r) > 12) for r in responses]\n")
    args = replace(single_update, reward_model=None, reward=f"{rule}:score", missing_eos_score=None, **KINDS["dapo"])
    return replace(args, clip_range=UNCLIPPED["clip_range"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "maxrl"])
def test_the_first_step_of_a_run_uses_the_papers_gradient(single_update, kind, monkeypatch, gradients):  # noqa: F811
    """Expected from single unpadded responses in float64, at ratio 1 and with the policy far from the reference."""
    reference = str(single_update.out.parent / "sft")
    args = replace(single_update, sampler=SamplerSettings(correction="sampler_logprobs"), **KINDS[kind])
    monkeypatch.setattr(loading, "reference", lambda policy: load_gpt(reference).requires_grad_(False))
    rollouts = spy_on(monkeypatch, "rollout_metrics")
    train_grpo.main(args)
    (metrics,) = read_metrics(args.out)
    assert metrics["policy/first_ratio_error"] < 1e-4 and "value/loss" not in metrics and metrics["objective/kl"] > 1
    ((batch, scores, *_), _) = rollouts.calls[0]
    assert 0 < (scores == -1.0).sum() < 8  # without EOS
    objective, policy = written_out(args, batch, scores.double().tolist(), reference)
    trained = list(policy.parameters())
    expected = -torch.cat([g.flatten() for g in torch.autograd.grad(objective, trained)])
    assert expected.abs().max() > 1e-3
    assert torch.allclose(gradients[0].double(), expected, atol=2e-4 * expected.abs().max().item())


def written_out(args, batch, scores, reference):
    """Compute the paper's objective at ratio 1 row by row in float64; return it and the policy."""
    tokenizer, k, beta, B = load_tokenizer(args.sft), args.samples_per_query, args.kl_coef, len(batch)
    policy, ref_policy = (
        load_gpt(path).forbid(tokenizer.pad_id, tokenizer.vocab_size).double() for path in (args.sft, reference)
    )
    logs = []
    for query, response in zip(batch.query.tolist(), batch.response.tolist(), strict=True):
        query, response = ([i for i in ids if i != tokenizer.pad_id] for ids in (query, response))
        of_models = []
        for model in (policy, ref_policy):
            logits = model.logits(model(torch.tensor([query + response])))[0, len(query) - 1 : -1] / args.temperature
            of_models.append(logits.log_softmax(-1)[range(len(response)), response])
        logs.append(of_models)
    assert len({len(new) for new, _ in logs}) > 1
    kls = [(new - ref).detach() for new, ref in logs]
    objective = torch.zeros((), dtype=torch.float64)
    if args.algorithm == "reinforce++":
        to_go = [[scores[i] - beta * kl[t:].sum().item() for t in range(len(kl))] for i, kl in enumerate(kls)]
        every = torch.tensor([x for row in to_go for x in row], dtype=torch.float64)
        for (new, _), row in zip(logs, to_go, strict=True):
            normalised = (torch.tensor(row, dtype=torch.float64) - every.mean()) / every.std(correction=0)
            objective = objective + (normalised * new).sum() / len(every)
    for i, (new, ref) in enumerate(logs):
        group = range(i // k * k, i // k * k + k)
        if args.algorithm == "rloo":
            rewards = {j: scores[j] - beta * kls[j].sum().item() for j in group}
            baseline = sum(rewards[j] for j in group if j != i) / (k - 1)
            objective = objective + (rewards[i] - baseline) * new.sum() / B
        elif args.algorithm == "online_dpo":
            if i != max(group, key=lambda j: scores[j]):
                continue  # each pair once
            worst = min(group, key=lambda j: scores[j])
            margin = beta * ((new - ref).sum() - (logs[worst][0] - logs[worst][1]).sum())
            objective = objective + torch.nn.functional.logsigmoid(margin) / (B / k)
        elif args.algorithm == "maxrl":
            num_right = sum(scores[j] for j in group)  # mean of the right responses minus mean of all
            weight = scores[i] / num_right - 1 / k if num_right else 0.0
            objective = objective + weight * new.sum() / (B / k)
        elif args.algorithm in ("dapo", "cispo"):
            T = batch.response.size(1)
            punished = [0.0 if args.algorithm == "cispo" else max(0, len(new) - 0.8 * T) / (0.2 * T) for new, _ in logs]
            of_group = torch.tensor([scores[j] - punished[j] for j in group], dtype=torch.float64)
            kept = [
                j for j in range(B) if args.algorithm == "cispo" or len(set(scores[j // k * k : j // k * k + k])) > 1
            ]
            if i in kept:
                advantage = (scores[i] - punished[i] - of_group.mean()) / (of_group.var(correction=0) + 1e-8).sqrt()
                objective = objective + advantage * new.sum() / sum(len(logs[j][0]) for j in kept)
        elif args.algorithm in ("grpo", "dr_grpo", "gspo"):
            of_group = torch.tensor([scores[j] for j in group], dtype=torch.float64)
            advantage = scores[i] - of_group.mean()
            k3_of_tokens = (ref - new).exp() - 1 - (ref - new)
            if args.algorithm != "dr_grpo":
                objective = objective + (advantage / of_group.std(correction=0) * new - beta * k3_of_tokens).mean() / B
            else:
                objective = objective + (advantage * new - beta * k3_of_tokens).sum() / B
    return objective, policy


def test_the_first_step_of_maxrl_raises_right_responses_above_the_mean_of_all(coarse, monkeypatch, gradients):  # noqa: F811
    args = replace(coarse, num_epochs=1, batch_size=16, total_episodes=16, **KINDS["maxrl"])
    rollouts = spy_on(monkeypatch, "rollout_metrics")
    train_grpo.main(args)
    ((batch, scores, *_), _) = rollouts.calls[0]
    shares = scores.view(-1, 4).mean(1)
    assert set(scores.tolist()) == {0.0, 1.0} and ((shares > 0) & (shares < 1)).sum() > 1
    objective, policy = written_out(args, batch, scores.double().tolist(), args.sft)
    expected = -torch.cat([g.flatten() for g in torch.autograd.grad(objective, list(policy.parameters()))])
    assert expected.abs().max() > 1e-3
    assert torch.allclose(gradients[0].double(), expected, atol=2e-4 * expected.abs().max().item())


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_separate_rows_give_the_same_metrics_and_weights(single_update, monkeypatch, tuning):
    """Two updates. Sampling, reading and training read each query once, or once per response."""
    args = replace(single_update, total_episodes=16, tune=tuning, **({"lr": 1e-2} if tuning == "lora" else {}))
    shared, read = [], reading.read_queries_once
    monkeypatch.setattr(reading, "read_queries_once", lambda *arguments: shared.append(1) or read(*arguments))
    train_grpo.main(args)
    expected, trained = read_metrics(args.out), weights(load_gpt(args.out))
    assert shared
    shared.clear()
    for module in ("reading", "generate", "batch"):
        separate = lambda query, mask: Groups(torch.arange(len(query)), torch.arange(len(query)))  # noqa: E731
        monkeypatch.setattr(f"nanorlhf.{module}.find_groups", separate)
    train_grpo.main(args)
    assert not shared and torch.allclose(weights(load_gpt(args.out)), trained, atol=2e-5)
    rounded = {*TIME_METRICS, "policy/first_ratio_error", "policy/sampler_gap"}
    for rows in zip(read_metrics(args.out), expected, strict=True):
        first, second = ({key: value for key, value in row.items() if key not in rounded} for row in rows)
        assert first == pytest.approx(second, abs=2e-4)


def test_the_responses_to_a_query_are_consecutive_rows(single_update, monkeypatch):
    indices, rollouts = spy_on(monkeypatch, "batch_indices"), spy_on(monkeypatch, "rollout_metrics")
    train_grpo.main(replace(single_update, total_episodes=16))
    for (_, chosen), ((batch, *_), _) in zip(indices.calls, rollouts.calls, strict=True):
        assert len(chosen) == 2 and len(batch.query) == 8
        for g in range(2):
            assert (batch.query[4 * g : 4 * g + 4] == batch.query[4 * g]).all()
            assert len({tuple(row) for row in batch.response[4 * g : 4 * g + 4].tolist()}) > 1
    samples = [json.loads(line) for line in (single_update.out / "samples.jsonl").open()]
    assert len({sample["query"] for sample in samples}) == len(samples) == 4  # one per group


@pytest.mark.parametrize("kind", ["rloo", "grpo", "gspo", "dapo", "cispo"])
def test_the_micro_batch_size_does_not_change_the_gradient(single_update, coarse, kind, gradients):  # noqa: F811
    """Micro-batches and minibatches split groups; DAPO drops some responses. Equal up to rounding."""
    args = replace(single_update, num_minibatches=2, **KINDS[kind] | {"clip_range": UNCLIPPED["clip_range"]})
    if kind == "dapo":
        args = replace(coarse, num_minibatches=2, batch_size=24, total_episodes=24)
    runs = []
    for size in (1, 3, 8):
        gradients.clear()
        train_grpo.main(replace(args, micro_batch_size=size))
        runs.append(torch.stack(gradients))
    assert runs[0].abs().max() > 1e-2 and all(len(steps) == 4 for steps in runs)
    for steps in runs[:-1]:
        assert torch.allclose(steps, runs[-1], atol=1e-4)
    if kind == "dapo":
        (metrics,) = read_metrics(args.out)
        assert metrics["groups/alike"] > metrics["groups/dropped"] > 0 and metrics["groups/refilled"] >= 3


def test_the_second_minibatch_of_rloo_uses_the_gradient_of_the_clipped_loss(single_update, monkeypatch, gradients):  # noqa: F811
    """The paper takes one step; after it, we clip each token's ratio to the rollout's policy like PPO."""
    args = replace(single_update, num_epochs=1, num_minibatches=2, micro_batch_size=8, lr=3e-3, clip_range=0.02)
    rollouts, seen = spy_on(monkeypatch, "rollout_metrics"), []
    plain = train_grpo.response_logprobs

    def response_logprobs(policy, *arguments):
        seen.append(copy.deepcopy(policy).double())
        return plain(policy, *arguments)

    split = batches.Batch.split
    minibatches = []
    monkeypatch.setattr(
        batches.Batch, "split", lambda batch, num: (minibatches.append(mb) or mb for mb in split(batch, num))
    )
    monkeypatch.setattr(train_grpo, "response_logprobs", response_logprobs)
    train_grpo.main(args)
    ((batch, scores, *_), _) = rollouts.calls[0]
    policy, pad_id = seen[1], load_tokenizer(args.sft).pad_id
    kl = [(batch.logprobs - batch.ref_logprobs)[i][batch.actions[i]].sum().item() for i in range(8)]
    rewards = [scores[i].item() - args.kl_coef * kl[i] for i in range(8)]
    objective, kinks = torch.zeros((), dtype=torch.float64), []
    for i in minibatches[1].index.tolist():
        query, response = ([x for x in ids[i].tolist() if x != pad_id] for ids in (batch.query, batch.response))
        logits = policy.logits(policy(torch.tensor([query + response])))[0, len(query) - 1 : -1] / args.temperature
        new = logits.log_softmax(-1)[range(len(response)), response]
        ratios = (new - batch.logprobs[i][batch.actions[i]].double()).exp()
        group = range(i // 4 * 4, i // 4 * 4 + 4)
        advantage = rewards[i] - sum(rewards[j] for j in group if j != i) / 3
        terms = surrogate(ratios, advantage, 0.98, 1.02)
        objective = objective + terms.sum() / 4
        kinks += (terms != ratios * advantage).tolist()
    assert 0 < sum(kinks) < len(kinks)
    grads = torch.autograd.grad(objective, list(policy.parameters()))
    expected = -torch.cat([g.flatten() for g in grads])
    assert torch.allclose(gradients[1].double(), expected, atol=1e-3 * expected.abs().max().item())


def test_a_rollout_with_equal_scores_takes_no_step_and_logs_no_nan(coarse, tmp_path, gradients):  # noqa: F811
    rule = tmp_path / "rule.py"
    rule.write_text("def score(queries, responses): return [1.0] * len(responses)\n")
    args = replace(coarse, reward=f"{rule}:score", total_episodes=16)
    train_grpo.main(args)
    rows = read_metrics(args.out)
    assert gradients == [] and torch.equal(weights(load_gpt(args.sft)), weights(load_gpt(args.out)))
    assert [(row["groups/alike"], row["groups/dropped"], row["groups/refilled"]) for row in rows] == [(1, 1, 12)] * 2
    assert all(math.isfinite(x) for row in rows for x in row.values()) and "policy/loss" not in rows[0]


def test_the_generating_share_is_the_time_of_all_samples(coarse, monkeypatch):
    """It includes DAPO's resampling, but not the passes that read the responses."""
    calls = []

    def slow(function):
        def slowed(*arguments):
            calls.append(function)
            time.sleep(0.05)
            return function(*arguments)

        return slowed

    monkeypatch.setattr(train_grpo.Sampler, "sample", slow(train_grpo.Sampler.sample))
    monkeypatch.setattr(train_grpo, "read_logprobs", slow(train_grpo.read_logprobs))
    train_grpo.main(coarse)
    (row,) = read_metrics(coarse.out)
    seconds, share = 8 / row["episodes_per_second"], row["time/generating_share"]
    assert len(calls) > 2 and row["groups/refilled"] > 0 and "time/mfu" not in row
    assert min(share, 1 - share) * seconds > 0.05 * len(calls) / 2


def test_the_glossary_explains_every_metric(single_update, coarse):
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    for args in (single_update, coarse):
        train_grpo.main(args)
        logged = {name for name in read_metrics(args.out)[0] if name != "step" and not name.startswith("reward/")}
        assert "groups/alike" in logged and logged <= set(re.findall(r"`([\w/]+)`", glossary))


def test_the_statistics_of_gspo_describe_responses(single_update, monkeypatch):
    """Means over responses of exp(mean log-ratio), its clipping and half its squared log, in the last step."""
    args = replace(single_update, num_epochs=1, num_minibatches=2, micro_batch_size=3, lr=3e-3, **KINDS["gspo"])
    counted = []
    plain = update_metrics.UpdateStatistics.count
    monkeypatch.setattr(
        update_metrics.UpdateStatistics, "count", lambda self, means: (counted.append(means), plain(self, means))
    )
    losses = spy_on_loss(monkeypatch, "gspo")
    train_grpo.main(args)
    assert len(losses) == 4  # responses per group: 3, 1, 3 and 1
    logs, clips = [], []
    for (new, old, advantages, actions, _), _ in losses[2:]:
        for i in range(len(new)):
            log_ratio = (new - old)[i][actions[i]].double().mean().item()
            logs.append(log_ratio)
            clips.append(log_ratio > math.log(1 + 4e-4) if advantages[i, 0] > 0 else log_ratio < math.log(1 - 3e-4))
    last = counted[1]
    assert last["policy/ratio"] == pytest.approx(fmean(map(math.exp, logs)), abs=1e-6)
    assert last["policy/approx_kl"] == pytest.approx(fmean(x * x / 2 for x in logs), rel=1e-3)
    assert last["policy/clip_fraction"] == pytest.approx(fmean(clips)) and 0 < sum(clips) < 4
    assert counted[0]["policy/ratio"] == pytest.approx(1, abs=1e-6) and counted[0]["policy/clip_fraction"] == 0


def test_the_mean_over_a_responses_own_length_is_exact_in_each_minibatch(single_update, monkeypatch, gradients):  # noqa: F811
    """The first of two minibatches, in micro-batches of one; its mean length differs from the rollout's."""
    reference = str(single_update.out.parent / "sft")
    args = replace(
        single_update,
        num_minibatches=2,
        micro_batch_size=1,
        sampler=SamplerSettings(correction="sampler_logprobs"),
        **KINDS["grpo"],
    )
    monkeypatch.setattr(loading, "reference", lambda policy: load_gpt(reference).requires_grad_(False))
    rollouts, losses = spy_on(monkeypatch, "rollout_metrics"), spy_on_loss(monkeypatch, "grpo")
    seen = []
    split = batches.Batch.split
    monkeypatch.setattr(batches.Batch, "split", lambda batch, num: (seen.append(mb) or mb for mb in split(batch, num)))
    train_grpo.main(args)
    ((batch, scores, *_), _) = rollouts.calls[0]
    chosen = seen[0].index.tolist()
    lengths = batch.actions.sum(1).double()
    assert len(chosen) == 4 and abs(lengths[chosen].mean() - lengths.mean()) > 0.1 and len(losses) == 4 * 4
    tokenizer = load_tokenizer(args.sft)
    policy, ref_policy = (
        load_gpt(path).forbid(tokenizer.pad_id, tokenizer.vocab_size).double() for path in (args.sft, reference)
    )
    objective = torch.zeros((), dtype=torch.float64)
    for i in chosen:
        query = [x for x in batch.query[i].tolist() if x != tokenizer.pad_id]
        response = [x for x in batch.response[i].tolist() if x != tokenizer.pad_id]
        new, ref = (
            (
                model.logits(model(torch.tensor([query + response])))[0, len(query) - 1 : -1] / args.temperature
            ).log_softmax(-1)[range(len(response)), response]
            for model in (policy, ref_policy)
        )
        group = scores[i // 4 * 4 : i // 4 * 4 + 4].double()
        advantage = (scores[i].double() - group.mean()) / group.std(correction=0)
        penalty = (ref - new).exp() - 1 - (ref - new)
        objective = objective + (advantage * new - args.kl_coef * penalty).sum() / len(response) / len(chosen)
    expected = -torch.cat([g.flatten() for g in torch.autograd.grad(objective, list(policy.parameters()))])
    assert torch.allclose(gradients[0].double(), expected, atol=2e-4 * expected.abs().max().item())


def test_a_dropped_response_does_not_count_in_the_loss(single_update, monkeypatch, gradients):  # noqa: F811
    """With `in_loss` False, only the other rows have a gradient; an empty minibatch takes no step."""
    plain, dropped = train_grpo.Sampler.correct, []

    def correct(self, batch):
        batch.in_loss[dropped] = False
        return plain(self, batch)

    monkeypatch.setattr(train_grpo.Sampler, "correct", correct)
    losses, readings = spy_on_loss(monkeypatch, "grpo"), spy_on(monkeypatch, "response_logprobs")
    args = replace(single_update, num_epochs=1, micro_batch_size=8, **KINDS["grpo"])
    dropped += [0, 2, 5]
    train_grpo.main(args)
    ((_, _, _, actions, *_), (lost, _)), *_ = losses
    lengths = actions.sum(1)
    assert (lengths > 0).sum() == 5 and (lost[lengths == 0] == 0).all()
    (metrics,) = read_metrics(args.out)
    expected = (lost.sum(1)[lengths > 0] / lengths[lengths > 0]).mean().item()
    assert metrics["policy/loss"] == pytest.approx(expected, abs=1e-5)  # the KL is 0 before the first step
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    entropies = [entropy for _, (_, entropy) in readings.calls]
    mean = sum(entropy[actions].sum() for entropy in entropies) / actions.sum()
    assert metrics["policy/entropy"] == pytest.approx(mean.item(), rel=1e-5)
    gradients.clear()
    dropped[:] = range(8)
    train_grpo.main(args)
    assert gradients == [] and torch.equal(weights(load_gpt(args.sft)), weights(load_gpt(args.out)))


def test_with_kl_coefficient_zero_an_infinite_kl_does_not_reach_loss_or_gradient(single_update, monkeypatch):
    """For a token that only the reference can emit, exp(ref - new) is infinite, and 0 * inf is NaN."""
    monkeypatch.setattr(train_grpo, "k3", lambda new, ref: torch.full_like(new, torch.inf))
    train_grpo.main(replace(single_update, **KINDS["grpo"] | {"kl_coef": 0.0}))
    (metrics,) = read_metrics(single_update.out)
    assert metrics["skipped_steps"] == 0 and math.isfinite(metrics["policy/loss"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_resuming_equals_the_uninterrupted_run(single_update, coarse, kind, tmp_path, monkeypatch):
    """Equal to the last bit, including DAPO's resampling; the state has no value model."""
    args = replace(single_update, **KINDS["grpo"]) if kind == "grpo" else coarse
    args = replace(args, total_episodes=32, save_every=2)
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_grpo.main(whole)
    interrupt_at(4, monkeypatch, train_grpo, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_grpo.main(broken)
    state = torch.load(states(broken.out)[0] / "state.pt")
    assert "policy" in state and "value_model" not in state
    assert len(state["steps"]["optimizer"]["state"]) == len(list(load_gpt(args.sft).parameters()))
    train_grpo.main(replace(broken, overwrite=False, resume=True))
    assert torch.equal(weights(load_gpt(whole.out)), weights(load_gpt(broken.out)))
    kept, expected = (
        [{name: x for name, x in row.items() if name not in TIME_METRICS} for row in read_metrics(a.out)]
        for a in (broken, whole)
    )
    assert kept == expected
    if kind == "dapo":
        assert all(sum(row["groups/refilled"] for row in rows) > 0 for rows in (kept[:2], kept[2:]))


@pytest.mark.slow
def test_a_run_learns_a_rule(single_update, tmp_path):
    """All signs are right end to end: rewarding short responses makes them shorter."""
    rule = tmp_path / "rule.py"
    rule.write_text("def score(queries, responses): return [-len(r) / 4 for r in responses]\n")
    args = replace(
        single_update, reward=f"{rule}:score", total_episodes=8 * 32, batch_size=32, micro_batch_size=32, lr=3e-3,
        missing_eos_score=-20.0, num_epochs=4,
    )  # fmt: skip
    for kind in ("rloo", "gspo", "online_dpo"):
        kl_coef = 0.1 if kind == "online_dpo" else 0.0
        train_grpo.main(replace(args, **KINDS[kind] | {"kl_coef": kl_coef}))
        rows = read_metrics(args.out)
        last = sum(row["objective/score"] for row in rows[-4:]) / 4
        assert rows[0]["objective/score"] < -4 and last > -1 and rows[-1]["eos_rate"] > 0.9, (kind, last)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples_per_query": 1}, "--algorithm rloo needs --samples-per-query of at least 2"),
        ({"samples_per_query": 3}, "--batch-size 8 must be a multiple of --samples-per-query 3"),
        ({"samples_per_query": 0}, "--samples-per-query 0"),
        ({"gamma": 0.9}, "--gamma must be 1 with --algorithm rloo; got 0.9"),
        ({**KINDS["dr_grpo"], "gamma": 0.9}, "--gamma must be 1 with --algorithm dr_grpo; got 0.9"),
        (KINDS["dapo"] | {"kl_coef": 0.1}, "--kl-coef must be 0 with --algorithm dapo; got 0.1"),
        (KINDS["maxrl"] | {"kl_coef": 0.1}, "--kl-coef must be 0 with --algorithm maxrl; got 0.1"),
        (KINDS["maxrl"], "--missing-eos-score must be at least 0 with --algorithm maxrl; got -1.0"),
        (KINDS["cispo"] | {"kl_coef": 0.1}, "--kl-coef must be 0 with --algorithm cispo; got 0.1"),
        (KINDS["online_dpo"] | {"num_epochs": 2}, "--algorithm online_dpo needs --num-epochs 1"),
        (KINDS["online_dpo"] | {"num_minibatches": 2}, "--algorithm online_dpo needs --num-epochs 1"),
        (KINDS["online_dpo"] | {"kl_coef": 0.0}, "--kl-coef must be above 0 with --algorithm online_dpo"),
        ({"reward_model": None}, "--reward-model None leaves nothing to score with"),
    ],
)
def test_conflicting_settings_are_rejected_before_anything_is_written(single_update, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        train_grpo.main(replace(single_update, out=tmp_path / "grpo", **change))
    assert not (tmp_path / "grpo").exists()


@pytest.mark.parametrize(("words", "clip_range"), [((), None), (("0.1",), 0.1), (("0.2", "0.28"), (0.2, 0.28))])
def test_the_clip_range_is_one_number_or_two_on_the_command_line(monkeypatch, words, clip_range):
    seen = []
    flags = ("--clip-range", *words) if words else ()
    monkeypatch.setattr("sys.argv", ["train_grpo.py", "tiny", *flags])
    command_line(seen.append, train_grpo.RECIPES)
    assert seen[0].clip_range == clip_range


def test_args_json_records_the_clip_range(single_update):
    for kind, expected in (("gspo", [3e-4, 4e-4]), ("rloo", 0.3)):
        train_grpo.main(replace(single_update, **KINDS[kind] | {"clip_range": None if kind == "gspo" else 0.3}))
        assert json.loads((single_update.out / "args.json").read_text())["clip_range"] == expected


def test_an_unknown_algorithm_is_rejected(single_update, tmp_path, monkeypatch, capsys):
    """The command line prints an error; from Python, no other algorithm runs instead."""
    monkeypatch.setattr("sys.argv", ["train_grpo.py", "tiny", "--algorithm", "reinforce"])
    with pytest.raises(SystemExit) as stopped:
        command_line(train_grpo.main, train_grpo.RECIPES)
    assert stopped.value.code == 2 and "reinforce" in capsys.readouterr().err
    with pytest.raises(KeyError, match="reinforce"):
        train_grpo.main(replace(single_update, out=tmp_path / "grpo", algorithm="reinforce"))
    assert not (tmp_path / "grpo").exists()
