"""Bad input to the scripts: one sentence with the place and the fix, and nothing is written.

Flags are tested in test_cli.py, run directories in training/test_run.py, files in test_dataset.py, test_tokenizer.py
and test_checkpoint.py; here each test calls a whole `main`.
"""

import errno
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import time
import zipfile
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import nanorlhf.checkpoint
import train_ppo
import train_rm
import train_sft
from data import codenet, dialogue, prepare, programs, stackoverflow, sums, tiny, town
from nanorlhf import distributed, files
from nanorlhf.checkpoint import is_reward_model, load_gpt, load_scalar
from nanorlhf.dataset import field, iter_jsonl, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.evals import summaries
from nanorlhf.evals.settings import EvalArgs
from nanorlhf.evals.writing import write_evaluation
from nanorlhf.model import ScalarModel
from nanorlhf.pretrained.weight_files import load_pickle, read_tensors
from nanorlhf.report import compare_runs
from nanorlhf.report.page import Section, write_page
from nanorlhf.report.run_curves import run_sections
from nanorlhf.rewards import endpoint
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from nanorlhf.training.run_directory import read_metrics as metrics_of
from tests.conftest import read_metrics, run_program
from tools import fuzz

MAIN = {"sft": train_sft.main, "rm": train_rm.main, "ppo": train_ppo.main}
STAGES = list(MAIN)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(args, stage, sentence):
    """Check that `main` raises the sentence and doesn't touch --out, whether it is missing or has a run."""
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
    lines[2] = json.dumps(change(json.loads(lines[2])))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("stage", "file"),
    [("sft", "sft.train"), ("sft", "sft.validation"), ("rm", "comparisons.train"), ("rm", "comparisons.validation"),
     ("rm", "sft.train"), ("ppo", "sft.train")],
)  # fmt: skip
def test_a_broken_row_names_its_file_and_line(miniature, data, tmp_path, stage, file):
    """All kinds of broken rows are tested in test_dataset.py."""
    broken_line(data / f"{file}.jsonl", lambda row: {**row, "query": "so sad " * 500})
    sentence = rf"{file}\.jsonl:3: the field 'query' has .* tokens.*--max-query-length is"
    refused(replace(getattr(miniature, stage), data=data, out=tmp_path / "out"), stage, sentence)


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


# -------------------------------------------------------------------------------------------------------------- --out
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, which takes no directory even from root")
@pytest.mark.parametrize("stage", STAGES)
def test_a_directory_that_cannot_be_made_is_refused_before_anything_is_read(miniature, tmp_path, stage):
    (tmp_path / "file").write_text("mine")
    for out, parent in (("/proc/x", "/proc"), ("/proc/x/y/z", "/proc"), (tmp_path / "file/x", tmp_path / "file")):
        args = replace(getattr(miniature, stage), data=tmp_path / "no data", out=Path(out))
        with pytest.raises(InputError, match=f"^--out {out}: {parent} is not a writable directory [(].*[)]"):
            MAIN[stage](args)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc, which takes no directory even from root")
@pytest.mark.parametrize(
    "convert",
    [
        lambda out: tiny.main(tiny.Args(out=out)),
        lambda out: sums.main(sums.Args(out=out)),
        lambda out: town.main(town.Args(out=out)),
        lambda out: programs.main(programs.Args(out=out)),
        lambda out: prepare.has_rows(out / "rankings.jsonl"),
        lambda out: prepare.jsonl_files(out).__enter__(),
    ],
    ids=["tiny", "sums", "town", "programs", "rankings", "all others"],
)
def test_a_converter_refuses_a_directory_that_cannot_be_made(convert):
    with pytest.raises(InputError, match="^--out /proc/x: /proc is not a writable directory"):
        convert(Path("/proc/x"))


# --------------------------------------------------------------------------------------------- tokenizers, checkpoints
def changed_checkpoint(source, target, config=None, tensors=None):
    """Copy a checkpoint with changes to config.json (a dict) or to the tensors (a function)."""
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
def test_a_checkpoint_of_another_shape_is_named(miniature, tmp_path, stage):
    """Other broken checkpoints are tested in test_checkpoint.py."""
    checkpoint = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint", {"num_hidden_layers": 2})
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    refused(start_from(stage, args, checkpoint), stage, f"{checkpoint}.*has no tensor")


def test_a_missing_reward_model_is_reported_with_a_fix(miniature, tmp_path):
    sentence = "--reward-model no/such/model/here: no such file .*: train one with train_rm.py, or pass --reward"
    refused(replace(miniature.ppo, reward_model="no/such/model/here", out=tmp_path / "out"), "ppo", sentence)


