"""Upload a finished run's checkpoint to the Hugging Face Hub, with a model card.

    python -m nanorlhf.training.hub runs/tldr/ppo someone/tldr-ppo

The card lists the command, the results and the settings. A new repository is private.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from nanorlhf import __version__
from nanorlhf.cli import run_module
from nanorlhf.errors import InputError
from nanorlhf.files import read_object, write_text
from nanorlhf.training.run_directory import flat_settings, read_settings

# files of a run directory; state, logs and samples are not uploaded
UPLOADED = [
    "README.md", "adapter/*", "config.json", "discriminator.json", "generation_config.json", "model.safetensors",
    "tokenizer*.json",
]  # fmt: skip
TEMPLATE = Path(__file__).with_name("model_card.md")
USES = {
    "policy": "Load it with transformers",
    "adapted policy": "It has adapters, which transformers does not support: load it with nanorlhf",
    "reward model": "It scores a text at its last token. Load it with nanorlhf",
    "discriminator": "It compares two programs for the same prompt. Load it with nanorlhf",
}


@dataclass(frozen=True, kw_only=True)
class Args:
    run: tyro.conf.Positional[Path]
    """directory of a finished run"""
    hub_id: tyro.conf.Positional[str]
    """OWNER/NAME of the repository"""


def main(args: Args) -> None:
    check_hub_id(args.hub_id)
    card = model_card(args.run, args.hub_id)
    print(f"pushed: {push(args.hub_id, args.run, card)}")


def check_hub_id(hub_id: str) -> None:
    """Raise InputError unless `hub_id` is OWNER/NAME and a token is set; needs no network."""
    if not is_hub_id(hub_id):
        raise InputError(f"{hub_id}: expected OWNER/NAME, such as someone/tldr-ppo.")
    if get_token() is None:
        raise InputError(f"{hub_id}: no Hub token: log in with `hf auth login` or set HF_TOKEN.")


def is_hub_id(text: str) -> bool:
    """Return True if the text is OWNER/NAME in characters that the Hub allows."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return "/" in text


def push(hub_id: str, run: Path, card: ModelCard) -> str:
    """Upload the checkpoint in `run` with its card and return the URL. Any failure raises InputError."""
    write_text(run / "README.md", str(card))
    try:
        api = HfApi()
        address = api.create_repo(hub_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=hub_id, folder_path=run, allow_patterns=UPLOADED, commit_message="Upload the model")
    except Exception as error:  # from the network, the server or the file system
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{run} was not uploaded to {hub_id} ({reason:.300}): try again.") from error
    return str(address)


def model_card(run: Path, hub_id: str) -> ModelCard:
    """Write the card of a finished run from its settings and checkpoint. The user adds the licence."""
    for name in ("args.json", "command.txt", "summary.json"):
        if not (run / name).is_file():
            raise InputError(f"{run} is not a finished run: {name} is missing.")
    settings, summary = read_settings(run), read_object(run / "summary.json")
    command = (run / "command.txt").read_text(encoding="utf-8").strip()
    stage = Path(shlex.split(command)[1]).stem.removeprefix("train_")
    kind = model_kind(run)
    source = base_model(settings)
    is_t5 = kind == "policy" and read_object(run / "config.json").get("is_encoder_decoder") is True
    data = ModelCardData(
        base_model=source,
        library_name="transformers" if kind == "policy" else "nanorlhf",
        pipeline_tag=None if kind != "policy" else "text2text-generation" if is_t5 else "text-generation",
        tags=["nanorlhf", "rlhf", stage],
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        stage=stage,
        kind=kind,
        auto_class="AutoModelForSeq2SeqLM" if is_t5 else "AutoModelForCausalLM",
        use=USES[kind],
        hub_id=hub_id,
        source=source,
        command=command,
        settings={name: cell(value) for name, value in flat_settings(settings).items()},
        summary={name: f"{x:.4g}" if isinstance(x, float) else x for name, x in summary.items()},
        version=__version__,
    )


def model_kind(directory: Path) -> str:
    """Return the kind of model in a checkpoint directory, a key of USES."""
    if (directory / "discriminator.json").exists():
        return "discriminator"
    config = read_object(directory / "config.json")
    if config.get("architectures") == ["ScalarModel"]:
        return "reward model"
    return "adapted policy" if "adapter_size" in config else "policy"


def base_model(settings: dict) -> str | None:
    """Return the Hub id that a run started from, following run directories; None if unknown."""
    for _ in range(10):  # the directories may form a cycle
        name = settings.get("model") or settings.get("sft")
        if not isinstance(name, str):
            return None
        if not Path(name).exists():
            return name if is_hub_id(name) else None
        settings = read_settings(name)
    return None


def cell(value: Any) -> str:
    """Format a setting for a Markdown table: one line of code, escaped."""
    text = " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    run_module(main, Args)
