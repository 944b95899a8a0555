"""DPO: train a policy on preferences, without a reward model and without sampling.

Papers: The N+ Implementation Details of RLHF with PPO, detail 19 and Table 6; Direct preference
optimization (Rafailov et al. 2023); its variants, chosen with --loss: IPO, robust DPO, hinge, KTO,
ORPO and SimPO (docs/algorithms.md). In: comparisons.{train,validation}.jsonl (unpaired.* for
kto_unpaired) and the policy of stage 1. Out: a policy, which is its own reward model.

    python train_dpo.py                                       # the embedded default, recipe tiny
    python train_dpo.py tldr --sft runs/tldr/sft              # writes runs/tldr/dpo
    torchrun --nproc-per-node 8 train_dpo.py tldr --sft runs/tldr/sft
    python train_dpo.py tldr --loss kto --out runs/tldr/kto
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf import distributed, dpo
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import PositiveFloat, PositiveInt, command_line
from nanorlhf.dataset import Comparison, Rows, batch_indices, load_comparisons, load_unpaired
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.peft import reference, tune
from nanorlhf.recipes import recipes
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.loading import loading_device, prepare_models
from nanorlhf.training.moving import ReferenceSettings, move
from nanorlhf.training.optimizer import adamw_steps, check_warmup, lr_factor
from nanorlhf.training.run import Run, begin, write_checkpoint
from nanorlhf.training.settings import SupervisedArgs
from nanorlhf.training.supervised import backward, check_length, evaluate, number_of_steps

Loss = Literal["sigmoid", "ipo", "robust", "hinge", "kto", "kto_unpaired", "orpo", "simpo"]
KTO = ("kto", "kto_unpaired")
NO_REFERENCE = ("orpo", "simpo")


@dataclass(frozen=True, kw_only=True)
class Args(SupervisedArgs):
    out: Path | None = None
    """run directory: checkpoint, metrics, state; None: dpo next to --data"""
    sft: str = "runs/tldr/sft"
    """the initial policy and the reference: checkpoint directory or Hub id"""
    beta: PositiveFloat = 0.05
    """implicit reward per nat of log(policy / reference); larger stays closer to the reference.
    simpo: per nat of the mean log-probability of a token; orpo: weight of the odds-ratio loss"""
    loss: Loss = "sigmoid"
    """sigmoid: DPO; ipo: squared distance to a margin; robust: corrects for flipped labels;
    hinge: SLiC; kto: each response against a reference point; kto_unpaired: KTO on responses
    labelled one by one; orpo, simpo: no reference model"""
    labels: dpo.Labels = dpo.Labels()
    reference: ReferenceSettings = ReferenceSettings()
    micro_batch_size: PositiveInt = 8
    # lengths and validation (the same in train_rm.py)
    max_response_length: PositiveInt = 169
    """[N+ 4] longest response in tokens, including EOS; longer than for demonstrations"""
    eval_every: PositiveInt = 200
    num_validation: PositiveInt | None = 2048
    """validation rows, spread evenly over the file; None: all. The last validation uses all"""


RECIPES = recipes("dpo", Args)


def margin_loss(margin: Tensor, beta: float, loss: Loss, label_smoothing: float) -> Tensor:
    """Return the loss of each pair from its margin, (B,) -> (B,).

    m = margin of the implicit rewards, L(m) = -log sigmoid(m) in nats, e = label_smoothing

    sigmoid   (1 - e) L(m) + e L(-m)              e = 0: DPO (Rafailov et al. 2023), no slope at a
                                                  large margin; e > 0: conservative DPO (Mitchell
                                                  2023), minimal at the margin log((1 - e) / e)
    robust    ((1 - e) L(m) - e L(-m)) / (1 - 2e) Chowdhury et al. 2024: if a share e of labels is
                                                  flipped, its mean equals L's without flips
    ipo       (m / beta - 1 / (2 beta))^2         Azar et al. 2023, equation 17: log-ratios should
                                                  differ by 1 / (2 beta), however sure the label
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


