"""The choice of a run's kernels: it is recorded, kept by --resume and shared by ranks."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_sft
from kernels import processor, tune
from kernels.processor import DEFAULT, PLAIN
from nanorlhf import distributed, launch
from nanorlhf.checkpoint import load_gpt
from nanorlhf.errors import InputError
from nanorlhf.training.run import begin
from nanorlhf.training.sampler import Sampler
from nanorlhf.training.settings import RunArgs, SamplerSettings
from tests.conftest import interrupt_at, read_metrics
from tests.two_processes import on_processes

TUNED = replace(
    DEFAULT,
    name="tuned",
    onednn=("forward 512+ small", "weight 512+ small"),
    block=1000,
    bfloat16=1.62,
    rollouts={"bfloat16 small": 3.42, "int8 small": 1.05},
)


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """Restore the choice after each test; a measurement returns TUNED."""
    monkeypatch.setattr(processor, "chosen", DEFAULT)
    monkeypatch.setattr(tune, "tuned", lambda threads: TUNED)


def settings(out: Path, **changed) -> RunArgs:
    return RunArgs(data=out, out=out / "run", device="cpu", batch_size=1, micro_batch_size=1, **changed)


@pytest.mark.parametrize(("name", "choice"), [("tuned", TUNED), ("default", DEFAULT), ("plain", PLAIN), (None, TUNED)])
def test_the_environment_chooses(monkeypatch, name, choice):
    if name is None:
        monkeypatch.delenv(launch.KERNELS_VARIABLE)
    else:
        monkeypatch.setenv(launch.KERNELS_VARIABLE, name)
    launch.setup("cpu")
    assert processor.chosen == choice


def test_another_word_is_refused(monkeypatch):
    monkeypatch.setenv(launch.KERNELS_VARIABLE, "fast")
    with pytest.raises(InputError, match="NANORLHF_KERNELS=fast: must be tuned, default or plain"):
        launch.setup("cpu")


def test_a_resumed_run_that_was_started_otherwise_is_refused(monkeypatch, tmp_path):
    (tmp_path / "kernels.json").write_text(json.dumps(TUNED.__dict__))
    monkeypatch.setenv(launch.KERNELS_VARIABLE, "plain")
    with pytest.raises(InputError, match=r"NANORLHF_KERNELS=plain: the run was started with tuned \(.*kernels.json\)"):
        launch.setup("cpu", tmp_path / "kernels.json")
    (tmp_path / "kernels.json").write_text("{}")
    with pytest.raises(InputError, match="kernels.json has no choice of kernels .*: delete it"):
        launch.setup("cpu", tmp_path / "kernels.json")
    launch.setup("cpu", tmp_path / "nothing.json")  # as for an older run
    assert processor.chosen == PLAIN


def disagree(_: object) -> None:
    """Choose different kernels on each rank."""
    os.environ[launch.KERNELS_VARIABLE] = ("plain", "default")[distributed.rank()]
    launch.setup("cpu")
    assert processor.chosen == PLAIN


@pytest.mark.slow
def test_all_ranks_take_the_firsts_choice(tmp_path):
    on_processes(disagree, None, tmp_path)


@pytest.mark.parametrize("choice", [TUNED, PLAIN])
def test_a_resumed_run_keeps_its_choice_and_ends_in_the_same_bits(miniature, tmp_path, monkeypatch, choice):
    monkeypatch.setenv(launch.KERNELS_VARIABLE, choice.name)
    args = replace(miniature.sft, save_every=2, num_samples=1, out=tmp_path / "whole")
    train_sft.main(args)
    broken = replace(args, out=tmp_path / "broken")
    with monkeypatch.context() as patch:
        interrupt_at(4, patch, train_sft, "demonstration_loss")
        with pytest.raises(KeyboardInterrupt):
            train_sft.main(broken)
    monkeypatch.delenv(launch.KERNELS_VARIABLE)
    monkeypatch.setattr(tune, "tuned", lambda threads: DEFAULT)  # as if the machine were measured again
    train_sft.main(replace(broken, resume=True))
    for out in (args.out, broken.out):
        assert json.loads((out / "kernels.json").read_text()) == json.loads(json.dumps(choice.__dict__))
    for one, other in zip(load_gpt(args.out).parameters(), load_gpt(broken.out).parameters(), strict=True):
        assert torch.equal(one, other)
    assert read_metrics(args.out) == read_metrics(broken.out)


@pytest.mark.parametrize(
    ("dtype", "line"),
    [
        (
            "bfloat16",
            "--sampler.dtype bfloat16: on this processor the matmuls of a decode step take 3.4 times as long as in "
            "float32 (measured)\n",
        ),
        ("int8", ""),  # not clearly slower
        ("same", ""),
    ],
)
def test_a_slower_sampler_says_what_it_costs_and_goes_on(miniature, tiny_gpt, monkeypatch, capsys, dtype, line):
    args = replace(miniature.ppo, sampler=SamplerSettings(dtype=dtype))
    for choice, said in ((TUNED, line), (DEFAULT, "")):  # DEFAULT has no measurements
        monkeypatch.setattr(processor, "chosen", choice)
        Sampler(tiny_gpt, None, args, "after_eos")  # no tokenizer: nothing is encoded yet
        assert capsys.readouterr().out == said


def test_training_in_a_slower_dtype_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(launch.KERNELS_VARIABLE, "tuned")
    begin(settings(tmp_path, dtype="bfloat16"))
    line = "--dtype bfloat16: on this processor a matmul takes 1.6 times as long as in float32 (measured)\n"
    assert capsys.readouterr().out == line
    begin(settings(tmp_path))
    monkeypatch.setenv(launch.KERNELS_VARIABLE, "default")
    begin(settings(tmp_path, dtype="bfloat16"))
    assert capsys.readouterr().out == ""
