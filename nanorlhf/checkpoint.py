"""Checkpoints in the Hugging Face layout: config.json, and model.safetensors with a family's names.

`load_gpt` and `load_scalar` read a directory or a Hub id; `save` writes a directory that
`transformers` loads. pretrained/ implements the file formats and the families. Nothing is dropped
silently: a missing or unexpected tensor, or one with the wrong shape, is an error. So are weights
that are not finite or larger than LARGEST, and a model whose output for a few tokens is not finite.
Half-precision weights become float32.

A reward or value model has "architectures": ["ScalarModel"] in config.json, the trunk under its
family's names, and three more tensors: score.weight (1, C), score.bias (1,) and reward_bias ().
[N+ 15] Two more formats are read but not written: transformers' ForSequenceClassification and
ForTokenClassification with one label, and TRL's policies with a value head (v_head). A directory
with a PEFT adapter is read as its base model with the updates merged.

With adapters (peft.py), config.json has "adapter_size" and a model_type that ends in "_adapter",
and each adapted layer has four more tensors. If a scalar model's score is the mean over a response,
model_type ends in "_mean_pooled". `transformers` has no such models and rejects these directories.
"""

import copy
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nanorlhf import distributed
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.files import atomic_files, read_object
from nanorlhf.layers import Linear
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.pretrained.directories import (
    ADAPTER_CONFIG,
    MERGE,
    find_config,
    find_updates,
    find_weights,
    split_adapter,
)
from nanorlhf.pretrained.family import find_family
from nanorlhf.pretrained.layout import (
    check_fits,
    config_object,
    from_family,
    fuse_gates,
    parse_config,
    split_gates,
    tensor_names,
    to_family,
    with_prefix,
)
from nanorlhf.pretrained.weight_files import list_shards, read_tensors, unwrapped
from nanorlhf.tokenizer import REPLACED, Tokenizer

M = TypeVar("M", GPT, ScalarModel)
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"  # transformers' classes
LANGUAGE_MODELS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration")
CLASSIFIER_HEADS = ("score", "classifier")
VALUE_HEAD = "v_head.summary"  # in TRL's policies
LARGEST = 1e6  # bound on a weight: float16's maximum is 65,504, SmolLM2-135M's 9.3
PROBED = 8  # tokens that check a model's output after loading


