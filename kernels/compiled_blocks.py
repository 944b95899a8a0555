"""torch.compile a transformer block once for all blocks, models and lengths (--compile)."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def compiled_block(block: nn.Module) -> Callable[..., Tensor]:
    """Return a function with the arguments and the result of `block`, compiled.

    Imports the compiler.
    """

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
        return compiled_call()(block, x, bias, rotary, cache, layer, wanted, *memory)

    return run


@cache
def compiled_call() -> Callable[..., Tensor]:
    """Return the compiled `call`, one for all models: models of the same shape share graphs."""
    return torch.compile(call, dynamic=True)


def call(block: nn.Module, *arguments: Any) -> Tensor:
    return block(*arguments)
