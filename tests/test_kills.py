"""A few kills at random moments; `python -m tools.kills` makes as many as you like."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--kills", "5"), ("--kills", "2", "--processes", "2")])
def test_killed_runs_end_in_the_same_bits(miniature, flags):
    result = subprocess.run(
        [sys.executable, "-m", "tools.kills", "--miniature", str(miniature.root), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "all ended in the same bits" in result.stdout
