import copy
import math
from dataclasses import replace

import pytest
import torch

import kernels.linear
import nanorlhf.generate
from kernels.int8 import Int8Weight
from kernels.linear import PackedWeight, onednn_matmul
from kernels.processor import has_int8_matmul
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.generate import ban_repeated_ngrams, draw, for_sampling, generate, keep_top_k, keep_top_p
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad
from nanorlhf.peft import merge, tune
from tests.conftest import GPU, TINY

EOS, PAD = 1, 99
QUERIES = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def sample(model, rows, T=12, seed=0, device="cpu", **settings):
    query = left_pad(rows, PAD).to(device)
    settings = {"temperature": 0.8, "eos_id": EOS, "pad_id": PAD, **settings}
    return generate(model, query, query != PAD, T, generator=torch.Generator().manual_seed(seed), **settings)


@torch.no_grad()
def full_forward_logprobs(model, row, response, temperature):
    logits = model.logits(model(torch.tensor([row + response])))[0, len(row) - 1 : -1].double() / temperature
    return logits.log_softmax(-1)[range(len(response)), response]


def test_a_stop_id_ends_a_response_and_changes_no_other(tiny_gpt):
    """A row with a stop id has no EOS: it ends where [PAD] begins, like a truncated response."""
    whole, whole_logprobs = sample(tiny_gpt, QUERIES * 20)
    response, logprobs = sample(tiny_gpt, QUERIES * 20, stop_ids=[3, 4])
    for ids, long, got, wanted in zip(response.tolist(), whole.tolist(), logprobs, whole_logprobs, strict=True):
        end = next((t for t, i in enumerate(long) if i in (3, 4)), len(long) - 1)
        assert ids == long[: end + 1] + [PAD] * (len(long) - 1 - end)
        assert torch.allclose(got[: end + 1], wanted[: end + 1], atol=1e-5) and not got[end + 1 :].any()
    assert not torch.equal(response, whole)


def test_logprobs_of_the_cache_equal_those_of_a_full_forward_pass(tiny_gpt):
    response, logprobs = sample(tiny_gpt, QUERIES)
    for row, ids, got in zip(QUERIES, response.tolist(), logprobs, strict=True):
        ids = ids[: ids.index(PAD)] if PAD in ids else ids
        expected = full_forward_logprobs(tiny_gpt, row, ids, 0.8)
        assert torch.allclose(got[: len(ids)].double(), expected, atol=1e-5)


def test_greedy_takes_the_argmax_of_a_full_forward_pass(tiny_gpt):
    response, _ = sample(tiny_gpt, QUERIES, temperature=0, eos_id=None)
    for row, ids in zip(QUERIES, response.tolist(), strict=True):
        for t, token in enumerate(ids):
            logits = tiny_gpt.logits(tiny_gpt(torch.tensor([row + ids[:t]])))[0, -1]
            assert token == logits.argmax().item()


def test_after_eos_there_is_only_pad_and_logprob_zero(tiny_gpt):
    with torch.no_grad():  # EOS is about one token in four
        tiny_gpt.lm_head.weight[EOS] += 0.05
    response, logprobs = sample(tiny_gpt, QUERIES * 20)
    rows_with_eos = 0
    for ids, row_logprobs in zip(response.tolist(), logprobs.tolist(), strict=True):
        if EOS in ids:
            rows_with_eos += 1
            end = ids.index(EOS)
            assert set(ids[end + 1 :]) <= {PAD} and set(row_logprobs[end + 1 :]) <= {0.0}
        else:
            assert PAD not in ids
    assert rows_with_eos > 5


