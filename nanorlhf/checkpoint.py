"""Checkpoints in the Hugging Face layout: config.json and model.safetensors, by a family's names.

`load_gpt` and `load_scalar` read a directory or a Hub id; `save` writes a directory that
`transformers` loads. pretrained/ knows the files and the families. Nothing is dropped silently: a
missing or unexpected tensor, or one of another shape, is an error. So are weights that are not
finite or larger than LARGEST, and a model whose output for a few tokens is not finite.
Half-precision weights become float32.

A reward or value model is such a directory with "architectures": ["ScalarModel"] in config.json,
the trunk under its family's names, and three more tensors: score.weight (1, C), score.bias (1,) and
reward_bias (). [N+ 15] Read as one, but not written: transformers' ForSequenceClassification and
ForTokenClassification with one label, and the value head of TRL's policies (v_head). A directory
that holds a PEFT adapter is read as its base model with the updates merged.

With adapters (peft.py), config.json has "adapter_size" and a model_type that ends in "_adapter",
and each adapted layer has four more tensors. Where a scalar model's score is the mean over a
response, model_type ends in "_mean_pooled". `transformers` has no such models and refuses the
directories.
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
from nanorlhf.model import GPT, Linear, ScalarModel
from nanorlhf.pretrained.directories import (
    ADAPTER_CONFIG,
    MERGE,
    find_config,
    find_updates,
    find_weights,
    split_adapter,
)
from nanorlhf.pretrained.families import family_of
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
from nanorlhf.pretrained.weight_files import read_tensors, shards_of, unwrapped
from nanorlhf.tokenizer import REPLACED, Tokenizer

M = TypeVar("M", GPT, ScalarModel)
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"  # of transformers
LANGUAGE_MODELS = ("LMHeadModel", "ForCausalLM", "ForConditionalGeneration")
CLASSIFIER_HEADS = ("score", "classifier")
VALUE_HEAD = "v_head.summary"  # of TRL's policies
LARGEST = 1e6  # of a weight: float16 has up to 65,504, SmolLM2-135M up to 9.3
PROBED = 8  # tokens that a new model reads


# --------------------------------------------------------------------------------------------- load
def load_gpt(
    where: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> GPT:
    """Load a language model from a checkpoint directory or a Hub id; InputError if it holds none.

    device  meta: the files are checked and mapped, but no weight is read until `distributed.shard`
            reads this rank's rows
    dtype   of the blocks' linear weights (`cast_linear_weights`), for models that are not trained
    """
    return load(GPT, where, device, dtype)


def load_scalar(
    where: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> ScalarModel:
    """Load a reward or value model, its head and normalisation included, as `load_gpt` does."""
    return load(ScalarModel, where, device, dtype)


def holds_reward_model(where: str | Path) -> bool:
    """True for a reward or value model, False for a policy."""
    return is_scalar(model_settings(where)[0])


def is_scalar(settings: dict) -> bool:
    architecture = architecture_of(settings)
    return architecture == "ScalarModel" or architecture.endswith((SEQUENCE, TOKEN))


def architecture_of(settings: dict) -> str:
    """The class that the checkpoint was saved by; empty if config.json doesn't say."""
    architectures = settings.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else ""


def has_value_head(where: str | Path) -> bool:
    """Whether the weights of a policy include TRL's value head."""
    shards = shards_of(find_weights(where))
    names = {name for shard, named in shards.items() for name in named or read_tensors(shard)}
    return any(VALUE_HEAD in name for name in names)


