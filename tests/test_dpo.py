"""Implicit rewards: log-probabilities of whole responses, in float64 and without padding."""

import pytest
import torch
import torch.nn.functional as F

from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.dpo import implicit_pair_rewards, implicit_rewards, pair_logprobs, summed_logprobs
from tests.conftest import TINY

EOS, PAD = 1, 36
ROWS = [Comparison([5, 6, 7], [8, 9, EOS], [4, EOS], {}), Comparison([10], [11, EOS], [12, 13, 14, EOS], {})]
RESPONSES = "chosen", "rejected"


def float64_sum(model, query: list[int], response: list[int]) -> torch.Tensor:
    """One text without padding, from full logits: the sum of its response tokens' log-probabilities."""
    logits = model.logits(model(torch.tensor([query + response])))[0]  # (L, V)
    return sum(F.log_softmax(logits[len(query) - 1 + t], -1)[token] for t, token in enumerate(response))


def test_logprobs_are_summed_over_the_response_with_its_eos_and_without_the_query(tiny_gpt):
    model = tiny_gpt.double()
    pairs, queries = pair_logprobs(model, ROWS, PAD), [row.query for row in ROWS]
    singly = [summed_logprobs(model, queries, [getattr(row, name) for row in ROWS], PAD) for name in RESPONSES]
    for name, *found in zip(RESPONSES, pairs, singly, strict=True):
        expected = [float64_sum(model, row.query, getattr(row, name)).item() for row in ROWS]
        assert all(sums.tolist() == pytest.approx(expected, abs=1e-9) for sums in found)
    chosen, _ = pairs
    without_eos = summed_logprobs(model, [ROWS[0].query], [ROWS[0].chosen[:-1]], PAD)
    assert without_eos.item() > chosen[0].item() + 1e-3


def test_implicit_rewards_do_not_depend_on_the_other_rows(tiny_gpt):
    torch.manual_seed(1)
    ref_policy = type(tiny_gpt)(TINY)
    rows = [Demonstration([5] * n, [7] * (9 - n) + [EOS], {}) for n in (1, 4, 8)]
    together = implicit_rewards(tiny_gpt, ref_policy, rows, PAD, 2.0)
    alone = torch.cat([implicit_rewards(tiny_gpt, ref_policy, [row], PAD, 2.0) for row in rows])
    assert together.abs().min() > 0.5 and torch.allclose(together, alone, atol=1e-5)


def test_the_rewards_of_a_pair_are_those_of_its_responses_and_0_by_the_reference_itself(tiny_gpt):
    torch.manual_seed(1)
    ref_policy = type(tiny_gpt)(TINY)
    pairs = implicit_pair_rewards(tiny_gpt, ref_policy, ROWS, PAD, 2.0)
    for rewards, name in zip(pairs, RESPONSES, strict=True):
        singly = [Demonstration(row.query, getattr(row, name), {}) for row in ROWS]
        assert torch.allclose(rewards, implicit_rewards(tiny_gpt, ref_policy, singly, PAD, 2.0), atol=1e-5)
        assert rewards.abs().min() > 0.5
    assert all(rewards.tolist() == [0, 0] for rewards in implicit_pair_rewards(tiny_gpt, tiny_gpt, ROWS, PAD, 2.0))
