"""Unusable input to the scripts: one sentence that says where and what to do, and nothing written.

The flags are in test_cli.py, a run's directory in training/test_run.py, files in test_dataset.py, test_tokenizer.py and
test_checkpoint.py; here each `main` is called as a whole.
"""

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanorlhf.checkpoint
import train_ppo
import train_rm
import train_sft
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import train_tokenizer
from tests.conftest import ROOT, read_metrics

MAIN = {"sft": train_sft.main, "rm": train_rm.main, "ppo": train_ppo.main}
STAGES = list(MAIN)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(args, stage, sentence):
    """`main` raises the sentence and touches nothing of --out, be it absent or somebody's run."""
    with pytest.raises(InputError, match=sentence) as caught:
        MAIN[stage](args)
    assert not args.out.exists() and "\n" not in str(caught.value)
    old = {args.out / "metrics.jsonl": b"{}\n", args.out / "model.safetensors": b"weights"}
    args.out.mkdir(parents=True)
    for path, content in old.items():
        path.write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        MAIN[stage](replace(args, overwrite=True))
    assert contents(args.out) == old


# ---------------------------------------------------------------------------------------------------------------- data
@pytest.fixture
def data(miniature, tmp_path):
    return shutil.copytree(miniature.root / "data", tmp_path / "data")


def broken_line(path, change):
    """Change the third line of a file."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    lines[2] = change if isinstance(change, str) else json.dumps(change(record))
    path.write_text("\n".join(lines) + "\n")


ROWS = [
    ("{'query': 1}", "malformed JSON"),
    ("[]", "not a JSON object"),
    ("", "the line is blank"),
    (lambda r: {k: v for k, v in r.items() if k != "query"}, "the field 'query' is missing"),
    (lambda r: {**r, "query": 3}, "the field 'query' must be str"),
    (lambda r: {**r, "query": " "}, "the field 'query' is empty"),
    (lambda r: {**r, "query": "so sad " * 500}, "the field 'query' has .* tokens.*--max-query-length is"),
]


@pytest.mark.parametrize(("change", "reason"), ROWS, ids=[reason for _, reason in ROWS])
@pytest.mark.parametrize(
    ("stage", "file"),
    [("sft", "sft.train"), ("sft", "sft.validation"), ("rm", "comparisons.train"), ("rm", "comparisons.validation"),
     ("rm", "sft.train"), ("ppo", "sft.train")],
)  # fmt: skip
def test_a_broken_row_names_its_file_and_line(miniature, data, tmp_path, stage, file, change, reason):
    broken_line(data / f"{file}.jsonl", change)
    sentence = rf"{file}\.jsonl:3: .*{reason}"
    refused(replace(getattr(miniature, stage), data=data, out=tmp_path / "out"), stage, sentence)


@pytest.mark.parametrize(
    ("stage", "file", "change", "reason"),
    [
        ("sft", "sft.train", lambda r: {**r, "response": " \n"}, "the field 'response' is empty"),
        ("ppo", "sft.train", lambda r: {**r, "response": ""}, "the field 'response' is empty"),
        ("rm", "comparisons.train", lambda r: {**r, "rejected": ""}, "the field 'rejected' is empty"),
        ("rm", "comparisons.train", lambda r: {**r, "rejected": r["chosen"]}, "'chosen' and 'rejected' are the same"),
        ("rm", "comparisons.train", lambda r: {**r, "chosen": "x" * 999}, "'chosen' .*--max-response-length"),
        ("sft", "sft.train", lambda r: {**r, "response": "x" * 999}, "'response' .*--max-response-length"),
    ],
)
def test_a_response_that_teaches_nothing_names_its_file_and_line(
    miniature, data, tmp_path, stage, file, change, reason
):
    broken_line(data / f"{file}.jsonl", change)
    args = replace(getattr(miniature, stage), data=data, out=tmp_path / "out")
    refused(args, stage, rf"{file}\.jsonl:3: .*{reason}")


@pytest.mark.parametrize(
    ("stage", "file"), [("sft", "sft.validation"), ("rm", "comparisons.train"), ("ppo", "sft.train")]
)
def test_an_empty_or_missing_file_is_named(miniature, data, tmp_path, stage, file):
    args = replace(getattr(miniature, stage), data=data, out=tmp_path / "out")
    (data / f"{file}.jsonl").write_text("")
    refused(args, stage, rf"{file}\.jsonl is empty")
    shutil.rmtree(args.out)
    (data / f"{file}.jsonl").unlink()
    refused(args, stage, rf"{file}\.jsonl does not exist")


# --------------------------------------------------------------------------------------------- tokenizers, checkpoints
def changed_checkpoint(source, target, config=None, tensors=None):
    """A copy of a checkpoint with another config.json (a dict of changes) or other tensors (a function of them)."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("state", "*.jsonl", "events*", "summary.json"))
    if config:
        settings = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**settings, **config}))
    if tensors:
        weights = load_file(target / "model.safetensors")
        tensors(weights)
        save_file(weights, target / "model.safetensors")
    return target


