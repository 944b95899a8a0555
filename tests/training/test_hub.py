"""Uploading a run: refused input, uploaded files, and the model card."""

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.tokenizer import train_tokenizer
from nanorlhf.training import hub
from nanorlhf.training.run import Run
from tests.conftest import TINY
from tests.training import test_run

ID = "someone/tldr-sft"


@dataclass(frozen=True)
class Args(test_run.Args):
    model: str | None = None
    sft: str | None = None
    note: str = "a | b\n`c`"


@dataclass
class Recorded:
    """A fake HfApi that records uploads, or fails."""

    error: Exception | None = None
    created: list[tuple] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> str:
        if self.error:
            raise self.error
        self.created.append((repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> None:
        names = (str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file())
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):  # HfApi's own selection
            self.files[name] = (folder_path / name).read_bytes()


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr(hub, "HfApi", lambda: recorded)
    monkeypatch.setattr("nanorlhf.training.run.digest_inputs", lambda args, data: {})  # the model doesn't exist
    monkeypatch.setattr("sys.argv", ["/home/me/train_sft.py", "tldr", "--out", "a run"])
    return recorded


def finished(out: Path, kind: type = GPT, **settings: object) -> Args:
    """Finish a run of two steps."""
    args = Args(out, save_every=1, **settings)
    tokenizer = train_tokenizer(["one two three"] * 3, 280)
    torch.manual_seed(0)
    model = kind(replace(TINY, vocab_size=tokenizer.vocab_size))
    run = Run(args, "SFT", lambda directory: save(model, directory, tokenizer))
    run.track(numbers={})
    for step in run.steps(2):
        run.log(step, {"loss": 1.0})
    run.log_samples(2, [{"query": "secret"}])
    run.finish({"validation_loss": 2.34567, "steps": 2})
    return args


def push(out: Path) -> None:
    hub.main(hub.Args(run=out, hub_id=ID))


def test_the_checkpoint_goes_up_and_neither_state_nor_logs(recorded, tmp_path, capsys) -> None:
    finished(tmp_path / "run")
    push(tmp_path / "run")
    assert recorded.created == [(ID, True, True)]
    assert set(recorded.files) == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert (tmp_path / "run/state").is_dir() and list((tmp_path / "run").glob("events*"))  # exist, but not uploaded
    assert f"pushed: https://huggingface.co/{ID}" in capsys.readouterr().out


def test_the_card_of_a_policy_says_how_it_was_made_and_loads_it(recorded, tmp_path) -> None:
    args = finished(tmp_path / "run", model="EleutherAI/pythia-1b-deduped")
    push(args.out)
    card = ModelCard(recorded.files["README.md"].decode())
    assert card.data.to_dict() == {
        "base_model": "EleutherAI/pythia-1b-deduped", "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["nanorlhf", "rlhf", "sft"],
    }  # fmt: skip
    assert card.text.lstrip().startswith("# tldr-sft\n") and "python train_sft.py tldr --out 'a run'" in card.text
    assert "| validation_loss | 2.346 |\n| steps | 2 |\n" in card.text and "| note | `a \\| b 'c'` |" in card.text
    table = re.findall(r"^\| (\w+) \| .+ \|$", card.text.partition("## Settings")[2], re.M)
    assert table == ["setting", *asdict(args)]
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.S)
    scope: dict = {}
    exec(code.replace(ID, str(args.out)), scope)
    assert scope["tokenizer"].decode(scope["tokenizer"]("one two")["input_ids"]) == "one two"
    assert torch.equal(scope["model"].get_input_embeddings().weight, load_gpt(args.out).transformer.embedding.weight)


def test_the_card_of_a_reward_model_loads_it_with_nanorlhf(recorded, tmp_path) -> None:
    args = finished(tmp_path / "run", ScalarModel)
    push(args.out)
    card = ModelCard(recorded.files["README.md"].decode())
    assert card.data.to_dict() == {"library_name": "nanorlhf", "tags": ["nanorlhf", "rlhf", "sft"]}
    assert "This model is a reward model" in card.text and "transformers" not in card.text
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.S)
    scope: dict = {}
    exec(code.replace(ID, str(args.out)), scope)
    assert isinstance(scope["model"], ScalarModel)


def test_a_policy_with_adapters_is_not_said_to_load_in_transformers(recorded, tmp_path) -> None:
    finished(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "adapter_size": 8}))
    card = hub.model_card(tmp_path, ID)
    assert "This model is a policy with adapters" in card.text
    assert "has adapters, which transformers does not support" in card.text and "import load_gpt" in card.text


def test_the_base_model_is_found_through_the_runs_between(tmp_path) -> None:
    for name, settings in {
        "sft": {"model": "openai-community/gpt2"},
        "ppo": {"sft": str(tmp_path / "sft")},
        "circle": {"sft": str(tmp_path / "circle")},
        "new": {"model": None},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "args.json").write_text(json.dumps(settings))
    bases = {name: hub.base_model({"sft": str(tmp_path / name)}) for name in ("sft", "ppo", "circle", "new")}
    assert bases == {"sft": "openai-community/gpt2", "ppo": "openai-community/gpt2", "circle": None, "new": None}
    assert hub.base_model({"model": "no such/directory/here"}) is None


def test_a_failed_upload_is_one_sentence(recorded, tmp_path) -> None:
    recorded.error = ConnectionError("Name or service not known\nin a long trace")
    finished(tmp_path / "a run")
    with pytest.raises(InputError, match=rf"not uploaded to {ID} \(Name or service not known\): try again") as raised:
        push(tmp_path / "a run")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["args.json", "command.txt", "summary.json"])
def test_a_directory_without_a_finished_run_is_refused(recorded, tmp_path, name) -> None:
    args = finished(tmp_path / "run")
    (args.out / name).unlink()
    with pytest.raises(InputError, match=f"run is not a finished run: {name} is missing"):
        push(args.out)
    assert recorded.created == []


@pytest.mark.parametrize("name", ["name", "a/b/c", "a b/c", "/name", "owner/", "owner/-x", "", "owner/" + "x" * 97])
def test_what_is_no_owner_and_name_is_refused(name, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with pytest.raises(InputError, match=r": expected OWNER/NAME"):
        hub.check_hub_id(name)


def test_without_a_token_nothing_is_sent(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("a server was asked"))
    with pytest.raises(InputError, match=f"{ID}: no Hub token: log in with `hf auth login`"):
        push(tmp_path / "run")


def test_the_command_line_takes_a_run_and_an_id(recorded, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    finished(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["hub.py", str(tmp_path / "run"), ID])
    run_module(hub.main, hub.Args)
    assert f"pushed: https://huggingface.co/{ID}" in capsys.readouterr().out
