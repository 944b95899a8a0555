"""Implicit rewards against log-probabilities of single responses in float64; the losses of KTO and ORPO."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.dpo import (
    Labels,
    implicit_pair_rewards,
    implicit_rewards,
    kto_loss,
    log_odds,
    log_ratio_sum,
    mismatched,
    pair_logprobs,
    pair_means,
    summed_logprobs,
)
from nanorlhf.model import GPT
from nanorlhf.t5 import T5Config
from tests.conftest import TINY

EOS, PAD = 1, 36
ROWS = [Comparison([5, 6, 7], [8, 9, EOS], [4, EOS], {}), Comparison([10], [11, EOS], [12, 13, 14, EOS], {})]
RESPONSES = "chosen", "rejected"


def float64_sum(model, query: list[int], response: list[int]) -> torch.Tensor:
    """Sum the log-probabilities of the response's tokens, from full logits of one text without padding."""
    logits = model.logits(model(torch.tensor([query + response])))[0]  # (L, V)
    return sum(F.log_softmax(logits[len(query) - 1 + t], -1)[token] for t, token in enumerate(response))


def test_logprobs_are_summed_over_the_response_with_its_eos_and_without_the_query(tiny_gpt):
    model = tiny_gpt.double()
    pairs, queries = pair_logprobs(model, ROWS, PAD), [row.query for row in ROWS]
    singly = [summed_logprobs(model, queries, [getattr(row, name) for row in ROWS], PAD) for name in RESPONSES]
    for name, *results in zip(RESPONSES, pairs, singly, strict=True):
        expected = [float64_sum(model, row.query, getattr(row, name)).item() for row in ROWS]
        assert all(sums.tolist() == pytest.approx(expected, abs=1e-9) for sums in results)
    chosen, _ = pairs
    without_eos = summed_logprobs(model, [ROWS[0].query], [ROWS[0].chosen[:-1]], PAD)
    assert without_eos.item() > chosen[0].item() + 1e-3


def test_summed_logprobs_have_the_gradient_of_float64(tiny_gpt):
    model, [row] = tiny_gpt.double(), ROWS[:1]
    sums = summed_logprobs(model, [row.query], [row.chosen], PAD)[0], float64_sum(model, row.query, row.chosen)
    gradients = [torch.autograd.grad(x, list(model.parameters())) for x in sums]
    assert all(torch.allclose(*pair, atol=1e-9) for pair in zip(*gradients, strict=True))


def test_implicit_rewards_do_not_depend_on_the_other_rows(tiny_gpt):
    torch.manual_seed(1)
    ref_policy = type(tiny_gpt)(TINY)
    rows = [Demonstration([5] * n, [7] * (9 - n) + [EOS], {}) for n in (1, 4, 8)]
    together = implicit_rewards(tiny_gpt, ref_policy, rows, PAD, 2.0)
    alone = torch.cat([implicit_rewards(tiny_gpt, ref_policy, [row], PAD, 2.0) for row in rows])
    assert together.abs().min() > 0.5 and torch.allclose(together, alone, atol=1e-5)


def test_pair_rewards_equal_single_rewards_and_are_0_for_the_reference(tiny_gpt):
    torch.manual_seed(1)
    ref_policy = type(tiny_gpt)(TINY)
    pairs = implicit_pair_rewards(tiny_gpt, ref_policy, ROWS, PAD, 2.0)
    for rewards, name in zip(pairs, RESPONSES, strict=True):
        singly = [Demonstration(row.query, getattr(row, name), {}) for row in ROWS]
        assert torch.allclose(rewards, implicit_rewards(tiny_gpt, ref_policy, singly, PAD, 2.0), atol=1e-5)
        assert rewards.abs().min() > 0.5
    assert all(rewards.tolist() == [0, 0] for rewards in implicit_pair_rewards(tiny_gpt, tiny_gpt, ROWS, PAD, 2.0))


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_a_missing_response_has_a_sum_of_0_and_changes_no_other(tiny_gpt, family):
    torch.manual_seed(0)
    shape = T5Config(vocab_size=36, d_model=24, n_layer=2, n_head=3, d_head=10, d_mlp=40)
    model = (tiny_gpt if family == "gpt" else GPT(shape)).double()
    whole = torch.stack(pair_logprobs(model, ROWS, PAD))  # (2, B)
    one_sided = [Comparison(ROWS[0].query, ROWS[0].chosen, [], {}), Comparison(ROWS[1].query, [], ROWS[1].rejected, {})]
    sums = torch.stack(pair_logprobs(model, one_sided, PAD))
    assert sums[1, 0] == sums[0, 1] == 0 and whole.abs().min() > 0.1
    assert torch.allclose(sums.diagonal(), whole.diagonal(), atol=1e-9)


