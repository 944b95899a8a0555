"""The supported model families, by model_type in config.json.

A run needs only one or two, so a family's module is imported with its first model. To add a family,
define a `Family` (family.py) in the module of its relatives and list it here.
"""

from importlib import import_module

from nanorlhf.pretrained.families.family import Family

FILES = {  # model_type: module in this package
    "gpt2": "gpt2",
    "gpt_neo": "gpt2",
    "gpt_neox": "neox",
    "codegen": "neox",
    "gptj": "neox",
    "t5": "t5",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "olmo2": "llama",
    "phi3": "llama",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
}


def family_of(model_type: str) -> Family:
    families: dict[str, Family] = import_module(f"{__name__}.{FILES[model_type]}").FAMILIES
    return families[model_type]
