"""Models with shared keys and values, RMS norms, windows and soft caps train through all stages, like Pythia."""

import math
from dataclasses import replace

import pytest
import torch
import transformers

import train_ppo
import train_rm
import train_sft
from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.config import GPTConfig
from nanorlhf.model import GPT
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import read_metrics

QWEN3 = GPTConfig(
    vocab_size=320, n_ctx=256, d_model=16, n_layer=2, n_head=4, n_kv_head=2, d_head=8, d_mlp=24, rotary_dim=8,
    norm="rms", gated_mlp=True, activation="silu", parallel_residual=False, qk_norm=True, qkv_bias=False,
    attention_out_bias=False, mlp_bias=False, attention_windows=(None, 40), architecture="qwen3",
)  # fmt: skip
GEMMA2 = replace(  # caps low enough to change a small model's logits
    QWEN3, qk_norm=False, norm="rms_offset", post_norm=True, activation="gelu_new", embedding_scale=4.0,
    attention_divisor=3, attention_cap=0.5, logit_cap=1.0, attention_windows=(40, None), tied_head=True,
    architecture="gemma2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("config", "dtype"), [(QWEN3, "bfloat16"), (GEMMA2, "float32")], ids=["qwen3", "gemma2"])
def test_a_family_goes_through_all_stages(miniature, tmp_path, config, dtype) -> None:
    torch.manual_seed(0)
    save(GPT(config), tmp_path / "model", load_tokenizer(miniature.root / "data"))
    sft = replace(miniature.sft, model=str(tmp_path / "model"), tune="lora", out=tmp_path / "sft", dtype=dtype)
    train_sft.main(sft)
    train_rm.main(replace(miniature.rm, sft=str(sft.out), out=tmp_path / "rm", dtype=dtype))
    ppo = replace(miniature.ppo, sft=str(sft.out), reward_model=str(tmp_path / "rm"), out=tmp_path / "ppo", dtype=dtype)
    train_ppo.main(ppo)
    first, *_, last = read_metrics(ppo.out)
    assert first["policy/first_ratio_error"] <= (1e-6 if dtype == "float32" else 0.02)
    assert abs(first["objective/kl"]) < 1e-4 if dtype == "float32" else math.isfinite(last["objective/kl"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(ppo.out, attn_implementation="eager").eval()
    ours, ids = load_gpt(ppo.out), torch.arange(2, 32)[None]
    with torch.no_grad():
        assert (ours.logits(ours(ids)) - theirs(ids).logits).abs().max() < 1e-5
    assert (theirs.lm_head.weight != load_gpt(sft.out).lm_head.weight).any()
