"""The model families that are read and written, by model_type in config.json.

A run needs one or two of them, so a family's file is read with its first model. To add a family,
write a `Family` (family.py) into the file of its relatives and name it here.
"""

from importlib import import_module

from nanorlhf.pretrained.families.family import Family

FILES = {  # the file next to this one that has it
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