def model_settings(where: str | Path) -> tuple[dict, Path]:
    """config.json and its path; of a PEFT adapter its base's, with the class it was trained as."""
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
        raise InputError(f"{where} holds a reward or value model, not a language model.")
    file = find_weights(where)
    shards = shards_of(file)
    # before anything of these sizes is made: a weight takes two bytes at least; 2^24 are no burden
    most = sum(shard.stat().st_size for shard in shards) // 2
    check_fits(config, config_file, max(2**24, most))
    # shapes only: allocates no memory, and to draw on the meta device PyTorch imports its compiler
    with torch.device("meta"), MetaDraws(keep_last=False):
        model = model_class(config)
    cast_linear_weights(model, dtype)
    tensors: dict[str, Tensor] = {}
    for shard, named in shards.items():
        found = read_tensors(shard)
        for name in sorted(named - found.keys())[:1]:
            raise InputError(f"{shard} has no tensor {name}, which {file} says: download it again.")
        for name in sorted(tensors.keys() & found.keys())[:1]:
            raise InputError(
                f"{shard}: {name} is in another file of {file} too: download it again."
            )
        tensors |= found
    tensors = with_prefix(unwrapped(tensors, file), config, file)
    base, adapter = split_adapter(where)
    if adapter is not None:
        from nanorlhf.pretrained.adapters import with_saved_updates

        note(f"{where} is a PEFT adapter: it is merged into its base model {base}")
        tensors = with_saved_updates(tensors, config, adapter / ADAPTER_CONFIG, find_updates(where))
    if model_class is ScalarModel:
        tensors = with_scalar_head(tensors, where, architecture_of(settings))
    elif any(name.startswith(VALUE_HEAD) for name in tensors):
        note(f"{where}: a policy is read without its value head {VALUE_HEAD}")
        tensors = {name: x for name, x in tensors.items() if not name.startswith(VALUE_HEAD)}
    tensors = split_gates(tensors, config)
    tie_head(tensors, config, model_class is GPT, file)

    stored: dict[str, list[Tensor]] = {}  # our name -> the tensors in the files that it is made of
    for name, like in model.state_dict().items():
        if config.tied_head and name == "lm_head.weight":
            continue
        stored[name] = []
        shapes = [expected.shape for expected in to_family(name, like, config)]
        for theirs, shape in zip(tensor_names(name, config), shapes, strict=True):
            if theirs not in tensors:
                raise InputError(f"{file} has no tensor {theirs}, which {config_file} requires.")
            tensor = tensors.pop(theirs)
            if tensor.shape != shape:
                raise InputError(
                    f"{file}: {theirs} has shape {tuple(tensor.shape)} instead of the "
                    f"{tuple(shape)} that {config_file} requires."
                )
            if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                raise InputError(
                    f"{file}: {theirs} has dtype {tensor.dtype}: weights must be floating-point."
                )
            stored[name].append(tensor)
    if tensors:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        name = min(tensors)
        if ".lora_" in name:
            raise InputError(f"{file} holds updates that are not merged, {name}{more}: {MERGE}.")
        raise InputError(f"{file} holds {name}{more}, unknown to {config_file}.")

    def read(name: str, rows: slice = slice(None)) -> Tensor:
        """Some rows of one of our tensors; may be a view into the file, which is mapped."""
        values = from_family(name, stored[name], config, rows)
        check_values(values, f"{file}: {tensor_names(name, config)[0]}")
        return values

    if isinstance(model, ScalarModel) and architecture_of(settings).endswith(SEQUENCE):
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
    """What is drawn for new weights on the meta device, which keeps no numbers: nothing.

    keep_last: as much as for weights in memory, tensor by tensor; `last` are the last one's.
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
    """Refuse weights that are NaN, infinite or absurdly large; `where` names file and tensor.

    In one pass: the two extremes are NaN if any value is.
    """
    if values.numel() == 0:  # this rank's share of a small tensor
        return
    for extreme in torch.aminmax(values):
        if not abs(extreme) <= LARGEST:
            raise InputError(
                f"{where} has a value of {extreme:g}: a weight must be finite, {LARGEST:,.0f} at "
                "most: the file is damaged, or not of the type it says."
            )


@torch.no_grad()
def check_output(
    where: str | Path, model: GPT | ScalarModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse a model whose output for a few tokens is not finite, before anyone trains it."""
    length = min(PROBED, model.config.n_ctx)
    ids = torch.linspace(0, model.config.vocab_size - 1, length).long().to(device)[None]
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        output = model(ids, query_length=max(1, length // 2))
        if isinstance(model, GPT) and model.forbidden is None:  # else some logits are -inf
            output = model.logits(output)
    if not output.isfinite().all():
        raise InputError(
            f"{where}: the model's output for {length} tokens is not finite: its weights or the "
            "numbers in its configuration are damaged."
        )


def with_scalar_head(
    tensors: dict[str, Tensor], where: str | Path, architecture: str
) -> dict[str, Tensor]:
    """The tensors of a reward or value model with its head under our names, whoever trained it.

    transformers' head has no bias and no normalisation. Raises InputError for a language model and
    for a head of several labels.
    """
    if architecture == "ScalarModel":
        return tensors
    is_classifier = architecture.endswith((SEQUENCE, TOKEN))
    heads = CLASSIFIER_HEADS if is_classifier else (VALUE_HEAD,)
    head = next((name for name in heads if f"{name}.weight" in tensors), None)
    if head is None:
        if not architecture or architecture.endswith(LANGUAGE_MODELS):
            kind = "a language model"
            raise InputError(
                f"{where} holds {kind}, not a reward model: train one with train_rm.py."
            )
        heads_read = " or ".join(f"{name}.weight" for name in CLASSIFIER_HEADS)
        raise InputError(
            f"{where}: the head of a {architecture} isn't implemented, only {heads_read}."
        )
    # a language model's head scores nothing
    others = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("lm_head.", "embed_out.", f"{head}."))
    }
    weight = tensors[f"{head}.weight"]
    if weight.ndim != 2 or len(weight) != 1:
        raise InputError(
            f"{where} is a {architecture} with {len(weight)} labels: a reward model has 1."
        )
    others["score.weight"] = weight
    others["score.bias"] = tensors.get(f"{head}.bias", torch.zeros(1))
    return others | {"reward_bias": torch.zeros(())}


