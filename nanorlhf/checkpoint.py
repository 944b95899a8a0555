"""Checkpoints in the Hugging Face layout: config.json and model.safetensors, with the names of one of the families.

`load_gpt` and `load_scalar` read a directory, a Hub id or a GGUF file (gguf_file.py); `save` writes a directory that
`transformers` loads. The names of each family are in families.py. Nothing is dropped silently: a missing or unexpected
tensor, or one of another shape, is an error. Half-precision weights become float32.

A reward or value model is such a directory with "architectures": ["ScalarModel"] in config.json, the trunk under its
family's names, and three more tensors: score.weight (1, C), score.bias (1,) and reward_bias (). [N+ 15]

With adapters (peft.py), config.json has "adapter_size" and a model_type that ends in "_adapter", and each adapted layer
has four more tensors. `transformers` refuses such a directory: it has no such model.
"""

import copy
import json
import os
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanorlhf import distributed
from nanorlhf.errors import InputError
from nanorlhf.families import (
    ARCHITECTURES,
    check_fits,
    config_object,
    from_family,
    parse_config,
    tensor_names,
    to_family,
    with_prefix,
)
from nanorlhf.files import hub_directory, open_regular, read_object
from nanorlhf.gguf_file import gguf_settings, gguf_tensors, is_gguf
from nanorlhf.model import GPT, GPTConfig, Linear, ScalarModel
from nanorlhf.t5 import T5Config
from nanorlhf.tokenizer import Tokenizer

M = TypeVar("M", GPT, ScalarModel)
WEIGHT_FILES = (  # in order of preference: safetensors before pickles, one file before shards
    ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin"),
)


