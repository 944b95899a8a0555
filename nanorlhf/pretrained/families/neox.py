"""GPT-NeoX (Pythia), CodeGen and GPT-J."""

import math
from dataclasses import replace
from typing import Any

from nanorlhf.config import GPTConfig
from nanorlhf.pretrained.families.gpt2 import GPT2, GPT2_SETTINGS
from nanorlhf.pretrained.family import ConfigFile, Family, read_rotary


def read_neox(file: ConfigFile, config: GPTConfig) -> dict[str, Any]:
    names = ("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")
    share, base, _ = read_rotary(file, ("default",), *names)
    # rounded down, as transformers does
    rotary_dim = int(config.head_width * (0.25 if share is None else share))
    return {"rotary_dim": rotary_dim, "rotary_base": base}


def write_neox(config: GPTConfig) -> dict[str, Any]:
    share = config.rotary_dim / config.head_width
    if int(config.head_width * share) < config.rotary_dim:  # reading it back would round down
        share = math.nextafter(share, math.inf)
    return {"rotary_pct": share, "rotary_emb_base": config.rotary_base}


GPT_NEOX = Family(
    transformers_class="GPTNeoXForCausalLM",
    settings={
        "vocab_size": "vocab_size", "n_ctx": "max_position_embeddings", "d_model": "hidden_size",
        "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "d_mlp": ("intermediate_size", None), "activation": ("hidden_act", "gelu"),
        "norm_eps": ("layer_norm_eps", 1e-5), "tied_head": ("tie_word_embeddings", False),
        "parallel_residual": ("use_parallel_residual", True),
        "attention_out_bias": ("attention_bias", True), "qkv_bias": ("attention_bias", True),
    },
    fixed={"positions": "rotary_half"},
    read=read_neox,
    write=write_neox,
    prefix="gpt_neox.",
    modules={
        "transformer.embedding": "embed_in", "transformer.blocks": "layers",
        "norm1": "input_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense", "norm2": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        "transformer.norm": "final_layer_norm",
        # transformers 5 calls it lm_head in memory, but embed_out in files, which 4 and 5 read
        "lm_head": "embed_out",
    },
    qkv_groups=None,
)  # fmt: skip
CODEGEN = Family(
    transformers_class="CodeGenForCausalLM",
    settings=GPT2_SETTINGS | {
        "rotary_dim": "rotary_dim", "tied_head": ("tie_word_embeddings", False)
    },
    fixed={
        "positions": "rotary_interleaved", "shared_norm": True, "head_bias": True,
        "qkv_bias": False, "attention_out_bias": False,
    },
    modules=GPT2.modules | {
        "attention.qkv": "attn.qkv_proj", "attention.out": "attn.out_proj",
        "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
    },
    qkv_groups=4,  # one per core of the TPU it was trained on
    qkv_order="qvk",
)  # fmt: skip
GPTJ = replace(
    CODEGEN,
    transformers_class="GPTJForCausalLM",
    modules=CODEGEN.modules | {"attention.qkv": "attn.[qkv]_proj"},
    qkv_groups=1,
    qkv_order="qkv",
)

FAMILIES = {"gpt_neox": GPT_NEOX, "codegen": CODEGEN, "gptj": GPTJ}
