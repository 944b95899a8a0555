"""Batches: splitting the rows into micro-batches changes the work but not the results."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nanorlhf.batch import Batch, sample
from nanorlhf.dataset import Demonstration
from nanorlhf.generate import generate
from nanorlhf.logprobs import read_logprobs, read_values, response_values
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import end_scores
from tests.conftest import TINY

EOS, PAD, T = 1, 99, 6
LENGTHS = [9, 2, 30, 5, 2, 21, 13, 3]
PER_TOKEN = ("sampled_logprobs", "logprobs", "ref_logprobs", "exact_kl", "values", "scores")


@pytest.fixture(scope="module")
def models() -> tuple[GPT, GPT, ScalarModel]:
    """Return policy, reference and value model, far from uniform; the policy's responses have about two tokens."""
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


def sampled(models, size: int, score_at: str = "after_eos", dtype: torch.dtype = torch.float32) -> Batch:
    """Sample a batch and read it with all models; also sets `scores` and `exact_kl`."""
    policy, ref_policy, value_model = models
    rows, uniforms = rows_and_uniforms()

    def score(mb):
        assert [int(record["query"]) for record in mb.records] == (mb.query != PAD).sum(1).tolist()  # the right rows
        return end_scores(value_model, mb.query_response, mb.query.size(1), PAD)

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        write = partial(generate, policy)
        batch = sample(write, rows, uniforms, torch.device("cpu"), 0.7, size, EOS, PAD, score_at)
        batch.scores = batch.read(score, size)
        batch.logprobs, batch.ref_logprobs, batch.exact_kl = read_logprobs(policy, ref_policy, batch, 0.7, size)
        batch.values = read_values(value_model, batch, size)
    return batch


@pytest.mark.parametrize("score_at", ["after_eos", "last_token"])
def test_rows_that_share_a_micro_batch_do_not_change_each_other(models, score_at):
    """A row in a micro-batch of one has no padding."""
    alone = sampled(models, 1, score_at)
    has_eos = (alone.response == EOS).any(1)
    assert has_eos.any() and alone.eos_index.unique().numel() > 2
    for size in (3, 8):
        together = sampled(models, size, score_at)
        assert torch.equal(together.response, alone.response) and torch.equal(together.query, alone.query)
        assert [int(record["query"]) for record in together.records] == LENGTHS  # in the order of the batch
        for name in PER_TOKEN:
            assert torch.allclose(getattr(together, name), getattr(alone, name), atol=1e-5), name


def test_a_micro_batch_is_as_wide_as_its_longest_row(models, monkeypatch):
    columns, forward = [], type(models[0].transformer).forward

    def counted(self, ids, mask=None, cache=None, *rest, **named):
        if cache is None:
            columns.append(ids.numel())
        return forward(self, ids, mask, cache, *rest, **named)

    monkeypatch.setattr(type(models[0].transformer), "forward", counted)
    batch = sampled(models, 2)
    states, real = batch.states.sum(1).tolist(), batch.real.sum(1)
    order = real.argsort().tolist()
    passes = 0
    for i, j in zip(order[::2], order[1::2], strict=True):
        passes += 4 * 2 * (max(LENGTHS[i], LENGTHS[j]) + max(states[i], states[j]))  # policy, reference, values, score
    assert sum(columns) == passes < 0.7 * 4 * batch.query_response.numel()


def by_hand() -> Batch:
    """Queries of 2 and 1 tokens, responses of 1 and 2 with EOS; the second response has no padding."""
    query, response = (
        torch.tensor([[PAD, PAD, 5, 6], [PAD, PAD, PAD, 7]]),
        torch.tensor([[8, EOS, PAD, PAD], [8, 9, 8, 9]]),
    )
    batch = Batch.of([{"n": 0}, {"n": 1}], query, response, torch.zeros(2, 4), EOS, PAD, "after_eos")
    batch.logprobs = torch.arange(8.0).view(2, 4)
    batch.advantages = torch.tensor([0.5, -0.5])
    return batch


def test_masks_and_score_index_of_a_worked_example():
    batch = by_hand()
    assert batch.real.int().tolist() == [[0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]]
    assert batch.actions.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.states.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.eos_index.tolist() == [1, 3] and batch.score_index.tolist() == [2, 3]
    assert batch.has_eos.tolist() == [True, False] and batch.in_loss.all()
    last = Batch.of(batch.records, batch.query, batch.response, batch.sampled_logprobs, EOS, PAD, "last_token")
    assert torch.equal(last.states, batch.actions) and last.score_index.tolist() == [1, 3]


def test_selected_rows_keep_only_the_columns_they_need():
    first = by_hand()[:1]
    assert first.query.tolist() == [[5, 6]] and first.response.tolist() == [[8, EOS, PAD]]  # with the state after EOS
    assert first.real.int().tolist() == [[1, 1, 1, 1, 0]] and first.logprobs.tolist() == [[0.0, 1.0, 2.0]]
    assert first.advantages.tolist() == [0.5] and first.records == [{"n": 0}] and first.index.tolist() == [0]
    turned = by_hand()[torch.tensor([1, 0])]
    assert turned.query.tolist() == [[PAD, 7], [5, 6]] and turned.index.tolist() == [1, 0]
    assert not hasattr(turned, "values")  # not computed yet


def test_minibatches_and_micro_batches_contain_each_row_once():
    rows, uniforms = rows_and_uniforms()
    query = torch.arange(8)[:, None] + 2
    batch = Batch.of([row.record for row in rows], query, query.clone(), query * 0.0, EOS, PAD, "last_token")
    generator = torch.Generator().manual_seed(0)
    one, two = batch.shuffled(generator), batch.shuffled(generator)
    assert one.index.tolist() != two.index.tolist()
    for shuffled in (one, two):
        parts = list(shuffled.split(4))
        seen = [mb.index.tolist() for part in parts for mb in part.micro_batches(1)]
        assert [len(part) for part in parts] == [2] * 4 and sorted(sum(seen, [])) == list(range(8))


