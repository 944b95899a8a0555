"""Token embeddings from pretrained transformers encoders, for BERTScore and RLCF's discriminator.

We import transformers only when an encoder is loaded, because the import takes seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory, open_regular, read_json, read_object
from nanorlhf.padding import right_pad
from nanorlhf.pretrained.family import ConfigFile

# `*` also matches inside folders: 1_Pooling/config.json
FILES = ["*.json", "vocab.txt", "merges.txt", "*.model"]


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
        """Return the encoder's name for reports: a BERTScore means nothing without it."""
        return f"{self.where}, layer {self.layer} of {self.num_layers}"


# ------------------------------------------------------------------------------------------ 1. load
def load_encoder(where: str | Path, layer: int | None = None, device: str | torch.device = "cpu") -> Encoder:
    """Load the first `layer` layers (None: all) of a BERT-like encoder from a directory or Hub id.

    The bert-score library uses layer 17 of 24 of roberta-large, which agrees best with people.
    Higher layers are neither computed nor kept. Raises InputError for an encoder that is missing,
    damaged, or not BERT-like.
    """
    try:
        import transformers
    except ImportError as error:  # part of the optional extra `encoder`
        raise InputError(f"{where}: encoders need `pip install transformers`.") from error

    directory = encoder_directory(where)
    check_encoder_files(directory)

    # transformers would warn about the layers that we drop; missing ones are checked below
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **local)
        num_layers = getattr(config, "num_hidden_layers", None)
        if num_layers is None or config.is_encoder_decoder:
            raise InputError(f"{where} is a {config.model_type}, not a BERT-like encoder.")
        if layer is not None and not 1 <= layer <= num_layers:
            raise InputError(f"layer {layer} of {where} must be from 1 to {num_layers}.")
        config.num_hidden_layers = layer or num_layers
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **local)
        model, loading = transformers.AutoModel.from_pretrained(
            directory, config=config, dtype=torch.float32, output_loading_info=True, **local
        )
    except InputError:
        raise
    except Exception as error:  # transformers hardly checks its files: wrong types raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{where} can't be read as an encoder ({reason:.300}).") from error
    missing = [name for name in loading["missing_keys"] if not name.startswith("pooler.")]  # unused
    if missing:
        raise InputError(f"{where}: {len(missing)} tensors are missing, such as {min(missing)}.")
    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        raise InputError(f"{where} is not a BERT-like encoder: its tokenizer has no [CLS] or no [SEP] token.")

    return Encoder(
        where=str(where),
        model=model.eval().to(device),
        tokenizer=tokenizer,
        layer=config.num_hidden_layers,
        num_layers=num_layers,
        max_length=longest_text(model, tokenizer),
    )


def encoder_directory(where: str | Path) -> Path:
    """Return the directory of an encoder: `where` itself, or the download of its Hub id."""
    directory = Path(where)
    if directory.is_file():
        raise InputError(f"{where} is a file: expected a directory with config.json and the weights.")
    if not directory.is_dir():
        directory = hub_directory(str(where), [*FILES, "*.safetensors"])
        if not any(directory.rglob("*.safetensors")):
            directory = hub_directory(str(where), [*FILES, "*pytorch_model*.bin"])
    if not any((directory / name).is_file() for name in ("config.json", "modules.json")):
        raise InputError(f"{where} has no config.json: pass an encoder's directory or Hub id.")
    return directory


def files_of_encoder(directory: Path) -> list[Path]:
    """Return the files in a directory that an encoder may be read from."""
    patterns = [*FILES, "*.safetensors", "*.bin"]
    return sorted(path for pattern in patterns for path in directory.glob(pattern) if path.is_file())


def longest_text(model: Any, tokenizer: Any) -> int:
    """Return how many tokens of a text the model can read, including special ones."""
    limit = tokenizer.model_max_length
    limit = min(limit, getattr(model.config, "max_position_embeddings", limit))
    table: Any = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if getattr(table, "padding_idx", None) is not None:  # RoBERTa's positions start after that id
        limit = min(limit, table.num_embeddings - table.padding_idx - 1)
    return limit


def check_encoder_files(directory: Path) -> None:
    """Refuse files that transformers would hang on: pipes, absurd JSON, sizes far beyond the weights.

    Subfolders are checked too: sentence-transformers has a folder per module, such as 1_Pooling.
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
    """Refuse a config.json that describes more weights than the files next to it contain."""
    config = ConfigFile(read_object(path), path)

    def size(name: str) -> int:
        return config.get(name, int, 1, least=1, most=2**31)

    width = size("hidden_size")
    block = 4 * width + 2 * size("intermediate_size")
    rows = size("vocab_size") + size("max_position_embeddings") + size("num_hidden_layers") * block
    count = width * rows
    files = [*path.parent.glob("*.safetensors"), *path.parent.glob("pytorch_model*.bin")]
    num_bytes = sum(file.stat().st_size for file in files)
    if count > max(2**24, num_bytes // 2):  # a weight takes at least two bytes
        raise config.error(f"a model of these sizes has {count:,} weights, more than its files contain.")


# ------------------------------------------------------------------------------------ 2. embeddings
@torch.no_grad()
def token_embeddings(texts: list[str], encoder: Encoder, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last hidden states (B, T, C), ids (B, T) and mask (B, T), True = real; right-padded."""
    device = next(encoder.model.parameters()).device
    rows = encoder.tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    ids = right_pad(rows, encoder.tokenizer.pad_token_id or 0).to(device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    # from the lengths, not the ids: a text may contain [PAD]
    mask = torch.arange(ids.size(1), device=device) < lengths[:, None]
    return encoder.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state, ids, mask
