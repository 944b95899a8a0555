"""--processes: ranks that are forked on this CPU, by the same collectives as those of `torchrun`."""

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
from tests.test_distributed import TIMED, TORCHRUN, flags_of, processes_of, program, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks after PyTorch is imported")


def run(*command, threads: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@contextlib.contextmanager
def started(path: Path, sign: Path, *command):
    """A program of several processes; at the end of the test none of them is left, nobody having to kill it."""
    with program(path, sign, *command) as process:
        yield process
        process.wait(timeout=60)
        wait_until(lambda: not processes_of(path), 30)


@pytest.fixture
def job(tmp_path):
    """Three processes that exchange tensors until the file `break` exists."""
    file = tmp_path / "break"
    with started(file, tmp_path / "started", "-m", "tests.exchange", str(file), "3") as process:
        assert len(processes_of(file)) == 3
        yield process, file


@pytest.mark.slow
def test_a_run_ends_in_the_bits_of_torchrun(miniature, tmp_path):
    """Each of one thread, whatever the environment says; said once."""
    args = replace(miniature.ppo, total_episodes=16)
    forked, launched = (replace(args, out=tmp_path / name) for name in ("forked", "launched"))
    ours = run("train_ppo.py", "tiny", *flags_of(forked), "--processes", "2", threads=2)
    theirs = run(*TORCHRUN, "train_ppo.py", "tiny", *flags_of(launched), threads=1)
    assert ours.returncode == theirs.returncode == 0, (ours.stderr[-2000:], theirs.stderr[-2000:])
    assert ours.stdout.count("PPO: 2 updates") == 1 and ours.stdout == theirs.stdout
    for rows in zip(read_metrics(forked.out), read_metrics(launched.out), strict=True):
        first, second = ({key: row[key] for key in row if key not in TIMED} for row in rows)
        assert first == second
    assert (forked.out / "samples.jsonl").read_text() == (launched.out / "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(["--batch-size", "3"], "--batch-size 3 can't be shared by 2 processes"), (["--data", "nowhere"], "nowhere")],
)
def test_bad_input_is_one_sentence_of_one_process(miniature, tmp_path, flags, sentence):
    out = tmp_path / "out"
    command = ["train_sft.py", "tiny", *flags_of(replace(miniature.sft, out=out)), "--processes", "2", *flags]
    done = run(*command, threads=2)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not out.exists()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, str]]:
    """Exit code and stderr of each case of tests/rank_errors.py."""
    done = run("-m", "tests.rank_errors", threads=1)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a bug on rank 1", "a bug on rank 0", "a bug on both", "a bug at the end"])
def test_a_bug_of_any_process_is_one_traceback(outcomes, case):
    code, err = outcomes[case]
    assert code == 1 and err.count("Traceback") == 1 and err.endswith("ValueError: a bug\n"), (code, err)


@pytest.mark.slow
def test_a_process_that_dies_without_a_word_is_one_sentence(outcomes):
    killed = [1, "in another process: rank 1 died of SIGKILL, maybe because memory ran out\n"]
    assert outcomes["a kill of rank 1"] == killed and outcomes["ctrl-C on rank 0"] == [130, "interrupted\n"]


def test_too_many_processes_are_refused_before_any_is_forked(miniature, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "fork_ranks", lambda *_: pytest.fail("a process was forked"))
    with pytest.raises(SystemExit) as stopped:
        run_program("train_sft.py", "tiny", *flags_of(replace(miniature.sft, out=tmp_path)), "--processes", "1000")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --processes 1000: it must be from 1 to 500.\n"


@pytest.mark.slow
def test_an_error_of_one_process_is_named_by_the_first(job):
    process, file = job
    file.touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "PeerFailed: in another process: rank 1 failed:\n" in err
    assert err.count("ValueError: the file is there") == 1


