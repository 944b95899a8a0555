"""docs/stability.md: we can read what 1.0.0 wrote, and the names that the page lists exist.

tests/v1/ was written by 1.0.0 and must not be regenerated: data, an SFT run, and a PPO run that was stopped by Ctrl-C
after its second update. The commands, in an empty directory, were

    python -m data.sums --out . --num-demonstrations 32 --num-queries 8 --num-comparisons 8 --num-validation 4
    python train_sft.py sums --data short --out sft --d-model 4 --n-layer 1 --num-epochs 1 --warmup-steps 0 \\
        --batch-size 16 --micro-batch-size 16
    python train_ppo.py sums --data long --sft sft --out ppo --total-episodes 24 --batch-size 8 \\
        --micro-batch-size 8 --num-minibatches 1 --trace 1

with full paths of the scripts. SFT's state, the caches and TensorBoard's events were deleted.
"""

import importlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import train_ppo
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.doctor.diagnosis import examine
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.trace import read_traces
from tests.conftest import read_metrics

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """Copy the files and change to the copy, because the paths in args.json are relative."""
    shutil.copytree(ROOT / "tests" / "v1", tmp_path / "v1")
    monkeypatch.chdir(tmp_path / "v1")
    return tmp_path / "v1"


def test_a_run_of_1_0_is_resumed_to_its_end(written) -> None:
    before = (written / "ppo" / "metrics.jsonl").read_text()
    settings = dict(
        data=Path("long"), sft="sft", out=Path("ppo"), total_episodes=24, batch_size=8, micro_batch_size=8,
        num_minibatches=1, trace=1, device="cpu", resume=True,
    )  # fmt: skip
    train_ppo.main(replace(train_ppo.RECIPES["sums"][1], **settings))
    after = (written / "ppo" / "metrics.jsonl").read_text()
    rows = read_metrics(written / "ppo")
    assert after.startswith(before) and [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0].keys() <= rows[2].keys(), "a metric of 1.0 isn't logged any more"
    assert (written / "ppo" / "summary.json").is_file()


def test_checkpoints_data_and_traces_of_1_0_are_read(written) -> None:
    tokenizer = load_tokenizer("sft")
    assert load_gpt("sft").config == load_gpt("ppo").config and load_scalar("ppo/value_model").config.d_model == 4
    assert len(load_demonstrations(written / "long" / "sft.train.jsonl", tokenizer, 16)) == 8
    assert len(load_comparisons(written / "long" / "comparisons.train.jsonl", tokenizer, 16, 40)) == 8
    traces = read_traces(written / "ppo")
    assert len(traces) == 2 and traces[0][0]["advantages"].shape == traces[0][0]["rewards"].shape
    assert all({"query", "response", "score", "kl"} <= json.loads(row).keys() for row in open("ppo/samples.jsonl"))
    examine([Path("ppo"), Path("sft")])  # the doctor reads metrics, settings, samples and traces


def test_the_names_of_the_page_are_there() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    rows = re.findall(r"^\| (`[^|]+`) \| (`[^|]+`) \|$", page, re.M)
    assert len(rows) == 8
    for modules, names in rows:
        for module in re.findall("`([^`]+)`", modules):
            for name in re.findall("`([^`]+)`", names):
                assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
