"""--processes: ranks that are forked on this CPU and use the same collectives as under `torchrun`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import train_dpo
import train_grpo
import train_ppo
import train_rlcf
import train_rm
import train_sft
from nanorlhf import distributed, launch
from nanorlhf.cli import command_line
from nanorlhf.errors import InputError
from nanorlhf.training.resume import damage, states
from tests.conftest import ROOT, read_metrics, run_program
from tests.helpers.rank_errors import write_outcomes
from tests.helpers.small_job import exchange
from tests.helpers.two_processes import start
from tests.test_distributed import TIMED, TORCHRUN, make_flags, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks after PyTorch is imported")


def run(*command, threads: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def followers(pid: int) -> list[int]:
    """Return the live processes that this one has forked."""
    return [child for child, (parent, state) in parents().items() if parent == pid and state != "Z"]


def parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of each process."""
    processes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            processes[int(stat.parent.name)] = int(parent), state
    return processes


@contextlib.contextmanager
def started(sign: Path, log: Path, work, *arguments):
    """Start work on several processes and wait until `sign` exists; afterwards check that all end without a kill."""
    process = start(log, work, *arguments)
    try:
        wait_until(lambda: sign.exists() or not process.is_alive())
        assert process.is_alive(), log.read_text()[-2000:]
        everyone = [process.pid, *followers(process.pid)]
        yield process
        process.join(60)
        wait_until(lambda: all(parents().get(pid, (0, "Z"))[1] == "Z" for pid in everyone), 30)
    finally:
        process.kill()  # also kills its forks
        process.join()


@pytest.fixture
def job(tmp_path):
    """Start three processes that exchange tensors until the file `break` exists; yield the first and the log."""
    log = tmp_path / "log"
    with started(tmp_path / "started", log, exchange, tmp_path / "break", 3) as process:
        assert len(followers(process.pid)) == 2
        yield process, log


@pytest.mark.slow
def test_a_run_ends_in_the_bits_of_torchrun(miniature, tmp_path):
    """Each process has one thread, whatever the environment requests, and output is printed once."""
    args = replace(miniature.ppo, total_episodes=16)
    forked, launched = (replace(args, out=tmp_path / name) for name in ("forked", "launched"))
    ours = run("train_ppo.py", "tiny", *make_flags(forked), "--processes", "2", threads=2)
    theirs = run(*TORCHRUN, "train_ppo.py", "tiny", *make_flags(launched), threads=1)
    assert ours.returncode == theirs.returncode == 0, (ours.stderr[-2000:], theirs.stderr[-2000:])
    assert ours.stdout.count("PPO: 2 updates") == 1 and ours.stdout == theirs.stdout
    for rows in zip(read_metrics(forked.out), read_metrics(launched.out), strict=True):
        first, second = ({key: row[key] for key in row if key not in TIMED} for row in rows)
        assert first == second
    assert (forked.out / "samples.jsonl").read_text() == (launched.out / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(["--batch-size", "3"], "--batch-size 3 can't be divided among 2 processes"), (["--data", "nowhere"], "nowhere")],
)
@pytest.mark.slow
def test_bad_input_is_one_sentence_of_one_process(miniature, tmp_path, flags, sentence):
    out = tmp_path / "out"
    command = ["train_sft.py", "tiny", *make_flags(replace(miniature.sft, out=out)), "--processes", "2", *flags]
    process = start(tmp_path / "log", run_program, *command)
    process.join(120)
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 2 and sentence in said, said
    assert said.startswith("error: ") and said.count("\n") == 1 and not out.exists()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Return the exit code and stderr of each case in tests/helpers/rank_errors.py."""
    path = tmp_path_factory.mktemp("outcomes")
    process = start(path / "log", write_outcomes, path / "outcomes.json")
    process.join(120)
    assert process.exitcode == 0, (path / "log").read_text()
    return json.loads((path / "outcomes.json").read_text())


SENTENCES = {
    "bad input on rank 1": "rule.py:2 is bad.",
    "bad input on rank 0": "rule.py:2 is bad.",
    "bad input on both": "rule.py:2 is bad.",
    "bad input at the end": "rule.py:2 is bad.",
    "another sentence on each": "rank [01] is bad.",
    "bad input where rank 0 looks for all": "it is bad.",
    "a full disk on rank 1": "the disk is full .No space left on device. at out/file.",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SENTENCES)
def test_an_error_that_the_user_can_fix_is_one_sentence_whichever_process_has_it(outcomes, case):
    code, err = outcomes[case]
    assert code == 2 and re.fullmatch(f"error: {SENTENCES[case]}\n", err), (code, err)


@pytest.mark.parametrize("case", ["a bug on rank 1", "a bug on rank 0", "a bug on both", "a bug at the end"])
def test_a_bug_of_any_process_is_one_traceback(outcomes, case):
    code, err = outcomes[case]
    assert code == 1 and err.count("Traceback") == 1 and err.endswith("ValueError: a bug\n"), (code, err)


@pytest.mark.parametrize("case", ["a kill of rank 1", "a kill as it starts", "a kill as it joins"])
def test_a_process_that_dies_without_a_word_is_one_sentence(outcomes, case):
    """Even before all have joined, while the others would wait."""
    code, err = outcomes[case]
    assert code == 1 and err.endswith("in another process: rank 1 died of SIGKILL, maybe out of memory\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("case", ["ctrl-C on rank 0", "ctrl-C within a fork"])
def test_an_interrupt_is_one_word(outcomes, case):
    """During a fork Python would print it and continue, with logging's lock never released."""
    assert outcomes[case] == [130, "interrupted\n"]


