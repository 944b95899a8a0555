"""A wheel installs one top-level package, and its commands run next to a user's data.py and kernels.py.

`make package` runs these tests in a new environment with only the dependencies in pyproject.toml.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import nanorlhf.__main__
from course.copies import CODE, OTHERS, copy_files, list_files
from nanorlhf import __version__
from nanorlhf.__main__ import ALIASES, find_module, main, programs

ROOT = Path(__file__).resolve().parents[2]
NOT_CODE = {Path("kernels") / name for name in ("README.md", "compiled.csv", "matmuls.csv", "measured.csv")}


def build(kind: str, tree: Path) -> Path:
    """Build a wheel, sdist or editable wheel with this environment's setuptools, without a network."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist/{kind}')"
    (tree / "dist" / kind).mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    [file] = (tree / "dist" / kind).iterdir()
    return file


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the repository, because setuptools leaves directories behind."""
    directory = tmp_path_factory.mktemp("package") / "tree"
    copy_files(ROOT, directory)
    return directory


@pytest.fixture(scope="module")
def wheel(tree) -> dict[str, str]:
    """Return the text of each file in the wheel."""
    with zipfile.ZipFile(build("wheel", tree)) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def wheel_path(path: Path) -> str:
    """Return the path in the wheel of a file of the repository."""
    return path.as_posix() if path.parts[0] == "nanorlhf" else f"nanorlhf/{path.as_posix()}"


def test_a_wheel_has_one_top_level_package_with_every_file_of_the_library(wheel) -> None:
    assert {name.partition("/")[0] for name in wheel} == {"nanorlhf", f"rlhf_nothing_hidden-{__version__}.dist-info"}
    shipped = {wheel_path(path) for path in set(list_files(ROOT, CODE)) - NOT_CODE}
    assert {name for name in wheel if name.startswith("nanorlhf/")} == shipped


def test_only_imports_of_kernels_and_data_differ_in_the_wheel(wheel) -> None:
    for path in list_files(ROOT, CODE):
        if path.suffix == ".py":
            text = re.sub(r"from nanorlhf\.(kernels|data)\b", r"from \1", wheel[wheel_path(path)])
            assert text == (ROOT / path).read_text(), path


def test_a_wheels_modules_import_each_other_from_within_it(wheel) -> None:
    ours = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    for name, text in wheel.items():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
                assert not {module.partition(".")[0] for module in modules} & ours - {"nanorlhf"}, (name, modules)


def test_an_editable_install_points_to_the_repositorys_folders(tree) -> None:
    with zipfile.ZipFile(build("editable", tree)) as file:
        [finder] = [name for name in file.namelist() if name.endswith("_finder.py")]
        text = file.read(finder).decode()
    mapping = ast.literal_eval(re.search(r"^MAPPING.*?= (\{.*\})$", text, re.M)[1])
    assert mapping == {name: str(tree / name) for name in ("nanorlhf", "kernels", "data")}


def test_the_source_distribution_contains_the_repository(tree) -> None:
    with tarfile.open(build("sdist", tree)) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {path.as_posix() for path in list_files(ROOT, CODE + OTHERS)} <= names


# -------------------------------------------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def commands(tree, tmp_path_factory) -> Path:
    """Return the bin directory of an installed copy, with the command `nanorlhf`."""
    if "PACKAGE_BIN" in os.environ:
        return Path(os.environ["PACKAGE_BIN"]).resolve()
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    [site] = environment.glob("lib/python*/site-packages")
    # our dependencies, but no editable installs, because this repository is one of them
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, *(tree / "dist" / "wheel").iterdir()], check=True)
    return environment / "bin"


@pytest.fixture(scope="module")
def user_directory(tmp_path_factory) -> Path:
    """Return a directory with a user's modules that have the same names as ours."""
    directory = tmp_path_factory.mktemp("user_directory")
    for name in ("data", "kernels"):
        (directory / f"{name}.py").write_text("MINE = True\n")
    (directory / "my_rule.py").write_text(
        "import data\nimport kernels\n\n\ndef score(queries, responses):\n"
        "    return [float(data.MINE and kernels.MINE) - len(response) / 100 for response in responses]\n"
    )
    return directory


