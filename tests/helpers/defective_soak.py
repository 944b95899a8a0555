"""Soak SFT with a defect in every run except the undisturbed one.

`python -m tests.helpers.defective_soak` prints the findings.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
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
CRASHES = {"a crash": 1, "crashes": 9}  # number of starts of a run that crash


def soak_with(defect: str, directory: Path) -> tuple[int, str, list[str]]:
    """Return the exit code, the output, and the files of the run that the soak kept."""

    def main(args: train_sft.Args) -> None:
        is_disturbed = not (args.out.parents[2] / "before").exists()  # only the undisturbed run has it
        if is_disturbed and defect in CRASHES:
            with (directory / "starts").open("a") as file:
                file.write("\n")
            if (directory / "starts").stat().st_size <= CRASHES[defect]:
                os.kill(os.getpid(), signal.SIGSEGV)
        train_sft.main(args)
        if is_disturbed and defect in DEFECTS:
            DEFECTS[defect](args.out)

    soak.STAGES = {"sft": main}
    soak.FAULTS = {"SIGKILL": soak.FAULTS["SIGKILL"]}
    soak.GRACE = 1.0
    tempfile.tempdir = str(directory)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = soak.main(soak.Args(hours=0))
    return code, output.getvalue(), [path.name for path in directory.glob("soak-*/kept/run/sft/*")]


if __name__ == "__main__":
    findings = {}
    temporary_directory = tempfile.gettempdir()
    for name in (*CRASHES, *DEFECTS):  # "a process" keeps running
        for _ in range(3):  # the kill may come between the end of the run and the defect
            os.environ["TMPDIR"] = tempfile.tempdir = temporary_directory  # the soak sets its own
            findings[name] = soak_with(name, Path(tempfile.mkdtemp()))
            if findings[name][0] == (name != "a crash"):
                break
    print(json.dumps(findings))
