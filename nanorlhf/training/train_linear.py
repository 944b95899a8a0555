"""Train a linear reward model on the hidden states of a pretrained model's middle layer.

    python -m nanorlhf.training.train_linear --data runs/harmless/first --model HuggingFaceTB/SmolLM2-135M-Instruct

With few pairs, a linear layer on the mean over the response's tokens learns more than a whole model trained on its last
token: a language model's middle layers already separate the texts, and only the weights of the channels are missing. We
fit them by logistic regression on chosen minus rejected, which is the loss of a reward model, with an L2 penalty chosen
by cross-validation over queries. The result is a reward model like train_rm.py's, with fewer blocks, whose score at a
token is the mean over the response so far. It takes minutes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.cli import Count, Fraction, PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import Comparison, Rows, load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, to_json, write_text
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches, right_pad
from nanorlhf.progress import Progress
from nanorlhf.reward_model import response_scores
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from nanorlhf.training.supervised import check_length

FOLDS = 5
STRENGTHS = np.logspace(-6, 0, 13)  # candidates for cross-validation: 1 / penalty, for channels with deviation 1
FEWEST = 100  # queries


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path
    """directory with comparisons.{train,validation}.jsonl and sft.train.jsonl"""
    model: str
    """pretrained policy: checkpoint directory or Hub id"""
    out: Path | None = None
    """directory of the reward model; None: rm, next to --data"""
    depth: Fraction = 0.6
    """fraction of the model's blocks to keep; the linear layer reads their output"""
    num_normalisation: Count = 256
    """[N+ 15] demonstrations whose mean score becomes 0"""
    max_query_length: PositiveInt = 512
    """longest query in tokens"""
    max_response_length: PositiveInt = 256
    """longest response in tokens, EOS included"""
    batch_size: PositiveInt = 8
    """pairs read at a time"""
    seed: Seed = 1
    """fixes the folds of the cross-validation"""


# ---------------------------------------------------------------------------------------------------------- 1. reading
def load_lower_blocks(
    model: str, tokenizer: Tokenizer, data: Path, sets: Sequence[Rows[Comparison]], depth: float
) -> GPT:
    """Load a policy with the first `depth` of its blocks, and the final norm, which makes channels comparable.

    Raises InputError if the model's positions are too few for the comparisons `sets` of `data`, and for an
    encoder-decoder.
    """
    policy = load_gpt(model)
    config = policy.config
    check_vocabulary(tokenizer, config.vocab_size, model)
    check_length(sets, config, f"comparisons in {data}", model)
    if config.num_decoder_blocks:
        raise InputError(f"--model {model} is an encoder-decoder: expected a decoder-only model.")
    num_blocks = max(1, round(depth * config.n_layer))
    windows = config.attention_windows and config.attention_windows[:num_blocks]
    policy.config = policy.transformer.config = replace(config, n_layer=num_blocks, attention_windows=windows)
    del policy.transformer.blocks[num_blocks:]
    return policy


@torch.no_grad()
def pair_features(policy: GPT, rows: Sequence[Comparison], pad_id: int, size: int) -> np.ndarray:
    """Return the mean hidden state of the chosen response minus that of the rejected one, (pairs, C)."""
    features = []
    for batch in Progress(micro_batches(rows, size), desc="pairs", unit="batch"):
        query = left_pad([row.query for row in batch for _ in range(2)], pad_id)  # (2B, Q)
        response = right_pad([text for row in batch for text in (row.chosen, row.rejected)], pad_id)  # (2B, T)
        ids = torch.cat((query, response), dim=1)
        hidden = policy.transformer(ids, ids != pad_id, last=response.size(1) + 1)[:, 1:]  # (2B, T, C)
        means = response_mean(hidden, response != pad_id)  # (2B, C)
        features.append(means[0::2] - means[1::2])
    return torch.cat(features).numpy()


