"""Training states: resuming after a kill, a full disk or a damaged disk, and stopping on a signal."""

import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_ppo
import train_rm
import train_sft
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.errors import InputError, Interrupted
from nanorlhf.training import resume
from nanorlhf.training.optimizer import FiniteSteps
from nanorlhf.training.resume import load_state, save_state, states
from nanorlhf.training.run import TIME_METRICS, Run
from nanorlhf.training.signals import StopSignals
from tests.conftest import read_metrics, run_program
from tests.helpers.jsonl import read_jsonl
from tests.helpers.two_processes import start

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Args:
    out: Path
    lr: float = 0.1
    save_every: int = 10
    keep_every: int | None = None
    micro_batch_size: int = 4
    checkpoint_activations: bool = False
    offload: bool = False
    track: str = "none"


@dataclass(frozen=True)
class ResumableArgs(Args):
    resume: bool = False


@dataclass(frozen=True)
class OtherArgs:
    out: Path
    kl_coef: float = 0.1


@pytest.fixture
def args(tmp_path):
    return Args(tmp_path / "run")


def write(args, step, **state):
    save_state(args.out, args, step, state)


def names(out):
    return [path.name for path in states(out)]


def read_files(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_state_is_restored_as_it_was(args):
    generator = torch.Generator().manual_seed(3)
    write(args, 7, weights={"a": torch.arange(3.0)}, generator=generator.get_state(), metrics={"kl": 0.1})
    state = load_state(args.out, args)
    assert torch.equal(state["weights"]["a"], torch.arange(3.0)) and state["step"] == 7
    assert torch.equal(state["generator"], generator.get_state()) and state["metrics"] == {"kl": 0.1}


def test_a_state_of_another_version_is_refused_in_one_sentence(args, monkeypatch):
    write(args, 3, weights=torch.zeros(1))
    monkeypatch.setattr(resume, "FORMAT", resume.FORMAT + 1)
    with pytest.raises(InputError, match="step-00000003 was written by another version of nanorlhf: finish the run"):
        load_state(args.out, args)


def test_every_random_number_generator_resumes_where_it_was(args):
    def numbers():
        return random.gauss(0, 1), np.random.standard_normal(), torch.randn(2).tolist()

    numbers()  # Gaussians are drawn in pairs: one is kept for the next call
    write(args, 1)
    expected = numbers()
    numbers()
    load_state(args.out, args)
    assert numbers() == expected


def test_the_newest_states_are_kept(args):
    for step in (2, 4, 100_000_000 - 1):
        write(args, step)
    assert names(args.out) == ["step-99999999", "step-00000004"]
    write(args, 6)  # later ones are left over from an earlier run
    assert names(args.out) == ["step-00000006", "step-00000004"]


def test_a_state_that_a_killed_save_did_not_delete_is_deleted_on_resume(tmp_path):
    """Even if no other save follows because the last one was killed."""
    args = ResumableArgs(tmp_path / "run")
    run = Run(args, "test", lambda directory: None)
    run.log(0, {"loss": 1.0})
    run.save(1)
    shutil.copytree(args.out / "state", tmp_path / "copy")
    run.save(2)
    run.save(3)
    shutil.copytree(tmp_path / "copy", args.out / "state", dirs_exist_ok=True)
    assert len(states(args.out)) == 3
    Run(replace(args, resume=True), "test", lambda directory: None).finish({})
    assert names(args.out) == ["step-00000003", "step-00000002"]


def test_other_files_beside_states_do_no_harm_and_stay(args):
    """Notes or a user's copies don't change which state is the newest."""
    write(args, 1, weights=torch.zeros(3))
    directory = args.out / "state"
    (directory / "step-99999999").write_text("a file")
    for name in ("step-the-best", "step-00000001.bak"):
        shutil.copytree(directory / "step-00000001", directory / name)
    assert load_state(args.out, args)["step"] == 1
    for step in (2, 3, 4):
        write(args, step, weights=torch.ones(3))
    assert load_state(args.out, args)["step"] == 4
    left = {path.name for path in directory.iterdir()}
    assert left == {"step-00000004", "step-00000003", "step-00000001.bak", "step-the-best", "step-99999999"}


def damage_at(path, how):
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "one bit":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("name", ["state.pt", "args.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut off", "one bit", "gone"])
def test_a_damaged_state_is_detected_and_the_one_before_it_used(args, capsys, name, how):
    for step in (1, 2):
        write(args, step, weights=torch.randn(1000))
    damage_at(args.out / "state" / "step-00000002" / name, how)
    assert load_state(args.out, args)["step"] == 1
    assert capsys.readouterr().err.count("\n") == 1
    load_state(args.out, args)
    assert "step-00000002 is damaged (" in capsys.readouterr().err
    write(args, 2, weights=torch.zeros(3))  # the run reaches this step again
    assert load_state(args.out, args)["weights"].tolist() == [0, 0, 0] and capsys.readouterr().err == ""


def test_a_run_whose_states_are_all_damaged_cannot_resume(args, capsys):
    write(args, 1)
    damage_at(args.out / "state" / "step-00000001" / "state.pt", "cut off")
    with pytest.raises(InputError, match="--resume: .* has no readable state: start over with --overwrite"):
        load_state(args.out, args)
    assert "state.pt does not match its checksum): no earlier state is left" in capsys.readouterr().err


def test_a_state_that_could_run_code_is_refused(args):
    write(args, 1, thing=Path("a pickle may hold anything"))
    with pytest.raises(InputError, match="--resume"):
        load_state(args.out, args)


class Payload:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def change_state(args, change):
    """Replace a state's content as another version, run or person might, and update its checksums."""
    path = args.out / "state" / "step-00000002"
    state = torch.load(path / "state.pt", weights_only=False)
    torch.save(change(state), path / "state.pt")
    manifest = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in ("state.pt", "args.json")}
    (path / "manifest.json").write_text(json.dumps(manifest))


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def having(**values):
    return lambda state: state | values


