"""--resume detects changes in the content of the files that a run reads."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import train_dpo
import train_grpo
import train_ppo
import train_rlcf
import train_rm
import train_sft
from nanorlhf.checkpoint import load_gpt
from nanorlhf.errors import InputError
from nanorlhf.rlcf import train_baselines, train_discriminator
from nanorlhf.training.input_digests import digest_inputs
from nanorlhf.training.resume import load_state, save_state
from nanorlhf.training.settings import RewardArgs
from tests.conftest import interrupt_at
from tests.test_train_grpo import KINDS, grpo_args


@dataclass(frozen=True, kw_only=True)
class Args(RewardArgs):
    """All settings that name a file; no single script has all of them."""

    batch_size: int = 8
    micro_batch_size: int = 8
    value_model: str | None = None
    encoder: str | None = None
    discriminator: str | None = None
    error_prone_jar: str | None = None


JUDGE = 'url = "http://localhost:8000"\nmodel = "m"\nrubric = "{query} {response}"\n'
RULE = "def score(queries, responses):\n    return [0.0 for _ in queries]\n"
TESTS = "compile_error = -1.0\n"


@pytest.fixture
def args(tmp_path) -> Args:
    """Inputs as files; digests don't need working models."""

    def model(name: str) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "tokenizer.json").write_text(f'{{"model": "{name}"}}')
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        for number in (1, 2):
            (directory / f"model-{number}.safetensors").write_text(f"{name} {number}")
        return str(directory)

    (tmp_path / "rule.py").write_text(RULE)
    (tmp_path / "other_rule.py").write_text(RULE.replace("score", "judge"))  # a name that is also a kind of reward
    (tmp_path / "judge.toml").write_text(JUDGE)
    (tmp_path / "tests.toml").write_text(TESTS)
    (tmp_path / "checker.jar").write_text("checker.jar")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sft.train.jsonl").write_text("a row\n")
    (tmp_path / "discriminator").mkdir()
    for name in ("discriminator.json", "model.safetensors"):
        (tmp_path / "discriminator" / name).write_text(name)
    rewards = (
        *(f"{tmp_path}/rule.py:score", model("rm"), f"teacher:{model('teacher')}", f"judge:{tmp_path}/judge.toml"),
        *(f"tests:{tmp_path}/tests.toml", f"{tmp_path}/other_rule.py:judge"),
    )
    return Args(
        out=tmp_path / "out", data=tmp_path / "data", sft=model("sft"), value_model=model("value"),
        reward=rewards, gold=model("gold"), encoder=model("encoder"),
        discriminator=str(tmp_path / "discriminator"), error_prone_jar=f"{tmp_path}/checker.jar{os.pathsep}other",
    )  # fmt: skip


def digests(args):
    return digest_inputs(args, [args.data / "sft.train.jsonl"])


def resumed(args, now=None):
    """Save a state of a run with these settings, and return a function that loads it."""
    save_state(args.out, args, 1, {"inputs": digests(args)})
    return lambda now=args: load_state(now.out, now, digests(now))


READ = (
    "data/sft.train.jsonl sft/config.json sft/tokenizer.json sft/model-2.safetensors sft/model.safetensors.index.json "
    "value/model-1.safetensors rule.py other_rule.py rm/model-1.safetensors teacher/model-2.safetensors judge.toml "
    "tests.toml gold/config.json encoder/model-1.safetensors encoder/tokenizer.json "
    "discriminator/model.safetensors checker.jar"
).split()


@pytest.mark.parametrize("name", READ)
def test_a_file_that_has_changed_is_refused_by_name(args, tmp_path, name):
    resume = resumed(args)
    text = (tmp_path / name).read_text()
    new = {"judge.toml": text.replace('"m"', '"n"'), "tests.toml": text.replace("-1.0", "0.0")}
    (tmp_path / name).write_text(new.get(name, text + " "))
    with pytest.raises(InputError, match=f"^--resume: {tmp_path / name} has changed since the run in {args.out} "):
        resume()


def test_a_file_that_has_gone_is_refused_by_name(args, tmp_path):
    resume = resumed(args)
    (tmp_path / "sft" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=f"^--resume: {tmp_path}/sft/tokenizer.json has gone since"):
        resume()


def test_touched_files_and_what_is_not_read_may_change(args, tmp_path):
    resume = resumed(args)
    for name in READ:
        os.utime(tmp_path / name, (1, 1))
    for name in ("data/sft.test.jsonl", "sft/metrics.jsonl", "rm/state"):
        (tmp_path / name).write_text("new")
    (tmp_path / "tests.toml").write_text(TESTS + "workers = 7\n")
    (tmp_path / "judge.toml").write_text(JUDGE + 'max_calls = 5\nworkers = 2\nkey_variable = "KEY"\n')
    assert resume()["step"] == 1


def moved(args, old: Path, new: Path) -> Args:
    """Return the settings with the paths of copies."""

    def there(setting):
        if isinstance(setting, tuple):
            return tuple(map(there, setting))
        return type(setting)(str(setting).replace(str(old), str(new))) if isinstance(setting, str | Path) else setting

    return replace(args, **{name: there(value) for name, value in vars(args).items() if name != "out"})


