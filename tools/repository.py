"""Set the repository's URL in every file that contains it: README.md, CITATION.cff, pages, notebooks and their badges.

    python -m tools.repository https://github.com/you/nanorlhf

The URL is set in pyproject.toml, [project.urls]. Until the project is published it is a placeholder with the owner
`OWNER`, so links and badges with it don't work.
"""

import argparse
import re
import subprocess
import tomllib
from pathlib import Path

from nanorlhf.cli import one_sentence
from nanorlhf.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
GITHUB = "https://github.com/"
SLUG = re.compile(rf"{GITHUB}([\w.-]+/[\w.-]+)")  # badges of Colab and Binder contain only this part


def repository(root: Path = ROOT) -> str:
    """Return the repository's OWNER/NAME on GitHub, from pyproject.toml."""
    url = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    return url.removeprefix(GITHUB)


def rename(url: str, root: Path = ROOT) -> list[str]:
    """Replace the old OWNER/NAME in all files under version control; return the changed files.

    Raises InputError for a URL that isn't on GitHub, where the badges look for notebooks.
    """
    match = SLUG.fullmatch(url)
    if match is None:
        raise InputError(f"{url}: expected {GITHUB}OWNER/NAME.")
    old = re.compile(rf"(?<![\w.-]){re.escape(repository(root))}(?![\w-])")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    changed = []
    for name in filter(None, listed.split("\0")):
        content = (root / name).read_bytes()
        new = old.sub(match[1], content.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        if new != content:
            (root / name).write_bytes(new)
            changed.append(name)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    url = parser.parse_args().url
    with one_sentence():
        print(*rename(url), sep="\n")


if __name__ == "__main__":
    main()
