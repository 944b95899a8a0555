"""torch.compile a transformer block once for all blocks, models and lengths (--compile)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kernels import linear


def compiled_block(block: nn.Module) -> Callable[..., Tensor]:
    """Return a function with the arguments and the result of `block`, compiled.

    Within `kept_casts` it multiplies with the casts that are kept, also if it is called later to
    recompute activations. Imports the compiler.
    """
    casts = linear_casts(block)

    def run(
        x: Tensor,
        bias: Any,
        rotary: Any,
        cache: None,
        layer: int,
        wanted: slice | Tensor,
        *memory: Any,
    ) -> Tensor:
        if isinstance(wanted, slice) and wanted != slice(None):
            # indices: the compiler guards a slice's start, and then rejects its own guard
            wanted = torch.arange(x.size(1), device=x.device)[wanted]
        return compiled_call()(block, casts, x, bias, rotary, cache, layer, wanted, *memory)

    return run


def linear_casts(block: nn.Module) -> dict[str, Tensor]:
    """Map names of linear weights to their casts in autocast's dtype; empty outside `kept_casts`.

    The compiler can't look them up by the parameter's id, as an eager linear layer does. Biases are
    cast in the graph: for their gradients in bfloat16, PyTorch 2.13 generates invalid C++ on a CPU.
    """
    if linear.casts is None:
        return {}
    return {
        name: kept
        for name, weight in block.named_parameters()
        if weight.ndim == 2 and weight.dtype == torch.float32  # a norm's have one dimension
        if (kept := linear.cast(weight)[0]) is not weight
    }


@cache
def compiled_call() -> Callable[..., Tensor]:
    """Return the compiled `call`, one for all models: models of the same shape share graphs."""
    # A graph is specialised to the model's shape, trained or frozen weights, a gradient or none
    # (also of the input: LoRA's first block), all or some tokens, and a window or none. PPO without
    # windows needs 6 with one shape, 10 with two. Past the default limit of 8, blocks run eagerly.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(call, dynamic=True)


def call(block: nn.Module, casts: dict[str, Tensor], *arguments: Any) -> Tensor:
    """Run a block with `casts` instead of the parameters of these names."""
    for weight in casts.values():
        torch._dynamo.mark_static(weight)  # only parameters are by themselves
    return torch.func.functional_call(block, casts, arguments, tie_weights=False)
