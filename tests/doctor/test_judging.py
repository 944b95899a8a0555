"""Tests of tools.doctor, which judges planted bugs and can resume, and tools.sick_runs, which plots their runs."""

import csv
import json
import shutil
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from course.bugs import BUGS
from nanorlhf.errors import InputError
from tests.rules.healthy import PPO_SETTINGS, ppo_rows, write_run
from tools import doctor as judging
from tools.changes import CHANGES
from tools.doctor import Verdict, all_cases
from tools.other_bugs import OTHER_BUGS
from tools.sick_runs import PANELS, Args, main, side_by_side


@pytest.fixture
def demo(tmp_path):
    for name in ("data", "sft", "rm"):
        (tmp_path / "tiny" / name).mkdir(parents=True)
    return tmp_path / "tiny"


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """Replace the judge by a fake that finds bugs of level 1, and return the list of bugs that it judged."""
    names: list[str] = []

    def judge(case, args):
        names.append(case.name)
        by_code = ["masks"] if case.level == 1 else []
        return Verdict(case.key, case.name, case.kind, case.level, by_code, ["gae"], [], 1.0)

    monkeypatch.setattr(judging, "judge", judge)
    monkeypatch.setattr(judging, "TABLE", tmp_path / "doctor.csv")
    return names


def test_an_interrupted_call_resumes_and_the_table_has_a_row_per_bug(demo, judged, tmp_path, capsys):
    args = judging.Args(demo=demo, out=tmp_path / "doctor", bugs=(BUGS[1].name, BUGS[0].name), jobs=1)
    judging.main(args)
    assert set(judged) == {BUGS[0].name, BUGS[1].name} and len(judged) == 2
    assert not (tmp_path / "doctor.csv").exists()
    judging.main(judging.Args(demo=demo, out=tmp_path / "doctor", jobs=2))
    known = [case.name for case in all_cases()]
    assert sorted(judged) == sorted(known)  # none was judged twice
    num_found = sum(bug.level == 1 for bug in BUGS)
    assert f"bugs of the course: {len(BUGS)}, found by code {num_found}, by run {len(BUGS)}" in capsys.readouterr().out
    with (tmp_path / "doctor.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["bug"] for row in rows] == known
    assert [row["from"] for row in rows] == ["course"] * len(BUGS) + ["new"] * len(OTHER_BUGS) + [
        "right",
        "wrong",
    ] * len(CHANGES)
    assert {row["run"] for row in rows} == {"gae"} and {row["code"] for row in rows if row["level"] == "2"} == {""}


def test_the_correct_and_the_incorrect_version_of_a_change_are_judged(demo, judged, tmp_path, capsys):
    judging.main(judging.Args(demo=demo, out=tmp_path / "doctor", bugs=("gspo",), jobs=1))
    assert judged == ["gspo", "gspo"]
    out = capsys.readouterr().out
    assert "gspo (right, level 2): code: -; run: gae" in out and "gspo (wrong, level 2): code: -; run: gae" in out


def test_every_run_below_the_healthy_directories_is_examined(demo, judged, tmp_path, capsys):
    write_run(tmp_path / "runs/1/ppo", PPO_SETTINGS, ppo_rows())
    write_run(tmp_path / "runs/1/ppo/state/step-00000012", PPO_SETTINGS, [])  # no metrics
    write_run(tmp_path / "runs/sick", PPO_SETTINGS, [row | {"policy/clip_fraction": 0.5} for row in ppo_rows()])
    args = judging.Args(demo=demo, out=tmp_path / "doctor", bugs=("gspo",), healthy=(tmp_path / "runs",), jobs=1)
    judging.main(args)
    _, count, said = capsys.readouterr().out.partition("2 runs, 1 with findings\n")
    assert count and said.startswith(f"{tmp_path}/runs/sick: clip-often: On average 50% of the tokens")


def test_a_case_is_planted_and_its_stage_gets_its_flags(demo, tmp_path, monkeypatch):
    seen = []

    def examine(tree):
        seen.append((tree / "nanorlhf/ppo.py").read_text())
        return [], []

    def no_training(tree, stage, demo, out, flags):
        seen.append((stage, out.parent.name, *flags))
        return SimpleNamespace(wait=lambda: 1)

    monkeypatch.setattr(judging.code, "examine", examine)
    monkeypatch.setattr(judging, "start", no_training)
    right, wrong = [case for case in all_cases() if case.name == "clip-higher"]
    args = judging.Args(demo=demo, out=tmp_path / "doctor")
    judging.code_findings.cache_clear()
    assert [judging.judge(case, args).by_run for case in (right, wrong, right)] == [["grpo fails"]] * 3
    sources = [text for text in seen if isinstance(text, str)]
    assert ["1 - upper, 1 + lower" in text for text in sources] == [False, True]  # the correct version only once
    flags = right.flags
    assert "dapo" in flags
    assert seen[1] == ("grpo", "clip-higher-right", *flags, "--overwrite")
    assert seen[3] == ("grpo", "clip-higher", *flags, "--overwrite")
    judging.code_findings.cache_clear()


def test_a_missing_demo_and_an_unknown_bug_are_errors(demo, judged, tmp_path):
    with pytest.raises(InputError, match="unknown bug"):
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


def test_each_panel_shows_its_metric_for_the_healthy_and_the_sick_run(tmp_path):
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


def test_a_missing_run_is_named(demo, tmp_path):
    write_metrics(demo / "ppo", "objective/kl", [0.0])
    with pytest.raises(InputError, match=f"{PANELS[0].bug}/ppo has no metrics.jsonl: run `python -m tools"):
        side_by_side(demo, tmp_path / "doctor")