def tie_head(tensors: dict[str, Tensor], config: GPTConfig, has_head: bool, file: Path) -> None:
    """Leave one of embedding and head where they are tied."""
    if not has_head:
        return
    names = ("transformer.embedding.weight", "lm_head.weight")
    embedding, head = (tensor_names(name, config)[0] for name in names)
    if config.num_decoder_blocks and embedding in tensors:
        # transformers 5 ties the heads of all T5s that have no other one
        tensors.setdefault(head, tensors[embedding])
    if config.tied_head and head in tensors:
        if not torch.equal(tensors[head], tensors.setdefault(embedding, tensors[head])):
            raise InputError(f"{file}: {head} isn't {embedding}, but tie_word_embeddings is true.")
        del tensors[head]


def cast_linear_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the blocks' linear weights in `dtype`, for a model that is not trained.

    Under autocast to bfloat16 the outputs stay the same to the last bit, as each matmul would cast
    these weights anyway. Embedding, layer norms and heads stay float32, as under autocast.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            for name, weight in list(module.named_parameters()):
                parameter = nn.Parameter(weight.detach().to(dtype), weight.requires_grad)
                setattr(module, name, parameter)


# --------------------------------------------------------------------- a scalar model from a policy
def scalar_from_gpt(gpt: GPT, share_trunk: bool = False) -> ScalarModel:
    """A reward model initialised from a policy: a copy of its trunk and a new head. [N+ 11]

    share_trunk: the policy's own trunk weights instead of a copy; both models must keep them
    frozen.
    """
    if not (share_trunk or gpt.lm_head.weight.is_meta):
        model = ScalarModel(gpt.config).to(gpt.lm_head.weight)  # its device and dtype
        model.transformer.load_state_dict(gpt.transformer.state_dict())
        return model
    # the same head as where the trunk is in memory
    with torch.device("meta"), MetaDraws(keep_last=True) as draws:
        model = ScalarModel(gpt.config)
    model.score.weight = nn.Parameter(draws.last)
    model.score.bias = nn.Parameter(torch.zeros(1))
    model.reward_bias = torch.zeros(())
    if share_trunk:
        shared = {id(weight): weight for weight in gpt.parameters()}
        model.transformer = copy.deepcopy(gpt.transformer, shared)
        return model.to(gpt.lm_head.weight)  # the head; the trunk is there
    model.elsewhere = gpt.elsewhere
    return model


# --------------------------------------------------------------------------------------------- save
def save(
    model: GPT | ScalarModel, directory: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files; the directory's others stay.

    All files are first written to a subdirectory, synced to disk, then renamed, so an interrupted
    save leaves the previous checkpoint intact. config.json comes last: without it a new directory
    is not a checkpoint.
    """
    config, directory = model.config, Path(directory)
    settings = config_object(config)
    transformers_class = family_of(config.architecture).transformers_class
    if isinstance(model, ScalarModel):
        transformers_class = "ScalarModel"
    settings["architectures"] = [transformers_class]
    dtype = model.transformer.embedding.weight.dtype
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    # null without a tokenizer: transformers would fill in 50256, which may not be in the vocabulary
    if not config.num_decoder_blocks:  # which has them
        settings["eos_token_id"] = tokenizer.eos_id if tokenizer else None
        bos = tokenizer.bos if tokenizer else None
        settings["bos_token_id"] = tokenizer.backend.token_to_id(bos) if tokenizer and bos else None
    # transformers' Llama looks [PAD] up in the embedding as it is made, and fails if it isn't there
    pad_id = tokenizer.pad_id if tokenizer else None
    settings["pad_token_id"] = pad_id if pad_id is not None and pad_id < config.vocab_size else None

    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not (config.tied_head and name == "lm_head.weight"):  # the embedding, written once
            theirs = to_family(name, tensor.detach().cpu(), config)
            names = tensor_names(name, config)
            tensors |= zip(names, [tensor.contiguous() for tensor in theirs], strict=True)
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
    except SafetensorError as error:  # its text holds the system's error, such as a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
