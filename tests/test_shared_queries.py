"""Rows with the same query read it once: hidden states, gradients and samples equal those of separate rows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanorlhf.batch import Batch
from nanorlhf.checkpoint import scalar_from_gpt
from nanorlhf.dataset import Comparison
from nanorlhf.dpo import pair_logprobs
from nanorlhf.generate import generate
from nanorlhf.logprobs import read_logprobs, response_logprobs
from nanorlhf.model import GPT, ScalarModel, Transformer
from nanorlhf.peft import tune
from nanorlhf.reward_model import RewardModel, end_scores, pair_scores
from nanorlhf.shared_queries import Groups, find_groups
from tests.conftest import TINY
from tests.test_model import CONFIGS, add_lora, make_model
from tests.test_t5 import CONFIGS as T5_CONFIGS

PAD, EOS, Q, T = 40, 1, 9, 5
QUERY_LENGTHS, K = (9, 4, 6), 4


def group_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, Q + T) and mask of three queries with four responses of 0 to T tokens each."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(2, 37, (len(QUERY_LENGTHS), Q), generator=generator)
    real = torch.arange(Q) >= Q - torch.tensor(QUERY_LENGTHS)[:, None]
    query = torch.where(real, queries, PAD).repeat_interleave(K, 0)
    response = torch.randint(2, 37, (len(query), T), generator=generator)
    lengths = torch.randint(0, T + 1, (len(query), 1), generator=generator)
    lengths[0], lengths[1] = T, 0
    response = response.masked_fill(torch.arange(T) >= lengths, PAD)
    ids = torch.cat((query, response), 1)
    return ids, ids != PAD


def separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row reads its query."""
    for module in ("reading", "t5", "generate"):
        separate = lambda query, mask: Groups(torch.arange(len(query)), torch.arange(len(query)))  # noqa: E731
        monkeypatch.setattr(f"nanorlhf.{module}.find_groups", separate)


