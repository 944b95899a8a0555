"""The runner, with programs that only write what it reads."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import train_ppo
import train_rm
from experiments import runs
from experiments.__main__ import commands, main
from experiments.compare.runs import compared_world
from experiments.leaderboard import report as table
from experiments.leaderboard.runs import ENTRIES, Leaderboard, digest, leaderboard, set_name, world_runs
from experiments.worlds import report as study
from nanorlhf.cli import parse_flags
from nanorlhf.errors import InputError


class Programs:
    """Replaces `runs.call`: writes what the programs would, and records them. Entries named free score no response."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __call__(self, command: list[str]) -> tuple[int, bytes]:
        words = command[1:]
        self.called.append(" ".join(words))
        out = Path(words[words.index("--out") + 1])
        if "experiments.leaderboard.referee" in words:
            entry, budget = (words[words.index(flag) + 1] for flag in ("--entry", "--budget"))
            is_free = "free" in entry or not entry.endswith(".py")
            result: dict = {"refused": "", "seconds": 3.0, "num_scored": 0 if is_free else int(budget)}
            if "cheat" in entry:
                result["refused"] = "budget: it asked for more"
            else:
                result |= {"gold_win_rate": 0.5, "gold_score": 2.0, "rm_score": None}
            out.write_text(json.dumps(result))
        else:
            out.mkdir(parents=True, exist_ok=True)
            (out / ("tokenizer.json" if out.name == "data" else "summary.json")).write_text("{}")
        return 0, b""


@pytest.fixture
def args(tmp_path: Path) -> Leaderboard:
    """Three entries and the initial policy in two worlds at two budgets; the study has rows for `known`."""
    for name in ("known", "free", "cheat"):
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
    row = dict.fromkeys(study.COLUMNS, "")
    row |= {"phase": "final", "world": "1", "algorithm": "known", "budget": "256", "gold_score": "3"}
    (tmp_path / "worlds.csv").write_text(study.rows_text([row | {"gold_win_rate": "0.9"}]))
    return Leaderboard(
        out=tmp_path / "runs", csv=tmp_path / "leaderboard.csv", worlds=tmp_path / "worlds.csv", numbers=(1, 2),
        entries=("sft", *(str(tmp_path / f"{name}.py") for name in ("known", "free", "cheat"))), budgets=(1024, 256),
    )  # fmt: skip


def run(args: Leaderboard, monkeypatch) -> list[str]:
    """Run the study; return the commands."""
    programs = Programs()
    monkeypatch.setattr(runs, "call", programs)
    main(args)
    return programs.called


def keys(args: Leaderboard) -> list[tuple[str, ...]]:
    return [(row["number"], row["entry"], row["budget"]) for row in table.read_results(args.csv)]


def test_every_run_has_a_row_and_an_entry_without_responses_one_for_all_budgets(args, monkeypatch) -> None:
    called = run(args, monkeypatch)
    used = [("cheat", "256"), ("cheat", "1024"), ("free", "0"), ("known", "256"), ("known", "1024"), ("sft", "0")]
    expected = [(number, *pair) for number in "12" for pair in used if (number, *pair) != ("1", "known", "256")]
    assert keys(args) == expected
    assert sum("referee" in words for words in called) == len(expected)
    rows = table.read_results(args.csv)
    assert {row["refused"] for row in rows if row["entry"] == "cheat"} == {"budget: it asked for more"}
    assert all(row["gold_win_rate"] == "0.5" for row in rows if row["entry"] != "cheat")
    assert run(args, monkeypatch) == []


def test_a_changed_entry_runs_again_and_replaces_its_rows(args, monkeypatch) -> None:
    run(args, monkeypatch)
    before, entry = keys(args), Path(args.entries[2])
    old = digest(str(entry))
    entry.write_text("# free, improved\n")
    called = run(args, monkeypatch)
    assert len(called) == 2 and all("--entry " + str(entry) in words for words in called)
    assert keys(args) == before
    assert {row["digest"] for row in table.read_results(args.csv) if row["entry"] == "free"} == {digest(str(entry))}
    assert digest(str(entry)) != old and digest("sft") == ""


def test_the_studys_rows_can_be_reproduced(args, monkeypatch) -> None:
    run(args, monkeypatch)
    [command] = run(replace(args, reproduce=True), monkeypatch)
    assert "known.py --budget 256" in command and ("1", "known", "256") in keys(args)


def test_a_run_that_ended_after_an_interruption_gets_its_row_without_running_again(args, monkeypatch) -> None:
    run(args, monkeypatch)
    text = args.csv.read_text()
    args.csv.unlink()
    assert run(args, monkeypatch) == [] and args.csv.read_text() == text


def test_public_worlds_are_made_as_in_the_worlds_study(args) -> None:
    assert world_runs(args, 3) == compared_world(args.out / "public/3", 3)


