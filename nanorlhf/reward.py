"""One score per response: by reward models, by a user's function, and the gold score.

A `Reward` scores the responses of PPO and GRPO: `RewardModel` or `Rule`.
"""

import importlib.util
import math
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_scalar
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.padding import first_true_index, join_pairs, left_pad, micro_batches, right_pad
from nanorlhf.t5 import T5Config
from nanorlhf.tokenizer import Tokenizer, check_vocabulary


def end_index(query_response: Tensor, query_length: Tensor | int, pad_id: int) -> Tensor:
    """(B, L) -> (B,): each response's last token, the one before the first [PAD] after the query.

    query_length is where responses begin: Q for left-padded queries, one number per row for
    right-padded texts. [PAD] is searched from there on, as a left-padded query begins with one. A
    row without any ends at L - 1.

        query_response   # # q q a b E #      Q = 4: the first [PAD] from 4 on is at 7, the end is 6
    """
    index = torch.arange(query_response.size(1), device=query_response.device)  # (L,)
    if isinstance(query_length, Tensor):
        query_length = query_length[:, None]
    # [N+ 12] the first [PAD] minus one; where there is none, first_true_index gives L
    return first_true_index((query_response == pad_id) & (index >= query_length)) - 1


def end_scores(
    model: ScalarModel, query_response: Tensor, query_length: Tensor | int, pad_id: int
) -> Tensor:
    """The model's score at the end of each response, (B, L) -> (B,)."""
    first = int(torch.as_tensor(query_length).min()) - 1  # an empty response ends with its query
    last = query_response.size(1) - first
    real = query_response != pad_id  # (B, L)
    scores = model(query_response, real, last=last, query_length=query_length)  # (B, L - first)
    end = end_index(query_response, query_length, pad_id) - first
    # [N+ 13] the scores before the end are mostly negative, and unused
    return scores.gather(1, end[:, None]).squeeze(1)


def pair_scores(model: ScalarModel, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor]:
    """Scores of chosen and rejected, (B,) each, in one pass; a GPT reads their query once."""
    if isinstance(model.config, T5Config):
        texts = [Demonstration(row.query, row.chosen, row.record) for row in rows]
        texts += [Demonstration(row.query, row.rejected, row.record) for row in rows]
        scores = response_scores(model, texts, pad_id, "right")  # (2B,)
    else:
        ids, branch, row, _, end, first = join_pairs(rows, pad_id, model.score.weight.device)
        last = ids.size(1) - first
        per_token = model(ids, ids != pad_id, last=last, branch=branch)  # (B, L - first)
        scores = per_token[row, end - first]  # (2B,)
    chosen, rejected = scores.chunk(2)
    return chosen, rejected


def response_scores(
    model: ScalarModel, rows: list[Demonstration], pad_id: int, side: Literal["left", "right"]
) -> Tensor:
    """Scores (B,), padded on the left of the query as in PPO or on the right of the text."""
    device = model.score.weight.device
    if side == "left":
        query = left_pad([row.query for row in rows], pad_id).to(device)  # (B, Q)
        response = right_pad([row.response for row in rows], pad_id).to(device)  # (B, T)
        return end_scores(model, torch.cat((query, response), dim=1), query.size(1), pad_id)
    query_length = torch.tensor([len(row.query) for row in rows], device=device)
    query_response = right_pad([row.query + row.response for row in rows], pad_id).to(device)
    return end_scores(model, query_response, query_length, pad_id)


Ensemble = Literal["mean", "min", "uncertainty"]
UNCERTAINTY_COEF = 0.1
"""lambda of --ensemble uncertainty, per score unit"""


