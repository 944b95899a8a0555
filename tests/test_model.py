"""Invariances of the model: padding, batch and cache change nothing. Parity with transformers: test_checkpoint.py."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nanorlhf.masks
from kernels.attention import RotaryScaling
from nanorlhf.cache import KVCache
from nanorlhf.checkpoint import scalar_from_gpt
from nanorlhf.config import GPTConfig
from nanorlhf.layers import OffsetRMSNorm, RMSNorm
from nanorlhf.masks import attention_mask, causal_suffices, position_ids
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import tune

SHAPE = {"vocab_size": 41, "n_ctx": 48, "d_model": 24, "n_layer": 3, "n_head": 3, "d_mlp": 40}
LLAMA = {"n_head": 4, "norm": "rms", "gated_mlp": True, "activation": "silu", "parallel_residual": False}
GEMMA = LLAMA | {"norm": "rms_offset", "post_norm": True, "embedding_scale": 24**0.5, "attention_divisor": 5}
CONFIGS = {
    "gpt2": GPTConfig(**SHAPE, positions="learned", parallel_residual=False, tied_head=True, architecture="gpt2"),
    "gpt_neo": GPTConfig(
        **SHAPE, positions="learned", parallel_residual=False, scale_attention=False, attention_windows=(5, None, 2)
    ),
    "gpt_neox": GPTConfig(**SHAPE, positions="rotary_half", rotary_dim=4),
    "codegen": GPTConfig(**SHAPE, positions="rotary_interleaved", rotary_dim=8, shared_norm=True, head_bias=True),
    "llama": GPTConfig(
        **SHAPE | LLAMA, n_kv_head=2, rotary_dim=6, rotary_scaling=RotaryScaling(kind="linear", factor=1.5)
    ),
    "qwen3": GPTConfig(
        **SHAPE | LLAMA, n_kv_head=1, d_head=10, rotary_dim=10, qk_norm=True, attention_windows=(None, 5, 2)
    ),
    "olmo2": GPTConfig(
        **SHAPE | LLAMA, n_kv_head=2, rotary_dim=6, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True
    ),
    "gemma2": GPTConfig(
        **SHAPE | GEMMA, n_kv_head=2, rotary_dim=6, attention_windows=(5, None, 5), attention_cap=2.0, logit_cap=3.0
    ),
    "gemma3": GPTConfig(
        **SHAPE | GEMMA, n_kv_head=1, d_head=10, rotary_dim=10, attention_windows=(5, 5, None), qk_norm=True,
        local_rotary_base=50.0, rotary_scaling=RotaryScaling(kind="linear", factor=1.5),
    ),
    "capped": GPTConfig(**SHAPE, rotary_dim=4, attention_cap=1.5),  # without windows
}  # fmt: skip


def make_model(config: GPTConfig, kind: type = GPT) -> GPT | ScalarModel:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():  # at initialisation, attention is nearly uniform
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def add_lora(model: GPT) -> None:
    """Train updates of rank 2 that are not zero."""
    tune(model, "lora", rank=2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


@pytest.fixture(params=CONFIGS)
def gpt(request) -> GPT:
    return make_model(CONFIGS[request.param])


# -------------------------------------------------------------------------------------------------- padding and batches
@torch.no_grad()
def test_left_padding_does_not_change_a_row(gpt) -> None:
    row = torch.randint(41, (1, 11), generator=torch.Generator().manual_seed(1))
    alone = gpt.logits(gpt(row))
    for padding in (1, 7, 30):
        ids = torch.cat((torch.randint(41, (1, padding)), row), dim=1)  # masked ids must not matter
        mask = torch.arange(11 + padding)[None] >= padding
        assert (gpt.logits(gpt(ids, mask))[:, padding:] - alone).abs().max() < 1e-5


@torch.no_grad()
def test_the_other_rows_of_a_batch_do_not_change_a_row(gpt) -> None:
    ids = torch.randint(41, (4, 15), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(15) >= torch.tensor([[0], [3], [8], [14]])
    together = gpt(ids, mask)
    for row, first in enumerate((0, 3, 8, 14)):
        assert (gpt(ids[row : row + 1, first:]) - together[row, first:]).abs().max() < 1e-5


@torch.no_grad()
def test_right_padding_does_not_change_the_tokens_before_it(gpt) -> None:
    ids = torch.randint(41, (1, 9), generator=torch.Generator().manual_seed(1))
    padded, mask = torch.cat((ids, ids), dim=1), torch.arange(18)[None] < 9
    assert (gpt(padded, mask)[:, :9] - gpt(ids)).abs().max() < 1e-5


@torch.no_grad()
def test_a_padding_id_outside_the_embedding_never_reaches_it(gpt) -> None:
    ids = torch.randint(41, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    expected = gpt(ids, mask)[mask]
    assert torch.equal(gpt(ids.masked_fill(~mask, 50257), mask)[mask], expected)


@torch.no_grad()
def test_a_row_of_only_padding_is_finite_and_does_not_affect_other_rows(gpt) -> None:
    ids = torch.randint(41, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True] * 9, [False] * 9])
    hidden = gpt(ids, mask)
    assert hidden.isfinite().all()
    assert (hidden[0] - gpt(ids[:1])[0]).abs().max() < 1e-5


# . padding, # real; whether causal attention never reaches the padding
PADDINGS = {
    "none": (["######", "######"], True),
    "right": (["######", "###...", "#....."], True),
    "a row of only padding": (["####..", "......"], True),
    "left": (["######", "..####"], False),
    "both sides": ([".####.", "###..."], False),
    "within a row": (["##.###", "######"], False),
}


@pytest.mark.parametrize("last", [None, 3])
@pytest.mark.parametrize("padding", PADDINGS)
def test_the_causal_kernel_equals_the_bias(gpt, monkeypatch, padding, last) -> None:
    """Compares hidden states of real tokens and all gradients; if padding comes first, the bias is kept."""
    drawing, suffices = PADDINGS[padding]
    mask = torch.tensor([[sign == "#" for sign in row] for row in drawing])
    ids, wanted = torch.randint(41, mask.shape), mask[:, -(last or 6) :]
    spy, plain, results = [], F.scaled_dot_product_attention, []

    def attend(q, k, v, **settings):
        spy.append(settings["is_causal"])
        return plain(q, k, v, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    for on_gpu in (False, True):
        monkeypatch.setattr(nanorlhf.masks, "has_causal_kernel", lambda device, on_gpu=on_gpu: on_gpu)
        gpt.zero_grad()
        hidden = gpt(ids, mask, last=last)[wanted]
        (hidden * torch.arange(hidden.numel()).view_as(hidden).cos()).sum().backward()
        results.append((hidden.detach(), *(p.grad for p in gpt.transformer.parameters())))
    causal = suffices and gpt.config.attention_windows is None
    if gpt.config.attention_cap is None:
        assert spy == [False] * 3 + [causal, causal, causal and last is None]
    else:  # no kernel caps its logits
        assert not spy
    assert (results[0][0] - results[1][0]).abs().max() < 1e-6
    for biased, unbiased in zip(*results, strict=True):
        assert (biased - unbiased).abs().max() <= 1e-6 * biased.abs().max().clamp(min=1)


def test_a_cpu_keeps_the_bias(monkeypatch) -> None:
    """Otherwise its sums would depend on the other rows' padding, and digits of old runs would change."""
    assert not causal_suffices(torch.ones(1, 3, dtype=torch.bool))
    monkeypatch.setattr(nanorlhf.masks, "has_causal_kernel", lambda device: True)
    assert causal_suffices(torch.ones(1, 3, dtype=torch.bool))


