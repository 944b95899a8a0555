"""Stage 1, supervised fine-tuning: a language model learns to write the reference summaries.

Papers: The N+ Implementation Details of RLHF with PPO, details 1 to 9 and Table 3. The other three papers start from
this stage as well; Coarse-Tuning Models of Code (RLCF) returns to it before the test, and Is Crowdsourcing Breaking
Your Bank? (STR) compares it with adapters, biases only and LoRA.
In: sft.{train,validation}.jsonl, or code.{train,validation}.jsonl, and a language model (or none: random weights).
Out: the policy that stages 2 and 3 start from.

    python train_sft.py                                                        # the embedded default, recipe tiny
    python train_sft.py tldr --model EleutherAI/pythia-1b-deduped --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_sft.py tldr --model EleutherAI/pythia-1b-deduped --data runs/tldr/data
    python train_sft.py rlcf-bench --model runs/rlcf/ppo --out runs/rlcf/ppo_bench
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
from nanorlhf.cli import NonNegativeFloat, PositiveInt, command_line
from nanorlhf.dataset import Demonstration, batch_indices, load_demonstrations, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.peft import tune
from nanorlhf.recipes import recipes
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.checks import check_sft
from nanorlhf.training.memory_plan import sft_plan
from nanorlhf.training.optimizer import adamw_steps
from nanorlhf.training.run import Run, begin, home, place_models, with_plan, write_checkpoint
from nanorlhf.training.schedule import lr_factor
from nanorlhf.training.settings import SupervisedArgs
from nanorlhf.training.supervised import autocast, backward, evaluate, new_shape, number_of_steps


@dataclass(frozen=True, kw_only=True)
class Args(SupervisedArgs):
    rows: Literal["sft", "code"] = "sft"
    """code: code.{train,validation}.jsonl instead, whose responses follow their queries unchanged"""
    model: str | None = "EleutherAI/pythia-1b-deduped"
    """checkpoint directory, .gguf file or Hub id to start from; None: random weights of the shape below"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the model's, or with random weights the data directory's"""
    architecture: Literal["gpt", "t5"] = "gpt"
    """of a model with random weights: one stack, or an encoder that reads the query and a decoder that writes"""
    n_layer: PositiveInt = 3
    """layers of a model with random weights; an encoder has half as many"""
    n_head: PositiveInt = 4
    """attention heads of a model with random weights"""
    d_model: PositiveInt = 128
    """width of a model with random weights"""
    tune: Literal["full", "adapter", "bitfit", "lora"] = "full"
    """what is trained: all weights, adapters after attention and MLP, the biases, or low-rank updates of q and v"""
    micro_batch_size: PositiveInt = 16
    """demonstrations per forward and backward pass and rank; changes memory, not the gradient"""
    loss_on: Literal["all", "response"] = "all"
    """all: query and response tokens (as the reference does); response: only the response and its EOS"""
    num_samples: PositiveInt = 64
    """validation queries answered at the end, for samples.jsonl and the EOS rate"""
    temperature: NonNegativeFloat = 0.7
    """of those samples"""


RECIPES = recipes("sft", Args)


def demonstration_loss(model: GPT, rows: list[Demonstration], pad_id: int, loss_on: str) -> Tensor:
    """The summed negative log-likelihood of the tokens that count, in nats."""
    device = model.lm_head.weight.device
    # [N+ 5] query and response right-padded; only as long as these rows need: [PAD] has no loss, so the sum is the same
    ids = right_pad([row.query + row.response for row in rows], pad_id).to(device)  # (B, L)
    length = torch.tensor([len(row.query) + len(row.response) for row in rows], device=device)  # (B,)
    query_length = torch.tensor([len(row.query) for row in rows], device=device)  # (B,)
    first = query_length if loss_on == "response" else torch.ones_like(query_length)  # (B,)
    index = torch.arange(ids.size(1), device=device)  # (L,)
    mask = index < length[:, None]  # (B, L) True = real token
    # the columns from the first label that counts: what stands before is needed as keys and values alone
    start = max(1, min(len(row.query) for row in rows)) if loss_on == "response" else 1
    labels, last = ids[:, start:], ids.size(1) - start + 1  # (B, S)
    counts = (mask & (index >= first[:, None]))[:, start:]  # (B, S) True = this label has a loss
    hidden = model(ids, mask, last=last, query_length=query_length)[:, :-1]  # (B, S, C) position i predicts token i + 1
    logprobs, _ = linear_logprobs(hidden[counts], model.lm_head.weight, labels[counts], model.head_bias)
    return -logprobs.sum()


