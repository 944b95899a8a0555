"""The pipelines work with macOS's bash 3.2 and continue after an interruption; the demo explains its stages."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanorlhf.cli import named_pairs
from tests.helpers.page_commands import recorded_commands

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "pipelines").glob("*.sh"))
DEMO = (ROOT / "pipelines/demo.sh").read_text()


def read_code(script: Path) -> str:
    return "\n".join(line for line in script.read_text().splitlines() if not line.lstrip().startswith("#"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the pipelines, with a fake Python that records its arguments in the file `told`."""
    shutil.copytree(ROOT / "pipelines", tmp_path / "pipelines")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*" >> told\n')
    python.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_nothing_needs_a_newer_bash_than_3_2_or_linux(script: Path) -> None:
    newer = (
        r"\bdeclare -A", r"\bmapfile\b", r"\breadarray\b", r"\$\{\w+[,^@]", r"&>>", r"\|&", r"\bglobstar\b", r"\[-1\]",
        r"/proc\b", r"\bnproc\b", r"\bsed -i", r"\breadlink -f", r"\bdate \+%s%N", r"\brealpath\b", r"\btac\b",  # GNU
    )  # fmt: skip
    assert not [word for word in newer if re.search(word, read_code(script))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_pipeline_starts_with_its_title_and_stops_at_the_first_error(script: Path) -> None:
    if script.name != "common.sh":
        shebang, title, *_ = script.read_text().splitlines()
        assert shebang == "#!/usr/bin/env bash" and re.match(r"# \w", title)
        begins = 'set -euo pipefail\ncd "$(dirname "$0")/.."\n. pipelines/common.sh\n'
        assert read_code(script).startswith(begins)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert not done.stdout and done.returncode == 0


def test_one_process_is_used_on_macos(copy: Path) -> None:
    """Like on macOS: `uname` prints Darwin."""
    uname = copy / ".venv/bin/uname"
    uname.write_text("#!/bin/sh\necho Darwin\n")
    uname.chmod(0o755)
    subprocess.run(["bash", "pipelines/demo.sh"], cwd=copy, env={"PATH": "/usr/bin:/bin"}, check=True)
    told = (copy / "told").read_text()
    assert told.count("--processes 1") == 4 and "--processes 2" not in told


def test_a_pipeline_runs_from_anywhere_with_the_python_of_an_activated_environment(copy: Path) -> None:
    (copy / ".venv").rename(copy / "active")
    environment = {"PATH": f"{copy / 'active/bin'}:/usr/bin:/bin", "SUMS": "runs/my sums", "SEED": "7"}
    subprocess.run(["bash", copy / "pipelines/sums.sh"], cwd="/", env=environment, check=True)
    told = (copy / "told").read_text().splitlines()
    assert told[0] == "-m data.sums --out runs/my sums --seed 7" and len(told) == 6


def test_a_pipeline_ends_with_the_first_program_that_fails(copy: Path) -> None:
    (copy / ".venv/bin/python").write_text('#!/bin/sh\necho "$*" >> told\ncase "$*" in train_rm*) exit 2;; esac\n')
    done = subprocess.run(["bash", "pipelines/demo.sh"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("python train_rm.py --data runs/tiny/data")
    assert len((copy / "told").read_text().splitlines()) == 3 and "4 of 6" not in done.stdout


@pytest.mark.parametrize(
    ("left", "flag"), [(None, "--overwrite"), ("state/.partial", "--overwrite"), ("state/step-00000008", "--resume")]
)
def test_a_stage_resumes_from_a_state_and_restarts_without_one(left, flag, copy) -> None:
    """If a run's first save failed, its directory of states is empty."""
    if left is not None:
        (copy / "films/ppo" / left).mkdir(parents=True)
    environment = os.environ | {"MODEL": "m", "FILMS": "films"}
    subprocess.run(["bash", "pipelines/sentiment.sh"], cwd=copy, env=environment, check=True)
    [stage] = [line for line in (copy / "told").read_text().splitlines() if line.startswith("train_ppo.py")]
    assert stage.endswith(f"--out films/ppo --seed 1 {flag}")


def test_a_stage_that_has_finished_is_not_run_again(copy: Path) -> None:
    for name in ("sft", "rloo_2"):
        (copy / "runs/harmless" / name).mkdir(parents=True)
        (copy / "runs/harmless" / name / "summary.json").touch()
    subprocess.run(["bash", "pipelines/harmless.sh"], cwd=copy, env=os.environ | {"MODEL": "m"}, check=True)
    told = [line for line in (copy / "told").read_text().splitlines() if line.startswith("train_")]
    runs = [re.search(r"--out runs/harmless/(\w+) --seed (\d)", line) for line in told]
    assert [run.groups() for run in runs] == [("ppo", "1"), ("rloo", "1"), ("ppo_2", "2")]


# ----------------------------------------------------------------------------------------------------------- the demo
def test_the_demo_prints_what_each_stage_does_and_its_progress() -> None:
    """A line is printed before each stage; the stated shares of the time increase."""
    lines = re.findall(r'^say (\d+) "(\d) of 6: [^"]+" "[A-Z][^"]+\."$', DEMO, re.M)
    assert [stage for _, stage in lines] == ["2", "3", "4", "5", "6"]
    shares = [int(share) for share, _ in lines]
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] < 100
    programs = [command.program for command in recorded_commands("demo")]
    page = "nanorlhf.report.microscope"
    assert programs == ["data.tiny", "train_sft.py", "train_rm.py", "train_ppo.py", page, "train_dpo.py", "eval.py"]


def test_the_demo_ends_with_the_paths_of_its_pages(copy: Path) -> None:
    done = subprocess.run(["bash", "pipelines/demo.sh"], cwd=copy, capture_output=True, text=True, check=True)
    said = done.stdout[done.stdout.rindex("== done in") :]
    assert "runs/tiny/eval/report.html" in said and "runs/tiny/ppo/microscope.html" in said


def test_the_demo_evaluates_what_it_has_trained() -> None:
    *_, evaluation = recorded_commands("demo")
    words = evaluation.arguments
    start = words.index("--policies")
    pairs = named_pairs("--policies", tuple(words[start + 1 : words.index("--reward-model")]))
    assert pairs == [(name, f"runs/tiny/{name}") for name in ("sft", "ppo", "dpo")]
