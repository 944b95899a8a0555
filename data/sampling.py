"""What the modules share that have a policy answer the queries of sft.{train,validation}.jsonl."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nanorlhf.checkpoint import load_gpt
from nanorlhf.dataset import field, is_chat, iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.tokenizer import Tokenizer, check_vocabulary

SPLITS = ("train", "validation")


def read_queries(path: Path, most: int | None) -> dict[str, bool]:
    """The distinct queries of a file, in its order; each with whether a chat template has written it."""
    queries: dict[str, bool] = {}
    for where, row in iter_jsonl(path):
        query = field(row, "query", str, where)
        if not query.strip():
            raise InputError(f"{where}: the field 'query' is empty: delete the line or fill it.")
        queries[query] = is_chat(row, where)
    return dict(islice(queries.items(), most))


def load_policy(args: Any, tokenizer: Tokenizer, queries: dict[str, bool], device: torch.device) -> GPT:
    policy = load_gpt(args.policy, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    check_vocabulary(tokenizer, policy.config.vocab_size, args.policy)
    longest = max(len(tokenizer.encode(query, chat)) for query, chat in queries.items())
    if longest + args.response_length > policy.config.n_ctx:
        raise InputError(
            f"the longest query of --data {args.data} has {longest} tokens: with --response-length "
            f"{args.response_length} that is more than the {policy.config.n_ctx} positions of {args.policy}: lower "
            "--response-length, or shorten the queries."
        )
    return policy
