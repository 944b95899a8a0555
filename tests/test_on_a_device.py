"""Run every script and its options in miniature on a CUDA device: a part of `make gpu`.

    NANORLHF_TEST_DEVICE=cuda python -m pytest tests/test_on_a_device.py
    NANORLHF_TEST_DEVICE=cpu python -m pytest tests/test_on_a_device.py     # everything, without a GPU
    python -m pytest tests/test_on_a_device.py                              # the commands, on a simulated GPU

The commands are the fuzzer's (tools/fuzz.py) with more flags, in one process; each takes a few seconds. Their inputs
are made once, on the CPU. On a simulated GPU (tests/helpers/pretend_hopper.py), a command in float32 must log what it
logs on a CPU.
"""

import math
import os
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import eval as evaluation
import train_dpo
import train_grpo
import train_ppo
import train_rlcf
import train_rm
import train_sft
from nanorlhf.grpo import ALGORITHMS
from nanorlhf.rlcf import train_baselines, train_discriminator
from tests.conftest import GPU, TEST_DEVICE, interrupt_at, read_metrics
from tests.helpers.pretend_hopper import PretendHopper
from tests.helpers.shared_directories import made_once
from tests.helpers.two_processes import on_processes
from tests.test_distributed import TWO_GPUS
from tools import fuzz

pytestmark = pytest.mark.usefixtures("undrawn")

SAVES_MEMORY = "--dtype bfloat16 --checkpoint-activations --offload"
COMMANDS = {
    # name -> the fuzzer's command, and more flags
    "SFT": ("train_sft", ""),
    "SFT in bfloat16": ("train_sft", "--dtype bfloat16 --checkpoint-activations --loss-on response"),
    "SFT of an encoder-decoder": ("train_sft", "--architecture t5 --n-layer 2"),
    "SFT of programs": ("train_sft of programs", ""),
    **{f"SFT, {tune}": ("train_sft from a model", f"--tune {tune}") for tune in ("adapter", "bitfit", "lora")},
    "SFT of a Llama": ("train_sft of a Llama", "--dtype bfloat16"),
    "reward model": ("train_rm", ""),
    "reward model by scores": ("train_rm by scores", "--dtype bfloat16"),
    "reward model, linear": ("train_rm", "--trainable linear"),
    "reward model, lora": ("train_rm", "--tune lora --dtype bfloat16 --checkpoint-activations"),
    "reward model of an encoder-decoder": ("train_rm", "--sft t5"),
    **{f"DPO, {loss}": ("train_dpo", f"--loss {loss}") for loss in get_args(train_dpo.Loss)},
    "DPO, robust": ("train_dpo", "--loss robust --labels.smoothing 0.1"),
    "DPO, kto_unpaired": ("train_dpo by labels", ""),
    "DPO, lora": ("train_dpo", "--tune lora --dtype bfloat16 --checkpoint-activations"),
    "PPO": ("train_ppo", "--trace 1"),
    "PPO, saving memory": ("train_ppo", SAVES_MEMORY),
    "PPO, compiled": ("train_ppo", "--compile --dtype bfloat16"),
    "PPO, lora": ("train_ppo", "--tune lora --dtype bfloat16"),
    "PPO, lora and a shared value model": ("train_ppo", "--tune lora --value-model shared --offload"),
    "PPO, a value model of its own": ("train_ppo", "--value-model sft --dtype bfloat16"),
    "PPO, rewarded by a function": ("train_ppo", "--reward-model None --reward length.py:score"),
    "PPO, two reward models": ("train_ppo", "--reward-model rm rm --reward-weights 1 2 --offload"),
    "PPO, top-p": ("train_ppo", "--sampler.top-p 0.9 --sampler.correction tis"),
    "PPO, a rounded sampler": ("train_ppo", "--sampler.dtype bfloat16 --sampler.correction sampler_logprobs"),
    "PPO, a stale sampler": ("train_ppo", "--sampler.sync-every 2 --sampler.correction tis --dtype bfloat16"),
    "PPO, greedy": ("train_ppo", "--temperature 0.01"),
    "PPO of an encoder-decoder": ("train_ppo", "--sft t5"),
    "PPO --resume": ("train_ppo --resume", ""),
    **{
        f"GRPO, {name}": (
            "train_grpo",
            f"--algorithm {name}"
            + (" --kl-coef 0" if ALGORITHMS[name].is_without_kl else "")
            + (" --missing-eos-score 0 --reward length.py:score" if name == "maxrl" else ""),
        )
        for name in ALGORITHMS
    },
    "GRPO, lora": ("train_grpo", f"--tune lora --sampler.top-p 0.9 {SAVES_MEMORY}"),
    "RLCF": ("train_rlcf", ""),
    "RLCF, saving memory": ("train_rlcf", SAVES_MEMORY),
    "RLCF, lora": ("train_rlcf", "--tune lora --no-localise --discriminator None"),
    "RLCF of an encoder-decoder": ("train_rlcf", "--sft t5 --dtype bfloat16"),
    "RLCF's discriminator": ("train_discriminator", ""),
    "RLCF's discriminator in bfloat16": ("train_discriminator", "--dtype bfloat16"),
    "CodeRL": ("train_baselines", ""),
    "BipolarRamp": ("train_baselines", "--dtype bfloat16"),
    **{f"evaluation, {name}": (f"eval {name}", "") for name in ("tiny", "tiny-rm", "rewards", "stackoverflow", "str")},
    "evaluation, rlcf": ("eval rlcf", "--top-p 0.95 --temperatures 0 0.6 --num-samples 2"),
    "evaluation, sums": ("eval sums", ""),
    "evaluation in bfloat16": ("eval tiny", "--dtype bfloat16"),
    "best of n": ("best_of", "--top-p 0.9"),
    "self-ranking": ("self_rank", ""),
    "answers of a policy": ("stackoverflow", ""),
}
FAST = ("PPO, saving memory", "PPO, top-p", "GRPO, lora")  # their inputs are only data, sft and rm
FUSED = ("SFT in bfloat16", "SFT of an encoder-decoder", "PPO, saving memory")
TIMES = re.compile("time/|seconds|_per_second|memory")
SHARDED = {
    "train_sft": "--shard fsdp",
    "train_rm": "--shard fsdp --dtype bfloat16 --checkpoint-activations",
    "train_dpo": "--dtype bfloat16",
    "train_ppo": f"--shard fsdp {SAVES_MEMORY}",
    "train_grpo": "--shard fsdp --tune lora",
}


