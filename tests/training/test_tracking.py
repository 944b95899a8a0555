"""`--track`: the tracker is imported when it is used, a resumed run continues under its id, and only rank 0 logs."""

import os
import signal
import sqlite3
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanorlhf import distributed
from nanorlhf.errors import InputError, Interrupted
from nanorlhf.training import tracking
from nanorlhf.training.run import Run, check_output
from nanorlhf.training.tracking import TRACK_ID, check_tracker
from tests.conftest import ROOT


@dataclass(frozen=True)
class Args:
    out: Path
    track: str
    resume: bool = False
    save_every: int = 10
    keep_every: int | None = None


def train(args: Args, stop_after: int | None = None) -> None:
    """Log four steps, or stop by a signal after one of them."""
    run = Run(args, "test", lambda directory: None)
    run.track(numbers={})
    for step in run.steps(4):
        run.log(step, {"loss": 1 / (step + 1)})
        if step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
    run.finish({"loss": 0.25})


class Recorder:
    """Records calls in place of wandb; one object is both the module and the run."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def init(self, **settings) -> "Recorder":
        self.calls.append(("init", settings))
        self.summary = types.SimpleNamespace(update=lambda numbers: self.calls.append(("summary", numbers)))
        return self

    def log(self, metrics, step) -> None:
        self.calls.append(("log", step, metrics))

    def finish(self) -> None:
        self.calls.append(("finish",))


@pytest.fixture
def wandb(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return recorder


def test_a_resumed_run_continues_under_its_id_and_a_new_run_gets_another(tmp_path, wandb, monkeypatch) -> None:
    with pytest.raises(Interrupted):
        train(Args(tmp_path / "ppo", "wandb"), stop_after=1)
    run_id = (tmp_path / "ppo" / TRACK_ID).read_text()
    monkeypatch.setenv("WANDB_PROJECT", "class")
    train(Args(tmp_path / "ppo", "wandb", resume=True))
    (_, first), *_, (_, second) = [call for call in wandb.calls if call[0] == "init"]
    assert first["id"] == second["id"] == run_id and first["resume"] == second["resume"] == "allow"
    assert (first["project"], second["project"], first["name"]) == ("nanorlhf", "class", "ppo")
    assert first["config"]["save_every"] == 10 and first["dir"] == str(tmp_path / "ppo")
    logged = [(call[1], call[2]["loss"]) for call in wandb.calls if call[0] == "log"]
    assert logged == [(0, 1), (1, 1 / 2), (2, 1 / 3), (3, 1 / 4)]
    assert wandb.calls[-2:] == [("summary", {"loss": 0.25}), ("finish",)]
    train(Args(tmp_path / "ppo", "wandb"))
    assert (tmp_path / "ppo" / TRACK_ID).read_text() != run_id


def test_other_ranks_log_nothing(tmp_path, wandb, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(Run, "save", lambda self, step: None)
    train(Args(tmp_path / "ppo", "wandb"))
    assert wandb.calls == [] and not (tmp_path / "ppo").exists()


def test_a_missing_package_and_a_refused_login_end_the_run_before_its_first_step(tmp_path, wandb, monkeypatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        with pytest.raises(InputError, match=f"^--track {name} needs a package: install it with `pip install {name}`"):
            check_tracker(name)
    check_tracker("none"), check_tracker("tensorboard")

    def refuse(**settings) -> None:
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError, match="^--track wandb: RuntimeError: No API key configured.$"):
        train(Args(tmp_path / "ppo", "wandb"))
    assert not (tmp_path / "ppo" / "metrics.jsonl").exists()
    check_output(tmp_path / "ppo", overwrite=False, resume=False)  # the next try needs no flag


def test_none_writes_only_our_files(tmp_path) -> None:
    train(Args(tmp_path / "ppo", "none"))
    assert not [*(tmp_path / "ppo").glob("events*")] and (tmp_path / "ppo" / "metrics.jsonl").is_file()
    train(Args(tmp_path / "sft", "tensorboard"))
    assert len([*(tmp_path / "sft").glob("events.out.tfevents.*")]) == 1


def test_a_tracker_is_imported_only_for_its_run(tmp_path) -> None:
    code = (
        "import sys; from pathlib import Path; from nanorlhf.training.tracking import Tracker\n"
        f"Tracker('none', Path({str(tmp_path)!r}), {{}}, 0).log(0, {{'loss': 1.0}})\n"
        "assert not {'wandb', 'trackio', 'tensorboard', 'torch.utils.tensorboard'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ------------------------------------------------------------------------------------------------- the real libraries
def stopped_and_resumed(args: Args, **environment: str) -> None:
    """Train in two processes, as a user would: the first is stopped after two steps, the second resumes."""
    code = (
        "import sys; from pathlib import Path; from nanorlhf.cli import one_sentence\n"
        "from tests.training.test_tracking import Args, train\n"
        "with one_sentence():\n"
        "    train(Args(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == 'resume'), 1 if sys.argv[3] == 'stop' else None)"
    )
    for mode, code_expected in (("stop", 128 + signal.SIGTERM), ("resume", 0)):
        words = [sys.executable, "-c", code, args.out, args.track, mode]
        done = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
        assert done.returncode == code_expected, done.stderr


def wandb_records(file: Path) -> list:
    """Read a .wandb file: a LevelDB log with blocks of 32 KiB after a header of 7 bytes, of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record, records = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position < len(data):
        if 32768 - position % 32768 < 7:  # padding at the end of a block
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            records.append(Record.FromString(record))
            record = b""
    return records


@pytest.mark.slow
def test_wandb_offline_keeps_the_id_and_all_steps_of_a_resumed_run(tmp_path) -> None:
    pytest.importorskip("wandb", reason="no W&B without its library: pip install wandb")
    args = Args(tmp_path / "ppo", "wandb")
    stopped_and_resumed(args, WANDB_MODE="offline")
    run_id = (args.out / TRACK_ID).read_text()
    files = sorted((args.out / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    losses = [
        float(item.value_json)
        for record in records
        if record.HasField("history")
        for item in record.history.item
        if (item.key or item.nested_key[0]) == "loss"
    ]
    assert len(files) == 2 and losses == [1, 1 / 2, 1 / 3, 1 / 4]
    assert {record.run.run_id for record in records if record.HasField("run")} == {run_id}


@pytest.mark.slow
def test_trackio_continues_a_resumed_run(tmp_path) -> None:
    pytest.importorskip("trackio", reason="no trackio without its library: pip install trackio")
    args = Args(tmp_path / "ppo", "trackio")
    stopped_and_resumed(args, TRACKIO_DIR=str(tmp_path / "trackio"), TRACKIO_PROJECT="class")
    with sqlite3.connect(tmp_path / "trackio" / "class.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert {name for name, _, _ in rows} == {f"ppo-{(args.out / TRACK_ID).read_text()}"}
    assert [step for _, step, _ in rows] == [0, 1, 2, 3]
