"""Invariants of a whole run: its data, random numbers, optimizer, checkpoints, seeds and processes."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.doctor.cases import B, CannotCheckError, Cases, differ
from nanorlhf.doctor.rollout_checks import LONGER, usual_run
from nanorlhf.doctor.watch import Watched, script
from nanorlhf.rules.finding import Finding

COMMAND_SETTINGS = (
    *("data", "sft", "reward_model", "max_query_length", "response_length", "total_episodes", "batch_size", "seed"),
    *("micro_batch_size", "num_ppo_epochs", "lr", "temperature", "gold", "device", "trace"),
)
"""settings that differ from the recipe, passed as flags to the run with two processes"""


TWO_EPOCHS: dict[str, dict[str, Any]] = {
    "train_ppo": LONGER,
    "train_grpo": {"samples_per_query": 2, "total_episodes": 6 * B, "num_epochs": 1, "save_every": 2},
    "train_rlcf": {"total_episodes": 3 * B, "num_ppo_epochs": 1, "lr": 1e-2, "save_every": 1},
    **dict.fromkeys(("train_sft", "train_rm", "train_dpo"), {"num_epochs": 2.0, "warmup_steps": 2, "save_every": 2}),
}
"""runs of two epochs over the world's 24 examples"""


def seeds(cases: Cases) -> Iterator[Finding]:
    """Check that equal seeds give identical runs, and different seeds different data."""
    first = usual_run(cases)
    repeated = cases.run("train_ppo", out=cases.world.root / "runs" / "again", **LONGER)
    if any(not torch.equal(a, b) for a, b in zip(first.parameters[-1], repeated.parameters[-1], strict=True)):
        yield Finding(
            name="seeds",
            seen="Two runs with the same settings and seed have different parameters after three updates.",
            means="Something draws unseeded random numbers, or depends on time or on the order of a set.",
            where="the script's generators",
        )
    other = cases.run("train_ppo", seed=2)
    if first.traces()[0][1]["queries"] == other.traces()[0][1]["queries"]:
        yield Finding(
            name="seeds",
            seen="Two seeds have the same queries in the same order.",
            means="The order of the data doesn't depend on --seed, so the spread over seeds is underestimated.",
            where="nanorlhf/dataset.py (batch_indices)",
        )


def resuming(cases: Cases) -> Iterator[Finding]:
    """Check that interrupting and resuming a run doesn't change its final weights."""
    for name, settings in TWO_EPOCHS.items():
        first = cases.run(name, **settings)
        out = cases.world.root / "runs" / f"interrupted-{name}"
        cases.run(name, stop_at=len(first.parameters) - 1, out=out, **settings)
        resumed = cases.run(name, out=out, resume=True, **settings)
        pairs = zip(saved_tensors(first.out), saved_tensors(resumed.out), strict=True)
        if any(differ(a, b, 1e-5) for a, b in pairs):
            yield Finding(
                name="resuming",
                seen=f"A run of {name}.py that is interrupted before its last step and resumed has different final "
                "weights.",
                means="Something is not saved, or saved but not loaded: the optimizer's moments, a generator, a "
                "coefficient.",
                where=f"`run.track` in {name}.py, nanorlhf/training/run.py and nanorlhf/training/resume.py",
            )


def saved_tensors(out: Path) -> list[Tensor]:
    """Return the saved tensors of a run's model, and of its value model if there is one."""
    files = [path / "model.safetensors" for path in (out, out / "value_model") if path.exists()]
    return [tensor for file in files for _, tensor in sorted(load_file(file).items())]


def saved_weights(out: Path) -> list[Tensor]:
    models = load_gpt(str(out)), load_scalar(str(out / "value_model"))
    return [parameter.detach() for model in models for parameter in model.parameters()]


