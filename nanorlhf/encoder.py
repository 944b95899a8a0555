"""Pretrained encoders from transformers: token embeddings, for BERTScore and RLCF's discriminator.

transformers is imported where an encoder is loaded and not before: it takes seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory, open_regular, read_json, read_object
from nanorlhf.padding import right_pad

FILES = ["*.json", "vocab.txt", "merges.txt", "*.model"]  # `*` enters folders too: 1_Pooling/config.json


@dataclass(frozen=True)
class Encoder:
    where: str  # directory or Hub id
    model: Any  # from transformers: the first `layer` of num_layers layers, in float32
    tokenizer: Any  # from transformers; adds its two special tokens to every text
    layer: int
    num_layers: int
    max_length: int  # tokens per text, special ones included; longer texts are truncated

    @property
    def name(self) -> str:
        """For reports: a BERTScore means nothing without its encoder."""
        return f"{self.where}, layer {self.layer} of {self.num_layers}"


# -------------------------------------------------------------------------------------------------------------- 1. load
def load_encoder(where: str | Path, layer: int | None = None, device: str | torch.device = "cpu") -> Encoder:
    """Load the first `layer` layers (None: all) of a BERT-like encoder from a directory or a Hub id.

    The bert-score library uses layer 17 of 24 of roberta-large, which agrees best with people; layers above are
    neither computed nor kept. Raises InputError where the encoder is missing, damaged, or not BERT-like.
    """
    try:
        import transformers
    except ImportError as error:  # part of the optional extra `encoder`
        raise InputError(f"{where}: encoders need transformers: install it with `pip install transformers`.") from error

    directory = encoder_directory(where)
    check_encoder_files(directory)

    transformers.logging.set_verbosity_error()  # it would warn of the layers above; missing ones are checked below
    transformers.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **local)
        num_layers = getattr(config, "num_hidden_layers", None)
        if num_layers is None or config.is_encoder_decoder:
            raise InputError(f"{where} is a {config.model_type}: name an encoder such as roberta-large.")
        if layer is not None and not 1 <= layer <= num_layers:
            raise InputError(f"layer {layer} of {where}: it must be from 1 to {num_layers}.")
        config.num_hidden_layers = layer or num_layers
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **local)
        model, loading = transformers.AutoModel.from_pretrained(
            directory, config=config, dtype=torch.float32, output_loading_info=True, **local
        )
    except InputError:
        raise
    except Exception as error:  # transformers checks few of its files: a wrong type there may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{where} can't be read as an encoder ({reason:.300}): name another, or fix it.") from error
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))  # unused here
    if missing:
        raise InputError(f"{where} lacks {len(missing)} tensors, {missing[0]} among them: download it again.")
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise InputError(f"{where}: its tokenizer marks no beginning and end: name an encoder such as roberta-large.")

    return Encoder(
        where=str(where),
        model=model.eval().to(device),
        tokenizer=tokenizer,
        layer=config.num_hidden_layers,
        num_layers=num_layers,
        max_length=longest_text(model, tokenizer),
    )


def encoder_directory(where: str | Path) -> Path:
    """The directory of an encoder: `where` itself, or what its Hub id downloads. Raises InputError for neither."""
    directory = Path(where)
    if directory.is_file():
        raise InputError(f"{where} is a file: name the directory that holds config.json and the weights.")
    if not directory.is_dir():
        directory = hub_directory(str(where), [*FILES, "*.safetensors"])
        if not any(directory.rglob("*.safetensors")):
            directory = hub_directory(str(where), [*FILES, "*pytorch_model*.bin"])
    if not any((directory / name).is_file() for name in ("config.json", "modules.json")):
        raise InputError(f"{where} holds no config.json: name the directory of an encoder, or a Hub id.")
    return directory


def longest_text(model: Any, tokenizer: Any) -> int:
    """How many tokens of a text the model reads, special ones included."""
    limit = tokenizer.model_max_length
    limit = min(limit, getattr(model.config, "max_position_embeddings", limit))
    table: Any = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if getattr(table, "padding_idx", None) is not None:  # RoBERTa's positions start after the padding id
        limit = min(limit, table.num_embeddings - table.padding_idx - 1)
    return limit


def check_encoder_files(directory: Path) -> None:
    """Refuse files that transformers would hang on: pipes, absurd JSON, and sizes for which the weights are too few.

    The folders inside count too: sentence-transformers keeps a folder per module, 1_Pooling say.
    """
    for path in sorted([*directory.glob("*"), *directory.glob("*/*")]):
        if path.is_dir():
            continue
        open_regular(path).close()
        if path.name == "config.json":
            check_sizes(path)
        elif path.suffix == ".json":
            read_json(path)


def check_sizes(path: Path) -> None:
    """Refuse a config.json whose model has more weights than the files beside it."""
    settings = read_object(path)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
    sizes = [settings.get(name, 1) for name in names]
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise InputError(f"{path}: {', '.join(names)} must be integers above 0, not {sizes!r:.300}: fix it.")
    vocabulary, width, layers, inner, positions = sizes
    count = width * (vocabulary + positions + layers * (4 * width + 2 * inner))
    files = [*path.parent.glob("*.safetensors"), *path.parent.glob("pytorch_model*.bin")]
    if count > max(2**24, sum(file.stat().st_size for file in files) // 2):  # a weight takes two bytes at least
        raise InputError(f"{path}: a model of these sizes has {count:,} weights, more than its files: fix them.")


# ------------------------------------------------------------------------------------------------------- 2. embeddings
@torch.no_grad()
def token_embeddings(texts: list[str], encoder: Encoder, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states (B, T, C), ids (B, T), and mask (B, T), True = real token; right-padded."""
    device = next(encoder.model.parameters()).device
    rows = encoder.tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    ids = right_pad(rows, encoder.tokenizer.pad_token_id or 0).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(ids.size(1), device=device) < lengths[:, None]  # not by id: a text may contain [PAD]
    return encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state, ids, mask
