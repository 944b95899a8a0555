"""What must hold for a run as a whole: seeds, resuming, and several processes."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.doctor.cases import CannotCheckError, Cases, far
from nanorlhf.doctor.finding import Finding
from nanorlhf.doctor.rollout_checks import LONGER, usual
from nanorlhf.doctor.watch import Watched, script

OF_COMMAND = (
    *("data", "sft", "reward_model", "max_query_length", "response_length", "total_episodes", "batch_size", "seed"),
    *("micro_batch_size", "num_ppo_epochs", "lr", "temperature", "gold", "device", "trace"),
)
"""settings that differ from the recipe's: flags of the run in two processes"""


def seeds(cases: Cases) -> Iterator[Finding]:
    """One seed repeats a run to the last digit, and two seeds see other data."""
    first = usual(cases)
    again = cases.run("train_ppo", out=cases.world.root / "runs" / "again", **LONGER)
    if any(not torch.equal(a, b) for a, b in zip(first.parameters[-1], again.parameters[-1], strict=True)):
        yield Finding(
            name="seeds",
            seen="The same settings and seed give other parameters after three updates.",
            means="Something draws random numbers outside the seed, or depends on time or on the order of a set.",
            where="the script's generators",
            page="docs/troubleshooting.md#a-run-as-a-whole",
        )
    other = cases.run("train_ppo", seed=2)
    if first.traces()[0][1]["queries"] == other.traces()[0][1]["queries"]:
        yield Finding(
            name="seeds",
            seen="Two seeds answer the same queries in the same order.",
            means="The order of the data does not depend on --seed, so a band over seeds is too narrow.",
            where="nanorlhf/dataset.py (batch_indices)",
            page="docs/troubleshooting.md#a-run-as-a-whole",
        )


def resuming(cases: Cases) -> Iterator[Finding]:
    """A run that is interrupted and resumed ends where it would have ended."""
    first = usual(cases)
    num_steps = len(first.parameters)
    out = cases.world.root / "runs" / "interrupted"
    cases.run("train_ppo", stop_at=num_steps - 1, out=out, **LONGER)
    resumed = cases.run("train_ppo", out=out, resume=True, **LONGER)
    pairs = zip(saved_weights(first.out), saved_weights(resumed.out), strict=True)
    if any(far(a, b, 1e-5) for a, b in pairs):
        yield Finding(
            name="resuming",
            seen="A run that was interrupted before its last step and resumed ends with other weights.",
            means="Something is saved and not loaded, or not saved: the optimizer's moments, a generator, a "
            "coefficient.",
            where="the script's `run.track`, nanorlhf/training/run.py and nanorlhf/training/resume.py",
            page="docs/troubleshooting.md#a-run-as-a-whole",
        )


def saved_weights(out: Path) -> list[Tensor]:
    models = load_gpt(str(out)), load_scalar(str(out / "value_model"))
    return [parameter.detach() for model in models for parameter in model.parameters()]


def processes(cases: Cases) -> Iterator[Finding]:
    """Two processes do what one does."""
    if sys.platform != "linux":
        raise CannotCheckError("--processes needs Linux")
    one = cases.run("train_ppo", num_ppo_epochs=1)
    settings = cases.settings("train_ppo", num_ppo_epochs=1)
    out = cases.world.root / "runs" / "two"
    shutil.rmtree(out, ignore_errors=True)
    flags = {name: getattr(settings, name) for name in OF_COMMAND} | {"out": out, "processes": 2}
    command = [sys.executable, str(script("train_ppo").__file__), "tiny"]
    command += [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        yield Finding(
            name="processes",
            seen=f"With --processes 2 train_ppo.py ends with: {(result.stderr.strip().splitlines() or ['?'])[-1]:.200}",
            means="Something waits for, or writes over, another process.",
            where="train_ppo.py and nanorlhf/distributed.py",
            page="docs/troubleshooting.md#a-run-as-a-whole",
        )
        return
    a, b = one.metrics[0], Watched(out).metrics[0]
    names = ("objective/score", "objective/entropy", "policy/loss", "value/loss", "response_length")
    odd = [name for name in names if abs(a.get(name, 0.0) - b.get(name, 0.0)) > 1e-3 * max(1.0, abs(a.get(name, 0.0)))]
    weights = zip(saved_weights(one.out), saved_weights(out), strict=True)
    start = zip(saved_weights(one.out), [*cases.policy().parameters(), *cases.reward_model().parameters()], strict=True)
    step = max((x - y).abs().max().item() for x, y in start)
    gap = max((x - y).abs().max().item() for x, y in weights)
    if odd or gap > 0.1 * step:
        what = f"{odd[0]} is {b[odd[0]]:.4g} and not {a[odd[0]]:.4g}" if odd else "the step leads to other weights"
        yield Finding(
            name="processes",
            seen=f"In two processes {what}, for the same responses.",
            means="Ranks read the same rows, or each divides by its own count instead of that of all.",
            where="nanorlhf/distributed.py (rank_slice, all_sum, sum_gradients) and the script's counts",
            page="docs/troubleshooting.md#a-run-as-a-whole",
        )


CHECKS = (seeds, resuming, processes)
