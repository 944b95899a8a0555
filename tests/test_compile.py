"""Every Triton kernel compiles for Ampere and Hopper, without a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


SHARED_MEMORY = {"80": 164_000, "90": 228_000}  # bytes per multiprocessor of Ampere and Hopper


@pytest.mark.slow
def test_every_kernel_compiles_and_some_setting_fits_the_shared_memory(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    smallest: dict[tuple[str, str], int] = {}
    for line in done.stdout.splitlines():
        architecture, name, *_, shared = line.split()
        key = architecture, name
        smallest[key] = min(int(shared), smallest.get(key, int(shared)))
    assert len(smallest) == 2 * 4
    assert all(shared <= SHARED_MEMORY[architecture] for (architecture, _), shared in smallest.items())
