"""Train RLCF's discriminator, which learns to distinguish human-written programs from the policy's.

Paper: Coarse-Tuning Models of Code with Reinforcement Learning Feedback, section 4 and the appendix. First, triplets
pull programs for the same problem together and push others away. Then pairs: the policy answers the training prompts,
and its program is compared with the written one if both pass the static checks. Sampling may take longer than
training, so --resume continues it too.
In: code.{train,validation}.jsonl, the policy of stage 1, and an encoder such as CodeBERT (or none: random weights).
Out: the discriminator, which scores the programs that pass the compiler in stage 3.

    python -m nanorlhf.rlcf.train_discriminator --encoder microsoft/codebert-base
    python -m nanorlhf.rlcf.train_discriminator rlcf-tiny                      # the embedded programs
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt
from nanorlhf.cli import (
    Count,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    TemperatureOrGreedy,
    command_line,
    exact,
)
from nanorlhf.dataset import (
    Demonstration,
    batch_indices,
    field,
    iter_jsonl,
    load_programs,
    sampled_rows,
    write_jsonl,
)
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import Transformer
from nanorlhf.padding import left_pad
from nanorlhf.progress import Progress
from nanorlhf.recipes import recipes
from nanorlhf.rlcf.discriminator import Discriminator, discriminator_from_encoder, save_discriminator, triplet_loss
from nanorlhf.rlcf.feedback import check_responses, training_compiler
from nanorlhf.rlcf.transformations import rename_variables
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, token_bytes
from nanorlhf.training.input_digests import digest_inputs
from nanorlhf.training.optimizer import adamw_steps, check_warmup, lr_factor
from nanorlhf.training.resume import changes, fitting
from nanorlhf.training.run import SAMPLING, Run, begin
from nanorlhf.training.settings import AdamSettings, RunArgs
from nanorlhf.training.supervised import Sums, autocast, backward, evaluate, new_config


@dataclass(frozen=True, kw_only=True)
class Args(RunArgs):
    sft: str = "runs/rlcf/sft"
    """the policy whose programs are compared with written ones: checkpoint directory or Hub id"""
    encoder: str | None = None
    """directory or Hub id of a pretrained encoder (microsoft/codebert-base); None: random weights, shape below"""
    n_layer: PositiveInt = 6
    """layers of an encoder with random weights"""
    n_head: PositiveInt = 8
    """attention heads of an encoder with random weights"""
    d_model: PositiveInt = 512
    """width of an encoder with random weights"""

    num_triplet_epochs: NonNegativeFloat
    """passes over the programs, each the anchor of one triplet; 0: no triplets"""
    triplet_batch_size: Count = 32
    """anchors per optimizer step on triplets, over all ranks"""
    triplet_lr: NonNegativeFloat
    """peak learning rate on triplets"""
    triplet_margin: NonNegativeFloat = 0.5
    """margin of the triplet loss, a squared distance"""
    warmup_steps: NonNegativeInt
    """optimizer steps of linear warm-up on triplets"""
    num_pair_epochs: NonNegativeFloat
    """passes over the pairs of a written and a sampled program; 0: no sampling (the paper's Table 4)"""
    num_rows: PositiveInt | None = None
    """training rows that the policy answers, from the top of the file; None: all"""
    batch_size: Count = 32
    """pairs per optimizer step, over all ranks"""
    micro_batch_size: PositiveInt = 16
    """rows per forward pass and rank; changes memory and, for triplets, which program is the hardest negative"""
    adam: AdamSettings = AdamSettings(eps=1e-8)
    eval_every: PositiveInt = 200
    """steps between measurements of the accuracy on validation pairs"""

    error_prone_jar: str | None = None
    """ErrorProne's jars as a class path: its errors count like javac's"""
    temperature: TemperatureOrGreedy = 0.6
    """sampling temperature of the policy's programs"""
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
Sample = dict[str, Any]  # "response": the policy's; "passes": whether its program passes the static checks


def sample_programs(args: Args, rows: list[Demonstration], device: torch.device) -> list[Sample]:
    """Sample one response of the policy for each row.

    Appends each batch to a file in --out, so that --resume can continue.
    """
    path, size = args.out / SAMPLING, args.rollout_batch_size * distributed.world_size()
    samples = distributed.from_first(lambda: begin_sampling(args, path, len(rows), size))
    tokenizer = load_tokenizer(args.sft)
    policy = load_gpt(args.sft, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    T, pieces = args.response_length, token_bytes(tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    uniforms = torch.rand((len(rows), T), generator=generator, dtype=torch.float64)  # the same on every rank
    is_first = distributed.rank() == 0
    progress = Progress(total=len(rows), initial=len(samples), desc="samples", disable=not is_first)
    with training_compiler(rows, args.error_prone_jar) as compiler:
        for start in range(len(samples), len(rows), size):
            first = start + distributed.rank() * args.rollout_batch_size
            local_rows = slice(first, min(first + args.rollout_batch_size, start + size))
            local_samples: list[Sample] = []
            if batch := rows[local_rows]:  # in the last batch, a rank may have no rows
                query = left_pad([row.query for row in batch], tokenizer.pad_id).to(device)  # (b, Q)
                with torch.no_grad(), autocast(args.dtype, device):
                    response, _ = generate(
                        policy, query, query != tokenizer.pad_id, T, args.temperature, top_p=args.top_p,
                        eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, uniforms=uniforms[local_rows],
                        stop_ids=tokenizer.stop_ids,
                    )  # fmt: skip
                checked = check_responses([row.record for row in batch], response, compiler, pieces, tokenizer.eos_id)
                checked_pairs = zip(checked.texts, checked.passes.tolist(), strict=True)
                local_samples = [{"response": text, "passes": passes} for text, passes in checked_pairs]
            batch_samples = distributed.all_gather_objects(local_samples)
            if is_first:
                with path.open("a", encoding="ascii") as file:
                    file.writelines(json.dumps(row) + "\n" for row in batch_samples)
            samples += batch_samples
            progress.update(len(batch_samples))
    progress.close()
    return samples


def data_files(args: Args) -> list[Path]:
    return [args.data / f"code.{split}.jsonl" for split in ("train", "validation")]


def begin_sampling(args: Args, path: Path, num_rows: int, size: int) -> list[Sample]:
    """Open the file of samples. When resuming, return the samples it already contains, in whole batches of `size`.

    Its first line records the settings and the digests of the files that the samples depend on. Raises InputError if
    they differ.
    """
    names = ("data", "num_rows", "sft", "seed", "dtype", "temperature", "top_p", "response_length")
    settings = {name: str(getattr(args, name)) for name in (*names, "max_query_length", "error_prone_jar")}
    settings["rows"] = str(num_rows)
    inputs = digest_inputs(args, data_files(args))
    done: list[Sample] = []
    if args.resume:
        done = as_samples(sampled_rows(path, settings))
        with path.open("rb") as file, fitting(path):
            first = file.readline()
            changed = changes(json.loads(first).get("inputs", {}), inputs) if first.endswith(b"\n") else []
        for change in changed:
            raise InputError(
                f"--resume: {change} since the sampling in {path} was started: restore it, or start again with "
                "--overwrite."
            )
    if len(done) < num_rows:  # keep whole batches, so that rounding is the same as in an uninterrupted run
        done = done[: len(done) // size * size]
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, [settings | {"inputs": inputs}, *done])
    return done


def as_samples(rows: Iterable[tuple[str, dict]]) -> list[Sample]:
    """Convert rows, each with its `file:line`, to samples. Raises InputError for a missing or malformed field."""
    kinds: dict[str, type] = {"response": str, "passes": bool}
    return [{name: field(row, name, kind, where) for name, kind in kinds.items()} for where, row in rows]


def read_programs(args: Args, num_rows: int) -> list[Sample]:
    """Read what `sample_programs` returned before the run was interrupted."""
    path = args.out / "generated.jsonl"
    samples = as_samples(iter_jsonl(path))
    if len(samples) != num_rows:
        raise InputError(
            f"--resume: {path} has {len(samples)} programs, expected {num_rows}: pass the original --data and "
            "--num-rows, or start again with --overwrite."
        )
    return samples


# ------------------------------------------------------------------------------------------------------------ triplets
class Programs:
    """The distinct programs of some rows, grouped by problem; a row without a problem is a problem by itself."""

    def __init__(self, rows: list[Demonstration]):
        problems: dict[str, dict[str, None]] = {}  # problem -> its programs, in order
        for row in rows:
            record = row.record
            program = record["prefix"] + record["response"] + record["suffix"]
            problem = str(record.get("meta", {}).get("problem", program))
            problems.setdefault(problem, {})[program] = None
        self.problems, self.language = [list(programs) for programs in problems.values()], rows[0].record["language"]
        self.anchors = [(index, program) for index, programs in enumerate(self.problems) for program in programs]

    def triplet(self, number: int, draw: random.Random) -> tuple[int, str, str]:
        """[RLCF pretraining] Return a program's problem, the program (anchor) and another program for it (positive).

        If a problem has only one program, the positive is that program with its variables renamed. The loss picks the
        hardest negative in the batch.
        """
        problem, anchor = self.anchors[number]
        alternatives = [program for program in self.problems[problem] if program != anchor]
        positive = draw.choice(alternatives) if alternatives else rename_variables(anchor, self.language, draw)
        return problem, anchor, positive


# --------------------------------------------------------------------------------------------------------------- pairs
Pair = tuple[Demonstration, str]  # a row with the written program, and the policy's


def pairs_that_pass(rows: list[Demonstration], samples: list[Sample]) -> list[Pair]:
    """Return the pairs whose sampled program passes the static checks and differs from the written one.
    [RLCF discriminator]

    The compiler already decides the others, and nothing can be learned from a copy of the written program.
    """
    both = ((row, sample["response"]) for row, sample in zip(rows, samples, strict=True) if sample["passes"])
    return [(row, text) for row, text in both if text != row.record["response"]]


def pair_loss(model: Discriminator, rows: list[Pair]) -> tuple[Tensor, Tensor]:
    """Return sums over the pairs: D(x, y', y), and the number of y' it recognises."""
    comparison = model.compare_pairs([(row.record, text) for row, text in rows])
    return comparison.sum(), (comparison < 0).sum()  # [RLCF section 4] the generated one comes first


# ------------------------------------------------------------------------------------------------------------- the run
def new_discriminator(args: Args, tokenizer: Tokenizer) -> Discriminator:
    """Create a discriminator on a pretrained encoder, or with random weights."""
    if args.encoder is not None:
        return discriminator_from_encoder(args.encoder)
    n_ctx = args.max_query_length + max(args.max_response_length, args.response_length) + 2
    config = new_config(  # [RLCF discriminator] an encoder
        tokenizer.vocab_size, n_ctx, args.d_model, args.n_layer, args.n_head, causal=False
    )
    return Discriminator(Transformer(config), tokenizer, n_ctx)


def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------------------------------ 1. data and model
    device = begin(args, "batch_size", "triplet_batch_size")
    tokenizer = load_tokenizer(args.sft)
    files = data_files(args)
    train, validation = (
        list(load_programs(file, tokenizer, args.max_query_length, args.max_response_length, needs_response=True))
        for file in files
    )
    model = new_discriminator(args, tokenizer).to(device)
    advice = f"lower --lr ({args.lr}) or --triplet-lr ({args.triplet_lr})"
    steps = adamw_steps(args, model.parameters(), advice=advice)

    programs, validation_programs = Programs(train), Programs(validation)
    num_triplet_steps = int(exact(args.num_triplet_epochs) * len(programs.anchors)) // args.triplet_batch_size
    if args.num_triplet_epochs and num_triplet_steps == 0:
        raise InputError(
            f"--triplet-batch-size {args.triplet_batch_size} exceeds the {len(programs.anchors)} programs in "
            f"{args.data}, times --num-triplet-epochs {args.num_triplet_epochs}: lower it."
        )
    check_warmup(args.warmup_steps, num_triplet_steps)
    pair_rows = train[: args.num_rows] if args.num_pair_epochs else []
    prompt_rows = pair_rows + (validation if args.num_pair_epochs else [])
    if args.num_pair_epochs and int(exact(args.num_pair_epochs) * len(pair_rows)) < args.batch_size:
        raise InputError(
            f"--batch-size {args.batch_size} exceeds the {len(pair_rows)} rows that the policy answers, times "
            f"--num-pair-epochs {args.num_pair_epochs}: lower it."
        )
    samples: list[Sample] = []
    if prompt_rows:
        is_sampled = args.resume and not distributed.from_first((args.out / SAMPLING).exists)
        samples = read_programs(args, len(prompt_rows)) if is_sampled else sample_programs(args, prompt_rows, device)
        args = replace(args, resume=is_sampled)  # otherwise no step has been taken yet
    pairs = pairs_that_pass(pair_rows, samples[: len(pair_rows)])
    held_out = pairs_that_pass(validation, samples[len(pair_rows) :]) if prompt_rows else []
    num_pair_steps = int(exact(args.num_pair_epochs) * len(pairs)) // args.batch_size
    if args.num_pair_epochs and num_pair_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} exceeds the {len(pairs)} of {len(pair_rows)} sampled programs that "
            f"pass the static checks, times --num-pair-epochs {args.num_pair_epochs}: lower it and pass --resume, "
            "which keeps the samples, or train the policy longer."
        )
    num_steps = num_triplet_steps + num_pair_steps

    def margin_loss(model: Discriminator, rows: list[tuple[int, str, str]]) -> tuple[Tensor, Tensor]:
        """Return sums over the triplets: the loss, and the number ordered correctly."""
        both = model.embed([""] * 2 * len(rows), [row[1] for row in rows] + [row[2] for row in rows])
        indices = torch.tensor([row[0] for row in rows], device=device)
        anchors, positives = both.float().chunk(2)  # (b, C)
        with torch.autocast(device.type, enabled=False):  # squared distances need float32
            return triplet_loss(anchors, positives, indices, args.triplet_margin)

    def validate() -> tuple[float, float]:
        """Return the loss and the accuracy on the validation pairs, 0 without any."""
        measured = evaluate(model, held_out, pair_loss, 2, args.micro_batch_size, args.dtype) / max(len(held_out), 1)
        loss, accuracy = measured.tolist()
        return loss, accuracy

    def write(directory: Path) -> None:
        if distributed.rank() == 0:
            save_discriminator(model, directory)

    # the negative of a triplet comes from the same micro-batch
    run = Run(args, "discriminator", write, files, must_stay=("micro_batch_size",))
    run.track(model=model, steps=steps)
    if not args.resume:
        if run.main:
            run.opened()
        if run.main and samples:
            write_jsonl(args.out / "generated.jsonl", samples)
        run.save(0)  # now the samples are safe; with 0 steps, this is the final discriminator
        if run.main:
            (args.out / SAMPLING).unlink(missing_ok=True)
    passing = [row["passes"] for row in samples]
    rate = f"; {fmean(passing):.1%} of the policy's programs pass the checks" if samples else ""
    run.print(
        f"Discriminator: {sum(p.numel() for p in model.parameters()):,} parameters, {num_triplet_steps} steps on "
        f"triplets of {len(programs.anchors):,} programs for {len(programs.problems):,} problems, {num_pair_steps} on "
        f"{len(pairs):,} pairs{rate}"
    )

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    for step in run.steps(num_steps):
        batch: list[Any]
        batch_loss: Sums
        if step < num_triplet_steps:  # 2.1 [RLCF pretraining] triplets: pull programs for one problem together
            indices = batch_indices(len(programs.anchors), args.triplet_batch_size, step, args.seed)
            batch = [programs.triplet(i, random.Random(f"{args.seed} {step} {i}")) for i in indices]
            stage, batch_loss = "triplet", margin_loss
            lr = args.triplet_lr * lr_factor("linear", step, num_triplet_steps, args.warmup_steps)
        else:  # 2.2 pairs: compare human-written programs with the policy's
            pair_step = step - num_triplet_steps
            indices = batch_indices(len(pairs), args.batch_size, pair_step, args.seed)
            stage, batch, batch_loss = "discriminator", [pairs[i] for i in indices], pair_loss
            lr = args.lr * lr_factor("linear", pair_step, num_pair_steps)
        mean_loss, accuracy = backward(model, batch, batch_loss, len(batch), args.micro_batch_size, args.dtype).tolist()
        steps.set_lr(lr)
        steps.step(model.parameters(), mean_loss)
        metrics = {f"{stage}/loss": mean_loss, f"{stage}/accuracy": accuracy, "lr": lr, "skipped_steps": steps.skipped}
        if held_out and (step + 1) % args.eval_every == 0:
            _, metrics["validation_accuracy"] = validate()
        run.log(step, metrics, **{stage: f"{mean_loss:.3f}"}, accuracy=f"{accuracy:.2f}")

    # ------------------------------------------------------------------------------------------------ 3. measure, save
    summary: dict[str, float] = {"steps": num_steps}
    if num_triplet_steps:
        draw = random.Random(args.seed)
        triplets = [validation_programs.triplet(i, draw) for i in range(len(validation_programs.anchors))]
        draw.shuffle(triplets)  # in file order, triplets for one problem are adjacent and would have no negatives
        measured = evaluate(model, triplets, margin_loss, 2, args.micro_batch_size, args.dtype) / len(triplets)
        summary["validation_triplet_loss"], summary["validation_triplet_accuracy"] = measured.tolist()
        run.print(f"Discriminator: orders {summary['validation_triplet_accuracy']:.1%} of validation triplets right")
    if samples:
        summary["validation_loss"], summary["validation_accuracy"] = validate()
        summary["num_validation_pairs"] = len(held_out)
        summary["compile_rate"] = fmean(passing)
        run.print(
            f"Discriminator: recognises the policy's program in {summary['validation_accuracy']:.1%} of "
            f"{len(held_out)} validation pairs where both programs pass"
        )
    run.log(num_steps, summary)
    run.finish(summary)
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
