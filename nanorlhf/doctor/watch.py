"""Run a script and keep what it computed: gradients, each token's slope, the rollout, the metrics.

Nothing here reads the script's text. The gradients come from a hook that PyTorch calls before each optimizer step, the
slopes from a hook on the log-probabilities that the script asks for, the rollout from --trace.
"""

import contextlib
import importlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanorlhf.training.trace import read_traces

Tensors = dict[str, Tensor]


class Stopped(Exception):
    """The doctor has ended a run, as a crash would."""


@dataclass
class Slopes:
    """A micro-batch of the update: the loss's slope in the log-probability of each token."""

    ids: list[tuple[int, ...]]  # of each row: query and response, without padding
    actions: Tensor  # (b, t)
    logprobs: Tensor  # (b, t)
    slopes: Tensor | None = None  # (b, t); None: no gradient came


@dataclass
class Watched:
    """What one run did."""

    out: Path
    gradients: list[list[Tensor | None]] = field(default_factory=list)  # of each optimizer step
    parameters: list[list[Tensor]] = field(default_factory=list)  # before each optimizer step
    micro_batches: list[Slopes] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "samples.jsonl").read_text().splitlines()]

    def traces(self) -> list[tuple[Tensors, dict[str, Any]]]:
        """The rollout of each update: its tensors in float64 where they are numbers, and what is said of it."""
        return [
            ({name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}, about)
            for tensors, about in read_traces(self.out)
        ]

    def token_slopes(self, num_micro_batches: int | None = None) -> dict[tuple[int, ...], Tensor]:
        """Text of query and response -> the slopes (t,) of its tokens, of the first micro-batches."""
        found: dict[tuple[int, ...], Tensor] = {}
        for micro_batch in self.micro_batches[:num_micro_batches]:
            if micro_batch.slopes is None:
                continue
            for ids, mask, slopes in zip(micro_batch.ids, micro_batch.actions, micro_batch.slopes, strict=True):
                found.setdefault(ids, slopes.double()[mask])
        return found


def script(name: str) -> ModuleType:
    """train_ppo and the others, as modules of the tree that is examined."""
    return importlib.import_module(name)


def watch(
    name: str,
    args: Any,
    stop_at: int | None = None,
    patches: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Watched:
    """Run `main` of a script with these settings; stop_at: the optimizer step before which the run ends, as by a crash.

    patches: a context in which it runs.
    """
    if not args.resume:
        shutil.rmtree(args.out, ignore_errors=True)
    kept = Watched(args.out)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if stop_at is not None and len(kept.gradients) == stop_at:
            raise Stopped
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept.parameters.append([p.detach().clone() for p in parameters])
        kept.gradients.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with silent(), patches(), listening(name, kept), contextlib.suppress(Stopped):
            script(name).main(args)
    finally:
        handle.remove()
    return kept


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context in which nothing is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def listening(name: str, kept: Watched) -> Iterator[None]:
    """Keep what the script asks `response_logprobs` for, with the slope of the loss in each number."""
    module = script(name)
    if not hasattr(module, "response_logprobs"):
        yield
        return
    function = module.response_logprobs

    def listened(model: Any, query_response: Tensor, real: Tensor, actions: Tensor, *others: Any, **named: Any) -> Any:
        result = function(model, query_response, real, actions, *others, **named)
        found = result[0]
        if found.requires_grad:
            ids = [tuple(row[mask].tolist()) for row, mask in zip(query_response, real, strict=True)]
            micro_batch = Slopes(ids, actions.clone(), found.detach().clone())
            kept.micro_batches.append(micro_batch)
            found.register_hook(lambda slope: setattr(micro_batch, "slopes", slope.detach().clone()))
        return result

    with patch.object(module, "response_logprobs", listened):
        yield


def replaced(where: Any, name: str, change: Callable[..., Any]) -> contextlib.AbstractContextManager:
    """A context in which where.name is change(original)."""
    return patch.object(where, name, change(getattr(where, name)))
