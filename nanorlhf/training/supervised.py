"""What SFT, the reward model and the discriminator share: micro-batches, new models, and checks of the settings."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanorlhf import distributed
from nanorlhf.errors import InputError
from nanorlhf.families import check_fits
from nanorlhf.model import GPTConfig
from nanorlhf.padding import micro_batches
from nanorlhf.t5 import T5Config
from nanorlhf.training.schedule import check_warmup
from nanorlhf.training.settings import RunArgs, SupervisedArgs

# sums(model, rows) -> the loss summed over the rows, and any other statistics, scalars
Sums = Callable[[Any, list], tuple[Tensor, ...]]


# -------------------------------------------------------------------------------------------------------- micro-batches
def backward(model: nn.Module, batch: list, sums: Sums, count: int, args: RunArgs) -> Tensor:
    """The gradient of the loss over a global batch, and the means (k,) of loss and statistics, on every rank.

    The sums are divided by `count` of the global batch: neither micro-batches nor ranks change the result.
    """
    device = next(model.parameters()).device
    means: Tensor | float = 0.0
    model.zero_grad()
    for rows in micro_batches(batch[distributed.rank_slice(len(batch))], args.micro_batch_size):
        with autocast(args, device):
            loss, *others = sums(model, rows)
        (loss / count).backward()
        means = means + torch.stack((loss.detach(), *others)) / count
    distributed.sum_gradients(model)
    assert isinstance(means, Tensor)  # each rank has at least one row
    return distributed.all_sum(means)


@torch.no_grad()
def evaluate(model: nn.Module, rows: Sequence, sums: Sums, num_sums: int, size: int, args: RunArgs) -> Tensor:
    """The sums (k,) over all rows, `size` at a time, on every rank; k = num_sums."""
    device = next(model.parameters()).device
    totals, whole = torch.zeros(num_sums, device=device), distributed.unshard(model)
    for batch in micro_batches(rows[distributed.rank() :: distributed.world_size()], size):
        with autocast(args, device):
            totals += torch.stack(sums(whole, list(batch)))
    return distributed.all_sum(totals)


def autocast(args: Any, device: torch.device) -> torch.autocast:
    """Forward passes in bfloat16, if --dtype says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")


# ----------------------------------------------------------------------------------------------- new models and checks
def number_of_steps(args: SupervisedArgs, num_rows: int, path: Path) -> int:
    """Optimizer steps in --num-epochs passes over the rows of a file.

    Raises InputError for less than one, and for a --warmup-steps that is not shorter.
    """
    num_steps = int(args.num_epochs * num_rows) // args.batch_size
    if num_steps == 0:
        raise InputError(
            f"--batch-size {args.batch_size} is more than the {num_rows} rows of {path} times --num-epochs "
            f"{args.num_epochs}: lower it."
        )
    check_warmup(args.warmup_steps, num_steps)
    return num_steps


def new_shape(args: Any, vocab_size: int, n_ctx: int, causal: bool = True, eos_id: int = 0) -> GPTConfig:
    """A small Pythia of --n-layer, --n-head and --d-model: rotary positions on half of each head, an untied LM head.

    With --architecture t5 a small T5, whose decoder has --n-layer layers and whose encoder half as many; its queries
    end and its responses start with EOS. Raises InputError where the heads don't divide the width, and for more weights
    than this machine's memory holds.
    """
    if args.d_model % args.n_head or args.d_model // args.n_head < 2:
        raise InputError(f"--n-head {args.n_head} must divide --d-model {args.d_model} into heads at least 2 wide.")
    sizes = {"vocab_size": vocab_size, "d_model": args.d_model, "n_layer": args.n_layer, "n_head": args.n_head}
    sizes["d_mlp"] = 4 * args.d_model
    if getattr(args, "architecture", "gpt") == "t5":
        sizes["n_decoder_layer"], sizes["n_layer"] = args.n_layer, math.ceil(args.n_layer / 2)
        config: GPTConfig = T5Config(**sizes, start_id=eos_id, query_end_id=eos_id)
    else:
        rotary_dim = max(2, args.d_model // args.n_head // 4 * 2)
        config = GPTConfig(**sizes, n_ctx=n_ctx, rotary_dim=rotary_dim, causal=causal)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
    room = 2**62 if getattr(args, "plan", False) else memory // 4  # a plan makes no model
    check_fits(config, "--n-layer, --d-model, --max-query-length", room)
    return config


def check_rows_fit(longest: int, config: GPTConfig, data: str, model: str) -> None:
    """Raise InputError if the longest row has more tokens than the model has positions."""
    if longest > config.n_ctx:
        raise InputError(
            f"a row of {data} has {longest} tokens, more than the {config.n_ctx} positions of {model}: "
            "lower --max-query-length where the data is made."
        )