def test_a_process_that_has_joined_may_take_longer(outcomes):
    assert outcomes["later than the time to join"] == [0, "[0, 1]\n"]


def test_too_many_processes_are_refused_before_any_is_forked(miniature, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "fork_ranks", lambda *_: pytest.fail("a process was forked"))
    with pytest.raises(SystemExit) as stopped:
        run_program("train_sft.py", "tiny", *make_flags(replace(miniature.sft, out=tmp_path)), "--processes", "1000")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --processes 1000: must be from 1 to 500.\n"


def test_an_error_of_one_process_is_named_by_the_first(job, tmp_path):
    process, log = job
    (tmp_path / "break").touch()
    process.join(60)
    said = log.read_text()
    assert process.exitcode == 1 and "PeerFailed: in another process: rank 1 failed:\n" in said
    assert said.count("ValueError: the file is there") == 1


def test_a_killed_process_ends_the_others(job):
    process, log = job
    os.kill(max(followers(process.pid)), signal.SIGKILL)
    process.join(60)
    assert process.exitcode == 1 and "PeerFailed: in another process: rank 2 died of SIGKILL" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_that_one_does_not_wait_for_stops_the_run(job, number):
    """The first process is in its steps and finishes one; another has not started them, or has finished them."""
    process, log = job
    os.kill(max(followers(process.pid)), number)
    process.join(60)
    stopped = f"Interrupted: stopped by {number.name} before or after its steps: --resume continues from the last"
    assert (
        process.exitcode == 1 and stopped in log.read_text().strip().splitlines()[-1]
    )  # `command_line` sets the exit code


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 1), (signal.SIGTERM, -15)])
def test_a_signal_to_the_first_leaves_no_orphan(job, number, code):
    process, _ = job
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == code


def test_sigterm_finishes_and_saves_the_step(miniature, tmp_path):
    """SIGTERM goes to the process that the user started; a resume on one process continues from the state."""
    out, log = tmp_path / "out", tmp_path / "log"
    args = replace(miniature.ppo, out=out, total_episodes=10**9)
    command = ["train_ppo.py", "tiny", *make_flags(args)]
    with started(out / "metrics.jsonl", log, run_program, *command, "--processes", "2") as process:
        process.terminate()
        process.join(120)
    (state,) = states(out)
    steps = int(state.name.removeprefix("step-"))
    assert process.exitcode == 143 and steps == len(read_metrics(out)) and damage(state) is None
    assert log.read_text().count(f"stopped by SIGTERM after {steps} steps") == 1
    with started(out / "metrics.jsonl", log, run_program, *command, "--resume") as process:
        wait_until(lambda: len(read_metrics(out)) > steps + 1)
        process.terminate()


def test_it_is_refused_where_it_cannot_be(monkeypatch):
    """Under torchrun, and where a fork is unsafe."""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        with pytest.raises(InputError, match="--processes 2: `torchrun` has already started the processes"):
            launch.run(lambda: None, "cpu", 2)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="needs Linux: use `torchrun --nproc-per-node 2`"):
        launch.run(lambda: None, "cpu", 2)


@dataclass(frozen=True)
class Settings:
    device: str = "cpu"
    processes: int = 2


@pytest.mark.parametrize("settings", [Settings("cuda"), Settings("auto"), Settings(processes=1)])
def test_nothing_is_forked_for_a_gpu(monkeypatch, settings):
    seen = []
    monkeypatch.setattr(launch, "fork_ranks", lambda *_: seen.append("forked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["program"])
    command_line(lambda args: seen.append(distributed.world_size()), {"tiny": ("a test", settings)})
    assert seen == [1]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("script", [train_sft, train_rm, train_dpo, train_ppo, train_grpo, train_rlcf])
def test_processes_are_forked_before_anything_looks_for_a_gpu(monkeypatch, script, dtype):
    """Once initialised, CUDA fails in every fork, even if it computes on the CPU: AdamW requests a stream."""
    forked = []
    monkeypatch.setattr(launch, "fork_ranks", lambda work, processes: forked.append(processes))
    for name in ("is_available", "device_count", "is_bf16_supported", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name}() was called"))
    monkeypatch.setattr(sys, "argv", ["program", "--device", "cpu", "--processes", "2", "--dtype", dtype])
    command_line(script.main, script.RECIPES)
    assert forked == [2]
