"""Convert a GGUF file (llama.cpp's format) to a checkpoint that our scripts and transformers can load.

    python -m nanorlhf.pretrained.gguf SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smollm2
    python train_sft.py real --model runs/smollm2

gguf_header.py opens the file; the `gguf` library dequantises the weights to float32. Inconsistent
settings and tensors raise an error when the checkpoint is loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import tyro
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from nanorlhf.checkpoint import note, write_tensors
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import atomic_files, check_out
from nanorlhf.pretrained.family import Family, find_family
from nanorlhf.pretrained.gguf_header import StoredTensor, open_gguf
from nanorlhf.pretrained.layout import config_object, parse_config

# general.architecture -> model_type in config.json; llama.cpp also calls Mistral's models llama
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "phi3": "phi3", "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}  # fmt: skip
SETTINGS = {  # field of config.json: field of the metadata, without the architecture prefix
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
MORE_SETTINGS = {  # optional fields of some architectures
    "phi3": WINDOW,
    "gemma2": WINDOW | FINAL_CAP | {"attn_logit_softcapping": "attn_logit_softcapping"},
    "gemma3": WINDOW | FINAL_CAP | {
        "sliding_window_pattern": "attention.sliding_window_pattern", "rope_local_base_freq": "rope.freq_base_swa"
    },
}  # fmt: skip
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""layers of the 27B models: only they don't divide attention logits by the square root of the head width, and the
metadata doesn't record it"""
MODULES = {  # module of a block: ours
    "attn_norm": "norm1", "attn_qkv": "attention.qkv", "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm", "attn_output": "attention.out", "post_attention_norm": "post_norm1",
    "ffn_norm": "norm2", "ffn_gate": "mlp.gate", "ffn_up": "mlp.up", "ffn_down": "mlp.down",
    "post_ffw_norm": "post_norm2",
}  # fmt: skip
DIVISORS = "rope_freqs.weight"  # of the rotary frequencies
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # token_type of special tokens
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # tokenizer.ggml.pre: how texts are split before byte-pair encoding; None: as GPT-2 does
    "default": None,
    "gpt-2": None,
    "smollm": None,  # and each digit by itself
    "llama-bpe": f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}{{1,3}}|{OTHERS}",
    "qwen2": f"{CONTRACTIONS}|{LETTERS}|\\p{{N}}|{OTHERS}",
}


@dataclass(frozen=True, kw_only=True)
class Args:
    file: tyro.conf.Positional[Path]
    """GGUF file; for a model split into several files, the first: NAME-00001-of-0000N.gguf"""
    out: Path
    """directory to write the checkpoint to"""


def main(args: Args) -> None:
    check_out(args.out)
    if (args.out / "config.json").exists():
        raise InputError(f"--out {args.out} already contains a model: choose another directory.")
    convert(args.file, args.out)
    print(f"written: {args.out}")


def convert(file: Path, out: Path) -> None:
    """Write the model in the Hugging Face layout and float32, with its tokenizer if we support its kind."""
    config = parse_config(gguf_settings(file), file)
    settings = config_object(config) | {
        "architectures": [find_family(config.architecture).transformers_class],
        "torch_dtype": "float32",
        "eos_token_id": metadata(file, "tokenizer.ggml.eos_token_id", int),
        "bos_token_id": metadata(file, "tokenizer.ggml.bos_token_id", int),
        "pad_token_id": None,  # transformers' default may not be in the vocabulary
    }
    backend, tokenizer_settings = gguf_tokenizer(file)
    with atomic_files(out, last="config.json") as partial:
        contents = {"config.json": settings}
        if backend is not None:
            (partial / "tokenizer.json").write_text(backend.to_str(), "utf-8")
            contents["tokenizer_config.json"] = tokenizer_settings
        for name, content in contents.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        write_tensors(gguf_tensors(file), partial / "model.safetensors", partial / "config.json")


def metadata(path: Path, name: str, *kinds: type) -> Any:
    """Return a field's value, or None if it is missing. Raises InputError if its type isn't one of `kinds`."""
    value = open_gguf(path).fields.get(name)
    if value is not None and type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"{path}: {name} must be {names}, not {value!r:.80}.")
    return value


