"""The discriminator of RLCF: it learns to tell programs of people from programs of the policy.

Paper: Coarse-Tuning Models of Code with Reinforcement Learning Feedback, section 4 and the appendix. First triplets:
programs for one problem lie together, those for others apart. Then pairs: the policy answers the prompts of the
training rows, and its program is compared with the written one where both pass the static checks.
In: code.{train,validation}.jsonl, the policy of stage 1, and an encoder such as CodeBERT (or none: random weights).
Out: the discriminator, which scores the programs that pass the compiler in stage 3.

    python -m nanorlhf.code.train_discriminator --encoder microsoft/codebert-base
    python -m nanorlhf.code.train_discriminator rlcf-tiny                      # the embedded programs
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, command_line
from nanorlhf.code.discriminator import Discriminator, discriminator_from_encoder, save_discriminator, triplet_loss
from nanorlhf.code.feedback import check_responses, compiler_for
from nanorlhf.code.transformations import rename_variables
from nanorlhf.dataset import Demonstration, batch_indices, iter_jsonl, load_programs, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import Transformer
from nanorlhf.padding import left_pad, micro_batches
from nanorlhf.recipes import recipes
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, token_bytes
from nanorlhf.training.optimizer import FiniteSteps, parameter_groups
from nanorlhf.training.run import Run, begin
from nanorlhf.training.schedule import lr_factor
from nanorlhf.training.settings import RunArgs
from nanorlhf.training.supervised import Sums, autocast, backward, evaluate, new_shape


@dataclass(frozen=True, kw_only=True)
class Args(RunArgs):
    sft: str = "runs/rlcf/sft"
    """the policy that writes the other programs: checkpoint directory or Hub id"""
    encoder: str | None = None
    """directory or Hub id of a pretrained encoder (microsoft/codebert-base); None: random weights of the shape below"""
    n_layer: PositiveInt = 6
    """layers of an encoder with random weights"""
    n_head: PositiveInt = 8
    """attention heads of an encoder with random weights"""
    d_model: PositiveInt = 512
    """width of an encoder with random weights"""

    num_triplet_epochs: NonNegativeFloat
    """passes over the problems: programs for one problem are drawn together, those for others pushed away; 0: none"""
    triplet_batch_size: PositiveInt = 32
    """problems per optimizer step on triplets, over all ranks"""
    triplet_lr: NonNegativeFloat
    """peak learning rate of the triplets"""
    triplet_margin: NonNegativeFloat = 0.5
    """how much farther away, in squared distance, a program for another problem has to be"""
    warmup_steps: NonNegativeInt
    """optimizer steps of linear warm-up of the triplets"""
    num_pair_epochs: NonNegativeFloat
    """passes over the pairs of a written and a sampled program; 0: none, an ablation of the paper"""
    num_rows: PositiveInt | None = None
    """training rows that the policy answers, from the top of the file; None: all"""
    batch_size: PositiveInt = 32
    """pairs per optimizer step, over all ranks"""
    micro_batch_size: PositiveInt = 16
    """rows per forward pass and rank; changes memory, and of the triplets also which program is the hardest"""
    adam_eps: PositiveFloat = 1e-8
    """of AdamW"""

    error_prone_jar: str | None = None
    """ErrorProne's jars as a class path: its errors count as javac's do"""
    temperature: NonNegativeFloat = 0.6
    """of the policy's programs"""
    top_p: Fraction = 0.95
    """nucleus sampling: the likeliest tokens that together reach this probability; 1: all"""
    response_length: PositiveInt
    """longest sampled response in tokens, EOS included"""
    rollout_batch_size: PositiveInt = 64
    """responses sampled at once per rank; changes memory, not the result"""
    max_response_length: PositiveInt
    """longest written response in tokens, EOS included"""


RECIPES = recipes("discriminator", Args)