def test_a_copy_elsewhere_is_the_same_input(args, tmp_path):
    resume = resumed(args)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path, elsewhere, ignore=shutil.ignore_patterns("out", "elsewhere"))
    now = moved(args, tmp_path, elsewhere)
    assert now.sft == str(elsewhere / "sft") and now.reward[2] == f"teacher:{elsewhere}/teacher"
    assert resume(now)["step"] == 1
    (elsewhere / "sft" / "model-1.safetensors").write_text("another model")
    with pytest.raises(InputError, match="was started with --sft"):
        resume(now)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("reward", lambda a: (a.reward[0].replace(":score", ":other"), *a.reward[1:])),
        ("reward", lambda a: (a.reward[0], a.reward[2], f"teacher:{a.reward[1]}", a.reward[3])),
        ("reward", lambda a: a.reward[:3]),
        ("value_model", lambda a: None),
        ("value_model", lambda a: "shared"),
        ("gold", lambda a: None),
        ("sft", lambda a: a.value_model),
    ],
)
def test_another_input_is_refused_by_its_flag(args, setting, value):
    resume = resumed(args)
    with pytest.raises(InputError, match=f"was started with --{setting.replace('_', '-')} "):
        resume(replace(args, **{setting: value(args)}))


def test_a_reward_model_that_reward_replaces_is_not_read(args):
    assert "reward_model" not in digests(replace(args, reward_model="nowhere"))
    assert digests(replace(args, reward=None, reward_model=args.value_model))["reward_model"].keys() == {
        f"1 model {name}" for name in ("config.json", "model.safetensors.index.json", *SHARDS)
    }


SHARDS = ("model-1.safetensors", "model-2.safetensors")


def test_our_own_functions_may_change_with_the_version(args):
    assert digests(replace(args, reward="data/sums.py:right", gold=None)).keys().isdisjoint({"reward", "gold"})


def test_a_state_without_digests_resumes_with_one_line(args, capsys):
    """As version 1.0.0 wrote it."""
    save_state(args.out, args, 1, {})
    assert load_state(args.out, args, digests(args))["step"] == 1
    assert capsys.readouterr().err.count("kept no digests") == 1


@pytest.mark.parametrize("inputs", [3, {"data": 3}, {"data": {"sft.train.jsonl": 3}}])
def test_digests_of_another_shape_are_one_sentence(args, inputs):
    save_state(args.out, args, 1, {"inputs": inputs})
    with pytest.raises(InputError, match="doesn't fit this run"):
        load_state(args.out, args, digests(args))


class Stopped(Exception):
    pass


STAGES = {
    "sft": (train_sft, "data/sft.train.jsonl data/sft.validation.jsonl data/tokenizer"),
    "rm": (train_rm, "data/comparisons.train.jsonl data/comparisons.validation.jsonl data/sft.train.jsonl sft"),
    "dpo": (train_dpo, "data/comparisons.train.jsonl data/comparisons.validation.jsonl sft"),
    "ppo": (train_ppo, "data/sft.train.jsonl sft rm"),
    "grpo": (train_grpo, "data/sft.train.jsonl sft rm"),
    "rlcf": (train_rlcf, "remarked/code.train.jsonl sft opinionated"),
    "baseline": (train_baselines, "remarked/code.train.jsonl sft"),
    "discriminator": (train_discriminator, "remarked/code.train.jsonl remarked/code.validation.jsonl sft"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_keeps_digests_of_its_data_and_of_all_its_models(request, tmp_path, monkeypatch, stage):
    script, expected = STAGES[stage]
    run = request.getfixturevalue("rlcf" if stage in ("rlcf", "baseline", "discriminator") else "miniature")
    args = grpo_args(run.ppo, **KINDS["rloo"]) if stage == "grpo" else getattr(run, {"rlcf": "ppo"}.get(stage, stage))
    args = replace(args, out=tmp_path / "out", **({"num_pair_epochs": 0.0} if stage == "discriminator" else {}))
    tracked = []

    def track(self, **_):
        tracked.append(self.inputs)
        raise Stopped

    monkeypatch.setattr(script.Run, "track", track)
    with pytest.raises(Stopped):
        script.main(args)
    paths = {str(Path(path).relative_to(run.root)) for parts in tracked[0].values() for path, _ in parts.values()}
    for name in expected.split():
        assert any(path.startswith(name) for path in paths), (name, paths)
        if "." not in name and name != "data/tokenizer":
            assert {f"{name}/model.safetensors", f"{name}/tokenizer.json"} <= paths or name == "rm", (name, paths)
            assert f"{name}/model.safetensors" in paths
    assert all(path.startswith(tuple(expected.split())) for path in paths), paths


def test_a_run_whose_inputs_were_copied_and_touched_resumes_bit_for_bit(miniature, tmp_path, monkeypatch):
    args = replace(miniature.ppo, save_every=1, total_episodes=16)
    train_ppo.main(replace(args, out=tmp_path / "whole"))
    broken = replace(args, out=tmp_path / "broken")
    with monkeypatch.context() as patch:
        interrupt_at(2, patch, train_ppo, "whiten")
        with pytest.raises(KeyboardInterrupt):
            train_ppo.main(broken)
    for name in ("data", "sft", "rm"):
        shutil.copytree(miniature.root / name, tmp_path / name, copy_function=shutil.copyfile)
    here = moved(broken, miniature.root, tmp_path)
    here = replace(here, resume=True)
    rows = (tmp_path / "data" / "sft.train.jsonl").read_text()
    (tmp_path / "data" / "sft.train.jsonl").write_text("".join(reversed(rows.splitlines(keepends=True))))
    with pytest.raises(InputError, match="was started with --data"):
        train_ppo.main(here)
    (tmp_path / "data" / "sft.train.jsonl").write_text(rows)
    train_ppo.main(here)
    whole, resumed_policy = (load_gpt(tmp_path / name) for name in ("whole", "broken"))
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed_policy.parameters(), strict=True))
