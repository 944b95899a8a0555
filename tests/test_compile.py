"""Every Triton kernel compiles for Ampere and Hopper, without a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "shared_memory"), [(80, 164_000), (90, 228_000)])
def test_every_kernel_compiles_and_some_setting_fits_the_shared_memory(architecture, shared_memory, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), str(architecture)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    smallest: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, shared = line.split()[0], int(line.split()[-1])
        smallest[name] = min(shared, smallest.get(name, shared))
    assert len(smallest) == 8 and max(smallest.values()) <= shared_memory
