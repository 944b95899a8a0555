"""T5: parity with `transformers` on random weights; masks of the encoder and the decoder."""

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

import kernels.linear
from kernels.int8 import Int8Weight
from kernels.linear import PackedWeight, onednn_matmul
from kernels.processor import has_int8_matmul
from nanorlhf.checkpoint import load_gpt, load_scalar, read_config, save, scalar_from_gpt
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling, generate
from nanorlhf.logprobs import response_logprobs, response_values
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad
from nanorlhf.t5 import T5Config, relative_bias, relative_buckets

transformers = pytest.importorskip("transformers")

VOCAB, PAD = 43, 999
SHAPE = {"vocab_size": VOCAB, "d_model": 24, "n_layer": 2, "n_head": 3, "d_head": 10, "d_mlp": 40}
FIRST = {"tied_head": True, "head_scale": 24**-0.5}
CONFIGS = {
    "first": T5Config(**SHAPE, **FIRST, start_id=2, query_start_id=1, query_end_id=2),  # like CodeT5
    "1.1": T5Config(**SHAPE, activation="gelu_new", gated_mlp=True, query_end_id=1),  # a separate head
    "deep decoder": T5Config(**SHAPE, **FIRST, n_decoder_layer=3, num_buckets=7, max_distance=9),
}
THEIRS = {
    "first": {"decoder_start_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "deep decoder": {
        "num_decoder_layers": 3, "relative_attention_num_buckets": 7, "relative_attention_max_distance": 9,
        "eos_token_id": None,
    },
    "narrow": {"d_kv": 8, "feed_forward_proj": "gelu", "layer_norm_epsilon": 0.1},
    "gated": {"feed_forward_proj": "gated-silu", "num_layers": 3, "num_decoder_layers": 1},
}  # fmt: skip


def away_from_the_start(model: torch.nn.Module, seed: int = 0) -> None:
    """Perturb the weights: with nearly uniform attention, a wrong mask or position would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))


@cache
def t5(name: str = "first", kind: type = GPT) -> GPT | ScalarModel:
    torch.manual_seed(0)
    model = kind(CONFIGS[name])
    away_from_the_start(model)
    return model.eval()


def transformers_model(name: str) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 3}
    config = transformers.T5Config(
        **{**shape, "decoder_start_token_id": 0, "attn_implementation": "eager", **THEIRS[name]}
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    if name == "1.1":  # transformers 5 ties the head of a new model, but not of a loaded one
        model.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn(VOCAB, 24))
    away_from_the_start(model)
    return model


def rows(T: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query (3, 14), left-padded by 0, 5 and 12, response (3, T), with 0, 2 and 7 after EOS, and their masks."""
    generator = torch.Generator().manual_seed(1)
    query, response = (torch.randint(3, VOCAB, (3, length), generator=generator) for length in (14, T))
    query_mask = torch.arange(14) >= torch.tensor([[0], [5], [12]])
    actions = torch.arange(T) < torch.tensor([[T], [T - 2], [T - 7]])
    return query.masked_fill(~query_mask, PAD), query_mask, response.masked_fill(~actions, PAD), actions


def enclosed(query: Tensor, query_mask: Tensor, config: transformers.T5Config) -> dict[str, Tensor]:
    """Return the inputs of transformers' encoder: each query between BOS and EOS, if any, as tokenizers do."""
    ids = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    ends = [[] if i is None else [i] for i in ids]
    texts = [ends[0] + q[real].tolist() + ends[1] for q, real in zip(query, query_mask, strict=True)]
    lengths = torch.tensor([[len(text)] for text in texts])
    padded = left_pad(texts, 0)
    return {"input_ids": padded, "attention_mask": (torch.arange(padded.size(1)) >= padded.size(1) - lengths).long()}


@torch.no_grad()
def largest_difference(ours: GPT, theirs: transformers.T5ForConditionalGeneration) -> float:
    """Return the largest difference of the logits at tokens that count."""
    query, query_mask, response, actions = rows()
    labels = response.masked_fill(~actions, 0)
    inputs = torch.cat((torch.full_like(labels[:, :1], theirs.config.decoder_start_token_id), labels[:, :-1]), dim=1)
    expected = theirs(**enclosed(query, query_mask, theirs.config), decoder_input_ids=inputs).logits
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, actions), dim=1)
    logits = ours.logits(ours(ids, mask, last=response.size(1) + 1)[:, :-1])
    return (logits - expected)[actions].abs().max().item()


