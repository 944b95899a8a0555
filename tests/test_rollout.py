"""A rollout row by row: which rows share a micro-batch changes nothing but the work."""

from dataclasses import replace

import pytest
import torch

from nanorlhf.dataset import Demonstration
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward import end_scores
from nanorlhf.rollout import Rollout, response_values, rollout
from tests.conftest import TINY

EOS, PAD, T = 1, 99, 6
LENGTHS = [9, 2, 30, 5, 2, 21, 13, 3]
PER_TOKEN = ("sampled_logprobs", "logprobs", "ref_logprobs", "exact_kl", "values", "scores")


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT, ScalarModel]:
    """Policy, reference and value model, far from uniform; the policy ends a response after about two tokens."""
    torch.manual_seed(0)
    made = GPT(TINY), GPT(TINY), ScalarModel(replace(TINY, n_layer=1))
    with torch.no_grad():
        for model in made:
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        made[0].transformer.norm.bias.add_(4 * made[0].lm_head.weight[EOS] / made[0].lm_head.weight[EOS].norm())
    return made


def rows_and_uniforms() -> tuple[list[Demonstration], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [
        Demonstration(torch.randint(2, 37, (n,), generator=generator).tolist(), [EOS], {"query": str(n)})
        for n in LENGTHS
    ]
    return rows, torch.rand((len(rows), T), generator=generator, dtype=torch.float64)


def sampled(models, size: int, score_at: str = "after_eos", dtype: torch.dtype = torch.float32) -> Rollout:
    policy, ref_policy, value_model = models
    rows, uniforms = rows_and_uniforms()

    def score(some, query, response):
        assert [len(row.query) for row in some] == (query != PAD).sum(1).tolist()  # the rows that belong to the ids
        return response, end_scores(value_model, torch.cat((query, response), dim=1), query.size(1), PAD)

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return rollout(policy, ref_policy, value_model, score, rows, uniforms, EOS, PAD, 0.7, score_at, size, Lengths())


class Lengths:
    """A gold score that tells the rows apart."""

    def of_ids(self, queries, query, response):
        return [float(length) for length in queries]


@pytest.mark.parametrize("score_at", ["after_eos", "last_token"])
def test_rows_that_share_a_micro_batch_do_not_change_each_other(models, score_at):
    """Alone, a row has no padding at all."""
    alone = sampled(models, 1, score_at)
    has_eos = (alone.response == EOS).any(1)
    assert has_eos.any() and alone.eos_index.unique().numel() > 2
    for size in (3, 8):
        together = sampled(models, size, score_at)
        assert torch.equal(together.response, alone.response) and torch.equal(together.query, alone.query)
        assert together.gold_scores == alone.gold_scores == LENGTHS  # in the order of the batch
        for name in PER_TOKEN:
            assert torch.allclose(getattr(together, name), getattr(alone, name), atol=1e-5), name


def test_a_micro_batch_is_as_wide_as_its_longest_row(models, monkeypatch):
    columns, forward = [], type(models[0].transformer).forward

    def counted(self, ids, mask=None, cache=None, *others, **named):
        if cache is None:
            columns.append(ids.numel())
        return forward(self, ids, mask, cache, *others, **named)

    monkeypatch.setattr(type(models[0].transformer), "forward", counted)
    batch = sampled(models, 2)
    states = (~batch.state_mask).sum(1).tolist()
    order = sorted(range(8), key=LENGTHS.__getitem__)
    passes = 0
    for i, j in zip(order[::2], order[1::2], strict=True):
        q, t = max(LENGTHS[i], LENGTHS[j]), max(states[i], states[j])
        passes += 2 * (3 * (q + t) + q + T)  # policy, reference and values; the score's own pass reads all T columns
    assert sum(columns) == passes < 0.7 * 4 * batch.query_response.numel()


def test_the_exact_kl_is_the_sum_over_the_vocabulary_in_float64(models):
    policy, ref_policy, _ = models
    batch = sampled(models, 8)
    total = 0.0
    for b, n in enumerate(LENGTHS):
        ids = batch.query_response[b][batch.mask[b]][None]
        tables = [(m.logits(m(ids))[0].double() / 0.7).log_softmax(-1)[n - 1 : -1] for m in (policy, ref_policy)]
        expected = (tables[0].exp() * (tables[0] - tables[1])).sum(1)
        count = ids.size(1) - n
        assert torch.allclose(batch.exact_kl[b, :count].double(), expected, atol=1e-4) and (expected > 0).all()
        assert (batch.exact_kl[b, count:] == 0).all()
        total += expected.sum().item()
    assert total > 1


@torch.no_grad()
def test_responses_are_drawn_from_the_whole_distribution(models):
    """Each token is where its random number falls in the policy's softmax: temperature, and no other filter."""
    batch, (_, uniforms) = sampled(models, 8), rows_and_uniforms()
    for b, n in enumerate(LENGTHS):
        ids = batch.query_response[b][batch.mask[b]]
        cumulative = (models[0].logits(models[0](ids[None]))[0].double() / 0.7).softmax(-1)[n - 1 : -1].cumsum(1)
        assert (cumulative > uniforms[b, : len(ids) - n, None]).int().argmax(1).tolist() == ids[n:].tolist()


@torch.no_grad()
def test_policy_and_reference_are_read_at_the_same_temperature(models):
    batch = sampled(models, 8)
    for model, logprobs in zip(models, (batch.logprobs, batch.ref_logprobs), strict=False):
        for b, n in enumerate(LENGTHS):
            ids = batch.query_response[b][batch.mask[b]]
            table = (model.logits(model(ids[None]))[0].double() / 0.7).log_softmax(-1)[n - 1 : -1]
            expected = table.gather(1, ids[n:, None])[:, 0]
            assert torch.allclose(logprobs[b, : len(expected)].double(), expected, atol=1e-4)


def test_bf16_recomputes_what_another_micro_batch_computes(models):
    """Autocast rounds the factors of the last product; with rounded logits the ratio was off by up to 6%."""
    batch, other = (sampled(models, size, dtype=torch.bfloat16) for size in (8, 1))
    same = (batch.response == other.response).all(1)
    ratio = (batch.logprobs - other.logprobs)[same].exp()
    assert same.sum() > 4 and (ratio - 1).abs().max() < 0.01


@torch.no_grad()
def test_a_value_is_that_of_the_state_before_its_token(models):
    """Query of 3, response of 2 with its EOS, and the state after it; the last column has no state."""
    ids, mask = torch.tensor([[PAD, 5, 6, 7, 8, EOS, PAD, PAD]]), torch.arange(8)[None] < 6
    mask[:, 0] = False
    state_mask = torch.tensor([[False, False, False, True]])
    alone = models[2](torch.tensor([[5, 6, 7, 8, EOS]]))[0]
    values = response_values(models[2], ids, mask, state_mask)
    assert torch.allclose(values[0, :3], alone[2:5], atol=1e-5) and values[0, 3] == 0


def test_without_a_value_model_all_values_are_0():
    ids, state_mask = torch.tensor([[5, 6, 7]] * 2), torch.zeros(2, 2, dtype=torch.bool)
    assert response_values(None, ids, ids > 0, state_mask).tolist() == [[0.0, 0.0]] * 2