def test_policies_and_reward_models_are_not_interchangeable(miniature, tmp_path):
    sft, rm = str(miniature.root / "sft"), str(miniature.root / "rm")
    args = replace(miniature.ppo, out=tmp_path / "out")
    refused(replace(args, sft=rm), "ppo", f"{rm} is a reward or value model")
    shutil.rmtree(args.out)
    refused(replace(args, reward_model=sft), "ppo", f"{sft} is a language model, not a reward model")


def test_a_missing_head_bias_or_normalisation_is_an_error(miniature, tmp_path):
    for name in ("score.bias", "reward_bias"):
        rm = changed_checkpoint(miniature.root / "rm", tmp_path / name, tensors=lambda t, name=name: t.pop(name))
        args = replace(miniature.ppo, reward_model=str(rm), out=tmp_path / f"out of {name}")
        refused(args, "ppo", f"has no tensor {name}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_vocabulary_larger_than_the_embedding_is_refused(miniature, tmp_path, stage):
    texts = [json.loads(line)["query"] for line in (miniature.root / "data/sft.train.jsonl").open()]
    directory = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint")
    train_tokenizer(texts, 400).save(directory)
    args = start_from(stage, replace(getattr(miniature, stage), out=tmp_path / "out"), directory)
    refused(args, stage, r"the tokenizer has \d+ ids, but the embedding of .* 320")


def test_a_reward_model_with_another_tokenizer_is_refused(miniature, tmp_path):
    rm = changed_checkpoint(miniature.root / "rm", tmp_path / "rm")
    train_tokenizer(["quite another text"] * 9, 320).save(rm)
    refused(
        replace(miniature.ppo, reward_model=str(rm), out=tmp_path / "out"),
        "ppo",
        "--reward-model .*: its tokenizer differs from",
    )


# --------------------------------------------------------------------------------------------------------- batch sizes
@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_that_the_processes_cannot_share_is_refused(miniature, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    sentence = "--batch-size 8 (can't be divided among 3 processes|must be a multiple of 3: --num-minibatches 1)"
    refused(replace(getattr(miniature, stage), out=tmp_path / "out"), stage, sentence)


# -------------------------------------------------------------------------------------------------------------- scores
@pytest.mark.parametrize(
    ("gold", "sentence"),
    [
        ("def score(query): return 1", ": FILE raises TypeError: score[(][)] takes 1 positional argument"),
        ("def score(query, response): raise SystemExit(3)", ": FILE:1 raises SystemExit: 3"),
        ("def score(query, response):\n    return query.nothing", ": FILE:2 raises AttributeError"),
        ("def score(query, response): return [1]", " must return a finite number, not .1."),
        ("def score(query, response): return 10**400", " must return a finite number, not 1000"),
    ],
)
def test_a_gold_function_that_raises_is_named(miniature, tmp_path, gold, sentence):
    file = tmp_path / "gold.py"
    file.write_text(gold)
    with pytest.raises(InputError, match=f"^--gold {file}:score{sentence.replace('FILE', str(file))}"):
        train_ppo.main(replace(miniature.ppo, gold=f"{file}:score", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_reward_that_stops_being_finite_leaves_the_checkpoint_of_the_update_before(miniature, tmp_path):
    path = tmp_path / "rule.py"
    path.write_text("n = 0\ndef score(q, r):\n    global n\n    n += 1\n    return [1e39 if n > 3 else 1.0] * len(r)\n")
    args = replace(miniature.ppo, reward=f"{path}:score", out=tmp_path / "out", save_every=1, missing_eos_score=None)
    with pytest.raises(InputError, match="not finite at update 2; .* keeps the last checkpoint"):
        train_ppo.main(args)
    assert all(p.isfinite().all() for p in load_gpt(args.out).parameters())
    assert [row["step"] for row in read_metrics(args.out)] == [0, 1]


def test_a_reward_model_that_gives_nan_is_named(miniature, tmp_path, monkeypatch):
    plain = ScalarModel.forward
    monkeypatch.setattr(ScalarModel, "forward", lambda self, ids, *a, **k: plain(self, ids, *a, **k) / (len(ids) == 1))
    rm = miniature.root / "rm"
    with pytest.raises(InputError, match=f"--reward-model {rm} gave a score that is not finite at update 0"):
        train_ppo.main(replace(miniature.ppo, reward_model=str(rm), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------- losses and weights that run away
@pytest.mark.parametrize("stage", STAGES)
def test_nan_weights_never_replace_the_last_good_checkpoint(miniature, tmp_path, monkeypatch, stage):
    """The loss is finite, the gradient isn't: the next loss would show it, but a checkpoint may come first."""
    args = replace(getattr(miniature, stage), out=tmp_path / "out", save_every=1)
    plain, calls = torch.optim.AdamW.step, []

    def step(self, *arguments):
        calls.append(1)
        plain(self, *arguments)
        if len(calls) == (4 if stage == "ppo" else 3):  # the last step of its update: no later check would notice
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
def test_a_far_too_high_learning_rate_gives_one_sentence(miniature, tmp_path, stage):
    """Logits, losses or weights may break first; none may cause a traceback or finish the run."""
    args = replace(getattr(miniature, stage), out=tmp_path / "out", lr=1e36, schedule="constant")
    with pytest.raises(InputError, match="not finite|is (nan|inf) (at|after) (step|update)"):
        MAIN[stage](args)
    assert not (args.out / "summary.json").exists()


def set_value(name, value):
    def change(tensors):
        tensors[name].view(-1)[-1] = value

    return change


WEIGHTS = {  # changes to config.json, changes to the weights, the reason
    "nan": (None, set_value("embed_out.weight", float("nan")), "embed_out.weight has a value of nan"),
    "infinite": (None, set_value("gpt_neox.embed_in.weight", float("-inf")), "embed_in.weight has a value of -inf"),
    "a norm of 1e30": (None, set_value("gpt_neox.final_layer_norm.weight", 1e30), "norm.weight has a value of 1e[+]30"),
    "fused and reordered": (
        None, set_value("gpt_neox.layers.0.attention.query_key_value.bias", -2e6), "key_value.bias has .* -2e[+]06",
    ),
    "a rope base of 0": ({"rotary_emb_base": 0}, None, "rotary_emb_base or rope_theta must be .* at least 1"),
    "a rope base of 1e-300": ({"rope_theta": 1e-300, "rotary_emb_base": None}, None, r"of at least 1, not \[1e-300\]"),
    "numbers that overflow together": (
        {"layer_norm_eps": 0.0}, lambda tensors: [tensor.zero_() for tensor in tensors.values()],
        "the model's output for 8 tokens is not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "case"), [("sft", case) for case in WEIGHTS] + [("rm", "nan"), ("ppo", "nan")], ids=str
)
def test_a_checkpoint_that_only_gives_nan_is_rejected_on_load(miniature, tmp_path, stage, case):
    config, tensors, reason = WEIGHTS[case]
    checkpoint = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint", config, tensors)
    args = replace(getattr(miniature, stage), out=tmp_path / "out")
    refused(start_from(stage, args, checkpoint), stage, rf"^{checkpoint}(/[a-z.]+)?: .*{reason}")


def test_a_reward_model_with_a_weight_of_nan_names_its_file(miniature, tmp_path):
    rm = changed_checkpoint(miniature.root / "rm", tmp_path / "rm", tensors=set_value("score.bias", float("nan")))
    args = replace(miniature.ppo, reward_model=str(rm), out=tmp_path / "out")
    refused(args, "ppo", f"^{rm}/model.safetensors: score.bias has a value of nan; weights must be finite")


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


@contextmanager
def small_files(limit):
    """Limit the size of files, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def evaluate(out):
    row = {"response": "x" * 200}
    write_evaluation(EvalArgs(data=out, out=out), {"a": 1}, [Section("T")], {"samples.jsonl": [row] * 999})


WRITERS = {
    "tiny": lambda out: tiny.main(tiny.Args(out=out, num_demonstrations=99, num_comparisons=99, num_validation=9)),
    "sums": lambda out: sums.main(sums.Args(out=out, num_demonstrations=999, num_queries=9, num_comparisons=9)),
    "town": lambda out: town.main(town.Args(out=out, num_train=999, num_validation=9)),
    "eval": evaluate,
    "rows": lambda out: write_jsonl(out / "rows.jsonl", [{"query": "x" * 200}] * 999),
    "text": lambda out: files.write_text(out / "text", "x" * 99_999),
    "tokenizer": lambda out: train_tokenizer([f"word{i} " for i in range(999)], 600).save(out),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_keeps_old_files_and_leaves_no_partial_ones(tmp_path, writer):
    out = tmp_path / "out"
    out.mkdir()
    old = {out / name: b"mine" for name in ("sft.train.jsonl", "eval.json", "rows.jsonl", "text", "tokenizer.json")}
    for path, content in old.items():
        path.write_bytes(content)
    with small_files(8000), pytest.raises(OSError) as error:
        WRITERS[writer](out)
    assert error.value.errno == errno.EFBIG
    left = contents(out)
    assert old.items() <= left.items()
    for path in left.keys() - old.keys():  # any other file is complete
        assert path.suffix == ".jsonl" and len([*iter_jsonl(path)]) == 9 or json.loads(left[path])


def test_judge_answers_written_before_the_disk_was_full_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint._Asker, "try_to_ask", lambda self, prompt: "x" * 3000)
    judge = endpoint.Endpoint(url="http://127.0.0.1:9/v1/chat/completions", model="m", workers=1)
    with small_files(8000), pytest.raises(OSError):
        endpoint.ask_all(["a", "b", "c"], judge, tmp_path / "cache.jsonl")
    kept = endpoint.read_cache((tmp_path / "cache.jsonl").read_bytes())
    assert len(kept) == 2
    answers, account = endpoint.ask_all(["a", "b", "c"], judge, tmp_path / "cache.jsonl")
    assert len(answers) == 3 and account["stopped"] == ""
    assert len(endpoint.read_cache((tmp_path / "cache.jsonl").read_bytes())) == 3


def test_a_file_that_cannot_grow_ends_the_process_with_one_sentence_and_code_2(miniature, tmp_path, capsys):
    names = ("n_layer", "n_head", "d_model", "batch_size", "max_query_length", "max_response_length")
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(miniature.sft, name)))]
    out = tmp_path / "out"
    flags += ["--data", str(miniature.root / "data"), "--out", str(out), "--warmup-steps", "0"]
    with small_files(20_000), pytest.raises(SystemExit) as stopped:
        run_program("train_sft.py", *flags)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and "Traceback" not in err
    assert re.search(rf"^error: the disk is full .* at {out}\S*\.$", err, re.MULTILINE)
    assert not (out / "model.safetensors").exists() and not (out / "summary.json").exists()


# ------------------------------------------------------------------------------------------- files that others made
DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5000


def strange(directory, kind):
    """Put something at a file's path that must not be read."""
    path = directory / "file.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "circle":
        path.symlink_to(path.name)
    elif kind == "directory":
        path.mkdir()
    elif kind == "long":
        path = directory / ("x" * 5000)
    return path


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe", "is not a regular file"),
        ("device", "is not a regular file"),
        ("circle", "can't be opened"),
        ("directory", "is a directory"),
        ("long", "can't be opened .*too long"),
        ("missing", "does not exist"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [files.read_object, lambda path: list(iter_jsonl(path)), read_tensors, load_pickle],
    ids=["object", "lines", "tensors", "pickle"],
)
def test_only_regular_files_are_read(tmp_path, kind, reason, read):
    with pytest.raises(InputError, match=reason):
        read(strange(tmp_path, kind))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{{"a": {DEEP}}}', "the JSON can't be parsed .*recursion"),
        (f'{{"a": {LONG}}}', "the JSON can't be parsed .*4300 digits"),
        ('{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1', ":1: malformed JSON"),
        ("[1]", "expected a JSON object, got list"),
    ],
    ids=["deep", "digits", "bytes", "cut", "list"],
)
def test_unparsable_json_gives_one_sentence(tmp_path, text, reason):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=reason):
        files.read_object(tmp_path / "x.json")


def test_an_endless_line_is_rejected_before_it_fills_memory(tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(2**34)  # 16 GiB that take no disk space
    with pytest.raises(InputError, match=r"rows\.jsonl:2: the line has more than 16,777,216 bytes"):
        list(iter_jsonl(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (10**400, float, "an integer with more than 64 bits"),
        (2**63, int, "an integer with more than 64 bits"),
        (float("nan"), float, "is nan, not a finite number"),
        ("\ud800", str, "isn't valid Unicode"),
        ("a" * (2**20 + 1), str, "more than 1,048,576 characters"),
    ],
)
def test_a_value_out_of_range_names_its_field(value, kind, reason):
    with pytest.raises(InputError, match=f"x:1: the field 'a' .*{reason}"):
        field({"a": value}, "a", kind, "x:1")


# ------------------------------------------------------------------------------------------------ weights and sizes
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_pickle_is_one_sentence_or_still_tensors(tmp_path, seed):
    """After bit flips in the pickle of a zip, the unpickler raises anything from KeyError to struct.error."""
    torch.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, tmp_path / "x.bin")
    rng = random.Random(seed)
    with zipfile.ZipFile(tmp_path / "x.bin") as old, zipfile.ZipFile(tmp_path / "y.bin", "w") as new:
        for name in old.namelist():
            data = bytearray(old.read(name))
            if name.endswith("data.pkl"):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            new.writestr(name, bytes(data))
    try:
        assert all(isinstance(tensor, torch.Tensor) for tensor in read_tensors(tmp_path / "y.bin").values())
    except InputError as error:
        assert str(error).startswith(str(tmp_path / "y.bin")) and "\n" not in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.slow
def test_ctrl_c_while_reading_weights_does_not_look_like_a_damaged_file(tmp_path, name):
    """Two in five raised a ValueError in PyTorch, within the 4 ms that 300 tensors take."""
    path, tensors = tmp_path / name, {f"t{i}": torch.ones(8, 8) for i in range(300)}
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    num_attempts, interrupted = 40, 0
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # which background processes of a shell ignore
    try:
        for i in range(num_attempts):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + i))
                read_tensors(path)
                time.sleep(1)  # until the signal arrives
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, ours)
    assert interrupted == num_attempts


def test_a_compressed_pickle_is_refused_unread(tmp_path):
    torch.save({"a": torch.zeros(2**18)}, tmp_path / "x.bin")
    with (
        zipfile.ZipFile(tmp_path / "x.bin") as old,
        zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(InputError, match="y.bin can't be read.*compressed"):
        read_tensors(tmp_path / "y.bin")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"a": "1.bin", "b": "1.bin"}, "1.bin has no tensor b, listed in .*index.json: download it again"),
        ({"a": "1.bin", "c": "2.bin"}, "2.bin: a is also in another file of .*index.json: download it again"),
    ],
)
def test_a_wrong_index_is_rejected(miniature, tmp_path, index, reason):
    checkpoint = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint")
    (checkpoint / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2)}, checkpoint / "1.bin")
    torch.save({"a": torch.zeros(2), "c": torch.ones(2)}, checkpoint / "2.bin")
    (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(InputError, match=reason):
        load_gpt(checkpoint)


@pytest.mark.parametrize("weight", [float("nan"), 1e30])
def test_a_weight_of_nan_in_the_second_of_two_files_names_the_index_and_the_tensor(miniature, tmp_path, weight):
    checkpoint = changed_checkpoint(
        miniature.root / "sft", tmp_path / "checkpoint", tensors=set_value("embed_out.weight", weight)
    )
    fuzz.write_shards(checkpoint / "model.safetensors", checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputError, match="index.json: embed_out.weight has a value of"):
        load_gpt(checkpoint)


@pytest.mark.parametrize("shard", ["../other/model.bin", "/etc/passwd", "", ".", "a\0b", "x" * 5000])
def test_an_index_reads_only_files_in_its_directory(miniature, tmp_path, shard):
    checkpoint = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint")
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"embed_out.weight": shard}}
    (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="which isn't a file next to it"):
        load_gpt(checkpoint)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9}, {"vocab_size": 2**62}, {"max_position_embeddings": 10**12},
        {"hidden_size": 2**17, "intermediate_size": 2**19}, {"num_hidden_layers": 10**400}, {"layer_norm_eps": 10**400},
        {"rotary_pct": [1]}, {"rope_scaling": {"rope_theta": []}}, {"architectures": 3},
        {"model_type": "gpt_neo", "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 10**12]]},
    ],
)  # fmt: skip
def test_absurd_sizes_and_types_in_config_json_are_rejected_before_allocation(miniature, tmp_path, config):
    checkpoint = changed_checkpoint(miniature.root / "sft", tmp_path / "checkpoint", config)
    if "architectures" in config:
        assert not is_reward_model(checkpoint)
        return
    with pytest.raises(InputError, match=r"checkpoint/config\.json: "):
        load_gpt(checkpoint)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_epochs": 1e308}, "--num-epochs 1e.308: must be above 0, a million at most"),
        ({"d_model": 10**12}, "d_model must be at most .*, got 1000000000000"),
        ({"n_layer": 10**8}, "n_layer must be at most .*, got 100000000"),
        ({"n_layer": 4096, "d_model": 2**14, "n_head": 4}, "a model of these sizes has .* weights, more than"),
        ({"max_query_length": 10**13}, "--max-query-length 10000000000000: must be at most 10.12"),
    ],
)
def test_absurd_flags_are_refused_before_anything_is_made(miniature, tmp_path, change, sentence):
    refused(replace(miniature.sft, out=tmp_path / "out", **change), "sft", sentence)


