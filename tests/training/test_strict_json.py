"""A run writes NaN and infinity as null in its JSON, and every reader accepts null."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_grpo
import train_ppo
import train_rlcf
from nanorlhf.dataset import write_jsonl
from nanorlhf.doctor.diagnosis import examine
from nanorlhf.files import to_json
from nanorlhf.report.run_curves import curves
from nanorlhf.rlcf import train_baselines
from nanorlhf.training.run import Run, write_json
from nanorlhf.training.run_directory import read_metrics
from nanorlhf.training.trace import read_trace, read_traces, save_trace
from nanorlhf.training.update_metrics import deviation
from tests.test_train_grpo import KINDS, grpo_args
from tests.training.test_resume import ResumableArgs


def strict(text: str):
    """Parse standard JSON; Python's parser would also accept NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} isn't valid JSON"))


def strict_files(directory: Path) -> dict[str, list]:
    files = [path for path in directory.rglob("*") if path.suffix in (".json", ".jsonl")]
    return {
        path.name: [strict(line) for line in path.read_text().splitlines()]
        if path.suffix == ".jsonl"
        else [strict(path.read_text())]
        for path in files
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "null"),
        ([1.5, -math.inf, (math.inf, 2)], "[1.5, null, [null, 2]]"),
        ({"a": {"b": np.float64("nan")}, "c": True, "d": None}, '{"a": {"b": null}, "c": true, "d": null}'),
        ({"a": "NaN", "b": 1e308}, '{"a": "NaN", "b": 1e+308}'),
    ],
)
def test_a_number_that_is_not_finite_becomes_null_at_any_depth(value, text):
    assert to_json(value) == text


def test_what_is_no_json_is_an_error_unless_the_caller_says_otherwise():
    with pytest.raises(TypeError):
        to_json({"a": torch.zeros(1)})
    assert to_json({"a": Path("b")}, default=str) == '{"a": "b"}'


def test_the_deviation_of_a_single_value_is_unknown():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(deviation(torch.ones(1)))
    assert deviation(torch.tensor([1.0, 3.0])) == pytest.approx(2**0.5)


def test_a_run_that_diverges_writes_json_and_goes_on_from_it(tmp_path):
    args = ResumableArgs(tmp_path / "run")
    run = Run(args, "test", lambda directory: None)
    run.log(0, {"loss": math.nan, "objective/kl": 1.0})
    run.log_samples(0, [{"response": "r", "score": math.inf}])
    run.save(1)
    run.log(1, {"loss": -math.inf, "objective/kl": 2.0})
    resumed = Run(replace(args, resume=True), "test", lambda directory: None)
    resumed.log(1, {"loss": math.nan})
    resumed.finish({"loss": math.nan, "steps": 2})
    files = strict_files(args.out)
    assert files["metrics.jsonl"] == [{"step": 0, "loss": None, "objective/kl": 1.0}, {"step": 1, "loss": None}]
    assert files["samples.jsonl"] == [{"step": 0, "response": "r", "score": None}]
    assert files["summary.json"][0]["loss"] is None
    rows = read_metrics(args.out)
    assert [math.isnan(row["loss"]) for row in rows] == [True, True] and rows[0]["objective/kl"] == 1.0
    (args.out / "metrics.jsonl").write_text('{"step": 0, "loss": NaN}\n')  # as version 1.0 wrote it
    assert math.isnan(read_metrics(args.out)[0]["loss"])


def test_the_doctor_still_sees_a_loss_that_is_not_finite(tmp_path, capsys):
    run = Run(ResumableArgs(tmp_path / "run"), "test", lambda directory: None)
    run.log(0, {"loss": math.inf})
    run.finish({"loss": math.inf})
    assert "loss is not finite at step 0" in capsys.readouterr().out


def test_files_of_rows_and_of_an_evaluation_are_json(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"meta": {"score": math.nan}}])
    write_json(tmp_path / "eval.json", {"policies": {"ppo": {"kl_standard_error": math.nan}}})
    assert strict_files(tmp_path) == {
        "rows.jsonl": [{"meta": {"score": None}}],
        "eval.json": [{"policies": {"ppo": {"kl_standard_error": None}}}],
    }


ONE_RESPONSE = {"batch_size": 1, "micro_batch_size": 1, "num_minibatches": 1}
RUNS = {
    "ppo": (train_ppo, lambda ppo: replace(ppo, **ONE_RESPONSE, total_episodes=2, trace=1)),
    "grpo": (
        train_grpo,
        lambda ppo: replace(grpo_args(ppo, **KINDS["reinforce++"]), **ONE_RESPONSE, total_episodes=2, trace=1),
    ),
    "rlcf": (train_rlcf, lambda ppo: replace(ppo, **ONE_RESPONSE, total_episodes=2)),
    "baseline": (train_baselines, lambda args: replace(args, batch_size=1, micro_batch_size=1, total_episodes=2)),
}


@pytest.mark.parametrize("name", RUNS)
def test_rollouts_of_one_response_write_json_without_a_warning(request, tmp_path, name):
    script, settings = RUNS[name]
    if name in ("ppo", "grpo"):
        args = settings(request.getfixturevalue("miniature").ppo)
    else:
        rlcf = request.getfixturevalue("rlcf")
        args = settings(rlcf.ppo if name == "rlcf" else rlcf.baseline)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"std\(\)|var\(\)")
        script.main(replace(args, out=tmp_path / name))
    files = strict_files(tmp_path / name)
    assert [row["objective/score_std"] for row in files["metrics.jsonl"]] == [None, None]
    assert math.isnan(read_metrics(tmp_path / name)[0]["objective/score_std"])
    rest = [value for row in files["metrics.jsonl"] for key, value in row.items() if key != "objective/score_std"]
    assert None not in rest and files["summary.json"]
    examine([tmp_path / name])
    curves(str(tmp_path / name))
    if name in ("ppo", "grpo"):
        (path, *_) = sorted((tmp_path / name / "trace").iterdir())
        tensors, about = read_trace(path)
        save_trace(path, tensors, about | {"kl_coef": math.inf})
        assert math.isnan(read_traces(tmp_path / name)[0][1]["kl_coef"])