@torch.no_grad()
def test_no_token_attends_to_a_later_one(gpt) -> None:
    ids = torch.randint(41, (1, 12), generator=torch.Generator().manual_seed(1))
    before = gpt(ids)
    ids[0, 7] = (ids[0, 7] + 1) % 41
    after = gpt(ids)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7], after[:, 7])


# ---------------------------------------------------------------------------------------- an encoder: without causality
@pytest.fixture(params=["gpt2", "gpt_neox", "codegen", "llama"])
def encoder(request) -> GPT:
    return make_model(replace(CONFIGS[request.param], causal=False))


@torch.no_grad()
def test_every_token_of_an_encoder_attends_to_every_other(encoder) -> None:
    ids = torch.randint(41, (1, 12), generator=torch.Generator().manual_seed(1))
    before = encoder(ids)
    for position in (0, 7, 11):
        other = ids.clone()
        other[0, position] = (other[0, position] + 1) % 41
        assert ((encoder(other) - before).abs().amax(2) > 1e-4).all()


@torch.no_grad()
def test_padding_on_either_side_and_neighbours_do_not_change_a_row_of_an_encoder(encoder) -> None:
    row = torch.randint(41, (1, 9), generator=torch.Generator().manual_seed(1))
    alone = encoder(row)
    assert torch.equal(encoder(row, torch.ones_like(row, dtype=torch.bool)), alone)
    ids = torch.randint(41, (3, 14), generator=torch.Generator().manual_seed(2)).fill_(50257)
    ids[0, :9], ids[1, 5:], ids[2] = row, row, 7
    index = torch.arange(14)
    hidden = encoder(ids, torch.stack((index < 9, index >= 5, index >= 0)))
    assert (hidden[:1, :9] - alone).abs().max() < 1e-5 and (hidden[1:2, 5:] - alone).abs().max() < 1e-5