def test_a_response_does_not_depend_on_the_other_rows_or_on_padding(tiny_gpt):
    uniforms = torch.rand(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    together, _ = sample(tiny_gpt, QUERIES, uniforms=uniforms)
    for b, row in enumerate(QUERIES):
        alone, _ = sample(tiny_gpt, [row], uniforms=uniforms[b : b + 1])
        assert torch.equal(together[b : b + 1], alone)
    longer, _ = sample(tiny_gpt, [*QUERIES, list(range(2, 22))], uniforms=torch.cat((uniforms, uniforms[:1])))
    assert torch.equal(longer[:3], together)


def test_a_response_excludes_its_query_and_has_the_requested_length(tiny_gpt):
    """The query's ids are forbidden, so any of them in the response would be copied from the query."""
    query_ids = sorted({i for row in QUERIES for i in row})
    tiny_gpt.register_buffer("forbidden", torch.isin(torch.arange(37), torch.tensor(query_ids)), persistent=False)
    response, logprobs = sample(tiny_gpt, QUERIES * 5, T=9, eos_id=None)
    assert response.shape == logprobs.shape == (15, 9) and not torch.isin(response, torch.tensor(query_ids)).any()


def test_nonfinite_logits_give_one_sentence(tiny_gpt):
    with torch.no_grad():
        tiny_gpt.lm_head.weight[3] = float("nan")
    for temperature in (0.0, 0.8):
        with pytest.raises(InputError, match="logits are not finite"):
            sample(tiny_gpt, QUERIES, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.7, 0.01])
def test_autocast_does_not_round_the_logits(tiny_gpt, monkeypatch, temperature):
    """Measures total variation from the softmax of the exact matmul of the same bfloat16 inputs."""
    drawn = []
    monkeypatch.setattr(nanorlhf.generate, "draw", lambda p, u: drawn.append(p / p.sum(1, keepdim=True)) or draw(p, u))
    query = left_pad(QUERIES * 8, PAD)
    query[3:] = torch.randint(2, 37, (21, 5), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        generate(tiny_gpt, query, query != PAD, 1, temperature, generator=torch.Generator().manual_seed(0))
        hidden = tiny_gpt(query, query != PAD, last=1)[:, -1].bfloat16()
    exact = hidden.double() @ tiny_gpt.lm_head.weight.bfloat16().double().T
    variation = 0.5 * (drawn[0] - (exact / temperature).softmax(-1)).abs().sum(1)
    assert variation.max() < 1e-3


def test_the_same_seed_gives_the_same_responses_and_another_does_not(tiny_gpt):
    assert torch.equal(sample(tiny_gpt, QUERIES)[0], sample(tiny_gpt, QUERIES)[0])
    assert not torch.equal(sample(tiny_gpt, QUERIES)[0], sample(tiny_gpt, QUERIES, seed=1)[0])


def test_dropping_ended_rows_changes_nothing(tiny_gpt):
    """Rows sampled without EOS and truncated afterwards are the reference's fixed-length sampler. [N+ 23]"""
    uniforms = torch.rand(60, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    stopped, _ = sample(tiny_gpt, QUERIES * 20, uniforms=uniforms)
    full, _ = sample(tiny_gpt, QUERIES * 20, uniforms=uniforms, eos_id=None)
    for ids, reference in zip(stopped.tolist(), full.tolist(), strict=True):
        end = reference.index(EOS) + 1 if EOS in reference else 12
        assert ids[:end] == reference[:end] and set(ids[end:]) <= {PAD}


@torch.inference_mode()
def step_by_step(model, row, uniforms, temperature):
    """Sample one row with a full forward pass per token, up to EOS; return tokens and logprobs."""
    ids, logprobs = [], []
    for uniform in uniforms:
        logits = model.logits(model(torch.tensor([row + ids])))[0, -1].double() / temperature
        log_p = logits.log_softmax(-1)
        token = int((log_p.exp().cumsum(0) <= uniform).sum())
        ids, logprobs = [*ids, token], [*logprobs, log_p[token].item()]
        if token == EOS:
            break
    return ids, logprobs


def rows_that_end_early(model):
    """EOS is about one token in eight, so that a GPU drops rows; T = 40, so that it captures a step more than once."""
    with torch.no_grad():
        direction = torch.ones(32) / math.sqrt(32)
        model.transformer.norm.bias += 4 * direction
        model.lm_head.weight[EOS] += 0.6 * direction
    rows = [[5 + i % 7, *range(6, 6 + i % 5)] for i in range(24)]
    return rows, torch.rand(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(11))


def check_rows(model, device, rows, uniforms):
    """Compare `generate` on the device with full forward passes on the CPU, at temperature 0.8."""
    expected = [step_by_step(model, row, u.tolist(), 0.8) for row, u in zip(rows, uniforms, strict=True)]
    response, logprobs = sample(copy.deepcopy(model).to(device), rows, T=40, uniforms=uniforms, device=device)
    for (ids, wanted), sampled, got in zip(expected, response.tolist(), logprobs.tolist(), strict=True):
        assert sampled == ids + [PAD] * (40 - len(ids))
        assert got == pytest.approx(wanted + [0.0] * (40 - len(ids)), abs=1e-4)
    return sorted(len(ids) for ids, _ in expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_sampling_on_a_device_equals_full_forward_passes(tiny_gpt, device):
    rows, uniforms = rows_that_end_early(tiny_gpt)
    check_rows(tiny_gpt, device, rows, uniforms)


def tiny_vocabulary_model(V=5):
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab_size=V, n_ctx=8, d_model=8, n_layer=1, n_head=2, d_mlp=8, rotary_dim=2))
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.3)  # far from uniform, but no token too rare to be sampled
    return model


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 3}, {"temperature": 1.0, "top_p": 0.7}]
)
def test_samples_have_the_exact_distribution(settings):
    """Two tokens over a vocabulary of five: chi-squared of 20,000 samples against the 25 exact probabilities."""
    model, n = tiny_vocabulary_model(), 20_000
    query = torch.tensor([[2, 4]]).expand(n, 2)
    response, _ = generate(
        model, query, torch.ones_like(query).bool(), 2, generator=torch.Generator().manual_seed(0), **settings
    )

    def distribution(prefix):
        logits = model.logits(model(torch.tensor([prefix])))[0, -1].detach().double() / settings["temperature"]
        p = logits.softmax(-1).tolist()
        order = sorted(range(5), key=lambda i: -p[i])
        kept = order[: settings.get("top_k") or 5]
        if "top_p" in settings:
            kept = [i for k, i in enumerate(order) if sum(p[j] for j in order[:k]) < settings["top_p"]]
        total = sum(p[i] for i in kept)
        return [p[i] / total if i in kept else 0.0 for i in range(5)]

    counts = torch.zeros(5, 5)
    for a, b in response.tolist():
        counts[a, b] += 1
    chi_squared = cells = 0
    for a, p_a in enumerate(distribution([2, 4])):
        for b, p_b in enumerate(distribution([2, 4, a])):
            expected = n * p_a * p_b
            if expected == 0:
                assert counts[a, b] == 0
            else:
                assert expected > 5  # otherwise the statistic isn't chi-squared
                cells += 1
                chi_squared += (counts[a, b].item() - expected) ** 2 / expected
    assert cells >= 4
    assert chi_squared < cells - 1 + 5 * math.sqrt(2 * (cells - 1))  # five standard deviations; the seed is fixed


