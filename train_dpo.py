"""DPO: a policy learns from comparisons, without a reward model and without sampling.

Papers: The N+ Implementation Details of RLHF with PPO, detail 19 and Table 6; Direct preference
optimization (Rafailov et al. 2023), and other losses of the same margin: IPO, robust DPO, hinge.
In: comparisons.{train,validation}.jsonl and the policy of stage 1. Out: a policy, which is its own
reward model.

    python train_dpo.py                                       # the embedded default, recipe tiny
    python train_dpo.py tldr --sft runs/tldr/sft              # writes runs/tldr/dpo
    torchrun --nproc-per-node 8 train_dpo.py tldr --sft runs/tldr/sft
    python train_dpo.py tldr --loss ipo --out runs/tldr/ipo
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import PositiveFloat, PositiveInt, Range, command_line
from nanorlhf.dataset import Comparison, Rows, batch_indices, load_comparisons
from nanorlhf.dpo import implicit_pair_rewards, pair_logprobs
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.padding import micro_batches
from nanorlhf.peft import reference, tune
from nanorlhf.recipes import recipes
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.memory_plan import dpo_plan
from nanorlhf.training.models import loading_device, prepare_models
from nanorlhf.training.optimizer import adamw_steps, check_warmup, lr_factor
from nanorlhf.training.run import Run, begin, with_plan, write_checkpoint
from nanorlhf.training.settings import SupervisedArgs
from nanorlhf.training.supervised import autocast, check_length, evaluate, number_of_steps

Loss = Literal["sigmoid", "ipo", "robust", "hinge"]


@dataclass(frozen=True, kw_only=True)
class Args(SupervisedArgs):
    out: Path | None = None
    """run directory: checkpoint, metrics, state; None: beside --data, named dpo"""
    sft: str = "runs/tldr/sft"
    """the initial policy and the reference: checkpoint directory or Hub id"""
    beta: PositiveFloat = 0.05
    """implicit reward per nat of log(policy / reference); more stays closer to the reference"""
    loss: Loss = "sigmoid"
    """sigmoid: DPO's own; ipo: squared distance to a margin; robust: corrects for flipped labels;
    hinge: SLiC"""
    label_smoothing: Annotated[float, Range("at least 0, below 0.5", lambda x: 0 <= x < 0.5)] = 0.0
    """share of labels assumed to be flipped: with sigmoid conservative DPO; robust needs it"""
    micro_batch_size: PositiveInt = 8
    # lengths and validation (the same in train_rm.py)
    max_response_length: PositiveInt = 169
    """[N+ 4] longest response in tokens, EOS included: more than in demonstrations"""
    eval_every: PositiveInt = 200
    num_validation: PositiveInt | None = 2048
    """validation rows, spread evenly over the file; None: all. The last validation takes all"""


RECIPES = recipes("dpo", Args)

STATISTICS = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward")


def margin_loss(margin: Tensor, beta: float, loss: Loss, label_smoothing: float) -> Tensor:
    """The loss of pairs with these margins, (B,) -> (B,).

    m = margin of the implicit rewards, L(m) = -log sigmoid(m) in nats, e = label_smoothing

    sigmoid   (1 - e) L(m) + e L(-m)              e = 0: DPO (Rafailov et al. 2023), no slope at a
                                                  large margin; e > 0: conservative DPO (Mitchell
                                                  2023), whose best margin is log((1 - e) / e)
    robust    ((1 - e) L(m) - e L(-m)) / (1 - 2e) Chowdhury et al. 2024: with a share e of flipped
                                                  labels, its mean is that of L with none
    ipo       (m / beta - 1 / (2 beta))^2         Azar et al. 2023, equation 17: the log-ratios
                                                  differ by 1 / (2 beta), however sure the label is
    hinge     max(0, 1 - m)                       SLiC (Zhao et al. 2023) on implicit rewards (Liu
                                                  et al. 2023): no slope beyond a margin of 1
    """
    if loss == "ipo":
        return (margin / beta - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return (1 - margin).clamp(min=0)
    if loss == "robust":
        unflipped = (1 - label_smoothing) * F.logsigmoid(margin)
        flipped = label_smoothing * F.logsigmoid(-margin)
        return -(unflipped - flipped) / (1 - 2 * label_smoothing)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def pair_sums(loss: Tensor, chosen_rewards: Tensor, rejected_rewards: Tensor) -> tuple[Tensor, ...]:
    """STATISTICS, summed over pairs: (B,) each -> scalars. A tie is ranked wrong."""
    correct = chosen_rewards > rejected_rewards
    margin = chosen_rewards - rejected_rewards
    statistics = loss, correct, margin, chosen_rewards, rejected_rewards
    return tuple(statistic.detach().sum() for statistic in statistics)


@with_plan(lambda args: dpo_plan(args, args.sft))
def main(args: Args) -> dict[str, float]:
    # -------------------------------------------------------------------------------------- 1. data
    if args.loss in ("ipo", "hinge") and args.label_smoothing > 0:
        raise InputError(f"--label-smoothing is for --loss sigmoid and robust, not {args.loss}.")
    if args.loss == "robust" and args.label_smoothing == 0:
        raise InputError("--loss robust needs --label-smoothing, the share of flipped labels.")
    if args.out is None:
        args = replace(args, out=args.data.parent / "dpo")
    device = begin(args, "batch_size")
    tokenizer = load_tokenizer(args.sft)
    pad_id = tokenizer.pad_id
    limits = tokenizer, args.max_query_length, args.max_response_length
    path = args.data / "comparisons.train.jsonl"
    train = load_comparisons(path, *limits)
    validation = load_comparisons(args.data / "comparisons.validation.jsonl", *limits)
    num_steps = number_of_steps(args.num_epochs, len(train), args.batch_size, path)
    check_warmup(args.warmup_steps, num_steps)

    # -------------------------------------------------------------- 2. the policy and the reference
    policy = load_gpt(args.sft, loading_device(args.shard, device))
    check_vocabulary(tokenizer, policy.config.vocab_size, args.sft)
    check_length((train, validation), policy.config, f"comparisons in {args.data}", args.sft)
    policy.forbid(pad_id, tokenizer.vocab_size)
    tune(policy, args.tune, args.lora_rank, args.lora_targets)
    if args.tune == "lora" and args.shard == "none":
        ref_policy = reference(policy)  # the policy's frozen weights, without the updates
    else:  # never sharded: each rank holds all of it
        ref_policy = load_gpt(args.sft, device, getattr(torch, args.dtype)).requires_grad_(False)
        ref_policy.forbid(pad_id, tokenizer.vocab_size)
    prepare_models(args, device, [policy])

    # ------------------------------------------------------------- 3. the optimizer, the validation
    parameters = list(policy.parameters())
    # optimizer (the same in train_sft.py, train_rm.py)
    steps = adamw_steps(args, parameters, args.decay_vectors)  # [N+ 9, 10]
    best = {"loss": math.inf}  # the lowest validation loss so far

    def write(directory: Path) -> None:
        write_checkpoint(policy, directory, tokenizer, args.sft)

    def validation_sums(full: GPT, rows: list[Comparison]) -> tuple[Tensor, ...]:
        chosen_rewards, rejected_rewards = implicit_pair_rewards(
            full, ref_policy, rows, pad_id, args.beta
        )
        margin = chosen_rewards - rejected_rewards
        loss = margin_loss(margin, args.beta, args.loss, args.label_smoothing)
        return pair_sums(loss, chosen_rewards, rejected_rewards)

    def validate(rows: Rows) -> dict[str, float]:
        """The means of STATISTICS over the rows."""
        num_sums = len(STATISTICS)
        sums = evaluate(policy, rows, validation_sums, num_sums, args.read_size, args.dtype)
        means = (sums / len(rows)).tolist()
        return {f"validation_{name}": mean for name, mean in zip(STATISTICS, means, strict=True)}

    watched = validation[:: -(-len(validation) // (args.num_validation or len(validation)))]
    run = Run(args, "DPO", lambda: write(args.out))
    run.track(policy=policy, steps=steps, best=best)
    run.print(
        f"DPO: {sum(p.numel() for p in parameters):,} parameters, {len(train):,} pairs, "
        f"{num_steps} steps of {args.batch_size} in micro-batches of {args.micro_batch_size}, "
        f"{distributed.world_size()} process(es)"
    )

    # ---------------------------------------------------------------------------------- 4. the loop
    for step in run.steps(num_steps):
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        batch = batch[distributed.rank_slice(len(batch))]  # this rank's pairs
        means = torch.zeros(len(STATISTICS), device=device)
        policy.zero_grad()
        for rows in micro_batches(batch, args.micro_batch_size):
            with autocast(args.dtype, device):
                # 4.1 log-probabilities of the responses, summed over their tokens: (b,) each
                with torch.no_grad():
                    ref_chosen, ref_rejected = pair_logprobs(ref_policy, rows, pad_id)
                chosen, rejected = pair_logprobs(policy, rows, pad_id)
                # 4.2 [N+ 19] implicit rewards: expect both to fall, the rejected one's faster
                chosen_rewards = args.beta * (chosen - ref_chosen)
                rejected_rewards = args.beta * (rejected - ref_rejected)
                # 4.3 the loss of a reward model, -log sigmoid(margin), or a relative
                margin = chosen_rewards - rejected_rewards
                loss = margin_loss(margin, args.beta, args.loss, args.label_smoothing)
                sums = pair_sums(loss, chosen_rewards, rejected_rewards)
            (loss.sum() / args.batch_size).backward()
            means += torch.stack(sums) / args.batch_size
        distributed.sum_gradients(policy)
        means = distributed.all_sum(means)
        metrics = dict(zip(STATISTICS, means.tolist(), strict=True))

        # optimizer step (the same in train_sft.py, train_rm.py)
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

    # ----------------------------------------------------------------------------- 5. measure, save
    summary = validate(validation)
    summary |= {"num_validation_pairs": len(validation), "steps": num_steps}
    run.log(num_steps, summary)
    run.finish(summary)
    run.print("DPO: " + ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
