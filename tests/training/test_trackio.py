"""--trackio: a project gets the metrics of a run, and a resumed run goes on where it ended."""

import sys
from dataclasses import dataclass, field, replace
from types import ModuleType

import pytest

import train_sft
from nanorlhf.errors import InputError
from nanorlhf.training import run as module
from nanorlhf.training.run import begin
from tests.training.test_run import Args, start


@dataclass
class Recorded:
    """Stands for trackio and for its run: records what it is asked to do."""

    init_settings: list[dict] = field(default_factory=list)
    rows: list[tuple[int, dict]] = field(default_factory=list)
    num_finished: int = 0

    def init(self, project: str, **settings: object) -> "Recorded":
        self.init_settings.append({"project": project, **settings})
        return self

    def log(self, metrics: dict, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    recorded, fake = Recorded(), ModuleType("trackio")
    fake.init = recorded.init
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return recorded


def two_halves(out) -> None:
    """A run of four steps, which ends after the second, its state saved, and is resumed."""
    run = start(Args(out, trackio="a project"))
    for step in range(2):
        run.log(step, {"loss": float(step)})
    run.save(2)
    run.tracker.finish()  # as at the process's end
    run = start(Args(out, trackio="a project", resume=True))
    for step in range(2, 4):
        run.log(step, {"loss": float(step)})
    run.finish({"loss": 3.0})


def test_each_row_arrives_with_its_step_and_a_resumed_run_continues(recorded, tmp_path) -> None:
    two_halves(tmp_path / "run")
    assert recorded.rows == [(step, {"loss": float(step)}) for step in range(4)] and recorded.num_finished == 2
    first, second = recorded.init_settings
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert first["project"] == second["project"] == "a project"
    assert first["name"] == second["name"] == str(tmp_path / "run")
    assert first["config"]["lr"] == 0.1 and first["config"]["out"] == str(tmp_path / "run")


def test_the_library_itself_keeps_the_rows_of_a_resumed_run_together(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read as trackio is imported
    trackio = pytest.importorskip("trackio", reason="the extra `trackio` is not installed")
    if trackio.TRACKIO_DIR != tmp_path / "trackio":
        pytest.skip("trackio was imported before, with another directory")
    two_halves(tmp_path / "run")
    [run] = trackio.Api().runs("a project")
    rows = trackio.SQLiteStorage.get_logs("a project", run.name, run_id=run.id)
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_without_the_flag_and_on_other_ranks_nothing_is_tracked(recorded, tmp_path, monkeypatch) -> None:
    run = start(Args(tmp_path / "run"))
    run.log(0, {"loss": 1.0})
    run.finish({})
    monkeypatch.setattr(module.distributed, "rank", lambda: 1)
    run = start(Args(tmp_path / "other", trackio="a project"))
    run.log(0, {"loss": 1.0})
    run.finish({})
    assert recorded == Recorded()


def test_a_run_may_be_resumed_with_the_flag_and_without_it(recorded, tmp_path) -> None:
    run = start(Args(tmp_path / "run"))
    run.log(0, {"loss": 1.0})
    run.save(1)
    start(Args(tmp_path / "run", resume=True, trackio="a project")).log(1, {"loss": 2.0})
    start(Args(tmp_path / "run", resume=True)).log(1, {"loss": 2.0})
    assert recorded.rows == [(1, {"loss": 2.0})]


def test_without_the_library_training_does_not_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    _, args = train_sft.RECIPES["tiny"]
    args = replace(args, out=tmp_path / "run", trackio="a project")
    with pytest.raises(InputError, match="--trackio a project: it is not installed: `pip install trackio`"):
        begin(args)
    assert not (tmp_path / "run").exists()
