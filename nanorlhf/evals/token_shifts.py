"""Token distribution shift: how a base model ranks each token of the policies' responses."""

import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from nanorlhf.dataset import Demonstration
from nanorlhf.metrics.token_shift import shift_shares, text_pieces, to_terminal, token_ranks
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, micro_batches
from nanorlhf.tokenizer import Tokenizer, token_bytes

Pieces = list[tuple[str, int]]  # a token's text and its rank


def token_shifts(
    base: GPT, rows: list[Demonstration], responses: dict[str, Tensor], tokenizer: Tokenizer, batch_size: int
) -> tuple[list[dict[str, Pieces]], dict[str, dict[str, float]]]:
    """Rank the tokens of each response under `base`; responses: name -> (B, T).

    Returns, for each query, name -> pieces of the response; and name -> the share of each kind of token.
    """
    query = left_pad([row.query for row in rows], tokenizer.pad_id).to(base.lm_head.weight.device)  # (B, Q)
    spellings, shares = token_bytes(tokenizer), {}
    shifts: list[dict[str, Pieces]] = [{} for _ in rows]
    for name, response in responses.items():
        batches = zip(micro_batches(query, batch_size), micro_batches(response, batch_size), strict=True)
        ranks = torch.cat([token_ranks(base, q, r, tokenizer.pad_id) for q, r in batches])  # (B, T)
        shares[name] = shift_shares(ranks)
        for shift, ids, row_ranks in zip(shifts, response.tolist(), ranks.tolist(), strict=True):
            n = sum(rank > 0 for rank in row_ranks)
            shift[name] = text_pieces(ids[:n], row_ranks[:n], spellings)
    return shifts, shares


def shift_lines(base_name: str, shift: dict[str, Pieces]) -> Iterator[str]:
    """Yield the responses to one query as lines for the terminal, tokens coloured by rank."""
    yield f"\nresponses to the first query, tokens marked by rank under {base_name} (2 or 3; 4 or more):"
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = max(map(len, shift))
    for name, pieces in shift.items():
        yield f"{name:<{width}} {to_terminal(pieces, color)}"
