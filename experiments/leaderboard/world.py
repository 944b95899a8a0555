"""A world as an entry sees it: data, the initial policy, and a reward model that another process runs and counts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nanorlhf.checkpoint import load_gpt
from nanorlhf.dataset import Comparison, Demonstration, Rows, load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

MAX_QUERY, MAX_RESPONSE = 80, 24  # tokens; a response's include EOS


@dataclass(frozen=True, kw_only=True)
class World:
    """The argument of an entry's `train`. Its directory is a copy that the entry may change."""

    directory: Path
    seed: int
    """for the entry's own random numbers"""
    budget: int
    """responses that the reward model scores"""
    ask: Callable[[bytes], bytes]
    """send a request to the referee and return its reply"""

    @property
    def data(self) -> Path:
        """Directory of sft.train.jsonl and comparisons.train.jsonl, for --data of the training scripts.

        The validation files repeat the first rows, because the scripts need such files.
        """
        return self.directory / "data"

    @property
    def sft(self) -> Path:
        """Checkpoint of the initial policy."""
        return self.directory / "sft"

    @property
    def reward(self) -> str:
        """The reward model, for --reward of the training scripts."""
        return f"{Path(__file__).parent / 'child.py'}:score_rollout"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(str(self.sft))

    @cached_property
    def demonstrations(self) -> Rows[Demonstration]:
        """Queries and the responses that the initial policy imitates."""
        return load_demonstrations(self.data / "sft.train.jsonl", self.tokenizer, MAX_QUERY, MAX_RESPONSE)

    @cached_property
    def comparisons(self) -> Rows[Comparison]:
        path = self.data / "comparisons.train.jsonl"
        return load_comparisons(path, self.tokenizer, MAX_QUERY, MAX_RESPONSE)

    def load(self, checkpoint: Path) -> GPT:
        """Load a policy, such as `sft` or the output of a training script."""
        return load_gpt(checkpoint).forbid(self.tokenizer.pad_id, self.tokenizer.vocab_size)

    def score(self, queries: Sequence[str], responses: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward model's score of each response, given as ids with EOS and without [PAD].

        Raises InputError if the referee refuses: the budget is used up, or a response isn't one.
        """
        request = {"queries": list(queries), "responses": [list(ids) for ids in responses]}
        reply = json.loads(self.ask(json.dumps(request).encode()))
        if "refused" in reply:
            raise InputError(reply["refused"])
        return reply["scores"]


current: World | None = None
"""the world of this process, for `world.reward`"""
