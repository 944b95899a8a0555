"""From an error's place in a program to the response token that is blamed for it. [RLCF alg 1, figure 13]

The policy wrote tokens, the compiler read characters. A byte-level token is a run of bytes: it may hold a part of a
character only, and a character may take several tokens. So both are laid over the bytes of the *sampled* ids; the text
is never tokenised again, since that gives other tokens. With `pieces = token_bytes(tokenizer)`, a row of the batch is

    text = response_text(ids, pieces)
    error = first_error(compiler.check([prefix + text + suffix])[0], len(prefix), len(prefix) + len(text))
    index = len(ids) if error is None else error_token(character_ends(ids, pieces), error.last - len(prefix))

where ids are those up to EOS, without [PAD], and `truncate_at_error` then cuts the batch behind each index.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def response_text(ids: Iterable[int], pieces: Mapping[int, bytes]) -> str:
    """What the ids say; bytes that are no UTF-8 become U+FFFD. An id that the tokenizer doesn't know says nothing."""
    return b"".join(pieces.get(i, b"") for i in ids).decode("utf-8", errors="replace")


def character_ends(ids: Iterable[int], pieces: Mapping[int, bytes]) -> list[int]:
    """For each token, how many characters of the response's text are complete with it; the last is the text's length.

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
        except UnicodeDecodeError as error:  # U+FFFD stands for as many bytes as Python says
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
    """The index of the token that completes the character at `offset` of the response's text (`character_ends`).

    What lies outside of the text is the last token's: behind it, where something is missing, and before it, in a text
    that is right and that the response as a whole has made wrong (`first_error`).
    """
    last = len(ends) - 1
    return min(bisect_right(ends, offset), last) if offset >= 0 else last


def truncate_at_error(response: Tensor, error_index: Tensor, pad_id: int) -> Tensor:
    """(B, T) -> (B, T): [PAD] behind the token at fault, which stays; error_index (B,), T where nothing is cut.

    response                a  b  c  d  E  #        error_index 2: the score, -1, is given at c
    truncate_at_error       a  b  c  #  #  #
    """
    index = torch.arange(response.size(1), device=response.device)  # (T,)
    return response.masked_fill(index > error_index[:, None], pad_id)