def main(args: Args) -> dict[str, float]:
    # -------------------------------------------------------------------------------------- 1. data
    args.labels.check(args.loss)
    args.reference.check(args.tune, args.shard)
    if args.loss in NO_REFERENCE and args.reference.rate > 0:
        raise InputError(f"--loss {args.loss} has no reference: --reference.rate must be 0.")
    if args.loss in KTO and args.batch_size < 2:
        raise InputError("--batch-size must be at least 2: KTO pairs each query with another row.")
    if args.out is None:
        args = replace(args, out=args.data.parent / "dpo")
    device = begin(args, "batch_size")
    tokenizer = load_tokenizer(args.sft)
    pad_id = tokenizer.pad_id
    Q, T = args.max_query_length, args.max_response_length
    load, kind, counted = load_comparisons, "comparisons", "pairs"
    if args.loss == "kto_unpaired":
        load, kind, counted = load_unpaired, "unpaired", "rows"
    path = args.data / f"{kind}.train.jsonl"
    train = load(path, tokenizer, Q, T)
    validation = load(args.data / f"{kind}.validation.jsonl", tokenizer, Q, T)
    watched = validation[:: -(-len(validation) // (args.num_validation or len(validation)))]
    num_steps = number_of_steps(args.num_epochs, len(train), args.batch_size, path)
    check_warmup(args.warmup_steps, num_steps)

    # -------------------------------------------------------------- 2. the policy and the reference
    policy = load_gpt(args.sft, loading_device(args.shard, device))
    check_vocabulary(tokenizer, policy.config.vocab_size, args.sft)
    files = (train, validation)
    check_length(files, policy.config, f"{kind} in {args.data}", args.sft, args.loss in KTO)
    policy.forbid(pad_id, tokenizer.vocab_size)
    tune(policy, args.tune, args.lora_rank, args.lora_targets)
    if args.loss in NO_REFERENCE:
        ref_policy = None
    elif args.tune == "lora" and args.shard == "none":
        ref_policy = reference(policy)  # the policy's frozen weights, without the updates
    else:  # never sharded: each rank has a full copy
        dtype = torch.float32 if args.reference.rate > 0 else getattr(torch, args.dtype)
        ref_policy = load_gpt(args.sft, device, dtype).requires_grad_(False)
        ref_policy.forbid(pad_id, tokenizer.vocab_size)
    prepare_models(args, device, [policy])

    # ------------------------------------------------------------------------------- 3. the loss
    def row_sums(model: GPT, rows: list[Comparison], z0: Tensor) -> tuple[Tensor, ...]:
        """Return sums over rows: loss, correct rankings, both rewards, both response counts."""
        # 3.1 log-probabilities of the responses, summed over their tokens: (b,) each
        chosen, rejected = dpo.pair_logprobs(model, rows, pad_id)
        lengths = torch.tensor([(len(row.chosen), len(row.rejected)) for row in rows]).T.to(device)
        present = lengths > 0  # (2, b): unpaired rows have one of the two
        if ref_policy is None:  # ORPO, SimPO: means over the tokens, EOS included
            chosen, rejected = torch.stack((chosen, rejected)) / lengths
        else:
            with torch.no_grad():
                ref_chosen, ref_rejected = dpo.pair_logprobs(ref_policy, rows, pad_id)
            chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
        # 3.2 [N+ 19] implicit rewards: both tend to fall in training, the rejected one faster
        chosen_rewards, rejected_rewards = args.beta * chosen, args.beta * rejected
        if args.loss == "orpo":
            chosen_rewards, rejected_rewards = dpo.log_odds(chosen), dpo.log_odds(rejected)
        # 3.3 the reward model loss -log sigmoid(margin), or a variant
        margin = chosen_rewards - rejected_rewards
        if args.loss in KTO:
            rewards = torch.stack((chosen_rewards, rejected_rewards))  # (2, b)
            loss, margin = dpo.kto_loss(rewards, present, args.beta * z0, args.labels)
        else:
            above = margin - args.labels.target_margin  # SimPO's gamma, 0 for the others
            loss = margin_loss(above, args.beta, args.loss, args.labels.smoothing)
        if args.loss == "orpo":  # SFT on the chosen response plus beta times the odds-ratio loss
            loss = args.beta * loss - chosen
        statistics = margin > 0, chosen_rewards, rejected_rewards, *present  # ties are wrong
        return loss.sum(), *(statistic.detach().sum() for statistic in statistics)

    def reference_point(rows: Sequence[Comparison]) -> Tensor:
        """[KTO 4.1] Estimate z0, the KL to the reference in nats, from mismatched responses."""
        if ref_policy is None or args.loss not in KTO:
            return torch.zeros(())
        sums = partial(dpo.log_ratio_sum, ref_policy=ref_policy, pad_id=pad_id)
        total, count = evaluate(policy, dpo.mismatched(rows), sums, 2, args.read_size, args.dtype)
        return (total / count).clamp(min=0)

    # ------------------------------------------------------------- 4. the optimizer, the validation
    parameters = list(policy.parameters())
    # optimizer (the same in train_sft.py, train_rm.py)
    steps = adamw_steps(args, parameters, args.decay_vectors)  # [N+ 9, 10]
    best = {"loss": math.inf}  # the lowest validation loss so far

    def write(directory: Path) -> None:
        write_checkpoint(policy, directory, tokenizer, args.sft)

    def validate(rows: Rows) -> dict[str, float]:
        """Return the means over the rows."""
        sums = partial(row_sums, z0=reference_point(watched))
        means = evaluate(policy, rows, sums, 6, args.read_size, args.dtype) / len(rows)
        return {f"validation_{name}": mean for name, mean in dpo.pair_means(means).items()}

    run = Run(args, "DPO", write, (train.path, validation.path))
    run.track(policy=policy, steps=steps, best=best)
    if args.reference.rate > 0:  # TR-DPO
        run.track(reference=ref_policy)
    run.print(
        f"DPO: {sum(p.numel() for p in parameters):,} parameters, {len(train):,} rows of {kind}, "
        f"{num_steps} steps of {args.batch_size} in micro-batches of {args.micro_batch_size}, "
        f"{distributed.world_size()} process(es)"
    )

    # ---------------------------------------------------------------------------------- 5. the loop
    for step in run.steps(num_steps):
        if ref_policy is not None and args.reference.is_due(step):
            move(ref_policy, policy, args.reference.rate)  # [TR-DPO]
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        z0 = reference_point(batch)  # over all micro-batches and ranks, without a gradient
        batch_loss = partial(row_sums, z0=z0)
        sums = backward(policy, batch, batch_loss, len(batch), args.micro_batch_size, args.dtype)
        metrics = dpo.pair_means(sums)
        if args.loss in KTO:
            metrics["reference_point"] = z0.item()

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

    # ----------------------------------------------------------------------------- 6. measure, save
    summary = validate(validation)
    summary |= {f"num_validation_{counted}": len(validation), "steps": num_steps}
    run.log(num_steps, summary)
    run.finish(summary)
    run.print("DPO: " + ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
