"""Sample responses, score them, and compare the scores of two policies."""

import itertools
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.evals.settings import PolicyArgs
from nanorlhf.generate import sample_answers
from nanorlhf.metrics import compare
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.ppo import eos_masks
from nanorlhf.reward_model import end_scores, response_scores
from nanorlhf.rewards.gold import Gold
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.supervised import autocast


def sample(
    policy: GPT, rows: list[Demonstration], tokenizer: Tokenizer, args: PolicyArgs, num_samples: int, **decoding: Any
) -> tuple[Tensor, Tensor]:
    """Call `sample_answers` for the queries of `rows`; decoding: its temperature and other decoding arguments."""
    queries = [row.query for row in rows]
    with distributed.on_device(policy), autocast(args.dtype, policy.lm_head.weight.device):
        return sample_answers(
            policy, queries, tokenizer, num_samples, args.response_length, args.batch_size, args.seed, **decoding
        )


@torch.no_grad()
def rm_scores(model: ScalarModel, query: Tensor, response: Tensor, pad_id: int, batch_size: int) -> list[float]:
    """Return the reward model's score at the last token of each response, query (B, Q) and response (B, T) -> B.

    The EOS trick isn't applied: it belongs to PPO, not to the reward model.
    """
    query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
    pieces = micro_batches(query_response, batch_size)
    with distributed.on_device(model):
        return torch.cat([end_scores(model, piece, query.size(1), pad_id) for piece in pieces]).tolist()


@torch.no_grad()
def row_scores(
    model: ScalarModel, rows: list[Demonstration], pad_id: int, batch_size: int, side: Literal["left", "right"]
) -> Tensor:
    """Return the reward model's scores of the responses in the data, (rows,); for `side` see `response_scores`."""
    with distributed.on_device(model):
        return torch.cat([response_scores(model, batch, pad_id, side) for batch in micro_batches(rows, batch_size)])


def gold_margins(gold: Gold, rows: list[Comparison]) -> list[float]:
    """Return the gold score of each chosen response minus the rejected one's."""
    return np.subtract(gold.score_rows(rows, "chosen"), gold.score_rows(rows, "rejected")).tolist()


def endings(response: Tensor, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the share of responses (B, T) with an EOS, and the mean length in tokens, EOS included."""
    eos_index, _, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
    return {
        "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
        "response_length": (eos_index + 1).float().mean().item(),
    }


def differences(measured: dict[str, dict[str, np.ndarray]], seed: int, num_resamples: int) -> list[dict]:
    """Compare each policy with each one before it in each metric. measured: policy -> metric -> (questions, n)."""
    return [
        {"ours": ours, "theirs": theirs, "metric": metric}
        | compare(measured[ours][metric], measured[theirs][metric], seed, num_resamples)
        for theirs, ours in itertools.combinations(measured, 2)
        for metric in measured[ours]
    ]
