"""Token distribution shift: the rank of each response token under the model before alignment. (N+ Table 8)

A token's rank is 1 plus the number of tokens that are more likely under the base model, with the same query and the
response so far as context. Rank 1 is unshifted: greedy decoding of the base model gives the same token. Ranks 2 and 3
are marginal, the rest shifted.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches

KINDS = ("unshifted", "marginal", "shifted")
COLORS = {"unshifted": "34", "marginal": "33", "shifted": "31"}  # ANSI codes of blue, yellow, red
MARKS = {"unshifted": "{}", "marginal": "({})", "shifted": "[{}]"}  # for terminals without colours
LOGITS = 2**24  # computed at once: 64 MB in float32


def classify(rank: int) -> str:
    return KINDS[0 if rank == 1 else 1 if rank <= 3 else 2]


@torch.no_grad()
def token_ranks(base: GPT, query: Tensor, response: Tensor, pad_id: int) -> Tensor:
    """Return the rank of each response token under `base`, from 1; 0 at [PAD].

    query (B, Q) left-padded, response (B, T) right-padded -> (B, T). Equally likely tokens don't raise a rank. Logits
    are computed for real tokens only, LOGITS at a time.
    """
    query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
    hidden = base(query_response, query_response != pad_id, last=response.size(1) + 1)[:, :-1]  # (B, T, C)
    counts = response != pad_id  # (B, T)
    hidden = hidden[counts].to(base.lm_head.weight.dtype)  # (N, C)
    size, ranks = max(1, LOGITS // base.config.vocab_size), [response.new_zeros(0)]
    with torch.autocast(hidden.device.type, enabled=False):  # in bfloat16 many logits tie
        for h, ids in zip(micro_batches(hidden, size), micro_batches(response[counts], size), strict=True):
            logits = base.logits(h)  # (n, V)
            ranks.append(1 + (logits > logits.gather(1, ids[:, None])).sum(1))
    return torch.zeros_like(response).masked_scatter(counts, torch.cat(ranks))


def shift_shares(ranks: Tensor) -> dict[str, float]:
    """Return the share of tokens of each kind; `ranks` from `token_ranks`, at least one of them above 0."""
    counted = ranks[ranks > 0]
    kinds = {"unshifted": counted == 1, "marginal": (counted == 2) | (counted == 3), "shifted": counted > 3}
    return {name: is_one.float().mean().item() for name, is_one in kinds.items()}


def text_pieces(ids: Iterable[int], values: Iterable[int], pieces: Mapping[int, bytes]) -> list[tuple[str, int]]:
    """Return tokens as text with their values; tokens that share a character become one piece with the largest value.

    `pieces` come from `token_bytes`; a token without one (EOS) is shown as [EOS].
    """
    result: list[tuple[str, int]] = []
    pending, largest = b"", 0
    for i, value in zip(ids, values, strict=True):
        pending, largest = pending + (pieces.get(i) or b"[EOS]"), max(largest, value)
        try:
            result.append((pending.decode(), largest))
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.end == len(pending):
                continue  # the rest of the character is in the next token
            result.append((pending.decode(errors="replace"), largest))
        pending, largest = b"", 0
    return result + ([(pending.decode(errors="replace"), largest)] if pending else [])


def to_terminal(pieces: list[tuple[str, int]], color: bool) -> str:
    """Format pieces for the terminal, coloured by ANSI codes or, without colour, as (marginal) and [shifted]."""
    parts = []
    for text, rank in pieces:
        kind, word = classify(rank), text.replace("\n", "\\n")
        space, body = word[: -len(word.lstrip()) or None], word.lstrip()
        if color:
            parts.append(f"\x1b[{COLORS[kind]}m{word}\x1b[0m")
        else:
            parts.append(space + MARKS[kind].format(body) if body else word)
    return "".join(parts)
