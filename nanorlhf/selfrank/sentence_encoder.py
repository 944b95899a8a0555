"""Sentence embeddings with sentence-transformers: any of its models, from a directory or the Hub."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanorlhf.errors import InputError
from nanorlhf.files import read_json
from nanorlhf.padding import micro_batches
from nanorlhf.pretrained.encoder import check_encoder_files, encoder_directory, longest_text
from nanorlhf.progress import Progress

TEXTS_AT_ONCE = 256  # encoder batch; fixed, because rounding depends on it


def load_sentence_encoder(where: str | Path, device: str | torch.device = "cpu") -> Any:
    """Load a SentenceTransformer with its own pooling and maximum length; a plain encoder gets mean pooling.

    Only local files are read (a Hub id is downloaded first), and no code in them is run. Raises InputError if the
    encoder is missing or damaged.
    """
    try:
        import sentence_transformers
        import transformers
    except ImportError as error:  # part of the optional extra `encoder`
        raise InputError(
            f"{where}: sentence encoders need a library: install it with `pip install sentence-transformers`."
        ) from error
    directory = encoder_directory(where)
    check_encoder_files(directory)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)  # it warns about plain encoders
    settings = {"local_files_only": True, "trust_remote_code": False}
    dtype = {"dtype": torch.float32}
    missing: list[str] = []
    try:
        encoder = sentence_transformers.SentenceTransformer(
            str(directory), device=str(device), model_kwargs=dtype, **settings
        )
        if inner := encoder.transformers_model:
            # missing tensors silently keep random values: load the weights again to list what is missing
            modules: Any = read_json(directory / "modules.json") if (directory / "modules.json").exists() else None
            folder = directory / modules[0]["path"] if modules else directory
            _, loading = type(inner).from_pretrained(
                folder, config=inner.config, output_loading_info=True, **dtype, **settings
            )
            missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))  # unused here
            encoder.max_seq_length = longest_text(inner, encoder.tokenizer)
        embed({"a word"}, encoder)
    except InputError:
        raise
    except Exception as error:  # neither library checks its files: a wrong type may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{where}: can't load the sentence encoder ({reason:.300}).") from error
    if missing:
        raise InputError(f"{where} lacks {len(missing)} tensors, e.g. {missing[0]}: download it again.")
    return encoder


def embed(texts: set[str], encoder: Any) -> dict[str, np.ndarray]:
    """[STR textrank] Embed each text as a unit vector (d,), in batches of similar length. Raises InputError for NaN."""
    in_order = sorted(texts, key=lambda text: (len(text), text))
    settings = {"batch_size": TEXTS_AT_ONCE, "normalize_embeddings": True, "show_progress_bar": False}
    batches = Progress(micro_batches(in_order, TEXTS_AT_ONCE), desc="encoder", unit=" batches", leave=False)
    vectors = [row for batch in batches for row in encoder.encode(batch, **settings).astype(np.float64)]
    if not np.isfinite(vectors).all():
        raise InputError("--encoder: its embeddings are not finite, so its weights must be damaged.")
    return dict(zip(in_order, vectors, strict=True))
