"""One score per response: the output of a reward model, or an ensemble, at the end of a text."""

from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_scalar
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.model import ScalarModel
from nanorlhf.padding import first_true_index, left_pad, right_pad
from nanorlhf.shared_queries import Groups, pairs
from nanorlhf.tokenizer import Tokenizer


def end_index(query_response: Tensor, query_length: Tensor | int, pad_id: int) -> Tensor:
    """Find each response's last token, before the first [PAD] after the query: (B, L) -> (B,).

    query_length is where responses begin: Q for left-padded queries, one number per row for
    right-padded texts. The search for [PAD] starts there, because a left-padded query begins with
    [PAD]. A row without [PAD] ends at L - 1.

        query_response   # # q q a b E #      Q = 4: the first [PAD] from 4 on is at 7, the end is 6
    """
    index = torch.arange(query_response.size(1), device=query_response.device)  # (L,)
    if isinstance(query_length, Tensor):
        query_length = query_length[:, None]
    # [N+ 12] the first [PAD] minus one; first_true_index returns L if there is none
    return first_true_index((query_response == pad_id) & (index >= query_length)) - 1


def end_scores(
    model: ScalarModel,
    query_response: Tensor,
    query_length: Tensor | int,
    pad_id: int,
    groups: Groups | None = None,
) -> Tensor:
    """Return the model's score at the end of each response, (B, L) -> (B,).

    groups: adjacent rows with the same query; None: find them.
    """
    first = int(torch.as_tensor(query_length).min()) - 1  # an empty response ends with its query
    if model.skipped_id is not None:  # a response of skipped tokens ends somewhere in its query
        first, groups = 0, None
    last = query_response.size(1) - first
    real = query_response != pad_id  # (B, L)
    scores = model(
        query_response, real, last=last, query_length=query_length, groups=groups
    )  # (B, L - first)
    end = end_index(query_response, query_length, pad_id) - first
    if model.skipped_id is not None:
        end = before_skipped(query_response, end, model.skipped_id)
    # [N+ 13] scores before the end are not used: the loss leaves even their sign open
    return scores.gather(1, end[:, None]).squeeze(1)


def before_skipped(ids: Tensor, end: Tensor, skipped_id: int) -> Tensor:
    """Find the last index up to `end` whose id isn't `skipped_id`: (B, L), (B,) -> (B,).

    ids a b S S #, end 3 -> 1
    """
    index = torch.arange(ids.size(1), device=ids.device)  # (L,)
    return torch.where((index <= end[:, None]) & (ids != skipped_id), index, 0).amax(1)


def pair_scores(model: ScalarModel, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor]:
    """Score chosen and rejected responses, (B,) each, in one pass that reads each query once."""
    texts = [
        Demonstration(row.query, response, row.record)
        for row in rows
        for response in (row.chosen, row.rejected)
    ]
    groups = pairs(len(rows), model.score.weight.device)
    scores = response_scores(model, texts, pad_id, "left", groups)  # (2B,)
    return scores[0::2], scores[1::2]


def response_scores(
    model: ScalarModel,
    rows: list[Demonstration],
    pad_id: int,
    side: Literal["left", "right"],
    groups: Groups | None = None,
) -> Tensor:
    """Score responses (B,), padded on the left of the query, as in PPO, or right of the text."""
    device = model.score.weight.device
    if side == "left":
        query = left_pad([row.query for row in rows], pad_id).to(device)  # (B, Q)
        response = right_pad([row.response for row in rows], pad_id).to(device)  # (B, T)
        ids = torch.cat((query, response), dim=1)  # (B, Q + T)
        return end_scores(model, ids, query.size(1), pad_id, groups)
    query_length = torch.tensor([len(row.query) for row in rows], device=device)
    query_response = right_pad([row.query + row.response for row in rows], pad_id).to(device)
    return end_scores(model, query_response, query_length, pad_id)


Ensemble = Literal["mean", "min", "uncertainty"]
UNCERTAINTY_COEF = 0.1
"""lambda of --reward-weights uncertainty, per score unit"""


def ensemble_scores(scores: Tensor, ensemble: Ensemble) -> Tensor:
    """Combine the members' scores, (M, B) -> (B,). Source: Coste et al. 2023, section 3.

    mean          mean_m r_m
    min           min_m r_m                        the paper's worst case
    uncertainty   mean_m r_m - lambda var_m r_m    lambda = UNCERTAINTY_COEF, population variance
    """
    if ensemble == "min":
        return scores.amin(0)
    if ensemble == "uncertainty":
        return scores.mean(0) - UNCERTAINTY_COEF * scores.var(0, correction=0)
    return scores.mean(0)


class Scores(NamedTuple):
    """The output of a reward for B responses."""

    scores: Tensor  # (B,) of whole responses
    token_rewards: Tensor  # (B, T) 0 where no token was chosen
    applies: Tensor  # (B,) bool; False: the reward doesn't apply to this response, and both are 0

    @classmethod
    def from_responses(cls, scores: Tensor, batch: Batch) -> "Scores":
        """Make the output of a reward that has no rewards per token."""
        zeros = torch.zeros_like(batch.actions, dtype=scores.dtype)
        return cls(scores, zeros, torch.ones_like(batch.has_eos))


class RewardModel:
    """The scalar models of stage 2, which score a response at its end; several are an ensemble.

    [N+ 12] They score `size` responses at once.
    """

    def __init__(
        self,
        flag: str,
        paths: tuple[str, ...],
        tokenizer: Tokenizer,
        device: torch.device,
        size: int,
        ensemble: Ensemble = "mean",
    ):
        self.name = f"{flag} {' '.join(paths)}"
        self.label = Path(paths[0]).name
        self.models = [load_scalar(path, device).requires_grad_(False) for path in paths]
        self.pad_id = tokenizer.pad_id
        self.size = size
        self.ensemble = ensemble
        self.disagreement = 0.0

    def score(self, batch: Batch) -> Scores:
        members = []
        for model in self.models:
            with distributed.on_device(model):
                members.append(batch.read(partial(self._score, model), self.size))
        scores = torch.stack(members)  # (M, B)
        if len(scores) == 1:
            return Scores.from_responses(scores[0], batch)
        self.disagreement = scores.std(0, correction=0).mean().item()
        return Scores.from_responses(ensemble_scores(scores, self.ensemble), batch)

    def _score(self, model: ScalarModel, batch: Batch) -> Tensor:
        Q = batch.query.size(1)
        return end_scores(model, batch.query_response, Q, self.pad_id, batch.groups)

    def metrics(self) -> dict[str, float]:
        return {"reward/disagreement": self.disagreement} if len(self.models) > 1 else {}
