"""Workflows, containers, constraints: .ci/run alone defines the test suite, and jobs have minimal permissions."""

import json
import re
import shlex
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from course.exercises import chosen
from tests.helpers.page_commands import parse_settings, read_command

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RULES = re.findall(r"^([\w./ -]+):", (ROOT / "Makefile").read_text(), re.M)
TARGETS = {name for rule in RULES for name in rule.split()} | {path.stem for path in (ROOT / "pipelines").glob("*.sh")}


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_only_read_the_repository(path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"} and "concurrency" in workflow
    more = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
    assert more == ({"publish": {"pages": "write", "id-token": "write"}} if path.name == "site.yml" else {})
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_step_runs_commands_that_users_can_run(path) -> None:
    """Steps run a make target, .ci/run, or the installation of uv; actions are GitHub's own, pinned by version."""
    for step in steps(read(path)):
        if "run" in step:
            ours = step["run"] in (".ci/run", "python -m pip install uv")
            assert ours or step["run"].removeprefix("make ") in TARGETS, step["run"]
        else:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


def test_the_suite_runs_on_two_systems_and_three_pythons_and_with_the_newest_packages() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "test.yml")
    job = workflow["jobs"]["test"]
    matrix = job["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"] and matrix["python"] == ["3.11", "3.12", "3.13"]
    assert [extra["newest"] for extra in matrix["include"]] == ["1"]
    [suite] = [step for step in job["steps"] if step.get("run") == ".ci/run"]
    assert suite["env"] == {"NEWEST": "${{ matrix.newest }}"}
    assert {name for name, job in workflow["jobs"].items()} == {"style", "test", "package"}


@pytest.mark.parametrize("newest", ["", "1"])
def test_ci_installs_the_tested_or_the_newest_versions(newest, tmp_path) -> None:
    """Uses a fake make and a fake Python that print their arguments."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("make", ".venv/bin/python"):
        stub = tmp_path / name
        stub.write_text('#!/bin/sh\necho "$(basename $0) $* [$PIP_CONSTRAINT] [$UV_CONSTRAINT]"\n')
        stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NEWEST": newest}
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    constraints = "[] []" if newest else "[.ci/constraints.txt] [.ci/constraints.txt]"
    assert all(line.endswith(constraints) for line in lines)
    assert lines[0].startswith("make .venv") and lines[-1].startswith("make test") and len(lines) == 6


def test_pytest_lists_failures_and_skips(pytestconfig) -> None:
    assert "-rfEs" in pytestconfig.getini("addopts")


# --------------------------------------------------------------------------------------------------------- containers
STAGES = re.split(r"^FROM ", (ROOT / ".devcontainer" / "Dockerfile").read_text(), flags=re.M)[1:]


def test_the_image_is_built_by_the_readmes_two_commands() -> None:
    tools, _, image = (re.findall(r"^RUN (.+)$", stage, re.M) for stage in STAGES)
    [commands] = re.findall(r"## Two commands.*?```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert image == [line.partition("  ")[0] for line in commands.splitlines()] == ["make demo", "make test"]
    assert tools == ["pip install --no-cache-dir uv"]
    assert re.search(r"^ARG TORCH=cpu\nENV UV_TORCH_BACKEND=\$TORCH$", STAGES[0], re.M)


def test_the_grading_image_runs_the_courses_command_on_mounted_files() -> None:
    """The entry point with the page's arguments parses; the image runs without root, network or writable files."""
    _, stage, _ = STAGES
    assert stage.startswith("tools AS grade\n") and re.search(r"^USER [1-9]\d*$", stage, re.M)
    [build] = re.findall(r"^RUN UV_CONSTRAINT=.ci/constraints.txt UV_COMPILE_BYTECODE=1 make (.+)$", stage, re.M)
    assert build in TARGETS
    [block] = re.findall(
        r"```text\n(docker build --file .devcontainer/Dockerfile --target grade .*?)```",
        (ROOT / "course" / "README.md").read_text(),
        re.S,
    )
    *_, line = block.replace("\\\n", "").splitlines()
    words = shlex.split(line)
    image = words.index("nanorlhf-grade")
    options, arguments = words[:image], words[image + 1 :]
    pairs = list(pairwise(options))
    assert {("--network", "none"), ("--tmpfs", "/tmp")} < set(pairs) and "--read-only" in options
    mounted = dict(value.split(":", 1)[::-1] for option, value in pairs if option == "--volume")
    python, *entry = json.loads(re.findall(r"^ENTRYPOINT (.+)$", stage, re.M)[0])
    settings = parse_settings(read_command(shlex.join(["python", *entry, *arguments])))
    assert python == ".venv/bin/python" and settings.format == "csv" and chosen(settings.exercises)
    assert set(mounted) == {f"{settings.directory}:ro", str(settings.out.parent)}


def test_the_development_container_is_the_images_first_stage() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    dockerfile = (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).read_text()
    assert f" AS {settings['build']['target']}\n" in dockerfile
    assert set(re.findall(r"make (\S+)", settings["postCreateCommand"])) <= TARGETS


def test_no_package_registry_is_hard_coded() -> None:
    """Users choose the registry in the settings of pip and uv."""
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch\.org|index-url|find-links|ghcr\.io|docker\.io")
    names = (".devcontainer/Dockerfile", "Makefile", "pyproject.toml", ".ci/constraints.txt", ".ci/run")
    assert not [path.name for path in (*WORKFLOWS, *(ROOT / name for name in names)) if hosts.search(path.read_text())]


# ------------------------------------------------------------------------------------------------------ what was tested
def test_every_package_that_the_suite_asks_for_has_a_tested_version_that_it_allows() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert list(tested) == sorted(tested) and not [name for name in tested if name != canonicalize_name(name)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    for group in groups.keys() - {"bench", "others"}:  # peers pin older packages
        for text in groups[group]:
            asked = Requirement(text)
            if asked.name != project["name"]:
                assert asked.specifier.contains(tested[canonicalize_name(asked.name)]), text
