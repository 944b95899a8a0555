"""Pretrained encoders from transformers: token embeddings (for BERTScore) and sentence embeddings (for self-ranking).

Only `load_encoder` imports transformers: nothing else in the product needs it, and importing it takes seconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory, open_regular, read_json, read_object
from nanorlhf.padding import micro_batches, right_pad

FILES = ["*.json", "vocab.txt", "merges.txt", "*.model"]  # `*` enters folders too: 1_Pooling/config.json


@dataclass(frozen=True)
class Encoder:
    where: str  # directory or Hub id
    model: Any  # from transformers: the first `layer` of num_layers layers, in float32
    tokenizer: Any  # from transformers; adds its two special tokens to every text
    layer: int
    num_layers: int
    max_length: int  # tokens per text, special ones included; longer texts are truncated
    max_sentence_length: int  # the same for sentence embeddings
    pooling: str  # how token embeddings become a sentence embedding

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
    import transformers

    directory = Path(where)
    if directory.is_file():
        raise InputError(f"{where} is a file: name the directory that holds config.json and the weights.")
    if not directory.is_dir():
        directory = hub_directory(str(where), [*FILES, "model*.safetensors"])
        if not any(directory.glob("model*.safetensors")):
            directory = hub_directory(str(where), [*FILES, "pytorch_model*.bin"])
    if not (directory / "config.json").is_file():
        raise InputError(f"{where} holds no config.json: name the directory of an encoder, or a Hub id.")
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

    max_length = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", tokenizer.model_max_length))
    table: Any = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if getattr(table, "padding_idx", None) is not None:  # RoBERTa's positions start after the padding id
        max_length = min(max_length, table.num_embeddings - table.padding_idx - 1)
    pooling, limit = sentence_settings(directory)
    return Encoder(
        where=str(where),
        model=model.eval().to(device),
        tokenizer=tokenizer,
        layer=config.num_hidden_layers,
        num_layers=num_layers,
        max_length=max_length,
        max_sentence_length=min(max_length, limit or max_length),
        pooling=pooling,
    )


def check_encoder_files(directory: Path) -> None:
    """Refuse files that transformers would hang on: pipes, absurd JSON, and sizes for which the weights are too few."""
    for path in sorted(directory.glob("*")):
        if not path.is_dir():
            open_regular(path).close()
        if path.suffix == ".json":
            read_json(path)
    settings, path = read_object(directory / "config.json"), directory / "config.json"
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
    sizes = [settings.get(name, 1) for name in names]
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise InputError(f"{path}: {', '.join(names)} must be integers above 0, not {sizes!r:.300}: fix it.")
    vocabulary, width, layers, inner, positions = sizes
    count = width * (vocabulary + positions + layers * (4 * width + 2 * inner))
    files = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")]
    if count > max(2**24, sum(file.stat().st_size for file in files) // 2):  # a weight takes two bytes at least
        raise InputError(f"{path}: a model of these sizes has {count:,} weights, more than its files: fix them.")


def sentence_settings(directory: Path) -> tuple[str, int | None]:
    """From a Sentence-Transformers directory: its pooling, and its longest text in tokens (None: not given).

    A plain encoder specifies neither; like Sentence-Transformers, we then pool by the mean.
    """
    limit = None
    if (directory / "sentence_bert_config.json").is_file():
        limit = read_object(directory / "sentence_bert_config.json").get("max_seq_length")
        if limit is not None and not (type(limit) is int and limit > 2):
            raise InputError(f"{directory / 'sentence_bert_config.json'}: max_seq_length must be an integer above 2.")
    if not (directory / "modules.json").is_file():
        return "mean", limit
    try:
        modules = read_json(directory / "modules.json")
        steps = [(module["type"].rpartition(".")[2], module["path"].replace("\0", "")) for module in modules]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{directory / 'modules.json'} is not a list of modules: download it again.") from error
    others = [kind for kind, _ in steps if kind not in ("Transformer", "Pooling", "Normalize")]
    if others:
        return others[0], limit
    modes = []
    for kind, path in steps:
        if kind == "Pooling":
            settings = read_object(directory / path / "config.json")
            prefix = "pooling_mode_"  # one flag per mode; since version 5, their names
            modes += [key.removeprefix(prefix) for key, on in settings.items() if key.startswith(prefix) and on is True]
            named = settings.get("pooling_mode", [])
            modes += named if isinstance(named, list) else [named]
    return "mean" if modes in ([], ["mean"], ["mean_tokens"]) else " and ".join(map(str, modes)), limit


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


def sentence_embeddings(texts: list[str], encoder: Encoder, batch_size: int = 64) -> Tensor:
    """[STR textrank] Unit vectors (texts, C) on the CPU: normalised means over a text's tokens, special ones too.

    That is what all-MiniLM-L6-v2 and most Sentence-Transformers do; raises InputError for an encoder with another
    pooling.
    """
    if encoder.pooling != "mean":
        raise InputError(f"{encoder.where} pools by {encoder.pooling}: name a sentence encoder that pools by the mean.")
    if encoder.layer != encoder.num_layers:
        raise ValueError(f"{encoder.name}: sentence embeddings come from the last layer")
    vectors = []
    for batch in micro_batches(texts, batch_size):
        embeddings, _, mask = token_embeddings(batch, encoder, encoder.max_sentence_length)  # (B, T, C), (B, T)
        total = embeddings.masked_fill(~mask[:, :, None], 0).sum(1)  # (B, C)
        vectors.append(F.normalize(total / mask.sum(1, keepdim=True), dim=1).cpu())
    return torch.cat(vectors)
