"""Check the models of an evaluation before reading any weights, then load them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, read_config
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.errors import InputError
from nanorlhf.evals.settings import EvalArgs, PolicyArgs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.report.run_curves import stage_of
from nanorlhf.rewards.gold import Gold
from nanorlhf.rewards.weighted_sum import is_function
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from nanorlhf.training.run_directory import read_metrics, read_settings

M = TypeVar("M", GPT, ScalarModel)


def common_tokenizer(named: str | None, checkpoints: Iterable[str | None], gold: str | None = None) -> Tokenizer:
    """Return the named tokenizer, or the first model's, which all models must then share; None means no model."""
    models = [checkpoint for checkpoint in checkpoints if checkpoint]
    if gold and not is_function(gold):
        models.append(gold)
    for checkpoint in models:  # the report needs them: fail now, not after hours
        stage_of(checkpoint, read_metrics(checkpoint)), read_settings(checkpoint)
    tokenizer = load_tokenizer(named or models[0])
    for checkpoint in models:
        if named is None and load_tokenizer(checkpoint).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise InputError(f"{checkpoint} and {models[0]} have different tokenizers; compared models must share one.")
    return tokenizer


def check_reward_model(checkpoint: str | None) -> None:
    """Raise InputError for a path or Hub id that doesn't exist; None means no model."""
    if checkpoint is None or Path(checkpoint).exists():
        return
    try:
        load_tokenizer(checkpoint)
    except InputError as error:
        sentence = str(error).rstrip(".")
        raise InputError(f"--reward-model {sentence}; to evaluate without one, pass --reward-model None.") from error


def check_model(flag: str, checkpoint: str | None, tokenizer: Tokenizer, longest: dict[str, int]) -> None:
    """Raise InputError if a model's vocabulary or context is too small, before any weights are read.

    checkpoint may also be None or a function, FILE.py:FUNCTION. longest: file or flag -> tokens of its longest text.
    """
    if checkpoint is None or is_function(checkpoint):
        return
    config = read_config(checkpoint)
    check_vocabulary(tokenizer, config.vocab_size, checkpoint)
    for source, length in longest.items():
        if length > config.n_ctx:
            raise InputError(
                f"{source}: the longest query and response have {length} tokens, more than the {config.n_ctx} "
                f"positions of {flag} {checkpoint}: shorten them, or lower --response-length."
            )


def longest_text(rows: list[Demonstration], response_length: int) -> int:
    """Return the length in tokens of the longest query with its response or a sampled one."""
    return max(len(row.query) + max(len(row.response), response_length) for row in rows)


def longest_pair(rows: list[Comparison]) -> int:
    return max((len(row.query) + max(len(row.chosen), len(row.rejected)) for row in rows), default=0)


def load_policy(
    checkpoint: str, rows: list[Demonstration], tokenizer: Tokenizer, args: PolicyArgs, device: torch.device
) -> GPT:
    """Load a policy, after checking that its context is long enough to answer `rows`."""
    needed = max(len(row.query) for row in rows) + args.response_length
    check_model("--policies", checkpoint, tokenizer, {"--response-length": needed})
    return load_model(load_gpt, checkpoint, args, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)


def load_model(load: Callable[..., M], checkpoint: str, args: EvalArgs, device: torch.device) -> M:
    """Load a model that passed `check_model`, with load_gpt or load_scalar; with --offload, keep it in CPU memory."""
    model = load(checkpoint, *device_and_dtype(args, device))
    model.requires_grad_(False)
    if args.offload:
        distributed.offload(model, device)
    return model


def load_gold(gold: str | None, args: EvalArgs, tokenizer: Tokenizer, device: torch.device) -> Gold | None:
    """Load --gold: FILE.py:FUNCTION, or the directory or Hub id of a larger reward model."""
    if not gold:
        return None
    loaded = Gold(gold, tokenizer, *device_and_dtype(args, device), batch_size=args.batch_size)
    if loaded.model is not None and args.offload:
        distributed.offload(loaded.model, device)
    return loaded


def device_and_dtype(args: EvalArgs, device: torch.device) -> tuple[torch.device, torch.dtype]:
    """Return the device to load a model on, and the dtype of its matmul weights."""
    return torch.device("cpu") if args.offload else device, getattr(torch, args.dtype)
