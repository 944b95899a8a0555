"""GPT-2 and GPT-Neo."""

from itertools import islice
from typing import Any

from nanorlhf.config import GPTConfig
from nanorlhf.pretrained.family import RANGES, ConfigFile, Family, Setting

GPT2_SETTINGS: dict[str, Setting] = {
    "vocab_size": "vocab_size", "n_ctx": "n_positions", "d_model": "n_embd", "n_layer": "n_layer",
    "n_head": "n_head", "d_mlp": ("n_inner", None), "norm_eps": ("layer_norm_epsilon", 1e-5),
    "activation": ("activation_function", "gelu_new"), "tied_head": ("tie_word_embeddings", True),
}  # fmt: skip
GPT2 = Family(
    transformers_class="GPT2LMHeadModel",
    settings=GPT2_SETTINGS | {"scale_attention": ("scale_attn_weights", True)},
    fixed={"positions": "learned", "parallel_residual": False},
    # [N+ 7] their default is 0.1
    constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    modules={
        "transformer.embedding": "wte", "transformer.positions": "wpe", "transformer.blocks": "h",
        "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
        "transformer.norm": "ln_f", "lm_head": "lm_head",
    },
    transposed=True,
)  # fmt: skip


def read_neo(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    """Read attention_layers, the kind of each layer, and attention_types, [[kinds, repeats], ...]."""
    window = file.get("window_size", int, 256, 1, RANGES["n_ctx"][1])
    types, layers = file.fields.get("attention_types"), file.fields.get("attention_layers")
    if types is None:
        types = [[["global", "local"], 12]] if layers is None else [[layers, 1]]
    try:
        repeated = (kind for group, times in types for _ in range(times) for kind in group)
        kinds = [*islice(repeated, config.n_layer + 1)]  # bounded, whatever number of repeats the file has
    except (TypeError, ValueError):  # not in that form
        kinds = []
    is_known = len(kinds) == config.n_layer and all(kind in ("global", "local") for kind in kinds)
    if not is_known or layers not in (None, kinds):
        raise file.error(
            f"attention_types {types!r:.80} and attention_layers {layers!r:.80} must name the "
            f"kinds of {config.n_layer} layers, global or local, and agree."
        )
    return {"attention_windows": tuple(window if kind == "local" else None for kind in kinds)}


def write_neo(config: GPTConfig) -> dict[str, Any]:
    kinds = ["local" if window else "global" for window in config.windows]
    window = next(filter(None, config.windows), 256)
    return {"attention_types": [[kinds, 1]], "window_size": window}


GPT_NEO = Family(
    transformers_class="GPTNeoForCausalLM",
    settings=GPT2_SETTINGS | {
        "n_ctx": "max_position_embeddings", "d_model": "hidden_size", "n_layer": "num_layers",
        "n_head": "num_heads", "d_mlp": ("intermediate_size", None),
    },
    fixed=GPT2.fixed | {"scale_attention": False, "qkv_bias": False},
    read=read_neo,
    write=write_neo,
    modules=GPT2.modules | {
        "attention.qkv": "attn.attention.[qkv]_proj", "attention.out": "attn.attention.out_proj"
    },
)  # fmt: skip

FAMILIES = {"gpt2": GPT2, "gpt_neo": GPT_NEO}