# --------------------------------------------------------------------------------------------- parity with transformers
@pytest.mark.parametrize("name", THEIRS)
def test_logits_equal_transformers(name, tmp_path) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path)
    assert largest_difference(load_gpt(tmp_path), theirs) < 1e-5


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_loads_what_we_write(name, tmp_path) -> None:
    transformers_model(name).save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    torch.manual_seed(3)
    ours = GPT(config)
    away_from_the_start(ours, seed=3)
    save(ours, tmp_path / "ours")
    load = transformers.AutoModelForSeq2SeqLM.from_pretrained
    theirs = load(tmp_path / "ours", attn_implementation="eager").eval()
    assert largest_difference(ours, theirs) < 1e-5
    assert read_config(tmp_path / "ours") == config
    query, query_mask, _, _ = rows()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(**enclosed(query, query_mask, theirs.config), **settings)[:, 1:]
    assert torch.equal(generate(ours, query, query_mask, 5, temperature=0.0)[0], expected)


@pytest.mark.parametrize("name", THEIRS)
def test_greedy_text_equals_transformers(name, tmp_path) -> None:
    """Texts are longer than max_distance; each library uses its cache."""
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path)
    query, query_mask, _, _ = rows()
    ours, _ = generate(load_gpt(tmp_path), query, query_mask, 17, temperature=0.0)
    settings = {"max_new_tokens": 17, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["use_cache"] = name != "deep decoder"  # their cache is too short for a decoder deeper than its encoder
    inputs = enclosed(query, query_mask, theirs.config)
    assert torch.equal(ours, theirs.generate(**inputs, **settings)[:, 1:])


def test_a_round_trip_changes_no_bit(tmp_path) -> None:
    for name in CONFIGS:
        save(t5(name), tmp_path / name)
        again = load_gpt(tmp_path / name)
        assert again.config == CONFIGS[name]
        for (tensor_name, a), b in zip(t5(name).state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(a, b), tensor_name


def test_a_scalar_model_survives_a_round_trip_and_copies_the_policys_trunk(tmp_path) -> None:
    model = scalar_from_gpt(t5("1.1"))
    away_from_the_start(model.score)
    save(model, tmp_path)
    again = load_scalar(tmp_path)
    query, query_mask, response, actions = rows()
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, actions), dim=1)
    with torch.no_grad():
        assert torch.equal(again(ids, mask, last=12), model(ids, mask, last=12))
        hidden = t5("1.1").transformer(ids, mask, last=12)
        expected = hidden @ model.score.weight[0] + model.score.bias
        assert torch.allclose(model(ids, mask, last=12), expected, atol=1e-5)


def test_files_of_older_versions_load_the_same(tmp_path) -> None:
    """Old pickles have a copy of the embedding for each stack and the head, and an unused bias."""
    theirs = transformers_model("first")
    theirs.save_pretrained(tmp_path / "now")
    (tmp_path / "then").mkdir()
    shutil.copy(tmp_path / "now/config.json", tmp_path / "then")
    tensors = load_file(tmp_path / "now/model.safetensors")
    embedding = tensors["shared.weight"]
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    then = tensors | dict.fromkeys(copies, embedding) | {unused: torch.randn(32, 3)}
    torch.save(then, tmp_path / "then/pytorch_model.bin")
    assert largest_difference(load_gpt(tmp_path / "then"), theirs) < 1e-5
    torch.save(then | {copies[1]: embedding + 1}, tmp_path / "then/pytorch_model.bin")
    with pytest.raises(InputError, match="encoder and decoder have different embeddings"):
        load_gpt(tmp_path / "then")


def test_an_implicitly_tied_head_is_the_embedding(tmp_path) -> None:
    """transformers 5 ties a new 1.1 model's head, doesn't save it, and ties it again when it loads the file."""
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=10, d_ff=40, num_layers=2, num_heads=3, tie_word_embeddings=False,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    away_from_the_start(theirs)
    with torch.no_grad():
        theirs.shared.weight *= 0.2  # otherwise logits exceed 10, with larger rounding errors
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert largest_difference(load_gpt(tmp_path), theirs) < 1e-5


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("feed_forward_proj", "doubly-gated-gelu", "isn't gated-ACTIVATION or ACTIVATION"),
        ("feed_forward_proj", "tanh", "isn't one of"),
        ("num_decoder_layers", 0, "num_decoder_layers must be an integer of at least 1"),
        ("relative_attention_num_buckets", 2, "relative_attention_num_buckets must be an integer of at least 4"),
        ("relative_attention_max_distance", 16, "relative_attention_max_distance must be an integer of at least 17"),
        ("decoder_start_token_id", VOCAB, "decoder_start_token_id must be an integer and at most 42"),
        ("eos_token_id", [1, 2], "eos_token_id must be an integer and at most 42"),
        ("is_encoder_decoder", 7, "is_encoder_decoder"),
        ("d_ff", None, "d_ff must be an integer"),
    ],
)
def test_invalid_settings_are_rejected(field, value, message, tmp_path) -> None:
    save(t5(), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {field: value}))
    with pytest.raises(InputError, match=message):
        load_gpt(tmp_path)


