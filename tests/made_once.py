"""Directories that several tests read and no test changes: made once, though each worker has its own copy."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """This worker's own directory with what `make` writes: the first worker to ask makes it, the others copy it."""
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