def processes(cases: Cases) -> Iterator[Finding]:
    """Check that two processes compute the same update as one."""
    if sys.platform != "linux":
        raise CannotCheckError("--processes needs Linux")
    single = cases.run("train_ppo", num_ppo_epochs=1)
    settings = cases.settings("train_ppo", num_ppo_epochs=1)
    directory = cases.world.root / "runs" / "two"
    shutil.rmtree(directory, ignore_errors=True)
    flags = {name: getattr(settings, name) for name in COMMAND_SETTINGS} | {"out": directory, "processes": 2}
    command = [sys.executable, str(script("train_ppo").__file__), "tiny"]
    command += [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command += cases.accepted_words("train_ppo")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        yield Finding(
            name="processes",
            seen=f"With --processes 2 train_ppo.py fails: {(result.stderr.strip().splitlines() or ['?'])[-1]:.200}",
            means="A process waits for another one, or overwrites its files.",
            where="train_ppo.py and nanorlhf/distributed.py",
        )
        return
    a, b = single.metrics[0], Watched(directory).metrics[0]
    names = ("objective/score", "objective/entropy", "policy/loss", "value/loss", "response_length")
    unequal = [
        name for name in names if abs(a.get(name, 0.0) - b.get(name, 0.0)) > 1e-3 * max(1.0, abs(a.get(name, 0.0)))
    ]
    weights = zip(saved_weights(single.out), saved_weights(directory), strict=True)
    initial = zip(
        saved_weights(single.out), [*cases.policy().parameters(), *cases.reward_model().parameters()], strict=True
    )
    step = max((x - y).abs().max().item() for x, y in initial)
    gap = max((x - y).abs().max().item() for x, y in weights)
    if unequal or gap > 0.1 * step:
        difference = (
            f"{unequal[0]} is {b[unequal[0]]:.4g} instead of {a[unequal[0]]:.4g}"
            if unequal
            else "the weights after a step differ"
        )
        yield Finding(
            name="processes",
            seen=f"With two processes {difference}, for the same responses.",
            means="Ranks use the same rows, or each divides by its own count instead of the total.",
            where="nanorlhf/distributed.py (rank_slice, all_sum, sum_gradients) and the script's counts",
        )


# ------------------------------------------------------------------------------------------ data and random numbers
def orders(cases: Cases) -> Iterator[Finding]:
    """Check that an epoch has each example once, and that epochs have different orders."""
    num_rows = len((cases.world.data / "sft.train.jsonl").read_text().splitlines())  # the same in all files
    for name, settings in TWO_EPOCHS.items():
        run = cases.run(name, **settings)
        # the examples passed to `backward` if the stage uses it, else their indices
        seen: list[Any] = [tuple(row.query) for batch in run.batches for row in batch]
        seen = seen or [i for batch in run.indices for i in batch]
        if len(seen) < 2 * num_rows:
            raise CannotCheckError(f"{name}.py doesn't use `batch_indices`")
        first, second = seen[:num_rows], seen[num_rows : 2 * num_rows]
        problem = None
        if len(set(first)) < num_rows or len(set(second)) < num_rows:
            missing = max(num_rows - len(set(epoch)) for epoch in (first, second))
            problem = f"{missing} of {num_rows} examples are missing in an epoch of {name}.py, and others occur twice"
        elif first == second:
            problem = f"The second epoch of {name}.py has its {num_rows} examples in the same order as the first"
        if problem is not None:
            yield Finding(
                name="order",
                seen=f"{problem}.",
                means="The order of an epoch must depend on the seed and on the number of the epoch, and contain each "
                "example once.",
                where=f"nanorlhf/dataset.py (batch_indices) and its call in {name}.py",
            )


def random_numbers(cases: Cases) -> Iterator[Finding]:
    """Check that each row of each update has different random numbers.

    An unchanged policy answers one query repeatedly, so equal answers mean equal random numbers.
    """
    data = cases.world.root / "one_query"
    if not data.exists():
        shutil.copytree(cases.world.data, data)
        for kind in ("sft", "code"):
            first = (data / f"{kind}.train.jsonl").read_text().splitlines(keepends=True)[0]
            (data / f"{kind}.train.jsonl").write_text(B * first)
    settings: dict[str, dict[str, Any]] = {
        "train_ppo": {"num_ppo_epochs": 1}, "train_grpo": {"num_epochs": 1},
        "train_rlcf": {"num_ppo_epochs": 1, "localise": False},
    }  # fmt: skip
    for name, overrides in settings.items():
        changes: dict[str, Any] = {"data": data, "lr": 0.0, "total_episodes": 3 * B} | overrides
        long, short = cases.run(name, **changes), cases.run(name, **changes | {"total_episodes": B, "seed": 2})
        # one micro-batch per update, with rows sorted by length
        answers, other = ([sorted(micro_batch.ids) for micro_batch in run.micro_batches] for run in (long, short))
        if (len(answers), len(other)) != (3, 1):
            raise CannotCheckError(f"{name}.py doesn't use `response_logprobs`")
        problem = None
        again = [(i, j) for j in range(len(answers)) for i in range(j) if answers[i] == answers[j]]
        num_alike = len(answers[0]) - len(set(answers[0]))
        if again:
            problem = f"updates {again[0][0]} and {again[0][1]} have the same answers"
        elif num_alike > len(answers[0]) / 2:
            problem = f"{num_alike} of the {len(answers[0])} answers of an update are copies of others"
        elif other[0] == answers[0]:
            problem = "two seeds have the same answers"
        if problem is not None:
            yield Finding(
                name="random-numbers",
                seen=f"When an unchanged policy of {name}.py answers one query repeatedly, {problem}.",
                means="Random numbers are reused: drawn once for all updates, from a reseeded generator, or shared by "
                "several rows. Rollouts are then not new samples of the policy.",
                where=f"the generator and the uniform random numbers in {name}.py",
            )


# -------------------------------------------------------------------------------------------------------- the optimizer
def optimizer(cases: Cases) -> Iterator[Finding]:
    """Check that each step is AdamW's, with moments since the first step, at the learning rate of the schedule."""
    for name, changes in TWO_EPOCHS.items():
        run, settings = cases.run(name, **changes), cases.settings(name, **changes)
        kind = run.optimizers[0][0] if run.optimizers else "no optimizer"
        if kind != "AdamW":
            raise CannotCheckError(f"{name}.py uses {kind} instead of AdamW")
        problem = wrong_counts(run) or wrong_settings(run, settings) or wrong_step(run)
        if problem is not None:
            yield Finding(
                name="optimizer",
                seen=f"{problem} ({name}.py).",
                means="The optimizer is recreated or reset, so its moments and their bias correction start again; its "
                "settings differ from the flags; or it takes another kind of step.",
                where=f"the optimizer in {name}.py, and nanorlhf/training/optimizer.py",
            )
        rates = [group[0]["lr"] for _, group in run.optimizers]
        expected = expected_rates(settings, len(rates), sum("lr" in row for row in run.metrics))
        wrong = [i for i, (rate, right) in enumerate(zip(rates, expected, strict=True)) if abs(rate - right) > 1e-9]
        if wrong:
            i = wrong[0]
            yield Finding(
                name="schedule",
                seen=f"Step {i} of {len(rates)} of {name}.py has the learning rate {rates[i]:.3g}, but --schedule "
                f"{settings.schedule} with --warmup-steps {getattr(settings, 'warmup_steps', 0)} gives "
                f"{expected[i]:.3g}.",
                means="The schedule doesn't count the optimizer's steps: it counts twice as many, only one epoch, or "
                "starts at another number.",
                where=f"nanorlhf/training/optimizer.py (lr_factor) and its call in {name}.py",
            )


def wrong_counts(run: Watched) -> str | None:
    """Check that Adam has counted a step of a parameter whenever it had a gradient."""
    for step, (_, groups) in enumerate(run.optimizers):
        for number, group in enumerate(groups):
            taken = sum(gradients[number] is not None for gradients in run.gradients[:step])
            if group["step"] != taken:
                return f"Before step {step} Adam has counted {group['step']} steps of a parameter instead of {taken}"
    return None


def wrong_settings(run: Watched, settings: Any) -> str | None:
    adam = settings.adam
    for _, groups in run.optimizers:
        for group in groups:
            actual = {"betas": tuple(group["betas"]), "eps": group["eps"], "weight_decay": group["weight_decay"]}
            expected = {"betas": tuple(adam.betas), "eps": adam.eps, "weight_decay": adam.weight_decay}
            for name, value in actual.items():
                if value != expected[name] and not (name == "weight_decay" and value == 0):
                    return f"The optimizer's {name} is {value}, but --adam.{name.replace('_', '-')} is {expected[name]}"
    return None


def wrong_step(run: Watched) -> str | None:
    """Compare each parameter's change with AdamW in float64, computed from the gradients of all steps so far."""
    after = [*run.parameters[1:], [parameter.detach() for parameter in run.live]]
    moments: dict[int, tuple[Tensor, Tensor, int]] = {}
    for step, (before, gradients, (_, groups)) in enumerate(
        zip(run.parameters, run.gradients, run.optimizers, strict=True)
    ):
        gap = largest = 0.0
        for number, (p, gradient, group) in enumerate(zip(before, gradients, groups, strict=True)):
            if gradient is None:
                continue
            g, (b1, b2) = gradient.double(), group["betas"]
            m, v, t = moments.get(number, (torch.zeros_like(g), torch.zeros_like(g), 0))
            m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g, t + 1
            moments[number] = m, v, t
            move = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p.double()
            moved = after[step][number].double() - p.double()
            gap = max(gap, (moved + group["lr"] * move).abs().max().item())
            largest = max(largest, (group["lr"] * move).abs().max().item())
        if gap > 1e-2 * largest + 1e-6:
            return f"Step {step} moves a parameter by {gap:.2g} more or less than AdamW does"
    return None


def expected_rates(settings: Any, num_steps: int, n: int) -> list[float]:
    """Return the learning rate of each optimizer step; each of the n updates has the same number of steps."""
    warm, rates = getattr(settings, "warmup_steps", 0), []
    for i in range(n):
        progress = (i - warm) / (n - warm)
        factor = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}
        rates.append(settings.lr * ((i + 1) / warm if i < warm else factor[settings.schedule]))
    return [rate for rate in rates for _ in range(num_steps // n)]


# --------------------------------------------------------------------------------------------------------- checkpoints
def checkpoints(cases: Cases) -> Iterator[Finding]:
    """Check that a saved model computes the same outputs as the trained model, also if its updates are merged."""
    yield from frozen_weights(cases)
    yield from saved_updates(cases)
    lora = {"tune": "lora", "lr": 0.1}
    runs: list[tuple[str, dict[str, Any]]] = [
        *(("train_sft", {"tune": tune, "lr": 0.1, "lora_rank": 1}) for tune in ("lora", "adapter", "bitfit")),
        *((name, settings) for name, settings in TWO_EPOCHS.items()),
        *((name, lora) for name in ("train_rm", "train_dpo")),
        ("train_ppo", lora | LONGER),
        ("train_grpo", lora | {"num_epochs": 1}),
        ("train_rlcf", lora | {"num_ppo_epochs": 1}),
    ]
    for name, settings in runs:
        run = cases.run(name, **settings)
        tune = settings.get("tune", "full")
        if run.out not in run.saved:
            raise CannotCheckError(f"{name}.py doesn't use `write_checkpoint`")
        for directory in (run.out, run.out / "value_model"):
            live = run.saved.get(directory)
            if live is None:
                continue
            load = load_scalar if hasattr(live, "score") else load_gpt
            gap = difference(live, load(str(directory)))
            if not {*map(id, live.parameters())} & {*map(id, run.live)}:
                gap = math.inf  # the optimizer has another model
            if not gap < 1e-3:
                yield Finding(
                    name="checkpoint",
                    seen=f"The outputs of the model that {name}.py --tune {tune} saves are up to {gap:.2g} off the "
                    "outputs of the model that it trained.",
                    means="Updates are merged with a wrong scale, twice or into the live weights, or trained weights "
                    "are not saved.",
                    where="nanorlhf/peft.py (merge) and nanorlhf/training/run.py (write_checkpoint)",
                )
                return


@torch.no_grad()
def difference(a: Any, b: Any) -> float:
    """Return the largest difference of two models' outputs for the same ids, relative to the largest output."""
    ids = torch.randint(a.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    x, y = a(ids), b(ids)
    if not hasattr(a, "score"):
        x, y = x @ a.lm_head.weight.T, y @ b.lm_head.weight.T
    gap = ((x - y).abs().max() / x.abs().max()).item()
    return gap if math.isfinite(gap) else math.inf


def frozen_weights(cases: Cases) -> Iterator[Finding]:
    """Check that rank-1 LoRA changes only the rows of q and of v, each by a rank-1 matrix."""
    run = cases.run("train_sft", tune="lora", lr=0.1, lora_rank=1)
    before, after = (dict(load_gpt(str(path)).named_parameters()) for path in (cases.world.root / "sft", run.out))
    q, k, _ = load_gpt(str(run.out)).config.qkv_rows
    problem = None
    for name, initial in before.items():
        change = (after[name] - initial).detach().double()
        pieces = change.split((q, k, len(change) - q - k)) if name.endswith(".qkv.weight") else (None, change, None)
        frozen, updated = pieces[1], [piece for piece in pieces[::2] if piece is not None]
        if frozen.abs().max() > 1e-5:
            problem = f"changes {name}, which should be frozen"
        for piece in updated:
            singular = torch.linalg.svdvals(piece)
            if singular[1] > 1e-3 * singular[0] + 1e-6:
                problem = f"with --lora-rank 1 changes {name} by a matrix of higher rank"
            elif singular[0] < 1e-6:
                problem = f"does not change {name}"
    if problem is not None:
        yield Finding(
            name="frozen-weights",
            seen=f"train_sft.py --tune lora {problem}.",
            means="The updates were merged before training, so whole matrices are trained; or frozen weights have a "
            "gradient.",
            where="nanorlhf/peft.py (tune, add_updates)",
        )


def saved_updates(cases: Cases) -> Iterator[Finding]:
    """Check that the initial checkpoint plus the LoRA updates saved for peft is the merged checkpoint."""
    run = cases.run("train_sft", tune="lora", lr=0.1, lora_rank=1)
    adapter = run.out / "adapter"
    if not (adapter / "adapter_model.safetensors").exists():
        raise CannotCheckError("LoRA's updates are not saved separately in adapter/")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    base, merged = (load_file(path / "model.safetensors") for path in (cases.world.root / "sft", run.out))
    gap = 0.0
    for name, down in tensors.items():
        if "lora_A" not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        pattern = ".".join(module.split(".")[-2:])
        rank, alpha = settings["rank_pattern"].get(pattern, settings["r"]), settings["lora_alpha"]
        alpha = settings["alpha_pattern"].get(pattern, alpha)
        update = alpha / rank * tensors[name.replace("lora_A", "lora_B")] @ down
        update = update.T if settings["fan_in_fan_out"] else update
        weight = f"{module}.weight"
        gap = max(gap, (base[weight] + update - merged[weight]).abs().max().item())
    if not gap < 1e-4:
        yield Finding(
            name="checkpoint",
            seen=f"The checkpoint of --model plus LoRA's updates in adapter/, added as in peft, is up to {gap:.2g} "
            "off the merged weights.",
            means="The updates are saved with another scale, rank or layout than they are trained with.",
            where="nanorlhf/pretrained/adapters.py (save_updates)",
        )


CHECKS = (seeds, resuming, processes, orders, random_numbers, optimizer, checkpoints)
