"""Shared by the comparisons: the modules of other libraries, and a rollout in float64."""

import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

K = 3  # responses to a query
LENGTHS = torch.tensor([7, 1, 3, 5, 7, 2])
ACTIONS = torch.arange(7) < LENGTHS[:, None]  # (B, T), up to EOS
STATES = torch.arange(7) <= LENGTHS[:, None]  # one token more, if it fits
ADVANTAGES = torch.tensor([1.5, -0.5, 0.25, -2.0, 3.0, -1.0], dtype=torch.float64)
SCORES = torch.tensor([0.5, -1.0, 2.0, 0.3, 0.7, -0.1], dtype=torch.float64)


def random(scale: float, seed: int, mask: Tensor = ACTIONS) -> Tensor:
    """Return random numbers (B, T) with mean 0, and 0 outside the mask: most libraries multiply by their mask."""
    numbers = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, scale * numbers, 0.0)


OLD, REF = -random(1.0, 1).abs(), -random(1.0, 2).abs()  # log-probabilities


def new_logprobs() -> Tensor:
    """Return log-probabilities (B, T); a third of their ratios to `OLD` are outside any usual clip range."""
    return (OLD + random(0.3, 3)).requires_grad_(True)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def loss_difference(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], made: Callable[[], Tensor] = new_logprobs
) -> float:
    """Return the larger `difference` of two losses of the same tensor and of their gradients.

    made: makes the tensor, the same each time
    """
    results = []
    for loss_function in (ours, theirs):
        new = made()
        loss = loss_function(new)
        results.append((loss, *torch.autograd.grad(loss, new)))
    return max(difference(a, b) for a, b in zip(*results, strict=True))


def need(package: str) -> None:
    """Skip the test if the package isn't installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: docs/how-we-compare.md shows how", allow_module_level=True)


def load(name: str, *unused: str) -> ModuleType:
    """Load a module of a package without running its `__init__` files, which import ray, vllm or DeepSpeed.

    unused: modules that it imports but the tests don't need; they are mocked
    """
    package = name.partition(".")[0]
    need(package)
    [directory] = map(Path, importlib.util.find_spec(package).submodule_search_locations)
    added = {module: MagicMock() for module in unused if module not in sys.modules}
    for file in directory.rglob("__init__.py"):
        module = ModuleType(".".join((package, *file.parent.relative_to(directory).parts)))
        module.__path__ = [str(file.parent)]
        added[module.__name__] = module
    sys.modules.update(added)
    try:
        return importlib.import_module(name)
    finally:  # later imports of the package work as usual
        for module in list(sys.modules):
            if module in added or module.startswith(f"{package}."):
                del sys.modules[module]


def alone(**settings: object) -> SimpleNamespace:
    """Make a `self` for a method of TRL's trainers: one process, no vLLM, and the settings."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    usual = {
        "model": SimpleNamespace(training=True),
        "accelerator": accelerator,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
    }
    return SimpleNamespace(**usual | settings)