def hidden_and_gradient(model: GPT, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states that predict response tokens and the one after, 0 at padding, and a gradient of them."""
    weights = torch.randn((len(ids), T + 1, model.config.d_model), generator=torch.Generator().manual_seed(5))
    counts = torch.cat((torch.ones_like(mask[:, :1]), mask[:, Q:]), 1)[..., None]
    hidden = torch.where(counts, model(ids, mask, last=T + 1), 0.0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = torch.autograd.grad((hidden * weights).sum(), trained, allow_unused=True, materialize_grads=True)
    return hidden.detach(), torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("name", [*CONFIGS, *T5_CONFIGS])
@pytest.mark.parametrize("how", ["full", "lora"])
def test_hidden_states_and_gradients_equal_those_of_separate_rows_in_float64(name, how, monkeypatch) -> None:
    """Learned, rotary and relative positions, windows, capped logits, shared keys; left-padded queries."""
    config = CONFIGS[name] if name in CONFIGS else T5_CONFIGS[name]
    model = make_model(config).double()
    if how == "lora":
        add_lora(model)
    ids, mask = group_rows()
    joined = hidden_and_gradient(model, ids, mask)
    # ids and padding that must not matter
    assert torch.equal(hidden_and_gradient(model, ids.masked_fill(~mask, 39), mask)[0], joined[0])
    separately(monkeypatch)
    hidden, gradient = hidden_and_gradient(model, ids, mask)
    scale = 1e-6 if config.norm.startswith("rms") else 1e-12  # RMS norms compute in float32
    assert torch.allclose(joined[0], hidden, atol=scale * hidden.abs().max().item())
    assert torch.allclose(joined[1], gradient, atol=scale * gradient.abs().max().item())


def test_a_response_sees_neither_the_others_nor_their_number() -> None:
    model = make_model(TINY).double()
    ids, mask = group_rows()
    before, _ = hidden_and_gradient(model, ids, mask)
    changed = ids.clone()
    changed[0, Q:] = 11
    after, _ = hidden_and_gradient(model, changed, mask)
    assert not torch.allclose(after[0], before[0])
    assert torch.allclose(after[1:], before[1:], atol=1e-12)
    pair, _ = hidden_and_gradient(model, ids[2:4], mask[2:4])
    assert torch.allclose(pair, before[2:4], atol=1e-12)


@pytest.mark.parametrize("how", ["full", "lora"])
def test_recomputed_activations_have_the_same_gradient(how) -> None:
    """The backward pass runs the blocks of both passes again."""
    model = make_model(TINY).double()
    if how == "lora":
        tune(model, "lora", rank=2)
    ids, mask = group_rows()
    hidden, gradient = hidden_and_gradient(model, ids, mask)
    model.transformer.checkpoint_activations = True
    again, recomputed = hidden_and_gradient(model, ids, mask)
    assert torch.equal(hidden, again) and torch.allclose(gradient, recomputed, atol=1e-12)


def test_a_bidirectional_model_reads_each_row(monkeypatch) -> None:
    """Its query tokens see the response."""
    model = make_model(replace(TINY, causal=False)).double()
    ids, mask = group_rows()
    hidden, _ = hidden_and_gradient(model, ids, mask)
    separately(monkeypatch)
    assert torch.equal(hidden_and_gradient(model, ids, mask)[0], hidden)


def test_queries_that_differ_only_in_padding_are_not_the_same() -> None:
    query = torch.tensor([[9, 5, 6], [7, 5, 6], [5, 5, 6], [5, 5, 6], [8, 8, 6]])
    mask = torch.tensor(
        [[False, True, True], [False, True, True], [True] * 3, [False, True, True], [False] * 2 + [True]]
    )
    assert [x.tolist() for x in find_groups(query, mask)] == [[0, 2, 3, 4], [0, 0, 1, 2, 3]]


@pytest.mark.parametrize("mean_pooled", [False, True])
def test_scores_equal_those_of_separate_rows(mean_pooled, monkeypatch) -> None:
    model = make_model(replace(TINY, mean_pooled=mean_pooled), ScalarModel)
    ids, _ = group_rows()
    joined = end_scores(model, ids, Q, PAD)
    separately(monkeypatch)
    assert torch.allclose(joined, end_scores(model, ids, Q, PAD), atol=1e-5)


@pytest.mark.parametrize("name", [*CONFIGS, *T5_CONFIGS])
def test_samples_equal_those_of_separate_prefills(name, monkeypatch) -> None:
    config = CONFIGS[name] if name in CONFIGS else T5_CONFIGS[name]
    model = make_model(config)
    query = group_rows()[0][:, :Q]
    uniforms = torch.rand((len(query), T), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    shared = generate(model, query, query != PAD, T, eos_id=EOS, pad_id=PAD, uniforms=uniforms)
    assert len({tuple(row) for row in shared[0].tolist()}) > len(QUERY_LENGTHS)
    separately(monkeypatch)
    response, logprobs = generate(model, query, query != PAD, T, eos_id=EOS, pad_id=PAD, uniforms=uniforms)
    assert torch.equal(shared[0], response)
    assert torch.allclose(shared[1], logprobs, atol=1e-5)


def test_a_group_is_prefilled_and_read_once(monkeypatch) -> None:
    """Counted at the embedding: 3 queries instead of 12, and each response token once."""
    model, tokens = make_model(TINY), []
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, x: (tokens.append(x.numel()), forward(self, x))[1])
    ids, mask = group_rows()
    generate(model, ids[:, :Q], mask[:, :Q], T, pad_id=PAD)
    assert tokens == [3 * Q] + [12] * (T - 1)
    tokens.clear()
    response_logprobs(model, ids, mask, mask[:, Q:], 1.0)
    assert tokens == [3 * Q, 12 * T]


def test_long_responses_read_their_queries_again(monkeypatch) -> None:
    """A second pass must save a twentieth of the tokens, or both passes take longer than one."""
    model, tokens = make_model(TINY), []
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, x: (tokens.append(x.numel()), forward(self, x))[1])
    for Q, T, passes in ((4, 36, [4, 2 * 36]), (4, 37, [2 * 41]), (5, 37, [5, 2 * 37])):  # 95.0, 95.1 and 94.0%
        query, response = torch.randint(2, 37, (1, Q)).expand(2, Q), torch.randint(2, 37, (2, T))
        ids, actions = torch.cat((query, response), dim=1), torch.ones_like(response, dtype=torch.bool)
        tokens.clear()
        response_logprobs(model, ids, torch.ones_like(ids, dtype=torch.bool), actions, 1.0)
        assert tokens == passes


def test_ranks_of_a_sharded_model_run_each_block_equally_often(monkeypatch) -> None:
    """A forward pass gathers a block's weights each time it runs: a rank that ran it twice would wait for the others.

    Without groups, as in PPO, each row reads its query. With them, a rank without equal queries makes two passes too.
    """
    model, runs = make_model(TINY), []
    model.transformer.share_queries = False  # as distributed.shard does
    run = Transformer.run
    monkeypatch.setattr(Transformer, "run", lambda self, *x: (runs.append(tuple(x[1].shape[:2])), run(self, *x))[1])
    ids, _ = group_rows()
    ids[:, Q:] = 7  # a rollout has no empty responses
    reward_model = scalar_from_gpt(model)
    reward_model.transformer.share_queries = False
    scorer = SimpleNamespace(size=12, pad_id=PAD)
    for rows, num_queries in ((slice(0, 4), 1), (slice(0, 12, 4), 3)):  # one query four times, three queries
        batch = Batch.of([{}] * 12, ids[:, :Q], ids[:, Q:], torch.zeros(12, T), EOS, PAD, "last_token")[rows]
        for batch.shares_queries in (False, True):
            runs.clear()
            response_logprobs(model, batch.query_response, batch.real, batch.actions, 1.0, batch.groups)
            read_logprobs(model, model, batch, 1.0, size=12)
            RewardModel._score(scorer, reward_model, batch)
            shapes = batch.query_response.shape, (num_queries, batch.query.size(1)), batch.response.shape
            assert runs[:: TINY.n_layer] == 4 * list(map(tuple, shapes[1:] if batch.shares_queries else shapes[:1]))
    same, different = (Comparison([5, 6, 7], [8, other, EOS], [9, EOS], {}) for other in (10, 11))
    for pairs in ([same, same], [same, different], [same]):
        for score in (pair_logprobs, pair_scores):
            scored = model if score is pair_logprobs else scalar_from_gpt(model)
            scored.transformer.share_queries = False
            runs.clear()
            score(scored, pairs, PAD)
            assert runs[:: TINY.n_layer] == [(len(pairs), 3), (2 * len(pairs), 3)]


@pytest.mark.parametrize("query_length", [1, 4])
def test_two_passes_over_different_queries_equal_one(query_length) -> None:
    """A rank of a sharded model without equal queries makes two passes. Results in float64."""
    model, results = make_model(TINY).double(), []
    model.transformer.share_queries = False
    ids, _ = group_rows()
    ids = torch.cat((ids[::K, Q - query_length : Q], ids[::K, Q:].clamp(max=36)), dim=1)
    mask, actions = torch.ones_like(ids, dtype=torch.bool), torch.ones(len(ids), T, dtype=torch.bool)
    for groups in (None, find_groups(ids[:, :query_length], mask[:, :query_length])):
        model.zero_grad()
        logprobs, _ = response_logprobs(model, ids, mask, actions, 1.0, groups)
        (logprobs * torch.linspace(-1, 1, T, dtype=torch.double)).sum().backward()
        results.append((logprobs.detach(), *(parameter.grad for parameter in model.parameters())))
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(*results, strict=True))


def test_micro_batches_keep_equal_queries_together() -> None:
    """Rows of a shuffled minibatch, by the longest of each group; without repeated queries, by length alone."""
    ids, mask = group_rows()
    shuffled = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))
    batch = Batch.of([{}] * len(ids), ids[:, :Q], ids[:, Q:], torch.zeros(len(ids), T), EOS, PAD, "last_token")[
        shuffled
    ]
    order = batch.reading_order()
    assert sorted(order.tolist()) == list(range(len(ids)))
    queries = [tuple(batch.query[i].tolist()) for i in order]
    assert sum(a != b for a, b in zip(queries, queries[1:], strict=False)) == len(QUERY_LENGTHS) - 1
    longest = [int(batch.real[order[i : i + K]].sum(1).max()) for i in range(0, len(ids), K)]
    assert longest == sorted(longest)
    for mb, index in zip(batch.micro_batches(K), order.split(K), strict=True):
        assert torch.equal(mb.index, batch.index[index]) and len(find_groups(mb.query, mb.query != PAD).first) == 1
    alone = batch[torch.tensor([queries.index(q) for q in dict.fromkeys(queries)])]
    assert torch.equal(alone.reading_order(), alone.real.sum(1).argsort())
