"""The lock that docs/installing.md makes with uv has the versions of .ci/constraints.txt."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from course.copies import copy_files

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
PINNED = dict(line.split("==") for line in LINES if not line.startswith("#"))


def commands() -> list[str]:
    [block] = re.findall(r"```text\n(uv lock .*?)```", (ROOT / "docs" / "installing.md").read_text(), re.S)
    return block.splitlines()


def test_the_pages_command_passes_each_pinned_version(tmp_path) -> None:
    """Uses a fake uv that prints its arguments."""
    uv = tmp_path / "uv"
    uv.write_text('#!/bin/sh\necho "$@"\n')
    uv.chmod(0o755)
    lock, sync = (
        subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
        ).stdout.split()
        for command in commands()
    )
    assert lock[0] == "lock" and lock[1::2] == ["-P"] * len(PINNED)
    assert dict(pin.split("==") for pin in lock[2::2]) == PINNED
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sync[:3] == ["sync", "--locked", "--extra"] and sync[3] in extras


def test_the_repository_has_no_lock_because_it_would_name_an_index() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "uv.lock" not in listed and "uv.lock" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.slow
def test_uv_locks_the_tested_versions(tmp_path) -> None:
    """Reads the index, but downloads no package: a minute."""
    if shutil.which("uv") is None:
        pytest.skip("no uv: pip install uv")
    copy_files(ROOT, tmp_path)
    done = subprocess.run(["bash", "-c", commands()[0]], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    if re.search("dns error|connect|timed out|Temporary failure", done.stderr):
        pytest.skip("uv can't reach an index")
    assert done.returncode == 0, done.stderr[-2000:]
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads((tmp_path / "uv.lock").read_text())["package"]:
        versions.setdefault(package["name"], set()).add(package.get("version", "").partition("+")[0])
    locked = versions.keys() & PINNED.keys()
    assert len(locked) > 150 and {name: versions[name] for name in locked} == {name: {PINNED[name]} for name in locked}
