"""Ranks of tokens under a base model against brute force in float64, and their display."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanorlhf.metrics.token_shift
from nanorlhf.metrics.token_shift import classify, shift_shares, text_pieces, to_terminal, token_ranks
from nanorlhf.tokenizer import token_bytes, train_tokenizer

EOS, PAD = 1, 36
QUERIES = [[5, 6, 7, 8], [9]]
RESPONSES = [[10, 11, EOS], [12, 13, 14, 15, EOS]]


def brute_force(model, query: list[int], response: list[int]) -> list[int]:
    """Rank tokens by sorting all probabilities of each prefix separately, in float64."""
    ranks = []
    for t, token in enumerate(response):
        logits = model.logits(model(torch.tensor([query + response[:t]]))[0, -1])
        order = sorted(range(len(logits)), key=lambda i: -logits[i].item())
        ranks.append(1 + order.index(token))
    return ranks


def padded(model) -> torch.Tensor:
    query = torch.tensor([QUERIES[0], [PAD] * 3 + QUERIES[1]])
    response = torch.tensor([RESPONSES[0] + [PAD] * 3, RESPONSES[1] + [PAD]])
    return token_ranks(model, query, response, PAD)


def test_ranks_are_those_of_a_brute_force_in_float64(tiny_gpt):
    model = tiny_gpt.double()
    ranks = padded(model).tolist()
    assert ranks[0] == brute_force(model, QUERIES[0], RESPONSES[0]) + [0] * 3
    assert ranks[1] == brute_force(model, QUERIES[1], RESPONSES[1]) + [0]
    assert len(set(sum(ranks, []))) > 4  # not all equal


def test_logits_are_float32_under_autocast(tiny_gpt, monkeypatch):
    """Logits stay float32 under autocast."""
    seen, plain = [], type(tiny_gpt).logits
    monkeypatch.setattr(type(tiny_gpt), "logits", lambda model, h: seen.append(plain(model, h)) or seen[-1])
    with torch.autocast("cpu", torch.bfloat16):
        padded(tiny_gpt)
    assert len(seen) == 1 and seen[0].dtype == torch.float32
    assert not torch.equal(seen[0], seen[0].bfloat16().float())


def test_the_chunk_size_changes_nothing(tiny_gpt, monkeypatch):
    whole = padded(tiny_gpt)
    for tokens in (1, 3):
        monkeypatch.setattr(nanorlhf.metrics.token_shift, "LOGITS", tokens * 37)
        assert torch.equal(padded(tiny_gpt), whole)


@torch.no_grad()
def test_the_greedy_response_has_rank_1_and_the_least_likely_token_the_last_rank(tiny_gpt):
    model, best, worst = tiny_gpt.forbid(PAD, 37), [], []
    for _ in range(5):
        best.append(model.logits(model(torch.tensor([QUERIES[0] + best]))[0, -1]).argmax().item())
    logits = model.logits(model(torch.tensor([QUERIES[0]]))[0, -1])
    worst.append(logits.masked_fill(logits == -torch.inf, torch.inf).argmin().item())
    query = torch.tensor([QUERIES[0]])
    assert token_ranks(model, query, torch.tensor([best]), PAD).tolist() == [[1] * 5]
    assert token_ranks(model, query, torch.tensor([worst]), PAD).tolist() == [[36]]  # [PAD] can't be sampled


def test_a_response_without_tokens_has_no_ranks(tiny_gpt):
    assert token_ranks(tiny_gpt, torch.tensor([[5]]), torch.tensor([[PAD, PAD]]), PAD).tolist() == [[0, 0]]


def test_1_is_unshifted_2_and_3_are_marginal_and_the_rest_is_shifted():
    assert [classify(rank) for rank in (1, 2, 3, 4, 99)] == ["unshifted", "marginal", "marginal", "shifted", "shifted"]
    assert shift_shares(torch.tensor([[1, 2, 3, 4], [1, 0, 0, 0]])) == {
        "unshifted": pytest.approx(0.4), "marginal": pytest.approx(0.4), "shifted": pytest.approx(0.2)
    }  # fmt: skip


def test_tokens_that_share_a_character_are_one_piece_with_the_largest_rank():
    pieces = {2: b" caf", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"!", EOS: b""}
    assert text_pieces([2, 3, 4, 5, EOS], [1, 2, 7, 3, 1], pieces) == [(" caf", 1), ("é", 7), ("!", 3), ("[EOS]", 1)]
    assert text_pieces([2, 3], [1, 2], pieces) == [(" caf", 1), ("\ufffd", 2)]  # cut within the character
    assert text_pieces([4, 5], [1, 2], pieces) == [("\ufffd", 1), ("!", 2)]


TOKENIZER = train_tokenizer(["so we met in Paris", "naïve café, 😀 and 我"], 300)


@given(st.text(max_size=20))
def test_the_pieces_of_a_text_join_to_the_text(text):
    ids = TOKENIZER.encode(text)
    shown = text_pieces(ids, [1] * len(ids), token_bytes(TOKENIZER))
    assert "".join(word for word, _ in shown) == text


def test_the_terminal_has_colours_or_brackets():
    pieces = [(" so", 1), (" we", 2), (" met", 4), ("\n", 1), (" ", 9)]
    assert to_terminal(pieces, color=False) == " so (we) [met]\\n "
    colored = to_terminal(pieces[:3], color=True)
    assert colored == "\x1b[34m so\x1b[0m\x1b[33m we\x1b[0m\x1b[31m met\x1b[0m"
    assert re.sub(r"\x1b\[\d+m", "", colored) == " so we met"