def gguf_settings(path: Path) -> dict:
    """Convert the metadata to the fields of config.json; raise InputError for an unsupported model."""
    architecture = metadata(path, "general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{path}: architecture {architecture!r:.80} isn't one of {known}.")
    more = MORE_SETTINGS.get(architecture, {})
    unsupported = ["expert_count"] if "sliding_window" in more else ["expert_count", WINDOW["sliding_window"]]
    for name in unsupported:
        if metadata(path, f"{architecture}.{name}", int):
            raise InputError(f"{path}: {architecture}.{name} isn't implemented.")
    settings = {name: metadata(path, f"{architecture}.{SETTINGS[name]}", int, float) for name in SETTINGS}
    for name, theirs in more.items():
        if value := metadata(path, f"{architecture}.{theirs}", int, float):
            settings[name] = value
    tensors = open_gguf(path).tensors
    n_head = settings["num_attention_heads"] or 1
    head_width = settings["head_dim"] or (settings["hidden_size"] or 0) // n_head
    if architecture in LARGEST_GEMMAS:
        is_largest = settings["num_hidden_layers"] == LARGEST_GEMMAS[architecture]
        settings["query_pre_attn_scalar"] = settings["hidden_size"] // n_head if is_largest else head_width
    if architecture == "phi3":
        if any(name.startswith("rope_factors") for name in tensors):
            raise InputError(f"{path}: rope_factors isn't implemented: only Phi-3 models without long context are.")
        rotated = metadata(path, f"{architecture}.rope.dimension_count", int) or head_width
        settings["partial_rotary_factor"] = rotated / max(head_width, 1)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"{path} is not a language model: it has no two-dimensional token_embd.weight.")
    if DIVISORS in tensors:
        divisors = dequantised(tensors[DIVISORS], path).astype(np.float64)
        settings["rope_scaling"] = llama3_scaling(divisors, settings, path)
    rope = f"{architecture}.rope.scaling"
    kind = metadata(path, f"{rope}.type", str)
    if kind not in (None, "none"):
        settings["rope_scaling"] = {
            "rope_type": kind,
            "factor": metadata(path, f"{rope}.factor", int, float),
            "original_max_position_embeddings": metadata(path, f"{rope}.original_context_length", int),
        }
    return settings | {
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def llama3_scaling(divisors: np.ndarray, settings: dict, path: Path) -> dict:
    """Recover rope_scaling of Llama 3.1 and later from the divisors of the frequencies.

    divisors (rotary_dim / 2,). A frequency with fewer turns in the original context than
    low_freq_factor is divided by the factor, one with more than high_freq_factor by 1, and we
    interpolate in between. Raises InputError for other divisors.
    """
    few, many, length = 1.0, 4.0, 8192  # the same for all Llamas; the file doesn't record them
    n_head = settings["num_attention_heads"] or 1
    half = (settings["head_dim"] or (settings["hidden_size"] or 0) // n_head) // 2
    base = settings["rope_theta"] or 1e4
    factor = round(float(divisors.max(initial=0)), 4)
    if divisors.shape == (half,) and factor >= 1:
        turns = length * base ** -(np.arange(half) / half) / (2 * np.pi)
        kept = ((turns - few) / (many - few)).clip(0, 1)
        if np.allclose(divisors, 1 / ((1 - kept) / factor + kept), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": few,
                "high_freq_factor": many,
                "original_max_position_embeddings": length,
            }
    raise InputError(f"{path}: {DIVISORS} doesn't match Llama 3: pass a checkpoint in the Hugging Face layout.")


def gguf_tensors(path: Path) -> dict[str, Tensor]:
    """Return the weights in float32, under their names in the Hugging Face layout."""
    settings = gguf_settings(path)
    n_head = settings["num_attention_heads"]
    family = find_family(settings["model_type"])
    tensors = {}
    for tensor in open_gguf(path).tensors.values():
        if tensor.name == DIVISORS:  # a setting, read in gguf_settings
            continue
        values = dequantised(tensor, path)
        if settings["model_type"] == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            num_kv_heads = settings["num_key_value_heads"] or n_head
            num_heads = n_head if tensor.name.endswith("attn_q.weight") else num_kv_heads
            if len(values) % (2 * num_heads):
                raise InputError(f"{path}: {tensor.name} has {len(values)} rows, not divisible by {num_heads} heads.")
            values = in_halves(values, num_heads)
        if family.fixed["norm"] == "rms_offset" and tensor.name.endswith("norm.weight"):
            values = values - 1  # llama.cpp stores the full factor
        tensors[hugging_face_name(tensor.name, family)] = torch.from_numpy(values)
    return tensors


def dequantised(tensor: StoredTensor, path: Path) -> np.ndarray:
    """Return a tensor's values in float32. Raises InputError for a type that the library doesn't support."""
    import gguf

    try:
        values = gguf.quants.dequantize(tensor.data, tensor.kind)
    except NotImplementedError as error:
        raise InputError(f"{path}: {tensor.name} has the unsupported type {tensor.kind.name}.") from error
    return np.array(values, dtype=np.float32)


def hugging_face_name(name: str, family: Family) -> str:
    """Translate a name: blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight; keep unknown names."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blk."):
        _, layer, inner = module.split(".", 2)
        theirs = family.modules.get(MODULES.get(inner, ""), inner)
        if inner in ("attn_q", "attn_k", "attn_v"):
            theirs = f"self_attn.{inner[-1]}_proj"
        if inner == "ffn_up" and family.fused_gate is not None:
            theirs = family.fused_gate
        return f"model.layers.{layer}.{theirs}.{kind}"
    return f"{OUTSIDE.get(module, module)}.{kind}"


def in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder llama.cpp's rows (H * D, C): it rotates channels (0, 1), (2, 3), ...; we rotate i and i + D / 2."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # (H, D / 2, 2, C)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def gguf_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer | None, dict]:
    """Return the tokenizer and the fields of tokenizer_config.json.

    Only byte-level BPE with one of SPLITS is supported: for other kinds print a note and return None. Raises InputError
    for a damaged tokenizer.
    """
    kind = metadata(path, "tokenizer.ggml.model", str)
    split = metadata(path, "tokenizer.ggml.pre", str)
    split = "default" if split is None else split
    if kind != "gpt2" or split not in SPLITS:
        note(
            f"{path}: a tokenizer of kind {kind!r:.40}, {split!r:.40} isn't implemented: "
            "pass the model's Hub id as --tokenizer"
        )
        return None, {}
    names = ("tokens", "token_type", "merges")
    tokens, types, merges = (metadata(path, f"tokenizer.ggml.{name}", list) for name in names)
    try:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: its tokenizer can't be read ({error!s:.200}).") from error
    pattern = SPLITS[split]
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.normalizer = normalizers.NFC() if split == "qwen2" else None
    backend.decoder = decoders.ByteLevel()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # transformers would decode "a ." as "a."
        "chat_template": metadata(path, "tokenizer.chat_template", str),
    }
    for name in ("eos_token", "bos_token"):
        i = metadata(path, f"tokenizer.ggml.{name}_id", int)
        settings[name] = tokens[i] if i is not None and 0 <= i < len(tokens) else None
    return backend, settings


if __name__ == "__main__":
    run_module(main, Args)