def start_from(stage, args, checkpoint):
    return replace(args, **{"model" if stage == "sft" else "sft": str(checkpoint)})


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("config", "tensors", "sentence"),
    [
        ({"model_type": "bert"}, None, "model_type 'bert' isn't one of"),
        ({"num_hidden_layers": 2}, None, "has no tensor"),
        ({"hidden_size": 32}, None, "shape"),
        (None, lambda t: t.pop("embed_out.weight"), "has no tensor embed_out.weight"),
        (None, lambda t: t.update(extra=torch.zeros(2)), "holds extra"),
    ],
)
def test_a_checkpoint_of_another_shape_is_named(miniature, tmp_path, stage, config, tensors, sentence):
    checkpoint = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint", config, tensors)
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    refused(start_from(stage, args, checkpoint), stage, rf"{tmp_path / 'checkpoint'}.*{sentence}")


def test_a_reward_model_is_no_policy_and_a_policy_no_reward_model(miniature, tmp_path):
    sft, rm = str(miniature.root / "sft"), str(miniature.root / "rm")
    args = replace(miniature.ppo, out=tmp_path / "out")
    refused(replace(args, sft=rm), "ppo", f"{rm} holds a reward or value model")
    shutil.rmtree(args.out)
    refused(replace(args, reward_model=sft), "ppo", f"{sft} holds a language model, not a reward model")


def test_a_head_bias_or_normalisation_that_is_missing_is_not_dropped_silently(miniature, tmp_path):
    for name in ("score.bias", "reward_bias"):
        rm = changed_checkpoint(miniature.root / "rm", tmp_path / name, tensors=lambda t, name=name: t.pop(name))
        args = replace(miniature.ppo, reward_model=str(rm), out=tmp_path / f"out of {name}")
        refused(args, "ppo", f"has no tensor {name}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_tokenizer_whose_pad_is_eos_is_refused(miniature, tmp_path, stage):
    """Masks are made of ids != pad_id: they would hide every EOS."""
    directory = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    args = replace(getattr(miniature, stage), out=tmp_path / "out", tokenizer=str(directory))
    refused(args, stage, "tokenizer_config.json: pad_token is eos_token")


@pytest.mark.parametrize("stage", STAGES)
def test_a_vocabulary_larger_than_the_embedding_is_refused(miniature, tmp_path, stage):
    texts = [json.loads(line)["query"] for line in (miniature.root / "data/sft.train.jsonl").open()]
    train_tokenizer(texts, 400).save(tmp_path / "larger")
    args = replace(getattr(miniature, stage), out=tmp_path / "out", tokenizer=str(tmp_path / "larger"))
    refused(
        start_from(stage, args, miniature.root / "sft"), stage, r"the tokenizer has \d+ ids but the embedding of .* 320"
    )


def test_a_reward_model_with_another_tokenizer_is_refused(miniature, tmp_path):
    rm = changed_checkpoint(miniature.root / "rm", tmp_path / "rm")
    train_tokenizer(["quite another text"] * 9, 320).save(rm)
    refused(
        replace(miniature.ppo, reward_model=str(rm), out=tmp_path / "out"),
        "ppo",
        "--reward-model .*: its tokenizer differs",
    )


# --------------------------------------------------------------------------------------------------------- batch sizes
@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_the_processes_cannot_share_is_refused(miniature, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    sentence = "--batch-size 8 can't be (shared by 3 processes|cut into --num-minibatches 1 for 3 process)"
    refused(replace(getattr(miniature, stage), out=tmp_path / "out"), stage, sentence)


# -------------------------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("[float('nan')] + [0.0] * (len(r) - 1)", "--reward .*:score gave a score that is not finite at update 0"),
        ("[float('inf')] * len(r)", "--reward .*:score gave a score that is not finite at update 0"),
        ("[1.0]", r"--reward .*:score gave shape \(1,\) for 8 responses"),
        ("['good'] * len(r)", "--reward .*:score must give one number per response, not"),
        ("None", "--reward .*:score must give one number per response, not None"),
    ],
)
def test_a_rule_that_gives_no_finite_numbers_is_named(miniature, tmp_path, rule, sentence):
    path = tmp_path / "rule.py"
    path.write_text(f"def score(q, r): return {rule}\n")
    with pytest.raises(InputError, match=sentence):
        train_ppo.main(replace(miniature.ppo, reward=f"{path}:score", out=tmp_path / "out"))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_reward_that_stops_being_finite_leaves_the_checkpoint_of_the_update_before(miniature, tmp_path):
    path = tmp_path / "rule.py"
    path.write_text("n = 0\ndef score(q, r):\n    global n\n    n += 1\n    return [1e39 if n > 2 else 1.0] * len(r)\n")
    args = replace(miniature.ppo, reward=f"{path}:score", out=tmp_path / "out", save_every=1, missing_eos_score=None)
    with pytest.raises(InputError, match="not finite at update 2: .* keeps the last checkpoint"):
        train_ppo.main(args)
    assert all(p.isfinite().all() for p in load_gpt(args.out).parameters())
    assert [row["step"] for row in read_metrics(args.out)] == [0, 1]


