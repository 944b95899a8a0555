"""The soak test's faults really happen, it finds defects, and the library survives a round."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.fault_effects import effects

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks, and needs /proc")]


def run(directory: Path, *command: str) -> subprocess.CompletedProcess:
    """Run a module with its temporary files in the directory."""
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)},
    )  # fmt: skip


def test_every_fault_really_happens(tmp_path):
    result = run(tmp_path, "tests.helpers.fault_effects")
    assert result.returncode == 0, result.stderr
    messages = json.loads(result.stdout)
    expected = effects(messages.pop("mounted"))
    assert messages.keys() == expected.keys()
    for fault, said in expected.items():  # on a busy machine answers may be late even without a fault
        assert said in messages[fault], (fault, messages[fault])


def test_defects_are_found_and_their_files_kept(tmp_path):
    result = run(tmp_path, "tests.helpers.defective_soak")
    assert result.returncode == 0, result.stderr
    findings = json.loads(result.stdout)
    code, said, _ = findings.pop("a crash")  # listed and resumed
    assert code == 0 and "| a library's crash | 0 | 1 | 0 | 1 |" in said, said
    code, said, _ = findings.pop("crashes")
    assert code == 1 and "after a library's crash: native code has crashed 3 times" in said, said
    differs = "its files differ from the undisturbed run: "
    expected = {
        "other weights": f"{differs}run/sft/model.safetensors.",
        "a temporary file": f"{differs}tmp/tmp",
        "half a save": f"{differs}run/sft/state/.partial.",
        "a damaged state": "step-00000012 is damaged (state.pt does not match its checksum)",
        "shared memory": "it left shared memory: left",
        "a process": "it left a process",
        # the kill may come between its traceback and its end
        "an error": ("the run ended with 1", "the run ended with a traceback or without an error message"),
    }
    assert findings.keys() == expected.keys()
    for defect, sentences in expected.items():
        code, said, kept = findings[defect]
        assert code == 1 and "model.safetensors" in kept, (defect, said)
        prefix = "FAILED in round 1, sft with {'processes': 1}, after SIGKILL: "
        possible = sentences if isinstance(sentences, tuple) else (sentences,)
        assert any(prefix + sentence in said for sentence in possible), (defect, said)
        assert "--hours 0 --seed 0 --first-round 1" in said


def test_a_round_ends_in_the_bits_of_undisturbed_runs(tmp_path):
    """Runs one round with two processes; `python -m tools.soak` runs as many as you like."""
    result = run(tmp_path, "tools.soak", "--hours", "0", "--first-round", "2")
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    drawn, hit, *_ = map(int, result.stdout.split("| all |")[1].split("\n")[0].rstrip("| ").split("|"))
    assert 0 < hit <= drawn and "\n1 rounds, " in result.stdout and not list(tmp_path.glob("soak-*"))