def entry(base: str, flags: str, device: str) -> fuzz.Entry:
    base_entry = fuzz.ENTRIES[base]
    return replace(base_entry, command=f"{base_entry.command} {flags} --device {device}")


def find_args(entry: fuzz.Entry) -> type:
    """Return the Args class whose fields are the command's flags."""
    if not isinstance(entry.args, dict):
        return entry.args
    name = entry.words[0]
    return type(entry.args[name if name in entry.args else next(iter(entry.args))][1])


def has_flag(args: type, flag: str) -> bool:
    """Return whether args has a flag such as --tune, --no-localise or --sampler.top-p."""
    name, _, rest = flag.removeprefix("--").removeprefix("no-").replace("-", "_").partition(".")
    hints = get_type_hints(args)
    return name in hints and (not rest or has_flag(hints[name], rest))


# -------------------------------------------------------------------------------------------------------- 1. the matrix
def test_the_commands_use_existing_flags_and_cover_every_script_and_evaluation():
    commands = [entry(base, flags, "cpu") for base, flags in [*COMMANDS.values(), *SHARDED.items()]]
    for command in commands:
        flags = [word for word in command.words if word.startswith("--")]
        assert [flag for flag in flags if not has_flag(find_args(command), flag)] == [], command.command
    scripts = (train_sft, train_rm, train_dpo, train_ppo, train_grpo, train_rlcf, train_discriminator, train_baselines)
    recipes = [settings for script in (*scripts, evaluation) for _, settings in script.RECIPES.values()]
    assert {find_args(command) for command in commands} >= {type(settings) for settings in recipes}


# --------------------------------------------------------------------------------------------------------- 2. the world
def make_world(root: Path) -> None:
    """The fuzzer's world, and an encoder-decoder."""
    root.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "argv", [])
        fuzz.make_models()
        Path("length.py").write_text(
            "def score(queries, responses):\n    return [len(text) / 10 for text in responses]\n"
        )
        fuzz.again("train_sft", "out/run", "t5", "--architecture t5 --n-layer 2")


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    return made_once(tmp_path_factory, "world", make_world)


