"""Stage 1, supervised fine-tuning: a language model learns to write the reference summaries.

Papers: The N+ Implementation Details of RLHF with PPO, details 1 to 9 and Table 3. The other three papers start from
this stage as well; Coarse-Tuning Models of Code (RLCF) comes back to it before the test, and Is Crowdsourcing Breaking
Your Bank? (STR) compares it with adapters, biases only and LoRA.
In: sft.{train,validation}.jsonl, or code.{train,validation}.jsonl, and a language model (or none: random weights).
Out: the policy that stages 2 and 3 start from.

    python train_sft.py                                                        # the embedded default, recipe tiny
    python train_sft.py tldr --model EleutherAI/pythia-1b-deduped --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_sft.py tldr --model EleutherAI/pythia-1b-deduped --data runs/tldr/data
    python train_sft.py rlcf-bench --model runs/rlcf/ppo --out runs/rlcf/ppo_bench
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from kernels import linear_logprobs
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.dataset import Demonstration, batch_indices, load_demonstrations, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT, GPTConfig
from nanorlhf.padding import left_pad, micro_batches, right_pad
from nanorlhf.peft import merge, tune
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer
from nanorlhf.training.memory_plan import sft_plan
from nanorlhf.training.optimizer import FiniteSteps, parameter_groups
from nanorlhf.training.resume import StopSignals, load_state
from nanorlhf.training.run import Run, check_output, check_weights
from nanorlhf.training.schedule import lr_factor


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path = Path("runs/tldr/data")
    """directory of sft.train.jsonl and sft.validation.jsonl"""
    rows: Literal["sft", "code"] = "sft"
    """code: code.train.jsonl and code.validation.jsonl instead, whose responses follow their queries as they are"""
    out: Path = Path("runs/tldr/sft")
    """run directory: checkpoint, metrics, samples"""
    model: str | None = "EleutherAI/pythia-1b-deduped"
    """checkpoint directory or Hub id to start from; None: random weights of the shape below"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the model's, or with random weights the data directory's"""
    n_layer: int = 3
    """shape of a model with random weights: layers"""
    n_head: int = 4
    """shape of a model with random weights: attention heads"""
    d_model: int = 128
    """shape of a model with random weights: width"""
    tune: Literal["full", "adapter", "bitfit", "lora"] = "full"
    """what is trained: all, adapters behind attention and MLP, the biases, or low-rank updates of q and v"""
    seed: int = 44413
    """fixes weights, order of the data and samples"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward pass; weights and optimizer stay float32"""

    num_epochs: float = 1.0
    """passes over the demonstrations"""
    batch_size: int = 128
    """demonstrations an optimizer step, over all processes"""
    micro_batch_size: int = 16
    """demonstrations a forward pass and process; changes memory, not the gradient"""
    checkpoint_activations: bool = False
    """keep each block's input only and run the block again in the backward pass: less memory, a third more time"""
    shard: Literal["none", "fsdp"] = "none"
    """fsdp: the processes share weights, gradients and optimizer state out among them; none: each has all (DDP)"""
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
    """[N+ 9] of AdamW; PyTorch's default is 1e-8"""
    max_grad_norm: float | None = None
    """longer gradients are shortened to this; None leaves them"""
    max_skipped_steps: int = 3
    """steps in a row that are skipped because loss or gradient are not finite; one more ends the run"""
    loss_on: Literal["all", "response"] = "all"
    """all: query and response tokens (as the reference does); response: only the response and its EOS"""
    max_query_length: int = 512
    """longest query in tokens"""
    max_response_length: int = 53
    """[N+ 4] longest response in tokens, EOS included"""

    eval_every: int = 100
    """steps between validation losses"""
    save_every: int = 500
    """steps between checkpoints"""
    num_samples: int = 64
    """validation queries that are answered at the end, for samples.jsonl and the EOS rate"""
    temperature: float = 0.7
    """of those samples"""
    keep_last: int = 2
    """checkpoints that --resume may go on from: if the newest is damaged, the one before it"""
    resume: bool = False
    """go on from the last checkpoint in --out"""
    overwrite: bool = False
    """replace a run that --out already holds"""
    plan: bool = False
    """print what each part takes of a GPU's memory and the flags that make it fit, from shapes alone; train nothing"""