def test_a_score_outside_float32_is_rejected(miniature, tmp_path):
    args = replace(miniature.ppo, out=tmp_path / "out", missing_eos_score=1e308)
    refused(args, "ppo", "--missing-eos-score 1e.308: must be a finite number in float32")


# ------------------------------------------------------------------------------------------------------- tokenizers
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"vocab.json": {"a": "b"}, "merges.txt": ""}, "the id of 'a' is 'b'"),
        ({"vocab.json": {"a": 2**70}, "merges.txt": ""}, "the id of 'a' is"),
        ({"vocab.json": {"<|endoftext|>": 0, "a": 1}, "merges.txt": "x y"}, "merges.txt doesn't match"),
        ({"vocab.json": {"<|endoftext|>": 0}, "merges.txt": ""}, "can't encode"),
        ({"tokenizer_config.json": {"eos_token": ["a"]}}, "eos_token is .'a'., expected a string"),
        ({"tokenizer_config.json": {"eos_token": "\ud800"}}, "eos_token is .*, expected a string"),
        ({"tokenizer.json": {"model": 3}}, "isn't a valid tokenizer"),
    ],
)
def test_a_damaged_or_foreign_tokenizer_is_one_sentence(miniature, tmp_path, files, reason):
    if "tokenizer_config.json" in files:
        shutil.copy(miniature.root / "sft/tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=reason):
        load_tokenizer(tmp_path)


# ----------------------------------------------------------------------------------------------- what runs left behind
def test_a_truncated_last_line_of_metrics_is_skipped_and_reported_once(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "lo')
    assert metrics_of(tmp_path) == metrics_of(tmp_path) == [{"step": 0, "loss": 1.5}]
    assert capsys.readouterr().err == f"{tmp_path / 'metrics.jsonl'}:2: ignoring the last row, which is incomplete.\n"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ('{"step": 0}\n{"st\n{"step": 2}\n', "metrics.jsonl:2: malformed JSON"),
        ('{"loss": 1}\n', "metrics.jsonl:1: the field 'step' is missing"),
        ('{"step": 0, "loss": "1"}\n', "metrics.jsonl:1: the field 'loss' must be a number"),
        (f'{{"step": 0, "loss": {"9" * 400}}}\n', "metrics.jsonl:1: the field 'loss' must be a number"),
        ("3\n", "metrics.jsonl:1: expected a JSON object"),
        ("", "metrics.jsonl has no complete row: delete it to continue without the run's curves"),
        ('{"step": 0', "metrics.jsonl has no complete row"),
        ("\0" * 999, "metrics.jsonl:1: malformed JSON"),
        ('{"step": 0}\n\1\2\3', "metrics.jsonl:2: malformed JSON"),
        ('{"step": 0, "loss": 1e300}\n', "metrics.jsonl:1: the field 'loss' must be a number of at most 1e[+]39"),
    ],
)
def test_broken_metrics_are_refused_with_their_line(tmp_path, rows, reason):
    (tmp_path / "metrics.jsonl").write_text(rows)
    with pytest.raises(InputError, match=reason):
        metrics_of(tmp_path)