def fill(directory: Path, world: Path, entry: fuzz.Entry) -> None:
    """Copy the command's inputs."""
    for name in {*entry.reads.split(), *(word.split(":")[0] for word in entry.words)}:
        source = world / name
        if "/" not in name and source.is_dir():
            shutil.copytree(source, directory / name, dirs_exist_ok=True)
        elif "/" not in name and source.is_file():
            shutil.copy(source, directory / name)


# ---------------------------------------------------------------------------------------------------------- 3. the runs
DEVICES = ["cpu"] if TEST_DEVICE == "cpu" else [GPU]
SIMULATED = [
    *(pytest.param(name, False, marks=() if name in FAST else pytest.mark.slow) for name in COMMANDS),
    *(pytest.param(name, True, id=f"{name}, fused", marks=pytest.mark.slow) for name in FUSED),
]


def not_finite(out: Path) -> list[str]:
    return [
        f"{metrics.parent}: {name} is {value}"
        for metrics in out.rglob("metrics.jsonl")
        for row in read_metrics(metrics.parent)
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Change the working directory; commands set sys.argv."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs(name, device, world, here):
    command = entry(*COMMANDS[name], device)
    fill(here, world, command)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    command.run()
    assert not not_finite(here)
    assert device == "cpu" or torch.cuda.max_memory_allocated() > before  # it ran on the device


def logged(here: Path) -> list[dict]:
    """Return the rows of the metrics, without times."""
    files = sorted(here.rglob("metrics.jsonl"))
    rows = [row for metrics in files for row in read_metrics(metrics.parent)]
    return [{name: value for name, value in row.items() if not TIMES.search(name)} for row in rows]


@pytest.mark.skipif(TEST_DEVICE is not None, reason="the commands run on a device")
@pytest.mark.parametrize(("name", "fuses"), SIMULATED)
def test_a_command_runs_on_a_simulated_gpu(name, fuses, request, here):
    pytest.importorskip("triton", reason="triton is not installed")
    base, flags = COMMANDS[name]
    world = request.getfixturevalue("miniature").root if name in FAST else request.getfixturevalue("world")
    for device in ("cpu", "cuda"):
        (here / device).mkdir()
        os.chdir(here / device)
        fill(here / device, world, entry(base, flags, device))
        with PretendHopper(fuses) if device == "cuda" else nullcontext() as gpu:
            entry(base, flags, device).run()
    assert not not_finite(here)
    on_cpu, on_gpu = logged(here / "cpu"), logged(here / "cuda")
    if "bfloat16" in flags:  # rounded in another order: a sampled token may differ
        assert [row.keys() for row in on_gpu] == [row.keys() for row in on_cpu]
        assert gpu.launches or name not in FUSED
    else:
        assert on_gpu == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in on_cpu]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupted_run_resumes(device, world, here):
    command = entry("train_ppo", "--save-every 1 --dtype bfloat16", device)
    fill(here, world, command)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        interrupt_at(2, patch, train_ppo, "gae")
        command.run()
    assert len(read_metrics(here / "out/run")) == 1
    entry("train_ppo", "--save-every 1 --dtype bfloat16 --resume", device).run()
    assert len(read_metrics(here / "out/run")) == 2


def run_on_a_rank(argument: tuple[Path, str]) -> None:
    directory, device = argument
    os.chdir(directory)
    for base, flags in SHARDED.items():
        sys.argv = []
        entry(base, f"{flags} --out out/{base}", device).run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "device"), [(1, "cpu")] if TEST_DEVICE == "cpu" else [pytest.param(1, "cuda", marks=GPU.marks), TWO_GPUS]
)
def test_the_scripts_run_on_nccl_ranks(number, device, world, tmp_path):
    """One GPU runs one rank: NCCL rejects two, and so does `--device cuda`."""
    for base, flags in SHARDED.items():
        fill(tmp_path, world, entry(base, flags, device))
    on_processes(run_on_a_rank, (tmp_path, device), tmp_path, number, device)
    assert not not_finite(tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == SHARDED.keys()