def test_a_missing_tensor_of_the_decoder_is_named(tmp_path) -> None:
    save(t5(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["decoder.block.1.layer.1.EncDecAttention.v.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"no tensor decoder\.block\.1\.layer\.1\.EncDecAttention\.v\.weight"):
        load_gpt(tmp_path)


# ---------------------------------------------------------------------------------------------------- positions by hand
def test_buckets_equal_the_drawing() -> None:
    distance = torch.tensor([0, -1, -2, -3, -4, -5, -6, -8, -16, -99])
    assert relative_buckets(distance, 8, 16, causal=True).tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 7]
    # bidirectional: four buckets per side, two of them exact
    both = torch.tensor([0, -1, -2, -5, -6, -40, 1, 2, 5, 6, 40])
    assert relative_buckets(both, 8, 16, causal=False).tolist() == [0, 1, 2, 2, 3, 3, 5, 6, 6, 7, 7]


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (7, 9), (5, 20), (4, 3), (64, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_equal_transformers_at_every_distance(num_buckets, max_distance, causal) -> None:
    distance = torch.arange(-700, 701)
    expected = T5Attention._relative_position_bucket(distance, not causal, num_buckets, max_distance)
    assert torch.equal(relative_buckets(distance, num_buckets, max_distance, causal), expected)


def test_a_bias_depends_only_on_the_distance() -> None:
    table, config = t5().transformer.encoder_bias, CONFIGS["first"]
    bias = relative_bias(table, 9, config, causal=False)
    assert bias.shape == (1, 3, 9, 9)
    for i in range(9):
        for j in range(9):
            bucket = relative_buckets(torch.tensor([j - i]), 32, 128, causal=False)
            assert torch.equal(bias[0, :, i, j], table(bucket)[0])


def test_new_heads_look_back_1_2_3_tokens_and_the_last_sees_all_alike() -> None:
    torch.manual_seed(0)
    model = GPT(CONFIGS["first"]).transformer
    for table, causal in ((model.encoder_bias, False), (model.decoder_bias, True)):
        first, second, last = relative_bias(table, 9, CONFIGS["first"], causal)[0]  # (9, 9) each
        assert first.argmax(1)[1:].tolist() == list(range(8)) and second.argmax(1)[2:].tolist() == list(range(7))
        assert first.tril().softmax(1).diagonal(-1).min() > 0.5 > 3 * last.softmax(1).max()


# ---------------------------------------------------------------------------------------------------- padding and masks
@torch.no_grad()
def hidden_states(model: GPT, query: Tensor, query_mask: Tensor, response: Tensor, actions: Tensor) -> Tensor:
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, actions), dim=1)
    return model(ids, mask, last=response.size(1) + 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_and_the_rest_of_the_batch_change_nothing(name) -> None:
    """Each row gives the same results as a single text without padding, cut at its end."""
    query, query_mask, response, actions = rows()
    together = hidden_states(t5(name), query, query_mask, response, actions)
    for b in range(3):
        q, r = query[b : b + 1, query_mask[b]], response[b : b + 1, actions[b]]
        alone = hidden_states(t5(name), q, q != PAD, r, r != PAD)
        assert (together[b : b + 1, : alone.size(1)] - alone).abs().max() < 1e-5


def test_right_padded_texts_have_the_hidden_states_of_left_padded_queries() -> None:
    query, query_mask, response, actions = rows()
    expected = hidden_states(t5(), query, query_mask, response, actions)  # (3, T + 1, C)
    lengths = query_mask.sum(1)
    ids = torch.full((3, 25), PAD)
    for b in range(3):
        text = torch.cat((query[b, query_mask[b]], response[b, actions[b]]))
        ids[b, : len(text)] = text
    with torch.no_grad():
        hidden = t5()(ids, ids != PAD, query_length=lengths)
        few = t5()(ids, ids != PAD, last=20, query_length=lengths)
    assert hidden.shape == (3, 25, 24) and torch.equal(few, hidden[:, -20:])
    for b, first in enumerate((lengths - 1).tolist()):
        num = int(actions[b].sum()) + 1
        assert (hidden[b, first : first + num] - expected[b, :num]).abs().max() < 1e-5


def test_the_encoder_reads_the_query_between_its_ids() -> None:
    query = torch.tensor([[PAD, PAD, 5, 6], [7, 8, PAD, PAD]])
    ids, mask = t5().transformer.enclosed(query, query != PAD)
    assert ids.masked_fill(~mask, -1).tolist() == [[-1, -1, 1, 5, 6, 2], [1, 7, 8, 2, -1, -1]]
    ids, mask = t5("1.1").transformer.enclosed(query, query != PAD)
    assert ids.masked_fill(~mask, -1).tolist() == [[-1, -1, 5, 6, 1], [7, 8, 1, -1, -1]]


def test_the_decoder_sees_no_later_token_and_the_encoder_sees_all() -> None:
    query, query_mask, response, actions = rows()
    response = response.masked_fill(~actions, 5)
    everywhere = torch.ones_like(actions)
    before = hidden_states(t5(), query, query_mask, response, everywhere)
    changed = response.clone()
    changed[:, 6] = (changed[:, 6] + 1) % VOCAB
    after = hidden_states(t5(), query, query_mask, changed, everywhere)
    assert torch.equal(before[:, :7], after[:, :7]) and ((before - after)[:, 7].abs().amax(1) > 1e-4).all()
    for position in (12, 13):  # the only real tokens of the third query
        other = query.clone()
        other[:, position] = (other[:, position] + 1) % VOCAB
        assert ((hidden_states(t5(), other, query_mask, response, everywhere) - before).abs().amax(2) > 1e-5).all()


def test_an_empty_query_is_finite_and_changes_no_other_row() -> None:
    query, query_mask, response, actions = rows()
    before = hidden_states(t5(), query, query_mask, response, actions)
    query[2], query_mask[2] = PAD, False
    after = hidden_states(t5(), query, query_mask, response, actions)
    assert after.isfinite().all() and torch.equal(after[:2], before[:2])


# ------------------------------------------------------------------------------------------ the cache, and two readings
@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True])  # True: as on a GPU, where one captured step is replayed
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_with_a_cache_equals_the_full_forward_pass(name, whole, monkeypatch) -> None:
    model = t5(name)
    query, query_mask, response, actions = rows()
    response = response.masked_fill(~actions, 5)
    full = hidden_states(model, query, query_mask, response, torch.ones_like(actions))
    monkeypatch.setattr("nanorlhf.cache.replays", lambda device: whole)
    cache = model.transformer.cache(query_mask, 11, torch.float32)
    steps = [model(query, query_mask, cache=cache, last=1)]
    kept = torch.tensor([0, 1, 2])
    for t in range(10):
        if t == 5:
            kept = torch.tensor([1, 2])
            cache.keep(kept)
        steps.append(model(response[kept, t : t + 1], cache=cache))
    assert cache.length == 11
    for t, hidden in enumerate(steps):
        assert (hidden[:, 0] - full[:, t][-len(hidden) :]).abs().max() < 1e-5


