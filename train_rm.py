"""Stage 2, the reward model: a scalar model learns which of two summaries people prefer.

Paper: The N+ Implementation Details of RLHF with PPO, details 10 to 15 and Table 4.
In: comparisons.{train,validation}.jsonl, sft.train.jsonl and the policy of stage 1. Out: the reward model, which is
also what stage 3 starts its value model from.

    python train_rm.py                                                         # the embedded default, recipe tiny
    python train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, save, scalar_from_gpt
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.dataset import batch_indices, load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.padding import micro_batches
from nanorlhf.reward import pair_scores, response_scores
from nanorlhf.schedule import lr_factor
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.tracking import Run, check_output, check_weights, load_state


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path = Path("runs/tldr/data")
    """directory of comparisons.{train,validation}.jsonl and sft.train.jsonl"""
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

    num_epochs: float = 1.0
    """passes over the comparisons"""
    batch_size: int = 64
    """pairs an optimizer step, over all processes"""
    micro_batch_size: int = 8
    """pairs a forward pass and process; changes memory, not the gradient"""
    checkpoint_activations: bool = False
    """keep each block's input only and run the block again in the backward pass: less memory, a third more time"""
    lr: float = 3e-6
    """peak learning rate of AdamW"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls"""
    warmup_steps: int = 0
    """optimizer steps of linear warm-up"""
    max_query_length: int = 512
    """longest query in tokens"""
    max_response_length: int = 169
    """[N+ 4] longest response in tokens, EOS included: preference data has longer ones than demonstrations"""
    num_normalisation: int | None = None
    """[N+ 15] demonstrations whose mean score becomes 0; None: all"""

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
}


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
    train = load_comparisons(args.data / "comparisons.train.jsonl", *limits)
    validation = load_comparisons(args.data / "comparisons.validation.jsonl", *limits)
    demonstrations = load_demonstrations(args.data / "sft.train.jsonl", *limits)[: args.num_normalisation]
    num_steps = int(args.num_epochs * len(train)) // args.batch_size
    if num_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {len(train)} rows of "
            f"{args.data / 'comparisons.train.jsonl'} times --num-epochs {args.num_epochs}: lower it."
        )
    model = scalar_from_gpt(load_gpt(args.sft, device)).to(device)  # [N+ 11] a fresh head on the policy's trunk
    model.transformer.checkpoint_activations = args.checkpoint_activations
    check_vocabulary(tokenizer, model.config.vocab_size, args.sft)
    longest = max(len(row.query) + max(len(row.chosen), len(row.rejected)) for row in train + validation)
    if longest > model.config.n_ctx:
        raise InputError(
            f"a comparison in {args.data} has {longest} tokens, more than the {model.config.n_ctx} positions of "
            f"{args.sft}: lower --max-query-length where the data is made."
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-5, fused=True)  # [N+ 10]
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
            f"RM: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} pairs, {num_steps} steps "
            f"of {args.batch_size} in micro-batches of {args.micro_batch_size}, {distributed.world_size()} process(es)"
        )

    @torch.no_grad()
    def validate() -> float:
        """The share of validation pairs ranked as the labeller did; a tie is wrong."""
        num_right = torch.zeros((), device=device)
        for rows in micro_batches(
            validation[distributed.rank() :: distributed.world_size()], 4 * args.micro_batch_size
        ):
            with autocast:
                chosen, rejected = pair_scores(model, rows, tokenizer.pad_id)
            num_right += (chosen > rejected).sum()
        return distributed.all_sum(num_right).item() / len(validation)

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
        totals = torch.zeros(3, device=device)  # loss, pairs ranked right, margin
        optimizer.zero_grad()
        for rows in micro_batches(batch[distributed.rank_slice(args.batch_size)], args.micro_batch_size):
            with autocast:
                chosen, rejected = pair_scores(model, rows, tokenizer.pad_id)
            margin = chosen - rejected  # (b,)
            loss = -F.logsigmoid(margin).sum() / args.batch_size  # [N+ 10] from two numbers a pair, in float32
            loss.backward()
            totals += torch.stack((loss.detach(), (margin > 0).sum(), margin.detach().sum()))
        distributed.sum_gradients(model)
        mean_loss, num_right, margin_sum = distributed.all_sum(totals).tolist()
        if not math.isfinite(mean_loss):
            raise InputError(
                f"the loss is {mean_loss} at step {step}: lower --lr ({args.lr}); "
                f"{args.out} keeps the last checkpoint that was saved before."
            )
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

        metrics = {
            "loss": mean_loss,
            "accuracy": num_right / args.batch_size,
            "margin": margin_sum / args.batch_size,
            "lr": lr,
            "episode": (step + 1) * args.batch_size,
        }
        if step + 1 < num_steps and (step + 1) % args.eval_every == 0:
            metrics["validation_accuracy"] = validate()
        run.log(step, metrics)
        progress.set_postfix(loss=f"{mean_loss:.3f}", accuracy=f"{metrics['accuracy']:.2f}")
        if step + 1 < num_steps and (step + 1) % args.save_every == 0:
            checkpoint(step + 1)

    # ----------------------------------------------------------------------- 3. normalise, measure, save
    # [N+ 15] demonstrations score 0 on average; the bias is saved with the weights and the value model inherits it
    model.reward_bias.zero_()  # a run that was resumed behind its last save has it already
    mine = demonstrations[distributed.rank() :: distributed.world_size()]
    with autocast:
        scores = [
            response_scores(model, rows, tokenizer.pad_id, "left")
            for rows in micro_batches(mine, 4 * args.micro_batch_size)
        ]
    scores = torch.cat(scores) if scores else torch.zeros(0, device=device)
    moments = distributed.all_sum(torch.stack((scores.sum(), (scores**2).sum()))).tolist()
    mean = moments[0] / len(demonstrations)
    std = math.sqrt(max(moments[1] / len(demonstrations) - mean**2, 0.0))
    model.reward_bias += mean

    # [N+ 14] PPO pads queries on the left, training padded on the right: how far apart are the scores?
    rows = demonstrations[: 4 * args.micro_batch_size]
    with autocast:
        left, right = (response_scores(model, rows, tokenizer.pad_id, side) for side in ("left", "right"))
    summary = {
        "validation_accuracy": validate(),
        "num_validation_pairs": len(validation),
        "padding_difference": (left - right).abs().mean().item(),
        "reward_mean_before_normalisation": mean,
        "reward_std": std,
        "steps": num_steps,
    }
    checkpoint(num_steps)
    run.log(num_steps, summary)
    run.finish(summary)
    if run.main:
        print(
            f"RM: accuracy {summary['validation_accuracy']:.3f} on {len(validation)} validation pairs; demonstrations "
            f"score {mean:.2f} +- {std:.2f} before normalisation, 0 after; left and right padding differ by "
            f"{summary['padding_difference']:.1e}"
        )
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
