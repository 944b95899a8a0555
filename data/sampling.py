"""Settings and helpers shared by data.best_of and data.self_rank, which sample answers from a policy."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import PositiveInt, Seed
from nanorlhf.dataset import filled, is_chat, iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.tokenizer import Tokenizer, check_vocabulary

SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class SamplingArgs:
    tokenizer: str | None = None
    """directory, file or Hub id (None: the policy's)"""
    num_queries: PositiveInt | None = None
    """queries per split, from the top of the file (None: all)"""
    batch_size: PositiveInt = 64
    """answers sampled at once; affects memory, not the result"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    seed: Seed = 1
    """seed of the samples and all other random choices"""


def read_queries(path: Path, limit: int | None) -> dict[str, bool]:
    """Return the first `limit` distinct queries of a file, in its order -> whether a chat template wrote them."""
    queries: dict[str, bool] = {}
    for where, row in iter_jsonl(path):
        query = filled(row, "query", where)
        queries[query] = is_chat(row, where)
    return dict(islice(queries.items(), limit))


def load_policy(path: str, tokenizer: Tokenizer, device: torch.device) -> GPT:
    policy = load_gpt(path, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    check_vocabulary(tokenizer, policy.config.vocab_size, path)
    return policy


def longest_query(
    queries: dict[str, dict[str, bool]], tokenizer: Tokenizer, response_length: int, policy: GPT, path: str
) -> int:
    """Return the length of the longest query. Raises InputError if it and a response exceed the policy's context."""
    longest = max(
        len(tokenizer.encode(*query)) for split_queries in queries.values() for query in split_queries.items()
    )
    if longest + response_length > policy.config.n_ctx:
        raise InputError(
            f"the longest query has {longest} tokens: with --response-length {response_length} it exceeds the "
            f"{policy.config.n_ctx} positions of {path}."
        )
    return longest
