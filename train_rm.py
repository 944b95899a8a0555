"""Stage 2, the reward model: a scalar model learns which of two responses people prefer, or how many votes one gets.

Papers: The N+ Implementation Details of RLHF with PPO, details 10 to 15 and 19 and Tables 4 and 6; Reinforcement
learning for question answering in programming domain (SO): regression to votes, and contrast between answers;
Coarse-Tuning Models of Code with Reinforcement Learning Feedback (RLCF): a discriminator between programs of people and
of the policy.
In: comparisons.{train,validation}.jsonl or scored.{train,validation}.jsonl, sft.train.jsonl and the policy of stage 1;
code.{train,validation}.jsonl for the discriminator.
Out: the reward model, which is also what stage 3 starts its value model from, or the discriminator; with --loss dpo
a policy that needs no stage 3, its own reward model.

    python train_rm.py                                                         # the embedded default, recipe tiny
    python train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_rm.py tldr --sft runs/tldr/sft --data runs/tldr/data
    python train_rm.py tldr --loss dpo                                         # into runs/tldr/dpo
    python train_rm.py stackoverflow --loss regression --out runs/stackoverflow/rm_regression
    python train_rm.py rlcf --encoder microsoft/codebert-base
"""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, load_scalar, save, scalar_from_gpt
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.code.discriminator import (
    Discriminator,
    discriminator_from_encoder,
    save_discriminator,
    triplet_loss,
)
from nanorlhf.code.feedback import check_responses, compiler_for
from nanorlhf.code.transformations import rename_variables
from nanorlhf.dataset import (
    Comparison,
    Demonstration,
    Scored,
    batch_indices,
    iter_jsonl,
    load_comparisons,
    load_demonstrations,
    load_programs,
    load_scored,
    write_jsonl,
)
from nanorlhf.dpo import dpo_loss, pair_logprobs
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT, GPTConfig, ScalarModel, Transformer
from nanorlhf.padding import left_pad, micro_batches
from nanorlhf.reward import pair_scores, response_scores
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer, token_bytes
from nanorlhf.training.memory_plan import rm_plan
from nanorlhf.training.optimizer import FiniteSteps, parameter_groups, train_linear_layers
from nanorlhf.training.resume import StopSignals, load_state
from nanorlhf.training.run import Run, check_output, check_weights
from nanorlhf.training.schedule import lr_factor


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path = Path("runs/tldr/data")
    """directory of comparisons.{train,validation}.jsonl or scored.{train,validation}.jsonl, and of sft.train.jsonl"""
    out: Path | None = None
    """run directory: checkpoint, metrics; None: rm beside --data, with --loss dpo dpo"""
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

    loss: Literal["contrastive", "regression", "dpo"] = "contrastive"
    """contrastive: which of two responses is preferred; regression: the score of one, by squared error; dpo: a policy,
    whose implicit reward says which of two is preferred"""
    dpo_beta: float = 0.05
    """[N+ 19] of DPO: its reward in score units a nat of log(policy / reference); more stays closer to the reference"""
    num_epochs: float = 1.0
    """passes over the comparisons or scored responses"""
    batch_size: int = 64
    """pairs or scored responses an optimizer step, over all processes"""
    micro_batch_size: int = 8
    """pairs or scored responses a forward pass and process; changes memory, not the gradient"""
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
    """of AdamW; PyTorch's default is 1e-8"""
    max_grad_norm: float | None = None
    """longer gradients are shortened to this; None leaves them"""
    max_skipped_steps: int = 3
    """steps in a row that are skipped because loss or gradient are not finite; one more ends the run"""
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
    keep_last: int = 2
    """checkpoints that --resume may go on from: if the newest is damaged, the one before it"""
    resume: bool = False
    """go on from the last checkpoint in --out"""
    overwrite: bool = False
    """replace a run that --out already holds"""
    plan: bool = False
    """print what each part takes of a GPU's memory and the flags that make it fit, from shapes alone; train nothing"""