def run(user_directory: Path, *words: str | Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(user_directory), "TQDM_DISABLE": "1"}
    done = subprocess.run(list(map(str, words)), cwd=user_directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


SHORT = "--max-query-length 160 --num-epochs 0.25 --warmup-steps 0 --batch-size 8"
ROLLOUT = "--max-query-length 160 --response-length 12 --total-episodes 16 --batch-size 8"
PIPELINE = (
    "data.tiny --out runs/data --num-demonstrations 64 --num-comparisons 64 --num-validation 16",
    f"train_sft --data runs/data --out runs/sft {SHORT} --max-response-length 64 --n-layer 1 --d-model 16",
    f"train_rm --data runs/data --sft runs/sft --out runs/rm {SHORT} --max-response-length 64 --num-normalisation 8",
    f"train_ppo.py --data runs/data --sft runs/sft --reward-model runs/rm --out runs/ppo {ROLLOUT} --trace 4",
    "train_grpo --data runs/data --sft runs/sft --reward my_rule.py:score --reward-workers 2 --out runs/grpo "
    f"{ROLLOUT} --samples-per-query 2",
    "eval --data runs/data --policies sft runs/sft ppo runs/ppo --reward-model runs/rm --out runs/eval "
    "--max-query-length 160 --max-response-length 64 --num-queries 4 --response-length 12 --num-report-samples 1",
    "report.microscope --run runs/ppo",
)


ONE_BY_ONE = """
import shlex, sys
from nanorlhf.__main__ import main

for command in sys.argv[1:]:
    sys.argv = ["nanorlhf", *shlex.split(command)]
    main()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("wheel")
def test_an_installed_copy_runs_the_pipeline_next_to_a_users_modules(commands, user_directory) -> None:
    """Runs from data to the evaluation with the gold score, a function in data/; the user's rule imports the user's."""
    run(user_directory, commands / "nanorlhf", *PIPELINE[0].split())
    # one process, to import PyTorch once
    run(user_directory, commands / "python", "-c", ONE_BY_ONE, *PIPELINE[1:])
    assert (user_directory / "runs" / "eval" / "report.html").is_file()
    assert "train_ppo.py:" in (user_directory / "runs" / "ppo" / "microscope.html").read_text()


@pytest.mark.usefixtures("wheel")
def test_an_installed_copy_reports_commands_that_need_a_clone(commands, user_directory) -> None:
    command = [commands / "nanorlhf", "doctor", "code"]
    done = subprocess.run(command, cwd=user_directory, capture_output=True, text=True)
    assert done.returncode == 2 and "checks a clone of the repository" in done.stderr


@pytest.mark.usefixtures("wheel")
def test_an_installed_copy_and_the_tree_have_the_same_programs(commands, user_directory) -> None:
    assert run(user_directory, commands / "nanorlhf") == run(ROOT, sys.executable, "-m", "nanorlhf")


def test_programs_are_the_modules_that_read_the_command_line() -> None:
    listed = programs()
    assert list(listed)[:6] == [f"train_{name}" for name in ("dpo", "grpo", "ppo", "rlcf", "rm", "sft")]
    assert {"eval", "data.tiny", "doctor", "rlcf.train_discriminator", "report.microscope"} <= listed.keys()
    assert not {"rewards.workers", "sandbox.supervisor", "doctor.code"} & listed.keys()
    assert all(listed.values())


@pytest.mark.parametrize("name", ["train_pop", "ppo", "../eval", "data.", "", "nanorlhf.ppo"])
def test_an_unknown_program_is_reported(name, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["nanorlhf", name])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == f"error: nanorlhf {name}: unknown program; list them: `nanorlhf`.\n"


def test_a_program_that_has_moved_keeps_its_name_in_a_clone(monkeypatch, capsys) -> None:
    for old, new in ALIASES.items():
        assert find_module(old) == new and importlib.util.find_spec(new)
    monkeypatch.setattr("sys.argv", ["nanorlhf", "report.lab"])
    monkeypatch.setattr("nanorlhf.__main__.TREE", nanorlhf.__main__.PACKAGE)  # like in an installed copy
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.endswith("moved to experiments.lab.report, which needs a clone of the repository.\n")


def test_the_version_matches_the_citation_and_the_changelog(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["nanorlhf", "--version"])
    main()
    assert capsys.readouterr().out == f"{__version__}\n"
    citation = (ROOT / "CITATION.cff").read_text()
    newest = re.findall(r"^## (\d\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == (
        re.search(r"^version: (\S+)$", citation, re.M)[1],
        re.search(r"^date-released: (\S+)$", citation, re.M)[1],
    )
    assert newest[0] == __version__