@torch.no_grad()
def test_an_encoder_without_positions_is_permutation_equivariant() -> None:
    encoder = make_model(replace(CONFIGS["gpt_neox"], rotary_dim=0, causal=False))
    ids = torch.randint(41, (1, 12), generator=torch.Generator().manual_seed(1))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert (encoder(ids[:, order]) - encoder(ids)[:, order]).abs().max() < 1e-5
    causal = make_model(replace(CONFIGS["gpt_neox"], rotary_dim=0))
    assert (causal(ids[:, order]) - causal(ids)[:, order]).abs().max() > 1e-2


def test_computing_only_the_last_tokens_of_an_encoder_gives_the_same_values_and_gradients(encoder) -> None:
    ids = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(1))
    results = []
    for last in (None, 5):
        encoder.zero_grad()
        hidden = encoder(ids, last=last)[:, -5:]
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        results.append([hidden.detach(), *(p.grad.clone() for p in encoder.parameters() if p.grad is not None)])
    for full, part in zip(*results, strict=True):
        assert torch.allclose(full, part, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------ the cache
@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True])  # True: as on a GPU, where one captured step is replayed
def test_decoding_with_a_cache_equals_the_full_forward_pass(gpt, whole, monkeypatch) -> None:
    """A prefill of 6, then one token per step; rows left-padded by 0 and 4; one row is dropped midway."""
    ids = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) >= torch.tensor([[0], [4]])
    full = gpt(ids, mask)
    monkeypatch.setattr("nanorlhf.cache.replays", lambda device: whole)
    cache = KVCache(gpt.config, mask[:, :6], 6, torch.float32)
    hidden = [gpt(ids[:, :6], mask[:, :6], cache=cache), gpt(ids[:, 6:7], cache=cache)]
    assert (torch.cat(hidden, 1) - full[:, :7]).abs()[mask[:, :7]].max() < 1e-5
    kept = torch.tensor([1])
    cache.keep(kept)
    hidden = [gpt(ids[kept, i : i + 1], cache=cache) for i in range(7, 11)]
    assert cache.length == 11
    assert (torch.cat(hidden, 1) - full[kept, 7:11]).abs().max() < 1e-5


