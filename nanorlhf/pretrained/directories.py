"""Find the files of a model in a directory or on the Hub.

A PEFT adapter (adapter_config.json) has neither config.json nor full weights: both come from its base
model. Other layouts raise an error that names them.
"""

import re
from pathlib import Path

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory, read_object

WEIGHT_FILES = (  # in order of preference: safetensors before pickles, one file before shards
    ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
MERGE = "merge it with peft's merge_and_unload() and pass the merged checkpoint"
CONVERT = "with `python -m nanorlhf.pretrained.gguf {} --out DIR`"
OTHER_LAYOUTS = (  # file patterns, and a description with advice
    (("*.gguf",), f"GGUF files: convert one {CONVERT.format('FILE')}"),
    (
        ("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin"),
        "shards without their index: download model.safetensors.index.json or pytorch_model.bin.index.json too",
    ),
    (
        ("zero_to_fp32.py", "*mp_rank_*", "*/*mp_rank_*"),
        "a DeepSpeed checkpoint: convert it with its zero_to_fp32.py",
    ),
    (
        ("*.distcp", "*/*.distcp", "pytorch_model_fsdp*"),
        "an FSDP checkpoint in shards: convert it with `accelerate merge-weights`",
    ),
    (("*.onnx", "*/*.onnx", "openvino_*.xml"), "an export for inference: pass the checkpoint that it was made from"),
    (("*.npz",), "MLX weights: pass the checkpoint that they were made from"),
    (("consolidated*",), "weights in the authors' layout: pass the same model in the Hugging Face layout"),
    (("tf_model*.h5", "flax_model*.msgpack"), "TensorFlow or Flax weights: convert them with transformers 4"),
    (("*.ckpt", "*.pt", "*.pth"), "a training program's own checkpoint: save the model with save_pretrained()"),
)


def refuse_gguf(where: str | Path) -> None:
    if Path(where).suffix == ".gguf":
        raise InputError(f"{where} is a GGUF file: convert it once {CONVERT.format(where)} and pass DIR.")


def local_directory(where: str | Path, patterns: tuple[str, ...]) -> Path:
    """Return the directory itself, or for a Hub id the directory of the downloaded files that match `patterns`."""
    path = Path(where)
    refuse_gguf(path)
    if path.is_file():
        raise InputError(f"{where} is a file: expected a directory with config.json.")
    return path if path.is_dir() else hub_directory(str(where), list(patterns))


def split_adapter(where: str | Path) -> tuple[str | Path, Path | None]:
    """Split a PEFT adapter into its base model and its directory; for any other model return the model and None.

    Raises InputError if the base model can't be found.
    """
    directory = local_directory(where, ("config.json", ADAPTER_CONFIG))
    file = directory / ADAPTER_CONFIG
    may_be_whole = (directory / "config.json").is_file() and (directory != Path(where) or has_weights(directory))
    if may_be_whole or not file.is_file():
        return where, None
    base = read_object(file).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{file}: base_model_name_or_path must name the adapter's base model, got {base!r:.80}.")
    try:
        if not (local_directory(base, ("config.json",)) / "config.json").is_file():
            raise InputError(f"{base} has no config.json.")
    except InputError as error:
        reason = str(error).rstrip(".")
        raise InputError(
            f"{where} is a PEFT adapter, but its base model {base} can't be read ({reason:.300}): correct "
            f"base_model_name_or_path in {ADAPTER_CONFIG}, or {MERGE}."
        ) from error
    return base, directory


def find_config(where: str | Path) -> Path:
    """Return the config.json of a model, or of an adapter's base model."""
    base, _ = split_adapter(where)
    directory = local_directory(base, ("config.json",))
    if not (directory / "config.json").is_file():
        instead = other_layout(directory) or "pass a checkpoint directory or a Hub id"
        raise InputError(f"{where} has no config.json: {instead}.")
    return directory / "config.json"


def find_weights(where: str | Path) -> Path:
    """Return the weights file of a model, or the index of its shards; for an adapter those of the base model."""
    base, _ = split_adapter(where)
    for patterns in WEIGHT_FILES:  # from a Hub repository with both kinds we download only the first
        directory = local_directory(base, patterns)
        for name in patterns[:2]:
            if (directory / name).is_file():
                return directory / name
    instead = other_layout(directory) or "no model.safetensors, pytorch_model.bin, or shards of them"
    raise InputError(f"{base} has no weights: {instead}.")


def find_updates(where: str | Path) -> Path:
    """Return the weights file of a PEFT adapter."""
    directory = local_directory(where, ADAPTER_FILES)
    for name in ADAPTER_FILES:
        if (directory / name).is_file():
            return directory / name
    raise InputError(f"{where} has no {' or '.join(ADAPTER_FILES)}, the weights of a PEFT adapter.")


def has_weights(directory: Path) -> bool:
    return any((directory / name).is_file() for patterns in WEIGHT_FILES for name in patterns[:2])


def other_layout(directory: Path) -> str | None:
    """Describe what a directory has instead of a checkpoint, with advice; None if unknown."""
    checkpoints = [file.parent.name for name in ("config.json", ADAPTER_CONFIG) for file in directory.glob(f"*/{name}")]
    if checkpoints:  # the root directory of a training run
        last = max(checkpoints, key=lambda name: [int(number) for number in re.findall(r"\d+", name)[-1:]])
        return f"it contains {len(set(checkpoints))} checkpoints: pass one of them, such as {directory / last}"
    for patterns, layout in OTHER_LAYOUTS:
        if any(True for pattern in patterns for _ in directory.glob(pattern)):
            return f"it contains {layout}"
    return None