RECIPES = {
    "tiny": (
        "the embedded world, on a CPU in minutes",
        Args(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/sft"),
            model=None,
            seed=1,
            batch_size=16,
            num_epochs=1.5,
            lr=3e-3,
            warmup_steps=30,
            loss_on="response",
            max_query_length=80,
            max_response_length=24,
        ),
    ),
    "tldr": ("N+ Table 3", Args()),
    "stackoverflow": (
        "SO: GPT-Neo 125M on the best answers",
        Args(
            data=Path("runs/stackoverflow/data"),
            out=Path("runs/stackoverflow/sft"),
            model="EleutherAI/gpt-neo-125m",
            num_epochs=3,  # not in the paper
            batch_size=12,
            micro_batch_size=12,
            lr=2e-5,
            schedule="linear",
            warmup_steps=17,  # 1% of three epochs of the paper's 6,946 questions
            weight_decay=1e-3,
            decay_vectors=False,
            adam_eps=1e-8,
            max_grad_norm=1.0,
            loss_on="response",
            max_response_length=512,  # query and response together, where the data is made
        ),
    ),
    "stackoverflow-tiny": (
        "the embedded Q&A site, on a CPU in minutes",
        Args(
            data=Path("runs/site/data"),
            out=Path("runs/site/sft"),
            model="runs/site/base",
            seed=1,
            num_epochs=2,
            batch_size=16,
            lr=1e-3,
            warmup_steps=20,
            loss_on="response",
            max_query_length=64,
            max_response_length=64,
        ),
    ),
    "rlcf": (
        "RLCF: CodeGen 350M on the rest of methods",
        Args(
            data=Path("runs/rlcf/data"),
            rows="code",
            out=Path("runs/rlcf/sft"),
            model="Salesforce/codegen-350M-multi",
            num_epochs=5,
            batch_size=128,
            lr=5e-5,
            schedule="linear",  # this and the two below: not in the paper
            adam_eps=1e-8,
            loss_on="response",
            max_query_length=500,
            max_response_length=384,
            temperature=0.6,
        ),
    ),
    "rlcf-bench": (
        "RLCF: fine-tuning on MBJP before the test, of any policy",
        Args(
            data=Path("runs/rlcf/bench"),
            rows="code",
            out=Path("runs/rlcf/ppo_bench"),
            model="runs/rlcf/ppo",
            num_epochs=20,
            batch_size=64,
            lr=5e-5,
            schedule="linear",  # as above
            warmup_steps=200,
            adam_eps=1e-8,
            loss_on="response",
            max_query_length=500,
            max_response_length=256,
            temperature=0.6,
        ),
    ),
    "rlcf-tiny": (
        "the embedded programs, on a CPU in minutes",
        Args(
            data=Path("runs/programs/data"),
            rows="code",
            out=Path("runs/programs/sft"),
            model=None,
            n_layer=2,
            d_model=96,
            seed=1,
            num_epochs=6,
            batch_size=16,
            lr=3e-3,
            warmup_steps=30,
            loss_on="response",
            max_query_length=160,
            max_response_length=128,
            temperature=0.6,
        ),
    ),
    "rlcf-tiny-bench": (
        "fine-tuning on the embedded problems with tests",
        Args(
            data=Path("runs/programs/bench"),
            rows="code",
            out=Path("runs/programs/ppo_bench"),
            model="runs/programs/ppo",
            seed=1,
            num_epochs=4,
            batch_size=16,
            lr=5e-5,  # more would undo what PPO chose
            warmup_steps=5,
            loss_on="response",
            max_query_length=160,
            max_response_length=128,
            temperature=0.6,
        ),
    ),
    "str": (
        "STR: GPT-2 124M on dialogues or SQuAD",
        Args(
            data=Path("runs/str/data"),
            out=Path("runs/str/sft"),
            model="openai-community/gpt2",  # or EleutherAI/gpt-neo-125m
            num_epochs=3,  # this and all below but loss_on: not in the paper
            batch_size=16,
            micro_batch_size=16,
            lr=5e-5,  # for --tune full; the other ways want ten times as much or more
            schedule="linear",
            adam_eps=1e-8,
            max_grad_norm=1.0,
            loss_on="all",
            max_response_length=100,
            temperature=0.8,
        ),
    ),
    "str-tiny": (
        "the embedded town, on a CPU in minutes",
        Args(
            data=Path("runs/town/data"),
            out=Path("runs/town/full"),
            model="runs/town/base",
            seed=1,
            num_epochs=2,
            batch_size=16,
            lr=1e-3,
            warmup_steps=30,
            max_query_length=96,
            max_response_length=32,
            temperature=0.8,
        ),
    ),
}


