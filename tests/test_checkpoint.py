"""All families but T5 against `transformers` on random weights, both ways; errors for broken checkpoints."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanorlhf import checkpoint
from nanorlhf.checkpoint import load_gpt, load_scalar, read_config, save, scalar_from_gpt
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT, ScalarModel

transformers = pytest.importorskip("transformers")
VOCAB, N_CTX = 53, 40

FAMILIES = {
    "gpt2": lambda **changes: transformers.GPT2Config(
        **{"vocab_size": VOCAB, "n_positions": N_CTX, "n_embd": 30, "n_layer": 2, "n_head": 3} | changes
    ),
    "gpt_neo": lambda **changes: transformers.GPTNeoConfig(
        **{
            "vocab_size": VOCAB, "max_position_embeddings": N_CTX, "hidden_size": 20, "num_layers": 3, "num_heads": 5,
            "attention_types": [[["local", "global", "local"], 1]], "window_size": 4,
        } | changes
    ),
    "gpt_neox": lambda **changes: transformers.GPTNeoXConfig(
        **{
            "vocab_size": VOCAB, "max_position_embeddings": N_CTX, "hidden_size": 36, "num_hidden_layers": 2,
            "num_attention_heads": 3, "intermediate_size": 50, "rotary_pct": 0.34,
        } | changes
    ),
    "codegen": lambda **changes: transformers.CodeGenConfig(
        **{
            "vocab_size": VOCAB, "n_positions": N_CTX, "n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 6,
            "tie_word_embeddings": False,
        } | changes
    ),
    "llama": lambda **changes: transformers.LlamaConfig(**LLAMA | changes),
    "mistral": lambda **changes: transformers.MistralConfig(**LLAMA | {"sliding_window": 5} | changes),
    "qwen2": lambda **changes: transformers.Qwen2Config(**LLAMA | changes),
    "qwen3": lambda **changes: transformers.Qwen3Config(**LLAMA | {"head_dim": 10} | changes),
    "gptj": lambda **changes: transformers.GPTJConfig(
        **{
            "vocab_size": VOCAB, "n_positions": N_CTX, "n_embd": 48, "n_layer": 2, "n_head": 4, "rotary_dim": 6,
        } | changes
    ),
    "olmo2": lambda **changes: transformers.Olmo2Config(**LLAMA | changes),
    "phi3": lambda **changes: transformers.Phi3Config(**LLAMA | {"pad_token_id": 0} | changes),
    "gemma2": lambda **changes: transformers.Gemma2Config(**LLAMA | GEMMA | CAPS | changes),
    "gemma3_text": lambda **changes: transformers.Gemma3TextConfig(
        **LLAMA | GEMMA | {"sliding_window_pattern": 2} | changes
    ),
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCAB, "max_position_embeddings": N_CTX, "hidden_size": 24, "intermediate_size": 34,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
GEMMA = {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 10}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CASES = [
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 17, "activation_function": "relu"}),
    ("gpt2", {"n_embd": 28, "n_head": 7, "scale_attn_weights": False}),
    ("gpt_neo", {}),  # windows shorter than the sequence
    ("gpt_neo", {"window_size": 64}),  # and longer
    ("gpt_neo", {"window_size": 1, "tie_word_embeddings": False}),
    ("gpt_neox", {}),
    ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500.0, "attention_bias": False}),
    ("codegen", {}),
    ("codegen", {"n_head": 12, "rotary_dim": 4, "tie_word_embeddings": True}),
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 14, "rms_norm_eps": 0.1}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 70.0}, "hidden_act": "gelu"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 60.0, "factor": 2.5}}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 50.0, "factor": 8.0}}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": YARN | {"beta_fast": 3.0, "beta_slow": 0.3, "truncate": False}}),
    ("llama", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    ("mistral", {}),  # windows shorter than the sequence
    ("mistral", {"sliding_window": 64}),  # and longer
    ("mistral", {"sliding_window": None, "head_dim": 8}),
    ("qwen2", {}),  # biases of q, k and v only
    ("qwen2", WINDOWS | {"tie_word_embeddings": True}),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"] * 2} | WINDOWS | {"num_hidden_layers": 4}),
    ("qwen3", {}),  # norms of q and k, and heads wider than hidden_size / heads
    ("qwen3", {"attention_bias": True, "head_dim": 6, "rope_parameters": YARN} | WINDOWS),
    ("gptj", {}),
    ("gptj", {"rotary_dim": 12, "tie_word_embeddings": True, "n_inner": 17}),
    ("olmo2", {}),  # norms after attention and MLP, and over all heads of q and of k
    ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    ("olmo2", {"rope_parameters": YARN}),
    ("phi3", {}),  # q, k, v in one tensor, gate and up in another
    ("phi3", {"sliding_window": 5, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.7}}),
    ("gemma2", {}),  # logits large enough for the caps, windows shorter than the sequence
    ("gemma2", {"attn_logit_softcapping": None, "sliding_window": 64, "attention_bias": True}),
    ("gemma2", {"final_logit_softcapping": None, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("gemma2", {"layer_types": ["full_attention"] * 3, "hidden_activation": "silu"}),
    ("gemma3_text", {}),  # layers with a window have a different rotary base
    ("gemma3_text", {"rope_parameters": BY_KIND, "final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    ("gemma3_text", {"layer_types": ["sliding_attention"] * 3, "rope_parameters": BY_KIND}),
    ("gemma3_text", {"sliding_window_pattern": 1, "attention_bias": True}),
]


def transformers_model(family: str, changes: dict, seed: int = 0) -> transformers.PreTrainedModel:
    """Make a random transformers model, perturbed so that a wrong mask, order or position changes the output."""
    torch.manual_seed(seed)
    config = FAMILIES[family](**changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ids_and_mask(batch: int = 3, length: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random ids and their mask; rows are left-padded by 0, 3, 6, ... positions."""
    ids = torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(length) >= 3 * torch.arange(batch)[:, None]


