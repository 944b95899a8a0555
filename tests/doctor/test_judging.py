"""tools.doctor judges planted bugs one by one and goes on where it stopped; tools.sick_runs draws what it trained."""

import csv
import json
import shutil

import pytest
from matplotlib.figure import Figure

from course.bugs import BUGS
from nanorlhf.errors import InputError
from tools import doctor as judging
from tools.doctor import Verdict, key_of
from tools.other_bugs import OTHER_BUGS
from tools.sick_runs import PANELS, Args, main, side_by_side


@pytest.fixture
def demo(tmp_path):
    for name in ("data", "sft", "rm"):
        (tmp_path / "tiny" / name).mkdir(parents=True)
    return tmp_path / "tiny"


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """The names of the bugs that were judged, by a judge that names each bug's level; the table is written apart."""
    names: list[str] = []

    def judge(bug, args):
        names.append(bug.name)
        by_code = ["masks"] if bug.level == 1 else []
        return Verdict(key_of(bug), bug.name, bug in OTHER_BUGS, bug.level, by_code, ["gae"], [], 1.0)

    monkeypatch.setattr(judging, "judge", judge)
    monkeypatch.setattr(judging, "TABLE", tmp_path / "doctor.csv")
    return names


def test_an_interrupted_call_goes_on_and_the_table_has_a_row_per_bug(demo, judged, tmp_path, capsys):
    args = judging.Args(demo=demo, out=tmp_path / "doctor", bugs=(BUGS[1].name, BUGS[0].name), jobs=1)
    judging.main(args)
    assert set(judged) == {BUGS[0].name, BUGS[1].name} and len(judged) == 2
    assert not (tmp_path / "doctor.csv").exists()
    judging.main(judging.Args(demo=demo, out=tmp_path / "doctor", jobs=2))
    known = [bug.name for bug in (*BUGS, *OTHER_BUGS)]
    assert sorted(judged) == sorted(known)  # none was judged twice
    assert f"the course's bugs: {len(BUGS)}, named by code 17, by run {len(BUGS)}" in capsys.readouterr().out
    with (tmp_path / "doctor.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["bug"] for row in rows] == known
    assert [row["from"] for row in rows] == ["course"] * len(BUGS) + ["new"] * len(OTHER_BUGS)
    assert {row["run"] for row in rows} == {"gae"} and {row["code"] for row in rows if row["level"] == "2"} == {""}


def test_a_demo_that_was_not_made_and_an_unknown_bug_are_refused(demo, judged, tmp_path):
    with pytest.raises(InputError, match="there is no such bug"):
        judging.main(judging.Args(demo=demo, out=tmp_path / "doctor", bugs=("unheard-of",)))
    shutil.rmtree(demo / "rm")
    with pytest.raises(InputError, match="has no rm: run `make demo` first"):
        judging.main(judging.Args(demo=demo, out=tmp_path / "doctor"))
    assert not judged


def write_metrics(run, metric, values):
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, metric: value} for step, value in enumerate(values)]
    with (run / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def test_each_panel_shows_its_metric_of_the_healthy_and_of_the_sick_run(tmp_path):
    assert {panel.bug for panel in PANELS} <= {bug.name for bug in (*BUGS, *OTHER_BUGS)}
    for metric in {panel.metric for panel in PANELS}:
        write_metrics(tmp_path / "tiny/ppo", metric, [0.0, 1.0, 2.0])
    for number, panel in enumerate(PANELS):
        write_metrics(tmp_path / "doctor/runs" / panel.bug / "ppo", panel.metric, [0.0, 10.0 + number])
    figure = side_by_side(tmp_path / "tiny", tmp_path / "doctor")
    assert isinstance(figure, Figure)
    for number, (axes, panel) in enumerate(zip(figure.axes, PANELS, strict=True)):
        healthy, sick = axes.lines
        assert axes.get_title("left") == panel.title
        assert list(healthy.get_ydata()) == [0.0, 1.0, 2.0] and list(sick.get_ydata()) == [0.0, 10.0 + number]
    main(Args(demo=tmp_path / "tiny", doctor=tmp_path / "doctor", out=tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_the_doctor_has_not_trained_is_named(demo, tmp_path):
    write_metrics(demo / "ppo", "objective/kl", [0.0])
    with pytest.raises(InputError, match=f"{PANELS[0].bug}/ppo holds no metrics.jsonl: run `make doctor` first"):
        side_by_side(demo, tmp_path / "doctor")