# -------------------------------------------------------------------------------------------------------- KTO and ORPO
def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(0, 10), st.floats(0, 3), st.floats(0, 3))
def test_kto_loss_is_lambda_minus_the_papers_value(chosen, rejected, z, weight_d, weight_u):
    """Equation 8 in Python floats: values lambda_D sigmoid(r - z) and lambda_U sigmoid(z - r), and their slopes."""
    labels = Labels(desirable_weight=weight_d, undesirable_weight=weight_u)
    rewards = torch.tensor([[chosen] * 3, [rejected] * 3], dtype=torch.float64, requires_grad=True)
    present = torch.tensor([[True, True, False], [True, False, True]])
    loss, margin = kto_loss(rewards, present, torch.tensor(z, dtype=torch.float64), labels)
    desirable = weight_d - weight_d * sigmoid(chosen - z)
    undesirable = weight_u - weight_u * sigmoid(z - rejected)
    assert loss.tolist() == pytest.approx([(desirable + undesirable) / 2, desirable, undesirable], abs=1e-12)
    assert margin.tolist() == pytest.approx([chosen - rejected, chosen - z, z - rejected], abs=1e-12)
    [slopes] = torch.autograd.grad(loss.sum(), rewards)
    slope_d = -weight_d * sigmoid(chosen - z) * sigmoid(z - chosen)
    slope_u = weight_u * sigmoid(z - rejected) * sigmoid(rejected - z)
    expected = [slope_d / 2, slope_d, 0, slope_u / 2, 0, slope_u]
    assert slopes.flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_nan_in_place_of_a_missing_response_reaches_neither_loss_nor_gradient():
    rewards = torch.tensor([[1.0, math.nan], [math.nan, 2.0]], requires_grad=True)
    loss, margin = kto_loss(rewards, torch.eye(2, dtype=torch.bool), torch.tensor(0.5), Labels())
    loss.sum().backward()
    assert loss.isfinite().all() and margin.tolist() == [0.5, -1.5]
    assert rewards.grad.isfinite().all() and (rewards.grad.diagonal() != 0).all()


@given(st.floats(1e-4, 1 - 1e-4))
def test_log_odds_and_their_gradient_match_the_formula(p):
    """log(p / (1 - p)) has the derivative 1 / (1 - p) with respect to log p."""
    logprob = torch.tensor(math.log(p), dtype=torch.float64, requires_grad=True)
    odds = log_odds(logprob)
    assert odds.item() == pytest.approx(math.log(p / (1 - p)), abs=1e-9)
    assert torch.autograd.grad(odds, logprob)[0].item() == pytest.approx(1 / (1 - p), rel=1e-9)


def test_log_odds_are_finite_for_the_certain_and_the_impossible():
    logprobs = torch.tensor([0.0, -1e-9, -200.0], requires_grad=True)
    odds = log_odds(logprobs)
    odds.sum().backward()
    assert odds.tolist() == pytest.approx([-math.log(1e-6)] * 2 + [-200.0], rel=1e-3)
    assert logprobs.grad.isfinite().all()


def test_mismatched_rows_have_the_next_rows_responses_and_the_last_row_the_firsts():
    third = Comparison([20, 21], [22, EOS], [], {})
    pairs = mismatched([*ROWS, third])
    assert [(row.query, row.chosen, row.rejected) for row in pairs] == [
        ([5, 6, 7], [11, EOS], [12, 13, 14, EOS]),
        ([10], [22, EOS], []),
        ([20, 21], [8, 9, EOS], [4, EOS]),
    ]


def test_log_ratios_are_summed_over_existing_responses(tiny_gpt):
    torch.manual_seed(1)
    ref_policy = type(tiny_gpt)(TINY).double()
    rows = [ROWS[0], Comparison(ROWS[1].query, [], ROWS[1].rejected, {})]
    total, number = log_ratio_sum(tiny_gpt.double(), rows, ref_policy, PAD)
    expected = sum(
        sign * float64_sum(model, row.query, response).item()
        for row in rows
        for response in filter(None, (row.chosen, row.rejected))
        for model, sign in ((tiny_gpt, 1), (ref_policy, -1))
    )
    assert number == 3 and abs(expected) > 0.5 and total.item() == pytest.approx(expected, abs=1e-9)


def test_rewards_are_averaged_over_the_responses_of_their_kind():
    means = pair_means(torch.tensor([0.5, 0.75, 3.0, -1.0, 0.75, 0.25]))
    assert means == {"loss": 0.5, "accuracy": 0.75, "chosen_reward": 4, "rejected_reward": -4, "margin": 8}
    assert pair_means(torch.tensor([0.5, 1.0, 3.0, 0.0, 1.0, 0.0])) == {"loss": 0.5, "accuracy": 1, "chosen_reward": 3}