# -------------------------------------------------------------------------------------------------------- load and save
def load_gpt(where: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> GPT:
    """Load a language model from a checkpoint directory or a Hub id; InputError if it holds none.

    device  meta: the files are checked and mapped, but no weight is read until `distributed.shard` reads this rank's
            rows
    dtype   of the matrix products' weights, see `round_products`; for models that are not trained
    """
    return _load(GPT, where, device, dtype)


def load_scalar(
    where: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> ScalarModel:
    """Load a reward or value model with its head, head bias and normalisation; InputError if it holds none.

    device and dtype as in `load_gpt`.
    """
    return _load(ScalarModel, where, device, dtype)


def holds_reward_model(where: str | Path) -> bool:
    """True for a reward or value model, False for a policy."""
    return _is_scalar(_settings(_config_file(where)))


def scalar_from_gpt(gpt: GPT, share_trunk: bool = False) -> ScalarModel:
    """A reward model initialised from a policy: a copy of its trunk and a new head. [N+ 11]

    share_trunk: the policy's own trunk weights instead of a copy; both models must keep them frozen.
    """
    if not (share_trunk or gpt.lm_head.weight.is_meta):
        model = ScalarModel(gpt.config).to(gpt.lm_head.weight)  # its device and dtype
        model.transformer.load_state_dict(gpt.transformer.state_dict())
        return model
    with torch.device("meta"), DrawnOneByOne() as draws:  # the same head as where the trunk is in memory
        model = ScalarModel(gpt.config)
    model.score.weight = nn.Parameter(draws.last)
    model.score.bias, model.reward_bias = nn.Parameter(torch.zeros(1)), torch.zeros(())
    if share_trunk:
        model.transformer = copy.deepcopy(gpt.transformer, {id(weight): weight for weight in gpt.parameters()})
        return model.to(gpt.lm_head.weight)  # the head; the trunk is there
    model.__dict__["stored"] = gpt.__dict__["stored"]
    return model


class DrawnOneByOne(TorchDispatchMode):
    """Random numbers for tensors on the meta device are drawn, and dropped but for the last ones."""

    last: Tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            return function(*args, **(kwargs or {}))
        self.last = function(torch.empty_like(args[0], device="cpu"), *args[1:], **(kwargs or {}))
        return args[0]


def read_config(where: str | Path) -> GPTConfig:
    """Read a checkpoint's config.json; the weights are not loaded."""
    path = _config_file(where)
    return parse_config(_settings(path), path)


def save(model: GPT | ScalarModel, directory: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `directory`; its other files stay.

    All files are first written to a subdirectory, synced to disk, then renamed, so an interrupted save leaves the
    previous checkpoint intact. config.json comes last: without it a new directory is not a checkpoint.
    """
    config, directory = model.config, Path(directory)
    settings = config_object(config)
    settings["architectures"] = [
        "ScalarModel" if isinstance(model, ScalarModel) else ARCHITECTURES[config.architecture]
    ]
    settings["torch_dtype"] = str(model.transformer.embedding.weight.dtype).removeprefix("torch.")
    # null without a tokenizer: transformers would fill in 50256, which may lie outside the vocabulary
    if not isinstance(config, T5Config):  # which has them
        settings["bos_token_id"] = settings["eos_token_id"] = tokenizer.eos_id if tokenizer else None
    # transformers' Llama looks [PAD] up in the embedding as it is made, and fails if it lies outside
    settings["pad_token_id"] = tokenizer.pad_id if tokenizer and tokenizer.pad_id < config.vocab_size else None

    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not (config.tied_head and name == "lm_head.weight"):  # a tied head is the embedding, written once
            parts = to_family(name, tensor.detach().cpu(), config)
            tensors |= {
                theirs: part.contiguous() for theirs, part in zip(tensor_names(name, config), parts, strict=True)
            }

    is_new = not directory.exists()
    partial = directory / ".partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
    try:
        partial.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{directory} can't be a directory: it or a parent is a file; name another.") from error
    try:
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(partial)
        _write_tensors(tensors, partial / "model.safetensors")
        shutil.copymode(partial / "config.json", partial / "model.safetensors")  # safetensors sets owner-only access
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
    except SafetensorError as error:  # its text holds the operating system's error, such as a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def to_disk(path: Path) -> None:
    """fsync a file or a directory, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_scalar(settings: dict) -> bool:
    architectures = settings.get("architectures")
    return isinstance(architectures, list) and "ScalarModel" in architectures


@dataclass(frozen=True, eq=False)
class Stored:
    """The tensors of a model in its files: mapped, and read where `rows` asks for them."""

    config: GPTConfig
    parts: dict[str, list[Tensor]]  # our name -> the tensors in the files that it is made of

    def rows(self, name: str, rows: slice = slice(None)) -> Tensor:
        """So many rows of one of our tensors; may be a view into the file."""
        return from_family(name, self.parts[name], self.config, rows)

    def __deepcopy__(self, memo: dict) -> "Stored":
        return self  # copies of a model that has not been read are read from the same files


def _load(model_class: type[M], where: str | Path, device: str | torch.device, dtype: torch.dtype) -> M:
    config_file = _config_file(where)
    settings = _settings(config_file)
    config = parse_config(settings, config_file)
    is_scalar = _is_scalar(settings)
    if model_class is GPT and is_scalar:
        raise InputError(f"{where} holds a reward or value model, not a language model: name a policy's directory.")
    if model_class is ScalarModel and not is_scalar:
        raise InputError(f"{where} holds a language model, not a reward model: train one from it with train_rm.py.")

    file = _weights_file(where)
    shards = _shards(file)
    # before anything of these sizes is made: a weight takes two bytes at least, a quarter in GGUF; 2^24 are no burden
    per_byte = 4 if is_gguf(file) else 0.5
    check_fits(config, config_file, max(2**24, int(per_byte * sum(shard.stat().st_size for shard in shards))))
    with torch.device("meta"):  # shapes only: draws no random numbers and allocates no memory
        model = model_class(config)
    round_products(model, dtype)
    tensors = with_prefix({name: part for shard in shards for name, part in read_tensors(shard).items()}, config, file)
    embedding, head = (tensor_names(name, config)[0] for name in ("transformer.embedding.weight", "lm_head.weight"))
    if isinstance(config, T5Config) and model_class is GPT and embedding in tensors:
        tensors.setdefault(head, tensors[embedding])  # transformers 5 ties the heads of all T5s that have no other one
    if config.tied_head and model_class is GPT:
        if head in tensors and not torch.equal(tensors[head], tensors.setdefault(embedding, tensors[head])):
            raise InputError(f"{file}: {head} isn't {embedding}: set tie_word_embeddings to false in {config_file}.")
        tensors.pop(head, None)

    stored = Stored(config, {})
    for name, like in model.state_dict().items():
        if config.tied_head and name == "lm_head.weight":
            continue
        stored.parts[name] = []
        for theirs, part_like in zip(tensor_names(name, config), to_family(name, like, config), strict=True):
            if theirs not in tensors:
                raise InputError(f"{file} has no tensor {theirs}, which {config_file} requires: another model's?")
            part = tensors.pop(theirs)
            if part.shape != part_like.shape:
                shapes = f"{tuple(part.shape)} instead of the {tuple(part_like.shape)} that {config_file} requires"
                raise InputError(f"{file}: {theirs} has shape {shapes}: another model's?")
            if part.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise InputError(f"{file}: {theirs} has dtype {part.dtype}: weights must be floating-point.")
            stored.parts[name].append(part)
    if tensors:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        raise InputError(f"{file} holds {min(tensors)}{more}, which {config_file} doesn't know: another model's?")

    model.__dict__["stored"] = stored
    is_left = torch.device(device).type == "meta"
    for name, buffer in model.named_buffers():  # reward_bias
        value = stored.rows(name).to("cpu" if is_left else device, buffer.dtype, copy=True)
        model.register_buffer(name, value)
    if not is_left:
        distributed.read_weights(model, device)
    return model


def round_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the weights of the blocks' matrix products in `dtype`, bfloat16 or float32, for a model that is not trained.

    Under autocast to bfloat16 the outputs stay the same to the last bit, as each product would round these weights
    anyway. Embedding, layer norms and heads stay float32, as under autocast.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            for name, weight in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(weight.detach().to(dtype), weight.requires_grad))


# ------------------------------------------------------------------------------------------------------------ the files
def _local(where: str | Path, patterns: tuple[str, ...]) -> Path:
    """The directory itself; for a Hub id, the one to which the files that match `patterns` were downloaded."""
    path = Path(where)
    if path.is_file():
        raise InputError(f"{where} is a file: name the directory with config.json and the weights, or a .gguf file.")
    return path if path.is_dir() else hub_directory(str(where), list(patterns))


def _settings(config_file: Path) -> dict:
    return gguf_settings(config_file) if is_gguf(config_file) else read_object(config_file)


def _config_file(where: str | Path) -> Path:
    if is_gguf(where):
        return Path(where)
    path = _local(where, ("config.json",)) / "config.json"
    if not path.is_file():
        raise InputError(f"{where} has no config.json: name a checkpoint directory or a Hub id.")
    return path


def _weights_file(where: str | Path) -> Path:
    if is_gguf(where):
        return Path(where)
    for patterns in WEIGHT_FILES:  # if a Hub repository has both kinds, only the first is downloaded
        directory = _local(where, patterns)
        for name in patterns[:2]:
            if (directory / name).is_file():
                return directory / name
    raise InputError(f"{where} holds no weights, neither model.safetensors nor pytorch_model.bin nor shards of them.")


def _shards(path: Path) -> list[Path]:
    """The file itself, or the files beside it that an index names."""
    if not path.name.endswith(".index.json"):
        return [path]
    shards = read_object(path).get("weight_map")
    if not shards or not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise InputError(f"{path} has no weight_map from tensors to files: download it again.")
    for shard in set(shards.values()):
        if not shard or Path(shard).name != shard or "\0" in shard:  # ../.. would read anything, anywhere
            raise InputError(f"{path} names {shard!r:.300}, which isn't a file beside it: download it again.")
        if not (path.parent / shard).is_file():
            raise InputError(f"{path} names {shard}, which isn't there: download it too.")
    return [path.parent / shard for shard in sorted(set(shards.values()))]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name; InputError for a damaged file and one that holds anything else."""
    open_regular(path).close()
    if is_gguf(path):
        return gguf_tensors(path)
    tensors = load_pickle(path) if path.suffix != ".safetensors" else None
    try:
        tensors = load_file(path) if tensors is None else tensors
    except (SafetensorError, RuntimeError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"{path} can't be read: it is damaged or holds more than tensors ({reason:.300}).") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"{path} isn't a dictionary of tensors: name a checkpoint in the Hugging Face layout.")
    if not all(isinstance(name, str) for name in tensors):
        raise InputError(f"{path} has a tensor whose name is no text: name a checkpoint in the Hugging Face layout.")
    return tensors


def load_pickle(path: Path, **settings: Any) -> Any:
    """What `torch.save` wrote, if it is plain data and tensors; InputError for anything else, and never its code.

    settings: of `torch.load`.
    """
    open_regular(path).close()
    try:
        if zipfile.is_zipfile(path):  # torch stores, so a compressed member is a bomb or another program's
            with zipfile.ZipFile(path) as members:
                if sum(member.file_size for member in members.infolist()) > path.stat().st_size:
                    raise RuntimeError("it is compressed")
        return torch.load(path, map_location="cpu", weights_only=True, **settings)  # a pickle could run code
    except Exception as error:  # the unpickler interprets damaged bytes: KeyError, IndexError, ..., whatever they say
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"{path} can't be read: it is damaged or holds more than tensors ({reason:.300}).") from error
