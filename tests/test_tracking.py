"""A run's directory: what is refused, what a kill or a full disk leaves behind, what a resumed run forgets."""

import errno
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from nanorlhf import tracking
from nanorlhf.errors import InputError
from nanorlhf.tracking import Run, check_output, check_weights, load_state


@dataclass(frozen=True)
class Args:
    out: Path
    lr: float = 0.1
    save_every: int = 10


@dataclass(frozen=True)
class OtherArgs:
    out: Path
    kl_coef: float = 0.1


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run", Args(tmp_path / "run"))


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_an_output_that_is_a_file_or_lies_in_one_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match="--out .*file is a file"):
        check_output(file, overwrite=True, resume=False)
    with pytest.raises(InputError, match="--out .*file/run: .*file is no directory that can be written to"):
        check_output(file / "run", overwrite=False, resume=False)
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no directory that can be written to"):
        check_output(tmp_path / "run", overwrite=False, resume=False)


def test_a_finished_run_is_not_overwritten_silently(run):
    run.finish({"loss": 1.0})
    before = files_of(run.out)
    for resume in (False, True):
        with pytest.raises(InputError, match="--out .* holds a finished run.*--overwrite"):
            check_output(run.out, overwrite=False, resume=resume)
    check_output(run.out, overwrite=True, resume=False)
    assert files_of(run.out) == before


def test_an_interrupted_run_is_not_overwritten_silently(run):
    run.log(0, {"loss": 1.0})
    with pytest.raises(InputError, match="interrupted run.*--resume.*--overwrite"):
        check_output(run.out, overwrite=False, resume=False)
    check_output(run.out, overwrite=True, resume=False)


def test_resuming_without_a_state_and_both_flags_are_refused(run, tmp_path):
    with pytest.raises(InputError, match="--resume: .*state.pt does not exist"):
        check_output(run.out, overwrite=False, resume=True)
    with pytest.raises(InputError, match="--resume: .*nowhere"):
        check_output(tmp_path / "nowhere", overwrite=False, resume=True)
    with pytest.raises(InputError, match="pass only one"):
        check_output(run.out, overwrite=True, resume=True)


def test_a_resumed_run_forgets_what_was_logged_behind_its_state_and_half_a_line(run):
    for step in range(4):
        run.log(step, {"loss": float(step)})
        run.log_samples(step, [{"query": "q"}])
    with (run.out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed here
    Run(run.out, Args(run.out), first_step=2)
    assert [json.loads(line)["step"] for line in (run.out / "metrics.jsonl").open()] == [0, 1]
    assert [json.loads(line)["step"] for line in (run.out / "samples.jsonl").open()] == [0, 1]


def test_a_new_run_forgets_the_old_one(run):
    run.log(0, {"loss": 1.0})
    run.log_samples(0, [{"query": "q"}])
    run.save_state(step=1)
    run.finish({"loss": 1.0})
    Run(run.out, Args(run.out))
    assert not {"metrics.jsonl", "samples.jsonl", "summary.json", "state.pt"} & set(files_of(run.out))


def test_a_state_comes_back_as_it_was(run):
    generator = torch.Generator().manual_seed(3)
    run.save_state(weights={"a": torch.arange(3.0)}, generator=generator.get_state(), step=7, metrics={"kl": 0.1})
    state = load_state(run.out, Args(run.out))
    assert torch.equal(state["weights"]["a"], torch.arange(3.0)) and state["step"] == 7
    assert torch.equal(state["generator"], generator.get_state()) and state["metrics"] == {"kl": 0.1}


@pytest.mark.parametrize("content", [b"", b"not a state", "half"])
def test_a_damaged_state_is_one_sentence(run, content):
    run.save_state(weights=torch.randn(1000), step=1)
    path = run.out / "state" / "state.pt"
    path.write_bytes(path.read_bytes()[:1500] if content == "half" else content)
    with pytest.raises(InputError, match="--resume: .* holds no readable run .*--overwrite"):
        load_state(run.out, Args(run.out))


def test_a_state_that_could_run_code_is_refused(run):
    run.save_state(step=Path("a pickle may hold anything"))
    with pytest.raises(InputError, match="--resume"):
        load_state(run.out, Args(run.out))


def test_a_resumed_run_must_have_the_settings_it_was_started_with(run, tmp_path):
    """Else the learning rate's schedule or the order of the data would change in the middle, silently."""
    run.save_state(step=1)
    load_state(run.out, Args(tmp_path / "elsewhere", save_every=3))
    with pytest.raises(InputError, match="started with --lr 0.1, not 0.2: pass the same"):
        load_state(run.out, Args(run.out, lr=0.2))
    with pytest.raises(InputError, match="another script's run"):
        load_state(run.out, OtherArgs(run.out))
    (run.out / "args.json").unlink()
    with pytest.raises(InputError, match="no readable run"):
        load_state(run.out, Args(run.out))


@pytest.mark.parametrize("function", ["os.replace", "torch.save"])
def test_a_full_disk_leaves_the_state_before(run, monkeypatch, function):
    run.save_state(step=1)
    before = files_of(run.out)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"nanorlhf.tracking.{function}", full)
    with pytest.raises(OSError, match="No space left"):
        run.save_state(step=2)
    assert files_of(run.out) == before


def test_the_error_of_the_operating_system_is_not_hidden_by_pytorchs(run):
    """A file that may not grow: torch.save says "unexpected pos 768 vs 662" where the disk is full."""
    run.save_state(step=1)
    before = files_of(run.out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="state.pt") as caught:
            run.save_state(weights=torch.randn(100_000), step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert files_of(run.out) == before


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    tracking.write_json(path, {"loss": 1.0})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracking.os, "replace", full)
    with pytest.raises(OSError):
        tracking.write_json(path, {"loss": 2.0})
    assert files_of(tmp_path) == {"summary.json": b'{\n  "loss": 1.0\n}\n'}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_saved(value):
    model = nn.Linear(2, 2)
    check_weights(4, model)
    with torch.no_grad():
        model.weight[1, 0] = value
    with pytest.raises(InputError, match="after step 4 the weights weight are not finite: lower --lr"):
        check_weights(4, model)


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.distributed, "rank", lambda: 1)
    run = Run(tmp_path / "run", Args(tmp_path / "run"))
    run.log(0, {"loss": 1.0})
    run.log_samples(0, [{"query": "q"}])
    run.save_state(step=1)
    run.finish({})
    assert not run.out.exists()
