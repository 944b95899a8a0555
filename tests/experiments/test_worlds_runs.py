"""The study over worlds, with programs that only write what it reads; and once in miniature with the real ones."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from experiments import runs
from experiments.__main__ import commands, main
from experiments.worlds import report as table
from experiments.worlds.runs import (
    A_WORLD,
    AROUND_A_RUN,
    VARIANTS,
    Worlds,
    drawn,
    hours_left,
    run_key,
    rungs,
    setting_flags,
    standing,
)
from nanorlhf.errors import InputError
from tests.helpers.page_commands import Command, parse_settings

ROOT = Path(__file__).resolve().parents[2]


def luck(*words: object) -> float:
    """From 0 to 1, of these words alone."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


class Programs:
    """Stands for `runs.call`: writes what the programs of the study would, and counts them."""

    def __init__(self, diverging: str = "nothing", stop_after: int | None = None):
        self.called: list[str] = []
        self.diverging, self.stop_after = diverging, stop_after

    def __call__(self, command: list[str]) -> tuple[int, bytes]:
        words = command[1:]
        said = " ".join(words)  # another thread may be the last to call
        self.called.append(said)
        if self.stop_after is not None and len(self.called) > self.stop_after:
            raise KeyboardInterrupt
        out, seed = Path(words[words.index("--out") + 1]), words[words.index("--seed") + 1]
        out.mkdir(parents=True, exist_ok=True)
        if "data.tiny" in words:
            (out / "tokenizer.json").touch()
        elif "data.best_of" in words:
            cost = {"num_tokens": 100, "seconds": 1.0, "peak_resident_bytes": 1}
            (out / "best_of.json").write_text(json.dumps(cost))
        elif words[0] == "eval.py":
            policies = words[words.index("--policies") + 1 : words.index("--out")]
            rows = {name: self.evaluated(name, path, seed) for name, path in zip(*[iter(policies)] * 2, strict=True)}
            (out / "eval.json").write_text(json.dumps({"policies": rows}))
        else:
            if self.diverging in said:
                return 2, b"error: loss or gradient is not finite for 4 step(s) in a row"
            settings = " ".join(word for word in words if "/" not in word)  # on every machine the same
            row = {"step": 0, "episode": 64, "response_length": 10.0, "episodes_per_second": 8.0, "objective/kl": 1.0}
            (out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
            (out / "args.json").write_text(json.dumps({"data": words[words.index("--data") + 1], "said": settings}))
            summary = {"seconds": 20 + time.perf_counter() % 1, "peak_resident_bytes": 1}
            (out / "summary.json").write_text(json.dumps(summary))
        return 0, b""

    def evaluated(self, name: str, path: str, seed: str) -> dict:
        """The algorithm matters, the settings matter, and the world matters most."""
        trained = Path(path) / "args.json"
        settings = json.loads(trained.read_text())["said"] if trained.exists() else path.partition(":")[0]
        gold = 2 + luck(seed) + 0.5 * luck(name.partition("-")[0]) + 0.2 * luck(settings, seed)
        return {
            "gold_win_rate": gold / 4, "gold_score": gold, "rm_score": 1.0, "kl": 1.0, "entropy": 1.0, "distinct": 2.0,
            "eos_rate": 1.0, "response_length": 10.0, "kl_estimate": 1.0 if name.startswith("best-of") else None,
        }  # fmt: skip


@pytest.fixture
def args(tmp_path: Path) -> Worlds:
    """A study of two algorithms and DPO with four points each, and four worlds."""
    (tmp_path / "docs").mkdir()
    return Worlds(
        out=tmp_path / "runs", csv=tmp_path / "docs/worlds.csv", algorithms=("ppo", "dpo", "rejection"), num_points=4,
        tune_seeds=(101, 102, 103, 104), seeds=(1, 2, 3, 4), budgets=(256, 1024), jobs=2,
    )  # fmt: skip


def run(args: Worlds, monkeypatch, **settings) -> list[str]:
    """The commands that were run."""
    programs = Programs(**settings)
    monkeypatch.setattr(runs, "call", programs)
    main(args)
    return programs.called


def results(path: Path) -> list[dict[str, str]]:
    """The rows without times and revision, which vary between runs."""
    return [row | {"seconds": "", "revision": ""} for row in table.read_rows(path)]


def elsewhere(args: Worlds, directory: Path, **changes) -> Worlds:
    """The same study on another machine."""
    directory.mkdir()
    return replace(args, out=directory / "runs", csv=directory / "worlds.csv", **changes)


# -------------------------------------------------------------------------------------------------- 1. the runs
def test_every_run_has_a_row_and_is_not_repeated_without_its_directory(args, monkeypatch) -> None:
    called = run(args, monkeypatch)
    rows = table.read_rows(args.csv)
    tuned = [row for row in rows if row["phase"] == "tune"]
    # of each algorithm four points in one world, two in two more, one in the last
    assert len(tuned) == 3 * (4 + 2 * 2 + 1)
    by_world = [row for row in rows if row["phase"] == "final" and row["world"] == "3"]
    names = sorted((row["algorithm"], row["budget"]) for row in by_world if not row["variant"])
    best_of = [(f"best-of-{n}", "0") for n in (16, 4, 64)]
    assert names == [
        *best_of, ("dpo", "0"), ("ppo", "1024"), ("ppo", "256"), ("rejection", "1024"), ("rejection", "256"),
        ("sft", "0"),
    ]  # fmt: skip
    variants = {name: {row["variant"] for row in by_world if row["algorithm"] == name} - {""} for name in VARIANTS}
    assert variants["ppo"] < {*VARIANTS["ppo"]} and len(variants["ppo"]) in (5, 6)  # one or two are PPO as tuned
    assert variants["dpo"] == {*VARIANTS["dpo"]}
    assert sum("eval.py" in words for words in called) == len(rows) - 3 * 4  # four rows of one evaluation
    assert not list((args.out / "runs").iterdir())
    assert run(args, monkeypatch) == []
    for file in (args.out / "rows").glob("*.csv"):
        file.unlink()
    assert run(args, monkeypatch) == []


def test_a_run_whose_row_is_lost_is_repeated_with_its_world(args, monkeypatch) -> None:
    run(args, monkeypatch)
    rows = table.read_rows(args.csv)
    lost = next(row for row in rows if row["algorithm"] == "dpo" and row["world"] == "2")
    args.csv.write_text(table.rows_text(row for row in rows if row != lost))
    [file] = [path for path in (args.out / "rows").glob("final_2_dpo_0_*.csv")]
    file.unlink()
    for name in ("tokenizer.json", "summary.json"):
        for path in (args.out / "2").rglob(name):
            path.unlink()
    called = run(args, monkeypatch)
    programs = [word for words in called for word in words.split() if word.endswith(".py") or word == "data.tiny"]
    assert programs == ["data.tiny", "train_sft.py", "train_rm.py", "train_dpo.py", "eval.py"]
    assert results(args.csv) == [row | {"seconds": "", "revision": ""} for row in rows]


def test_final_runs_take_the_point_that_tuning_chose(args, monkeypatch) -> None:
    run(args, monkeypatch)
    rows = table.read_rows(args.csv)
    for name in args.algorithms:
        choice, golds = table.tuned(rows, name)[0]
        assert len(golds) == 4
        final = [row for row in rows if row["phase"] == "final" and row["algorithm"] == name and not row["variant"]]
        assert final and all(table.row_settings(row) == choice for row in final)


def test_a_diverged_run_gets_the_lowest_score_and_stops_no_other(args, monkeypatch) -> None:
    lr = drawn(args, "dpo")[0]["lr"]
    run(args, monkeypatch, diverging=f"101/sft --lr {lr} --beta")
    [row] = [row for row in table.read_rows(args.csv) if row["algorithm"] == "dpo" and row["lr"] == lr]
    assert (row["gold_score"], row["gold_win_rate"], row["kl"], row["phase"]) == ("-8.0", "0", "", "tune")


def test_another_failure_stops_the_study(args, monkeypatch) -> None:
    monkeypatch.setattr(runs, "call", lambda command: (2, b"error: the disk is full"))
    with pytest.raises(InputError, match="data.tiny .* failed with exit status 2"):
        main(args)


# ------------------------------------------------------------------------------------ 2. interrupted, and on machines
@pytest.mark.parametrize("stop_after", [9, 50, 111])
def test_an_interrupted_study_resumes_to_the_same_csv(args, monkeypatch, tmp_path, stop_after) -> None:
    run(args, monkeypatch)
    other = elsewhere(args, tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        run(other, monkeypatch, stop_after=stop_after)
    before = len(table.read_rows(other.csv))
    run(other, monkeypatch)
    assert before < len(table.read_rows(other.csv)) and results(other.csv) == results(args.csv)


def test_two_machines_joined_are_one(args, monkeypatch, tmp_path) -> None:
    """Tuning is shared by algorithm, the rest by world; in between each machine is given the other's CSV."""
    run(args, monkeypatch)
    machines = [elsewhere(args, tmp_path / f"machine_{k}", share=f"{k}/2") for k in (1, 2)]
    for machine in machines:
        run(replace(machine, phase="tune"), monkeypatch)
    exchange(*machines)
    for machine in machines:
        run(replace(machine, phase="final"), monkeypatch)
    seeds = [{row["world"] for row in table.read_rows(m.csv) if row["phase"] == "final"} for m in machines]
    assert seeds == [{"1", "3"}, {"2", "4"}]
    exchange(*machines)
    assert run(machines[0], monkeypatch) == run(replace(machines[0], share="1/1"), monkeypatch) == []
    assert results(machines[0].csv) == results(args.csv)


def exchange(one: Worlds, other: Worlds) -> None:
    texts = [machine.csv.read_text() for machine in (one, other)]
    for machine, text in zip((one, other), reversed(texts), strict=True):
        (machine.out / "rows" / "of_the_other_machine.csv").write_text(text)


def test_shares_on_one_disk_keep_their_worlds_apart(args, monkeypatch) -> None:
    called = [run(replace(args, share=f"{k}/2", phase="tune"), monkeypatch) for k in (1, 2)]
    assert all(
        "share_1_of_2/101/data" in words for words in called[0] if "data.tiny" in words and "--seed 101" in words
    )
    assert not {words for words in called[0]} & {words for words in called[1]}
    assert {row["algorithm"] for row in table.read_rows(args.csv)} == {*args.algorithms}


def test_an_algorithm_that_is_not_tuned_has_no_final_runs_and_is_named(args, monkeypatch, capsys) -> None:
    run(replace(args, share="1/3", phase="tune"), monkeypatch)
    run(replace(args, phase="final"), monkeypatch)
    said = capsys.readouterr().out
    assert "dpo: tuning isn't finished" in said and "ppo: tuning" not in said
    best_of = {f"best-of-{n}" for n in args.best_of}
    assert {row["algorithm"] for row in table.read_rows(args.csv)} == {"ppo", "sft"} | best_of


# ----------------------------------------------------------------------------------------------------- 3. the tuning
def test_points_depend_only_on_the_seed_and_cover_their_ranges() -> None:
    args = Worlds()
    for name, space in table.SPACE.items():
        points = drawn(args, name)
        assert points == drawn(replace(args, seeds=(7,)), name) != drawn(replace(args, draw_seed=1), name)
        assert len({tuple(point.values()) for point in points}) == len(points) == 12
        for setting, values in space.items():
            drawn_values = [point[setting] for point in points]
            if isinstance(values[0], str):
                assert {drawn_values.count(value) for value in values} <= {3, 4, 6}
            else:
                low, high = values
                edges = [low * (high / low) ** (i / 12) for i in range(13)]
                assert [sum(a <= float(x) < b for x in drawn_values) for a, b in pairwise(edges)] == [1] * 12
        assert all(not point[setting] for point in points for setting in set(table.SETTINGS) - set(space))


def test_halving_keeps_the_best_by_the_mean_over_the_worlds_so_far() -> None:
    args = Worlds(num_points=4, tune_seeds=(101, 102, 103, 104))
    assert rungs(args) == [((101,), 4), ((102, 103), 2), ((104,), 1)]
    assert rungs(Worlds()) == [((101,), 12), ((102, 103), 6), ((104, 105), 3)]
    points = drawn(args, "rloo")

    def rows(scores: dict[tuple[int, int], float]) -> list[table.Row]:
        table_rows = []
        for (i, seed), gold in scores.items():
            key = run_key(args, "tune", seed, "rloo", 1024, points[i])
            table_rows.append(dict.fromkeys(table.COLUMNS, "") | key | {"gold_score": str(gold)})
        return table_rows

    scores = {(0, 101): 1.0, (1, 101): 4.0, (2, 101): 3.0}
    assert standing(args, rows(scores), "rloo", 0) == points
    assert standing(args, rows(scores), "rloo", 1) is None  # point 3 has no row
    scores[3, 101] = 2.0
    assert standing(args, rows(scores), "rloo", 1) == [points[1], points[2]]
    scores |= {(1, 102): 0.0, (1, 103): 1.0, (2, 102): 3.0, (2, 103): 1.0}  # means 1.67 and 2.33
    assert standing(args, rows(scores), "rloo", 2) == [points[2]]
    assert standing(args, rows(scores), "rloo", 3) is None
    scores[2, 104] = 0.0
    assert standing(args, rows(scores), "rloo", 3) == [points[2]]


def test_without_best_of_n_the_initial_policy_is_not_evaluated(args, monkeypatch) -> None:
    run(replace(args, best_of=()), monkeypatch)
    assert {row["algorithm"] for row in table.read_rows(args.csv)} == {*args.algorithms}


def test_settings_become_the_flags_of_their_script() -> None:
    empty = dict.fromkeys(table.SETTINGS, "")
    key = {"algorithm": "ppo"} | empty | {"lr": "1e-3", "epochs": "4", "lam": "1", "value_model": "scratch"}
    key |= {"value_clip": "None", "batch_size": "256"}
    directory = Path("world")
    assert [*map(str, setting_flags(key, directory))] == [
        *("--lr", "1e-3", "--lam", "1", "--value-clip-range", "None", "--num-ppo-epochs", "4"),
        *("--value-model", "world/scratch", "--batch-size", "256", "--num-minibatches", "4"),
    ]
    assert [*setting_flags({"algorithm": "dpo"} | empty | {"beta": "0.1", "epochs": "2"}, directory)] == [
        *("--beta", "0.1", "--num-epochs", "2")
    ]
    assert [*setting_flags({"algorithm": "ppo"} | empty | {"value_model": "reward model"}, directory)] == []
    first_run = {"algorithm": "ppo"} | empty | {"value_model": "first run"}
    assert [*setting_flags(first_run, directory)] == ["--value-model", directory / "first_run/value_model"]


# ------------------------------------------------------------------------------------------- 4. flags, and what is left
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"share": "9/8"}, "--share 9/8: expected K/N"),
        ({"share": "half"}, "--share half: expected K/N"),
        ({"algorithms": ("a2c",)}, "--algorithms a2c: choose from ppo"),
        ({"variants": ("lambda 2",)}, "--variants 'lambda 2': choose from lambda 1"),
        ({"budgets": (256, 1000)}, "--budgets 1000: must be a multiple of 256"),
        ({"tune_seeds": (4, 101)}, "--seeds 4 is also in --tune-seeds"),
        ({"budget": 64}, "--budget 64: must be a multiple of 256"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(args, monkeypatch, changes, sentence) -> None:
    monkeypatch.setattr(runs, "call", lambda command: pytest.fail("it ran"))
    with pytest.raises(InputError, match=sentence):
        main(replace(args, **changes))


def test_a_dry_run_prints_all_commands_and_the_remaining_hours(args, monkeypatch, capsys) -> None:
    main(replace(args, dry_run=True))
    *lines, last = capsys.readouterr().out.splitlines()
    assert not args.csv.exists() and not args.out.exists()
    assert all(line.startswith("python ") for line in lines) and last.startswith("# about ")
    whole = hours_left(replace(args, dry_run=True))
    run(replace(args, phase="tune"), monkeypatch)
    left = hours_left(replace(args, dry_run=True))
    run(args, monkeypatch)
    capsys.readouterr()
    main(replace(args, dry_run=True))
    *again, last = capsys.readouterr().out.splitlines()
    assert 0 < left < whole and last.startswith("# about 0.0 core hours") and len(again) >= len(lines) - 12


def test_the_whole_study_is_estimated_below_twenty_core_hours(tmp_path) -> None:
    args = Worlds(out=tmp_path / "runs", csv=tmp_path / "worlds.csv", dry_run=True)
    assert 2 < hours_left(args) < 20


def test_the_seconds_of_the_csv_replace_the_guess(args, monkeypatch) -> None:
    run(args, monkeypatch)
    rows = table.read_rows(args.csv)
    kept = [row | {"seconds": "7200"} for row in rows if row["world"] != "4" and row["algorithm"] == "dpo"]
    kept += [row for row in rows if row["algorithm"] != "dpo"]
    args.csv.write_text(table.rows_text(kept))
    for file in (args.out / "rows").glob("*dpo*.csv"):
        file.unlink()
    num_runs = 1 + len(VARIANTS["dpo"])
    assert hours_left(args) == pytest.approx((num_runs * (7200 + AROUND_A_RUN) + A_WORLD) / 3600)


def test_every_command_is_one_that_its_program_takes(args) -> None:
    """Of one world of each phase, all algorithms and all of PPO's variants."""
    small = replace(args, algorithms=tuple(table.SPACE), tune_seeds=(101,), seeds=(1,), budgets=(256,))
    settings = [parse_settings(Command(("python", *words))) for words in commands(small)]
    assert len(settings) > 50 and all(settings)
    from_scratch = [run for run in settings if str(getattr(run, "value_model", "")).endswith("scratch")]
    assert len(from_scratch) == 1
    [second] = [run for run in settings if str(getattr(run, "value_model", "")).endswith("first_run/value_model")]
    [first] = [run for run in settings if run.out.name == "first_run"]
    assert second == replace(first, out=second.out, value_model=second.value_model, total_episodes=768, trace=64)
    assert first.total_episodes == 256 and first.value_model is None
    assert {run.trace for run in settings if hasattr(run, "lam") and run is not first} == {64}


# ---------------------------------------------------------------------------------------------------- 5. in miniature
SMALL = """--algorithms ppo --tune-seeds 101 --num-points 2 --seeds 1 --budgets 256 --budget 256 --best-of 4
--num-demonstrations 600 --num-comparisons 192 --num-queries 8 --jobs 2 --variants --phase final""".split()


def start_study(out: Path) -> subprocess.Popen:
    """Run in a separate process group, with the programs that it starts."""
    command = (sys.executable, "-m", "experiments", "worlds", *SMALL, "--out", out / "runs")
    return subprocess.Popen(
        list(map(str, (*command, "--csv", out / "worlds.csv"))), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_study_resumes(tmp_path, monkeypatch) -> None:
    """Real runs in one world; the tuning before it, whose programs are the same, is written by stand-ins."""
    csv = tmp_path / "worlds.csv"
    tuning = Worlds(
        out=tmp_path / "runs", csv=csv, algorithms=("ppo",), tune_seeds=(101,), num_points=2, budget=256, phase="tune",
        num_demonstrations=600, num_comparisons=192, num_queries=8,
    )  # fmt: skip
    run(tuning, monkeypatch)
    tuned = results(csv)
    study = start_study(tmp_path)
    while len(table.read_rows(csv)) == len(tuned):
        assert study.poll() is None
        time.sleep(0.2)
    os.killpg(study.pid, signal.SIGKILL)
    study.wait()
    before = results(csv)
    assert start_study(tmp_path).wait() == 0
    rows = results(csv)
    assert all(row in rows for row in before)
    ran = [("tune", "101", "ppo")] * 2 + [("final", "1", name) for name in ("best-of-4", "ppo", "sft")]
    assert sorted((row["phase"], row["world"], row["algorithm"]) for row in rows) == sorted(ran)
    [ppo] = [row for row in rows if row["phase"] == "final" and row["algorithm"] == "ppo"]
    assert float(ppo["explained_variance_run"]) <= 1 and float(ppo["tokens"]) > 0
    better = max(tuned, key=lambda row: float(row["gold_score"]))
    assert all(ppo[setting] == better[setting] for setting in table.SETTINGS)
    page = tmp_path / "page.md"
    page.write_text("\n".join(("# Page", *table.SUMMARY, *table.MARKS)))
    table.main(table.Args(csv=csv, page=page, reruns=tmp_path / "none.csv", out=tmp_path / "pictures"))
    assert "| `ppo` | 0.000 |" in page.read_text()
