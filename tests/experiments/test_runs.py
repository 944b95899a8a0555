"""Runs start after what they need, finished ones are not repeated, a failure stops the experiment."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import PHASES, commands, main
from experiments.compare.runs import Compare, algorithm, points
from experiments.lab.runs import Lab
from experiments.mismatch.runs import Mismatch
from experiments.mismatch.staleness import Staleness
from experiments.runs import Run, execute, flag, stage
from nanorlhf.errors import InputError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def writing(name: str, *needs: str, then: str = "", state: str | None = None) -> Run:
    """A run that logs its name and its last argument, and writes a file of its name."""
    log = f"import sys; from pathlib import Path; print({name!r}, *sys.argv[1:], file=open('log', 'a'))"
    script = f"{log}; {then or '0'}; Path({name!r}).touch()"
    return Run(("-c", script), Path(name), tuple(map(Path, needs)), None if state is None else Path(state))


def logged(here: Path) -> list[str]:
    return (here / "log").read_text().split("\n")[:-1] if (here / "log").exists() else []


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_run_starts_after_those_it_needs_and_only_once(here, jobs) -> None:
    runs = [writing("c", "a", "b"), writing("b", "a"), writing("a"), writing("a")]
    execute(runs, jobs)
    assert logged(here) == ["a", "b", "c"]
    execute(runs, jobs)
    assert logged(here) == ["a", "b", "c"]
    (here / "b").unlink()
    execute(runs, jobs)
    assert logged(here) == ["a", "b", "c", "b"]


def test_a_run_waits_for_the_end_of_a_run_even_if_its_file_exists(here) -> None:
    early = "Path('a').touch(); import time; time.sleep(1); print('end of a', file=open('log', 'a'))"
    # `slow` keeps a worker busy until `a` has written its file, and its end makes the scheduler look again
    slow = "import time; time.sleep(0.5)"
    execute([writing("a", then=early), writing("slow", then=slow), writing("b", "a")], 3)
    assert logged(here)[-1] == "b" and set(logged(here)[:-1]) == {"a", "end of a", "slow"}


def test_an_interrupted_run_continues_and_a_new_one_overwrites(here) -> None:
    execute([writing("a", state="state")], 1)
    (here / "a").unlink()
    (here / "state/.partial").mkdir(parents=True)  # it failed in its first save
    execute([writing("a", state="state")], 1)
    (here / "a").unlink()
    (here / "state/step-00000001").mkdir()
    execute([writing("a", state="state")], 1)
    assert logged(here) == ["a --overwrite", "a --overwrite", "a --resume"]


@pytest.mark.parametrize("then", ["sys.exit(3)", "sys.exit(0)"])
def test_a_run_that_fails_or_writes_nothing_stops_the_experiment(here, then) -> None:
    with pytest.raises(InputError, match=f"failed with exit status {then[9]}"):
        execute([writing("a", then=then), writing("b", "a")], 1)
    assert logged(here) == ["a"]


def test_a_runs_final_callback_may_write_its_file(here) -> None:
    run = replace(writing("a", then="sys.exit(0)"), then=Path("a").touch)
    execute([run, writing("b", "a")], 1)
    assert logged(here) == ["a", "b"]
    with pytest.raises(InputError, match="failed with exit status 3"):
        execute([replace(writing("c", then="sys.exit(3)"), then=Path("c").touch)], 1)
    assert not (here / "c").exists()


def test_a_diverged_run_cancels_only_the_runs_that_need_it(here, capfd) -> None:
    said = "sys.exit('error: loss or gradient is not finite')"
    run = replace(writing("a", then=said), diverged=Path("told").touch)
    execute([run, writing("b", "a"), writing("c")], 1)
    assert logged(here) == ["a", "c"] and (here / "told").exists() and "not finite" in capfd.readouterr().err
    with pytest.raises(InputError, match="failed with exit status 1"):
        execute([writing("a", then=said)], 1)


def test_a_table_entry_becomes_flags() -> None:
    assert flag("summarisers/terse,lead") == ("--summarisers", "terse", "lead") and flag("base") == ()
    assert points(Compare(lrs=("1e-3",), kl_coefs=("0", "1")), "rloo") == ["lr/1e-3/kl-coef/0", "lr/1e-3/kl-coef/1"]
    assert points(Compare(lrs=("1e-3",)), "dpo") == ["lr/1e-3/beta/0.02", "lr/1e-3/beta/0.1"]
    assert algorithm("simpo", Path("here"))[5:] == ("--loss", "simpo", "--labels.target-margin", 1)


def test_the_comparison_continues_with_the_best_grid_point(here) -> None:
    args = Compare(out=here, seeds=(1,), algorithms=("ppo",))
    grid = here / "grid" / "ppo" / "eval"
    grid.mkdir(parents=True)
    scores = dict(zip(points(args, "ppo"), (1.0, 3.0, 2.0, 0.0), strict=True))
    rows = ", ".join(f'"{name}": {{"gold_score": {score}}}' for name, score in ({"sft": 9.0} | scores).items())
    (grid / "eval.json").write_text(f'{{"policies": {{{rows}}}}}')
    [*_, runs, _, _] = PHASES[type(args)](args)
    words = " ".join(runs[0].words)
    assert "--lr 3e-4 --kl-coef 0.1" in words and words.endswith(f"--out {here / '1' / 'ppo'} --seed 1")


def test_every_run_needs_only_files_of_its_phase_or_an_earlier_one() -> None:
    """Whatever a run waits for is written by a run of the same phase or of one before it."""
    for args in (Lab(), Compare(), Mismatch(), Staleness()):
        written: set[Path | None] = set()
        for runs in PHASES[type(args)](replace(args, dry_run=True)):
            written |= {run.done for run in runs}
            assert {file for run in runs for file in run.needs} <= written


def test_a_dry_run_prints_the_commands_and_runs_none(here, capsys) -> None:
    main(Mismatch(out=here / "out", runs=("stale/tis",), seeds=(4,), dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and not (here / "out").exists()
    [stale] = [line for line in lines if "--sampler.sync-every" in line]
    assert stale.startswith("python train_ppo.py") and "--sampler.sync-every 8 --sampler.correction tis" in stale
    assert [*commands(Mismatch(out=here / "out", runs=("stale/tis",), seeds=(4,)))][0][:2] == ("-m", "data.tiny")


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(InputError, match="--runs float4/none"):
        [*commands(Mismatch(runs=("float4/none",)))]


def test_a_stage_is_one_command_with_its_directory_and_seed(here) -> None:
    run = stage(here / "out", 3, "train_sft.py", "--num-epochs", 2)
    assert run.words == ("train_sft.py", "--num-epochs", "2", "--out", str(here / "out"), "--seed", "3")
    assert run.done == here / "out" / "summary.json" and run.command()[-1] == "--overwrite"