@torch.no_grad()
def largest_differences(ours: GPT, theirs: transformers.PreTrainedModel) -> tuple[float, float]:
    """Return the largest differences of hidden states and logits at real tokens of left-padded rows."""
    ids, mask = ids_and_mask()
    arguments = {"attention_mask": mask.long(), "output_hidden_states": True}
    arguments["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    output = theirs(ids, **arguments)
    hidden = ours(ids, mask)
    differences = (
        (hidden - output.hidden_states[-1]).abs()[mask].max(),
        (ours.logits(hidden) - output.logits).abs()[mask],
    )
    return differences[0].item(), differences[1].max().item()


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_hidden_states_and_logits_equal_transformers(family, changes, tmp_path) -> None:
    theirs = transformers_model(family, changes)
    theirs.save_pretrained(tmp_path)
    ours = load_gpt(tmp_path)
    assert max(largest_differences(ours, theirs)) < 1e-5
    ids, _ = ids_and_mask()
    with torch.no_grad():  # and without a mask
        assert (ours.logits(ours(ids)) - theirs(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_transformers_loads_what_we_write(family, changes, tmp_path) -> None:
    transformers_model(family, changes).save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    torch.manual_seed(3)
    ours = GPT(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save(ours, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert max(largest_differences(ours, theirs)) < 1e-5
    assert (tmp_path / "ours" / "config.json").stat().st_size > 0 and read_config(tmp_path / "ours") == config


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_left_padded_rows_equals_transformers(family, tmp_path) -> None:
    """Uses each library's cache; texts are longer than the windows."""
    theirs = transformers_model(family, {})
    theirs.save_pretrained(tmp_path)
    ids, mask = ids_and_mask(length=13)
    ours, _ = generate(load_gpt(tmp_path), ids, mask, 14, temperature=0.0)
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours, theirs.generate(ids, attention_mask=mask.long(), **settings)[:, 13:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_changes_no_bit(family, tmp_path) -> None:
    transformers_model(family, {}).save_pretrained(tmp_path / "a")
    first = load_gpt(tmp_path / "a")
    save(first, tmp_path / "b")
    second = load_gpt(tmp_path / "b")
    assert first.config == second.config
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_safetensors_and_pickles_give_the_same_weights(family, tmp_path) -> None:
    theirs = transformers_model(family, {})
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    unsharded, shards = load_gpt(tmp_path / "whole").state_dict(), load_gpt(tmp_path / "shards").state_dict()
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    names = sorted(tensors)
    bins = {"bin": {"pytorch_model.bin": names}}
    bins["bin_shards"] = {
        f"pytorch_model-0000{i}-of-00002.bin": part for i, part in ((1, names[:5]), (2, names[5:]))
    }  # fmt: skip
    for directory, files in bins.items():
        (tmp_path / directory).mkdir()
        shutil.copy(tmp_path / "whole" / "config.json", tmp_path / directory)
        for file, part in files.items():
            torch.save({name: tensors[name] for name in part}, tmp_path / directory / file)
    index = {name: file for file, part in bins["bin_shards"].items() for name in part}
    (tmp_path / "bin_shards" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for state in (shards, load_gpt(tmp_path / "bin").state_dict(), load_gpt(tmp_path / "bin_shards").state_dict()):
        assert all(torch.equal(unsharded[name], tensor) for name, tensor in state.items()) and len(state) == len(
            unsharded
        )


def test_half_precision_weights_become_float32(tmp_path) -> None:
    transformers_model("gpt_neox", {}).to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_gpt(tmp_path)
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {torch.float32}
    assert max(largest_differences(ours, theirs)) < 1e-5


def test_a_file_with_only_the_trunk_and_old_buffers_loads(tmp_path) -> None:
    """OpenAI's GPT-2 on the Hub has no `transformer.` prefix, and causal masks among the weights."""
    theirs = transformers_model("gpt2", {})
    theirs.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, N_CTX, N_CTX).tril()
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert max(largest_differences(load_gpt(tmp_path), theirs)) < 1e-5


# ------------------------------------------------------------------------------------------- the reward and value model
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_keeps_head_head_bias_and_normalisation(family, tmp_path) -> None:
    transformers_model(family, {}).save_pretrained(tmp_path / "policy")
    policy = load_gpt(tmp_path / "policy")
    model = scalar_from_gpt(policy)
    with torch.no_grad():
        model.score.bias.fill_(0.7)
        model.reward_bias.fill_(-1.3)
    save(model, tmp_path / "rm")
    again = load_scalar(tmp_path / "rm")
    ids, mask = ids_and_mask()
    assert torch.equal(model(ids, mask), again(ids, mask))
    hidden = policy(ids, mask)
    expected = hidden @ model.score.weight[0] + 0.7 + 1.3
    assert (again(ids, mask) - expected).abs()[mask].max() < 1e-5


def test_a_reward_model_has_its_own_copy_of_the_trunk(tmp_path) -> None:
    transformers_model("gpt2", {}).save_pretrained(tmp_path)
    policy = load_gpt(tmp_path)
    model = scalar_from_gpt(policy)
    with torch.no_grad():
        model.transformer.embedding.weight.zero_()
    assert policy.transformer.embedding.weight.abs().sum() > 0


def test_policies_and_reward_models_are_not_confused(tmp_path) -> None:
    transformers_model("gpt_neox", {}).save_pretrained(tmp_path / "policy")
    save(scalar_from_gpt(load_gpt(tmp_path / "policy")), tmp_path / "rm")
    with pytest.raises(InputError, match="is a reward or value model"):
        load_gpt(tmp_path / "rm")
    with pytest.raises(InputError, match="train_rm.py"):
        load_scalar(tmp_path / "policy")


# --------------------------------------------------------------------------------------------------- broken checkpoints
@pytest.fixture
def written(tmp_path) -> Path:
    transformers_model("gpt_neox", {}).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def change_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


BIAS = "gpt_neox.layers.1.attention.dense.bias"


@pytest.mark.parametrize(
    ("breakage", "sentence"),
    [
        (lambda d: change_tensors(d, lambda t: t.pop(BIAS)), f"no tensor {BIAS}"),
        (lambda d: change_tensors(d, lambda t: t.update(surprise=torch.zeros(1))), "surprise"),
        (
            lambda d: change_tensors(d, lambda t: t.update({BIAS: torch.zeros(7)})),
            r"shape \(7,\), but .* requires \(36,\)",
        ),
        (lambda d: change_tensors(d, lambda t: t.update({BIAS: torch.zeros(36).long()})), "int64"),
        (lambda d: change_config(d, model_type="mixtral"), "model_type 'mixtral' isn't one of gpt2, gpt_neo"),
        (lambda d: change_config(d, model_type="gpt2", n_positions=40, n_embd=36, n_layer=2, n_head=3), "wte"),
        (lambda d: change_config(d, hidden_act="mish"), "hidden_act 'mish'"),
        (lambda d: change_config(d, num_attention_heads=5), "must divide"),
        (lambda d: change_config(d, hidden_size="36"), "hidden_size must be an integer"),
        (lambda d: change_config(d, rope_parameters={"rope_type": "linear", "factor": 2.0}), "isn't implemented"),
        (lambda d: change_config(d, quantization_config={"bits": 4}), "quantization_config"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "malformed JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
        (lambda d: os.truncate(d / "model.safetensors", 5000), "can't be read"),
    ],
)
def test_a_broken_checkpoint_gives_one_sentence_naming_the_file(written, breakage, sentence) -> None:
    load_gpt(written)
    breakage(written)
    with pytest.raises(InputError, match=sentence) as error:
        load_gpt(written)
    assert str(written) in str(error.value) and "\n" not in str(error.value)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("phi3", {"rope_parameters": None, "rope_scaling": LONGROPE}, "'longrope'.* isn't implemented, only rope_type"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'.* isn't implemented"),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 2.0}, "12 rotary channels don't fit a head of"),
        ("phi3", {"model_type": "phimoe"}, "model_type 'phimoe' isn't one of gpt2, "),
        ("olmo2", {"model_type": "olmoe"}, "model_type 'olmoe' isn't one of gpt2, "),
        ("olmo2", {"num_key_value_heads": 3}, "num_key_value_heads 3 must divide num_attention_heads 4"),
        ("gptj", {"rotary_dim": 7}, "7 rotary channels don't fit a head of width 12"),
        ("gptj", {"rotary_dim": None}, "rotary_dim must be an integer of at least 2"),
        ("gemma2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.* isn't implemented"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping must be a number of at least 0.001"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping must be a number"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be an integer of at least 1"),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types .* must name the kinds of 3 layers"),
        ("gemma3_text", {"model_type": "gemma3", "text_config": {}}, "model_type 'gemma3' isn't one of .*gemma3_text"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True isn't implemented"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping isn't implemented for Gemma 3"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "must be by kind, full_attention and sliding"),
        ("gemma3_text", {"rope_parameters": {"full_attention": 7}}, "must be by kind, full_attention and sliding"),
        (
            "gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "'linear'.* isn't implemented, only rope_type default",
        ),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be an int"),
    ],
)  # fmt: skip
def test_an_unsupported_config_gives_one_sentence(family, changes, sentence, tmp_path) -> None:
    settings = FAMILIES[family]().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read_config(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError, match=sentence) as error:
        read_config(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "config.json")) and "\n" not in str(error.value)


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path) -> None:
    transformers_model("gpt2", {}).save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(VOCAB, 30)}))
    with pytest.raises(InputError, match="tie_word_embeddings"):
        load_gpt(tmp_path)


class Intruder:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.system, ("touch intruder",)


def test_a_pickle_that_runs_code_is_refused(written, monkeypatch) -> None:
    monkeypatch.chdir(written)
    (written / "model.safetensors").unlink()
    (written / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Intruder()}, protocol=2))
    with pytest.raises(InputError, match="damaged or contains more than tensors"):
        load_gpt(written)
    torch.save({"x": Intruder()}, written / "pytorch_model.bin")
    with pytest.raises(InputError, match="damaged or contains more than tensors"):
        load_gpt(written)
    assert not (written / "intruder").exists()


