"""The notebook of each stage is built from its page, is stored without outputs, and runs from top to bottom."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from urllib.parse import quote

import pytest

import train_ppo
from course.notebook import STAGES, play
from tests.helpers.page_commands import Command, parse_settings
from tools.notebooks import PAGES, ROOT, notebook, section
from tools.repository import GITHUB, repository

NAMES = ("sft", "rm", "ppo", "evaluation")
LENGTHS = "--max-query-length 160 --max-response-length 64"
RUN = {  # notebook -> the stage that a test runs in miniature, and its flags
    "sft": ("sft", f"{LENGTHS} --n-layer 1 --d-model 16 --n-head 2 --batch-size 8 --warmup-steps 0 --num-samples 4"),
    "rm": ("rm", f"{LENGTHS} --batch-size 8 --num-normalisation None --warmup-steps 0"),
    "ppo": (
        "ppo",
        "--max-query-length 160 --response-length 12 --total-episodes 24 --batch-size 8 --micro-batch-size 4 "
        "--num-ppo-epochs 2",
    ),
    "evaluation": ("eval", LENGTHS),
}


def test_the_notebooks_match_their_pages() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == sorted(NAMES)
    for name in NAMES:
        stored = json.loads((PAGES / f"{name}.ipynb").read_text())
        assert stored == notebook(PAGES / f"{name}.md"), "python -m tools.notebooks"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_each_cell_compiles(name) -> None:
    nbformat = pytest.importorskip("nbformat")
    document = nbformat.read(PAGES / f"{name}.ipynb", as_version=4)
    nbformat.validate(document)
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert code[0].id == "place" and "pip" in code[0].source and "git" in code[0].source
    for cell in code:
        compile(cell.source, cell.id, "exec")
    assert "lecture" in document.cells[0].source


def test_badges_and_the_first_cell_lead_to_the_repository_and_an_existing_notebook() -> None:
    for name in NAMES:
        text = (PAGES / f"{name}.ipynb").read_text()
        slug = repository()
        [colab] = re.findall(r"https://colab\.research\.google\.com/github/([^)\\\"]+)", text)
        [binder] = re.findall(r"https://mybinder\.org/v2/gh/([^)\\\"]+)", text)
        path = colab.removeprefix(f"{slug}/blob/main/")
        assert binder == f"{slug}/main?labpath={quote(path, safe='')}" and (ROOT / path) == PAGES / f"{name}.ipynb"
        assert f'os.environ.get(\\"REPOSITORY\\", \\"{GITHUB}{slug}\\")' in text


def test_binder_installs_the_notebooks_extra_for_a_cpu(tmp_path) -> None:
    """Uses a fake uv that prints its arguments."""
    (tmp_path / "uv").write_text('#!/bin/sh\necho "$UV_TORCH_BACKEND $UV_CONSTRAINT $*"\n')
    (tmp_path / "python").write_text("")
    for name in ("uv", "python"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([ROOT / ".binder" / "postBuild"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == f"cpu .ci/constraints.txt pip install --python {tmp_path}/python -e .[notebook]\n"
    assert (ROOT / ".binder" / "requirements.txt").read_text() == "uv\n"


def test_lecture_sections_are_inserted_without_pictures() -> None:
    text = section("4. Twenty updates")
    assert text.startswith("## 4. Twenty updates") and "2.7 nats" in text
    assert "](" not in text and "experiments.lecture.report" not in text


def test_the_stages_are_commands_that_parse() -> None:
    for command in STAGES.values():
        parse_settings(Command(("python", *command.split())))


def test_sliders_start_at_the_given_values() -> None:
    pytest.importorskip("ipywidgets")
    drawn = []
    play(lambda **values: drawn.append(values), pads=(4, 0, 16), beta=(0.1, 0.0, 1.0))
    assert drawn == [{"pads": 4, "beta": 0.1}]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, miniature, tmp_path, monkeypatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    stage, flags = RUN[name]
    for other in ("data", "sft", "rm"):
        if other != stage:
            shutil.copytree(miniature.root / other, tmp_path / other)
    monkeypatch.setenv("RUNS", str(tmp_path))
    if name == "evaluation":
        train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=8))
    document = nbformat.read(PAGES / f"{name}.ipynb", as_version=4)
    [cell] = [cell for cell in document.cells if "\nflags = []" in f"\n{cell.source}"]
    cell.source = cell.source.replace("flags = []", f"flags = {flags.split()!r}")
    # without sliders, because text printed inside them isn't an output of the cell
    document.cells[1].source = f"import sys\n\nsys.modules['ipywidgets'] = None\n{document.cells[1].source}"
    where = {"metadata": {"path": PAGES}}
    nbclient.NotebookClient(document, timeout=300, kernel_name="python3", resources=where).execute()
    assert (tmp_path / stage).is_dir()
    printed = {
        cell.id: "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in document.cells
        if cell.cell_type == "code"
    }
    for word in {"sft": ["by hand", "masked False"], "rm": ["margin", "truth"], "ppo": ["objective/kl", "score"],
                 "evaluation": ["prefers the truth in", "reward  truth"]}[name]:  # fmt: skip
        assert any(word in text for text in printed.values()), word
