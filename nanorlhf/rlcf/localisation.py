"""Map an error's position in a program to the response token to blame for it. [RLCF alg 1, figure 13]

The policy writes tokens, the compiler reads characters. A byte-level token is a run of bytes: it may contain only part
of a character, and a character may take several tokens. So both are mapped to the bytes of the *sampled* ids before
EOS. The text is never tokenised again, which could give different tokens. `pieces` is token_bytes(tokenizer).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def response_text(ids: Iterable[int], pieces: Mapping[int, bytes]) -> str:
    """Decode the ids; bytes that aren't UTF-8 become U+FFFD, ids unknown to the tokenizer are skipped."""
    return b"".join(pieces.get(i, b"") for i in ids).decode("utf-8", errors="replace")


def character_ends(ids: Iterable[int], pieces: Mapping[int, bytes]) -> list[int]:
    """Return how many characters of the text are complete after each token; the last count is the text's length.

    ids     ' s'  '+='  ' '  F0 9F  98 80  ';'      the emoji takes two tokens
    ends      2     4    5     5      6     7
    """
    spans = [pieces.get(i, b"") for i in ids]
    rest = b"".join(spans)
    ends_of_characters: list[int] = []  # in bytes
    offset = 0
    while rest:
        try:
            valid, broken = rest.decode(), b""
        except UnicodeDecodeError as error:  # Python decides how many bytes one U+FFFD stands for
            valid, broken = rest[: error.start].decode(), rest[error.start : error.end]
        for character in valid:
            offset += len(character.encode())
            ends_of_characters.append(offset)
        if broken:
            offset += len(broken)
            ends_of_characters.append(offset)
        rest = rest[len(valid.encode()) + len(broken) :]
    ends, offset = [], 0
    for span in spans:
        offset += len(span)
        ends.append(bisect_right(ends_of_characters, offset))
    return ends


def error_token(ends: list[int], offset: int) -> int:
    """Return the index of the token that completes the character at `offset` in the response's text.

    ends = character_ends(ids, pieces). An offset outside the text blames the last token: if the offset is after the
    text, something is missing; if before, the response as a whole broke correct code (`first_error`).
    """
    last = len(ends) - 1
    return min(bisect_right(ends, offset), last) if offset >= 0 else last


def truncate_at_error(response: Tensor, error_index: Tensor, pad_id: int) -> Tensor:
    """Replace the tokens after the one to blame with [PAD], (B, T) -> (B, T); error_index (B,), T for no error.

    response                a  b  c  d  E  #        error_index 2: the score of -1 goes to c
    truncate_at_error       a  b  c  #  #  #
    """
    index = torch.arange(response.size(1), device=response.device)  # (T,)
    return response.masked_fill(index > error_index[:, None], pad_id)
