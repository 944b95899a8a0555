"""The Makefile works with make 3.81 and the tools of macOS, and its help is complete."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text()
CODE = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(
    "newer",
    [
        r"\$\(file ", r"\$\(guile ", r"!=", r"::=", r"\.ONESHELL", r"\.RECIPEPREFIX", r"&:", r"\bundefine\b",  # make
        r"/proc\b", r"\bnproc\b", r"\bsed -i", r"\breadlink -f", r"\bdate \+%s%N", r"\brealpath\b", r"\btac\b",  # GNU
    ],
)  # fmt: skip
def test_nothing_needs_a_newer_make_than_3_81_or_linux(newer: str) -> None:
    assert not re.search(newer, CODE), newer


@pytest.mark.parametrize(
    ("variables", "backend"), [({}, "auto"), ({"UV_TORCH_BACKEND": "cpu"}, "cpu"), ({"UV_TORCH_BACKEND": ""}, "unset")]
)
def test_uv_installs_pytorch_for_the_detected_gpu(tmp_path, variables, backend) -> None:
    """By default uv installs the CUDA wheels on Linux. The test uses a fake uv that records its arguments."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "uv").write_text('#!/bin/sh\necho "${UV_TORCH_BACKEND-unset} $*" > told\n')
    (tmp_path / "python").write_text("#!/bin/sh\nmkdir -p .venv\n")
    for name in ("uv", "python"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python"), **variables}
    subprocess.run(["make", ".venv"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert (tmp_path / "told").read_text() == f"{backend} pip install --quiet --python .venv/bin/python -e .\n"


def test_the_makefile_fits_on_a_page() -> None:
    assert len(TEXT.splitlines()) <= 90


def test_the_help_lists_every_verb_and_every_pipeline() -> None:
    verbs = set(re.findall(r"^# make ([a-z-]+)", TEXT, re.M))
    phony = set(re.search(r"^\.PHONY: (.*)", TEXT, re.M)[1].split())
    assert phony - verbs == {"help", "style", "tests", ".venv", "$(PIPELINES)"}
    pipelines = {path.stem for path in (ROOT / "pipelines").glob("*.sh")} - {"common"}
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make ([a-z-]+) +\w", done.stdout, re.M)) == verbs | pipelines


def test_a_pipeline_gets_the_variables_of_make_and_the_extra_that_it_needs() -> None:
    words = ["make", "-n", "-W", "pyproject.toml", "reason", "SEED=2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    installed = re.findall(r"-e '?\.(?:\[(\w+)\])?", done.stdout)
    assert installed == ["", "real", "reason"] and done.stdout.endswith("bash pipelines/reason.sh\n")