def test_a_missing_shard_is_named(tmp_path) -> None:
    transformers_model("gpt2", {}).save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InputError, match=shard.name):
        load_gpt(tmp_path)


def test_a_missing_path_gives_one_sentence_without_a_network(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="no such file or directory"):
        load_gpt(tmp_path / "nothing")
    with pytest.raises(
        InputError, match="nobody/nothing: no such file or directory, and downloading it as a model from the Hub failed"
    ):
        load_gpt("nobody/nothing")


def test_settings_a_family_cannot_store_are_rejected_before_writing(tmp_path) -> None:
    config = GPTConfig(vocab_size=9, n_ctx=8, d_model=8, n_layer=1, n_head=2, d_mlp=8, rotary_dim=2, norm_eps=1e-5)
    with pytest.raises(InputError, match="can't express scale_attention = False"):
        save(GPT(replace(config, scale_attention=False)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fails_at", ["save_file", "replace"])
def test_an_interrupted_save_leaves_the_previous_checkpoint(written, monkeypatch, fails_at) -> None:
    before = {file.name: file.read_bytes() for file in written.iterdir()}
    model = load_gpt(written)
    with torch.no_grad():
        model.lm_head.weight.zero_()

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if fails_at == "save_file":
        monkeypatch.setattr(checkpoint, "save_file", fail)
    else:
        monkeypatch.setattr(checkpoint.os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save(model, written)
    assert {file.name: file.read_bytes() for file in written.iterdir()} == before
    with pytest.raises(OSError, match="No space left"):
        save(model, written.parent / "new")
    assert not (written.parent / "new").exists()


def test_a_scalar_model_is_not_saved_as_a_language_model(tmp_path) -> None:
    """Its config names ScalarModel, so that transformers does not generate text with a random head."""
    config = GPTConfig(vocab_size=9, n_ctx=8, d_model=8, n_layer=1, n_head=2, d_mlp=8, rotary_dim=2)
    save(ScalarModel(config), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["ScalarModel"]
    assert {"score.weight", "score.bias", "reward_bias"} < load_file(tmp_path / "model.safetensors").keys()
    assert not any(re.match("embed_out|lm_head", name) for name in load_file(tmp_path / "model.safetensors"))


def test_loading_a_checkpoint_does_not_import_the_compiler(tmp_path) -> None:
    """The import takes a second or more; drawing or indexing on the meta device would trigger it."""
    config = GPTConfig(vocab_size=41, n_ctx=48, d_model=24, n_layer=2, n_head=3, d_mlp=40, rotary_dim=4)
    save(GPT(config), tmp_path / "policy")
    save(ScalarModel(config), tmp_path / "reward")
    program = f"""
import sys
from nanorlhf.checkpoint import load_gpt, load_scalar
load_gpt({str(tmp_path / "policy")!r}), load_scalar({str(tmp_path / "reward")!r})
print(*sorted({{"torch._dynamo", "sympy"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
