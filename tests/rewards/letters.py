"""Helpers for the tests of rewards: a tokenizer of letters, and a rollout of two responses."""

import torch

from nanorlhf.batch import Batch

PAD, EOS = 99, 98
RECORDS = [
    {"query": "a", "response": "a", "meta": {"answer": "4", "level": 1}},
    {"query": "ab", "response": "b", "tests": "assert x", "meta": {"answer": None}},
]


class Letters:
    """1 is "a", 2 is "b", ...; EOS and [PAD] have no text."""

    pad_id, eos_id = PAD, EOS

    def decode(self, ids):
        return "".join(chr(96 + i) for i in ids if i not in (PAD, EOS))


def make_batch(records=RECORDS):
    """Return a batch with the responses "abc" with EOS and "a" without."""
    query, response = torch.tensor([[PAD, 1], [1, 2]]), torch.tensor([[1, 2, 3, EOS], [1, PAD, PAD, PAD]])
    return Batch.of(records, query, response, torch.zeros(2, 4), EOS, PAD, "last_token")