def test_a_reward_model_that_gives_nan_is_named(miniature, tmp_path):
    def poison(tensors):
        tensors["score.bias"] += float("nan")

    rm = changed_checkpoint(miniature.root / "rm", tmp_path / "rm", tensors=poison)
    with pytest.raises(InputError, match=f"--reward-model {rm} gave a score that is not finite at update 0"):
        train_ppo.main(replace(miniature.ppo, reward_model=str(rm), out=tmp_path / "out"))


# ----------------------------------------------------------------------------------- losses and weights that run away
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_a_step_makes_nan_never_replace_the_last_good_checkpoint(miniature, tmp_path, monkeypatch, stage):
    """The loss is finite, the gradient isn't: the next loss would tell, but a checkpoint may come first."""
    args = replace(getattr(miniature, stage), out=tmp_path / "out", save_every=1)
    plain, calls = torch.optim.AdamW.step, []

    def step(self, *arguments):
        calls.append(1)
        plain(self, *arguments)
        if len(calls) == (4 if stage == "ppo" else 3):  # the last of its update: nothing else would notice
            self.param_groups[0]["params"][0].data[0] = float("nan")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(InputError, match="after step [12] the weights .* are not finite: lower --lr"):
        MAIN[stage](args)
    load = load_scalar if stage == "rm" else load_gpt
    assert all(p.isfinite().all() for p in load(args.out).parameters())
    monkeypatch.setattr(torch.optim.AdamW, "step", plain)
    MAIN[stage](replace(args, resume=True))
    assert (args.out / "summary.json").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_a_learning_rate_that_is_far_too_high_ends_in_one_sentence(miniature, tmp_path, stage):
    """Whatever breaks first, logits, losses or weights: never a traceback, never a finished run."""
    args = replace(getattr(miniature, stage), out=tmp_path / "out", lr=1e36, schedule="constant")
    with pytest.raises(InputError, match="not finite|is (nan|inf) (at|after) (step|update)"):
        MAIN[stage](args)
    assert not (args.out / "summary.json").exists()


def test_a_model_that_gives_no_finite_logits_cannot_be_sampled(miniature, tmp_path):
    def poison(tensors):
        tensors["embed_out.weight"][5] = float("nan")

    sft = changed_checkpoint(miniature.root / "sft", tmp_path / "sft", tensors=poison)
    with pytest.raises(InputError, match="logits are not finite"):
        train_ppo.main(replace(miniature.ppo, sft=str(sft), out=tmp_path / "out"))


# ------------------------------------------------------------------------------------------------------------ the disk
@pytest.mark.parametrize("stage", STAGES)
def test_a_full_disk_leaves_the_last_good_checkpoint_and_the_run_can_resume(miniature, tmp_path, monkeypatch, stage):
    args = replace(getattr(miniature, stage), out=tmp_path / "out", save_every=1)
    plain, calls = nanorlhf.checkpoint.save_file, []

    def full(tensors, path, **settings):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        plain(tensors, path, **settings)

    monkeypatch.setattr(nanorlhf.checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        MAIN[stage](args)
    (load_scalar if stage == "rm" else load_gpt)(args.out)
    assert not list(args.out.rglob("*.tmp")) and not (args.out / "summary.json").exists()
    MAIN[stage](replace(args, resume=True))
    assert (args.out / "summary.json").exists()


def test_a_file_that_cannot_grow_ends_the_process_with_one_sentence_and_code_2(miniature, tmp_path):
    names = ("n_layer", "n_head", "d_model", "batch_size", "max_query_length", "max_response_length")
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(miniature.sft, name)))]
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "train_sft.py", "--data", str(miniature.root / "data"), "--out", str(out), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )  # fmt: skip
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert re.search(rf"^error: the disk is full .* at {out}\S*: free some space", result.stderr, re.MULTILINE)
    assert not (out / "model.safetensors").exists() and not (out / "summary.json").exists()
