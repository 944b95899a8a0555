"""Read the tensors of a model from safetensors, pickles, or shards of them."""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.files import interrupts_wait, open_regular, read_object
from nanorlhf.pretrained.directories import (
    ADAPTER_CONFIG,
    find_config,
    find_updates,
    find_weights,
    split_adapter,
)

# what wrappers insert into tensor names: torch.compile, DDP, FSDP, activation checkpointing, peft, TRL
WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model|base_layer"
    r"|pretrained_model)\."
)
# peft's trained copies of whole modules, next to their originals
TRAINED_COPY, ORIGINAL = re.compile(r"\.modules_to_save\.[^.]+\."), ".original_module."
# what the readers raise for damaged bytes, in addition to their own errors
WRONG_BYTES = (RuntimeError, ValueError, KeyError, TypeError, AttributeError)


def list_shards(path: Path) -> dict[Path, set[str]]:
    """Return the file itself, or the shards that an index lists next to it, each with the names of its tensors."""
    if not path.name.endswith(".index.json"):
        return {path: set()}
    weight_map = read_object(path).get("weight_map") or {}
    names = [*weight_map.values()] if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} has no weight_map from tensors to files: download it again.")
    for name in set(names):
        is_name = Path(name).name == name and "\0" not in name and len(name) < 256
        if not name or not is_name:  # ../.. would read anything
            raise InputError(f"{path} lists {name!r:.300}, which isn't a file next to it.")
        if not (path.parent / name).is_file():
            raise InputError(f"{path} lists {name}, which is missing: download it too.")
    shards: dict[Path, set[str]] = {path.parent / name: set() for name in sorted(set(names))}
    for tensor, name in weight_map.items():
        shards[path.parent / name].add(tensor)
    return shards


def files_of_model(where: str | Path) -> list[Path]:
    """Return the files that `load_gpt` and `load_scalar` read: configuration, weights, shards, an adapter."""
    weights = find_weights(where)
    files = [find_config(where), weights, *list_shards(weights)]
    _, adapter = split_adapter(where)
    if adapter is not None:
        files += [adapter / ADAPTER_CONFIG, find_updates(where)]
    return list(dict.fromkeys(files))


def unwrapped(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Remove the prefixes that wrappers around the model added to the tensor names."""
    plain_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ORIGINAL in name:
            continue
        plain = TRAINED_COPY.sub(".", WRAPPERS.sub("", name))
        if plain in plain_tensors:
            raise InputError(f"{file} has {plain} under two names: remove one of them.")
        plain_tensors[plain] = tensor
    return plain_tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of one file by name; raise InputError if the file is damaged or has anything else in it."""
    open_regular(path).close()
    if path.suffix == ".safetensors":
        try:
            with interrupts_wait():
                tensors = load_file(path)
        except (SafetensorError, OSError, *WRONG_BYTES) as error:
            raise unreadable(path, error) from error
    else:
        tensors = load_pickle(path)
    is_dictionary = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not is_dictionary or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{path} isn't a dictionary of tensors by name.")
    return tensors


def load_pickle(path: Path, **settings: Any) -> Any:
    """Load what `torch.save` wrote if it contains only data and tensors; code is refused and never run.

    settings: passed to `torch.load`.
    """
    open_regular(path).close()
    try:
        with interrupts_wait():
            if zipfile.is_zipfile(path):  # torch doesn't compress: a compressed member may be a zip bomb
                with zipfile.ZipFile(path) as members:
                    size = sum(member.file_size for member in members.infolist())
                    if size > path.stat().st_size:
                        raise RuntimeError("it is compressed")
            return torch.load(path, map_location="cpu", weights_only=True, **settings)
    except Exception as error:  # damaged bytes can make the unpickler raise anything
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> InputError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return InputError(f"{path} can't be read: it is damaged or contains more than tensors ({reason:.300}).")
