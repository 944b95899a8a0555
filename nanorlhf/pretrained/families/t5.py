"""T5 and CodeT5."""

from typing import Any

from nanorlhf.pretrained.family import ConfigFile, Family
from nanorlhf.t5 import T5Config


def read_t5(file: ConfigFile, config: T5Config) -> dict[str, Any]:
    """Read the activation in feed_forward_proj, and whether the head is tied to the embedding.

    The original T5 scales the input of its tied head; version 1.1 has a separate head. transformers 5
    writes tie_word_embeddings: true for both and distinguishes them by scale_decoder_outputs.
    """
    projection = config.activation
    gate, _, activation = projection.rpartition("-")
    if gate not in ("", "gated"):
        raise file.error(f"feed_forward_proj {projection!r:.80} isn't gated-ACTIVATION or ACTIVATION.")
    if projection == "gated-gelu":
        activation = "gelu_new"  # T5 1.1 was trained with it
    exact = config.num_buckets // 2  # in the decoder; the encoder has half as many on each side
    file.get("relative_attention_max_distance", int, config.max_distance, exact + 1)
    is_scaled = file.get("scale_decoder_outputs", bool, config.tied_head)
    if is_scaled and not config.tied_head:
        raise file.error("scale_decoder_outputs needs tie_word_embeddings: set both to true or both to false.")
    return {
        "gated_mlp": gate == "gated",
        "activation": activation,
        "tied_head": is_scaled,
        "head_scale": config.d_model**-0.5 if is_scaled else 1.0,
    }


def write_t5(config: T5Config) -> dict[str, Any]:
    projection = f"gated-{config.activation}" if config.gated_mlp else config.activation
    return {
        "feed_forward_proj": "gated-gelu" if projection == "gated-gelu_new" else projection,
        # transformers 5 creates its cache with as many layers as the encoder has
        "use_cache": config.num_decoder_blocks <= config.n_layer,
    }


RELATIVE = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5 = Family(
    transformers_class="T5ForConditionalGeneration",
    config_class=T5Config,
    settings={
        "vocab_size": "vocab_size", "d_model": "d_model", "n_layer": "num_layers",
        "n_decoder_layer": ("num_decoder_layers", None), "n_head": "num_heads",
        "d_head": ("d_kv", 64), "d_mlp": "d_ff", "activation": ("feed_forward_proj", "relu"),
        "norm_eps": ("layer_norm_epsilon", 1e-6), "tied_head": ("tie_word_embeddings", True),
        "num_buckets": ("relative_attention_num_buckets", 32),
        "max_distance": ("relative_attention_max_distance", 128),
        "start_id": ("decoder_start_token_id", 0),
        # the tokens that T5's and CodeT5's tokenizers put around every text
        "query_start_id": ("bos_token_id", None), "query_end_id": ("eos_token_id", None),
    },
    fixed={},  # T5Config has them
    constants={"is_encoder_decoder": True, "dropout_rate": 0.0},  # [N+ 7] their default is 0.1
    read=read_t5,
    write=write_t5,
    prefix="",
    modules={
        "transformer.embedding": "shared", "transformer.blocks": "{stack}.block",
        "norm1": "layer.0.layer_norm", "attention.qkv": "layer.0.SelfAttention.[qkv]",
        "attention.out": "layer.0.SelfAttention.o", "cross_norm": "layer.1.layer_norm",
        "cross.q": "layer.1.EncDecAttention.q", "cross.kv": "layer.1.EncDecAttention.[kv]",
        "cross.out": "layer.1.EncDecAttention.o", "norm2": "{mlp}.layer_norm",
        "mlp.gate": "{mlp}.DenseReluDense.wi_0", "mlp.up": "{mlp}.DenseReluDense.{wi}",
        "mlp.down": "{mlp}.DenseReluDense.wo", "transformer.norm": "decoder.final_layer_norm",
        "transformer.encoder_norm": "encoder.final_layer_norm",
        "transformer.encoder_bias": f"encoder.{RELATIVE}",
        "transformer.decoder_bias": f"decoder.{RELATIVE}", "lm_head": "lm_head",
    },
)  # fmt: skip

FAMILIES = {"t5": T5}
