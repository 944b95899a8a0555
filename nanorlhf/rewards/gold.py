"""The gold score of --gold: the ground truth, logged but never used in training."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kernels.processor import widest_dtype
from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_scalar
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.padding import left_pad, micro_batches, right_pad
from nanorlhf.reward_model import end_scores
from nanorlhf.rewards.function import load_function, score_response
from nanorlhf.rewards.weighted_sum import is_function
from nanorlhf.tokenizer import Tokenizer, check_vocabulary


class Gold:
    """The true score of a response, never used in training.

    path   FILE.py:FUNCTION, function(query, response) -> number, such as the labeller of an
           embedded world; or the checkpoint directory or Hub id of a larger reward model, which
           shows over-optimisation on real data. That model must share `tokenizer`; it scores
           `batch_size` responses per forward pass

    Raises InputError for other paths, and if the function returns anything but a finite number.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        batch_size: int = 64,
    ):
        self.path = path
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.model: ScalarModel | None = None
        if is_function(path):
            self.function = load_function("--gold", path)
        else:
            self.model = load_scalar(path, device, dtype).requires_grad_(False)
            check_vocabulary(tokenizer, self.model.config.vocab_size, path)

    def score_texts(self, queries: list[str], responses: list[str]) -> list[float]:
        """Score texts with the function."""
        pairs = zip(queries, responses, strict=True)
        return [score_response("--gold", self.path, self.function, *pair) for pair in pairs]

    def score_rows(
        self,
        data: Sequence[Demonstration | Comparison],
        name: Literal["response", "chosen", "rejected"] = "response",
    ) -> list[float]:
        """Score responses in the data, such as references; a model reads their ids."""
        if self.model is None:
            return self.score_texts([row.record["query"] for row in data], [row.record[name] for row in data])
        device, pad_id = self.model.score.weight.device, self.tokenizer.pad_id
        scores = []
        with distributed.on_device(self.model):
            for batch in micro_batches(data, self.batch_size):
                query = left_pad([row.query for row in batch], pad_id).to(device)  # (b, Q)
                response = right_pad([getattr(row, name) for row in batch], pad_id).to(device)
                scores += self.score_ids([], query, response)
        return scores

    def score_ids(self, queries: list[str], query: Tensor, response: Tensor) -> list[float]:
        """Score responses: a function reads texts, a model reads query (B, Q) and response (B, T)."""
        if self.model is None:
            return self.score_texts(queries, [self.tokenizer.decode(ids) for ids in response.tolist()])
        ids = torch.cat((query, response), dim=1)  # (B, Q + T)
        if ids.size(1) > self.model.config.n_ctx:
            raise InputError(
                f"the longest query and response have {ids.size(1)} tokens, more than the "
                f"{self.model.config.n_ctx} positions of --gold {self.path}."
            )
        pad_id, scores = self.tokenizer.pad_id, []
        with torch.no_grad(), distributed.on_device(self.model):
            for rows in micro_batches(ids, self.batch_size):
                scores += end_scores(self.model, rows, query.size(1), pad_id).tolist()
        return scores

    def score(self, batch: Batch) -> Tensor:
        """Return the scores (B,) of a rollout, in float64 (float32 on mps)."""
        with distributed.on_device(self.model):
            return batch.read(self._score, self.batch_size)

    def _score(self, batch: Batch) -> Tensor:
        queries = [record["query"] for record in batch.records]
        scores = self.score_ids(queries, batch.query, batch.response)
        device = batch.query.device
        return torch.tensor(scores, dtype=widest_dtype(device), device=device)
