"""Stage 2, the reward model: learn which of two responses people prefer, or a response's votes.

Papers: The N+ Implementation Details of RLHF with PPO (N+), details 10 to 15 and Table 4; question
answering by votes (SO): regression on votes, and a contrastive loss between answers.
In: comparisons.{train,validation}.jsonl or scored.{train,validation}.jsonl, sft.train.jsonl and the
policy of stage 1. Out: the reward model, from which stage 3 also starts its value model.

    python train_rm.py                                        # the embedded default, recipe tiny
    python train_rm.py tldr --sft runs/tldr/sft               # writes runs/tldr/rm
    torchrun --nproc-per-node 8 train_rm.py tldr --sft runs/tldr/sft
    python train_rm.py stackoverflow --loss regression --out runs/stackoverflow/rm_regression
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf import dataset, distributed
from nanorlhf.checkpoint import load_gpt, load_scalar, scalar_from_gpt
from nanorlhf.cli import NonNegativeInt, PositiveInt, command_line
from nanorlhf.dataset import Comparison, Rows, Scored, batch_indices
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.peft import tune
from nanorlhf.recipes import recipes
from nanorlhf.reward_model import pair_scores, response_scores
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.loading import loading_device, prepare_models
from nanorlhf.training.optimizer import adamw_steps, check_warmup, lr_factor, train_linear_layers
from nanorlhf.training.run import Run, begin, write_checkpoint
from nanorlhf.training.settings import SupervisedArgs
from nanorlhf.training.supervised import autocast, backward, check_length, evaluate, number_of_steps


@dataclass(frozen=True, kw_only=True)
class Args(SupervisedArgs):
    out: Path | None = None
    """run directory: checkpoint, metrics, state; None: rm next to --data"""
    sft: str = "runs/tldr/sft"
    """the policy to start from: checkpoint directory or Hub id"""
    loss: Literal["contrastive", "regression"] = "contrastive"
    """contrastive: which of two responses is preferred; regression: a score, by squared error"""
    trainable: Literal["all", "linear"] = "all"
    """linear: the first and last block, the linear layers in between, and the head"""
    micro_batch_size: PositiveInt = 8
    num_normalisation: NonNegativeInt | None = None
    """[N+ 15] demonstrations whose mean score is set to 0; None: all; 0: no normalisation"""
    # lengths and validation (the same in train_dpo.py)
    max_response_length: PositiveInt = 169
    """[N+ 4] longest response in tokens, including EOS; longer than for demonstrations"""
    eval_every: PositiveInt = 200
    num_validation: PositiveInt | None = 2048
    """validation rows, spread evenly over the file; None: all. The last validation uses all"""


RECIPES = recipes("rm", Args)


def contrastive_loss(model: ScalarModel, rows: list[Comparison], pad_id: int) -> tuple[Tensor, ...]:
    """Return sums over pairs: -log sigmoid(margin), correct rankings (ties are wrong), margin."""
    chosen, rejected = pair_scores(model, rows, pad_id)
    margin = chosen - rejected  # (b,)
    return -F.logsigmoid(margin).sum(), (margin > 0).sum(), margin.detach().sum()  # [N+ 10] float32


def regression_loss(model: ScalarModel, rows: list[Scored], pad_id: int) -> tuple[Tensor, ...]:
    """Return sums over responses: squared error, matching signs, absolute error."""
    scores = response_scores(model, rows, pad_id, "right")  # (b,)
    targets = torch.tensor([row.score for row in rows], device=scores.device)
    error = scores - targets
    agrees = (scores >= 0) == (targets >= 0)  # [SO eq 2] 0 counts as positive
    return (error**2).sum(), agrees.sum(), error.detach().abs().sum()


@torch.no_grad()
def normalise(
    model: ScalarModel, rows: Rows, pad_id: int, size: int, dtype: str, shift: bool
) -> tuple[float, float]:
    """[N+ 15] Shift the scores so that demonstrations score 0 on average.

    Return the mean and standard deviation of their scores before the shift. Without `shift`, only
    measure them. The bias is saved with the parameters, and the value model inherits it. `size`
    demonstrations are scored at once.
    """
    device = model.score.weight.device
    full = distributed.unshard(model)
    scores = [torch.zeros(0, device=device)]  # a rank may have no rows
    for batch in micro_batches(rows[distributed.rank() :: distributed.world_size()], size):
        with autocast(dtype, device):
            scores.append(response_scores(full, list(batch), pad_id, "left"))
    local = torch.cat(scores)  # (b,)
    sums = distributed.all_sum(torch.stack((local.sum(), (local**2).sum())))
    total, total_square = sums.tolist()
    mean = total / len(rows)
    if shift:
        model.reward_bias += mean
    return mean, math.sqrt(max(total_square / len(rows) - mean**2, 0.0))


def main(args: Args) -> dict[str, float]:
    # -------------------------------------------------------------------------------------- 1. data
    if args.trainable == "linear" and args.tune == "lora":
        raise InputError("--trainable linear and --tune lora can't be combined.")
    if args.out is None:
        args = replace(args, out=args.data.parent / "rm")
    device = begin(args, "batch_size")
    tokenizer = load_tokenizer(args.sft)
    pad_id = tokenizer.pad_id
    Q, T = args.max_query_length, args.max_response_length
    rank_loss = partial(contrastive_loss, pad_id=pad_id)
    pairs: Rows | None = None  # to measure a regression's ranking accuracy, if the file exists
    if args.loss == "regression":
        kind = "scored"
        load = dataset.load_scored
        batch_loss = partial(regression_loss, pad_id=pad_id)
        statistics = ("loss", "accuracy", "absolute_error")  # names of the sums that it returns
        count_name = "num_validation_rows"
        if (args.data / "comparisons.validation.jsonl").exists():
            pairs = dataset.load_comparisons(
                args.data / "comparisons.validation.jsonl", tokenizer, Q, T
            )
    else:
        kind = "comparisons"
        load = dataset.load_comparisons
        batch_loss = rank_loss
        statistics = ("loss", "accuracy", "margin")
        count_name = "num_validation_pairs"
    path = args.data / f"{kind}.train.jsonl"
    train = load(path, tokenizer, Q, T)
    validation = load(args.data / f"{kind}.validation.jsonl", tokenizer, Q, T)
    demonstrations = dataset.load_demonstrations(args.data / "sft.train.jsonl", tokenizer, Q, T)
    num_steps = number_of_steps(args.num_epochs, len(train), args.batch_size, path)
    check_warmup(args.warmup_steps, num_steps)

    # ------------------------------------------------------------------------------------- 2. model
    policy = load_gpt(args.sft, loading_device(args.shard, device))
    check_vocabulary(tokenizer, policy.config.vocab_size, args.sft)
    check_length((train, validation), policy.config, f"{kind} in {args.data}", args.sft)
    model = scalar_from_gpt(policy)  # [N+ 11] a fresh head on the policy's trunk
    if args.trainable == "linear":
        train_linear_layers(model)
    else:
        tune(model, args.tune, args.lora_rank, args.lora_targets)
    prepare_models(args, device, [model])

    # ------------------------------------------------------------- 3. the optimizer, the validation
    parameters = list(model.parameters())
    # optimizer (the same in train_sft.py, train_dpo.py)
    steps = adamw_steps(args, parameters, args.decay_vectors)  # [N+ 9, 10]
    best = {"loss": math.inf}  # the lowest validation loss so far

    size = args.read_size

    def write(directory: Path) -> None:
        write_checkpoint(model, directory, tokenizer)

    def validate(rows: Rows) -> dict[str, float]:
        """Return the means of the statistics over the rows."""
        sums = evaluate(model, rows, batch_loss, len(statistics), size, args.dtype)
        means = (sums / len(rows)).tolist()
        return {f"validation_{name}": mean for name, mean in zip(statistics, means, strict=True)}

    watched = validation[:: -(-len(validation) // (args.num_validation or len(validation)))]
    data = [rows.path for rows in (train, validation, demonstrations, pairs) if rows]
    run = Run(args, "RM", write, data)
    run.track(model=model, steps=steps, best=best)
    run.print(
        f"RM: {sum(p.numel() for p in parameters):,} parameters, {len(train):,} rows of {kind}, "
        f"{num_steps} steps of {args.batch_size} in micro-batches of {args.micro_batch_size}, "
        f"{distributed.world_size()} process(es)"
    )

    # ---------------------------------------------------------------------------------- 4. the loop
    for step in run.steps(num_steps):
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        means = backward(model, batch, batch_loss, len(batch), args.micro_batch_size, args.dtype)
        metrics = dict(zip(statistics, means.tolist(), strict=True))

        # optimizer step (the same in train_sft.py, train_dpo.py)
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        steps.set_lr(lr)
        steps.step(parameters, metrics["loss"], args.max_grad_norm)
        episode = (step + 1) * args.batch_size
        metrics |= {"lr": lr, "episode": episode, "skipped_steps": steps.skipped}
        if step + 1 == num_steps or (step + 1) % args.eval_every == 0:
            metrics |= validate(watched)
            if metrics["validation_loss"] < best["loss"]:
                best["loss"] = metrics["validation_loss"]
                write(args.out / "best")

        run.log(step, metrics, loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['accuracy']:.2f}")

    # ------------------------------------------------------------------ 5. normalise, measure, save
    measured = demonstrations[: args.num_normalisation or None]
    shift = args.num_normalisation != 0
    mean, std = normalise(model, measured, pad_id, size, args.dtype, shift)
    write(args.out)
    if best["loss"] < run.metrics["validation_loss"]:  # from an earlier step: normalise it too
        best_model = load_scalar(args.out / "best", loading_device(args.shard, device))
        prepare_models(args, device, [best_model])
        best_model.reward_bias.zero_()  # a resumed run may have normalised it already
        normalise(best_model, measured, pad_id, size, args.dtype, shift)
        write_checkpoint(best_model, args.out / "best", tokenizer)
    else:
        write(args.out / "best")

    # [N+ 14] PPO pads queries on the left, training padded on the right: do the scores differ?
    rows = list(demonstrations[:size])
    full = distributed.unshard(model)
    with autocast(args.dtype, device), torch.no_grad():
        left = response_scores(full, rows, pad_id, "left")
        right = response_scores(full, rows, pad_id, "right")
    summary = validate(validation) | {count_name: len(validation), "steps": num_steps}
    summary |= {"reward_mean_before_normalisation": mean, "reward_std": std}
    summary["padding_difference"] = (left - right).abs().mean().item()
    if args.loss == "regression":
        positive = sum(row.score >= 0 for row in validation) / len(validation)
        summary["validation_majority_sign"] = max(positive, 1 - positive)  # accuracy of a constant
    if pairs:
        sums = evaluate(model, pairs, rank_loss, 3, size, args.dtype)
        summary["validation_pair_accuracy"] = (sums / len(pairs)).tolist()[1]
    run.log(num_steps, summary)
    run.finish(summary)
    run.print("RM: " + ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
