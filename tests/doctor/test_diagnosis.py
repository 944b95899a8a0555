"""Tests of `doctor run`: the files that it reads, bad input, and the findings that training prints at its end."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_ppo
from nanorlhf.doctor.__main__ import Args, Run, main
from nanorlhf.doctor.diagnosis import examine, repeated_order, unchecked
from nanorlhf.errors import InputError
from nanorlhf.training.trace import PER_ROW, read_trace, save_trace
from tests.rules.healthy import PPO_SETTINGS, RM_SETTINGS, ppo_rows, rm_rows, write_run


def names(*runs: Path) -> list[str]:
    return [finding.name for finding in examine(runs)]


# ----------------------------------------------------------------------------------------------------- 1. a run's files
def test_healthy_files_have_no_findings(tmp_path):
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, ppo_rows(), {"seconds": 1.0})
    assert names(run) == []


def test_a_running_run_is_examined_without_its_unfinished_row(tmp_path):
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, [row | {"policy/first_ratio_error": 0.5} for row in ppo_rows()])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "objec')
    assert names(run) == ["first-ratio"]


def test_with_several_runs_each_finding_names_its_run(tmp_path):
    sick = [row | {"policy/first_ratio_error": 0.5} for row in ppo_rows()]
    runs = [write_run(tmp_path / "a", PPO_SETTINGS, ppo_rows()), write_run(tmp_path / "b", PPO_SETTINGS, sick)]
    (finding,) = examine(runs)
    assert finding.seen.startswith(f"{tmp_path / 'b'}: Before any step")


@pytest.mark.parametrize(
    "file, text, sentence",
    [
        ("metrics.jsonl", "", "metrics.jsonl has no complete row"),
        ("metrics.jsonl", '{"step": 0, "lr": "high"}\n', "metrics.jsonl:1: the field 'lr' must be a number"),
        ("metrics.jsonl", '{"step"\n{"step": 1}\n', "metrics.jsonl:1: malformed JSON"),
        ("args.json", "[]", "args.json: expected a JSON object"),
        ("args.json", '{"batch_size": "many"}', "args.json: the field 'batch_size' must be a number, not 'many'"),
        ("summary.json", "{", "summary.json:1: malformed JSON"),
        ("tokenizer.json", "{}", "tokenizer.json"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, file, text, sentence):
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, ppo_rows())
    (run / file).write_text(text)
    with pytest.raises(InputError, match=sentence) as refused:
        examine([run])
    assert str(run) in str(refused.value) and "\n" not in str(refused.value)


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(InputError, match="args.json does not exist"):
        examine([tmp_path])


@pytest.mark.parametrize("error, status", [(2e-6, 0), (0.5, 1)])
def test_the_exit_status_depends_on_the_findings(tmp_path, capsys, error, status):
    rows = [row | {"policy/first_ratio_error": error} for row in ppo_rows()]
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, rows)
    with pytest.raises(SystemExit) as stopped:
        main(Args(command=Run(directories=(run,))))
    assert stopped.value.code == status
    assert capsys.readouterr().out.startswith("first-ratio: " if status else "no findings")


def test_the_command_needs_a_run():
    with pytest.raises(InputError, match="missing the directory of a run"):
        main(Args(command=Run(directories=())))


# ------------------------------------------------------------------------------------------- 2. the reward model's run
SHIFTED = {"reward_mean_before_normalisation": -1.8, "reward_std": 1.5}


def shifted_rows(score: float) -> list[dict]:
    """Return the healthy run with all scores shifted so that the first is `score`."""
    shift = score - ppo_rows()[0]["objective/score"]
    names = ("objective/score", "objective/rlhf_reward")
    return [row | {name: row[name] + shift for name in names} for row in ppo_rows()]


def test_a_lost_normalisation_is_found_by_the_reward_models_summary(tmp_path):
    rm = write_run(tmp_path / "rm", RM_SETTINGS, rm_rows(), SHIFTED)
    ppo = PPO_SETTINGS | {"reward_model": str(rm)}
    assert names(write_run(tmp_path / "healthy", ppo, shifted_rows(0.3))) == []
    assert names(write_run(tmp_path / "lost", ppo, shifted_rows(0.3 - 1.8))) == ["start-score"]
    assert names(write_run(tmp_path / "far", ppo, shifted_rows(7.0))) == ["start-score"]


def test_the_reward_model_is_also_searched_next_to_the_run_and_among_the_runs(tmp_path):
    rm = write_run(tmp_path / "family" / "rm", RM_SETTINGS, rm_rows(), SHIFTED)
    settings = PPO_SETTINGS | {"reward_model": "runs/elsewhere/rm"}
    assert names(write_run(tmp_path / "family" / "ppo", settings, shifted_rows(-1.5))) == ["start-score"]
    away = write_run(tmp_path / "away" / "ppo", settings, shifted_rows(-1.5))
    assert names(away) == [] and names(away, rm) == ["start-score"]


def test_a_reward_model_without_normalisation_implies_no_start_score(tmp_path):
    rm = write_run(tmp_path / "rm", RM_SETTINGS | {"num_normalisation": 0}, rm_rows(), SHIFTED)
    assert names(write_run(tmp_path / "ppo", PPO_SETTINGS | {"reward_model": str(rm)}, shifted_rows(-1.5))) == []


# ----------------------------------------------------------------------------------------- 3. samples, traces, training
@pytest.fixture(scope="module")
def traced_run(miniature, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("traced") / "ppo"
    train_ppo.main(replace(miniature.ppo, out=out, trace=4))
    return out


def test_a_traced_run_is_healthy_except_for_its_eos_rate(traced_run):
    assert names(traced_run) in ([], ["eos-rate"])


def test_a_missing_trace_is_reported(traced_run, tmp_path, capsys):
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, ppo_rows())
    sft = write_run(tmp_path / "rm", RM_SETTINGS, rm_rows())  # no rollouts
    assert unchecked([traced_run, sft]) == []
    with pytest.raises(SystemExit):
        main(Args(command=Run(directories=(run,))))
    expected = f"not checked: {run}: masks, rewards, returns and advantages of responses, because there is no trace"
    assert capsys.readouterr().out.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize("n, T", [(0, 5), (4, 0)])
def test_an_empty_trace_is_reported(traced_run, tmp_path, n, T):
    tensors, about = read_trace(sorted((traced_run / "trace").iterdir())[0])
    for name, x in tensors.items():
        shape = list(x[:, :n].shape if name.startswith("new_") else x[:n].shape)
        if name not in (*PER_ROW, "query"):
            shape[-1] = T
        tensors[name] = x.new_zeros(shape)
    about |= {name: about[name][:n] for name in ("queries", "texts")}
    about["answers"] = about["answers"][: len(tensors["fixed_logprobs"])]
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, ppo_rows())
    save_trace(run / "trace/update-00000000.safetensors", tensors, about)
    assert names(run) == []
    assert unchecked([run])[0].endswith("because the trace is empty")


# ---------------------------------------------------------------------------------------------------- its saved states
@pytest.fixture(scope="module")
def saved_run(miniature, tmp_path_factory) -> Path:
    """Return a finished run of three updates with two steps each, and its last two states."""
    out = tmp_path_factory.mktemp("saved") / "ppo"
    train_ppo.main(replace(miniature.ppo, out=out, save_every=1, num_ppo_epochs=2, tune="lora", lr=0.01))
    return out


@pytest.fixture
def trained(saved_run, tmp_path) -> Path:
    """Return a copy of the saved run, to be changed."""
    return shutil.copytree(saved_run, tmp_path / "ppo")


def changed_state(run: Path, change: Callable[[dict], None]) -> list[str]:
    """Return the findings of the run with its last state changed."""
    path = sorted((run / "state").glob("step-*"))[-1] / "state.pt"
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    return [name for name in names(run) if name != "eos-rate"]


def reset_step_counts(state: dict) -> None:
    for moments in state["steps"]["optimizer"]["state"].values():
        moments["step"] = torch.tensor(2.0)


def double_updates(state: dict) -> None:
    for name, tensor in state["policy"].items():
        if ".ups." in name:
            tensor *= 2


def test_states_of_a_healthy_run_have_no_findings(trained):
    assert changed_state(trained, lambda state: None) == []


@pytest.mark.parametrize("name, change", [("optimizer", reset_step_counts), ("checkpoint", double_updates)])
def test_a_state_that_does_not_fit_the_run_is_found(name, change, trained):
    assert changed_state(trained, change) == [name]


def test_a_generator_that_is_reseeded_in_each_update_is_found(trained):
    first, last = (path / "state.pt" for path in sorted((trained / "state").glob("step-*")))
    seeded = torch.load(first, weights_only=False)["generator"]
    assert changed_state(trained, lambda state: state.update(generator=seeded)) == ["random-numbers"]


def test_updates_with_the_same_queries_at_the_same_positions_are_found():
    orders = {0: {row: f"query {row}" for row in range(32)}, 7: {row: f"query {row + 1}" for row in range(8)}}
    assert repeated_order(orders) is None
    finding = repeated_order(orders | {9: {row: f"query {row}" for row in (3, 4, 5, 9)}})
    assert finding is not None and finding.seen.startswith("Updates 0 and 9 have the same queries")


def test_samples_longer_than_the_logged_length_are_found(traced_run, tmp_path):
    rows = [row | {"response_length": 3.0, "objective/entropy": 3 * row["policy/entropy"]} for row in ppo_rows()]
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, rows)
    (run / "tokenizer.json").write_bytes((traced_run / "tokenizer.json").read_bytes())
    for text, expected in ((" a", []), (" then they cut the cable and sold the car", ["text-after-eos"])):
        (run / "samples.jsonl").write_text(20 * (json.dumps({"step": 0, "response": text}) + "\n"))
        assert names(run) == expected


@pytest.mark.parametrize("text, metrics", [(" then they cut the cable and sold the car", {"compile_rate": 0.1}),
                                           (" then they cut\ufffd the cable and sold the car", {})])  # fmt: skip
def test_truncated_programs_and_invalid_utf8_are_not_measured(text, metrics, traced_run, tmp_path):
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, [row | {"response_length": 3.0} | metrics for row in ppo_rows()])
    (run / "tokenizer.json").write_bytes((traced_run / "tokenizer.json").read_bytes())
    (run / "samples.jsonl").write_text(20 * (json.dumps({"step": 0, "response": text}) + "\n"))
    assert "text-after-eos" not in names(run)


def test_a_damaged_trace_is_an_error(traced_run, tmp_path):
    run = write_run(tmp_path / "ppo", PPO_SETTINGS, ppo_rows())
    (run / "trace").mkdir()
    path = sorted((traced_run / "trace").iterdir())[0]
    (run / "trace" / path.name).write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        examine([run])


def test_training_prints_the_findings_of_its_metrics_at_the_end(miniature, tmp_path, capsys):
    """A learning rate of 0 is not a finding, but one of 1e-12 is, because the policy doesn't move."""
    train_ppo.main(replace(miniature.ppo, out=tmp_path / "still", lr=0.0, total_episodes=16))
    assert "policy-rests" not in capsys.readouterr().out
    train_ppo.main(replace(miniature.ppo, out=tmp_path / "rests", lr=1e-12, total_episodes=16))
    assert "\npolicy-rests: The policy does not move" in capsys.readouterr().out
    assert (tmp_path / "rests" / "summary.json").exists()


def test_a_doctor_that_fails_does_not_end_the_run(miniature, tmp_path, capsys, monkeypatch):
    def broken(record):
        raise ZeroDivisionError("raised by the test")

    monkeypatch.setattr("nanorlhf.rules.metric_rules.examine_metrics", broken)
    assert train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=8))
    assert "the doctor can't read" in capsys.readouterr().out
