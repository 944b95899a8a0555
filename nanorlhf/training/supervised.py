"""Micro-batches, new models and checks shared by SFT, the reward model, DPO and the discriminator."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernels.linear import kept_casts
from nanorlhf import distributed
from nanorlhf.cli import exact
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import Rows
from nanorlhf.errors import InputError
from nanorlhf.padding import micro_batches
from nanorlhf.pretrained.layout import check_fits

# sums(model, rows) -> the loss summed over the rows, then any other statistics; all scalars
Sums = Callable[[Any, list], tuple[Tensor, ...]]


# -------------------------------------------------------------------------------------------------------- micro-batches
def backward(model: nn.Module, batch: list, sums: Sums, count: int, micro_batch_size: int, dtype: str) -> Tensor:
    """Compute the gradient of the loss over a global batch; return the means (k,) of loss and statistics on every rank.

    The sums are divided by `count`, which belongs to the global batch, so neither micro-batches nor ranks change the
    result. `sums(model, rows)` runs under autocast and returns k scalars, the loss first. Old gradients are cleared.
    """
    device = next(model.parameters()).device
    means: Tensor | float = 0.0
    model.zero_grad()
    with kept_casts():
        for rows in micro_batches(batch[distributed.rank_slice(len(batch))], micro_batch_size):
            with autocast(dtype, device):
                loss, *rest = sums(model, rows)
            (loss / count).backward()
            means = means + torch.stack((loss.detach(), *rest)) / count
    distributed.sum_gradients(model)
    assert isinstance(means, Tensor)  # each rank has at least one row
    return distributed.all_sum(means)


@torch.no_grad()
def evaluate(model: nn.Module, rows: Sequence, sums: Sums, num_sums: int, size: int, dtype: str) -> Tensor:
    """Return the sums (k,) over all rows on every rank, computed `size` rows at a time; k = num_sums."""
    device = next(model.parameters()).device
    totals = torch.zeros(num_sums, device=device)
    full = distributed.unshard(model)
    with kept_casts():
        for batch in micro_batches(rows[distributed.rank() :: distributed.world_size()], size):
            with autocast(dtype, device):
                totals += torch.stack(sums(full, list(batch)))
    return distributed.all_sum(totals)


def autocast(dtype: str, device: torch.device) -> torch.autocast:
    """Return an autocast context: enabled for bfloat16, disabled otherwise."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


# ----------------------------------------------------------------------------------------------- new models and checks
def number_of_steps(num_epochs: float, num_rows: int, batch_size: int, path: Path) -> int:
    """Return the optimizer steps in num_epochs passes over the rows of a file; raise InputError for less than one."""
    num_steps = int(exact(num_epochs) * num_rows) // batch_size
    if num_steps == 0:
        raise InputError(
            f"--batch-size {batch_size} is more than the {num_rows} rows of {path} times --num-epochs {num_epochs}: "
            "lower it."
        )
    return num_steps


def new_config(
    vocab_size: int,
    n_ctx: int,
    d_model: int,
    n_layer: int,
    n_head: int,
    *,
    causal: bool = True,
    architecture: Literal["gpt", "t5"] = "gpt",
    eos_id: int = 0,
) -> GPTConfig:
    """Return the config of a small Pythia: rotary positions on half of each head, an untied LM head.

    t5: a small T5 instead, with n_layer decoder layers and half as many encoder layers; its queries end with EOS and
    its responses start with it. Raises InputError if the heads don't divide the width, or if the parameters don't fit
    into this machine's memory.
    """
    if d_model % n_head or d_model // n_head < 2:
        raise InputError(f"--n-head {n_head} must divide --d-model {d_model} into heads at least 2 wide.")
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "n_layer": n_layer,
        "n_head": n_head,
        "d_mlp": 4 * d_model,
    }
    if architecture == "t5":
        from nanorlhf.t5 import T5Config  # optional: most models are GPTs

        sizes |= {"n_decoder_layer": n_layer, "n_layer": math.ceil(n_layer / 2)}
        config: GPTConfig = T5Config(**sizes, start_id=eos_id, query_end_id=eos_id)
    else:
        rotary_dim = max(2, d_model // n_head // 4 * 2)
        config = GPTConfig(**sizes, n_ctx=n_ctx, rotary_dim=rotary_dim, causal=causal)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
    check_fits(config, "--n-layer, --d-model, --max-query-length", memory // 4)
    return config


def check_length(files: Sequence[Rows], config: GPTConfig, data: str, model: str, mismatched: bool = False) -> None:
    """Raise InputError if the longest query and response have more tokens than the model has positions.

    Query and response come from the same row, or from any two rows if mismatched: then queries are also read with the
    responses of other rows.
    """
    for rows in files:
        queries, responses = rows.lengths[:, 0], rows.lengths[:, 1:].max(1)
        longest = int(queries.max() + responses.max() if mismatched else (queries + responses).max())
        if longest > config.n_ctx:
            pair = "the longest query and the longest response" if mismatched else "a row"
            raise InputError(
                f"{pair} of {data} {'have' if mismatched else 'has'} {longest} tokens, more than the {config.n_ctx} "
                f"positions of {model}: prepare the data with a lower --max-query-length."
            )
