"""Run a script and record what it computes: gradients, each token's slope, the rollout, the metrics.

The source text isn't used. Gradients come from a hook that PyTorch calls before each optimizer step, slopes from a hook
on the log-probabilities that the script computes, and the rollout from --trace.
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

from nanorlhf.training.run_directory import read_metrics
from nanorlhf.training.trace import read_traces

Tensors = dict[str, Tensor]


class Stopped(Exception):
    """Raised by the doctor to end a run like a crash."""


@dataclass
class Slopes:
    """A micro-batch of the update: the derivative of the loss in the log-probability of each token."""

    ids: list[tuple[int, ...]]  # query and response of each row, without padding
    actions: Tensor  # (b, t)
    logprobs: Tensor  # (b, t)
    slopes: Tensor | None = None  # (b, t); None without a gradient
    is_all: bool = True  # False if other outputs, such as the entropy, have a gradient


@dataclass
class Watched:
    """The record of a run."""

    out: Path
    gradients: list[list[Tensor | None]] = field(default_factory=list)  # at each optimizer step
    parameters: list[list[Tensor]] = field(default_factory=list)  # before each optimizer step
    optimizers: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    """before each optimizer step: the optimizer's class, and per parameter its group's settings and Adam's `step`"""
    live: list[Tensor] = field(default_factory=list)  # the parameters of the last optimizer, not copied
    micro_batches: list[Slopes] = field(default_factory=list)  # the policy's
    value_micro_batches: list[Slopes] = field(default_factory=list)
    read_before: list[int] = field(default_factory=list)  # number of micro-batches before each optimizer step
    batches: list[list[Any]] = field(default_factory=list)  # examples of each step of a supervised stage
    indices: list[list[int]] = field(default_factory=list)  # indices of each batch's examples
    saved: dict[Path, Any] = field(default_factory=dict)  # directory -> the last model written to it

    @property
    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.out)

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "samples.jsonl").read_text().splitlines()]

    def traces(self) -> list[tuple[Tensors, dict[str, Any]]]:
        """Return tensors and metadata of each update's rollout, with floats as float64."""
        return [
            ({name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}, about)
            for tensors, about in read_traces(self.out)
        ]

    def token_slopes(self, num_micro_batches: int | None = None) -> dict[tuple[int, ...], Tensor]:
        """Return a map of query and response ids to the slopes (t,) of their actions in the first micro-batches."""
        token_slopes: dict[tuple[int, ...], Tensor] = {}
        for micro_batch in self.micro_batches[:num_micro_batches]:
            if micro_batch.slopes is None:
                continue
            for ids, mask, slopes in zip(micro_batch.ids, micro_batch.actions, micro_batch.slopes, strict=True):
                token_slopes.setdefault(ids, slopes.double()[mask])
        return token_slopes


def script(name: str) -> ModuleType:
    """Import a training script, or eval, from the examined tree."""
    return importlib.import_module(name)


def watch(
    name: str,
    args: Any,
    stop_at: int | None = None,
    patches: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Watched:
    """Run `main` of a script with these settings, and return its record.

    stop_at: the run ends before this optimizer step, like a crash. patches: a context manager for the run.
    """
    if not args.resume:
        shutil.rmtree(args.out, ignore_errors=True)
    record = Watched(args.out)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if stop_at is not None and len(record.gradients) == stop_at:
            raise Stopped
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        settings = [
            {name: value for name, value in group.items() if name != "params"}
            | {"step": int(optimizer.state[parameter]["step"]) if parameter in optimizer.state else 0}
            for group in groups
            for parameter in group["params"]
        ]
        record.optimizers.append((type(optimizer).__name__, settings))
        record.live = parameters
        record.read_before.append(len(record.micro_batches))
        record.parameters.append([p.detach().clone() for p in parameters])
        record.gradients.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with silent(), patches(), listening(name, record), contextlib.suppress(Stopped):
            script(name).main(args)
    finally:
        handle.remove()
    return record


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def listening(name: str, record: Watched) -> Iterator[None]:
    """Record the model outputs that the script computes, their slopes, its examples, and the models that it saves.

    Functions that the script doesn't have are skipped.
    """
    module = script(name)

    def reading(function: Callable, micro_batches: list[Slopes]) -> Callable:
        def read(model: Any, query_response: Tensor, real: Tensor, mask: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = function(model, query_response, real, mask, *args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            if output.requires_grad:
                ids = [tuple(row[is_token].tolist()) for row, is_token in zip(query_response, real, strict=True)]
                micro_batch = Slopes(ids, mask.clone(), output.detach().clone())
                micro_batches.append(micro_batch)
                output.register_hook(lambda slope: setattr(micro_batch, "slopes", slope.detach().clone()))
                for other in result[1:] if isinstance(result, tuple) else ():
                    if other.requires_grad:
                        other.register_hook(lambda slope: setattr(micro_batch, "is_all", False))
            return result

        return read

    def batch_indices(function: Callable) -> Callable:
        def asked(*args: Any, **kwargs: Any) -> Any:
            record.indices.append(list(function(*args, **kwargs)))
            return record.indices[-1]

        return asked

    def backward(function: Callable) -> Callable:
        def summed(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            record.batches.append(list(batch))
            return function(model, batch, *args, **kwargs)

        return summed

    def write_checkpoint(function: Callable) -> Callable:
        def written(model: Any, directory: Path, *args: Any, **kwargs: Any) -> Any:
            record.saved[Path(directory)] = model
            return function(model, directory, *args, **kwargs)

        return written

    changes = {
        "response_logprobs": lambda function: reading(function, record.micro_batches),
        "response_values": lambda function: reading(function, record.value_micro_batches),
        "batch_indices": batch_indices, "backward": backward, "write_checkpoint": write_checkpoint,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for function, change in changes.items():
            if hasattr(module, function):
                stack.enter_context(replaced(module, function, change))
        yield


def replaced(target: Any, name: str, change: Callable[..., Any]) -> contextlib.AbstractContextManager:
    """Return a context manager that replaces where.name by change(original)."""
    return patch.object(target, name, change(getattr(target, name)))
