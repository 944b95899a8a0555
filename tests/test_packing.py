"""Packed rows have the hidden states, gradients, samples and scores of padded rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nanorlhf.packing
import nanorlhf.reading
from nanorlhf.generate import generate
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.packing import Bounds, Packing, attend_by_row, attend_packed, can_pack
from nanorlhf.reward_model import end_scores
from tests.conftest import GPU
from tests.test_model import CONFIGS, add_lora, make_model

PAD, Q, T = 40, 7, 4
CAUSAL = [name for name, config in CONFIGS.items() if config.attention_cap is None]
# (tokens of the query, of the response)
ROWS = [(7, 4), (2, 3), (5, 0), (1, 4), (7, 1)]


@pytest.fixture
def packs(monkeypatch) -> None:
    """Pack on a CPU, as a GPU does in bfloat16."""
    monkeypatch.setattr(nanorlhf.reading, "can_pack", lambda config, device, dtype: config.attention_cap is None)


def padded_rows(repeats: int = 1) -> tuple[Tensor, Tensor]:
    """Ids (B, Q + T) and mask; queries padded on the left, responses on the right, each query `repeats` times."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for query_length, _ in ROWS:
        query = torch.full((Q,), PAD)
        query[Q - query_length :] = torch.randint(2, 37, (query_length,), generator=generator)
        for i in range(repeats):
            response = torch.randint(2, 37, (T,), generator=generator)
            response[(ROWS[len(rows) // repeats][1] + i) % (T + 1) :] = PAD
            rows.append(torch.cat((query, response)))
    ids = torch.stack(rows)
    return ids, ids != PAD


def hidden_and_gradient(model: GPT, ids: Tensor, mask: Tensor, last: int | None) -> tuple[Tensor, Tensor]:
    """Hidden states of real tokens, and a gradient of them."""
    weights = torch.randn((*ids.shape, model.config.d_model), generator=torch.Generator().manual_seed(5))
    last = last or ids.size(1)
    hidden = model(ids, mask, last=last)[mask[:, -last:]]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = (hidden * weights[:, -last:][mask[:, -last:]]).sum()
    gradient = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return hidden.detach(), torch.cat([g.flatten() for g in gradient])


def close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return torch.allclose(x, y, rtol=0, atol=tolerance * y.abs().max().item())


@pytest.mark.parametrize("how", ["full", "lora", "recomputed activations"])
@pytest.mark.parametrize("last", [None, T + 1, 1])
@pytest.mark.parametrize("name", CAUSAL)
def test_packing_changes_neither_hidden_states_nor_gradients_in_float64(name, last, how, request) -> None:
    model = make_model(CONFIGS[name]).double()
    model.transformer.checkpoint_activations = how == "recomputed activations"
    if how == "lora":
        add_lora(model)
    ids, mask = padded_rows()
    hidden, gradient = hidden_and_gradient(model, ids, mask, last)
    request.getfixturevalue("packs")
    packed = hidden_and_gradient(model, ids, mask, last)
    tolerance = 1e-12 if model.config.norm == "layer" else 1e-6  # RMS norms compute in float32
    assert close(packed[0], hidden, tolerance) and close(packed[1], gradient, tolerance)
    # ids at padding must not matter
    assert torch.equal(hidden_and_gradient(model, ids.masked_fill(~mask, 39), mask, last)[0], packed[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_shared_queries_equal_separate_padded_rows_in_float64(name, monkeypatch, request) -> None:
    model = make_model(CONFIGS[name]).double()
    ids, mask = padded_rows(repeats=3)
    model.transformer.share_queries = False
    hidden, gradient = hidden_and_gradient(model, ids, mask, T + 1)
    model.transformer.share_queries = True
    request.getfixturevalue("packs")
    shared = hidden_and_gradient(model, ids, mask, T + 1)
    tolerance = 1e-12 if model.config.norm == "layer" else 1e-6
    assert close(shared[0], hidden, tolerance) and close(shared[1], gradient, tolerance)


def test_only_real_tokens_are_computed(packs, monkeypatch) -> None:
    """Counted at the embedding; with shared queries, each query once."""
    model, tokens = make_model(CONFIGS["gpt_neox"]), []
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, x: (tokens.append(x.numel()), forward(self, x))[1])
    ids, mask = padded_rows()
    response_logprobs(model, ids, mask, mask[:, Q:], 1.0)
    assert tokens == [int(mask.sum())]
    tokens.clear()
    ids, mask = padded_rows(repeats=3)
    response_logprobs(model, ids, mask, mask[:, Q:], 1.0)
    assert tokens == [int(mask[::3, :Q].sum()), int(mask[:, Q:].sum())]
    tokens.clear()
    generate(model, ids[::3, :Q], mask[::3, :Q], 2, pad_id=PAD)
    assert tokens == [int(mask[::3, :Q].sum()), len(ROWS)]


@torch.no_grad()
def test_a_row_does_not_depend_on_the_others(packs) -> None:
    model = make_model(CONFIGS["qwen3"]).double()
    ids, mask = padded_rows()
    together = model(ids, mask, last=T + 1)
    for row in range(len(ids)):
        alone = model(ids[row : row + 1], mask[row : row + 1], last=T + 1)
        assert torch.allclose(alone[0], together[row], atol=1e-6)
    assert (together[:, 1:][~mask[:, Q:]] == model.transformer.norm(torch.zeros(24).double())).all()


@torch.no_grad()
def test_a_row_of_only_padding_changes_nothing(packs) -> None:
    model = make_model(CONFIGS["gpt2"]).double()
    ids, mask = padded_rows()
    hidden = model(ids, mask)[mask]
    mask = torch.cat((mask[:2], torch.zeros_like(mask[:1]), mask[2:]))
    ids = torch.cat((ids[:2], ids[:1], ids[2:]))
    with_empty = model(ids, mask)
    assert with_empty.isfinite().all() and torch.allclose(with_empty[mask], hidden, atol=1e-12)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("name", CAUSAL)
def test_samples_equal_those_after_a_padded_prefill(name, repeats, request) -> None:
    model = make_model(CONFIGS[name])
    query = padded_rows(repeats)[0][:, :Q]
    uniforms = torch.rand((len(query), 9), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    padded = generate(model, query, query != PAD, 9, eos_id=1, pad_id=PAD, uniforms=uniforms)
    request.getfixturevalue("packs")
    response, logprobs = generate(model, query, query != PAD, 9, eos_id=1, pad_id=PAD, uniforms=uniforms)
    assert torch.equal(response, padded[0]) and torch.allclose(logprobs, padded[1], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_packing_does_not_change_scores(side, request) -> None:
    """Also of texts that are padded only on the right, whose responses begin at different columns."""
    model = make_model(CONFIGS["llama"], ScalarModel)
    ids, mask = padded_rows()
    query_length = Q
    if side == "right":
        order = (~mask).long().sort(dim=1, stable=True).indices
        ids, query_length = ids.gather(1, order), torch.tensor([length for length, _ in ROWS])
    scores = end_scores(model, ids, query_length, PAD)
    request.getfixturevalue("packs")
    assert torch.allclose(end_scores(model, ids, query_length, PAD), scores, atol=1e-5)


def test_the_arguments_of_flash_attention(monkeypatch) -> None:
    """Its documentation, written out: N tokens of all rows, their bounds, and tokens seen to the left and right."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, **gqa):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        left, right = window_size
        assert right == 0
        out = torch.empty_like(query)
        for row in range(len(cu_seq_q) - 1):
            n, m = int(cu_seq_q[row + 1] - cu_seq_q[row]), int(cu_seq_k[row + 1] - cu_seq_k[row])
            assert n <= max_q and m <= max_k
            for i in range(n):
                at = m - n + i  # aligned at the end
                first = 0 if left == -1 else max(0, at - left)
                for head in range(query.size(1)):
                    shared = head * key.size(1) // query.size(1)
                    keys = key[cu_seq_k[row] + first : cu_seq_k[row] + at + 1, shared]
                    weights = (keys @ query[cu_seq_q[row] + i, head] * scale).softmax(0)
                    values = value[cu_seq_k[row] + first : cu_seq_k[row] + at + 1, shared]
                    out[cu_seq_q[row] + i, head] = weights @ values
        return out

    class OnGPU(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    torch.manual_seed(0)
    q, k, v = (torch.randn((1, heads, n, 8)).double() for heads, n in ((4, 9), (2, 14), (2, 14)))
    for window in (None, 1, 3):
        bounds = Bounds(*(torch.tensor(x).int() for x in ((0, 2, 2, 9), (0, 5, 5, 14))), 7, 9, window)
        expected = attend_by_row(q, k, v, bounds, 0.3)
        result = attend_packed(q.as_subclass(OnGPU), k, v, bounds, 0.3)
        assert torch.allclose(result.as_subclass(torch.Tensor), expected, atol=1e-12)


def test_bounds_of_a_batch() -> None:
    """The last layer has queries only at the last 3 columns; keys may have more columns than queries."""
    mask = torch.tensor([[sign == "#" for sign in row] for row in ("..####", "###...", ".#####")])
    every, last = Packing(mask, 3).bounds((None, 2))
    assert every.queries.tolist() == every.keys.tolist() == last.keys.tolist() == [0, 4, 7, 12]
    assert last.queries.tolist() == [0, 3, 3, 6] and (last.longest_queries, last.longest_keys) == (3, 6)
    assert (every.window, last.window) == (None, 2)
    responses = Packing(mask[:, 4:], 2).bounds((None,), mask)[0]
    assert responses.queries.tolist() == [0, 2, 2, 4] and responses.keys.tolist() == [0, 4, 7, 12]


def test_which_models_are_packed(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda, config = torch.device("cuda"), CONFIGS["gpt_neox"]
    assert can_pack(config, cuda, torch.bfloat16) and can_pack(replace(config, d_head=256), cuda, torch.float16)
    assert not can_pack(replace(config, d_head=10), cuda, torch.bfloat16)  # not a multiple of 8
    assert not can_pack(config, cuda, torch.float32)
    assert not can_pack(config, torch.device("cpu"), torch.bfloat16)
    assert not can_pack(CONFIGS["capped"], cuda, torch.bfloat16)
    assert not can_pack(replace(config, causal=False), cuda, torch.bfloat16)
    assert not can_pack(replace(config, d_head=264), cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not can_pack(config, cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(nanorlhf.packing, "varlen_arguments", lambda: ["query", "is_causal"])  # PyTorch 2.10
    assert not can_pack(config, cuda, torch.bfloat16)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("repeats", [1, 3])
def test_flash_attention_equals_padded_rows_in_bfloat16(name, repeats, device, monkeypatch) -> None:
    """Both are compared with float32: packing must not be less precise."""
    config = replace(CONFIGS[name], d_head=16, rotary_dim=8 if CONFIGS[name].rotary_dim else 0)
    model = make_model(config).to(device)
    ids, mask = (x.to(device) for x in padded_rows(repeats))
    results = {}
    for path in ("float32", "packed", "padded"):
        with torch.autocast("cuda", torch.bfloat16, enabled=path != "float32"):
            if path == "padded":
                monkeypatch.setattr(nanorlhf.reading, "can_pack", lambda *arguments: False)
            hidden = model(ids, mask, last=T + 1)
            counts = torch.cat((torch.ones_like(mask[:, :1]), mask[:, Q:]), dim=1)
            weights = torch.arange(hidden.numel(), device=device).view_as(hidden).cos()
            loss = (hidden.float() * weights)[counts].sum()
            gradient = torch.autograd.grad(loss, list(model.transformer.parameters()))
            results[path] = torch.cat([hidden[counts].flatten().float(), *(g.flatten().float() for g in gradient)])
    error = {path: (results[path] - results["float32"]).norm() for path in ("packed", "padded")}
    assert error["packed"] < 1.5 * error["padded"]