def test_secret_worlds_never_show_the_secret(args, tmp_path, monkeypatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("open sesame\n")
    args = replace(args, secret_file=secret)
    called = run(args, monkeypatch)
    names = {row["set"] for row in table.read_results(args.csv)}
    assert names == {set_name(args)} and set_name(args).startswith("secret-") and len(set_name(args)) == 15
    assert len(keys(args)) == 2 * 6  # the study has no rows of this set
    assert not any("sesame" in text for text in (*called, args.csv.read_text(), *map(str, args.out.rglob("*"))))
    seeds = {words.split("--seed ")[1].split()[0] for words in called if "train_" in words}
    assert len(seeds) == 2  # one per world, used by both of its models
    labelled = [words for words in called if "experiments.leaderboard.labeller" in words]
    assert len(labelled) == 2 and all(f"--secret-file {secret}" in words for words in labelled)
    secret.write_text("other")
    assert set_name(args) not in names


def test_a_dry_run_lists_all_runs_and_needs_no_files(args) -> None:
    words = [" ".join(command) for command in commands(replace(args, dry_run=True))]
    assert sum("referee" in command for command in words) == 2 * 4 * 2
    assert len({command for command in words if "data.tiny" in command}) == 2 and not args.out.exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"entries": ("missing.py",)}, "--entries missing.py: no such file"),
        ({"entries": ("best-of-x",)}, "--entries best-of-x: expected the file of an entry, sft or best-of-N"),
        ({"numbers": (1, 21)}, "--numbers 21: the public set has worlds 1 to 20"),
        ({"budgets": (100,)}, "--budgets 100: must be a multiple of 64"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(args, changes, sentence, monkeypatch) -> None:
    with pytest.raises(InputError, match=sentence):
        run(replace(args, **changes), monkeypatch)
    assert not args.out.exists()


def test_the_first_entries_have_the_settings_that_the_study_chose() -> None:
    """The files repeat the settings of the worlds study's CSV."""
    rows = study.read_rows(study.Args.csv)
    names = {"lr": "lr", "kl_coef": "kl_coef", "beta": "beta", "lam": "lam"}
    for algorithm in study.SPACE:
        chosen, _ = study.tuned(rows, algorithm)[0]
        [file] = [entry for entry in ENTRIES if Path(entry).stem == table.NAMES.get(algorithm, algorithm)]
        source = Path(file).read_text()
        epochs = "num_ppo_epochs" if algorithm == "ppo" else "num_epochs"
        settings = {names[name]: float(value) for name, value in chosen.items() if name in names and value}
        settings[epochs] = float(chosen["epochs"])
        for name, value in settings.items():
            written = {float(text.split(",")[0].split(")")[0]) for text in source.split(f"{name}=")[1:]}
            assert value in written, f"{file}: {name} is {written}, not {value}"


# -------------------------------------------------------------------------------------------------- PPO's value model
@pytest.fixture
def demonstration(tmp_path: Path) -> Leaderboard:
    """The flags of the page's command for PPO's runs with another value model, and the committed table."""
    page = table.Args.page.read_text()
    [command] = [line for line in page.splitlines() if "ppo_same_rm.py --" in line]
    words = command.split()
    assert words[:4] == ["python", "-m", "experiments", "leaderboard"] and "runs/secret" in words
    secret = tmp_path / "secret"
    secret.write_text("demonstration\n")
    args = parse_flags(Leaderboard, words[4:], "experiments")
    assert args.csv == table.Args.value_model
    return replace(args, secret_file=secret, out=tmp_path / "runs")


def test_the_pages_command_makes_exactly_the_rows_of_ppos_value_model(demonstration) -> None:
    assert [*leaderboard(demonstration)] == [[]]  # the table has each run's row, and of this version of the entry
    rows = table.read_results(demonstration.csv)
    assert len(rows) == 8 and [*leaderboard(replace(demonstration, csv=Path("none.csv")))][0]


def test_ppos_other_value_model_starts_with_the_seed_of_the_worlds_reward_model(demonstration, monkeypatch) -> None:
    calls: dict[str, list] = {"rm": [], "ppo": []}
    monkeypatch.setattr(train_rm, "main", calls["rm"].append)
    monkeypatch.setattr(train_ppo, "main", calls["ppo"].append)
    [file] = demonstration.entries
    for number in (1, 8):
        for path in (file, "experiments/leaderboard/entries/ppo.py"):
            spec = importlib.util.spec_from_file_location("entry", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            names = dict(directory=Path("world"), data=Path("data"), sft=Path("sft"), reward=None)
            module.train(SimpleNamespace(**names, seed=number, budget=1024, load=lambda out: out))
        (ours, theirs), (our_ppo, their_ppo) = (calls[name][-2:] for name in ("rm", "ppo"))
        made = next(run for run in world_runs(demonstration, number) if "train_rm.py" in run.words)
        assert str(ours.seed) == made.words[made.words.index("--seed") + 1]
        assert theirs.seed == number and replace(ours, seed=number) == theirs and our_ppo == their_ppo
