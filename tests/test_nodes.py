"""Two nodes on one machine: two torchrun agents that meet at the loopback address."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_ppo
import train_rm
import train_sft
from nanorlhf import dataset, distributed
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import ROOT, UNCLIPPED, interrupt_at, read_metrics, weights
from tests.helpers.two_processes import on_processes, run_all
from tests.test_distributed import TIMED, find_processes, make_flags, needs_proc, wait_until, worker
from tests.test_train_ppo import miniature  # noqa: F401  its policy sometimes samples EOS


@contextlib.contextmanager
def two_nodes(directory, path, *command):
    """Start a job with one process per node and `path` on its command line; yield the agents and their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    logs = [directory / f"node.{number}" for number in range(2)]
    agents = []
    try:
        for number, log in enumerate(logs):
            # otherwise the agent that starts first would be the host, and the other one might get rank 0
            host = f"--rdzv-conf=is_host={number == 0}"
            with log.open("w") as file:
                call = [sys.executable, "-m", "torch.distributed.run", *meet, host, "--rdzv-id=test", *command]
                agents.append(subprocess.Popen(call, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        yield agents, logs
    finally:
        for pid in {*(agent.pid for agent in agents), *find_processes(path)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in agents:
            agent.wait()


@contextlib.contextmanager
def exchanging_nodes(directory):
    """Start two nodes that exchange numbers until a file exists; yield the file, the agents and their logs.

    torchrun doesn't kill a process whose peer on another node died, so the grace period is pure waiting.
    """
    file = directory / "break"
    with two_nodes(directory, file, "-m", "tests.helpers.small_job", str(file), "1", "1.0") as (agents, logs):
        wait_until((directory / "started").exists, 600)
        yield file, agents, logs


def equal_metrics(one, other):
    for rows in zip(read_metrics(one), read_metrics(other), strict=True):
        first, second = ({key: value for key, value in row.items() if key not in TIMED} for row in rows)
        assert first == pytest.approx(second, abs=2e-4)


@pytest.fixture(scope="module")
def nodes(miniature, tmp_path_factory):  # noqa: F811
    """Run three programs in one job on two nodes; return the directory and the output of each node.

    STAGE_one ran on a single process, STAGE_two on the nodes, except for the first of PPO's three updates.
    """
    root = tmp_path_factory.mktemp("nodes")
    stages = {
        "sft": (train_sft, replace(miniature.sft, micro_batch_size=3)),
        "rm": (train_rm, replace(miniature.rm, micro_batch_size=3)),
        "ppo": (train_ppo, replace(miniature.ppo, num_minibatches=2, save_every=1, **UNCLIPPED)),
    }
    more = {"ppo": ["--clip-range", "1e6", "--value-clip-range", "None", "--save-every", "1", "--resume"]}
    commands = []
    for name, (script, args) in stages.items():
        script.main(replace(args, out=root / f"{name}_one"))
        flags = make_flags(replace(args, out=root / f"{name}_two")) + more.get(name, [])
        commands.append([f"{script.__name__}.py", "tiny", *flags])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_at(2, patch, train_ppo, "gae")
        train_ppo.main(replace(stages["ppo"][1], out=root / "ppo_two"))
    file = root / "commands.json"
    file.write_text(json.dumps(commands))
    with two_nodes(root, file, "-m", "tests.helpers.programs_in_turn", str(file)) as (agents, logs):
        codes = [agent.wait(900) for agent in agents]
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], texts
    return root, texts


def said_once(texts, pattern):
    """Return True if only one node, the one with rank 0, printed the pattern, and only once."""
    return sorted(len(re.findall(pattern, text)) for text in texts) == [0, 1]


@pytest.mark.slow
def test_a_run_of_one_process_resumes_on_two_nodes_and_equals_one_process(nodes):
    """One update on one process, then two on two nodes: the same batches, and the same weights up to rounding."""
    root, texts = nodes
    said = "continues with 2 process(es) instead of 1: the global batches stay the same, but sums differ by rounding."
    assert said_once(texts, re.escape(said))
    one, two = (weights(load_gpt(root / name)) for name in ("ppo_one", "ppo_two"))
    assert torch.allclose(one, two, atol=2e-5)
    equal_metrics(root / "ppo_one", root / "ppo_two")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name", "read"), [("sft", "SFT", load_gpt), ("rm", "RM", load_scalar)])
def test_the_first_two_stages_on_two_nodes_equal_one_process(nodes, stage, name, read):
    root, texts = nodes
    assert said_once(texts, rf"{name}: [\d,]+ parameters.* 2 process\(es\)")
    one, two = (weights(read(root / f"{stage}_{number}")) for number in ("one", "two"))
    assert torch.allclose(one, two, atol=2e-5)
    equal_metrics(root / f"{stage}_one", root / f"{stage}_two")


@pytest.mark.slow
def test_ppo_with_shards_within_nodes_and_copies_across_equals_one_process(miniature, tmp_path):  # noqa: F811
    """Two updates on four processes, as two nodes of two, with models read from their files row by row."""
    args = replace(miniature.ppo, total_episodes=16, **UNCLIPPED)
    one, four = replace(args, out=tmp_path / "one"), replace(args, out=tmp_path / "four", shard="hsdp", offload=True)
    train_ppo.main(one)
    on_processes(run_all, [(train_ppo.main, four)], tmp_path, number=4, per_node=2)
    assert torch.allclose(weights(load_gpt(one.out)), weights(load_gpt(four.out)), atol=2e-5)
    equal_metrics(one.out, four.out)


@needs_proc
@pytest.mark.slow
def test_an_error_on_one_node_is_the_reason_that_both_give(tmp_path):
    with exchanging_nodes(tmp_path) as (file, agents, logs):
        file.touch()
        assert all(agent.wait(600) != 0 for agent in agents)
    texts = [log.read_text() for log in logs]
    assert all("the file is there" in text for text in texts), texts
    assert sum("PeerFailed: on another node: rank 1 failed:" in text for text in texts) == 1
    wait_until(lambda: not find_processes(file))


@needs_proc
@pytest.mark.slow
def test_a_node_that_dies_ends_the_other(tmp_path):
    """It dies silently, as in a power failure: its torchrun is killed along with its process."""
    with exchanging_nodes(tmp_path) as (file, agents, logs):
        status = Path(f"/proc/{worker(file, rank=1)}/status").read_text()
        parent = int(re.search(r"PPid:\s+(\d+)", status)[1])
        os.kill(parent, signal.SIGKILL)
        (lives,) = (number for number, agent in enumerate(agents) if agent.pid != parent)
        assert agents[lives].wait(600) != 0
    assert "PeerFailed: on another node: a process died, or the node itself" in logs[lives].read_text()
    wait_until(lambda: not find_processes(file))


def test_a_cache_that_another_node_does_not_see_is_sent_by_the_first(miniature, tmp_path, monkeypatch):  # noqa: F811
    """Simulate two nodes, one after the other: the second has the rows, but no cache or an old one."""
    tokenizer, sent = load_tokenizer(miniature.ppo.sft), []
    file = miniature.ppo.data / "sft.train.jsonl"
    expected = dataset.load_demonstrations(file, tokenizer, 160, None)
    (cache,) = (miniature.ppo.data / dataset.CACHE).glob(
        f"sft.train.jsonl.demonstrations.{tokenizer.fingerprint[:16]}*"
    )
    key, arrays = dataset.read_cache(cache)

    def from_first(function):
        """Return what rank 0 would send to the other node."""
        sent.append(key if len(sent) == 0 else arrays)
        return sent[-1]

    monkeypatch.setattr(distributed, "from_first", from_first)
    for there in (tmp_path / "nothing", tmp_path / "old"):
        if there.name == "old":
            there.write_bytes(
                dataset.save({name: array[:1] for name, array in arrays.items()}, {"key": "an older one"})
            )
        sent.clear()
        mapped = dataset.map_cache(there)
        assert sent[1:] and all(np.array_equal(mapped[name], arrays[name]) for name in arrays)
    sent.clear()
    dataset.map_cache(cache)
    assert sent == [key] and len(expected) > 0