def test_a_minibatch_without_counted_actions_is_skipped():
    rows, _ = rows_and_uniforms()
    query = torch.arange(8)[:, None] + 2
    batch = Batch.of([row.record for row in rows], query, query.clone(), query * 0.0, EOS, PAD, "last_token")
    batch.in_loss[2:4] = False  # all of the second minibatch
    batch.in_loss[4] = False  # half of the third
    assert [part.index.tolist() for part in batch.split(4)] == [[0, 1], [4, 5], [6, 7]]


def test_read_returns_batch_order_with_zeros_in_dropped_columns():
    batch = by_hand()
    per_token, per_row = batch.read(lambda mb: (mb.logprobs + 1, mb.index.float()), 1)
    assert per_row.tolist() == [0.0, 1.0]
    assert per_token.tolist() == [[1.0, 2.0, 3.0, 0.0], [5.0, 6.0, 7.0, 8.0]]


def test_the_exact_kl_is_the_sum_over_the_vocabulary_in_float64(models):
    policy, ref_policy, _ = models
    batch = sampled(models, 8)
    total = 0.0
    for b, n in enumerate(LENGTHS):
        ids = batch.query_response[b][batch.real[b]][None]
        tables = [(m.logits(m(ids))[0].double() / 0.7).log_softmax(-1)[n - 1 : -1] for m in (policy, ref_policy)]
        expected = (tables[0].exp() * (tables[0] - tables[1])).sum(1)
        count = ids.size(1) - n
        assert torch.allclose(batch.exact_kl[b, :count].double(), expected, atol=1e-4) and (expected > 0).all()
        assert (batch.exact_kl[b, count:] == 0).all()
        total += expected.sum().item()
    assert total > 1


@torch.no_grad()
def test_responses_are_drawn_from_the_whole_distribution(models):
    """Each token is drawn by its random number from the policy's softmax, with temperature as the only filter."""
    batch, (_, uniforms) = sampled(models, 8), rows_and_uniforms()
    for b, n in enumerate(LENGTHS):
        ids = batch.query_response[b][batch.real[b]]
        cumulative = (models[0].logits(models[0](ids[None]))[0].double() / 0.7).softmax(-1)[n - 1 : -1].cumsum(1)
        assert (cumulative > uniforms[b, : len(ids) - n, None]).int().argmax(1).tolist() == ids[n:].tolist()


@torch.no_grad()
def test_policy_and_reference_are_read_at_the_same_temperature(models):
    batch = sampled(models, 8)
    for model, logprobs in zip(models, (batch.logprobs, batch.ref_logprobs), strict=False):
        for b, n in enumerate(LENGTHS):
            ids = batch.query_response[b][batch.real[b]]
            table = (model.logits(model(ids[None]))[0].double() / 0.7).log_softmax(-1)[n - 1 : -1]
            expected = table.gather(1, ids[n:, None])[:, 0]
            assert torch.allclose(logprobs[b, : len(expected)].double(), expected, atol=1e-4)


def test_bf16_logprobs_are_the_same_in_another_micro_batch(models):
    """Autocast rounds the inputs of the last matmul; with rounded logits, the ratio was off by up to 6%."""
    batch, other = (sampled(models, size, dtype=torch.bfloat16) for size in (8, 1))
    same = (batch.response == other.response).all(1)
    ratio = (batch.logprobs - other.logprobs)[same].exp()
    assert same.sum() > 4 and (ratio - 1).abs().max() < 0.01


@torch.no_grad()
def test_a_value_is_computed_at_the_state_before_its_token(models):
    """A query of 3, a response of 2 with its EOS, and the state after it; the last column has no state."""
    ids, mask = torch.tensor([[PAD, 5, 6, 7, 8, EOS, PAD, PAD]]), torch.arange(8)[None] < 6
    mask[:, 0] = False
    states = torch.tensor([[True, True, True, False]])
    alone = models[2](torch.tensor([[5, 6, 7, 8, EOS]]))[0]
    values = response_values(models[2], ids, mask, states)
    assert torch.allclose(values[0, :3], alone[2:5], atol=1e-5) and values[0, 3] == 0


def test_values_have_the_gradient_of_a_row_without_padding(models):
    ids, mask = torch.tensor([[PAD, 5, 6, 7, 8, EOS]]), torch.arange(6)[None] > 0
    values = response_values(models[2], ids, mask, torch.ones(1, 2, dtype=torch.bool))
    gradients = [
        torch.autograd.grad(x.sum(), list(models[2].transformer.parameters()))
        for x in (values, models[2](torch.tensor([[5, 6, 7, 8]]))[:, 2:])
    ]
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*gradients, strict=True))


@torch.no_grad()
def test_a_pooled_value_is_the_mean_over_the_response_so_far(models):
    """The value before the first token is the query's; later values don't average it."""
    pooled = ScalarModel(replace(models[2].config, mean_pooled=True))
    pooled.load_state_dict(models[2].state_dict())
    ids, mask = torch.tensor([[PAD, 5, 6, 7, 8, EOS, PAD]]), torch.arange(7)[None] < 6
    mask[:, 0] = False
    alone = models[2](torch.tensor([[5, 6, 7, 8, EOS]]))[0]
    values = response_values(pooled, ids, mask, torch.tensor([[True, True, True]]))
    assert values[0].tolist() == pytest.approx([*alone[2:4].tolist(), alone[3:5].mean().item()], abs=1e-5)