@pytest.mark.parametrize(
    "row",
    [{"objective/kl": 1.0}, {"objective/kl": 1.0, "objective/score": 1.0}, {"gold_score": 1.0}, {"eos_rate": 1.0}, {}],
)
def test_metrics_of_an_unknown_stage_are_rejected_before_a_policy_is_read(miniature, tmp_path, monkeypatch, row):
    run = shutil.copytree(miniature.root / "sft", tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0} | row) + "\n")
    monkeypatch.setattr(summaries, "load_policy", lambda *_: pytest.fail("a model was loaded"))
    args = replace(
        evaluation.RECIPES["tiny"][1], data=miniature.root / "data", out=tmp_path / "out", device="cpu",
        policies=("sft", str(miniature.root / "sft"), "ppo", str(run)), reward_model=None, gold=None,
    )  # fmt: skip
    with pytest.raises(
        InputError, match=f"{run}/metrics.jsonl isn't from a training run: the last row lacks objective/kl"
    ):
        evaluation.main(args)
    assert not args.out.exists()
    with pytest.raises(InputError, match="isn't from a training run"):
        run_sections([str(run)])


def finished_run(directory, **settings):
    directory.mkdir()
    (directory / "args.json").write_text(json.dumps({"seed": 1} | settings))
    rows = [{"step": i, "episode": i, "objective/kl": 1.0, "objective/score": i, "eos_rate": 1.0} for i in range(3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "ep')
    return str(directory)


def test_runs_with_truncated_metrics_and_math_in_their_names_are_compared(tmp_path):
    runs = ("$\\bad$", finished_run(tmp_path / "a"), "a_{b", finished_run(tmp_path / "$x_{"))
    compare_runs.main(compare_runs.Args(runs=runs, out=tmp_path / "out"))
    assert "$\\bad$" in (tmp_path / "out/compare.html").read_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"names": ("\ud800", "b")}, "--runs '.ud800': a name must be printable"),
        ({"eval": "[]"}, "eval.json: expected a JSON object"),
        ({"eval": '{"args": 3, "policies": {}}'}, "eval.json: the field 'args' must be dict"),
        (
            {"eval": '{"args": {"policies": 3}, "policies": {}}'},
            "eval.json: args: the field 'policies' must be list, not int",
        ),
        ({"eval": '{"args": {"policies": ["a", "b"]}, "policies": {"a": 1}}'}, "policies: the field 'a' must be dict"),
        (
            {"eval": '{"args": {"policies": ["a", "b"]}, "policies": {"a": {"gold_win_rate": "x"}}}'},
            "a: the field 'gold_win_rate' must be float",
        ),
        ({"settings": {"whiten_rewards": [1]}}, "args.json: the field 'whiten_rewards' must be bool"),
    ],
)
def test_compare_runs_rejects_malformed_files(tmp_path, change, reason):
    names = change.get("names", ("a", "b"))
    directories = [finished_run(tmp_path / name, **change.get("settings", {})) for name in "ab"]
    runs = tuple(word for pair in zip(names, directories, strict=True) for word in pair)
    evals = ()
    if "eval" in change:
        evals = (tmp_path,)
        (tmp_path / "eval.json").write_text(change["eval"])
    with pytest.raises(InputError, match=reason):
        compare_runs.main(compare_runs.Args(runs=runs, evals=evals, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_path_that_is_not_unicode_can_be_written_into_a_page(tmp_path):
    write_page(tmp_path / "page.html", "a\udcff", ["b\ud800"])
    assert "a\\udcff" in (tmp_path / "page.html").read_text() and not list(tmp_path.glob("*.tmp"))


# ------------------------------------------------------------------------------ no partial output after an error
@pytest.mark.parametrize("rule", ["['good'] * len(r)", "[float('nan')] * len(r)"])
def test_a_run_that_fails_in_its_first_step_leaves_nothing(miniature, tmp_path, rule):
    (tmp_path / "rule.py").write_text(f"def score(q, r): return {rule}\n")
    refused(replace(miniature.ppo, reward=f"{tmp_path}/rule.py:score", out=tmp_path / "out"), "ppo", "--reward")


def test_a_failed_evaluation_page_keeps_the_previous_one(tmp_path):
    args = EvalArgs(data=tmp_path, out=tmp_path / "out")
    write_evaluation(args, {"seed": 1}, [], {"samples.jsonl": [{"a": 1}]})
    before = {path.name: path.read_bytes() for path in args.out.iterdir()}
    with pytest.raises(AttributeError):
        write_evaluation(args, {"seed": 2}, [Section(figures=[None])], {"samples.jsonl": [{"a": 2}]})
    assert {path.name: path.read_bytes() for path in args.out.iterdir()} == before
    assert set(before) == {"eval.json", "report.html", "samples.jsonl"}


# ---------------------------------------------------------------------------------------- sources of the converters
@pytest.mark.parametrize("seed", range(30))
def test_damaged_parquet_is_one_sentence_or_still_rows(tmp_path, seed):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"a": f"text {i}", "at": datetime(2020, 1, 1), "b": [i]} for i in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    data, rng = bytearray((tmp_path / "x.parquet").read_bytes()), random.Random(seed)
    for _ in range(1 + seed % 3):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (tmp_path / "x.parquet").write_bytes(bytes(data))
    try:
        assert all(isinstance(row, dict) for _, row in prepare.read_records(tmp_path / "x.parquet"))
    except InputError as error:
        assert "x.parquet" in str(error) and "\n" not in str(error)


def test_a_timestamp_that_python_cannot_hold_is_one_sentence(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array([2**62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"at": column}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="x.parquet: damaged"):
        list(prepare.read_records(tmp_path / "x.parquet"))


def test_a_million_spaces_take_linear_time():
    """A search that restarts at each space would take 10^12 steps."""
    assert stackoverflow.to_text("a" + " " * 10**6 + "b \n \n\n c") == "a" + " " * 10**6 + "b\n\n c"


@pytest.mark.parametrize("listed", ["[" * 10**5, "['L1'", "[L1]", "['L1', f()]", "[]"], ids=range(5))
def test_a_conversation_list_is_not_evaluated_as_python(tmp_path, listed):
    (tmp_path / "movie_lines.txt").write_text("L1 +++$+++ u0 +++$+++ m0 +++$+++ BIANCA +++$+++ Hi.\n")
    (tmp_path / "movie_conversations.txt").write_text(f"u0 +++$+++ u2 +++$+++ m0 +++$+++ {listed}\n")
    with pytest.raises(InputError, match="movie_conversations.txt:1: the last field must be a list"):
        dialogue.read_conversations(tmp_path, Counter())


def test_dropping_turns_by_bisection_equals_one_by_one():
    """Bisection finds the first start that fits: with 10,000 turns, 15 encodings instead of 10,000."""
    calls = []

    def fits(start):
        calls.append(start)
        return start >= 7777

    assert prepare.first_fit(range(10_000), fits) == 7777 and len(calls) <= 16
    assert prepare.first_fit(range(5), lambda start: False) is None and prepare.first_fit([], fits) is None
    assert prepare.first_fit([3, 8], lambda start: True) == 3


def test_a_program_of_megabytes_is_skipped_without_parsing(tmp_path):
    for name, text in {"a": "def f(n):\n    return n\n", "b": "x = 1; " * 1_400_000}.items():
        (tmp_path / "p00001").mkdir(exist_ok=True)
        (tmp_path / f"p00001/{name}.py").write_text(text)
    args, left_out = codenet.Args(source=tmp_path, language="python"), defaultdict(list)
    programs = list(codenet.cut_programs(codenet.find_programs(tmp_path, "python"), args, Counter(), left_out))
    assert len(programs) == 1 and left_out["program: more than 131,072 bytes"] == ["p00001/b.py"]


# --------------------------------------------------------------------------------- the fuzzer: python -m tools.fuzz
@dataclass(frozen=True)
class Nothing:
    """Settings of a toy command."""


def raises(args):
    raise ValueError("no sentence")


def refuses(args):
    raise InputError("one sentence.")


def refuses_late(args):
    os.mkdir("out")
    raise InputError("one sentence.")


def leaves_a_scratch_file(args):
    open("x.tmp", "w").close()


def never_ends(args):
    while True:
        pass


def hoards(args):
    # new pages: the heap may still have as much memory that earlier tests have freed
    kept = mmap.mmap(-1, 2**27, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept.write(b"x" * 2**27)
    while kept:
        pass


@pytest.mark.parametrize(
    ("main", "kind"),
    [
        (raises, "traceback"), (refuses, "refused"), (refuses_late, "half-written"), (never_ends, "hang"),
        (leaves_a_scratch_file, "half-written"), (print, "fine"),
    ],
)  # fmt: skip
def test_the_fuzzer_tells_errors_from_other_outcomes(tmp_path, monkeypatch, main, kind):
    (tmp_path / "world").mkdir()
    (tmp_path / "world/rows.jsonl").write_text('{"a": [1, "b"]}\n')
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
    monkeypatch.setattr(fuzz, "attack_flag", lambda entry, rng: ("nothing", entry))  # toy commands have no flags
    monkeypatch.setattr(fuzz, "ENTRIES", {"toy": fuzz.Entry(main, Nothing, "", "rows.jsonl")})
    monkeypatch.chdir(tmp_path)
    for case in range(1 if kind == "hang" else 3):
        outcome = fuzz.run_case(case, 1, tmp_path / "world")
        assert outcome.kind == kind, outcome
    assert fuzz.run_case(0, 1, tmp_path / "world").change == fuzz.run_case(0, 1, tmp_path / "world").change


def test_the_fuzzer_stops_a_command_that_takes_too_much_memory(tmp_path, monkeypatch):
    (tmp_path / "world").mkdir()
    monkeypatch.setattr(fuzz, "MAX_BYTES", 2**26)
    monkeypatch.setattr(fuzz, "attack_flag", lambda entry, rng: ("nothing", entry))
    monkeypatch.setattr(fuzz, "ENTRIES", {"toy": fuzz.Entry(hoards, Nothing, "", "")})
    monkeypatch.chdir(tmp_path)
    assert fuzz.run_case(1, 1, tmp_path / "world").kind == "memory"