def test_computing_only_the_last_tokens_gives_the_same_values_and_gradients(gpt) -> None:
    ids = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) >= torch.tensor([[0], [4]])
    for real in (mask, None):
        results = []
        for last in (None, 5):
            gpt.zero_grad()
            hidden = gpt(ids, real, last=last)[:, -5:]
            (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
            gradients = [p.grad.clone() for p in gpt.parameters() if p.grad is not None]
            results.append([hidden.detach(), *gradients])
        for full, part in zip(*results, strict=True):
            assert torch.allclose(full, part, atol=1e-4, rtol=1e-4)


def test_checkpointed_activations_change_no_output_and_save_memory(gpt) -> None:
    ids = torch.randint(41, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) >= torch.tensor([[0], [4]])
    results, kept = [], []
    for gpt.transformer.checkpoint_activations in (False, True):
        gpt.zero_grad()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):  # noqa: B023
            hidden = gpt(ids, mask, last=5)
        hidden.square().sum().backward()
        kept.append(sum(sizes))
        results.append([hidden.detach(), *(p.grad.clone() for p in gpt.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert kept[1] < kept[0] / 3


# ---------------------------------------------------------------------------------------------------------------- masks
def test_positions_equal_the_drawing() -> None:
    mask = torch.tensor([[False, False, True, True, True, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 0]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(1, 8)),
    st.booleans(),
)
def test_the_attention_mask_equals_a_triple_loop(rows, window, causal) -> None:
    visible = attention_mask(torch.tensor(rows), window, causal)
    assert visible.shape == (len(rows), 1, 6, 6)
    for row in range(len(rows)):
        for query in range(6):
            for key in range(6):
                near = window is None or query - key < window
                expected = key == query or ((key < query or not causal) and near and rows[row][key])
                assert visible[row, 0, query, key].item() == expected


# ------------------------------------------------------------------------------------------------------- [PAD], dropout
@torch.no_grad()
def test_pad_and_unused_rows_of_the_head_have_probability_zero() -> None:
    model = make_model(CONFIGS["codegen"]).forbid(pad_id=37, num_ids=39)
    logits = model.logits(model(torch.zeros((1, 3), dtype=torch.long)))
    assert (logits[..., [37, 39, 40]] == -torch.inf).all()
    assert logits[..., [i for i in range(39) if i != 37]].isfinite().all()


@torch.no_grad()
def test_forbidding_ids_outside_the_head_changes_nothing() -> None:
    model = make_model(CONFIGS["gpt2"])
    before = model.logits(model(torch.zeros((1, 3), dtype=torch.long)))
    model.forbid(pad_id=41, num_ids=41)
    assert model.head_bias is None
    assert torch.equal(model.logits(model(torch.zeros((1, 3), dtype=torch.long))), before)


def test_no_model_has_dropout() -> None:
    for config in CONFIGS.values():
        for kind in (GPT, ScalarModel):
            assert not [m for m in kind(config).modules() if isinstance(m, nn.Dropout) or getattr(m, "dropout", 0)]


def test_training_mode_changes_no_number(gpt) -> None:
    ids = torch.randint(41, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gpt.train()(ids), gpt.eval()(ids))


# ----------------------------------------------------------------------------------------------------- the scalar model
def test_the_scalar_head_starts_at_one_over_the_square_root_of_width_plus_one() -> None:
    """[N+ 11] 10,000 weights: their standard deviation is within 5 standard errors, 0.7% each, of 1 / sqrt(10001)."""
    torch.manual_seed(0)
    model = ScalarModel(replace(CONFIGS["gpt_neox"], d_model=9999, n_layer=0, n_head=1, d_mlp=1))
    assert model.score.weight.std().item() == pytest.approx(1 / math.sqrt(10_000), rel=0.035)
    assert model.score.bias.item() == 0 and model.reward_bias.item() == 0


def test_the_scalar_head_of_width_two_has_weights_of_variance_a_third() -> None:
    """[N+ 11] 6,000 weights of 3,000 models: their standard deviation is within 4 standard errors of 1 / sqrt(3)."""
    torch.manual_seed(0)
    config = replace(CONFIGS["gpt_neox"], vocab_size=2, d_model=2, n_layer=0, n_head=1, d_mlp=1, rotary_dim=2)
    assert ScalarModel(config).config is config
    weights = torch.cat([ScalarModel(config).score.weight for _ in range(3000)])
    assert weights.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.037)


@torch.no_grad()
def test_the_normalisation_is_subtracted_from_every_score() -> None:
    model = make_model(CONFIGS["gpt_neo"], ScalarModel)
    ids = torch.randint(41, (2, 9), generator=torch.Generator().manual_seed(1))
    before = model(ids)
    model.reward_bias.fill_(2.5)
    assert torch.allclose(model(ids), before - 2.5)
    assert "reward_bias" in model.state_dict()


@torch.no_grad()
def test_scores_do_not_depend_on_padding_or_batch(gpt) -> None:
    model = scalar_from_gpt(gpt)
    ids = torch.randint(41, (1, 9), generator=torch.Generator().manual_seed(1))
    left = torch.cat((ids.new_zeros(1, 5), ids), dim=1)
    right = torch.cat((ids, ids.new_zeros(1, 5)), dim=1)
    index = torch.arange(14)[None]
    assert (model(left, index >= 5)[:, 5:] - model(ids)).abs().max() < 1e-5
    assert (model(right, index < 9)[:, :9] - model(ids)).abs().max() < 1e-5


@torch.no_grad()
def test_scores_are_float32_under_bf16_autocast() -> None:
    model = make_model(CONFIGS["gpt_neox"], ScalarModel)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.zeros((1, 3), dtype=torch.long)).dtype == torch.float32


@torch.no_grad()
def test_an_rms_norm_is_its_formula_in_float64_and_float32_inside_autocast() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(16, eps=1e-3), torch.randn(2, 5, 16) * 3
    norm.weight.normal_()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    assert (norm(x) - exact).abs().max() < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), norm.float()(x)) and norm(x).dtype == torch.float32
        assert torch.equal(norm(x.bfloat16()), norm(x.bfloat16().float()).bfloat16())


