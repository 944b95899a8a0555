"""Weights on disk, laid out as Hugging Face does: config.json and model.safetensors in the words of one of 4 families.

`load_gpt` and `load_scalar` read a directory or a Hub id; `save` writes a directory that `transformers` loads; what
each family calls things is in families.py. Nothing is dropped silently: a tensor too few or too many, or one of another
shape, is an error. Half-precision weights become float32.

A reward or value model is a directory of the same kind with "architectures": ["ScalarModel"] in config.json, the trunk
under its family's names, and three tensors more: score.weight (1, C), score.bias (1,) and reward_bias (). [N+ 15]

Where there are adapters (peft.py) config.json has "adapter_size" and "_adapter" behind its model_type, and each layer
with one has its four tensors beside weight and bias. `transformers` refuses such a directory, it has no such model.
"""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.families import (
    ARCHITECTURES,
    config_object,
    from_family,
    of_family,
    parse_config,
    tensor_names,
    to_family,
    with_prefix,
)
from nanorlhf.hub import hub_directory, read_object
from nanorlhf.model import GPT, GPTConfig, ScalarModel
from nanorlhf.tokenizer import Tokenizer

WEIGHT_FILES = (  # safetensors before pickles, whole before sharded
    ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)


# ------------------------------------------------------------------------------------------------------- load and save
def load_gpt(where: str | Path, device: str | torch.device = "cpu") -> GPT:
    """A language model from a checkpoint directory or a Hub id."""
    return _load(GPT, where, device)


def load_scalar(where: str | Path, device: str | torch.device = "cpu") -> ScalarModel:
    """A reward or value model as `save` wrote it: head, head bias and normalisation included."""
    return _load(ScalarModel, where, device)


def holds_reward_model(where: str | Path) -> bool:
    """Or a value model; False of a policy."""
    return _is_scalar(read_object(_config_file(where)))


def scalar_from_gpt(gpt: GPT) -> ScalarModel:
    """A reward model that starts from a policy: a copy of its trunk, and a fresh head. [N+ 11]"""
    model = ScalarModel(gpt.config).to(gpt.lm_head.weight)  # its device and dtype
    model.transformer.load_state_dict(gpt.transformer.state_dict())
    return model


def read_config(where: str | Path) -> GPTConfig:
    """The shape of a checkpoint, without its weights."""
    path = _config_file(where)
    return parse_config(read_object(path), path)