def response_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the hidden states over the tokens of a response: hidden (B, T, C), mask (B, T) -> (B, C)."""
    return torch.where(mask[:, :, None], hidden, 0.0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def query_numbers(rows: Sequence[Comparison], data: Path) -> np.ndarray:
    """Number the queries, (pairs,), so that pairs of the same query share a fold; raise InputError for too few."""
    _, numbers = np.unique([str(row.record["query"]) for row in rows], return_inverse=True)
    if (num_queries := numbers.max() + 1) < FEWEST:
        raise InputError(f"--data {data} has comparisons for {num_queries} queries; at least {FEWEST} are needed.")
    return numbers


# ---------------------------------------------------------------------------------------------------------- 2. weights
def fit_weights(inputs: np.ndarray, queries: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """Fit logistic regression to chosen minus rejected (pairs, C); return the weights (C,) and the chosen strength.

    queries (pairs,): each pair's query number. A difference in score is the log-odds of being preferred.
    """
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import GridSearchCV, GroupKFold
    except ModuleNotFoundError as error:
        raise InputError("Linear reward models need scikit-learn: `pip install scikit-learn`.") from error

    scale = inputs.std(0)
    scale = np.where(scale > 0, scale, 1)
    # swapping a pair must only flip the label: fit no intercept, and flip every second pair to balance the classes
    sign = np.where(np.arange(len(inputs)) % 2, 1, -1)
    folds = GroupKFold(FOLDS, shuffle=True, random_state=seed)
    model = LogisticRegression(fit_intercept=False, max_iter=10_000)
    search = GridSearchCV(model, {"C": STRENGTHS}, scoring="neg_log_loss", cv=folds)
    search.fit(inputs / scale * sign[:, None], sign, groups=queries)
    return search.best_estimator_.coef_[0] / scale, float(search.best_params_["C"])


def linear_reward_model(policy: GPT, weights: np.ndarray) -> ScalarModel:
    """Combine the policy's trunk and these weights (C,), applied to the mean over a response."""
    model = ScalarModel(replace(policy.config, mean_pooled=True))
    model.transformer = policy.transformer
    model.score.weight = nn.Parameter(torch.tensor(weights, dtype=torch.float32)[None])
    nn.init.zeros_(model.score.bias)
    return model.requires_grad_(False)


def main(args: Args) -> dict[str, float]:
    """Read the pairs, fit the weights, rank the validation pairs, save."""
    check_ranges(args)
    out = args.out or args.data.parent / "rm"
    check_out(out)
    if (out / "summary.json").exists():
        raise InputError(f"--out {out} contains a finished run: choose another directory.")
    tokenizer = load_tokenizer(args.model)
    pad_id = tokenizer.pad_id
    Q, T = args.max_query_length, args.max_response_length
    splits = ("train", "validation")
    train, validation = (
        load_comparisons(args.data / f"comparisons.{split}.jsonl", tokenizer, Q, T) for split in splits
    )
    demonstrations = load_demonstrations(args.data / "sft.train.jsonl", tokenizer, Q, T)[: args.num_normalisation]
    queries = query_numbers(train, args.data)
    policy = load_lower_blocks(args.model, tokenizer, args.data, (train, validation), args.depth)

    weights, strength = fit_weights(pair_features(policy, train, pad_id, args.batch_size), queries, args.seed)
    right = pair_features(policy, validation, pad_id, args.batch_size) @ weights > 0  # (pairs,)
    model = linear_reward_model(policy, weights)
    with torch.no_grad():
        batches = micro_batches(demonstrations, args.batch_size)
        scores = torch.cat([response_scores(model, list(batch), pad_id, "left") for batch in batches])  # (b,)
    model.reward_bias = scores.mean()
    save(model, out, tokenizer)
    summary = {
        "num_pairs": len(train), "strength": strength, "num_validation_pairs": len(validation),
        "validation_accuracy": right.mean().item(),
        "reward_mean_before_normalisation": scores.mean().item(), "reward_std": scores.std(correction=0).item(),
    }  # fmt: skip
    write_text(out / "args.json", to_json(asdict(replace(args, out=out)), indent=2, default=str))
    write_text(out / "summary.json", to_json(summary, indent=2))  # written last: it marks the run as finished
    print(f"{out}: " + ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    return summary


if __name__ == "__main__":
    run_module(main, Args)
