"""SFT, soaked, of which every start but the first has a defect: `python -m tests.soaked DEFECT`."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import train_sft
from tools import soak


def other_weights(out: Path) -> None:
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")


DEFECTS: dict[str, Callable[[Path], object]] = {
    "other weights": other_weights,
    "a temporary file": lambda out: tempfile.mkstemp(),
    "half a save": lambda out: (out / "state" / ".partial").mkdir(),
    "a damaged state": lambda out: os.truncate(max((out / "state").iterdir()) / "state.pt", 100),
    "shared memory": lambda out: Path("/dev/shm/left").touch(),
    "a process": lambda out: subprocess.Popen(["sleep", "30"], start_new_session=True),
    "an error": lambda out: 1 / 0,
}


def soak_with(defect: str) -> int:
    def main(args: train_sft.Args) -> None:
        train_sft.main(args)
        if args.resume or args.overwrite:
            DEFECTS[defect](args.out)

    soak.STAGES = {"sft": main}
    soak.FAULTS = {"SIGKILL": soak.FAULTS["SIGKILL"]}
    soak.GRACE = 1.0
    return soak.main(soak.Args(hours=0))


if __name__ == "__main__":
    sys.exit(soak_with(sys.argv[1]))
