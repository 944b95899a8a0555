"""The Makefile: what it must not use, so that macOS's make, 3.81, and its tools run it; and what the demo says."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanorlhf.cli import named_pairs
from tools.page_commands import commands_of

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Makefile").read_text()
CODE = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(
    "newer",
    [
        r"\$\(file ", r"\$\(guile ", r"!=", r"::=", r"\.ONESHELL", r"\.RECIPEPREFIX", r"&:", r"\bundefine\b",  # make
        r"/proc\b", r"\bnproc\b", r"\bsed -i", r"\breadlink -f", r"\bdate \+%s%N", r"\brealpath\b", r"\btac\b",  # GNU
    ],
)  # fmt: skip
def test_nothing_is_newer_than_make_3_81_or_of_linux_alone(newer: str) -> None:
    assert not re.search(newer, CODE), newer


def test_processes_are_one_where_they_are_not_forked(tmp_path: Path) -> None:
    """As on macOS: `uname` says Darwin."""
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho Darwin\n")
    uname.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("--processes 1") == 4 and "--processes 2" not in done.stdout


@pytest.mark.parametrize(
    ("variables", "backend"), [({}, "auto"), ({"UV_TORCH_BACKEND": "cpu"}, "cpu"), ({"UV_TORCH_BACKEND": ""}, "unset")]
)
def test_uv_takes_pytorch_for_the_gpu_that_it_finds(tmp_path, variables, backend) -> None:
    """Left alone it takes the wheels for CUDA on Linux. With a uv and a Python that write down what they are told."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "uv").write_text('#!/bin/sh\necho "${UV_TORCH_BACKEND-unset} $*" > told\n')
    (tmp_path / "python").write_text("#!/bin/sh\nmkdir -p .venv\n")
    for name in ("uv", "python"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python"), **variables}
    subprocess.run(["make", ".venv"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert (tmp_path / "told").read_text() == f"{backend} pip install --quiet --python .venv/bin/python -e .\n"


def test_the_help_lists_every_target_that_a_reader_may_want() -> None:
    listed = set(re.findall(r"^# make ([a-z-]+)", TEXT, re.M))
    phony = set(re.search(r"^\.PHONY: ((?:.*\\\n)*.*)", TEXT, re.M)[1].replace("\\\n", "").split())
    assert phony - listed == {"help", "style", "format", "tests", ".venv"}
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^make ([a-z-]+)", done.stdout, re.M)) == listed


def test_the_demo_says_what_each_stage_does_and_what_is_left() -> None:
    """One line before each stage; the shares of the time rise."""
    lines = re.findall(r"\$\(call say,(\d+),(\d) of 6: [^,]+,[A-Z][^,]+\.\)", TEXT)
    assert [stage for _, stage in lines] == ["2", "3", "4", "5", "6"] == [str(2 + i) for i in range(len(lines))]
    shares = [int(share) for share, _ in lines]
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] < 100
    programs = [command.program for command in commands_of("demo")]
    page = "nanorlhf.report.microscope"
    assert programs == ["data.tiny", "train_sft.py", "train_rm.py", "train_ppo.py", page, "train_dpo.py", "eval.py"]


def test_the_demo_ends_with_the_paths_of_its_pages() -> None:
    done = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    said = done.stdout[done.stdout.rindex("== done in") :]
    assert "runs/tiny/eval/report.html" in said and "runs/tiny/ppo/microscope.html" in said


def test_the_demo_evaluates_what_it_has_trained() -> None:
    *_, evaluation = commands_of("demo")
    words = evaluation.arguments
    start = words.index("--policies")
    pairs = named_pairs("--policies", tuple(words[start + 1 : words.index("--reward-model")]))
    assert pairs == [(name, f"runs/tiny/{name}") for name in ("sft", "ppo", "dpo")]


@pytest.mark.parametrize(
    ("left", "flag"), [(None, "--overwrite"), ("state/.partial", "--overwrite"), ("state/step-00000008", "--resume")]
)
def test_a_stage_goes_on_from_a_state_and_begins_again_without_one(left, flag, tmp_path) -> None:
    """A run whose first save failed has a directory of states, and none in it."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$*" >> told\n')
    python.chmod(0o755)
    if left is not None:
        (tmp_path / "films/ppo" / left).mkdir(parents=True)
    words = ("make", "-o", ".venv", "-o", ".venv/real", "sentiment", "PY=./python", "MODEL=m", "FILMS=films")
    subprocess.run(words, cwd=tmp_path, capture_output=True, check=True)
    stage = next(line for line in (tmp_path / "told").read_text().splitlines() if line.startswith("train_ppo.py"))
    assert stage.endswith(f"--out films/ppo --seed 1 {flag}")