def test_outputs_can_be_used_in_training(tiny_gpt):
    """The outputs are computed in inference mode; autograd can't save such tensors."""
    query = torch.tensor([[3, 5, 7]])
    response, logprobs = generate(tiny_gpt, query, query > 0, 4)
    loss = (tiny_gpt(response) * logprobs[..., None]).sum()
    loss.backward()
    assert not response.is_inference() and tiny_gpt.lm_head.weight.grad is None


def test_pad_inside_the_vocabulary_is_never_sampled():
    """A padded embedding like Pythia's has a row for [PAD]; here the model strongly prefers it."""
    model = tiny_vocabulary_model()
    with torch.no_grad():
        model.lm_head.weight[3] = 50 * model.transformer.norm.bias.new_ones(8)
        model.transformer.norm.bias.fill_(1.0)
    query = torch.full((100_000, 1), 2)
    drawn, _ = generate(model, query[:10], query[:10] == 2, 1)
    assert (drawn == 3).all()
    model.forbid(pad_id=3, num_ids=5)
    response, logprobs = generate(model, query, query == 2, 1)
    assert (response != 3).all() and logprobs.isfinite().all()


def test_an_id_of_probability_zero_is_never_drawn():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, 5)
    uniforms = torch.tensor([0.0, 0.5, 0.4999999999, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities, uniforms[:, None]).tolist() == [[1], [3], [1], [3]]


@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-1074], ids=["float32", "float64"])
def test_an_id_of_probability_zero_is_never_drawn_where_a_product_rounds_up(tiny):
    """The only positive probability is the dtype's smallest: three quarters of 2^-1074 round to 2^-1074."""
    dtype = torch.float32 if tiny == 2.0**-149 else torch.float64
    probabilities = torch.tensor([[0.0, tiny, 0.0]], dtype=dtype).expand(4, 3)
    uniforms = torch.tensor([0.0, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities, uniforms[:, None]).tolist() == [[1]] * 4


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_many_draws_never_have_probability_zero(device):
    """A GPU sums in another order; half of all ids have probability 0, including the first and the last ones."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(3000, 100, generator=generator) ** 20
    probabilities[torch.rand(3000, 100, generator=generator) < 0.5] = 0
    probabilities[:, :3] = probabilities[:, -3:] = 0
    uniforms = torch.rand(3000, 1, dtype=torch.float64, generator=generator)
    uniforms[:1000], uniforms[1000:2000] = 0, 1 - 2**-53
    token = draw(probabilities.to(device), uniforms.to(device)).cpu()
    assert (probabilities.gather(1, token) > 0).all()


def test_draws_equal_a_walk_along_the_running_sum():
    """The probabilities don't sum to 1; all numbers are multiples of 1/64, so every sum is exact."""
    probabilities = torch.tensor([[1, 0, 2, 1], [8, 0, 0, 0], [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 0, 3]]) / 8
    for uniform in torch.arange(8, dtype=torch.float64) / 8:
        ids = draw(probabilities, uniform.expand(5, 1))
        assert ids.shape == (5, 1)
        for row, [drawn] in zip(probabilities.tolist(), ids.tolist(), strict=True):
            assert drawn == next(i for i in range(4) if sum(row[: i + 1]) > uniform.item() * sum(row))


def test_draws_are_made_in_float64():
    """After an id with probability 1, float32 loses an id with 2^-30, but float64 does not."""
    probabilities = torch.tensor([[1.0, 2**-30]])
    assert draw(probabilities, torch.tensor([[1 - 2**-40]], dtype=torch.float64)).item() == 1


def test_a_draw_from_nan_is_an_id_of_the_vocabulary():
    uniforms = torch.tensor([[0.5]], dtype=torch.float64)
    assert 0 <= draw(torch.full((1, 3), torch.nan), uniforms).item() <= 2


def test_top_k_and_top_p_equal_a_search_through_a_sorted_list():
    """Rows have different orders; ids that are kept keep their logits."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for b, (row, whole) in enumerate(zip(logits, logits.softmax(-1).tolist(), strict=True)):
        order = sorted(range(6), key=lambda i: -whole[i])
        for k in range(8):
            kept = order[: k or 6]
            filtered = keep_top_k(logits, k)[b]
            assert [filtered[i].item() for i in order] == [row[i].item() if i in kept else -math.inf for i in order]
        for p in (0.0, 0.2, 0.5, 0.8, 0.99, 1.5):
            kept = [i for n, i in enumerate(order) if n == 0 or sum(whole[j] for j in order[:n]) < p]
            filtered = keep_top_p(logits, p)[b]
            assert [filtered[i].item() for i in order] == [row[i].item() if i in kept else -math.inf for i in order]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_filtered_logits_equal_transformers(temperature):
    """Temperature, then top-k, then top-p, on 200 rows of 50 logits; the n-gram ban on texts of 12 ids."""
    transformers = pytest.importorskip("transformers")
    logits = 3 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(5, (200, 12), generator=torch.Generator().manual_seed(1))
    scaled = transformers.TemperatureLogitsWarper(temperature)(ids, logits)
    for k in (1, 7, 49):
        for p in (0.1, 0.6, 0.95):
            expected = transformers.TopPLogitsWarper(p)(ids, transformers.TopKLogitsWarper(k)(ids, scaled))
            assert torch.equal(keep_top_p(keep_top_k(logits / temperature, k), p), expected)
    for n in (1, 2, 3):
        expected = transformers.NoRepeatNGramLogitsProcessor(n)(ids, logits)
        assert torch.equal(ban_repeated_ngrams(logits, ids, n), expected) and expected.isinf().any()


def test_top_k_keeps_ties_with_the_last_and_top_p_stops_where_p_is_reached():
    ties = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    assert keep_top_k(ties, 2).isfinite().tolist() == [[True, True, True, False]]
    assert keep_top_p(torch.zeros(1, 4), 0.5).isfinite().sum() == 2  # exactly half of the probability


def test_top_k_keeps_k_and_top_p_keeps_the_id_that_crosses_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert keep_top_k(logits, 2).isfinite().tolist() == [[True, True, False, False]]
    assert keep_top_p(logits, 0.6).isfinite().tolist() == [[True, True, False, False]]
    assert keep_top_p(logits, 0.0).isfinite().tolist() == [[True, False, False, False]]
    assert keep_top_k(logits, 0) is logits and keep_top_p(logits, 1.0) is logits


def test_ngram_ban_equals_a_search_through_lists(tiny_gpt):
    for n in (1, 2, 3):
        response, _ = sample(tiny_gpt, QUERIES * 5, T=20, eos_id=None, no_repeat_ngram_size=n)
        for row, ids in zip(QUERIES * 5, response.tolist(), strict=True):
            ngrams = [tuple((row + ids)[i : i + n]) for i in range(len(row) + 20 - n + 1)]
            assert len(set(ngrams)) == len(ngrams)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngram_ban_bans_the_same_ids_as_a_search_through_lists(n):
    """Ids are up to 6 in a vocabulary of 5, so 5 and 6 are outside; -1 is padding. A row whose ids would all be banned
    keeps them all."""
    context = torch.randint(-1, 7, (200, 9), generator=torch.Generator().manual_seed(n))
    context[:20] = torch.randint(0, 2, (20, 9), generator=torch.Generator().manual_seed(n))
    logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(n))
    for row, ids, filtered in zip(logits, context.tolist(), ban_repeated_ngrams(logits, context, n), strict=True):
        seen = {tuple(ids[i : i + n]) for i in range(9 - n + 1)}
        tail = tuple(ids[9 - n + 1 :])
        banned = {i for i in range(5) if (*tail, i) in seen and all(0 <= j < 5 for j in tail)}
        expected = [-math.inf if i in banned and len(banned) < 5 else row[i].item() for i in range(5)]
        assert filtered.tolist() == expected


def test_ngram_ban_needs_a_whole_ngram():
    """Two ids contain one bigram and no trigram."""
    logits, context = torch.zeros(1, 4), torch.tensor([[2, 2]])
    assert ban_repeated_ngrams(logits, context, 2).isfinite().tolist() == [[True, True, False, True]]
    assert ban_repeated_ngrams(logits, context, 3).isfinite().all()
    assert ban_repeated_ngrams(logits, context[:, :1], 1).isfinite().tolist() == [[True, True, False, True]]


def test_ngram_ban_ignores_rows_that_have_ended(tiny_gpt):
    """After EOS comes [PAD], whose id is outside the vocabulary here."""
    banned, free = (
        sample(tiny_gpt, QUERIES * 20, T=20, eos_id=3, temperature=2.0, no_repeat_ngram_size=n)[0] for n in (2, 0)
    )
    assert (banned == PAD).any(1).float().mean() > 0.2  # rows that ended while others went on
    for row, ids in zip(QUERIES * 20, banned.tolist(), strict=True):
        text = row + ids[: ids.index(PAD) if PAD in ids else None]
        pairs = list(zip(text, text[1:], strict=False))
        assert len(set(pairs)) == len(pairs)
    assert not torch.equal(banned, free)


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.9}, {"filtered_logprobs": True}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 0.1, 0.01, 1e-6])
def test_ids_left_by_an_ngram_ban_are_drawn_by_their_probabilities(temperature, settings):
    """The likeliest of four ids is banned: the other three are drawn by logits 2, 1 and 0, however improbable."""
    model = GPT(GPTConfig(vocab_size=4, n_ctx=4, d_model=4, n_layer=0, n_head=1, d_mlp=1, rotary_dim=2))
    with torch.no_grad():
        model.transformer.embedding.weight.copy_(torch.tensor([3.0, -1.0, -1.0, -1.0]))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = torch.tensor([4.0, 2.0, 1.0, 0.0])
        scale = model.logits(model(torch.tensor([[0, 0]])))[0, -1, 0] / 4  # scale of the layer norm
        model.lm_head.weight /= scale
    query = torch.zeros((200, 2), dtype=torch.long)
    uniforms = torch.arange(200, dtype=torch.float64)[:, None] / 200
    response, logprobs = generate(
        model, query, query == 0, 1, temperature, no_repeat_ngram_size=2, uniforms=uniforms, **settings
    )
    p = (torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64) / temperature).softmax(0)
    p[2 if "top_k" in settings else 3 :] = 0
    if "top_p" in settings:
        p[p.cumsum(0) - p >= 0.9] = 0
    p /= p.sum()
    expected = 1 + (p.cumsum(0) <= uniforms).sum(1)
    assert torch.equal(response[:, 0], expected)
    z = torch.tensor([4.0, 2.0, 1.0, 0.0], dtype=torch.float64) / temperature
    before = (z - z.logsumexp(0))[response[:, 0]]
    expected_logprobs = p[response[:, 0] - 1].log() if "filtered_logprobs" in settings else before
    assert torch.allclose(logprobs[:, 0].double(), expected_logprobs, rtol=1e-5, atol=1e-5)


def test_ngram_ban_that_would_ban_every_id_is_lifted():
    logits = ban_repeated_ngrams(torch.zeros(1, 3), torch.tensor([[0, 1, 2]]), 1)
    assert logits.isfinite().all()


# ------------------------------------------------------------------------------------------------------ for_sampling
needs_int8 = pytest.mark.skipif(not has_int8_matmul(), reason="this processor has no VNNI")


def test_filtered_logprobs_are_under_the_sampling_distribution(tiny_gpt):
    """For the tokens that top-p keeps, they are the unfiltered logprobs minus the log of the probability kept."""
    uniforms = torch.rand(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    settings = {"T": 6, "uniforms": uniforms, "eos_id": None, "top_p": 0.5}
    response, before = sample(tiny_gpt, QUERIES * 10, **settings)
    again, after = sample(tiny_gpt, QUERIES * 10, filtered_logprobs=True, **settings)
    assert torch.equal(response, again) and (after > before).all()
    for b, row in enumerate(QUERIES * 10):
        ids = response[b].tolist()
        for t in range(6):
            p = (tiny_gpt.logits(tiny_gpt(torch.tensor([row + ids[:t]])))[0, -1].double() / 0.8).softmax(-1)
            largest = p.sort(descending=True).values
            kept = largest[: int((largest.cumsum(0) < 0.5).sum()) + 1].sum()
            assert after[b, t].item() == pytest.approx((p[ids[t]] / kept).log().item(), abs=1e-5)
    unfiltered = {**settings, "top_p": 1.0}
    plain, flagged = (sample(tiny_gpt, QUERIES * 10, filtered_logprobs=flag, **unfiltered) for flag in (False, True))
    assert torch.equal(plain[1], flagged[1])


def random_gpt(**changes):
    torch.manual_seed(0)
    model = GPT(replace(TINY, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


LLAMA = {"norm": "rms", "gated_mlp": True, "activation": "silu", "n_kv_head": 2, "mlp_bias": False, "qkv_bias": False}
SHAPES = {
    "gpt2": {"positions": "learned", "rotary_dim": 0, "tied_head": True, "parallel_residual": False},
    "codegen": {"positions": "rotary_interleaved", "shared_norm": True, "head_bias": True, "activation": "gelu_new"},
    "qwen3": {**LLAMA, "qk_norm": True, "attention_out_bias": False, "parallel_residual": False, "tied_head": True},
    "adapters": {"adapter_size": 3},
}


@needs_int8
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_an_int8_sampler_is_the_model_with_rounded_matmuls(changes):
    """Its logprobs are close to the model's but not equal; embeddings are shared, and the model is unchanged."""
    model = random_gpt(**changes).forbid(3, 36)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sampler = for_sampling(model, "int8")
    uniforms = torch.rand(30, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    response, logprobs = sample(sampler, QUERIES * 10, uniforms=uniforms, eos_id=None, temperature=1.0)
    gaps = []
    for row, ids, got in zip(QUERIES * 10, response.tolist(), logprobs, strict=True):
        gaps.append(got.double() - full_forward_logprobs(model, row, ids, 1.0))
    gap = torch.stack(gaps).abs().mean()
    assert 1e-4 < gap < 0.1 and not torch.isin(response, torch.tensor([3, 36])).any()
    assert sampler.transformer.embedding.weight is model.transformer.embedding.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {type(module.weight) for module in sampler.modules() if isinstance(module, torch.nn.Linear)} == {Int8Weight}


@needs_int8
def test_an_int8_samplers_row_does_not_depend_on_batch_or_padding(tiny_gpt):
    test_a_response_does_not_depend_on_the_other_rows_or_on_padding(for_sampling(tiny_gpt, "int8"))
    test_dropping_ended_rows_changes_nothing(for_sampling(tiny_gpt, "int8"))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("int8", marks=needs_int8)])
