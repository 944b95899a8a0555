"""Checks of the families of pretrained models against `transformers`."""

import os
from collections.abc import Iterator
from typing import Any

import torch

from nanorlhf.checkpoint import load_gpt
from nanorlhf.doctor.cases import CannotCheckError, Cases
from nanorlhf.pretrained.family import FILES, find_family
from nanorlhf.rules.finding import Finding

SIZES = {
    "vocab_size": 60, "n_ctx": 64, "d_model": 64, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_mlp": 96,
    "rotary_dim": 4,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 3},
    "mistral": {"sliding_window": 3},
    "phi3": {"pad_token_id": 0},
    "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 3, "sliding_window_pattern": 2},
}
"""settings with defaults that don't fit these sizes or have no effect within 12 tokens"""


def families(cases: Cases) -> Iterator[Finding]:
    """Check that a model saved by transformers has the same logits when we load it; all families but T5."""
    try:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers
    except ImportError as error:
        raise CannotCheckError("transformers is not installed: pip install -e '.[test]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(60, (2, 12), generator=generator)
    for name in [name for name in FILES if name != "t5"]:
        family = find_family(name)
        names = {ours: spec[0] if isinstance(spec, tuple) else spec for ours, spec in family.settings.items()}
        sizes = {names[ours]: size for ours, size in SIZES.items() if ours in names}
        config = transformers.AutoConfig.for_model(name, **sizes, **family.constants | OTHERS.get(name, {}))
        # eager: SDPA, which transformers 5.17 uses for Gemma 2, ignores the cap on attention logits
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in theirs.parameters():  # biases are 0 otherwise
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        path = cases.world.root / "families" / name
        theirs.save_pretrained(path)
        ours = load_gpt(path)
        with torch.no_grad():
            gap = (ours.logits(ours(ids)) - theirs(ids).logits).abs().max().item()
        if not gap < 1e-3:
            yield Finding(
                name="families",
                seen=f"The logits of a {name} model are up to {gap:.2g} off transformers.",
                means="A weight has the wrong name or layout, or a setting is misread: rotary pairs, norms, the order "
                "of attention and MLP, a bias.",
                where="nanorlhf/pretrained/families/",
            )


CHECKS = (families,)