def num_labels(rows: Sequence[Demonstration], loss_on: str) -> int:
    """How many tokens `demonstration_loss` sums over."""
    return sum(len(row.response) + (len(row.query) - 1 if loss_on == "all" else 0) for row in rows)


@with_plan(sft_plan)
def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------------------------------ 1. data and model
    device = begin(args, "batch_size")
    tokenizer = load_tokenizer(args.tokenizer or args.model or str(args.data))
    load = load_programs if args.rows == "code" else load_demonstrations
    lengths = args.max_query_length, args.max_response_length
    files = [args.data / f"{args.rows}.{split}.jsonl" for split in ("train", "validation")]
    train, validation = (load(file, tokenizer, *lengths) for file in files)
    num_steps = number_of_steps(args, len(train), files[0])

    n_ctx = sum(lengths)
    place = home(args, device)
    shape = new_shape(args, tokenizer.vocab_size, n_ctx, eos_id=tokenizer.eos_id)
    model = load_gpt(args.model, place) if args.model else GPT(shape)
    check_vocabulary(tokenizer, model.config.vocab_size, args.model or "the new model")
    check_sft(args, model.config)
    model.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    tune(model, args.tune, args.lora_rank, args.lora_alpha, args.lora_targets)
    place_models(args, device, [model])
    steps = adamw_steps(model, args)

    def write(directory: Path) -> None:
        write_checkpoint(model, directory, tokenizer, args.model)

    def summed_loss(model: GPT, rows: list[Demonstration]) -> tuple[Tensor]:
        return (demonstration_loss(model, rows, tokenizer.pad_id, args.loss_on),)

    best = {"loss": math.inf}
    run = Run(args, "SFT", {"model": model, "steps": steps, "best": best}, write=lambda: write(args.out))
    num_all = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = f"{num_all:,} parameters, {num_trained:,} of them trained ({num_trained / num_all:.2%})"
    batches = f"{num_steps} steps of {args.batch_size} in micro-batches of {args.micro_batch_size}"
    run.print(f"SFT: {parameters}; {len(train):,} demonstrations, {batches} on {distributed.world_size()} process(es)")

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    for step in run.steps(num_steps):
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        # a mean over the tokens of the global batch: a mean of micro-batches' means would weigh short rows more
        loss = backward(model, batch, summed_loss, num_labels(batch, args.loss_on), args).item()
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        steps.set_lr(lr)
        steps.step(model.parameters(), loss, args.max_grad_norm)

        episode = (step + 1) * args.batch_size
        metrics = {"loss": loss, "lr": lr, "episode": episode, "skipped_steps": steps.skipped}
        if step + 1 == num_steps or (step + 1) % args.eval_every == 0:
            total = evaluate(model, validation, summed_loss, 1, args.micro_batch_size, args).item()
            validation_loss = total / num_labels(validation, args.loss_on)
            if not math.isfinite(validation_loss):
                raise InputError(
                    f"the validation loss is {validation_loss} after step {step}: lower --lr ({args.lr}); {args.out} "
                    "keeps the last checkpoint that was saved before."
                )
            metrics["validation_loss"] = validation_loss
            if validation_loss < best["loss"]:
                best["loss"] = validation_loss
                write(args.out / "best")
        run.log(step, metrics, loss=f"{loss:.3f}")

    # --------------------------------------------------------------------------------------------- 3. what it says now
    rows = list(validation[: args.num_samples])
    query = left_pad([row.query for row in rows], tokenizer.pad_id).to(device)  # (B, Q)
    with autocast(args, device):
        response, _ = generate(
            distributed.unshard(model), query, query != tokenizer.pad_id, args.max_response_length, args.temperature,
            eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, generator=torch.Generator().manual_seed(args.seed),
        )  # fmt: skip
    samples = [
        {"query": row.record["query"], "response": row.record["response"], "sample": tokenizer.decode(ids)}
        for row, ids in zip(rows, response.tolist(), strict=True)
    ]
    run.log_samples(num_steps, samples)
    final_loss = run.metrics["validation_loss"]  # of the last step, also where the run was resumed after it
    eos_rate = (response == tokenizer.eos_id).any(1).float().mean().item()
    summary = {"validation_loss": final_loss, "eos_rate": eos_rate, "steps": num_steps}
    run.finish(summary)
    run.print(f"SFT: validation loss {final_loss:.3f} nats per token, EOS in {eos_rate:.0%} of samples")
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