@pytest.mark.slow
def test_a_killed_process_ends_the_others(job):
    process, file = job
    os.kill(max(processes_of(file)), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "PeerFailed: in another process: rank 2 died of SIGKILL" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_that_one_does_not_wait_for_stops_the_run(job, number):
    """The first is in its steps and finishes one; another has not begun them, or has ended them."""
    process, file = job
    os.kill(max(processes_of(file)), number)
    _, err = process.communicate(timeout=60)
    stopped = f"Interrupted: stopped by {number.name} before or after its steps: --resume continues from the last"
    assert process.returncode == 1 and stopped in err.strip().splitlines()[-1]  # `command_line` exits with its code


DIES_AS_IT_STARTS = """
import os, signal
from nanorlhf import launch
launch.die_with_parent = lambda: os.kill(os.getpid(), signal.SIGKILL)  # the first call of a rank that is forked
launch.run(lambda: print("all are there"), "cpu", 2)
"""


INTERRUPTED_AS_IT_FORKS = """
import os, signal
from nanorlhf import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background ignores
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
launch.run(lambda: print("all are there"), "cpu", 3)
"""


@pytest.mark.slow
def test_an_interrupt_within_a_fork_is_not_lost():
    """There Python would print it and go on, with logging's lock held for ever."""
    done = run("-c", INTERRUPTED_AS_IT_FORKS, threads=1)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert "Exception ignored" not in done.stderr and done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


DIES_AS_IT_JOINS = """
import os, signal
from datetime import timedelta
from nanorlhf import launch
launch.JOIN_TIMEOUT = timedelta(seconds=2)
join = launch.dist.init_process_group
def init_process_group(*names, rank, **settings):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    join(*names, rank=rank, **settings)
launch.dist.init_process_group = init_process_group
launch.run(lambda: print("all are there"), "cpu", 2)
"""


@pytest.mark.slow
def test_a_process_that_dies_while_it_joins_ends_the_first():
    done = run("-c", DIES_AS_IT_JOINS, threads=1)
    reason = "PeerFailed: in another process: it died as it started, or did not join in 2 s\n"
    assert done.returncode == 1 and done.stdout == "" and reason in done.stderr, done.stderr


LATER_THAN_THE_TIME_TO_JOIN = """
import time
from datetime import timedelta
from nanorlhf import distributed, launch
launch.JOIN_TIMEOUT = timedelta(seconds=2)
def main():
    time.sleep(4 * distributed.rank())
    gathered = distributed.all_gather_objects([distributed.rank()])
    if distributed.rank() == 0:
        print(gathered)
launch.run(main, "cpu", 2)
"""


@pytest.mark.slow
def test_a_process_that_has_joined_may_take_longer():
    done = run("-c", LATER_THAN_THE_TIME_TO_JOIN, threads=1)
    assert done.returncode == 0 and done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.slow
def test_a_process_that_dies_before_it_joins_ends_the_first():
    """Which would wait for it for half an hour."""
    done = run("-c", DIES_AS_IT_STARTS, threads=1)
    assert done.returncode == 1 and done.stdout == ""
    started, last = "in another process: rank 1 died as it started", "in another process: rank 1 died of SIGKILL"
    assert started in done.stderr and f"PeerFailed: {last}" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_first_leaves_no_orphan(job, number):
    process, _ = job
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number


@pytest.mark.slow
def test_sigterm_finishes_and_saves_the_step(miniature, tmp_path):
    """To the process that the user started; a resume on one process goes on from there."""
    out = tmp_path / "out"
    args = replace(miniature.ppo, out=out, total_episodes=10**9)
    command = ["train_ppo.py", "tiny", *flags_of(args)]
    with started(out, out / "metrics.jsonl", *command, "--processes", "2") as process:
        process.terminate()
        _, err = process.communicate(timeout=120)
    (state,) = states(out)
    steps = int(state.name.removeprefix("step-"))
    assert process.returncode == 143 and steps == len(read_metrics(out)) and damage(state) is None
    assert err.count(f"stopped by SIGTERM after {steps} steps") == 1
    with started(out, out / "metrics.jsonl", *command, "--resume") as process:
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
    """CUDA, once initialised, fails in every fork, even in one that computes on the CPU: AdamW asks for a stream."""
    forked = []
    monkeypatch.setattr(launch, "fork_ranks", lambda work, processes: forked.append(processes))
    for name in ("is_available", "device_count", "is_bf16_supported", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name}() was called"))
    monkeypatch.setattr(sys, "argv", ["program", "--device", "cpu", "--processes", "2", "--dtype", dtype])
    command_line(script.main, script.RECIPES)
    assert forked == [2]