def test_the_query_is_encoded_once(monkeypatch) -> None:
    calls = []
    encode = type(t5().transformer).encode
    monkeypatch.setattr(type(t5().transformer), "encode", lambda *a: calls.append(1) or encode(*a))
    query, query_mask, _, _ = rows()
    generate(t5(), query, query_mask, 9)
    assert len(calls) == 1


def test_the_samplers_logprobs_equal_those_of_the_update() -> None:
    """The ratio of the first epoch is 1, even after rows have ended and been dropped."""
    query, query_mask, _, _ = rows()
    query, query_mask = query.repeat(6, 1), query_mask.repeat(6, 1)
    model = t5()
    response, sampled = generate(
        model, query, query_mask, 12, 0.8, eos_id=1, pad_id=PAD, generator=torch.Generator().manual_seed(0)
    )
    ended = response == PAD
    assert ended.any() and not ended[:, 0].any() and len(set(ended.sum(1).tolist())) > 2
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, ~ended), dim=1)
    logprobs, entropies = response_logprobs(model, ids, mask, ~ended, 0.8)
    assert ((logprobs - sampled).exp() - 1).abs().max() < 1e-5
    assert (entropies[~ended] > 0).all()


def test_a_response_does_not_depend_on_the_other_rows() -> None:
    query, query_mask, _, _ = rows()
    uniforms = torch.rand((3, 12), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    together, _ = generate(t5(), query, query_mask, 12, uniforms=uniforms)
    for b in range(3):
        q = query[b : b + 1, query_mask[b]]
        alone, _ = generate(t5(), q, q != PAD, 12, uniforms=uniforms[b : b + 1])
        assert torch.equal(together[b], alone[0])


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", pytest.param("int8", marks=pytest.mark.skipif(not has_int8_matmul(), reason="no VNNI here"))],
)
@torch.no_grad()
def test_a_rounded_sampler_is_the_model_with_rounded_matmuls(dtype) -> None:
    """Its logprobs are the same with and without a cache, and close to the model's but not equal."""
    query, query_mask, _, _ = rows()
    query, query_mask = query.repeat(6, 1), query_mask.repeat(6, 1)
    model, uniforms = t5(), torch.rand((18, 12), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    sampler = for_sampling(model, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        response, sampled = generate(sampler, query, query_mask, 12, eos_id=1, pad_id=PAD, uniforms=uniforms)
        ended = response == PAD
        ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, ~ended), dim=1)
        logits = sampler.logits(sampler(ids, mask, last=13)[:, :-1]).float()
    assert ended.any()
    again = logits.log_softmax(-1).gather(2, response.masked_fill(ended, 0)[..., None]).squeeze(2)
    exact, _ = response_logprobs(model, ids, mask, ~ended, 1.0)
    gap, rounding = (sampled - exact).abs()[~ended], (sampled - again).abs()[~ended]
    assert 5e-4 < gap.mean() < 0.1 and rounding.max() < 0.02  # sums in another order round to a neighbouring value
    if dtype == "int8":
        rounded = (module for module in sampler.modules() if isinstance(module, torch.nn.Linear))
        assert {type(module.weight) for module in rounded} == {Int8Weight}
    assert sampler.transformer.encoder_bias.weight is model.transformer.encoder_bias.weight