def demonstration_loss(model: GPT, rows: list[Demonstration], pad_id: int, loss_on: str) -> Tensor:
    """The summed negative log-likelihood of the tokens that count, in nats."""
    device = model.lm_head.weight.device
    # [N+ 5] query and response right-padded; only as long as these rows need: [PAD] has no loss, so the sum is the same
    ids = right_pad([row.query + row.response for row in rows], pad_id).to(device)  # (B, L)
    length = torch.tensor([len(row.query) + len(row.response) for row in rows], device=device)  # (B,)
    first = torch.tensor([len(row.query) if loss_on == "response" else 1 for row in rows], device=device)  # (B,)
    index = torch.arange(ids.size(1), device=device)  # (L,)
    mask = index < length[:, None]  # (B, L) True = real token
    counts = (mask & (index >= first[:, None]))[:, 1:]  # (B, L - 1) True = this label has a loss
    hidden = model(ids, mask)[:, :-1]  # (B, L - 1, C) position i predicts token i + 1
    logprobs, _ = linear_logprobs(hidden[counts], model.lm_head.weight, ids[:, 1:][counts], model.head_bias)
    return -logprobs.sum()


def num_labels(rows: list[Demonstration], loss_on: str) -> int:
    """How many tokens `demonstration_loss` sums over."""
    return sum(len(row.response) + (len(row.query) - 1 if loss_on == "all" else 0) for row in rows)


