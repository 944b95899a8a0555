"""Run modified scripts and packages in a small world, and check invariants.

The invariants are true of any correct policy-gradient code; no check compares source text. The checks run in separate
processes, in a copy of this tree with the modified files.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from nanorlhf.errors import InputError
from nanorlhf.rules.finding import Finding, nearest_first

ROOT = Path(__file__).resolve().parents[2]
EXAMINED = ("train_*.py", "eval.py", "nanorlhf", "kernels", "data")
"""the scripts and packages that are examined"""
PROCESSES = (("model_checks", "rollout_checks", "whole_run_checks"), ("update_checks", "stage_checks", "family_checks"))
"""modules with checks; each tuple runs in one process"""


def examine(scripts: Path, flags: Sequence[str] = ()) -> tuple[list[Finding], list[str]]:
    """Return findings for the scripts in a directory, nearest to the input first, and the checks that don't apply.

    Missing files and packages are taken from this tree. flags: passed to the training scripts that have them.
    Raises InputError for a directory without scripts or packages, and for flags that no script accepts.
    """
    if not (ROOT / "train_ppo.py").is_file():
        raise InputError(f"nanorlhf.doctor code checks a clone of the repository, but {ROOT} isn't one.")
    if not scripts.is_dir():
        raise InputError(f"--scripts {scripts}: directory not found.")
    if not any(path for pattern in EXAMINED[:4] for path in scripts.glob(pattern)):
        raise InputError(f"--scripts {scripts} contains neither a script such as train_ppo.py nor nanorlhf/.")
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory:
        tree = Path(directory)
        is_this_tree = scripts.resolve() == ROOT
        if not is_this_tree:
            overlay(ROOT, tree)
            overlay(scripts, tree)
            for path in ("nanorlhf/doctor", "nanorlhf/rules"):  # the doctor's own code
                shutil.rmtree(tree / path)
                shutil.copytree(ROOT / path, tree / path)
        root = ROOT if is_this_tree else tree
        processes = [start_checks(root, tree / f"world-{i}", part, flags) for i, part in enumerate(PROCESSES)]
        findings, unchecked = [], []
        for process in processes:
            out, errors = process.communicate()
            if process.returncode:
                findings.append(startup_finding(errors))
                continue
            result = json.loads(out.splitlines()[-1])
            if "error" in result:
                raise InputError(result["error"])
            findings += [Finding(**finding) for finding in result["findings"]]
            unchecked += result["unchecked"]
    return merge_by_name(nearest_first(findings)), list(dict.fromkeys(unchecked))


def merge_by_name(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings with the same name, since one bug can affect every script: keep the first and count the others."""
    by_name: dict[str, list[Finding]] = {}
    for finding in dict.fromkeys(findings):
        by_name.setdefault(finding.name, []).append(finding)
    return [
        first if not more else replace(first, seen=f"{first.seen} {len(more)} more like this.")
        for first, *more in by_name.values()
    ]


def overlay(source: Path, tree: Path) -> None:
    """Copy the scripts and packages of a directory into the tree, overwriting existing files."""
    for pattern in EXAMINED:
        for path in source.glob(pattern):
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, tree / path.name, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copyfile(path, tree / path.name)


def start_checks(tree: Path, world: Path, modules: Sequence[str], flags: Sequence[str]) -> subprocess.Popen[str]:
    """Start a single-threaded process that runs the checks of these modules in the tree."""
    environment = os.environ | {
        "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1",
        "TQDM_DISABLE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "nanorlhf.doctor.code", str(world), *modules, "--", *flags]
    return subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def startup_finding(errors: str) -> Finding:
    lines = errors.strip().splitlines() or ["no output"]
    positions = [line.strip() for line in lines if line.strip().startswith("File ") and "/lib/python" not in line]
    return Finding(
        name="crash",
        seen=f"The code can't be run: {lines[-1]:.300}",
        means="It fails before anything can be checked.",
        where=positions[-1].removeprefix("File ") if positions else "the changed files",
    )


def run_modules(world: Path, modules: Sequence[str], flags: Sequence[str] = ()) -> tuple[list[Finding], list[str]]:
    """Run all checks of the modules in a new world. Raises InputError for flags that no script accepts."""
    import importlib

    import torch

    from nanorlhf.doctor.cases import CannotCheckError, Cases
    from nanorlhf.doctor.world import make_world

    torch.set_num_threads(1)
    cases = Cases(make_world(world), flags=tuple(flags))
    cases.check_flags()
    findings: list[Finding] = []
    unchecked: list[str] = []
    for module in modules:
        for function in importlib.import_module(f"nanorlhf.doctor.{module}").CHECKS:
            try:
                findings += function(cases)
            except CannotCheckError as error:
                unchecked.append(f"{function.__name__}: {error}")
            except Exception as error:  # noqa: BLE001  a crash of the examined code is a finding
                findings.append(crash_finding(function.__name__, error))
    return findings, unchecked


def crash_finding(name: str, error: Exception) -> Finding:
    """Return the finding for a check that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    tree = Path.cwd()
    examined = [f for f in frames if Path(f.filename).is_relative_to(tree) and "doctor" not in Path(f.filename).parts]
    frame = examined[-1] if examined else frames[-1]
    file = Path(frame.filename)
    file = file.relative_to(tree) if file.is_relative_to(tree) else file
    return Finding(
        name="crash",
        seen=f"The check {name!r} ended with {type(error).__name__}: {' '.join(str(error).split()):.200}",
        means="The modified code fails with settings that work in this tree, or the arguments of a function changed.",
        where=f"{file}:{frame.lineno} ({frame.name})",
    )


if __name__ == "__main__":
    _end = sys.argv.index("--")
    try:
        _findings, _unchecked = run_modules(Path(sys.argv[1]), sys.argv[2:_end], sys.argv[_end + 1 :])
        print(json.dumps({"findings": [asdict(finding) for finding in _findings], "unchecked": _unchecked}))
    except InputError as _error:
        print(json.dumps({"error": str(_error)}))
