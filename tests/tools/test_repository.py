"""The repository's URL is set in one place, and pages that install the project warn about its namesake on PyPI."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from nanorlhf.errors import InputError
from tests.helpers.page_commands import PAGES
from tools.repository import GITHUB, rename, repository

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = [*PAGES, *sorted((ROOT / "pipelines").glob("*.sh")), *sorted((ROOT / "course").rglob("*.ipynb"))]
# a command, or the words of one in Python
INSTALLS = re.compile(r"pip install (-e|git)|\buv sync --|\bpip\W+install\b.*\W-e\b")
OTHER = "another project"


def tracked(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def owners(root: Path) -> dict[str, set[str]]:
    """Return each OWNER/NAME in the addresses of repositories called like ours, with the files that contain it."""
    name = repository(root).partition("/")[2]
    address = re.compile(rf"(?:github\.com/|/github/|/gh/)([\w.-]+/{re.escape(name)})(?![\w-])")
    slugs: dict[str, set[str]] = {}
    for path in tracked(root):
        for slug in address.findall(path.read_text(encoding="utf-8", errors="replace")):
            slugs.setdefault(slug.removesuffix(".git"), set()).add(path.relative_to(root).as_posix())
    return slugs


def test_every_file_has_the_url_of_pyproject() -> None:
    used = owners(ROOT)
    used.pop("you/nanorlhf", None)  # the example of tools/repository.py
    assert used.keys() == {repository()}
    assert {"pyproject.toml", "CITATION.cff", "README.md", "docs/installing.md"} <= used[repository()]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == GITHUB + repository()


def test_the_tool_replaces_the_url_and_nothing_else(tmp_path) -> None:
    old = {
        "pyproject.toml": '[project.urls]\nRepository = "https://github.com/OWNER/nanorlhf"\n',
        "page.md": "git+https://github.com/OWNER/nanorlhf.git [x](https://mybinder.org/v2/gh/OWNER/nanorlhf/main)\n",
        "other.md": "https://example.org/NO.OWNER/nanorlhf OWNER/nanorlhf-2\n",
    }
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert rename("https://github.com/ada/rlhf", tmp_path) == ["page.md", "pyproject.toml"]
    assert repository(tmp_path) == "ada/rlhf"
    page = "git+https://github.com/ada/rlhf.git [x](https://mybinder.org/v2/gh/ada/rlhf/main)\n"
    assert (tmp_path / "page.md").read_text() == page and (tmp_path / "other.md").read_text() == old["other.md"]
    assert (tmp_path / "picture.png").read_bytes() == b"\xff\xfe\x00"
    for wrong in ("https://gitlab.com/ada/rlhf", "https://github.com/ada", "ada/rlhf"):
        with pytest.raises(InputError, match="expected https://github.com/OWNER/NAME"):
            rename(wrong, tmp_path)


def test_no_page_installs_the_namesake() -> None:
    """`pip install nanorlhf` would install another project with the same import name."""
    namesake = re.compile(r"(pip install|uv add|uv pip install|pip download)[^`\n#;]* ['\"]?nanorlhf\b(?!/)")
    assert namesake.search("`pip install -U nanorlhf`") and namesake.search("uv add 'nanorlhf[hub]'")
    assert not [path.name for path in TEXTS if namesake.search(path.read_text())]


def test_every_line_that_installs_this_project_warns_about_the_namesake() -> None:
    lines = [(path.name, line) for path in TEXTS for line in path.read_text().splitlines() if INSTALLS.search(line)]
    assert len(lines) > 15 and not [(name, line) for name, line in lines if OTHER not in line]


def test_extras_refer_to_this_distribution() -> None:
    """A reference to `nanorlhf[hub]` would install the other project."""
    references = [text for extra in PROJECT["optional-dependencies"].values() for text in extra if "rlhf" in text]
    assert len(references) >= 5 and all(text.startswith(f"{PROJECT['name']}[") for text in references)
    assert PROJECT["name"] != "nanorlhf" and PROJECT["scripts"].keys() == {"nanorlhf"}
