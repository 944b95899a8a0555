"""Stage 2, the reward model: a scalar model learns which of two responses people prefer, or how many votes one gets.

Papers: The N+ Implementation Details of RLHF with PPO, details 10 to 15 and Table 4; Reinforcement learning for
question answering in programming domain (SO): regression to votes, and contrast between answers.
In: comparisons.{train,validation}.jsonl or scored.{train,validation}.jsonl, sft.train.jsonl and the policy of stage 1.
Out: the reward model, which is also what stage 3 starts its value model from.

    python train_rm.py                                                         # the embedded default, recipe tiny
    python train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data
    python train_rm.py stackoverflow --loss regression --out runs/stackoverflow/rm_regression
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, save, scalar_from_gpt
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.dataset import Comparison, Scored, batch_indices, load_comparisons, load_demonstrations, load_scored
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.optimizer import parameter_groups, train_linear_layers
from nanorlhf.padding import micro_batches
from nanorlhf.reward import pair_scores, response_scores
from nanorlhf.schedule import lr_factor
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.tracking import Run, check_output, check_weights, load_state


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path = Path("runs/tldr/data")
    """directory of comparisons.{train,validation}.jsonl or scored.{train,validation}.jsonl, and of sft.train.jsonl"""
    out: Path = Path("runs/tldr/rm")
    """run directory: checkpoint, metrics"""
    sft: str = "runs/tldr/sft"
    """the policy to start from: checkpoint directory or Hub id"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the policy's"""
    seed: int = 44413
    """fixes the new head and the order of the data"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward pass; weights and optimizer stay float32"""

    loss: Literal["contrastive", "regression"] = "contrastive"
    """contrastive: which of two responses is preferred; regression: the score of one, by squared error"""
    num_epochs: float = 1.0
    """passes over the comparisons or scored responses"""
    batch_size: int = 64
    """pairs or scored responses an optimizer step, over all processes"""
    micro_batch_size: int = 8
    """pairs or scored responses a forward pass and process; changes memory, not the gradient"""
    checkpoint_activations: bool = False
    """keep each block's input only and run the block again in the backward pass: less memory, a third more time"""
    lr: float = 3e-6
    """peak learning rate of AdamW"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls"""
    warmup_steps: int = 0
    """optimizer steps of linear warm-up"""
    weight_decay: float = 0.01
    """of AdamW"""
    decay_vectors: bool = True
    """biases and layer norms decay too, as PyTorch does if not told otherwise"""
    adam_eps: float = 1e-5
    """of AdamW; PyTorch's default is 1e-8"""
    max_grad_norm: float | None = None
    """longer gradients are shortened to this; None leaves them"""
    trainable: Literal["all", "linear"] = "all"
    """linear: the first and the last block, the linear layers between them and the head; the rest stays"""
    max_query_length: int = 512
    """longest query in tokens"""
    max_response_length: int = 169
    """[N+ 4] longest response in tokens, EOS included: preference data has longer ones than demonstrations"""
    num_normalisation: int | None = None
    """[N+ 15] demonstrations whose mean score becomes 0; None: all; 0: scores stay as they are"""

    eval_every: int = 200
    """steps between validation accuracies"""
    save_every: int = 500
    """steps between checkpoints"""
    resume: bool = False
    """go on from the last checkpoint in --out"""
    overwrite: bool = False
    """replace a run that --out already holds"""


RECIPES = {
    "tiny": (
        "the embedded world, on a CPU in minutes",
        Args(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/rm"),
            sft="runs/tiny/sft",
            seed=1,
            batch_size=16,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=80,
            max_response_length=24,
            num_normalisation=2048,
        ),
    ),
    "tldr": ("N+ Table 4", Args()),
    "stackoverflow": (
        "SO: pairs of answers; for scores by votes --loss regression --lr 2e-5 --batch-size 16",
        Args(
            data=Path("runs/stackoverflow/data"),
            out=Path("runs/stackoverflow/rm"),
            sft="runs/stackoverflow/sft",
            num_epochs=3,  # not in the paper
            batch_size=8,
            lr=3e-5,
            schedule="linear",
            weight_decay=1e-3,
            decay_vectors=False,
            adam_eps=1e-8,
            max_grad_norm=1.0,
            trainable="linear",
            max_response_length=512,
            num_normalisation=0,
        ),
    ),
    "stackoverflow-tiny": (
        "the embedded Q&A site, on a CPU in minutes",
        Args(
            data=Path("runs/site/data"),
            out=Path("runs/site/rm"),
            sft="runs/site/sft",
            seed=1,
            num_epochs=1,
            batch_size=16,
            micro_batch_size=16,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=64,
            max_response_length=64,
            num_normalisation=0,
        ),
    ),
}