@torch.no_grad()
def test_an_offset_norm_multiplies_by_one_plus_its_weight_and_starts_at_one() -> None:
    torch.manual_seed(0)
    norm, x = OffsetRMSNorm(16, eps=1e-3), torch.randn(2, 5, 16) * 3
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert (norm(x) - exact).abs().max() < 1e-6
    norm.weight.normal_()
    assert (norm(x) - exact * (1 + norm.weight.double())).abs().max() < 2e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x.bfloat16()), norm(x.bfloat16().float()).bfloat16())


@torch.no_grad()
def test_capped_logits_match_the_formula_and_forbidden_ids_stay_impossible() -> None:
    model = make_model(CONFIGS["gemma2"])
    hidden = model(torch.randint(41, (2, 9), generator=torch.Generator().manual_seed(1)))
    plain = hidden.double() @ model.lm_head.weight.double().T
    assert plain.abs().max() > 3 and (model.logits(hidden) - 3 * (plain / 3).tanh()).abs().max() < 1e-5
    forbidden = model.forbid(pad_id=37, num_ids=39).logits(hidden)
    assert (forbidden[..., [37, 39, 40]] == -torch.inf).all() and forbidden[..., :37].abs().max() <= 3


@torch.no_grad()
def test_a_group_of_queries_shares_its_keys_and_values() -> None:
    """The result equals a model with a copy for every query head, and the cache stores them once."""
    config = CONFIGS["llama"]
    gpt, copied = make_model(config), make_model(replace(config, n_kv_head=None))
    copied.load_state_dict(gpt.state_dict() | {name: repeated(weight) for name, weight in qkv_weights(gpt)})
    ids = torch.randint(41, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(13) >= torch.tensor([[0], [4]])
    assert (gpt(ids, mask) - copied(ids, mask))[mask].abs().max() < 1e-5
    cache = KVCache(config, mask, 3, torch.float32)
    assert cache.keys.shape == (3, 2, config.kv_heads, 16, config.head_width)


@pytest.mark.parametrize("whole", [False, True])
def test_on_a_cpu_each_channel_of_the_keys_is_contiguous(whole: bool, monkeypatch) -> None:
    """Also after rows have ended: in the other order, a matmul with one query loses up to two thirds of its speed."""
    monkeypatch.setattr("nanorlhf.cache.replays", lambda device: whole)
    cache = KVCache(CONFIGS["llama"], torch.ones((2, 13), dtype=torch.bool), 3, torch.float32)
    assert cache.keys.mT.is_contiguous() and cache.values.is_contiguous()
    assert not whole or not (cache.keys.any() or cache.values.any())
    cache.keep(torch.tensor([1]))
    assert cache.keys.mT.is_contiguous() and cache.values.is_contiguous()


def qkv_weights(gpt: GPT) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in gpt.state_dict().items() if "attention.qkv" in name]


def repeated(rows: torch.Tensor) -> torch.Tensor:
    """Repeat 2 key and 2 value heads to match 4 query heads, 6 rows each."""
    heads = rows.view(8, 6, *rows.shape[1:])
    return heads[[0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]].flatten(0, 1)