# ------------------------------------------------------------------------------------------------ the policy's programs
def sample_programs(args: Args, rows: list[Demonstration], device: torch.device) -> list[tuple[str, bool]]:
    """One response of the policy to each row, and whether it passes the static checks."""
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    policy = load_gpt(args.sft, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    T, pieces = args.response_length, token_bytes(tokenizer)
    shared = rows + rows[: -len(rows) % distributed.world_size()]  # as many for each rank
    generator = torch.Generator().manual_seed(args.seed)
    uniforms = torch.rand((len(shared), T), generator=generator, dtype=torch.float64)
    mine = distributed.rank_slice(len(shared))
    batches = micro_batches(shared[mine], args.rollout_batch_size)
    samples: list[tuple[str, bool]] = []
    with compiler_for(rows[0].record["language"], args.error_prone_jar) as compiler:
        progress = tqdm(total=len(shared[mine]), desc="samples", disable=distributed.rank() != 0)
        for batch, u in zip(batches, micro_batches(uniforms[mine], args.rollout_batch_size), strict=True):
            query = left_pad([row.query for row in batch], tokenizer.pad_id).to(device)  # (b, Q)
            with torch.no_grad(), autocast(args, device):
                response, _ = generate(
                    policy, query, query != tokenizer.pad_id, T, args.temperature, top_p=args.top_p,
                    eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, uniforms=u,
                )  # fmt: skip
            checked = check_responses([row.record for row in batch], response, compiler, pieces, tokenizer.eos_id)
            samples += zip(checked.texts, checked.passes.tolist(), strict=True)
            progress.update(len(batch))
        progress.close()
    return distributed.all_gather_objects(samples)[: len(rows)]


def read_programs(args: Args, num_rows: int) -> list[tuple[str, bool]]:
    """What `sample_programs` gave when the run that is resumed was started."""
    path = args.out / "generated.jsonl"
    samples = [(row["response"], row["passes"]) for _, row in iter_jsonl(path)]
    if len(samples) != num_rows:
        raise InputError(
            f"--resume: {path} holds {len(samples)} programs, not {num_rows}: pass the --data and --num-rows that the "
            "run was started with, or start anew with --overwrite."
        )
    return samples


# ------------------------------------------------------------------------------------------------------------ triplets
def solutions(rows: list[Demonstration]) -> list[list[str]]:
    """The programs that solve each problem; rows that name no problem are problems of their own."""
    problems: dict[str, list[str]] = {}
    for row in rows:
        record = row.record
        program = record["prefix"] + record["response"] + record["suffix"]
        problem = str(record.get("meta", {}).get("problem", program))
        if program not in problems.setdefault(problem, []):
            problems[problem].append(program)
    return list(problems.values())


def draw_triplets(args: Args, problems: list[list[str]], language: str, step: int) -> list[tuple[int, str, str]]:
    """Problem, anchor, positive; a program alone with its problem is its own positive, its variables renamed."""
    rows = []
    for place, index in enumerate(batch_indices(len(problems), args.triplet_batch_size, step, args.seed)):
        draw = random.Random(f"{args.seed} {step} {place}")
        two = draw.sample(problems[index], min(2, len(problems[index])))
        rows.append((index, two[0], two[1] if len(two) > 1 else rename_variables(two[0], language, draw)))
    return rows


# --------------------------------------------------------------------------------------------------------------- pairs
Pair = tuple[Demonstration, str]  # a row with the written program, and the policy's


def pairs_that_pass(rows: list[Demonstration], samples: list[tuple[str, bool]]) -> list[Pair]:
    """Where the policy's program passes the static checks and is not the written one. [RLCF discriminator]

    The compiler has decided the others already, and what the policy knows by heart teaches nothing.
    """
    both = zip(rows, samples, strict=True)
    return [(row, text) for row, (text, passes) in both if passes and text != row.record["response"]]


def pair_loss(model: Discriminator, rows: list[Pair]) -> tuple[Tensor, Tensor]:
    """Sums over the pairs: D(x, y', y), and how many y' it finds out."""
    queries, written = ([row.record[name] for row, _ in rows] for name in ("query", "response"))
    comparison = model.compare(queries, [text for _, text in rows], written)
    return comparison.sum(), (comparison < 0).sum()  # [RLCF section 4] the generated one comes first


# ------------------------------------------------------------------------------------------------------------- the run
def new_discriminator(args: Args, tokenizer: Tokenizer) -> Discriminator:
    """From a pretrained encoder, or from random weights."""
    if args.encoder is not None:
        return discriminator_from_encoder(args.encoder)
    n_ctx = args.max_query_length + max(args.max_response_length, args.response_length) + 2
    config = new_shape(args, tokenizer.vocab_size, n_ctx, causal=False)  # [RLCF discriminator] an encoder
    return Discriminator(Transformer(config), tokenizer, n_ctx)


def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------------------------------ 1. data and model
    device = begin(args, "batch_size", "triplet_batch_size")
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    limits = tokenizer, args.max_query_length, args.max_response_length
    train, validation = (
        list(load_programs(args.data / f"code.{split}.jsonl", *limits, needs_response=True))
        for split in ("train", "validation")
    )
    model = new_discriminator(args, tokenizer).to(device)
    groups = parameter_groups(model.parameters(), args.weight_decay, decay_vectors=True)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, eps=args.adam_eps, fused=True)
    steps = FiniteSteps(optimizer, args, f"lower --lr ({args.lr}) or --triplet-lr ({args.triplet_lr})")

    problems, language = solutions(train), train[0].record["language"]
    num_triplet_steps = int(args.num_triplet_epochs * len(problems)) // args.triplet_batch_size
    answered = train[: args.num_rows]
    if args.resume:
        samples = read_programs(args, len(answered + validation))
    else:
        samples = sample_programs(args, answered + validation, device)
    compile_rate = sum(passes for _, passes in samples) / len(samples)
    pairs = pairs_that_pass(answered, samples[: len(answered)])
    held_out = pairs_that_pass(validation, samples[len(answered) :])
    num_pair_steps = int(args.num_pair_epochs * len(pairs)) // args.batch_size
    if args.num_pair_epochs and num_pair_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {len(pairs)} of {len(answered)} sampled programs that "
            f"pass the static checks, times --num-pair-epochs {args.num_pair_epochs}: lower it, or train the policy "
            "longer."
        )

    def margin_loss(model: Discriminator, rows: list[tuple[int, str, str]]) -> tuple[Tensor, Tensor]:
        """Sums over the triplets: the loss, and how many of them are right."""
        both = model.embed([""] * 2 * len(rows), [row[1] for row in rows] + [row[2] for row in rows])
        indices = torch.tensor([row[0] for row in rows], device=device)
        anchors, positives = both.float().chunk(2)  # (b, C)
        with torch.autocast(device.type, enabled=False):  # squared distances in float32
            return triplet_loss(anchors, positives, indices, args.triplet_margin)

    def write() -> None:
        if distributed.rank() == 0:
            save_discriminator(model, args.out)

    # micro-batches decide which programs of a triplet can be the negative
    run = Run(args, "discriminator", {"model": model, "steps": steps}, write, must_stay=("micro_batch_size",))
    if run.main and not args.resume:
        run.opened()
        write_jsonl(args.out / "generated.jsonl", [{"response": text, "passes": passes} for text, passes in samples])
    run.print(
        f"Discriminator: {sum(p.numel() for p in model.parameters()):,} parameters, {num_triplet_steps} steps on "
        f"triplets of {len(problems):,} problems, {num_pair_steps} on {len(pairs):,} pairs; {compile_rate:.1%} of "
        "the policy's programs pass the static checks"
    )

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    for step in run.steps(num_triplet_steps + num_pair_steps):
        batch: list[Any]
        batch_loss: Sums
        if step < num_triplet_steps:  # 2.1 [RLCF pretraining] programs for one problem lie together
            stage, batch, batch_loss = "triplet", draw_triplets(args, problems, language, step), margin_loss
            lr = args.triplet_lr * lr_factor("linear", step, num_triplet_steps, args.warmup_steps)
        else:  # 2.2 programs of people against the policy's
            pair_step = step - num_triplet_steps
            indices = batch_indices(len(pairs), args.batch_size, pair_step, args.seed)
            stage, batch, batch_loss = "discriminator", [pairs[i] for i in indices], pair_loss
            lr = args.lr * lr_factor("linear", pair_step, num_pair_steps)
        mean_loss, accuracy = backward(model, batch, batch_loss, len(batch), args).tolist()
        steps.set_lr(lr)
        steps.step(model.parameters(), mean_loss)
        metrics = {f"{stage}/loss": mean_loss, f"{stage}/accuracy": accuracy, "lr": lr, "skipped_steps": steps.skipped}
        run.log(step, metrics, **{stage: f"{mean_loss:.3f}"}, accuracy=f"{accuracy:.2f}")

    # ------------------------------------------------------------------------------------------------ 3. measure, save
    totals = evaluate(model, held_out, pair_loss, 2, args.micro_batch_size, args)
    validation_loss, validation_accuracy = (totals / max(len(held_out), 1)).tolist()
    summary = {
        "validation_loss": validation_loss,
        "validation_accuracy": validation_accuracy,
        "num_validation_pairs": len(held_out),
        "compile_rate": compile_rate,
        "steps": num_triplet_steps + num_pair_steps,
    }
    run.log(num_triplet_steps + num_pair_steps, summary)
    run.finish(summary)
    run.print(
        f"Discriminator: tells the policy's program from the written one in {validation_accuracy:.1%} of "
        f"{len(held_out)} validation pairs that both pass"
    )
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