def contrastive_loss(model: ScalarModel, rows: list[Comparison], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the pairs: -log sigmoid(margin), pairs ranked as the labeller did (a tie is wrong), margin."""
    chosen, rejected = pair_scores(model, rows, pad_id)
    margin = chosen - rejected  # (b,)
    return -F.logsigmoid(margin).sum(), (margin > 0).sum(), margin.detach().sum()  # [N+ 10] in float32


def regression_loss(model: ScalarModel, rows: list[Scored], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the responses: squared error, signs that agree, absolute error."""
    scores = response_scores(model, rows, pad_id, "right")  # (b,)
    targets = torch.tensor([row.score for row in rows], device=scores.device)
    error = scores - targets
    agrees = (scores >= 0) == (targets >= 0)  # [SO eq 2] 0 counts as positive
    return (error**2).sum(), agrees.sum(), error.detach().abs().sum()


def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------------------------------ 1. data and model
    check_ranges(args)
    check_output(args.out, args.overwrite, args.resume)
    device = distributed.setup(args.device)
    torch.manual_seed(args.seed)
    if args.batch_size % distributed.world_size():
        raise InputError(
            f"--batch-size {args.batch_size} can't be shared by {distributed.world_size()} processes: "
            "make it a multiple of their number."
        )
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    limits = tokenizer, args.max_query_length, args.max_response_length
    regression = args.loss == "regression"
    batch_loss = regression_loss if regression else contrastive_loss
    name, load = ("scored", load_scored) if regression else ("comparisons", load_comparisons)
    train, validation = (load(args.data / f"{name}.{split}.jsonl", *limits) for split in ("train", "validation"))
    pairs = []  # a regression is measured by its ranking as well, where there are pairs
    if regression and (args.data / "comparisons.validation.jsonl").exists():
        pairs = load_comparisons(args.data / "comparisons.validation.jsonl", *limits)
    demonstrations = load_demonstrations(args.data / "sft.train.jsonl", *limits)
    num_steps = int(args.num_epochs * len(train)) // args.batch_size
    if num_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {len(train)} rows of "
            f"{args.data / f'{name}.train.jsonl'} times --num-epochs {args.num_epochs}: lower it."
        )
    model = scalar_from_gpt(load_gpt(args.sft, device)).to(device)  # [N+ 11] a fresh head on the policy's trunk
    if args.trainable == "linear":
        train_linear_layers(model)
    model.transformer.checkpoint_activations = args.checkpoint_activations
    check_vocabulary(tokenizer, model.config.vocab_size, args.sft)
    longest = max(
        len(row.query) + (len(row.response) if regression else max(len(row.chosen), len(row.rejected)))
        for row in train + validation
    )
    if longest > model.config.n_ctx:
        raise InputError(
            f"a row of {name} in {args.data} has {longest} tokens, more than the {model.config.n_ctx} positions of "
            f"{args.sft}: lower --max-query-length where the data is made."
        )
    groups = parameter_groups(model.parameters(), args.weight_decay, args.decay_vectors)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, fused=True)  # [N+ 10]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    first_step = 0
    if args.resume:
        state = load_state(args.out, args)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    run = Run(args.out, args, first_step)
    if run.main:
        print(
            f"RM: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} "
            f"{'scored responses' if regression else 'pairs'}, {num_steps} steps "
            f"of {args.batch_size} in micro-batches of {args.micro_batch_size}, {distributed.world_size()} process(es)"
        )

    @torch.no_grad()
    def validate(rows: list, batch_loss: Callable) -> tuple[float, float]:
        """Mean loss, and the share of pairs ranked as the labeller did, or of signs that agree."""
        totals = torch.zeros(3, device=device)
        mine = rows[distributed.rank() :: distributed.world_size()]
        for batch in micro_batches(mine, 4 * args.micro_batch_size):
            with autocast:
                totals += torch.stack(batch_loss(model, batch, tokenizer.pad_id))
        loss, accuracy, _ = (distributed.all_sum(totals) / len(rows)).tolist()
        return loss, accuracy

    def checkpoint(step: int) -> None:
        check_weights(step - 1, model)
        if run.main:
            save(model, args.out, tokenizer)
        run.save_state(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
        distributed.barrier()

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    progress = tqdm(range(first_step, num_steps), initial=first_step, total=num_steps, desc="RM", disable=not run.main)
    for step in progress:
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        totals = torch.zeros(3, device=device)  # loss, rows that are right, margin or absolute error
        optimizer.zero_grad()
        for rows in micro_batches(batch[distributed.rank_slice(args.batch_size)], args.micro_batch_size):
            with autocast:
                loss, num_right, margin = batch_loss(model, rows, tokenizer.pad_id)
            (loss / args.batch_size).backward()
            totals += torch.stack((loss.detach(), num_right, margin))
        distributed.sum_gradients(model)
        mean_loss, accuracy, margin = (distributed.all_sum(totals) / args.batch_size).tolist()
        if not math.isfinite(mean_loss):
            raise InputError(
                f"the loss is {mean_loss} at step {step}: lower --lr ({args.lr}); "
                f"{args.out} keeps the last checkpoint that was saved before."
            )
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if args.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()

        metrics = {
            "loss": mean_loss,
            "accuracy": accuracy,
            "absolute_error" if regression else "margin": margin,
            "lr": lr,
            "episode": (step + 1) * args.batch_size,
        }
        if step + 1 < num_steps and (step + 1) % args.eval_every == 0:
            metrics["validation_loss"], metrics["validation_accuracy"] = validate(validation, batch_loss)
        run.log(step, metrics)
        progress.set_postfix(loss=f"{mean_loss:.3f}", accuracy=f"{accuracy:.2f}")
        if step + 1 < num_steps and (step + 1) % args.save_every == 0:
            checkpoint(step + 1)

    # ----------------------------------------------------------------------- 3. normalise, measure, save
    # [N+ 15] demonstrations score 0 on average; the bias is saved with the weights and the value model inherits it
    model.reward_bias.zero_()  # a run that was resumed behind its last save has it already
    measured = demonstrations[: args.num_normalisation or None]
    mine = measured[distributed.rank() :: distributed.world_size()]
    with autocast, torch.no_grad():
        scores = [
            response_scores(model, rows, tokenizer.pad_id, "left")
            for rows in micro_batches(mine, 4 * args.micro_batch_size)
        ]
    scores = torch.cat(scores) if scores else torch.zeros(0, device=device)
    moments = distributed.all_sum(torch.stack((scores.sum(), (scores**2).sum()))).tolist()
    mean = moments[0] / len(measured)
    std = math.sqrt(max(moments[1] / len(measured) - mean**2, 0.0))
    if args.num_normalisation != 0:
        model.reward_bias += mean

    # [N+ 14] PPO pads queries on the left, training padded on the right: how far apart are the scores?
    rows = demonstrations[: 4 * args.micro_batch_size]
    with autocast, torch.no_grad():
        left, right = (response_scores(model, rows, tokenizer.pad_id, side) for side in ("left", "right"))
    validation_loss, validation_accuracy = validate(validation, batch_loss)
    summary = {
        "validation_loss": validation_loss,
        "validation_accuracy": validation_accuracy,
        "num_validation_rows" if regression else "num_validation_pairs": len(validation),
        "padding_difference": (left - right).abs().mean().item(),
        "reward_mean_before_normalisation": mean,
        "reward_std": std,
        "steps": num_steps,
    }
    if regression:
        positive = sum(row.score >= 0 for row in validation) / len(validation)
        summary["validation_majority_sign"] = max(positive, 1 - positive)  # what a constant would reach
    if pairs:
        _, summary["validation_pair_accuracy"] = validate(pairs, contrastive_loss)
    checkpoint(num_steps)
    run.log(num_steps, summary)
    run.finish(summary)
    if run.main:
        kind = "sign accuracy" if regression else "accuracy"
        shift = " before normalisation, 0 after" if args.num_normalisation != 0 else ""
        print(
            f"RM: {kind} {summary['validation_accuracy']:.3f} on {len(validation)} validation rows; demonstrations "
            f"score {mean:.2f} +- {std:.2f}{shift}; left and right padding differ by "
            f"{summary['padding_difference']:.1e}"
        )
        if regression:
            print(f"    {summary['validation_majority_sign']:.3f} of the validation scores have the same sign")
        if pairs:
            print(f"    ranks {summary['validation_pair_accuracy']:.3f} of {len(pairs)} validation pairs as voted")
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