def reward_model_paths(reward_model: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The paths in a setting: none, one, or the several of an ensemble."""
    return (reward_model,) if isinstance(reward_model, str) else tuple(reward_model or ())


def ensemble_scores(scores: Tensor, ensemble: Ensemble) -> Tensor:
    """The members' scores (M, B) -> (B,). Source: Coste et al. 2023, section 3.

    mean          mean_m r_m
    min           min_m r_m                        the paper's worst case
    uncertainty   mean_m r_m - lambda var_m r_m    lambda = UNCERTAINTY_COEF, population variance
    """
    if ensemble == "min":
        return scores.amin(0)
    if ensemble == "uncertainty":
        return scores.mean(0) - UNCERTAINTY_COEF * scores.var(0, correction=0)
    return scores.mean(0)


class Reward(Protocol):
    """What scores a policy's responses; `RewardModel` and `Rule` below are two."""

    name: str  # for messages
    models: list[ScalarModel]  # it reads responses with these; often none

    def score(self, batch: Batch) -> Tensor:
        """The responses of a rollout, with the records of their rows -> scores (B,)."""

    def metrics(self) -> dict[str, float]:
        """What to log about the last rollout."""


class RewardModel:
    """[N+ 12] The scalar models of stage 2 read each response up to its end; several: an ensemble.

    They read `size` responses at once.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        tokenizer: Tokenizer,
        device: torch.device,
        size: int,
        ensemble: Ensemble = "mean",
    ):
        self.name = f"--reward-model {' '.join(paths)}"
        self.models = [load_scalar(path, device).requires_grad_(False) for path in paths]
        self.pad_id = tokenizer.pad_id
        self.size = size
        self.ensemble = ensemble
        self.disagreement = 0.0

    def score(self, batch: Batch) -> Tensor:
        members = []
        for model in self.models:
            with distributed.on_device(model):
                members.append(batch.read(partial(self._score, model), self.size))
        scores = torch.stack(members)  # (M, B)
        if len(scores) == 1:
            return scores[0]
        self.disagreement = scores.std(0, correction=0).mean().item()
        return ensemble_scores(scores, self.ensemble)

    def _score(self, model: ScalarModel, batch: Batch) -> Tensor:
        return end_scores(model, batch.query_response, batch.query.size(1), self.pad_id)

    def metrics(self) -> dict[str, float]:
        return {"reward/disagreement": self.disagreement} if len(self.models) > 1 else {}


class Rule:
    """A user's function of two lists of texts, queries and responses: `FILE.py:FUNCTION`.

    It returns one number per response, of `size` responses at once. The texts are decoded ids
    without [PAD] and EOS; the query keeps its template.
    """

    def __init__(self, path: str, tokenizer: Tokenizer, size: int):
        self.name = f"--reward {path}"
        self.models: list[ScalarModel] = []
        self.function = load_function("--reward", path)
        self.tokenizer = tokenizer
        self.size = size

    def score(self, batch: Batch) -> Tensor:
        return batch.read(self._score, self.size)

    def _score(self, batch: Batch) -> Tensor:
        queries = [self.tokenizer.decode(ids) for ids in batch.query.tolist()]
        responses = [self.tokenizer.decode(ids) for ids in batch.response.tolist()]
        numbers = self.function(queries, responses)
        try:
            scores = torch.as_tensor(numbers, dtype=torch.float32, device=batch.response.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{self.name} must return one number per response, not {numbers!r:.80}."
            ) from error
        if scores.shape != (len(batch),):
            shape = tuple(scores.shape)
            raise InputError(f"{self.name} returned shape {shape} for {len(batch)} responses.")
        return scores

    def metrics(self) -> dict[str, float]:
        return {}


def load_function(flag: str, where: str) -> Callable:
    """The function that `FILE.py:FUNCTION` names; raises InputError, naming the flag."""
    path, _, name = where.rpartition(":")
    if not name or not path.endswith(".py") or not Path(path).is_file():
        raise InputError(f"{flag} {where}: write it as FILE.py:FUNCTION, with a file that exists.")
    spec = importlib.util.spec_from_file_location("user_function", path)
    assert spec is not None and spec.loader is not None  # the file exists and ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's code: whatever it raises
        lines = [
            step.lineno
            for step in traceback.extract_tb(error.__traceback__)
            if step.filename == path
        ]
        line = f":{lines[-1]}" if lines else ""
        raise InputError(
            f"{flag} {where}: {path}{line} raises {type(error).__name__}: {error!s:.200}."
        ) from error
    if not callable(getattr(module, name, None)):
        raise InputError(f"{flag} {where}: {path} defines no function {name}.")
    return getattr(module, name)


class Gold:
    """The true score of a response, which training never sees.

    path   FILE.py:FUNCTION, function(query, response) -> number, such as the labeller of an
           embedded world; or the checkpoint directory or Hub id of a larger reward model, which
           shows over-optimisation on real data. That model must share `tokenizer`; it scores
           `batch_size` responses per forward pass

    Raises InputError for neither, and when the function returns anything but a finite number.
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

    def of_texts(self, queries: list[str], responses: list[str]) -> list[float]:
        """The scores that a function gives texts."""
        return [self._number(self.function(*pair)) for pair in zip(queries, responses, strict=True)]

    def of_rows(
        self,
        data: Sequence[Demonstration | Comparison],
        name: Literal["response", "chosen", "rejected"] = "response",
    ) -> list[float]:
        """The scores of the data's own responses, such as references; a model reads their ids."""
        if self.model is None:
            return self.of_texts(
                [row.record["query"] for row in data], [row.record[name] for row in data]
            )
        device, pad_id = self.model.score.weight.device, self.tokenizer.pad_id
        scores = []
        with distributed.on_device(self.model):
            for batch in micro_batches(data, self.batch_size):
                query = left_pad([row.query for row in batch], pad_id).to(device)  # (b, Q)
                response = right_pad([getattr(row, name) for row in batch], pad_id).to(device)
                scores += self.of_ids([], query, response)
        return scores

    def of_ids(self, queries: list[str], query: Tensor, response: Tensor) -> list[float]:
        """Scores of responses: a function reads texts, a model query (B, Q), response (B, T)."""
        if self.model is None:
            return self.of_texts(queries, [self.tokenizer.decode(ids) for ids in response.tolist()])
        ids = torch.cat((query, response), dim=1)  # (B, Q + T)
        if ids.size(1) > self.model.config.n_ctx:
            raise InputError(
                f"the longest query and response make {ids.size(1)} tokens, more than the "
                f"{self.model.config.n_ctx} positions of --gold {self.path}."
            )
        pad_id, scores = self.tokenizer.pad_id, []
        with torch.no_grad(), distributed.on_device(self.model):
            for rows in micro_batches(ids, self.batch_size):
                scores += end_scores(self.model, rows, query.size(1), pad_id).tolist()
        return scores

    def score(self, batch: Batch) -> Tensor:
        """The scores (B,) of a rollout, in float64."""
        with distributed.on_device(self.model):
            return batch.read(self._score, self.batch_size)

    def _score(self, batch: Batch) -> Tensor:
        queries = [record["query"] for record in batch.records]
        scores = self.of_ids(queries, batch.query, batch.response)
        return torch.tensor(scores, dtype=torch.float64, device=batch.query.device)

    def _number(self, value: object) -> float:
        try:
            number = float(value)  # type: ignore[arg-type]  # whatever the user's function returned
        except (TypeError, ValueError) as error:
            raise InputError(
                f"--gold {self.path} must give a number, not {value!r:.80}."
            ) from error
        if not math.isfinite(number):
            raise InputError(f"--gold {self.path} gave {number}: it must give a finite number.")
        return number


def is_function(where: str) -> bool:
    """Whether a setting has the form FILE.py:FUNCTION, or was meant to."""
    return ".py:" in where or where.endswith(".py")