@dataclass(frozen=True, kw_only=True)
class DiscriminatorArgs:
    data: Path = Path("runs/rlcf/data")
    """directory of code.{train,validation}.jsonl, whose programs people wrote"""
    out: Path = Path("runs/rlcf/discriminator")
    """run directory: discriminator, metrics, the policy's programs"""
    sft: str = "runs/rlcf/sft"
    """the policy that writes the other programs: checkpoint directory or Hub id"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the policy's"""
    encoder: str | None = None
    """directory or Hub id of a pretrained encoder (microsoft/codebert-base); None: random weights of the shape below"""
    n_layer: int = 6
    """shape of an encoder with random weights: layers"""
    n_head: int = 8
    """shape of an encoder with random weights: attention heads"""
    d_model: int = 512
    """shape of an encoder with random weights: width"""
    seed: int = 44413
    """fixes random weights, samples and the order of the data"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward pass; weights and optimizer stay float32"""

    num_triplet_epochs: float = 5.0
    """passes over the problems: programs for one problem are drawn together, those for others pushed away; 0: none"""
    triplet_batch_size: int = 32
    """problems an optimizer step of the triplets, over all processes"""
    triplet_lr: float = 1e-5
    """peak learning rate of the triplets"""
    triplet_margin: float = 0.5
    """by how much a program for another problem has to be farther away, in squared distance"""
    warmup_steps: int = 1000
    """steps of linear warm-up of the triplets"""
    num_rows: int | None = None
    """training rows that the policy answers as well, from the top of the file; None: all"""
    num_pair_epochs: float = 5.0
    """passes over the pairs of a written and a sampled program; 0: none, an ablation of the paper"""
    batch_size: int = 32
    """pairs an optimizer step, over all processes"""
    micro_batch_size: int = 16
    """rows a forward pass and process; changes memory, of the triplets also which program is the hardest"""
    lr: float = 1e-5
    """peak learning rate of AdamW"""
    weight_decay: float = 0.01
    """of AdamW"""
    adam_eps: float = 1e-8
    """of AdamW"""
    max_skipped_steps: int = 3
    """steps in a row that are skipped because loss or gradient are not finite; one more ends the run"""

    error_prone_jar: str | None = None
    """ErrorProne's jars as a class path: its errors count as javac's do"""
    temperature: float = 0.6
    """of the policy's programs"""
    top_p: float = 0.95
    """only the likeliest tokens that reach this probability together are sampled; 1: all"""
    response_length: int = 384
    """tokens sampled at most, EOS included"""
    rollout_batch_size: int = 64
    """responses sampled at once by a process; changes memory, not the result"""
    max_query_length: int = 500
    """longest query in tokens"""
    max_response_length: int = 384
    """longest response in tokens, EOS included"""

    save_every: int = 500
    """steps between checkpoints"""
    keep_last: int = 2
    """checkpoints that --resume may go on from: if the newest is damaged, the one before it"""
    resume: bool = False
    """go on from the last checkpoint in --out"""
    overwrite: bool = False
    """replace a run that --out already holds"""


