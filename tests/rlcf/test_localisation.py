"""From a character of a program to the token that completes it, for any tokens."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanorlhf.rlcf.compilers import Diagnostic, first_error
from nanorlhf.rlcf.localisation import character_ends, error_token, response_text, truncate_at_error
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, token_bytes, train_tokenizer

PIECES = {0: b"", 1: b" s", 2: b"+=", 3: b" ", 4: b"\xf0\x9f", 5: b"\x98\x80", 6: b";", 7: b"\x80", 8: b"ab\xf0"}
BYTES = {i: bytes([i]) for i in range(256)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["int sum = 0; sum += B; // größer 😀 größer 😀"] * 20, 300)


def test_a_character_belongs_to_the_token_that_completes_it():
    ids = [1, 2, 3, 4, 5, 6]  # ' s', '+=', ' ', and an emoji of two tokens
    assert response_text(ids, PIECES) == " s+= 😀;"
    ends = character_ends(ids, PIECES)
    assert ends == [2, 4, 5, 5, 6, 7]
    assert [error_token(ends, offset) for offset in range(7)] == [0, 0, 1, 1, 2, 4, 5]


def test_figure_13_ends_on_the_operand():
    ids = [ord(c) for c in "sum += B;"]
    program = "class A { int f() { " + "sum += B;" + " } }"
    start = program.index("sum")
    error = Diagnostic("error", "compiler.err.cant.resolve.location", start + 7, start + 8, "cannot find symbol")
    index = error_token(character_ends(ids, BYTES), error.last - start)
    assert response_text(ids[: index + 1], BYTES) == "sum += B"


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")
def test_from_the_compiler_to_the_token(java_compiler, tokenizer):
    prefix = "class A {\n    static int f(int[] numbers) { // 😀\n"
    responses = [
        "\tint sum = 0; // größer 😀\n\tfor (int i = 0; i < 3; i++) sum += B;\n\treturn sum;\n}",  # figure 13
        "\tint sum = 0; // größer 😀\n\tfor (int i : numbers) sum += i;\n\treturn sum;\n}",
        "\tint größe = 0;\n\treturn numbers.length;\n}",
        "\treturn numbers.length;\n}\n}",  # an extra brace: the error is in the suffix
    ]
    pieces = token_bytes(tokenizer)
    ids = [tokenizer.encode(response) + [tokenizer.eos_id] for response in responses]
    checked = java_compiler.check([prefix + response + "\n}" for response in responses])
    kept = []
    for row, response, diagnostics in zip(ids, responses, checked, strict=True):
        error = first_error(diagnostics, len(prefix), len(prefix) + len(response))
        index = len(row) if error is None else error_token(character_ends(row, pieces), error.last - len(prefix))
        kept.append(row[: index + 1])
    assert response_text(kept[0], pieces) == responses[0][: responses[0].index("B") + 1]
    assert kept[1] == ids[1]
    assert response_text(kept[2], pieces) == "\tint größe"
    assert kept[3] == ids[3] and checked[3]


def test_an_offset_outside_the_text_blames_the_last_token():
    ends = character_ends([1, 2, 6, 0], PIECES)  # the last is EOS, without text
    assert ends == [2, 4, 5, 5]
    assert [error_token(ends, offset) for offset in (4, 5, 1000, -1, -1000)] == [2, 3, 3, 3, 3]


def test_broken_bytes_count_as_their_replacement_characters():
    # 80 can't begin a character; F0 9F is one broken character, as the next byte shows; so is F0 at the end
    ids = [7, 4, 6, 8]
    assert response_text(ids, PIECES) == "\ufffd\ufffd;ab\ufffd"
    assert character_ends(ids, PIECES) == [1, 2, 3, 6]


def test_an_unknown_id_is_skipped():
    assert response_text([1, 99, 6], PIECES) == " s;" and character_ends([1, 99, 6], PIECES) == [2, 2, 3]


@given(st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=30), st.integers(-5, 80))
def test_the_text_up_to_the_blamed_token_is_the_shortest_with_the_character(ids, offset):
    text, ends = response_text(ids, PIECES), character_ends(ids, PIECES)
    assert ends == sorted(ends) and ends[-1] == len(text)
    index = error_token(ends, offset)
    before, kept, whole = (b"".join(PIECES[i] for i in ids[:n]) for n in (index, index + 1, len(ids)))
    assert whole.startswith(kept)
    if not 0 <= offset < len(text):
        assert index == len(ids) - 1
        return
    # brute force: the number of bytes after which the text has that character in its final form
    needed = next(n for n in range(len(whole) + 1) if final_characters(whole, n) > offset)
    assert len(before) < needed <= len(kept)


def final_characters(whole: bytes, n: int) -> int:
    """Return how many characters of the text are complete in its first n bytes."""
    characters = whole.decode(errors="replace")
    halves = [(whole[:i].decode(errors="replace"), whole[i:].decode(errors="replace")) for i in range(n + 1)]
    return max(len(first) for first, second in halves if first + second == characters)


@given(ids=st.lists(st.integers(0, 300), max_size=40))
def test_the_text_of_ids_is_what_the_tokenizer_decodes(tokenizer, ids):
    assert response_text(ids, token_bytes(tokenizer)) == tokenizer.decode(ids)


@given(text=st.text(max_size=40))
def test_every_character_of_an_encoded_text_is_found(tokenizer, text):
    ids, pieces = tokenizer.encode(text), token_bytes(tokenizer)
    assert response_text(ids, pieces) == text
    ends = character_ends(ids, pieces)
    for offset in range(len(text)):
        index = error_token(ends, offset)
        assert b"".join(pieces[i] for i in ids[: index + 1]).startswith(text[: offset + 1].encode())
        assert len(b"".join(pieces[i] for i in ids[:index])) < len(text[: offset + 1].encode())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox_20b"])
def test_the_text_of_ids_is_what_published_tokenizers_decode(real_data, name):
    files = real_data / "tokenizers" / name
    tokenizer = load_tokenizer(next(files.glob("*tokenizer.json"), files))
    pieces = token_bytes(tokenizer)
    ids = torch.randint(tokenizer.vocab_size, (200, 50), generator=torch.Generator().manual_seed(0)).tolist()
    ids.append(tokenizer.encode("\n        for (int i = 0; i < n; i++) {\t// größer 😀\n                return;"))
    ids.append(list(range(tokenizer.vocab_size - 300, tokenizer.vocab_size)))  # NeoX adds runs of blanks there
    for row in ids:
        assert response_text(row, pieces) == tokenizer.decode(row)
        assert character_ends(row, pieces)[-1] == len(tokenizer.decode(row))


def test_a_response_is_cut_after_the_token_to_blame():
    response = torch.tensor([[5, 6, 7, 8, 1, 0], [5, 6, 7, 8, 9, 9], [5, 6, 7, 1, 0, 0]])
    cut = truncate_at_error(response, torch.tensor([2, 5, 6]), pad_id=0)
    assert cut.tolist() == [[5, 6, 7, 0, 0, 0], [5, 6, 7, 8, 9, 9], [5, 6, 7, 1, 0, 0]]


# prefix ...[  response  ]... suffix: [10, 20)
def error(start: int, end: int, kind: str = "error") -> Diagnostic:
    return Diagnostic(kind, "", start, end, "")


@pytest.mark.parametrize(
    ("diagnostics", "blamed"),
    [
        ([], None),
        ([error(12, 13, "warning")], None),
        ([error(12, 13), error(15, 16)], 0),
        ([error(12, 13, "unused"), error(15, 16)], 0),
        ([error(3, 4), error(12, 13)], 1),  # the first is in the prefix, which is correct: blame the other
        ([error(3, 4)], 0),
        ([error(25, 26)], 0),
        ([error(3, 4, "unused"), error(25, 26, "unused")], None),  # variables of the code around the response
        ([error(3, 4, "unused"), error(30, 30)], 1),
        ([error(8, 11)], 0),  # a word that begins in the prefix
        ([error(9, 10, "unused"), error(19, 21, "unused")], None),
        ([error(20, 20)], 0),  # a file that ends with the response
    ],
)
def test_a_response_fails_with_its_own_first_error(diagnostics, blamed):
    assert first_error(diagnostics, 10, 20) is (None if blamed is None else diagnostics[blamed])