def main(args: Args) -> dict[str, float]:
    if args.plan:
        print(sft_plan(args))
        return {}
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
    tokenizer = load_tokenizer(args.tokenizer or args.model or str(args.data))
    limits = tokenizer, args.max_query_length, args.max_response_length
    load = load_programs if args.rows == "code" else load_demonstrations
    train, validation = (load(args.data / f"{args.rows}.{split}.jsonl", *limits) for split in ("train", "validation"))
    num_steps = int(args.num_epochs * len(train)) // args.batch_size
    if num_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {len(train)} rows of "
            f"{args.data / f'{args.rows}.train.jsonl'} times --num-epochs {args.num_epochs}: lower it."
        )
    n_ctx = args.max_query_length + args.max_response_length
    home = device if args.shard == "none" else torch.device("cpu")  # what is sharded goes to the GPU block by block
    if args.model is None:
        if args.d_model % args.n_head or args.d_model // args.n_head < 2:
            raise InputError(f"--n-head {args.n_head} must divide --d-model {args.d_model} into heads at least 2 wide.")
        # the shape of a small Pythia: rotary positions on half of each head, parallel residual, untied head
        model = GPT(
            GPTConfig(
                vocab_size=tokenizer.vocab_size,
                n_ctx=n_ctx,
                d_model=args.d_model,
                n_layer=args.n_layer,
                n_head=args.n_head,
                d_mlp=4 * args.d_model,
                rotary_dim=max(2, args.d_model // args.n_head // 4 * 2),
            )
        ).to(home)
    else:
        model = load_gpt(args.model, home)
    check_vocabulary(tokenizer, model.config.vocab_size, args.model or "the new model")
    if n_ctx > model.config.n_ctx:
        raise InputError(
            f"--max-query-length plus --max-response-length is {n_ctx}, more than the {model.config.n_ctx} positions "
            f"of {args.model}: lower one of them."
        )
    model.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    model.transformer.checkpoint_activations = args.checkpoint_activations
    tune(model, args.tune)
    if args.shard == "fsdp":
        distributed.shard(model, device, args.dtype == "bfloat16")
    # [N+ 9] fused: one pass over the weights instead of one an operation
    groups = parameter_groups(model.parameters(), args.weight_decay, args.decay_vectors)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, fused=True)
    steps = FiniteSteps(
        optimizer,
        args.max_skipped_steps,
        f"lower --lr ({args.lr}); {args.out} keeps the last checkpoint that was saved before.",
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    first_step, best_loss = 0, math.inf
    if args.resume:
        state = load_state(args.out, args)
        distributed.load_model(model, state["model"])
        steps.load_state_dict(state["steps"])
        first_step, best_loss = state["step"], state["best_loss"]
    run = Run(args.out, args, first_step)
    if run.main:
        num_all = sum(p.numel() for p in model.parameters())
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(
            f"SFT: {num_all:,} parameters, {num_trained:,} of them trained ({num_trained / num_all:.2%}); "
            f"{len(train):,} demonstrations, {num_steps} steps of {args.batch_size} in micro-batches of "
            f"{args.micro_batch_size} on {distributed.world_size()} process(es)"
        )

    def write(directory: Path) -> None:
        whole = merge(distributed.plain(model))  # LoRA's updates within the weights
        if run.main:
            save(whole, directory, tokenizer)

    def checkpoint(step: int) -> None:
        check_weights(step - 1, model)
        write(args.out)
        run.save_state(step, model=model.state_dict(), steps=steps.state_dict(), best_loss=best_loss)
        distributed.barrier()

    @torch.no_grad()
    def validation_loss() -> float:
        total = torch.zeros((), device=device)
        mine, whole = validation[distributed.rank() :: distributed.world_size()], distributed.plain(model)
        for rows in micro_batches(mine, args.micro_batch_size):
            with autocast:
                total += demonstration_loss(whole, rows, tokenizer.pad_id, args.loss_on)
        return distributed.all_sum(total).item() / num_labels(validation, args.loss_on)

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    progress = tqdm(range(first_step, num_steps), initial=first_step, total=num_steps, desc="SFT", disable=not run.main)
    metrics, signals = {}, StopSignals()
    for step in progress:
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        num_tokens = num_labels(batch, args.loss_on)  # of the global batch: micro-batches and processes don't matter
        loss = torch.zeros((), device=device)
        optimizer.zero_grad()
        for rows in micro_batches(batch[distributed.rank_slice(args.batch_size)], args.micro_batch_size):
            with autocast:
                micro_loss = demonstration_loss(model, rows, tokenizer.pad_id, args.loss_on) / num_tokens
            micro_loss.backward()
            loss += micro_loss.detach()
        distributed.sum_gradients(model)
        mean_loss = distributed.all_sum(loss).item()
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        steps.step(model.parameters(), mean_loss, args.max_grad_norm)

        metrics = {
            "loss": mean_loss,
            "lr": lr,
            "episode": (step + 1) * args.batch_size,
            "skipped_steps": steps.skipped,
        }
        last = step + 1 == num_steps
        if last or (step + 1) % args.eval_every == 0:
            metrics["validation_loss"] = validation_loss()
            if not math.isfinite(metrics["validation_loss"]):
                raise InputError(
                    f"the validation loss is {metrics['validation_loss']} after step {step}: lower --lr ({args.lr}); "
                    f"{args.out} keeps the last checkpoint that was saved before."
                )
            if metrics["validation_loss"] < best_loss:
                best_loss = metrics["validation_loss"]
                write(args.out / "best")
        run.log(step, metrics)
        progress.set_postfix(loss=f"{mean_loss:.3f}")
        stopping = signals.received()
        if last or stopping or (step + 1) % args.save_every == 0:
            checkpoint(step + 1)
        if stopping:
            signals.stop(args.out, step + 1)
    signals.restore()

    # -------------------------------------------------------------------------------------------- 3. what it says now
    rows = validation[: args.num_samples]
    query = left_pad([row.query for row in rows], tokenizer.pad_id).to(device)  # (B, Q)
    with autocast:
        response, _ = generate(
            distributed.plain(model),
            query,
            query != tokenizer.pad_id,
            args.max_response_length,
            args.temperature,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            generator=torch.Generator().manual_seed(args.seed),
        )
    eos_rate = (response == tokenizer.eos_id).any(1).float().mean().item()
    run.log_samples(
        num_steps,
        [
            {**{key: row.record[key] for key in ("query", "response")}, "sample": tokenizer.decode(ids)}
            for row, ids in zip(rows, response.tolist(), strict=True)
        ],
    )
    if "validation_loss" not in metrics:  # resumed behind the last step
        metrics["validation_loss"] = validation_loss()
    summary = {"validation_loss": metrics["validation_loss"], "eos_rate": eos_rate, "steps": num_steps}
    run.finish(summary)
    if run.main:
        print(f"SFT: validation loss {summary['validation_loss']:.3f} nats a token, EOS in {eos_rate:.0%} of samples")
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