@pytest.mark.skipif(onednn_matmul() is None, reason="this build of PyTorch has no oneDNN linear")
def test_packed_weights_sample_the_same(monkeypatch) -> None:
    monkeypatch.setattr(kernels.linear, "MANY_WEIGHTS", 300)
    sampler = for_sampling(t5(), "same")
    assert type(sampler.transformer.blocks[-1].cross.kv.weight) is type(sampler.lm_head.weight) is PackedWeight
    query, query_mask, _, _ = rows()
    uniforms = torch.rand((3, 12), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    plain, packed = (generate(model, query, query_mask, 12, uniforms=uniforms) for model in (t5(), sampler))
    assert torch.equal(plain[0], packed[0]) and torch.allclose(plain[1], packed[1], atol=1e-5)


def test_no_ngram_of_query_or_response_is_repeated() -> None:
    query, query_mask, _, _ = rows()
    response, _ = generate(t5(), query, query_mask, 14, temperature=0.0, no_repeat_ngram_size=2)
    for q, real, r in zip(query.tolist(), query_mask.tolist(), response.tolist(), strict=True):
        text = [i for i, is_real in zip(q, real, strict=True) if is_real] + r
        pairs = list(zip(text[-15:], text[-14:], strict=False))
        assert len(set(pairs)) == len(pairs)


def test_values_are_read_before_each_token_and_a_critic_may_have_another_size() -> None:
    query, query_mask, response, actions = rows()
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, actions), dim=1)
    torch.manual_seed(0)
    critic = ScalarModel(replace(CONFIGS["first"], d_model=12, n_layer=1, n_head=2))
    away_from_the_start(critic)
    with torch.no_grad():
        values = response_values(critic, ids, mask, actions)
        assert (values[~actions] == 0).all()
        for b in range(3):
            q = query[b : b + 1, query_mask[b]]
            for t in range(int(actions[b].sum())):
                state = torch.cat((q, response[b : b + 1, :t]), dim=1)
                assert abs(critic(state, last=t + 1)[0, -1] - values[b, t]) < 1e-5


def test_recomputed_blocks_give_the_same_gradients() -> None:
    query, query_mask, response, actions = rows()
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, actions), dim=1)
    gradients = []
    for again in (False, True):
        model = GPT(CONFIGS["1.1"])
        model.load_state_dict(t5("1.1").state_dict())
        model.transformer.checkpoint_activations = again
        response_logprobs(model, ids, mask, actions, 1.0)[0].sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose(*gradients, atol=1e-6)