def save(model: GPT | ScalarModel, directory: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `directory`; its other files stay.

    Everything is written to a directory inside it first and renamed when it is on the disk, so that an interrupted
    save leaves the checkpoint before it. config.json comes last: a new directory is no checkpoint without it.
    """
    config, directory = model.config, Path(directory)
    settings = config_object(config)
    settings["architectures"] = ["ScalarModel" if isinstance(model, ScalarModel) else of_family(ARCHITECTURES, config)]
    settings["torch_dtype"] = str(model.transformer.embedding.weight.dtype).removeprefix("torch.")
    # without a tokenizer: null, or transformers would fill in 50256, which a small vocabulary hasn't
    settings["bos_token_id"] = settings["eos_token_id"] = tokenizer.eos_id if tokenizer else None
    settings["pad_token_id"] = tokenizer.pad_id if tokenizer else None

    tensors = {}
    for name, tensor in model.state_dict().items():
        if not (config.tied_head and name == "lm_head.weight"):  # a tied head is the embedding, written once
            parts = to_family(name, tensor.detach().cpu(), config)
            tensors |= {
                theirs: part.contiguous() for theirs, part in zip(tensor_names(name, config), parts, strict=True)
            }

    is_new = not directory.exists()
    partial = directory / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was killed
    try:
        partial.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{directory} can't become a checkpoint: it is or lies in a file, name another.") from error
    try:
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(partial)
        _write_tensors(tensors, partial / "model.safetensors")
        shutil.copymode(partial / "config.json", partial / "model.safetensors")  # safetensors lets only the owner read
        files = sorted(partial.iterdir(), key=lambda file: file.name == "config.json")
        for file in files:
            to_disk(file)
        for file in files:
            os.replace(file, directory / file.name)
        to_disk(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new and not any(directory.iterdir()):
            directory.rmdir()


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the error of the operating system, a full disk say, stands in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_scalar(settings: dict) -> bool:
    return "ScalarModel" in (settings.get("architectures") or [])


def _load(model_class: type[GPT] | type[ScalarModel], where: str | Path, device: str | torch.device):
    config_file = _config_file(where)
    settings = read_object(config_file)
    config = parse_config(settings, config_file)
    is_scalar = _is_scalar(settings)
    if model_class is GPT and is_scalar:
        raise InputError(f"{where} holds a reward or value model, no language model: name the directory of a policy.")
    if model_class is ScalarModel and not is_scalar:
        raise InputError(f"{where} holds a language model, not a reward model: train one from it with train_rm.py.")

    with torch.device("meta"):  # shapes only: no random numbers are drawn and no memory is taken twice
        model = model_class(config)
    file = _weights_file(where)
    tensors = with_prefix(_read_tensors(file), config, file)
    if config.tied_head and model_class is GPT:
        embedding, head = (tensor_names(name, config)[0] for name in ("transformer.embedding.weight", "lm_head.weight"))
        if head in tensors and not torch.equal(tensors[head], tensors.setdefault(embedding, tensors[head])):
            raise InputError(f"{file}: {head} isn't {embedding}: set tie_word_embeddings to false in {config_file}.")
        tensors.pop(head, None)

    state = {}
    for name, like in model.state_dict().items():
        if config.tied_head and name == "lm_head.weight":
            continue
        parts = []
        for theirs, part_like in zip(tensor_names(name, config), to_family(name, like, config), strict=True):
            if theirs not in tensors:
                raise InputError(f"{file} has no tensor {theirs}, which {config_file} calls for: another model's?")
            part = tensors.pop(theirs)
            if part.shape != part_like.shape:
                shapes = f"{tuple(part.shape)} instead of the {tuple(part_like.shape)} that {config_file} calls for"
                raise InputError(f"{file}: {theirs} has shape {shapes}: another model's?")
            if part.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise InputError(f"{file}: {theirs} holds {part.dtype} numbers: only floating-point weights are read.")
            parts.append(part.to(device, torch.float32, copy=True).contiguous())  # no view into the file
        state[name] = from_family(name, parts, config)
    if tensors:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        raise InputError(f"{file} holds {min(tensors)}{more}, which {config_file} doesn't call for: another model's?")

    if config.tied_head and model_class is GPT:
        state["lm_head.weight"] = state["transformer.embedding.weight"]
    model.load_state_dict(state, assign=True)
    if config.tied_head and model_class is GPT:
        model.lm_head.weight = model.transformer.embedding.weight
    return model


# ----------------------------------------------------------------------------------------------------------- the files
def _local(where: str | Path, patterns: tuple[str, ...]) -> Path:
    """The directory itself, or for a Hub id the one that the files of these patterns were downloaded to."""
    path = Path(where)
    if path.is_file():
        raise InputError(f"{where} is a file: name the directory that holds config.json and the weights.")
    return path if path.is_dir() else hub_directory(str(where), list(patterns))


def _config_file(where: str | Path) -> Path:
    path = _local(where, ("config.json",)) / "config.json"
    if not path.is_file():
        raise InputError(f"{where} holds no config.json: name a checkpoint directory or a Hub id.")
    return path


def _weights_file(where: str | Path) -> Path:
    for patterns in WEIGHT_FILES:  # of a Hub repository that holds both kinds only the first is downloaded
        directory = _local(where, patterns)
        for name in patterns[:2]:
            if (directory / name).is_file():
                return directory / name
    raise InputError(f"{where} holds no weights, neither model.safetensors nor pytorch_model.bin nor shards of them.")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the shards that an index names."""
    if not path.name.endswith(".index.json"):
        return _read_tensor_file(path)
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise InputError(f"{path} has no weight_map from tensors to files: download it again.")
    tensors = {}
    for shard in sorted(set(shards.values())):
        if not (path.parent / shard).is_file():
            raise InputError(f"{path} names {shard}, which isn't there: download it too.")
        tensors |= _read_tensor_file(path.parent / shard)
    return tensors


def _read_tensor_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)  # a pickle could run code
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"{path} can't be read, it is damaged or holds more than tensors ({reason}).") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{path} isn't a dictionary of tensors: name a checkpoint in the layout of transformers.")
    return tensors
