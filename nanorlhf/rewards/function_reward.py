"""Rewards computed by a user's function of texts: `--reward FILE.py:FUNCTION`."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.dataset import Demonstration, response_ids
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import Scores
from nanorlhf.rewards.function import Responses, RewardFunction, Value, kept_alive
from nanorlhf.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanorlhf.rewards.workers import Workers


class FunctionReward:
    """A reward function, called with decoded ids without [PAD] and EOS; queries keep their template.

    records  rows of the data, with the fields that the function takes as parameters
    size     responses per call; with workers, the rollout is split among them
    workers  number of processes that call it; 0: this process, unless the file sets a TIME_LIMIT
    """

    workers: "Workers | None"

    def __init__(self, where: str, tokenizer: Tokenizer, size: int, records: Iterable[dict] = (), workers: int = 0):
        self.function = RewardFunction(where, records)
        self.name = self.function.name
        self.label = where.rpartition(":")[2]
        self.models: list[GPT | ScalarModel] = []
        self.tokenizer = tokenizer
        self.size = size
        self.workers = None
        if workers or self.function.time_limit is not None:
            from nanorlhf.rewards.workers import Workers

            self.workers = Workers(self.function, workers or 1, show=distributed.rank() == 0)
        self.timeout_rate = 0.0

    def call(self, responses: Responses) -> list[Value]:
        if self.workers is not None:
            return self.workers(responses)
        with kept_alive():
            return self.function(responses)

    def try_out(self, rows: Sequence[Demonstration]) -> bool:
        """Call the function on the references of a few rows; return True if it gives rewards per token.

        For rows without a reference, the query is used: the function must accept any text.
        """
        records = [row.record for row in rows]
        queries = [record["query"] for record in records]
        responses = [record.get("response") or record["query"] for record in records]
        texts = zip(queries, responses, records, strict=True)
        ids = [response_ids(query, text, self.tokenizer, record.get("chat", False)) for query, text, record in texts]
        return any(isinstance(value, list) for value in self.call(Responses(queries, responses, ids, records)))

    def score(self, batch: Batch) -> Scores:
        if self.workers is None:
            return Scores(*batch.read(self._score, self.size))
        scores = Scores(*batch.read(self._score, len(batch)))
        timeouts = torch.tensor([self.workers.num_timeouts], device=batch.response.device)
        self.timeout_rate = distributed.all_sum(timeouts).item() / len(batch)
        return scores

    def _score(self, batch: Batch) -> Scores:
        queries = [self.tokenizer.decode(ids) for ids in batch.query.tolist()]
        responses = [self.tokenizer.decode(ids) for ids in batch.response.tolist()]
        ids = [row[mask].tolist() for row, mask in zip(batch.response, batch.actions, strict=True)]
        return as_scores(self.call(Responses(queries, responses, ids, batch.records)), batch.actions)

    def metrics(self) -> dict[str, float]:
        if self.function.time_limit is None:
            return {}
        return {f"reward/{self.label}_timeouts": self.timeout_rate}


def as_scores(values: list[Value], actions: Tensor) -> Scores:
    """Convert a value per response to tensors; actions (B, T)."""
    scores = [value if isinstance(value, float) else 0.0 for value in values]
    lengths = actions.sum(1).tolist()
    per_token = [v if isinstance(v, list) else [0.0] * n for v, n in zip(values, lengths, strict=True)]
    device = actions.device
    tokens = torch.tensor([reward for row in per_token for reward in row], device=device)  # (N,)
    token_rewards = torch.zeros_like(actions, dtype=torch.float32).masked_scatter(actions, tokens)
    applies = torch.tensor([value is not None for value in values], device=device)
    return Scores(torch.tensor(scores, device=device), token_rewards, applies)
