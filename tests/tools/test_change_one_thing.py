"""docs/change-one-thing.md: its examples apply to the repository, and their tests fail before and pass after."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course.copies import copy_files

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "change-one-thing.md").read_text()
EXAMPLES = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", PAGE, re.M | re.S)


def read_hunks(example: str) -> list[tuple[str, str, list[str]]]:
    """Return (file, name, lines) of each hunk; the name is "" for the only hunk of a new file."""
    hunks: list[tuple[str, str, list[str]]] = []
    file = ""
    for line in example.splitlines():
        if line.startswith("+++ "):
            hunks.append((line[4:], "", []))
        elif line.startswith("--- "):
            file = line[4:]
        elif match := re.fullmatch("@@ (.+) @@", line):
            hunks.append((file, match[1], []))
        else:
            hunks[-1][2].append(line)
    return hunks


def apply(tree: Path, file: str, name: str, lines: list[str]) -> None:
    """Apply a hunk to a file. Raises AssertionError unless its position is found exactly once."""
    path = tree / file
    added = "".join(line[1:] + "\n" for line in lines if line.startswith("+"))
    if not name:
        assert not path.exists(), f"{file} exists already"
        path.write_text(added)
        return
    text = path.read_text()
    if name == "end":
        path.write_text(text + added)
        return
    old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
    new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"{file}, {name}: these lines occur {text.count(old)} times:\n{old}"
    assert re.search(rf"^.*\b{re.escape(name)}\b", text[: text.index(old) + len(old)], re.M), f"{file}: no {name}"
    path.write_text(text.replace(old, new))


def outcomes(tree: Path, files: set[str], names: set[str]) -> list[tuple[str, str]]:
    """Run the tests with these names in a tree and return (outcome, name) of each."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=no", *sorted(files)]
    command += ["--continue-on-collection-errors", "-k", " or ".join(sorted(names))]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1, 2), done.stdout[-3000:] + done.stderr[-3000:]
    return re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(\w+)", done.stdout, re.M)


def test_each_kind_of_change_has_an_example() -> None:
    kinds = ["loss", "entropy bonus", "estimator", "head", "reward", "model family", "dataset", "curriculum"]
    kinds += ["metric", "evaluation", "exercise"]
    assert [re.sub("^An? ", "", title) for title, _ in EXAMPLES] == kinds
    assert len(re.findall(r"^\d+\. \*\*", PAGE.partition("## Good first changes")[2], re.M)) == 10


@pytest.mark.slow
def test_the_examples_tests_pass_with_the_example_and_fail_without(tmp_path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    files: set[str] = set()
    names: set[str] = set()
    for tree in (before, after):
        copy_files(ROOT, tree)
        for _, example in EXAMPLES:
            for file, name, lines in read_hunks(example):
                is_test = file.startswith("tests/")
                if is_test or tree is after:
                    apply(tree, file, name, lines)
                if is_test:
                    files.add(file)
                    names |= set(re.findall(r"^\+def (test_\w+)", "\n".join(lines), re.M))
    # the tests of a model family exist already; the example adds rows to them
    names |= {
        f"{name} and gemma-" for name in ("test_hidden_states_and_logits", "test_transformers_loads_what_we_write")
    }
    passed, failed = outcomes(after, files, names), outcomes(before, files, names)
    assert {outcome for outcome, _ in passed} == {"PASSED"} and len({name for _, name in passed}) == len(names), passed
    assert "PASSED" not in {outcome for outcome, _ in failed}, failed
