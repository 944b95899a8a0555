"""--push-to-hub: upload a finished run's checkpoint to the Hugging Face Hub, with a model card."""

import shlex
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from nanorlhf.errors import InputError
from nanorlhf.files import read_object
from nanorlhf.training.run_directory import read_settings
from nanorlhf.training.settings import RunArgs

# files of a run directory; state, logs and samples are not uploaded
UPLOADED = ["README.md", "adapter/*", "config.json", "discriminator.json", "model.safetensors", "tokenizer*.json"]
TEMPLATE = Path(__file__).with_name("model_card.md")
USES = {
    "policy": "transformers loads it",
    "adapted policy": "It has adapters, which transformers does not know: load it with nanorlhf",
    "reward model": "It scores a text at its last token, and needs nanorlhf",
    "discriminator": "It compares two programs for the same prompt, and needs nanorlhf",
}


def check_hub_id(hub_id: str) -> None:
    """Raise InputError unless `hub_id` is OWNER/NAME and there is a token; before training, without the network."""
    if not is_hub_id(hub_id):
        raise InputError(f"--push-to-hub {hub_id}: it must be OWNER/NAME, such as someone/tldr-ppo.")
    if get_token() is None:
        raise InputError(f"--push-to-hub {hub_id}: there is no token: log in with `hf auth login`, or set HF_TOKEN.")


def is_hub_id(text: str) -> bool:
    """Whether it is OWNER/NAME in characters that the Hub allows."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return "/" in text


def push(hub_id: str, out: Path, card: ModelCard) -> str:
    """Upload the checkpoint in `out` with its card; returns the URL. A new repository is private.

    On any error it raises InputError, which says how to upload later: the run is already on disk.
    """
    (out / "README.md").write_text(str(card), encoding="utf-8", errors="backslashreplace")
    try:
        api = HfApi()
        address = api.create_repo(hub_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=hub_id, folder_path=out, allow_patterns=UPLOADED, commit_message="Upload the model")
    except Exception as error:  # of the network, the server or the file system
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        includes = shlex.join(word for pattern in UPLOADED for word in ("--include", pattern))
        raise InputError(
            f"--push-to-hub {hub_id}: the run is finished and saved in {out}, but not uploaded ({reason:.300}): "
            f"later, run `hf upload {hub_id} {shlex.quote(str(out))} . --private {includes}`."
        ) from error
    return str(address)


def model_card(stage: str, args: RunArgs, summary: dict[str, float]) -> ModelCard:
    """The card of a finished run, from its settings and its checkpoint. The licence is left to the user."""
    kind = kind_of_model(args.out)
    source = base_model(asdict(args))
    is_t5 = kind == "policy" and read_object(args.out / "config.json").get("is_encoder_decoder") is True
    data = ModelCardData(
        base_model=source,
        library_name="transformers" if kind == "policy" else "nanorlhf",
        pipeline_tag=None if kind != "policy" else "text2text-generation" if is_t5 else "text-generation",
        tags=["nanorlhf", "rlhf", stage.lower()],
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        stage=stage,
        kind=kind,
        auto_class="AutoModelForSeq2SeqLM" if is_t5 else "AutoModelForCausalLM",
        use=USES[kind],
        hub_id=args.push_to_hub,
        source=source,
        command=" ".join(("python", Path(sys.argv[0]).name, shlex.join(sys.argv[1:]))).strip(),
        settings={name: cell(value) for name, value in asdict(args).items()},
        summary={name: f"{x:.4g}" if isinstance(x, float) else x for name, x in summary.items()},
        version=nanorlhf_version(),
    )


def kind_of_model(directory: Path) -> str:
    """The model in a checkpoint directory, a key of USES."""
    if (directory / "discriminator.json").exists():
        return "discriminator"
    config = read_object(directory / "config.json")
    if config.get("architectures") == ["ScalarModel"]:
        return "reward model"
    return "adapted policy" if "adapter_size" in config else "policy"


def base_model(settings: dict) -> str | None:
    """The Hub id that a run started from, followed through run directories; None if unknown."""
    for _ in range(10):  # directories may refer to each other in a circle
        start = settings.get("model") or settings.get("sft")
        if not isinstance(start, str):
            return None
        if not Path(start).exists():
            return start if is_hub_id(start) else None
        settings = read_settings(start)
    return None


def cell(value: Any) -> str:
    """A setting for a Markdown table: one line of code, escaped."""
    text = " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
    return f"`{text}`" if text else ""


def nanorlhf_version() -> str:
    try:
        return version("nanorlhf")
    except PackageNotFoundError:  # run from a clone
        return "(not installed)"
