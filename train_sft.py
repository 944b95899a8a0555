"""Stage 1, supervised fine-tuning: a language model learns to write the reference responses.

Papers: The N+ Implementation Details of RLHF with PPO, details 1 to 9 and Table 3. The other three
papers also start with this stage. RLCF (Coarse-Tuning Models of Code) repeats it before the test,
and STR (Is Crowdsourcing Breaking Your Bank?) compares it with adapters, BitFit and LoRA.
In: sft.{train,validation}.jsonl, or code.{train,validation}.jsonl, and a language model (or none:
random weights). Out: the policy that stages 2 and 3 start from.

    python train_sft.py                                       # the embedded default, recipe tiny
    python train_sft.py tldr --model EleutherAI/pythia-1b-deduped --data runs/tldr/data
    torchrun --nproc-per-node 8 train_sft.py tldr --data runs/tldr/data
    python train_sft.py rlcf-bench --model runs/rlcf/rlcf --out runs/rlcf/rlcf_bench
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels import linear_logprobs
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import PositiveInt, TemperatureOrGreedy, command_line
from nanorlhf.dataset import Demonstration, Rows, batch_indices, load_demonstrations, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.peft import tune
from nanorlhf.recipes import recipes
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.checks import check_sft
from nanorlhf.training.loading import loading_device, prepare_models
from nanorlhf.training.optimizer import adamw_steps, check_warmup, lr_factor
from nanorlhf.training.run import Run, begin, write_checkpoint
from nanorlhf.training.settings import SupervisedArgs
from nanorlhf.training.supervised import autocast, backward, evaluate, new_config, number_of_steps


@dataclass(frozen=True, kw_only=True)
class Args(SupervisedArgs):
    rows: Literal["sft", "code"] = "sft"
    """files to read; code: programs, whose responses follow their queries without a space"""
    model: str | None = "EleutherAI/pythia-1b-deduped"
    """checkpoint directory or Hub id to start from; None: a new model with random
    weights and the architecture and sizes below"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the model's, or the data directory's for a new model"""
    architecture: Literal["gpt", "t5"] = "gpt"
    """for a new model: decoder-only, or an encoder for the query and a decoder for the response"""
    n_layer: PositiveInt = 3
    """layers of a new model; an encoder has half as many"""
    n_head: PositiveInt = 4
    """attention heads of a new model"""
    d_model: PositiveInt = 128
    """width of a new model"""
    tune: Literal["full", "adapter", "bitfit", "lora"] = "full"
    """what to train: all weights, adapters after attention and MLP, the biases, or low-rank
    updates. All but full need a higher --lr, often ten times as high"""
    micro_batch_size: PositiveInt = 16
    loss_on: Literal["all", "response"] = "all"
    """all: query and response tokens, as the paper's code does; response: response and EOS only"""
    num_samples: PositiveInt = 64
    """validation queries to answer at the end, for samples.jsonl and the EOS rate"""
    temperature: TemperatureOrGreedy = 0.7
    """divides the logits when sampling them"""


RECIPES = recipes("sft", Args)


def demonstration_loss(model: GPT, rows: list[Demonstration], pad_id: int, loss_on: str) -> Tensor:
    """Return the summed negative log-likelihood of the labels, in nats."""
    device = model.lm_head.weight.device
    # [N+ 5] query and response, right-padded to the longest of these rows: [PAD] has no loss
    ids = right_pad([row.query + row.response for row in rows], pad_id).to(device)  # (B, L)
    lengths = [len(row.query) + len(row.response) for row in rows]
    length = torch.tensor(lengths, device=device)  # (B,)
    query_length = torch.tensor([len(row.query) for row in rows], device=device)  # (B,)
    first = query_length if loss_on == "response" else torch.ones_like(query_length)  # (B,)
    index = torch.arange(ids.size(1), device=device)  # (L,)
    real = index < length[:, None]  # (B, L) True = real token
    # the first column with a label in any row; earlier columns only provide keys and values
    start = max(1, min(len(row.query) for row in rows)) if loss_on == "response" else 1
    labels = ids[:, start:]  # (B, S)
    counts = (real & (index >= first[:, None]))[:, start:]  # (B, S) True = this label has a loss
    # (B, S, C) position i predicts token i + 1
    hidden = model(ids, real, last=ids.size(1) - start + 1, query_length=query_length)[:, :-1]
    hidden, labels, cap = hidden[counts], labels[counts], model.config.logit_cap
    logprobs, _ = linear_logprobs(hidden, model.lm_head.weight, labels, model.head_bias, cap=cap)
    return -logprobs.sum()


def num_labels(rows: Sequence[Demonstration], loss_on: str) -> int:
    """Count the tokens `demonstration_loss` sums over; the first token of a text isn't a label."""
    num_queries = sum(len(row.query) - 1 for row in rows) if loss_on == "all" else 0
    return num_queries + sum(len(row.response) for row in rows)


