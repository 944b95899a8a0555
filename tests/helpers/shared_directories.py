"""Directories that several tests read but don't change: made once, then copied for each worker."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory with the output of `make`: the first worker makes it, the others copy it."""
    shared = tmp_path_factory.getbasetemp().parent / f"{name}.shared"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shared = tmp_path_factory.mktemp(name)
        make(shared)
        return shared
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            make(shared.with_suffix(".partial"))
            shared.with_suffix(".partial").rename(shared)
    return Path(shutil.copytree(shared, tmp_path_factory.mktemp(name), dirs_exist_ok=True))