def test_low_rank_updates_are_merged_before_rounding(tiny_gpt, dtype):
    tune(tiny_gpt, "lora", rank=2, targets=("q", "v", "down"))
    for name, parameter in tiny_gpt.named_parameters():
        if ".ups." in name:
            torch.nn.init.normal_(parameter, std=0.5)
    uniforms = torch.rand(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        results = [
            sample(for_sampling(model, dtype), QUERIES, uniforms=uniforms, eos_id=None)
            for model in (tiny_gpt, merge(tiny_gpt))
        ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_weights_rounded_once_equal_those_autocast_rounds(tiny_gpt):
    uniforms = torch.rand(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    with torch.autocast("cpu", torch.bfloat16):
        plain, rounded = (
            sample(model, QUERIES, uniforms=uniforms) for model in (tiny_gpt, for_sampling(tiny_gpt, "bfloat16"))
        )
        same = for_sampling(tiny_gpt, "same")
        assert same.transformer.blocks[0].mlp.up.weight.dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(plain, rounded, strict=True))
    assert for_sampling(tiny_gpt, "same") is tiny_gpt


def test_a_sampler_with_low_rank_updates_casts_its_weights_once(tiny_gpt):
    """Not per token; and not a bit changes, because the updates aren't merged."""
    tune(tiny_gpt, "lora", rank=2, targets=("q", "v", "down"))
    for name, parameter in tiny_gpt.named_parameters():
        if ".ups." in name:
            torch.nn.init.normal_(parameter, std=0.5)
    uniforms = torch.rand(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    with torch.autocast("cpu", torch.bfloat16):
        sampler = for_sampling(tiny_gpt, "same")
        plain, cast = (sample(model, QUERIES, uniforms=uniforms, eos_id=None) for model in (tiny_gpt, sampler))
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))
    assert {p.dtype for p in sampler.transformer.blocks.parameters() if p.ndim == 2} == {torch.bfloat16}
    assert {p.dtype for p in tiny_gpt.parameters()} == {torch.float32}
    assert sampler.lm_head.weight is tiny_gpt.lm_head.weight


@pytest.mark.skipif(onednn_matmul() is None, reason="this build of PyTorch has no oneDNN linear")
def test_packed_weights_sample_the_same(monkeypatch):
    monkeypatch.setattr(kernels.linear, "MANY_WEIGHTS", 1100)
    model = random_gpt(**SHAPES["qwen3"]).forbid(3, 36)
    tune(model, "lora", rank=2, targets=("q", "v", "down"))
    sampler = for_sampling(model, "same")
    layers = (module for module in sampler.modules() if isinstance(module, torch.nn.Linear))
    assert {PackedWeight, torch.nn.Parameter} == {type(layer.weight) for layer in layers}
    assert type(sampler.lm_head.weight) is PackedWeight
    assert sampler.transformer.embedding.weight is model.lm_head.weight
    uniforms = torch.rand(30, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    plain, packed = (sample(one, QUERIES * 10, uniforms=uniforms, eos_id=None) for one in (model, sampler))
    assert torch.equal(plain[0], packed[0]) and torch.allclose(plain[1], packed[1], atol=1e-5)


@needs_int8
def test_nonfinite_weights_show_in_an_int8_sampler(tiny_gpt):
    with torch.no_grad():
        tiny_gpt.lm_head.weight[3] = float("nan")
    with pytest.raises(InputError, match="logits are not finite"):
        sample(for_sampling(tiny_gpt, "int8"), QUERIES)