def main(args: Args) -> dict[str, float]:
    # -------------------------------------------------------------------------------------- 1. data
    device = begin(args, "batch_size")
    tokenizer = load_tokenizer(args.tokenizer or args.model or str(args.data))
    pad_id = tokenizer.pad_id
    load = load_programs if args.rows == "code" else load_demonstrations
    Q, T = args.max_query_length, args.max_response_length
    path = args.data / f"{args.rows}.train.jsonl"
    train = load(path, tokenizer, Q, T)
    validation = load(args.data / f"{args.rows}.validation.jsonl", tokenizer, Q, T)
    num_steps = number_of_steps(args.num_epochs, len(train), args.batch_size, path)
    check_warmup(args.warmup_steps, num_steps)

    # ------------------------------------------------------------------------------------- 2. model
    if args.model is not None:
        model = load_gpt(args.model, loading_device(args.shard, device))
    else:
        config = new_config(
            tokenizer.vocab_size,
            Q + T,
            args.d_model,
            args.n_layer,
            args.n_head,
            architecture=args.architecture,
            eos_id=tokenizer.eos_id,
        )
        model = GPT(config)
    name = args.model or "the new model"
    check_vocabulary(tokenizer, model.config.vocab_size, name)
    check_sft(Q, T, args.loss_on, name, model.config)
    model.forbid(pad_id, tokenizer.vocab_size)
    tune(model, args.tune, args.lora_rank, args.lora_targets)
    prepare_models(args, device, [model])

    # ------------------------------------------------------------- 3. the optimizer, the validation
    parameters = list(model.parameters())
    # optimizer (the same in train_rm.py, train_dpo.py)
    steps = adamw_steps(args, parameters, args.decay_vectors)  # [N+ 9, 10]
    best = {"loss": math.inf}  # the lowest validation loss so far

    def write(directory: Path) -> None:
        write_checkpoint(model, directory, tokenizer, args.model)

    def summed_loss(model: GPT, rows: list[Demonstration]) -> tuple[Tensor]:
        return (demonstration_loss(model, rows, pad_id, args.loss_on),)

    def validate(rows: Rows) -> dict[str, float]:
        """Return the mean loss over all labels of the rows."""
        sums = evaluate(model, rows, summed_loss, 1, args.micro_batch_size, args.dtype)
        loss = sums.item() / num_labels(rows, args.loss_on)
        if not math.isfinite(loss):
            raise InputError(
                f"the validation loss is {loss}: lower --lr ({args.lr}); {args.out} keeps the last "
                "checkpoint saved before that."
            )
        return {"validation_loss": loss}

    watched = validation  # all rows, every time
    run = Run(args, "SFT", write, (train.path, validation.path))
    run.track(model=model, steps=steps, best=best)
    num_all = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    run.print(
        f"SFT: {num_all:,} parameters, {num_trained:,} of them trained "
        f"({num_trained / num_all:.2%}); {len(train):,} demonstrations, {num_steps} steps of "
        f"{args.batch_size} in micro-batches of {args.micro_batch_size} on "
        f"{distributed.world_size()} process(es)"
    )

    # ---------------------------------------------------------------------------------- 4. the loop
    for step in run.steps(num_steps):
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        # mean over all labels of the batch: averaging micro-batch means would overweight short rows
        count = num_labels(batch, args.loss_on)
        loss = backward(model, batch, summed_loss, count, args.micro_batch_size, args.dtype)
        metrics = {"loss": loss.item()}

        # optimizer step (the same in train_rm.py, train_dpo.py)
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

        run.log(step, metrics, loss=f"{metrics['loss']:.3f}")

    # ------------------------------------------------------------------------------------ 5. sample
    rows = list(validation[: args.num_samples])
    query = left_pad([row.query for row in rows], pad_id).to(device)  # (B, Q)
    with autocast(args.dtype, device):
        response, _ = generate(
            distributed.unshard(model),
            query,
            query != pad_id,
            args.max_response_length,
            args.temperature,
            eos_id=tokenizer.eos_id,
            pad_id=pad_id,
            generator=torch.Generator().manual_seed(args.seed),
            stop_ids=tokenizer.stop_ids,
        )
    samples = [
        {
            "query": row.record["query"],
            "response": row.record["response"],
            "sample": tokenizer.decode(ids),
        }
        for row, ids in zip(rows, response.tolist(), strict=True)
    ]
    run.log_samples(num_steps, samples)
    summary = {
        # after the last step, even if the run was resumed after it
        "validation_loss": run.metrics["validation_loss"],
        "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
        "steps": num_steps,
    }
    run.finish(summary)
    run.print(
        f"SFT: validation loss {summary['validation_loss']:.3f} nats per token, EOS in "
        f"{summary['eos_rate']:.0%} of samples"
    )
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