FOREIGN = {
    "a list": (lambda state: [state], "was written by another version"),
    "a tensor": (lambda state: torch.zeros(3), "was written by another version"),
    "nothing": (lambda state: {}, "was written by another version"),
    "no format": (without("format"), "was written by another version"),
    "format 99": (having(format=99), "was written by another version"),
    "no step": (without("step"), "doesn't fit this run .KeyError: 'step'"),
    "another step": (having(step=5), "doesn't fit this run .ValueError: it belongs to another step"),
    "a step that is a text": (having(step="2"), "doesn't fit this run .ValueError: it belongs to another step"),
    "no generators": (without("generators"), "doesn't fit this run .KeyError: 'generators'"),
    "an empty list of generators": (having(generators=[]), "doesn't fit this run .ZeroDivisionError"),
    "generators that are a number": (having(generators=3), "doesn't fit this run .TypeError"),
    "generators of another kind": (having(generators=[{"python": 3}]), "doesn't fit this run .TypeError"),
    "half a generator": (
        lambda state: state | {"generators": [state["generators"][0] | {"torch": torch.zeros(3, dtype=torch.uint8)}]},
        "doesn't fit this run .RuntimeError",
    ),
    "no metrics": (without("metrics"), "doesn't fit this run .KeyError: 'metrics'"),
    "metrics that are a number": (having(metrics=3), "doesn't fit this run .TypeError"),
    "seconds that are a text": (having(seconds="long"), "doesn't fit this run .ValueError"),
    "no model": (without("model"), "doesn't fit this run .KeyError: 'model'"),
    "a larger model": (
        having(model={"weight": torch.zeros(9, 9), "bias": torch.zeros(9)}), "RuntimeError: .*size mismatch for weight",
    ),
    "a model with other names": (having(model={"w": torch.zeros(2)}), "RuntimeError: .*Missing key"),
    "a model that is a number": (having(model=3), "doesn't fit this run .(TypeError|AttributeError)"),
    "another optimizer": (having(steps={"optimizer": {"state": {}, "param_groups": []}}), "ValueError|KeyError"),
    "a generator of another kind": (having(generator=torch.zeros(2)), "doesn't fit this run .(TypeError|RuntimeError)"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_state_is_one_sentence_and_nothing_is_lost(tmp_path, case):
    change, sentence = FOREIGN[case]
    args = ResumableArgs(tmp_path / "run")

    def start_run(args):
        model = torch.nn.Linear(2, 2)
        steps = FiniteSteps(torch.optim.AdamW(model.parameters()), args.out, "lower --lr")
        run = Run(args, "test", lambda directory: None)
        run.track(model=model, steps=steps, generator=torch.Generator())
        return run

    run = start_run(args)
    run.log(0, {"loss": 1.0})
    run.save(2)
    start_run(replace(args, resume=True))  # resumes if unchanged
    change_state(args, change)
    before = read_files(args.out)
    with pytest.raises(InputError, match=f"^--resume: {args.out}/state.*({sentence}).*--overwrite[.]$") as error:
        start_run(replace(args, resume=True))
    assert "\n" not in str(error.value) and read_files(args.out) == before


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_payload_in_a_pickle_is_refused_and_never_run(args, tmp_path, is_whole):
    write(args, 2, weights=torch.zeros(3))
    payload = Payload(tmp_path / "made")
    change_state(args, lambda state: payload if is_whole else state | {"thing": payload})
    with pytest.raises(
        InputError, match="--resume: .*state.pt can't be read: it is damaged or contains more than tensors"
    ):
        load_state(args.out, args)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("change", [{"lr": [1]}, {"lr": None}, {"more": 1}])
def test_foreign_settings_beside_a_state_are_one_sentence(args, change):
    write(args, 2)
    path = args.out / "state" / "step-00000002" / "args.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    change_state(args, lambda state: state)
    with pytest.raises(InputError, match="--resume: .*(was started with --lr|with the setting more)"):
        load_state(args.out, args)


def test_a_resumed_run_must_have_the_settings_it_was_started_with(args, tmp_path):
    """Otherwise the learning rate schedule or the data order would silently change in the middle of a run."""
    write(args, 1)
    less_memory = {"micro_batch_size": 2, "checkpoint_activations": True, "offload": True}
    load_state(args.out, replace(args, out=tmp_path / "elsewhere", save_every=3, **less_memory))
    with pytest.raises(InputError, match="started with --lr 0.1, not 0.2: pass the same"):
        load_state(args.out, replace(args, lr=0.2))
    with pytest.raises(InputError, match="started with --micro-batch-size 4, not 2"):
        load_state(args.out, replace(args, micro_batch_size=2), must_stay=("micro_batch_size",))
    with pytest.raises(InputError, match="run of another script or version, with the setting"):
        load_state(args.out, OtherArgs(args.out))


@dataclass(frozen=True)
class LaterArgs(Args):
    estimator: str = "off"


def test_a_flag_that_came_after_the_run_was_started_must_be_off(args):
    write(args, 10)
    later = LaterArgs(args.out)
    assert load_state(args.out, later)["step"] == 10
    with pytest.raises(InputError, match="was started without --estimator"):
        load_state(args.out, replace(later, estimator="on"))


@dataclass(frozen=True)
class Group:
    top_p: float = 1.0


@dataclass(frozen=True)
class GroupedArgs(Args):
    sampler: Group = Group()


def test_the_settings_of_a_group_are_compared_one_by_one(args):
    write(args, 10)
    later = GroupedArgs(args.out)  # the group came after the run was started
    load_state(args.out, later)
    with pytest.raises(InputError, match="was started without --sampler.top-p"):
        load_state(args.out, replace(later, sampler=Group(0.5)))
    write(replace(later, sampler=Group(0.5)), 11)
    load_state(args.out, replace(later, sampler=Group(0.5)))
    with pytest.raises(InputError, match="started with --sampler.top-p 0.5, not 1.0: pass the same"):
        load_state(args.out, later)


# ------------------------------------------------------------------------------------------------------------ the disk
@pytest.mark.parametrize("function", ["os.rename", "torch.save", "to_disk", "sha256"])
def test_a_full_disk_leaves_earlier_states_intact(args, monkeypatch, function):
    write(args, 1)
    before = read_files(args.out)
    renames = []

    def full(*arguments):
        if function == "os.rename" and Path(arguments[1]).name == ".doomed":
            return renames.append(1) or os.replace(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"nanorlhf.training.resume.{function}", full)
    with pytest.raises(OSError, match="No space left"):
        write(args, 2)
    assert read_files(args.out) == before


def test_the_error_of_the_operating_system_is_not_hidden_by_pytorchs(args):
    """With a limit on the file size: on a full disk torch.save reports "unexpected pos 768 vs 662"."""
    write(args, 1)
    before = read_files(args.out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="state.pt") as caught:
            write(args, 2, weights=torch.randn(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert read_files(args.out) == before


CALLS = "resume.torch.save resume.sha256 resume.to_disk os.rename resume.delete".split()


@pytest.mark.parametrize(("function", "number"), [(name, n) for name in CALLS for n in (1, 2)])
def test_a_kill_at_any_call_of_a_save_leaves_a_state_to_resume_from(args, monkeypatch, function, number):
    """No `finally` runs after a kill, so we copy the files as they are at that moment."""
    monkeypatch.setattr(resume, "KEEP_LAST", 1)
    write(args, 1)
    owner, name = function.rsplit(".", 1)
    owner = {"resume": resume, "os": os, "resume.torch": torch}[owner]
    plain, calls, copy = getattr(owner, name), [], args.out.with_name("copy")

    def killed(*arguments, **settings):
        calls.append(1)
        if len(calls) == number:
            subprocess.run(["cp", "-r", args.out, copy], check=True)
        return plain(*arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        write(args, 2)
    assert len(calls) >= number or function == "resume.torch.save"
    for out in (args.out, copy):
        if out.exists():
            step = load_state(out, args)["step"]
            assert step in (1, 2)
            save_state(out, args, step + 1, {})  # leftovers of the kill don't get in the way
            assert names(out) == [f"step-{step + 1:08}"]
            assert [path.name for path in (out / "state").iterdir()] == names(out)


# ------------------------------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_waits_for_the_end_of_a_step_and_a_second_one_does_not(args, number, code):
    before = signal.getsignal(number)
    signals = StopSignals()
    assert not signals.received()
    os.kill(os.getpid(), number)
    assert signals.received() and signal.getsignal(number) == before
    with pytest.raises(Interrupted, match=f"stopped by {number.name} after 5 steps: .*--resume") as raised:
        signals.stop(args.out, 5)
    assert raised.value.code == code


def test_a_signal_that_arrives_while_the_handlers_are_installed_is_received(monkeypatch):
    plain = signal.signal

    def install(number, handler):
        before = plain(number, handler)
        if getattr(handler, "__name__", "") == "_note" and number == signal.SIGTERM:
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", install)
    signals = StopSignals()
    signals.restore()
    assert signals.received() and signals.agreed == signal.SIGTERM


def test_a_signal_while_the_ranks_compare_is_not_lost(monkeypatch):
    signals, plain = StopSignals(), distributed.largest

    def interrupted(number):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(number)

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "largest", interrupted)
        assert not signals.received()  # too late for this step
    assert signals.received()


MAIN = {"sft": train_sft.main, "rm": train_rm.main, "ppo": train_ppo.main}


@pytest.mark.parametrize("stage", MAIN)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_told_to_stop_resumes_bit_for_bit(miniature, tmp_path, monkeypatch, stage, number):
    args = replace(getattr(miniature, stage), save_every=1000)
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    MAIN[stage](whole)
    plain, calls = torch.optim.AdamW.step, []

    def step(self, *arguments):
        calls.append(1)
        if len(calls) == 3:  # in the middle of a step, or of PPO's second update
            os.kill(os.getpid(), number)
        plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    steps = 2 if stage == "ppo" else 3
    with pytest.raises(Interrupted, match=f"{number.name} after {steps} steps"):
        MAIN[stage](broken)
    assert names(broken.out) == [f"step-{steps:08}"] and len(read_metrics(broken.out)) == steps
    less_memory = {"checkpoint_activations": True} | ({"offload": True} if stage == "ppo" else {})
    MAIN[stage](replace(broken, resume=True, **less_memory))
    load = load_scalar if stage == "rm" else load_gpt
    for a, b in zip(load(whole.out).parameters(), load(broken.out).parameters(), strict=True):
        assert torch.equal(a, b)
    untimed = [
        [{k: v for k, v in row.items() if k not in TIME_METRICS} for row in read_metrics(out)]
        for out in (whole.out, broken.out)
    ]
    assert untimed[0] == untimed[1]


def make_flags(args, names):
    return [text for name in names.split() for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]


def test_sigterm_ends_a_process_with_one_line_and_a_state(miniature, tmp_path):
    args = replace(miniature.sft, out=tmp_path / "out", num_epochs=10_000.0, eval_every=10**6)
    shape = "data out batch_size max_query_length max_response_length n_layer d_model n_head num_epochs eval_every"
    process = start(tmp_path / "log", run_program, "train_sft.py", "tiny", *make_flags(args, shape))
    try:
        while not (args.out / "metrics.jsonl").exists():
            assert process.is_alive()
            time.sleep(0.05)
        process.terminate()
        process.join(120)
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 143 and "Traceback" not in said
    assert said.splitlines()[-1].startswith("stopped by SIGTERM after ")
    assert len(states(args.out)) == 1 and len(read_jsonl(args.out / "metrics.jsonl", {})) == int(names(args.out)[0][5:])


# ---------------------------------------------------------------------------------------------------------------- best
@pytest.mark.parametrize("stage", ["sft", "rm"])
def test_the_best_checkpoint_is_the_one_with_the_lowest_validation_loss(miniature, tmp_path, monkeypatch, stage):
    script = {"sft": train_sft, "rm": train_rm}[stage]
    args = replace(getattr(miniature, stage), eval_every=3, save_every=1, out=tmp_path / "out")
    monkeypatch.setattr(script, "lr_factor", lambda schedule, step, *_: 1.0 if step < 3 else -1.0)  # ascent
    load = load_scalar if stage == "rm" else load_gpt
    seen = []

    def note(*_):
        seen.append(torch.cat([p.flatten() for p in load(args.out / "best").parameters()]))

    plain = script.Run.log
    monkeypatch.setattr(script.Run, "log", lambda self, step, m, **shown: (plain(self, step, m), step == 2 and note()))
    summary = script.main(args)
    losses = [row["validation_loss"] for row in read_metrics(args.out) if "validation_loss" in row]
    assert losses[0] == min(losses) < losses[-1] == summary["validation_loss"]
    assert torch.equal(torch.cat([p.flatten() for p in load(args.out / "best").parameters()]), seen[0])
    if stage == "rm":  # normalised like the last checkpoint, by its own scores
        bias = load_scalar(args.out / "best").reward_bias
        assert bias != 0 and bias != load_scalar(args.out).reward_bias
        (args.out / "summary.json").unlink()  # as if killed just before the end: must not normalise twice
        script.main(replace(args, resume=True))
        assert load_scalar(args.out / "best").reward_bias == bias