RECIPES = {
    "tiny": (
        "the embedded world, on a CPU in minutes",
        Args(
            data=Path("runs/tiny/data"),
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
    "str": (
        "STR: pairs of the policy's own answers, as it ranked them",
        Args(
            data=Path("runs/str/data"),
            sft="runs/str/sft",
            batch_size=16,  # this and the next two: not in the paper, those of its PPO
            lr=3e-5,
            schedule="linear",
            adam_eps=1e-8,
            max_response_length=100,
        ),
    ),
    "str-tiny": (
        "the embedded town, on a CPU in minutes",
        Args(
            data=Path("runs/town/data"),
            out=Path("runs/town/rm"),
            sft="runs/town/full",
            seed=1,
            batch_size=16,
            micro_batch_size=16,
            num_epochs=3,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=96,
            max_response_length=32,
        ),
    ),
    "rlcf": ("RLCF: the discriminator, by triplets and on samples of the policy", DiscriminatorArgs()),
    "rlcf-tiny": (
        "the embedded programs, on a CPU in minutes",
        DiscriminatorArgs(
            data=Path("runs/programs/data"),
            out=Path("runs/programs/discriminator"),
            sft="runs/programs/sft",
            n_layer=2,
            n_head=4,
            d_model=96,
            seed=1,
            num_triplet_epochs=1,
            triplet_lr=5e-4,
            warmup_steps=20,
            num_rows=512,
            num_pair_epochs=1,
            micro_batch_size=32,
            lr=5e-4,
            response_length=128,
            rollout_batch_size=512,
            max_query_length=160,
            max_response_length=128,
        ),
    ),
}


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


def implicit_loss(policy: GPT, ref_policy: GPT, rows: list[Comparison], pad_id: int, beta: float) -> tuple[Tensor, ...]:
    """[N+ 19] That of a reward model, on implicit rewards; expect both of them to fall, the rejected one faster."""
    with torch.no_grad():
        ref_logprobs = pair_logprobs(ref_policy, rows, pad_id)
    loss, chosen, rejected = dpo_loss(*pair_logprobs(policy, rows, pad_id), *ref_logprobs, beta)
    sums = (x.detach().sum() for x in (chosen > rejected, chosen - rejected, chosen, rejected))
    return loss.sum(), *sums


def main(args: Args | DiscriminatorArgs) -> dict[str, float]:
    return train_discriminator(args) if isinstance(args, DiscriminatorArgs) else train_reward_model(args)


def train_reward_model(args: Args) -> dict[str, float]:
    if args.plan:
        print(rm_plan(args))
        return {}
    # ------------------------------------------------------------------------------------------------ 1. data and model
    check_ranges(args)
    regression, dpo = args.loss == "regression", args.loss == "dpo"
    if args.out is None:
        args = replace(args, out=args.data.parent / ("dpo" if dpo else "rm"))
    if dpo and args.trainable == "linear":
        raise InputError("--trainable linear trains a reward model's head: pass --trainable all with --loss dpo.")
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
    name, load = ("scored", load_scored) if regression else ("comparisons", load_comparisons)
    train, validation = (load(args.data / f"{name}.{split}.jsonl", *limits) for split in ("train", "validation"))
    pairs = []  # a regression is measured by its ranking as well, where there are pairs
    if regression and (args.data / "comparisons.validation.jsonl").exists():
        pairs = load_comparisons(args.data / "comparisons.validation.jsonl", *limits)
    demonstrations = [] if dpo else load_demonstrations(args.data / "sft.train.jsonl", *limits)
    num_steps = int(args.num_epochs * len(train)) // args.batch_size
    if num_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {len(train)} rows of "
            f"{args.data / f'{name}.train.jsonl'} times --num-epochs {args.num_epochs}: lower it."
        )
    home = device if args.shard == "none" else torch.device("cpu")  # what is sharded goes to the GPU block by block
    if dpo:
        model = load_gpt(args.sft, home).forbid(tokenizer.pad_id, tokenizer.vocab_size)
        ref_policy = copy.deepcopy(model).requires_grad_(False).to(device)  # whole on each rank

        def batch_loss(model: GPT, rows: list[Comparison], pad_id: int) -> tuple[Tensor, ...]:
            return implicit_loss(model, ref_policy, rows, pad_id, args.dpo_beta)
    else:
        model = scalar_from_gpt(load_gpt(args.sft, home)).to(home)  # [N+ 11] a fresh head on the policy's trunk
        batch_loss = regression_loss if regression else contrastive_loss
    statistics = STATISTICS[args.loss]
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
    if args.shard == "fsdp":
        distributed.shard(model, device, args.dtype == "bfloat16")
    groups = parameter_groups(model.parameters(), args.weight_decay, args.decay_vectors)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, fused=True)  # [N+ 10]
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
    stage = "DPO" if dpo else "RM"
    if run.main:
        print(
            f"{stage}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} "
            f"{'scored responses' if regression else 'pairs'}, {num_steps} steps "
            f"of {args.batch_size} in micro-batches of {args.micro_batch_size}, {distributed.world_size()} process(es)"
        )

    @torch.no_grad()
    def validate(rows: list, batch_loss: Callable) -> list[float]:
        """The means of STATISTICS: loss, share of pairs ranked as the labeller did, or of signs that agree, ..."""
        totals, whole = torch.zeros(len(statistics), device=device), distributed.plain(model)
        mine = rows[distributed.rank() :: distributed.world_size()]
        for batch in micro_batches(mine, 4 * args.micro_batch_size):
            with autocast:
                totals += torch.stack(batch_loss(whole, batch, tokenizer.pad_id))
        return (distributed.all_sum(totals) / len(rows)).tolist()

    @torch.no_grad()
    def normalise() -> tuple[float, float]:
        """[N+ 15] Make demonstrations score 0 on average; mean and standard deviation of their scores before.

        The bias is saved with the weights, and the value model inherits it.
        """
        measured = demonstrations[: args.num_normalisation or None]
        whole = distributed.plain(model)
        mine = measured[distributed.rank() :: distributed.world_size()]
        with autocast:
            scores = [
                response_scores(whole, rows, tokenizer.pad_id, "left")
                for rows in micro_batches(mine, 4 * args.micro_batch_size)
            ]
        scores = torch.cat(scores) if scores else torch.zeros(0, device=device)
        moments = distributed.all_sum(torch.stack((scores.sum(), (scores**2).sum()))).tolist()
        mean = moments[0] / len(measured)
        if args.num_normalisation != 0:
            model.reward_bias += mean
        return mean, math.sqrt(max(moments[1] / len(measured) - mean**2, 0.0))

    def write(directory: Path) -> None:
        whole = distributed.plain(model)
        if run.main:
            save(whole, directory, tokenizer)

    def checkpoint(step: int) -> None:
        check_weights(step - 1, model)
        write(args.out)
        run.save_state(step, model=model.state_dict(), steps=steps.state_dict(), best_loss=best_loss)
        distributed.barrier()

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    progress = tqdm(range(first_step, num_steps), initial=first_step, total=num_steps, desc=stage, disable=not run.main)
    signals = StopSignals()
    for step in progress:
        batch = [train[i] for i in batch_indices(len(train), args.batch_size, step, args.seed)]
        totals = torch.zeros(len(statistics), device=device)
        optimizer.zero_grad()
        for rows in micro_batches(batch[distributed.rank_slice(args.batch_size)], args.micro_batch_size):
            with autocast:
                loss, *sums = batch_loss(model, rows, tokenizer.pad_id)
            (loss / args.batch_size).backward()
            totals += torch.stack((loss.detach(), *sums))
        distributed.sum_gradients(model)
        means = (distributed.all_sum(totals) / args.batch_size).tolist()
        mean_loss, accuracy, *_ = means
        lr = args.lr * lr_factor(args.schedule, step, num_steps, args.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        steps.step(model.parameters(), mean_loss, args.max_grad_norm)

        metrics = dict(zip(statistics, means, strict=True))
        metrics |= {"lr": lr, "episode": (step + 1) * args.batch_size, "skipped_steps": steps.skipped}
        if step + 1 < num_steps and (step + 1) % args.eval_every == 0:
            means = zip(statistics, validate(validation, batch_loss), strict=True)
            metrics |= {f"validation_{name}": mean for name, mean in means}
            if metrics["validation_loss"] < best_loss:
                best_loss = metrics["validation_loss"]
                write(args.out / "best")
        run.log(step, metrics)
        progress.set_postfix(loss=f"{mean_loss:.3f}", accuracy=f"{accuracy:.2f}")
        stopping = signals.received()
        if step + 1 == num_steps or stopping or (step + 1) % args.save_every == 0:
            checkpoint(step + 1)
        if stopping:
            signals.stop(args.out, step + 1)
    signals.restore()

    # ----------------------------------------------------------------------- 3. normalise, measure, save
    summary = {}
    if not dpo:  # an implicit reward begins at 0, and what all responses to a query have in common means nothing
        mean, std = normalise()
        # [N+ 14] PPO pads queries on the left, training padded on the right: how far apart are the scores?
        rows = demonstrations[: 4 * args.micro_batch_size]
        whole = distributed.plain(model)
        with autocast, torch.no_grad():
            left, right = (response_scores(whole, rows, tokenizer.pad_id, side) for side in ("left", "right"))
        summary = {
            "padding_difference": (left - right).abs().mean().item(),
            "reward_mean_before_normalisation": mean,
            "reward_std": std,
        }
    means = zip(statistics, validate(validation, batch_loss), strict=True)
    summary |= {f"validation_{name}": mean for name, mean in means}
    summary |= {"num_validation_rows" if regression else "num_validation_pairs": len(validation), "steps": num_steps}
    if regression:
        positive = sum(row.score >= 0 for row in validation) / len(validation)
        summary["validation_majority_sign"] = max(positive, 1 - positive)  # what a constant would reach
    if pairs:
        _, summary["validation_pair_accuracy"], _ = validate(pairs, contrastive_loss)
    write(args.out)
    best_is_last = not best_loss < summary["validation_loss"]
    if not (best_is_last or dpo):  # it is normalised as well
        distributed.load_model(model, load_scalar(args.out / "best").state_dict())
        model.reward_bias.zero_()
        normalise()
    if best_is_last or not dpo:
        write(args.out / "best")
    run.log(num_steps, summary)
    run.finish(summary)
    if run.main:
        kind = "sign accuracy" if regression else "accuracy"
        print(f"{stage}: {kind} {summary['validation_accuracy']:.3f} on {len(validation)} validation rows; ", end="")
        if dpo:
            chosen, rejected = (summary[f"validation_{name}_reward"] for name in ("chosen", "rejected"))
            print(f"the chosen have a reward of {chosen:.2f}, the rejected of {rejected:.2f}")
        else:
            shift = " before normalisation, 0 after" if args.num_normalisation != 0 else ""
            print(
                f"demonstrations score {mean:.2f} +- {std:.2f}{shift}; left and right padding differ by "
                f"{summary['padding_difference']:.1e}"
            )
        if regression:
            print(f"    {summary['validation_majority_sign']:.3f} of the validation scores have the same sign")
        if pairs:
            print(f"    ranks {summary['validation_pair_accuracy']:.3f} of {len(pairs)} validation pairs as voted")
    return summary


# -------------------------------------------------------------------------------- programs of people and of the policy
def sample_programs(args: DiscriminatorArgs, rows: list[Demonstration], device) -> list[tuple[str, bool]]:
    """One response of the policy to each row, and whether it passes the static checks."""
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    policy = load_gpt(args.sft, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    world, T, pieces = distributed.world_size(), args.response_length, token_bytes(tokenizer)
    shared = rows + rows[: -len(rows) % world]  # each process takes as many
    generator = torch.Generator().manual_seed(args.seed)
    uniforms = torch.rand((len(shared), T), generator=generator, dtype=torch.float64)
    mine = distributed.rank_slice(len(shared))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    samples = []
    with compiler_for(rows[0].record["language"], args.error_prone_jar) as compiler:
        progress = tqdm(total=len(shared[mine]), desc="samples", disable=distributed.rank() != 0)
        for batch, u in zip(
            micro_batches(shared[mine], args.rollout_batch_size),
            micro_batches(uniforms[mine], args.rollout_batch_size),
            strict=True,
        ):
            query = left_pad([row.query for row in batch], tokenizer.pad_id).to(device)  # (b, Q)
            with autocast, torch.no_grad():
                response, _ = generate(
                    policy, query, query != tokenizer.pad_id, T, args.temperature, top_p=args.top_p,
                    eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, uniforms=u,
                )  # fmt: skip
            checked = check_responses([row.record for row in batch], response, compiler, pieces, tokenizer.eos_id)
            samples += zip(checked.texts, checked.passes.tolist(), strict=True)
            progress.update(len(batch))
        progress.close()
    return distributed.all_gather_objects(samples)[: len(rows)]


def train_discriminator(args: DiscriminatorArgs) -> dict[str, float]:
    # ------------------------------------------------------------------------------------------------ 1. data and model
    check_ranges(args)
    check_output(args.out, args.overwrite, args.resume)
    device = distributed.setup(args.device)
    torch.manual_seed(args.seed)
    world = distributed.world_size()
    for flag, size in (("batch-size", args.batch_size), ("triplet-batch-size", args.triplet_batch_size)):
        if size % world:
            raise InputError(f"--{flag} {size} can't be shared by {world} processes: make it a multiple of that.")
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    limits = tokenizer, args.max_query_length, args.max_response_length
    train, validation = (
        load_programs(args.data / f"code.{split}.jsonl", *limits, needs_response=True)
        for split in ("train", "validation")
    )
    if args.encoder is None:
        if args.d_model % args.n_head or args.d_model // args.n_head < 2:
            raise InputError(f"--n-head {args.n_head} must divide --d-model {args.d_model} into heads at least 2 wide.")
        config = GPTConfig(
            vocab_size=tokenizer.vocab_size,
            n_ctx=args.max_query_length + max(args.max_response_length, args.response_length) + 2,
            d_model=args.d_model,
            n_layer=args.n_layer,
            n_head=args.n_head,
            d_mlp=4 * args.d_model,
            rotary_dim=max(2, args.d_model // args.n_head // 4 * 2),
            causal=False,  # [RLCF discriminator] an encoder
        )
        model = Discriminator(Transformer(config), tokenizer, config.n_ctx).to(device)
    else:
        model = discriminator_from_encoder(args.encoder).to(device)
    groups = parameter_groups(model.parameters(), args.weight_decay, decay_vectors=True)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, fused=True)
    steps = FiniteSteps(
        optimizer,
        args.max_skipped_steps,
        f"lower --lr ({args.lr}) or --triplet-lr ({args.triplet_lr}); {args.out} keeps the last checkpoint that was "
        "saved before.",
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    # programs that solve the same problem; a lone one is its own twin under other names
    solutions: dict[str, list[str]] = {}
    for row in train:
        record = row.record
        program = record["prefix"] + record["response"] + record["suffix"]
        problem = str(record.get("meta", {}).get("problem", program))
        if program not in solutions.setdefault(problem, []):
            solutions[problem].append(program)
    problems = list(solutions.values())
    language = train[0].record["language"]
    num_triplet_steps = int(args.num_triplet_epochs * len(problems)) // args.triplet_batch_size

    train = train[: args.num_rows]
    first_step = 0
    if args.resume:
        state = load_state(args.out, args, must_stay=("micro_batch_size",))
        model.load_state_dict(state["model"])
        steps.load_state_dict(state["steps"])
        first_step = state["step"]
        generated = [(row["response"], row["passes"]) for _, row in iter_jsonl(args.out / "generated.jsonl")]
    else:
        generated = sample_programs(args, train + validation, device)
    # [RLCF discriminator] only between programs that pass: of the others the compiler has spoken already;
    # and what the policy knows by heart has nothing to tell
    pairs, held_out = (
        [
            (row, text)
            for row, (text, passes) in zip(rows, samples, strict=True)
            if passes and text != row.record["response"]
        ]
        for rows, samples in ((train, generated[: len(train)]), (validation, generated[len(train) :]))
    )
    compile_rate = sum(passes for _, passes in generated) / len(generated)
    num_pair_steps = int(args.num_pair_epochs * len(pairs)) // args.batch_size
    num_steps = num_triplet_steps + num_pair_steps
    if args.num_pair_epochs and num_pair_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {len(pairs)} of {len(train)} sampled programs that pass "
            f"the static checks, times --num-pair-epochs {args.num_pair_epochs}: lower it, or train the policy longer."
        )
    run = Run(args.out, args, first_step)
    if run.main and not args.resume:
        rows = [{"response": text, "passes": passes} for text, passes in generated]
        write_jsonl(args.out / "generated.jsonl", rows)
    if run.main:
        print(
            f"Discriminator: {sum(p.numel() for p in model.parameters()):,} parameters, {num_triplet_steps} steps on "
            f"triplets of {len(problems):,} problems, {num_pair_steps} on {len(pairs):,} pairs; {compile_rate:.1%} of "
            f"the policy's programs pass the static checks"
        )

    def triplets(step: int) -> list[tuple[int, str, str]]:
        """Problem, anchor, positive."""
        indices = batch_indices(len(problems), args.triplet_batch_size, step, args.seed)
        rows = []
        for place, index in enumerate(indices):
            draw = random.Random(f"{args.seed} {step} {place}")
            two = draw.sample(problems[index], min(2, len(problems[index])))
            rows.append((index, two[0], two[1] if len(two) > 1 else rename_variables(two[0], language, draw)))
        return rows

    def pair_loss(rows: list[tuple[Demonstration, str]]) -> tuple[Tensor, Tensor]:
        """Sums over the pairs: D(x, y', y), and how many y' it finds out."""
        queries, written = ([row.record[name] for row, _ in rows] for name in ("query", "response"))
        comparison = model.compare(queries, [text for _, text in rows], written)
        return comparison.sum(), (comparison < 0).sum()  # [RLCF section 4] the generated one comes first

    @torch.no_grad()
    def validate() -> tuple[float, float]:
        totals = torch.zeros(2, device=device)
        for rows in micro_batches(held_out[distributed.rank() :: world], args.micro_batch_size):
            with autocast:
                totals += torch.stack(pair_loss(rows))
        loss, accuracy = (distributed.all_sum(totals) / max(len(held_out), 1)).tolist()
        return loss, accuracy

    def checkpoint(step: int) -> None:
        check_weights(step - 1, model)
        if run.main:
            save_discriminator(model, args.out)
        run.save_state(step, model=model.state_dict(), steps=steps.state_dict())
        distributed.barrier()

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    progress = tqdm(
        range(first_step, num_steps), initial=first_step, total=num_steps, desc="discriminator", disable=not run.main
    )
    signals = StopSignals()
    for step in progress:
        is_triplet = step < num_triplet_steps
        totals = torch.zeros(2, device=device)  # loss, rows that are right
        optimizer.zero_grad()
        if is_triplet:  # 2.1 [RLCF pretraining] programs for one problem lie together
            size = args.triplet_batch_size
            for rows in micro_batches(triplets(step)[distributed.rank_slice(size)], args.micro_batch_size):
                with autocast:
                    both = model.embed([""] * 2 * len(rows), [row[1] for row in rows] + [row[2] for row in rows])
                anchors, positives = both.float().chunk(2)  # (b, C)
                indices = torch.tensor([row[0] for row in rows], device=device)
                loss, num_right = triplet_loss(anchors, positives, indices, args.triplet_margin)
                (loss / size).backward()
                totals += torch.stack((loss.detach(), num_right))
            lr = args.triplet_lr * lr_factor("linear", step, num_triplet_steps, args.warmup_steps)
        else:  # 2.2 programs of people against the policy's
            size, first = args.batch_size, step - num_triplet_steps
            batch = [pairs[i] for i in batch_indices(len(pairs), size, first, args.seed)]
            for rows in micro_batches(batch[distributed.rank_slice(size)], args.micro_batch_size):
                with autocast:
                    loss, num_right = pair_loss(rows)
                (loss / size).backward()
                totals += torch.stack((loss.detach(), num_right))
            lr = args.lr * lr_factor("linear", first, num_pair_steps)
        distributed.sum_gradients(model)
        mean_loss, accuracy = (distributed.all_sum(totals) / size).tolist()
        for group in optimizer.param_groups:
            group["lr"] = lr
        steps.step(model.parameters(), mean_loss)
        stage = "triplet" if is_triplet else "discriminator"
        metrics = {f"{stage}/loss": mean_loss, f"{stage}/accuracy": accuracy, "lr": lr}
        run.log(step, metrics | {"skipped_steps": steps.skipped})
        progress.set_postfix(**{stage: f"{mean_loss:.3f}"}, accuracy=f"{accuracy:.2f}")
        stopping = signals.received()
        if step + 1 == num_steps or stopping or (step + 1) % args.save_every == 0:
            checkpoint(step + 1)
        if stopping:
            signals.stop(args.out, step + 1)
    signals.restore()

    # ------------------------------------------------------------------------------------------------ 3. measure, save
    loss, accuracy = validate()
    summary = {
        "validation_loss": loss,
        "validation_accuracy": accuracy,
        "num_validation_pairs": len(held_out),
        "compile_rate": compile_rate,
        "steps": num_steps,
    }
    run.log(num_steps, summary)
    run.finish(summary)
    if run.main:
        print(
            f"Discriminator: tells the policy's program from the written one in {accuracy:.1%} of {len(held_out)} "
            f"validation pairs that both pass"
        )
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
