"""Stage 2, the reward model: a scalar model learns which of two responses people prefer, or how many votes one gets.

Papers: The N+ Implementation Details of RLHF with PPO, details 10 to 15 and 19 and Tables 4 and 6; Reinforcement
learning for question answering in programming domain (SO): regression to votes, and contrast between answers.
In: comparisons.{train,validation}.jsonl or scored.{train,validation}.jsonl, sft.train.jsonl and the policy of stage 1.
Out: the reward model, from which stage 3 also starts its value model; with --loss dpo a policy that needs no stage 3,
its own reward model.

    python train_rm.py                                                         # the embedded default, recipe tiny
    python train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data
    python train_rm.py tldr --loss dpo                                         # into runs/tldr/dpo
    python train_rm.py tldr --loss dpo --dpo-loss ipo --out runs/tldr/ipo
    python train_rm.py stackoverflow --loss regression --out runs/stackoverflow/rm_regression
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, load_scalar, scalar_from_gpt
from nanorlhf.cli import NonNegativeInt, PositiveFloat, PositiveInt, Range, command_line
from nanorlhf.dataset import Comparison, Rows, Scored, batch_indices, load_comparisons, load_demonstrations, load_scored
from nanorlhf.dpo import DPOLoss, dpo_loss, pair_logprobs
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import micro_batches
from nanorlhf.peft import reference, tune
from nanorlhf.recipes import recipes
from nanorlhf.reward import pair_scores, response_scores
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.memory_plan import rm_plan
from nanorlhf.training.optimizer import adamw_steps, train_linear_layers
from nanorlhf.training.run import Run, begin, home, place_models, with_plan, write_checkpoint
from nanorlhf.training.schedule import lr_factor
from nanorlhf.training.settings import SupervisedArgs
from nanorlhf.training.supervised import autocast, backward, check_rows_fit, evaluate, number_of_steps


@dataclass(frozen=True, kw_only=True)
class Args(SupervisedArgs):
    out: Path | None = None
    """run directory: checkpoint, metrics, state; None: beside --data, named rm, or dpo with --loss dpo"""
    sft: str = "runs/tldr/sft"
    """the policy to start from: checkpoint directory or Hub id"""
    loss: Literal["contrastive", "regression", "dpo"] = "contrastive"
    """contrastive: which of two responses is preferred; regression: the score of one, by squared error; dpo: a policy
    whose implicit reward says which of two is preferred"""
    dpo_beta: PositiveFloat = 0.05
    """[N+ 19] of DPO: score units of reward per nat of log(policy / reference); more stays closer to the reference"""
    dpo_loss: DPOLoss = "sigmoid"
    """sigmoid: DPO's own; ipo: squared distance to a margin; robust: corrects for flipped labels; hinge: SLiC"""
    dpo_label_smoothing: Annotated[float, Range("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)] = 0.0
    """share of labels assumed to be flipped: with sigmoid conservative DPO; robust needs it"""
    trainable: Literal["all", "linear"] = "all"
    """linear: the first and the last block, the linear layers between them and the head; the rest is frozen"""
    micro_batch_size: PositiveInt = 8
    """pairs or scored responses per forward and backward pass and rank; changes memory, not the gradient"""
    max_response_length: PositiveInt = 169
    """[N+ 4] longest response in tokens, EOS included: preference data has longer ones than demonstrations"""
    num_normalisation: NonNegativeInt | None = None
    """[N+ 15] demonstrations whose mean score becomes 0; None: all; 0: no normalisation"""
    eval_every: PositiveInt = 200
    """steps between validations"""
    num_validation: PositiveInt | None = 2048
    """rows of each, spread evenly over the file; None: all. At the end all are validated"""


RECIPES = recipes("rm", Args)

# what the losses below give, in this order: sums over the rows of a batch
STATISTICS = {
    "contrastive": ("loss", "accuracy", "margin"),
    "regression": ("loss", "accuracy", "absolute_error"),
    "dpo": ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward"),
}


def contrastive_loss(model: ScalarModel, rows: list[Comparison], pad_id: int) -> tuple[Tensor, ...]:
    """-log sigmoid(margin), pairs ranked as the labeller did (a tie is wrong), margin."""
    chosen, rejected = pair_scores(model, rows, pad_id)
    margin = chosen - rejected  # (b,)
    return -F.logsigmoid(margin).sum(), (margin > 0).sum(), margin.detach().sum()  # [N+ 10] in float32


def regression_loss(model: ScalarModel, rows: list[Scored], pad_id: int) -> tuple[Tensor, ...]:
    """Squared error, signs that agree, absolute error."""
    scores = response_scores(model, rows, pad_id, "right")  # (b,)
    targets = torch.tensor([row.score for row in rows], device=scores.device)
    error = scores - targets
    agrees = (scores >= 0) == (targets >= 0)  # [SO eq 2] 0 counts as positive
    return (error**2).sum(), agrees.sum(), error.detach().abs().sum()


def implicit_loss(
    policy: GPT,
    ref_policy: GPT,
    rows: list[Comparison],
    pad_id: int,
    beta: float,
    kind: DPOLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, ...]:
    """[N+ 19] That of a reward model, on implicit rewards; expect both of them to fall, the rejected one faster."""
    with torch.no_grad():
        ref_logprobs = pair_logprobs(ref_policy, rows, pad_id)
    logprobs = pair_logprobs(policy, rows, pad_id)
    loss, chosen, rejected = dpo_loss(*logprobs, *ref_logprobs, beta, kind, label_smoothing)
    sums = (x.detach().sum() for x in (chosen > rejected, chosen - rejected, chosen, rejected))
    return loss.sum(), *sums


@with_plan(rm_plan)
def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------------------------------ 1. data and model
    regression, dpo = args.loss == "regression", args.loss == "dpo"
    stage = "DPO" if dpo else "RM"
    if args.out is None:
        args = replace(args, out=args.data.parent / stage.lower())
    if args.trainable == "linear" and (dpo or args.tune == "lora"):
        raise InputError("--trainable linear is for reward models: leave it out with --loss dpo and --tune lora.")
    if not dpo and (args.dpo_loss != "sigmoid" or args.dpo_label_smoothing > 0):
        raise InputError(f"--dpo-loss and --dpo-label-smoothing are of --loss dpo, not {args.loss}: leave them out.")
    if args.dpo_loss in ("ipo", "hinge") and args.dpo_label_smoothing > 0:
        raise InputError(f"--dpo-label-smoothing is of sigmoid and robust, not --dpo-loss {args.dpo_loss}: omit it.")
    if args.dpo_loss == "robust" and args.dpo_label_smoothing == 0:
        raise InputError("--dpo-loss robust needs --dpo-label-smoothing, the share of flipped labels: pass it.")
    device = begin(args, "batch_size")
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    limits = tokenizer, args.max_query_length, args.max_response_length
    name, load = ("scored", load_scored) if regression else ("comparisons", load_comparisons)
    train, validation = (load(args.data / f"{name}.{split}.jsonl", *limits) for split in ("train", "validation"))
    pairs = []  # the ranking measures a regression as well, where there are pairs
    if regression and (args.data / "comparisons.validation.jsonl").exists():
        pairs = load_comparisons(args.data / "comparisons.validation.jsonl", *limits)
    demonstrations = [] if dpo else load_demonstrations(args.data / "sft.train.jsonl", *limits)
    num_steps = number_of_steps(args, len(train), args.data / f"{name}.train.jsonl")

    model = load_gpt(args.sft, home(args, device))
    check_vocabulary(tokenizer, model.config.vocab_size, args.sft)
    longest = max((rows.lengths[:, 0] + rows.lengths[:, 1:].max(1)).max() for rows in (train, validation))
    check_rows_fit(int(longest), model.config, f"{name} in {args.data}", args.sft)
    pair_loss = partial(contrastive_loss, pad_id=tokenizer.pad_id)
    # [N+ 11] a fresh head on the policy's trunk
    model = model.forbid(tokenizer.pad_id, tokenizer.vocab_size) if dpo else scalar_from_gpt(model)
    if args.trainable == "linear":
        train_linear_layers(model)
    else:
        tune(model, args.tune, args.lora_rank, args.lora_alpha, args.lora_targets)
    batch_loss = partial(regression_loss, pad_id=tokenizer.pad_id) if regression else pair_loss
    if dpo:
        if args.tune == "lora" and args.shard == "none":
            ref_policy = reference(model)
        else:  # whole on each rank
            ref_policy = load_gpt(args.sft, device, getattr(torch, args.dtype)).requires_grad_(False)
            ref_policy.forbid(tokenizer.pad_id, tokenizer.vocab_size)

        def batch_loss(model: GPT, rows: list[Comparison]) -> tuple[Tensor, ...]:
            settings = args.dpo_beta, args.dpo_loss, args.dpo_label_smoothing
            return implicit_loss(model, ref_policy, rows, tokenizer.pad_id, *settings)

    place_models(args, device, [model])
    steps = adamw_steps(model, args)
    statistics = STATISTICS[args.loss]

    def validate(rows: Rows, batch_loss: Callable) -> dict[str, float]:
        """The means of STATISTICS: loss, share of pairs ranked as the labeller did or of signs that agree, ..."""
        means = evaluate(model, rows, batch_loss, len(statistics), 4 * args.micro_batch_size, args) / len(rows)
        return {f"validation_{name}": mean for name, mean in zip(statistics, means.tolist(), strict=True)}

    def normalise(model: ScalarModel) -> tuple[float, float]:
        """[N+ 15] Make demonstrations score 0 on average; mean and standard deviation of their scores before.

        The bias is saved with the weights, and the value model inherits it.
        """
        measured = demonstrations[: args.num_normalisation or None]
        mine, whole = measured[distributed.rank() :: distributed.world_size()], distributed.unshard(model)
        scores = [torch.zeros(0, device=device)]  # a rank may have none
        for rows in micro_batches(mine, 4 * args.micro_batch_size):
            with torch.no_grad(), autocast(args, device):
                scores.append(response_scores(whole, list(rows), tokenizer.pad_id, "left"))
        of_mine = torch.cat(scores)  # (b,)
        total, total_square = distributed.all_sum(torch.stack((of_mine.sum(), (of_mine**2).sum()))).tolist()
        mean = total / len(measured)
        if args.num_normalisation != 0:
            model.reward_bias += mean
        return mean, math.sqrt(max(total_square / len(measured) - mean**2, 0.0))

    watched = validation[:: -(-len(validation) // (args.num_validation or len(validation)))]
    best = {"loss": math.inf}
    parts = {"model": model, "steps": steps, "best": best}
    run = Run(args, stage, parts, write=lambda: write_checkpoint(model, args.out, tokenizer, args.sft))
    run.print(
        f"{stage}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} "
        f"{'scored responses' if regression else 'pairs'}, {num_steps} steps of {args.batch_size} in micro-batches of "
        f"{args.micro_batch_size}, {distributed.world_size()} process(es)"
    )

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    for step in run.steps(num_steps):
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        means = backward(model, batch, batch_loss, args.batch_size, args)
        metrics = dict(zip(statistics, means.tolist(), strict=True))
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        steps.set_lr(lr)
        steps.step(model.parameters(), metrics["loss"], args.max_grad_norm)

        metrics |= {"lr": lr, "episode": (step + 1) * args.batch_size, "skipped_steps": steps.skipped}
        if step + 1 == num_steps or (step + 1) % args.eval_every == 0:
            metrics |= validate(watched, batch_loss)
            if metrics["validation_loss"] < best["loss"]:
                best["loss"] = metrics["validation_loss"]
                write_checkpoint(model, args.out / "best", tokenizer, args.sft)
        run.log(step, metrics, loss=f"{metrics['loss']:.3f}", accuracy=f"{metrics['accuracy']:.2f}")

    # ----------------------------------------------------------------------------------- 3. normalise, measure, save
    summary, last_loss = {}, run.metrics["validation_loss"]  # also where the run was resumed after the last step
    if not dpo:  # an implicit reward starts at 0, and what all responses to a query have in common means nothing
        mean, std = normalise(model)
        # [N+ 14] PPO pads queries on the left, training padded on the right: how far apart are the scores?
        rows = list(demonstrations[: 4 * args.micro_batch_size])
        whole = distributed.unshard(model)
        with autocast(args, device), torch.no_grad():
            left, right = (response_scores(whole, rows, tokenizer.pad_id, side) for side in ("left", "right"))
        summary = {
            "padding_difference": (left - right).abs().mean().item(),
            "reward_mean_before_normalisation": mean,
            "reward_std": std,
        }
    summary |= validate(validation, batch_loss)
    summary |= {"num_validation_rows" if regression else "num_validation_pairs": len(validation), "steps": num_steps}
    if regression:
        positive = sum(row.score >= 0 for row in validation) / len(validation)
        summary["validation_majority_sign"] = max(positive, 1 - positive)  # what a constant would reach
    if pairs:
        summary["validation_pair_accuracy"] = validate(pairs, pair_loss)["validation_accuracy"]
    run.write()  # normalised
    best_is_last = not best["loss"] < last_loss
    if not (best_is_last or dpo):  # it is normalised as well
        best_model = load_scalar(args.out / "best", home(args, device))
        place_models(args, device, [best_model])
        best_model.reward_bias.zero_()
        normalise(best_model)
        write_checkpoint(best_model, args.out / "best", tokenizer)
    elif best_is_last:
        write_checkpoint(model, args.out / "best", tokenizer, args.sft)
    run.log(num_steps, summary)
    run.finish(summary)

    kind = "sign accuracy" if regression else "accuracy"
    lines = [f"{stage}: {kind} {summary['validation_accuracy']:.3f} on {len(validation)} validation rows"]
    if dpo:
        chosen, rejected = (summary[f"validation_{response}_reward"] for response in ("chosen", "rejected"))
        lines += [f"    the chosen responses have a mean reward of {chosen:.2f}, the rejected ones of {rejected:.2f}"]
    else:
        shift = " before normalisation, 0 after" if args.num_normalisation != 0 else ""
        lines += [f"    demonstrations score {mean:.2f} +- {std:.2f}{shift}"]
        lines += [f"    left and right padding differ by {summary['padding_difference']:.1e}"]
    if regression:
        lines += [f"    {summary['validation_majority_sign']:.3f} of the validation scores have the same sign"]
    if pairs:
        lines += [f"    ranks {summary['validation_pair_accuracy']:.3f} of {len(pairs)} validation pairs as voted"]
    run.print("\n".join(lines))
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
