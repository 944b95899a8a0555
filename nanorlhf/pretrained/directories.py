"""Find the files of a model: in a directory, on the Hub, or one file in GGUF."""

from pathlib import Path

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory
from nanorlhf.pretrained.gguf import is_gguf

WEIGHT_FILES = (  # in order of preference: safetensors before pickles, one file before shards
    ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)


def local_directory(where: str | Path, patterns: tuple[str, ...]) -> Path:
    """The directory itself, or of a Hub id the one with the files that match `patterns`."""
    path = Path(where)
    if path.is_file():
        raise InputError(f"{where} is a file: name a directory with config.json, or a .gguf file.")
    return path if path.is_dir() else hub_directory(str(where), list(patterns))


def find_config(where: str | Path) -> Path:
    if is_gguf(where):
        return Path(where)
    path = local_directory(where, ("config.json",)) / "config.json"
    if not path.is_file():
        raise InputError(f"{where} has no config.json: name a checkpoint directory or a Hub id.")
    return path


def find_weights(where: str | Path) -> Path:
    """The file of the weights, or the index of its shards."""
    if is_gguf(where):
        return Path(where)
    for patterns in WEIGHT_FILES:  # of a Hub repository with both kinds the first is downloaded
        directory = local_directory(where, patterns)
        for name in patterns[:2]:
            if (directory / name).is_file():
                return directory / name
    names = "model.safetensors, pytorch_model.bin, or shards of them"
    raise InputError(f"{where} holds no weights: no {names}.")