# --------------------------------------------------------------------------------------------- load
def load_gpt(
    where: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> GPT:
    """Load a language model from a checkpoint directory or a Hub id; InputError if it isn't one.

    device  meta: the files are checked and mapped, but no weight is read until `distributed.shard`
            reads this rank's rows
    dtype   for the blocks' linear weights (`cast_linear_weights`), in models that are not trained
    """
    return load(GPT, where, device, dtype)


def load_scalar(
    where: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> ScalarModel:
    """Load a reward or value model with its head and normalisation, like `load_gpt`."""
    return load(ScalarModel, where, device, dtype)


def is_reward_model(where: str | Path) -> bool:
    """Return True for a reward or value model, False for a policy."""
    return is_scalar(model_settings(where)[0])


def is_scalar(settings: dict) -> bool:
    architecture = read_architecture(settings)
    return architecture == "ScalarModel" or architecture.endswith((SEQUENCE, TOKEN))


def read_architecture(settings: dict) -> str:
    """Return the class that saved the checkpoint, or "" if config.json doesn't name one."""
    architectures = settings.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def has_value_head(where: str | Path) -> bool:
    """Return True if a policy's weights include TRL's value head."""
    shards = list_shards(find_weights(where))
    names = {name for shard, listed in shards.items() for name in listed or read_tensors(shard)}
    return any(VALUE_HEAD in name for name in names)


def model_settings(where: str | Path) -> tuple[dict, Path]:
    """Read config.json; return it and its path.

    For a PEFT adapter, it is the base model's, with the class that the adapter was trained as.
    """
    config_file = find_config(where)
    settings = read_object(config_file)
    _, adapter = split_adapter(where)
    if adapter is not None and not is_scalar(settings):
        task = read_object(adapter / ADAPTER_CONFIG).get("task_type")
        if task in ("SEQ_CLS", "TOKEN_CLS"):
            settings["architectures"] = [SEQUENCE if task == "SEQ_CLS" else TOKEN]
    return settings, config_file


def read_config(where: str | Path) -> GPTConfig:
    """Read a checkpoint's config.json; the weights are not loaded."""
    return parse_config(*model_settings(where))


def load(
    model_class: type[M], where: str | Path, device: str | torch.device, dtype: torch.dtype
) -> M:
    settings, config_file = model_settings(where)
    config = parse_config(settings, config_file)
    if model_class is GPT and is_scalar(settings):
        raise InputError(f"{where} is a reward or value model, not a language model.")
    file = find_weights(where)
    shards = list_shards(file)
    # before allocating these sizes: a weight takes at least two bytes, and 2^24 weights always fit
    most = sum(shard.stat().st_size for shard in shards) // 2
    check_fits(config, config_file, max(2**24, most))
    # shapes only, without memory; drawing on the meta device would import PyTorch's compiler
    with torch.device("meta"), MetaDraws(keep_last=False):
        model = model_class(config)
    cast_linear_weights(model, dtype)
    tensors: dict[str, Tensor] = {}
    for shard, names in shards.items():
        loaded = read_tensors(shard)
        for name in sorted(names - loaded.keys())[:1]:
            raise InputError(f"{shard} has no tensor {name}, listed in {file}: download it again.")
        for name in sorted(tensors.keys() & loaded.keys())[:1]:
            raise InputError(
                f"{shard}: {name} is also in another file of {file}: download it again."
            )
        tensors |= loaded
    tensors = with_prefix(unwrapped(tensors, file), config, file)
    base, adapter = split_adapter(where)
    if adapter is not None:
        from nanorlhf.pretrained.adapters import with_saved_updates

        note(f"{where} is a PEFT adapter: merging it into its base model {base}")
        tensors = with_saved_updates(tensors, config, adapter / ADAPTER_CONFIG, find_updates(where))
    if model_class is ScalarModel:
        tensors = with_scalar_head(tensors, where, read_architecture(settings))
    elif any(name.startswith(VALUE_HEAD) for name in tensors):
        note(f"{where}: ignoring the policy's value head {VALUE_HEAD}")
        tensors = {name: x for name, x in tensors.items() if not name.startswith(VALUE_HEAD)}
    tensors = split_gates(tensors, config)
    tie_head(tensors, config, model_class is GPT, file)

    stored: dict[str, list[Tensor]] = {}  # our name -> the tensors in the files that make it up
    for name, like in model.state_dict().items():
        if config.tied_head and name == "lm_head.weight":
            continue
        stored[name] = []
        shapes = [expected.shape for expected in to_family(name, like, config)]
        for family_name, shape in zip(tensor_names(name, config), shapes, strict=True):
            if family_name not in tensors:
                raise InputError(
                    f"{file} has no tensor {family_name}, which {config_file} requires."
                )
            tensor = tensors.pop(family_name)
            if tensor.shape != shape:
                raise InputError(
                    f"{file}: {family_name} has shape {tuple(tensor.shape)}, but {config_file} "
                    f"requires {tuple(shape)}."
                )
            if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise InputError(
                    f"{file}: {family_name} has dtype {tensor.dtype}; "
                    "weights must be floating-point."
                )
            stored[name].append(tensor)
    if tensors:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        name = min(tensors)
        if ".lora_" in name:
            raise InputError(f"{file} has updates that are not merged, {name}{more}: {MERGE}.")
        raise InputError(f"{file} has unexpected tensors for {config_file}: {name}{more}.")

    def read(name: str, rows: slice = slice(None)) -> Tensor:
        """Read rows of one of our tensors; may return a view of the mapped file."""
        values = from_family(name, stored[name], config, rows)
        check_values(values, f"{file}: {tensor_names(name, config)[0]}")
        return values

    if isinstance(model, ScalarModel) and read_architecture(settings).endswith(SEQUENCE):
        pad_id = settings.get("pad_token_id")
        model.skipped_id = pad_id if type(pad_id) is int else None
    on_meta = torch.device(device).type == "meta"
    for name, buffer in model.named_buffers():  # reward_bias
        value = read(name).to("cpu" if on_meta else device, buffer.dtype, copy=True)
        model.register_buffer(name, value)
    weights = distributed.OnDisk(read, partial(check_output, where))
    if on_meta:
        model.elsewhere = weights
    else:
        weights.load(model, device)
        weights.check(model, torch.device(device), dtype)
    return model


def note(sentence: str) -> None:
    if distributed.rank() == 0:
        print(f"note: {sentence}.", file=sys.stderr)


class MetaDraws(TorchFunctionMode):
    """Skip the random initialisation of weights on the meta device, which stores no values.

    keep_last: draw each tensor as for weights in memory; `last` is the last tensor drawn.
    """

    last: Tensor

    def __init__(self, keep_last: bool):
        super().__init__()
        self.keep_last = keep_last

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return function(*args, **kwargs)
        if self.keep_last:
            in_memory = torch.empty_like(kwargs["tensor"], device="cpu")
            self.last = function(**kwargs | {"tensor": in_memory})
        return kwargs["tensor"]


def check_values(values: Tensor, where: str) -> None:
    """Reject weights that are NaN, infinite or absurdly large; `where` names file and tensor.

    One pass is enough: both extremes are NaN if any value is.
    """
    if values.numel() == 0:  # this rank's share of a small tensor
        return
    for extreme in torch.aminmax(values):
        if not abs(extreme) <= LARGEST:
            raise InputError(
                f"{where} has a value of {extreme:g}; weights must be finite and at most "
                f"{LARGEST:,.0f}: the file is damaged, or its dtype is wrong."
            )


@torch.no_grad()
def check_output(
    where: str | Path, model: GPT | ScalarModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Reject a model whose output for a few tokens is not finite, before it is trained."""
    length = min(PROBED, model.config.n_ctx)
    ids = torch.linspace(0, model.config.vocab_size - 1, length).long().to(device)[None]
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        output = model(ids, query_length=max(1, length // 2))
        if isinstance(model, GPT) and model.forbidden is None:  # else some logits are -inf
            output = model.logits(output)
    if not output.isfinite().all():
        raise InputError(
            f"{where}: the model's output for {length} tokens is not finite: its weights or its "
            "configuration are damaged."
        )


def with_scalar_head(
    tensors: dict[str, Tensor], where: str | Path, architecture: str
) -> dict[str, Tensor]:
    """Rename the head of a reward or value model from any trainer to our names.

    transformers' head has no bias and no normalisation: both become 0. Raises InputError for a
    language model and for a head with several labels.
    """
    if architecture == "ScalarModel":
        return tensors
    is_classifier = architecture.endswith((SEQUENCE, TOKEN))
    heads = CLASSIFIER_HEADS if is_classifier else (VALUE_HEAD,)
    head = next((name for name in heads if f"{name}.weight" in tensors), None)
    if head is None:
        if not architecture or architecture.endswith(LANGUAGE_MODELS):
            kind = "a language model"
            raise InputError(f"{where} is {kind}, not a reward model: train one with train_rm.py.")
        heads_read = " or ".join(f"{name}.weight" for name in CLASSIFIER_HEADS)
        raise InputError(
            f"{where}: unsupported head for {architecture}; supported heads: {heads_read}."
        )
    # a language model's head is not used for scores
    renamed = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("lm_head.", "embed_out.", f"{head}."))
    }
    weight = tensors[f"{head}.weight"]
    if weight.ndim != 2 or len(weight) != 1:
        raise InputError(
            f"{where} is a {architecture} with {len(weight)} labels; a reward model must have 1."
        )
    renamed["score.weight"] = weight
    renamed["score.bias"] = tensors.get(f"{head}.bias", torch.zeros(1))
    return renamed | {"reward_bias": torch.zeros(())}


def tie_head(tensors: dict[str, Tensor], config: GPTConfig, has_head: bool, file: Path) -> None:
    """Drop the head's tensor if the head is tied to the embedding."""
    if not has_head:
        return
    names = ("transformer.embedding.weight", "lm_head.weight")
    embedding, head = (tensor_names(name, config)[0] for name in names)
    if config.num_decoder_blocks and embedding in tensors:
        # transformers 5 ties the head of every T5 without a separate one
        tensors.setdefault(head, tensors[embedding])
    if config.tied_head and head in tensors:
        if not torch.equal(tensors[head], tensors.setdefault(embedding, tensors[head])):
            raise InputError(
                f"{file}: {head} differs from {embedding}, but tie_word_embeddings is true."
            )
        del tensors[head]


def cast_linear_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the blocks' linear weights in `dtype`, for a model that is not trained.

    Under autocast to bfloat16, outputs don't change by a bit: each matmul would cast these weights
    anyway. Embedding, layer norms and heads stay float32, as under autocast.
    """
    for module in model.modules():
        if isinstance(module, Linear | nn.ParameterList):  # a list has the updates of LoRA
            for name, weight in list(module.named_parameters(recurse=False)):
                parameter = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
                setattr(module, name, parameter)


# --------------------------------------------------------------------- a scalar model from a policy
def scalar_from_gpt(gpt: GPT, share_trunk: bool = False) -> ScalarModel:
    """Initialise a reward model from a policy: a copy of its trunk and a new head. [N+ 11]

    share_trunk: use the policy's trunk weights instead of a copy; both models must keep them
    frozen.
    """
    if not (share_trunk or gpt.lm_head.weight.is_meta):
        model = ScalarModel(gpt.config).to(gpt.lm_head.weight)  # its device and dtype
        model.transformer.load_state_dict(gpt.transformer.state_dict())
        return model
    # draw the same head as if the trunk were in memory
    with torch.device("meta"), MetaDraws(keep_last=True) as draws:
        model = ScalarModel(gpt.config)
    model.score.weight = nn.Parameter(draws.last)
    model.score.bias = nn.Parameter(torch.zeros(1))
    model.reward_bias = torch.zeros(())
    if share_trunk:
        shared = {id(weight): weight for weight in gpt.parameters()}
        model.transformer = copy.deepcopy(gpt.transformer, shared)
        return model.to(gpt.lm_head.weight)  # moves only the head
    model.elsewhere = gpt.elsewhere
    return model


# --------------------------------------------------------------------------------------------- save
def save(
    model: GPT | ScalarModel, directory: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files; keep the directory's others.

    All files are first written to a subdirectory, synced to disk, then renamed, so an interrupted
    save leaves the previous checkpoint intact. config.json comes last: without it a new directory
    is not a checkpoint.
    """
    config, directory = model.config, Path(directory)
    settings = config_object(config)
    transformers_class = find_family(config.architecture).transformers_class
    if isinstance(model, ScalarModel):
        transformers_class = "ScalarModel"
    settings["architectures"] = [transformers_class]
    dtype = model.transformer.embedding.weight.dtype
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    # null without a tokenizer: transformers would fill in 50256, which may not be in the vocabulary
    if not config.num_decoder_blocks:  # T5's settings have both ids
        settings["eos_token_id"] = tokenizer.eos_id if tokenizer else None
        bos = tokenizer.bos if tokenizer else None
        settings["bos_token_id"] = tokenizer.backend.token_to_id(bos) if tokenizer and bos else None
    # transformers' Llama looks up [PAD] in the embedding at creation, and fails if it isn't there
    pad_id = tokenizer.pad_id if tokenizer else None
    settings["pad_token_id"] = pad_id if pad_id is not None and pad_id < config.vocab_size else None

    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not (config.tied_head and name == "lm_head.weight"):  # the embedding, written once
            family_tensors = to_family(name, tensor.detach().cpu(), config)
            names = tensor_names(name, config)
            tensors |= zip(names, [tensor.contiguous() for tensor in family_tensors], strict=True)
    tensors = fuse_gates(tensors, config)

    with atomic_files(directory, last="config.json") as partial:
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        if tokenizer is not None:
            tokenizer.save(partial)
        write_tensors(tensors, partial / "model.safetensors", partial / "config.json")
        written = {file.name for file in partial.iterdir()}
    if tokenizer is not None:
        for name in REPLACED - written:
            (directory / name).unlink(missing_ok=True)


def write_tensors(
    tensors: dict[str, Tensor], path: Path, like: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the access mode of the file `like`."""
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
        shutil.copymode(like, path)  # safetensors sets owner-only access
    except SafetensorError as error:  # its message includes the OS error, such as a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
