"""A run's directory: refused output paths, what remains after a kill or a full disk, what a resumed run drops."""

import errno
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.model import GPT
from nanorlhf.training import run as module
from nanorlhf.training.run import Run, check_output, check_weights
from nanorlhf.training.run_directory import kept_checkpoints


@dataclass(frozen=True)
class Args:
    out: Path
    lr: float = 0.1
    save_every: int = 10
    keep_every: int | None = None
    resume: bool = False
    track: str = "tensorboard"


def start(args):
    run = Run(args, "test", lambda directory: None)
    run.track(numbers={})
    return run


@pytest.fixture
def run(tmp_path):
    return start(Args(tmp_path / "run"))


def read_files(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_output_that_is_a_file_or_lies_in_one_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="--out .*file is a file"):
        check_output(file, overwrite=True, resume=False)
    with pytest.raises(InputError, match="--out .*file/run: .*file is not a writable directory"):
        check_output(file / "run", overwrite=False, resume=False)
    assert file.read_text() == "mine"


def test_what_lies_elsewhere_stays_as_it_is_whatever_leads_to_it(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    out = tmp_path / "run"
    out.mkdir()
    written = ("args.json", "metrics.jsonl", "samples.jsonl", "summary.json")
    for name in (*written, *(f"{name}.tmp" for name in written), "events.out.tfevents.1", ".partial"):
        (out / name).symlink_to(elsewhere / "file")
    os.link(elsewhere / "file", out / "command.txt")
    check_output(out, overwrite=True, resume=False)
    model = GPT(GPTConfig(vocab_size=4, n_ctx=4, n_layer=1, n_head=1, d_model=4, d_mlp=4))
    run = Run(Args(out), "test", lambda directory: save(model, directory))
    run.track(model=model)
    for step in run.steps(2):
        run.log(step, {"loss": 1.0})
        run.log_samples(step, [{"query": "q"}])
    run.finish({"loss": 1.0})
    assert read_files(elsewhere) == {"file": b"mine"}
    assert {*written, "command.txt", "model.safetensors", "state.pt"} <= read_files(out).keys()
    assert (out / "command.txt").read_text().startswith("python ")
    assert not any((out / name).is_symlink() for name in written)


@pytest.mark.parametrize("name", ["adapter", "best", "checkpoints", "state", "trace", "command.txt"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "loop", "other kind"])
def test_an_entry_through_which_a_run_would_write_elsewhere_is_refused(tmp_path, name, kind):
    entry, target = tmp_path / "run" / name, tmp_path / "elsewhere"
    entry.parent.mkdir()
    target.mkdir() if "." not in name else target.write_text("mine")
    if kind == "other kind":
        entry.mkdir() if "." in name else entry.write_text("mine")
    else:
        entry.symlink_to({"link": target, "dangling link": tmp_path / "nothing", "loop": entry}[kind])
    for settings in ({"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}):
        with pytest.raises(InputError, match=f"^--out .*run: .*{name} (must be a|is a|is not a) .*: move it away."):
            check_output(entry.parent, **settings)


@pytest.mark.parametrize("name", ["summary.json", "summary.json.tmp", "model.safetensors", "chat_template.jinja"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_directory_or_a_pipe_with_the_name_of_a_file_is_refused_before_the_run(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(InputError, match=f"^--out .*{name} is not a regular file: move it away.$"):
        check_output(tmp_path, overwrite=True, resume=False)


def test_a_link_that_leads_nowhere_is_no_output(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (tmp_path / "run", tmp_path / "run" / "inner", tmp_path / "loop"):
        with pytest.raises(InputError, match=f"^--out {out}: .*(run|loop) is a broken symbolic link.$"):
            check_output(out, overwrite=False, resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no directory that can be written to"):
        check_output(tmp_path / "run", overwrite=False, resume=False)


def test_a_finished_run_is_not_overwritten_silently(run):
    run.finish({"loss": 1.0})
    before = read_files(run.out)
    for resume in (False, True):
        with pytest.raises(InputError, match="--out .* contains a finished run.*--overwrite"):
            check_output(run.out, overwrite=False, resume=resume)
    check_output(run.out, overwrite=True, resume=False)
    assert read_files(run.out) == before


@contextmanager
def other_process_has(directory):
    """Lock a run's directory in another process until the end of the block."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print('has it'); input()"
    command = [sys.executable, "-c", code, str(directory / "command.txt")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "has it\n"
        yield
        process.communicate("\n")


def test_two_runs_with_one_output_are_refused_and_the_first_loses_nothing(run):
    run.log(0, {"loss": 1.0})
    run.opened().flush()  # TensorBoard writes in its own thread
    run.unlock()  # as if another process had started it
    before = read_files(run.out)
    with other_process_has(run.out):
        for settings in ({"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}):
            with pytest.raises(InputError, match=f"^--out {run.out}: another run is writing there: choose another dir"):
                check_output(run.out, **settings)
        late = start(Args(run.out))  # both started before the first had written anything
        for write in (late.opened, lambda: late.log(0, {"loss": 2.0}), lambda: late.finish({})):
            with pytest.raises(InputError, match=f"^--out {run.out}: another run is writing there"):
                write()
        assert read_files(run.out) == before
    check_output(run.out, overwrite=True, resume=False)  # the other process has ended
    start(Args(run.out)).log(0, {"loss": 2.0})


def locks(out: Path) -> subprocess.CompletedProcess:
    """Try to lock a run's directory from another process."""
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code, str(out / "command.txt")], capture_output=True)


def test_a_run_holds_its_directory_against_other_processes_until_it_is_finished(run):
    for step in run.steps(1):
        run.log(step, {"loss": 1.0})
    assert b"BlockingIOError" in locks(run.out).stderr
    run.finish({"loss": 1.0})
    assert locks(run.out).returncode == 0
    assert (run.out / "command.txt").read_text().startswith("python ")


def test_an_interrupted_run_gives_its_directory_back_while_the_process_goes_on(run):
    with pytest.raises(KeyboardInterrupt):
        for step in run.steps(2):
            run.log(step, {"loss": 1.0})
            assert b"BlockingIOError" in locks(run.out).stderr
            raise KeyboardInterrupt
    assert locks(run.out).returncode == 0


def test_an_interrupted_run_is_not_overwritten_silently(run):
    run.log(0, {"loss": 1.0})
    with pytest.raises(InputError, match="interrupted run.*--resume.*--overwrite"):
        check_output(run.out, overwrite=False, resume=False)
    check_output(run.out, overwrite=True, resume=False)


def test_resuming_without_a_state_and_both_flags_are_refused(run, tmp_path):
    with pytest.raises(InputError, match="--resume: .*run/state has no state yet: start without --resume"):
        check_output(run.out, overwrite=False, resume=True)
    run.log(0, {"loss": 1.0})
    with pytest.raises(
        InputError, match="has no state yet: start with --overwrite"
    ):  # the run ended before its first save
        check_output(run.out, overwrite=False, resume=True)
    with pytest.raises(InputError, match="--resume: .*nowhere"):
        check_output(tmp_path / "nowhere", overwrite=False, resume=True)
    with pytest.raises(InputError, match="pass only one"):
        check_output(run.out, overwrite=True, resume=True)


def test_a_resumed_run_drops_what_was_logged_after_its_state_and_half_a_line(run):
    for step in range(4):
        run.log(step, {"loss": float(step)})
        run.log_samples(step, [{"query": "q"}])
        if step == 1:
            run.save(2)
    with (run.out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here
    start(Args(run.out, resume=True)).opened()
    assert [json.loads(line)["step"] for line in (run.out / "metrics.jsonl").open()] == [0, 1]
    assert [json.loads(line)["step"] for line in (run.out / "samples.jsonl").open()] == [0, 1]


def test_a_new_run_drops_the_old_one(run):
    run.log(0, {"loss": 1.0})
    run.log_samples(0, [{"query": "q"}])
    run.save(1)
    run.finish({"loss": 1.0})
    start(Args(run.out)).opened()
    assert not {"metrics.jsonl", "samples.jsonl", "summary.json", "state.pt"} & set(read_files(run.out))


def train(args, num_steps, stop_after=None):
    """Set a model's weights to the number of steps, in a run that may be killed; return its directory."""
    model = GPT(GPTConfig(vocab_size=4, n_ctx=4, n_layer=1, n_head=1, d_model=4, d_mlp=4))
    nn.init.zeros_(model.lm_head.weight)
    run = Run(args, "test", lambda directory: save(model, directory))
    run.track(model=model)
    for step in run.steps(num_steps):
        model.lm_head.weight.data += 1
        run.log(step, {"loss": 1.0})
        if step + 1 == stop_after:
            run.unlock()  # as if this process had been killed
            return run.out
    run.finish({"loss": 1.0})
    return run.out


def kept_values(out):
    """Return the steps of the kept checkpoints, and the only value in each one's head."""
    return {step: load_gpt(path).lm_head.weight.unique().tolist() for step, path in kept_checkpoints(out).items()}


def test_every_second_checkpoint_stays_although_the_run_saves_at_other_steps(tmp_path, capsys):
    out = train(Args(tmp_path / "run", save_every=3, keep_every=2), 7)
    assert kept_values(out) == {2: [2.0], 4: [4.0], 6: [6.0]} and load_gpt(out).lm_head.weight.unique().tolist() == [7]
    size = sum(tensor.numel() for tensor in load_gpt(out).state_dict().values()) * 4 / 1e9
    assert (
        f"{out}/checkpoints will keep 3 checkpoints of about {size:.3f} GB: {3 * size:.3f} GB"
        in capsys.readouterr().out
    )
    assert not (train(Args(tmp_path / "plain"), 7) / "checkpoints").exists()


def test_a_resumed_run_keeps_the_checkpoints_up_to_its_state_and_writes_the_others_again(tmp_path, capsys):
    args = Args(tmp_path / "run", save_every=3, keep_every=2)
    out = train(args, 8, stop_after=6)  # the state is the one after three steps
    assert kept_values(out) == {2: [2.0], 4: [4.0]}
    (out / "checkpoints/step-00000004/config.json").unlink()  # as if killed while it was written
    (out / "checkpoints/step-00000004/.partial").mkdir()
    resumed = train(replace(args, resume=True), 8, stop_after=4)
    assert kept_values(resumed) == {2: [2.0]} and "will keep 3 checkpoints" in capsys.readouterr().out
    assert kept_values(train(replace(args, resume=True), 8)) == {2: [2.0], 4: [4.0], 6: [6.0], 8: [8.0]}


def test_a_checkpoint_is_kept_before_the_state_of_its_step_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "save_state", lambda out, args, step, state: seen.append((step, kept_values(out))))
    seen = []
    train(Args(tmp_path / "run", save_every=2, keep_every=2), 4)
    assert seen == [(2, {2: [2.0]}), (4, {2: [2.0], 4: [4.0]})]


def test_a_new_run_deletes_kept_checkpoints_and_nothing_else_next_to_them(tmp_path):
    out = train(Args(tmp_path / "run", keep_every=1), 3)
    (out / "checkpoints/step-2").mkdir()
    (out / "checkpoints/notes.txt").write_text("mine")
    train(Args(out, keep_every=2), 3)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["notes.txt", "step-00000002", "step-2"]


def test_a_checkpoint_whose_weights_are_not_finite_is_not_kept(tmp_path):
    model = nn.Linear(2, 2)
    run = Run(Args(tmp_path / "run", keep_every=1), "test", lambda directory: directory.mkdir(parents=True))
    run.track(model=model)
    with pytest.raises(InputError, match="after step 0 the weights bias are not finite"):
        for _ in run.steps(2):
            model.bias.data[0] = float("nan")
    assert not (run.out / "checkpoints").exists()


def test_the_summary_says_what_the_run_cost_those_steps_included_that_came_before_a_resume(run, monkeypatch):
    clock = iter(range(0, 1000, 10))  # each reading is 10 seconds after the last
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for step in run.steps(2):
        run.log(step, {"loss": 1.0})
    assert run.seconds == 40  # each step reads the clock at its start and end
    again = start(Args(run.out, resume=True))
    for step in again.steps(3):
        again.log(step, {"loss": 1.0})
    again.finish({"loss": 1.0})
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["loss"] == 1.0 and summary["seconds"] == 60
    assert 0 < summary["peak_resident_bytes"] <= module.peak_resident_bytes()


def test_the_summary_counts_trained_parameters_once_even_if_two_models_share_them(tmp_path):
    policy, value_model = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2))
    policy.bias.requires_grad_(False)
    value_model.append(policy)
    run = Run(Args(tmp_path / "run"), "test", lambda _: None)
    run.track(policy=policy, value_model=value_model, numbers={})
    for step in run.steps(1):
        run.log(step, {"loss": 1.0})
    run.finish({"loss": 1.0})
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["num_trained_parameters"] == 4 * 3 + (3 * 2 + 2)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_peak_of_memory_is_at_least_what_was_held_and_is_gone_again():
    block = b"x" * 2**26
    held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    del block
    assert held - 2**21 <= module.peak_resident_bytes() < 100 * held  # the kernel's two counts differ by pages


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    module.write_json(path, {"loss": 1.0})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        module.write_json(path, {"loss": 2.0})
    assert read_files(tmp_path) == {"summary.json": b'{\n  "loss": 1.0\n}\n'}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_saved(value):
    model = nn.Linear(2, 2)
    check_weights(4, model)
    with torch.no_grad():
        model.weight[1, 0] = value
    with pytest.raises(InputError, match="after step 4 the weights weight are not finite: lower --lr"):
        check_weights(4, model)


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module.distributed, "rank", lambda: 1)
    run = start(Args(tmp_path / "run"))
    run.log(0, {"loss": 1.0})
    run.log_samples(0, [{"query": "q"}])
    run.keep(1)
    run.save(1)
    run.finish({})
    assert not run.out.exists()
