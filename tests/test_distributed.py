"""Two gloo processes give the same weights as one from the same global batch, in all three stages."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path

import train_dpo
import train_grpo
import train_ppo
import train_rm
import train_sft
from nanorlhf import distributed, launch
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import batch_indices
from nanorlhf.errors import InputError
from nanorlhf.training.resume import damage, states
from nanorlhf.training.run import TIME_METRICS
from nanorlhf.training.run_directory import kept_checkpoints
from tests.conftest import GPU, ROOT, UNCLIPPED, read_metrics, weights
from tests.helpers import two_processes
from tests.helpers.two_processes import on_processes, run_all, run_tests
from tests.test_moving import SOFT
from tests.test_regression import scored  # noqa: F401  a fixture
from tests.test_train_grpo import grpo_args
from tests.test_train_ppo import policy_that_stops

SETTINGS = (
    "data", "out", "sft", "reward_model", "device", "batch_size", "micro_batch_size", "num_minibatches", "num_epochs",
    "total_episodes", "max_query_length", "max_response_length", "response_length", "n_layer", "d_model", "n_head",
    "warmup_steps", "num_samples", "num_ppo_epochs", "loss", "num_normalisation", "max_grad_norm",
    "shard", "eval_every", "kl_coef",
)  # fmt: skip


def make_flags(args) -> list[str]:
    return [
        text
        for name in SETTINGS
        if hasattr(args, name)
        for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]


STAGES = {
    "sft": load_gpt, "rm": load_scalar, "regression": load_scalar, "dpo": load_gpt, "ppo": load_gpt, "lora": load_gpt,
    "grpo": load_gpt, "dapo": load_gpt, "kto": load_gpt,
}  # fmt: skip
SHARDED = [(stage, "fsdp") for stage in ("sft", "regression", "dpo", "ppo", "lora", "grpo", "dapo")]
ROLLOUTS = ("ppo", "lora", "grpo", "dapo")


@pytest.fixture(scope="module")
def runs(miniature, scored, tmp_path_factory):  # noqa: F811
    """Run each stage on one process and on two; return the directories by stage and --shard ("one": one process)."""
    root = tmp_path_factory.mktemp("two_processes")
    ppo = replace(miniature.ppo, sft=str(policy_that_stops(miniature.root)), total_episodes=16, num_minibatches=2)
    rule = root / "rule.py"  # has two values, so that all responses to some queries score the same
    rule.write_text("def score(queries, responses): return [float(len(r) > 30) for r in responses]\n")
    dapo = grpo_args(ppo, algorithm="dapo", samples_per_query=3, batch_size=12, total_episodes=24, num_epochs=2)
    dapo = replace(dapo, reward_model=None, reward=f"{rule}:score", missing_eos_score=None, kl_coef=0.0)
    short = {"micro_batch_size": 3, "num_epochs": 0.5}
    stages = {
        "sft": (
            train_sft.main,
            replace(miniature.sft, micro_batch_size=3, max_grad_norm=0.5, eval_every=4, num_epochs=0.75),
        ),
        "rm": (train_rm.main, replace(miniature.rm, **short)),
        "regression": (train_rm.main, replace(scored, **short, max_grad_norm=0.5)),
        "dpo": (train_dpo.main, replace(miniature.dpo, **short)),
        "kto": (train_dpo.main, replace(miniature.dpo, **short, loss="kto", beta=0.5, lr=3e-3, reference=SOFT)),
        "ppo": (train_ppo.main, replace(ppo, **UNCLIPPED, keep_every=1)),
        "lora": (train_ppo.main, replace(ppo, **UNCLIPPED, tune="lora", lr=1e-2)),
        "grpo": (
            train_grpo.main,
            grpo_args(ppo, clip_range=UNCLIPPED["clip_range"], algorithm="grpo", samples_per_query=2, num_epochs=2),
        ),
        "dapo": (train_grpo.main, replace(dapo, clip_range=UNCLIPPED["clip_range"])),
        "clipped": (train_ppo.main, replace(ppo, total_episodes=8, clip_range=0.01, value_clip_range=0.01)),
    }
    shared = [(stage, "none") for stage in stages] + SHARDED
    for stage, (main, args) in stages.items():
        main(replace(args, out=root / f"{stage}_one"))
    pairs = []
    for stage, shard in shared:
        main, args = stages[stage]
        sharded = {"shard": shard, "checkpoint_activations": True} if shard != "none" else {}
        sharded |= {"offload": True} if (stage, shard) == ("ppo", "fsdp") else {}
        pairs.append((main, replace(args, out=root / f"{stage}_{shard}", **sharded)))
    on_processes(run_all, pairs, root)
    return {(stage, shard): root / f"{stage}_{shard}" for stage in stages for shard in ("one", "none", "fsdp")}


TIMED = {*TIME_METRICS, "policy/first_ratio_error", "policy/sampler_gap", "padding_difference"}
CLIPPED = {"policy/clip_fraction", "value/clip_fraction"}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shard"), [(stage, "none") for stage in STAGES] + SHARDED)
def test_two_processes_equal_one(runs, stage, shard):
    """Weights and metrics are equal up to rounding (PPO without clipping), samples to the last bit."""
    load, one, two = STAGES[stage], runs[stage, "one"], runs[stage, shard]
    assert torch.allclose(weights(load(one)), weights(load(two)), atol=2e-5)
    if stage not in ROLLOUTS:  # both write at the same steps
        assert torch.allclose(weights(load(one / "best")), weights(load(two / "best")), atol=2e-5)
    kept, kept_by_two = map(kept_checkpoints, (one, two))
    assert [*kept] == [*kept_by_two] == ([1, 2] if stage == "ppo" else [])
    for step, path in kept.items():
        assert torch.allclose(weights(load(path)), weights(load(kept_by_two[step])), atol=2e-5)
    state, sharded_state = (torch.load(next((out / "state").glob("step-*")) / "state.pt") for out in (one, two))
    shapes = [
        {path: leaf.shape for path, leaf in tree_flatten_with_path(s)[0] if isinstance(leaf, torch.Tensor)}
        for s in (state, sharded_state)
    ]
    shapes = [{path: shape for path, shape in leaves.items() if "generators" not in str(path)} for leaves in shapes]
    assert shapes[0] == shapes[1]  # one process and two write the same state files
    for rows in zip(read_metrics(one), read_metrics(two), strict=True):
        first, second = ({key: value for key, value in row.items() if key not in TIMED} for row in rows)
        assert first == pytest.approx(second, abs=2e-4)
    if stage in ROLLOUTS:  # the same texts: each row has its own random numbers
        texts = [[json.loads(line)["response"] for line in (out / "samples.jsonl").open()] for out in (one, two)]
        assert texts[0] == texts[1] and len(texts[0]) == 8


@pytest.mark.slow
def test_two_processes_resample_and_drop_the_same_groups_as_one(runs):
    """With three responses per query, an odd number is padded with a second sample, for equal shares."""
    rows = read_metrics(runs["dapo", "none"])
    assert sum(row["groups/refilled"] for row in rows) > 0 and max(row["groups/dropped"] for row in rows) > 0


@pytest.mark.slow
def test_two_processes_log_the_same_metrics_as_one_with_clipping(runs):
    """Equal up to rounding. A value at a clipping boundary may fall on either side, which changes clipped fractions."""
    for rows in zip(*(read_metrics(runs["clipped", name]) for name in ("one", "none")), strict=True):
        first, second = ({key: value for key, value in row.items() if key not in TIMED | CLIPPED} for row in rows)
        assert first == pytest.approx(second, abs=2e-3)
        for key in CLIPPED:
            assert rows[0][key] == pytest.approx(rows[1][key], abs=0.05) and rows[0][key] > 0.15, rows[0]


def test_the_slices_of_the_ranks_are_disjoint_and_cover_the_batch(monkeypatch):
    batch, seen = batch_indices(100, 12, step=3, seed=0), []
    for rank in range(4):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: 4)
        share = batch[distributed.rank_slice(12)]
        assert len(share) == 3
        seen += share
    assert seen == batch and len(set(seen)) == 12


def test_gradients_are_summed_over_the_ranks_parameter_by_parameter(monkeypatch):
    """Runs two ranks one after the other; a frozen parameter has no gradient."""
    shapes = [(2, 3), (4,), (5,)]
    ranks = [torch.nn.ParameterList(torch.zeros(shape) for shape in shapes) for _ in range(2)]
    for model in ranks:
        for parameter in model[:2]:
            parameter.grad = torch.randn_like(parameter)
    other = torch.cat([parameter.grad.flatten() for parameter in ranks[1][:2]])
    expected = [first.grad + second.grad for first, second in zip(ranks[0][:2], ranks[1][:2], strict=True)]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda flat: flat.add_(other))
    distributed.sum_gradients(ranks[0])
    assert all(torch.equal(p.grad, sum_) for p, sum_ in zip(ranks[0][:2], expected, strict=True))
    assert ranks[0][2].grad is None


def test_only_gradients_that_differ_between_ranks_are_sent(monkeypatch) -> None:
    """None for a single process, a sharded model (already summed), or frozen parameters."""
    sharded, plain, frozen = (torch.nn.Linear(2, 1) for _ in range(3))
    for model in (sharded, plain):
        model.weight.grad = torch.ones(1, 2)
    sent = []
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda flat: sent.append(flat.tolist()) or flat.mul_(3))
    monkeypatch.setattr(distributed, "is_sharded", lambda model: model is sharded)
    monkeypatch.setattr(distributed, "world_size", lambda: 1)
    distributed.sum_gradients(plain)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    distributed.sum_gradients(frozen)
    distributed.sum_gradients(sharded)
    assert not sent
    distributed.sum_gradients(sharded, plain)
    assert sent == [[1.0, 1.0]] and plain.weight.grad.tolist() == [[3.0, 3.0]]
    assert sharded.weight.grad.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cuda:99", "gpu0", ""])
def test_a_missing_device_is_named(device):
    with pytest.raises(InputError, match=f"--device {device}"):
        launch.setup(device)


def test_one_gpu_for_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--device cuda:0 puts 2 processes on one GPU: pass cuda."):
        launch.setup("cuda:0")


def test_mps_is_for_one_process_in_float32(monkeypatch):
    with pytest.raises(InputError, match="--device mps: PyTorch found no GPU of Apple's."):
        launch.setup("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert launch.setup("mps") == torch.device("mps")
    with pytest.raises(InputError, match="--dtype bfloat16: on mps only float32 works."):
        launch.setup("mps", "bfloat16")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--device mps: 2 processes can't share it: start one."):
        launch.setup("mps")


def test_a_named_gpu_becomes_the_current_device(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    for rank, (flag, expected) in enumerate((("cuda:1", "cuda:1"), ("cuda", "cuda:1"))):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert str(launch.setup(flag)) == expected
    assert current == ["cuda:1", "cuda:1"]


# -------------------------------------------------------------------------------------------------- a process that dies
def find_processes(path) -> list[int]:
    """Find processes with this path on their command line: torchrun and its workers."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:  # the process has just ended
            continue
        if str(path).encode() in arguments and not zombie:
            pids.append(int(entry.name))
    return pids


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@contextlib.contextmanager
def program(path, started, *command):
    """Start a Python program with the path on its command line; wait for `started`; kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        # background processes of a shell ignore SIGINT, and so would this program
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait_until(lambda: started.exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()[-2000:]
        yield process
    finally:
        for pid in {process.pid, *find_processes(path)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.communicate()


@pytest.fixture
def job(tmp_path):
    """Start two processes that exchange tensors until the file `break` exists."""
    file = tmp_path / "break"
    with program(file, tmp_path / "started", *TORCHRUN, "-m", "tests.helpers.small_job", str(file)) as process:
        yield process, file


def worker(path, rank) -> int:
    return next(p for p in find_processes(path) if f"\0RANK={rank}\0" in Path(f"/proc/{p}/environ").read_text())


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


@needs_proc
@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_is_named(job):
    process, file = job
    os.kill(worker(file, rank=1), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    first = err.partition("Root Cause (first observed failure)")[2]
    assert process.returncode != 0 and "(local_rank: 1)" in first and "SIGKILL" in first
    wait_until(lambda: not find_processes(file))


@needs_proc
@pytest.mark.slow
def test_the_error_of_the_process_that_failed_first_is_reported(job):
    process, file = job
    file.touch()
    _, err = process.communicate(timeout=120)
    first = err.partition("Root Cause (first observed failure)")[2]
    assert process.returncode != 0 and "(local_rank: 1)" in first and "ValueError: the file is there" in first
    wait_until(lambda: not find_processes(file))


@needs_proc
@pytest.mark.slow
def test_sigterm_to_torchrun_finishes_and_saves_the_step(miniature, tmp_path):
    out = tmp_path / "out"
    args = replace(miniature.ppo, out=out, total_episodes=10**9)
    with program(out, out / "metrics.jsonl", *TORCHRUN, "train_ppo.py", "tiny", *make_flags(args)) as process:
        process.terminate()
        process.communicate(timeout=120)
    (state,) = states(out)
    assert process.returncode != 0 and int(state.name.removeprefix("step-")) == len(read_metrics(out))
    assert damage(state) is None
    wait_until(lambda: not find_processes(out))


@needs_proc
@pytest.mark.slow
def test_torchrun_killed_with_sigkill_leaves_no_orphan(job):
    process, file = job
    assert len(find_processes(file)) == 3
    process.kill()
    wait_until(lambda: not find_processes(file))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in vars(two_processes) if name.startswith("test_")])
def test_two_processes_agree(name, tmp_path):
    """Runs the assertions of tests/helpers/two_processes.py on both ranks."""
    on_processes(run_tests, [name], tmp_path)


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="`make gpu` runs it, on two CUDA devices")
TWO_GPUS = pytest.param(2, "cuda", marks=[pytest.mark.gpu, needs_two_gpus])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "device"), [(1, "cpu"), pytest.param(1, *GPU.values, marks=GPU.marks), TWO_GPUS], ids=str
)
def test_collectives_and_sharded_steps_on_any_device(number, device, tmp_path):
    """Tests Gloo or NCCL; FSDP2 also in a group of one."""
    names = [
        "check_collectives", "test_sharded_steps_equal_unsharded_ones",
        "test_a_state_resumes_bit_for_bit_if_it_stays_sharded",
    ]  # fmt: skip
    on_processes(run_tests, names, tmp_path, number, device)


@pytest.mark.slow
def test_shards_within_a_node_and_copies_across(tmp_path):
    """Four processes as two nodes, a 2 x 2 mesh: gradients, states and a bad gradient are as with one copy."""
    names = [
        "check_that_each_node_has_all_rows", "check_gradients",
        "test_a_state_resumes_bit_for_bit_if_it_stays_sharded",
        "test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all",
    ]  # fmt: skip
    on_processes(run_tests, names, tmp_path, number=4, per_node=2)


def test_nodes_of_unequal_size_are_refused(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather_objects", lambda sizes: [*sizes, 4])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(InputError, match=r"--shard hsdp: nodes run \[4, 8\] processes: pass the same"):
        distributed.node_size()
